"""Attention one head at a time, and the same with bugs in what the softmax is taken over.

Separate from what rawattn-check matches answers with. A bug is a subclass of ``Kernel`` that does
one step of it differently. As autograd has it, the backward pass gets out and lse of the forward.

Long by the bugs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from tests.diagnose.planted.first import FLOAT64, Array, Needs, difference, draw, showing

BOTH, FORWARD, BACKWARD = ("forward", "backward"), ("forward",), ("backward",)
LN_2 = log(2)


class Head(NamedTuple):
    """The rows of a query head in a sequence, and the keys there; ``padded``: to the longest."""

    question: Question
    h: int
    Q: Array
    K: Array
    V: Array
    dO: Array
    dL: Array
    i: Array  # positions of queries, counted from the first key
    j: Array
    first: tuple[int, int]  # rows of q and of k before them
    padded: int

    @property
    def seen(self) -> Array:
        left, right = self.question.mask_window
        away = self.j[None, :] - self.i[:, None]
        return ((left < 0) | (away >= -left)) & ((right < 0) | (away <= right))


class Kernel:
    """Nothing is wrong."""

    def inputs(self, head: Head) -> Head:
        return head

    def scale(self, head: Head) -> float:
        return head.question.scale

    def scores(self, head: Head) -> Array:
        return self.scale(head) * (head.Q @ head.K.T)

    def masked(self, head: Head, S: Array) -> Array:
        return np.where(head.seen, S, -np.inf)

    def softmax(self, head: Head, S: Array) -> tuple[Array, Array]:
        return attended(S, head.V)

    def weights(self, head: Head, S: Array, L: Array) -> Array:
        return exp(S - finite(L)[:, None])

    def delta(self, head: Head, S: Array, O: Array) -> Array:  # noqa: E741
        return (head.dO * O).sum(axis=1, keepdims=True)

    def of_scores(self, head: Head, dS: Array, S: Array) -> Array:
        return dS

    def stored(self, head: Head, dQ: Array, dK: Array) -> tuple[Array, Array]:
        return dQ, dK


def exp(x: Array) -> Array:
    return np.where(np.isneginf(x), 0, np.exp(np.where(np.isneginf(x), 0, x)))


def finite(L: Array) -> Array:
    return np.where(np.isneginf(L), 0, L)


def attended(S: Array, V: Array) -> tuple[Array, Array]:
    top = finite(S.max(axis=1, initial=-np.inf))
    weights = exp(S - top[:, None])
    total = weights.sum(axis=1)
    L = top + np.log(total)
    return L, weights @ V / np.where(total == 0, 1, total)[:, None]


# ---- scores ----


class OtherScale(Kernel):
    def __init__(self, more: int = 8, heads: bool = False) -> None:
        self.more, self.heads = more, heads

    def scale(self, head: Head) -> float:
        by_head = 1.3**head.h if self.heads else 1
        return by_head * (head.Q.shape[1] + self.more) ** -0.5


class Power(Kernel):
    def weights(self, head: Head, S: Array, L: Array) -> Array:
        return exp(LN_2 * (S - finite(L)[:, None]))


class Capped(Kernel):
    def __init__(self, cap: float, derivative: bool = True) -> None:
        self.cap, self.derivative = cap, derivative

    def scores(self, head: Head) -> Array:
        return self.cap * np.tanh(super().scores(head) / self.cap)

    def of_scores(self, head: Head, dS: Array, S: Array) -> Array:
        slope = 1 - (self.scores(head) / self.cap) ** 2
        return dS * slope if self.derivative else dS


class Biased(Kernel):
    def __init__(self, form: str) -> None:
        self.form = form

    def scores(self, head: Head) -> Array:
        slope = 2.0 ** (-8 * (head.h + 1) / head.question.num_heads_q)
        away = head.j[None, :] - head.i[:, None].astype(np.float64)
        if self.form == "symmetric":
            away = -np.abs(away)
        if self.form == "keys alone":
            away = away * 0 + head.j + head.first[1]
        return super().scores(head) + slope * away


class Rotated(Kernel):
    def __init__(self, of: str, neighbours: bool = False, back: bool = False) -> None:
        self.of, self.neighbours, self.back = of, neighbours, back

    def turned(self, x: Array, positions: Array, sign: int) -> Array:
        d = x.shape[1]
        found = x.copy()
        for pair in range(d // 2):
            a, b = (2 * pair, 2 * pair + 1) if self.neighbours else (pair, pair + d // 2)
            angle = sign * positions * 10000.0 ** (-2 * pair / d)
            found[:, a] = x[:, a] * np.cos(angle) - x[:, b] * np.sin(angle)
            found[:, b] = x[:, a] * np.sin(angle) + x[:, b] * np.cos(angle)
        return found

    def inputs(self, head: Head) -> Head:
        if "q" in self.of:
            head = head._replace(Q=self.turned(head.Q, head.i, 1))
        if "k" in self.of:
            head = head._replace(K=self.turned(head.K, head.j, 1))
        return head

    def stored(self, head: Head, dQ: Array, dK: Array) -> tuple[Array, Array]:
        if self.back:
            dQ = self.turned(dQ, head.i, -1)
            dK = self.turned(dK, head.j, -1)
        return dQ, dK


# ---- masks ----


class Inverted(Kernel):
    def __init__(self, diagonal: bool) -> None:
        self.diagonal = diagonal

    def masked(self, head: Head, S: Array) -> Array:
        own = head.j[None, :] == head.i[:, None]
        return np.where(~head.seen | (own & self.diagonal), S, -np.inf)


class Padded(Kernel):
    """Keys of zeros up to the longest sequence; ``valid`` is added to the scores of all others, and
    ``fill`` stands for those of the padding."""

    def __init__(self, valid: float, fill: float) -> None:
        self.valid, self.fill = valid, fill

    def inputs(self, head: Head) -> Head:
        zeros = np.zeros((head.padded, head.K.shape[1]), dtype=head.K.dtype)
        more = np.zeros((head.padded, head.V.shape[1]), dtype=head.V.dtype)
        j = np.arange(len(head.K) + head.padded)
        return head._replace(K=np.vstack([head.K, zeros]), V=np.vstack([head.V, more]), j=j)

    def masked(self, head: Head, S: Array) -> Array:
        here = len(head.K) - head.padded
        S[:, :here] += self.valid
        S[:, here:] = self.fill
        return S

    def stored(self, head: Head, dQ: Array, dK: Array) -> tuple[Array, Array]:
        return dQ, dK[: len(dK) - head.padded]


class Filled(Kernel):
    def __init__(self, fill: float, adds: bool = False, stops: bool = True) -> None:
        self.fill, self.adds, self.stops = fill, adds, stops

    def masked(self, head: Head, S: Array) -> Array:
        return np.where(head.seen, S, self.fill + (S if self.adds else 0))

    def of_scores(self, head: Head, dS: Array, S: Array) -> Array:
        return np.where(head.seen, dS, 0) if self.stops and not self.adds else dS


# ---- sums ----


class Sunk(Kernel):
    """More in the row sum: a number, or one for each head."""

    def __init__(self, of_heads: float, lse_too: bool) -> None:
        self.of_heads, self.lse_too = of_heads, lse_too

    def softmax(self, head: Head, S: Array) -> tuple[Array, Array]:
        L, O = attended(S, head.V)  # noqa: E741
        whole = np.logaddexp(L, self.of_heads * (head.h % 3))
        return (whole if self.lse_too else L), O * exp(L - finite(whole))[:, None]


class MaskedLate(Kernel):
    """Masked keys of the tile are in the row sum."""

    def __init__(self, tile: int) -> None:
        self.tile = tile

    def softmax(self, head: Head, S: Array) -> tuple[Array, Array]:
        end = (head.i // self.tile + 1) * self.tile
        every = np.where(head.j[None, :] < end[:, None], self.scores(head), -np.inf)
        L, _ = attended(every, head.V)
        return L, exp(S - finite(L)[:, None]) @ head.V


class OfLanes(Kernel):
    """Lanes have sums of their own keys, which nobody adds up."""

    def softmax(self, head: Head, S: Array) -> tuple[Array, Array]:
        O = np.zeros((len(S), head.V.shape[1]))  # noqa: E741
        sums = []
        for half in (0, 1):
            L, _ = attended(S[:, head.j % 4 // 2 == half], head.V[head.j % 4 // 2 == half])
            columns = np.arange(head.V.shape[1]) % 4 // 2 == half
            O[:, columns] = exp(S - finite(L)[:, None]) @ head.V[:, columns]
            sums.append(L)
        return sums[0], O


class Merged(Kernel):
    def __init__(self, how: str, parts: int = 0, tile: int = 0) -> None:
        self.how, self.parts, self.tile = how, parts, tile

    def of_parts(self, head: Head, S: Array) -> Iterator[tuple[slice, Array, Array]]:
        step = self.tile or -(-S.shape[1] // self.parts)
        for start in range(0, S.shape[1], step):
            here = slice(start, start + step)
            yield here, *attended(S[:, here], head.V[here])

    def softmax(self, head: Head, S: Array) -> tuple[Array, Array]:
        L, O = attended(S, head.V)  # noqa: E741
        parts = [(lse, out) for _, lse, out in self.of_parts(head, S)]
        if self.how == "stale":
            L, O = parts[0]  # noqa: E741
            for lse, out in parts[1:]:
                whole = finite(np.logaddexp(L, lse))
                O = exp(L - whole)[:, None] * O + exp(lse - whole)[:, None] * out  # noqa: E741
            return L, O
        if self.how == "largest":
            return np.max([lse for lse, _ in parts], axis=0), O
        if self.how == "mean":
            return L, np.mean([out for _, out in parts], axis=0)
        lse = np.stack([lse for lse, _ in parts])
        if self.how == "empty as 0":
            lse = finite(lse)
        factor = {"empty as 0": 1.0, "base 2": 1 / LN_2}[self.how]
        top = finite(lse.max(axis=0))
        weights = exp(factor * (lse - top))
        total = weights.sum(axis=0)
        O = sum(w[:, None] * out for w, (_, out) in zip(weights, parts, strict=True))  # noqa: E741
        return top + np.log(total) / factor, O / np.where(total == 0, 1, total)[:, None]


class BySums(Merged):
    """Parts of as many tiles, weighted by row sums without their maxima."""

    def __init__(self, parts: int, tile: int, lse_too: bool) -> None:
        super().__init__("sums", parts, tile)
        self.lse_too = lse_too

    def softmax(self, head: Head, S: Array) -> tuple[Array, Array]:
        L, _ = attended(S, head.V)
        top, total, O = -np.inf, 0.0, 0.0  # noqa: E741
        size = -(-(-(-S.shape[1] // self.tile)) // self.parts) * self.tile  # noqa: B002
        for start in range(0, S.shape[1], size):
            part = S[:, start : start + size]
            most = part.max(axis=1)
            weights = exp(part - finite(most)[:, None])
            total = total + weights.sum(axis=1)
            O = O + weights @ head.V[start : start + size]  # noqa: E741
            top = np.maximum(top, most)
        return (finite(top) + np.log(total) if self.lse_too else L), O / np.where(
            total == 0, 1, total
        )[:, None]


class NotReset(Kernel):
    """The row sum begins with what the head before has left in the same row."""

    def __init__(self, tile: int) -> None:
        self.tile, self.left = tile, np.zeros(0)

    def softmax(self, head: Head, S: Array) -> tuple[Array, Array]:
        if head.h == 0:
            self.left = np.zeros(0)
        top = S.max(axis=1)
        left = np.zeros(len(S))
        left[: len(self.left)] = self.left[: len(S)]
        moved = exp(S[:, : self.tile].max(axis=1) - finite(top))
        weights = exp(S - finite(top)[:, None])
        total = weights.sum(axis=1) + left * moved
        self.left = total
        return finite(top) + np.log(total), weights @ head.V / np.where(total == 0, 1, total)[
            :, None
        ]


class OfRing(Merged):
    """A backward pass that has statistics of one part of the keys alone."""

    def softmax(self, head: Head, S: Array) -> tuple[Array, Array]:
        return attended(S, head.V)

    def weights(self, head: Head, S: Array, L: Array) -> Array:
        if self.how == "delta":
            return super().weights(head, S, L)
        found = np.zeros_like(S)
        for here, lse, _ in self.of_parts(head, S):
            found[:, here] = exp(S[:, here] - finite(lse)[:, None])
        return found

    def delta(self, head: Head, S: Array, O: Array) -> Array:  # noqa: E741
        if self.how == "lse":
            return super().delta(head, S, O)
        found = np.zeros_like(S)
        for here, _, out in self.of_parts(head, S):
            found[:, here] = super().delta(head, S, out)
        return found


# ---- the table ----


@dataclass(frozen=True)
class Planted:
    """A bug of class ``bug``, in ``stages``. ``also``: classes that are the same function."""

    bug: str
    variant: str
    stages: tuple[str, ...]
    kernel: Kernel
    needs: Needs
    also: tuple[str, ...] = ()


def _needs(**changes: Any) -> Needs:
    usual: dict[str, Any] = {"lengths": (12, 40), "batch": (2, 2), "past_end": 0.0, "dlse": 0.0}
    heads = {"heads_kv": (1, 2), "groups": (1, 2), "head_dims": (16, 24, 32), "same_dims": 1.0}
    return Needs(**usual | heads | {"lengths_k": ("equal", "equal", "more")} | changes)


_ANY = _needs()
_CAUSAL = _needs(masks=("causal",))
_OPEN = _needs(masks=("open",))
_PADDED = _needs(masks=("open",), lengths_k=("equal",))
_HEADS = _needs(groups=(2, 3), heads_kv=(1, 2))
_SEVERAL = _needs(heads_kv=(3, 4), masks=("causal", "open"), lengths=(20, 40))
_LONG = _needs(lengths=(33, 60), lengths_k=("equal",))

_KEYS = ("wrong-keys",)

PLANTED: tuple[Planted, ...] = (
    Planted("score-scale", "of a padded head_dim", BOTH, OtherScale(8), _ANY),
    Planted("score-scale", "of another head_dim, forward", FORWARD, OtherScale(37), _ANY),
    Planted("score-scale", "of another head_dim, backward", BACKWARD, OtherScale(37), _ANY),
    Planted("score-scale", "by head", BOTH, OtherScale(3, heads=True), _HEADS),
    Planted("score-scale", "exp2 without log2(e)", BACKWARD, Power(), _ANY),
    Planted("softcap", "2", BOTH, Capped(2.0), _ANY),
    Planted("softcap", "1.3, forward", FORWARD, Capped(1.3), _ANY),
    Planted("softcap", "2.5, without derivative", BOTH, Capped(2.5, False), _ANY),
    Planted("score-bias", "ALiBi", BOTH, Biased("j - i"), _CAUSAL),
    Planted("score-bias", "ALiBi on both sides", BOTH, Biased("symmetric"), _OPEN),
    Planted("score-bias", "of packed keys", FORWARD, Biased("keys alone"), _ANY),
    Planted("rotary", "k", BOTH, Rotated("k"), _ANY),
    Planted("rotary", "q and k, neighbours", BOTH, Rotated("qk", neighbours=True), _LONG),
    Planted("rotary", "q, forward", FORWARD, Rotated("q"), _ANY),
    Planted("rotary", "gradients back", BACKWARD, Rotated("", back=True), _ANY),
    Planted("mask-inverted", "j > i", BOTH, Inverted(False), _CAUSAL, _KEYS),
    Planted("mask-inverted", "j >= i", BOTH, Inverted(True), _CAUSAL, _KEYS),
    Planted("mask-inverted", "j >= i, forward", FORWARD, Inverted(True), _CAUSAL, _KEYS),
    Planted("mask-fill", "0 for masked scores", BOTH, Filled(0.0), _CAUSAL),
    Planted("mask-fill", "-10 for masked scores", BOTH, Filled(-5.0), _CAUSAL),
    Planted("mask-fill", "-1, with gradients", BOTH, Filled(-1.0, stops=False), _CAUSAL),
    Planted("mask-fill", "-3 added", BOTH, Filled(-3.0, adds=True), _CAUSAL),
    Planted("mask-fill", "1 and 0 added", BOTH, Padded(1.0, 0.0), _PADDED),
    Planted("mask-fill", "-1 for padding", BOTH, Padded(0.0, -1.0), _PADDED),
    Planted("denominator", "1 more", FORWARD, Sunk(0.0, lse_too=True), _ANY),
    Planted("denominator", "1 more, out alone", FORWARD, Sunk(0.0, lse_too=False), _ANY),
    Planted("denominator", "sinks, out alone", FORWARD, Sunk(0.7, lse_too=False), _HEADS),
    Planted("denominator", "sinks", FORWARD, Sunk(-0.6, lse_too=True), _HEADS),
    Planted("denominator", "masked late, 16", FORWARD, MaskedLate(16), _CAUSAL),
    Planted("denominator", "masked late, 24", FORWARD, MaskedLate(24), _CAUSAL),
    Planted("denominator", "sums of lanes", FORWARD, OfLanes(), _OPEN),
    Planted("denominator", "not reset", FORWARD, NotReset(16), _SEVERAL),
    Planted("denominator", "not reset, tiles of 8", FORWARD, NotReset(8), _SEVERAL),
    Planted("partial-merge", "by sums, 3 of 16", FORWARD, BySums(3, 16, False), _LONG),
    Planted("partial-merge", "by sums, 2 of 16, lse", FORWARD, BySums(2, 16, True), _LONG),
    Planted("partial-merge", "lse not updated", FORWARD, Merged("stale", 3), _OPEN),
    Planted("partial-merge", "base 2", FORWARD, Merged("base 2", 2), _ANY),
    Planted("partial-merge", "the largest lse", FORWARD, Merged("largest", 4), _ANY),
    Planted("partial-merge", "mean", FORWARD, Merged("mean", tile=16), _LONG),
    Planted("partial-merge", "empty as 0", FORWARD, Merged("empty as 0", 3), _CAUSAL),
    Planted("partial-merge", "lse of a part", BACKWARD, OfRing("lse", 2), _ANY),
    Planted(
        "partial-merge",
        "delta of a part",
        BACKWARD,
        OfRing("delta", 3),
        _ANY,
        ("delta-of-another-out",),
    ),
)


# ---- answers ----


def answers(planted: Planted | None, question: Question, chance: int = 0) -> Answers:
    """out, lse, dq, dk and dv, by a kernel with this bug, or by a right one."""
    q, wide = question, np.dtype(np.float64 if question.dtype == FLOAT64 else np.float32)
    kernels = {s: planted.kernel if planted and s in planted.stages else Kernel() for s in BOTH}
    found: dict[str, Array] = {
        "out": np.zeros((*q.q.shape[:2], q.v.shape[2]), dtype=wide),
        "lse": np.full(q.q.shape[1::-1], -np.inf, dtype=wide),
        **{
            name: np.zeros(x.shape, dtype=wide)
            for name, x in zip(("dq", "dk", "dv"), (q.q, q.k, q.v), strict=True)
        },
    }
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(q.batch, q.num_heads_q):
            rows = slice(int(q.cu_seqlens_q[b]), int(q.cu_seqlens_q[b + 1]))
            keys = slice(int(q.cu_seqlens_k[b]), int(q.cu_seqlens_k[b + 1]))
            head = _head(q, h, rows, keys, max(q.lengths_k), wide)
            if len(head.Q) and len(head.K):
                L, O = _forward(kernels["forward"], head)  # noqa: E741
                found["lse"][h, rows], found["out"][rows, h] = L, O
                if q.dout is not None:
                    _backward(kernels["backward"], head, found, h, rows, keys)
    return {name: x if name == "lse" else x.astype(q.dtype) for name, x in found.items()}


def _head(q: Question, h: int, rows: slice, keys: slice, longest: int, wide: Any) -> Head:
    kv = h // q.group
    n, m = rows.stop - rows.start, keys.stop - keys.start
    arrays = (q.q[rows, h], q.k[keys, kv], q.v[keys, kv], q.dout[rows, h])
    no_lse = np.zeros(n) if q.dlse is None else q.dlse[h, rows]
    wide_arrays = [x.astype(wide) for x in arrays]
    first = rows.start, keys.start
    i, j = np.arange(n) + m - n, np.arange(m)
    return Head(q, h, *wide_arrays, no_lse.astype(wide), i, j, first, longest - m)


def _forward(kernel: Kernel, head: Head) -> tuple[Array, Array]:
    head = kernel.inputs(head)
    return kernel.softmax(head, kernel.masked(head, kernel.scores(head)))


def _backward(kernel: Kernel, head: Head, found: Answers, h: int, rows: slice, keys: slice) -> None:
    q, group = head.question, head.question.group
    out, lse = (found["out"], found["lse"]) if q.out is None else (q.out, q.lse)
    O, L = out[rows, h].astype(head.Q.dtype), lse[h, rows].astype(head.Q.dtype)  # noqa: E741
    head = kernel.inputs(head)
    S = kernel.masked(head, kernel.scores(head))
    P = kernel.weights(head, S, L)
    dS = P * (head.dO @ head.V.T - kernel.delta(head, S, O) + head.dL[:, None])
    dY = kernel.scale(head) * kernel.of_scores(head, dS, S)
    dQ, dK = kernel.stored(head, dY @ head.K, dY.T @ head.Q)
    found["dq"][rows, h] = dQ
    found["dk"][keys, h // group] += dK
    found["dv"][keys, h // group] += (P.T @ head.dO)[: keys.stop - keys.start]


def problems(planted: Planted, count: int, seed: int) -> Iterator[Question]:
    """``count`` questions on which ``planted`` shows: dtypes in turn."""

    def drawn(rng: np.random.Generator, number: int) -> Question:
        dtype = planted.needs.dtypes[number % len(planted.needs.dtypes)]
        given = "forward" not in planted.stages and bool((seed + number) % 2)
        return draw(planted.needs, rng, dtype, given=given)

    name = f"{planted.bug}, {planted.variant}"
    return showing(name, count, seed, drawn, partial(shows, planted))


def shows(planted: Planted, question: Question) -> bool:
    """Whether the bug changes results of its stages by more than rounding does."""
    wrong, right = answers(planted, question), answers(None, question)
    names = [name for stage in planted.stages for name in STAGES[stage] if name in right]
    bound = 1e-2 if question.dtype.itemsize > 2 else 0.1
    return max(difference(wrong[name], right[name]) for name in names) > bound
