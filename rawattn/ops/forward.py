"""Launch of kernels_cu/sm80/forward.cu, or of its Numba twin."""

from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import layout, sizes, tensor
from rawattn.problem import Problem
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("TTTTPPP")  # struct Args


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
        from rawattn.kernels_numba import forward as forward_numba

        forward_numba.launch(
            variant, problem, q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, stream=stream
        )
        return
    arguments = _ARGS.pack(
        *tensor(q),
        *tensor(k),
        *tensor(v),
        *tensor(out),
        lse.ptr,
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        *sizes(problem),
    )
    tiles = problem.total_q // variant.cfg.block_m + problem.batch + 1
    loaded.kernel(variant, problem).launch((tiles, problem.num_heads_q, 1), arguments, stream)
