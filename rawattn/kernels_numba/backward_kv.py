"""dV = P^T dO and dK = softmax_scale dS^T Q, key tiles outer; on request dQ = dS K by atomic adds.

One CTA per key tile and key/value head, which loops over the query heads of its group and over the
query tiles that see the keys. Thread (row, lane) owns gradients (key row, lane + LANES x).
CUDA twin: kernels_cu/sm80/backward_kv.cu; reference: rawattn/reference/dense.py.
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
    keys_in_use,
    load_row_terms,
    query_range,
    run,
    sequence,
    tile_loader,
    tiles_bound,
)
from rawattn.ops.arguments import sizes
from rawattn.ops.backward_kv import Args
from rawattn.problem import Problem
from rawattn.variants import Row


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``dk`` and ``dv``.

    ``dq_accum``, row-major (total_q, num_heads_q, head_dim) if given, has dQ / softmax_scale added.
    """
    p = problem
    args = filled(args, p, dq_accum=1, seqused_k=1)
    kernel, block = compiled(p.dtype, p.head_dim, p.head_dim_v, p.softcap > 0)
    run(
        kernel,
        (tiles_bound(p.total_k, p.batch, block), p.num_heads_kv),
        block * LANES,
        p,
        args,
        sizes(p),
        written=("dq_accum", "dk", "dv"),
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
    QK_SHARE, V_SHARE = HEAD_DIM // LANES, HEAD_DIM_V // LANES
    load_qk, load_v = tile_loader(dtype, BLOCK, HEAD_DIM), tile_loader(dtype, BLOCK, HEAD_DIM_V)
    scores = backward_scores(dtype, BLOCK, HEAD_DIM, HEAD_DIM_V, capped)

    def kernel(
        q: Array,
        k: Array,
        v: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        dq_accum: Array,
        dk: Array,
        dv: Array,
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
        rdK = cuda.local.array(QK_SHARE, real)
        rdV = cuda.local.array(V_SHARE, real)
        thread = cuda.threadIdx.x
        row, lane = thread // LANES, thread % LANES
        head_kv = cuda.blockIdx.y
        group = num_heads_q // num_heads_kv
        b, start_k, allotted, n_start = find_tile(
            cu_seqlens_k, batch, total_k, cuda.blockIdx.x, BLOCK
        )
        if n_start >= allotted:
            return
        _, seqlen_k = keys_in_use(cu_seqlens_k, seqused_k, batch, b, total_k)
        start_q, seqlen_q = sequence(cu_seqlens_q, batch, b, total_q)
        shift = seqlen_k - seqlen_q
        scale, cap_at = real(softmax_scale), real(softcap)

        load_qk(k, start_k + n_start, seqlen_k - n_start, head_kv, sK, thread)
        load_v(v, start_k + n_start, seqlen_k - n_start, head_kv, sV, thread)
        for x in range(QK_SHARE):
            rdK[x] = real(0)
        for x in range(V_SHARE):
            rdV[x] = real(0)
        n_stop = min(n_start + BLOCK, seqlen_k)
        first, last = query_range(n_start, n_stop, shift, seqlen_q, window_left, window_right)
        if n_start >= seqlen_k:
            last = 0  # keys that are not in use: gradients of zeros
        for head in range(head_kv * group, (head_kv + 1) * group):
            for m_start in range(first // BLOCK * BLOCK, last, BLOCK):
                first_row, rows = start_q + m_start, seqlen_q - m_start
                load_qk(q, first_row, rows, head, sQ, thread)
                load_v(dout, first_row, rows, head, sdO, thread)
                if lane == 0 and row < rows:
                    load_row_terms(lse, delta, first_row, head, sL, sD, row)
                cuda.syncthreads()  # Q, dO, L, D are in; the first time round, K and V too

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

                for m in range(BLOCK):
                    probability, dscore = sP[m, row], sdS[m, row]
                    for x in range(QK_SHARE):
                        rdK[x] += dscore * sQ[m, lane + x * LANES]
                    for x in range(V_SHARE):
                        rdV[x] += probability * sdO[m, lane + x * LANES]
                if dq_accum.shape[0] > 0 and row < rows:
                    base = ((first_row + row) * num_heads_q + head) * HEAD_DIM
                    for d in range(lane, HEAD_DIM, LANES):
                        total = real(0)
                        for n in range(BLOCK):
                            total += sdS[row, n] * sK[n, d]
                        cuda.atomic.add(dq_accum, base + d, total)
                cuda.syncthreads()  # Q, dO, P, dS are read, and may make room for the next tile's

        if n_start + row < allotted:
            token = start_k + n_start + row
            for x in range(QK_SHARE):
                dk[token, head_kv, lane + x * LANES] = encode(scale * rdK[x])
            for x in range(V_SHARE):
                dv[token, head_kv, lane + x * LANES] = encode(rdV[x])

    return cuda.jit(kernel), BLOCK
