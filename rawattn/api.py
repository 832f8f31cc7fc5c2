"""Attention and its gradient: look at all arrays, check them, compute.

Long for a module, since the contract of the package stands in the docstrings.

Packed ("varlen") attention: the tokens of all sequences lie one after the other along the first
axis, and ``cu_seqlens`` says where each sequence begins. Per sequence and query head, with
s = ``softmax_scale`` and query head h reading key/value head h // (num_heads_q // num_heads_kv):

    S = s Q K^T      P = exp(S - L)      L = logsumexp over the allowed keys      O = P V

The algorithm is that of FlashAttention-2 (arXiv 2307.08691): no array of size seqlen_q x seqlen_k.
"""

from functools import lru_cache
from typing import Any, Never

from rawattn import call, checks, device, passes, variants
from rawattn.arrays import Array, Shape, View, framework_of, neutral
from rawattn.call import Given, Window
from rawattn.problem import Problem
from rawattn.reference import dense

_INF = float("inf")


def forward(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens: Array,
    *extra: Never,
    cu_seqlens_k: Array | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    seqused_k: Array | None = None,
    max_seqlen: int | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    backend: str | None = None,
    validate: bool = False,
    **wrong: Never,
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
    softcap: scores become softcap * tanh(score / softcap), after the scale and before the mask
        (Gemma 2, arXiv 2408.00118); None or 0 is none.
    sinks: (num_heads_q,) of any float dtype, a logit of each head that counts in the denominator,
        and in lse, without a value (gpt-oss; StreamingLLM, arXiv 2309.17453).
    seqused_k: (batch,) int32 or int64, how many keys of each sequence are in use: those from there
        on are no keys, and masks count from the last one in use.
    max_seqlen: accepted for the sake of other signatures; not needed.
    return_lse: also return the logsumexp.
    out: array to write into, of the shape and dtype of the result; must not overlap an input.
    backend: None (the best there is), "cuda", "numba" or "reference" (float64, reads cu_seqlens).
    validate: read cu_seqlens back from the device and check its content, which waits for the
        device; on the CPU it is checked in any case.

    Returns out (total_q, num_heads_q, head_dim_v) of q's dtype, or (out, lse) with lse
    (num_heads_q, total_q), natural logarithm, float32 (float64 for float64 inputs). A query that
    may see no key has out 0 and lse -inf, or its sink where its sequence has one.

    Raises TypeError (library, dtype, kind of argument), ValueError (shape, device, value) or
    RuntimeError (nothing here can run it), each with the remedy.
    """
    if extra or wrong:
        checks.call_style("forward", extra, wrong)
    given, inputs = call.look(
        *(q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, backend, validate),
        softcap=softcap,
        sinks=sinks,
        seqused_k=seqused_k,
    )
    results = (given.result(out, "out", given.rows), given.result(None, "lse", given.sums))

    def reference() -> Any:
        x = call.neutral(inputs)
        return dense.forward(*x[:5], **call.options(given.problem, x))

    out, lse = call.compute(
        given,
        inputs,
        results,
        empty=(0.0, -_INF),
        without_keys=sinks is not None,
        reference=reference,
        kernels=lambda to, out, lse: passes.forward(to, inputs, out, lse),
    )
    return (out, lse) if return_lse else out


def backward_preprocess(
    out: Array,
    dout: Array,
    *extra: Never,
    dlse: Array | None = None,
    delta: Array | None = None,
    backend: str | None = None,
    **wrong: Never,
) -> Any:
    """The row term of the softmax derivative: D_i = dO_i . O_i - dL_i, in float32.

    ``backward`` computes it by itself; this step is public for those who schedule their own passes.

    out, dout: (total_q, num_heads_q, head_dim_v), of one dtype.
    dlse: (num_heads_q, total_q) cotangent of lse, float32 (float64 beside float64); None is zero.
    delta: array to write into, of the shape and dtype of the result; must not overlap an input.
    backend: as in ``forward``.

    Returns delta (num_heads_q, total_q) float32, float64 for float64 inputs. Raises as ``forward``.
    """
    if extra or wrong:
        checks.call_style("backward_preprocess", extra, wrong)
    framework = framework_of(out, "out")
    of_out = framework.view(out, "out")
    problem = _pose_preprocess(of_out.shape, of_out.dtype, of_out.device, backend)
    sums = ((problem.num_heads_q, problem.total_q), call.statistic(problem.dtype))
    given = Given(framework, problem, (of_out.shape, of_out.dtype), sums, backend, of_out)
    of_dout = given.view_like(dout, "dout", given.rows)
    of_lse = None if dlse is None else given.view_like(dlse, "dlse", given.sums)
    views = (of_out, of_dout, of_lse)
    [result] = call.compute(
        given,
        views,
        (given.result(delta, "delta", given.sums),),
        empty=(0.0,),
        reference=lambda: (_delta(*views),),
        kernels=lambda to, room: passes.backward_preprocess(to, *views, room),
    )
    return result


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    cu_seqlens: Array,
    *extra: Never,
    cu_seqlens_k: Array | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    seqused_k: Array | None = None,
    max_seqlen: int | None = None,
    dlse: Array | None = None,
    deterministic: bool = False,
    method: str | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    dsinks: Array | None = None,
    backend: str | None = None,
    validate: bool = False,
    **wrong: Never,
) -> tuple[Any, ...]:
    """Gradients of ``forward`` for the cotangents dout of out and dlse of lse.

        D_i = dO_i . O_i - dL_i      dP = dO V^T      dS = P o (dP - D)
        dQ = s dS K                  dK = s dS^T Q    dV = P^T dO

    dout: (total_q, num_heads_q, head_dim_v) of q's dtype.
    q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, softcap, sinks, seqused_k,
        max_seqlen, backend, validate: as in ``forward``.
    out: (total_q, num_heads_q, head_dim_v), lse: (num_heads_q, total_q) float32 (float64 for
        float64 inputs), used as passed: with those of a larger attention, of which these keys are
        a part, the result is this part's share of the gradients.
    dlse: (num_heads_q, total_q) of lse's dtype; None is zero.
    deterministic: bitwise the same on every run, each sum in one order: method "deterministic".
    method: None (the fastest), "atomic_dq" (key tiles outer, dQ by float32 atomic adds),
        "atomic_dkv" (query tiles outer, dK and dV by float32 atomic adds) or "deterministic" (on
        Hopper key tiles outer that add to dQ in their order, elsewhere dQ in a pass of its own).
    dq, dk, dv, dsinks: arrays to write into, shaped like q, k, v, sinks; must not overlap an input.

    Returns (dq, dk, dv), shaped like q, k, v and of their dtype; dk and dv are summed over the
    query heads of a group in float32. With ``sinks`` dsinks comes fourth, of their dtype: minus the
    sum of exp(sink - lse_i) D_i over the queries. Raises as ``forward`` does.
    """
    if extra or wrong:
        checks.call_style("backward", extra, wrong)
    given, inputs = call.look(
        *(q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, backend, validate),
        softcap=softcap,
        sinks=sinks,
        seqused_k=seqused_k,
    )
    checks.method(method, deterministic)
    passed = given.passed(dout, out, lse, dlse)
    results = given.gradients(inputs, "d", dq, dk, dv) + given.of_sinks(inputs, "dsinks", dsinks)

    def reference() -> Any:
        x, y = call.neutral(inputs), call.neutral(passed)
        arrays_ = (y.dout, x.q, x.k, x.v, y.out, y.lse, x.cu_seqlens_q, x.cu_seqlens_k)
        return dense.backward(*arrays_, dlse=y.dlse, **call.options(given.problem, x))

    chosen = variants.method_of(method, deterministic)
    gradients = call.compute(
        given,
        (*inputs, *passed),
        results,
        empty=(0.0,) * len(results),
        without_keys=sinks is not None,
        reference=reference,
        kernels=lambda to, *rooms: passes.backward(to, chosen, inputs, passed, *rooms),
    )
    return tuple(gradients)


# ---- the row term -----------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _pose_preprocess(out: Shape, dtype: str, ordinal: int, backend: str | None) -> Problem:
    """The Problem of backward_preprocess, which knows of out alone: one sequence, keys like it."""
    checks.rank("out", out)
    checks.dtype("out", dtype)
    checks.head_dim("out", out[2])
    checks.heads(out[1], out[1])
    checks.tokens("out", out[0])
    call.check_backend(backend, ordinal)
    total, heads, size = out
    sizes = (total, total, heads, heads, size, size)
    return Problem(dtype, 1, *sizes, -1, -1, 1.0, device.arch_of(ordinal), ordinal)


def _delta(out: View, dout: View, dlse: View | None) -> Array:
    product = neutral(out).astype("float64") * neutral(dout).astype("float64")
    sums = product.sum(axis=-1).T
    return sums if dlse is None else sums - neutral(dlse)
