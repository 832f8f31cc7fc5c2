"""Pairs of printed tensors: which two are one quantity of two sides, and how one fits the other.

A pair is cut to the entries that both sides print.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from rawattn.check.diagnose.logs.tensor import Flags, Float64, Integers, Printed

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
    def constant(self) -> bool:
        return self.count >= 4 and self.beyond <= CONSTANT


@dataclass(frozen=True, eq=False)
class Pair:
    """Two tensors of one quantity, cut to the entries that both print."""

    a: Printed
    b: Printed
    sides: tuple[str, str]
    kind: str
    causal: bool | None = None

    @property
    def title(self) -> str:
        return f"{self.a.title} / {self.b.title}"

    @property
    def either(self) -> str:
        return " or ".join(self.sides)

    @cached_property
    def finite(self) -> Flags:
        return np.asarray(np.isfinite(self.a.values) & np.isfinite(self.b.values))

    @cached_property
    def difference(self) -> Float64:
        return np.asarray(np.where(self.finite, np.abs(self.a.values - self.b.values), 0.0))

    @cached_property
    def digits(self) -> Float64:
        """How far two prints of one number may lie apart."""
        size = np.maximum(np.abs(self.a.values), np.abs(self.b.values))
        return np.asarray(0.5005 * (self.a.units + self.b.units) + 2.0**-23 * size)

    @cached_property
    def size(self) -> float:
        """The larger side's root mean square."""
        if not self.finite.any():
            return 0.0
        return max(_rms(side.values[self.finite]) for side in (self.a, self.b))

    @cached_property
    def noise(self) -> float:
        """What rounding on the way may do, relative to ``size``. Prints of float32 do not tell
        whether 16-bit tensors were cast for printing; corners may be the small part of a tensor."""
        dtypes = {self.a.dtype, self.b.dtype}
        if dtypes == {"float64"}:
            return 2.0**-20
        half = "float16" in dtypes and "bfloat16" not in dtypes
        return (2.0**-10 if half else 2.0**-8) * (1 if self.a.full else 2)

    def within(self, allowed: Float64 | float) -> Flags:
        """Entries that are equal but for ``allowed``, NaN and infinities among them."""
        same = np.isnan(self.a.values) & np.isnan(self.b.values)
        same |= self.a.values == self.b.values
        return np.asarray(same | (self.finite & (self.difference <= self.digits + allowed)))

    @cached_property
    def scale(self) -> Float64:
        """What an error of 1 means for each entry: its own size and that of the tensor."""
        entry = np.maximum(np.abs(self.a.values), np.abs(self.b.values))
        return np.asarray(self.size + np.where(self.finite, entry, 0.0))

    @property
    def agrees(self) -> bool:
        """Whether rounding explains every difference."""
        spread = math.sqrt(max(0.0, _rms(self.difference) ** 2 - _rms(self.digits) ** 2))
        if self.kind in ("", "dS", "dQ", "dK"):  # dP - D goes in, and cancels where D is rounded
            factor, entry = 8, 16 * (self.scale.max(initial=0.0) - self.size)
        else:
            factor, entry = 4, 6 * self.scale
        alike = self.within(self.noise * entry).all()
        return bool(alike) and spread <= factor * self.noise * self.size

    @cached_property
    def visible(self) -> Flags | None:
        """Which printed entries a causal mask allows; matrices elided alike are taken as square."""
        if self.a.values.ndim < 2:
            return None
        rows, columns = self.a.places[-2:]
        size_rows, size_columns = self.a.sizes[-2:]
        if size_rows is not None and size_columns is not None:
            shown = columns <= rows[:, None] + size_columns - size_rows
        elif size_rows is None and size_columns is None and np.array_equal(rows, columns):
            order = np.arange(rows.size)
            shown = order <= order[:, None]
        else:
            return None
        return np.asarray(np.broadcast_to(shown, self.a.values.shape))

    @cached_property
    def hidden(self) -> tuple[float, float] | None:
        """The largest entry of each side where a causal mask would give 0; None where it may not,
        or nothing tells where it would."""
        if self.kind not in ("dS", "P") or self.causal is False or self.visible is None:
            return None
        above = ~self.visible
        one, other = (float(np.abs(p.values[above]).max(initial=0.0)) for p in (self.a, self.b))
        return one, other

    @property
    def masked(self) -> bool:
        """Whether a mask is evident: one side at least is 0 where a causal one hides the key."""
        sides = zip((self.a, self.b), self.hidden or (), strict=False)
        return any(hidden <= 2 * p.units.max() for p, hidden in sides)

    def fit(self, where: Flags | tuple[int, ...] = ()) -> Fit | None:
        """None where one side is zero or little more than the last printed digit."""
        chosen = self.finite[where]
        (a, a_units), (b, b_units) = (
            (side.values[where][chosen], side.units[where][chosen]) for side in (self.a, self.b)
        )
        if a.size < 2 or _rms(a) <= 2 * _rms(a_units) or _rms(b) <= 2 * _rms(b_units):
            return None
        slope = float(a @ b) / float(b @ b)
        left, size = _rms(a - slope * b), _rms(a)
        digits = float(np.mean(a_units**2 + (slope * b_units) ** 2)) / 12
        beyond = math.sqrt(max(0.0, left**2 - digits))
        return Fit(slope, left / size, beyond / size, a.size)

    @cached_property
    def rows(self) -> list[tuple[str, tuple[int, ...]]]:
        """Label and index of every printed row; none of a single number or a line of numbers."""
        axes = self.a.values.shape[:-1]
        if not axes:
            return []
        long = [axis for axis, size in enumerate(axes) if size > 1] or [len(axes) - 1]
        labels = []
        for index in product(*map(range, axes)):
            at = [str(self.a.places[axis][index[axis]]) for axis in long]
            labels.append((at[0] if len(at) == 1 else f"[{', '.join(at)}]", index))
        return labels


def _rms(values: Float64) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def paired(found: Sequence[Printed], names: tuple[str, str] | None) -> list[Pair]:
    """Pairs by name: one quantity, two sides; by order where a name is printed more than once."""
    if names is not None:
        labelled = by_given_names(found, names)
    else:
        labelled = [(p, " ".join(p.side), _quantity(p)) for p in found if p.name and p.kind]
    matches: list[tuple[Printed, Printed]] = []
    for quantity in dict.fromkeys(quantity for _, _, quantity in labelled):
        of_side: dict[str, list[Printed]] = {name: [] for name in names or ()}
        for p, side, other in labelled:
            if other == quantity:
                of_side.setdefault(side, []).append(p)
        first, *others = (of for of in of_side.values() if of)
        matches += [match for other in others for match in _matched(first, other)]
    if names is None:
        matches += _one_word_apart([p for p in found if p.name and not p.kind])
    if not matches and len(found) == 2 and len({p.kind for p in found} - {""}) < 2:
        matches += _matched(found[:1], found[1:])
    return [pair for a, b in matches if (pair := _pair(a, b, names)) is not None]


def _quantity(p: Printed) -> tuple[str, ...]:
    return p.kind, *(word for word in p.words if word.isdigit())


def _pair(a: Printed, b: Printed, names: tuple[str, str] | None) -> Pair | None:
    cut = _common(a, b)
    if cut is None:
        return None
    own = ["_".join(w for w in p.side if w not in o.side) for p, o in ((a, b), (b, a))]
    sides = names or (own[0] or a.title, own[1] or b.title)
    kinds = {a.kind, b.kind} - {""}
    return Pair(*cut, sides, kinds.pop() if len(kinds) == 1 else "")


Labelled = tuple[Printed, str, tuple[str, ...]]


def by_given_names(found: Sequence[Printed], names: tuple[str, str]) -> list[Labelled]:
    """The tensors that have one of ``names`` in theirs, that, and the other words."""
    for name in names:
        if not any(name in p.name for p in found):
            shown = ", ".join(sorted({p.name for p in found if p.name})) or "none"
            raise ValueError(f"no printed tensor has {name!r} in its name; there are: {shown}")
    labelled = []
    for p in found:
        name = next((n for n in sorted(names, key=len, reverse=True) if n in p.name), "")
        if name:
            labelled.append((p, name, replace(p, name=p.name.replace(name, " ", 1)).words))
    return labelled


def _matched(first: Sequence[Printed], second: Sequence[Printed]) -> list[tuple[Printed, Printed]]:
    """One to one, in order; equal settings first, then such that do not contradict."""
    pairs: list[tuple[Printed, Printed]] = []
    used: set[int] = set()
    for strict, a, b in product((True, False), first, second):
        settings = dict(b.settings)
        equal = a.settings == b.settings or not strict
        equal &= all(settings.get(key, value) == value for key, value in a.settings)
        if equal and not {id(a), id(b)} & used and _common(a, b) is not None:
            used |= {id(a), id(b)}
            pairs.append((a, b))
    return sorted(pairs, key=lambda pair: pair[0].start)


def _one_word_apart(found: Sequence[Printed]) -> Iterator[tuple[Printed, Printed]]:
    """Names that say no quantity, and differ in one word: whose it is."""
    used: set[int] = set()
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            if len(a.words) != len(b.words) or len(a.words) < 2 or {id(a), id(b)} & used:
                continue
            unlike = [pair for pair in zip(a.words, b.words, strict=True) if pair[0] != pair[1]]
            if len(unlike) != 1 or any(len(w) < 3 or w.isdigit() for w in unlike[0]):
                continue
            if _common(a, b) is not None:
                used |= {id(a), id(b)}
                yield a, b


def _common(a: Printed, b: Printed) -> tuple[Printed, Printed] | None:
    """Both cut to the entries that both print; None where the shapes differ."""
    a, b = _thin(a, b.values.ndim), _thin(b, a.values.ndim)
    if a.values.ndim != b.values.ndim or not (a.floating and b.floating):
        return None
    cuts_a, cuts_b, sizes = [], [], []
    for axis, (size_a, size_b) in enumerate(zip(a.sizes, b.sizes, strict=True)):
        if size_a is not None and size_b is not None and size_a != size_b:
            return None
        size = size_a if size_a is not None else size_b
        if size is not None and max(a.values.shape[axis], b.values.shape[axis]) > size:
            return None
        at_a, at_b = (_absolute(p.places[axis], size) for p in (a, b))
        _, cut_a, cut_b = np.intersect1d(at_a, at_b, return_indices=True)
        order = np.argsort(cut_a)
        cuts_a.append(cut_a[order])
        cuts_b.append(cut_b[order])
        sizes.append(size)
    if any(not cut.size for cut in cuts_a):
        return None
    return _cut(a, cuts_a, tuple(sizes)), _cut(b, cuts_b, tuple(sizes))


def _absolute(places: Integers, size: int | None) -> Integers:
    return places if size is None else np.where(places < 0, places + size, places)


def _cut(printed: Printed, cuts: Sequence[Integers], sizes: tuple[int | None, ...]) -> Printed:
    grid = np.ix_(*cuts) if cuts else ()
    places = tuple(
        _absolute(at[cut], size) for at, cut, size in zip(printed.places, cuts, sizes, strict=True)
    )
    values, units = np.asarray(printed.values[grid]), np.asarray(printed.units[grid])
    return replace(printed, values=values, units=units, places=places, sizes=sizes)


def _thin(printed: Printed, dimensions: int) -> Printed:
    """Without leading axes of length 1, as far as the other side has none."""
    while printed.values.ndim > dimensions and printed.sizes[0] == 1:
        values, units = printed.values[0], printed.units[0]
        printed = replace(
            printed, values=values, units=units, places=printed.places[1:], sizes=printed.sizes[1:]
        )
    return printed
