"""Packed attention, one equation a line, with every score of a sequence in memory.

Arrays are NumPy or CuPy, of any floating dtype; the result is of the same library. The arithmetic
is float64, or with ``rounding`` that of an implementation which keeps every intermediate in that
dtype. Names: S scores, P probabilities, L logsumexp, D the row term of the softmax derivative.
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


def sequences(cu_seqlens_q: Array, cu_seqlens_k: Array) -> Iterator[tuple[slice, slice]]:
    """Rows of q and rows of k of every sequence that has at least one of each."""
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(bounds_q) - 1):
        rows, keys = slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])
        if rows.start < rows.stop and keys.start < keys.stop:
            yield rows, keys


def forward(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    rounding: Any = None,
) -> tuple[Array, Array]:
    """Attention of packed sequences and its logsumexp.

    q (total_q, num_heads_q, head_dim), k (total_k, num_heads_kv, head_dim),
    v (total_k, num_heads_kv, head_dim_v), cu_seqlens (batch + 1,); causal is ``window=(left, 0)``.
    ``rounding`` (a dtype) rounds after every operation, where the softmax counts as one.
    Returns out (total_q, num_heads_q, head_dim_v) and lse (num_heads_q, total_q), both float64.
    A query without an allowed key, or in no sequence, has out 0 and lse -inf.
    """
    xp, group, s = namespace(q), q.shape[1] // k.shape[1], scale_of(q, softmax_scale)
    load, r = arithmetic(xp, rounding)
    out = xp.zeros((*q.shape[:2], v.shape[2]), dtype=xp.float64)
    lse = xp.full((q.shape[1], q.shape[0]), -xp.inf, dtype=xp.float64)
    for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k):
        mask = allowed(rows.stop - rows.start, keys.stop - keys.start, window, xp)
        for head_kv in range(k.shape[1]):
            heads = slice(head_kv * group, (head_kv + 1) * group)
            Q = load(q[rows, heads]).swapaxes(0, 1)
            K, V = load(k[keys, head_kv]), load(v[keys, head_kv])
            S = xp.where(mask, r(s * r(Q @ K.T)), -xp.inf)
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
    *,
    dlse: Array | None = None,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    rounding: Any = None,
) -> tuple[Array, Array, Array]:
    """Gradients dq, dk, dv (shapes of q, k, v; float64) of ``forward``.

    dout (total_q, num_heads_q, head_dim_v) and dlse (num_heads_q, total_q) or None are the
    cotangents; ``out`` and ``lse`` are used as passed, so they may belong to a larger attention of
    which these keys are one part. The other arguments are those of ``forward``.
    """
    xp, group, s = namespace(q), q.shape[1] // k.shape[1], scale_of(q, softmax_scale)
    load, r = arithmetic(xp, rounding)
    dq, dk, dv = (xp.zeros(a.shape, dtype=xp.float64) for a in (q, k, v))
    for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k):
        mask = allowed(rows.stop - rows.start, keys.stop - keys.start, window, xp)
        for head_kv in range(k.shape[1]):
            heads = slice(head_kv * group, (head_kv + 1) * group)
            Q, dO = load(q[rows, heads]).swapaxes(0, 1), load(dout[rows, heads]).swapaxes(0, 1)
            K, V, L = load(k[keys, head_kv]), load(v[keys, head_kv]), load(lse[heads, rows])
            dL = 0.0 if dlse is None else load(dlse[heads, rows])
            S = xp.where(mask, r(s * r(Q @ K.T)), -xp.inf)
            P = r(xp.exp(S - dead_to_inf(xp, L)[..., None]))
            D = (dO * load(out[rows, heads]).swapaxes(0, 1)).sum(axis=-1) - dL
            dP = r(dO @ V.T)
            dS = r(P * (dP - D[..., None]))
            dQ = r(s * r(dS @ K))
            dK = r(s * r(r(dS.swapaxes(1, 2) @ Q).sum(axis=0)))
            dV = r(r(P.swapaxes(1, 2) @ dO).sum(axis=0))
            dq[rows, heads], dk[keys, head_kv], dv[keys, head_kv] = dQ.swapaxes(0, 1), dK, dV
    return dq, dk, dv


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
