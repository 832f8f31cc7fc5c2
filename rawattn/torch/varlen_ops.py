"""The operators of rawattn.torch: schemas, what they compute, and the shapes of their results.

torch.ops.rawattn.varlen_forward            (out, lse) of q, k, v, sinks
torch.ops.rawattn.varlen_backward           (dq, dk, dv, dsinks) of dout, dlse
torch.ops.rawattn.varlen_double_backward    (ddout, ddlse, gq, gk, gv, gsinks) of ddq, ddk, ddv,
                                            ddsinks
torch.ops.rawattn.varlen_jvp                (out, tout, lse, tlse) of tq, tk, tv, tsinks

Sinks are optional; without them their gradients are empty tensors.
"""

from typing import Any

from torch import Tensor

from rawattn import api, api_second
from rawattn.torch.autograd import register
from rawattn.torch.operators import (
    Operators,
    define,
    fake_backward,
    fake_double_backward,
    fake_forward,
    fake_jvp,
    nothing_like,
)

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sinks"
DIRECTION = "Tensor? {0}q, Tensor? {0}k, Tensor? {0}v, Tensor? {0}sinks"
GIVEN = f"Tensor dout, Tensor? dlse, {INPUTS}, Tensor out, Tensor lse"
OPTIONS = (
    "Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "bool causal, SymInt window_left, SymInt window_right, float? softmax_scale, float? softcap, "
    "bool deterministic, str? backend"
)


# ---- what they compute ------------------------------------------------------------------------


def _keywords(sinks: Tensor | None, rest: tuple[Any, ...]) -> dict[str, Any]:
    """What every function gets beside its tensors, from what follows cu_seqlens_q in OPTIONS."""
    names = ("cu_seqlens_k", "seqused_k", "causal", "left", "right", "softmax_scale", "softcap")
    given = dict(zip((*names, "deterministic", "backend"), rest, strict=True))
    window = given.pop("left"), given.pop("right")
    return given | {"window": window, "sinks": sinks}


def _compute_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    # The forward is repeatable in any case: ``deterministic`` travels along for the others.
    keywords = _keywords(sinks, rest)
    del keywords["deterministic"]
    result: tuple[Tensor, Tensor] = api.forward(q, k, v, cu_seqlens_q, return_lse=True, **keywords)
    return result


def _compute_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    passed = (dout, q, k, v, out, lse, cu_seqlens_q)
    grads = api.backward(*passed, dlse=dlse, **_keywords(sinks, rest))
    return grads if sinks is not None else (*grads, nothing_like(lse))


def _compute_double_backward(
    ddq: Tensor | None,
    ddk: Tensor | None,
    ddv: Tensor | None,
    ddsinks: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    passed = (dout, q, k, v, out, lse, cu_seqlens_q)
    # without sinks a graph still has a cotangent of what stands in the place of their gradient
    moved = None if sinks is None else ddsinks
    keywords = _keywords(sinks, rest) | {"dlse": dlse, "ddsinks": moved}
    results = api_second.double_backward(ddq, ddk, ddv, *passed, **keywords)
    return results if sinks is not None else (*results, nothing_like(lse))


def _compute_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    tsinks: Tensor | None,
    cu_seqlens_q: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    keywords = _keywords(sinks, rest)
    return api_second.jvp(q, k, v, tq, tk, tv, cu_seqlens_q, tsinks=tsinks, **keywords)


# ---- the operators ----------------------------------------------------------------------------

varlen_forward = define(
    "varlen_attn",
    f"varlen_forward({INPUTS}, {OPTIONS}) -> (Tensor out, Tensor lse)",
    _compute_forward,
    fake_forward,
)
varlen_backward = define(
    "varlen_attn",
    f"varlen_backward({GIVEN}, {OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _compute_backward,
    fake_backward,
)
varlen_double_backward = define(
    "varlen_attn",
    f"varlen_double_backward({DIRECTION.format('dd')}, {GIVEN}, {OPTIONS}) -> "
    "(Tensor ddout, Tensor ddlse, Tensor gq, Tensor gk, Tensor gv, Tensor gsinks)",
    _compute_double_backward,
    fake_double_backward,
)
varlen_jvp = define(
    "varlen_attn",
    f"varlen_jvp({INPUTS}, {DIRECTION.format('t')}, {OPTIONS}) -> "
    "(Tensor out, Tensor tout, Tensor lse, Tensor tlse)",
    _compute_jvp,
    fake_jvp,
)
VARLEN = Operators(
    "varlen_attn", varlen_forward, varlen_backward, varlen_double_backward, varlen_jvp, 4, 3
)
register(VARLEN)
