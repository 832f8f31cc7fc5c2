"""The public functions: look at the arrays, check them, select the kernel, launch it.

Long for a module, since the contract of the package stands in the docstrings.

Packed ("varlen") attention: the tokens of all sequences lie one after the other along the first
axis, and ``cu_seqlens`` says where each sequence begins. Per sequence and query head, with
s = ``softmax_scale`` and query head h reading key/value head h // (num_heads_q // num_heads_kv):

    S = s Q K^T      P = exp(S - L)      L = logsumexp over the allowed keys      O = P V

The algorithm is that of FlashAttention-2 (arXiv 2307.08691): no array of size seqlen_q x seqlen_k.
"""

import os
from functools import lru_cache
from typing import Any

from rawattn import arrays, checks, variants
from rawattn.arrays import Array, Framework, Shape, View, framework_of
from rawattn.ops import backward_kv as kv_op
from rawattn.ops import backward_postprocess as postprocess_op
from rawattn.ops import backward_preprocess as preprocess_op
from rawattn.ops import backward_q as q_op
from rawattn.ops import forward as forward_op
from rawattn.problem import Problem
from rawattn.reference import dense

Window = tuple[int, int]
Inputs = tuple[View, View, View, View, View]  # q, k, v, cu_seqlens_q, cu_seqlens_k


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
    softmax_scale: factor on the scores, by default head_dim ** -0.5.
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
    framework, problem, inputs = _inputs(
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
            result = _output(framework, out, "out", shape, dtype, like)
        lse = framework.empty(shape[1::-1], _statistic(dtype), like)
        if _by_reference(problem, backend):
            with arrays.on_stream(stream, problem.device):
                values = dense.forward(*map(arrays.neutral, inputs), **_mask(problem))
                _store(values, (result, lse))
        elif _is_empty(problem):
            framework.fill(result, 0.0, stream)
            framework.fill(lse, -float("inf"), stream)
        else:
            target = result if out is None else _target(framework, result, like)
            q, k, v, offsets_q, offsets_k = _ready(framework, inputs, stream)
            variant = variants.select("forward", problem, backend=backend)
            forward_op.launch(
                variant, problem, q, k, v, offsets_q, offsets_k, target, lse, stream=stream
            )
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
    inputs = [result, _like(framework, dout, "dout", shape, dtype, result)]
    if dlse is not None:
        view = _like(framework, dlse, "dlse", shape[1::-1], _statistic(dtype), result)
        inputs.append(view)
    previous = arrays.enter_device(problem.device)
    try:
        stream = framework.stream(*inputs)
        sums = _output(framework, delta, "delta", shape[1::-1], _statistic(dtype), result)
        if _by_reference(problem, backend):
            with arrays.on_stream(stream, problem.device):
                _store((_delta(*map(arrays.neutral, inputs)),), (sums,))
        elif problem.total_q:
            target = _target(framework, sums, result)
            _preprocess(framework, problem, backend, inputs, target, None, stream)
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
    framework, problem, inputs = _inputs(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, backend, validate
    )
    checks.method(method, deterministic)
    like, dtype = inputs[0], problem.dtype
    rows = (problem.total_q, problem.num_heads_q, problem.head_dim_v)
    cotangent = _like(framework, dout, "dout", rows, dtype, like)
    passed = [
        _like(framework, out, "out", rows, dtype, like),
        _like(framework, lse, "lse", rows[1::-1], _statistic(dtype), like),
    ]
    if dlse is not None:
        passed.append(_like(framework, dlse, "dlse", rows[1::-1], _statistic(dtype), like))
    previous = arrays.enter_device(problem.device)
    try:
        stream = framework.stream(*inputs, cotangent, *passed)
        grads = (
            _output(framework, dq, "dq", inputs[0].shape, dtype, like),
            _output(framework, dk, "dk", inputs[1].shape, dtype, like),
            _output(framework, dv, "dv", inputs[2].shape, dtype, like),
        )
        if _by_reference(problem, backend):
            with arrays.on_stream(stream, problem.device):
                views = (cotangent, *inputs[:3], *passed[:2], *inputs[3:])
                cotangent_of_lse = arrays.neutral(passed[2]) if dlse is not None else None
                values = dense.backward(
                    *map(arrays.neutral, views), dlse=cotangent_of_lse, **_mask(problem)
                )
                _store(values, grads)
        elif _is_empty(problem):
            for grad in grads:
                framework.fill(grad, 0.0, stream)
        else:
            targets = tuple(_target(framework, grad, like) for grad in grads)
            method = variants.method_of(problem, method, deterministic)
            _launch_backward(
                framework, problem, backend, method, inputs, cotangent, passed, targets, stream
            )
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


# ---- look and check ---------------------------------------------------------------------------


def _inputs(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens: Array,
    cu_seqlens_k: Array | None,
    causal: bool,
    window: Window,
    softmax_scale: float | None,
    backend: str | None,
    validate: bool,
) -> tuple[Framework, Problem, Inputs]:
    """Views of what every call has, and the Problem that they pose."""
    framework = framework_of(q, "q")
    gq = framework.view(q, "q")
    device = gq.device
    gk = _view(framework, k, "k", device)
    gv = _view(framework, v, "v", device)
    offsets_q = offsets_k = _view(framework, cu_seqlens, "cu_seqlens", device)
    if cu_seqlens_k is not None:
        offsets_k = _view(framework, cu_seqlens_k, "cu_seqlens_k", device)
    problem = _pose(
        gq.shape, gk.shape, gv.shape, offsets_q.shape, offsets_k.shape,
        gq.dtype, gk.dtype, gv.dtype, offsets_q.dtype, offsets_k.dtype, cu_seqlens_k is None,
        checks.window(window, causal), checks.softmax_scale(softmax_scale), backend, device,
    )  # fmt: skip
    if validate:
        checks.offsets("cu_seqlens", arrays.host_values(offsets_q), problem.total_q)
        name = "cu_seqlens" if cu_seqlens_k is None else "cu_seqlens_k"
        checks.offsets(name, arrays.host_values(offsets_k), problem.total_k)
    return framework, problem, (gq, gk, gv, offsets_q, offsets_k)


# Layers repeat their shapes, and so do steps: every rule is checked once for each combination.
@lru_cache(maxsize=1024)
def _pose(
    q: Shape,
    k: Shape,
    v: Shape,
    offsets_q: Shape,
    offsets_k: Shape,
    dtype: str,
    dtype_k: str,
    dtype_v: str,
    dtype_offsets_q: str,
    dtype_offsets_k: str,
    shared: bool,
    window: Window,
    softmax_scale: float | None,
    backend: str | None,
    device: int,
) -> Problem:
    """Check shapes, dtypes and options against each other, and put them into a Problem."""
    checks.rank("q", q)
    checks.rank("k", k)
    checks.rank("v", v)
    checks.dtype("q", dtype)
    checks.same_dtype("k", dtype_k, dtype)
    checks.same_dtype("v", dtype_v, dtype)
    total_q, num_heads_q, head_dim = q
    total_k, num_heads_kv, head_dim_v = v
    checks.keys_and_values(k, v)
    checks.same_head_dim(head_dim, k[2])
    checks.head_dim("q", head_dim)
    checks.head_dim("v", head_dim_v)
    checks.heads(num_heads_q, num_heads_kv)
    checks.tokens("q", total_q)
    checks.tokens("k", total_k)
    checks.cu_seqlens("cu_seqlens", offsets_q, dtype_offsets_q)
    checks.cu_seqlens("cu_seqlens_k", offsets_k, dtype_offsets_k)
    checks.same_batch(offsets_q[0], offsets_k[0])
    if shared:
        checks.shared_cu_seqlens(total_q, total_k)
    _check_backend(backend, device)
    # A side that reaches past every token is open; with that, positions plus a side fit 32 bits.
    left, right = window
    return Problem(
        dtype=dtype,
        batch=offsets_q[0] - 1,
        total_q=total_q,
        total_k=total_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        window_left=-1 if left >= total_k else left,
        window_right=-1 if right >= total_q else right,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        arch=arrays.arch_of(device),
        device=device,
    )


@lru_cache(maxsize=1024)
def _pose_preprocess(out: Shape, dtype: str, device: int, backend: str | None) -> Problem:
    """The Problem of backward_preprocess, which knows of out alone: no keys, one sequence."""
    checks.rank("out", out)
    checks.dtype("out", dtype)
    checks.head_dim("out", out[2])
    checks.heads(out[1], out[1])
    checks.tokens("out", out[0])
    _check_backend(backend, device)
    arch = arrays.arch_of(device)
    total_q, num_heads, head_dim_v = out
    heads, sizes = (num_heads, num_heads), (head_dim_v, head_dim_v)
    return Problem(dtype, 1, total_q, 0, *heads, *sizes, -1, -1, 1.0, arch, device)


def _check_backend(backend: str | None, device: int) -> None:
    checks.backend(backend, device)
    if backend == "numba" and device < 0:
        simulated = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
        checks.numba_device(simulated or arrays.has_cuda_device())


def _view(framework: Framework, array: Array, name: str, device: int) -> View:
    """View of an array that has to be of the framework, and on the device, of the first one."""
    given = framework_of(array, name)
    if given is not framework:
        checks.same_framework(name, given.name, framework.name)
    view = framework.view(array, name)
    if view.device != device:
        checks.same_device(name, view.device, device)
    return view


def _like(
    framework: Framework, array: Array, name: str, shape: Shape, dtype: str, like: View
) -> View:
    """View of an array whose shape and dtype follow from the others."""
    view = _view(framework, array, name, like.device)
    checks.shape(name, view.shape, shape)
    checks.same_dtype(name, view.dtype, dtype)
    return view


def _output(
    framework: Framework, array: Array | None, name: str, shape: Shape, dtype: str, like: View
) -> View:
    """View of a preallocated output, or of a new array."""
    if array is None:
        return framework.empty(shape, dtype, like)
    view = _like(framework, array, name, shape, dtype, like)
    checks.writable(name, framework.writable(view))
    checks.distinct_elements(name, view.shape, view.strides)
    return view


def _statistic(dtype: str) -> str:
    """dtype of lse, delta and gathered sums beside inputs of ``dtype``."""
    return "float64" if dtype == "float64" else "float32"


# ---- the reference ----------------------------------------------------------------------------


def _by_reference(problem: Problem, backend: str | None) -> bool:
    return backend == "reference" or (backend is None and problem.device < 0)


def _mask(problem: Problem) -> dict[str, Any]:
    window = (problem.window_left, problem.window_right)
    return {"window": window, "softmax_scale": problem.softmax_scale}


def _delta(out: Array, dout: Array, dlse: Array | float = 0.0) -> Array:
    return (out.astype("float64") * dout.astype("float64")).sum(axis=-1).T - dlse


def _store(values: tuple[Array, ...], views: tuple[View, ...]) -> None:
    for value, view in zip(values, views, strict=True):
        arrays.neutral(view)[...] = value


# ---- the kernels ------------------------------------------------------------------------------


def _is_empty(problem: Problem) -> bool:
    """No token can see another: the results are known, and a grid would be of size zero."""
    return not (problem.batch and problem.total_q and problem.total_k)


def _ready(framework: Framework, inputs: Inputs, stream: int) -> Inputs:
    """The inputs as kernels take them."""
    q, k, v, offsets_q, offsets_k = inputs
    ready_q = framework.offsets(offsets_q, stream)
    shared = offsets_k is offsets_q
    return (
        framework.rows(q, stream),
        framework.rows(k, stream),
        framework.rows(v, stream),
        ready_q,
        ready_q if shared else framework.offsets(offsets_k, stream),
    )


def _target(framework: Framework, result: View, like: View) -> View:
    """Where kernels write a result: the array itself if they can, else one to copy from."""
    ready = arrays.is_aligned(result) if len(result.shape) == 3 else arrays.is_dense(result)
    return result if ready else framework.empty(result.shape, result.dtype, like)


def _preprocess(
    framework: Framework,
    problem: Problem,
    backend: str | None,
    inputs: list[View],
    delta: View,
    dq_accum: View | None,
    stream: int,
) -> None:
    """delta of ``inputs``, which are out, dout and possibly dlse; zeroes dq_accum."""
    variant = variants.select("backward_preprocess", problem, backend=backend)
    out, dout = (framework.rows(view, stream) for view in inputs[:2])
    dlse = framework.dense(inputs[2], stream) if len(inputs) == 3 else None
    preprocess_op.launch(variant, problem, out, dout, dlse, delta, dq_accum, stream=stream)


def _launch_backward(
    framework: Framework,
    problem: Problem,
    backend: str | None,
    method: str,
    inputs: Inputs,
    dout: View,
    passed: list[View],
    grads: tuple[View, ...],
    stream: int,
) -> None:
    """dq, dk, dv by one of the methods; ``passed`` is out, lse and possibly dlse.

    Gradients that are gathered by atomic adds wait in float32 workspaces, which come from the
    caller's allocator; a last pass scales them and puts them into the dtype of the result.
    """
    like, scale = inputs[0], problem.softmax_scale
    dq, dk, dv = grads
    q, k, v, offsets_q, offsets_k = _ready(framework, inputs, stream)
    dout = framework.rows(dout, stream)
    lse = framework.dense(passed[1], stream)
    delta = framework.empty(lse.shape, lse.dtype, like)
    last = variants.select("backward_postprocess", problem, backend=backend)

    def workspace(gradient: str) -> View:
        shape = postprocess_op.accum_shape(last, problem, gradient)
        return framework.empty(shape, lse.dtype, like)

    def postprocess(accum: View, offsets: View, grad: View, scale: float) -> None:
        postprocess_op.launch(last, problem, accum, offsets, grad, scale=scale, stream=stream)

    dq_accum = workspace("dq") if method == "atomic_dq" else None
    terms = [passed[0], dout, *passed[2:]]
    _preprocess(framework, problem, backend, terms, delta, dq_accum, stream)
    common = (problem, q, k, v, dout, lse, delta, offsets_q, offsets_k)
    if method == "atomic_dkv":
        dk_accum, dv_accum = workspace("dk"), workspace("dv")
        framework.fill(dk_accum, 0.0, stream)
        framework.fill(dv_accum, 0.0, stream)
        variant = variants.select("backward_q", problem, backend=backend)
        q_op.launch(variant, *common, dq, dk_accum, dv_accum, stream=stream)
        postprocess(dk_accum, offsets_k, dk, scale)
        postprocess(dv_accum, offsets_k, dv, 1.0)
        return
    variant = variants.select("backward_kv", problem, backend=backend)
    kv_op.launch(variant, *common, dq_accum, dk, dv, stream=stream)
    if dq_accum is not None:
        postprocess(dq_accum, offsets_q, dq, scale)
    else:
        variant = variants.select("backward_q", problem, backend=backend)
        q_op.launch(variant, *common, dq, None, None, stream=stream)
