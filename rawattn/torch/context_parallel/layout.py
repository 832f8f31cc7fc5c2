"""Which tokens each rank has: ranges of the packed batch, in the order in which they lie there."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from math import inf
from typing import NamedTuple

from rawattn.torch.context_parallel.dealing import WITHIN, Hands, Part, dealt, laid

Range = tuple[int, int]  # first token, and the one behind the last
Ranges = list[Range]
Offsets = Mapping[str, Sequence[int]]  # by "q" and "k", of the whole batch


class Piece(NamedTuple):
    """Tokens of one sequence that lie together on a rank: those from ``start`` to ``stop``, counted
    from where the sequence begins; ``row`` is the first one's place on the rank."""

    sequence: int
    start: int
    stop: int
    row: int


def contiguous(offsets: Offsets, ranks: int, least: int) -> dict[str, list[Ranges]]:
    """Equal shares of the batch as it lies. Only what a cut goes through is wanted elsewhere."""
    del least

    def shares(total: int) -> list[Ranges]:
        return [[(total * r // ranks, total * (r + 1) // ranks)] for r in range(ranks)]

    return {side: shares(cu_seqlens[-1]) for side, cu_seqlens in offsets.items()}


def zigzag(offsets: Offsets, ranks: int, least: int) -> dict[str, list[Ranges]]:
    """Equal shares of tokens, and of a causal mask's work, by as few cuts as do.

    Of the longest documents each rank r has the chunks r and 2 ranks - 1 - r of 2 x ranks equal
    ones, of ``least`` tokens or more; the others are dealt out whole but for one cut between two
    ranks. Where no way is within a hundredth of equal work, the best one is taken. Keys go where
    the same part of their sequence's queries does; where there are none, by turns.
    """
    lengths = {side: [b - a for a, b in pairwise(x)] for side, x in offsets.items()}
    hands = _shared([Part(n, 0, stop) for n, stop in enumerate(lengths["q"])], ranks, least)
    of_keys = [
        [_scaled(part, lengths["q"][part.document], lengths["k"][part.document]) for part in hand]
        for hand in hands
    ]
    for n, (count, keys) in enumerate(zip(lengths["q"], lengths["k"], strict=True)):
        if count == 0:
            of_keys[n % ranks].append(Part(n, 0, keys))
    return {
        "q": [_in_order(hand, offsets["q"]) for hand in hands],
        "k": [_in_order(hand, offsets["k"]) for hand in of_keys],
    }


def _shared(documents: list[Part], ranks: int, least: int) -> Hands:
    """The ranks' parts; as many of the longest documents in chunks as it takes."""
    by_length = sorted(documents, key=lambda part: -part.tokens)
    long = sum(part.tokens >= max(2 * ranks * least, 1) for part in documents)
    total, work = (sum(getattr(x, name) for x in documents) for name in ("tokens", "work"))
    least_work, best, count = inf, [[*documents]], 0
    while least_work > (1 + WITHIN) * work / ranks:
        chunks = _chunks(by_length[:count], ranks)
        rooms = [
            total * (r + 1) // ranks - total * r // ranks - sum(part.tokens for part in own)
            for r, own in enumerate(chunks)
        ]
        for deal in (laid, dealt):
            rest = deal(sorted(by_length[count:]), rooms)
            hands = [] if rest is None else [a + b for a, b in zip(chunks, rest, strict=True)]
            most = max((sum(part.work for part in hand) for hand in hands), default=inf)
            if most < least_work:
                least_work, best = most, hands
        if count == long:
            break
        count = min(long, count + max(1, count // 4))
    return best


def _chunks(documents: list[Part], ranks: int) -> Hands:
    hands: Hands = [[] for _ in range(ranks)]
    for document, _, length in documents:
        cuts = [length * n // (2 * ranks) for n in range(2 * ranks + 1)]
        for n, (start, stop) in enumerate(pairwise(cuts)):
            hands[min(n, 2 * ranks - 1 - n)].append(Part(document, start, stop))
    return hands


def _scaled(part: Part, of: int, to: int) -> Part:
    return Part(part.document, part.start * to // of, part.stop * to // of)


def _in_order(hand: list[Part], cu_seqlens: Sequence[int]) -> Ranges:
    """Whole sequences, then beginnings, then what needs others' keys in any case, so that what can
    be computed together lies together; of a sequence no two runs in one of these."""
    kinds: dict[int, Ranges] = {}
    for document, parts in groupby(sorted(hand), key=lambda part: part.document):
        begin, end = cu_seqlens[document : document + 2]
        runs = _joined([(begin + part.start, begin + part.stop) for part in parts])
        for turn, run in enumerate(runs):
            kind = 0 if run == (begin, end) else 1 if run[0] == begin else 2 + turn
            kinds.setdefault(kind, []).append(run)
    return [run for kind in sorted(kinds) for run in _joined(kinds[kind])]


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


LAYOUTS: dict[str, Callable[[Offsets, int, int], dict[str, list[Ranges]]]] = {
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
