"""Launch of kernels_cu/sm80/sparse_postprocess.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Float, Int, Layout, Pointer, Tensor, own_first
from rawattn.problem import Problem
from rawattn.variants import Row

_GROUP = 16  # columns of a thread


class Args(NamedTuple):
    """``struct Args`` of the kernel, field for field."""

    accum: Pointer
    grad: Tensor
    total_rows: Int
    num_heads: Int
    scale: Float


LAYOUT = Layout(Args)


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """grad = scale * accum, in grad's dtype."""
    if row.family == "numba":
        from rawattn.kernels_numba import sparse_postprocess as twin

        twin.launch(row, problem, args, stream=stream)
        return
    tokens, heads, width = args.accum.shape
    groups = tokens * heads * (width // _GROUP)
    kernel = loaded.kernel(
        row, problem, head_dims=own_first(problem, args.grad.shape[2]), args_bytes=LAYOUT.size
    )
    grid = (-(-groups // (row.cfg.threads)), 1, 1)
    kernel.launch(grid, LAYOUT.pack(args), stream)
