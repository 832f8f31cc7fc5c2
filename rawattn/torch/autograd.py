"""How the operators of rawattn.torch are differentiated: backwards, forwards, twice, and mixed.

Each operator has an autograd kernel of its own. torch runs it once at every level of derivatives:
eager autograd is one, and every torch.func.grad and torch.func.jvp around the call is one more.
At its level the kernel looks for tangents of forward mode and for tensors that require a gradient,
and calls the operator again, below autograd, where the next level or the computation takes over.

    operator           backwards                         forwards
    forward            backward                          jvp
    backward           double_backward                   it and backward
    jvp                both of these, see _Jvp           refused
    double_backward    both, in its direction alone      refused

The rules are the same for every attention function: its ``Operators`` say how many inputs it is
differentiated in (q, k, v and perhaps more). Nodes save inputs and outputs alone. A saved
intermediate would be a constant for the second derivative, which would silently be wrong. Long for
a module, since these rules belong together.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad

from rawattn.torch.operators import LIBRARY, Operators

Args = tuple[Any, ...]
Gradients = tuple[Tensor | None, ...]

_make_dual: Any = forward_ad.make_dual
_unpack_dual: Any = forward_ad.unpack_dual


# ---- backwards: the nodes of the graph --------------------------------------------------------


class _Attention(Function):
    """The node that autograd records for ``forward``."""

    @staticmethod
    def forward(ctx: Any, ops: Operators, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse = _at_next_level(ops.forward, args)
        tensors = ops.num_inputs + ops.num_given
        ctx.save_for_backward(*args[:tensors], out, lse)
        ctx.ops, ctx.options = ops, args[tensors:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)  # torch runs nodes that nothing reaches too
        *saved, out, lse = ctx.saved_tensors
        inputs, given = saved[: ctx.ops.num_inputs], saved[ctx.ops.num_inputs :]
        grads = ctx.ops.backward(_or_zero(dout, out), dlse, *inputs, out, lse, *given, *ctx.options)
        return _of_all(ctx, _where_present(inputs, grads))


class _AttentionBackward(Function):
    """The node recorded for ``backward`` under create_graph=True.

    gq, gk and gv hold what depends on q, k and v through out and lse too.
    """

    @staticmethod
    def forward(ctx: Any, ops: Operators, *args: Any) -> tuple[Tensor, ...]:
        needed, end = ctx.needs_input_grad[3:], ops.num_inputs  # after ops, dout and dlse
        if any(needed[end : end + 2]) and not any(needed[:end]):  # out and lse, but no input
            _refuse_foreign_results(ops)
        grads = _at_next_level(ops.backward, args)
        tensors = ops.num_inputs + ops.num_given + 4
        ctx.save_for_backward(*args[:tensors])
        ctx.ops, ctx.options = ops, args[tensors:]
        ctx.set_materialize_grads(False)
        return tuple(grads)

    @staticmethod
    def backward(ctx: Any, *direction: Tensor | None) -> Gradients:
        if all(part is None for part in direction):
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        dlse, inputs = saved[1], saved[2 : 2 + ctx.ops.num_inputs]
        ddout, ddlse, *second = ctx.ops.double_backward(*direction, *saved, *ctx.options)
        ddlse = None if dlse is None else ddlse
        return _of_all(ctx, (ddout, ddlse, *_where_present(inputs, second)))


class _Jvp(Function):
    """The node recorded for ``jvp``.

    With cotangents w, (tq, tk, tv) get ``backward`` of (w_tout, w_tlse), and (q, k, v) get
    ``backward`` of (w_out, w_lse) plus the gq, gk, gv of ``double_backward`` in the direction
    (tq, tk, tv) with dout = w_tout and dlse = w_tlse: the derivative of a tangent is a second one.
    """

    @staticmethod
    def forward(ctx: Any, ops: Operators, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, tout, lse, tlse = _at_next_level(ops.jvp, args)
        if not any(ctx.needs_input_grad[1 : 1 + ops.num_inputs]):
            ctx.mark_non_differentiable(out, lse)  # they do not depend on the direction
        tensors = 2 * ops.num_inputs + ops.num_given
        ctx.save_for_backward(*args[:tensors], out, lse)
        ctx.ops, ctx.options = ops, args[tensors:]
        ctx.set_materialize_grads(False)
        return out, tout, lse, tlse

    @staticmethod
    def backward(
        ctx: Any,
        w_out: Tensor | None,
        w_tout: Tensor | None,
        w_lse: Tensor | None,
        w_tlse: Tensor | None,
    ) -> Gradients:
        ops, num_inputs = ctx.ops, ctx.ops.num_inputs
        *saved, out, lse = ctx.saved_tensors
        inputs, direction = saved[:num_inputs], saved[num_inputs : 2 * num_inputs]
        rest = (*saved[2 * num_inputs :], *ctx.options)
        needed = ctx.needs_input_grad[1:]
        of_inputs: Args = (None,) * num_inputs
        of_direction: Args = (None,) * num_inputs
        if w_out is not None or w_lse is not None:
            of_inputs = ops.backward(_or_zero(w_out, out), w_lse, *inputs, out, lse, *rest)
        if w_tout is not None or w_tlse is not None:
            # A tangent has no tangent of its own at the level that it belongs to.
            primals = map(_primal, (*inputs, out, lse))
            given = (_or_zero(w_tout, out), w_tlse, *primals, *rest)
            if any(needed[:num_inputs]):
                second = ops.double_backward(*direction, *given)[2:]
                of_inputs = tuple(map(_sum, of_inputs, second))
            if any(needed[num_inputs : 2 * num_inputs]):
                of_direction = _where_present(direction, ops.backward(*given))
        return _of_all(ctx, (*_where_present(inputs, of_inputs), *of_direction))


class _DoubleBackward(Function):
    """The node recorded for ``double_backward`` under create_graph=True.

    It is linear in its direction, in which torch.autograd.functional.hvp differentiates it; the map
    from the direction to (ddout, ddlse, gq, gk, gv) is the derivative of the forward above the
    Hessian, and its transpose is ``backward`` and the same Hessian. All else is third order.
    """

    @staticmethod
    def forward(ctx: Any, ops: Operators, *args: Any) -> tuple[Tensor, ...]:
        results = _at_next_level(ops.double_backward, args)
        tensors = 2 * ops.num_inputs + ops.num_given + 4
        ctx.save_for_backward(*args[:tensors])
        ctx.ops, ctx.options = ops, args[tensors:]
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Gradients:
        w_ddout, w_ddlse, *w_inputs = cotangents
        ops, num_inputs = ctx.ops, ctx.ops.num_inputs
        direction, rest = ctx.saved_tensors[:num_inputs], ctx.saved_tensors[num_inputs:]
        out = rest[2 + num_inputs]
        parts = len([t for t in direction if t is not None])
        if any(_is_asked_for(node) for node, _ in ctx.next_functions[parts:]):
            _refuse_third_derivative(ops)
        sums: Args = (None,) * num_inputs
        if w_ddout is not None or w_ddlse is not None:
            sums = ops.backward(_or_zero(w_ddout, out), w_ddlse, *rest[2:], *ctx.options)
        if any(w is not None for w in w_inputs):
            second = ops.double_backward(*w_inputs, *rest, *ctx.options)[2:]
            sums = tuple(map(_sum, sums, second))
        return _of_all(ctx, _where_present(direction, sums))


def _is_asked_for(node: Any) -> bool:
    """Whether the backward that is running goes on to ``node``."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch does not answer for a leaf that torch.autograd.grad was given
        return True


def _record(ops: Operators, op: Any, node: Any, num_tensors: int, args: Args) -> Any:
    """``op``, with ``node`` in the graph of this level if a leading tensor wants a gradient."""
    if not (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in args[:num_tensors])
    ):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)
    # Function.apply would begin at the outermost level of torch.func again; its base's does not.
    apply = super(Function, node).apply
    if not _may_have_tangents():
        return apply(ops, *args)
    # Tangents are seen to by the kernel; the node keeps them, for its backward to see them too.
    with enable_single_level_autograd_function(), forward_ad._set_fwd_grad_enabled(False):
        return apply(ops, *args)


def _at_next_level(op: Any, args: Args) -> Any:
    """``op`` below the autograd of this level, from within a node."""
    if not torch._C._are_functorch_transforms_active():
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)
    # Within a node no derivatives are taken, which must not hold for the levels that follow.
    forwards = forward_ad._set_fwd_grad_enabled(True)
    with torch.enable_grad(), forwards, torch._C._AutoDispatchBelowAutograd():
        return op(*args)


# ---- forwards ---------------------------------------------------------------------------------


def _forward_with_tangents(ops: Operators, tangents: Args, args: Args) -> tuple[Tensor, Tensor]:
    inputs, rest = args[: ops.num_inputs], args[ops.num_inputs :]
    given = (*inputs, *tangents, *rest)
    out, tout, lse, tlse = _record(ops, ops.jvp, _Jvp, 2 * ops.num_inputs, given)
    return _make_dual(out, tout, level=0), _make_dual(lse, tlse, level=0)


def _backward_with_tangents(ops: Operators, tangents: Args, args: Args) -> tuple[Tensor, ...]:
    """The tangents of (dq, dk, dv): gq, gk, gv in the direction, plus those of (tdout, tdlse)."""
    tdout, tdlse, *direction, tout, tlse = tangents
    tensors = ops.num_inputs + 4
    grads = _record(ops, ops.backward, _AttentionBackward, tensors, args)
    given: Args = tuple(map(_primal, args[:tensors]))
    options = args[tensors:]
    sums: Args = (None,) * ops.num_inputs
    if any(t is not None for t in direction):
        sums = ops.double_backward(*direction, *given, *options)[2:]
    elif tout is not None or tlse is not None:
        _refuse_foreign_results(ops)
    if tdout is not None or tdlse is not None:
        own = ops.backward(_or_zero(tdout, given[-2]), tdlse, *given[2:], *options)
        sums = tuple(map(_sum, sums, own))
    return tuple(_make_dual(grad, t, level=0) for grad, t in zip(grads, sums, strict=True))


def _jvp_with_tangents(ops: Operators, tangents: Args, args: Args) -> NoReturn:
    raise RuntimeError(
        f"rawattn: forward mode over forward mode (a jvp of a jvp) does not exist for "
        f"{ops.function}; take forward over reverse, torch.func.jvp of torch.func.grad, or reverse "
        "over forward, torch.func.grad of torch.func.jvp"
    )


def _double_backward_with_tangents(ops: Operators, tangents: Args, args: Args) -> NoReturn:
    _refuse_third_derivative(ops)


def _may_have_tangents() -> bool:
    """Whether to look for tangents. Compiled code does not tell forward_ad of a torch.func.jvp."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _tangent(tensor: Tensor | None) -> Tensor | None:
    """The tangent at this level, whose number in forward_ad is always 0."""
    return None if tensor is None else _unpack_dual(tensor, level=0).tangent


def _primal(tensor: Tensor | None) -> Tensor | None:
    """The tensor without the tangent that it may have at this level."""
    if tensor is None or not _may_have_tangents():
        return tensor
    primal, tangent = _unpack_dual(tensor, level=0)
    return tensor if tangent is None else primal


# ---- both -------------------------------------------------------------------------------------


def _or_zero(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _where_present(tensors: Args, grads: Args) -> Args:
    """The gradients of those tensors that there are."""
    return tuple(None if t is None else g for t, g in zip(tensors, grads, strict=True))


def _of_all(ctx: Any, grads: Args) -> Gradients:
    """Gradients of all arguments of a node from those of the first tensors, after its ops."""
    return None, *grads, *(None for _ in ctx.needs_input_grad[1 + len(grads) :])


def _refuse_third_derivative(ops: Operators) -> NoReturn:
    raise RuntimeError(
        f"rawattn: the third derivative of {ops.function} does not exist; detach() a gradient that "
        "need not be differentiated again, leave forward_ad.dual_level() before backward(), or use "
        "torch's scaled_dot_product_attention with the math backend"
    )


def _refuse_foreign_results(ops: Operators) -> NoReturn:
    raise RuntimeError(
        f"rawattn: {ops.backward.name().split('::')[1]} is differentiated in out or lse but in "
        "none of q, k and v, of which it takes them to be functions; differentiate "
        f"{ops.function} instead"
    )


def _refuse_compiled_dual_level(ops: Operators) -> None:
    """A compiled forward_ad.dual_level leaves no sign for ``_may_have_tangents`` when it runs."""
    tracing = torch._guards.TracingContext.try_get() is not None
    if tracing and not torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "rawattn: forward_ad.dual_level inside compiled code does not exist for "
            f"{ops.function}; use torch.func.jvp there, or enter the dual level outside"
        )


# ---- the kernels ------------------------------------------------------------------------------


def _autograd_kernel(
    ops: Operators, op: Any, node: Any, num_tensors: int, with_tangents: Any
) -> Any:
    """What runs first for ``op`` at a level of derivatives."""

    def kernel(*args: Any) -> Any:
        if _may_have_tangents():
            tangents = tuple(map(_tangent, args[:num_tensors]))
            if any(t is not None for t in tangents):
                _refuse_compiled_dual_level(ops)
                return with_tangents(ops, tangents, args)
        return _record(ops, op, node, num_tensors, args)

    return kernel


def register(ops: Operators) -> None:
    """Give the operators of a function their derivatives."""
    inputs = ops.num_inputs
    for op, node, num_tensors, with_tangents in (
        (ops.forward, _Attention, inputs, _forward_with_tangents),
        (ops.backward, _AttentionBackward, inputs + 4, _backward_with_tangents),
        (ops.double_backward, _DoubleBackward, 2 * inputs + 4, _double_backward_with_tangents),
        (ops.jvp, _Jvp, 2 * inputs, _jvp_with_tangents),
    ):
        kernel = _autograd_kernel(ops, op, node, num_tensors, with_tangents)
        LIBRARY.impl(op.name(), kernel, "Autograd")
