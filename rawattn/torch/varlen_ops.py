"""The operators of rawattn.torch: schemas, what they compute, and the shapes of their results.

    torch.ops.rawattn.varlen_forward            (out, lse) of q, k, v
    torch.ops.rawattn.varlen_backward           (dq, dk, dv) of dout, dlse
    torch.ops.rawattn.varlen_double_backward    (ddout, ddlse, gq, gk, gv) of ddq, ddk, ddv
    torch.ops.rawattn.varlen_jvp                (out, tout, lse, tlse) of tq, tk, tv

They are defined through ``torch.library.Library``; ``torch_autograd`` says how to differentiate
them. The backward operators take out and lse as functions of q, k and v: those of varlen_forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rawattn import api, api_second

INPUTS = "Tensor q, Tensor k, Tensor v"
DIRECTION = "Tensor? {0}q, Tensor? {0}k, Tensor? {0}v"
GIVEN = f"Tensor dout, Tensor? dlse, {INPUTS}, Tensor out, Tensor lse"
OPTIONS = (
    "Tensor cu_seqlens_q, Tensor? cu_seqlens_k, "
    "bool causal, SymInt window_left, SymInt window_right, float? softmax_scale, "
    "bool deterministic, str? backend"
)
LIBRARY: Any = torch.library.Library("rawattn", "DEF")  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Operators:
    """The four operators of one attention function, and the order of their arguments.

        forward             inputs, given, options
        backward            dout, dlse, inputs, out, lse, given, options
        double_backward     directions, dout, dlse, inputs, out, lse, given, options
        jvp                 inputs, tangents, given, options

    ``inputs`` are the ``num_inputs`` tensors that the attention is differentiated in; each has a
    direction or tangent, and a gradient in the results. ``given`` are ``num_given`` other tensors.
    """

    function: str  # its name in messages
    forward: Any
    backward: Any
    double_backward: Any
    jvp: Any
    num_inputs: int
    num_given: int


def define(
    function: str, schema: str, compute: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """A new operator, part of ``function``."""
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    op: Any = getattr(torch.ops.rawattn, name).default
    LIBRARY.impl(op.name(), compute, "CPU")
    LIBRARY.impl(op.name(), compute, "CUDA")
    torch.library.register_fake(op.name(), fake, lib=LIBRARY)
    torch.library.register_vmap(op.name(), partial(_refuse_vmap, function), lib=LIBRARY)
    return op


def _refuse_vmap(function: str, *_: Any) -> None:
    raise RuntimeError(
        f"rawattn: vmap does not exist for {function}; pack the batch into one call, with "
        "cu_seqlens; instead of torch.func's jacrev, jacfwd and hessian, which are made of vmap, "
        "take torch.func.jacrev(..., chunk_size=1) or torch.autograd.functional.hessian"
    )


# ---- before the call --------------------------------------------------------------------------


def cast_by_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype of autocast where it is on; float64 is left alone."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def is_unseen(tensors: tuple[Tensor, ...]) -> bool:
    """Whether nobody would see the operator: no gradient, mode, transform, tangent or subclass.

    Then a call may go straight to the kernel, which halves its time on the host.
    """
    return (
        not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and all(type(t) is Tensor for t in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


# ---- what they compute ------------------------------------------------------------------------


def compute_forward(
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


def _compute_double_backward(
    ddq: Tensor | None,
    ddk: Tensor | None,
    ddv: Tensor | None,
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
) -> tuple[Tensor, ...]:
    causal, left, right, softmax_scale, deterministic, backend = options
    return api_second.double_backward(
        ddq,
        ddk,
        ddv,
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


def _compute_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    causal, left, right, softmax_scale, _deterministic, backend = options
    return api_second.jvp(
        q,
        k,
        v,
        tq,
        tk,
        tv,
        cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        causal=causal,
        window=(left, right),
        softmax_scale=softmax_scale,
        backend=backend,
    )


# ---- the shapes of their results --------------------------------------------------------------


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    total_q, num_heads_q, _head_dim = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((total_q, num_heads_q, v.shape[2]))
    return out, q.new_empty((num_heads_q, total_q), dtype=lse_dtype)


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fake_double_backward(
    ddq: Tensor | None, ddk: Tensor | None, ddv: Tensor | None, *given: Any
) -> tuple[Tensor, ...]:
    return *_fake_forward(*given[2:5]), *_fake_backward(*given)


def _fake_jvp(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    (out, lse), (tout, tlse) = _fake_forward(q, k, v), _fake_forward(q, k, v)
    return out, tout, lse, tlse


# ---- the operators ----------------------------------------------------------------------------

varlen_forward = define(
    "varlen_attn",
    f"varlen_forward({INPUTS}, {OPTIONS}) -> (Tensor out, Tensor lse)",
    compute_forward,
    _fake_forward,
)
varlen_backward = define(
    "varlen_attn",
    f"varlen_backward({GIVEN}, {OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    _compute_backward,
    _fake_backward,
)
varlen_double_backward = define(
    "varlen_attn",
    f"varlen_double_backward({DIRECTION.format('dd')}, {GIVEN}, {OPTIONS}) -> "
    "(Tensor ddout, Tensor ddlse, Tensor gq, Tensor gk, Tensor gv)",
    _compute_double_backward,
    _fake_double_backward,
)
varlen_jvp = define(
    "varlen_attn",
    f"varlen_jvp({INPUTS}, {DIRECTION.format('t')}, {OPTIONS}) -> "
    "(Tensor out, Tensor tout, Tensor lse, Tensor tlse)",
    _compute_jvp,
    _fake_jvp,
)
VARLEN = Operators(
    "varlen_attn", varlen_forward, varlen_backward, varlen_double_backward, varlen_jvp, 3, 2
)
