"""Launch of kernels_cu/sm80/block_order.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Layout, Pointer
from rawattn.problem import Problem, Selection
from rawattn.variants import Row


class Args(NamedTuple):
    """``struct Args`` of the kernel, field for field, sizes apart."""

    starts: Pointer
    lengths: Pointer
    unsorted: Pointer
    unsorted_slots: Pointer
    queries: Pointer
    query_slots: Pointer


LAYOUT = Layout(Args, problem=True, selection=True)


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """Each list of ``unsorted`` ascending into ``queries``, its slots beside."""
    if row.family == "numba":
        from rawattn.kernels_numba import block_order as twin

        twin.launch(row, problem, selection, args, stream=stream)
        return
    grid = (-(-selection.lists(problem) // (row.cfg.threads // 32)), 1, 1)
    arguments = LAYOUT.pack(args, problem, selection)
    loaded.kernel(row, problem, args_bytes=LAYOUT.size).launch(grid, arguments, stream)
