"""The bytes of a kernel's ``struct Args``: how arrays and a problem's numbers enter it."""

import struct
from typing import TYPE_CHECKING

from rawattn.problem import Problem, Selection
from rawattn.variants import Variant, block_keys

if TYPE_CHECKING:
    from rawattn.arrays import View

_SIZES = "7if"  # batch .. window_right, softmax_scale


def layout(fields: str, behind: str = "") -> struct.Struct:
    """The layout of a ``struct Args``: a "T" for each Tensor and a "P" for each pointer in it.

    Then come ``sizes``, and what stands ``behind`` them, in the letters of ``struct``; the end is
    padded as C++ pads a struct.
    """
    return struct.Struct("@" + fields.replace("T", "Pqq") + _SIZES + behind + "0q")


SELECTION = "5i"  # what ``selection_sizes`` gives, behind ``sizes``


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


def selection_sizes(selection: Selection) -> tuple[int, ...]:
    """What ``sizes`` are followed by in the ``struct Args`` of a sparse kernel."""
    return (
        selection.num_heads_sel,
        selection.num_selected,
        selection.width,
        selection.block_size,
        selection.chunk,
    )


def query_tiles(variant: Variant, problem: Problem, selection: Selection) -> int:
    """CTAs along the tokens of a kernel of the RING_STEMS: the most that there can be."""
    return problem.total_q // (variant.cfg.block_m // selection.group(problem)) + problem.batch + 1


def key_tiles(variant: Variant, problem: Problem, selection: Selection) -> int:
    """CTAs along the keys of a sparse kernel with key blocks outer: the most that there can be."""
    blocks = problem.total_k // selection.block_size + problem.batch + 1
    return blocks * (selection.block_size // block_keys(variant, selection.block_size))
