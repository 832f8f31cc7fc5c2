"""delta = sum over head_dim_v of out * dout, minus dlse; and a workspace for dQ set to zero.

One row of LANES threads per (token, head); their partial sums meet in shared memory.
CUDA twin: kernels_cu/sm80/backward_preprocess.cu; reference: D in rawattn/reference/dense.py.
"""

import functools
from typing import Any

from rawattn.kernels_numba.common import LANES, Array, accumulator, cuda, decoder, filled, run
from rawattn.ops.backward_preprocess import Args
from rawattn.problem import Problem
from rawattn.variants import Row

ROWS = 16  # (token, head) pairs of a CTA


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``delta`` (num_heads_q, total_q) and zeroes ``dq_accum``."""
    p = problem
    run(
        compiled(p.dtype),
        (p.total_q * p.num_heads_q // ROWS + 1, 1),
        ROWS * LANES,
        p,
        filled(args, p, dlse=2, dq_accum=1),
        written=("delta", "dq_accum"),
        stream=stream,
    )


@functools.cache
def compiled(dtype: str) -> Any:
    """The kernel for arrays of ``dtype``."""
    real, decode = accumulator(dtype), decoder(dtype)

    def kernel(
        out: Array,
        dout: Array,
        dlse: Array,
        delta: Array,
        dq_accum: Array,
        total_q: int,
        num_heads_q: int,
        dq_accum_size: int,
    ) -> None:
        sPartial = cuda.shared.array((ROWS, LANES), real)
        thread = cuda.threadIdx.x
        row, lane = thread // LANES, thread % LANES
        pair = cuda.blockIdx.x * ROWS + row
        token, head = pair // num_heads_q, pair % num_heads_q

        total = real(0)
        if token < total_q:
            for d in range(lane, out.shape[2], LANES):
                total += decode(out[token, head, d]) * decode(dout[token, head, d])
        sPartial[row, lane] = total
        cuda.syncthreads()  # the partial sums of the row's other lanes

        if lane == 0 and token < total_q:
            for other in range(1, LANES):
                total += sPartial[row, other]
            if dlse.shape[0] > 0:
                total -= dlse[head, token]
            delta[head, token] = total
        for e in range(cuda.grid(1), dq_accum_size, cuda.gridsize(1)):
            dq_accum[e] = real(0)

    return cuda.jit(kernel)
