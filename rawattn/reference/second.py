"""Second derivatives and forward mode of packed attention, one equation a line, as in ``dense``.

The four functions are one: dout and dlse fixed, f = <dout, out> + <dlse, lse> is a number that
depends on q, k and v. For a direction u = (uq, uk, uv), and with H the second derivative of f,

    backward(dout, dlse)            the gradient of f, (dq, dk, dv)
    jvp(u)                          (tout, tlse): <dout, tout> + <dlse, tlse> = <u, (dq, dk, dv)>
    double_backward(u, dout, dlse)  (ddout, ddlse) = jvp(u), and (gq, gk, gv) = H u

H is symmetric: <u, H w> = <w, H u>. ``double_backward`` is the backward of ``backward``, for the
cotangents u of (dq, dk, dv); H u is also the tangent of (dq, dk, dv) when (q, k, v) moves along u.
So the backward of ``jvp`` takes no further function: for cotangents (wout, wtout, wlse, wtlse) of
its results, the gradients are

    of u          backward(wtout, wtlse)
    of (q, k, v)  backward(wout, wlse) + the (gq, gk, gv) of double_backward(u, wtout, wtlse)

With sinks they too move, along tsinks or ddsinks, and have gradients. Names: those of ``dense``,
with t for the tangent in direction (tq, tk, tv) or (ddq, ddk, ddv); F is the tangent of X, E that
of S, E0 that of a sink, and W that of D as far as dout stays.
"""

from collections.abc import Callable
from typing import Any

from rawattn.reference.dense import (
    Array,
    Window,
    allowed,
    arithmetic,
    capped,
    dead_to_inf,
    forward,
    logsumexp,
    namespace,
    scale_of,
    sequences,
)


def jvp(
    q: Array,
    k: Array,
    v: Array,
    tq: Array | None,
    tk: Array | None,
    tv: Array | None,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    tsinks: Array | None = None,
    seqused_k: Array | None = None,
    rounding: Any = None,
) -> tuple[Array, Array, Array, Array]:
    """Out and lse of ``dense.forward``, and their tangents when (q, k, v) moves along (tq, tk, tv).

    tq, tk and tv have the shapes of q, k and v, and ``tsinks`` that of ``sinks``; None stands for
    zeros. The other arguments are those of ``forward``. ``rounding`` rounds after every operation
    that autograd's forward mode runs, where logsumexp and its tangent count as one each.
    Returns out, tout (total_q, num_heads_q, head_dim_v) and lse, tlse (num_heads_q, total_q) in the
    order (out, tout, lse, tlse), all float64. Where lse is -inf, both tangents are 0.
    """
    xp, group, s = namespace(q), q.shape[1] // k.shape[1], scale_of(q, softmax_scale)
    load, r = arithmetic(xp, rounding)
    tq, tk, tv = (xp.zeros(a.shape) if t is None else t for a, t in ((q, tq), (k, tk), (v, tv)))
    mode: dict[str, Any] = {"window": window, "softmax_scale": s, "rounding": rounding}
    mode |= {"softcap": softcap, "sinks": sinks, "seqused_k": seqused_k}
    out, lse = forward(q, k, v, cu_seqlens_q, cu_seqlens_k, **mode)
    tout, tlse = xp.zeros(out.shape, dtype=xp.float64), xp.zeros(lse.shape, dtype=xp.float64)
    with_sinks = sinks is not None
    for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, without_keys=with_sinks):
        mask = allowed(rows.stop - rows.start, keys.stop - keys.start, window, xp)
        for head_kv in range(k.shape[1]):
            heads = slice(head_kv * group, (head_kv + 1) * group)
            Q, tQ = load(q[rows, heads]).swapaxes(0, 1), load(tq[rows, heads]).swapaxes(0, 1)
            K, V, L = load(k[keys, head_kv]), load(v[keys, head_kv]), load(lse[heads, rows])
            tK, tV = load(tk[keys, head_kv]), load(tv[keys, head_kv])
            S, slope, _ = capped(xp, r(s * r(Q @ K.T)), softcap, r)
            S = xp.where(mask, S, -xp.inf)
            P = r(xp.exp(S - dead_to_inf(xp, L)[..., None]))
            E = r(slope * r(s * r(r(tQ @ K.T) + r(Q @ tK.T))))
            tL = (P * E).sum(axis=-1)
            if sinks is not None and tsinks is not None:
                P0 = xp.exp(load(sinks[heads])[:, None] - dead_to_inf(xp, L))
                tL = tL + P0 * load(tsinks[heads])[:, None]
            tP = r(P * r(E - r(tL)[..., None]))
            tO = r(r(tP @ V) + r(P @ tV))
            tout[rows, heads], tlse[heads, rows] = tO.swapaxes(0, 1), tL
    return out, tout, lse, tlse


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
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    dlse: Array | None = None,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    ddsinks: Array | None = None,
    seqused_k: Array | None = None,
    rounding: Any = None,
) -> tuple[Array, ...]:
    """Gradients of <ddq, dq> + <ddk, dk> + <ddv, dv>, where dq, dk, dv are those of ``backward``.

    ddq, ddk and ddv have the shapes of q, k and v; None stands for zeros. With ``sinks`` comes
    + <ddsinks, dsinks>. ``out`` and ``lse`` must be those of ``forward`` on the same arrays. The
    other arguments are those of ``backward``.
    ``rounding`` rounds after every operation that autograd runs to differentiate dense attention
    twice: every product, sum and scaling, softmax and its backward each as one, and the backward of
    the latter multiplied out (``softmax_twice``); lse and what its cotangent adds are of float32.
    P and the row terms then come from the rounded scores, as there, not from ``out`` and ``lse``.
    Returns ddout, ddlse, gq, gk, gv: with respect to dout, dlse, q, k and v, and of their shapes,
    all float64; with ``sinks`` gsinks too. They are 0 for a query whose lse is -inf, and for a row
    of no sequence. ValueError for ``rounding`` together with ``softcap`` or ``sinks``.
    """
    if rounding is not None and (softcap is not None or sinks is not None):
        raise ValueError("rounding goes with neither softcap nor sinks; leave it out")
    xp, group, s = namespace(q), q.shape[1] // k.shape[1], scale_of(q, softmax_scale)
    load, r = arithmetic(xp, rounding)
    ddq, ddk, ddv = (
        xp.zeros(a.shape) if dd is None else dd for a, dd in ((q, ddq), (k, ddk), (v, ddv))
    )
    with_sinks = sinks is not None
    inputs = (dout, lse, q, k, v) if sinks is None else (dout, lse, q, k, v, sinks)
    results = [xp.zeros(a.shape, dtype=xp.float64) for a in inputs]
    ddout, ddlse, gq, gk, gv, *_ = results
    for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, without_keys=with_sinks):
        mask = allowed(rows.stop - rows.start, keys.stop - keys.start, window, xp)
        for head_kv in range(k.shape[1]):
            heads = slice(head_kv * group, (head_kv + 1) * group)
            Q, ddQ = load(q[rows, heads]).swapaxes(0, 1), load(ddq[rows, heads]).swapaxes(0, 1)
            dO = load(dout[rows, heads]).swapaxes(0, 1)
            K, V = load(k[keys, head_kv]), load(v[keys, head_kv])
            ddK, ddV = load(ddk[keys, head_kv]), load(ddv[keys, head_kv])
            dL = 0.0 if dlse is None else load(dlse[heads, rows])[..., None]
            S, slope, bend = capped(xp, r(s * r(Q @ K.T)), softcap, r)
            S = xp.where(mask, S, -xp.inf)
            L = load(lse[heads, rows]) if rounding is None else logsumexp(xp, S)
            P = r(xp.exp(S - dead_to_inf(xp, L)[..., None]))
            F = r(s * r(r(ddQ @ K.T) + r(Q @ ddK.T)))
            E = slope * F
            ddL = (P * E).sum(axis=-1, keepdims=True)
            if sinks is not None:
                P0 = xp.exp(load(sinks[heads])[:, None] - dead_to_inf(xp, L))[..., None]
                E0 = 0.0 if ddsinks is None else load(ddsinks[heads])[:, None, None]
                ddL = ddL + P0 * E0
            tP = r(P * (E - ddL))
            ddO = r(r(tP @ V) + r(P @ ddV))
            dP, tdP = r(dO @ V.T), r(dO @ ddV.T)
            if rounding is None:
                OdO = dO * load(out[rows, heads]).swapaxes(0, 1)
                D = OdO.sum(axis=-1, keepdims=True) - dL
                W = (dO * ddO).sum(axis=-1, keepdims=True)
                dS = P * (dP - D)
                tdS = tP * (dP - D) + P * (tdP - W)
                if with_sinks:  # its dP and tdP are 0
                    results[5][heads] -= (P0 * (E0 - ddL) * D + P0 * W).sum(axis=(1, 2))
            else:
                dS, tdS = softmax_twice(P, E, dP, tdP, dL, r)
            dX, tdX = r(s * slope * dS), r(s * (slope * tdS + bend * F * dS))  # of Q K^T
            gQ = r(r(tdX @ K) + r(dX @ ddK))
            gK = r(r(r(tdX.swapaxes(1, 2) @ Q) + r(dX.swapaxes(1, 2) @ ddQ)).sum(axis=0))
            gV = r(r(tP.swapaxes(1, 2) @ dO).sum(axis=0))
            ddout[rows, heads], ddlse[heads, rows] = ddO.swapaxes(0, 1), ddL[..., 0]
            gq[rows, heads], gk[keys, head_kv], gv[keys, head_kv] = gQ.swapaxes(0, 1), gK, gV
    return tuple(results)


def softmax_twice(
    P: Array, E: Array, dP: Array, tdP: Array, dL: Array | float, r: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """dS and tdS by the operations of autograd, which knows no D and no W but sums P * dP itself.

    It differentiates P * (dP - sum) by P with everything multiplied out (gP); what softmax's own
    backward then takes away from every row makes that equal to the product of the other branch.
    """

    def over_row(a: Array) -> Array:
        return a.sum(axis=-1, keepdims=True)

    def softmax_backward(dP: Array) -> Array:
        return r(P * (dP - over_row(P * dP)))

    D, ddL = r(over_row(r(P * dP))), r(over_row(r(P * E)))
    gP = r(r(r(r(dP * E) - r(D * E)) - r(dP * ddL)) + tdP)
    dS = r(softmax_backward(dP) + r(dL * P))
    tdS = r(softmax_backward(gP) + r(dL * P * (E - over_row(P * E))))
    return dS, tdS
