"""The lists of blocks that tokens walk in block-sparse attention, and the views that they show."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue.sparse.selection import Views
from rawattn.check.diagnose.engine.attention import (
    Floats,
    View,
    views_of,
)
from rawattn.check.diagnose.engine.question import Question

OWN = -1  # slot of the own block


def places(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Token and head of every entry."""
    tokens, heads = (np.arange(n) for n in shape[:2])
    return tokens[:, None, None], heads[:, None]


@dataclass(frozen=True)
class Lists:
    """What every token walks, in order, (total_q, num_heads_sel, entries).

    block: of its sequence, -1 for what is no block. slot: whose factor it gets, OWN for none.
    times: how often it counts. whole: it is not cut at the query. named: what the slots hold,
    padding and repeats too. own and blocks (total_q, 1, 1): the own block, -1 for none, and how
    many the sequence has. inside (total_q,): the token is in a sequence that has keys.
    """

    question: Question
    block: np.ndarray
    slot: np.ndarray
    times: np.ndarray
    whole: np.ndarray
    named: np.ndarray
    counted: np.ndarray
    own: np.ndarray
    blocks: np.ndarray
    inside: np.ndarray

    @property
    def is_block(self) -> np.ndarray:
        """Of the slots: a block of the sequence, counted or not."""
        return np.asarray((self.named >= 0) & (self.named < self.blocks))

    @property
    def exists(self) -> np.ndarray:
        """Of the slots: a block of the sequence that counts."""
        return np.asarray(self.is_block & self.counted)

    def multiplicity(self, hidden: bool = False) -> np.ndarray:
        """How often every block is seen, (total_q, num_heads_sel, most blocks); ``hidden``: those
        behind the query too, of which a causal mask leaves nothing."""
        most = int(self.blocks.max(initial=0))
        found = np.zeros((*self.block.shape[:2], most + 1), dtype=np.int64)
        token, head = places(self.block.shape)
        np.add.at(found, (token, head, np.where(self.times > 0, self.block, -1)), self.times)
        found = found[..., :most]
        cut = self.question.causal and not hidden
        seen = np.arange(most) <= self.own if cut else True
        return np.where(seen, found, 0)


Walk = Callable[[Lists], Lists]
Family = Iterator[tuple[str, str, Walk]]  # class, variant


def lists_of(question: Question) -> Lists:
    """The right lists: every block once, at its first slot; then the own block, if not named."""
    named = np.asarray(question.block_indices).astype(np.int64)
    sequence = question.sequence_of("q")
    lengths_q, lengths_k = (np.array([*n, 0]) for n in (question.lengths_q, question.lengths_k))
    starts = np.array([*np.asarray(question.cu_seqlens_q)[:-1], 0])
    place = np.arange(len(sequence)) - starts[sequence] + (lengths_k - lengths_q)[sequence]
    inside = (sequence >= 0) & (lengths_k[sequence] > 0)
    own = np.where(inside & (place >= 0), place // question.block_size, -1)[:, None, None]
    blocks = np.where(inside, -(-lengths_k[sequence] // question.block_size), 0)[:, None, None]
    slots = np.arange(named.shape[2])
    limit = len(slots) if question.block_counts is None else question.block_counts
    counted = slots < np.broadcast_to(limit, named.shape[:2])[..., None]
    bare = Lists(question, *(np.zeros(0),) * 4, named, counted, own, blocks, inside)
    return walked(bare, bare.exists & first_of(named, bare.exists))


def first_of(named: np.ndarray, there: np.ndarray) -> np.ndarray:
    """The entries that no entry of ``there`` before them repeats."""
    found = np.ones(named.shape, dtype=bool)
    for slot in range(1, named.shape[2]):
        same = (named[..., :slot] == named[..., slot : slot + 1]) & there[..., :slot]
        found[..., slot] = ~same.any(axis=2)
    return found


def walked(
    lists: Lists,
    times: np.ndarray,
    named: np.ndarray | None = None,
    own: np.ndarray | None = None,
    order: np.ndarray | None = None,
) -> Lists:
    """``lists`` whose slots count so many ``times``, holding ``named``, and the own block ``own``
    times: by default once if no slot that counts names it. order: the slots of the entries."""
    named = lists.named if named is None else named
    times = times.astype(np.int64)
    if own is None:
        own = ~((named == lists.own) & (times > 0)).any(axis=2, keepdims=True)
    own = np.broadcast_to(own, (*named.shape[:2], 1)) * (lists.own >= 0) * lists.question.own
    own = own.astype(np.int64)
    slot = np.broadcast_to(np.arange(named.shape[2]) if order is None else order, named.shape)
    none = np.full_like(own, OWN)
    return replace(
        lists,
        block=np.concatenate([named, np.broadcast_to(lists.own, own.shape)], axis=2),
        slot=np.concatenate([slot, none], axis=2),
        times=np.concatenate([times, own], axis=2),
        whole=np.concatenate([np.full(named.shape, not lists.question.causal), none > 0], axis=2),
        named=named,
    )


class Different:
    """Whether lists show other blocks than the right ones, and than all that were asked before."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.gated = question.block_scale is not None
        self.seen = {self._key(lists_of(question))}

    def __call__(self, lists: Lists) -> bool:
        key = self._key(lists)
        new = key not in self.seen
        self.seen.add(key)
        return new

    def _key(self, lists: Lists) -> bytes:
        whole = lists.whole & (lists.block == lists.own) & (lists.times > 0)
        key = [lists.multiplicity(), whole.any(axis=2)]
        if self.gated:
            mention = (lists.slot + 1) * (1 + lists.blocks) + lists.block
            key.append(np.sort(np.where(lists.times > 0, mention, -1), axis=2))
        return b"".join(x.tobytes() for x in key)


class Entry(NamedTuple):
    """One entry of the lists of a view: block and slot (heads, n, 1), of rows i (n, 1) with places
    (n, 1) among the keys, and all keys (m,), counted from the sequence's first one."""

    block: np.ndarray
    slot: np.ndarray
    i: np.ndarray
    place: np.ndarray
    key: np.ndarray
    first: int  # the sequence's offset in k


Cover = Callable[[Entry], np.ndarray]  # the keys that an entry has: bool, (heads, n, m)


def walking(change: Walk, cover: Cover | None = None, before: bool = False) -> Views:
    """The views of the changed lists; with factors, each mention of a block has its own keys.

    cover: other keys of a block, uncut. before: up to a block of keys before the sequence too.
    """

    def others(question: Question) -> tuple[Question, Sequence[View]]:
        lists = change(lists_of(question))
        found = [_view(question, view, lists, cover, before) for view in views_of(question)]
        return question, found

    return others


def _view(
    question: Question, view: View, lists: Lists, cover: Cover | None, with_before: bool
) -> View:
    length_q, length_k = question.lengths_q[view.sequence], question.lengths_k[view.sequence]
    first = int(question.cu_seqlens_k[view.sequence])
    before = min(question.block_size, first) if with_before else 0
    key = np.concatenate([np.arange(length_k), np.arange(-before, 0)])
    keys = np.concatenate([view.keys, first + key[length_k:]])
    i = np.arange(length_q)[:, None]
    place = i + length_k - length_q
    block = key // question.block_size
    not_after = key <= place

    def of(x: np.ndarray) -> np.ndarray:
        """(heads, n, entries)"""
        return np.asarray(x[view.rows][:, view.selections].swapaxes(0, 1))

    blocks, slots, counts, wholes = map(of, (lists.block, lists.slot, lists.times, lists.whole))
    shape = (len(view.heads), length_q, len(key))
    gated = question.block_scale is not None or question.tblock_scale is not None
    weights, slot_of_key = [np.zeros(shape)], [np.full(shape, OWN)]
    for entry in range(blocks.shape[2]):
        one, slot_of_one = blocks[..., entry, None], slots[..., entry, None]
        if cover is None:
            seen = (one == block) & (not_after | wholes[..., entry, None])
        else:
            seen = cover(Entry(one, slot_of_one, i, place, key, first))
        seen = seen & (counts[..., entry, None] > 0)
        if not seen.any():
            continue
        times, slot = (np.broadcast_to(x[..., entry, None], shape) for x in (counts, slots))
        for weight, slot_of in zip(weights, slot_of_key, strict=True):
            free = seen & ((weight == 0) | ((slot_of == slot) | (not gated)))
            slot_of[free & (weight == 0)] = slot[free & (weight == 0)]
            weight[free] += times[free]
            seen = seen & ~free
        if seen.any():
            weights.append(np.where(seen, times, 0.0))
            slot_of_key.append(np.where(seen, slot, OWN))
    found = replace(view, keys=keys, weight=weights[0], slot=slot_of_key[0])
    for weight, slot_of in zip(weights[1:], slot_of_key[1:], strict=True):
        found = replace(
            found,
            keys=np.concatenate([found.keys, keys]),
            weight=np.concatenate([found.weight, weight], axis=2),
            slot=np.concatenate([np.asarray(found.slot), slot_of], axis=2),
        )
    return found


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
    found = {field.name: getattr(right, field.name) for field in fields(View)}
    found |= {"keys": of_k.keys, "weight": weight, "slot": slot}
    return Split(**found, of_q=rows, of_k=of_k.weight)
