"""Bugs of the lists from blocks back to queries, which dk and dv, gk and gv are summed by."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.catalogue.reading import delta_of
from rawattn.check.diagnose.catalogue.sparse.lists import (
    OWN,
    Different,
    Lists,
    Split,
    Walk,
    first_of,
    lists_of,
    split,
    walked,
    walking,
)
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    STEPS,
    Bug,
    Context,
    Floats,
    See,
    Step,
    View,
    changed,
    views_of,
)
from rawattn.check.diagnose.engine.question import Question


def _counted(step: str, kind: str, operands: Sequence[str]) -> Step:
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
    "dQ": _counted("dQ", "of_q", ["dY"]),
    "dK": _counted("dK", "of_k", ["dY"]),
    "dV": _counted("dV", "of_k", ["P"]),
    "dG": _counted("dG", "of_q", ["dS"]),
}
OF_LISTS_BEYOND: dict[str, Step] = {
    "e": _counted("e", "of_q", ["P"]),
    "tO": _counted("tO", "of_q", ["P", "tP"]),
    "gQ": _counted("gQ", "of_q", ["tdY", "dY"]),
    "gK": _counted("gK", "of_k", ["tdY", "dY"]),
    "gV": _counted("gV", "of_k", ["tP"]),
    "gG": _counted("gG", "of_q", ["tdS", "dS"]),
}


def inverted(variant: str, see: See) -> Iterator[Bug]:
    """A bug of the lists that dk and dv, or gk and gv, are summed by."""
    name = "sparse-inverted-lists"
    yield Bug(name, variant, BACKWARD, see=see, steps=OF_LISTS)
    yield Bug(name, variant, ("second",), see=see, steps=OF_LISTS_BEYOND)


def by_walk(change: Walk) -> See:
    """Keys sum what the changed lists have."""
    others = walking(change)

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        if not views or views[0].slot is None:
            return views
        right = views_of(question)
        return [split(one, other) for one, other in zip(right, others(question)[1], strict=True)]

    return see


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    if not question.sparse:
        return
    different = Different(question)
    for text, change in inversions(question):
        if different(change(lists_of(question))):
            yield from inverted(text, by_walk(change))
    if question.group > 1:
        yield from _statistics(question)
    if question.batch > 1:
        for text, own_place in (("", False), (", masked by their own places", True)):
            variant = f"lists of neighbouring sequences share a place{text}"
            yield from inverted(variant, _shared_places(own_place))


def _statistics(question: Question) -> Iterator[Bug]:
    """The pass over keys alone reads lse and delta of another head."""
    heads, group = np.arange(question.num_heads_q), question.group
    different: dict[bytes, str] = {heads.tobytes(): ""}
    for text, of_head in {
        "the first head of the group": heads // group * group,
        "the key/value head's number": heads // group,
        "head h % num_heads_kv": heads % question.num_heads_kv,
        "the last head of the group": heads // group * group + group - 1,
    }.items():
        if different.setdefault(of_head.tobytes(), text) != text:
            continue
        for names in (("lse", "delta"), ("lse",), ("delta",)):
            form = f"{' and '.join(names)} of {text}, for dk and dv"
            steps = {"dK": _with_statistics("dK", names, of_head)}
            if "lse" in names:
                steps["dV"] = _with_statistics("dV", names, of_head)
            else:
                form = form.removesuffix(" and dv")
            yield Bug("statistics-misplaced", form, BACKWARD, steps=steps)


def _with_statistics(step: str, names: Sequence[str], of_head: np.ndarray) -> Step:
    def other(c: Context) -> Floats:
        heads, rows = of_head[c.view.heads][:, None], c.view.rows
        P, D = c.P, c.D
        if "lse" in names:
            L = np.asarray(c.given[1][heads, rows], dtype=np.float64)
            P = STEPS["bP"](changed(c, L=L))
        if "delta" in names:
            D = delta_of(c)[heads, rows]
        found = changed(c, P=P, D=D)
        found.dS = STEPS["dS"](found)
        found.dY = STEPS["dY"](found)
        return np.asarray(STEPS[step](found))

    return other


def inversions(question: Question) -> Iterator[tuple[str, Walk]]:
    """Lists as they are after somebody has turned them round."""
    slots = np.asarray(question.block_indices).shape[2]

    def every(own: bool) -> Walk:
        def walk(lists: Lists) -> Lists:
            times = np.ones_like(lists.own) if own else None
            return walked(lists, lists.exists, own=times)

        return walk

    def no_own(lists: Lists) -> Lists:
        there = lists.exists & first_of(lists.named, lists.exists)
        return walked(lists, there, own=np.zeros_like(lists.own))

    def uncounted(lists: Lists) -> Lists:
        there = (lists.named >= 0) & (lists.named < lists.blocks)
        return walked(lists, there & first_of(lists.named, there))

    def but_for(last: bool, hidden: bool) -> Walk:
        """Without one entry of every list, that of its first or last query; ``hidden``: queries
        that the block lies behind are in it too."""

        def walk(lists: Lists) -> Lists:
            there = lists.times > 0
            if question.causal and not hidden:
                there = there & (lists.block <= lists.own)
            first: dict[tuple[int, int, int], int] = {}
            sequence = question.sequence_of("q")
            entries = np.argwhere(there)
            for t, h, e in entries[::-1] if not last else entries:
                first[sequence[t], h, lists.block[t, h, e]] = t
            gone = np.zeros(there.shape, dtype=bool)
            for (_, h, block), t in first.items():
                gone[t, h] |= lists.block[t, h] == block
            return replace(lists, times=np.where(gone, 0, lists.times))

        return walk

    if slots > 1:
        yield "repeats are counted", every(own=False)
    if question.own:
        yield "the own block is counted again where it is named", every(own=True)
        yield "the own block is missing where it is not named", no_own
    if question.block_counts is not None:
        yield "slots that do not count are in them", uncounted
    for text, last in (("first", False), ("last", True)):
        for where, hidden in (("", False), (", hidden ones too", True)):
            yield f"the {text} query of a list is missing{where}", but_for(last, hidden)
    if np.asarray(question.block_indices).shape[1] > 1:
        yield "those of the first head", _lists_of_heads(lambda head: 0 * head)
        yield "those of the next head", _lists_of_heads(lambda head: np.roll(head, -1))


def _lists_of_heads(other: Callable[[np.ndarray], np.ndarray]) -> Walk:
    def walk(lists: Lists) -> Lists:
        of_head = other(np.arange(lists.named.shape[1]))
        return replace(
            lists,
            **{
                name: getattr(lists, name)[:, of_head]
                for name in ("block", "slot", "times", "whole")
            },
        )

    return walk


def _shared_places(own_place: bool) -> See:
    """The lists of a sequence start at cu_seqlens / block_size, rounded down: the first block of
    one may have the place of the last block of the one before, and both get both's queries."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        if not views or views[0].slot is None:
            return views
        lists, right = lists_of(question), views_of(question)
        seen, size = lists.multiplicity() > 0, question.block_size
        base = np.asarray(question.cu_seqlens_k).astype(np.int64) // size
        found: list[View] = [split(view, view) for view in right]
        for view, other in ((v, o) for v in right for o in right if v.head_kv == o.head_kv):
            shift = int(base[view.sequence] - base[other.sequence])
            if view.sequence == other.sequence:
                continue
            lengths_q, lengths_k = question.lengths_q, question.lengths_k
            block = np.arange(lengths_k[view.sequence]) // size + shift
            last = -(-lengths_k[other.sequence] // size) - 1
            there = (block >= 0) & (block <= last)
            if not there.any():
                continue
            of = seen[other.rows][:, other.selections].swapaxes(0, 1)
            weight = of[..., np.clip(block, 0, last)] & there
            own = other.sequence if own_place else view.sequence
            place = other.rows - question.cu_seqlens_q[own] + lengths_k[own] - lengths_q[own]
            if question.causal:
                weight = weight & (np.arange(len(view.keys)) <= place[:, None])
            nothing = np.zeros(weight.shape)
            found.append(
                Split(
                    view.sequence,
                    other.rows,
                    view.keys,
                    view.heads,
                    view.head_kv,
                    weight.astype(np.float64),
                    np.full(weight.shape, OWN),
                    other.selections,
                    of_q=nothing,
                    of_k=weight.astype(np.float64),
                )
            )
        return found

    return see
