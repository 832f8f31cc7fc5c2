"""Launch of kernels_cu/sm80/jvp.cu, or of its Numba twin."""

from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import layout, sizes, tensor
from rawattn.problem import Problem
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("TTTTTTTTPPPP")  # struct Args


def launch(
    variant: Variant,
    problem: Problem,
    q: "View",
    k: "View",
    v: "View",
    tq: "View | None",
    tk: "View | None",
    tv: "View | None",
    out: "View",
    tout: "View",
    lse: "View",
    tlse: "View",
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    *,
    stream: int,
) -> None:
    """out and lse, and their tangents tout and tlse in direction (tq, tk, tv); None is zero."""
    if variant.family == "numba":
        from rawattn.kernels_numba import jvp as jvp_numba

        jvp_numba.launch(
            variant,
            problem,
            q,
            k,
            v,
            tq,
            tk,
            tv,
            out,
            tout,
            lse,
            tlse,
            cu_seqlens_q,
            cu_seqlens_k,
            stream=stream,
        )
        return
    arguments = _ARGS.pack(
        *tensor(q),
        *tensor(k),
        *tensor(v),
        *tensor(tq),
        *tensor(tk),
        *tensor(tv),
        *tensor(out),
        *tensor(tout),
        lse.ptr,
        tlse.ptr,
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        *sizes(problem),
    )
    direction = (tq is not None, tk is not None, tv is not None)
    tiles = problem.total_q // variant.cfg.block_m + problem.batch + 1
    kernel = loaded.kernel(variant, problem, direction=direction)
    kernel.launch((tiles, problem.num_heads_q, variant.cfg.pieces), arguments, stream)
