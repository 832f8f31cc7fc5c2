"""What a case must give: every tensor in float64, and as a dense same-dtype computation has it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rawattn.check.cases import Case, Direction, Tensors, dtype_of, lse_dtype
from rawattn.check.diff import Share, Verdict, agree, allowance, breakdown, judge
from rawattn.check.exact import SIDES, Exact, Float64, Results, exact, sliding
from rawattn.check.sparse_cases import SparseCase
from rawattn.check.transfer import Array

Bools = npt.NDArray[np.bool_]


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
    zeros: Bools | None
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
        """The errors of ``candidate`` by sequence and head; none if its shape is another, or it is
        of heads alone."""
        wanted = self.reference if against is None else against
        if candidate.shape != wanted.shape or wanted.ndim == 1:
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
    exact: Exact
    out: Array
    lse: Array
    targets: dict[str, Target]
    symmetry: Symmetry | None = None


@lru_cache(maxsize=2)
def expect(case: Case, seed: int = 0) -> Expected:
    """Compute the targets of "out", "lse", "delta" and the gradients for ``case``.

    A sparse case has no "delta", but perhaps the results of a sliding branch.
    """
    tensors, reference = exact(case, seed)
    dtype, wide = dtype_of(case.dtype), lse_dtype(case.dtype)
    truth = reference.forward()
    out, lse = truth["out"].astype(dtype), truth["lse"].astype(wide)
    targets = _forward_targets(case, reference.zeros["q"], reference.forward)
    gradients = reference.backward(truth["out"], truth["lse"])
    same = reference.backward(out, lse, coarse(dtype))
    targets |= {
        name: target(case, name, gradients[name], same[name], reference.zeros[SIDES[name]])
        for name in gradients
    }
    if not isinstance(case, SparseCase):
        dout = reference.tensors[3]
        wanted, summed = (_delta(t, out, dout, reference.dlse) for t in (np.float64, coarse(wide)))
        delta = target(case, "lse", wanted, summed)
        targets["delta"] = replace(delta, undefined=(*case.poisoned, -1))
    elif case.sliding:
        compute, zeros = partial(sliding, case, reference), case.unseen("q")[:, None, None]
        targets |= _forward_targets(case, zeros, compute)
    outside = np.isin(case.sequence_of("q"), (*case.poisoned, -1))
    out[outside] = np.nan
    lse[:, outside] = np.nan
    out.flags.writeable = lse.flags.writeable = False
    return Expected(case, tensors, reference, out, lse, targets)


def target(
    case: Case, name: str, truth: Float64, same: Float64, zeros: Bools | None = None
) -> Target:
    """The target of a result called ``name``. Numbers for a row, slot or head have lse's precision;
    those for a head are of all sequences."""
    side = SIDES[name]
    dtype = (dtype_of if side in "qk" else lse_dtype)(case.dtype)
    same, token_axis = _as_precise_as(dtype, truth, same), int(side == "row")
    sequence_of = case.sequence_of("k" if side == "k" else "q")
    if side == "head":
        sequence_of = np.zeros(case.num_heads_q, dtype=np.int64)
    return Target(
        truth, same, dtype, sequence_of, case.poisoned, zeros, token_axis, case.terms_of(name)
    )


def _forward_targets(
    case: Case, zeros: Bools, compute: Callable[[Any], Results]
) -> dict[str, Target]:
    """Targets of an out with an lse that may be -inf."""
    truth, same = compute(None), compute(coarse(dtype_of(case.dtype)))
    same_rows = compute(coarse(lse_dtype(case.dtype)))
    return {
        name: target(case, name, truth[name], same[name], zeros)
        if SIDES[name] == "q"
        else target(case, name, truth[name], same_rows[name])
        for name in truth
    }


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
