"""out = softmax(softmax_scale q k^T) v and its logsumexp, by tiles with an online softmax.

One CTA per query tile and query head; the keys pass through shared memory tile by tile, K and V in
turn through the same buffer. Thread (row, lane) owns scores (row, lane + LANES x) and outputs
(row, lane + LANES x); all lanes of a row keep the same row_max and row_sum.
CUDA twin: kernels_cu/sm80/forward.cu; reference: rawattn/reference/online.py.
"""

import functools
import math
from typing import Any

from rawattn.kernels_numba.common import (
    LANES,
    Array,
    accumulator,
    block_rows,
    capper,
    cuda,
    encoder,
    filled,
    find_tile,
    key_range,
    keys_in_use,
    run,
    tile_loader,
    tiles_bound,
    visible,
)
from rawattn.ops.arguments import sizes
from rawattn.ops.forward import Args
from rawattn.problem import Problem
from rawattn.variants import Row


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``out`` and ``lse``; shapes as in ``api.forward``."""
    p = problem
    args = filled(args, p, sinks=1, seqused_k=1)
    kernel, block = compiled(p.dtype, p.head_dim, p.head_dim_v, p.softcap > 0)
    run(
        kernel,
        (tiles_bound(p.total_q, p.batch, block), p.num_heads_q),
        block * LANES,
        p,
        args,
        sizes(p),
        written=("out", "lse"),
        stream=stream,
    )


@functools.cache
def compiled(dtype: str, head_dim: int, head_dim_v: int, capped: bool) -> tuple[Any, int]:
    """The kernel for these compile-time constants, and its BLOCK."""
    real, encode = accumulator(dtype), encoder(dtype)
    HEAD_DIM, HEAD_DIM_V, COLUMNS = head_dim, head_dim_v, max(head_dim, head_dim_v)
    BLOCK = block_rows(dtype, HEAD_DIM, COLUMNS)
    # one more column than there are numbers: rows then start in different banks of shared memory
    QK_TILE, KV_TILE, SCORES = (BLOCK, HEAD_DIM + 1), (BLOCK, COLUMNS + 1), (BLOCK, BLOCK + 1)
    V_SHARE = HEAD_DIM_V // LANES
    cap = capper(dtype, capped)
    load_qk, load_v = tile_loader(dtype, BLOCK, HEAD_DIM), tile_loader(dtype, BLOCK, HEAD_DIM_V)

    def kernel(
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        sinks: Array,
        seqused_k: Array,
        batch: int,
        total_q: int,
        total_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        window_left: int,
        window_right: int,
        softmax_scale: float,
        softcap: float,
    ) -> None:
        sQ = cuda.shared.array(QK_TILE, real)
        sKV = cuda.shared.array(KV_TILE, real)
        sS = cuda.shared.array(SCORES, real)
        sP = cuda.shared.array(SCORES, real)
        rO = cuda.local.array(V_SHARE, real)
        thread = cuda.threadIdx.x
        row, lane = thread // LANES, thread % LANES
        head = cuda.blockIdx.y
        head_kv = head // (num_heads_q // num_heads_kv)
        b, start_q, seqlen_q, m_start = find_tile(
            cu_seqlens_q, batch, total_q, cuda.blockIdx.x, BLOCK
        )
        if m_start >= seqlen_q:
            return
        start_k, seqlen_k = keys_in_use(cu_seqlens_k, seqused_k, batch, b, total_k)
        shift = seqlen_k - seqlen_q
        scale, cap_at = real(softmax_scale), real(softcap)

        load_qk(q, start_q + m_start, seqlen_q - m_start, head, sQ, thread)
        for x in range(V_SHARE):
            rO[x] = real(0)
        row_max, row_sum = real(-math.inf), real(0)
        if sinks.shape[0] > 0 and b < batch and sinks[head] > -math.inf:
            row_max, row_sum = sinks[head], real(1)  # as if a key with this score had been first
        m_stop = min(m_start + BLOCK, seqlen_q)
        first, last = key_range(m_start, m_stop, shift, seqlen_k, window_left, window_right)
        for n_start in range(first // BLOCK * BLOCK, last, BLOCK):
            load_qk(k, start_k + n_start, seqlen_k - n_start, head_kv, sKV, thread)
            cuda.syncthreads()  # K is in; the first time round, Q too

            for n in range(lane, BLOCK, LANES):
                score = real(-math.inf)
                i, j = m_start + row, n_start + n
                if j < seqlen_k and visible(i, j, shift, window_left, window_right):
                    score = real(0)
                    for d in range(HEAD_DIM):
                        score += sQ[row, d] * sKV[n, d]
                    score, _, _ = cap(scale * score, cap_at)
                    if score == -math.inf:
                        score = real(math.nan)  # a key that is seen: not as if there were none
                sS[row, n] = score
            cuda.syncthreads()  # S is whole, and K may make room for V

            load_v(v, start_k + n_start, seqlen_k - n_start, head_kv, sKV, thread)
            new_max = row_max
            for n in range(BLOCK):
                new_max = max(new_max, sS[row, n])
            origin = new_max if new_max > -math.inf else real(0)  # no key so far: every exp is 0
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

        if m_start + row < seqlen_q:
            token = start_q + m_start + row
            dead = row_sum == real(0)
            for x in range(V_SHARE):
                mean = real(0) if dead else rO[x] / row_sum
                out[token, head, lane + x * LANES] = encode(mean)
            if lane == 0:
                lse[head, token] = row_max if dead else row_max + math.log(row_sum)

    return cuda.jit(kernel), BLOCK
