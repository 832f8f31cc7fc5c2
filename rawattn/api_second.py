"""Second derivatives and forward mode: look at all arrays, check them, compute.

Long for a module, since the contract of both functions stands in the docstrings. Per sequence and
query head, in the direction (tq, tk, tv) of (q, k, v), with S, P, O and s of ``api``:

    E = s (tq K^T + Q tk^T)      tlse_i = sum_j P_ij E_ij      tout = (P o E) V + P tv - tlse o O

E is the tangent of S; tlse and tout are those of L and O. The gradients of <ddq, dQ> + <ddk, dK> +
<ddv, dV> are the derivatives of (O, L, dQ, dK, dV) in direction (ddq, ddk, ddv), since second
derivatives are symmetric. The tiling is that of FlashAttention-2 (arXiv 2307.08691): P, E and what
follows from them are made anew in every pass, no array of size seqlen_q x seqlen_k.
"""

from typing import Any, Never

from rawattn import call, checks, passes
from rawattn.arrays import Array
from rawattn.call import Result, Window
from rawattn.reference import second

_INF = float("inf")


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
    *extra: Never,
    cu_seqlens_k: Array | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    ddsinks: Array | None = None,
    seqused_k: Array | None = None,
    max_seqlen: int | None = None,
    dlse: Array | None = None,
    deterministic: bool = False,
    ddout: Array | None = None,
    ddlse: Array | None = None,
    gq: Array | None = None,
    gk: Array | None = None,
    gv: Array | None = None,
    gsinks: Array | None = None,
    backend: str | None = None,
    validate: bool = False,
    **wrong: Never,
) -> tuple[Any, ...]:
    """Gradients of ``backward`` for the cotangents ddq, ddk and ddv of dq, dk and dv.

    With E of the direction (ddq, ddk, ddv), and with D, dP and dS = P o Z as in ``backward``:

        ddL_i = sum_j P_ij E_ij      ddO = (P o E) V + P ddv - ddL o O      W_i = dO_i . ddO_i
        P' = P o (E - ddL)           Z = dP - D          dS' = P' o Z + P o (dO ddv^T - W)
        gQ = s (dS' K + dS ddk)      gK = s (dS'^T Q + dS^T ddq)            gV = P'^T dO

    ddq, ddk, ddv: shaped like q, k, v and of their dtype, of any strides (an expanded array need
        not be copied). None is zero, and its products are left out. ddsinks: likewise of sinks.
    dout: (total_q, num_heads_q, head_dim_v) of q's dtype, as it was given to ``backward``.
    q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, softcap, sinks, seqused_k,
        max_seqlen, backend, validate: as in ``forward``.
    out: (total_q, num_heads_q, head_dim_v), lse: (num_heads_q, total_q) float32 (float64 for
        float64 inputs), what ``forward`` gave for the same q, k and v: unlike in ``backward`` they
        cannot be those of a larger attention, since ddL and W are sums over all its keys.
    dlse: (num_heads_q, total_q) of lse's dtype, as it was given to ``backward``; None is zero.
    deterministic: bitwise the same on every run: gq in a pass of its own, no atomic adds.
    ddout, ddlse, gq, gk, gv, gsinks: arrays to write into, shaped like out, lse, q, k, v, sinks;
        must not overlap an input.

    Returns (ddout, ddlse, gq, gk, gv), with ``sinks`` gsinks too: the gradients with respect to
    dout, dlse, q, k, v and sinks, of their shapes and dtypes (ddlse also without dlse); gk and gv
    are summed over the query heads of a group in float32. out and lse count as functions of q, k, v
    and sinks: what passes through them is in gq, gk, gv and gsinks. A query that may see no key has
    zeros. Raises as ``forward`` does.
    """
    if extra or wrong:
        checks.call_style("double_backward", extra, wrong)
    given, inputs = call.look(
        *(q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, backend, validate),
        softcap=softcap,
        sinks=sinks,
        seqused_k=seqused_k,
    )
    parts = given.direction("dd", inputs, ddq, ddk, ddv)
    passed = given.passed(dout, out, lse, dlse)
    moved = given.along_sinks(inputs, "ddsinks", ddsinks)
    results = (
        given.result(ddout, "ddout", given.rows),
        given.result(ddlse, "ddlse", given.sums),
        *given.gradients(inputs, "g", gq, gk, gv),
        *given.of_sinks(inputs, "gsinks", gsinks),
    )

    def reference() -> Any:
        x, y, z = call.neutral(inputs), call.neutral(passed), call.neutral(parts)
        arrays_ = (y.dout, x.q, x.k, x.v, y.out, y.lse, x.cu_seqlens_q, x.cu_seqlens_k)
        options = call.options(given.problem, x) | {"ddsinks": call.neutral_or_none(moved)}
        return second.double_backward(z.q, z.k, z.v, *arrays_, dlse=y.dlse, **options)

    gradients = call.compute(
        given,
        (*inputs, *parts, *passed, moved),
        results,
        empty=(0.0,) * len(results),
        nothing=not any((*parts, moved)),
        without_keys=sinks is not None,
        reference=reference,
        kernels=lambda to, *rooms: passes.double_backward(
            to, deterministic, inputs, parts, passed, *rooms, ddsinks=moved
        ),
    )
    return tuple(gradients)


def jvp(
    q: Array,
    k: Array,
    v: Array,
    tq: Array | None,
    tk: Array | None,
    tv: Array | None,
    cu_seqlens: Array,
    *extra: Never,
    cu_seqlens_k: Array | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    tsinks: Array | None = None,
    seqused_k: Array | None = None,
    max_seqlen: int | None = None,
    deterministic: bool = False,
    out: Array | None = None,
    tout: Array | None = None,
    backend: str | None = None,
    validate: bool = False,
    **wrong: Never,
) -> tuple[Any, Any, Any, Any]:
    """``forward`` and its derivative in the direction (tq, tk, tv), in one pass.

        E = s (tq K^T + Q tk^T)      tlse_i = sum_j P_ij E_ij
        tout = (P o E) V + P tv - tlse o out

    q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, softcap, sinks, seqused_k,
        max_seqlen, backend, validate: as in ``forward``.
    tq, tk, tv: shaped like q, k, v and of their dtype, of any strides (an expanded array need not
        be copied). None is zero, and its products are left out. tsinks: likewise of sinks.
    deterministic: a sequence is computed to the same bits alone and in any batch. Without it the
        kernel is chosen by the size of the batch; on every run it gives the same bits either way.
    out, tout: arrays to write into, of the shape and dtype of the results; must not overlap an
        input.

    Returns (out, tout, lse, tlse): out and tout (total_q, num_heads_q, head_dim_v) of q's dtype,
    lse and tlse (num_heads_q, total_q) float32 (float64 for float64 inputs). A query that may see
    no key has out 0, lse -inf and tangents 0. Raises as ``forward`` does.
    """
    if extra or wrong:
        checks.call_style("jvp", extra, wrong)
    given, inputs = call.look(
        *(q, k, v, cu_seqlens, cu_seqlens_k, causal, window, softmax_scale, backend, validate),
        softcap=softcap,
        sinks=sinks,
        seqused_k=seqused_k,
    )
    parts = given.direction("t", inputs, tq, tk, tv)
    moved = given.along_sinks(inputs, "tsinks", tsinks)
    results = (
        given.result(out, "out", given.rows),
        given.result(tout, "tout", given.rows),
        Result("lse", given.sums),
        Result("tlse", given.sums),
    )

    def reference() -> Any:
        x = call.neutral(inputs)
        options = call.options(given.problem, x) | {"tsinks": call.neutral_or_none(moved)}
        return second.jvp(*x[:3], *call.neutral(parts), *x[3:5], **options)

    out, tout, lse, tlse = call.compute(
        given,
        (*inputs, *parts, moved),
        results,
        empty=(0.0, 0.0, -_INF, 0.0),
        without_keys=sinks is not None,
        reference=reference,
        kernels=lambda to, *rooms: passes.jvp(
            to, deterministic, inputs, parts, *rooms, tsinks=moved
        ),
    )
    return out, tout, lse, tlse
