"""Launch of kernels_cu/sm80/backward_q.cu, or of its Numba twin."""

import struct
from typing import TYPE_CHECKING

from rawattn import jit
from rawattn.problem import Problem
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = struct.Struct("@" + 4 * "Pqq" + 2 * "P" + "Pqq" + 4 * "P" + 7 * "i" + "f0q")


def launch(
    variant: Variant,
    problem: Problem,
    q: "View",
    k: "View",
    v: "View",
    dout: "View",
    lse: "View",
    delta: "View",
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    dq: "View",
    dk_accum: "View | None",
    dv_accum: "View | None",
    *,
    stream: int,
) -> None:
    """dq; with the (zeroed) accums also dK / softmax_scale and dV, by atomic adds into them."""
    if variant.family == "numba":
        from rawattn.ops import backward_q_numba

        backward_q_numba.launch(
            variant,
            problem,
            q,
            k,
            v,
            dout,
            lse,
            delta,
            cu_seqlens_q,
            cu_seqlens_k,
            dq,
            dk_accum,
            dv_accum,
            stream=stream,
        )
        return
    arguments = _ARGS.pack(
        q.ptr,
        *q.strides[:2],
        k.ptr,
        *k.strides[:2],
        v.ptr,
        *v.strides[:2],
        dout.ptr,
        *dout.strides[:2],
        lse.ptr,
        delta.ptr,
        dq.ptr,
        *dq.strides[:2],
        dk_accum.ptr if dk_accum else 0,
        dv_accum.ptr if dv_accum else 0,
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
    kernel = jit.kernel(variant, problem, atomic=dk_accum is not None)
    kernel.launch((tiles, problem.num_heads_q, 1), arguments, stream)
