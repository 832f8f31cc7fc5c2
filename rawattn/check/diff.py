"""Is this array right? The tolerance rule of rawattn, and where in an array the error sits.

    error <= 2 * (error of a dense reference in the same dtype) + atol + drift
    atol  = 2 * max|(ref + c - c) - ref|                 computed in the candidate's dtype
    c     = 0.3 * max|ref|                               of the tensor that is judged
    drift = eps(accumulator) * sqrt(terms) * max|ref|    terms: the longest sum behind an element

Errors are the largest absolute difference from the float64 reference. Every summand grows with the
data, so small tensors are judged as sharply as large ones, and a reference of zeros allows zeros
alone. ``drift`` is the floor for float32 and float64 results: their dense reference sums in blocks,
so its error says nothing of an honest serial sum, whose roundings walk about sqrt(terms) steps
away. The accumulator is float32, or float64 for float64 results, so 16-bit results hardly feel it.
"""

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawattn.check.transfer import Array, to_numpy

Float64 = npt.NDArray[np.float64]


FLOATING = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ``judge`` found: the largest error, what was allowed, and "pass", "FAIL" or "vacuous".

    Vacuous: an array of zeros would have passed, so passing proves nothing. ``note`` says what the
    two numbers do not.
    """

    error: float
    allowed: float
    verdict: str
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict == "pass"


@dataclass(frozen=True, slots=True)
class Share:
    """The largest error within one sequence and head; ``sequence`` -1 is the rows past the end."""

    sequence: int
    head: int
    error: float


def judge(
    candidate: Array,
    reference: Array,
    same_dtype_reference: Array,
    *,
    terms: int = 1,
    zeros: npt.NDArray[np.bool_] | None = None,
    against: Array | None = None,
) -> Verdict:
    """Compare ``candidate`` (in its own dtype) with the float64 ``reference``.

    same_dtype_reference: the dense computation rounded to the candidate's dtype, on the same data.
    terms: length of the longest sum behind an element. zeros: mask, broadcastable to the arrays, of
    the elements that must be exactly 0; where that is all of them, an all-zero result passes, and
    the note says so. against: what to compare with in place of ``reference``; it is no more exact
    than the candidate, but the allowance holds the expected error twice, once for each; a
    difference where zeros are due counts like any other.
    NaN, inf and -inf must stand in equal places. Raises nothing on bad candidates: they FAIL.
    """
    candidate, exact = to_numpy(candidate), to_numpy(reference)
    target = exact if against is None else to_numpy(against)
    if candidate.shape != target.shape:
        return _fail(f"shape {candidate.shape}, expected {target.shape}")
    if candidate.dtype not in FLOATING:
        return _fail(f"dtype {candidate.dtype}, expected a floating one of 16 to 64 bits")
    allowed = allowance(exact, to_numpy(same_dtype_reference), candidate.dtype, terms)
    found, wanted = candidate.astype(np.float64), target.astype(np.float64)
    misplaced = _misplaced(found, wanted)
    if misplaced.any():
        at = tuple(int(i) for i in np.argwhere(misplaced)[0])
        note = f"{misplaced.sum()} elements NaN or inf unlike the reference, first at {at}"
        return Verdict(math.inf, allowed, "FAIL", note)
    difference = distance(found, wanted)
    error = float(difference.max(initial=0.0))
    if zeros is not None:
        zeros = np.broadcast_to(zeros, found.shape)
        if against is None and found[zeros].any():
            at = tuple(int(i) for i in np.argwhere(zeros & (found != 0))[0])
            return Verdict(error, allowed, "FAIL", f"not exactly 0 at {at}, where it must be")
    if not error <= allowed:
        at = tuple(int(i) for i in np.unravel_index(difference.argmax(), difference.shape))
        note = f"worst at {at}: {found[at]:.4g}, not {wanted[at]:.4g}"
        return Verdict(error, allowed, "FAIL", note)
    if zeros is not None and zeros.all() and not found.any():
        return Verdict(error, allowed, "pass", "all zero by definition" if zeros.size else "empty")
    finite = wanted[np.isfinite(wanted)]
    if not finite.size:
        return Verdict(error, allowed, "pass", "nowhere finite by definition")
    if np.abs(finite).max() <= allowed:
        return Verdict(error, allowed, "vacuous", "zeros would pass")
    return Verdict(error, allowed, "pass")


def agree(first: float, second: float, allowed: float, *, zero: bool = False) -> Verdict:
    """Compare two numbers that must be the same; ``zero``: both are 0 by definition.

    Vacuous like ``judge``: where two zeros would have passed that need not be any.
    """
    error = abs(first - second)
    if not error <= allowed:
        return Verdict(error, allowed, "FAIL", f"{first:.6g} one way, {second:.6g} the other")
    if zero and not first and not second:
        return Verdict(error, allowed, "pass", "all zero by definition")
    if abs(first) <= allowed:
        return Verdict(error, allowed, "vacuous", "zeros would pass")
    return Verdict(error, allowed, "pass")


def allowance(reference: Float64, same: Float64, dtype: np.dtype[Any], terms: int) -> float:
    """The largest error that a result of ``dtype`` may have; 0 where no element is finite, or all
    of these are 0."""
    finite = np.isfinite(reference)
    exact = reference[finite]
    size = float(np.abs(exact).max(initial=0.0))
    if not size:
        return 0.0
    # By a power of two, which rounds nothing: ref + c may pass the largest float16.
    unit = math.ldexp(1.0, math.frexp(size)[1] - 1)
    typed, c = (exact / unit).astype(dtype), dtype.type(0.3 * size / unit)
    shifted = ((typed + c) - c).astype(np.float64)
    atol = 2 * unit * np.abs(shifted - typed.astype(np.float64)).max()
    accumulator = np.finfo(np.float64 if dtype == np.float64 else np.float32)
    drift = accumulator.eps * math.sqrt(terms) * size
    return float(2 * np.abs(same[finite] - exact).max() + atol + drift)


def breakdown(
    candidate: Array,
    reference: Array,
    sequence_of: npt.NDArray[np.int64],
    *,
    token_axis: int = 0,
) -> list[Share]:
    """Errors by sequence and head, largest first.

    Arrays are (tokens, heads, ...), or (heads, tokens) with ``token_axis=1``. sequence_of: the
    sequence of every token, -1 past the last one. NaN or inf out of place count as an infinite
    error.
    """
    found, wanted = (
        np.moveaxis(to_numpy(a).astype(np.float64), token_axis, 0) for a in (candidate, reference)
    )
    difference = np.where(_misplaced(found, wanted), math.inf, distance(found, wanted))
    if difference.ndim > 2:
        difference = difference.max(axis=2, initial=0.0)
    shares = []
    for sequence in np.unique(sequence_of):
        worst = difference[sequence_of == sequence].max(axis=0, initial=0.0)
        shares += [Share(int(sequence), head, float(error)) for head, error in enumerate(worst)]
    return sorted(shares, key=lambda share: -share.error)


def _fail(note: str) -> Verdict:
    return Verdict(math.inf, 0.0, "FAIL", note)


def _misplaced(found: Float64, wanted: Float64) -> npt.NDArray[np.bool_]:
    """Where exactly one of the two is NaN, or inf, or -inf."""
    same: npt.NDArray[np.bool_] = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    return ~(same | (np.isfinite(found) & np.isfinite(wanted)))


def distance(found: Float64, wanted: Float64) -> Float64:
    """|found - wanted|, 0 where either is not finite."""
    finite = np.isfinite(found) & np.isfinite(wanted)
    return np.asarray(np.abs(np.where(finite, found, 0.0) - np.where(finite, wanted, 0.0)))
