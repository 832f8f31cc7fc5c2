"""out and lse as forward makes them, and their tangents in direction (tq, tk, tv).

    tlse = sum of P o E        tout = (P o E) v + P tv - tlse out

with P = softmax(S) and E = softmax_scale (tq k^T + q tk^T), the tangent of S.
One CTA per query tile and query head; the keys pass through shared memory tile by tile as in
forward, K and V in turn through one buffer, tK and tV through another. Thread (row, lane)
owns scores (row, lane + LANES x) and outputs (row, lane + LANES x).
CUDA twin: kernels_cu/sm80/jvp.cu; reference: rawattn/reference/online.py.
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
from rawattn.kernels_numba.second import score_and_tangent
from rawattn.ops.arguments import given, sizes
from rawattn.ops.jvp import Args
from rawattn.problem import Problem
from rawattn.variants import Row


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``out``, ``tout``, ``lse`` and ``tlse``."""
    p = problem
    parts = given(args.tq, args.tk, args.tv)
    args = filled(args, p, tq=3, tk=3, tv=3, sinks=1, tsinks=1, seqused_k=1)
    kernel, block = compiled(p.dtype, p.head_dim, p.head_dim_v, p.softcap > 0, *parts)
    run(
        kernel,
        (tiles_bound(p.total_q, p.batch, block), p.num_heads_q),
        block * LANES,
        p,
        args,
        sizes(p),
        written=("out", "tout", "lse", "tlse"),
        stream=stream,
    )


@functools.cache
def compiled(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    capped: bool,
    has_tq: bool,
    has_tk: bool,
    has_tv: bool,
) -> tuple[Any, int]:
    """The kernel for these compile-time constants, and its BLOCK."""
    real, encode = accumulator(dtype), encoder(dtype)
    HEAD_DIM, HEAD_DIM_V, COLUMNS = head_dim, head_dim_v, max(head_dim, head_dim_v)
    HAS_TQ, HAS_TK, HAS_TV, HAS_E = has_tq, has_tk, has_tv, has_tq or has_tk
    TQ_COLUMNS = HEAD_DIM * HAS_TQ
    TKV_COLUMNS = max(HEAD_DIM * HAS_TK, HEAD_DIM_V * HAS_TV)
    BLOCK = block_rows(dtype, HEAD_DIM, COLUMNS, TQ_COLUMNS, TKV_COLUMNS, squares=3)
    # one more column than there are numbers: rows then start in different banks of shared memory
    QK_TILE, KV_TILE, SCORES = (BLOCK, HEAD_DIM + 1), (BLOCK, COLUMNS + 1), (BLOCK, BLOCK + 1)
    TQ_TILE, TKV_TILE = (BLOCK, TQ_COLUMNS + 1), (BLOCK, TKV_COLUMNS + 1)
    V_SHARE = HEAD_DIM_V // LANES
    cap = capper(dtype, capped)
    load_qk, load_v = tile_loader(dtype, BLOCK, HEAD_DIM), tile_loader(dtype, BLOCK, HEAD_DIM_V)
    qk_products = score_and_tangent(dtype, HEAD_DIM, HAS_TQ, HAS_TK)

    def kernel(
        q: Array,
        k: Array,
        v: Array,
        tq: Array,
        tk: Array,
        tv: Array,
        out: Array,
        tout: Array,
        lse: Array,
        tlse: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        sinks: Array,
        tsinks: Array,
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
        stQ = cuda.shared.array(TQ_TILE, real)
        stKV = cuda.shared.array(TKV_TILE, real)
        sS = cuda.shared.array(SCORES, real)
        sP = cuda.shared.array(SCORES, real)
        sE = cuda.shared.array(SCORES, real)
        rO = cuda.local.array(V_SHARE, real)
        rtO = cuda.local.array(V_SHARE, real)
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
        if HAS_TQ:
            load_qk(tq, start_q + m_start, seqlen_q - m_start, head, stQ, thread)
        for x in range(V_SHARE):
            rO[x] = real(0)
            rtO[x] = real(0)
        row_max, row_sum, row_tangent = real(-math.inf), real(0), real(0)
        if sinks.shape[0] > 0 and b < batch and sinks[head] > -math.inf:
            row_max, row_sum = sinks[head], real(1)  # as if a key with this score had been first
            if tsinks.shape[0] > 0:
                row_tangent = tsinks[head]
        m_stop = min(m_start + BLOCK, seqlen_q)
        first, last = key_range(m_start, m_stop, shift, seqlen_k, window_left, window_right)
        for n_start in range(first // BLOCK * BLOCK, last, BLOCK):
            load_qk(k, start_k + n_start, seqlen_k - n_start, head_kv, sKV, thread)
            if HAS_TK:
                load_qk(tk, start_k + n_start, seqlen_k - n_start, head_kv, stKV, thread)
            cuda.syncthreads()  # K and tK are in; the first time round, Q and tQ too

            for n in range(lane, BLOCK, LANES):
                score, tangent = real(-math.inf), real(0)
                i, j = m_start + row, n_start + n
                if j < seqlen_k and visible(i, j, shift, window_left, window_right):
                    score, tangent = qk_products(sQ, sKV, stQ, stKV, row, n)
                    score, slope, _ = cap(scale * score, cap_at)
                    if score == -math.inf:
                        score = real(math.nan)  # a key that is seen: not as if there were none
                    tangent *= scale * slope
                sS[row, n] = score
                sE[row, n] = tangent
            cuda.syncthreads()  # S is whole, and K and tK may make room for V and tV

            load_v(v, start_k + n_start, seqlen_k - n_start, head_kv, sKV, thread)
            if HAS_TV:
                load_v(tv, start_k + n_start, seqlen_k - n_start, head_kv, stKV, thread)
            new_max = row_max
            for n in range(BLOCK):
                new_max = max(new_max, sS[row, n])
            origin = new_max if new_max > -math.inf else real(0)  # no key so far: every exp is 0
            for n in range(lane, BLOCK, LANES):
                sP[row, n] = math.exp(sS[row, n] - origin)
                sE[row, n] *= sP[row, n]  # from here on P o E
            rescale = math.exp(row_max - origin)
            row_max = new_max
            row_sum *= rescale
            row_tangent *= rescale
            for x in range(V_SHARE):
                rO[x] *= rescale
                rtO[x] *= rescale
            cuda.syncthreads()  # P and P o E are whole, V and tV are in

            for n in range(BLOCK):
                probability, tprobability = sP[row, n], sE[row, n]
                row_sum += probability
                row_tangent += tprobability
                for x in range(V_SHARE):
                    rO[x] += probability * sKV[n, lane + x * LANES]
                    if HAS_E:
                        rtO[x] += tprobability * sKV[n, lane + x * LANES]
                    if HAS_TV:
                        rtO[x] += probability * stKV[n, lane + x * LANES]
            cuda.syncthreads()  # V and tV are read, and may make room for the next K and tK

        if m_start + row < seqlen_q:
            token = start_q + m_start + row
            dead = row_sum == real(0)
            row_tlse = real(0) if dead else row_tangent / row_sum
            for x in range(V_SHARE):
                mean = real(0) if dead else rO[x] / row_sum
                tmean = real(0) if dead else rtO[x] / row_sum - row_tlse * mean
                out[token, head, lane + x * LANES] = encode(mean)
                tout[token, head, lane + x * LANES] = encode(tmean)
            if lane == 0:
                lse[head, token] = row_max if dead else row_max + math.log(row_sum)
                tlse[head, token] = row_tlse

    return cuda.jit(kernel), BLOCK
