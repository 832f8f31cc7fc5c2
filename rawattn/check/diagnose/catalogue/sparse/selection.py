"""The catalogue of bugs in block-sparse attention: lists of blocks that are read wrongly, by
everybody or by the pass over keys alone (``walks``), factors (``gates``), and the sliding branch.

dk and dv, gk and gv are summed by lists from blocks back to queries: any list that is turned round
wrongly is another list for these tensors alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rawattn.check.diagnose.catalogue.masks import distances, within
from rawattn.check.diagnose.catalogue.reading import delta_of
from rawattn.check.diagnose.catalogue.sparse import gates, keys
from rawattn.check.diagnose.catalogue.sparse.lists import (
    OWN,
    Different,
    Lists,
    Walk,
    lists_of,
    of_last,
    shown,
    walking,
    with_keys,
)
from rawattn.check.diagnose.catalogue.sparse.walks import usual
from rawattn.check.diagnose.catalogue.tangents import other_heads
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FORWARD,
    NO_BUG,
    STEPS,
    Bug,
    Context,
    Floats,
    See,
    Step,
    View,
    changed,
    run_steps,
    views_of,
)
from rawattn.check.diagnose.engine.question import STAGES, Question

ALL = tuple(STAGES)
TURNED = (  # classes of lists that may be turned round so
    "sparse-duplicate-twice",
    "sparse-own-block-missing",
    "sparse-counts-ignored",
    "sparse-other-heads-selection",
    "sparse-list-cut",
)


@of_last
def bugs(question: Question) -> tuple[Bug, ...]:
    """Every bug of the catalogue that can matter for the question."""
    return tuple(_bugs(question)) if question.sparse else ()


def _bugs(question: Question) -> Iterator[Bug]:
    different = Different(question)
    for name, words, walk in usual(question):
        see = walking(walk)
        if different(see):
            yield Bug(name, words, ALL, see=see)
            if name in TURNED:
                yield from inverted(f"{words or name}, for dk and dv", by_walk(walk))
    for name, words, cover, walk in keys.rows(question):
        see = walking(walk, cover)
        if different(see):
            yield Bug(name, words, ALL, see=see)
    if question.batch > 1:
        text = "k and v without the sequence's offset"
        yield Bug("offsets-shifted", text, ALL, see=_first_keys)
    for text, last in (("first", False), ("last", True)):
        for where, hidden in (("", False), (", hidden ones too", True)):
            for what, times in (("is missing", 0), ("counts twice", 2)):
                walk = _with_one(last, hidden, times)
                yield from inverted(f"the {text} query of a list {what}{where}", by_walk(walk))
    yield from _statistics(question)
    if (~lists_of(question).is_block & lists_of(question).counted).any():
        yield Bug("sparse-padding-read", "as a block of zeros", ALL, see=_zero_blocks)
    if question.block_scale is not None:
        yield from gates.bugs(question)
    if question.sliding is not None:
        yield from _sliding(question)


def _first_keys(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """Keys and values at the rows of the first sequence."""
    starts = question.cu_seqlens_k
    return [
        view
        if view.slot is None
        else replace(view, keys=np.where(view.keys < 0, -1, view.keys - starts[view.sequence]))
        for view in views
    ]


def _zero_blocks(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """Padding is a block of zeros: one key that is seen so often."""
    if not views or views[0].slot is None:
        return views
    lists = getattr(views[0], "lists", None) or lists_of(question)
    padding = ~lists.is_block & (lists.blocks > 0) & lists.counted
    count = question.block_size * padding.sum(axis=2)[:, lists.heads].astype(np.float64)
    found = []
    for view in views:
        times = count[view.rows][:, view.heads].T[..., None]
        found.append(with_keys(view, np.array([-1]), times, np.full(times.shape, OWN)))
    return found


# ---- lists turned round -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Split(View):
    """A view whose gradients of queries count its pairs ``of_q`` times, and those of keys ``of_k``
    times, both like weight; a bug that makes another view of it takes it for a plain one."""

    __slots__ = ("of_k", "of_q")
    of_q: Floats
    of_k: Floats


def split(right: View, of_k: View) -> Split:
    """Queries see what ``right`` has, and keys sum what ``of_k`` has, whose keys begin with it."""
    m, more = len(right.keys), len(of_k.keys) - len(right.keys)
    pad = [(0, 0), (0, 0), (0, more)]
    rows = np.pad(np.broadcast_to(right.weight, (len(right.heads), *right.weight.shape[1:])), pad)
    weight = ((rows > 0) | (of_k.weight > 0)).astype(np.float64)
    slot = np.asarray(of_k.slot).copy()
    slot[..., :m] = np.where(right.weight > 0, np.asarray(right.slot), slot[..., :m])
    return Split(
        right.sequence,
        right.rows,
        of_k.keys,
        right.heads,
        right.head_kv,
        weight,
        slot,
        right.selections,
        of_q=rows,
        of_k=of_k.weight,
    )


def _counted(step: str, kind: str, *operands: str) -> Step:
    def counted(c: Context) -> Floats:
        times = getattr(c.view, kind, None)
        if times is None or times.shape[:2] != (len(c.view.heads), len(c.view.rows)):
            return np.asarray(STEPS[step](c))
        more = c.view.weight[..., times.shape[2] :]  # keys of another bug
        times = np.concatenate([times, np.broadcast_to(more, (*times.shape[:2], more.shape[2]))], 2)
        products = {name: getattr(c, name) * times for name in operands}
        return np.asarray(STEPS[step](changed(c, **products)))

    return counted


OF_LISTS: dict[str, Step] = {
    "dQ": _counted("dQ", "of_q", "dY"),
    "dK": _counted("dK", "of_k", "dY"),
    "dV": _counted("dV", "of_k", "P"),
    "dG": _counted("dG", "of_q", "dS"),
}
OF_LISTS_BEYOND: dict[str, Step] = {
    "e": _counted("e", "of_q", "P"),
    "tO": _counted("tO", "of_q", "P", "tP"),
    "gQ": _counted("gQ", "of_q", "tdY", "dY"),
    "gK": _counted("gK", "of_k", "tdY", "dY"),
    "gV": _counted("gV", "of_k", "tP"),
    "gG": _counted("gG", "of_q", "tdS", "dS"),
}


def inverted(variant: str, see: See) -> Iterator[Bug]:
    """A bug of the lists that dk and dv, or gk and gv, are summed by."""
    name = "sparse-inverted-lists"
    yield Bug(name, variant, BACKWARD, see=see, steps=OF_LISTS)
    yield Bug(name, variant, ("second",), see=see, steps=OF_LISTS_BEYOND)


def by_walk(change: Walk) -> See:
    """Keys sum what the changed lists have."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        if not views or views[0].slot is None:
            return views
        lists = change(lists_of(question))
        return [split(one, shown(question, one, lists)) for one in views_of(question)]

    return see


def _with_one(last: bool, hidden: bool, times: int) -> Walk:
    """With one entry of every list, that of its first or last query, so many times; ``hidden``:
    queries that the block lies behind are in it too."""

    def walk(lists: Lists) -> Lists:
        there = lists.multiplicity(hidden) > 0
        sequence = lists.question.sequence_of("q")
        one = np.zeros_like(there)
        for b in np.unique(sequence[sequence >= 0]):
            rows = np.flatnonzero(sequence == b)[:: -1 if last else 1]
            here = there[rows]
            one[rows] = here & (np.cumsum(here, axis=0) == 1)
        at_entry = np.clip(lists.block, 0, there.shape[2] - 1)
        moved = np.take_along_axis(one, at_entry, axis=2) if there.shape[2] else False
        often = np.where(moved & (lists.block >= 0), times * lists.times, lists.times)
        return replace(lists, times=often)

    return walk


def _statistics(question: Question) -> Iterator[Bug]:
    """The pass over keys alone reads lse and delta of another head."""
    for text, of_head in other_heads(question).items():
        for names in (("lse", "delta"), ("lse",), ("delta",)):
            sums = ("dK", "dV") if "lse" in names else ("dK",)
            steps = {name: _with_statistics(name, names, of_head) for name in sums}
            form = f"{' and '.join(names)} of {text}, for {' and '.join(sums).lower()}"
            yield Bug("statistics-misplaced", form, BACKWARD, steps=steps)


def _with_statistics(step: str, names: Sequence[str], of_head: np.ndarray) -> Step:
    def other(c: Context) -> Floats:
        heads, rows = of_head[c.view.heads][:, None], c.view.rows
        found = changed(c)
        if "lse" in names:
            found.L = np.asarray(c.given[1][heads, rows], dtype=np.float64)
            run_steps(found, ["bP"], NO_BUG)
        if "delta" in names:
            found.D = delta_of(c)[heads, rows]
        run_steps(found, ["dS", "dY"], NO_BUG)
        return np.asarray(STEPS[step](found))

    return other


# ---- the sliding branch -----------------------------------------------------------------------


def _sliding(question: Question) -> Iterator[Bug]:
    left, right = (math.inf if side < 0 else side for side in question.sliding or (-1, -1))
    for change in (1, -1):
        for side, window in (
            ("left", (left + change, right)),
            ("right", (left, right + change)),
        ):
            if window != (left, right) and window[0] >= 0:
                see = _other_window(*window)
                yield Bug("sparse-sliding-off-by-one", f"{side} {change:+}", FORWARD, see)
    if left < math.inf:
        yield Bug("window-dropped", "sliding", FORWARD, _other_window(math.inf, right))


def _other_window(left: float, right: float) -> See:
    return lambda question, views: [
        view
        if view.slot is not None
        else replace(view, weight=within(distances(question, view), left, right))
        for view in views
    ]
