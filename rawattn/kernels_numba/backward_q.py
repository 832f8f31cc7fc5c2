"""dQ = softmax_scale dS K, query tiles outer; on request dK = dS^T Q, dV = P^T dO by atomic adds.

One CTA per query tile and query head, which loops over the key tiles that its queries see. Thread
(row, lane) owns gradients (query row, lane + LANES x).
CUDA twin: kernels_cu/sm80/backward_q.cu; reference: rawattn/reference/dense.py.
"""

import functools
from typing import Any

from rawattn.kernels_numba.common import (
    LANES,
    Array,
    accumulator,
    backward_scores,
    block_rows,
    cuda,
    encoder,
    filled,
    find_tile,
    key_range,
    keys_in_use,
    load_row_terms,
    run,
    tile_loader,
    tiles_bound,
)
from rawattn.ops.arguments import sizes
from rawattn.ops.backward_q import Args
from rawattn.problem import Problem
from rawattn.variants import Row


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``dq``.

    It adds dK / softmax_scale to ``dk_accum`` and dV to ``dv_accum``, row-major
    (total_k, num_heads_kv, size), if both are given.
    """
    p = problem
    args = filled(args, p, dk_accum=1, dv_accum=1, seqused_k=1)
    kernel, block = compiled(p.dtype, p.head_dim, p.head_dim_v, p.softcap > 0)
    run(
        kernel,
        (tiles_bound(p.total_q, p.batch, block), p.num_heads_q),
        block * LANES,
        p,
        args,
        sizes(p),
        written=("dq", "dk_accum", "dv_accum"),
        stream=stream,
    )


@functools.cache
def compiled(dtype: str, head_dim: int, head_dim_v: int, capped: bool) -> tuple[Any, int]:
    """The kernel for these compile-time constants, and its BLOCK."""
    real, encode = accumulator(dtype), encoder(dtype)
    HEAD_DIM, HEAD_DIM_V = head_dim, head_dim_v
    BLOCK = block_rows(dtype, HEAD_DIM, HEAD_DIM, HEAD_DIM_V, HEAD_DIM_V)
    # one more column than there are numbers: rows then start in different banks of shared memory
    QK_TILE, V_TILE, SCORES = (BLOCK, HEAD_DIM + 1), (BLOCK, HEAD_DIM_V + 1), (BLOCK, BLOCK + 1)
    QK_SHARE = HEAD_DIM // LANES
    load_qk, load_v = tile_loader(dtype, BLOCK, HEAD_DIM), tile_loader(dtype, BLOCK, HEAD_DIM_V)
    scores = backward_scores(dtype, BLOCK, HEAD_DIM, HEAD_DIM_V, capped)

    def kernel(
        q: Array,
        k: Array,
        v: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        dq: Array,
        dk_accum: Array,
        dv_accum: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
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
        sK = cuda.shared.array(QK_TILE, real)
        sV = cuda.shared.array(V_TILE, real)
        sdO = cuda.shared.array(V_TILE, real)
        sP = cuda.shared.array(SCORES, real)
        sdS = cuda.shared.array(SCORES, real)
        sL = cuda.shared.array(BLOCK, real)
        sD = cuda.shared.array(BLOCK, real)
        rdQ = cuda.local.array(QK_SHARE, real)
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

        first_row, rows = start_q + m_start, seqlen_q - m_start
        load_qk(q, first_row, rows, head, sQ, thread)
        load_v(dout, first_row, rows, head, sdO, thread)
        if lane == 0 and row < rows:
            load_row_terms(lse, delta, first_row, head, sL, sD, row)
        for x in range(QK_SHARE):
            rdQ[x] = real(0)
        m_stop = min(m_start + BLOCK, seqlen_q)
        first, last = key_range(m_start, m_stop, shift, seqlen_k, window_left, window_right)
        for n_start in range(first // BLOCK * BLOCK, last, BLOCK):
            load_qk(k, start_k + n_start, seqlen_k - n_start, head_kv, sK, thread)
            load_v(v, start_k + n_start, seqlen_k - n_start, head_kv, sV, thread)
            cuda.syncthreads()  # K and V are in; the first time round, Q, dO, L and D too

            scores(
                sQ,
                sK,
                sV,
                sdO,
                sL,
                sD,
                sP,
                sdS,
                row,
                lane,
                m_start,
                n_start,
                seqlen_q,
                seqlen_k,
                window_left,
                window_right,
                scale,
                cap_at,
            )
            cuda.syncthreads()  # P and dS are whole

            for n in range(BLOCK):
                dscore = sdS[row, n]
                for x in range(QK_SHARE):
                    rdQ[x] += dscore * sK[n, lane + x * LANES]
            if dk_accum.shape[0] > 0 and n_start + row < seqlen_k:
                pair = (start_k + n_start + row) * num_heads_kv + head_kv
                for d in range(lane, HEAD_DIM, LANES):
                    total = real(0)
                    for m in range(BLOCK):
                        total += sdS[m, row] * sQ[m, d]
                    cuda.atomic.add(dk_accum, pair * HEAD_DIM + d, total)
                for d in range(lane, HEAD_DIM_V, LANES):
                    total = real(0)
                    for m in range(BLOCK):
                        total += sP[m, row] * sdO[m, d]
                    cuda.atomic.add(dv_accum, pair * HEAD_DIM_V + d, total)
            cuda.syncthreads()  # K, V, P, dS are read, and may make room for the next tile's

        if row < rows:
            for x in range(QK_SHARE):
                dq[first_row + row, head, lane + x * LANES] = encode(scale * rdQ[x])

    return cuda.jit(kernel), BLOCK
