"""Packed attention for torch: operators that autograd, torch.compile and checkpointing understand.

``varlen_attn`` is the function to call. Behind it stand four operators, whose names may be given to
selective activation checkpointing:

    torch.ops.rawattn.varlen_forward.default            (out, lse) of q, k, v
    torch.ops.rawattn.varlen_backward.default           (dq, dk, dv) of dout, dlse
    torch.ops.rawattn.varlen_double_backward.default    (ddout, ddlse, gq, gk, gv) of ddq, ddk, ddv
    torch.ops.rawattn.varlen_jvp.default                (out, tout, lse, tlse) of tq, tk, tv

``varlen_attn_compat`` and ``varlen_attn_out_compat`` have the signatures of torch's own
``torch.nn.attention.varlen``, behind which "RAWATTN" can be activated (``provider``);
``register_with_transformers`` makes it an attention of Hugging Face's models (``hugging_face``),
and ``flash_attn`` has the names of that package.

``sparse_attn`` is attention to selected blocks of keys (``sparse``), ``native_sparse_attend``
and ``parallel_nsa`` other libraries' signatures of it (``sparse_compat``), and
``NativeSparseAttention`` a layer that learns what to select (``nsa``).

The operators have autograd kernels of their own (``autograd``). These cost a third of the host
time of generated ones, which besides drop the tangents of forward mode, so that a derivative would
silently be zero, and know nothing of torch.func. torch has no public way to write such kernels, so
they stand on these private parts of it, the same from 2.11, the lower bound, to 2.13:

    torch._C                 _AutoDispatchBelowAutograd, _will_engine_execute_node,
                             _are_functorch_transforms_active, _len_torch_dispatch_stack,
                             _is_any_autocast_enabled
    torch.autograd           forward_ad._current_level, forward_ad._set_fwd_grad_enabled,
                             and apply of Function's base class
    torch._functorch.utils   enable_single_level_autograd_function
    torch._guards            TracingContext
"""

from rawattn.torch import provider
from rawattn.torch.compat import AuxRequest, varlen_attn_compat, varlen_attn_out_compat
from rawattn.torch.hugging_face import register_with_transformers
from rawattn.torch.nsa import NativeSparseAttention
from rawattn.torch.sparse import sparse_attn
from rawattn.torch.sparse_compat import native_sparse_attend, parallel_nsa
from rawattn.torch.varlen import varlen_attn

__all__ = [
    "AuxRequest",
    "NativeSparseAttention",
    "native_sparse_attend",
    "parallel_nsa",
    "register_with_transformers",
    "sparse_attn",
    "varlen_attn",
    "varlen_attn_compat",
    "varlen_attn_out_compat",
]

provider.register()
