"""Pairs of printed tensors: which two are one quantity of two sides, and how one fits the other."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from rawattn.check.diagnose.logs.tensor import (
    FAR,
    KINDS,
    OF_GRADIENTS,
    Flags,
    Float64,
    Printed,
    words_of,
)

CONSTANT = 0.02  # what a constant slope may leave, relative, beyond the printed digits


@dataclass(frozen=True)
class Fit:
    """a = slope * b by least squares, of ``count`` numbers. residual: relative, less what the
    printed digits explain."""

    slope: float
    residual: float
    count: int

    @property
    def factor(self) -> bool:
        """Whether it is a constant other than 1."""
        constant = self.count >= 4 and self.residual <= CONSTANT
        return constant and abs(self.slope - 1) > CONSTANT

    @property
    def larger(self) -> tuple[int, float]:
        """Which side has the larger values, and how many times as large they are."""
        return (1, 1 / self.slope) if abs(self.slope) < 1 else (0, self.slope)


def fit(a: Float64, b: Float64, a_units: Float64, b_units: Float64) -> Fit | None:
    """None where one side is zero or little more than the last printed digit."""
    if a.size < 2 or rms(a) <= 2 * rms(a_units) or rms(b) <= 2 * rms(b_units):
        return None
    slope = float(a @ b) / float(b @ b)
    digits = (rms(a_units) ** 2 + (slope * rms(b_units)) ** 2) / 12
    return Fit(slope, math.sqrt(max(0.0, rms(a - slope * b) ** 2 - digits)) / rms(a), a.size)


class Pair:
    """Two tensors of one quantity of which the same entries are printed.

    kind: as of one of the two, where that tells. finite: entries that are numbers on both sides;
    of others difference and size are 0. entries: the larger size of each; size: the larger side's
    root mean square. digits: how far two prints of one number may lie apart. noise: what rounding
    on the way may do, relative to size. masked: whether one side at least has nothing where a
    causal mask would give 0; seen: the entries that it leaves.
    """

    def __init__(self, a: Printed, b: Printed) -> None:
        self.a, self.b, self.both, self.sides = a, b, (a, b), (a.side, b.side)
        self.title, self.either = f"{a.name} / {b.name}", " or ".join(self.sides)
        kinds = {p.kind for p in self.both} - {""}
        self.kind = kinds.pop() if len(kinds) == 1 else ""
        self.finite: Flags = np.isfinite(a.values) & np.isfinite(b.values)
        x, y = (np.where(self.finite, p.values, 0.0) for p in self.both)
        self.difference = np.asarray(np.abs(x - y))
        self.entries = np.maximum(np.abs(x), np.abs(y))
        self.size = max(rms(p.values[self.finite]) for p in self.both)
        self.digits = np.asarray(0.5005 * (a.units + b.units) + 2.0**-23 * self.entries)
        dtypes = {a.dtype, b.dtype}
        # prints of float32 do not tell whether 16-bit tensors were cast for printing
        noise = 2.0**-10 if "float16" in dtypes and "bfloat16" not in dtypes else 2.0**-8
        corners = 1 if a.full else 2  # which may be the small part of a tensor
        self.noise = 2.0**-20 if dtypes == {"float64"} else noise * corners
        square = self.kind in ("dS", "P") and x.ndim > 1
        self.masked = square and any(p.hidden <= 2 * p.units.max() for p in self.both)
        self.seen: Flags = np.ones(x.shape, dtype=np.bool_) & (a.causal if self.masked else True)

    def within(self, allowed: Float64 | float) -> Flags:
        """Entries that are equal but for ``allowed``, NaN and infinities among them."""
        same = np.isnan(self.a.values) & np.isnan(self.b.values)
        same |= self.a.values == self.b.values
        return np.asarray(same | (self.finite & (self.difference <= self.digits + allowed)))

    @property
    def agrees(self) -> bool:
        """Whether rounding explains every difference."""
        spread = math.sqrt(max(0.0, rms(self.difference) ** 2 - rms(self.digits) ** 2))
        if self.kind in ("", "dS", "dQ", "dK"):  # dP - D goes in, and cancels where D is rounded
            factor, entry = 8, 16 * self.entries.max(initial=0.0)
        else:
            factor, entry = 4, 6 * (self.size + self.entries)
        alike = self.within(self.noise * entry).all()
        return bool(alike) and spread <= factor * self.noise * self.size

    def fit(self, where: Flags | bool = True) -> Fit | None:
        """a = slope * b on some entries, or on all."""
        chosen = self.finite & where
        return fit(*(p.values[chosen] for p in self.both), *(p.units[chosen] for p in self.both))

    @cached_property
    def rows(self) -> dict[str, Flags]:
        """The entries of every printed row that a mask leaves; none of a line of numbers."""
        found = {}
        for index in np.ndindex(self.seen.shape[:-1]) if self.seen.ndim > 1 else ():
            at = [str(x[n]) for x, n in zip(self.a.places, index, strict=False) if len(x) > 1]
            row = np.zeros_like(self.seen)
            row[index] = self.seen[index]
            found[f"[{', '.join(at)}]" if len(at) > 1 else "".join(at) or "0"] = row
        return found


def rms(values: Float64) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def sided(found: Sequence[Printed], names: Sequence[str]) -> list[Printed]:
    """With whose and of what each is. ValueError where no name has one of ``names`` in it."""
    for name in names:
        if not any(name in p.name for p in found):
            shown = ", ".join(sorted({p.name for p in found})) or "none"
            raise ValueError(f"no printed tensor has {name!r} in its name; there are: {shown}")
    told = ((p, *_told(p, sorted(names, key=len, reverse=True))) for p in found)
    return [replace(p, side=side, quantity=quantity) for p, side, quantity in told]


def _told(p: Printed, names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Which of ``names`` it has in its own, and the other words; without names what its own says
    besides a quantity, and that, with the numbers in the name."""
    for name in names:
        if name in p.name:
            return name, ("", *words_of(p.name.replace(name, " ", 1)))
    if names:
        return p.name, (p.name,)
    told = KINDS.keys() | OF_GRADIENTS
    side = " ".join(word for word in p.words if word not in told and not word.isdigit())
    return side, (p.kind, *filter(str.isdigit, p.words)) if p.kind else ()


def paired(found: Sequence[Printed]) -> list[Pair]:
    """Pairs by name, of one quantity and of two sides; by order where a name is printed more than
    once; any two that are all there is."""
    used: set[object] = set()  # tensors, and of the first of several sides those that have one
    pairs: list[Pair] = []
    for a, b in combinations(found, 2):
        both = a.start, b.side
        alike = not {a.start, b.start, both} & used and _alike(a, b)
        for one in _pair(a, b) if alike else ():
            used |= {b.start, both}
            pairs.append(one)
    if not pairs and len(found) == 2 and len({p.kind for p in found} - {""}) < 2:
        pairs = list(_pair(*found))
    return pairs


def _alike(a: Printed, b: Printed) -> bool:
    """Whether two tensors are one quantity of two sides; names that say no quantity must differ in
    one word."""
    if a.side == b.side or a.quantity != b.quantity:
        return False
    unlike = [one for one in zip(a.words, b.words, strict=False) if one[0] != one[1]]
    telling = all(len(word) > 2 and not word.isdigit() for one in unlike for word in one)
    apart = len(a.words) == len(b.words) > 1 and len(unlike) == 1 and telling
    return bool(a.quantity) or apart


def _pair(*both: Printed) -> Iterator[Pair]:
    """Nothing where other entries are printed."""
    a, b = both
    places = zip(a.places, b.places, strict=False)
    sizes = tuple(map(min, a.sizes, b.sizes))
    alike = a.values.shape == b.values.shape and all(np.array_equal(*at) for at in places)
    alike &= all({*of} <= {n, FAR} for n, *of in zip(sizes, a.sizes, b.sizes, strict=False))
    if alike and a.values.size and not any(re.match("u?int|bool|long", p.dtype) for p in both):
        words = [p.side.split() for p in both]
        own = ("_".join(w for w in words[n] if w not in words[1 - n]) for n in (0, 1))
        sides = (side or p.name for side, p in zip(own, both, strict=True))
        yield Pair(*(replace(p, sizes=sizes, side=s) for p, s in zip(both, sides, strict=True)))
