"""dV = P^T dO, dK = softmax_scale dS^T Q and the gates' gradient, by the list of each key block.

On request dQ = dS K by atomic adds. One CTA per key block and key/value head, for the lists of all
chunks in turn; or per segment of work, with dK and dV by atomic adds too. It loops over the key
tiles of the block, and for each over the list, whose entries stand for one row of a query tile per
query head that shares the selection. Thread (row, lane) owns gradients (key row, lane + LANES x).
The gates that one CTA adds to are its own.
CUDA twin: kernels_cu/sm80/sparse_backward_kv.cu; reference: rawattn/reference/sparse.py.
"""

import functools
import math
from typing import Any

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
)
from rawattn.kernels_numba.sparse import (
    OWN,
    find_block,
    gate_reader,
    keys_stop,
    live_row_terms,
    products,
    row_loader,
)
from rawattn.ops.arguments import sizes
from rawattn.ops.sparse_backward_kv import Args
from rawattn.problem import Problem, Selection
from rawattn.variants import Row


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``dk`` and ``dv``, or adds to ``dk_accum`` and ``dv_accum``.

    ``dq_accum`` and ``dk_accum`` have gradients / softmax_scale added, ``dblock_scale`` its own.
    Beside ``dk`` and ``dv``, ``work`` is not read.
    """
    p = problem
    grid = (selection.key_units(p) + 1, p.num_heads_kv)
    if args.work is None or args.dk_accum is None:
        args = args._replace(work=None)
    else:
        grid = (max(args.work.shape[0], 1), 1)
    kernel, block = compiled(p.dtype, p.head_dim, p.head_dim_v)
    results = ("dblock_scale", "dq_accum", "dk", "dv", "dk_accum", "dv_accum")
    run(
        kernel,
        grid,
        block * LANES,
        p,
        filled(filled(args, p, "int32", work=2), p, block_scale=3, **dict.fromkeys(results, 3)),
        sizes(p, selection),
        written=results,
        stream=stream,
    )


@functools.cache
def compiled(dtype: str, head_dim: int, head_dim_v: int) -> tuple[Any, int]:
    """The kernel for these compile-time constants, and its BLOCK."""
    real, encode = accumulator(dtype), encoder(dtype)
    HEAD_DIM, HEAD_DIM_V = head_dim, head_dim_v
    BLOCK = block_rows(dtype, HEAD_DIM, HEAD_DIM, HEAD_DIM_V, HEAD_DIM_V, numbers=LANES)
    # one more column than there are numbers: rows then start in different banks of shared memory
    QK_TILE, V_TILE, SCORES = (BLOCK, HEAD_DIM + 1), (BLOCK, HEAD_DIM_V + 1), (BLOCK, BLOCK + 1)
    PARTIAL = (BLOCK, LANES)
    QK_SHARE, V_SHARE = HEAD_DIM // LANES, HEAD_DIM_V // LANES
    load_qk, load_v = row_loader(dtype, HEAD_DIM), row_loader(dtype, HEAD_DIM_V)
    gate, terms = gate_reader(dtype), live_row_terms(dtype)
    dots = products(dtype, HEAD_DIM, HEAD_DIM_V)

    def kernel(
        q: Array,
        k: Array,
        v: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        starts: Array,
        lengths: Array,
        queries: Array,
        query_slots: Array,
        work: Array,
        block_scale: Array,
        dblock_scale: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        dq_accum: Array,
        dk: Array,
        dv: Array,
        dk_accum: Array,
        dv_accum: Array,
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
        sdO = cuda.shared.array(V_TILE, real)
        sP = cuda.shared.array(SCORES, real)
        sdS = cuda.shared.array(SCORES, real)
        sPartial = cuda.shared.array(PARTIAL, real)
        rdK = cuda.local.array(QK_SHARE, real)
        rdV = cuda.local.array(V_SHARE, real)
        thread = cuda.threadIdx.x
        row, lane = thread // LANES, thread % LANES
        unit, head_kv = cuda.blockIdx.x, cuda.blockIdx.y
        one, direct = cuda.blockIdx.x, work.shape[0] == 0
        if not direct:
            if work[one, 0] < 0:  # there are fewer segments
                return
            units = starts.shape[2]
            unit = int(work[one, 0]) % units
            head_kv = int(work[one, 0]) // units % num_heads_kv
        group, ratio = num_heads_q // num_heads_sel, num_heads_sel // num_heads_kv
        b, start_k, seqlen_k, block = find_block(cu_seqlens_k, batch, total_k, unit, block_size)
        if block * block_size >= seqlen_k:
            return
        start_q, seqlen_q = sequence(cu_seqlens_q, batch, b, total_q)
        lists = 1
        if direct:
            lists = starts.shape[0]
        if b == batch:  # keys of no sequence: nobody sees them
            lists = 0
        scale = real(softmax_scale)

        block_stop = min((block + 1) * block_size, seqlen_k)
        for n_start in range(block * block_size, block_stop, BLOCK):
            key, key_exists = start_k + n_start + row, n_start + row < block_stop
            load_qk(k, key, head_kv, key_exists, sK, row, lane)
            load_v(v, key, head_kv, key_exists, sV, row, lane)
            for x in range(QK_SHARE):
                rdK[x] = real(0)
            for x in range(V_SHARE):
                rdV[x] = real(0)
            for c in range(lists):
                begin, items = 0, 0
                if direct:
                    begin, items = int(starts[c, head_kv, unit]), int(lengths[c, head_kv, unit])
                else:
                    begin, items = int(work[one, 1]), int(work[one, 2])
                pairs = items * group  # of an item and a query head
                for m_start in range(0, pairs, BLOCK):
                    pair = m_start + row
                    exists, token, head_sel, slot = pair < pairs, 0, 0, OWN
                    if exists:
                        item = int(queries[begin + pair // group])
                        slot = int(query_slots[begin + pair // group])
                        token, head_sel = item // ratio, head_kv * ratio + item % ratio
                    head = head_sel * group + pair % group
                    alive, row_lse, row_delta = terms(lse, delta, head, token, exists)
                    load_qk(q, token, head, alive, sQ, row, lane)
                    load_v(dout, token, head, alive, sdO, row, lane)
                    cuda.syncthreads()  # Q and dO are in; the first time round, K and V too

                    pos = token - start_q + seqlen_k - seqlen_q
                    stop = keys_stop(block, slot, pos, seqlen_k, block_size, window_right)
                    factor = gate(block_scale, token, head_sel, slot)
                    dfactor = real(0)
                    for n in range(lane, BLOCK, LANES):
                        probability: Any = real(0)
                        dscore: Any = real(0)
                        if alive and n_start + n < stop:
                            score, dprobability = dots(sQ, sK, sdO, sV, row, n)
                            score *= scale
                            probability = math.exp(factor * score - row_lse)
                            dscore = probability * (dprobability - row_delta)
                            dfactor += dscore * score
                            dscore *= factor
                        sP[row, n] = probability
                        sdS[row, n] = dscore
                    sPartial[row, lane] = dfactor
                    cuda.syncthreads()  # P, dS and the gates' partial sums are whole

                    for m in range(BLOCK):
                        probability, dscore = sP[m, row], sdS[m, row]
                        for x in range(QK_SHARE):
                            rdK[x] += dscore * sQ[m, lane + x * LANES]
                        for x in range(V_SHARE):
                            rdV[x] += probability * sdO[m, lane + x * LANES]
                    if dq_accum.shape[0] > 0 and alive:
                        for d in range(lane, HEAD_DIM, LANES):
                            total = real(0)
                            for n in range(min(BLOCK, stop - n_start)):
                                total += sdS[row, n] * sK[n, d]
                            cuda.atomic.add(dq_accum, (token, head, d), total)
                    # the first row of each item in this tile adds up the item's rows
                    first_of_item = row == 0 or pair % group == 0
                    if dblock_scale.shape[0] > 0 and slot != OWN and lane == 0 and first_of_item:
                        total = real(0)
                        for m in range(row, min(BLOCK, row + group - pair % group)):
                            for other in range(LANES):
                                total += sPartial[m, other]
                        dblock_scale[token, head_sel, slot] += total
                    cuda.syncthreads()  # Q, dO, P, dS, partial sums are read, and may make room

            if direct and key_exists:
                for x in range(QK_SHARE):
                    dk[key, head_kv, lane + x * LANES] = encode(scale * rdK[x])
                for x in range(V_SHARE):
                    dv[key, head_kv, lane + x * LANES] = encode(rdV[x])
            if not direct and key_exists:
                for x in range(QK_SHARE):
                    cuda.atomic.add(dk_accum, (key, head_kv, lane + x * LANES), rdK[x])
                for x in range(V_SHARE):
                    cuda.atomic.add(dv_accum, (key, head_kv, lane + x * LANES), rdV[x])

    return cuda.jit(kernel), BLOCK
