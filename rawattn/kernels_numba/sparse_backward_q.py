"""dQ = softmax_scale dS K over the selected blocks of each query, without atomic adds.

One CTA per query token and ROWS of the query heads that share its selection, which loops over the
keys of its blocks. Thread (row, lane) owns gradients (query head row, lane + LANES x).
CUDA twin: kernels_cu/sm80/sparse_backward_q.cu; reference: rawattn/reference/sparse.py.
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
)
from rawattn.kernels_numba.sparse import (
    UNUSED,
    find_item,
    gate_reader,
    head_rows,
    keys_stop,
    live_row_terms,
    products,
    row_loader,
)
from rawattn.ops.arguments import sizes
from rawattn.ops.sparse_backward_q import Args
from rawattn.problem import Problem, Selection
from rawattn.variants import Row


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``dq``."""
    p, group = problem, selection.group(problem)
    kernel, rows = compiled(p.dtype, p.head_dim, p.head_dim_v, group)
    run(
        kernel,
        (max(p.total_q, 1), selection.num_heads_sel * -(-group // rows)),
        rows * LANES,
        p,
        filled(args, p, block_scale=3),
        sizes(p, selection),
        written=("dq",),
        stream=stream,
    )


@functools.cache
def compiled(dtype: str, head_dim: int, head_dim_v: int, group: int) -> tuple[Any, int]:
    """The kernel for these compile-time constants, and its ROWS."""
    real, encode = accumulator(dtype), encoder(dtype)
    HEAD_DIM, HEAD_DIM_V = head_dim, head_dim_v
    BLOCK = block_rows(dtype, HEAD_DIM, HEAD_DIM, HEAD_DIM_V, HEAD_DIM_V, squares=1, numbers=0)
    ROWS = head_rows(group, BLOCK)
    # one more column than there are numbers: rows then start in different banks of shared memory
    Q_TILE, DO_TILE, SCORES = (ROWS, HEAD_DIM + 1), (ROWS, HEAD_DIM_V + 1), (ROWS, BLOCK + 1)
    K_TILE, V_TILE = (BLOCK, HEAD_DIM + 1), (BLOCK, HEAD_DIM_V + 1)
    QK_SHARE = HEAD_DIM // LANES
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
        blocks: Array,
        slots: Array,
        block_scale: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        dq: Array,
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
        sK = cuda.shared.array(K_TILE, real)
        sV = cuda.shared.array(V_TILE, real)
        sdO = cuda.shared.array(DO_TILE, real)
        sdS = cuda.shared.array(SCORES, real)
        rdQ = cuda.local.array(QK_SHARE, real)
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

        alive, row_lse, row_delta = terms(lse, delta, head, token, exists)
        load_qk(q, token, head, alive, sQ, row, lane)
        load_v(dout, token, head, alive, sdO, row, lane)
        for x in range(QK_SHARE):
            rdQ[x] = real(0)
        for w in range(width):
            block = int(blocks[head_sel, token, w])
            if block == UNUSED:
                break
            slot = int(slots[head_sel, token, w])
            factor = gate(block_scale, token, head_sel, slot)
            scale = real(softmax_scale) * factor
            stop = keys_stop(block, slot, pos, seqlen_k, block_size, window_right)
            for n_start in range(block * block_size, stop, BLOCK):
                for n in range(row, BLOCK, ROWS):
                    j = n_start + n
                    load_qk(k, start_k + j, head_kv, j < stop, sK, n, lane)
                    load_v(v, start_k + j, head_kv, j < stop, sV, n, lane)
                cuda.syncthreads()  # K and V are in; the first time round, Q and dO too

                for n in range(lane, BLOCK, LANES):
                    dscore = real(0)
                    if alive and n_start + n < stop:
                        score, dprobability = dots(sQ, sK, sdO, sV, row, n)
                        dscore = math.exp(scale * score - row_lse) * (dprobability - row_delta)
                        dscore *= factor
                    sdS[row, n] = dscore
                cuda.syncthreads()  # dS is whole

                for n in range(BLOCK):
                    dscore = sdS[row, n]
                    for x in range(QK_SHARE):
                        rdQ[x] += dscore * sK[n, lane + x * LANES]
                cuda.syncthreads()  # K, V and dS are read, and may make room for the next tile's

        if exists:
            for x in range(QK_SHARE):
                dq[token, head, lane + x * LANES] = encode(real(softmax_scale) * rdQ[x])

    return cuda.jit(kernel), ROWS
