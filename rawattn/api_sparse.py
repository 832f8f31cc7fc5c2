"""Block-sparse attention and its derivatives: look at the arrays, check, select kernels, launch.

Long for a module, since the contracts of four functions stand in the docstrings. Every query sees
a few blocks of the keys of its sequence, which block_indices names: the selected branch of native
sparse attention (arXiv 2502.11089). Per sequence and query head, with g the number of the block
that key j lies in (``block_scale``, else 1) and s = ``softmax_scale``:

    S_ij = g s q_i . k_j      P = exp(S - L)      L = logsumexp over the allowed keys      O = P V

Everything else is as in ``api`` and ``api_second``, from the tiling of FlashAttention-2 (arXiv
2307.08691) on. Queries that share a selection go through its blocks together; gradients with
respect to keys go the other way, from a block to the queries that see it (``block_table``).
"""

from typing import Any, NamedTuple

from rawattn import api, arrays, call, checks, passes_sparse
from rawattn.arrays import Array, Framework, View
from rawattn.call import Call, Inputs, Parts, Passed, Window
from rawattn.passes_sparse import Chosen
from rawattn.problem import Problem, Selection
from rawattn.reference import sparse
from rawattn.tables import BlockTable, Source, named_blocks, selection_given

_OPEN = (-1, -1)


def sparse_forward(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens: Array,
    block_indices: Array | BlockTable,
    *,
    cu_seqlens_k: Array | None = None,
    block_size: int = 64,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Array | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    return_sliding: bool = False,
    window: Window | int | None = None,
    out: Array | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Any:
    """Attention of each query to selected blocks of the keys of its sequence.

    q, k, v, cu_seqlens, cu_seqlens_k, softmax_scale, out, backend, validate: as in ``forward``.
    block_indices: (total_q, num_heads_kv or num_heads_q, num_selected) int32 or int64: blocks of
        the query's own sequence. Block n is the keys from n * block_size on, and ends with the
        sequence. What lies outside of the sequence is padding, as -1 is, or num_blocks; a block
        that is named twice counts once. int64 is converted on the device, and what is no int32 is
        padding too. With num_heads_kv on the middle axis, the query heads of a group share a
        selection. Or a BlockTable of ``block_table``, so that nothing has to be built.
    block_size: keys of a block: 16, 32, 64 or 128.
    block_counts: (total_q, the middle axis of block_indices) int32 or int64: slots of a query from
        there on are padding. None: all count.
    include_own_block: each query also sees its own block, which holds key i + seqlen_k - seqlen_q,
        up to that key.
    causal: query i sees key j only if j <= i + seqlen_k - seqlen_q, whatever it has selected.
    block_scale: float32 (float64 for float64 inputs), of the shape of block_indices: factors on the
        scores of the blocks. A block that is named twice has the factor of the first slot, an own
        block that is not named 1. None: 1 everywhere.
    return_lse: also return the logsumexp.
    return_sliding: also return dense attention to a window, the sliding branch. Its gradients are
        those of ``backward`` with the same causal and window.
    window: of return_sliding: (left, right) as in ``forward``, or left alone for (left, 0); by
        default (block_size - 1, 0).

    Returns out (total_q, num_heads_q, head_dim_v) of q's dtype, or (out, lse) with lse
    (num_heads_q, total_q), natural logarithm, float32 (float64 for float64 inputs); with
    return_sliding (out, sliding_out) or (out, lse, sliding_out, sliding_lse). A query that may see
    no key has out 0 and lse -inf. A NaN or an infinity among the values of a block that some query
    selected may reach others of the same sequence that go through a tile with it; of blocks that
    nobody selected nothing is read. Nothing waits for the device. Raises as ``forward`` does.
    """
    framework, problem, inputs, selection, source, gate = _posed(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, softmax_scale, backend, validate,
        block_indices, block_counts, block_size, include_own_block, block_scale, lists=False,
    )  # fmt: skip
    like, dtype = inputs[0], problem.dtype
    if return_sliding:
        window = checks.sliding_window(window, selection.block_size, causal)
    previous = arrays.enter_device(problem.device)
    try:
        stream = framework.stream(*inputs, *source.views(), *filter(None, (gate,)))
        shape = (problem.total_q, problem.num_heads_q, problem.head_dim_v)
        result = call.output(framework, out, "out", shape, dtype, like)
        lse = framework.empty(shape[1::-1], call.statistic(dtype), like)
        if call.is_empty(problem, selection):
            framework.fill(result, 0.0, stream)
            framework.fill(lse, -float("inf"), stream)
        elif call.by_reference(problem, backend):
            with arrays.on_stream(stream, problem.device):
                options = _options(problem, selection, source, inputs, gate)
                call.store(sparse.forward(*map(arrays.neutral, inputs), **options), (result, lse))
        else:
            target = call.target(framework, result, like)
            given = Call(framework, problem, backend, like, stream)
            passes_sparse.forward(given, Chosen(selection, source, gate), inputs, target, lse)
            if target is not result:
                framework.copy(result, target, stream)
        answer = framework.finish(result) if out is None else out
        answers = (answer, framework.finish(lse)) if return_lse else (answer,)
    finally:
        arrays.leave_device(previous)
    if return_sliding:
        near = api.forward(
            *(q, k, v, cu_seqlens),
            cu_seqlens_k=cu_seqlens_k,
            causal=causal,
            window=window,  # type: ignore[arg-type]
            softmax_scale=softmax_scale,
            return_lse=return_lse,
            backend=backend,
        )
        answers += near if return_lse else (near,)
    return answers if len(answers) > 1 else answers[0]


def sparse_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    cu_seqlens: Array,
    block_indices: Array | BlockTable,
    *,
    cu_seqlens_k: Array | None = None,
    block_size: int = 64,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Array | None = None,
    softmax_scale: float | None = None,
    dlse: Array | None = None,
    deterministic: bool = False,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """Gradients of ``sparse_forward`` for the cotangents dout of out and dlse of lse.

        D_i = dO_i . O_i - dL_i      dP = dO V^T      dS = P o (dP - D)      dV = P^T dO
        dQ = s (g o dS) K            dK = s (g o dS)^T Q      dg = s sum dS_ij q_i . k_j

    where the last sum is over the keys of the block, and the query heads that share the selection.

    q, k, v, cu_seqlens, block_indices, cu_seqlens_k, block_size, block_counts, include_own_block,
        causal, block_scale, softmax_scale, backend, validate: as in ``sparse_forward``. A
        BlockTable has to have lists (``block_table``).
    dout: (total_q, num_heads_q, head_dim_v) of q's dtype.
    out: (total_q, num_heads_q, head_dim_v), lse: (num_heads_q, total_q) float32 (float64 for
        float64 inputs), used as passed: with those of a larger attention, of which these blocks are
        a part, the result is this part's share of the gradients.
    dlse: (num_heads_q, total_q) of lse's dtype; None is zero.
    deterministic: bitwise the same on every run: no floating-point atomics, dq in a pass of its
        own.
    dq, dk, dv: arrays to write into, shaped like q, k, v; must not overlap an input.

    Returns (dq, dk, dv, dblock_scale): shaped like q, k, v and of their dtype, and like block_scale
    (None without it). dk and dv are summed over the query heads of a group in float32.
    dblock_scale is 0 where a slot is padding, or names a block again. Raises as ``forward`` does.
    """
    framework, problem, inputs, selection, source, gate = _posed(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, softmax_scale, backend, validate,
        block_indices, block_counts, block_size, include_own_block, block_scale, lists=True,
    )  # fmt: skip
    like, dtype = inputs[0], problem.dtype
    passed = _passed(framework, problem, dout, out, lse, dlse, like)
    previous = arrays.enter_device(problem.device)
    try:
        waits = (gate, *passed)
        stream = framework.stream(*inputs, *source.views(), *filter(None, waits))
        grads = (
            call.output(framework, dq, "dq", inputs[0].shape, dtype, like),
            call.output(framework, dk, "dk", inputs[1].shape, dtype, like),
            call.output(framework, dv, "dv", inputs[2].shape, dtype, like),
        )
        of_gate = None if gate is None else framework.empty(gate.shape, gate.dtype, like)
        results = grads if of_gate is None else (*grads, of_gate)
        if call.is_empty(problem, selection):
            for result in results:
                framework.fill(result, 0.0, stream)
        elif call.by_reference(problem, backend):
            with arrays.on_stream(stream, problem.device):
                views = (passed[0], *inputs[:3], *passed[1:3], *inputs[3:])
                values = sparse.backward(
                    *map(call.neutral, views),
                    dlse=call.neutral(passed[3]),
                    **_options(problem, selection, source, inputs, gate),
                )
                call.store(values[: len(results)], results)
        else:
            targets = tuple(call.target(framework, grad, like) for grad in grads)
            given = Call(framework, problem, backend, like, stream)
            chosen = Chosen(selection, source, gate)
            of_q, of_k, of_v = targets
            passes_sparse.backward(
                given, chosen, deterministic, inputs, passed, of_q, of_k, of_v, of_gate
            )
            for grad, target in zip(grads, targets, strict=True):
                if target is not grad:
                    framework.copy(grad, target, stream)
        return (
            framework.finish(grads[0]) if dq is None else dq,
            framework.finish(grads[1]) if dk is None else dk,
            framework.finish(grads[2]) if dv is None else dv,
            None if of_gate is None else framework.finish(of_gate),
        )
    finally:
        arrays.leave_device(previous)


def sparse_double_backward(
    ddq: Array | None,
    ddk: Array | None,
    ddv: Array | None,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    cu_seqlens: Array,
    block_indices: Array | BlockTable,
    *,
    ddblock_scale: Array | None = None,
    cu_seqlens_k: Array | None = None,
    block_size: int = 64,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Array | None = None,
    softmax_scale: float | None = None,
    dlse: Array | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Gradients of ``sparse_backward`` for the cotangents of dq, dk, dv and dblock_scale.

    With t = ddblock_scale, D, dP and dS = P o Z as in ``sparse_backward``:

        E = g o s (ddq K^T + Q ddk^T) + t o s Q K^T        ddL_i = sum_j P_ij E_ij
        ddO = (P o E) V + P ddv - ddL o O                  W_i = dO_i . ddO_i
        P' = P o (E - ddL)      Z = dP - D      dS' = P' o Z + P o (dO ddv^T - W)
        gQ = s ((g o dS' + t o dS) K + (g o dS) ddk)       gV = P'^T dO
        gK = s ((g o dS' + t o dS)^T Q + (g o dS)^T ddq)
        gg = s sum (dS'_ij q_i . k_j + dS_ij (ddq_i . k_j + q_i . ddk_j))

    where the last sum is over the keys of the block, and the query heads that share the selection.

    ddq, ddk, ddv: shaped like q, k, v and of their dtype, of any strides. None is zero.
    ddblock_scale: of the shape and dtype of block_scale, and only beside it. None is zero.
    dout, dlse: as they were given to ``sparse_backward``.
    q, k, v, cu_seqlens, block_indices, cu_seqlens_k, block_size, block_counts, include_own_block,
        causal, block_scale, softmax_scale, backend, validate: as in ``sparse_backward``.
    out, lse: what ``sparse_forward`` gave for the same arrays: they cannot be those of a larger
        attention, since ddL and W are sums over all its keys.
    deterministic: accepted for the sake of the other signatures; there are no atomics either way.

    Returns (ddout, ddlse, gq, gk, gv, gblock_scale): the gradients with respect to dout, dlse, q,
    k, v and block_scale, of their shapes and dtypes (ddlse also without dlse; gblock_scale None
    without block_scale). out and lse count as functions of q, k, v and block_scale. A query that
    may see no key has zeros. Raises as ``forward`` does.
    """
    framework, problem, inputs, selection, source, gate = _posed(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, softmax_scale, backend, validate,
        block_indices, block_counts, block_size, include_own_block, block_scale, lists=True,
    )  # fmt: skip
    like, dtype, statistic = inputs[0], problem.dtype, call.statistic(problem.dtype)
    checks.beside_block_scale("ddblock_scale", ddblock_scale is not None, gate is not None)
    parts = Parts(
        call.part_of(framework, ddq, "ddq", inputs[0], like),
        call.part_of(framework, ddk, "ddk", inputs[1], like),
        call.part_of(framework, ddv, "ddv", inputs[2], like),
    )
    part_of_gate = _scale(framework, selection, problem, ddblock_scale, "ddblock_scale", like)
    passed = _passed(framework, problem, dout, out, lse, dlse, like)
    previous = arrays.enter_device(problem.device)
    try:
        waits = (gate, *parts, part_of_gate, *passed)
        stream = framework.stream(*inputs, *source.views(), *filter(None, waits))
        results = [
            framework.empty(
                (problem.total_q, problem.num_heads_q, problem.head_dim_v), dtype, like
            ),
            framework.empty((problem.num_heads_q, problem.total_q), statistic, like),
            *(framework.empty(tuple(view.shape), dtype, like) for view in inputs[:3]),
        ]
        if gate is not None:
            results.append(framework.empty(tuple(gate.shape), gate.dtype, like))
        if call.is_empty(problem, selection) or not any((*parts, part_of_gate)):
            for result in results:
                framework.fill(result, 0.0, stream)
        elif call.by_reference(problem, backend):
            with arrays.on_stream(stream, problem.device):
                views = (*parts, passed[0], *inputs[:3], *passed[1:3], *inputs[3:])
                values = sparse.double_backward(
                    *map(call.neutral, views),
                    ddblock_scale=call.neutral(part_of_gate),
                    dlse=call.neutral(passed[3]),
                    **_options(problem, selection, source, inputs, gate),
                )
                call.store(values[: len(results)], tuple(results))
        else:
            given = Call(framework, problem, backend, like, stream)
            chosen = Chosen(selection, source, gate)
            ddout, ddlse, gq, gk, gv, *gg = results
            of_gate = gg[0] if gg else None
            passes_sparse.double_backward(
                *(given, chosen, inputs, parts, part_of_gate, passed),
                *(ddout, ddlse, gq, gk, gv, of_gate),
            )
        ddout, ddlse, gq, gk, gv, *gg = map(framework.finish, results)
        return ddout, ddlse, gq, gk, gv, gg[0] if gg else None
    finally:
        arrays.leave_device(previous)


def sparse_jvp(
    q: Array,
    k: Array,
    v: Array,
    tq: Array | None,
    tk: Array | None,
    tv: Array | None,
    cu_seqlens: Array,
    block_indices: Array | BlockTable,
    *,
    tblock_scale: Array | None = None,
    cu_seqlens_k: Array | None = None,
    block_size: int = 64,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Array | None = None,
    softmax_scale: float | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """``sparse_forward`` and its derivative in the direction (tq, tk, tv, tblock_scale).

        E = g o s (tq K^T + Q tk^T) + tblock_scale o s Q K^T      tlse_i = sum_j P_ij E_ij
        tout = (P o E) V + P tv - tlse o out

    q, k, v, cu_seqlens, block_indices, cu_seqlens_k, block_size, block_counts, include_own_block,
        causal, block_scale, softmax_scale, backend, validate: as in ``sparse_forward``.
    tq, tk, tv: shaped like q, k, v and of their dtype, of any strides. None is zero.
    tblock_scale: of the shape and dtype of block_scale, and only beside it. None is zero.

    Returns (out, tout, lse, tlse): out and tout (total_q, num_heads_q, head_dim_v) of q's dtype,
    lse and tlse (num_heads_q, total_q) float32 (float64 for float64 inputs). A query that may see
    no key has out 0, lse -inf and tangents 0. Raises as ``forward`` does.
    """
    framework, problem, inputs, selection, source, gate = _posed(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, softmax_scale, backend, validate,
        block_indices, block_counts, block_size, include_own_block, block_scale, lists=False,
    )  # fmt: skip
    like, dtype, statistic = inputs[0], problem.dtype, call.statistic(problem.dtype)
    checks.beside_block_scale("tblock_scale", tblock_scale is not None, gate is not None)
    parts = Parts(
        call.part_of(framework, tq, "tq", inputs[0], like),
        call.part_of(framework, tk, "tk", inputs[1], like),
        call.part_of(framework, tv, "tv", inputs[2], like),
    )
    part_of_gate = _scale(framework, selection, problem, tblock_scale, "tblock_scale", like)
    previous = arrays.enter_device(problem.device)
    try:
        waits = (gate, *parts, part_of_gate)
        stream = framework.stream(*inputs, *source.views(), *filter(None, waits))
        rows = (problem.total_q, problem.num_heads_q, problem.head_dim_v)
        results = (
            framework.empty(rows, dtype, like),
            framework.empty(rows, dtype, like),
            framework.empty(rows[1::-1], statistic, like),
            framework.empty(rows[1::-1], statistic, like),
        )
        if call.is_empty(problem, selection):
            for result, value in zip(results, (0.0, 0.0, -float("inf"), 0.0), strict=True):
                framework.fill(result, value, stream)
        elif call.by_reference(problem, backend):
            with arrays.on_stream(stream, problem.device):
                views = (*inputs[:3], *parts, *inputs[3:])
                values = sparse.jvp(
                    *map(call.neutral, views),
                    tblock_scale=call.neutral(part_of_gate),
                    **_options(problem, selection, source, inputs, gate),
                )
                call.store(values, results)
        else:
            given = Call(framework, problem, backend, like, stream)
            chosen = Chosen(selection, source, gate)
            passes_sparse.jvp(given, chosen, inputs, parts, part_of_gate, *results)
        out, tout, lse, tlse = map(framework.finish, results)
        return out, tout, lse, tlse
    finally:
        arrays.leave_device(previous)


# ---- look and check ---------------------------------------------------------------------------


class _Posed(NamedTuple):
    """What every function looks at first."""

    framework: Framework
    problem: Problem
    inputs: Inputs
    selection: Selection
    source: Source
    gate: View | None


def _posed(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens: Array,
    cu_seqlens_k: Array | None,
    causal: bool,
    softmax_scale: float | None,
    backend: str | None,
    validate: bool,
    block_indices: Array | BlockTable,
    block_counts: Array | None,
    block_size: int,
    include_own_block: bool,
    block_scale: Array | None,
    *,
    lists: bool,
) -> _Posed:
    """Views of what every call has, and the Problem and the Selection that they pose."""
    framework, problem, inputs = call.problem_of(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, _OPEN, softmax_scale, backend, validate
    )
    like = inputs[0]
    selection, source = selection_given(
        framework, problem, block_indices, block_counts, block_size, include_own_block, causal,
        lists, like,
    )  # fmt: skip
    gate = _scale(framework, selection, problem, block_scale, "block_scale", like)
    return _Posed(framework, problem, inputs, selection, source, gate)


def _scale(
    framework: Framework,
    selection: Selection,
    problem: Problem,
    array: Array | None,
    name: str,
    like: View,
) -> View | None:
    """View of block_scale, or of its direction."""
    if array is None:
        return None
    shape = (problem.total_q, selection.num_heads_sel, selection.num_selected)
    return call.view_like(framework, array, name, shape, call.statistic(problem.dtype), like)


def _passed(
    framework: Framework,
    problem: Problem,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    like: View,
) -> Passed:
    """Views of the cotangents and of what the forward gave."""
    shape = (problem.total_q, problem.num_heads_q, problem.head_dim_v)
    dtype, statistic = problem.dtype, call.statistic(problem.dtype)
    of_lse = None
    if dlse is not None:
        of_lse = call.view_like(framework, dlse, "dlse", shape[1::-1], statistic, like)
    return Passed(
        call.view_like(framework, dout, "dout", shape, dtype, like),
        call.view_like(framework, out, "out", shape, dtype, like),
        call.view_like(framework, lse, "lse", shape[1::-1], statistic, like),
        of_lse,
    )


# ---- the reference ----------------------------------------------------------------------------


def _options(
    problem: Problem, selection: Selection, source: Source, inputs: Inputs, gate: View | None
) -> dict[str, Any]:
    """What the reference wants to know beside the arrays of dense attention."""
    options = named_blocks(problem, selection, source, *inputs[3:])
    return options | {"block_scale": call.neutral(gate), "softmax_scale": problem.softmax_scale}
