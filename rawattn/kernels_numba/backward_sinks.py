"""The gradient of the sinks: what their P0 = exp(sink - L) makes of the terms of a head's rows.

    dsinks = -sum of P0 D        gsinks = -sum of P0 ((ddsinks - ddlse) D + W)

One CTA per query head, whose threads take every THREADS-th query of the sequences in turn; one
thread adds up what all have. A query without keys and sink (lse -inf) adds nothing.
CUDA twin: kernels_cu/sm80/backward_sinks.cu; reference: rawattn/reference/dense.py and second.py.
"""

import functools
import math
from typing import Any

from rawattn.kernels_numba.common import Array, accumulator, cuda, filled, run
from rawattn.ops.backward_sinks import Args
from rawattn.problem import Problem
from rawattn.variants import Row

THREADS = 64


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``grad`` (num_heads_q,)."""
    run(
        compiled(problem.dtype),
        (problem.num_heads_q, 1),
        THREADS,
        problem,
        filled(args, problem, ddsinks=1, ddlse=2, ddelta=2),
        written=("grad",),
        stream=stream,
    )


@functools.cache
def compiled(dtype: str) -> Any:
    """The kernel beside arrays of ``dtype``."""
    real = accumulator(dtype)

    def kernel(
        sinks: Array,
        lse: Array,
        delta: Array,
        ddsinks: Array,
        ddlse: Array,
        ddelta: Array,
        grad: Array,
        cu_seqlens_q: Array,
        batch: int,
        total_q: int,
    ) -> None:
        sPartial = cuda.shared.array(THREADS, real)
        thread, head = cuda.threadIdx.x, cuda.blockIdx.x
        begin = min(max(int(cu_seqlens_q[0]), 0), total_q)
        end = min(max(int(cu_seqlens_q[batch]), 0), total_q)
        moved = real(0)
        if ddsinks.shape[0] > 0:
            moved = ddsinks[head]
        total = real(0)
        for token in range(begin + thread, end, THREADS):
            if lse[head, token] == -math.inf:
                continue
            term = delta[head, token]
            if ddlse.shape[0] > 0:
                term = (moved - ddlse[head, token]) * term + ddelta[head, token]
            total -= math.exp(sinks[head] - lse[head, token]) * term
        sPartial[thread] = total
        cuda.syncthreads()  # what the other threads have

        if thread == 0:
            for other in range(1, THREADS):
                total += sPartial[other]
            grad[head] = total

    return cuda.jit(kernel)
