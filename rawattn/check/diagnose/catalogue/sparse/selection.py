"""The catalogue of bugs in block-sparse attention: what is selected, and the gate.

Most are other views. Where a selection that is read wrongly is a selection itself, these are the
right views of another question.

Long by the catalogue.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rawattn.check.diagnose.catalogue.masks import distances, within
from rawattn.check.diagnose.catalogue.second_order import of, with_values
from rawattn.check.diagnose.engine.attention import (
    STEPS,
    Bug,
    Context,
    Floats,
    See,
    Step,
    View,
    views_of,
)
from rawattn.check.diagnose.engine.question import STAGES, Question
from rawattn.reference.dense import allowed

FORWARD, BACKWARD, SECOND, JVP = ((stage,) for stage in STAGES)
GRADIENTS = ("dG", "gG")  # of the gate, by the names of steps

Views = Callable[[Question], tuple[Question, Sequence[View]]]  # and whose selection they show
Change = Callable[[Question], Question]


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    if not question.sparse:
        return
    named = Named(question)
    if question.causal and named.there.any():
        yield from _not_causal(question)
    if question.own:
        yield from _own_block(question)
    yield from _duplicates(question, named)
    yield from _past_the_end(question)
    if (named.padding & named.counted).any():
        yield from _padding(named)
    if named.there.any():
        yield from _slots(question)
    if _indices_of(question).shape[1] > 1:
        yield from _other_heads(question)
    if question.block_scale is not None:
        yield from _gate(question)
    if question.sliding is not None:
        yield from _sliding(question)


class Named:
    """What the slots of block_indices name, all (total_q, num_heads_sel, num_selected).

    counted: anything, by block_counts. padding: no block of the query's sequence. there: a block
    that counts. own and blocks (total_q, 1, 1): the query's own block, and how many there are.
    """

    def __init__(self, question: Question) -> None:
        sequence = question.sequence_of("q")
        lengths_q, lengths_k = (np.array([*n, 0]) for n in (question.lengths_q, question.lengths_k))
        starts = np.array([*np.asarray(question.cu_seqlens_q)[:-1], 0])
        pos = np.arange(len(sequence)) - starts[sequence] + (lengths_k - lengths_q)[sequence]
        self.own = np.where(sequence >= 0, pos // question.block_size, -1)[:, None, None]
        self.blocks = -(-lengths_k[sequence] // question.block_size)[:, None, None]
        self.indices = _indices_of(question).astype(np.int64)
        counts, slots = question.block_counts, np.arange(self.indices.shape[2])
        self.counted = slots < (len(slots) if counts is None else np.asarray(counts)[..., None])
        exists = (self.indices >= 0) & (self.indices < self.blocks)
        self.there = np.asarray(self.counted & exists)
        self.padding = np.asarray(~exists & (self.blocks > 0))

    def twice(self) -> bool:
        """Is a block named twice by a query?"""
        found = np.sort(np.where(self.there, self.indices, -1), axis=2)
        return bool(((found[..., 1:] == found[..., :-1]) & (found[..., 1:] >= 0)).any())

    def own_too(self) -> bool:
        """Is the own block named too?"""
        return bool((self.there & (self.indices == self.own)).any())


# ---- changes of views -------------------------------------------------------------------------


@dataclass(frozen=True)
class Sourced(View):
    """A view after a bug: of the selection of ``source``, which the next bug reads."""

    source: Question | None = None


def instead(others: Views) -> See:
    """``others`` in so far as they differ from the right views: the rest may have another bug.

    The views of the sliding branch, which have no slots, stay as they are.
    """

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        if not views or views[0].slot is None:
            return views
        base = getattr(views[0], "source", question)
        source, changed = others(base)
        right, found = (
            {(v.sequence, v.head_kv): v for v in some} for some in (views_of(base), changed)
        )
        places = [(v.sequence, v.head_kv) for v in views]
        patched = [
            _patched(view, right[place], found[place])
            for view, place in zip(views, places, strict=True)
        ]
        return [Sourced(**(vars(view) | {"source": source})) for view in patched]

    return see


def _patched(view: View, right: View, other: View) -> View:
    """``view`` with what tells ``other`` from ``right``; its keys begin with those of ``right``."""
    m = len(right.keys)
    if view.weight.shape[:2] != right.weight.shape[:2]:
        return view
    if not np.array_equal(view.keys[:m], right.keys):
        return view
    weight, slot, slots = view.weight.copy(), _slots_of(view).copy(), _slots_of(other)
    moved = (other.weight[..., :m] != right.weight) | (slots[..., :m] != right.slot)
    weight[..., :m][moved] = other.weight[..., :m][moved]
    slot[..., :m][moved] = slots[..., :m][moved]
    same = np.array_equal(np.asarray(right.selections), np.asarray(other.selections))
    selections = view.selections if same else other.selections
    view = replace(view, weight=weight, slot=slot, selections=selections)
    return _with_keys(view, other.keys[m:], other.weight[..., m:], slots[..., m:])


def of_question(change: Change) -> Views:
    """The right views of another question, which is made once of each."""
    made: list[tuple[Question, Question]] = []

    def others(question: Question) -> tuple[Question, Sequence[View]]:
        if not made or made[0][0] is not question:
            made[:] = [(question, change(question))]
        return made[0][1], views_of(made[0][1])

    return others


def _indices_of(question: Question) -> np.ndarray:
    return np.asarray(question.block_indices)


def _slots_of(view: View) -> np.ndarray:
    return np.asarray(view.slot)


def _with_keys(view: View, keys: np.ndarray, weight: Floats, slot: np.ndarray) -> View:
    """``view`` with more keys."""
    return replace(
        view,
        keys=np.concatenate([view.keys, keys]),
        weight=np.concatenate([view.weight, weight], axis=2),
        slot=np.concatenate([_slots_of(view), slot], axis=2),
    )


def _with_zeros(view: View, count: np.ndarray) -> View:
    """``view`` with ``count`` (heads, n) keys of zeros: one key that is seen so often."""
    keys, slot = np.array([-1]), np.full((*count.shape, 1), -1)
    return _with_keys(view, keys, count[..., None].astype(np.float64), slot)


def _places(question: Question, view: View) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the keys of a view's sequence: the block (m,), whether that is a query's own (n, m), and
    whether the key does not lie after the query (n, m)."""
    length_q, length_k = question.lengths_q[view.sequence], question.lengths_k[view.sequence]
    block = np.arange(length_k) // question.block_size
    pos = np.arange(length_q) + length_k - length_q
    own = block == (pos // question.block_size)[:, None]
    return block, own, allowed(length_q, length_k, (-1, 0))


# ---- causality --------------------------------------------------------------------------------


def _not_causal(question: Question) -> Iterator[Bug]:
    name = "sparse-not-causal"
    yield Bug(name, "everywhere", see=instead(of_question(_open)))
    yield Bug(name, "in the block around the query", see=instead(_open_in_part(around=True)))
    yield Bug(name, "in later blocks", see=instead(_open_in_part(around=False)))
    if question.own:
        whole = instead(_own_whole(of_question(_open)))
        yield Bug(name, "everywhere, the own block too", see=whole)


def _open(question: Question) -> Question:
    return replace(question, causal=False)


def _right(question: Question) -> tuple[Question, Sequence[View]]:
    return question, views_of(question)


def _open_in_part(around: bool) -> Views:
    """Without the cut at the query in its own block (if selected), or in the others, alone."""
    whole = of_question(_open)

    def others(question: Question) -> tuple[Question, Sequence[View]]:
        found = []
        for right, view in zip(views_of(question), whole(question)[1], strict=True):
            _, own, _ = _places(question, right)
            here = own == around
            weight = np.where(here, view.weight, right.weight)
            slot = np.where(here, _slots_of(view), _slots_of(right))
            found.append(replace(view, weight=weight, slot=slot))
        return question, found

    return others


def _own_whole(views: Views, always: bool = True) -> Views:
    """The own block is not cut at the query; without ``always``, only where it is not selected."""

    def others(question: Question) -> tuple[Question, Sequence[View]]:
        source, some = views(question)
        found = []
        for view in some:
            _, own, _ = _places(question, view)
            slot = np.where(own, _slots_of(view), -1).max(axis=2, keepdims=True)
            there = own & (always | (slot < 0))
            weight = np.where(there, 1.0, view.weight)
            found.append(replace(view, weight=weight, slot=np.where(there, slot, _slots_of(view))))
        return source, found

    return others


def _own_block(question: Question) -> Iterator[Bug]:
    missing = of_question(lambda question: replace(question, own=False))
    yield Bug("sparse-own-block-missing", see=instead(missing))
    yield Bug("sparse-own-block-not-causal", see=instead(_own_whole(_right)))
    if question.causal:
        alone = instead(_own_whole(_right, always=False))
        yield Bug("sparse-own-block-not-causal", "unless it is selected", see=alone)


# ---- duplicates, padding, and the end of a sequence -------------------------------------------


def _duplicates(question: Question, named: Named) -> Iterator[Bug]:
    name = "sparse-duplicate-twice"
    twice, own_too = named.twice(), named.own_too() and question.own
    if twice:
        yield Bug(name, "of the selection", see=instead(_repeated(own=False)))
    if own_too:
        yield Bug(name, "the own block", see=instead(_repeated(selected=False)))
    if twice and own_too:
        yield Bug(name, "all", see=instead(_repeated()))


def _repeated(selected: bool = True, own: bool = True, views: Views = _right) -> Views:
    """A block counts as often as it is ``selected``, and once more as the ``own`` one."""

    def others(question: Question) -> tuple[Question, Sequence[View]]:
        source, some = views(question)
        return source, [_with_repeats(source, view, selected, own) for view in some]

    return others


def _with_repeats(question: Question, view: View, selected: bool, own: bool) -> View:
    """With gates, each mention of a block has its own: its keys are there once more for it."""
    block, own_block, not_after = _places(question, view)
    shape = (len(view.heads), len(view.rows))
    indices = _indices_of(question)[view.rows][:, view.selections].swapaxes(0, 1).astype(np.int64)
    counts = np.full(shape, indices.shape[2])
    if question.block_counts is not None:
        counts = question.block_counts[view.rows][:, view.selections].T
    cut = not_after | (not question.causal)
    mentions = [
        (slot, (indices[..., slot, None] == block) & (slot < counts)[..., None] & cut, selected)
        for slot in range(indices.shape[2])
    ]
    if question.own:
        mentions.append((-1, np.broadcast_to(own_block & not_after, (*shape, len(block))), own))
    weights, slots = [np.zeros((*shape, len(block)))], [np.full((*shape, len(block)), -1)]
    before = np.zeros((*shape, len(block)), dtype=int)
    for slot, mask, again in mentions:
        seen = mask & (again | (before == 0))
        for time in range(int(before[seen].max(initial=0)) + 1):
            if time == len(weights):
                weights.append(np.zeros_like(weights[0]))
                slots.append(np.full_like(slots[0], -1))
            here = seen & (before == time)
            weights[time][here], slots[time][here] = 1, slot
        before += seen
    if question.block_scale is None and question.tblock_scale is None:
        return replace(view, weight=np.sum(weights, axis=0), slot=slots[0])
    first = replace(view, weight=weights[0], slot=slots[0])
    for weight, slot_of_key in zip(weights[1:], slots[1:], strict=True):
        first = _with_keys(first, view.keys, weight, slot_of_key)
    return first


def _past_the_end(question: Question) -> Iterator[Bug]:
    """Keys that complete the last block of a sequence."""
    if all(length % question.block_size == 0 for length in question.lengths_k):
        return
    name = "sparse-partial-block-zeros"
    yield Bug(name, "where it is selected", see=_completed(own=False, zeros=True))
    if question.own:
        yield Bug(name, "where it is seen", see=_completed(own=True, zeros=True))
    if question.batch > 1 or len(question.k) > int(question.cu_seqlens_k[-1]):
        leak = _completed(own=False, zeros=False)
        yield Bug("neighbour-leak", "up to the end of the last block", see=leak)


def _completed(own: bool, zeros: bool) -> See:
    """Queries that see the last block see keys behind its end: zeros, or what lies there."""

    def change(question: Question, view: View) -> View:
        length, size = question.lengths_k[view.sequence], question.block_size
        start, stop = question.cu_seqlens_k[view.sequence], question.cu_seqlens_k[view.sequence + 1]
        missing = -length % size
        if not missing:
            return view
        first = view.keys == start + (length - 1) // size * size  # whoever sees the block sees it
        if not first.any():  # another bug has other keys
            return view
        weight, slot = view.weight[..., first], _slots_of(view)[..., first]
        times = np.where(own | (slot >= 0), weight, 0.0).sum(axis=2)
        if zeros:
            return _with_zeros(view, missing * times)
        keys = int(stop) + np.arange(missing)
        keys = np.where(keys < len(question.k), keys, -1)
        shape = (*times.shape, missing)
        slots = np.broadcast_to(slot.max(axis=2, keepdims=True), shape)
        return _with_keys(view, keys, np.broadcast_to(times[..., None], shape), slots)

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        return [view if view.slot is None else change(question, view) for view in views]

    return see


READINGS: dict[str, Callable[["Named"], np.ndarray]] = {
    "as the first block": lambda n: np.where(n.padding, 0, n.indices),
    "as the last block": lambda n: np.where(n.padding, n.blocks - 1, n.indices),
    "as the own block": lambda n: np.where(n.padding, n.own, n.indices),
    "as the nearest block": lambda n: np.where(
        n.padding, n.indices.clip(0, n.blocks - 1), n.indices
    ),
    "if negative as the first block": lambda n: np.where(n.padding & (n.indices < 0), 0, n.indices),
    "if negative from the end": lambda n: np.where(
        n.padding & (n.indices < 0), n.indices + n.blocks, n.indices
    ),
}


def _padding(named: Named) -> Iterator[Bug]:
    """What padding may be taken for; "every time": blocks that this names again count again."""
    name = "sparse-padding-read"
    different: dict[bytes, str] = {named.indices.tobytes(): ""}
    for text, read in READINGS.items():
        if different.setdefault(read(named).tobytes(), text) == text:
            views = of_question(_with_indices(read))
            yield Bug(name, text, see=instead(views))
            yield Bug(name, f"{text}, every time", see=instead(_repeated(views=views)))
    yield Bug(name, "as a block of zeros", see=_zero_blocks)


def _with_indices(read: Callable[[Named], np.ndarray]) -> Change:
    return lambda question: replace(question, block_indices=read(Named(question)))


def _zero_blocks(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    if not views or views[0].slot is None:
        return views
    named = Named(getattr(views[0], "source", question))
    count = question.block_size * (named.padding & named.counted).sum(axis=2)
    per = question.num_heads_q // count.shape[1]
    return [_with_zeros(view, count[view.rows][:, view.heads // per].T) for view in views]


# ---- slots and heads --------------------------------------------------------------------------


def _slots(question: Question) -> Iterator[Bug]:
    width, name = _indices_of(question).shape[2], "sparse-last-slot-dropped"
    dropped = {width - 1: "the last one"}
    for step in (2, 4, 8, 16):
        dropped.setdefault(width // step * step, f"those after a multiple of {step}")
    for start, text in dropped.items():
        if start < width:
            yield Bug(name, text, see=instead(of_question(_without(slice(start, None)))))
    if width > 1:
        yield Bug(name, "the first one", see=instead(of_question(_without(slice(1)))))
    if question.block_counts is not None:
        fewer, more, all_ = (instead(of_question(_more_slots(n))) for n in (-1, 1, width))
        yield Bug(name, "the last one that counts", see=fewer)
        yield Bug("sparse-counts-ignored", "", see=all_)
        yield Bug("sparse-counts-ignored", "one slot too many", see=more)


def _without(slots: slice) -> Change:
    def change(question: Question) -> Question:
        fewer = _indices_of(question).copy()
        fewer[..., slots] = -1
        return replace(question, block_indices=fewer)

    return change


def _more_slots(more: int) -> Change:
    def change(question: Question) -> Question:
        width = _indices_of(question).shape[2]
        counts = np.asarray(question.block_counts).clip(0, width)
        return replace(question, block_counts=counts + more)

    return change


def _other_heads(question: Question) -> Iterator[Bug]:
    heads, selections = np.arange(question.num_heads_q), _indices_of(question).shape[1]
    right = heads // (question.num_heads_q // selections)
    maps = {
        "of the first head": 0 * heads,
        "of the last head": 0 * heads + selections - 1,
        "of h modulo their number": heads % selections,
        "of the next head": (right + 1) % selections,
        "of the head before": (right - 1) % selections,
        "of the kv head's number": heads // question.group,
        "of the group's first head": heads // question.group * question.group % selections,
    }
    different: dict[bytes, str] = {right.tobytes(): ""}
    for text, of_head in maps.items():
        if different.setdefault(of_head.tobytes(), text) != text:
            continue
        see = instead(_of_heads(of_head, of_head))
        yield Bug("sparse-other-heads-selection", text, see=see)
        if question.block_scale is not None:
            see = instead(_of_heads(of_head, right))
            yield Bug("sparse-other-heads-selection", f"{text}, with its own gate", see=see)


def _of_heads(of_head: np.ndarray, gate_of_head: np.ndarray) -> Views:
    """Every query head with the selection, and the gate, of these selection heads."""

    def change(question: Question) -> Question:
        counts = question.block_counts
        there = np.minimum(of_head, _indices_of(question).shape[1] - 1)  # after another bug
        return replace(
            question,
            block_indices=_indices_of(question)[:, there],
            block_counts=None if counts is None else counts[:, there],
        )

    views = of_question(change)

    def others(question: Question) -> tuple[Question, Sequence[View]]:
        source, found = views(question)
        return source, [replace(view, selections=gate_of_head[view.heads]) for view in found]

    return others


# ---- the gate ---------------------------------------------------------------------------------


def _gate(question: Question) -> Iterator[Bug]:
    none = {name: _nothing for name in GRADIENTS}
    for stages in (BACKWARD, SECOND):  # each alone, too
        yield Bug("sparse-gate-gradient-missing", "", stages, steps=none)
    if question.tblock_scale is not None:
        yield from _without_direction()
    heads = question.num_heads_q // _indices_of(question).shape[1]
    if heads > 1:
        for text, share in {
            "the last head": np.arange(heads) == heads - 1,
            "the first head": np.arange(heads) == 0,
            "the mean": np.full(heads, 1 / heads),
        }.items():
            steps = {name: _shared(name, share) for name in GRADIENTS}
            yield Bug("sparse-gate-not-summed", text, BACKWARD + SECOND, steps=steps)
    if not math.isclose(question.scale, 1.0):
        for text, factor in (("without", 1 / question.scale), ("twice", question.scale)):
            scaled = {name: _times(name, factor) for name in GRADIENTS}
            yield Bug("output-scale", f"dblock_scale, {text}", BACKWARD + SECOND, steps=scaled)
    if np.any(np.asarray(question.block_scale) != 1):
        yield from _ungated()


def _nothing(c: Context) -> Floats:
    return np.zeros_like(c.P)


def _without_direction() -> Iterator[Bug]:
    name, text = "sparse-gate-gradient-missing", "its direction ignored"
    E, tdY = ({step: with_values(step, tG=lambda c: 0.0)} for step in ("E", "tdY"))
    yield Bug(name, text, SECOND, steps=E | tdY)
    yield Bug(name, text, JVP, steps=E)
    yield from of(
        name,
        SECOND,
        {
            f"{text}, gblock_scale = 0": E | tdY | {"gG": _nothing},
            f"{text} in E": E,
            f"{text} in the tangent of dY": tdY,
            "dS o tY of gblock_scale": {"gG": lambda c: c.tdS * c.Y},
            "tdS o Y of gblock_scale": {"gG": lambda c: c.dS * c.tY},
        },
    )


def _shared(name: str, share: np.ndarray) -> Step:
    """Of the heads of a selection these shares of the gradient."""

    def step(c: Context) -> Floats:
        of_head = share[c.view.heads % len(share)]
        return np.asarray(of_head[:, None, None] * STEPS[name](c))

    return step


def _times(name: str, factor: float) -> Step:
    return lambda c: factor * STEPS[name](c)


def _ungated() -> Iterator[Bug]:
    S, dY = (with_values(name, G=lambda c: 1.0) for name in ("S", "dY"))
    E, tdY = (with_values(name, G=lambda c: 1.0) for name in ("E", "tdY"))
    fixed = {name: with_values(name, G=lambda c: 1.0, tG=lambda c: 0.0) for name in ("E", "tdY")}
    everywhere = {"S": S, "dY": dY, **fixed}
    name, beyond = "sparse-gate-ignored", BACKWARD + SECOND + JVP
    yield Bug(name, "everywhere", tuple(STAGES), steps=everywhere)
    nothing = everywhere | {name: _nothing for name in GRADIENTS}
    yield Bug(name, "everywhere, and its gradient is 0", BACKWARD + SECOND, steps=nothing)
    yield Bug(name, "in the scores alone", beyond, steps={"S": S})
    yield Bug(name, "in dY alone", BACKWARD + SECOND, steps={"dY": dY, "tdY": tdY})
    yield Bug(name, "in E alone", SECOND + JVP, steps={"E": E})
    yield Bug(name, "in the tangent of dY alone", SECOND, steps={"tdY": tdY})


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
