"""The blocks of keys that each item sees, ascending, each once; how many items see each block.

One thread per item, which puts its slots into its list one after the other, where it stays sorted.
CUDA twin: kernels_cu/sm80/block_lists.cu; reference: rawattn/reference/sparse.py.
"""

import functools
from typing import Any

from rawattn.kernels_numba.common import Array, cuda, device_function, filled, run
from rawattn.kernels_numba.sparse import OWN, UNUSED, find_item
from rawattn.ops.arguments import sizes
from rawattn.ops.block_lists import Args
from rawattn.problem import Problem, Selection
from rawattn.variants import Row

THREADS = 64
INDICES, MASK = 0, 1  # what block_indices holds; else it is filled, and the blocks are a pattern


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``blocks``, ``slots``, ``counts`` and adds to ``lengths``."""
    run(
        compiled(),
        (problem.total_q // THREADS + 1, selection.num_heads_sel),
        THREADS,
        problem,
        filled(args, problem, "int32", block_indices=3, block_counts=2, lengths=3),
        sizes(problem, selection),
        written=("blocks", "slots", "counts", "lengths"),
        stream=stream,
    )


@device_function
def insert(blocks: Array, slots: Array, head: int, token: int, used: int, n: int, slot: int) -> Any:
    """Put block ``n`` into a list of ``used``; the new length. A block that is there stays."""
    place = used
    while place > 0 and int(blocks[head, token, place - 1]) >= n:
        place -= 1
    if place < used and int(blocks[head, token, place]) == n:
        return used
    for w in range(used, place, -1):
        blocks[head, token, w] = blocks[head, token, w - 1]
        slots[head, token, w] = slots[head, token, w - 1]
    blocks[head, token, place] = n
    slots[head, token, place] = slot
    return used + 1


@functools.cache
def compiled() -> Any:
    """The kernel."""

    def kernel(
        block_indices: Array,
        block_counts: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        blocks: Array,
        slots: Array,
        counts: Array,
        lengths: Array,
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
        source: int,
        global_blocks: int,
    ) -> None:
        token, head = cuda.grid(1), cuda.blockIdx.y
        if token >= total_q:
            return
        b, start_k, seqlen_k, pos = find_item(
            cu_seqlens_q, cu_seqlens_k, batch, total_q, total_k, token
        )
        stop = seqlen_k  # blocks that start behind it do not count
        if window_right >= 0:
            stop = min(stop, pos + 1)
        candidates = num_selected
        if block_counts.shape[0] > 0:
            candidates = min(candidates, int(block_counts[token, head]))

        used = 0
        for slot in range(candidates):
            n = slot  # of a mask, and the first blocks of a pattern
            if source == INDICES:
                n = int(block_indices[token, head, slot])
            elif source == MASK:
                if block_indices[token, head, slot] == 0:
                    n = -1
            elif slot >= global_blocks:
                n = pos // block_size - (slot - global_blocks)
            if n >= 0 and n * block_size < stop:
                used = insert(blocks, slots, head, token, used, n, slot)
        if width > num_selected and pos >= 0:
            used = insert(blocks, slots, head, token, used, pos // block_size, OWN)

        counts[head, token] = used
        for w in range(used, width):
            blocks[head, token, w] = UNUSED
            slots[head, token, w] = -1
        if lengths.shape[0] > 0:
            head_kv = head // (num_heads_sel // num_heads_kv)
            for w in range(used):
                unit = start_k // block_size + b + int(blocks[head, token, w])
                cuda.atomic.add(lengths, (token // chunk, head_kv, unit), 1)

    return cuda.jit(kernel)
