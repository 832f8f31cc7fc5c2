"""Block-sparse packed attention for torch, as ``rawattn.torch.varlen_attn`` is the dense one.

Its operators, whose names may be given to selective activation checkpointing, stand in
``sparse_ops``:

    torch.ops.rawattn.sparse_forward.default            (out, lse) of q, k, v, block_scale
    torch.ops.rawattn.sparse_backward.default           (dq, dk, dv, dblock_scale) of dout, dlse
    torch.ops.rawattn.sparse_double_backward.default    (ddout, ddlse, gq, gk, gv, gblock_scale)
    torch.ops.rawattn.sparse_jvp.default                (out, tout, lse, tlse) of their tangents
"""

from typing import Never

import torch
from torch import Tensor

from rawattn import api_sparse, checks
from rawattn.tables import BlockTable
from rawattn.torch.inputs import cast_by_autocast, check_call, is_unseen, refuse_foreign
from rawattn.torch.sparse_ops import selection_of, sparse_forward
from rawattn.torch.varlen import varlen_attn

Window = int | tuple[int, int] | None


def sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    block_indices: Tensor | BlockTable,
    *lengths: Never,
    cu_seqlens_k: Tensor | None = None,
    block_size: int = 64,
    block_counts: Tensor | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    return_sliding: bool = False,
    window: Window = None,
    deterministic: bool = False,
    backend: str | None = None,
    validate: bool = False,
    **foreign: Never,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of each query to the blocks of keys that it has selected; differentiable twice.

    q, k, v, cu_seqlens, cu_seqlens_k, softmax_scale, deterministic, backend, validate and autocast
    are as in :func:`rawattn.torch.varlen_attn`.

    ``block_indices`` is (total_q, num_heads_kv or num_heads_q, num_selected), int32 or int64: the
    numbers of blocks of ``block_size`` (16, 32, 64 or 128) keys, counted from the start of the
    query's own sequence. An index outside of the sequence, -1 for instance, is padding, and so are
    the slots from ``block_counts`` (total_q, heads of block_indices) on. A block counts once,
    however often it is named; its lowest slot is the one that counts. Or it is a
    :class:`rawattn.BlockTable`, for masks and patterns and to build the table of several calls
    once; block_size, include_own_block and causal have to be those of the table.

    ``include_own_block`` adds the block at the query's own position, of which the query sees what
    does not come after itself. With ``causal``, aligned at the ends of queries and keys, it sees
    nothing after itself in any block.

    ``block_scale``, of the shape of block_indices and of any floating dtype, is multiplied to the
    scores of a slot's keys (1 for an own block that is not selected). With the value 1 its gradient
    is that of a straight-through gate. Slots that do not count have gradient 0.

    Returns out (total_q, num_heads_q, head_dim_v), with ``return_lse`` (out, lse) with lse
    (num_heads_q, total_q). ``return_sliding`` adds the attention of the same q, k and v within
    ``window``, (left, right) or an int for (left, 0), by default (block_size - 1, 0): (out,
    sliding_out) or (out, lse, sliding_out, sliding_lse). A query without any allowed key has out 0
    and lse -inf.

    Derivatives are those of ``varlen_attn``, with respect to block_scale too: twice backwards,
    forwards, and mixed; the same ones do not exist. Raises ValueError, TypeError or RuntimeError.
    """
    if lengths or foreign:
        refuse_foreign("sparse_attn", "block_indices", lengths, foreign)
    listed = isinstance(block_indices, BlockTable)
    check_call(
        *(q, k, v, cu_seqlens, cu_seqlens_k, validate),
        block_indices=None if listed else block_indices,
        block_counts=block_counts,
        block_scale=block_scale,
    )
    checks.only_sliding(window, return_sliding)
    q, k, v = cast_by_autocast(q, k, v)
    if block_scale is not None:
        block_scale = block_scale.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    if is_unseen(q, k, v, block_scale):
        out, lse = api_sparse.sparse_forward(
            *(q, k, v, cu_seqlens, block_indices),
            cu_seqlens_k=cu_seqlens_k,
            block_size=block_size,
            block_counts=block_counts,
            include_own_block=include_own_block,
            causal=causal,
            block_scale=block_scale,
            softmax_scale=softmax_scale,
            return_lse=True,
            backend=backend,
        )
    else:
        kind = (block_size, include_own_block, causal)
        tensors, numbers = selection_of(block_indices, block_counts, *kind)
        repeatable = deterministic or torch.are_deterministic_algorithms_enabled()
        options = (*numbers, *kind, softmax_scale, repeatable, backend)
        out, lse = sparse_forward(
            *(q, k, v, block_scale, cu_seqlens, cu_seqlens_k, *tensors, *options)
        )
    results: tuple[Tensor, ...] = (out, lse) if return_lse else (out,)
    if return_sliding:
        sliding = varlen_attn(
            *(q, k, v, cu_seqlens, cu_seqlens_k),
            causal=causal,
            window=checks.sliding_window(window, block_size, causal),
            softmax_scale=softmax_scale,
            return_lse=return_lse,
            deterministic=deterministic,
            backend=backend,
        )
        results += (sliding,) if isinstance(sliding, Tensor) else sliding
    return results if len(results) > 1 else out
