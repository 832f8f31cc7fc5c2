"""Launch of kernels_cu/sm80/backward_kv.cu, or of its Numba twin."""

import struct
from typing import TYPE_CHECKING

from rawattn import jit
from rawattn.problem import Problem
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = struct.Struct("@" + 4 * "Pqq" + 3 * "P" + 2 * "Pqq" + 2 * "P" + 7 * "i" + "f0q")


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
    dq_accum: "View | None",
    dk: "View",
    dv: "View",
    *,
    stream: int,
) -> None:
    """dk and dv; with dq_accum (zeroed) also dQ / softmax_scale, by atomic adds into it."""
    if variant.family == "numba":
        from rawattn.ops import backward_kv_numba

        backward_kv_numba.launch(
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
            dq_accum,
            dk,
            dv,
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
        dq_accum.ptr if dq_accum else 0,
        dk.ptr,
        *dk.strides[:2],
        dv.ptr,
        *dv.strides[:2],
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
    tiles = problem.total_k // variant.block_n + problem.batch + 1
    kernel = jit.kernel(variant, problem, atomic=dq_accum is not None)
    kernel.launch((tiles, problem.num_heads_kv, 1), arguments, stream)
