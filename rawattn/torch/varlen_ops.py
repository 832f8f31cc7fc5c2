"""The operators of rawattn.torch: schemas, what they compute, and the shapes of their results.

torch.ops.rawattn.varlen_forward            (out, lse) of q, k, v
torch.ops.rawattn.varlen_backward           (dq, dk, dv) of dout, dlse
torch.ops.rawattn.varlen_double_backward    (ddout, ddlse, gq, gk, gv) of ddq, ddk, ddv
torch.ops.rawattn.varlen_jvp                (out, tout, lse, tlse) of tq, tk, tv
"""

from typing import Any

from torch import Tensor

from rawattn import api, api_second
from rawattn.torch.autograd import register
from rawattn.torch.operators import Operators, define, fake_forward, fake_jvp

INPUTS = "Tensor q, Tensor k, Tensor v"
DIRECTION = "Tensor? {0}q, Tensor? {0}k, Tensor? {0}v"
GIVEN = f"Tensor dout, Tensor? dlse, {INPUTS}, Tensor out, Tensor lse"
OPTIONS = (
    "Tensor cu_seqlens_q, Tensor? cu_seqlens_k, "
    "bool causal, SymInt window_left, SymInt window_right, float? softmax_scale, "
    "bool deterministic, str? backend"
)


# ---- what they compute ------------------------------------------------------------------------


def _compute_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    # The forward is repeatable in any case: ``deterministic`` travels along for the others.
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
    causal, left, right, softmax_scale, deterministic, backend = options
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
        deterministic=deterministic,
        backend=backend,
    )


# ---- the shapes of their results --------------------------------------------------------------


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fake_double_backward(
    ddq: Tensor | None, ddk: Tensor | None, ddv: Tensor | None, *given: Any
) -> tuple[Tensor, ...]:
    return *fake_forward(*given[2:5]), *_fake_backward(*given)


# ---- the operators ----------------------------------------------------------------------------

varlen_forward = define(
    "varlen_attn",
    f"varlen_forward({INPUTS}, {OPTIONS}) -> (Tensor out, Tensor lse)",
    _compute_forward,
    fake_forward,
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
    fake_jvp,
)
VARLEN = Operators(
    "varlen_attn", varlen_forward, varlen_backward, varlen_double_backward, varlen_jvp, 3, 2
)
register(VARLEN)
