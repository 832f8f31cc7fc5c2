"""Launch of kernels_cu/sm80/block_offsets.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Int, Layout, Pointer
from rawattn.problem import Problem, Selection
from rawattn.variants import Row


class Args(NamedTuple):
    """``struct Args`` of the kernel, field for field, sizes apart."""

    lengths: Pointer
    starts: Pointer
    cursor: Pointer
    work: Pointer
    segment: Int


LAYOUT = Layout(Args, problem=True, selection=True)


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """starts of all lists, their segments into ``work`` (filled with -1); ``cursor`` is zeroed."""
    if row.family == "numba":
        from rawattn.kernels_numba import block_offsets as twin

        twin.launch(row, problem, selection, args, stream=stream)
        return
    grid = (-(-selection.lists(problem) // (row.cfg.threads)), 1, 1)
    arguments = LAYOUT.pack(args, problem, selection)
    loaded.kernel(row, problem, args_bytes=LAYOUT.size).launch(grid, arguments, stream)
