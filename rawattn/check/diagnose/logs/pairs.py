"""Pairs of printed tensors: which two are one quantity of two sides, and how one fits the other."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from rawattn.check.diagnose.logs.printed import KINDS, Flags, Float64, Printed

CONSTANT = 0.02  # what a constant slope may leave, relative, beyond the printed digits
ROUNDING = 2.0**-8  # prints do not tell whether 16-bit tensors were cast for printing
DIGITS = 50  # units of the last printed place, from which on a logarithm can be taken
OF_NO_SIDE = {*KINDS, "grad", "gradient", "diff", "difference", "err", "error", "abs"}


def factor(a: Float64, b: Float64, a_unit: float = 0.0, b_unit: float = 0.0) -> float | None:
    """a / b by least squares where that is a constant other than 1, but for what was printed."""
    if a.size < 4 or rms(a) <= 2 * a_unit or rms(b) <= 2 * b_unit:
        return None
    slope = float(a @ b) / float(b @ b)
    digits = (a_unit**2 + (slope * b_unit) ** 2) / 12
    constant = rms(a - slope * b) ** 2 - digits <= (CONSTANT * rms(a)) ** 2
    return slope if constant and abs(slope - 1) > CONSTANT else None


class Pair:
    """Two tensors of one quantity of which the same entries are printed. sides: whose they are.
    finite: entries that are numbers on both sides; the difference of others is 0. size: the larger
    side's root mean square. digits: how far two prints of one number may lie apart. alike: entries
    that are equal but for rounding, NaN and infinities too. agrees: all are."""

    def __init__(self, a: Printed, b: Printed, sides: tuple[str, str]) -> None:
        self.a, self.both, self.sides = a, (a, b), sides
        self.either = " or ".join(sides)
        self.title, self.kind = f"{a.name} / {b.name}", a.kind if a.kind == b.kind else ""
        self.finite: Flags = np.isfinite(a.values) & np.isfinite(b.values)
        x, y = (np.where(self.finite, p.values, 0.0) for p in self.both)
        self.difference: Float64 = np.abs(x - y)
        self.size = max(rms(x), rms(y))
        self.digits = 0.5005 * (a.unit + b.unit)
        noise = ROUNDING * (1 if a.whole else 2)  # corners may be the small part of a tensor
        # where dP - D cancels, what is rounded is larger than what is printed
        largest = float(np.maximum(np.abs(x), np.abs(y)).max(initial=0.0))
        near = self.finite & (self.difference <= self.digits + 16 * noise * largest)
        self.alike: Flags = near | (a.values == b.values) | np.isnan(a.values) & np.isnan(b.values)
        spread = math.sqrt(max(0.0, rms(self.difference) ** 2 - self.digits**2))
        self.agrees = bool(self.alike.all()) and spread <= 8 * noise * self.size

    @property
    def factor(self) -> float | None:
        x, y = (p.values[self.finite] for p in self.both)
        return factor(x, y, *(p.unit for p in self.both))

    @property
    def power(self) -> float | None:
        """The factor of one side's scores: of the logarithms of P less their mean in each row."""
        if self.kind != "P" or self.a.values.ndim < 2:
            return None
        there = np.all([p.values > max(DIGITS * p.unit, 1e-6) for p in self.both], axis=0)
        count = np.maximum(there.sum(axis=-1, keepdims=True), 1)
        logs = [np.log(np.where(there, p.values, 1.0)) for p in self.both]
        x, y = ((z - z.sum(axis=-1, keepdims=True) / count)[there] for z in logs)
        found = factor(x, y)
        return found if found is not None and found > 0 else None


def rms(values: Float64) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def paired(found: Sequence[Printed]) -> list[Pair]:
    """Of two whose names differ in one word, the side, which one may lack if a kind is named."""
    told = {p: dict(_told(p)) for p in found}
    used: set[object] = set()  # tensors, and of the first of several sides those that have one
    pairs = []
    for a, b in combinations(found, 2):
        common = ((told[a][what], told[b][what]) for what in told[a] if what in told[b])
        sides = next((both for both in common if both[0] != both[1]), ("", ""))
        same = a.values.shape == b.values.shape and a.fronts == b.fronts and a.values.size
        if any(sides) and same and not {a, b, (a, sides[1])} & used:
            used |= {b, (a, sides[1])}
            pairs.append(Pair(a, b, (sides[0] or a.name, sides[1] or b.name)))
    return pairs


def _told(p: Printed) -> Iterator[tuple[tuple[str, ...], str]]:
    """Of what it may be by its name, and whose."""
    if p.kind:
        yield p.words, ""
    for n, word in enumerate(p.words):
        if len(word) > 2 and word not in OF_NO_SIDE and not word.isdigit() and len(p.words) > 1:
            yield (*p.words[:n], *p.words[n + 1 :]), word
