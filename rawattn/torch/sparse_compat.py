"""Two signatures of block-sparse attention that others have given it, over rawattn's sparse_attn.

    from rawattn.torch import native_sparse_attend    # native-sparse-attention-pytorch 0.2.3
    from rawattn.torch import parallel_nsa            # fla-core 0.6.0

is the one line to change. Each docstring says where the results differ from those of the library.
"""

import torch
from torch import Tensor

from rawattn.torch.sparse import sparse_attn


def native_sparse_attend(
    fq: Tensor,
    fk: Tensor,
    fv: Tensor,
    block_size: int,
    selected_block_indices: Tensor,
    fmask: Tensor | None,
    sel_scale: Tensor | None = None,
    include_block_causal: bool = True,
    return_lse: bool = False,
    block_dk_dv_use_dot: bool = False,
    return_sliding_window_out: bool = False,
) -> Tensor | tuple[Tensor | tuple[Tensor, Tensor], ...]:
    """native_sparse_attention_pytorch.triton_native_sparse_attention.native_sparse_attend.

    fq is (batch, num_heads_q, tokens, head_dim), fk and fv (batch, num_heads_kv, tokens, ...).
    selected_block_indices and the bool fmask are (batch, num_heads_kv or num_heads_q, tokens,
    num_selected); a slot whose fmask is False is padding. sel_scale, of that shape, is a factor on
    the scores of a slot's keys. include_block_causal adds the causal part of the query's own block.
    The sliding window is causal and reaches block_size tokens back. block_dk_dv_use_dot chooses
    between kernels there and nothing here.

    Returns out (batch, num_heads_q, tokens, head_dim_v), or (out, sliding_out) with
    return_sliding_window_out; with return_lse a pair of that and lse (batch, num_heads_q, tokens)
    or (lse, sliding_lse). A batch larger than 1 of this layout costs a copy of each input.

    Where results differ from that library's:

    - With include_block_causal, selected blocks are causal too. There, a query sees all of a
      selected block, so a block that ends after it shows it the future.
    - A block that is selected twice, or the own block selected too, counts once. There, its keys
      are in the softmax twice.
    - Keys past the end of a partial last block are no keys. There, they are keys of zeros, and each
      adds exp(0) to the denominator.
    - Any group of query heads. There, num_heads_q / num_heads_kv has to divide 16.
    - The dtype of the inputs is that of the computation, with float32 sums. There, inputs are
      rounded to float16, gradients too.
    - sel_scale is applied, whatever its value, and differentiated. There, it has to be 1.
    - The gradient of the sliding window covers all its keys, and lse has a gradient. There, the
      backward looks at block_size keys up to the end of each 16 queries, and drops that of lse.
    - block_size is 16, 32, 64 or 128, head_dim at most 256. There, any multiple of 16, and 128.
    """
    batch, num_heads_q, tokens, _ = fq.shape
    tokens_k = fk.shape[2]
    if include_block_causal and tokens != tokens_k:
        raise ValueError(
            f"native_sparse_attend: fq has {tokens} tokens and fk {tokens_k}: expected the same "
            "with include_block_causal; call rawattn.torch.sparse_attn with cu_seqlens_k instead"
        )
    indices = selected_block_indices
    if fmask is not None:
        indices = indices.masked_fill(~fmask, -1)
    results = sparse_attn(
        _packed(fq),
        _packed(fk),
        _packed(fv),
        _even(batch, tokens, fq.device),
        _packed(indices),
        cu_seqlens_k=None if tokens == tokens_k else _even(batch, tokens_k, fq.device),
        block_size=block_size,
        include_own_block=include_block_causal,
        causal=include_block_causal,
        block_scale=None if sel_scale is None else _packed(sel_scale),
        return_lse=True,
        return_sliding=return_sliding_window_out,
        window=(block_size, 0) if return_sliding_window_out else None,
    )

    def of_out(out: Tensor) -> Tensor:
        return out.view(batch, tokens, num_heads_q, fv.shape[3]).transpose(1, 2)

    def of_lse(lse: Tensor) -> Tensor:
        return lse.view(num_heads_q, batch, tokens).transpose(0, 1)

    outs, lses = [of_out(x) for x in results[::2]], [of_lse(x) for x in results[1::2]]
    if not return_sliding_window_out:
        return (outs[0], lses[0]) if return_lse else outs[0]
    pair = (outs[0], outs[1])
    return (pair, (lses[0], lses[1])) if return_lse else pair


def parallel_nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """fla.ops.nsa.parallel.parallel_nsa with block_indices: its selected and sliding branches.

    q is (batch, tokens, num_heads_q, head_dim), k and v (batch, tokens, num_heads_kv, ...), batch 1
    beside cu_seqlens, which may be (cu_seqlens_q, cu_seqlens_k). block_indices is (batch, tokens,
    num_heads_kv, num_selected) with any index outside of the sequence, -1 or the number of tokens,
    as padding; a tensor block_counts (batch, tokens, num_heads_kv) says how many slots count. The
    query's own block is seen if it is selected. The gates g_slc and g_swa, (batch, tokens,
    num_heads_q), are multiplied to out and to the output of a window of window_size tokens, which
    is left out for 0.

    Returns out (batch, tokens, num_heads_q, head_dim_v). Raises ValueError for the compressed
    branch, g_cmp or block_indices=None: see :class:`rawattn.torch.NativeSparseAttention`.

    Where results differ from that library's:

    - A block that is selected twice counts once. There, its keys are in the softmax twice.
    - A query that sees no key has out 0 and gradients 0. There, NaN.
    - An int block_counts limits nothing. There, it limits no slots of out and dq, but those of dk
      and dv, so with fewer than num_selected these gradients lack the rest.
    - Any group of query heads. There, a power of two and at least 16.
    - num_selected is any number, and block_indices may have num_heads_q heads. There, the backward
      needs a power of two.
    - Gradients exist with (cu_seqlens_q, cu_seqlens_k), with unequal numbers of tokens, and twice.
    """
    if g_cmp is not None or block_indices is None:
        given = "g_cmp" if g_cmp is not None else "block_indices=None"
        raise ValueError(
            f"parallel_nsa: {given} asks for the compressed branch, which is not part of this "
            "adapter; pass block_indices and no g_cmp, or use rawattn.torch.NativeSparseAttention"
        )
    if window_size > 0 and g_swa is None:
        raise ValueError(
            f"parallel_nsa: window_size={window_size} needs g_swa, the gate of the sliding branch, "
            "(batch, tokens, num_heads_q); pass it, or window_size=0"
        )
    batch, tokens = q.shape[:2]
    if cu_seqlens is None:
        cu_seqlens_q = _even(batch, tokens, q.device)
        cu_seqlens_k = None if k.shape[1] == tokens else _even(batch, k.shape[1], q.device)
    elif batch != 1:
        raise ValueError(
            f"parallel_nsa: batch is {batch}: expected 1 beside cu_seqlens; flatten it"
        )
    elif isinstance(cu_seqlens, tuple):
        cu_seqlens_q, cu_seqlens_k = cu_seqlens
    else:
        cu_seqlens_q, cu_seqlens_k = cu_seqlens, None
    results = sparse_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        cu_seqlens_q,
        block_indices.flatten(0, 1),
        cu_seqlens_k=cu_seqlens_k,
        block_size=block_size,
        block_counts=block_counts.flatten(0, 1) if isinstance(block_counts, Tensor) else None,
        include_own_block=False,
        softmax_scale=scale,
        return_sliding=window_size > 0,
        window=(window_size - 1, 0) if window_size > 0 else None,
    )
    outs = [results] if isinstance(results, Tensor) else [*results]
    selected, *sliding = (out.view(*q.shape[:3], v.shape[3]) for out in outs)
    if g_slc is not None:
        selected = selected * g_slc.unsqueeze(-1)
    if sliding and g_swa is not None:
        selected = selected + sliding[0] * g_swa.unsqueeze(-1)
    return selected


def _packed(x: Tensor) -> Tensor:
    """(batch, heads, tokens, n) as (batch * tokens, heads, n)."""
    return x.transpose(1, 2).flatten(0, 1)


def _even(batch: int, tokens: int, device: torch.device) -> Tensor:
    """cu_seqlens of ``batch`` sequences of ``tokens``."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
