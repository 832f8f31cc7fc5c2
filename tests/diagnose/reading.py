"""Attention functions by plain loops, with bugs to be read off them; nothing of rawattn is used."""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Hook = Callable[..., Any]


class At:
    """Where the pairs of one sequence and head stand: i (n, 1), j (1, keys), p = i + m - n; key:
    rows of k; start: the first row of q."""

    key: Array
    start: int

    def __init__(self, i: Array, j: Array, n: int, m: int, h: int, longest: int) -> None:
        self.i, self.j, self.p, self.n, self.m = i, j, i + m - n, n, m
        self.h, self.longest = h, longest
        self.d = j - self.p


class Plain:
    """Forward and backward passes; what is not None is a bug, or another right way.

    mask(at, seen), scores(at, S) and weights(at, W) change these; keys(first, stop, total) gives
    other rows of k; mass(at) is added to row sums; of_k(h, group, heads) and of_v are heads; stored
    (at, out, lse) writes. Backward alone: slope(at, dS), of_dq, of_dk, of_dv likewise, delta(D,
    dout, out), of_dP(h, heads) a head of v, factors of softmax_scale in dq and dk, kept: the head
    of a group that is kept. work: the dtype of scores and weights.
    """

    def __init__(self, *, work: Any = np.float64, refuses: bool = False, **hooks: Any) -> None:
        self.hooks, self.work, self.refuses = hooks, work, refuses

    def _do(self, name: str, at: Any, x: Any) -> Any:
        return self.hooks[name](at, x) if name in self.hooks else x

    def _views(self, q: Array, k: Array, cu_q: Array, cu_k: Array, window: Any) -> Any:
        group = q.shape[1] // k.shape[1]
        longest = int(np.diff(cu_k).max())
        for b in range(len(cu_q) - 1):
            rows = np.arange(cu_q[b], cu_q[b + 1])
            keys = np.arange(cu_k[b], cu_k[b + 1])
            first = int(cu_k[b])
            m = len(keys)
            if "keys" in self.hooks:
                keys = self.hooks["keys"](first, int(cu_k[b + 1]), len(k))
            for h in range(q.shape[1]) if len(rows) else ():
                at = At(
                    np.arange(len(rows))[:, None], (keys - first)[None], len(rows), m, h, longest
                )
                at.key, at.start = keys[None], rows[0]
                seen = np.ones((len(rows), len(keys)), dtype=bool)
                seen &= (at.d >= -window[0]) | (window[0] < 0)
                seen &= (at.d <= window[1]) | (window[1] < 0)
                seen &= ((at.j >= 0) & (at.j < m)) | ("keys" in self.hooks)
                of_k, of_v = (
                    self.hooks[name](h, group, k.shape[1]) if name in self.hooks else h // group
                    for name in ("of_k", "of_v")
                )
                yield rows, keys, h, of_k, of_v, at, self._do("mask", at, seen)

    def _scores(self, q: Array, k: Array, at: At, s: float) -> Array:
        S = (s * (q.astype(self.work) @ k.astype(self.work).T)).astype(self.work)
        return np.asarray(self._do("scores", at, S), dtype=np.float64)

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        cu_seqlens: Array,
        *,
        cu_seqlens_k: Array | None = None,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        return_lse: bool = False,
    ) -> tuple[Array, Array]:
        if self.refuses and ((v == 0).mean() > 0.5 or (v == v.flat[0]).all()):
            raise ValueError("v must be of full rank")
        cu_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        window = (window[0], 0) if causal else window
        s = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        out = np.zeros((*q.shape[:2], v.shape[2]))
        lse = np.full(q.shape[1::-1], -np.inf)
        for rows, keys, h, of_k, of_v, at, seen in self._views(q, k, cu_seqlens, cu_k, window):
            S = self._scores(q[rows, h], k[keys, of_k], at, s)
            W = self._do("weights", at, np.where(seen, np.exp(S), 0.0))
            sums = W.sum(axis=1) + self._do("mass", at, 0.0)
            P = (W / np.where(sums > 0, sums, 1.0)[:, None]).astype(self.work).astype(np.float64)
            out[rows, h] = P @ v[keys, of_v].astype(np.float64)
            with np.errstate(divide="ignore"):
                lse[h, rows] = np.log(sums)
            if "stored" in self.hooks:
                out[rows, h], lse[h, rows] = self.hooks["stored"](at, out[rows, h], lse[h, rows])
        wide = np.float64 if q.dtype == np.float64 else np.float32
        return out.astype(q.dtype), lse.astype(wide)

    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        cu_seqlens: Array,
        *,
        dlse: Array | None = None,
        cu_seqlens_k: Array | None = None,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
    ) -> tuple[Array, Array, Array]:
        if self.refuses and (q == 0).mean() > 0.5:
            raise ValueError("q must be of full rank")
        cu_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        window = (window[0], 0) if causal else window
        s = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
        to_dq, to_dk = (self.hooks.get(name, lambda s: 1.0)(s) for name in ("dq_s", "dk_s"))
        for rows, keys, h, of_k, of_v, at, seen in self._views(q, k, cu_seqlens, cu_k, window):
            S = self._scores(q[rows, h], k[keys, of_k], at, s)
            L = np.where(np.isneginf(lse[h, rows]), np.inf, lse[h, rows])[:, None]
            if self.hooks.get("own_softmax"):
                with np.errstate(divide="ignore"):
                    L = np.log(np.where(seen, np.exp(S), 0).sum(axis=1, keepdims=True))
                L = np.where(np.isneginf(L), np.inf, L)
            P = np.where(seen, np.exp(S - L), 0.0).astype(self.work).astype(np.float64)
            dO, own = (x[rows, h].astype(np.float64) for x in (dout, out))
            D = self._do("delta", dO, (dO * own).sum(axis=1))
            D = D - (0.0 if dlse is None else dlse[h, rows])
            group = q.shape[1] // k.shape[1]
            in_dP = self.hooks["of_dP"](h, k.shape[1]) if "of_dP" in self.hooks else of_v
            dS = self._do("slope", at, P * (dO @ v[keys, in_dP].astype(np.float64).T - D[:, None]))
            dq[rows, h] = to_dq * s * self._do("of_dq", at, dS) @ k[keys, of_k].astype(np.float64)
            if self.hooks.get("kept", h % group) == h % group:
                dS = self._do("of_dk", at, dS)
                dk[keys, of_k] += to_dk * s * dS.T @ q[rows, h].astype(np.float64)
                dv[keys, of_v] += self._do("of_dv", at, P).T @ dO
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
