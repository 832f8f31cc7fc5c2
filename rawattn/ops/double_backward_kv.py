"""Launch of kernels_cu/sm80/double_backward_kv.cu, or of its Numba twin."""

from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import layout, pointer, sizes, tensor
from rawattn.problem import Problem
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("TTTTTTTPPPPPTTPP")  # struct Args


def launch(
    variant: Variant,
    problem: Problem,
    q: "View",
    k: "View",
    v: "View",
    ddq: "View | None",
    ddk: "View | None",
    ddv: "View | None",
    dout: "View",
    lse: "View",
    delta: "View",
    ddlse: "View",
    ddelta: "View",
    gq_accum: "View | None",
    gk: "View",
    gv: "View",
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    *,
    stream: int,
) -> None:
    """gk and gv; with gq_accum (zeroed) also gQ / softmax_scale, by atomic adds into it."""
    if variant.family == "numba":
        from rawattn.kernels_numba import double_backward_kv as double_backward_kv_numba

        double_backward_kv_numba.launch(
            variant,
            problem,
            q,
            k,
            v,
            ddq,
            ddk,
            ddv,
            dout,
            lse,
            delta,
            ddlse,
            ddelta,
            gq_accum,
            gk,
            gv,
            cu_seqlens_q,
            cu_seqlens_k,
            stream=stream,
        )
        return
    arguments = _ARGS.pack(
        *tensor(q),
        *tensor(k),
        *tensor(v),
        *tensor(ddq),
        *tensor(ddk),
        *tensor(ddv),
        *tensor(dout),
        lse.ptr,
        delta.ptr,
        ddlse.ptr,
        ddelta.ptr,
        pointer(gq_accum),
        *tensor(gk),
        *tensor(gv),
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        *sizes(problem),
    )
    direction = (ddq is not None, ddk is not None, ddv is not None)
    tiles = problem.total_k // variant.cfg.block_n + problem.batch + 1
    kernel = loaded.kernel(variant, problem, atomic=gq_accum is not None, direction=direction)
    kernel.launch((tiles, problem.num_heads_kv, 1), arguments, stream)
