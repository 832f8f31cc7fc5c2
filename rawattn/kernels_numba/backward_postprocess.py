"""grad = scale * accum: sums of atomic adds, row-major, to a gradient in the caller's dtype.

Every thread strides over the elements; rows at or past cu_seqlens[batch] become zero.
CUDA twin: kernels_cu/sm80/backward_postprocess.cu.
"""

import functools
from typing import Any

from rawattn.kernels_numba.common import Array, accumulator, cuda, encoder, run
from rawattn.ops.backward_postprocess import Args
from rawattn.problem import Problem
from rawattn.variants import Row

THREADS = 128
ELEMENTS = 16  # of a thread, about


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``grad`` (rows, heads, size) from the flat ``accum``."""
    rows, heads, columns = args.grad.shape
    run(
        compiled(problem.dtype),
        (rows * heads * columns // (THREADS * ELEMENTS) + 1, 1),
        THREADS,
        problem,
        args,
        written=("grad",),
        stream=stream,
    )


@functools.cache
def compiled(dtype: str) -> Any:
    """The kernel for gradients of ``dtype``."""
    real, encode = accumulator(dtype), encoder(dtype)

    def kernel(
        accum: Array,
        grad: Array,
        cu_seqlens: Array,
        batch: int,
        total_rows: int,
        num_heads: int,
        scale: float,
    ) -> None:
        columns = grad.shape[2]
        end = int(cu_seqlens[batch])
        for e in range(cuda.grid(1), total_rows * num_heads * columns, cuda.gridsize(1)):
            pair, column = e // columns, e % columns
            row, head = pair // num_heads, pair % num_heads
            grad[row, head, column] = encode(accum[e] * real(scale) if row < end else real(0))

    return cuda.jit(kernel)
