"""What the operators of every attention function share: how one is defined, and its fakes.

``autograd`` says how to differentiate them. The backward operators take out and lse as functions of
their inputs: those of the forward operator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

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


# ---- the shapes of their results --------------------------------------------------------------


def nothing_like(tensor: Tensor) -> Tensor:
    """In the place of the gradient of an input that there is not: operators return tensors."""
    return tensor.new_empty((0,))


def fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    total_q, num_heads_q, _head_dim = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((total_q, num_heads_q, v.shape[2]))
    return out, q.new_empty((num_heads_q, total_q), dtype=lse_dtype)


def fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    learned: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and of what else is learned: sinks, or block_scale."""
    last = nothing_like(lse) if learned is None else learned.new_empty(learned.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), last


def fake_double_backward(*args: Any) -> tuple[Tensor, ...]:
    """(ddout, ddlse) and the gradients, of a direction and what ``fake_backward`` gets."""
    return *fake_forward(*args[6:9]), *fake_backward(*args[4:])


def fake_jvp(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """(out, tout, lse, tlse)."""
    (out, lse), (tout, tlse) = fake_forward(q, k, v), fake_forward(q, k, v)
    return out, tout, lse, tlse
