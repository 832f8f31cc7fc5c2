"""What a comparison is fed: right results, and wrong ones of every kind, each with its reference.

What counts as wrong leaves room for rounding: an error above GENEROUS units of the dtype's
rounding (eps) of the largest element.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawattn.check.cases import dtype_of

Float64 = npt.NDArray[np.float64]
Shape = tuple[int, ...]

GENEROUS = 4.0
LARGEST = 3.0  # of the data, in standard deviations

PAIRED = ("x = 0", "x = 0.5 ref", "x = 4 ref", "x = -ref")  # also with the arguments swapped
SWAPPED = ", arguments swapped"
PLACES = ("rows shifted by one", "transposed at equal size")


@dataclass(frozen=True)
class Pair:
    """What a comparison is fed, and what is due: "refuse" or "pass"."""

    name: str
    kind: str
    x: np.ndarray
    ref: np.ndarray
    due: str = "refuse"

    @property
    def error(self) -> float:
        """The largest error in units of the largest element; inf for NaN and other shapes."""
        if self.x.shape != self.ref.shape or not self.x.size:
            return math.inf
        found, wanted = self.x.astype(np.float64), self.ref.astype(np.float64)
        error, largest = float(np.abs(found - wanted).max()), float(np.abs(wanted).max())
        return error / largest if math.isfinite(error) and largest else math.inf


def rights(shape: Shape, dtype: str, *, size: float = 1.0, wide: bool = False) -> list[Pair]:
    """Right results of ``dtype`` with their references, float64 where ``wide``; mildest first."""
    rng = np.random.default_rng(0)
    exact, kind = _draw(shape, rng, size), dtype_of(dtype)
    ref = exact if wide else exact.astype(kind)
    ulps = eps_of(dtype) * 2.0 ** np.floor(np.log2(np.abs(exact) + np.finfo(np.float64).tiny))
    accumulator = min(eps_of(dtype), eps_of("float32")) * np.abs(exact).max()
    found = {
        "the reference, rounded to x's dtype": exact,
        "the result of another rounding, off by at most an ulp": exact
        + 0.25 * ulps * rng.uniform(-1, 1, shape),
        "the same sums in another order": exact + accumulator * rng.uniform(-1, 1, shape),
    }
    return [Pair(name, "right", x.astype(kind), ref, "pass") for name, x in found.items()]


def wrongs(shape: Shape, dtype: str, *, size: float = 1.0, wide: bool = False) -> list[Pair]:
    """Wrong results of ``dtype``, each made of a right one.

    ``shape``: (tokens, width), (tokens, heads, width), or (batch, heads, tokens, width) with
    sequences of one length; else there are three sequences.
    """
    rng = np.random.default_rng(0)
    exact, kind = _draw(shape, rng, size), dtype_of(dtype)
    typed = np.dtype(np.float64) if wide else kind
    ref, x = exact.astype(typed), exact.astype(kind)
    pairs = []
    for name, group, changed in _changed(exact, rng, eps_of(dtype)):
        pair = Pair(name, group, changed if group == "integers" else changed.astype(kind), ref)
        if pair.error > GENEROUS * eps_of(dtype):
            pairs.append(pair)
            if name in PAIRED:
                pairs.append(Pair(name + SWAPPED, "swapped", ref, pair.x))
    shapes = (
        ("x of shape (1, ...) where ref repeats it", x[:1], np.broadcast_to(ref[:1], shape)),
        ("an axis too many, x = ref[None]", x[None], ref),
        ("one too few along the first axis", x[:-1], ref),
        ("one too many along the first axis", np.concatenate([x, x[:1]]), ref),
        ("an empty x", x[:0], ref),
    )
    pairs += [Pair(name, "shape", a, b) for name, a, b in shapes if a.shape != b.shape]
    return [*pairs, Pair("x and ref both 0", "vacuous", np.zeros_like(x), np.zeros_like(ref))]


def _changed(
    exact: Float64, rng: np.random.Generator, eps: float
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name, kind and values of wrong results of the right shape."""
    batched = exact.ndim == 4  # with heads first
    tokens_first = (
        exact.swapaxes(1, 2) if batched else exact.reshape(len(exact), -1, exact.shape[-1])
    )
    rows = tokens_first.reshape(-1, *tokens_first.shape[-2:])  # tokens, heads, width
    tokens, heads, _ = rows.shape
    lengths = [tokens // 5, tokens // 3, tokens - tokens // 5 - tokens // 3]
    lengths = [exact.shape[2]] * len(exact) if batched else [n for n in lengths if n]
    largest = np.abs(rows).max(initial=0.0)

    def back(changed: Float64) -> Float64:
        found = changed.reshape(tokens_first.shape)
        return found.swapaxes(1, 2) if batched else found.reshape(exact.shape)

    def spoiled(where: Any, values: Any) -> Float64:
        changed = rows.copy()
        changed[where] = values
        return back(changed)

    for factor in (0.0, 0.5, 1.05, 1.43, 2.0, 4.0, -1.0):
        name = {0.0: "0", -1.0: "-ref"}.get(factor, f"{factor:g} ref")
        yield f"x = {name}", "scaled" if factor else "zeros", exact * factor
    yield PLACES[0], "places", back(np.roll(rows, 1, axis=0))
    axes = (1, 0, 2) if heads > 1 else (2, 1, 0)
    yield PLACES[1], "places", back(rows.transpose(axes).reshape(rows.shape))
    if heads > 1:
        yield "heads swapped", "places", back(rows[:, ::-1])
    other = _draw(rows.shape, rng, 1.0) * (largest / LARGEST)
    yield "other data of the same size", "part", back(other)
    first, second = slice(0, lengths[0]), slice(lengths[0], sum(lengths[:2]))
    if len(lengths) > 1:
        taken = rows[first][np.arange(second.stop - second.start) % lengths[0]]
        yield "a sequence taken from its neighbour", "part", spoiled(second, taken)
        slope = "the first sequence 1.43 times too large (padded keys)"
        yield slope, "part", spoiled(first, 1.43 * rows[first])
    yield "a row of zeros", "row", spoiled(tokens // 2, 0.0)
    middle = tuple(n // 2 for n in rows.shape)
    yield "one NaN", "nan", spoiled(middle, np.nan)
    yield "one inf", "nan", spoiled(middle, np.inf)
    yield "all NaN", "nan", spoiled(..., np.nan)
    at = np.unravel_index(np.abs(rows).argmax(), rows.shape)
    for share in (1.0, 0.1, 0.01):
        name = f"the largest element off by {share:.0%}"
        yield name, "element", spoiled(at, (1 + share) * rows[at])
    for share, words in ((0.25, "25%"), (16 * eps, "16 eps")):
        for sign, way in ((1, "large"), (-1, "small")):
            name = f"every element too {way} by {words} of the largest"
            yield name, "offset", exact + sign * share * largest
    yield "x cut to int32", "integers", exact.astype(np.int32)


def _draw(shape: Shape, rng: np.random.Generator, size: float) -> Float64:
    return np.asarray(rng.standard_normal(shape).clip(-LARGEST, LARGEST) * size)


def eps_of(dtype: str) -> float:
    return float(ml_dtypes.finfo(dtype_of(dtype)).eps)  # type: ignore[no-untyped-call]


def range_of(dtype: str) -> tuple[float, float]:
    """The sizes of data for which wrong results of a dtype are finite and its normal numbers."""
    info = ml_dtypes.finfo(dtype_of(dtype))  # type: ignore[no-untyped-call]
    return float(info.tiny), float(info.max) / 64
