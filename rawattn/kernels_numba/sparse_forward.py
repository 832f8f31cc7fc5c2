"""out and lse of attention over selected blocks of keys, with an online softmax.

One CTA per query token and ROWS of the query heads that share its selection; the keys of its blocks
pass through shared memory tile by tile, K and V in turn through the same buffer. Thread (row, lane)
owns scores (row, lane + LANES x) and outputs (row, lane + LANES x) of query head ``row``; all lanes
of a row keep the same row_max and row_sum.
CUDA twin: kernels_cu/sm80/sparse_forward.cu; reference: rawattn/reference/sparse.py.
"""

import functools
import math
from typing import Any

import numpy as np

from rawattn.kernels_numba.common import (
    LANES,
    Array,
    accumulator,
    block_rows,
    cuda,
    encoder,
    filled,
    run,
)
from rawattn.kernels_numba.sparse import (
    UNUSED,
    find_item,
    gate_reader,
    head_rows,
    keys_stop,
    row_loader,
)
from rawattn.ops.arguments import sizes
from rawattn.ops.sparse_forward import Args
from rawattn.problem import Problem, Selection
from rawattn.variants import Row


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``out`` and ``lse``."""
    p, group = problem, selection.group(problem)
    kernel, rows = compiled(p.dtype, p.head_dim, p.head_dim_v, group)
    run(
        kernel,
        (max(p.total_q, 1), selection.num_heads_sel * -(-group // rows)),
        rows * LANES,
        p,
        filled(args, p, block_scale=3),
        sizes(p, selection),
        written=("out", "lse"),
        stream=stream,
    )


@functools.cache
def compiled(dtype: str, head_dim: int, head_dim_v: int, group: int) -> tuple[Any, int]:
    """The kernel for these compile-time constants, and its ROWS."""
    real, encode = accumulator(dtype), encoder(dtype)
    HEAD_DIM, HEAD_DIM_V, COLUMNS = head_dim, head_dim_v, max(head_dim, head_dim_v)
    BLOCK = block_rows(dtype, HEAD_DIM, COLUMNS)
    ROWS = head_rows(group, BLOCK)
    # one more column than there are numbers: rows then start in different banks of shared memory
    Q_TILE, KV_TILE, SCORES = (ROWS, HEAD_DIM + 1), (BLOCK, COLUMNS + 1), (ROWS, BLOCK + 1)
    V_SHARE = HEAD_DIM_V // LANES
    load_qk, load_v = row_loader(dtype, HEAD_DIM), row_loader(dtype, HEAD_DIM_V)
    gate = gate_reader(dtype)

    def kernel(
        q: Array,
        k: Array,
        v: Array,
        blocks: Array,
        slots: Array,
        block_scale: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        out: Array,
        lse: Array,
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
        sQ = cuda.shared.array(Q_TILE, real)
        sKV = cuda.shared.array(KV_TILE, real)
        sS = cuda.shared.array(SCORES, real)
        sP = cuda.shared.array(SCORES, real)
        rO = cuda.local.array(V_SHARE, real)
        thread = cuda.threadIdx.x
        row, lane = thread // LANES, thread % LANES
        token = cuda.blockIdx.x
        if token >= total_q:
            return
        group = num_heads_q // num_heads_sel
        tiles = (group + ROWS - 1) // ROWS
        head_sel, inside = cuda.blockIdx.y // tiles, cuda.blockIdx.y % tiles * ROWS + row
        head, exists = head_sel * group + inside, inside < group
        head_kv = head_sel // (num_heads_sel // num_heads_kv)
        _, start_k, seqlen_k, pos = find_item(
            cu_seqlens_q, cu_seqlens_k, batch, total_q, total_k, token
        )

        load_qk(q, token, head, exists, sQ, row, lane)
        for x in range(V_SHARE):
            rO[x] = real(0)
        row_max, row_sum = real(-math.inf), real(0)
        for w in range(width):
            block = int(blocks[head_sel, token, w])
            if block == UNUSED:
                break
            slot = int(slots[head_sel, token, w])
            scale = real(softmax_scale) * gate(block_scale, token, head_sel, slot)
            stop = keys_stop(block, slot, pos, seqlen_k, block_size, window_right)
            for n_start in range(block * block_size, stop, BLOCK):
                for n in range(row, BLOCK, ROWS):
                    j = n_start + n
                    load_qk(k, start_k + j, head_kv, j < stop, sKV, n, lane)
                cuda.syncthreads()  # K is in; the first time round, Q too

                for n in range(lane, BLOCK, LANES):
                    score = real(-math.inf)
                    if exists and n_start + n < stop:
                        dot = np.float64(0)  # as in the kernels of derivatives: S is the same
                        for d in range(HEAD_DIM):
                            dot += np.float64(sQ[row, d]) * np.float64(sKV[n, d])
                        score = real(dot) * scale
                        if score == -math.inf:
                            score = real(math.nan)  # a key that is seen: not as if there were none
                    sS[row, n] = score
                cuda.syncthreads()  # S is whole, and K may make room for V

                for n in range(row, BLOCK, ROWS):
                    j = n_start + n
                    load_v(v, start_k + j, head_kv, j < stop, sKV, n, lane)
                new_max = row_max
                for n in range(BLOCK):
                    new_max = max(new_max, sS[row, n])
                origin = (
                    new_max if new_max > -math.inf else real(0)
                )  # no key so far: every exp is 0
                for n in range(lane, BLOCK, LANES):
                    sP[row, n] = math.exp(sS[row, n] - origin)
                rescale = math.exp(row_max - origin)
                row_max = new_max
                row_sum *= rescale
                for x in range(V_SHARE):
                    rO[x] *= rescale
                cuda.syncthreads()  # P is whole, V is in

                for n in range(BLOCK):
                    probability = sP[row, n]
                    row_sum += probability
                    for x in range(V_SHARE):
                        rO[x] += probability * sKV[n, lane + x * LANES]
                cuda.syncthreads()  # V is read, and may make room for the next K

        if exists:
            dead = row_sum == real(0)
            for x in range(V_SHARE):
                mean = real(0) if dead else rO[x] / row_sum
                out[token, head, lane + x * LANES] = encode(mean)
            if lane == 0:
                lse[head, token] = row_max if dead else row_max + math.log(row_sum)

    return cuda.jit(kernel), ROWS
