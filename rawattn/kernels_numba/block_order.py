"""Each list of ``queries`` ascending by item, so that sums over it are the same on every run.

One CTA per list. A list holds an item at most once, so that one bit tells whether it is there; the
bits set before an item's own are its place. SPAN items are looked at at a time, which is a whole
chunk as a rule.
CUDA twin: kernels_cu/sm80/block_order.cu.
"""

import functools
from typing import Any

import numpy as np

from rawattn.kernels_numba.common import Array, cuda, run
from rawattn.ops.arguments import sizes
from rawattn.ops.block_order import Args
from rawattn.problem import Problem, Selection
from rawattn.variants import Row

THREADS = 64
WORDS = 2048  # of 32 bits


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``queries`` and ``query_slots``."""
    chunks, heads, units = args.starts.shape
    run(
        compiled(WORDS),
        (max(units, 1), heads, chunks),
        THREADS,
        problem,
        args,
        sizes(problem, selection),
        written=("queries", "query_slots"),
        stream=stream,
    )


@functools.cache
def compiled(words: int) -> Any:
    """The kernel that looks at 32 ``words`` items at a time."""
    WORDS, SPAN = words, 32 * words

    def kernel(
        starts: Array,
        lengths: Array,
        unsorted: Array,
        unsorted_slots: Array,
        queries: Array,
        query_slots: Array,
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
        sBits = cuda.shared.array(WORDS, np.uint32)
        sBefore = cuda.shared.array(WORDS, np.int32)
        sTotal = cuda.shared.array(THREADS, np.int32)
        thread = cuda.threadIdx.x
        unit, head_kv, c = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        if unit >= starts.shape[2]:
            return
        begin, length = int(starts[c, head_kv, unit]), int(lengths[c, head_kv, unit])
        if length == 0:
            return
        ratio = num_heads_sel // num_heads_kv
        stop = min((c + 1) * chunk, total_q) * ratio
        done = begin
        for first in range(c * chunk * ratio, stop, SPAN):
            items = min(SPAN, stop - first)
            share = (items + 32 * THREADS - 1) // (32 * THREADS)  # words of a thread
            for word in range(thread, min(share * THREADS, WORDS), THREADS):
                sBits[word] = 0
            cuda.syncthreads()  # no bit is set yet

            for e in range(begin + thread, begin + length, THREADS):
                item = int(unsorted[e]) - first
                if item >= 0 and item < items:
                    cuda.atomic.or_(sBits, item // 32, np.uint32(np.uint32(1) << (item % 32)))
            cuda.syncthreads()  # all bits are set

            total = 0
            for word in range(thread * share, min((thread + 1) * share, WORDS)):
                total += cuda.popc(sBits[word])
            sTotal[thread] = total
            cuda.syncthreads()  # the other threads' totals

            before = 0
            for other in range(thread):
                before += int(sTotal[other])
            for word in range(thread * share, min((thread + 1) * share, WORDS)):
                sBefore[word] = before
                before += cuda.popc(sBits[word])
            cuda.syncthreads()  # what stands before each word

            for e in range(begin + thread, begin + length, THREADS):
                item = int(unsorted[e]) - first
                if item >= 0 and item < items:
                    below = np.uint32((np.uint32(1) << (item % 32)) - 1)
                    word = item // 32
                    place = done + int(sBefore[word]) + cuda.popc(np.uint32(sBits[word] & below))
                    queries[place] = unsorted[e]
                    query_slots[place] = unsorted_slots[e]
            for other in range(THREADS):
                done += int(sTotal[other])
            cuda.syncthreads()  # bits and totals are read, and may make room for the next span's

    return cuda.jit(kernel)
