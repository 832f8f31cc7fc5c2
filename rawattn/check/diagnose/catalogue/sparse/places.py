"""Where the keys of a block lie, other than where they should; in which block a query's own is."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.catalogue.sparse.lists import (
    OWN,
    Cover,
    Entry,
    Lists,
    Walk,
    first_of,
    walked,
    walking,
)
from rawattn.check.diagnose.catalogue.sparse.selection import Change, instead, of_question
from rawattn.check.diagnose.engine.attention import Bug
from rawattn.check.diagnose.engine.question import STAGES, Question

ALL = tuple(STAGES)


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    yield from _aligned(question)
    yield from _sizes(question)
    if question.lengths_q != question.lengths_k:
        yield from _without_offset(question)


def _cut(question: Question, entry: Entry) -> np.ndarray:
    """Keys that are not hidden from a query: behind it, of named blocks in causal attention."""
    hidden = (entry.key > entry.place) & ((entry.slot == OWN) | question.causal)
    return np.asarray(~hidden)


def _right(question: Question, entry: Entry) -> np.ndarray:
    inside = entry.key // question.block_size == entry.block
    return np.asarray(inside & _cut(question, entry))


def _same(lists: Lists) -> Lists:
    return lists


# ---- other addresses --------------------------------------------------------------------------


def _aligned(question: Question) -> Iterator[Bug]:
    """Blocks at multiples of block_size in the packed array: those that the sequence's first key is
    in and behind it, or those behind it alone."""
    size, offsets = question.block_size, np.asarray(question.cu_seqlens_k)[:-1]
    if not (offsets % size).any():
        return
    text = "blocks start at multiples of block_size of the packed array"
    for rounded, up in (("", False), (", rounded up", True)):
        for part, own in ((", the own block too", True), ("", False)):
            cover = _at_multiples(question, up, own)
            see = instead(walking(_same, cover))
            yield Bug("offsets-shifted", f"{text}{rounded}{part}", ALL, see=see)
            if not up:
                see = instead(walking(_same, cover, before=True))
                leak = f"{text}{part}: keys before the sequence are seen"
                yield Bug("neighbour-leak", leak, ALL, see=see)


def _at_multiples(question: Question, up: bool, own: bool) -> Cover:
    size = question.block_size

    def cover(entry: Entry) -> np.ndarray:
        shift = -entry.first % size if up else -(entry.first % size)
        start = entry.block * size + np.where((entry.slot == OWN) & (not own), 0, shift)
        there = (entry.key >= start) & (entry.key < start + size)
        return np.asarray(there & _cut(question, entry))

    return cover


def _sizes(question: Question) -> Iterator[Bug]:
    """Indices in units of another block_size than theirs."""
    size, longest = question.block_size, max(question.lengths_k, default=0)
    for other in sorted({size // 2, 2 * size, 4 * size} - {0}):
        if size >= longest:
            continue
        text = f"blocks of {other} keys in place of {size}"
        if other < longest:  # else everything may be seen, for many reasons
            yield Bug("wrong-keys", text, ALL, see=instead(of_question(_of_size(other))))
        if question.own:
            for part, own in ((", the own block's number of the right size", True), ("", False)):
                part = part or ", but for the own block"
                see = instead(walking(_same, _of_other_size(question, other, own)))
                yield Bug("wrong-keys", f"{text}{part}", ALL, see=see)


def _of_size(size: int) -> Change:
    return lambda question: replace(question, block_size=size)


def _of_other_size(question: Question, size: int, own: bool) -> Cover:
    def cover(entry: Entry) -> np.ndarray:
        there = (entry.key // size == entry.block) & _cut(question, entry)
        if own:
            return np.asarray(there)
        return np.where(entry.slot == OWN, _right(question, entry), there)

    return cover


# ---- seqlen_k - seqlen_q left out --------------------------------------------------------------


def _without_offset(question: Question) -> Iterator[Bug]:
    """The number of a query in its sequence for its place among the keys."""
    if question.causal:
        own = _own_by_row(question) if question.own else _same
        see = instead(walking(own, _top_left(question)))
        yield Bug("causal-alignment", "top-left", ALL, see=see)
        if question.own:
            see = instead(walking(_same, _top_left(question)))
            yield Bug("causal-alignment", "top-left, but for the own block's number", ALL, see=see)
    if question.own:
        text = "the block of the query's number in its place, without seqlen_k - seqlen_q"
        name = "sparse-own-block-missing"
        yield Bug(name, text, ALL, see=instead(walking(_own_by_row(question))))
        see = instead(walking(_own_by_row(question), _own_top_left(question)))
        yield Bug(name, f"{text}, up to that number", ALL, see=see)


def _top_left(question: Question) -> Cover:
    return lambda entry: (entry.key // question.block_size == entry.block) & (entry.key <= entry.i)


def _own_top_left(question: Question) -> Cover:
    def cover(entry: Entry) -> np.ndarray:
        own = entry.slot == OWN
        return np.where(own, _top_left(question)(entry), _right(question, entry))

    return cover


def _own_by_row(question: Question) -> Walk:
    sequence = question.sequence_of("q")
    starts = np.array([*np.asarray(question.cu_seqlens_q)[:-1], 0])[sequence]
    number = ((np.arange(len(sequence)) - starts) // question.block_size)[:, None, None]

    def walk(lists: Lists) -> Lists:
        own = np.where((lists.blocks > 0) & (number < lists.blocks), number, -1)
        times = lists.exists & first_of(lists.named, lists.exists)
        found = walked(replace(lists, own=own), times)
        return replace(found, own=lists.own)

    return walk
