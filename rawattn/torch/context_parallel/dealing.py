"""Documents dealt to ranks whole: equal tokens and equal work of a causal mask, by few cuts.

Row i of a document sees i + 1 keys, so that tokens from ``start`` to ``stop`` of it are that many
rows and work that grows with their place. Two ranks that hold whole documents are made equal in
both by one document that they share: the one has a first and a last part of it, the other what is
between, and how long the two parts are follows from the tokens and the work that are missing.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

WITHIN = 0.01  # of a rank's share: work that may be missing


class Part(NamedTuple):
    """Tokens of a document that lie together, counted from where it begins."""

    document: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def work(self) -> int:
        """Keys that its rows see."""
        return (self.stop * (self.stop + 1) - self.start * (self.start + 1)) // 2


Hands = list[list[Part]]


class Cut(NamedTuple):
    """Of a part: so many tokens from its beginning and its end to the one, the rest to the other.

    excess: the work that the one then has too much. moved: keys that come from the other.
    """

    part: Part
    first: int
    last: int
    excess: float
    moved: int


def laid(documents: Sequence[Part], tokens: Sequence[int]) -> Hands:
    """As they lie, so many ``tokens`` for each rank; what is left goes to the last."""
    hands: Hands = [[] for _ in tokens]
    rank, room = 0, tokens[0]
    for document, start, stop in documents:
        while start < stop:
            while room <= 0 and rank < len(tokens) - 1:
                rank += 1
                room = tokens[rank]
            end = stop if rank == len(tokens) - 1 else min(stop, start + room)
            hands[rank].append(Part(document, start, end))
            room -= end - start
            start = end
    return hands


def dealt(documents: Sequence[Part], tokens: Sequence[int]) -> Hands | None:
    """The longest first, to and fro, then each rank made equal with the next by a cut; None where
    one cut does not do."""
    ranks = len(tokens)
    hands: Hands = [[] for _ in tokens]
    for n, part in enumerate(sorted(documents, key=lambda part: -part.tokens)):
        turn, at = divmod(n, ranks)
        hands[ranks - 1 - at if turn % 2 else at].append(part)
    left = sum(part.work for part in documents)
    for rank, (hand, after) in enumerate(pairwise(hands)):
        share = left / (ranks - rank)
        cuts = _cuts(hand, after, tokens[rank], share)
        if not cuts:
            return None
        cut = min(cuts, key=lambda cut: (max(abs(cut.excess), WITHIN / 2 * share), cut.moved))
        for held in (hand, after):
            if cut.part in held:
                held.remove(cut.part)
        document, start, stop = cut.part
        inner = Part(document, start + cut.first, stop - cut.last)
        hand += [Part(document, start, inner.start), Part(document, inner.stop, stop)]
        after.append(inner)
        hand[:], after[:] = ([part for part in held if part.tokens] for held in (hand, after))
        left -= sum(part.work for part in hand)
    return hands if sum(part.tokens for part in hands[-1]) == tokens[-1] else None


def _cuts(hand: Sequence[Part], after: Sequence[Part], tokens: int, work: float) -> list[Cut]:
    """Ways to give ``hand`` so many tokens, and about so much work."""
    found = []
    held = sum(part.tokens for part in hand), sum(part.work for part in hand)
    for part in (*hand, *after):
        own = part in hand
        count = tokens - held[0] + own * part.tokens
        if not 0 <= count <= part.tokens:
            continue
        missing = work - held[1] + own * part.work
        # with all of them at the end; a token at the beginning in the place of one there is less
        least_first = Part(part.document, part.stop - count, part.stop).work
        step = max(part.tokens - count, 1)
        exact = min(max(round((least_first - missing) / step), 0), count)
        for first in {0, exact, count}:
            inner = Part(part.document, part.start + first, part.stop - count + first)
            moved = (inner.tokens if first < count else 0) + (first if inner.tokens else 0)
            found.append(Cut(part, first, count - first, part.work - inner.work - missing, moved))
    return found
