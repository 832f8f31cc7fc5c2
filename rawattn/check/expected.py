"""What a case must give: every tensor in float64, and as a dense same-dtype computation has it."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rawattn.check.cases import Case, Direction, Tensors, dtype_of, lse_dtype, make
from rawattn.check.diff import Share, Verdict, agree, allowance, breakdown, judge
from rawattn.check.transfer import Array
from rawattn.reference import dense

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Target:
    """What one tensor must be, and its verdicts.

    The float64 ``reference``; what the dense computation in ``dtype`` gives; the sequence of every
    token along ``token_axis`` (-1 past the last one); the ``undefined`` ones among these sequences;
    the tokens that must be exactly ``zeros`` (None: no rule); the longest sum behind an element.
    """

    reference: Float64
    same_dtype: Float64
    dtype: np.dtype[Any]
    sequence_of: npt.NDArray[np.int64]
    undefined: tuple[int, ...]
    zeros: npt.NDArray[np.bool_] | None
    token_axis: int
    terms: int

    def judge(self, candidate: Array, against: Array | None = None) -> Verdict:
        """The verdict on ``candidate`` (NumPy), or on its difference from ``against``."""
        if candidate.dtype != self.dtype:
            return Verdict(np.inf, 0.0, "FAIL", f"dtype {candidate.dtype}, expected {self.dtype}")
        if candidate.shape != self.reference.shape:
            return judge(candidate, self.reference, self.same_dtype)
        return judge(
            self._counted(candidate),
            self._counted(self.reference),
            self._counted(self.same_dtype),
            terms=self.terms,
            zeros=None if self.zeros is None else self._counted(self.zeros),
            against=None if against is None else self._counted(against),
        )

    def allowance(self) -> float:
        """The largest error that an element may have."""
        exact, same = self._counted(self.reference), self._counted(self.same_dtype)
        return allowance(exact, same, self.dtype, self.terms)

    def _counted(self, array: Array) -> Array:
        """Those tokens of ``array`` that are defined."""
        counted = ~np.isin(self.sequence_of, self.undefined)
        return np.compress(counted, array, axis=self.token_axis)

    def shares(self, candidate: Array, against: Array | None = None) -> list[Share]:
        """The errors of ``candidate`` by sequence and head; none if its shape is another."""
        wanted = self.reference if against is None else against
        if candidate.shape != wanted.shape:
            return []
        shares = breakdown(candidate, wanted, self.sequence_of, token_axis=self.token_axis)
        return [share for share in shares if share.sequence not in self.undefined]


@dataclass(frozen=True, slots=True)
class Symmetry:
    """That second derivatives H are symmetric: <u, H w> = <w, H u>, where w is a case's direction
    and u this one. The two may be ``allowed`` apart; both are 0 by definition where ``zero``.
    """

    direction: Direction
    allowed: float
    zero: bool

    def judge(self, products: Array) -> Verdict:
        """The verdict on the two inner products."""
        first, second = map(float, products)
        return agree(first, second, self.allowed, zero=self.zero)


@dataclass(frozen=True, slots=True)
class Expected:
    """Inputs and targets of one case. ``out`` and ``lse`` are what a backward pass is given: the
    reference's, rounded, and NaN in every row that has nothing to do with a healthy sequence."""

    case: Case
    tensors: Tensors
    out: Array
    lse: Array
    targets: dict[str, Target]
    symmetry: Symmetry | None = None


@lru_cache(maxsize=2)
def expect(case: Case, seed: int = 0) -> Expected:
    """Compute the targets of "out", "lse", "delta", "dq", "dk" and "dv" for ``case``."""
    tensors = make(case, seed)
    # The poison is taken out here: the reference shall not depend on its own isolation.
    q, k, v, dout = (clean(a) for a in (tensors.q, tensors.k, tensors.v, tensors.dout))
    dlse = None if tensors.dlse is None else clean(tensors.dlse)
    offsets = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    mask: dict[str, Any] = {"window": case.mask_window, "softmax_scale": case.softmax_scale}
    dtype, wide = dtype_of(case.dtype), lse_dtype(case.dtype)

    exact_out, exact_lse = dense.forward(q, k, v, *offsets, **mask)
    same_out, _ = dense.forward(q, k, v, *offsets, rounding=coarse(dtype), **mask)
    _, same_lse = dense.forward(q, k, v, *offsets, rounding=coarse(wide), **mask)
    out, lse = exact_out.astype(dtype), exact_lse.astype(wide)
    backward: dict[str, Any] = {"dlse": dlse, **mask}
    exact = dense.backward(dout, q, k, v, exact_out, exact_lse, *offsets, **backward)
    backward["rounding"] = coarse(dtype)
    same = dense.backward(dout, q, k, v, out, lse, *offsets, **backward)
    exact_delta, same_delta = (_delta(t, out, dout, dlse) for t in (np.float64, coarse(wide)))

    targets = {
        "out": target(case, "q", exact_out, same_out),
        "lse": row_target(case, exact_lse, same_lse, case.poisoned),
        "delta": row_target(case, exact_delta, same_delta, (*case.poisoned, -1)),
        "dq": target(case, "q", exact[0], same[0]),
        "dk": target(case, "k", exact[1], same[1]),
        "dv": target(case, "k", exact[2], same[2]),
    }
    outside = np.isin(case.sequence_of("q"), (*case.poisoned, -1))
    out[outside] = np.nan
    lse[:, outside] = np.nan
    out.flags.writeable = lse.flags.writeable = False
    return Expected(case, tensors, out, lse, targets)


def target(case: Case, side: str, exact: Float64, same: Float64, zero: bool = False) -> Target:
    """The target of a result with the rows of ``side`` "q" or "k"; ``zero``: all of it must be."""
    dtype, zeros = dtype_of(case.dtype), case.unseen(side)[:, None, None] | zero
    same = _as_precise_as(dtype, exact, same)
    return Target(exact, same, dtype, case.sequence_of(side), case.poisoned, zeros, 0, case.terms)


def row_target(
    case: Case,
    exact: Float64,
    same: Float64,
    undefined: tuple[int, ...],
    zeros: npt.NDArray[np.bool_] | None = None,
) -> Target:
    """The target of a number for each row and head, like lse."""
    dtype = lse_dtype(case.dtype)
    same = _as_precise_as(dtype, exact, same)
    return Target(exact, same, dtype, case.sequence_of("q"), undefined, zeros, 1, case.terms)


def clean(array: Array) -> Float64:
    """``array`` in float64, with 0 for NaN."""
    return np.asarray(np.nan_to_num(array.astype(np.float64)))


def coarse(dtype: np.dtype[Any]) -> Any:
    """The precision whose errors show those of ``dtype``: its own, but float32 for float64."""
    return np.dtype(np.float32) if dtype == np.float64 else dtype


def _as_precise_as(dtype: np.dtype[Any], exact: Float64, same: Float64) -> Float64:
    """``same``, for float64 with the errors of float32 made smaller by the ratio of their eps."""
    if dtype != np.float64:
        return same
    scale = np.finfo(np.float64).eps / np.finfo(np.float32).eps
    error = np.subtract(same, exact, out=np.zeros_like(exact), where=np.isfinite(exact))
    return exact + scale * error


def _delta(dtype: Any, out: Array, dout: Float64, dlse: Float64 | None) -> Float64:
    """D = dO . O - dL of the passed out, added up in ``dtype``; (num_heads_q, total_q)."""
    rows = (out.astype(dtype) * dout.astype(dtype)).sum(axis=-1).T
    return np.asarray(rows if dlse is None else rows - dlse.astype(dtype), dtype=np.float64)
