"""Pass 2 of the double backward, key tiles outer: gk, gv, and on request gq by atomic adds.

    gv = tP^T dO    gk = softmax_scale (tdS^T Q + dS^T ddQ)    gq = softmax_scale (tdS K + dS ddK)

with tP, tdS and dS as in second.second_scores. One CTA per key tile and key/value head, which
loops over the query heads of its group and over the query tiles that see the keys. Thread
(row, lane) owns gradients (key row, lane + LANES x).
CUDA twin: kernels_cu/sm80/double_backward_kv.cu; reference: rawattn/reference/second.py.
"""

import functools
from typing import Any

from rawattn.kernels_numba.common import (
    LANES,
    Array,
    accumulator,
    block_rows,
    cuda,
    encoder,
    filled,
    find_tile,
    keys_in_use,
    query_range,
    run,
    sequence,
    tile_loader,
    tiles_bound,
    visible,
)
from rawattn.kernels_numba.second import live_tile_loader, row_terms, second_scores
from rawattn.ops.arguments import given, sizes
from rawattn.ops.double_backward_kv import Args
from rawattn.problem import Problem
from rawattn.variants import Row


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``gk`` and ``gv``.

    ``gq_accum``, row-major (total_q, num_heads_q, head_dim) if given, has gq / softmax_scale added.
    """
    p = problem
    parts = given(args.ddq, args.ddk, args.ddv)
    args = filled(args, p, ddq=3, ddk=3, ddv=3, gq_accum=1, seqused_k=1)
    kernel, block = compiled(p.dtype, p.head_dim, p.head_dim_v, p.softcap > 0, *parts)
    run(
        kernel,
        (tiles_bound(p.total_k, p.batch, block), p.num_heads_kv),
        block * LANES,
        p,
        args,
        sizes(p),
        written=("gq_accum", "gk", "gv"),
        stream=stream,
    )


@functools.cache
def compiled(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    capped: bool,
    has_ddq: bool,
    has_ddk: bool,
    has_ddv: bool,
) -> tuple[Any, int]:
    """The kernel for these compile-time constants, and its BLOCK."""
    real, encode = accumulator(dtype), encoder(dtype)
    HEAD_DIM, HEAD_DIM_V = head_dim, head_dim_v
    HAS_DDQ, HAS_DDK, HAS_DDV, HAS_E = has_ddq, has_ddk, has_ddv, has_ddq or has_ddk
    V_COLUMNS, DDV_COLUMNS = HEAD_DIM_V * HAS_E, HEAD_DIM_V * HAS_DDV
    DDQ_COLUMNS, DDK_COLUMNS = HEAD_DIM * HAS_DDQ, HEAD_DIM * HAS_DDK
    BLOCK = block_rows(
        dtype,
        *(HEAD_DIM, HEAD_DIM, V_COLUMNS, HEAD_DIM_V, DDQ_COLUMNS, DDK_COLUMNS, DDV_COLUMNS),
        squares=3,
        numbers=0,
    )
    # one more column than there are numbers: rows then start in different banks of shared memory
    QK_TILE, V_TILE, DO_TILE = (
        (BLOCK, HEAD_DIM + 1),
        (BLOCK, V_COLUMNS + 1),
        (BLOCK, HEAD_DIM_V + 1),
    )
    DDQ_TILE, DDK_TILE = (BLOCK, DDQ_COLUMNS + 1), (BLOCK, DDK_COLUMNS + 1)
    DDV_TILE, SCORES = (BLOCK, DDV_COLUMNS + 1), (BLOCK, BLOCK + 1)
    QK_SHARE, V_SHARE = HEAD_DIM // LANES, HEAD_DIM_V // LANES
    load_k, load_v = tile_loader(dtype, BLOCK, HEAD_DIM), tile_loader(dtype, BLOCK, HEAD_DIM_V)
    load_q = live_tile_loader(dtype, BLOCK, HEAD_DIM)
    load_dout = live_tile_loader(dtype, BLOCK, HEAD_DIM_V)
    terms = row_terms(dtype)
    scores = second_scores(dtype, HEAD_DIM, HEAD_DIM_V, capped, (HAS_DDQ, HAS_DDK, HAS_DDV))

    def kernel(
        q: Array,
        k: Array,
        v: Array,
        ddq: Array,
        ddk: Array,
        ddv: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        ddlse: Array,
        ddelta: Array,
        gq_accum: Array,
        gk: Array,
        gv: Array,
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
        sdO = cuda.shared.array(DO_TILE, real)
        sddQ = cuda.shared.array(DDQ_TILE, real)
        sddK = cuda.shared.array(DDK_TILE, real)
        sddV = cuda.shared.array(DDV_TILE, real)
        stP = cuda.shared.array(SCORES, real)
        stdS = cuda.shared.array(SCORES, real)
        sdS = cuda.shared.array(SCORES, real)
        rgK = cuda.local.array(QK_SHARE, real)
        rgV = cuda.local.array(V_SHARE, real)
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

        load_k(k, start_k + n_start, seqlen_k - n_start, head_kv, sK, thread)
        if HAS_E:
            load_v(v, start_k + n_start, seqlen_k - n_start, head_kv, sV, thread)
        if HAS_DDK:
            load_k(ddk, start_k + n_start, seqlen_k - n_start, head_kv, sddK, thread)
        if HAS_DDV:
            load_v(ddv, start_k + n_start, seqlen_k - n_start, head_kv, sddV, thread)
        for x in range(QK_SHARE):
            rgK[x] = real(0)
        for x in range(V_SHARE):
            rgV[x] = real(0)
        n_stop = min(n_start + BLOCK, seqlen_k)
        first, last = query_range(n_start, n_stop, shift, seqlen_q, window_left, window_right)
        if n_start >= seqlen_k:
            last = 0  # keys that are not in use: gradients of zeros
        for head in range(head_kv * group, (head_kv + 1) * group):
            for m_start in range(first // BLOCK * BLOCK, last, BLOCK):
                first_row, rows = start_q + m_start, seqlen_q - m_start
                load_q(q, lse, first_row, rows, head, sQ, thread)
                load_dout(dout, lse, first_row, rows, head, sdO, thread)
                if HAS_DDQ:
                    load_q(ddq, lse, first_row, rows, head, sddQ, thread)
                row_lse, row_delta, row_ddlse, row_ddelta = terms(
                    lse, delta, ddlse, ddelta, head, first_row + row, row < rows
                )
                cuda.syncthreads()  # Q, dO, ddQ are in; the first time round, K, V, ddK, ddV too

                for n in range(lane, BLOCK, LANES):
                    tprobability, tdscore, dscore = real(0), real(0), real(0)
                    i, j = m_start + row, n_start + n
                    if j < seqlen_k and visible(i, j, shift, window_left, window_right):
                        tprobability, tdscore, dscore = scores(
                            sQ,
                            sK,
                            sV,
                            sdO,
                            sddQ,
                            sddK,
                            sddV,
                            row_lse,
                            row_delta,
                            row_ddlse,
                            row_ddelta,
                            row,
                            n,
                            scale,
                            cap_at,
                        )
                    stP[row, n] = tprobability
                    stdS[row, n] = tdscore
                    sdS[row, n] = dscore
                cuda.syncthreads()  # tP, tdS and dS are whole

                for m in range(BLOCK):
                    tprobability, tdscore, dscore = stP[m, row], stdS[m, row], sdS[m, row]
                    for x in range(QK_SHARE):
                        rgK[x] += tdscore * sQ[m, lane + x * LANES]
                        if HAS_DDQ:
                            rgK[x] += dscore * sddQ[m, lane + x * LANES]
                    if HAS_E:
                        for x in range(V_SHARE):
                            rgV[x] += tprobability * sdO[m, lane + x * LANES]
                if gq_accum.shape[0] > 0 and row < rows:
                    base = ((first_row + row) * num_heads_q + head) * HEAD_DIM
                    for d in range(lane, HEAD_DIM, LANES):
                        total = real(0)
                        for n in range(BLOCK):
                            total += stdS[row, n] * sK[n, d]
                            if HAS_DDK:
                                total += sdS[row, n] * sddK[n, d]
                        cuda.atomic.add(gq_accum, base + d, total)
                cuda.syncthreads()  # Q, dO, ddQ, tP, tdS, dS are read, and may make room

        if n_start + row < allotted:
            token = start_k + n_start + row
            for x in range(QK_SHARE):
                gk[token, head_kv, lane + x * LANES] = encode(scale * rgK[x])
            for x in range(V_SHARE):
                gv[token, head_kv, lane + x * LANES] = encode(rgV[x])

    return cuda.jit(kernel), BLOCK
