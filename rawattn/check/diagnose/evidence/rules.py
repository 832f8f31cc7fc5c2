"""Which pairs of query and key a set holds, in words: at most three intervals of integer features.

The set is found on one problem and must hold on a second one of other lengths.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

Array = np.ndarray
MOST = 3  # intervals of a rule
TRIED = 40  # rules of as few intervals as can be, the plainest first
FEW = 6  # runs of a feature that may be intervals: what falls into more is told by another one


class Places(Protocol):
    """What has integer features: pairs of query and key, (total_q, total_k), or rows."""

    @property
    def j(self) -> Array: ...
    @property
    def features(self) -> Mapping[str, Callable[[], Array]]: ...
    def feature(self, name: str) -> Array: ...


class Span(NamedTuple):
    """low <= feature <= high; None is open."""

    feature: str
    low: int | None
    high: int | None

    def covers(self, x: Array) -> Array:
        """Which values of the feature are in it."""
        low, high = -np.inf if self.low is None else self.low, self.high
        return np.asarray((x >= low) & (x <= (np.inf if high is None else high)))

    def holds(self, places: Places) -> Array:
        """(total_q, total_k)."""
        return np.broadcast_to(self.covers(places.feature(self.feature)), places.j.shape)

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.feature} = {self.low}"
        if self.low is None or self.high is None:
            sign, bound = ("<=", self.high) if self.low is None else (">=", self.low)
            return f"{self.feature} {sign} {bound}"
        return f"{self.low} <= {self.feature} <= {self.high}"


@dataclass(frozen=True)
class Rule:
    """Pairs that are in any of ``spans``, or in ``every`` one of them; without spans all pairs."""

    spans: tuple[Span, ...]
    every: bool = False

    def holds(self, places: Places) -> Array:
        """(total_q, total_k)."""
        if not self.spans:
            return np.ones(places.j.shape, dtype=bool)
        held = [span.holds(places) for span in self.spans]
        return np.asarray(np.logical_and.reduce(held) if self.every else np.logical_or.reduce(held))

    def __str__(self) -> str:
        return (" and " if self.every else ", or ").join(map(str, self.spans)) or "all of them"


@dataclass(frozen=True, eq=False)
class Shown:
    """Pairs (total_q, total_k) of ``places``: those in question, and those of them that are in
    the set."""

    places: Places
    domain: Array
    inside: Array


def rule_of(*shown: Shown) -> Rule | None:
    """The plainest rule for a set, which holds wherever it is shown."""
    if not any(of.inside.any() for of in shown):
        return None
    if _is(Rule(()), shown):
        return Rule(())
    first = shown[0].places.features
    names = [name for name in first if all(name in of.places.features for of in shown)]
    pure: list[tuple[Span, Array]] = []  # intervals that have nothing else, and what they lack
    wide: list[tuple[Span, Array]] = []  # bounds that have all of the set, and what else
    for name in names:
        x, there = _values(shown, name)
        pure += [(span, ~span.covers(x[there])) for span in _pure(x, there, name)]
        wide += [(span, span.covers(x[~there])) for span in _wide(x, x[there], name)]
    told = _exact(pure, False, shown), _exact(wide, True, shown)
    return min((rule for rule in told if rule), key=lambda rule: len(rule.spans), default=None)


def _is(rule: Rule, shown: Sequence[Shown]) -> bool:
    held = ((rule.holds(of.places) & of.domain) == of.inside for of in shown)
    return all(bool(same.all()) for same in held)


def _values(shown: Sequence[Shown], name: str) -> tuple[Array, Array]:
    """Of all pairs in question: a feature, and whether they are in the set."""
    x = [np.broadcast_to(of.places.feature(name), of.domain.shape)[of.domain] for of in shown]
    return np.concatenate(x), np.concatenate([of.inside[of.domain] for of in shown])


def _exact(found: Sequence[tuple[Span, Array]], every: bool, shown: Sequence[Shown]) -> Rule | None:
    """The rule of one span, of two or of three that leaves nothing of what each leaves."""
    if not found:
        return None
    spans, left = zip(*found, strict=True)
    matrix = np.stack(left).astype(np.float32)
    both = np.triu(matrix @ matrix.T)  # what two of them leave; the diagonal is that of one
    pairs = np.argwhere((both == 0) & np.triu(np.ones_like(both, dtype=bool)))
    order = sorted(pairs.tolist(), key=lambda pair: (pair[0] != pair[1], sum(pair)))
    chosen = [list(dict.fromkeys(pair)) for pair in order[:TRIED]]
    if not chosen:
        first = int(matrix.sum(axis=1).argmin())
        rest = matrix * matrix[first]
        thirds = np.argwhere(rest @ rest.T == 0)
        chosen = [
            [first, *pair] for pair in thirds[np.argsort(thirds.sum(axis=1))][:TRIED].tolist()
        ]
    for places in chosen:
        rule = Rule(tuple(spans[place] for place in places), every)
        if _is(rule, shown):
            return rule
    return None


def _wide(x: Array, inside: Array, name: str) -> Iterator[Span]:
    """Bounds of a feature that hold for all of the set, and not for all others."""
    low, high = int(inside.min()), int(inside.max())
    lows, highs = [low] * int(low > x.min()), [high] * int(high < x.max())
    yield from (*(Span(name, a, None) for a in lows), *(Span(name, None, b) for b in highs))
    yield from (Span(name, a, b) for a in lows for b in highs)


def _pure(x: Array, inside: Array, name: str) -> Iterator[Span]:
    """Runs of values of a feature whose pairs are all in the set."""
    values, place = np.unique(x, return_inverse=True)
    pure = np.bincount(place, inside, len(values)) == np.bincount(place, minlength=len(values))
    edges = np.flatnonzero(np.diff(np.concatenate([[0], pure, [0]]).astype(int)))
    runs = edges.reshape(-1, 2)
    for first, stop in runs if len(runs) <= FEW else ():
        low, high = int(values[first]), int(values[stop - 1])
        if low == high:
            yield Span(name, low, high)
        if first == 0 or stop == len(values):
            yield Span(name, None if first == 0 else low, None if stop == len(values) else high)
        elif low != high:
            yield Span(name, low, high)
