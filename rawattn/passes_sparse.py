"""Which kernels the functions of ``api_sparse`` launch, in order.

As in ``passes``. All kernels of a call are of one family: Numba's, if one of them has no CUDA row.
A table of blocks that the call did not bring is built first.
"""

from typing import NamedTuple

from rawattn.arrays import View
from rawattn.call import Call, Inputs, Parts, Passed
from rawattn.ops import backward_preprocess as preprocess_op
from rawattn.ops import sparse_backward_kv as kv_op
from rawattn.ops import sparse_backward_q as q_op
from rawattn.ops import sparse_double_backward_kv as double_kv_op
from rawattn.ops import sparse_double_backward_out as double_out_op
from rawattn.ops import sparse_double_backward_q as double_q_op
from rawattn.ops import sparse_forward as forward_op
from rawattn.ops import sparse_postprocess as postprocess_op
from rawattn.passes import family_of, ready, ready_passed
from rawattn.problem import Selection
from rawattn.tables import Lists, Source, lists_of
from rawattn.variants import Variant


class Chosen(NamedTuple):
    """Which blocks a call attends to, and the factors on their scores."""

    selection: Selection
    source: Source
    block_scale: View | None


class _Ready(NamedTuple):
    """The inputs of a call as kernels take them, and the rows of its kernels."""

    call: Call  # of their family
    rows: list[Variant]
    inner: tuple[View, View, View]  # q, k, v
    offsets: tuple[View, View]
    lists: Lists
    block_scale: View | None


def _ready(
    call: Call, chosen: Chosen, stems: tuple[str, ...], inputs: Inputs, lists: bool
) -> _Ready:
    """What the kernels ``stems`` share, with the ``lists`` of queries or without."""
    selection, source, block_scale = chosen
    rows = [call.row(stem, selection=selection) for stem in stems]
    backend = "numba" if "numba" in map(family_of, rows) else "cuda"
    call = call._replace(backend=backend)
    if backend == "numba":
        rows = [call.row(stem, selection=selection) for stem in stems]
    q, k, v, offsets_q, offsets_k = ready(call, inputs)
    offsets = (offsets_q, offsets_k)
    table = lists_of(call, selection, source, offsets, lists)
    return _Ready(call, rows, (q, k, v), offsets, table, call.dense(block_scale))


def forward(call: Call, chosen: Chosen, inputs: Inputs, out: View, lse: View) -> None:
    """out and lse."""
    x = _ready(call, chosen, ("sparse_forward",), inputs, False)
    arguments = (*x.inner, *x.lists.of_queries(), x.block_scale, *x.offsets, out, lse)
    forward_op.launch(x.rows[0], call.problem, chosen.selection, *arguments, stream=call.stream)


def backward(
    call: Call,
    chosen: Chosen,
    deterministic: bool,
    inputs: Inputs,
    passed: Passed,
    dq: View,
    dk: View,
    dv: View,
    dblock_scale: View | None,
) -> None:
    """dq, dk, dv, and dblock_scale if there is one.

    One kernel goes along the blocks of keys. dQ is gathered by atomic adds in a float32 workspace
    from the caller's allocator, as are dK and dV if lists of queries are cut into segments, which
    the kernel takes one by one; a last pass scales them and puts them into the dtype of the
    result. Deterministically, the kernel goes through all chunks of a block in order, and dQ has a
    pass of its own along the queries.
    """
    last = "sparse_backward_q" if deterministic else "sparse_postprocess"
    x = _ready(call, chosen, ("sparse_backward_kv", last), inputs, True)
    call, selection = x.call, chosen.selection
    of_blocks, of_rows = x.rows
    problem, stream = call.problem, call.stream
    dout, out, lse, dlse = ready_passed(call, passed)
    delta = call.empty(lse.shape, lse.dtype)
    row = call.row("backward_preprocess")
    preprocess_op.launch(row, problem, out, dout, dlse, delta, None, stream=stream)
    if dblock_scale is not None:
        call.fill(dblock_scale, 0.0)

    def workspace(gradient: str) -> View:
        shape = postprocess_op.accum_shape(of_rows, problem, gradient)
        accum = call.empty(shape, lse.dtype)
        call.fill(accum, 0.0)
        return accum

    accums = [] if deterministic else [workspace("dq")]
    if accums and selection.is_cut(problem):
        accums += [workspace("dk"), workspace("dv")]
    dq_accum = accums[0] if accums else None
    of_keys = (None, None, *accums[1:]) if len(accums) == 3 else (dk, dv, None, None)
    common = (problem, selection, *x.inner, dout, lse, delta)
    lists = (*x.lists.of_keys(), x.lists.work)
    scales = (x.block_scale, dblock_scale)
    kv_op.launch(of_blocks, *common, *lists, *scales, *x.offsets, dq_accum, *of_keys, stream=stream)
    factors = (problem.softmax_scale, problem.softmax_scale, 1.0)
    for accum, grad, scale in zip(accums, (dq, dk, dv), factors, strict=False):
        postprocess_op.launch(of_rows, problem, accum, grad, scale=scale, stream=stream)
    if deterministic:
        of_queries = (*x.lists.of_queries(), x.block_scale, *x.offsets)
        q_op.launch(of_rows, *common, *of_queries, dq, stream=stream)


def double_backward(
    call: Call,
    chosen: Chosen,
    inputs: Inputs,
    parts: Parts,
    ddblock_scale: View | None,
    passed: Passed,
    ddout: View,
    ddlse: View,
    gq: View,
    gk: View,
    gv: View,
    gblock_scale: View | None,
) -> None:
    """ddout .. gv, and gblock_scale if there is one.

    The first pass goes along the queries and leaves the rows' sums D and W to the others: one along
    the blocks of keys, one along the queries again.
    """
    stems = [f"sparse_double_backward_{part}" for part in ("out", "kv", "q")]
    x = _ready(call, chosen, (*stems,), inputs, True)
    call, stream = x.call, call.stream
    first, of_blocks, last = x.rows
    if gblock_scale is not None:
        call.fill(gblock_scale, 0.0)
    directions = map(call.rows, parts)
    scales = (x.block_scale, call.dense(ddblock_scale))
    dout, out, lse, dlse = ready_passed(call, passed)
    delta, ddelta = call.empty(lse.shape, lse.dtype), call.empty(lse.shape, lse.dtype)
    inner = (call.problem, chosen.selection, *x.inner, *directions)
    of_queries = (*x.lists.of_queries(), *scales, *x.offsets)
    sums = (ddout, ddlse, delta, ddelta)
    double_out_op.launch(first, *inner, out, dout, lse, dlse, *of_queries, *sums, stream=stream)
    common = (*inner, dout, lse, delta, ddlse, ddelta)
    of_keys = (*x.lists.of_keys(), *scales, gblock_scale, *x.offsets)
    double_kv_op.launch(of_blocks, *common, *of_keys, gk, gv, stream=stream)
    double_q_op.launch(last, *common, *of_queries, gq, stream=stream)


def jvp(
    call: Call,
    chosen: Chosen,
    inputs: Inputs,
    parts: Parts,
    tblock_scale: View | None,
    out: View,
    tout: View,
    lse: View,
    tlse: View,
) -> None:
    """out and lse by the kernel of ``sparse_forward``, then their tangents tout and tlse."""
    if not any((*parts, tblock_scale)):
        forward(call, chosen, inputs, out, lse)
        call.fill(tout, 0.0)
        call.fill(tlse, 0.0)
        return
    stems = ("sparse_forward", "sparse_double_backward_out")
    x = _ready(call, chosen, stems, inputs, False)
    call, stream = x.call, call.stream
    first, last = x.rows
    inner, of_queries = (call.problem, chosen.selection, *x.inner), x.lists.of_queries()
    forward_op.launch(
        first, *inner, *of_queries, x.block_scale, *x.offsets, out, lse, stream=stream
    )
    scales = (x.block_scale, call.dense(tblock_scale))
    rows = (*map(call.rows, parts), out, None, lse, None)
    double_out_op.launch(
        last, *inner, *rows, *of_queries, *scales, *x.offsets, tout, tlse, None, None, stream=stream
    )
