"""Which kernels the functions of ``api_sparse`` launch, in order.

Every function here gets the views of a call, after its checks, and room for the results. All
kernels of a call are of one family: Numba's, if one of them has no CUDA row. A table of blocks that
the call did not bring is built first.
"""

from typing import NamedTuple

from rawattn import call, variants
from rawattn.arrays import Framework, View
from rawattn.call import Inputs, Parts
from rawattn.ops import backward_preprocess as preprocess_op
from rawattn.ops import sparse_backward_kv as kv_op
from rawattn.ops import sparse_backward_q as q_op
from rawattn.ops import sparse_double_backward_kv as double_kv_op
from rawattn.ops import sparse_double_backward_out as double_out_op
from rawattn.ops import sparse_double_backward_q as double_q_op
from rawattn.ops import sparse_forward as forward_op
from rawattn.ops import sparse_postprocess as postprocess_op
from rawattn.problem import Problem, Selection
from rawattn.tables import Lists, Source, lists_of

Passed = tuple[View, View, View, View | None]  # dout, out, lse and dlse
Direction = tuple[Parts, View | None]  # and like block_scale


class _Ready(NamedTuple):
    """The inputs of a call as kernels take them; the rows of its kernels, and their family."""

    rows: list[variants.Variant]
    family: str
    inner: tuple[View, View, View]  # q, k, v
    offsets: tuple[View, View]
    lists: Lists
    gate: View | None


def _ready(
    framework: Framework,
    problem: Problem,
    selection: Selection,
    source: Source,
    backend: str | None,
    stems: tuple[str, ...],
    inputs: Inputs,
    gate: View | None,
    lists: bool,
    stream: int,
) -> _Ready:
    """What the kernels ``stems`` share, with the ``lists`` of queries or without."""

    def row(stem: str) -> variants.Variant:
        return variants.select(stem, problem, backend=backend, selection=selection)

    rows = [row(stem) for stem in stems]
    backend = "numba" if any(row.family == "numba" for row in rows) else "cuda"
    if backend == "numba":
        rows = [row(stem) for stem in stems]
    q, k, v, offsets_q, offsets_k = call.ready(framework, inputs, stream)
    offsets = (offsets_q, offsets_k)
    table = lists_of(
        framework, problem, selection, source, offsets, backend, lists, inputs[0], stream
    )
    scale = None if gate is None else framework.dense(gate, stream)
    return _Ready(rows, backend, (q, k, v), offsets, table, scale)


def forward(
    framework: Framework,
    problem: Problem,
    selection: Selection,
    source: Source,
    backend: str | None,
    inputs: Inputs,
    gate: View | None,
    out: View,
    lse: View,
    stream: int,
) -> None:
    """out and lse."""
    shared = (framework, problem, selection, source, backend)
    ready = _ready(*shared, ("sparse_forward",), inputs, gate, False, stream)
    forward_op.launch(
        *(ready.rows[0], problem, selection, *ready.inner, *ready.lists.of_queries(), ready.gate),
        *(*ready.offsets, out, lse),
        stream=stream,
    )


def backward(
    framework: Framework,
    problem: Problem,
    selection: Selection,
    source: Source,
    backend: str | None,
    deterministic: bool,
    inputs: Inputs,
    gate: View | None,
    passed: Passed,
    grads: tuple[View, ...],
    of_gate: View | None,
    stream: int,
) -> None:
    """dq, dk, dv, and the gradient of block_scale in ``of_gate``.

    One kernel goes along the blocks of keys. dQ is gathered by atomic adds in a float32 workspace
    from the caller's allocator, as are dK and dV if lists of queries are cut into segments, which
    the kernel takes one by one; a last pass scales them and puts them into the dtype of the
    result. Deterministically, the kernel goes through all chunks of a block in order, and dQ has a
    pass of its own along the queries.
    """
    shared, like = (framework, problem, selection, source, backend), inputs[0]
    last = "sparse_backward_q" if deterministic else "sparse_postprocess"
    ready = _ready(*shared, ("sparse_backward_kv", last), inputs, gate, True, stream)
    of_blocks, of_rows = ready.rows
    dout, out, lse, dlse = _dense(framework, passed, stream)
    delta = framework.empty(lse.shape, lse.dtype, like)
    row = variants.select("backward_preprocess", problem, backend=ready.family)
    preprocess_op.launch(row, problem, out, dout, dlse, delta, None, stream=stream)
    if of_gate is not None:
        framework.fill(of_gate, 0.0, stream)

    def workspace(gradient: str) -> View:
        shape = postprocess_op.accum_shape(of_rows, problem, gradient)
        accum = framework.empty(shape, lse.dtype, like)
        framework.fill(accum, 0.0, stream)
        return accum

    dq, dk, dv = grads
    accums = [] if deterministic else [workspace("dq")]
    work = ready.lists.work
    if accums and selection.is_cut(problem):
        accums += [workspace("dk"), workspace("dv")]
    dq_accum = accums[0] if accums else None
    of_keys = (None, None, *accums[1:]) if len(accums) == 3 else (dk, dv, None, None)
    common = (problem, selection, *ready.inner, dout, lse, delta)
    kv_op.launch(
        *(of_blocks, *common, *ready.lists.of_keys(), work, ready.gate, of_gate, *ready.offsets),
        *(dq_accum, *of_keys),
        stream=stream,
    )
    scales = (problem.softmax_scale, problem.softmax_scale, 1.0)
    for accum, grad, scale in zip(accums, grads, scales, strict=False):
        postprocess_op.launch(of_rows, problem, accum, grad, scale=scale, stream=stream)
    if deterministic:
        of_queries = (*ready.lists.of_queries(), ready.gate, *ready.offsets)
        q_op.launch(of_rows, *common, *of_queries, dq, stream=stream)


def _dense(framework: Framework, passed: Passed, stream: int) -> Passed:
    """The passed arrays as kernels take them."""
    dout, out, lse, dlse = passed
    return (
        framework.rows(dout, stream),
        framework.rows(out, stream),
        framework.dense(lse, stream),
        None if dlse is None else framework.dense(dlse, stream),
    )


def _ready_direction(framework: Framework, direction: Direction, stream: int) -> Direction:
    """The direction as kernels take it."""
    parts, of_gate = direction
    dense = None if of_gate is None else framework.dense(of_gate, stream)
    return call.ready_parts(framework, parts, stream), dense


def double_backward(
    framework: Framework,
    problem: Problem,
    selection: Selection,
    source: Source,
    backend: str | None,
    inputs: Inputs,
    gate: View | None,
    direction: Direction,
    passed: Passed,
    results: list[View],
    stream: int,
) -> None:
    """ddout .. gv, and the gradient of block_scale behind them if there is one.

    The first pass goes along the queries and leaves the rows' sums D and W to the others: one along
    the blocks of keys, one along the queries again.
    """
    shared, like = (framework, problem, selection, source, backend), inputs[0]
    stems = [f"sparse_double_backward_{part}" for part in ("out", "kv", "q")]
    ready = _ready(*shared, (*stems,), inputs, gate, True, stream)
    first, of_blocks, last = ready.rows
    ddout, ddlse, gq, gk, gv = results[:5]
    of_gate = results[5] if len(results) == 6 else None
    if of_gate is not None:
        framework.fill(of_gate, 0.0, stream)
    parts, part_of_gate = _ready_direction(framework, direction, stream)
    dout, out, lse, dlse = _dense(framework, passed, stream)
    delta = framework.empty(lse.shape, lse.dtype, like)
    ddelta = framework.empty(lse.shape, lse.dtype, like)
    inner, gates = (problem, selection, *ready.inner, *parts), (ready.gate, part_of_gate)
    of_queries, of_keys = ready.lists.of_queries(), ready.lists.of_keys()
    double_out_op.launch(
        *(first, *inner, out, dout, lse, dlse, *of_queries, *gates, *ready.offsets),
        *(ddout, ddlse, delta, ddelta),
        stream=stream,
    )
    common = (*inner, dout, lse, delta, ddlse, ddelta)
    double_kv_op.launch(
        *(of_blocks, *common, *of_keys, *gates, of_gate, *ready.offsets, gk, gv), stream=stream
    )
    double_q_op.launch(*(last, *common, *of_queries, *gates, *ready.offsets, gq), stream=stream)


def jvp(
    framework: Framework,
    problem: Problem,
    selection: Selection,
    source: Source,
    backend: str | None,
    inputs: Inputs,
    gate: View | None,
    direction: Direction,
    results: tuple[View, View, View, View],
    stream: int,
) -> None:
    """out and lse by the kernel of ``sparse_forward``, then their tangents tout and tlse."""
    out, tout, lse, tlse = results
    shared = (framework, problem, selection, source, backend)
    if not any((*direction[0], direction[1])):
        forward(*shared, inputs, gate, out, lse, stream)
        framework.fill(tout, 0.0, stream)
        framework.fill(tlse, 0.0, stream)
        return
    stems = ("sparse_forward", "sparse_double_backward_out")
    ready = _ready(*shared, stems, inputs, gate, False, stream)
    parts, part_of_gate = _ready_direction(framework, direction, stream)
    first, last = ready.rows
    inner, of_queries = (problem, selection, *ready.inner), ready.lists.of_queries()
    forward_op.launch(
        *(first, *inner, *of_queries, ready.gate, *ready.offsets, out, lse), stream=stream
    )
    double_out_op.launch(
        *(last, *inner, *parts, out, None, lse, None, *of_queries, ready.gate, part_of_gate),
        *(*ready.offsets, tout, tlse, None, None),
        stream=stream,
    )
