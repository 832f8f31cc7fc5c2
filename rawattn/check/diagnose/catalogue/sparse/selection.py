"""Bugs of block-sparse attention: of ``lists``, ``walks``, block_scale and the sliding branch."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.inputs import whole
from rawattn.check.diagnose.catalogue.masks import windows
from rawattn.check.diagnose.catalogue.second_order import JVP, SECOND, with_values
from rawattn.check.diagnose.catalogue.sparse import lists, walks
from rawattn.check.diagnose.catalogue.stages import tiles
from rawattn.check.diagnose.engine import attention
from rawattn.check.diagnose.engine.attention import BACKWARD, FIRST, FORWARD, Bug, See, View, each
from rawattn.check.diagnose.engine.lists import Ints, Lists, lists_of
from rawattn.check.diagnose.engine.question import STAGES, Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, Step, times


def _bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    different = _differing(question)
    found = [(name, words, lists.listed(change)) for name, words, change in lists.rows(question)]
    last = "a last block that is selected"
    found.append(("padded-keys", f"zeros in {last}", each(_completed, True)))
    found.append(("neighbour-leak", f"up to the end of {last}", each(_completed, False)))
    for name, words, see in found:
        if different(see) or name == lists.UNION:  # of sizes that are alike here other lengths tell
            yield Bug(name, words, see=see)
    if question.block_scale is not None:
        yield from _of_gates(question, different)
    if question.sliding is not None:
        for name, form, window in windows(replace(question, window=question.sliding)):
            yield Bug(name, f"sliding, {form}", FORWARD, window.see)


def of_weights(question: Question) -> Iterator[Bug]:
    """All that change who sees whom, how often, or by what factor, whether they show or not."""
    yield from (Bug(name, text, see=lists.listed(of)) for name, text, of in lists.rows(question))
    if question.block_scale is not None:
        yield from _of_gates(question, lambda see: True)
    yield from chain(lists.misread(question), _misread(question), walks.cut(question))


def candidates(question: Question, stage: str, wrong: Collection[str]) -> Iterator[Bug]:
    """More of a stage, tried on one sequence: other arrays, parts of walks, tiles."""
    of_walks = chain(walks.cut(question), walks.bugs(question, wrong), walks.stale(question))
    every = chain(lists.misread(question), _misread(question), of_walks, tiles(question))
    yield from (bug for bug in every if stage in bug.stages)


def _differing(question: Question) -> Callable[[See], bool]:
    """Whether a bug shows other views than the right ones, and than all that were asked before."""
    seen = set[bytes]()

    def different(see: See) -> bool:
        found: list[object] = []
        for view in see(question, attention.views_of(question)):
            found += [view.keys, view.weight]
            if question.block_scale is not None:
                found += [np.where(view.weight > 0, np.asarray(view.slot), -1), view.selections]
        key = b"".join(np.asarray(x, dtype=np.float64).tobytes() for x in found)
        known = len(seen)
        seen.add(key)
        return len(seen) > known

    different(lambda question, views: views)
    return different


def _completed(zeros: bool, question: Question, view: View) -> View:
    """Keys that complete a last block that is selected: zeros, or what lies there."""
    count, there, size = question.lengths_k[view.sequence], len(view.keys), question.block_size
    if view.slot is None or not count:
        return view
    stop = int(view.keys[count - 1]) + 1
    keys = np.arange(stop, stop - count % -size)
    keys = np.where(zeros | (keys >= len(question.k)), -1, keys)
    like = np.append(np.arange(there), np.full(len(keys), (count - 1) // size * size))
    weight, slot = view.weight[..., like], view.slot[..., like]
    weight[..., there:] *= slot[..., there:] >= 0
    return replace(view, keys=np.append(view.keys, keys), weight=weight, slot=slot)


def _of_gates(question: Question, different: Callable[[See], bool]) -> Iterator[Bug]:
    """Which slot block_scale is for, what it multiplies, and what its gradient holds."""
    rows, heads = [*GRADIENTS], question.num_heads_q // np.asarray(question.block_indices).shape[1]
    for words, head in ("the last head", heads - 1), ("the first head", 0):
        steps = {name: partial(_of_head, head, heads, name) for name in ("dG", "gG")}
        rows += [("sparse-gate-not-summed", words, BEYOND, steps)] if heads > 1 else []
    rows += DIRECTIONS if question.tblock_scale is not None else ()
    rows += LEFT_OUT if np.any(np.asarray(question.block_scale) != 1) else ()
    yield from (Bug(name, words, stages, steps=steps) for name, words, stages, steps in rows)
    for words, see in OTHERS.items():
        if different(see):
            two = ({x: with_values(x, G=partial(_gate, y)) for x in GATED} for y in (see, GIVEN))
            yield Bug(ORDER, words, see=see)
            yield Bug(ORDER, f"{words}, where it is read", steps=next(two))
            yield Bug(ORDER, f"{words}, in the gradient", BEYOND, see, next(two))


def _misread(question: Question) -> Iterator[Bug]:
    """Factors that are read by a map, alone or with all lists."""
    names = ["block_indices", *["block_counts"] * (question.block_counts is not None)]
    for by in lists.maps_of(question) if question.block_scale is not None else ():
        steps = {name: with_values(name, G=partial(_gate_by, by)) for name in GATED}
        yield Bug(MISREAD, f"block_scale, {by.words}", steps=steps)
        see, words = lists.listed(partial(lists.moved, by, names)), ", ".join(names)
        yield Bug(MISREAD, f"{words} and block_scale, {by.words}", see=see, steps=steps)


def _gate_by(by: maps.Map, c: Context) -> Floats | float:
    scale = whole(c.question, None, "dblock_scale", "block_scale", by)
    return attention.per_key(c.view, scale, 1.0)


def _of_head(head: int, heads: int, name: str, c: Context) -> Floats:
    """The share of one of the heads of a selection in the gradient."""
    return np.asarray((c.view.heads % heads == head)[:, None, None] * STEPS[name](c))


def _in_slots(of: Callable[..., Ints], question: Question, view: View) -> View:
    """A view with factors of other slots than (heads, n, m), -1 of an own block that none names, by
    which keys are of own blocks, the slot walked last (heads, n, 1), and how many there are."""
    if view.slot is None or view.lists is None or not question.slots:
        return view
    block = (view.keys - question.cu_seqlens_k[view.sequence]) // question.block_size
    own, last = view.lists.own_block[view.rows, 0] == block, view.slot.max(axis=2, initial=-1)
    slot = of(view.slot, own, last[..., None], question.slots)
    return replace(view, slot=np.where(view.weight > 0, slot, -1))


def _by_place(order: str, question: Question, view: View) -> View:
    """A view with factors by a block's place in the walk, an own block that none names apart."""
    if view.slot is None or not question.slots:
        return view
    walked = replace(view, weight=view.weight * (view.slot >= 0))
    place, _ = walks.in_walk(walks.ORDERS[order], question, walked)
    return replace(view, slot=np.where(view.slot < 0, -1, np.minimum(place, question.slots - 1)))


def _gate(see: See, c: Context) -> Floats | float:
    """The factors of the same keys in other views."""
    return attention.per_key(see(c.question, (c.view,))[0], c.question.block_scale, 1.0)


def _sorted(order: Callable[[Lists], Ints], x: Lists) -> Lists:
    """The blocks of the sorted list, and the factors of slots in the order that was given."""
    moved = np.argsort(order(x), axis=2, kind="stable")
    named, counted = (np.take_along_axis(of, moved, 2) for of in (x.named, x.counted))
    return replace(x, named=named, counted=counted)


def _of_the_last(x: Lists) -> Lists:
    back = replace(x, named=x.named[..., ::-1], counted=x.counted[..., ::-1])
    last = (back.exists & (back.number == 0))[..., ::-1]
    return replace(x, times=np.concatenate([last, x.walked[..., -1:]], axis=2))


BEYOND = BACKWARD + SECOND
MISSING, IGNORED, ON_P = (f"sparse-gate-{x}" for x in ("gradient-missing", "ignored", "on-p"))
ORDER, MISREAD = "sparse-gate-order", "sparse-lists-misread"
Row = tuple[str, str, tuple[str, ...], Mapping[str, Step]]
NO_GRADIENT: dict[str, Step] = dict.fromkeys(("dG", "gG"), lambda c: np.zeros_like(c.P))
GATED, MOVED = ("S", "dY", "E", "tdY"), ("E", "tdY")  # what it, and what its direction multiplies
S, DY, E, TDY = ({name: with_values(name, G=lambda c: 1.0)} for name in GATED)
STILL_E, STILL_TDY = ({name: with_values(name, tG=lambda c: 0.0)} for name in MOVED)
AS_IF_1 = S | DY | {x: with_values(x, G=lambda c: 1.0, tG=lambda c: 0.0) for x in MOVED}
ON_OUT: dict[str, Step] = S | {
    **{step: with_values(step, P=lambda c: c.G * c.P) for step in ("O", "dV")},
    "dP": lambda c: c.r(c.G * c.r(times(c.dO, c.V.T))),
    "dY": lambda c: c.dS,
    "dG": lambda c: c.P * times(c.dO, c.V.T),
}
TWICE_IN_E = {"E": with_values("E", Y=lambda c: c.G * c.Y)}
GRADIENTS: tuple[Row, ...] = (
    (ON_P, "P V alone", FIRST, ON_OUT),
    (ON_P, "twice in dY", BACKWARD, {"dY": lambda c: c.G * STEPS["dY"](c)}),
    (ON_P, "twice in its own gradient", BACKWARD, {"dG": lambda c: c.G * c.dS * c.Y}),
    (MISSING, "", BACKWARD, NO_GRADIENT),  # each alone, too
    (MISSING, "", SECOND, NO_GRADIENT),
)
DIRECTIONS: tuple[Row, ...] = (
    (ON_P, "it multiplies the term of its direction in E too", SECOND + JVP, TWICE_IN_E),
    (MISSING, "its direction ignored in E", SECOND, STILL_E),
    (MISSING, "its direction ignored in the tangent of dY", SECOND, STILL_TDY),
    (MISSING, "dS o tY of gblock_scale", SECOND, {"gG": lambda c: c.tdS * c.Y}),
    (MISSING, "tdS o Y of gblock_scale", SECOND, {"gG": lambda c: c.dS * c.tY}),
)
LEFT_OUT: tuple[Row, ...] = (
    (IGNORED, "everywhere", tuple(STAGES), AS_IF_1),
    (IGNORED, "in the scores alone", BEYOND + JVP, S),
    (IGNORED, "in dY alone", BEYOND, DY | TDY),
    (IGNORED, "in E alone", SECOND + JVP, E),
    (IGNORED, "in the tangent of dY alone", SECOND, TDY),
)
bugs = lru_cache(maxsize=1)(lambda question: tuple(_bugs(question)))
GIVEN, _slots = lists.listed(lambda x: lists_of(x.question)), partial(each, _in_slots)
KEPT = "that of its place among the slots that are walked, without padding and repeats"
OTHERS: dict[str, See] = {
    "blocks ascending": lists.listed(partial(_sorted, lambda x: x.named)),
    "padding last": lists.listed(partial(_sorted, lambda x: ~x.is_block)),
    "of a block that is named twice that of the last slot": lists.listed(_of_the_last),
    "that of its place in the sorted list of blocks": each(_by_place, "blocks ascending"),
    KEPT: each(_by_place, "in the order of the slots"),
    "that of the last slot for the own block": _slots(lambda s, own, last, n: s % n),
    "that of the last slot, where it is walked, for the own block": _slots(
        lambda s, own, last, n: np.where((s < 0) & (last == n - 1), last, s)
    ),
    "the walk's last for the own block": _slots(lambda s, own, last, n: np.where(s < 0, last, s)),
    "that of the first slot for the own block": _slots(lambda s, own, last, n: np.maximum(s, 0)),
    "1 for the first slot": _slots(lambda s, own, last, n: np.where(s == 0, -1, s)),
    "1 for the own block where it is named": _slots(lambda s, own, last, n: np.where(own, -1, s)),
}
