"""Which pairs of query and key a set holds, in words: one or two intervals of integer features.

The set is found on one problem and must hold on a second one of other lengths.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

Array = np.ndarray
LENGTHS = {"seqlen_q", "seqlen_k"}  # bounds of which tell the few sequences of a problem apart
FEW = 6  # runs of a feature that may be intervals: what falls into more is told by another one


class Places(Protocol):
    """What has integer features: pairs of query and key, (total_q, total_k), or rows."""

    @property
    def j(self) -> Array: ...
    @property
    def features(self) -> Mapping[str, Callable[[], Array]]: ...
    @property
    def loops(self) -> Mapping[str, Callable[[], Array]]: ...
    def feature(self, name: str) -> Array: ...


class Span(NamedTuple):
    """low <= feature <= high; None is open."""

    feature: str
    low: int | None
    high: int | None

    def among(self, x: Array) -> Array:
        """Which of these values of the feature."""
        found = np.ones(x.shape, dtype=bool) if self.low is None else x >= self.low
        return found if self.high is None else found & (x <= self.high)

    def holds(self, places: Places) -> Array:
        """(total_q, total_k)."""
        return np.broadcast_to(self.among(places.feature(self.feature)), places.j.shape)

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
        """Of bounds for lengths chance makes some."""
        return not {x.feature for x in self.spans} & LENGTHS

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
    """The plainest rule for a set, which holds wherever it is shown: the fewest intervals that have
    all of it and nothing else, or the fewest bounds, each of which has all of it, that leave
    nothing else."""
    inside = np.concatenate([of.inside[of.domain] for of in shown])
    if not inside.any():
        return None
    if inside.all():
        return Rule(())
    first = shown[0].places
    rule = _of_features(shown, inside, first.features)
    if rule is None or not rule.plain:
        return _of_features(shown, inside, first.loops) or rule
    return rule


def _of_features(shown: Sequence[Shown], inside: Array, names: Iterable[str]) -> Rule | None:
    pure: list[Span] = []
    bounds: list[Span] = []
    left_by: tuple[list[Array], list[Array]] = [], []
    for name in names:
        if all(name in of.places.features or name in of.places.loops for of in shown):
            every = (np.broadcast_to(of.places.feature(name), of.domain.shape) for of in shown)
            x = np.concatenate([x[of.domain] for x, of in zip(every, shown, strict=True)])
            found = [*_pure(x, inside, name)], [*_bounds(x, inside, name)]
            pure, bounds = [*pure, *found[0]], [*bounds, *found[1]]
            left_by[0].extend(~span.among(x[inside]) for span in found[0])
            left_by[1].extend(span.among(x[~inside]) for span in found[1])
    told = _exact(pure, left_by[0], False), _exact(bounds, left_by[1], True)
    return min((rule for rule in told if rule), key=lambda rule: rule.size, default=None)


def _exact(spans: Sequence[Span], left: Sequence[Array], every: bool) -> Rule | None:
    """The rule of one span, or of two, that leaves nothing, of the plainest of these; ``left``:
    what each leaves."""
    if not spans:
        return None
    matrix = np.stack(left).astype(np.float32)
    # what two of them leave; the diagonal is that of one
    pairs = np.argwhere(np.triu(matrix @ matrix.T == 0)).tolist()
    chosen = min(pairs, key=lambda pair: (pair[0] != pair[1], sum(pair)), default=())
    return Rule(tuple(spans[place] for place in dict.fromkeys(chosen)), every) if chosen else None


def _bounds(x: Array, inside: Array, name: str) -> Iterator[Span]:
    """Intervals that have all of the set, and not all else."""
    low, high = int(x[inside].min()), int(x[inside].max())
    lows = [low] * int(low > x.min())
    highs = [high] * int(high < x.max())
    yield from (Span(name, a, None) for a in lows)
    yield from (Span(name, None, b) for b in highs)
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
