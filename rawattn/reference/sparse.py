"""Block-sparse attention and its derivatives, one equation a line, as in ``dense`` and ``second``.

Every query sees the keys of its selected blocks (``selection``); a block's scores may be multiplied
by a number of its own, the gate block_scale. block_indices is (total_q, num_heads_sel,
num_selected), where num_heads_sel is num_heads_kv or num_heads_q, and block_scale has its shape.

Keys that no query sees may hold anything, NaN included.

Names: those of ``dense`` and ``second``; Y scores before the gate G, S = G Y; X = Q K^T. G is 1 for
the own block if it is not selected too, and everywhere without a block_scale. Read in ``second``
what the four functions have to do with each other; here f depends on block_scale too, and u has a
fourth component.
"""

from typing import Any

from rawattn.reference.dense import (
    Array,
    arithmetic,
    dead_to_inf,
    logsumexp,
    namespace,
    scale_of,
)
from rawattn.reference.second import softmax_twice
from rawattn.reference.selection import parts


def forward(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    block_indices: Array,
    *,
    block_size: int,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Array | None = None,
    softmax_scale: float | None = None,
    rounding: Any = None,
) -> tuple[Array, Array]:
    """Attention of packed sequences to selected blocks of keys, and its logsumexp.

    q, k, v, cu_seqlens, softmax_scale, rounding and the result are those of ``dense.forward``.
    block_indices names key blocks of the query's own sequence; an index outside of it is padding,
    as are the slots from block_counts (total_q, num_heads_sel) on. When causal, keys after the
    query's position are cut off. include_own_block adds the block at that position, of which a
    query sees nothing after itself, unless the block is selected too and causal is False.
    """
    xp, s = namespace(q), scale_of(q, softmax_scale)
    load, r = arithmetic(xp, rounding)
    selection: dict[str, Any] = {
        "block_size": block_size,
        "block_counts": block_counts,
        "include_own_block": include_own_block,
        "causal": causal,
    }
    out = xp.zeros((*q.shape[:2], v.shape[2]), dtype=xp.float64)
    lse = xp.full((q.shape[1], q.shape[0]), -xp.inf, dtype=xp.float64)
    for part in parts(
        block_indices, q.shape[1], k.shape[1], cu_seqlens_q, cu_seqlens_k, **selection
    ):
        rows, heads, here = part.rows, part.heads, (part.keys, part.head_kv)
        Q = load(q[rows, heads]).swapaxes(0, 1)
        K, V = part.seen(load(k[here])), part.seen(load(v[here]))
        G = part.per_key(block_scale, 1.0, load)
        Y = r(s * r(Q @ K.T))
        S = xp.where(part.mask, r(G * Y), -xp.inf)
        L = logsumexp(xp, S)
        P = r(xp.exp(S - dead_to_inf(xp, L)[..., None]))
        out[rows, heads] = r(P @ V).swapaxes(0, 1)
        lse[heads, rows] = L
    return out, lse


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    block_indices: Array,
    *,
    block_size: int,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Array | None = None,
    softmax_scale: float | None = None,
    dlse: Array | None = None,
    rounding: Any = None,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients dq, dk, dv and dblock_scale of ``forward``, all float64, the last None without it.

    dout, dlse, out and lse are those of ``dense.backward``, the other arguments those of
    ``forward``. The gradient of a slot that is padding, or a later one of the same block, is 0.
    """
    xp, s = namespace(q), scale_of(q, softmax_scale)
    load, r = arithmetic(xp, rounding)
    selection: dict[str, Any] = {
        "block_size": block_size,
        "block_counts": block_counts,
        "include_own_block": include_own_block,
        "causal": causal,
    }
    dq, dk, dv, dg = (xp.zeros(a.shape, dtype=xp.float64) for a in (q, k, v, block_indices))
    for part in parts(
        block_indices, q.shape[1], k.shape[1], cu_seqlens_q, cu_seqlens_k, **selection
    ):
        rows, heads, here = part.rows, part.heads, (part.keys, part.head_kv)
        Q, dO = load(q[rows, heads]).swapaxes(0, 1), load(dout[rows, heads]).swapaxes(0, 1)
        K, V, L = part.seen(load(k[here])), part.seen(load(v[here])), load(lse[heads, rows])
        dL = 0.0 if dlse is None else load(dlse[heads, rows])
        G = part.per_key(block_scale, 1.0, load)
        Y = r(s * r(Q @ K.T))
        S = xp.where(part.mask, r(G * Y), -xp.inf)
        P = r(xp.exp(S - dead_to_inf(xp, L)[..., None]))
        D = (dO * load(out[rows, heads]).swapaxes(0, 1)).sum(axis=-1) - dL
        dP = r(dO @ V.T)
        dS = r(P * (dP - D[..., None]))
        dY = r(G * dS)
        dQ = r(s * r(dY @ K))
        dK = r(s * r(r(dY.swapaxes(1, 2) @ Q).sum(axis=0)))
        dV = r(r(P.swapaxes(1, 2) @ dO).sum(axis=0))
        dq[rows, heads], dk[here], dv[here] = dQ.swapaxes(0, 1), dK, dV
        dg[rows, part.selections] = part.per_slot(dS * Y, dg.shape[2])
    return dq, dk, dv, None if block_scale is None else dg


def jvp(
    q: Array,
    k: Array,
    v: Array,
    tq: Array | None,
    tk: Array | None,
    tv: Array | None,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    block_indices: Array,
    *,
    tblock_scale: Array | None = None,
    block_size: int,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Array | None = None,
    softmax_scale: float | None = None,
    rounding: Any = None,
) -> tuple[Array, Array, Array, Array]:
    """Out and lse of ``forward``, and their tangents when its arguments move along the directions.

    tq, tk, tv and tblock_scale have the shapes of q, k, v and block_scale; None stands for zeros.
    The other arguments are those of ``forward``, the results those of ``second.jvp``:
    (out, tout, lse, tlse). Where lse is -inf, both tangents are 0.
    """
    xp, s = namespace(q), scale_of(q, softmax_scale)
    load, r = arithmetic(xp, rounding)
    tq, tk, tv = (xp.zeros(a.shape) if t is None else t for a, t in ((q, tq), (k, tk), (v, tv)))
    selection: dict[str, Any] = {
        "block_size": block_size,
        "block_counts": block_counts,
        "include_own_block": include_own_block,
        "causal": causal,
    }
    gate: dict[str, Any] = {"block_scale": block_scale, "softmax_scale": s, "rounding": rounding}
    out, lse = forward(q, k, v, cu_seqlens_q, cu_seqlens_k, block_indices, **selection, **gate)
    tout, tlse = xp.zeros(out.shape, dtype=xp.float64), xp.zeros(lse.shape, dtype=xp.float64)
    for part in parts(
        block_indices, q.shape[1], k.shape[1], cu_seqlens_q, cu_seqlens_k, **selection
    ):
        rows, heads, here = part.rows, part.heads, (part.keys, part.head_kv)
        Q, tQ = load(q[rows, heads]).swapaxes(0, 1), load(tq[rows, heads]).swapaxes(0, 1)
        K, V, L = part.seen(load(k[here])), part.seen(load(v[here])), load(lse[heads, rows])
        tK, tV = part.seen(load(tk[here])), part.seen(load(tv[here]))
        G, tG = part.per_key(block_scale, 1.0, load), part.per_key(tblock_scale, 0.0, load)
        Y = r(s * r(Q @ K.T))
        S = xp.where(part.mask, r(G * Y), -xp.inf)
        P = r(xp.exp(S - dead_to_inf(xp, L)[..., None]))
        tY = r(s * r(r(tQ @ K.T) + r(Q @ tK.T)))
        E = r(r(G * tY) + r(tG * Y))
        tL = (P * E).sum(axis=-1)
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
    block_indices: Array,
    *,
    ddblock_scale: Array | None = None,
    block_size: int,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Array | None = None,
    softmax_scale: float | None = None,
    dlse: Array | None = None,
    rounding: Any = None,
) -> tuple[Array, Array, Array, Array, Array, Array | None]:
    """Gradients of <ddq, dq> + <ddk, dk> + <ddv, dv> + <ddblock_scale, dblock_scale>.

    Those four are the results of ``backward``, the directions have their shapes, and None stands
    for zeros. ``out`` and ``lse`` must be those of ``forward`` on the same arrays; the other
    arguments are those of ``backward``, and ``rounding`` is that of ``second.double_backward``.
    Returns ddout, ddlse, gq, gk, gv and gblock_scale: with respect to dout, dlse, q, k, v and
    block_scale, all float64, the last None without block_scale.
    """
    xp, s = namespace(q), scale_of(q, softmax_scale)
    load, r = arithmetic(xp, rounding)
    ddq, ddk, ddv = (
        xp.zeros(a.shape) if dd is None else dd for a, dd in ((q, ddq), (k, ddk), (v, ddv))
    )
    selection: dict[str, Any] = {
        "block_size": block_size,
        "block_counts": block_counts,
        "include_own_block": include_own_block,
        "causal": causal,
    }
    ddout, ddlse, gq, gk, gv, gg = (
        xp.zeros(a.shape, dtype=xp.float64) for a in (dout, lse, q, k, v, block_indices)
    )
    for part in parts(
        block_indices, q.shape[1], k.shape[1], cu_seqlens_q, cu_seqlens_k, **selection
    ):
        rows, heads, here = part.rows, part.heads, (part.keys, part.head_kv)
        Q, ddQ = load(q[rows, heads]).swapaxes(0, 1), load(ddq[rows, heads]).swapaxes(0, 1)
        dO = load(dout[rows, heads]).swapaxes(0, 1)
        K, V = part.seen(load(k[here])), part.seen(load(v[here]))
        ddK, ddV = part.seen(load(ddk[here])), part.seen(load(ddv[here]))
        dL = 0.0 if dlse is None else load(dlse[heads, rows])[..., None]
        G, ddG = part.per_key(block_scale, 1.0, load), part.per_key(ddblock_scale, 0.0, load)
        Y = r(s * r(Q @ K.T))
        S = xp.where(part.mask, r(G * Y), -xp.inf)
        L = load(lse[heads, rows]) if rounding is None else logsumexp(xp, S)
        P = r(xp.exp(S - dead_to_inf(xp, L)[..., None]))
        tY = r(s * r(r(ddQ @ K.T) + r(Q @ ddK.T)))
        E = r(r(G * tY) + r(ddG * Y))
        ddL = (P * E).sum(axis=-1, keepdims=True)
        tP = r(P * (E - ddL))
        ddO = r(r(tP @ V) + r(P @ ddV))
        dP, tdP = r(dO @ V.T), r(dO @ ddV.T)
        if rounding is None:
            OdO = dO * load(out[rows, heads]).swapaxes(0, 1)
            D = OdO.sum(axis=-1, keepdims=True) - dL
            W = (dO * ddO).sum(axis=-1, keepdims=True)
            dS = P * (dP - D)
            tdS = tP * (dP - D) + P * (tdP - W)
        else:
            dS, tdS = softmax_twice(P, E, dP, tdP, dL, r)
        dY, tdY = r(G * dS), r(r(G * tdS) + r(ddG * dS))
        dX, tdX = r(s * dY), r(s * tdY)
        gQ = r(r(tdX @ K) + r(dX @ ddK))
        gK = r(r(r(tdX.swapaxes(1, 2) @ Q) + r(dX.swapaxes(1, 2) @ ddQ)).sum(axis=0))
        gV = r(r(tP.swapaxes(1, 2) @ dO).sum(axis=0))
        ddout[rows, heads], ddlse[heads, rows] = ddO.swapaxes(0, 1), ddL[..., 0]
        gq[rows, heads], gk[here], gv[here] = gQ.swapaxes(0, 1), gK, gV
        gg[rows, part.selections] = part.per_slot(tdS * Y + dS * tY, gg.shape[2])
    return ddout, ddlse, gq, gk, gv, None if block_scale is None else gg
