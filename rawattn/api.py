"""Attention and its gradient: look at the arrays, check them, select the kernels, launch them.

Long for a module, since the contract of the package stands in the docstrings.

Packed ("varlen") attention: the tokens of all sequences lie one after the other along the first
axis, and ``cu_seqlens`` says where each sequence begins. Per sequence and query head, with
s = ``softmax_scale`` and query head h reading key/value head h // (num_heads_q // num_heads_kv):

    S = s Q K^T      P = exp(S - L)      L = logsumexp over the allowed keys      O = P V

The algorithm is that of FlashAttention-2 (arXiv 2307.08691): no array of size seqlen_q x seqlen_k.
"""

from functools import lru_cache
from typing import Any

from rawattn import arrays, call, checks, passes, variants
from rawattn.arrays import Array, Shape, framework_of
from rawattn.call import Call, Passed, Window
from rawattn.problem import Problem
from rawattn.reference import dense


def forward(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens: Array,
    *,
    cu_seqlens_k: Array | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    max_seqlen: int | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> Any:
    """Attention within each sequence of a packed batch.

    Arrays are all CuPy, all torch, all JAX, all Numba or all NumPy, on one device; the results are
    of the same library, from its allocator, computed on its current stream. Nothing waits for the
    device, so the call can be captured in a CUDA graph.

    q: (total_q, num_heads_q, head_dim) float16, bfloat16, float32 or float64. Token and head
        strides are free; a last stride other than 1 costs a copy.
    k: (total_k, num_heads_kv, head_dim), v: (total_k, num_heads_kv, head_dim_v), of q's dtype.
        Head sizes are multiples of 8 up to 256; num_heads_q is a multiple of num_heads_kv.
    cu_seqlens: (batch + 1,) int32 or int64, the running sum of the query lengths, from 0. Repeated
        offsets are empty sequences; rows from cu_seqlens[-1] on belong to no sequence.
    cu_seqlens_k: the same for the keys; by default cu_seqlens.
    causal: query i sees key j only if j <= i + seqlen_k - seqlen_q: the last query sees all keys.
    window: (left, right), inclusive distances from i + seqlen_k - seqlen_q; -1 is open.
        ``causal`` caps right at 0.
    softmax_scale: positive factor on the scores, by default head_dim ** -0.5.
    max_seqlen: accepted for the sake of other signatures; not needed.
    return_lse: also return the logsumexp.
    out: array to write into, of the shape and dtype of the result; must not overlap an input.
    backend: None (the best there is), "cuda", "numba" or "reference" (float64, reads cu_seqlens).
    validate: read cu_seqlens back and check its content, which waits for the device.

    Returns out (total_q, num_heads_q, head_dim_v) of q's dtype, or (out, lse) with lse
    (num_heads_q, total_q), natural logarithm, float32 (float64 for float64 inputs). A query that
    may see no key has out 0 and lse -inf.

    Raises TypeError (library, dtype, kind of argument), ValueError (shape, device, value) or
    RuntimeError (nothing here can run it), each with the remedy.
    """
    framework, problem, inputs = call.problem_of(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, backend, validate
    )
    like = inputs[0]
    previous = arrays.enter_device(problem.device)
    try:
        stream = framework.stream(*inputs)
        dtype, shape = problem.dtype, (problem.total_q, problem.num_heads_q, problem.head_dim_v)
        if out is None:
            result = framework.empty(shape, dtype, like)
        else:
            result = call.output(framework, out, "out", shape, dtype, like)
        lse = framework.empty(shape[1::-1], call.statistic(dtype), like)
        if call.by_reference(problem, backend):
            with arrays.on_stream(stream, problem.device):
                values = dense.forward(*map(arrays.neutral, inputs), **call.mask(problem))
                call.store(values, (result, lse))
        elif call.is_empty(problem):
            framework.fill(result, 0.0, stream)
            framework.fill(lse, -float("inf"), stream)
        else:
            target = result if out is None else call.target(framework, result, like)
            given = Call(framework, problem, backend, like, stream)
            passes.forward(given, inputs, target, lse)
            if target is not result:
                framework.copy(result, target, stream)
        answer = framework.finish(result) if out is None else out
        return (answer, framework.finish(lse)) if return_lse else answer
    finally:
        arrays.leave_device(previous)


def backward_preprocess(
    out: Array,
    dout: Array,
    *,
    dlse: Array | None = None,
    delta: Array | None = None,
    backend: str | None = None,
) -> Any:
    """The row term of the softmax derivative: D_i = dO_i . O_i - dL_i, in float32.

    ``backward`` computes it by itself; this step is public for those who schedule their own passes.

    out, dout: (total_q, num_heads_q, head_dim_v), of one dtype.
    dlse: (num_heads_q, total_q) cotangent of lse, float32 (float64 beside float64); None is zero.
    delta: array to write into, of the shape and dtype of the result.
    backend: as in ``forward``.

    Returns delta (num_heads_q, total_q) float32, float64 for float64 inputs. Raises as ``forward``.
    """
    framework = framework_of(out, "out")
    result = framework.view(out, "out")
    problem = _pose_preprocess(result.shape, result.dtype, result.device, backend)
    shape, dtype = result.shape, result.dtype
    inputs = [result, call.view_like(framework, dout, "dout", shape, dtype, result)]
    if dlse is not None:
        view = call.view_like(framework, dlse, "dlse", shape[1::-1], call.statistic(dtype), result)
        inputs.append(view)
    previous = arrays.enter_device(problem.device)
    try:
        stream = framework.stream(*inputs)
        sums = call.output(framework, delta, "delta", shape[1::-1], call.statistic(dtype), result)
        if call.by_reference(problem, backend):
            with arrays.on_stream(stream, problem.device):
                call.store((_delta(*map(arrays.neutral, inputs)),), (sums,))
        elif problem.total_q:
            target = call.target(framework, sums, result)
            given = Call(framework, problem, backend, result, stream)
            of_lse = inputs[2] if dlse is not None else None
            passes.backward_preprocess(given, inputs[0], inputs[1], of_lse, target)
            if target is not sums:
                framework.copy(sums, target, stream)
        return framework.finish(sums) if delta is None else delta
    finally:
        arrays.leave_device(previous)


def backward(
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
    method: str | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[Any, Any, Any]:
    """Gradients of ``forward`` for the cotangents dout of out and dlse of lse.

        D_i = dO_i . O_i - dL_i      dP = dO V^T      dS = P o (dP - D)
        dQ = s dS K                  dK = s dS^T Q    dV = P^T dO

    dout: (total_q, num_heads_q, head_dim_v) of q's dtype.
    q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, max_seqlen, backend, validate:
        as in ``forward``.
    out: (total_q, num_heads_q, head_dim_v), lse: (num_heads_q, total_q) float32 (float64 for
        float64 inputs), used as passed: with those of a larger attention, of which these keys are
        a part, the result is this part's share of the gradients.
    dlse: (num_heads_q, total_q) of lse's dtype; None is zero.
    deterministic: bitwise the same on every run: no floating-point atomics, method "two_pass".
    method: None (the fastest), "atomic_dq" (key tiles outer, dQ by float32 atomic adds),
        "atomic_dkv" (query tiles outer, dK and dV by float32 atomic adds) or "two_pass" (no
        atomics).
    dq, dk, dv: arrays to write into, shaped like q, k, v; must not overlap an input.

    Returns (dq, dk, dv), shaped like q, k, v and of their dtype; dk and dv are summed over the
    query heads of a group in float32. Raises as ``forward`` does.
    """
    framework, problem, inputs = call.problem_of(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, backend, validate
    )
    checks.method(method, deterministic)
    like, dtype = inputs[0], problem.dtype
    rows = (problem.total_q, problem.num_heads_q, problem.head_dim_v)
    cotangent = call.view_like(framework, dout, "dout", rows, dtype, like)
    passed = [
        call.view_like(framework, out, "out", rows, dtype, like),
        call.view_like(framework, lse, "lse", rows[1::-1], call.statistic(dtype), like),
    ]
    if dlse is not None:
        passed.append(
            call.view_like(framework, dlse, "dlse", rows[1::-1], call.statistic(dtype), like)
        )
    previous = arrays.enter_device(problem.device)
    try:
        stream = framework.stream(*inputs, cotangent, *passed)
        grads = (
            call.output(framework, dq, "dq", inputs[0].shape, dtype, like),
            call.output(framework, dk, "dk", inputs[1].shape, dtype, like),
            call.output(framework, dv, "dv", inputs[2].shape, dtype, like),
        )
        if call.by_reference(problem, backend):
            with arrays.on_stream(stream, problem.device):
                views = (cotangent, *inputs[:3], *passed[:2], *inputs[3:])
                cotangent_of_lse = arrays.neutral(passed[2]) if dlse is not None else None
                values = dense.backward(
                    *map(arrays.neutral, views), dlse=cotangent_of_lse, **call.mask(problem)
                )
                call.store(values, grads)
        elif call.is_empty(problem):
            for grad in grads:
                framework.fill(grad, 0.0, stream)
        else:
            targets = tuple(call.target(framework, grad, like) for grad in grads)
            method = variants.method_of(problem, method, deterministic)
            given = Call(framework, problem, backend, like, stream)
            of_lse = passed[2] if dlse is not None else None
            beside = Passed(cotangent, passed[0], passed[1], of_lse)
            passes.backward(given, method, inputs, beside, *targets)
            for grad, target in zip(grads, targets, strict=True):
                if target is not grad:
                    framework.copy(grad, target, stream)
        return (
            framework.finish(grads[0]) if dq is None else dq,
            framework.finish(grads[1]) if dk is None else dk,
            framework.finish(grads[2]) if dv is None else dv,
        )
    finally:
        arrays.leave_device(previous)


# ---- the row term -----------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _pose_preprocess(out: Shape, dtype: str, device: int, backend: str | None) -> Problem:
    """The Problem of backward_preprocess, which knows of out alone: no keys, one sequence."""
    checks.rank("out", out)
    checks.dtype("out", dtype)
    checks.head_dim("out", out[2])
    checks.heads(out[1], out[1])
    checks.tokens("out", out[0])
    call.check_backend(backend, device)
    arch = arrays.arch_of(device)
    total_q, num_heads, head_dim_v = out
    heads, sizes = (num_heads, num_heads), (head_dim_v, head_dim_v)
    return Problem(dtype, 1, total_q, 0, *heads, *sizes, -1, -1, 1.0, arch, device)


def _delta(out: Array, dout: Array, dlse: Array | float = 0.0) -> Array:
    return (out.astype("float64") * dout.astype("float64")).sum(axis=-1).T - dlse
