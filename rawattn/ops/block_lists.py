"""Launch of kernels_cu/sm80/block_lists.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Int, Layout, Pointer, query_tiles
from rawattn.problem import Problem, Selection
from rawattn.variants import Row


class Args(NamedTuple):
    """``struct Args`` of the kernel, field for field, sizes apart."""

    block_indices: Pointer | None
    block_counts: Pointer | None
    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer
    blocks: Pointer
    slots: Pointer
    counts: Pointer
    lengths: Pointer | None
    source: Int
    global_blocks: Int


LAYOUT = Layout(Args, problem=True, selection=True)


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """blocks, slots and counts of every item; adds to lengths (zeroed) where there is one."""
    if row.family == "numba":
        from rawattn.kernels_numba import block_lists as twin

        twin.launch(row, problem, selection, args, stream=stream)
        return
    grid = (query_tiles(row, problem), selection.num_heads_sel, 1)
    arguments = LAYOUT.pack(args, problem, selection)
    loaded.kernel(row, problem, args_bytes=LAYOUT.size).launch(grid, arguments, stream)
