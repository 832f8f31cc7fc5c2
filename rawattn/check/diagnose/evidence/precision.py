"""What rounding is: the precisions of right results, and how well a prediction fits, row by row (a
token of a head), in units of the noise that rounding of its own operations makes there."""

import math
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.attention import FIRST, Bug, Given, Rounding, exact, solve
from rawattn.check.diagnose.engine.question import OF_SLOTS, Answers, Question, by_rows
from rawattn.check.diagnose.engine.steps import Floats, Step, times

FINE = 0.02  # of a tensor's size, more than float32 makes of any that is not next to 0
RMS_FIT, ROW_FIT = 2.5, 8.0  # units of noise: of all rows together, of the worst row


class Precision(NamedTuple):
    """``noise`` is that of ``rounding`` times ``factor``; at most a share ``most``."""

    name: str
    rounding: Rounding
    factor: float = 1.0
    most: float = 0.1


def to_dtype(dtype: type) -> Callable[[Floats], Floats]:
    return np.errstate(all="ignore")(lambda x: np.asarray(x).astype(dtype).astype(np.float64))


def to_tf32(x: Floats, half: int = 0x1000) -> Floats:
    """Rounded to the 10 bits of mantissa that TF32 keeps of float32; cut off with a half of 0."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(half)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x).astype(np.float64)


def ladder(dtype: np.dtype) -> tuple[Precision, ...]:
    """The precisions that a right computation on such arrays may have, the finest first."""
    if dtype == np.float64:
        # twice: what it is compared with is rounded as well
        ratio = 2 * float(np.finfo(np.float64).eps / np.finfo(np.float32).eps)
        return Precision("float64", _FLOAT32, ratio, FINE), *ladder(np.dtype(np.float32))
    if dtype == np.float32:
        return Precision("float32", _FLOAT32, most=FINE), Precision("TF32", _TF32)
    half = to_dtype(np.float16 if dtype == np.float16 else ml_dtypes.bfloat16)
    return (
        Precision(f"{dtype.name} operands, float32 sums", Rounding(to_dtype(np.float32), half)),
        Precision(f"{dtype.name} in every operation", Rounding(half, half), most=0.3),
    )


class Fit(NamedTuple):
    """``rms`` and ``worst`` row of the residual in units of noise; its part of the whole."""

    rms: float
    worst: float
    relative: float

    @property
    def good(self) -> bool:
        return self.rms <= RMS_FIT and self.worst <= ROW_FIT


def eps_of(x: np.ndarray) -> float:
    return float(ml_dtypes.finfo(x.dtype).eps)  # type: ignore[no-untyped-call]


def smallest_of(x: np.ndarray) -> float:
    return float(ml_dtypes.finfo(x.dtype).smallest_subnormal)  # type: ignore[no-untyped-call]


def defined(question: Question, name: str, right: Floats) -> np.ndarray:
    """Rows (tokens, heads) of a sequence, whose right value does not come from NaN inputs."""
    sequence = question.sequence_of(name)
    inside = sequence >= 0
    if name == "delta":  # what D is without keys, no bug knows
        inside &= np.array([*question.lengths_k, 0])[sequence] > 0
    nan = np.isnan(by_rows(name, right)).any(axis=2)
    if name in OF_SLOTS:  # what comes of NaN where a slot names nothing, nobody says
        nan |= np.isin(sequence, sequence[nan.any(axis=1)])[:, None]
    return np.asarray(inside[:, None] & ~nan)


def residual(found: Floats, wanted: Floats, rows: np.ndarray | slice) -> Floats:
    """found - wanted in these rows, (rows, columns): inf where one is not finite and unlike. A
    vector may hold NaN where inf was predicted: which of them comes out, the order of sums says."""
    a, b = found[rows], wanted[rows]
    with np.errstate(invalid="ignore"):
        difference = np.asarray(a - b)
    if np.isfinite(difference).all():
        return difference
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if a.shape[-1] > 1:
        same |= ~np.isfinite(a) & ~np.isfinite(b)
    difference = np.where(same, 0.0, difference)
    return np.where(np.isnan(difference), np.inf, difference)


def relative_residual(found: Floats, wanted: Floats, rows: np.ndarray | slice) -> float:
    """Root mean square of the residual over that of what was found."""
    difference = residual(found, wanted, rows)
    with np.errstate(over="ignore"):
        size, rms = (float(np.linalg.norm(x)) for x in (finite(found[rows]), difference))
    return rms / size if size and math.isfinite(rms) else (math.inf if rms else 0.0)


def rows_off(
    found: Floats, right: Floats, rows: np.ndarray, share: float, least: Floats | float = 0.0
) -> np.ndarray:
    """Which of some rows are off by more than a share of their size, that of all, and ``least``."""
    size = np.abs(finite(right)).max(axis=2)
    typical = size[rows].mean() if rows.any() else 0.0
    off = np.abs(residual(found, right, slice(None))).max(axis=2)
    return np.asarray(rows & (off > share * np.maximum(np.maximum(size, typical), least)))


def finite(x: Floats) -> Floats:
    return np.where(np.isfinite(x), x, 0.0)


def _row_rms(x: Floats) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.sqrt(np.mean(finite(x) ** 2, axis=-1)))


_FLOAT32, _TF32 = Rounding(to_dtype(np.float32), exact), Rounding(to_tf32, to_tf32, to_tf32)
# Sums of the squares of terms: what terms that cancel leave does not tell what rounding may do.
SQUARES: dict[str, Step] = {
    "L": lambda c: c.s**2 * (c.P * times(c.Q**2, c.K.T**2)).sum(axis=-1),
    "O": lambda c: times(c.P**2, c.V**2),
    "D": lambda c: (c.dO**2 * c.O**2).sum(axis=-1) + c.dL**2,
    "dS": lambda c: c.P**2 * (times(c.dO**2, c.V.T**2) + c.D[..., None]),
    "dY": lambda c: c.G**2 * c.dS,
    "dQ": lambda c: c.s**2 * times(c.dY, c.K**2),
    "dK": lambda c: c.s**2 * (c.dY.swapaxes(1, 2) @ c.Q**2),
    "dV": lambda c: (c.P**2).swapaxes(1, 2) @ c.dO**2,
}


def sizes(question: Question, stage: str, given: Given) -> Answers:
    """Of every row of a stage's results the size of what is added up in it, (tokens, heads); of
    second order that of all rows, since terms cancel there that no step has alone."""
    if stage not in FIRST:
        right = {n: by_rows(n, x) for n, x in solve(question, stage, given=given).items()}
        return {n: np.full(x.shape[:2], np.sqrt(np.mean(finite(x) ** 2))) for n, x in right.items()}
    with np.errstate(all="ignore"):
        squares = solve(question, stage, Bug("", steps=SQUARES), given=given)
        found = {n: np.sqrt(by_rows(n, x).mean(axis=2)) for n, x in squares.items() if x.ndim > 1}
    return {n: finite(x) for n, x in found.items()}


def fit(
    question: Question,
    name: str,
    found: np.ndarray,
    wanted: Floats,
    rounded: Floats,
    factor: float,
    rows: np.ndarray,
    went_in: Floats | float = 0.0,
) -> Fit:
    """``found`` against ``wanted``, whose noise shows in ``rounded``; went_in: sizes of rows."""
    a, b, c = (by_rows(name, x) for x in (found, wanted, rounded))
    difference = residual(a, b, rows)
    if not difference.size or not np.isfinite(difference).all():
        return Fit(*[math.inf if difference.size else 0.0] * 3)
    size = _row_rms(b)
    with np.errstate(invalid="ignore"):
        error = factor * _row_rms(c - b)
    sequence = question.sequence_of(name)
    typical, scale = of_sequence = np.stack([error, size])
    for b_index in np.unique(sequence):
        here = of_sequence[:, sequence == b_index]
        of_sequence[:, sequence == b_index] = np.sqrt(np.mean(here**2, axis=1, keepdims=True))
    summands = max((*question.lengths_q, *question.lengths_k, question.q.shape[2])) * question.group
    accumulator = np.finfo(np.float64 if factor < 1 else np.float32).eps
    floor = accumulator * math.sqrt(summands) * np.maximum(scale, went_in)
    noise = np.sqrt(error**2 + typical**2 + floor**2 + (eps_of(found) / 2 * size) ** 2)[rows]
    with np.errstate(over="ignore"):
        ratio = np.minimum(_row_rms(difference) / np.maximum(noise, smallest_of(found)), 1e150)
    return Fit(float(np.sqrt(np.mean(ratio**2))), float(ratio.max()), relative_residual(a, b, rows))
