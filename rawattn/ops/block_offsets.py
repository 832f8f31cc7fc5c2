"""Launch of kernels_cu/sm80/block_offsets.cu, or of its Numba twin."""

from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import (
    SELECTION,
    layout,
    selection_sizes,
    sizes,
)
from rawattn.problem import Problem, Selection
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("PPPP", SELECTION + "i")  # struct Args


def launch(
    variant: Variant,
    problem: Problem,
    selection: Selection,
    lengths: "View",
    starts: "View",
    cursor: "View",
    work: "View",
    *,
    stream: int,
) -> None:
    """starts of all lists, their segments into ``work`` (filled with -1); ``cursor`` is zeroed."""
    if variant.family == "numba":
        from rawattn.kernels_numba import block_offsets as block_offsets_numba

        block_offsets_numba.launch(
            variant,
            problem,
            selection,
            lengths,
            starts,
            cursor,
            work,
            stream=stream,
        )
        return
    arguments = _ARGS.pack(
        lengths.ptr,
        starts.ptr,
        cursor.ptr,
        work.ptr,
        *sizes(problem),
        *selection_sizes(selection),
        selection.segment(problem),
    )
    lists = selection.lists(problem)
    grid = (-(-lists // variant.cfg.threads), 1, 1)
    kernel = loaded.kernel(variant, problem)
    kernel.launch(grid, arguments, stream)
