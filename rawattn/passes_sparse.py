"""Which kernels the functions of ``api_sparse`` launch, in order.

As in ``passes``. A table of blocks that the call did not bring is built first. All kernels of a
call are of one family: Numba's, if one of them has no CUDA row.
"""

from typing import TYPE_CHECKING, NamedTuple

from rawattn.call import Call, Inputs, Parts, Passed
from rawattn.ops import sparse_backward_kv as kv_op
from rawattn.ops import sparse_backward_q as q_op
from rawattn.ops import sparse_double_backward_kv as double_kv_op
from rawattn.ops import sparse_double_backward_out as double_out_op
from rawattn.ops import sparse_double_backward_q as double_q_op
from rawattn.ops import sparse_forward as forward_op
from rawattn.ops import sparse_postprocess as postprocess_op
from rawattn.ops.workspaces import Gradient, accum_shape, check_layout
from rawattn.passes import beside, preprocess, ready, ready_parts, ready_passed
from rawattn.problem import Selection
from rawattn.tables import Lists, Source, lists_of
from rawattn.variants import Row

if TYPE_CHECKING:
    from rawattn.arrays import View


class Chosen(NamedTuple):
    """Which blocks a call has selected, and the factors of their scores, where there are any."""

    selection: Selection
    source: Source
    block_scale: "View | None"


class _Ready(NamedTuple):
    """A call whose kernels are of one family, their rows, and its arrays as they take them."""

    call: Call
    rows: list[Row]
    inputs: Inputs
    lists: Lists
    block_scale: "View | None"


def _ready(call: Call, chosen: Chosen, inputs: Inputs, *stems: str, lists: bool) -> _Ready:
    """What the kernels ``stems`` share, with the ``lists`` of queries or without."""
    rows = [call.row(stem, selection=chosen.selection) for stem in stems]
    call = beside(call, next((row for row in rows if row.family == "numba"), rows[0]))
    if call.backend == "numba":
        rows = [call.row(stem, selection=chosen.selection) for stem in stems]
    inputs = ready(call, inputs)
    offsets = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    table = lists_of(call, chosen.selection, chosen.source, offsets, lists)
    return _Ready(call, rows, inputs, table, call.dense(chosen.block_scale))


def forward(call: Call, chosen: Chosen, inputs: Inputs, out: "View", lse: "View") -> None:
    """out and lse."""
    call, [row], inputs, lists, block_scale = _ready(
        call, chosen, inputs, "sparse_forward", lists=False
    )
    args = _of_forward(inputs, lists, block_scale, out, lse)
    forward_op.launch(row, call.problem, chosen.selection, args, stream=call.stream)


def _of_forward(
    inputs: Inputs, lists: Lists, block_scale: "View | None", out: "View", lse: "View"
) -> forward_op.Args:
    blocks, slots = lists.of_queries()
    return forward_op.Args(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        blocks=blocks,
        slots=slots,
        block_scale=block_scale,
        cu_seqlens_q=inputs.cu_seqlens_q,
        cu_seqlens_k=inputs.cu_seqlens_k,
        out=out,
        lse=lse,
    )


def backward(
    call: Call,
    chosen: Chosen,
    deterministic: bool,
    inputs: Inputs,
    passed: Passed,
    dq: "View",
    dk: "View",
    dv: "View",
    dblock_scale: "View | None",
) -> None:
    """dq, dk, dv, and dblock_scale where the scores have factors.

    One kernel goes along the blocks of keys. dQ is gathered by atomic adds in a workspace, as are
    dK and dV if lists of queries are cut into segments, which the kernel takes one by one.
    Deterministically, the kernel goes through all chunks of a block in order, and dQ has a pass of
    its own along the queries.
    """
    last = "sparse_backward_q" if deterministic else "sparse_postprocess"
    call, [of_blocks, of_rows], inputs, lists, block_scale = _ready(
        call, chosen, inputs, "sparse_backward_kv", last, lists=True
    )
    problem, selection = call.problem, chosen.selection
    dout, out, lse, dlse = ready_passed(call, passed)
    delta = call.empty(lse.shape, lse.dtype)
    preprocess(call, out, dout, dlse, delta, None)
    if dblock_scale is not None:
        call.fill(dblock_scale, 0.0)

    def workspace(gradient: Gradient) -> "View":
        accum = call.empty(accum_shape(of_blocks, problem, gradient), lse.dtype)
        call.fill(accum, 0.0)
        return accum

    cut = not deterministic and selection.is_cut(problem)
    dq_accum = None if deterministic else workspace("dq")
    dk_accum = workspace("dk") if cut else None
    dv_accum = workspace("dv") if cut else None
    starts, lengths, queries, query_slots = lists.of_keys()
    of_kv = kv_op.Args(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        dout=dout,
        lse=lse,
        delta=delta,
        starts=starts,
        lengths=lengths,
        queries=queries,
        query_slots=query_slots,
        work=lists.work,
        block_scale=block_scale,
        dblock_scale=dblock_scale,
        cu_seqlens_q=inputs.cu_seqlens_q,
        cu_seqlens_k=inputs.cu_seqlens_k,
        dq_accum=dq_accum,
        dk=None if cut else dk,
        dv=None if cut else dv,
        dk_accum=dk_accum,
        dv_accum=dv_accum,
    )
    kv_op.launch(of_blocks, problem, selection, of_kv, stream=call.stream)
    if deterministic:
        blocks, slots = lists.of_queries()
        of_q = q_op.Args(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            dout=dout,
            lse=lse,
            delta=delta,
            blocks=blocks,
            slots=slots,
            block_scale=block_scale,
            cu_seqlens_q=inputs.cu_seqlens_q,
            cu_seqlens_k=inputs.cu_seqlens_k,
            dq=dq,
        )
        q_op.launch(of_rows, problem, selection, of_q, stream=call.stream)
        return
    check_layout(of_blocks, of_rows)
    scale = problem.softmax_scale
    for accum, grad, factor in ((dq_accum, dq, scale), (dk_accum, dk, scale), (dv_accum, dv, 1.0)):
        if accum is not None:
            tokens, heads, _ = accum.shape
            of_sums = postprocess_op.Args(
                accum=accum, grad=grad, total_rows=tokens, num_heads=heads, scale=factor
            )
            postprocess_op.launch(of_rows, problem, of_sums, stream=call.stream)


def double_backward(
    call: Call,
    chosen: Chosen,
    inputs: Inputs,
    parts: Parts,
    ddblock_scale: "View | None",
    passed: Passed,
    ddout: "View",
    ddlse: "View",
    gq: "View",
    gk: "View",
    gv: "View",
    gblock_scale: "View | None",
) -> None:
    """ddout .. gv, and gblock_scale where the scores have factors.

    The first pass goes along the queries and leaves the rows' sums D and W to the others: one along
    the blocks of keys, one along the queries again.
    """
    stems = [f"sparse_double_backward_{part}" for part in ("out", "kv", "q")]
    call, [first, of_blocks, last], inputs, lists, block_scale = _ready(
        call, chosen, inputs, *stems, lists=True
    )
    problem, selection = call.problem, chosen.selection
    if gblock_scale is not None:
        call.fill(gblock_scale, 0.0)
    ddq, ddk, ddv = ready_parts(call, parts)
    ddblock_scale = call.dense(ddblock_scale)
    dout, out, lse, dlse = ready_passed(call, passed)
    delta = call.empty(lse.shape, lse.dtype)
    ddelta = call.empty(lse.shape, lse.dtype)
    blocks, slots = lists.of_queries()
    starts, lengths, queries, query_slots = lists.of_keys()
    of_out = double_out_op.Args(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        ddq=ddq,
        ddk=ddk,
        ddv=ddv,
        out=out,
        dout=dout,
        lse=lse,
        dlse=dlse,
        blocks=blocks,
        slots=slots,
        block_scale=block_scale,
        ddblock_scale=ddblock_scale,
        cu_seqlens_q=inputs.cu_seqlens_q,
        cu_seqlens_k=inputs.cu_seqlens_k,
        ddout=ddout,
        ddlse=ddlse,
        delta=delta,
        ddelta=ddelta,
    )
    double_out_op.launch(first, problem, selection, of_out, stream=call.stream)
    of_kv = double_kv_op.Args(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        ddq=ddq,
        ddk=ddk,
        ddv=ddv,
        dout=dout,
        lse=lse,
        delta=delta,
        ddlse=ddlse,
        ddelta=ddelta,
        starts=starts,
        lengths=lengths,
        queries=queries,
        query_slots=query_slots,
        block_scale=block_scale,
        ddblock_scale=ddblock_scale,
        gblock_scale=gblock_scale,
        cu_seqlens_q=inputs.cu_seqlens_q,
        cu_seqlens_k=inputs.cu_seqlens_k,
        gk=gk,
        gv=gv,
    )
    double_kv_op.launch(of_blocks, problem, selection, of_kv, stream=call.stream)
    of_q = double_q_op.Args(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        ddq=ddq,
        ddk=ddk,
        ddv=ddv,
        dout=dout,
        lse=lse,
        delta=delta,
        ddlse=ddlse,
        ddelta=ddelta,
        blocks=blocks,
        slots=slots,
        block_scale=block_scale,
        ddblock_scale=ddblock_scale,
        cu_seqlens_q=inputs.cu_seqlens_q,
        cu_seqlens_k=inputs.cu_seqlens_k,
        gq=gq,
    )
    double_q_op.launch(last, problem, selection, of_q, stream=call.stream)


def jvp(
    call: Call,
    chosen: Chosen,
    inputs: Inputs,
    parts: Parts,
    tblock_scale: "View | None",
    out: "View",
    tout: "View",
    lse: "View",
    tlse: "View",
) -> None:
    """out and lse by the kernel of ``forward``, then their tangents tout and tlse."""
    if not any((*parts, tblock_scale)):
        forward(call, chosen, inputs, out, lse)
        call.fill(tout, 0.0)
        call.fill(tlse, 0.0)
        return
    call, [first, last], inputs, lists, block_scale = _ready(
        call, chosen, inputs, "sparse_forward", "sparse_double_backward_out", lists=False
    )
    problem, selection = call.problem, chosen.selection
    of_forward = _of_forward(inputs, lists, block_scale, out, lse)
    forward_op.launch(first, problem, selection, of_forward, stream=call.stream)
    tq, tk, tv = ready_parts(call, parts)
    blocks, slots = lists.of_queries()
    of_tangents = double_out_op.Args(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        ddq=tq,
        ddk=tk,
        ddv=tv,
        out=out,
        dout=None,
        lse=lse,
        dlse=None,
        blocks=blocks,
        slots=slots,
        block_scale=block_scale,
        ddblock_scale=call.dense(tblock_scale),
        cu_seqlens_q=inputs.cu_seqlens_q,
        cu_seqlens_k=inputs.cu_seqlens_k,
        ddout=tout,
        ddlse=tlse,
        delta=None,
        ddelta=None,
    )
    double_out_op.launch(last, problem, selection, of_tangents, stream=call.stream)
