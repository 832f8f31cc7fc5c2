"""The lists of blocks that tokens walk in block-sparse attention, and the views that they show.

A token walks the slots of its selection, and its own block. A bug is other lists (a ``Walk``) or
other keys of a block (a ``Cover``); where two come together, the second one walks the lists of the
first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, TypeVar

import numpy as np

from rawattn.check.diagnose.engine.attention import Floats, See, View, views_of
from rawattn.check.diagnose.engine.question import Question

T = TypeVar("T")
OWN = -1  # slot of the own block


@dataclass(frozen=True)
class Lists:
    """What every token walks, in order: arrays (total_q, num_heads_sel, slots or entries).

    named: what the slots hold, padding and repeats too. counted: whether they do, by block_counts.
    own and blocks (total_q, 1, 1): the own block, -1 for none, and how many the sequence has; row
    and place: of the query, among those of the sequence and among its keys, of which there are
    length_q and length_k.
    heads and factors (num_heads_q,): whose list, and whose factors, a query head has. Of entries,
    which ``walked`` makes of these: block: of its sequence. slot: whose factor it gets, OWN for
    none. times: how often it counts. whole: it is not cut at the query.
    """

    question: Question
    named: np.ndarray
    counted: np.ndarray
    own: np.ndarray
    blocks: np.ndarray
    row: np.ndarray
    place: np.ndarray
    length_q: np.ndarray
    length_k: np.ndarray
    heads: np.ndarray
    factors: np.ndarray
    block: np.ndarray
    slot: np.ndarray
    times: np.ndarray
    whole: np.ndarray

    @property
    def size(self) -> int:
        return self.question.block_size

    @property
    def slots(self) -> np.ndarray:
        return np.arange(self.named.shape[2])

    @property
    def limit(self) -> np.ndarray:
        """block_counts (total_q, num_heads_sel, 1)"""
        heads, width = self.named.shape[1:]
        if self.question.block_counts is None:
            return np.full((len(self.named), heads, 1), width)
        counts = np.clip(self.question.block_counts, 0, width)
        return np.asarray(counts[:, np.arange(heads) * counts.shape[1] // heads, None])

    @property
    def is_block(self) -> np.ndarray:
        """Of the slots: a block of the sequence, counted or not."""
        return np.asarray((self.named >= 0) & (self.named < self.blocks))

    @property
    def exists(self) -> np.ndarray:
        """Of the slots: a block of the sequence that counts."""
        return np.asarray(self.is_block & self.counted)

    @property
    def repeats(self) -> np.ndarray:
        """Of the slots: a block of the sequence that one before names."""
        return np.asarray(self.exists & ~first_of(self.named, self.exists))

    def multiplicity(self, hidden: bool = False) -> np.ndarray:
        """How often every block is seen, (total_q, num_heads_sel, most blocks); ``hidden``: those
        behind the query too, of which a causal mask leaves nothing."""
        most = int(self.blocks.max(initial=0))
        found = np.zeros((*self.block.shape[:2], most + 1), dtype=np.int64)
        token, head = (np.arange(n) for n in self.block.shape[:2])
        there = (self.times > 0) & (self.block >= 0) & (self.block < most)
        where = token[:, None, None], head[:, None], np.where(there, self.block, -1)
        np.add.at(found, where, self.times)
        seen = np.arange(most) <= self.own if self.question.causal and not hidden else True
        return np.asarray(np.where(seen, found[..., :most], 0))


Walk = Callable[[Lists], Lists]


def of_last(make: Callable[[Question], T]) -> Callable[[Question], T]:
    """``make``, whose result for the last question is kept: it is asked for again and again."""
    kept: list[tuple[Question, T]] = []

    def made(question: Question) -> T:
        if not kept or kept[0][0] is not question:
            kept[:] = [(question, make(question))]
        return kept[0][1]

    return made


def starts_of(question: Question) -> np.ndarray:
    """For every token where its sequence begins."""
    starts = np.array([*np.asarray(question.cu_seqlens_q)[:-1], 0])
    return np.asarray(starts[question.sequence_of("q")])


@of_last
def lists_of(question: Question) -> Lists:
    """The right lists: every block once, at its first slot; then the own block, if not named."""
    named = np.asarray(question.block_indices).astype(np.int64)
    sequence, size = question.sequence_of("q"), question.block_size
    lengths = (np.array([*n, 0]) for n in (question.lengths_q, question.lengths_k))
    length_q, length_k = (length[sequence][:, None, None] for length in lengths)
    row = (np.arange(len(sequence)) - starts_of(question))[:, None, None]
    place = row + length_k - length_q
    inside = (sequence >= 0)[:, None, None] & (length_k > 0)
    own = np.where(inside & (place >= 0), place // size, -1)
    blocks = np.where(inside, -(-length_k // size), 0)
    heads = np.arange(question.num_heads_q) * named.shape[1] // question.num_heads_q
    where = (own, blocks, row, place, length_q, length_k)
    bare = Lists(question, named, named, *where, heads, heads, *(np.zeros(0),) * 4)
    return walked(replace(bare, counted=bare.slots < bare.limit))


def first_of(named: np.ndarray, there: np.ndarray) -> np.ndarray:
    """The entries that no entry of ``there`` before them repeats."""
    found = np.ones(named.shape, dtype=bool)
    for slot in range(1, named.shape[2]):
        same = (named[..., :slot] == named[..., slot : slot + 1]) & there[..., :slot]
        found[..., slot] = ~same.any(axis=2)
    return found


def walked(
    lists: Lists, times: np.ndarray | None = None, own: np.ndarray | int | None = None
) -> Lists:
    """``lists`` whose slots count so many ``times``, by default every block once, and the own block
    ``own`` times, by default once if no slot that counts names it."""
    named = lists.named
    times = lists.exists & ~lists.repeats if times is None else times
    if own is None:
        own = ~((named == lists.own) & (times > 0)).any(axis=2, keepdims=True)
    own = np.broadcast_to(own, (*named.shape[:2], 1)) * (lists.own >= 0) * lists.question.own
    none = np.full(own.shape, OWN)
    slot = np.broadcast_to(np.arange(named.shape[2]), named.shape)
    return replace(
        lists,
        block=np.concatenate([named, np.broadcast_to(lists.own, own.shape)], axis=2),
        slot=np.concatenate([slot, none], axis=2),
        times=np.concatenate([times, own], axis=2).astype(np.int64),
        whole=np.concatenate([np.full(named.shape, not lists.question.causal), none > 0], axis=2),
    )


# ---- views ------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One entry of the lists of a view: block and slot (heads, n, 1), of rows (n, 1)
    of their sequence, and keys (m,), counted from the sequence's first one, which is
    ``first`` of k, as ``length`` is their number; ``open`` (heads, n, m): those that are not hidden
    from the query."""

    block: np.ndarray
    slot: np.ndarray
    open: np.ndarray
    row: np.ndarray
    key: np.ndarray
    first: int
    length: int
    size: int

    @property
    def right(self) -> np.ndarray:
        inside = (self.key >= 0) & (self.key < self.length)
        return np.asarray((self.key // self.size == self.block) & inside & self.open)


class Cover(NamedTuple):
    """Which keys an entry has: bool, (heads, n, m). beyond: what there is besides those of the
    sequence, "zeros" or "memory", as many as its last block lacks, and zeros behind the end of k;
    "k": what there is of k; "before": a block of keys before it too. once: whatever has a key."""

    keys: Callable[[Entry], np.ndarray]
    beyond: str = ""
    once: bool = False


@dataclass(frozen=True)
class Listed(View):
    """A view after a bug: of other lists, which the next bug walks."""

    lists: Lists | None = None


def walking(change: Walk, cover: Cover | None = None) -> See:
    """The changed lists in so far as they show something else: the rest may have another bug.

    The views of the sliding branch, which have no slots, stay as they are.
    """

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        if not views or views[0].slot is None:
            return views
        before: Lists | None = getattr(views[0], "lists", None)
        after = change(before or lists_of(question))
        found = []
        for view, right in _pairs(question, views):
            one = right if before is None else shown(question, right, before)
            new = shown(question, right, after, cover)
            new = new if view is right else _patched(view, one, new)
            found.append(
                Listed(**{f.name: getattr(new, f.name) for f in fields(View)}, lists=after)
            )
        return found

    return see


class Different:
    """Whether a bug shows other views than the right ones, and than all that were asked before."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.seen = {self._key(views_of(question))}

    def __call__(self, see: See) -> bool:
        key = self._key(see(self.question, views_of(self.question)))
        new = key not in self.seen
        self.seen.add(key)
        return new

    def _key(self, views: Sequence[View]) -> bytes:
        found = [x for view in views for x in (view.keys, view.weight)]
        if self.question.block_scale is not None or self.question.tblock_scale is not None:
            for view in views:
                seen = np.where(view.weight > 0, np.asarray(view.slot), OWN)
                found += [seen, np.asarray(view.selections)]
        return b"".join(np.asarray(x, dtype=np.float64).tobytes() for x in found)


def _pairs(question: Question, views: Sequence[View]) -> list[tuple[View, View]]:
    """Views, each beside the right one of its sequence and head."""
    right = {(view.sequence, view.head_kv): view for view in views_of(question)}
    return [(view, right[view.sequence, view.head_kv]) for view in views]


def _patched(view: View, right: View, other: View) -> View:
    """``view`` with what tells ``other`` from ``right``; its keys begin with those of ``right``."""
    m = len(right.keys)
    if view.weight.shape[:2] != right.weight.shape[:2]:
        return view
    if not np.array_equal(view.keys[:m], right.keys):
        return view
    weight, slot = view.weight.copy(), np.asarray(view.slot).copy()
    slots = np.asarray(other.slot)
    moved = (other.weight[..., :m] != right.weight) | (slots[..., :m] != right.slot)
    weight[..., :m][moved] = other.weight[..., :m][moved]
    slot[..., :m][moved] = slots[..., :m][moved]
    same = np.array_equal(np.asarray(right.selections), np.asarray(other.selections))
    selections = view.selections if same else other.selections
    view = replace(view, weight=weight, slot=slot, selections=selections)
    return with_keys(view, other.keys[m:], other.weight[..., m:], slots[..., m:])


def with_keys(view: View, keys: np.ndarray, weight: Floats, slot: np.ndarray) -> View:
    """``view`` with more keys."""
    return replace(
        view,
        keys=np.concatenate([view.keys, keys]),
        weight=np.concatenate([view.weight, weight], axis=2),
        slot=np.concatenate([np.asarray(view.slot), slot], axis=2),
    )


def shown(question: Question, view: View, lists: Lists, cover: Cover | None = None) -> View:
    """What the lists show; with factors, each mention of a block has its own keys."""
    length_q, length_k = question.lengths_q[view.sequence], question.lengths_k[view.sequence]
    size, first = question.block_size, int(question.cu_seqlens_k[view.sequence])
    key, keys = np.arange(length_k), view.keys
    if cover and cover.beyond:
        behind = np.arange(length_k, -(-length_k // size) * size)
        if cover.beyond == "before":
            behind = np.arange(-min(size, first), 0)
        stop = int(question.cu_seqlens_k[view.sequence + 1]) - length_k
        there = behind + (first if cover.beyond == "before" else stop)
        if cover.beyond == "k":
            behind, there = (x[there < len(question.k)] for x in (behind, there))
        gone = (cover.beyond == "zeros") | (there >= len(question.k))
        key = np.concatenate([key, behind])
        keys = np.concatenate([keys, np.where(gone, -1, there)])
    row = np.arange(length_q)[:, None]

    def of(x: np.ndarray) -> np.ndarray:
        """(heads, n, entries)"""
        return np.asarray(x[view.rows][:, lists.heads[view.heads]].swapaxes(0, 1))

    blocks, slots, counts, wholes = map(of, (lists.block, lists.slot, lists.times, lists.whole))
    shape = (len(view.heads), length_q, len(key))
    gated = question.block_scale is not None or question.tblock_scale is not None
    weights, slot_of_key = [np.zeros(shape)], [np.full(shape, OWN)]
    for number in range(blocks.shape[2]):
        block, slot_of, count, whole = (
            x[..., number, None] for x in (blocks, slots, counts, wholes)
        )
        open_ = (key <= row + length_k - length_q) | whole
        entry = Entry(block, slot_of, open_, row, key, first, length_k, size)
        seen = (cover.keys(entry) if cover else entry.right) & (count > 0)
        if not seen.any():
            continue
        times, slot = (np.broadcast_to(x, shape) for x in (count, slot_of))
        for weight, slots_there in zip(weights, slot_of_key, strict=True):
            free = seen & ((weight == 0) | ((slots_there == slot) | (not gated)))
            slots_there[free & (weight == 0)] = slot[free & (weight == 0)]
            weight[free] += times[free]
            seen = seen & ~free
        if seen.any():
            weights.append(np.where(seen, times, 0.0))
            slot_of_key.append(np.where(seen, slot, OWN))
    if cover and cover.once:
        weights, slot_of_key = [np.minimum(weights[0], 1.0)], slot_of_key[:1]
    selections = np.asarray(lists.factors[view.heads])
    found = replace(view, keys=keys, weight=weights[0], slot=slot_of_key[0], selections=selections)
    for weight, slot in zip(weights[1:], slot_of_key[1:], strict=True):
        found = with_keys(found, keys, weight, slot)
    return found
