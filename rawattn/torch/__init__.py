"""Packed attention for torch: operators that autograd, torch.compile and checkpointing understand.

``varlen_attn`` is the function to call. Behind it stand four operators, whose names may be given to
selective activation checkpointing:

    torch.ops.rawattn.varlen_forward.default            (out, lse) of q, k, v
    torch.ops.rawattn.varlen_backward.default           (dq, dk, dv) of dout, dlse
    torch.ops.rawattn.varlen_double_backward.default    (ddout, ddlse, gq, gk, gv) of ddq, ddk, ddv
    torch.ops.rawattn.varlen_jvp.default                (out, tout, lse, tlse) of tq, tk, tv

``varlen_attn_compat`` has the signature of ``torch.nn.attention.varlen.varlen_attn``.

``sparse_attn`` is attention to selected blocks of keys (``torch_sparse``), ``native_sparse_attend``
and ``parallel_nsa`` other libraries' signatures of it (``torch_sparse_compat``), and
``NativeSparseAttention`` a layer that learns what to select (``torch_nsa``).

The operators have autograd kernels of their own (``torch_autograd``). These cost a third of the
host time of generated ones, which besides drop the tangents of forward mode, so that a derivative
would silently be zero, and know nothing of torch.func.
"""

import torch
from torch import Tensor

from rawattn.torch import autograd as torch_autograd
from rawattn.torch.compat import AuxRequest, varlen_attn_compat
from rawattn.torch.nsa import NativeSparseAttention
from rawattn.torch.sparse import sparse_attn
from rawattn.torch.sparse_compat import native_sparse_attend, parallel_nsa
from rawattn.torch.sparse_ops import SPARSE
from rawattn.torch.varlen_ops import (
    VARLEN,
    cast_by_autocast,
    compute_forward,
    is_unseen,
    varlen_forward,
)

__all__ = [
    "AuxRequest",
    "NativeSparseAttention",
    "native_sparse_attend",
    "parallel_nsa",
    "sparse_attn",
    "varlen_attn",
    "varlen_attn_compat",
]

torch_autograd.register(VARLEN)
torch_autograd.register(SPARSE)


def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each sequence of a packed batch; differentiable twice, in out and in lse.

    q is (total_q, num_heads_q, head_dim), k (total_k, num_heads_kv, head_dim), v (total_k,
    num_heads_kv, head_dim_v); float16, bfloat16, float32 or float64; num_heads_q is a multiple of
    num_heads_kv. Token and head strides are free, so views of one qkv tensor need no copy.
    cu_seqlens_q and cu_seqlens_k are (batch + 1,) int32 or int64 offsets on the same device; their
    content is read on the device alone. cu_seqlens_k defaults to cu_seqlens_q.

    ``causal`` aligns the ends of queries and keys; ``window`` is (left, right), inclusive, -1 open;
    ``softmax_scale`` defaults to head_dim ** -0.5. ``deterministic``, or
    ``torch.use_deterministic_algorithms(True)``, makes the backward bitwise repeatable.
    ``backend`` forces "cuda", "numba" or "reference". Under autocast q, k and v are cast to its
    dtype (float64 is left alone, as by torch's own attention).

    Returns out (total_q, num_heads_q, head_dim_v) of q's dtype, with ``return_lse`` also lse
    (num_heads_q, total_q), float32 (float64 for float64 inputs). A query without any allowed key
    has out 0 and lse -inf.

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
    q, k, v = cast_by_autocast(q, k, v)
    left, right = window
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    options = (causal, left, right, softmax_scale, deterministic, backend)
    compute = compute_forward if is_unseen((q, k, v)) else varlen_forward
    out, lse = compute(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
    return (out, lse) if return_lse else out
