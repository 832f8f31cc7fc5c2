"""The operators of rawattn.torch: schemas, what they compute, and the shapes of their results.

    torch.ops.rawattn.varlen_forward            (out, lse) of q, k, v
    torch.ops.rawattn.varlen_backward           (dq, dk, dv) of dout, dlse
    torch.ops.rawattn.varlen_double_backward    (ddout, ddlse, gq, gk, gv) of ddq, ddk, ddv
    torch.ops.rawattn.varlen_jvp                (out, tout, lse, tlse) of tq, tk, tv

They are defined through ``torch.library.Library``; ``torch_autograd`` says how to differentiate
them. The backward operators take out and lse as functions of q, k and v: those of varlen_forward.
"""

from typing import Any

import torch
from torch import Tensor

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
for _schema in (
    f"varlen_forward({INPUTS}, {OPTIONS}) -> (Tensor out, Tensor lse)",
    f"varlen_backward({GIVEN}, {OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    f"varlen_double_backward({DIRECTION.format('dd')}, {GIVEN}, {OPTIONS}) -> "
    "(Tensor ddout, Tensor ddlse, Tensor gq, Tensor gk, Tensor gv)",
    f"varlen_jvp({INPUTS}, {DIRECTION.format('t')}, {OPTIONS}) -> "
    "(Tensor out, Tensor tout, Tensor lse, Tensor tlse)",
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
varlen_forward: Any = torch.ops.rawattn.varlen_forward.default
varlen_backward: Any = torch.ops.rawattn.varlen_backward.default
varlen_double_backward: Any = torch.ops.rawattn.varlen_double_backward.default
varlen_jvp: Any = torch.ops.rawattn.varlen_jvp.default


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


def _refuse_vmap(*_: Any) -> None:
    raise RuntimeError(
        "rawattn: vmap does not exist for varlen_attn; pack the batch into one call, with "
        "cu_seqlens; instead of torch.func's jacrev, jacfwd and hessian, which are made of vmap, "
        "take torch.func.jacrev(..., chunk_size=1) or torch.autograd.functional.hessian"
    )


for _op, _compute, _fake in (
    (varlen_forward, compute_forward, _fake_forward),
    (varlen_backward, _compute_backward, _fake_backward),
    (varlen_double_backward, _compute_double_backward, _fake_double_backward),
    (varlen_jvp, _compute_jvp, _fake_jvp),
):
    _name = _op.name()
    LIBRARY.impl(_name, _compute, "CPU")
    LIBRARY.impl(_name, _compute, "CUDA")
    torch.library.register_fake(_name, _fake, lib=LIBRARY)
    torch.library.register_vmap(_name, _refuse_vmap, lib=LIBRARY)
