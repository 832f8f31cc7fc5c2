"""Pass 1 of the double backward: gradients of dout and dlse, and the row terms of pass 2.

    ddlse = sum of P o E        ddout = (P o E) v + P ddv - ddlse out
    delta = dout . out - dlse   ddelta = dout . ddout

with P = exp(S - lse) and E = softmax_scale (ddq k^T + q ddk^T), the tangent of S.
One CTA per query tile and query head; the keys pass through shared memory tile by tile, K and V in
turn through one buffer, ddK and ddV through another. Thread (row, lane) owns scores
(row, lane + LANES x) and outputs (row, lane + LANES x). A row without keys gets zeros.
CUDA twin: kernels_cu/sm80/double_backward_out.cu; reference: rawattn/reference/second.py.
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
    decoder,
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
from rawattn.ops.double_backward_out import Args
from rawattn.problem import Problem
from rawattn.variants import Row


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``ddout``, ``ddlse``, ``delta``, ``ddelta``, zeroes ``gq_accum``.

    ``ddlse``, ``delta`` and ``ddelta`` are of ``lse``'s shape, (num_heads_q, total_q).
    """
    p = problem
    parts = given(args.ddq, args.ddk, args.ddv)
    args = filled(args, p, ddq=3, ddk=3, ddv=3, dlse=2, gq_accum=1, sinks=1, ddsinks=1, seqused_k=1)
    kernel, block = compiled(p.dtype, p.head_dim, p.head_dim_v, p.softcap > 0, *parts)
    run(
        kernel,
        (tiles_bound(p.total_q, p.batch, block), p.num_heads_q),
        block * LANES,
        p,
        args,
        sizes(p),
        written=("ddout", "ddlse", "delta", "ddelta", "gq_accum"),
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
    real, decode, encode = accumulator(dtype), decoder(dtype), encoder(dtype)
    HEAD_DIM, HEAD_DIM_V, COLUMNS = head_dim, head_dim_v, max(head_dim, head_dim_v)
    HAS_DDQ, HAS_DDK, HAS_DDV, HAS_E = has_ddq, has_ddk, has_ddv, has_ddq or has_ddk
    DDQ_COLUMNS = HEAD_DIM * HAS_DDQ
    DDKV_COLUMNS = max(HEAD_DIM * HAS_DDK, HEAD_DIM_V * HAS_DDV)
    BLOCK = block_rows(
        dtype, HEAD_DIM, COLUMNS, DDQ_COLUMNS, DDKV_COLUMNS, squares=2, numbers=2 * LANES
    )
    # one more column than there are numbers: rows then start in different banks of shared memory
    QK_TILE, KV_TILE, SCORES = (BLOCK, HEAD_DIM + 1), (BLOCK, COLUMNS + 1), (BLOCK, BLOCK + 1)
    DDQ_TILE, DDKV_TILE = (BLOCK, DDQ_COLUMNS + 1), (BLOCK, DDKV_COLUMNS + 1)
    V_SHARE = HEAD_DIM_V // LANES
    cap = capper(dtype, capped)
    load_qk, load_v = tile_loader(dtype, BLOCK, HEAD_DIM), tile_loader(dtype, BLOCK, HEAD_DIM_V)
    qk_products = score_and_tangent(dtype, HEAD_DIM, HAS_DDQ, HAS_DDK)

    def kernel(
        q: Array,
        k: Array,
        v: Array,
        ddq: Array,
        ddk: Array,
        ddv: Array,
        out: Array,
        dout: Array,
        lse: Array,
        dlse: Array,
        ddout: Array,
        ddlse: Array,
        delta: Array,
        ddelta: Array,
        gq_accum: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        sinks: Array,
        ddsinks: Array,
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
        gq_accum_size: int,
    ) -> None:
        sQ = cuda.shared.array(QK_TILE, real)
        sKV = cuda.shared.array(KV_TILE, real)
        sddQ = cuda.shared.array(DDQ_TILE, real)
        sddKV = cuda.shared.array(DDKV_TILE, real)
        sP = cuda.shared.array(SCORES, real)
        stP = cuda.shared.array(SCORES, real)
        sDelta = cuda.shared.array((BLOCK, LANES), real)
        sDdelta = cuda.shared.array((BLOCK, LANES), real)
        rddO = cuda.local.array(V_SHARE, real)
        thread = cuda.threadIdx.x
        row, lane = thread // LANES, thread % LANES
        head = cuda.blockIdx.y
        head_kv = head // (num_heads_q // num_heads_kv)
        cta = cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x
        step = cuda.gridDim.x * cuda.gridDim.y * cuda.blockDim.x
        for e in range(cta * cuda.blockDim.x + thread, gq_accum_size, step):
            gq_accum[e] = real(0)
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
        if HAS_DDQ:
            load_qk(ddq, first_row, rows, head, sddQ, thread)
        dead = row >= rows or b == batch or lse[head, first_row + row] == -math.inf
        row_lse = real(math.inf) if dead else lse[head, first_row + row]
        row_tangent = real(0)
        if sinks.shape[0] > 0 and ddsinks.shape[0] > 0:
            row_tangent = math.exp(sinks[head] - row_lse) * ddsinks[head]
        for x in range(V_SHARE):
            rddO[x] = real(0)
        m_stop = min(m_start + BLOCK, seqlen_q)
        first, last = key_range(m_start, m_stop, shift, seqlen_k, window_left, window_right)
        for n_start in range(first // BLOCK * BLOCK, last, BLOCK):
            load_qk(k, start_k + n_start, seqlen_k - n_start, head_kv, sKV, thread)
            if HAS_DDK:
                load_qk(ddk, start_k + n_start, seqlen_k - n_start, head_kv, sddKV, thread)
            cuda.syncthreads()  # K and ddK are in; the first time round, Q and ddQ too

            for n in range(lane, BLOCK, LANES):
                probability: Any = real(0)
                tangent = real(0)
                i, j = m_start + row, n_start + n
                if j < seqlen_k and visible(i, j, shift, window_left, window_right):
                    score, tangent = qk_products(sQ, sKV, sddQ, sddKV, row, n)
                    score, slope, _ = cap(scale * score, cap_at)
                    probability = math.exp(score - row_lse)
                    tangent *= scale * slope
                sP[row, n] = probability
                stP[row, n] = probability * tangent
            cuda.syncthreads()  # P and P o E are whole, and K and ddK may make room for V and ddV

            if HAS_E:
                load_v(v, start_k + n_start, seqlen_k - n_start, head_kv, sKV, thread)
            if HAS_DDV:
                load_v(ddv, start_k + n_start, seqlen_k - n_start, head_kv, sddKV, thread)
            cuda.syncthreads()  # V and ddV are in

            for n in range(BLOCK):
                probability, tprobability = sP[row, n], stP[row, n]
                row_tangent += tprobability
                for x in range(V_SHARE):
                    if HAS_E:
                        rddO[x] += tprobability * sKV[n, lane + x * LANES]
                    if HAS_DDV:
                        rddO[x] += probability * sddKV[n, lane + x * LANES]
            cuda.syncthreads()  # V and ddV are read, and may make room for the next K and ddK

        partial_delta, partial_ddelta = real(0), real(0)
        if row < rows:
            token = first_row + row
            for x in range(V_SHARE):
                d = lane + x * LANES
                cotangent = real(0)
                if not dead:
                    mean = decode(out[token, head, d])
                    cotangent = rddO[x] - row_tangent * mean
                    partial_delta += decode(dout[token, head, d]) * mean
                    partial_ddelta += decode(dout[token, head, d]) * cotangent
                ddout[token, head, d] = encode(cotangent)
        sDelta[row, lane] = partial_delta
        sDdelta[row, lane] = partial_ddelta
        cuda.syncthreads()  # the partial sums of the row's other lanes

        if lane == 0 and row < rows:
            token = first_row + row
            for other in range(1, LANES):
                partial_delta += sDelta[row, other]
                partial_ddelta += sDdelta[row, other]
            if dlse.shape[0] > 0 and not dead:
                partial_delta -= dlse[head, token]
            ddlse[head, token] = real(0) if dead else row_tangent
            delta[head, token] = partial_delta
            ddelta[head, token] = partial_ddelta

    return cuda.jit(kernel), BLOCK
