"""Which pairs of query and key a set holds, in words: at most three intervals of integer features.

The set is found on one problem and must hold on a second one of other lengths.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

Array = np.ndarray
MOST = 3  # intervals of a rule
LENGTHS = {"seqlen_q", "seqlen_k"}  # bounds of which tell the few sequences of a problem apart
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

    def holds(self, places: Places) -> Array:
        """(total_q, total_k)."""
        x = places.feature(self.feature)
        found = np.ones(places.j.shape, dtype=bool)
        found &= True if self.low is None else x >= self.low
        found &= True if self.high is None else x <= self.high
        return found

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

    @property
    def size(self) -> tuple[int, int, int]:
        """How many intervals, how many numbers in them, and how large they are."""
        numbers = [x for span in self.spans for x in {*span[1:]} if isinstance(x, int)]
        return len(self.spans), len(numbers), sum(map(abs, numbers))

    @property
    def plain(self) -> bool:
        return len(self.spans) < 3 and not {x.feature for x in self.spans} & LENGTHS

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
    told = _cover(shown, names), _cut(shown, names)
    return min((rule for rule in told if rule), key=lambda rule: rule.size, default=None)


def _is(rule: Rule, shown: Sequence[Shown]) -> bool:
    held = ((rule.holds(of.places) & of.domain) == of.inside for of in shown)
    return all(bool(same.all()) for same in held)


def _values(shown: Sequence[Shown], name: str) -> tuple[Array, Array]:
    """Of all pairs in question: a feature, and whether they are in the set."""
    x = [np.broadcast_to(of.places.feature(name), of.domain.shape)[of.domain] for of in shown]
    return np.concatenate(x), np.concatenate([of.inside[of.domain] for of in shown])


def _held(span: Span, shown: Sequence[Shown], inside: bool) -> Array:
    """Which of the pairs in the set, or of the others in question, are in an interval."""
    parts = [of.inside if inside else of.domain & ~of.inside for of in shown]
    held = [span.holds(of.places)[part] for of, part in zip(shown, parts, strict=True)]
    return np.concatenate(held)


def _cover(shown: Sequence[Shown], names: Sequence[str]) -> Rule | None:
    """The fewest intervals that have all of the set and nothing else."""
    spans = [span for name in names for span in _pure(*_values(shown, name), name)]
    return _exact(spans, [~_held(span, shown, True) for span in spans], False, shown)


def _cut(shown: Sequence[Shown], names: Sequence[str]) -> Rule | None:
    """The fewest bounds, each of which has all of the set, that leave nothing else."""
    spans: list[Span] = []
    for name in names:
        x, there = _values(shown, name)
        low, high = int(x[there].min()), int(x[there].max())
        lows = [low] * int(low > x.min())
        highs = [high] * int(high < x.max())
        spans += [*(Span(name, a, None) for a in lows), *(Span(name, None, b) for b in highs)]
        spans += [Span(name, a, b) for a in lows for b in highs]
    return _exact(spans, [_held(span, shown, False) for span in spans], True, shown)


def _exact(
    spans: Sequence[Span], left: Sequence[Array], every: bool, shown: Sequence[Shown]
) -> Rule | None:
    """The rule of one span, of two or of three that leaves nothing; ``left``: what each leaves."""
    if not spans:
        return None
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
