"""Launch of kernels_cu/sm80/block_queries.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Layout, Pointer, query_tiles
from rawattn.problem import Problem, Selection
from rawattn.variants import Row


class Args(NamedTuple):
    """``struct Args`` of the kernel, field for field, sizes apart."""

    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer
    blocks: Pointer
    slots: Pointer
    starts: Pointer
    cursor: Pointer
    unsorted: Pointer
    unsorted_slots: Pointer


LAYOUT = Layout(Args, problem=True, selection=True)


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """Every item into its blocks' lists, in any order; counts in ``cursor``."""
    if row.family == "numba":
        from rawattn.kernels_numba import block_queries as twin

        twin.launch(row, problem, selection, args, stream=stream)
        return
    grid = (query_tiles(row, problem), selection.num_heads_sel, 1)
    arguments = LAYOUT.pack(args, problem, selection)
    loaded.kernel(row, problem, args_bytes=LAYOUT.size).launch(grid, arguments, stream)
