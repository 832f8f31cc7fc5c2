"""Which rows meet which keys, in how many calls: a mask's work on pieces of sequences.

Row i of a sequence may see the keys from i + o - left to i + o + right, where o = seqlen_k -
seqlen_q. A call computes pieces of rows, each beside a run of keys, and its own mask is aligned at
the end of these. Rows up to i1 and keys up to b there have an o that is larger by
shift = b - (i1 + o), so that the window is (left + shift, right - shift): pieces of one shift go
into one call. Where all rows of a piece see all of its keys, any wider window does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rawattn.torch.context_parallel.layout import Piece, Range

Window = tuple[int, int]
OPEN = -1


class Lengths(NamedTuple):
    """Of all sequences."""

    q: Sequence[int]
    k: Sequence[int]


class Segment(NamedTuple):
    """A run of keys of one sequence in the buffer of a stage."""

    sequence: int
    start: int
    stop: int


class Meeting(NamedTuple):
    """The rows of a sequence from ``start`` on, the first of them at ``row`` of the rank, and the
    keys up to ``end`` of a segment, which all that they may see of it are among."""

    start: int
    stop: int
    row: int
    segment: int
    end: int


@dataclass
class Side:
    """How far a call's mask reaches on one side: exactly so far, or anything from ``least`` on."""

    exact: int | None
    least: int = 0

    def does(self, other: "Side") -> bool:
        """Whether there is a reach that does for both."""
        if self.exact is None or other.exact is None:
            return all(x.exact is None or x.exact >= y.least for x, y in _both(self, other))
        return self.exact == other.exact

    def with_(self, other: "Side") -> "Side":
        exact = other.exact if self.exact is None else self.exact
        return Side(exact, max(self.least, other.least))


def _both(a: Side, b: Side) -> tuple[tuple[Side, Side], ...]:
    return (a, b), (b, a)


@dataclass
class Call:
    """Meetings whose rows and segments both ascend, none of either twice, under one mask."""

    left: Side
    right: Side
    meetings: list[Meeting] = field(default_factory=list)

    @property
    def window(self) -> Window:
        left, right = (OPEN if side.exact is None else side.exact for side in self.sides)
        return left, right

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.left, self.right

    def takes(self, left: Side, right: Side, other: Meeting) -> bool:
        last = self.meetings[-1]
        ascends = last.segment < other.segment and last.row + last.stop - last.start <= other.row
        return ascends and self.left.does(left) and self.right.does(right)


class Stage(NamedTuple):
    """Keys that are there at once, and what is computed with them."""

    segments: list[Segment]
    calls: list[Call]


def stage(
    pieces: Iterable[Piece], there: Sequence[Sequence[Range]], lengths: Lengths, window: Window
) -> Stage:
    """All that ``pieces`` have to do with the keys of each sequence that are ``there``."""
    seen: list[tuple[tuple[int, int], Piece, Range]] = []
    wanted: dict[tuple[int, int], list[Range]] = {}  # by sequence and run of keys
    for piece in pieces:
        offset = lengths.k[piece.sequence] - lengths.q[piece.sequence]
        for n, keys in enumerate(there[piece.sequence]):
            met = _meet(piece, keys, offset, window)
            if met is not None:
                where = piece.sequence, n
                seen.append((where, *met))
                wanted.setdefault(where, []).append(met[1])
    segments: list[Segment] = []
    of_run: dict[tuple[int, int], list[int]] = {}
    for where, runs in wanted.items():
        for run in union(runs):
            of_run.setdefault(where, []).append(len(segments))
            segments.append(Segment(where[0], *run))
    calls: list[Call] = []
    for where, piece, (start, stop) in seen:
        n = next(n for n in of_run[where] if start < segments[n].stop)
        meeting = Meeting(piece.start, piece.stop, piece.row, n, stop)
        shift = stop - piece.stop - lengths.k[piece.sequence] + lengths.q[piece.sequence]
        _place(calls, meeting, stop - segments[n].start, shift, window)
    return Stage(segments, calls)


def _meet(piece: Piece, keys: Range, offset: int, window: Window) -> tuple[Piece, Range] | None:
    """The rows of a piece that see any of the keys, and the keys that any of these rows sees."""
    left, right = window
    start = piece.start if right == OPEN else max(piece.start, keys[0] - offset - right)
    stop = piece.stop if left == OPEN else min(piece.stop, keys[1] - offset + left)
    if start >= stop:
        return None
    first = keys[0] if left == OPEN else max(keys[0], start + offset - left)
    end = keys[1] if right == OPEN else min(keys[1], stop + offset + right)
    if first >= end:
        return None
    return Piece(piece.sequence, start, stop, piece.row + start - piece.start), (first, end)


def within(piece: Piece, runs: Sequence[Range], lengths: Lengths, window: Window) -> bool:
    """Whether all keys that a piece sees are in one of the ``runs``."""
    keys = lengths.k[piece.sequence]
    met = _meet(piece, (0, keys), keys - lengths.q[piece.sequence], window)
    return met is None or any(a <= met[1][0] and met[1][1] <= b for a, b in runs)


def union(runs: list[Range]) -> list[Range]:
    """Runs that touch or overlap as one."""
    joined: list[Range] = []
    for start, stop in sorted(runs):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _place(calls: list[Call], meeting: Meeting, keys: int, shift: int, window: Window) -> None:
    """Into a call whose mask does, or else a new one. ``keys`` of its segment are in use."""
    rows = meeting.stop - meeting.start
    reaches = window[0] + shift, window[1] - shift
    left, right = (
        Side(None, least) if side == OPEN or reach >= least else Side(reach)
        for side, reach, least in zip(window, reaches, (keys - 1, rows - 1), strict=True)
    )
    for call in calls:
        if call.takes(left, right, meeting):
            call.left, call.right = call.left.with_(left), call.right.with_(right)
            call.meetings.append(meeting)
            return
    calls.append(Call(left, right, [meeting]))


def pairs(rows: Range, keys: Range, offset: int, window: Window) -> int:
    """How many of the ``keys`` of a sequence its ``rows`` see in all."""
    (start, stop), (first, end), (left, right) = rows, keys, window

    def before(distance: int) -> int:
        """i + ``distance``, but no less than the first key and no more than the end, summed."""
        low = min(max(first - distance - start, 0), stop - start)
        high = min(max(stop - end + distance, 0), stop - start - low)
        i, j = start + low, stop - high
        return low * first + high * end + (i + j - 1 + 2 * distance) * (j - i) // 2

    ends = (stop - start) * end if right == OPEN else before(offset + right + 1)
    return ends - ((stop - start) * first if left == OPEN else before(offset - left))
