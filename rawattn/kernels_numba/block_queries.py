"""The selection inverted: every item enters the lists of its key blocks, in any order.

One thread per item. An entry is token * ratio + the selection head among those of its kv head.
CUDA twin: kernels_cu/sm80/block_queries.cu.
"""

import functools
from typing import Any

from rawattn.kernels_numba.common import Array, cuda, run
from rawattn.kernels_numba.sparse import UNUSED, find_item
from rawattn.ops.arguments import sizes
from rawattn.ops.block_queries import Args
from rawattn.problem import Problem, Selection
from rawattn.variants import Row

THREADS = 64


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``unsorted`` and ``unsorted_slots``.

    ``cursor[2 + list]``, zero before, counts the entries of a list.
    """
    run(
        compiled(),
        (problem.total_q // THREADS + 1, selection.num_heads_sel),
        THREADS,
        problem,
        args,
        sizes(problem, selection),
        written=("cursor", "unsorted", "unsorted_slots"),
        stream=stream,
    )


@functools.cache
def compiled() -> Any:
    """The kernel."""

    def kernel(
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        blocks: Array,
        slots: Array,
        starts: Array,
        cursor: Array,
        unsorted: Array,
        unsorted_slots: Array,
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
    ) -> None:
        token, head = cuda.grid(1), cuda.blockIdx.y
        if token >= total_q:
            return
        ratio = num_heads_sel // num_heads_kv
        head_kv = head // ratio
        b, start_k, _, _ = find_item(cu_seqlens_q, cu_seqlens_k, batch, total_q, total_k, token)
        for w in range(width):
            n = int(blocks[head, token, w])
            if n == UNUSED:
                return
            c, unit = token // chunk, start_k // block_size + b + n
            one = (c * num_heads_kv + head_kv) * starts.shape[2] + unit
            place = int(starts[c, head_kv, unit]) + cuda.atomic.add(cursor, 2 + one, 1)
            if place < unsorted.shape[0]:  # there is room, but for lists of a broken cu_seqlens
                unsorted[place] = token * ratio + head % ratio
                unsorted_slots[place] = slots[head, token, w]

    return cuda.jit(kernel)
