"""Gradients whose sums lack terms, hold them twice, or have row terms of other rows: planted.

Loops over tiles of one head at a time, written apart from rawattn.reference and from what
rawattn-check plants. What is wrong is a field of ``Backward``, ``Forward``, ``Second`` or
``Lists``; with the fields as they are by default nothing is. Problems are drawn by ``planted``.

Long by the table of bugs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from tests.diagnose.planted.first import (
    BFLOAT16,
    FLOAT32,
    FLOAT64,
    Needs,
    difference,
    draw,
    showing,
)

Array = np.ndarray[Any, Any]
Rounded = Callable[[Array], Array]


class Rows(NamedTuple):
    """What a preprocess pass has at hand, rows as (num_heads_q, total_q)."""

    question: Question
    dout: Array  # (num_heads_q, total_q, columns)
    out: Array
    dlse: Array
    lse: Array
    row_max: Array

    @property
    def delta(self) -> Array:
        return (self.dout * self.out).sum(axis=2) - self.dlse


class Tiles(NamedTuple):
    """A pair of tiles in the loop: numbers of them, of the first and last ones that meet."""

    i: int
    j: int
    first_i: int
    last_i: int
    first_j: int
    last_j: int
    rows: slice
    seqlen_q: int
    head: int
    group: int


def once(tiles: Tiles) -> float:
    return 1.0


def unrounded(x: Array) -> Array:
    return x


@dataclass(frozen=True)
class Backward:
    """A backward pass. ``tensors``: those that ``often`` and the row terms of others are for."""

    tile_m: int = 32
    tile_n: int = 16
    delta: Callable[[Rows], Array] | None = None
    lse: Callable[[Rows], Array] | None = None
    dS: Callable[[Array, Array, Array], Array] | None = None  # of P, dP and D, over all keys
    tensors: tuple[str, ...] = ("dq", "dk", "dv")
    often: Callable[[Tiles], float] = once
    overwrites: bool = False  # each pair, in place of adding to the sum
    inside: str = ""  # "s": the scale, inside of the loop
    kept: Rounded = unrounded  # dS, on its way into the matmuls
    sums: Rounded = unrounded  # dk and dv, after every pair of tiles
    mask: tuple[int, int] | None = None  # another window


@dataclass(frozen=True)
class Forward:
    """An online softmax. ``factor``: the row whose factor rescales ``sums``; None for no factor."""

    factor: Callable[[Array], Array] | None = None
    sums: tuple[str, ...] = ()
    tile_n: int = 16
    backwards: bool = False
    late: bool = False  # the new tile, which is there already, is rescaled too
    power: float = 1.0  # of the factor


@dataclass(frozen=True)
class Second:
    """A double backward."""

    tile_m: int = 32
    tile_n: int = 16
    W: Callable[[Question, Array], Array] | None = None
    D: Callable[[Question, Array], Array] | None = None
    often: Callable[[Tiles], float] = once


@dataclass(frozen=True)
class Lists:
    """Block-sparse attention by lists of the queries of every block: of one selection."""

    changed: Callable[[list[list[int]]], list[list[int]]] | None = None


@dataclass(frozen=True)
class Planted:
    """A bug of class ``bug``, in ``stages``. ``also``: classes that are the same function."""

    bug: str
    variant: str
    stages: tuple[str, ...]
    kernel: Backward | Forward | Second | Lists
    needs: Needs
    also: tuple[str, ...] = ()
    dout: float = 1.0  # size of it


# ---- other row terms ----


def local(x: Array, question: Question) -> Array:
    """Read by the number of the row in its sequence, without the sequence's offset."""
    found = np.empty_like(x)
    for start, stop in _spans(question.cu_seqlens_q):
        found[:, start:stop] = x[:, : stop - start]
    return found


def swapped(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(x.shape[::-1]).T


def upper_rows(x: Array) -> Array:
    """Rows 8 to 15 of every 16 read those 8 before, of the whole array."""
    place = np.arange(x.shape[1])
    return x[:, np.where(place % 16 >= 8, place - 8, place)]


def in_tiles(x: Array, question: Question, tile: int) -> Array:
    """Row i % tile of the sequence."""
    found = np.empty_like(x)
    for start, stop in _spans(question.cu_seqlens_q):
        found[:, start:stop] = x[:, start + np.arange(stop - start) % tile]
    return found


def until(x: Array, last: int) -> Array:
    """0 in the rows from ``last`` on."""
    found = x.copy()
    found[:, last:] = 0
    return found


def tails(x: Array, question: Question, tile: int) -> Array:
    """0 in the last rows of every sequence, those of a partial tile."""
    found = x.copy()
    for start, stop in _spans(question.cu_seqlens_q):
        found[:, start + (stop - start) // tile * tile : stop] = 0
    return found


def with_residual(rows: Rows) -> Array:
    x = np.random.default_rng(3).standard_normal(rows.out.shape)
    return (rows.dout * (rows.out + x)).sum(axis=2) - rows.dlse


def by_queries(P: Array, dP: Array, D: Array) -> Array:
    return P * (dP - (P * dP).sum(axis=0))


def by_shards(count: int) -> Callable[[Array, Array, Array], Array]:
    """Every shard of the keys has the D of its own output."""

    def dS(P: Array, dP: Array, D: Array) -> Array:
        found = np.zeros_like(P)
        for shard in np.array_split(np.arange(P.shape[1]), count):
            weight = P[:, shard].sum(axis=1)
            own = (P[:, shard] * dP[:, shard]).sum(axis=1) / np.where(weight == 0, 1, weight)
            found[:, shard] = P[:, shard] * (dP[:, shard] - own[:, None])
        return found

    return dS


def of_dtype(dtype: Any) -> Rounded:
    return lambda x: x.astype(dtype).astype(x.dtype)


def flushed(x: Array) -> Array:
    return np.where(np.abs(x) < 2.0**-14, 0, x.astype(np.float16)).astype(x.dtype)


# ---- the table ----

_B, _TWO = ("backward",), {"batch": (2, 3), "lengths": (30, 90)}
_ONE = {"masks": ("open", "causal"), "lengths_k": ("equal",), "dlse": 0.0}
_ROWS = _TWO | _ONE
_HEADS = {"heads_kv": (2, 3)}
_FINE = {"dtypes": (FLOAT64, FLOAT32, FLOAT32)}
_LONG = {"lengths": (70, 130), "batch": (1, 2), "head_dims": (32, 64), "head_dims_v": (32, 64)}


def _planted(
    bug: str,
    needs: Mapping[str, Any],
    *variants: tuple[Any, ...],
    stages: tuple[str, ...] = _B,
    dout: float = 1.0,
) -> list[Planted]:
    found = []
    for words, kernel, *more in variants:
        wanted = Needs(**{**needs, **(more[0] if more else {})})
        same = more[1] if len(more) > 1 else ()
        found.append(Planted(bug, words, stages, kernel, wanted, same, dout))
    return found


def _delta(of: Callable[[Rows], Array], *tensors: str) -> Backward:
    return Backward(delta=of, tensors=tensors or ("dq", "dk"))


def _lse(of: Callable[[Rows], Array], *tensors: str) -> Backward:
    return Backward(lse=of, tensors=tensors or ("dq", "dk", "dv"))


def _some_lost(tiles: Tiles) -> float:
    return float(crc32(bytes([tiles.i, tiles.j, tiles.head, tiles.seqlen_q])) % 7 > 0)


PLANTED: tuple[Planted, ...] = (
    # ---- row terms ----
    *_planted(
        "delta-of-another-out",
        _ROWS,
        ("the first 16 columns", _delta(lambda r: (r.dout * r.out)[..., :16].sum(2)), _LONG),
        ("every second column", _delta(lambda r: (r.dout * r.out)[..., ::2].sum(2)), _LONG),
        ("out with a residual", _delta(with_residual)),
        ("dout of the row before", _delta(lambda r: (np.roll(r.dout, 1, 1) * r.out).sum(2))),
        (
            *("over the queries", Backward(dS=by_queries), {"lengths_k": ("equal",)}),
            ("softmax-axis",),
        ),
        ("of 3 shards", Backward(dS=by_shards(3)), {"masks": ("open",)}),
        ("of 2 shards", Backward(dS=by_shards(2)), {"masks": ("open",)}),
        ("in dk alone, of half the columns", _delta(lambda r: 0.5 * r.delta, "dk"), _LONG),
    ),
    *_planted(
        "delta-omitted",
        _ROWS,
        (
            "from the last whole tile of the pack on",
            _delta(lambda r: until(r.delta, r.delta.shape[1] // 64 * 64)),
            {"past_end": 0.0, "lengths": (41, 59), "batch": (2, 2)},
        ),
        ("in partial tiles", _delta(lambda r: tails(r.delta, r.question, 32))),
        ("in dk alone", _delta(lambda r: 0 * r.delta, "dk")),
    ),
    *_planted(
        "statistics-misplaced",
        _ROWS | _HEADS,
        ("D of 8 rows before", _delta(lambda r: upper_rows(r.delta))),
        ("D as (tokens, heads)", _delta(lambda r: swapped(r.delta))),
        ("D without offset", _delta(lambda r: local(r.delta, r.question))),
        ("D without offset, in dq alone", _delta(lambda r: local(r.delta, r.question), "dq")),
        ("D of a tile of 16", _delta(lambda r: in_tiles(r.delta, r.question, 16))),
        ("lse without offset", _lse(lambda r: local(r.lse, r.question))),
        ("lse as (tokens, heads)", _lse(lambda r: swapped(r.lse))),
        ("lse of the next head, in dv alone", _lse(lambda r: np.roll(r.lse, -1, 0), "dv")),
        ("lse of 0", _lse(lambda r: 0 * r.lse)),
    ),
    *_planted(
        "input-layout",
        _TWO | _HEADS | {"dlse": 1.0, "masks": ("open", "causal"), "lengths_k": ("equal",)},
        ("dlse as (tokens, heads)", _delta(lambda r: r.delta + r.dlse - swapped(r.dlse))),
    ),
    *_planted(
        "lse-gradient-sign",
        {"dlse": 1.0, "masks": ("open", "causal"), "lengths_k": ("equal",)},
        ("dlse in base 2", _delta(lambda r: r.delta + r.dlse - r.dlse * np.log(2))),
        ("dlse twice", _delta(lambda r: r.delta - r.dlse)),
    ),
    *_planted(
        "constant-factor",
        _ROWS,
        ("dP scaled", Backward(dS=lambda P, dP, D: P * (0.25 * dP - D))),
    ),
    *_planted(
        "mask-missing-in-backward",
        {"masks": ("causal",), "lengths_k": ("equal",), "lengths": (10, 90)},
        ("in dv alone", Backward(mask=(-1, -1), tensors=("dv",))),
        ("in dq alone", Backward(mask=(-1, -1), tensors=("dq",))),
    ),
    *_planted(
        "causal-off-by-one",
        {"masks": ("causal",), "lengths_k": ("equal",), "lengths": (10, 60)},
        ("in dk and dv", Backward(mask=(-1, 1), tensors=("dk", "dv"))),
    ),
    # ---- pairs ----
    *_planted(
        "pairs-dropped",
        _LONG | {"lengths_k": ("equal",)},
        (
            "the first query tile rounded up",
            Backward(
                tile_m=64, tile_n=32, often=lambda t: float(t.i >= -(-t.j // 2) or t.i > t.first_i)
            ),
            {"masks": ("causal",)},
        ),
        (
            "the last query tile rounded down",
            Backward(tile_n=32, often=lambda t: float(t.i < t.last_i or t.first_i == t.last_i)),
            {"masks": ("window",), "lengths": (90, 130)},
        ),
        ("by chance", Backward(often=_some_lost), {"lengths": (90, 130)}),
        (
            "the diagonal in dq alone",
            Backward(tile_m=32, tile_n=32, often=lambda t: float(t.i != t.j), tensors=("dq",)),
            {"masks": ("causal",)},
            ("tile-skipped",),
        ),
    ),
    *_planted(
        "tile-counted-twice",
        _LONG | {"lengths_k": ("equal",)},
        (
            "the diagonal in dk and dv",
            Backward(
                tile_m=32, tile_n=32, often=lambda t: 1.0 + (t.i == t.j), tensors=("dk", "dv")
            ),
            {"masks": ("causal",)},
        ),
        (
            "the last query tile",
            Backward(often=lambda t: 1.0 + (t.i == t.last_i), tensors=("dk", "dv")),
            {"masks": ("open",)},
        ),
    ),
    *_planted(
        "tail-tile-dropped",
        _LONG | {"masks": ("open",), "lengths": (102, 122), "lengths_k": ("equal",)},
        (
            "of queries, in dk and dv",
            Backward(
                often=lambda t: float(t.rows.stop <= t.seqlen_q // 32 * 32), tensors=("dk", "dv")
            ),
        ),
    ),
    *_planted(
        "tile-overwrites",
        _LONG | {"lengths": (100, 130), "groups": (2, 4), "lengths_k": ("equal",)},
        (
            "dk and dv of the last head and tile",
            Backward(overwrites=True, tensors=("dk", "dv")),
            {"masks": ("open",)},
        ),
    ),
    *_planted(
        "gqa-group-not-summed",
        {"groups": (2, 4), "lengths": (20, 90), "lengths_k": ("equal",)},
        (
            "dv alone",
            Backward(often=lambda t: float(t.head % t.group == t.group - 1), tensors=("dv",)),
        ),
        (
            "dk alone, the first",
            Backward(often=lambda t: float(t.head % t.group == 0), tensors=("dk",)),
        ),
    ),
    *_planted(
        "output-scale",
        _LONG | {"scaled": 0.0, "masks": ("open", "causal"), "lengths_k": ("equal",)},
        ("dk inside of the loop", Backward(inside="s", tensors=("dk",))),
        ("dq inside of the loop", Backward(inside="s", tensors=("dq",), tile_n=32)),
    ),
    # ---- 16 bits ----
    *_planted(
        "underflow-in-16-bit",
        _FINE | {"dlse": 0.0},
        ("dS in float16", Backward(kept=of_dtype(np.float16))),
        dout=1e-6,
    ),
    *_planted(
        "underflow-in-16-bit",
        _FINE | {"dlse": 0.0},
        ("dS in float16, flushed to 0", Backward(kept=flushed)),
        dout=3e-3,
    ),
    *_planted(
        "narrow-intermediate",
        {"dtypes": (FLOAT32,) * 3, "dlse": 0.0},  # beside float64's noise it is "unknown" as yet
        ("dS in float8", Backward(kept=of_dtype(ml_dtypes.float8_e5m2))),
    ),
    *_planted(
        "accumulates-in-16-bit",
        {"dtypes": (BFLOAT16,) * 3, "lengths": (140, 200), "batch": (1, 2), "groups": (2, 4)}
        | {"head_dims": (32,), "head_dims_v": (32,), "dlse": 0.0, "lengths_k": ("equal",)}
        | {"heads_kv": (1,), "masks": ("open", "causal"), "shows": 0.0},
        ("dk and dv over tiles of 16", Backward(tile_m=16, sums=of_dtype(ml_dtypes.bfloat16))),
    ),
    *_planted(
        "accumulates-in-16-bit",
        _FINE | _ROWS,
        ("D in bfloat16", _delta(lambda r: of_dtype(ml_dtypes.bfloat16)(r.delta))),
        ("lse in bfloat16", _lse(lambda r: of_dtype(ml_dtypes.bfloat16)(r.lse))),
    ),
    # ---- online sums ----
    *_planted(
        "no-rescale",
        {"lengths": (40, 120), "masks": ("open",)},
        ("out by the row 8 before", Forward(lambda i: i & ~8, ("out",))),
        ("out by the row 8 before, from the last", Forward(lambda i: i & ~8, ("out",), 32, True)),
        ("out after P V is added", Forward(lambda i: i, ("out",), late=True)),
        ("out after P V, from the last", Forward(lambda i: i, ("out",), 32, True, late=True)),
        ("row_sum after the sum is added", Forward(lambda i: i, ("row_sum",), late=True)),
        ("out rescaled twice", Forward(lambda i: i, ("out",), power=2.0)),
        stages=("forward",),
    ),
    *_planted(
        "no-rescale",
        {"lengths": (40, 120), "masks": ("open", "causal"), "lengths_k": ("equal",)},
        ("e", Forward(None, ("e",))),
        ("tout, tiles of 32", Forward(None, ("tout",), 32)),
        stages=("jvp",),
    ),
    # ---- double backward ----
    *_planted(
        "statistics-misplaced",
        _ROWS | _HEADS,
        ("W as (tokens, heads)", Second(W=lambda q, x: swapped(x))),
        ("W without offset", Second(W=lambda q, x: local(x, q))),
        ("D as (tokens, heads), double backward", Second(D=lambda q, x: swapped(x))),
        stages=("second",),
    ),
    *_planted(
        "pairs-dropped",
        _LONG | {"masks": ("causal",), "lengths_k": ("equal",)},
        (
            "the first query tile rounded up, double backward",
            Second(often=lambda t: float(t.i >= -(-t.j // 2) or t.i > t.first_i)),
        ),
        stages=("second",),
    ),
    # ---- lists ----
    *_planted(
        "sparse-inverted-lists",
        {"lengths": (60, 130), "batch": (1, 2)},
        ("cut", Lists(lambda lists: [one[:30] for one in lists])),
        ("the first one twice", Lists(lambda lists: [one[:1] + one for one in lists])),
        (
            "one further in every third",
            Lists(lambda x: [x[i - (i % 3 == 2)] for i in range(len(x))]),
        ),
    ),
)


# ---- the loops ----


def _spans(offsets: Array) -> list[tuple[int, int]]:
    edges = [int(x) for x in offsets]
    return list(pairwise(edges))


def _tiles(size: int, tile: int) -> list[slice]:
    return [slice(first, min(first + tile, size)) for first in range(0, size, tile)]


def _mask(n: int, m: int, window: tuple[int, int]) -> Array:
    distance = np.arange(m) - (np.arange(n)[:, None] + m - n)
    seen = np.ones((n, m), dtype=bool)
    if window[0] >= 0:
        seen &= distance >= -window[0]
    if window[1] >= 0:
        seen &= distance <= window[1]
    return seen


class Arrays:
    """A question's arrays in the arithmetic of its kernels, and (heads, rows) before columns."""

    def __init__(self, question: Question) -> None:
        self.wide = FLOAT64 if question.dtype == FLOAT64 else FLOAT32
        self.narrow = of_dtype(question.dtype)
        q = question
        self.Q, self.dO, self.tQ = (self._by_head(a) for a in (q.q, q.dout, q.tq))
        self.K, self.V, self.tK, self.tV = (
            self._by_head(a, q.group) for a in (q.k, q.v, q.tk, q.tv)
        )
        self.dL = np.zeros(q.q.shape[1::-1], self.wide)
        if q.dlse is not None:
            self.dL = q.dlse.astype(self.wide)
        self.scale = self.wide.type(q.scale)

    def _by_head(self, array: Array | None, repeats: int = 1) -> Any:
        if array is None:
            return None
        return np.repeat(array.astype(self.wide).swapaxes(0, 1), repeats, axis=0)


def _heads(question: Question) -> Iterator[tuple[int, slice, slice, Array]]:
    """Every head of every sequence: its rows, its keys, and who sees whom."""
    queries, keys = _spans(question.cu_seqlens_q), _spans(question.cu_seqlens_k)
    for (q0, q1), (k0, k1) in zip(queries, keys, strict=True):
        seen = _mask(q1 - q0, k1 - k0, question.mask_window)
        for head in range(question.num_heads_q):
            yield head, slice(q0, q1), slice(k0, k1), seen


def _empty(question: Question, wide: Any) -> tuple[Array, Array]:
    out = np.zeros((*question.q.shape[:2], question.v.shape[2]), wide)
    return out, np.full(question.q.shape[1::-1], -np.inf, wide)


def forward(question: Question, kernel: Forward, *, moved: bool = False) -> Answers:
    """out and lse, and with ``moved`` their tangents."""
    x = Arrays(question)
    out, lse = _empty(question, x.wide)
    tout, tlse = np.zeros_like(out), np.zeros_like(lse)
    for head, rows, keys, seen in _heads(question):
        Q, K, V = x.Q[head, rows], x.K[head, keys], x.V[head, keys]
        S = np.where(seen, x.scale * (Q @ K.T), -np.inf)
        if not S.size:
            continue
        E, tV = np.zeros_like(S), np.zeros_like(V)
        if moved:
            tQ, tK = x.tQ[head, rows], x.tK[head, keys]
            E, tV = x.scale * (tQ @ K.T + Q @ tK.T), x.tV[head, keys]
        n = len(Q)
        top = np.full((n, 1), -np.inf, x.wide)
        one, wide = np.zeros((n, 1), x.wide), np.zeros((n, V.shape[1]), x.wide)
        sums = {"row_sum": one, "out": wide, "e": one, "tout": wide}
        tiles = _tiles(len(K), kernel.tile_n)
        for tile in tiles[::-1] if kernel.backwards else tiles:
            new = np.maximum(top, S[:, tile].max(axis=1, keepdims=True))
            safe = np.where(np.isneginf(new), 0, new)
            factor = np.exp(np.where(np.isneginf(top), safe, top) - safe)
            other = np.ones_like(factor)
            if kernel.factor is not None:
                other = factor[kernel.factor(np.arange(n))] ** kernel.power
            P = np.exp(S[:, tile] - safe)
            more = {
                "row_sum": P.sum(axis=1, keepdims=True),
                "out": x.narrow(P) @ V[tile],
                "e": (P * E[:, tile]).sum(axis=1, keepdims=True),
                "tout": x.narrow(P * E[:, tile]) @ V[tile] + x.narrow(P) @ tV[tile],
            }
            sums = {
                name: (sums[name] + part) * other
                if kernel.late and name in kernel.sums
                else sums[name] * (other if name in kernel.sums else factor) + part
                for name, part in more.items()
            }
            top = new
        total = np.where(sums["row_sum"] == 0, 1, sums["row_sum"])
        out[rows, head] = sums["out"] / total
        with np.errstate(divide="ignore"):
            logs = np.log(sums["row_sum"]) + np.where(np.isneginf(top), 0, top)
        lse[head, rows] = logs[:, 0]
        e = sums["e"] / total
        tlse[head, rows] = e[:, 0]
        tout[rows, head] = sums["tout"] / total - e * out[rows, head]
    found = {"out": out.astype(question.dtype), "lse": lse}
    return found | ({"tout": tout.astype(question.dtype), "tlse": tlse} if moved else {})


def _meeting(seen: Array, tile_m: int, tile_n: int, head: int, group: int) -> Iterator[tuple]:
    """Pairs of tiles of which some query sees some key: tile of keys by tile of keys."""
    queries, keys = _tiles(seen.shape[0], tile_m), _tiles(seen.shape[1], tile_n)
    meet = np.array([[seen[a, b].any() for b in keys] for a in queries])
    for j, i in np.argwhere(meet.T):
        of_j, of_i = np.flatnonzero(meet[:, j]), np.flatnonzero(meet[i])
        place = (int(i), int(j), of_j[0], of_j[-1], of_i[0], of_i[-1])
        yield queries[i], keys[j], Tiles(*place, queries[i], len(seen), head, group)


def backward(question: Question, kernel: Backward, out: Array, lse: Array) -> Answers:
    x = Arrays(question)
    rows_of = _preprocessed(question, x, out, lse)
    dq, dk, dv = (np.zeros(a.shape, x.wide) for a in (question.q, question.k, question.v))
    sums = {"dq": dq, "dk": dk, "dv": dv}
    D, L = rows_of.delta, rows_of.lse
    other_D = D if kernel.delta is None else kernel.delta(rows_of).astype(x.wide)
    other_L = L if kernel.lse is None else kernel.lse(rows_of).astype(x.wide)
    for head, rows, keys, seen in _heads(question):
        if not seen.size:
            continue
        terms = {}
        for name in sums:
            own = name in kernel.tensors
            shown = _mask(*seen.shape, kernel.mask) if own and kernel.mask is not None else seen
            P, dS = _weights(
                x, head, rows, keys, shown, *((other_L, other_D) if own else (L, D)), kernel, own
            )
            dS = x.narrow(dS) if question.dtype == BFLOAT16 else dS  # float16 has no range for it
            terms[name] = x.narrow(P), kernel.kept(dS)
            seen_by = shown if own else seen
            _add(question, kernel, x, sums[name], name, terms[name], (head, rows, keys), seen_by)
    return {name: a.astype(question.dtype) for name, a in sums.items()}


def _preprocessed(question: Question, x: Arrays, out: Array, lse: Array) -> Rows:
    O = out.astype(x.wide).swapaxes(0, 1)  # noqa: E741
    safe = np.where(np.isneginf(lse), 0, lse).astype(x.wide)
    return Rows(question, x.dO, O, x.dL, safe, safe)


def _weights(
    x: Arrays,
    head: int,
    rows: slice,
    keys: slice,
    seen: Array,
    L: Array,
    D: Array,
    kernel: Backward,
    own: bool,
) -> tuple[Array, Array]:
    """P and dS."""
    S = x.scale * (x.Q[head, rows] @ x.K[head, keys].T)
    with np.errstate(over="ignore"):
        P = np.where(seen, np.exp(S - L[head, rows, None]), 0)
    dP, D = x.dO[head, rows] @ x.V[head, keys].T, D[head, rows, None]
    return P, kernel.dS(P, dP, D) if kernel.dS is not None and own else P * (dP - D)


def _add(
    question: Question,
    kernel: Backward,
    x: Arrays,
    sums: Array,
    name: str,
    terms: tuple[Array, Array],
    place: tuple[int, slice, slice],
    seen: Array,
) -> None:
    """Add what one head of a sequence adds to a gradient, tile by tile."""
    head, rows, keys = place
    P, dS = terms
    own, group = name in kernel.tensors, question.group
    inside = x.scale if own and kernel.inside else x.wide.type(1)
    scale = x.wide.type(1) if own and kernel.inside else x.scale
    n, m = seen.shape
    shape = {"dq": (n, x.K.shape[2]), "dk": (m, x.Q.shape[2]), "dv": (m, x.dO.shape[2])}[name]
    found = np.zeros(shape, x.wide)
    target = sums[rows, head] if name == "dq" else sums[keys, head // group]
    for i, j, tiles in _meeting(seen, kernel.tile_m, kernel.tile_n, head, group):
        at, part = {
            "dq": (i, dS[i, j] @ x.K[head, keys][j]),
            "dk": (j, dS[i, j].T @ x.Q[head, rows][i]),
            "dv": (j, P[i, j].T @ x.dO[head, rows][i]),
        }[name]
        often = kernel.often(tiles) if own else 1.0
        if own and kernel.overwrites:
            target[at] = (scale if name != "dv" else 1) * part
            continue
        found[at] = (found[at] + x.wide.type(often) * part) * inside
        if name != "dq":
            found[at] = kernel.sums(found[at])
    if not (own and kernel.overwrites):
        target += (scale if name != "dv" else 1) * found
    if name == "dq":
        sums[rows, head] = target
    else:
        sums[keys, head // group] = target


def double_backward(question: Question, kernel: Second, out: Array, lse: Array) -> Answers:
    x, q = Arrays(question), question
    dd_out, ddlse = _empty(q, x.wide)
    ddlse[:] = 0
    gq, gk, gv = (np.zeros(a.shape, x.wide) for a in (q.q, q.k, q.v))
    rows_of = _preprocessed(q, x, out, lse)
    W = np.zeros_like(ddlse)
    kept = []
    for head, rows, keys, seen in _heads(q):
        if not seen.size:
            continue
        Q, K, V, tQ, tK, tV = (
            a[head, rows] if a is x.Q or a is x.tQ else a[head, keys]
            for a in (x.Q, x.K, x.V, x.tQ, x.tK, x.tV)
        )
        P = np.where(seen, np.exp(x.scale * (Q @ K.T) - rows_of.lse[head, rows, None]), 0)
        E = x.scale * (tQ @ K.T + Q @ tK.T)
        e = (P * E).sum(axis=1)
        tP = P * (E - e[:, None])
        dd_out[rows, head], ddlse[head, rows] = tP @ V + P @ tV, e
        W[head, rows] = (x.dO[head, rows] * dd_out[rows, head]).sum(axis=1)
        kept.append((head, rows, keys, seen, P, tP))
    D = rows_of.delta if kernel.D is None else kernel.D(q, rows_of.delta)
    W = W if kernel.W is None else kernel.W(q, W)
    for head, rows, keys, seen, P, tP in kept:
        dO, kv = x.dO[head, rows], head // q.group
        Z = dO @ x.V[head, keys].T - D[head, rows, None]
        dS = P * Z
        tdS = tP * Z + P * (dO @ x.tV[head, keys].T - W[head, rows, None])
        for i, j, tiles in _meeting(seen, kernel.tile_m, kernel.tile_n, head, q.group):
            a, b = dS[i, j] * kernel.often(tiles), tdS[i, j] * kernel.often(tiles)
            r, c = (
                slice(rows.start + i.start, rows.start + i.stop),
                slice(keys.start + j.start, keys.start + j.stop),
            )
            gq[r, head] += x.scale * (b @ x.K[head, c] + a @ x.tK[head, c])
            gk[c, kv] += x.scale * (b.T @ x.Q[head, r] + a.T @ x.tQ[head, r])
            gv[c, kv] += (tP[i, j] * kernel.often(tiles)).T @ x.dO[head, r]
    narrow = {"ddout": dd_out, "gq": gq, "gk": gk, "gv": gv}
    return {name: a.astype(q.dtype) for name, a in narrow.items()} | {"ddlse": ddlse}


def by_lists(question: Question, kernel: Lists) -> Answers:
    """out, lse, dq, dk and dv of causal block-sparse attention, dk and dv by lists of queries."""
    x, q = Arrays(question), question
    out, lse = _empty(q, x.wide)
    dq, dk, dv = (np.zeros(a.shape, x.wide) for a in (q.q, q.k, q.v))
    size = q.block_size
    for (start, stop), selection in [
        (span, s) for span in _spans(q.cu_seqlens_q) for s in range(q.block_indices.shape[1])
    ]:
        blocks = _tiles(stop - start, size)
        lists: list[list[int]] = [[] for _ in blocks]
        for i in range(stop - start):
            named = {int(b) for b in q.block_indices[start + i, selection]} | {i // size}
            for block in sorted(named & set(range(len(blocks)))):
                lists[block].append(i)
        wrong = lists if kernel.changed is None else kernel.changed(lists)
        per = q.num_heads_q // q.block_indices.shape[1]
        for head in range(selection * per, (selection + 1) * per):
            rows, kv = slice(start, stop), head // q.group
            Q, K, V, dO = (a[head, rows] for a in (x.Q, x.K, x.V, x.dO))
            n = stop - start
            S, causal = x.scale * (Q @ K.T), np.tri(n, dtype=bool)
            seen = np.zeros((n, n), dtype=bool)
            for block, queries in zip(blocks, lists, strict=True):
                seen[queries, block] = True
            seen &= causal
            L = np.log(np.where(seen, np.exp(S), 0).sum(axis=1))
            P = np.where(causal, np.exp(S - L[:, None]), 0)
            O = np.where(seen, P, 0) @ V  # noqa: E741
            out[rows, head], lse[head, rows] = O, L
            D = (dO * O).sum(axis=1) - x.dL[head, rows]
            dS = P * (dO @ V.T - D[:, None])
            dq[rows, head] = x.scale * (np.where(seen, dS, 0) @ K)
            for block, queries in zip(blocks, wrong, strict=True):
                there = slice(start + block.start, start + block.stop)
                dk[there, kv] += x.scale * (dS[queries, block].T @ Q[queries])
                dv[there, kv] += P[queries, block].T @ dO[queries]
    narrow = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    return {name: a.astype(q.dtype) for name, a in narrow.items()} | {"lse": lse}


# ---- questions and answers ----


def answers(planted: Planted | None, question: Question, chance: int = 0) -> Answers:
    """What a kernel with this bug, or a right one, gives in the stages of the question."""
    kernel = None if planted is None else planted.kernel
    if question.block_indices is not None:
        return by_lists(question, kernel if isinstance(kernel, Lists) else Lists())
    if "jvp" in question.stages and question.dout is None:
        found = forward(question, kernel if isinstance(kernel, Forward) else Forward(), moved=True)
        return {n if n[0] == "t" else f"jvp {n}": a for n, a in found.items()}
    right = forward(question, Forward())
    if question.tq is not None:
        own = kernel if isinstance(kernel, Second) else Second()
        return double_backward(question, own, right["out"], right["lse"])
    if question.dout is None:
        return forward(question, kernel) if isinstance(kernel, Forward) else right
    out, lse = question.out, question.lse
    if out is None or lse is None:
        out, lse = right["out"], right["lse"]
    own = kernel if isinstance(kernel, Backward) else Backward()
    return right | backward(question, own, out, lse)


def problems(planted: Planted, count: int, seed: int) -> Iterator[Question]:
    """``count`` questions on which ``planted`` shows: dtypes in turn, out and lse given or not."""

    def drawn(rng: np.random.Generator, number: int) -> Question:
        dtype = planted.needs.dtypes[number % len(planted.needs.dtypes)]
        return _drawn(planted, rng, dtype, given=(seed + number) % 2 == 1)

    name = f"{planted.bug}, {planted.variant}"
    return showing(name, count, seed, drawn, partial(shows, planted))


def _drawn(planted: Planted, rng: np.random.Generator, dtype: Any, *, given: bool) -> Question:
    backward_alone = isinstance(planted.kernel, Backward)
    question = draw(planted.needs, rng, dtype, given=given and backward_alone)
    dout = (question.dout.astype(np.float64) * planted.dout).astype(dtype)
    question = replace(question, dout=dout)
    if isinstance(planted.kernel, Forward) and planted.stages == ("forward",):
        return replace(question, dout=None, dlse=None)
    if isinstance(planted.kernel, Forward | Second):
        moved = {
            f"t{name}": rng.standard_normal(getattr(question, name).shape).astype(dtype)
            for name in "qkv"
        }
        forward_alone = isinstance(planted.kernel, Forward)
        question = replace(question, **moved)
        return replace(question, dout=None, dlse=None) if forward_alone else question
    if isinstance(planted.kernel, Lists):
        k, v = (rng.standard_normal(a.shape).astype(dtype) for a in (question.k, question.v))
        rows, heads = len(question.q), question.num_heads_kv
        number = -(-max(question.lengths_q) // 16)
        return replace(
            question,
            k=np.resize(k, (rows, *k.shape[1:])),
            v=np.resize(v, (rows, *v.shape[1:])),
            cu_seqlens_k=question.cu_seqlens_q,
            causal=True,
            window=(-1, -1),
            block_indices=rng.integers(-1, number, (rows, heads, 4)).astype(np.int32),
            block_size=16,
        )
    return question


def shows(planted: Planted, question: Question) -> bool:
    """Whether a result of the planted stages changes by more than rounding does."""
    wrong, right = answers(planted, question), answers(None, question)
    names = [name for stage in planted.stages for name in STAGES[stage] if name in right]
    coarse = question.dtype.itemsize == 2
    bound = planted.needs.shows * float(ml_dtypes.finfo(question.dtype).eps) if coarse else 1e-3
    return any(difference(wrong[name], right[name]) > bound for name in names)
