"""Bugs in what the softmax is taken over: scores, masks, sums, and how parts are merged."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tests.diagnose.hooks import added, heavier, padding, with_zeros
from tests.diagnose.plain import LN_2, ZEROS, Array, Head, answers, capped, finite
from tests.diagnose.problems import problems
from tests.diagnose.table import FEW, Hooks, Table, plants

__all__ = ["PLANTED", "answers", "problems"]
Softmax = tuple[Array, Array]  # L and O


def exp(x: Array) -> Array:
    return np.exp(np.where(np.isnan(x), -np.inf, x))


def attended(S: Array, V: Array) -> Softmax:
    top = finite(S.max(axis=1, initial=-np.inf, keepdims=True))
    weights = exp(S - top)
    total = weights.sum(axis=1, keepdims=True)
    return top + np.log(total), weights @ V / np.where(total == 0, 1, total)


# ---- scores ----


def capped_at(cap: float, derivative: bool = True) -> Hooks:
    def of(c: Head, x: Any) -> Any:
        found, slope, bend = capped(c.Y, cap)
        return found, slope if derivative else 1.0, bend

    return {"cap": of}


def sloped(away: Callable[[Head], Array]) -> Hooks:
    return added(lambda c: 2.0 ** (-8 * (c.h + 1) / c.question.num_heads_q) * away(c))


# ---- masks ----


def padded(valid: float, fill: float) -> Hooks:
    """``valid`` is added to the scores of all keys but the padding, for whose ``fill`` stands."""
    S_of = {"S": lambda c, S: np.where(c.r == ZEROS, fill, S + valid).astype(S.dtype)}
    return with_zeros(padding) | S_of


def filled(fill: float, adds: bool = False, stops: bool = True) -> Hooks:
    def scores(c: Head, S: Array) -> Array:
        return np.where(c.seen > 0, S, (fill + (c.bare if adds else 0))).astype(S.dtype)

    stop = {"dY": lambda c, x: np.where(c.seen > 0, x, 0)} if stops and not adds else {}
    return {"S": scores, "skips_masked": False} | stop


# ---- sums ----


def parts_of(c: Head, parts: int) -> Iterator[tuple[slice, Array, Array]]:
    step = -(-c.S.shape[1] // parts)
    for start in range(0, c.S.shape[1], step):
        here = slice(start, start + step)
        yield here, *attended(c.S[:, here], c.V[here])


def by_sums(c: Head, x: Softmax) -> Softmax:
    """Parts weighted by row sums without their maxima."""
    total, O = 0.0, 0.0  # noqa: E741
    for here, lse, out in parts_of(c, 3):
        own = exp(lse - finite(c.S[:, here].max(axis=1, keepdims=True)))
        total, O = total + own, O + own * out  # noqa: E741
    return x[0], O / np.where(total == 0, 1, total)


def merged(parts: int, of: Callable[[Softmax, Array, Array], Softmax]) -> Hooks:
    """L and O of those of ``parts`` of the keys."""

    def softmax(c: Head, x: Softmax) -> Softmax:
        return of(x, *map(np.stack, zip(*(part[1:] for part in parts_of(c, parts)), strict=True)))

    return {"softmax": softmax}


def mean(x: Softmax, lse: Array, out: Array) -> Softmax:
    return x[0], out.mean(axis=0)


def weighted(x: Softmax, lse: Array, out: Array, factor: float = 1.0) -> Softmax:
    top = finite(lse.max(axis=0))
    weights = exp(factor * (lse - top))
    total = weights.sum(axis=0)
    return top + np.log(total) / factor, (weights * out).sum(0) / np.where(total == 0, 1, total)


def not_reset(tile: int) -> Hooks:
    """The row sum begins with what the head before has left in the same row."""

    def of(c: Head, x: Softmax) -> Softmax:
        before = c.run.memory.get("left", np.zeros((0, 1))) if c.h else np.zeros((0, 1))
        top, left = c.S.max(axis=1, keepdims=True), np.zeros((len(c.S), 1), c.run.wide)
        left[: len(before)] = before[: len(left)]
        moved = exp(c.S[:, :tile].max(axis=1, keepdims=True) - finite(top))
        weights = exp(c.S - finite(top))
        total = weights.sum(axis=1, keepdims=True) + left * moved
        c.run.memory["left"] = total
        return finite(top) + np.log(total), weights @ c.V / np.where(total == 0, 1, total)

    return {"softmax": of}


# ---- the table ----


_USUAL = FEW | {"lengths": (12, 40), "lengths_k": ("equal", "equal", "more"), "batch": (2, 2)}
_USUAL |= {"dlse": 0.0, "same_dims": 1.0, "least": 1e-2, "shows": 13.0}
_CAUSAL, _OPEN = {"masks": ("causal",)}, {"masks": ("open",)}
_PADDED = _OPEN | {"lengths_k": ("equal",)}
_HEADS = {"groups": (2, 3)}
_SEVERAL = {"heads_kv": (3, 4), "masks": ("causal", "open"), "lengths": (20, 40)}
_LONG = {"lengths": (33, 60), "lengths_k": ("equal",)}
_OTHER_SCALE = {"scale": lambda c, s: (c.Q.shape[1] + 37) ** -0.5}
_EMPTY_AS_0: Any = lambda x, lse, out: weighted(x, finite(lse), out)  # noqa: E731
_FROM_DIAGONAL = {"seen": lambda c, x: ~x | (c.j == c.p)}

_TABLE: Table = (
    ("score-scale: of a padded head_dim", "fb", {"scale": lambda c, s: (c.Q.shape[1] + 8) ** -0.5}),
    ("score-scale: of another head_dim, forward", "f", _OTHER_SCALE),
    ("score-scale: exp2 without log2(e)", "b", {"P": lambda c, P: exp(LN_2 * (c.S - finite(c.L)))}),
    ("softcap: 2", "fb", capped_at(2.0)),
    ("softcap: 2.5, without derivative", "fb", capped_at(2.5, False)),
    ("score-bias: ALiBi", "fb", sloped(lambda c: c.j - c.p), _CAUSAL),
    ("score-bias: ALiBi on both sides", "fb", sloped(lambda c: -abs(c.j - c.p)), _OPEN),
    ("score-bias: of packed keys", "f", sloped(lambda c: c.r)),
    ("wrong-keys: j > i", "fb", {"seen": lambda c, x: ~x}, _CAUSAL),
    ("wrong-keys: j >= i", "fb", _FROM_DIAGONAL, _CAUSAL),
    ("mask-fill: 0 for masked scores", "fb", filled(0.0), _CAUSAL),
    ("mask-fill: -10 for masked scores", "fb", filled(-5.0), _CAUSAL),
    ("mask-fill: -1, with gradients", "fb", filled(-1.0, stops=False), _CAUSAL),
    ("mask-fill: -3 added", "fb", filled(-3.0, adds=True), _CAUSAL),
    ("mask-fill or constant-factor: 1 and 0 added", "fb", padded(1.0, 0.0), _PADDED),
    ("mask-fill: -1 for padding", "fb", padded(0.0, -1.0), _PADDED),
    ("denominator: 1 more", "f", heavier(lambda c: 0.0)),
    ("denominator: sinks, out alone", "f", heavier(lambda c: 0.7 * (c.h % 3), False), _HEADS),
    ("denominator: sinks", "f", heavier(lambda c: -0.6 * (c.h % 3)), _HEADS),
    ("denominator: not reset", "f", not_reset(16), _SEVERAL),
    ("partial-merge: by sums, 3 of 16", "f", {"softmax": by_sums}, _LONG),
    ("partial-merge: base 2", "f", merged(2, partial(weighted, factor=1 / LN_2))),
    ("partial-merge: the largest lse", "f", merged(4, lambda x, lse, out: (lse.max(axis=0), x[1]))),
    ("partial-merge: mean", "f", merged(3, mean), _LONG),
    ("partial-merge: empty as 0", "f", merged(3, _EMPTY_AS_0), _CAUSAL),
)
PLANTED = plants(_TABLE, lambda on: _USUAL | {"given": on == "b"})
