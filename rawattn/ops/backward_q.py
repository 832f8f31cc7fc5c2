"""Launch of kernels_cu/sm80/backward_q.cu, or of its Numba twin."""

from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import layout, pointer, sizes, tensor
from rawattn.problem import Problem
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("TTTTPPTPPPP")  # struct Args


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
        from rawattn.kernels_numba import backward_q as backward_q_numba

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
        *tensor(q),
        *tensor(k),
        *tensor(v),
        *tensor(dout),
        lse.ptr,
        delta.ptr,
        *tensor(dq),
        pointer(dk_accum),
        pointer(dv_accum),
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        *sizes(problem),
    )
    tiles = problem.total_q // variant.cfg.block_m + problem.batch + 1
    kernel = loaded.kernel(variant, problem, atomic=dk_accum is not None)
    kernel.launch((tiles, problem.num_heads_q, 1), arguments, stream)
