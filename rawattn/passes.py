"""Which kernels the functions of ``api`` and ``api_second`` launch, in order.

Every function gets a Call after its checks, views as the caller gave them, and room for results
that kernels can write. Gradients that are gathered by atomic adds wait in workspaces of the
statistics' dtype, which come from the caller's allocator; a last pass scales them and puts them
into the dtype of the result. The layout of a workspace is that of the row that fills it, so that
row is chosen first. Long by the arguments of the launches.
"""

from typing import TYPE_CHECKING

from rawattn.arrays import are_usual
from rawattn.call import Call, Inputs, Parts, Passed
from rawattn.ops import backward_kv as kv_op
from rawattn.ops import backward_postprocess as postprocess_op
from rawattn.ops import backward_preprocess as preprocess_op
from rawattn.ops import backward_q as q_op
from rawattn.ops import backward_sinks as sinks_op
from rawattn.ops import double_backward_kv as double_kv_op
from rawattn.ops import double_backward_out as double_out_op
from rawattn.ops import double_backward_q as double_q_op
from rawattn.ops import forward as forward_op
from rawattn.ops import jvp as jvp_op
from rawattn.ops.workspaces import accum_shape, check_layout
from rawattn.variants import Row

if TYPE_CHECKING:
    from rawattn.arrays import View


# ---- arrays as kernels take them --------------------------------------------------------------


def ready(call: Call, inputs: Inputs) -> Inputs:
    """The inputs of a call; offsets that are shared stay so."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, seqused_k = inputs
    shared = cu_seqlens_k is cu_seqlens_q
    # What is usual is found at one look; without it the rest comes to the same.
    if (
        shared
        and sinks is None
        and seqused_k is None
        and not (q.ptr | k.ptr | v.ptr) % 16
        and are_usual(
            q.dtype, cu_seqlens_q.dtype, q.strides, k.strides, v.strides, cu_seqlens_q.strides
        )
    ):
        return inputs
    offsets = call.offsets(cu_seqlens_q)
    return Inputs(
        q=call.rows(q),
        k=call.rows(k),
        v=call.rows(v),
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets if shared else call.offsets(cu_seqlens_k),
        sinks=call.sums(sinks),
        seqused_k=None if seqused_k is None else call.offsets(seqused_k),
    )


def ready_parts(call: Call, parts: Parts) -> Parts:
    """The parts of a direction; one that is None stays so."""
    return Parts(*map(call.rows, parts))


def ready_passed(call: Call, passed: Passed) -> Passed:
    """What a derivative gets beside the inputs."""
    dout, out, lse, dlse = passed
    return Passed(call.rows(dout), call.rows(out), call.dense(lse), call.dense(dlse))


def _zeros_like(call: Call, x: "View") -> "View":
    """Zeros of the shape and dtype of x."""
    zeros = call.empty(x.shape, x.dtype)
    call.fill(zeros, 0.0)
    return zeros


def beside(call: Call, row: Row) -> Call:
    """The call with its other kernels from the family of ``row``, whose workspaces they read."""
    return call._replace(backend="numba" if row.family == "numba" else "cuda")


# ---- first order ------------------------------------------------------------------------------


def forward(call: Call, inputs: Inputs, out: "View", lse: "View") -> None:
    """out and lse."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, seqused_k = ready(call, inputs)
    row = call.row("forward")
    counted = False
    if row.family == "sm90":
        q, k, v = call.mapped(q), call.mapped(k), call.mapped(v)
        # a graph may run twice at once, and beside whoever has its counter by then
        counted = not call.capturing
    args = forward_op.Args(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, sinks, seqused_k)
    forward_op.launch(row, call.problem, args, stream=call.stream, counted=counted)


def backward_preprocess(
    call: Call, out: "View", dout: "View", dlse: "View | None", delta: "View"
) -> None:
    """delta = rowsum(out * dout) - dlse."""
    preprocess(call, call.rows(out), call.rows(dout), call.dense(dlse), delta, None)


def preprocess(
    call: Call,
    out: "View",
    dout: "View",
    dlse: "View | None",
    delta: "View",
    dq_accum: "View | None",
) -> None:
    """delta, and zeros to dq_accum, from arrays that are ready."""
    args = preprocess_op.Args(
        out=out,
        dout=dout,
        dlse=dlse,
        delta=delta,
        dq_accum=dq_accum,
        total_q=call.problem.total_q,
        num_heads_q=call.problem.num_heads_q,
        dq_accum_size=dq_accum.shape[0] if dq_accum else 0,
    )
    row = call.row("backward_preprocess")
    preprocess_op.launch(row, call.problem, args, stream=call.stream)


def _postprocess(
    call: Call, filling: Row, accum: "View", cu_seqlens: "View", grad: "View", scale: float
) -> None:
    """grad = scale times the sums that row ``filling`` has left in accum."""
    row = call.row("backward_postprocess")
    check_layout(filling, row)
    args = postprocess_op.Args(
        accum=accum,
        grad=grad,
        cu_seqlens=cu_seqlens,
        batch=call.problem.batch,
        total_rows=grad.shape[0],
        num_heads=grad.shape[1],
        scale=scale,
    )
    postprocess_op.launch(row, call.problem, args, stream=call.stream)


def _along_sinks(
    call: Call,
    sinks: "View",
    lse: "View",
    delta: "View",
    cu_seqlens_q: "View",
    grad: "View",
    *,
    ddsinks: "View | None" = None,
    ddlse: "View | None" = None,
    ddelta: "View | None" = None,
) -> None:
    """The gradient of sinks, from the terms of the rows; with ddlse and ddelta the second one."""
    sums = grad if grad.dtype == lse.dtype else call.empty(grad.shape, lse.dtype)
    args = sinks_op.Args(
        sinks=sinks,
        lse=lse,
        delta=delta,
        ddsinks=ddsinks,
        ddlse=ddlse,
        ddelta=ddelta,
        grad=sums,
        cu_seqlens_q=cu_seqlens_q,
        batch=call.problem.batch,
        total_q=call.problem.total_q,
    )
    sinks_op.launch(call.row("backward_sinks"), call.problem, args, stream=call.stream)
    if sums is not grad:
        call.framework.copy(grad, sums, call.stream)


def backward(
    call: Call,
    method: str,
    inputs: Inputs,
    passed: Passed,
    dq: "View",
    dk: "View",
    dv: "View",
    dsinks: "View | None" = None,
) -> None:
    """dq, dk, dv by one of ``variants.METHODS``; and of sinks dsinks."""
    problem, scale = call.problem, call.problem.softmax_scale
    row = call.row("backward_q" if method == "atomic_dkv" else "backward_kv")
    call = beside(call, row)
    q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, seqused_k = ready(call, inputs)
    dout, out, lse, dlse = ready_passed(call, passed)
    if row.family == "sm90":
        q, k, v, dout = map(call.mapped, (q, k, v, dout))
    delta = call.empty(lse.shape, lse.dtype)
    dq_accum = None
    in_order = method == "deterministic" and row.in_order
    if method == "atomic_dq" or in_order:
        dq_accum = call.empty(accum_shape(row, problem, "dq", in_order=in_order), lse.dtype)
    preprocess(call, out, dout, dlse, delta, dq_accum)
    if sinks is not None and dsinks is not None:
        _along_sinks(call, sinks, lse, delta, cu_seqlens_q, dsinks)

    def along_queries(row: Row, dk_accum: "View | None", dv_accum: "View | None") -> None:
        args = q_op.Args(
            q=q,
            k=k,
            v=v,
            dout=dout,
            lse=lse,
            delta=delta,
            dq=dq,
            dk_accum=dk_accum,
            dv_accum=dv_accum,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_k=seqused_k,
        )
        q_op.launch(row, problem, args, stream=call.stream)

    if method == "atomic_dkv":
        dk_accum = call.empty(accum_shape(row, problem, "dk"), lse.dtype)
        dv_accum = call.empty(accum_shape(row, problem, "dv"), lse.dtype)
        call.fill(dk_accum, 0.0)
        call.fill(dv_accum, 0.0)
        along_queries(row, dk_accum, dv_accum)
        _postprocess(call, row, dk_accum, cu_seqlens_k, dk, scale)
        _postprocess(call, row, dv_accum, cu_seqlens_k, dv, 1.0)
        return
    args = kv_op.Args(
        q=q,
        k=k,
        v=v,
        dout=dout,
        lse=lse,
        delta=delta,
        dq_accum=dq_accum,
        dk=dk,
        dv=dv,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
    )
    counted = row.family == "sm90" and not in_order and not call.capturing
    kv_op.launch(row, problem, args, stream=call.stream, counted=counted, in_order=in_order)
    if dq_accum is not None:
        _postprocess(call, row, dq_accum, cu_seqlens_q, dq, scale)
    else:
        along_queries(call.row("backward_q"), None, None)


# ---- second order and forward mode ------------------------------------------------------------


def double_backward(
    call: Call,
    deterministic: bool,
    inputs: Inputs,
    parts: Parts,
    passed: Passed,
    ddout: "View",
    ddlse: "View",
    gq: "View",
    gk: "View",
    gv: "View",
    gsinks: "View | None" = None,
    *,
    ddsinks: "View | None" = None,
) -> None:
    """ddout, ddlse, gq, gk and gv in the direction ``parts``; and of sinks gsinks, and ddsinks.

    The first pass goes along the queries and leaves the rows' sums D and W to the second, which
    goes along the keys. gq is gathered by atomic adds in a workspace that the first pass zeroes;
    or, deterministically, by a pass along the queries.
    """
    problem, by_size = call.problem, not deterministic
    of_keys = call.row("double_backward_kv", by_size=by_size)
    call = beside(call, of_keys)
    q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, seqused_k = ready(call, inputs)
    ddq, ddk, ddv = ready_parts(call, parts)
    ddsinks = call.sums(ddsinks)
    if ddsinks is not None and ddq is None and ddk is None:
        ddq = _zeros_like(call, q)  # it moves P, which kernels know by a part of q or k
    dout, out, lse, dlse = ready_passed(call, passed)
    delta = call.empty(lse.shape, lse.dtype)
    ddelta = call.empty(lse.shape, lse.dtype)
    gq_accum = None
    if not deterministic:
        gq_accum = call.empty(accum_shape(of_keys, problem, "dq"), lse.dtype)
    of_out = double_out_op.Args(
        q=q,
        k=k,
        v=v,
        ddq=ddq,
        ddk=ddk,
        ddv=ddv,
        out=out,
        dout=dout,
        lse=lse,
        dlse=dlse,
        ddout=ddout,
        ddlse=ddlse,
        delta=delta,
        ddelta=ddelta,
        gq_accum=gq_accum,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        sinks=sinks,
        ddsinks=ddsinks,
        seqused_k=seqused_k,
        gq_accum_size=gq_accum.shape[0] if gq_accum else 0,
    )
    row = call.row("double_backward_out", by_size=by_size)
    double_out_op.launch(row, problem, of_out, stream=call.stream)
    if sinks is not None and gsinks is not None:
        second = {"ddsinks": ddsinks, "ddlse": ddlse, "ddelta": ddelta}
        _along_sinks(call, sinks, lse, delta, cu_seqlens_q, gsinks, **second)
    of_kv = double_kv_op.Args(
        q=q,
        k=k,
        v=v,
        ddq=ddq,
        ddk=ddk,
        ddv=ddv,
        dout=dout,
        lse=lse,
        delta=delta,
        ddlse=ddlse,
        ddelta=ddelta,
        gq_accum=gq_accum,
        gk=gk,
        gv=gv,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
    )
    double_kv_op.launch(of_keys, problem, of_kv, stream=call.stream)
    if gq_accum is not None:
        _postprocess(call, of_keys, gq_accum, cu_seqlens_q, gq, problem.softmax_scale)
        return
    of_q = double_q_op.Args(
        q=q,
        k=k,
        v=v,
        ddq=ddq,
        ddk=ddk,
        ddv=ddv,
        dout=dout,
        lse=lse,
        delta=delta,
        ddlse=ddlse,
        ddelta=ddelta,
        gq=gq,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
    )
    double_q_op.launch(call.row("double_backward_q"), problem, of_q, stream=call.stream)


def jvp(
    call: Call,
    deterministic: bool,
    inputs: Inputs,
    parts: Parts,
    out: "View",
    tout: "View",
    lse: "View",
    tlse: "View",
    *,
    tsinks: "View | None" = None,
) -> None:
    """out, lse and their tangents tout, tlse; by ``forward`` if no part of the direction is there.

    ``deterministic``: the same row, and so the same bits, for a sequence alone and in a batch.
    """
    if not any((*parts, tsinks)):
        forward(call, inputs, out, lse)
        call.fill(tout, 0.0)
        call.fill(tlse, 0.0)
        return
    q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, seqused_k = ready(call, inputs)
    tq, tk, tv = ready_parts(call, parts)
    if tsinks is not None and tq is None and tk is None:
        tq = _zeros_like(call, q)
    args = jvp_op.Args(
        q=q,
        k=k,
        v=v,
        tq=tq,
        tk=tk,
        tv=tv,
        out=out,
        tout=tout,
        lse=lse,
        tlse=tlse,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        sinks=sinks,
        tsinks=call.sums(tsinks),
        seqused_k=seqused_k,
    )
    jvp_op.launch(
        call.row("jvp", by_size=not deterministic), call.problem, args, stream=call.stream
    )
