"""Pass 1 of the block-sparse double backward: gradients of dout and dlse, and pass 2's row terms.

    ddlse = sum of P o E        ddout = (P o E) v + P ddv - ddlse out
    delta = dout . out - dlse   ddelta = dout . ddout

with P = exp(S - lse) over the keys of the selected blocks, and E, the tangent of S, as in
sparse_second. Without dout it is the second half of the JVP: ddout is tout, ddlse is tlse.
One CTA per query and query head, which goes through the keys of its blocks one after the other in
tiles of THREADS. Each thread owns a key of the tile, then columns of ddout. A row without keys gets
zeros.
CUDA twin: kernels_cu/sm80/sparse_double_backward_out.cu; reference: rawattn/reference/sparse.py.
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
    key_product,
    listed_keys,
)
from rawattn.ops.arguments import given, sizes
from rawattn.ops.sparse_double_backward_out import Args
from rawattn.problem import Problem, Selection
from rawattn.variants import Row


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """Queue the kernel that fills the last four arrays, without ``dout`` only two of them.

    ``ddlse``, ``delta`` and ``ddelta`` are of ``lse``'s shape, (num_heads_q, total_q).
    """
    p, parts = problem, given(args.ddq, args.ddk, args.ddv)
    has_ddgate, has_dout = args.ddblock_scale is not None, args.dout is not None
    tensors = dict.fromkeys(("ddq", "ddk", "ddv", "dout", "block_scale", "ddblock_scale"), 3)
    run(
        compiled(p.dtype, p.head_dim, p.head_dim_v, *parts, has_ddgate, has_dout),
        (max(p.total_q, 1), p.num_heads_q),
        THREADS,
        p,
        filled(args, p, **tensors, dlse=2, delta=2, ddelta=2),
        sizes(p, selection),
        written=("ddout", "ddlse", "delta", "ddelta"),
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
    has_dout: bool,
) -> Any:
    """The kernel for these compile-time constants."""
    real, decode, encode = accumulator(dtype), decoder(dtype), encoder(dtype)
    HEAD_DIM, HEAD_DIM_V = head_dim, head_dim_v
    HAS_DDQ, HAS_DDK, HAS_DDV, HAS_DOUT = has_ddq, has_ddk, has_ddv, has_dout
    HAS_E = has_ddq or has_ddk or has_ddgate
    V_SHARE = -(-HEAD_DIM_V // THREADS)
    qk_product = key_product(dtype, HEAD_DIM)
    read_gate, read_ddgate = gate_reader(dtype), ddgate_reader(dtype, has_ddgate)

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
        blocks: Array,
        slots: Array,
        block_scale: Array,
        ddblock_scale: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        ddout: Array,
        ddlse: Array,
        delta: Array,
        ddelta: Array,
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
        sKey = cuda.shared.array(THREADS, np.int64)
        sP = cuda.shared.array(THREADS, real)
        stP = cuda.shared.array(THREADS, real)
        sDelta = cuda.shared.array(THREADS, real)
        sDdelta = cuda.shared.array(THREADS, real)
        rddO = cuda.local.array(V_SHARE, real)
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

        dead = seqlen_k == 0 or lse[head, token] == -math.inf
        keys = 0
        if not dead:
            keys = listed_keys(blocks, head_sel, token, width, block_size)
            for d in range(thread, HEAD_DIM, THREADS):
                sQ[d] = decode(q[token, head, d])
                if HAS_DDQ:
                    sddQ[d] = decode(ddq[token, head, d])
        row_tangent = real(0)
        for x in range(V_SHARE):
            rddO[x] = real(0)
        for first in range(0, keys, THREADS):
            cuda.syncthreads()  # Q and ddQ are in; after the first time, P and P o E are read

            key, probability, tscore = -1, real(0), real(0)
            if first + thread < keys:
                entry, within = (first + thread) // block_size, (first + thread) % block_size
                block = int(blocks[head_sel, token, entry])
                slot = int(slots[head_sel, token, entry])
                j = block * block_size + within
                if j < keys_stop(block, slot, pos, seqlen_k, block_size, window_right):
                    key = start_k + j
                    gate = read_gate(block_scale, token, head_sel, slot)
                    ddgate = read_ddgate(ddblock_scale, token, head_sel, slot)
                    score = real(qk_product(sQ, k, key, head_kv))
                    tangent = np.float64(0)
                    if HAS_DDQ:
                        tangent += qk_product(sddQ, k, key, head_kv)
                    if HAS_DDK:
                        tangent += qk_product(sQ, ddk, key, head_kv)
                    probability += math.exp(scale * gate * score - lse[head, token])
                    tscore += scale * (gate * real(tangent) + ddgate * score)
            sKey[thread] = key
            sP[thread] = probability
            stP[thread] = probability * tscore
            cuda.syncthreads()  # P and P o E are whole

            for n in range(THREADS):
                if sKey[n] >= 0:
                    row_tangent += stP[n]
                    for x in range(V_SHARE):
                        d = thread + x * THREADS
                        if HAS_E and d < HEAD_DIM_V:
                            rddO[x] += stP[n] * decode(v[sKey[n], head_kv, d])
                        if HAS_DDV and d < HEAD_DIM_V:
                            rddO[x] += sP[n] * decode(ddv[sKey[n], head_kv, d])

        partial_delta, partial_ddelta = real(0), real(0)
        for x in range(V_SHARE):
            d = thread + x * THREADS
            if d < HEAD_DIM_V:
                cotangent = real(0)
                if not dead:
                    mean = decode(out[token, head, d])
                    cotangent = rddO[x] - row_tangent * mean
                    if HAS_DOUT:
                        partial_delta += decode(dout[token, head, d]) * mean
                        partial_ddelta += decode(dout[token, head, d]) * cotangent
                ddout[token, head, d] = encode(cotangent)
        sDelta[thread] = partial_delta
        sDdelta[thread] = partial_ddelta
        cuda.syncthreads()  # the partial sums of the other columns

        if thread == 0:
            ddlse[head, token] = row_tangent
            if HAS_DOUT:
                for other in range(1, THREADS):
                    partial_delta += sDelta[other]
                    partial_ddelta += sDdelta[other]
                if dlse.shape[0] > 0 and not dead:
                    partial_delta -= dlse[head, token]
                delta[head, token] = partial_delta
                ddelta[head, token] = partial_ddelta

    return cuda.jit(kernel)
