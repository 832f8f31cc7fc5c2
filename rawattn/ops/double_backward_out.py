"""Launch of kernels_cu/sm80/double_backward_out.cu, or of its Numba twin."""

from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import layout, pointer, sizes, tensor
from rawattn.problem import Problem
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("TTTTTTTTPPTPPPPPP", "q")  # struct Args


def launch(
    variant: Variant,
    problem: Problem,
    q: "View",
    k: "View",
    v: "View",
    ddq: "View | None",
    ddk: "View | None",
    ddv: "View | None",
    out: "View",
    dout: "View",
    lse: "View",
    dlse: "View | None",
    ddout: "View",
    ddlse: "View",
    delta: "View",
    ddelta: "View",
    gq_accum: "View | None",
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    *,
    stream: int,
) -> None:
    """ddout and ddlse; delta, ddelta and zeros in gq_accum for the kernels of gq, gk and gv."""
    if variant.family == "numba":
        from rawattn.kernels_numba import double_backward_out as double_backward_out_numba

        double_backward_out_numba.launch(
            variant,
            problem,
            q,
            k,
            v,
            ddq,
            ddk,
            ddv,
            out,
            dout,
            lse,
            dlse,
            ddout,
            ddlse,
            delta,
            ddelta,
            gq_accum,
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
        *tensor(out),
        *tensor(dout),
        lse.ptr,
        pointer(dlse),
        *tensor(ddout),
        ddlse.ptr,
        delta.ptr,
        ddelta.ptr,
        pointer(gq_accum),
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        *sizes(problem),
        gq_accum.shape[0] if gq_accum else 0,
    )
    direction = (ddq is not None, ddk is not None, ddv is not None)
    tiles = problem.total_q // variant.cfg.block_m + problem.batch + 1
    kernel = loaded.kernel(variant, problem, direction=direction)
    kernel.launch((tiles, problem.num_heads_q, 1), arguments, stream)
