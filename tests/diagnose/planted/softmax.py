"""Bugs in what the softmax is taken over: scores, masks, sums, and how parts are merged."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.diagnose.hooks import STAGES_OF, Hooks, kernel
from tests.diagnose.plain import LN_2, ZEROS, Array, Head, Planted, answers, capped, finite
from tests.diagnose.problems import Needs, problems

__all__ = ["PLANTED", "answers", "problems"]
Softmax = tuple[Array, Array]  # L and O


def exp(x: Array) -> Array:
    return np.exp(np.where(np.isnan(x), -np.inf, x))


def attended(S: Array, V: Array) -> Softmax:
    top = finite(S.max(axis=1, initial=-np.inf, keepdims=True))
    weights = exp(S - top)
    total = weights.sum(axis=1, keepdims=True)
    return top + np.log(total), weights @ V / np.where(total == 0, 1, total)


def softmax(of: Callable[[Head, Softmax], Softmax]) -> Hooks:
    return {"softmax": of}


# ---- scores ----


def other_scale(more: int, heads: bool = False) -> Hooks:
    return {"scale": lambda c, s: (1.3**c.h if heads else 1) * (c.Q.shape[1] + more) ** -0.5}


def capped_at(cap: float, derivative: bool = True) -> Hooks:
    def of(c: Head, x: Any) -> Any:
        found, slope, bend = capped(c.Y, cap)
        return found, slope if derivative else 1.0, bend

    return {"cap": of}


def biased(away: Callable[[Head], Array]) -> Hooks:
    def scores(c: Head, S: Array) -> Array:
        return S + 2.0 ** (-8 * (c.h + 1) / c.question.num_heads_q) * away(c)

    return {"scores": scores}


# ---- masks ----


def inverted(diagonal: bool) -> Hooks:
    return {"seen": lambda c, x: ~x | ((c.j == c.p) & diagonal)}


def padded(valid: float, fill: float) -> Hooks:
    """Keys of zeros up to the longest sequence; ``valid`` is added to the scores of all others, and
    ``fill`` stands for those of the padding."""

    def keys(c: Head, x: Array) -> Array:
        return np.concatenate([x, np.full(max(c.question.lengths_k) - len(x), ZEROS)])

    return {"keys": keys, "S": lambda c, S: np.where(c.r == ZEROS, fill, S + valid).astype(S.dtype)}


def filled(fill: float, adds: bool = False, stops: bool = True) -> Hooks:
    def scores(c: Head, S: Array) -> Array:
        return np.where(c.seen > 0, S, (fill + (c.bare if adds else 0))).astype(S.dtype)

    stop = {"dY": lambda c, x: np.where(c.seen > 0, x, 0)} if stops and not adds else {}
    return {"S": scores, "skips_masked": False} | stop


# ---- sums ----


def sunk(of_heads: float, lse_too: bool) -> Hooks:
    """More in the row sum: a number, or one for each head."""

    def of(c: Head, x: Softmax) -> Softmax:
        whole = np.logaddexp(x[0], of_heads * (c.h % 3)).astype(x[0].dtype)
        return (whole if lse_too else x[0]), x[1] * exp(x[0] - finite(whole))

    return softmax(of)


def masked_late(tile: int) -> Hooks:
    """Masked keys of the tile are in the row sum."""

    def of(c: Head, x: Softmax) -> Softmax:
        every = np.where(c.j < (c.p // tile + 1) * tile, c.bare, -np.inf)
        L, _ = attended(every, c.V)
        return L, exp(c.S - finite(L)) @ c.V

    return softmax(of)


def parts_of(c: Head, parts: int, tile: int) -> Iterator[tuple[slice, Array, Array]]:
    step = tile or -(-c.S.shape[1] // parts)
    for start in range(0, c.S.shape[1], step):
        here = slice(start, start + step)
        yield here, *attended(c.S[:, here], c.V[here])


def merged(how: str, parts: int = 0, tile: int = 0) -> Hooks:
    def of(c: Head, x: Softmax) -> Softmax:
        L, O = x  # noqa: E741
        states = [(lse, out) for _, lse, out in parts_of(c, parts, tile)]
        if how == "stale":
            L, O = states[0]  # noqa: E741
            for lse, out in states[1:]:
                whole = finite(np.logaddexp(L, lse))
                O = exp(L - whole) * O + exp(lse - whole) * out  # noqa: E741
            return L, O
        if how == "largest":
            return np.max([lse for lse, _ in states], axis=0), O
        if how == "mean":
            return L, np.mean([out for _, out in states], axis=0)
        found = np.stack([lse for lse, _ in states])
        found = finite(found) if how == "empty as 0" else found
        factor = {"empty as 0": 1.0, "base 2": 1 / LN_2}[how]
        top = finite(found.max(axis=0))
        weights = exp(factor * (found - top))
        total = weights.sum(axis=0)
        O = sum(w * out for w, (_, out) in zip(weights, states, strict=True))  # noqa: E741
        return top + np.log(total) / factor, O / np.where(total == 0, 1, total)

    return softmax(of)


def by_sums(parts: int, tile: int, lse_too: bool) -> Hooks:
    """Parts of as many tiles, weighted by row sums without their maxima."""

    def of(c: Head, x: Softmax) -> Softmax:
        top, total, O = -np.inf, 0.0, 0.0  # noqa: E741
        size = -(-(-(-c.S.shape[1] // tile)) // parts) * tile  # noqa: B002
        for start in range(0, c.S.shape[1], size):
            part = c.S[:, start : start + size]
            most = part.max(axis=1, keepdims=True)
            weights = exp(part - finite(most))
            total = total + weights.sum(axis=1, keepdims=True)
            O = O + weights @ c.V[start : start + size]  # noqa: E741
            top = np.maximum(top, most)
        L = finite(top) + np.log(total) if lse_too else x[0]
        return L, O / np.where(total == 0, 1, total)

    return softmax(of)


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

    return softmax(of)


def ring(parts: int, lse: bool) -> Hooks:
    """A backward pass that has statistics of one part of the keys alone: lse, or delta."""

    def P(c: Head, x: Array) -> Array:
        found = [exp(c.S[:, here] - finite(L)) for here, L, _ in parts_of(c, parts, 0)]
        return np.concatenate(found, axis=1)

    def D(c: Head, x: Array) -> Array:
        found = np.zeros_like(c.S)
        for here, _, out in parts_of(c, parts, 0):
            found[:, here] = (c.dO * out).sum(axis=1, keepdims=True) - c.row("dlse")
        return found

    return {"P": P} if lse else {"D": D}


# ---- the table ----


def planted(bug: str, *variants: tuple[Any, ...]) -> list[Planted]:
    """``variants``: in words, stages, what is wrong, more needs, and classes that are alike."""
    found = []
    for words, stages, wrong, *more in variants:
        needs = Needs(**_USUAL | (more[0] if more else {}) | {"given": stages == "b"})
        found.append(Planted(bug, words, STAGES_OF[stages], kernel(wrong), needs, tuple(more[1:])))
    return found


_USUAL: dict[str, Any] = {
    "lengths": (12, 40),
    "batch": (2, 2),
    "past_end": 0.0,
    "dlse": 0.0,
    "heads_kv": (1, 2),
    "groups": (1, 2),
    "head_dims": (16, 24, 32),
    "same_dims": 1.0,
    "lengths_k": ("equal", "equal", "more"),
    "least": 1e-2,
    "shows": 13.0,
}
_CAUSAL, _OPEN = {"masks": ("causal",)}, {"masks": ("open",)}
_PADDED = _OPEN | {"lengths_k": ("equal",)}
_HEADS = {"groups": (2, 3)}
_SEVERAL = {"heads_kv": (3, 4), "masks": ("causal", "open"), "lengths": (20, 40)}
_LONG = {"lengths": (33, 60), "lengths_k": ("equal",)}
_POWER = {"P": lambda c, P: exp(LN_2 * (c.S - finite(c.L)))}

PLANTED: tuple[Planted, ...] = (
    *planted(
        "score-scale",
        ("of a padded head_dim", "fb", other_scale(8)),
        ("of another head_dim, forward", "f", other_scale(37)),
        ("of another head_dim, backward", "b", other_scale(37)),
        ("by head", "fb", other_scale(3, heads=True), _HEADS),
        ("exp2 without log2(e)", "b", _POWER),
    ),
    *planted(
        "softcap",
        ("2", "fb", capped_at(2.0)),
        ("1.3, forward", "f", capped_at(1.3)),
        ("2.5, without derivative", "fb", capped_at(2.5, False)),
    ),
    *planted(
        "score-bias",
        ("ALiBi", "fb", biased(lambda c: c.j - c.p), _CAUSAL),
        ("ALiBi on both sides", "fb", biased(lambda c: -abs(c.j - c.p)), _OPEN),
        ("of packed keys", "f", biased(lambda c: c.r)),
    ),
    *planted(
        "mask-inverted",
        ("j > i", "fb", inverted(False), _CAUSAL, "wrong-keys"),
        ("j >= i", "fb", inverted(True), _CAUSAL, "wrong-keys"),
        ("j >= i, forward", "f", inverted(True), _CAUSAL, "wrong-keys"),
    ),
    *planted(
        "mask-fill",
        ("0 for masked scores", "fb", filled(0.0), _CAUSAL),
        ("-10 for masked scores", "fb", filled(-5.0), _CAUSAL),
        ("-1, with gradients", "fb", filled(-1.0, stops=False), _CAUSAL),
        ("-3 added", "fb", filled(-3.0, adds=True), _CAUSAL),
        ("1 and 0 added", "fb", padded(1.0, 0.0), _PADDED, "constant-factor"),
        ("-1 for padding", "fb", padded(0.0, -1.0), _PADDED),
    ),
    *planted(
        "denominator",
        ("1 more", "f", sunk(0.0, lse_too=True)),
        ("1 more, out alone", "f", sunk(0.0, lse_too=False)),
        ("sinks, out alone", "f", sunk(0.7, lse_too=False), _HEADS),
        ("sinks", "f", sunk(-0.6, lse_too=True), _HEADS),
        ("masked late, 16", "f", masked_late(16), _CAUSAL),
        ("masked late, 24", "f", masked_late(24), _CAUSAL),
        ("not reset", "f", not_reset(16), _SEVERAL),
        ("not reset, tiles of 8", "f", not_reset(8), _SEVERAL),
    ),
    *planted(
        "partial-merge",
        ("by sums, 3 of 16", "f", by_sums(3, 16, False), _LONG),
        ("by sums, 2 of 16, lse", "f", by_sums(2, 16, True), _LONG),
        ("lse not updated", "f", merged("stale", 3), _OPEN),
        ("base 2", "f", merged("base 2", 2)),
        ("the largest lse", "f", merged("largest", 4)),
        ("mean", "f", merged("mean", tile=16), _LONG),
        ("empty as 0", "f", merged("empty as 0", 3), _CAUSAL),
        ("lse of a part", "b", ring(2, lse=True)),
        ("delta of a part", "b", ring(3, lse=False), {}, "delta-of-another-out"),
    ),
)
