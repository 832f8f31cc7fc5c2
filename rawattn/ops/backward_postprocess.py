"""Launch of kernels_cu/sm80/backward_postprocess.cu, or its Numba twin; the workspaces."""

import struct
from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.problem import Problem
from rawattn.variants import Variant, tile_widths

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = struct.Struct("@P" + "Pqq" + "P" + 3 * "i" + "f0q")  # struct Args
UNIT = 16  # rows that kernels_cu/base/workspace.cuh keeps together


def accum_shape(variant: Variant, problem: Problem, rows: str) -> tuple[int]:
    """Elements of the workspace of "dq", "dk" or "dv", as a one-dimensional shape."""
    total = problem.total_q if rows == "dq" else problem.total_k
    heads = problem.num_heads_q if rows == "dq" else problem.num_heads_kv
    dim = problem.head_dim_v if rows == "dv" else problem.head_dim
    if variant.family == "numba":
        return (heads * total * dim,)
    widths = tile_widths(problem.head_dim, problem.head_dim_v)
    return (heads * (total // UNIT + problem.batch) * UNIT * widths[rows == "dv"],)


def launch(
    variant: Variant,
    problem: Problem,
    accum: "View",
    cu_seqlens: "View",
    grad: "View",
    *,
    scale: float,
    stream: int,
) -> None:
    """grad = scale * accum, rows past cu_seqlens[-1] zero."""
    if variant.family == "numba":
        from rawattn.kernels_numba import backward_postprocess as backward_postprocess_numba

        backward_postprocess_numba.launch(
            variant, problem, accum, cu_seqlens, grad, scale=scale, stream=stream
        )
        return
    total_rows, num_heads, dim = grad.shape
    arguments = _ARGS.pack(
        accum.ptr,
        grad.ptr,
        *grad.strides[:2],
        cu_seqlens.ptr,
        problem.batch,
        total_rows,
        num_heads,
        scale,
    )
    tiles = total_rows // variant.cfg.block_m + problem.batch + 1
    of_v = dim != problem.head_dim
    head_dims = (problem.head_dim, problem.head_dim_v)
    kernel = loaded.kernel(variant, problem, head_dims=head_dims[::-1] if of_v else head_dims)
    kernel.launch((tiles, num_heads, 1), arguments, stream)
