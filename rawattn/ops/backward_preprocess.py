"""Launch of kernels_cu/sm80/backward_preprocess.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Int, Int64, Layout, Pointer, Tensor
from rawattn.problem import Problem
from rawattn.variants import Row


class Args(NamedTuple):
    """``struct Args`` of the kernel, field for field."""

    out: Tensor
    dout: Tensor
    dlse: Pointer | None
    delta: Pointer
    dq_accum: Pointer | None
    total_q: Int
    num_heads_q: Int
    dq_accum_size: Int64


LAYOUT = Layout(Args)


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """delta = rowsum(out * dout) - dlse, and zeros to dq_accum; dlse and dq_accum may be absent."""
    if row.family == "numba":
        from rawattn.kernels_numba import backward_preprocess as twin

        twin.launch(row, problem, args, stream=stream)
        return
    grid = (-(-problem.total_q // row.cfg.block_m), problem.num_heads_q, 1)
    loaded.kernel(row, problem, args_bytes=LAYOUT.size).launch(grid, LAYOUT.pack(args), stream)
