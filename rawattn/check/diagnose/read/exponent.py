"""Exponentials that are inexact: by which polynomial of the fraction of an exponent of 2."""

from collections.abc import Callable
from functools import partial

import numpy as np

from rawattn.check.diagnose.engine.attention import Context, Step
from rawattn.check.diagnose.engine.steps import LOG2_E
from rawattn.check.diagnose.evidence.precision import eps_of
from rawattn.check.diagnose.read.contexts import of_view, places_of
from rawattn.check.diagnose.read.probe import Weights
from rawattn.reference.dense import dead_to_inf

Array = np.ndarray
TILES = (
    0,
    16,
    -16,
    32,
    -32,
    64,
    -64,
    128,
    -128,
)  # of keys, from the last one on if below 0; 0: all
DEGREES = range(1, 6)
WHOLE: tuple[Callable[[Array], Array], ...] = np.floor, np.rint
LEFT = 0.03  # of an error: what rounding may leave of it where a polynomial is its reason


def coarse_of(read: Weights, seen: Array) -> tuple[str, dict[str, Step]] | None:
    """What exp is, if it is nearly right, and its error that of a polynomial; ``seen``: weights
    that were read."""
    L = read.right.lse if read.passed else read.lse
    if L is None or read.places.question.dtype.itemsize == 2:
        return None
    there = seen & read.right.seen & np.isfinite(L)[..., None]
    S = np.where(there, read.right.S, -np.inf)
    for tile in TILES[: 1 if read.passed else None]:
        base = np.where(np.isfinite(L), L, 0.0)[..., None]
        top = base if read.passed else _tops(S, np.maximum(read.places.j, 0), tile)
        x = LOG2_E * (read.right.S - top)[there]
        w = (read.P * np.exp(base - top))[there]
        for whole in WHOLE:
            f = x - whole(x)
            error = w / 2 ** whole(x) / 2**f - 1
            size = float(np.sqrt(np.mean(error**2))) if error.size else 0.0
            if not 64 * eps_of(read.places.question.q) < size < 0.1:
                return None
            for degree in DEGREES:
                basis = f[:, None] ** np.arange(degree + 1) / 2 ** f[:, None]
                factors = np.linalg.lstsq(basis, error + 1, rcond=None)[0]
                if np.sqrt(np.mean((basis @ factors - error - 1) ** 2)) < LEFT * size:
                    told = f"exp is off by up to {np.abs(error).max():.1g} of itself, a polynomial "
                    told += f"of degree {degree} in the fraction of its exponent of 2"
                    exp2 = partial(_exp2, factors, whole)
                    made = partial(_passed if read.passed else _online, exp2, tile)
                    return told, {"bP" if read.passed else "softmax": made}
    return None


def _tops(S: Array, j: Array, tile: int) -> Array:
    """The maximum of a row (heads, n, m) so far, that is after the tile of a key; S with -inf."""
    whole = S.max(axis=-1, keepdims=True)
    if tile:
        order = np.s_[..., :: 1 if tile > 0 else -1]
        so_far = np.maximum.accumulate(S[order], axis=-1)[order]
        last = np.arange(S.shape[2]) - j % abs(tile) + (tile - 1 if tile > 0 else 0)
        last = np.broadcast_to(last.clip(0, S.shape[2] - 1), S.shape)
        whole = np.take_along_axis(so_far, last, axis=-1)
    return np.where(np.isfinite(whole), whole, 0.0)


def _exp2(factors: Array, whole: Callable[[Array], Array], x: Array) -> Array:
    """2 to the power of x, of -inf 0."""
    x = np.where(np.isneginf(x), -2000.0, x)
    return np.asarray(np.polyval(factors[::-1], x - whole(x)) * 2.0 ** whole(x))


def _passed(exp2: Callable[[Array], Array], _: int, c: Context) -> Array:
    return exp2(LOG2_E * (c.S - dead_to_inf(np, c.L)[..., None]))


def _online(exp2: Callable[[Array], Array], tile: int, c: Context) -> tuple[Array, Array]:
    """L and P."""
    j = of_view(c, np.maximum(places_of(c.question).j, 0)[None])[0]
    top, last = _tops(c.S, j, tile), _tops(c.S, j, 0)
    P = exp2(LOG2_E * (c.S - top)) * np.exp(top - last)
    sums = P.sum(axis=-1)
    sums = sums if c.sink is None else sums + np.exp(c.sink - last[..., 0])
    with np.errstate(divide="ignore"):
        L = np.log(sums) + last[..., 0]
    return L, P / np.where(sums > 0, sums, 1.0)[..., None]
