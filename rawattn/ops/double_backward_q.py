"""Launch of kernels_cu/sm80/double_backward_q.cu, or of its Numba twin."""

from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import layout, sizes, tensor
from rawattn.problem import Problem
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("TTTTTTTPPPPTPP")  # struct Args


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
    gq: "View",
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    *,
    stream: int,
) -> None:
    """gq, without atomics."""
    if variant.family == "numba":
        from rawattn.kernels_numba import double_backward_q as double_backward_q_numba

        double_backward_q_numba.launch(
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
            gq,
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
        *tensor(gq),
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        *sizes(problem),
    )
    direction = (ddq is not None, ddk is not None, ddv is not None)
    tiles = problem.total_q // variant.cfg.block_m + problem.batch + 1
    kernel = loaded.kernel(variant, problem, direction=direction)
    kernel.launch((tiles, problem.num_heads_q, 1), arguments, stream)
