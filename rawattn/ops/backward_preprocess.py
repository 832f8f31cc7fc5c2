"""Launch of kernels_cu/sm80/backward_preprocess.cu, or of its Numba twin."""

import struct
from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.problem import Problem
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = struct.Struct("@" + 2 * "Pqq" + 3 * "P" + 2 * "i" + "q0q")  # struct Args


def launch(
    variant: Variant,
    problem: Problem,
    out: "View",
    dout: "View",
    dlse: "View | None",
    delta: "View",
    dq_accum: "View | None",
    *,
    stream: int,
) -> None:
    """delta = rowsum(out * dout) - dlse, and zeros to dq_accum; dlse and dq_accum may be absent."""
    if variant.family == "numba":
        from rawattn.kernels_numba import backward_preprocess as backward_preprocess_numba

        backward_preprocess_numba.launch(
            variant, problem, out, dout, dlse, delta, dq_accum, stream=stream
        )
        return
    arguments = _ARGS.pack(
        out.ptr,
        *out.strides[:2],
        dout.ptr,
        *dout.strides[:2],
        dlse.ptr if dlse else 0,
        delta.ptr,
        dq_accum.ptr if dq_accum else 0,
        problem.total_q,
        problem.num_heads_q,
        dq_accum.shape[0] if dq_accum else 0,
    )
    grid = (-(-problem.total_q // variant.cfg.block_m), problem.num_heads_q, 1)
    loaded.kernel(variant, problem).launch(grid, arguments, stream)
