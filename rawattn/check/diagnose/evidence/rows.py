"""Rows of a side, or of a tensor: what rules of them are made of, and those taken for others."""

from collections.abc import Callable
from functools import cached_property

import numpy as np

from rawattn.check.diagnose.engine.question import Question, side_of
from rawattn.check.diagnose.evidence.places import TILES, of_tiles
from rawattn.check.diagnose.evidence.reach import Reach
from rawattn.check.diagnose.evidence.rules import Rule, Shown, rule_of

Array = np.ndarray
FEW = 3  # distances, at most
NOWHERE = 1 << 40  # so far away are zeros


class Rows:
    """Rows of q, of k and v, or of a tensor, like ``Places``: (1, rows); with ``heads`` also what
    depends on these, (heads, rows), and on who sees whom."""

    def __init__(self, question: Question, of: str, heads: int = 0) -> None:
        self.side = "k" if of == "v" else side_of(of)
        self.question, self.heads = question, heads
        self.b = question.sequence_of(self.side)
        self.inside, self.n = (self.b >= 0)[None], np.diff(question.offsets(self.side))[self.b]
        place = question.place_of(self.side)[None]
        self.j = np.repeat(place, heads, axis=0) if heads else place

    @cached_property
    def features(self) -> dict[str, Callable[[], Array]]:
        j, n, at, size = self.j[:1], self.n, "ij"[self.side == "k"], f"seqlen_{self.side}"
        found = {at: lambda: j, f"{size} - 1 - {at}": lambda: n - 1 - j}
        found |= self._of_heads() if self.heads else {}
        for t in TILES:
            found |= of_tiles(at, j, size, n, t)
        return found

    def _of_heads(self) -> dict[str, Callable[[], Array]]:
        q, b, h = self.question, self.b, np.arange(self.heads)[:, None]
        reach, (of_q, of_k) = Reach(q), (np.asarray(x)[b][None] for x in (q.lengths_q, q.lengths_k))
        found: dict[str, Callable[[], Array]] = {}
        if self.side == "k":
            found["whether a query sees it"] = lambda: reach.seen.T.astype(int)
        elif self.heads == q.num_heads_q:
            found["keys seen"] = lambda: reach.count.T
        found |= {"seqlen_q": lambda: of_q, "seqlen_k": lambda: of_k}
        found |= {"seqlen_k - seqlen_q": lambda: of_k - of_q, "the sequence": lambda: b[None]}
        if self.heads == q.num_heads_q and q.group > 1:
            found[f"h % {q.group}"] = lambda: h % q.group
            other = f"whether h % {q.num_heads_kv} is not h // {q.group}"
            found[other] = lambda: (h % q.num_heads_kv != h // q.group).astype(int)
        return found

    def feature(self, name: str) -> Array:
        return np.asarray(self.features[name]())


def moves_of(question: Question, of: str, taken: Array) -> dict[int, Rule] | None:
    """Distances of moved rows, each with a rule for the rows that are; taken: for every row the one
    that is, -1 where that is not known."""
    places = Rows(question, of)
    by = np.where(taken >= 0, taken - np.arange(len(taken)), 0)[None]
    known = (taken >= 0)[None] & places.inside
    distances = sorted({*by.ravel().tolist()} - {0}, key=abs)
    found: dict[int, Rule] = {}
    for distance in distances[: FEW + 1]:
        rule = rule_of(Shown(places, known, (by == distance) & known))
        if rule is None:
            return None
        found[distance] = rule
    return found if 0 < len(distances) <= FEW else None


def in_words(moves: dict[int, Rule], of: str) -> str:
    """Which row is taken where."""
    index = "i" if of == "q" else "j"
    by = {by: f"{index} {'-+'[by > 0]} {abs(by)}" for by in moves} | {NOWHERE: "zeros"}
    return "; ".join(f"{by[distance]} for {rule}" for distance, rule in moves.items())
