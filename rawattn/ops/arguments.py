"""The bytes of a kernel's ``struct Args``: how arrays and a problem's numbers enter it."""

import struct
from typing import TYPE_CHECKING

from rawattn.problem import Problem

if TYPE_CHECKING:
    from rawattn.arrays import View

_SIZES = "7if0q"  # batch .. window_right, softmax_scale; padded as C++ pads a struct


def layout(fields: str, behind: str = "") -> struct.Struct:
    """The layout of a ``struct Args``: a "T" for each Tensor and a "P" for each pointer in it.

    Then come ``sizes``, and what stands ``behind`` them, in the letters of ``struct``.
    """
    return struct.Struct("@" + fields.replace("T", "Pqq") + _SIZES + behind)


def tensor(view: "View | None") -> tuple[int, int, int]:
    """The fields of a ``Tensor``: pointer, token stride, head stride; a null pointer for None."""
    return (view.ptr, *view.strides[:2]) if view else (0, 0, 0)  # type: ignore[return-value]


def pointer(view: "View | None") -> int:
    """A plain pointer; null for None."""
    return view.ptr if view else 0


def sizes(problem: Problem) -> tuple[int | float, ...]:
    """What every attention kernel's ``struct Args`` ends with."""
    return (
        problem.batch,
        problem.total_q,
        problem.total_k,
        problem.num_heads_q,
        problem.num_heads_kv,
        problem.window_left,
        problem.window_right,
        problem.softmax_scale,
    )
