"""Attention between ranks for autograd: what a job computes in first order, fast, and what is
beyond, composed of differentiable pieces.

A job has ``computed``, which gives out, lse and whatever else its ``gradients`` want of what was
saved after q, k, v, out and lse, and ``composed``, out and lse as any function of q, k, v and sinks
that autograd knows.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rawattn import api

INF = float("inf")


@dataclass(frozen=True)
class Options:
    """How to compute; None for what ``varlen_attn`` takes by itself."""

    softmax_scale: float | None
    softcap: float | None
    deterministic: bool
    backend: str | None

    @property
    def named(self) -> dict[str, Any]:
        names = ("softmax_scale", "softcap", "backend")
        return {name: getattr(self, name) for name in names}


class Job(Protocol):
    def computed(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, ...]: ...

    def gradients(
        self, dout: Tensor, dlse: Tensor | None, *saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def composed(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows."""
    if any(x is not None and is_dual(x) for x in (q, k, v, sinks)):
        return job.composed(q, k, v, sinks)
    out, lse, *_ = FirstOrder.apply(q, k, v, sinks, job)  # type: ignore[no-untyped-call]
    return out, lse


def is_dual(x: Tensor) -> bool:
    """Whether it carries a tangent."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


class FirstOrder(torch.autograd.Function):
    """Its derivatives are those of what is composed."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job
    ) -> tuple[Tensor, ...]:
        return job.computed(q, k, v, sinks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.job = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse, *kept = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None, None
        if dout is None:
            dout = torch.zeros_like(out)
        if torch.is_grad_enabled():  # somebody wants derivatives of this
            inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
            out, lse = ctx.job.composed(q, k, v, sinks)
            results = [(out, dout)] if dlse is None else [(out, dout), (lse, dlse)]
            outputs, cotangents = zip(*results, strict=True)
            wanted = [x for x in inputs if x.requires_grad]
            grads = iter(torch.autograd.grad(outputs, wanted, cotangents, create_graph=True))
            found = [next(grads) if x is not None and x.requires_grad else None for x in inputs]
            return (*found, *[None] * (5 - len(found)))
        dq, dk, dv = ctx.job.gradients(dout, dlse, q, k, v, out, lse, *kept)
        dsinks = None if sinks is None else gradient_of_sinks(dout, dlse, sinks, out, lse)
        return dq, dk, dv, dsinks, None


# every call of apply asks for it, which takes longer than a launch
FirstOrder.forward.__signature__ = inspect.signature(FirstOrder.forward)  # type: ignore[attr-defined]


def gradient_of_sinks(
    dout: Tensor, dlse: Tensor | None, sinks: Tensor, out: Tensor, lse: Tensor
) -> Tensor:
    """Minus the sum of exp(sink - L) D over this rank's rows."""
    delta = api.backward_preprocess(out, dout, dlse=dlse)
    p = torch.exp(sinks[:, None].to(lse.dtype) - dead_to(INF, lse))
    gradient: Tensor = -(p * delta).sum(1).to(sinks.dtype)
    return gradient


def dead_to(value: float, lse: Tensor) -> Tensor:
    """lse, but ``value`` for rows without keys, where it is -inf."""
    return torch.where(lse == -INF, value, lse)
