"""Second half of pass 2 of the double backward without atomic adds, query tiles outer: gq.

    gq = softmax_scale (tdS K + dS ddK)

with tdS and dS as in second.second_scores. One CTA per query tile and query head, which loops
over the key tiles that its queries see. Thread (row, lane) owns gradients
(query row, lane + LANES x).
CUDA twin: kernels_cu/sm80/double_backward_q.cu; reference: rawattn/reference/second.py.
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
    key_range,
    keys_in_use,
    run,
    tile_loader,
    tiles_bound,
    visible,
)
from rawattn.kernels_numba.second import live_tile_loader, row_terms, second_scores
from rawattn.ops.arguments import given, sizes
from rawattn.ops.double_backward_q import Args
from rawattn.problem import Problem
from rawattn.variants import Row


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``gq``."""
    p = problem
    parts = given(args.ddq, args.ddk, args.ddv)
    args = filled(args, p, ddq=3, ddk=3, ddv=3, seqused_k=1)
    kernel, block = compiled(p.dtype, p.head_dim, p.head_dim_v, p.softcap > 0, *parts)
    run(
        kernel,
        (tiles_bound(p.total_q, p.batch, block), p.num_heads_q),
        block * LANES,
        p,
        args,
        sizes(p),
        written=("gq",),
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
        squares=2,
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
    QK_SHARE = HEAD_DIM // LANES
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
        gq: Array,
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
        stdS = cuda.shared.array(SCORES, real)
        sdS = cuda.shared.array(SCORES, real)
        rgQ = cuda.local.array(QK_SHARE, real)
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
        load_q(q, lse, first_row, rows, head, sQ, thread)
        load_dout(dout, lse, first_row, rows, head, sdO, thread)
        if HAS_DDQ:
            load_q(ddq, lse, first_row, rows, head, sddQ, thread)
        row_lse, row_delta, row_ddlse, row_ddelta = terms(
            lse, delta, ddlse, ddelta, head, first_row + row, row < rows
        )
        for x in range(QK_SHARE):
            rgQ[x] = real(0)
        m_stop = min(m_start + BLOCK, seqlen_q)
        first, last = key_range(m_start, m_stop, shift, seqlen_k, window_left, window_right)
        for n_start in range(first // BLOCK * BLOCK, last, BLOCK):
            load_k(k, start_k + n_start, seqlen_k - n_start, head_kv, sK, thread)
            if HAS_E:
                load_v(v, start_k + n_start, seqlen_k - n_start, head_kv, sV, thread)
            if HAS_DDK:
                load_k(ddk, start_k + n_start, seqlen_k - n_start, head_kv, sddK, thread)
            if HAS_DDV:
                load_v(ddv, start_k + n_start, seqlen_k - n_start, head_kv, sddV, thread)
            cuda.syncthreads()  # K, V, ddK, ddV are in; the first time round, Q, dO, ddQ too

            for n in range(lane, BLOCK, LANES):
                tdscore, dscore = real(0), real(0)
                i, j = m_start + row, n_start + n
                if j < seqlen_k and visible(i, j, shift, window_left, window_right):
                    _, tdscore, dscore = scores(
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
                stdS[row, n] = tdscore
                sdS[row, n] = dscore
            cuda.syncthreads()  # tdS and dS are whole

            for n in range(BLOCK):
                tdscore, dscore = stdS[row, n], sdS[row, n]
                for x in range(QK_SHARE):
                    rgQ[x] += tdscore * sK[n, lane + x * LANES]
                    if HAS_DDK:
                        rgQ[x] += dscore * sddK[n, lane + x * LANES]
            cuda.syncthreads()  # K, V, ddK, ddV, tdS, dS are read, and may make room for the next

        if row < rows:
            for x in range(QK_SHARE):
                gq[first_row + row, head, lane + x * LANES] = encode(scale * rgQ[x])

    return cuda.jit(kernel), BLOCK
