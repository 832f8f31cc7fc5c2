"""Launch of kernels_cu/sm80/sparse_postprocess.cu, or of its Numba twin."""

import struct
from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import tensor
from rawattn.problem import Problem
from rawattn.variants import Variant, tile_widths

if TYPE_CHECKING:
    from rawattn.arrays import Shape, View

_ARGS = struct.Struct("@P" + "Pqq" + "2if0q")  # struct Args
_GROUP = 16  # columns of a thread


def accum_shape(variant: Variant, problem: Problem, gradient: str) -> "Shape":
    """The float32 sums that "dq", "dk" or "dv" is gathered in: (tokens, heads, width).

    The CUDA kernels keep whole tiles, and inside 16 columns the order of a lane's accumulators:
    place 4 q + (0, 1, 2, 3) is column 2 q + (0, 1, 8, 9). The Numba kernels keep rows as they are.
    """
    width, width_v = problem.head_dim, problem.head_dim_v
    if variant.family != "numba":
        width, width_v = tile_widths(width, width_v)
    return {
        "dq": (problem.total_q, problem.num_heads_q, width),
        "dk": (problem.total_k, problem.num_heads_kv, width),
        "dv": (problem.total_k, problem.num_heads_kv, width_v),
    }[gradient]


def launch(
    variant: Variant,
    problem: Problem,
    accum: "View",
    grad: "View",
    *,
    scale: float,
    stream: int,
) -> None:
    """grad = scale * accum, in grad's dtype."""
    if variant.family == "numba":
        from rawattn.kernels_numba import sparse_postprocess as sparse_postprocess_numba

        sparse_postprocess_numba.launch(variant, problem, accum, grad, scale=scale, stream=stream)
        return
    rows, heads, width = accum.shape
    arguments = _ARGS.pack(accum.ptr, *tensor(grad), rows, heads, scale)
    groups = rows * heads * (width // _GROUP)
    kernel = loaded.kernel(variant, problem, head_dims=_head_dims(problem, grad.shape[2]))
    kernel.launch((-(-groups // variant.cfg.threads), 1, 1), arguments, stream)


def _head_dims(problem: Problem, width: int) -> tuple[int, int]:
    """Those of the tensor first, so that its tile is as wide as beside the other in a kernel."""
    head_dims = problem.head_dim, problem.head_dim_v
    return head_dims if width == problem.head_dim else head_dims[::-1]
