"""Scores that lead an online softmax astray: all negative, rising or falling from tile to tile,
wide, or with one key far above all others."""

from typing import Any

import numpy as np

import rawattn
from rawattn.check.cases import dtype_of

TOKENS = 300
AT = {"first key": 0, "last key": TOKENS - 1, "amid": 131, "at a tile's end": 127}
KINDS = ("negative", "rising", "falling", "wide", *AT)
OFFSETS = np.array([0, TOKENS], np.int32)


def inputs(kind: str, dtype: str, head_dim: int) -> tuple[np.ndarray, ...]:
    """q, k, v of one sequence: the first column makes the kind, the others some noise."""
    rng, element = np.random.default_rng(0), dtype_of(dtype)
    q, k, v = rng.standard_normal((3, TOKENS, 1, head_dim))
    key = np.arange(TOKENS) // 64
    scores = {
        "negative": np.full(TOKENS, -60.0),
        "rising": 40.0 * key,
        "falling": -40.0 * key,
        "wide": 30 * rng.standard_normal(TOKENS),
    }.get(kind, np.zeros(TOKENS))
    if kind in AT:
        scores[AT[kind]] = 1024.0
    q[:, 0, 0], k[:, 0, 0] = 8.0, scores / 8
    return tuple(x.astype(element) for x in (q, k, v))


def deviation(kind: str, dtype: str, head_dim: int, mask: dict[str, Any], on: Any) -> float:
    """How far out and lse are from the reference, in units of what 16 bits round away; ``on`` puts
    a NumPy array where the kernels take it. Infinite where a dominated row is not that key's v."""
    q, k, v = inputs(kind, dtype, head_dim)
    options = {"softmax_scale": 1.0, "return_lse": True} | mask
    given = [on(x) for x in (q, k, v, OFFSETS)]
    out, lse = (np.asarray(x.get(), float) for x in rawattn.forward(*given, **options))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    exact, of_rows = rawattn.forward(*wide, OFFSETS, backend="reference", **options)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    if kind in AT:
        seen = of_rows[0] > 500
        if seen.any() and not (out[seen] == wide[2][AT[kind]]).all():
            return np.inf
    seen = np.isfinite(of_rows)
    far = np.abs(lse - of_rows)[seen] / np.maximum(1, np.abs(of_rows[seen]))
    return max(np.abs(out - exact).max() / unit, far.max() / 1e-5)
