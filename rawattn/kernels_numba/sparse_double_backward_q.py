"""Half of pass 2 of the block-sparse double backward, one query at a time: gq.

    gq = softmax_scale (tdX K + dX ddK)

with tdX and dX as in sparse_second.gated_scores. One CTA per query and query head, which goes
through the keys of its blocks one after the other in tiles of THREADS. Each thread owns a key of
the tile, then columns of gq.
CUDA twin: kernels_cu/sm80/sparse_double_backward_q.cu; reference: rawattn/reference/sparse.py.
"""

import functools
import math
from typing import Any

import numpy as np

from rawattn.kernels_numba.common import (
    Array,
    accumulator,
    cuda,
    decoder,
    encoder,
    filled,
    run,
)
from rawattn.kernels_numba.sparse import find_item, gate_reader, keys_stop
from rawattn.kernels_numba.sparse_second import (
    THREADS,
    ddgate_reader,
    gated_scores,
    key_product,
    listed_keys,
)
from rawattn.ops.arguments import given, sizes
from rawattn.ops.sparse_double_backward_q import Args
from rawattn.problem import Problem, Selection
from rawattn.variants import Row


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills ``gq``."""
    p, parts = problem, given(args.ddq, args.ddk, args.ddv)
    run(
        compiled(p.dtype, p.head_dim, p.head_dim_v, *parts, args.ddblock_scale is not None),
        (max(p.total_q, 1), p.num_heads_q),
        THREADS,
        p,
        filled(args, p, ddq=3, ddk=3, ddv=3, block_scale=3, ddblock_scale=3),
        sizes(p, selection),
        written=("gq",),
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
) -> Any:
    """The kernel for these compile-time constants."""
    real, decode, encode = accumulator(dtype), decoder(dtype), encoder(dtype)
    HEAD_DIM, HEAD_DIM_V = head_dim, head_dim_v
    HAS_DDQ, HAS_DDK, HAS_DDV = has_ddq, has_ddk, has_ddv
    HAS_E = has_ddq or has_ddk or has_ddgate
    QK_SHARE = -(-HEAD_DIM // THREADS)
    qk_product, v_product = key_product(dtype, HEAD_DIM), key_product(dtype, HEAD_DIM_V)
    read_gate, read_ddgate = gate_reader(dtype), ddgate_reader(dtype, has_ddgate)
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
        blocks: Array,
        slots: Array,
        block_scale: Array,
        ddblock_scale: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        gq: Array,
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
        sQ = cuda.shared.array(HEAD_DIM, real)
        sddQ = cuda.shared.array(HEAD_DIM, real)
        sdO = cuda.shared.array(HEAD_DIM_V, real)
        sKey = cuda.shared.array(THREADS, np.int64)
        stdX = cuda.shared.array(THREADS, real)
        sdX = cuda.shared.array(THREADS, real)
        rgQ = cuda.local.array(QK_SHARE, real)
        thread = cuda.threadIdx.x
        head = cuda.blockIdx.y
        head_kv = head // (num_heads_q // num_heads_kv)
        head_sel = head // (num_heads_q // num_heads_sel)
        token = cuda.blockIdx.x
        if token >= total_q:
            return
        _, start_k, seqlen_k, pos = find_item(
            cu_seqlens_q, cu_seqlens_k, batch, total_q, total_k, token
        )
        scale = real(softmax_scale)

        keys = 0
        if lse[head, token] != -math.inf:
            keys = listed_keys(blocks, head_sel, token, width, block_size)
            for d in range(thread, HEAD_DIM, THREADS):
                sQ[d] = decode(q[token, head, d])
                if HAS_DDQ:
                    sddQ[d] = decode(ddq[token, head, d])
            for d in range(thread, HEAD_DIM_V, THREADS):
                sdO[d] = decode(dout[token, head, d])
        for x in range(QK_SHARE):
            rgQ[x] = real(0)
        for first in range(0, keys, THREADS):
            cuda.syncthreads()  # Q, ddQ, dO are in; after the first time, tdX and dX are read

            key, tdproduct, dproduct = -1, real(0), real(0)
            if first + thread < keys:
                entry, within = (first + thread) // block_size, (first + thread) % block_size
                block = int(blocks[head_sel, token, entry])
                slot = int(slots[head_sel, token, entry])
                j = block * block_size + within
                if j < keys_stop(block, slot, pos, seqlen_k, block_size, window_right):
                    key = start_k + j
                    gate = read_gate(block_scale, token, head_sel, slot)
                    ddgate = read_ddgate(ddblock_scale, token, head_sel, slot)
                    score, tangent = qk_product(sQ, k, key, head_kv), np.float64(0)
                    if HAS_DDQ:
                        tangent += qk_product(sddQ, k, key, head_kv)
                    if HAS_DDK:
                        tangent += qk_product(sQ, ddk, key, head_kv)
                    dprobability, tdprobability = np.float64(0), np.float64(0)
                    if HAS_E:
                        dprobability += v_product(sdO, v, key, head_kv)
                    if HAS_DDV:
                        tdprobability += v_product(sdO, ddv, key, head_kv)
                    _, tdproduct, dproduct, _ = scores(
                        real(score),
                        real(tangent),
                        real(dprobability),
                        real(tdprobability),
                        gate,
                        ddgate,
                        lse[head, token],
                        delta[head, token],
                        ddlse[head, token],
                        ddelta[head, token],
                        scale,
                    )
            sKey[thread] = key
            stdX[thread] = tdproduct
            sdX[thread] = dproduct
            cuda.syncthreads()  # tdX and dX are whole

            for n in range(THREADS):
                if sKey[n] >= 0:
                    for x in range(QK_SHARE):
                        d = thread + x * THREADS
                        if d < HEAD_DIM:
                            rgQ[x] += stdX[n] * decode(k[sKey[n], head_kv, d])
                        if HAS_DDK and d < HEAD_DIM:
                            rgQ[x] += sdX[n] * decode(ddk[sKey[n], head_kv, d])

        for x in range(QK_SHARE):
            d = thread + x * THREADS
            if d < HEAD_DIM:
                gq[token, head, d] = encode(scale * rgQ[x])

    return cuda.jit(kernel)
