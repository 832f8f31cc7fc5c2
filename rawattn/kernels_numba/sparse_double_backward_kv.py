"""Half of pass 2 of the block-sparse double backward, one key block at a time: gk, gv, gate's gg.

    gv = tP^T dO    gk = softmax_scale (tdX^T Q + dX^T ddQ)
    gblock_scale = softmax_scale times the sum over keys and query heads of tdS X + dS tX

with all of these as in sparse_second. One CTA per key block and key/value head; no atomic
adds. A query's heads are rows of their own: the block's list, chunk after chunk, is read in tiles
of BLOCK rows, once for every BLOCK keys. Thread (row, lane) owns scores (row, lane + LANES x) and
gradients (key row, lane + LANES x).
CUDA twin: kernels_cu/sm80/sparse_double_backward_kv.cu; reference: rawattn/reference/sparse.py.
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
    sequence,
    tile_loader,
)
from rawattn.kernels_numba.second import row_terms, score_and_tangent
from rawattn.kernels_numba.sparse import (
    OWN,
    find_block,
    gate_reader,
    keys_stop,
    row_loader,
)
from rawattn.kernels_numba.sparse_second import ddgate_reader, gated_scores
from rawattn.ops.arguments import given, sizes
from rawattn.ops.sparse_double_backward_kv import Args
from rawattn.problem import Problem, Selection
from rawattn.variants import Row


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``gk`` and ``gv``, and adds to ``gblock_scale``, zeros so far."""
    p, parts = problem, given(args.ddq, args.ddk, args.ddv)
    has_ddgate = args.ddblock_scale is not None
    kernel, block = compiled(p.dtype, p.head_dim, p.head_dim_v, *parts, has_ddgate)
    run(
        kernel,
        (selection.key_units(p) + 1, p.num_heads_kv),
        block * LANES,
        p,
        filled(args, p, ddq=3, ddk=3, ddv=3, block_scale=3, ddblock_scale=3, gblock_scale=3),
        sizes(p, selection),
        written=("gblock_scale", "gk", "gv"),
        stream=stream,
    )


@functools.cache
def compiled(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    has_ddq: bool,
    has_ddk: bool,
    has_ddv: bool,
    has_ddgate: bool,
) -> tuple[Any, int]:
    """The kernel for these compile-time constants, and its BLOCK."""
    real, encode = accumulator(dtype), encoder(dtype)
    HEAD_DIM, HEAD_DIM_V = head_dim, head_dim_v
    HAS_DDQ, HAS_DDK, HAS_DDV = has_ddq, has_ddk, has_ddv
    HAS_E = has_ddq or has_ddk or has_ddgate
    V_COLUMNS, DDV_COLUMNS = HEAD_DIM_V * HAS_E, HEAD_DIM_V * HAS_DDV
    DDQ_COLUMNS, DDK_COLUMNS = HEAD_DIM * HAS_DDQ, HEAD_DIM * HAS_DDK
    BLOCK = block_rows(
        dtype,
        *(HEAD_DIM, HEAD_DIM, V_COLUMNS, HEAD_DIM_V, DDQ_COLUMNS, DDK_COLUMNS, DDV_COLUMNS),
        squares=3,
        numbers=LANES,
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
    load_q, load_dout = row_loader(dtype, HEAD_DIM), row_loader(dtype, HEAD_DIM_V)
    terms = row_terms(dtype)
    read_gate, read_ddgate = gate_reader(dtype), ddgate_reader(dtype, has_ddgate)
    qk_products = score_and_tangent(dtype, HEAD_DIM, HAS_DDQ, HAS_DDK, "float64")
    scores = gated_scores(dtype, HAS_E)

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
        starts: Array,
        lengths: Array,
        queries: Array,
        query_slots: Array,
        block_scale: Array,
        ddblock_scale: Array,
        gblock_scale: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        gk: Array,
        gv: Array,
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
        sQ = cuda.shared.array(QK_TILE, real)
        sK = cuda.shared.array(QK_TILE, real)
        sV = cuda.shared.array(V_TILE, real)
        sdO = cuda.shared.array(DO_TILE, real)
        sddQ = cuda.shared.array(DDQ_TILE, real)
        sddK = cuda.shared.array(DDK_TILE, real)
        sddV = cuda.shared.array(DDV_TILE, real)
        stP = cuda.shared.array(SCORES, real)
        stdX = cuda.shared.array(SCORES, real)
        sdX = cuda.shared.array(SCORES, real)
        sGate = cuda.shared.array((BLOCK, LANES), real)
        rgK = cuda.local.array(QK_SHARE, real)
        rgV = cuda.local.array(V_SHARE, real)
        thread = cuda.threadIdx.x
        row, lane = thread // LANES, thread % LANES
        head_kv = cuda.blockIdx.y
        ratio, group = num_heads_sel // num_heads_kv, num_heads_q // num_heads_sel
        unit = cuda.blockIdx.x
        b, start_k, seqlen_k, block = find_block(cu_seqlens_k, batch, total_k, unit, block_size)
        if block * block_size >= seqlen_k:
            return
        block_stop = min((block + 1) * block_size, seqlen_k)
        chunks, pos_of_token = 0, 0
        if b < batch:
            chunks = (total_q + chunk - 1) // chunk
            start_q, seqlen_q = sequence(cu_seqlens_q, batch, b, total_q)
            pos_of_token = seqlen_k - start_q - seqlen_q
        scale = real(softmax_scale)

        for n_start in range(block * block_size, block_stop, BLOCK):
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
            for c in range(chunks):
                begin = starts[c, head_kv, unit]
                rows = lengths[c, head_kv, unit] * group
                for m_start in range(0, rows, BLOCK):
                    m = m_start + row
                    token, head_sel, head, slot = 0, 0, 0, OWN
                    if m < rows:
                        item = int(queries[begin + m // group])
                        token, head_sel = item // ratio, head_kv * ratio + item % ratio
                        head = head_sel * group + m % group
                        slot = int(query_slots[begin + m // group])
                    row_lse, row_delta, row_ddlse, row_ddelta = terms(
                        lse, delta, ddlse, ddelta, head, token, m < rows
                    )
                    alive, stop = row_lse != math.inf, 0
                    if alive:
                        pos = token + pos_of_token
                        stop = keys_stop(block, slot, pos, seqlen_k, block_size, window_right)
                    load_q(q, token, head, alive, sQ, row, lane)
                    load_dout(dout, token, head, alive, sdO, row, lane)
                    if HAS_DDQ:
                        load_q(ddq, token, head, alive, sddQ, row, lane)
                    cuda.syncthreads()  # Q, dO, ddQ are in; the first time, K, V, ddK, ddV too

                    partial_gate = real(0)
                    for n in range(lane, BLOCK, LANES):
                        tprobability, tdproduct, dproduct = real(0), real(0), real(0)
                        if n_start + n < stop:
                            gate = read_gate(block_scale, token, head_sel, slot)
                            ddgate = read_ddgate(ddblock_scale, token, head_sel, slot)
                            score, tangent = qk_products(sQ, sK, sddQ, sddK, row, n)
                            dprobability, tdprobability = np.float64(0), np.float64(0)
                            for d in range(HEAD_DIM_V):
                                if HAS_E:
                                    dprobability += np.float64(sdO[row, d]) * np.float64(sV[n, d])
                                if HAS_DDV:
                                    tdprobability += np.float64(sdO[row, d]) * np.float64(
                                        sddV[n, d]
                                    )
                            tprobability, tdproduct, dproduct, gate_term = scores(
                                score,
                                tangent,
                                real(dprobability),
                                real(tdprobability),
                                gate,
                                ddgate,
                                row_lse,
                                row_delta,
                                row_ddlse,
                                row_ddelta,
                                scale,
                            )
                            partial_gate += gate_term
                        stP[row, n] = tprobability
                        stdX[row, n] = tdproduct
                        sdX[row, n] = dproduct
                    sGate[row, lane] = partial_gate
                    cuda.syncthreads()  # tP, tdX, dX and the gate's partial sums are whole

                    for other in range(BLOCK):
                        tprobability = stP[other, row]
                        tdproduct, dproduct = stdX[other, row], sdX[other, row]
                        for x in range(QK_SHARE):
                            rgK[x] += tdproduct * sQ[other, lane + x * LANES]
                            if HAS_DDQ:
                                rgK[x] += dproduct * sddQ[other, lane + x * LANES]
                        if HAS_E:
                            for x in range(V_SHARE):
                                rgV[x] += tprobability * sdO[other, lane + x * LANES]
                    # an item's first row in this tile adds up all its rows in this tile
                    leads = m < rows and lane == 0 and (row == 0 or m % group == 0)
                    if gblock_scale.shape[0] > 0 and leads and slot != OWN:
                        total = real(0)
                        for other in range(row, min(BLOCK, row + group - m % group)):
                            for part in range(LANES):
                                total += sGate[other, part]
                        gblock_scale[token, head_sel, slot] += scale * total
                    cuda.syncthreads()  # all of this is read, K too, and the gate's sum is written

            if n_start + row < seqlen_k:
                token = start_k + n_start + row
                for x in range(QK_SHARE):
                    gk[token, head_kv, lane + x * LANES] = encode(scale * rgK[x])
                for x in range(V_SHARE):
                    gv[token, head_kv, lane + x * LANES] = encode(rgV[x])

    return cuda.jit(kernel), BLOCK
