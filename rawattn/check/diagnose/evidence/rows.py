"""Rows of a side, or of a tensor: what rules of them are made of, and those taken for others."""

from collections.abc import Callable
from functools import cached_property

import numpy as np

from rawattn.check.diagnose.engine.attention import TILES
from rawattn.check.diagnose.engine.question import Question, side_of
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
        j, n, at = self.j[:1], self.n, "ij"[self.side == "k"]
        size = f"seqlen_{self.side}"
        found = {at: lambda: j, f"{size} - 1 - {at}": lambda: n - 1 - j}
        found |= self._of_heads() if self.heads else {}
        for t in (2, 4, *TILES):
            found |= self._of_tiles(t, at, size)
        return found

    @property
    def loops(self) -> dict[str, Callable[[], Array]]:
        return {}

    def _of_tiles(self, t: int, at: str, size: str) -> dict[str, Callable[[], Array]]:
        j, n = self.j[:1], self.n
        return {
            f"{at} - {size} // {t} * {t}": lambda: j - n // t * t,
            f"{at} % {t}": lambda: j % t,
            f"{at} // {t}": lambda: j // t,
            f"({size} - 1) // {t} - {at} // {t}": lambda: (n - 1) // t - j // t,
            f"{at} // {t} % 2": lambda: j // t % 2,
        }

    def _of_heads(self) -> dict[str, Callable[[], Array]]:
        q, b, h = self.question, self.b, np.arange(self.heads)[:, None]
        reach, (of_q, of_k) = Reach(q), (np.asarray(x)[b][None] for x in (q.lengths_q, q.lengths_k))
        found: dict[str, Callable[[], Array]] = {}
        if self.side == "k":
            found["whether a query sees it"] = lambda: reach.seen.T.astype(int)
        elif self.heads == q.num_heads_q:
            found["keys seen"] = lambda: reach.count.T
            found["keys not seen"] = lambda: of_k - reach.count.T
            found["first key seen"] = lambda: reach.first.T - q.offsets("k")[b]
        found |= {"seqlen_q": lambda: of_q, "seqlen_k": lambda: of_k}
        found |= {"seqlen_k - seqlen_q": lambda: of_k - of_q, "the sequence": lambda: b[None]}
        if self.heads == q.num_heads_q and q.group > 1:
            found[f"h % {q.group}"] = lambda: h % q.group
            other = f"whether h % {q.num_heads_kv} is not h // {q.group}"
            found[other] = lambda: (h % q.num_heads_kv != h // q.group).astype(int)
        return found

    def feature(self, name: str) -> Array:
        return np.asarray(self.features[name]())


def by_rules(of: str, moves: dict[int, Rule], question: Question) -> Array:
    """For all rows of an array those that are taken."""
    rows, places = np.arange(len(getattr(question, of))), Rows(question, of)
    for by, rule in moves.items():
        rows = np.where((rule.holds(places) & places.inside)[0], rows + by, rows)
    return np.clip(rows, 0, len(rows) - 1)


def moves_of(shown: list[tuple[Question, Array]], of: str) -> dict[int, Rule] | None:
    """Distances of moved rows, each with a rule for the rows that are."""
    places = [Rows(question, of) for question, _ in shown]
    by = [np.where(x >= 0, x - np.arange(len(x)), 0)[None] for _, x in shown]
    known = [(x >= 0)[None] & at.inside for at, (_, x) in zip(places, shown, strict=True)]
    distances = sorted({int(d) for x in by for d in x.ravel()} - {0}, key=abs)
    found: dict[int, Rule] = {}
    for distance in distances[: FEW + 1]:
        parts = zip(places, known, by, strict=True)
        rule = rule_of(*(Shown(at, of, (x == distance) & of) for at, of, x in parts))
        if rule is None:
            return None
        found[distance] = rule
    return found if 0 < len(distances) <= FEW else None


def in_words(moves: dict[int, Rule], of: str) -> str:
    """Which row is taken where."""
    index = "i" if of == "q" else "j"
    by = {by: f"{index} {'-+'[by > 0]} {abs(by)}" for by in moves} | {NOWHERE: "zeros"}
    return "; ".join(f"{by[distance]} for {rule}" for distance, rule in moves.items())
