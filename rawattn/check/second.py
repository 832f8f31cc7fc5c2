"""What a case must give beyond first derivatives: targets of ``jvp`` and ``double_backward``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from rawattn.check.cases import Case, Direction, dtype_of, lse_dtype
from rawattn.check.expected import (
    Expected,
    Float64,
    Symmetry,
    Target,
    clean,
    coarse,
    expect,
    row_target,
    target,
)
from rawattn.check.transfer import Array, to_numpy
from rawattn.reference import second

SECOND = ("ddout", "ddlse", "gq", "gk", "gv")
HESSIAN = ("gq", "gk", "gv")  # the second derivatives times a direction
OF_SCORES = ("tlse", "ddlse", "gv")  # 0 in a direction that leaves the scores as they are
Compute = Callable[[Direction, Any], tuple[Float64, ...]]  # results in a direction, with a rounding


@lru_cache(maxsize=2)
def expect_second(case: Case) -> Expected:
    """``expect``, with the targets of ``jvp`` and ``double_backward`` too, and with ``symmetry``.

    "jvp out" and "jvp lse" are those results of ``jvp`` that ``forward`` gives as well.
    """
    first = expect(case)
    t, out, lse = first.tensors, first.targets["out"], first.targets["lse"]
    qkv, offsets = (clean(t.q), clean(t.k), clean(t.v)), (t.cu_seqlens_q, t.cu_seqlens_k)
    dout, dlse = clean(t.dout), None if t.dlse is None else clean(t.dlse)
    mask: dict[str, Any] = {"window": case.mask_window, "softmax_scale": case.softmax_scale}

    def jvp(direction: Direction, rounding: Any) -> tuple[Float64, ...]:
        inputs = (*qkv, *map(_clean, direction), *offsets)
        _, tout, _, tlse = second.jvp(*inputs, rounding=rounding, **mask)
        return tout, tlse

    def double_backward(direction: Direction, rounding: Any) -> tuple[Float64, ...]:
        passed = (
            a.reference if rounding is None else a.reference.astype(a.dtype) for a in (out, lse)
        )
        inputs = (*map(_clean, direction), dout, *qkv, *passed, *offsets)
        return second.double_backward(*inputs, dlse=dlse, rounding=rounding, **mask)

    targets = first.targets | {"jvp out": out, "jvp lse": lse}
    targets |= _targets(case, t.direction, ("tout", "tlse"), jvp)
    targets |= _targets(case, t.direction, SECOND, double_backward)
    u = _across(case, targets)
    mirrored = _targets(case, u, SECOND, double_backward)
    allowed = sum(
        targets[name].allowance() * _norm(part) + mirrored[name].allowance() * _norm(own)
        for name, part, own in zip(HESSIAN, u, t.direction, strict=True)
    )
    zero = not any(targets[name].reference.any() for name in HESSIAN)
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


def _targets(
    case: Case, direction: Direction, names: tuple[str, ...], compute: Compute
) -> dict[str, Target]:
    """Targets of the results of ``compute``. Those for a row and head have lse's precision."""
    exact = compute(direction, None)
    same = compute(direction, coarse(dtype_of(case.dtype)))
    same_rows = compute(direction, coarse(lse_dtype(case.dtype)))
    given = [part is not None for part in direction]
    targets = {}
    for name, truth, dense, dense_rows in zip(names, exact, same, same_rows, strict=True):
        zero = not any(given[:2] if name in OF_SCORES else given)
        if name.endswith("lse"):
            zeros = (case.unseen("q") | zero)[None]
            targets[name] = row_target(case, truth, dense_rows, case.poisoned, zeros)
        else:
            side = "k" if name in ("gk", "gv") else "q"
            targets[name] = target(case, side, truth, dense, zero)
    return targets


def _across(case: Case, targets: dict[str, Target]) -> Direction:
    """The direction in which H answers the case's own most: H w, brought to unit size.

    An inner product of random directions would be hardly larger than its own rounding.
    """

    def part(name: str, side: str) -> Array:
        exact = targets[name].reference
        size = np.sqrt(np.square(exact[exact != 0]).mean()) if exact.any() else 1.0
        unit = (exact / size).astype(dtype_of(case.dtype))
        unit[~case.healthy(side) | (case.sequence_of(side) < 0)] = np.nan
        unit.flags.writeable = False
        return unit

    return part("gq", "q"), part("gk", "k"), part("gv", "k")


def _clean(part: Array | None) -> Float64 | None:
    return None if part is None else clean(part)


def _norm(part: Array | None) -> float:
    return 0.0 if part is None else float(np.linalg.norm(clean(part)))
