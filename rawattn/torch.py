"""Packed attention for torch: operators that autograd, torch.compile and checkpointing understand.

``varlen_attn`` is the function to call. Behind it stand two operators, whose names may be given to
selective activation checkpointing:

    torch.ops.rawattn.varlen_forward.default    (out, lse) of q, k, v
    torch.ops.rawattn.varlen_backward.default   (dq, dk, dv) of dout, dlse

``varlen_attn_compat`` has the signature of ``torch.nn.attention.varlen.varlen_attn``.

The operators are defined through ``torch.library.Library`` with autograd kernels of their own.
These cost a third of the host time of generated ones, and they can see a tangent of forward mode;
the generated ones drop it, and the derivative would silently be zero.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rawattn import api
from rawattn.torch_compat import AuxRequest, varlen_attn_compat

__all__ = ["AuxRequest", "varlen_attn", "varlen_attn_compat"]

INPUTS = "Tensor q, Tensor k, Tensor v"
SEQUENCES = "Tensor cu_seqlens_q, Tensor? cu_seqlens_k"
OPTIONS = (
    "bool causal, SymInt window_left, SymInt window_right, float? softmax_scale, "
    "bool deterministic, str? backend"
)
LIBRARY: Any = torch.library.Library("rawattn", "DEF")  # type: ignore[no-untyped-call]
for _schema in (
    f"varlen_forward({INPUTS}, {SEQUENCES}, {OPTIONS}) -> (Tensor out, Tensor lse)",
    f"varlen_backward(Tensor dout, Tensor? dlse, {INPUTS}, Tensor out, Tensor lse, {SEQUENCES}, "
    f"{OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
varlen_forward: Any = torch.ops.rawattn.varlen_forward.default
varlen_backward: Any = torch.ops.rawattn.varlen_backward.default


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
    """Attention within each sequence of a packed batch; differentiable once, in out and in lse.

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

    Raises ValueError or TypeError for inputs that break these rules, and RuntimeError for forward
    mode, torch.func's transforms and second derivatives, which do not exist yet.
    """
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    left, right = window
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    options = (causal, left, right, softmax_scale, deterministic, backend)
    unseen = not torch.compiler.is_compiling() and _unseen((q, k, v))
    compute = _compute_forward if unseen else varlen_forward
    out, lse = compute(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
    return (out, lse) if return_lse else out


def _unseen(tensors: tuple[Tensor, ...]) -> bool:
    """Whether nobody would see the operator: no gradient, mode, transform, tangent or subclass.

    Then the call goes straight to the kernel, which halves its time on the host.
    """
    return (
        not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and all(type(t) is Tensor for t in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _compute_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    # The forward is repeatable in any case: ``deterministic`` travels along for the backward.
    causal, left, right, softmax_scale, _deterministic, backend = options
    result: tuple[Tensor, Tensor] = api.forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        causal=causal,
        window=(left, right),
        softmax_scale=softmax_scale,
        return_lse=True,
        backend=backend,
    )
    return result


def _compute_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    causal, left, right, softmax_scale, deterministic, backend = options
    result: tuple[Tensor, Tensor, Tensor] = api.backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        causal=causal,
        window=(left, right),
        softmax_scale=softmax_scale,
        dlse=dlse,
        deterministic=deterministic,
        backend=backend,
    )
    return result


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    total_q, num_heads_q, _head_dim = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((total_q, num_heads_q, v.shape[2]))
    return out, q.new_empty((num_heads_q, total_q), dtype=lse_dtype)


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Attention(torch.autograd.Function):
    """The node that autograd records for varlen_forward; saves inputs and outputs alone."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = varlen_forward(*args)
        ctx.save_for_backward(*args[:5], out, lse)
        ctx.options = args[5:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv = varlen_backward(
            dout, dlse, *inputs, out, lse, cu_seqlens_q, cu_seqlens_k, *ctx.options
        )
        return dq, dk, dv, None, None, *(None for _ in ctx.options)


class _AttentionBackward(torch.autograd.Function):
    """The node recorded for varlen_backward under create_graph=True: it refuses to be used."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            dq, dk, dv = varlen_backward(*args)
        return dq, dk, dv

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(
            "rawattn: the second derivative of varlen_attn does not exist yet, and a gradient made "
            "with create_graph=True was differentiated again; detach that gradient, or use torch's "
            "scaled_dot_product_attention with the math backend"
        )


def _refuse_forward_mode(tensors: tuple[Tensor | None, ...]) -> None:
    unpack: Any = forward_ad.unpack_dual
    if any(t is not None and unpack(t).tangent is not None for t in tensors):
        raise RuntimeError(
            "rawattn: forward mode (jvp, jacfwd, forward_ad) does not exist yet for varlen_attn; "
            "use reverse mode, or torch's scaled_dot_product_attention with the math backend"
        )


def _refuse_torch_func() -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "rawattn: torch.func's grad, vjp and jacrev do not exist yet for varlen_attn; use "
            "torch.autograd.grad or backward()"
        )


def _refuse_vmap(*_: Any) -> None:
    raise RuntimeError(
        "rawattn: vmap does not exist yet for varlen_attn; pack the batch into one call, with "
        "cu_seqlens"
    )


def _autograd_kernel(op: Any, node: Any, num_tensors: int) -> Any:
    """What runs first for ``op``: records ``node`` if a leading tensor wants a gradient."""

    def kernel(*args: Any) -> Any:
        tensors = args[:num_tensors]
        _refuse_forward_mode(tensors)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            _refuse_torch_func()
            return node.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return kernel


for _op, _compute, _fake, _node, _num_tensors in (
    (varlen_forward, _compute_forward, _fake_forward, _Attention, 3),
    (varlen_backward, _compute_backward, _fake_backward, _AttentionBackward, 7),
):
    _name = _op.name()
    LIBRARY.impl(_name, _compute, "CPU")
    LIBRARY.impl(_name, _compute, "CUDA")
    LIBRARY.impl(_name, _autograd_kernel(_op, _node, _num_tensors), "Autograd")
    torch.library.register_fake(_name, _fake, lib=LIBRARY)
    torch.library.register_vmap(_name, _refuse_vmap, lib=LIBRARY)
