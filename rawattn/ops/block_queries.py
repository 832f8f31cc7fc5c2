"""Launch of kernels_cu/sm80/block_queries.cu, or of its Numba twin."""

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

_ARGS = layout("PPPPPPPP", SELECTION)  # struct Args


def launch(
    variant: Variant,
    problem: Problem,
    selection: Selection,
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    blocks: "View",
    slots: "View",
    starts: "View",
    cursor: "View",
    unsorted: "View",
    unsorted_slots: "View",
    *,
    stream: int,
) -> None:
    """Every item into its blocks' lists, in any order; counts in ``cursor``."""
    if variant.family == "numba":
        from rawattn.kernels_numba import block_queries as block_queries_numba

        block_queries_numba.launch(
            variant,
            problem,
            selection,
            cu_seqlens_q,
            cu_seqlens_k,
            blocks,
            slots,
            starts,
            cursor,
            unsorted,
            unsorted_slots,
            stream=stream,
        )
        return
    arguments = _ARGS.pack(
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        blocks.ptr,
        slots.ptr,
        starts.ptr,
        cursor.ptr,
        unsorted.ptr,
        unsorted_slots.ptr,
        *sizes(problem),
        *selection_sizes(selection),
    )
    tiles = problem.total_q // variant.cfg.block_m + problem.batch + 1
    grid = (tiles, selection.num_heads_sel, 1)
    kernel = loaded.kernel(variant, problem)
    kernel.launch(grid, arguments, stream)
