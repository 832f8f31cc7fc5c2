"""More bugs of block-sparse attention: how the lists of named blocks are walked and read.

A token walks a list of entries: the slots of its selection, and its own block (``lists``). A bug
is another walk of it, another reading of the slots, or other keys of a block. Which blocks
somebody's rows really saw can be read off the answers too, in ``inferred.blocks``, which looks it
up among the same walks.

Long by the catalogue.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.catalogue.sparse import gates, inverted_lists, places
from rawattn.check.diagnose.catalogue.sparse.lists import (
    Different,
    lists_of,
    walking,
)
from rawattn.check.diagnose.catalogue.sparse.readings import READINGS, USUAL_READINGS
from rawattn.check.diagnose.catalogue.sparse.selection import Views, instead, of_question
from rawattn.check.diagnose.catalogue.sparse.walks import usual
from rawattn.check.diagnose.engine.attention import (
    Bug,
    View,
    views_of,
)
from rawattn.check.diagnose.engine.question import STAGES, Question
from rawattn.reference.dense import allowed

ALL = tuple(STAGES)


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    if not question.sparse:
        return
    different = Different(question)
    for name, variant, change in usual(question):
        if different(change(lists_of(question))):
            yield Bug(name, variant, ALL, see=instead(walking(change)))
    yield from _readings(question)
    yield from _keys(question)
    yield from places.bugs(question)
    yield from inverted_lists.bugs(question)
    yield from gates.bugs(question)


# ---- how block_indices is read ----------------------------------------------------------------


def _readings(question: Question) -> Iterator[Bug]:
    """Another array that the same memory is taken for."""
    seen = {np.asarray(question.block_indices).astype(np.int64).tobytes()}
    for text in USUAL_READINGS:
        read = READINGS[text]
        indices = read(question)
        if indices is not None and indices.tobytes() not in seen:
            seen.add(indices.tobytes())
            see = instead(_with_indices(read))
            yield Bug("input-layout", f"block_indices, {text}", ALL, see=see)


def _with_indices(read: Callable[[Question], np.ndarray | None]) -> Views:
    """The views with these indices, which may have other heads; factors stay where they are."""

    def change(question: Question) -> Question:
        indices, counts = read(question), question.block_counts
        if indices is None:
            return question
        if counts is not None:
            heads = counts.shape[1]
            counts = np.asarray(counts)[:, np.arange(indices.shape[1]) * heads // indices.shape[1]]
        return replace(question, block_indices=indices, block_counts=counts)

    views = of_question(change)

    def others(question: Question) -> tuple[Question, Sequence[View]]:
        source, found = views(question)
        right = (view.selections for view in views_of(question))
        return source, [
            replace(view, selections=selections)
            for view, selections in zip(found, right, strict=True)
        ]

    return others


# ---- which keys a block has -------------------------------------------------------------------


def _keys(question: Question) -> Iterator[Bug]:
    lengths = [n for n in question.lengths_k if n]
    partial = any(n % question.block_size for n in lengths)
    if partial and not question.causal and question.batch > 1:
        yield Bug("neighbour-leak", "up to the end of the last block or of k", ALL, see=_leaking)
    if question.batch > 1:
        yield Bug("offsets-shifted", "k and v without the sequence's offset", ALL, see=_first_keys)
        shifted = _of_keys(lambda block, size, first: block * size - first, packed=True)
        yield Bug("offsets-shifted", "blocks of the packed array", ALL, see=instead(shifted))
    if any(n > question.block_size for n in lengths):
        for text, place in PLACES.items():
            yield Bug("wrong-keys", text, ALL, see=instead(_of_keys(place)))
        if partial:
            yield Bug(
                "wrong-keys", "the last block ends where k does", ALL, see=instead(_moved_end)
            )


def _leaking(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """Whoever names the last block sees what lies behind it in k, as far as there is something."""
    found = []
    for view in views:
        missing = -question.lengths_k[view.sequence] % question.block_size
        stop = int(question.cu_seqlens_k[view.sequence + 1])
        keys = stop + np.arange(min(missing, len(question.k) - stop))
        last = view.keys == stop - 1
        if view.slot is None or not len(keys) or not last.any():
            found.append(view)
            continue
        weight = np.where(np.asarray(view.slot) >= 0, view.weight, 0.0)[..., last].max(axis=2)
        slot = np.asarray(view.slot)[..., last].max(axis=2)
        shape = (*weight.shape, len(keys))
        found.append(
            replace(
                view,
                keys=np.concatenate([view.keys, keys]),
                weight=np.concatenate(
                    [view.weight, np.broadcast_to(weight[..., None], shape)], axis=2
                ),
                slot=np.concatenate([view.slot, np.broadcast_to(slot[..., None], shape)], axis=2),
            )
        )
    return found


def _first_keys(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """Keys and values at the rows of the first sequence."""
    starts = question.cu_seqlens_k
    return [
        view
        if view.slot is None
        else replace(view, keys=np.where(view.keys < 0, -1, view.keys - starts[view.sequence]))
        for view in views
    ]


Place = Callable[[np.ndarray, int, int], np.ndarray]

PLACES: dict[str, Place] = {  # the first key of a block of so many, in a sequence from ``first``
    "blocks start at twice the block_size": lambda block, size, first: 2 * size * block,
    "blocks start at half the block_size": lambda block, size, first: size // 2 * block,
}


def _of_keys(place: Place, packed: bool = False) -> Views:
    """Named blocks that start at another key; the own block stays."""

    def others(question: Question) -> tuple[Question, Sequence[View]]:
        lists, size, found = lists_of(question), question.block_size, []
        for view in views_of(question):
            length_q, length_k = (
                n[view.sequence] for n in (question.lengths_q, question.lengths_k)
            )
            not_after = allowed(length_q, length_k, (-1, 0))
            key = np.arange(length_k)
            first = int(question.cu_seqlens_k[view.sequence]) if packed else 0
            weight, slot = np.zeros((2, len(view.heads), length_q, length_k))
            slot -= 1
            named = lists.named[view.rows][:, view.selections].swapaxes(0, 1)
            counted = lists.counted[view.rows][:, view.selections].swapaxes(0, 1)
            for entry in range(named.shape[2] - 1, -1, -1):
                there = (named[..., entry] >= 0) & counted[..., entry]
                start = place(named[..., entry], size, first)[..., None]
                seen = there[..., None] & (key >= start) & (key < start + size)
                seen &= not_after | (not question.causal)
                weight[seen], slot[seen] = 1, entry
            if question.own:
                block = key // size
                own = block == (np.arange(length_q) + length_k - length_q)[:, None] // size
                own = own & not_after & (weight == 0)
                weight[own] = 1
            found.append(replace(view, weight=weight, slot=slot.astype(np.int64)))
        return question, found

    return others


def _moved_end(question: Question) -> tuple[Question, Sequence[View]]:
    """The last block, moved so that it is whole: keys of the one before are seen with it."""
    found = []
    for view in views_of(question):
        length_q, length_k = (n[view.sequence] for n in (question.lengths_q, question.lengths_k))
        size = question.block_size
        weight, slot = view.weight.copy(), np.asarray(view.slot).copy()
        if length_k % size and length_k > size:
            inside = np.arange(length_k) >= length_k - size
            last = np.arange(length_k) >= length_k // size * size
            sees = np.where(slot >= 0, weight, 0.0)[..., last].max(axis=2, keepdims=True) > 0
            not_after = allowed(length_q, length_k, (-1, 0)) | (not question.causal)
            more = sees & inside & ~last & not_after
            new = more & (weight == 0)
            weight[more] += 1
            slot[new] = np.broadcast_to(slot[..., last].max(axis=2, keepdims=True), slot.shape)[new]
        found.append(replace(view, weight=weight, slot=slot))
    return question, found
