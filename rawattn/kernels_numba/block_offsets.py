"""Where the list of each (chunk, kv head, key block) begins, and its segments of work.

One thread per list, which takes room for its items from one counter and for its segments from
another; which list comes first is left to chance.
CUDA twin: kernels_cu/sm80/block_offsets.cu.
"""

import functools
import math
from typing import Any

from rawattn.kernels_numba.common import Array, cuda, run
from rawattn.ops.arguments import sizes
from rawattn.ops.block_offsets import Args
from rawattn.problem import Problem, Selection
from rawattn.variants import Row

THREADS = 64


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``starts``, and of ``work`` (-1 before) a row for each segment.

    ``cursor``, zero before, begins with the sum of ``lengths`` and the number of segments.
    """
    run(
        compiled(),
        (math.prod(args.lengths.shape) // THREADS + 1, 1),
        THREADS,
        problem,
        args,
        sizes(problem, selection),
        written=("lengths", "starts", "cursor", "work"),
        stream=stream,
    )


@functools.cache
def compiled() -> Any:
    """The kernel."""

    def kernel(
        lengths: Array,
        starts: Array,
        cursor: Array,
        work: Array,
        batch: int,
        total_q: int,
        total_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        window_left: int,
        window_right: int,
        softmax_scale: float,
        softcap: float,
        num_heads_sel: int,
        num_selected: int,
        width: int,
        block_size: int,
        chunk: int,
        segment: int,
    ) -> None:
        units = lengths.shape[2]
        one = cuda.grid(1)
        if one >= lengths.shape[0] * num_heads_kv * units:
            return
        row, unit = one // units, one % units
        c, head_kv = row // num_heads_kv, row % num_heads_kv
        length = int(lengths[c, head_kv, unit])
        start = int(cuda.atomic.add(cursor, 0, length))
        places = num_heads_sel * total_q * width
        if start < 0 or length > places - start:  # lengths of a broken cu_seqlens
            start, length = 0, 0
            lengths[c, head_kv, unit] = 0
        segments = (length + segment - 1) // segment
        place = int(cuda.atomic.add(cursor, 1, segments))
        starts[c, head_kv, unit] = start
        for i in range(min(segments, work.shape[0] - place)):
            first = i * segment
            work[place + i, 0] = one
            work[place + i, 1] = start + first
            work[place + i, 2] = min(segment, length - first)
            work[place + i, 3] = 0

    return cuda.jit(kernel)
