"""Packed attention for torch: the function to call."""

from typing import Never

import torch
from torch import Tensor

from rawattn import api, checks
from rawattn.torch.inputs import cast_by_autocast, check_call, is_unseen, refuse_foreign
from rawattn.torch.varlen_ops import varlen_forward


def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *lengths: Never,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    validate: bool = False,
    **foreign: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each sequence of a packed batch; differentiable twice, in out and in lse.

    q is (total_q, num_heads_q, head_dim), k (total_k, num_heads_kv, head_dim), v (total_k,
    num_heads_kv, head_dim_v); float16, bfloat16, float32 or float64; num_heads_q is a multiple of
    num_heads_kv. Token and head strides are free, so views of one qkv tensor need no copy.
    cu_seqlens_q and cu_seqlens_k are (batch + 1,) int32 or int64 offsets on the same device; their
    content is read on the device alone, but with ``validate``, which checks it and waits for the
    device. cu_seqlens_k defaults to cu_seqlens_q. Meta tensors give the shapes of the results.

    ``causal`` aligns the ends of queries and keys; ``window`` is (left, right), inclusive, -1 open;
    ``softmax_scale`` defaults to head_dim ** -0.5. ``softcap`` c makes scores c tanh(score / c),
    after the scale and before the mask. ``sinks`` (num_heads_q,), of any float dtype, is a learned
    logit of each head that counts in the denominator, and in lse, without a value. ``seqused_k``
    (batch,) says how many keys of each sequence are in use. ``backend`` forces "cuda", "numba" or
    "reference". Under autocast q, k and v are cast to its dtype (float64 is left alone, as by
    torch's own attention). ``deterministic``, or ``torch.use_deterministic_algorithms(True)``,
    makes the backward bitwise repeatable, and what the jvp gives a sequence independent of the rest
    of the batch, as it always is of the forward.

    Returns out (total_q, num_heads_q, head_dim_v) of q's dtype, with ``return_lse`` also lse
    (num_heads_q, total_q), float32 (float64 for float64 inputs). A query without any allowed key
    has out 0 and lse -inf, or its sink. All derivatives are in q, k, v and sinks.

    Two derivatives exist: backwards (``create_graph=True``, torch.func.grad and vjp), forwards in
    one pass with the values (torch.func.jvp and linearize, forward_ad's dual tensors), backwards
    through a jvp, and the jvp of a gradient; none makes an array of size seqlen_q x seqlen_k. All
    of torch.func's work within torch.compile too; torch itself refuses ``create_graph=True``
    through compiled code and torch.func.jvp around it.

    Raises ValueError or TypeError for inputs that break these rules, and RuntimeError for what does
    not exist: third derivatives, a jvp of a jvp, forward_ad.dual_level inside compiled code, and
    vmap, thus torch.func's jacrev, jacfwd and hessian (``jacrev(..., chunk_size=1)`` and
    torch.autograd.functional.hessian do without it).
    """
    if lengths or foreign:
        refuse_foreign("varlen_attn", "cu_seqlens_k", lengths, foreign)
    others = {"sinks": sinks, "seqused_k": seqused_k}
    if torch._C._is_any_autocast_enabled():
        q, k, v = cast_by_autocast(q, k, v)
    if not validate and is_unseen(q, k, v, sinks):
        try:
            result: Tensor | tuple[Tensor, Tensor] = api.forward(
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                causal=causal,
                window=window,
                softmax_scale=softmax_scale,
                softcap=softcap,
                sinks=sinks,
                seqused_k=seqused_k,
                return_lse=return_lse,
                backend=backend,
            )
            return result
        except (RuntimeError, TypeError):
            check_call(q, k, v, cu_seqlens_q, cu_seqlens_k, False, **others)  # may say it better
            raise
    check_call(q, k, v, cu_seqlens_q, cu_seqlens_k, validate, **others)
    left, right = checks.window(window, causal)
    if not torch.compiler.is_compiling():  # there it may be symbolic
        softmax_scale = checks.softmax_scale(softmax_scale)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    options = (causal, left, right, softmax_scale, softcap, deterministic, backend)
    out, lse = varlen_forward(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, *options)
    return (out, lse) if return_lse else out
