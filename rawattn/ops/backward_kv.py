"""Launch of kernels_cu/sm80/backward_kv.cu, or of its Numba twin."""

from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import layout, pointer, sizes, tensor
from rawattn.problem import Problem
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("TTTTPPPTTPP")  # struct Args


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
        from rawattn.kernels_numba import backward_kv as backward_kv_numba

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
        *tensor(q),
        *tensor(k),
        *tensor(v),
        *tensor(dout),
        lse.ptr,
        delta.ptr,
        pointer(dq_accum),
        *tensor(dk),
        *tensor(dv),
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        *sizes(problem),
    )
    tiles = problem.total_k // variant.cfg.block_n + problem.batch + 1
    kernel = loaded.kernel(variant, problem, atomic=dq_accum is not None)
    kernel.launch((tiles, problem.num_heads_kv, 1), arguments, stream)
