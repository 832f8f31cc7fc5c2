"""Which tokens each rank has: ranges of the packed batch, in the order in which they lie there."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

Range = tuple[int, int]  # first token, and the one behind the last
Ranges = list[Range]


class Piece(NamedTuple):
    """Tokens of one sequence that lie together on a rank: those from ``start`` to ``stop``, counted
    from where the sequence begins; ``row`` is the first one's place on the rank."""

    sequence: int
    start: int
    stop: int
    row: int


def contiguous(cu_seqlens: Sequence[int], ranks: int, least: int) -> list[Ranges]:
    """Equal shares of the batch as it lies. Only what a cut goes through is wanted elsewhere."""
    del least
    total = cu_seqlens[-1]
    return [[(total * r // ranks, total * (r + 1) // ranks)] for r in range(ranks)]


def zigzag(cu_seqlens: Sequence[int], ranks: int, least: int) -> list[Ranges]:
    """Equal shares of tokens, and of a causal mask's work on each long sequence.

    A sequence of 2 x ranks chunks of ``least`` tokens or more is cut into as many equal ones, and
    the rank r has its chunks r and 2 ranks - 1 - r. What is shorter stays as it lies, in shares
    that make the tokens equal. A rank has first these, then its early chunks, then the late ones,
    so that what can be computed together lies together.
    """
    spans = list(pairwise(cu_seqlens))
    long = [span for span in spans if span[1] - span[0] >= max(2 * ranks * least, 1)]
    short = [span for span in spans if span[1] - span[0] < max(2 * ranks * least, 1)]
    chunks = 2 * ranks

    def chunk(span: Range, n: int) -> Range:
        start, length = span[0], span[1] - span[0]
        return start + length * n // chunks, start + length * (n + 1) // chunks

    early = [[chunk(span, r) for span in long] for r in range(ranks)]
    late = [[chunk(span, chunks - 1 - r) for span in long] for r in range(ranks)]
    total, left = cu_seqlens[-1], _joined(short)
    shares = []
    for r in range(ranks):
        there = sum(stop - start for start, stop in early[r] + late[r])
        room = total * (r + 1) // ranks - total * r // ranks - there
        own, left = _first(left, room) if r < ranks - 1 else (left, [])
        shares.append(_joined(own + early[r]) + _joined(late[r]))
    return shares


def _joined(ranges: Ranges) -> Ranges:
    """The same tokens, where one range ends at the next one's beginning as one."""
    joined: Ranges = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _first(ranges: Ranges, room: int) -> tuple[Ranges, Ranges]:
    """The first ``room`` tokens, and the others."""
    own: Ranges = []
    for n, (start, stop) in enumerate(ranges):
        if room <= 0:
            return own, ranges[n:]
        cut = min(stop, start + room)
        own.append((start, cut))
        room -= cut - start
        if cut < stop:
            return own, [(cut, stop), *ranges[n + 1 :]]
    return own, []


LAYOUTS: dict[str, Callable[[Sequence[int], int, int], list[Ranges]]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
}


def pieces(ranges: Ranges, cu_seqlens: Sequence[int]) -> list[Piece]:
    """The ranges cut where sequences begin, without those that are empty."""
    found, row = [], 0
    for start, stop in ranges:
        sequence = bisect_right(cu_seqlens, start) - 1
        while start < stop:
            begins, ends = cu_seqlens[sequence], min(cu_seqlens[sequence + 1], stop)
            if start < ends:
                found.append(Piece(sequence, start - begins, ends - begins, row))
                row, start = row + ends - start, ends
            sequence += 1
    return found
