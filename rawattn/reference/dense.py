"""Packed attention, one equation a line, with every score of a sequence in memory.

Arrays are NumPy or CuPy, of any floating dtype; the result is of the same library. The arithmetic
is float64, or with ``rounding`` that of an implementation which keeps every intermediate in that
dtype. Names: X what softcap takes, S scores, P probabilities, L logsumexp, D the row term of the
softmax derivative. A sink is one more key of every query of a head, whose score is a number of its
own and which has no value: its P is named P0, its S is the sink itself.
"""

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

Array = Any  # numpy.ndarray or cupy.ndarray
Window = tuple[int, int]


def namespace(array: Array) -> ModuleType:
    """The library that ``array`` belongs to: cupy for a CuPy array, else numpy."""
    return importlib.import_module("cupy" if type(array).__module__.startswith("cupy") else "numpy")


def allowed(seqlen_q: int, seqlen_k: int, window: Window, xp: ModuleType | None = None) -> Array:
    """Boolean (seqlen_q, seqlen_k): may query i see key j, with i counted from the last key back.

    ``window`` is (left, right), both inclusive around i + seqlen_k - seqlen_q; -1 is open.
    """
    xp = xp or importlib.import_module("numpy")
    left, right = window
    distance = xp.arange(seqlen_k) - (xp.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    mask = xp.ones((seqlen_q, seqlen_k), dtype=bool)
    if left >= 0:
        mask &= distance >= -left
    if right >= 0:
        mask &= distance <= right
    return mask


def sequences(
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    seqused_k: Array | None = None,
    *,
    without_keys: bool = False,
) -> Iterator[tuple[slice, slice]]:
    """Rows of q and rows of k of every sequence that has at least one of each.

    ``seqused_k`` (batch,): how many of a sequence's keys are in use. ``without_keys``: sequences
    with queries alone too.
    """
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(bounds_q) - 1):
        rows, (start, stop) = slice(*bounds_q[b : b + 2]), bounds_k[b : b + 2]
        if seqused_k is not None:
            stop = min(stop, start + max(0, int(seqused_k[b])))
        if rows.start < rows.stop and (start < stop or without_keys):
            yield rows, slice(start, max(start, stop))


def forward(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    seqused_k: Array | None = None,
    rounding: Any = None,
) -> tuple[Array, Array]:
    """Attention of packed sequences and its logsumexp.

    q (total_q, num_heads_q, head_dim), k (total_k, num_heads_kv, head_dim),
    v (total_k, num_heads_kv, head_dim_v), cu_seqlens (batch + 1,); causal is ``window=(left, 0)``.
    ``softcap`` c makes scores c tanh(score / c), after the scale and before the mask. ``sinks``
    (num_heads_q,) is a logit of each head that counts in the denominator and in lse, without a
    value. ``seqused_k`` (batch,): keys of a sequence from there on are no keys.
    ``rounding`` (a dtype) rounds after every operation, where the softmax counts as one.
    Returns out (total_q, num_heads_q, head_dim_v) and lse (num_heads_q, total_q), both float64.
    A query in no sequence has out 0 and lse -inf, one without an allowed key too, or lse its sink.
    """
    xp, group, s = namespace(q), q.shape[1] // k.shape[1], scale_of(q, softmax_scale)
    load, r = arithmetic(xp, rounding)
    out = xp.zeros((*q.shape[:2], v.shape[2]), dtype=xp.float64)
    lse = xp.full((q.shape[1], q.shape[0]), -xp.inf, dtype=xp.float64)
    with_sinks = sinks is not None
    for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, without_keys=with_sinks):
        mask = allowed(rows.stop - rows.start, keys.stop - keys.start, window, xp)
        for head_kv in range(k.shape[1]):
            heads = slice(head_kv * group, (head_kv + 1) * group)
            Q = load(q[rows, heads]).swapaxes(0, 1)
            K, V = load(k[keys, head_kv]), load(v[keys, head_kv])
            S, *_ = capped(xp, r(s * r(Q @ K.T)), softcap, r)
            S = xp.where(mask, S, -xp.inf)
            L = logsumexp(xp, S if sinks is None else with_sink(xp, S, load(sinks[heads])))
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
    *,
    dlse: Array | None = None,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    seqused_k: Array | None = None,
    rounding: Any = None,
) -> tuple[Array, ...]:
    """Gradients dq, dk, dv (shapes of q, k, v; float64) of ``forward``, with ``sinks`` dsinks too.

    dout (total_q, num_heads_q, head_dim_v) and dlse (num_heads_q, total_q) or None are the
    cotangents; ``out`` and ``lse`` are used as passed, so they may belong to a larger attention of
    which these keys are one part. The other arguments are those of ``forward``.
    """
    xp, group, s = namespace(q), q.shape[1] // k.shape[1], scale_of(q, softmax_scale)
    load, r = arithmetic(xp, rounding)
    with_sinks = sinks is not None
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    grads = dq, dk, dv, *_ = [xp.zeros(a.shape, dtype=xp.float64) for a in inputs]
    for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, without_keys=with_sinks):
        mask = allowed(rows.stop - rows.start, keys.stop - keys.start, window, xp)
        for head_kv in range(k.shape[1]):
            heads = slice(head_kv * group, (head_kv + 1) * group)
            Q, dO = load(q[rows, heads]).swapaxes(0, 1), load(dout[rows, heads]).swapaxes(0, 1)
            K, V, L = load(k[keys, head_kv]), load(v[keys, head_kv]), load(lse[heads, rows])
            dL = 0.0 if dlse is None else load(dlse[heads, rows])
            S, slope, _ = capped(xp, r(s * r(Q @ K.T)), softcap, r)
            S = xp.where(mask, S, -xp.inf)
            P = r(xp.exp(S - dead_to_inf(xp, L)[..., None]))
            D = (dO * load(out[rows, heads]).swapaxes(0, 1)).sum(axis=-1) - dL
            dP = r(dO @ V.T)
            dS = r(P * (dP - D[..., None]))
            dX = r(dS * slope)
            dQ = r(s * r(dX @ K))
            dK = r(s * r(r(dX.swapaxes(1, 2) @ Q).sum(axis=0)))
            dV = r(r(P.swapaxes(1, 2) @ dO).sum(axis=0))
            dq[rows, heads], dk[keys, head_kv], dv[keys, head_kv] = dQ.swapaxes(0, 1), dK, dV
            if sinks is not None:
                P0 = xp.exp(load(sinks[heads])[:, None] - dead_to_inf(xp, L))
                grads[3][heads] -= (P0 * D).sum(axis=-1)
    return tuple(grads)


def capped(
    xp: ModuleType, X: Array, softcap: float | None, r: Callable[[Array], Array]
) -> tuple[Array, Array | float, Array | float]:
    """S = c tanh(X / c), its derivative and its second one; X, 1 and 0 without a softcap."""
    if softcap is None:
        return X, 1.0, 0.0
    T = r(xp.tanh(r(X / softcap)))
    slope = r(1 - r(T * T))
    return r(softcap * T), slope, -2 / softcap * T * slope


def with_sink(xp: ModuleType, S: Array, sinks: Array) -> Array:
    """Scores of some heads with those of their sinks as one more key."""
    column = xp.broadcast_to(sinks[:, None, None], (*S.shape[:2], 1))
    return xp.concatenate([S, column], axis=-1)


def scale_of(q: Array, softmax_scale: float | None) -> float:
    """The factor of the scores: ``softmax_scale``, or head_dim ** -0.5."""
    return float(q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale)


def arithmetic(
    xp: ModuleType, rounding: Any
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """How an input enters the arithmetic, and what happens to the result of every operation."""
    if rounding is None:
        return lambda a: a.astype(xp.float64), lambda a: a
    return lambda a: a.astype(xp.float32), lambda a: a.astype(rounding).astype(xp.float32)


def logsumexp(xp: ModuleType, S: Array) -> Array:
    """Log of the summed exponentials of each row; -inf, without a warning, for a row of -inf."""
    row_max = S.max(axis=-1)
    dead = row_max == -xp.inf
    row_max = xp.where(dead, 0.0, row_max)
    row_sum = xp.exp(S - row_max[..., None]).sum(axis=-1)
    return xp.where(dead, -xp.inf, xp.log(xp.where(dead, 1.0, row_sum)) + row_max)


def dead_to_inf(xp: ModuleType, L: Array) -> Array:
    """L with +inf for -inf, so that exp(S - L) is 0 in a row without keys, where S is -inf too."""
    return xp.where(L == -xp.inf, xp.inf, L)
