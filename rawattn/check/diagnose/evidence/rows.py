"""Rows that are taken for others: how far away they are, and which, in rules."""

from collections.abc import Callable
from functools import cached_property

import numpy as np

from rawattn.check.diagnose.engine.attention import TILES
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.rules import Rule, Shown, rule_of

Array = np.ndarray
FEW = 3  # distances, at most
NOWHERE = 1 << 40  # so far away are zeros


class Rows:
    """Rows of q, or of k and v, with what rules are made of, like ``Places``."""

    def __init__(self, question: Question, of: str) -> None:
        side, self.index = ("q", "i") if of == "q" else ("k", "j")
        b, lengths = question.sequence_of(side), np.diff(question.offsets(side).astype(np.int64))
        self.j, self.inside, self.n = question.place_of(side)[None], (b >= 0)[None], lengths[b]

    @cached_property
    def features(self) -> dict[str, Callable[[], Array]]:
        j, n, name = self.j, self.n, self.index
        found = {name: lambda: j, f"seqlen - 1 - {name}": lambda: n - 1 - j}
        for t in (2, 4, *TILES):
            found |= self._of_tiles(t, name)
        return found

    def _of_tiles(self, t: int, name: str) -> dict[str, Callable[[], Array]]:
        j, n = self.j, self.n
        return {
            f"{name} % {t}": lambda: j % t,
            f"{name} // {t}": lambda: j // t,
            f"{name} - seqlen // {t} * {t}": lambda: j - n // t * t,
            f"(seqlen - 1) // {t} - {name} // {t}": lambda: (n - 1) // t - j // t,
            f"{name} // {t} % 2": lambda: j // t % 2,
        }

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
