"""What a case must give beyond first derivatives: targets of ``jvp`` and ``double_backward``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from rawattn.check.cases import Case, Direction, dtype_of, lse_dtype
from rawattn.check.exact import HESSIAN, SIDES, Results, clean, of_direction
from rawattn.check.expected import Expected, Symmetry, Target, coarse, expect, target
from rawattn.check.transfer import Array, to_numpy

__all__ = ["HESSIAN", "expect_second", "inner"]

OF_SCORES = ("tlse", "ddlse", "gv")  # 0 in a direction that leaves the scores as they are
Compute = Callable[[Direction, Any], Results]  # results in a direction, with a rounding


@lru_cache(maxsize=2)
def expect_second(case: Case) -> Expected:
    """``expect``, with the targets of ``jvp`` and ``double_backward`` too, and with ``symmetry``.

    "jvp out" and "jvp lse" are those results of ``jvp`` that ``forward`` gives as well.
    """
    first = expect(case)
    t, out, lse = first.tensors, first.targets["out"], first.targets["lse"]

    def double_backward(direction: Direction, rounding: Any) -> Results:
        passed_out, passed_lse = (
            a.reference if rounding is None else a.reference.astype(a.dtype) for a in (out, lse)
        )
        return first.exact.double_backward(direction, passed_out, passed_lse, rounding)

    targets = first.targets | {"jvp out": out, "jvp lse": lse}
    targets |= _targets(first, t.direction, first.exact.jvp)
    targets |= _targets(first, t.direction, double_backward)
    u = _across(first, targets)
    mirrored = _targets(first, u, double_backward)
    allowed = sum(
        targets[name].allowance() * _norm(part) + mirrored[name].allowance() * _norm(own)
        for name, part, own in zip(of_direction(case), u, t.direction, strict=False)
        if name in targets
    )
    zero = not any(targets[name].reference.any() for name in of_direction(case) if name in targets)
    return replace(first, targets=targets, symmetry=Symmetry(u, allowed, zero))


def inner(direction: Direction, arrays: Sequence[Array]) -> float:
    """The inner product over the rows of healthy sequences, where ``direction`` (NumPy) is no NaN;
    NaN where shapes differ."""
    total = 0.0
    for part, array in zip(direction, map(to_numpy, arrays), strict=True):
        if part is not None:
            if part.shape != array.shape:
                return math.nan
            wide = part.astype(np.float64)
            there = ~np.isnan(wide)
            with np.errstate(all="ignore"):  # whatever a candidate gives
                total += float((wide[there] * array.astype(np.float64)[there]).sum())
    return total


def _targets(first: Expected, direction: Direction, compute: Compute) -> dict[str, Target]:
    """Targets of the results of ``compute``. Those for a row and head have lse's precision."""
    case = first.case
    truth = compute(direction, None)
    same = compute(direction, coarse(dtype_of(case.dtype)))
    same_rows = compute(direction, coarse(lse_dtype(case.dtype)))
    given = [part is not None for part in direction]
    targets = {}
    for name in truth:
        zero = not any(given[:2] + given[3:] if name in OF_SCORES else given)
        if SIDES[name] == "row":
            zeros = first.exact.zeros["q"][..., 0].T & (not case.sinks)  # those are in every lse
            targets[name] = target(case, name, truth[name], same_rows[name], zeros | zero)
        else:
            zeros = first.exact.zeros[SIDES[name]]
            targets[name] = target(case, name, truth[name], same[name], zeros | zero)
    return targets


def _across(first: Expected, targets: dict[str, Target]) -> Direction:
    """The direction in which H answers the case's own most: H w, brought to unit size.

    An inner product of random directions would be hardly larger than its own rounding. It is NaN
    where the case's arrays are.
    """
    t = first.tensors

    def part(name: str, origin: Array | None) -> Array | None:
        if name not in targets or origin is None:
            return None
        exact = targets[name].reference
        size = np.sqrt(np.square(exact[exact != 0]).mean()) if exact.any() else 1.0
        unit = (exact / size).astype(origin.dtype)
        unit[np.isnan(origin)] = np.nan
        unit.flags.writeable = False
        return unit

    return tuple(map(part, of_direction(first.case), t.origins))


def _norm(part: Array | None) -> float:
    return 0.0 if part is None else float(np.linalg.norm(clean(part)))
