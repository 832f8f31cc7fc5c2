"""Other keys than those of a block: blocks that start elsewhere, are of another size, or reach
beyond the end of a sequence."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue.sparse.lists import OWN, Cover, Entry, Lists, Walk, walked
from rawattn.check.diagnose.engine.question import Question


class Row(NamedTuple):
    """A class, words, and the keys of the blocks of other lists."""

    name: str
    words: str
    cover: Cover
    walk: Walk


def _same(lists: Lists) -> Lists:
    return lists


def _unbounded(lists: Lists) -> Lists:
    """Blocks that the sequence does not have too, and the own block."""
    return walked(lists, (lists.named >= 0) & lists.counted, 1)


def _own_by(size: int, by_row: bool = False) -> Walk:
    """The own block by another size, or by the number of the query, not its place."""

    def walk(lists: Lists) -> Lists:
        own, blocks = (lists.row if by_row else lists.place) // size, -(-lists.length_k // size)
        own = np.where((own >= 0) & (own < blocks), own, -1)
        return walked(replace(lists, own=own, blocks=np.where(lists.blocks > 0, blocks, 0)))

    return walk


def rows(question: Question) -> Iterator[Row]:
    """All of them; some show nothing."""
    yield from _past_the_end(question)
    yield from _other_starts(question)
    yield from _other_sizes(question)
    yield from _by_rows(question)


def _past_the_end(question: Question) -> Iterator[Row]:
    """Keys that complete the last block of a sequence: zeros, or what lies there."""

    def completed(own: bool, beyond: str) -> Cover:
        def keys(e: Entry) -> np.ndarray:
            start = (e.length - 1) // e.size * e.size
            whole = e.open[..., start : start + 1] & (e.block == start // e.size)
            behind = whole & (e.key >= e.length) & ((e.slot != OWN) | own)
            return np.asarray(e.right | behind)

        return Cover(keys, beyond)

    name, text = "sparse-partial-block-zeros", "up to the end of the last block"
    yield Row(name, "where it is selected", completed(False, "zeros"), _same)
    yield Row(name, "where it is seen", completed(True, "zeros"), _same)
    yield Row("neighbour-leak", text, completed(False, "memory"), _same)
    if not question.causal:
        yield Row("neighbour-leak", f"{text} or of k", completed(False, "k"), _same)


def _starting(
    start: Callable[[Entry], np.ndarray], width: int, own: bool = True, once: bool = False
) -> Cover:
    """Blocks of ``width`` keys from another one on; ``own``: the own block too."""

    def keys(e: Entry) -> np.ndarray:
        at = start(e)
        there = (e.key >= at) & (e.key < at + width) & e.open & (e.key < e.length)
        return np.asarray(there) if own else np.where(e.slot == OWN, e.right, there)

    return Cover(keys, once=once)


def _other_starts(question: Question) -> Iterator[Row]:
    """Blocks that start at another key, the own block too or not."""
    size, text = question.block_size, "blocks start at multiples of block_size of the packed array"
    for own, part in ((True, ", the own block too"), (False, "")):
        down = _starting(lambda e: e.block * e.size - e.first % e.size, size, own)
        up = _starting(lambda e: e.block * e.size + -e.first % e.size, size, own)
        yield Row("offsets-shifted", f"{text}{part}", down, _same)
        yield Row("offsets-shifted", f"{text}, rounded up{part}", up, _same)
        leak = f"{text}{part}: keys before the sequence are seen"
        yield Row("neighbour-leak", leak, down._replace(beyond="before"), _same)
    starts: dict[tuple[str, str], Callable[[Entry], np.ndarray]] = {
        ("offsets-shifted", "blocks of the packed array"): lambda e: e.block * e.size - e.first,
        ("wrong-keys", "blocks start at twice the block_size"): lambda e: 2 * e.size * e.block,
        ("wrong-keys", "blocks start at half the block_size"): lambda e: e.size // 2 * e.block,
    }
    for (name, text), start in starts.items():
        yield Row(name, text, _starting(start, size, own=False, once=True), _unbounded)


def _other_sizes(question: Question) -> Iterator[Row]:
    """Blocks in units of another size than theirs."""
    size, longest = question.block_size, max(question.lengths_k, default=0)
    for other in sorted({size // 2, 2 * size, 4 * size} - {0}):
        text = f"blocks of {other} keys in place of {size}"
        for part, walk, own in (
            ("", _own_by(other), True),
            (", the own block's number of the right size", _same, True),
            (", but for the own block", _same, False),
        ):
            if size < longest and (other < longest or part):  # else all may be seen
                yield Row("wrong-keys", f"{text}{part}", _starting(_at(other), other, own), walk)


def _at(size: int) -> Callable[[Entry], np.ndarray]:
    return lambda e: e.block * size


def _by_rows(question: Question) -> Iterator[Row]:
    """The number of a query in its sequence for its place among the keys."""
    name, by_row = "sparse-own-block-missing", _own_by(question.block_size, by_row=True)

    def right(e: Entry) -> np.ndarray:
        return e.right

    def top_left(e: Entry) -> np.ndarray:
        return np.asarray((e.key // e.size == e.block) & (e.key <= e.row))

    def own_alone(e: Entry) -> np.ndarray:
        return np.where(e.slot == OWN, top_left(e), e.right)

    if question.causal:
        yield Row("causal-alignment", "top-left", Cover(top_left), by_row)
        text = "top-left, but for the own block's number"
        yield Row("causal-alignment", text, Cover(top_left), _same)
    text = "the block of the query's number in its place, without seqlen_k - seqlen_q"
    yield Row(name, text, Cover(right), by_row)
    yield Row(name, f"{text}, up to that number", Cover(own_alone), by_row)
