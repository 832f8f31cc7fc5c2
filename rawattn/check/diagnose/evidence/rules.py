"""Which pairs of query and key a set holds, in words: one or two intervals of integer features.
The set is found on one problem and must hold on a second one of other lengths."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.question import Question

Array = np.ndarray
LENGTHS = {"seqlen_q", "seqlen_k"}  # bounds of which tell the few sequences of a problem apart
SPLIT = re.compile(r"ceil\(")  # of what is in so many parts, which few lengths tell from tiles
CHANCE = re.compile(r"seqlen_[qk]|the (sequence|row of).*|j - the (longest )?seqlen_k.*")  # alike
NUMBERS = re.compile(r"\d+")
LENGTHS_APART = 8  # of sequences, with which chance makes no rules of lengths
FEW = 6  # runs of a feature that may be intervals: what falls into more is told by another one
PAIRS, MOST = 400, 4000  # rules of two that are made, of so many that are looked at
Places = Any  # what has integer features: pairs of query and key, (total_q, total_k), or rows


class Span(NamedTuple):
    """low <= feature <= high; None is open."""

    feature: str
    low: int | None
    high: int | None

    def among(self, x: Array) -> Array:
        found = np.ones(x.shape, dtype=bool) if self.low is None else x >= self.low
        return found if self.high is None else found & (x <= self.high)

    def holds(self, places: Places) -> Array:
        """(total_q, total_k)."""
        return np.broadcast_to(self.among(places.feature(self.feature)), places.j.shape)

    @property
    def numbers(self) -> frozenset[int]:
        """Those but 0, 1 that it is said with, also of its feature: chance needs more of them."""
        return frozenset(map(int, NUMBERS.findall(str(self)))) - {0, 1}

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.feature} = {self.low}"
        if self.low is None or self.high is None:
            sign, bound = ("<=", self.high) if self.low is None else (">=", self.low)
            return f"{self.feature} {sign} {bound}"
        return f"{self.low} <= {self.feature} <= {self.high}"


class Rule(NamedTuple):
    """Pairs that are in any of ``spans``, or in ``every`` one of them; without spans all pairs."""

    spans: tuple[Span, ...]
    every: bool = False

    @property
    def size(self) -> tuple[int, int, int]:
        """How many intervals, how many numbers they are said with, and how large these are."""
        numbers = {x for span in self.spans for x in span.numbers}
        return len(self.spans), len(numbers), sum(numbers)

    @property
    def plain(self) -> bool:
        """Of bounds for lengths chance makes some."""
        if len(self.spans) == 1:
            feature = self.spans[0].feature
            return feature not in LENGTHS and not SPLIT.search(feature)
        return not any(CHANCE.fullmatch(x.feature) for x in self.spans)

    def holds(self, places: Places) -> Array:
        """(total_q, total_k)."""
        if not self.spans:
            return np.ones(places.j.shape, dtype=bool)
        held = [span.holds(places) for span in self.spans]
        return np.asarray(np.logical_and.reduce(held) if self.every else np.logical_or.reduce(held))

    def __str__(self) -> str:
        return (" and " if self.every else ", or ").join(map(str, self.spans)) or "all of them"


class Shown(NamedTuple):
    """Pairs (total_q, total_k) of ``places``: those in question, and those in the set."""

    places: Places
    domain: Array
    inside: Array


def mask_rule(question: Question) -> str:
    """Which keys j a query i must see, as people write it; "" where it sees all."""
    if question.sparse:
        return ""
    left, right = question.mask_window
    last = "" if question.lengths_q == question.lengths_k else " + seqlen_k - seqlen_q"
    lower = f"i{last} - {left} <= " if left >= 0 else ""
    upper = "" if right < 0 else f" <= i{last}" + (f" + {right}" if right else "")
    return f"{lower}j{upper}" if lower or upper else ""


def rules_of(*shown: Shown, among: Iterable[str] | None = None) -> Iterator[Rule]:
    """Rules for a set, which hold wherever it is shown, the plainest first: the fewest intervals
    that have all of it and nothing else, or the fewest bounds, each of which has all of it, that
    leave nothing else. What chance makes comes last. ``among``: the features that are tried."""
    inside = np.concatenate([of.inside[of.domain] for of in shown])
    if not inside.any():
        return
    if inside.all():
        yield Rule(())
        return
    places = shown[0].places
    every = _spans(shown, inside, places.features if among is None else among)
    yield from _rules(every, 1)
    if among is not None:
        yield from _rules(every, 2)
        return
    loops = _spans(shown, inside, (n for n in places.loops if not SPLIT.search(n)))
    yield from _rules(loops, 1)
    lengths = {x for of in shown for x in np.unique(of.places.feature("seqlen_q")).tolist()}
    many = len(lengths) >= LENGTHS_APART
    plain = [one for one in every if many or not CHANCE.fullmatch(one.span.feature)]
    yield from _rules(plain, 2)
    yield from _rules(_spans(shown, inside, filter(SPLIT.search, places.loops)), 1)
    for spans in (plain + loops, every):
        yield from _rules(spans, 2)


class _Left(NamedTuple):
    """An interval that may make a rule, and what it leaves: a pure one of a union, or bounds."""

    every: bool
    span: Span
    left: Array


def _spans(shown: Sequence[Shown], inside: Array, names: Iterable[str]) -> list[_Left]:
    found = []
    for name in names:
        if not all(name in of.places.features or name in of.places.loops for of in shown):
            continue
        every = (np.broadcast_to(of.places.feature(name), of.domain.shape) for of in shown)
        x = np.concatenate([x[of.domain] for x, of in zip(every, shown, strict=True)])
        found += [_Left(False, one, ~one.among(x[inside])) for one in _pure(x, inside, name)]
        found += [_Left(True, one, one.among(x[~inside])) for one in _bounds(x, inside, name)]
    few = {None, -1, 0, 1}  # bounds that hold by chance less often than others
    return [x for x in found if "longest seqlen_q" not in x.span.feature or {*x.span[1:]} <= few]


def _rules(spans: Sequence[_Left], count: int) -> Iterator[Rule]:
    """Rules of so many intervals, the plainest first, unions and bounds by turns."""
    told = ([*_exact([x for x in spans if x.every == every], count)] for every in (False, True))
    in_order = sorted(filter(None, told), key=lambda rules: rules[0].size)
    yield from (rule for rules in zip_longest(*in_order) for rule in rules if rule)


def _exact(spans: Sequence[_Left], count: int) -> Iterator[Rule]:
    """Rules of one span, or of two, that leave nothing, made of the plainest of these."""
    if not spans or count == 1:
        yield from (Rule((one.span,), one.every) for one in spans if not one.left.any())
        return
    # places that the same spans leave count once
    marks = np.packbits(np.stack([one.left for one in spans]), axis=0).T
    apart = np.array([*{mark.tobytes(): n for n, mark in enumerate(marks)}.values()])
    matrix = np.stack([one.left[apart] for one in spans]).astype(np.float32)
    pairs = np.argwhere(np.triu(matrix @ matrix.T == 0, 1))
    pairs = pairs[np.argsort(pairs.sum(axis=1), kind="stable")[:MOST]]
    numbers = [one.span.numbers for one in spans]
    chance = [bool(CHANCE.fullmatch(one.span.feature)) for one in spans]

    def size(pair: Sequence[int]) -> float:
        one, other = pair
        return len(numbers[one] | numbers[other]) + (chance[one] or chance[other]) / 2

    for one, other in sorted(pairs.tolist(), key=size)[:PAIRS]:
        yield Rule((spans[one].span, spans[other].span), spans[one].every)


def _bounds(x: Array, inside: Array, name: str) -> Iterator[Span]:
    low, high = int(x[inside].min()), int(x[inside].max())
    if name in LENGTHS and low > x.min():  # as few as can be are left out
        low = int(x[x < low].max()) + 1
    for a, b in ((low, None), (None, high), (low, high)):
        if (a is None or a > x.min()) and (b is None or b < x.max()):
            yield Span(name, a, b)


def _pure(x: Array, inside: Array, name: str) -> Iterator[Span]:
    """Runs of values of a feature whose pairs are all in the set."""
    count = np.bincount(x - x.min())
    values = np.flatnonzero(count)
    pure = np.bincount(x[inside] - x.min(), minlength=len(count))[values] == count[values]
    values += x.min()
    runs = np.flatnonzero(np.diff(np.concatenate([[0], pure, [0]]).astype(int))).reshape(-1, 2)
    for first, stop in runs if len(runs) <= FEW else ():
        low, high = int(values[first]), int(values[stop - 1])
        outer = first == 0, stop == len(values)
        if low == high or not any(outer):
            yield Span(name, low, high)
        if any(outer):
            yield Span(name, None if outer[0] else low, None if outer[1] else high)
