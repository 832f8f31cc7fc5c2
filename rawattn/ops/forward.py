"""Launch of kernels_cu/sm80/forward.cu, or of its Numba twin."""

import struct
from typing import TYPE_CHECKING

from rawattn import jit
from rawattn.problem import Problem
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = struct.Struct("@" + 4 * "Pqq" + 3 * "P" + 7 * "i" + "f0q")  # struct Args


def launch(
    variant: Variant,
    problem: Problem,
    q: "View",
    k: "View",
    v: "View",
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    out: "View",
    lse: "View",
    *,
    stream: int,
) -> None:
    """out, lse of packed q, k, v; the device is current, every check has been made."""
    if variant.family == "numba":
        from rawattn.ops import forward_numba

        forward_numba.launch(
            variant, problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, stream=stream
        )
        return
    arguments = _ARGS.pack(
        q.ptr,
        *q.strides[:2],
        k.ptr,
        *k.strides[:2],
        v.ptr,
        *v.strides[:2],
        out.ptr,
        *out.strides[:2],
        lse.ptr,
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        problem.batch,
        problem.total_q,
        problem.total_k,
        problem.num_heads_q,
        problem.num_heads_kv,
        problem.window_left,
        problem.window_right,
        problem.softmax_scale,
    )
    tiles = problem.total_q // variant.block_m + problem.batch + 1
    jit.kernel(variant, problem).launch((tiles, problem.num_heads_q, 1), arguments, stream)
