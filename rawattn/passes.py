"""Which kernels the dense functions launch, in order.

Every function here gets a Call, Views as the caller gave them, after all checks, and Views to write
to. Gradients that are gathered by atomic adds wait in workspaces of lse's dtype, which come from
the caller's allocator; a last pass scales them and puts them into the dtype of the result. All
kernels that share a workspace are of one family, that of the kernel that gathers.
"""

from rawattn.arrays import View
from rawattn.call import Call, Inputs, Parts, Passed
from rawattn.ops import backward_kv as kv_op
from rawattn.ops import backward_postprocess as postprocess_op
from rawattn.ops import backward_preprocess as preprocess_op
from rawattn.ops import backward_q as q_op
from rawattn.ops import double_backward_kv as double_kv_op
from rawattn.ops import double_backward_out as double_out_op
from rawattn.ops import double_backward_q as double_q_op
from rawattn.ops import forward as forward_op
from rawattn.ops import jvp as jvp_op
from rawattn.variants import Variant


def ready(call: Call, inputs: Inputs) -> tuple[View, View, View, View, View]:
    """The inputs as kernels take them; offsets that are shared are made ready once."""
    q, k, v, given_q, given_k = inputs
    offsets_q = call.offsets(given_q)
    offsets_k = offsets_q if given_k is given_q else call.offsets(given_k)
    return call.rows(q), call.rows(k), call.rows(v), offsets_q, offsets_k


def family_of(row: Variant) -> str:
    """The backend of which a row is one."""
    return "numba" if row.family == "numba" else "cuda"


def forward(call: Call, inputs: Inputs, out: View, lse: View) -> None:
    """out and lse."""
    row = call.row("forward")
    forward_op.launch(row, call.problem, *ready(call, inputs), out, lse, stream=call.stream)


def backward_preprocess(call: Call, out: View, dout: View, dlse: View | None, delta: View) -> None:
    """delta."""
    _preprocess(call, Passed(call.rows(dout), call.rows(out), delta, call.dense(dlse)), delta, None)


def _preprocess(call: Call, passed: Passed, delta: View, dq_accum: View | None) -> None:
    dout, out, _lse, dlse = passed
    row = call.row("backward_preprocess")
    preprocess_op.launch(row, call.problem, out, dout, dlse, delta, dq_accum, stream=call.stream)


def ready_passed(call: Call, passed: Passed) -> Passed:
    """The passed arrays as kernels take them."""
    dout, out, lse, dlse = passed
    return Passed(call.rows(dout), call.rows(out), call.dense(lse), call.dense(dlse))


def backward(
    call: Call, method: str, inputs: Inputs, passed: Passed, dq: View, dk: View, dv: View
) -> None:
    """dq, dk, dv by one of the methods."""
    gathering = call.row("backward_q" if method == "atomic_dkv" else "backward_kv")
    call = call._replace(backend=family_of(gathering))
    problem, stream = call.problem, call.stream
    q, k, v, offsets_q, offsets_k = ready(call, inputs)
    passed = ready_passed(call, passed)
    dout, _out, lse, _dlse = passed
    delta = call.empty(lse.shape, lse.dtype)
    last = call.row("backward_postprocess")

    def workspace(gradient: str) -> View:
        return call.empty(postprocess_op.accum_shape(last, problem, gradient), lse.dtype)

    def postprocess(accum: View, offsets: View, grad: View, scale: float) -> None:
        postprocess_op.launch(last, problem, accum, offsets, grad, scale=scale, stream=stream)

    dq_accum = workspace("dq") if method == "atomic_dq" else None
    _preprocess(call, passed, delta, dq_accum)
    common = (problem, q, k, v, dout, lse, delta, offsets_q, offsets_k)
    if method == "atomic_dkv":
        dk_accum, dv_accum = workspace("dk"), workspace("dv")
        call.fill(dk_accum, 0.0)
        call.fill(dv_accum, 0.0)
        q_op.launch(gathering, *common, dq, dk_accum, dv_accum, stream=stream)
        postprocess(dk_accum, offsets_k, dk, problem.softmax_scale)
        postprocess(dv_accum, offsets_k, dv, 1.0)
        return
    kv_op.launch(gathering, *common, dq_accum, dk, dv, stream=stream)
    if dq_accum is not None:
        postprocess(dq_accum, offsets_q, dq, problem.softmax_scale)
    else:
        q_op.launch(call.row("backward_q"), *common, dq, None, None, stream=stream)


def double_backward(
    call: Call,
    deterministic: bool,
    inputs: Inputs,
    parts: Parts,
    passed: Passed,
    ddout: View,
    ddlse: View,
    gq: View,
    gk: View,
    gv: View,
) -> None:
    """ddout .. gv.

    The first pass goes along the queries and leaves the rows' sums D and W to the second, which
    goes along the keys. gq is gathered by atomic adds, in a workspace that the first pass zeroes;
    or, deterministically, by a pass along the queries.
    """
    by_size = not deterministic
    of_keys = call.row("double_backward_kv", by_size=by_size)
    call = call._replace(backend=family_of(of_keys))
    of_rows = call.row("double_backward_out", by_size=by_size)
    last = call.row("double_backward_q" if deterministic else "backward_postprocess")
    problem, stream = call.problem, call.stream
    q, k, v, *offsets = ready(call, inputs)
    directions = tuple(map(call.rows, parts))
    dout, out, lse, dlse = ready_passed(call, passed)
    delta = call.empty(lse.shape, lse.dtype)
    ddelta = call.empty(lse.shape, lse.dtype)
    gq_accum = None
    if not deterministic:
        gq_accum = call.empty(postprocess_op.accum_shape(last, problem, "dq"), lse.dtype)
    sums = (ddout, ddlse, delta, ddelta)
    inner = (q, k, v, *directions, out, dout, lse, dlse)
    double_out_op.launch(of_rows, problem, *inner, *sums, gq_accum, *offsets, stream=stream)
    common = (problem, q, k, v, *directions, dout, lse, delta, ddlse, ddelta)
    double_kv_op.launch(of_keys, *common, gq_accum, gk, gv, *offsets, stream=stream)
    if gq_accum is None:
        double_q_op.launch(last, *common, gq, *offsets, stream=stream)
    else:
        scale = problem.softmax_scale
        postprocess_op.launch(last, problem, gq_accum, offsets[0], gq, scale=scale, stream=stream)


def jvp(
    call: Call,
    deterministic: bool,
    inputs: Inputs,
    parts: Parts,
    out: View,
    tout: View,
    lse: View,
    tlse: View,
) -> None:
    """out, tout, lse and tlse; without any direction by ``forward``, with tangents of zero."""
    if not any(parts):
        forward(call, inputs, out, lse)
        call.fill(tout, 0.0)
        call.fill(tlse, 0.0)
        return
    row = call.row("jvp", by_size=not deterministic)
    q, k, v, *offsets = ready(call, inputs)
    directions = map(call.rows, parts)
    jvp_op.launch(
        row, call.problem, q, k, v, *directions, out, tout, lse, tlse, *offsets, stream=call.stream
    )
