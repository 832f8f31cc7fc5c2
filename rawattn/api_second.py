"""Second derivatives and forward mode: look at the arrays, check them, select kernels, launch.

Long for a module, since the contract of both functions stands in the docstrings. Per sequence and
query head, in the direction (tq, tk, tv) of (q, k, v), with S, P, O and s of ``api``:

    E = s (tq K^T + Q tk^T)      tlse_i = sum_j P_ij E_ij      tout = (P o E) V + P tv - tlse o O

E is the tangent of S; tlse and tout are those of L and O. The gradients of <ddq, dQ> + <ddk, dK> +
<ddv, dV> are the derivatives of (O, L, dQ, dK, dV) in direction (ddq, ddk, ddv), since second
derivatives are symmetric. The tiling is that of FlashAttention-2 (arXiv 2307.08691): P, E and what
follows from them are made anew in every pass, no array of size seqlen_q x seqlen_k.
"""

from typing import Any

from rawattn import arrays, call, passes
from rawattn.arrays import Array
from rawattn.call import Call, Parts, Passed, Window
from rawattn.reference import second


def double_backward(
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
    *,
    cu_seqlens_k: Array | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    max_seqlen: int | None = None,
    dlse: Array | None = None,
    deterministic: bool = False,
    ddout: Array | None = None,
    ddlse: Array | None = None,
    gq: Array | None = None,
    gk: Array | None = None,
    gv: Array | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[Any, Any, Any, Any, Any]:
    """Gradients of ``backward`` for the cotangents ddq, ddk and ddv of dq, dk and dv.

    With E of the direction (ddq, ddk, ddv), and with D, dP and dS = P o Z as in ``backward``:

        ddL_i = sum_j P_ij E_ij      ddO = (P o E) V + P ddv - ddL o O      W_i = dO_i . ddO_i
        P' = P o (E - ddL)           Z = dP - D          dS' = P' o Z + P o (dO ddv^T - W)
        gQ = s (dS' K + dS ddk)      gK = s (dS'^T Q + dS^T ddq)            gV = P'^T dO

    ddq, ddk, ddv: shaped like q, k, v and of their dtype, of any strides (an expanded array need
        not be copied). None is zero, and its products are left out.
    dout: (total_q, num_heads_q, head_dim_v) of q's dtype, as it was given to ``backward``.
    q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, max_seqlen, backend, validate:
        as in ``forward``.
    out: (total_q, num_heads_q, head_dim_v), lse: (num_heads_q, total_q) float32 (float64 for
        float64 inputs), what ``forward`` gave for the same q, k and v: unlike in ``backward`` they
        cannot be those of a larger attention, since ddL and W are sums over all its keys.
    dlse: (num_heads_q, total_q) of lse's dtype, as it was given to ``backward``; None is zero.
    deterministic: bitwise the same on every run: gq in a pass of its own, no atomic adds.
    ddout, ddlse, gq, gk, gv: arrays to write into, shaped like out, lse, q, k, v; must not overlap
        an input.

    Returns (ddout, ddlse, gq, gk, gv): the gradients with respect to dout, dlse, q, k and v, of
    their shapes and dtypes (ddlse also without dlse); gk and gv are summed over the query heads of
    a group in float32. out and lse count as functions of q, k and v: what passes through them is in
    gq, gk and gv. A query that may see no key has zeros. Raises as ``forward`` does.
    """
    framework, problem, inputs = call.problem_of(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, backend, validate
    )
    like, dtype, statistic = inputs[0], problem.dtype, call.statistic(problem.dtype)
    rows = (problem.total_q, problem.num_heads_q, problem.head_dim_v)
    direction = Parts(
        call.part_of(framework, ddq, "ddq", inputs[0], like),
        call.part_of(framework, ddk, "ddk", inputs[1], like),
        call.part_of(framework, ddv, "ddv", inputs[2], like),
    )
    passed = [
        call.view_like(framework, dout, "dout", rows, dtype, like),
        call.view_like(framework, out, "out", rows, dtype, like),
        call.view_like(framework, lse, "lse", rows[1::-1], statistic, like),
    ]
    if dlse is not None:
        passed.append(call.view_like(framework, dlse, "dlse", rows[1::-1], statistic, like))
    previous = arrays.enter_device(problem.device)
    try:
        stream = framework.stream(*inputs, *filter(None, direction), *passed)
        results = (
            call.output(framework, ddout, "ddout", rows, dtype, like),
            call.output(framework, ddlse, "ddlse", rows[1::-1], statistic, like),
            call.output(framework, gq, "gq", inputs[0].shape, dtype, like),
            call.output(framework, gk, "gk", inputs[1].shape, dtype, like),
            call.output(framework, gv, "gv", inputs[2].shape, dtype, like),
        )
        if call.is_empty(problem) or not any(direction):
            for result in results:
                framework.fill(result, 0.0, stream)
        elif call.by_reference(problem, backend):
            with arrays.on_stream(stream, problem.device):
                views = (*direction, passed[0], *inputs[:3], *passed[1:3], *inputs[3:])
                values = second.double_backward(
                    *map(call.neutral, views),
                    dlse=None if dlse is None else arrays.neutral(passed[3]),
                    **call.mask(problem),
                )
                call.store(values, results)
        else:
            targets = tuple(call.target(framework, result, like) for result in results)
            given = Call(framework, problem, backend, like, stream)
            of_lse = passed[3] if dlse is not None else None
            beside = Passed(passed[0], passed[1], passed[2], of_lse)
            passes.double_backward(given, deterministic, inputs, direction, beside, *targets)
            for result, target in zip(results, targets, strict=True):
                if target is not result:
                    framework.copy(result, target, stream)
        return (
            framework.finish(results[0]) if ddout is None else ddout,
            framework.finish(results[1]) if ddlse is None else ddlse,
            framework.finish(results[2]) if gq is None else gq,
            framework.finish(results[3]) if gk is None else gk,
            framework.finish(results[4]) if gv is None else gv,
        )
    finally:
        arrays.leave_device(previous)


def jvp(
    q: Array,
    k: Array,
    v: Array,
    tq: Array | None,
    tk: Array | None,
    tv: Array | None,
    cu_seqlens: Array,
    *,
    cu_seqlens_k: Array | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    max_seqlen: int | None = None,
    out: Array | None = None,
    tout: Array | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """``forward`` and its derivative in the direction (tq, tk, tv), in one pass.

        E = s (tq K^T + Q tk^T)      tlse_i = sum_j P_ij E_ij
        tout = (P o E) V + P tv - tlse o out

    q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, max_seqlen, backend, validate:
        as in ``forward``.
    tq, tk, tv: shaped like q, k, v and of their dtype, of any strides (an expanded array need not
        be copied). None is zero, and its products are left out.
    out, tout: arrays to write into, of the shape and dtype of the results; must not overlap an
        input.

    Returns (out, tout, lse, tlse): out and tout (total_q, num_heads_q, head_dim_v) of q's dtype,
    lse and tlse (num_heads_q, total_q) float32 (float64 for float64 inputs). A query that may see
    no key has out 0, lse -inf and tangents 0. Raises as ``forward`` does.
    """
    framework, problem, inputs = call.problem_of(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, backend, validate
    )
    like, dtype, statistic = inputs[0], problem.dtype, call.statistic(problem.dtype)
    direction = Parts(
        call.part_of(framework, tq, "tq", inputs[0], like),
        call.part_of(framework, tk, "tk", inputs[1], like),
        call.part_of(framework, tv, "tv", inputs[2], like),
    )
    previous = arrays.enter_device(problem.device)
    try:
        stream = framework.stream(*inputs, *filter(None, direction))
        rows = (problem.total_q, problem.num_heads_q, problem.head_dim_v)
        results = (
            call.output(framework, out, "out", rows, dtype, like),
            call.output(framework, tout, "tout", rows, dtype, like),
            framework.empty(rows[1::-1], statistic, like),
            framework.empty(rows[1::-1], statistic, like),
        )
        if call.by_reference(problem, backend):
            with arrays.on_stream(stream, problem.device):
                views = (*inputs[:3], *direction, *inputs[3:])
                call.store(second.jvp(*map(call.neutral, views), **call.mask(problem)), results)
        elif call.is_empty(problem):
            for result, value in zip(results, (0.0, 0.0, -float("inf"), 0.0), strict=True):
                framework.fill(result, value, stream)
        else:
            targets = tuple(call.target(framework, result, like) for result in results)
            given = Call(framework, problem, backend, like, stream)
            passes.jvp(given, False, inputs, direction, *targets)
            for result, target in zip(results, targets, strict=True):
                if target is not result:
                    framework.copy(result, target, stream)
        return (
            framework.finish(results[0]) if out is None else out,
            framework.finish(results[1]) if tout is None else tout,
            framework.finish(results[2]),
            framework.finish(results[3]),
        )
    finally:
        arrays.leave_device(previous)
