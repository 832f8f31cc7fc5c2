"""Launch of kernels_cu/sm80/block_lists.cu, or of its Numba twin."""

from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import (
    SELECTION,
    layout,
    pointer,
    selection_sizes,
    sizes,
)
from rawattn.problem import Problem, Selection
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("PPPPPPPP", SELECTION + "2i")  # struct Args


def launch(
    variant: Variant,
    problem: Problem,
    selection: Selection,
    source: int,
    block_indices: "View | None",
    block_counts: "View | None",
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    blocks: "View",
    slots: "View",
    counts: "View",
    lengths: "View | None",
    global_blocks: int,
    *,
    stream: int,
) -> None:
    """blocks, slots and counts of every item; adds to lengths (zeroed) where there is one."""
    if variant.family == "numba":
        from rawattn.kernels_numba import block_lists as block_lists_numba

        block_lists_numba.launch(
            variant,
            problem,
            selection,
            source,
            block_indices,
            block_counts,
            cu_seqlens_q,
            cu_seqlens_k,
            blocks,
            slots,
            counts,
            lengths,
            global_blocks,
            stream=stream,
        )
        return
    arguments = _ARGS.pack(
        pointer(block_indices),
        pointer(block_counts),
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        blocks.ptr,
        slots.ptr,
        counts.ptr,
        pointer(lengths),
        *sizes(problem),
        *selection_sizes(selection),
        source,
        global_blocks,
    )
    tiles = problem.total_q // variant.cfg.block_m + problem.batch + 1
    grid = (tiles, selection.num_heads_sel, 1)
    kernel = loaded.kernel(variant, problem)
    kernel.launch(grid, arguments, stream)
