"""Pairs of printed tensors: which two are one quantity of two sides, and how one fits the other.

A pair is cut to the entries that both sides print.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product

import numpy as np

from rawattn.check.diagnose.logs.tensor import FAR, Flags, Float64, Printed

CONSTANT = 0.02  # what a constant slope may leave, relative, beyond the printed digits


@dataclass(frozen=True)
class Fit:
    """a = slope * b by least squares. residual: relative; ``beyond``: the same less what the
    printed digits explain."""

    slope: float
    residual: float
    beyond: float
    count: int

    @property
    def factor(self) -> bool:
        """Whether it is a constant other than 1."""
        constant = self.count >= 4 and self.beyond <= CONSTANT
        return constant and abs(self.slope - 1) > CONSTANT


def fit(a: Float64, b: Float64, a_units: Float64, b_units: Float64) -> Fit | None:
    """None where one side is zero or little more than the last printed digit."""
    if a.size < 2 or rms(a) <= 2 * rms(a_units) or rms(b) <= 2 * rms(b_units):
        return None
    slope = float(a @ b) / float(b @ b)
    left, size = rms(a - slope * b), rms(a)
    digits = float(np.mean(a_units**2 + (slope * b_units) ** 2)) / 12
    return Fit(slope, left / size, math.sqrt(max(0.0, left**2 - digits)) / size, a.size)


class Pair:
    """Two tensors of one quantity of which the same entries are printed.

    kind: as of one of the two, where that tells. finite: entries that are numbers on both sides;
    of others difference and size are 0. entries: the larger size of each; size: the larger side's
    root mean square. digits: how far two prints of one number may lie apart. noise: what rounding
    on the way may do, relative to size. hidden: the largest entry of each side where a causal mask
    would give 0; masked: whether it does, on one side at least; seen: the entries that it leaves.
    """

    def __init__(self, a: Printed, b: Printed, sides: tuple[str, str]) -> None:
        self.a, self.b, self.both, self.sides = a, b, (a, b), sides
        self.title, self.either = f"{a.title} / {b.title}", " or ".join(sides)
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
        self.seen: Flags = np.ones(x.shape, dtype=np.bool_)
        self.hidden, self.masked = (0.0, 0.0), False
        if self.kind in ("dS", "P") and x.ndim > 1:
            self.hidden = a.largest(~a.causal), b.largest(~a.causal)
            units = (2 * p.units.max() for p in self.both)
            self.masked = any(x <= unit for x, unit in zip(self.hidden, units, strict=True))
            self.seen &= a.causal | (not self.masked)

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

    def fit(self, where: Flags | None = None) -> Fit | None:
        """a = slope * b on some entries, or on all."""
        chosen = self.finite if where is None else self.finite & where
        return fit(*(p.values[chosen] for p in self.both), *(p.units[chosen] for p in self.both))

    @cached_property
    def rows(self) -> dict[str, Flags]:
        """The entries of every printed row that a mask leaves; none of a line of numbers."""
        axes = self.finite.shape[:-1]
        long = [axis for axis, size in enumerate(axes) if size > 1] or [len(axes) - 1]
        found = {}
        for index in product(*map(range, axes)) if axes else ():
            at = [str(self.a.places[axis][index[axis]]) for axis in long]
            row = np.zeros_like(self.seen)
            row[index] = self.seen[index]
            found[at[0] if len(at) == 1 else f"[{', '.join(at)}]"] = row
        return found


def rms(values: Float64) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


# ---- which two ----------------------------------------------------------------------------------

Labels = dict[int, tuple[str, tuple[str, ...]]]  # by ``start``: whose, and which quantity


def paired(found: Sequence[Printed], names: tuple[str, str] | None) -> list[Pair]:
    """Pairs by name, of one quantity and of two sides; by order where a name is printed more than
    once."""
    labels = labels_of(found, names)
    used: set[object] = set()  # tensors, and of the first of several sides those that have one
    pairs: list[Pair] = []
    for a, b in combinations([p for p in found if p.start in labels], 2):
        both = a.start, labels[b.start][0]
        alike = not {a.start, b.start, both} & used and _alike(a, b, labels)
        for one in _pair(a, b) if alike else ():
            used |= {b.start, both}
            sides = labels[a.start][0], labels[b.start][0]
            pairs.append(one if names is None else Pair(one.a, one.b, sides))
    if not pairs and len(found) == 2 and len({p.kind for p in found} - {""}) < 2:
        pairs = list(_pair(*found))
    return pairs


def labels_of(found: Sequence[Printed], names: tuple[str, str] | None) -> Labels:
    """Which of ``names`` a tensor has in its own, and the other words; without names what its own
    says besides a quantity, and that, with the numbers in the name."""
    if names is None:
        of = {p: (p.kind, *filter(str.isdigit, p.words)) if p.kind else () for p in found}
        return {p.start: (" ".join(p.side), quantity) for p, quantity in of.items() if p.name}
    labels: Labels = {}
    for name in sorted(names, key=len):
        there = [p for p in found if name in p.name]
        if not there:
            shown = ", ".join(sorted({p.name for p in found if p.name})) or "none"
            raise ValueError(f"no printed tensor has {name!r} in its name; there are: {shown}")
        rest = (replace(p, name=p.name.replace(name, " ", 1)) for p in there)
        labels |= {p.start: (name, ("", *p.words)) for p in rest}
    return labels


def _alike(a: Printed, b: Printed, labels: Labels) -> bool:
    """Whether two tensors are one quantity of two sides; names that say no quantity must differ in
    one word."""
    (side, quantity), (other, same) = labels[a.start], labels[b.start]
    if side == other or quantity != same:
        return False
    unlike = [one for one in zip(a.words, b.words, strict=False) if one[0] != one[1]]
    telling = all(len(word) > 2 and not word.isdigit() for one in unlike for word in one)
    apart = len(a.words) == len(b.words) > 1 and len(unlike) == 1 and telling
    return bool(quantity) or apart


def _pair(a: Printed, b: Printed) -> Iterator[Pair]:
    """Nothing where other entries are printed."""
    own = ["_".join(w for w in p.side if w not in o.side) for p, o in ((a, b), (b, a))]
    sides = own[0] or a.title, own[1] or b.title
    a, b = _thin(a, b.values.ndim), _thin(b, a.values.ndim)
    places = zip(a.places, b.places, strict=False)
    alike = a.values.shape == b.values.shape and all(np.array_equal(*both) for both in places)
    sizes = tuple(map(min, a.sizes, b.sizes))
    alike &= all(set(both) <= {n, FAR} for n, *both in zip(sizes, a.sizes, b.sizes, strict=False))
    if alike and a.floating and b.floating and a.values.size:
        yield Pair(replace(a, sizes=sizes), replace(b, sizes=sizes), sides)


def _thin(p: Printed, dimensions: int) -> Printed:
    """Without leading axes of length 1, as far as the other side has none."""
    n = 0
    while p.values.ndim - n > dimensions and p.sizes[n] == 1:
        n += 1
    values, units = p.values[(0,) * n], p.units[(0,) * n]
    return replace(p, values=values, units=units, places=p.places[n:], sizes=p.sizes[n:])
