"""Launch of kernels_cu/sm80/backward_postprocess.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Float, Int, Layout, Pointer, Tensor, own_first
from rawattn.problem import Problem
from rawattn.variants import Row


class Args(NamedTuple):
    """``struct Args`` of the kernel, field for field."""

    accum: Pointer
    grad: Tensor
    cu_seqlens: Pointer
    batch: Int
    total_rows: Int
    num_heads: Int
    scale: Float


LAYOUT = Layout(Args)


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """grad = scale * accum, rows past cu_seqlens[-1] zero."""
    if row.family == "numba":
        from rawattn.kernels_numba import backward_postprocess as twin

        twin.launch(row, problem, args, stream=stream)
        return
    total_rows, num_heads, width = args.grad.shape
    tiles = total_rows // row.cfg.block_m + problem.batch + 1
    kernel = loaded.kernel(
        row, problem, head_dims=own_first(problem, width), args_bytes=LAYOUT.size
    )
    kernel.launch((tiles, num_heads, 1), LAYOUT.pack(args), stream)
