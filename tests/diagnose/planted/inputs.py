"""Packed attention by loops over tiles, with bugs in what it reads planted in it.

Separate from what rawattn-check matches answers with: nothing of it is used here. ``Odd`` says what
is wrong; with its fields as they are by default nothing is. ``problems`` and ``answers`` are those
of ``planted``, for these plants.

Long by the table.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from tests.diagnose.planted import first as planted
from tests.diagnose.planted.first import BFLOAT16, FLOAT32, FLOAT64, Needs

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Change = Callable[[Arrays, Question], Arrays]
Store = Callable[[Array, str, Question], Array]
FORWARD, BACKWARD = ("forward",), ("backward",)
BOTH = FORWARD + BACKWARD


@dataclass(frozen=True)
class Odd:
    """What is not right. ``stale``: the product that takes an operand ``by`` tiles away, and what
    it takes at the end of its loop. ``partner``: of products, which row of a tile is read."""

    tile_m: int = 32
    tile_n: int = 32
    read: Change | None = None  # of all inputs, and out, lse and delta
    stale: str = ""
    by: int = 0
    at_end: str = "own"
    partner: Mapping[str, Callable[[int], int]] = field(default_factory=dict)
    in_blocks: int = 0  # V is read with blocks of so many rows and columns transposed
    masked: bool = True
    queries_past: int = 0  # the last tile of so many queries goes on
    head_of: Callable[[int, Question], int] | None = None  # whose dk and dv a query head adds to
    over_queries: bool = False  # the softmax's derivative
    over_heads: bool = False  # attention between the heads of a token
    first_masked: bool = False  # the first tile of queries of every tile of keys, and no other
    lse_by_key: int = 0  # row j % so many of a tile of queries, for key j
    lost: bool = False  # some tiles of keys in dq
    factors: Mapping[str, Callable[[Question], float]] = field(default_factory=dict)
    stores: Mapping[str, Store] = field(default_factory=dict)


@dataclass(frozen=True)
class Planted:
    """A bug of class ``bug``, in ``stages``. ``also``: classes that are the same function."""

    bug: str
    variant: str
    stages: tuple[str, ...]
    odd: Odd
    needs: Needs = field(default_factory=Needs)
    also: tuple[str, ...] = ()


# ---- what is read ----


def bounds(name: str, question: Question) -> list[tuple[int, int]]:
    of_keys = name in ("k", "v", "dk", "dv")
    offsets = question.cu_seqlens_k if of_keys else question.cu_seqlens_q
    return list(pairwise(int(offset) for offset in offsets))


def swapped(one: str, other: str) -> Change:
    return lambda arrays, question: arrays | {one: arrays[other], other: arrays[one]}


def rotated(*names: str) -> Change:
    """Each is read as the next one."""
    return lambda arrays, question: (
        arrays | {name: arrays[names[(i + 1) % len(names)]] for i, name in enumerate(names)}
    )


def heads_first(*names: str) -> Change:
    """Memory of (tokens, heads, columns) or (heads, tokens), read with the axes exchanged."""

    def change(arrays: Arrays, question: Question) -> Arrays:
        found = dict(arrays)
        for name in names:
            x = arrays[name]
            turned = (x.shape[1], x.shape[0], *x.shape[2:])
            found[name] = x.reshape(turned).swapaxes(0, 1)
        return found

    return change


def columns_first(*names: str) -> Change:
    def change(arrays: Arrays, question: Question) -> Arrays:
        found = dict(arrays)
        for name in names:
            tokens, heads, columns = arrays[name].shape
            found[name] = arrays[name].reshape(tokens, columns, heads).swapaxes(1, 2)
        return found

    return change


def heads_first_in_sequences(*names: str) -> Change:
    def change(arrays: Arrays, question: Question) -> Arrays:
        found = dict(arrays)
        for name in names:
            x = arrays[name].copy()
            for start, stop in bounds(name, question):
                part = arrays[name][start:stop]
                x[start:stop] = part.reshape(part.shape[1], -1, part.shape[2]).swapaxes(0, 1)
            found[name] = x
        return found

    return change


def by_index(index: Callable[[int, int, int], tuple[int, int]], *names: str) -> Change:
    """lse, delta or dlse of (head, row) read elsewhere: of head, start and row in the sequence."""

    def change(arrays: Arrays, question: Question) -> Arrays:
        found = dict(arrays)
        for name in names:
            x = np.zeros_like(arrays[name])
            heads, total = x.shape
            for start, stop in bounds(name, question):
                for head in range(heads):
                    for row in range(stop - start):
                        h, at = index(head, start, row)
                        there = 0 <= at < total
                        x[head, start + row] = arrays[name][h % heads, at] if there else 0
            found[name] = x
        return found

    return change


def with_strides(name: str, of_head: Callable[[Question], int]) -> Change:
    """Every head at a multiple of another width."""

    def change(arrays: Arrays, question: Question) -> Arrays:
        x = arrays[name]
        tokens, heads, columns = x.shape
        flat, found = x.ravel(), np.zeros_like(x)
        for token in range(tokens):
            for head in range(heads):
                at = token * heads * columns + head * of_head(question)
                part = flat[at : at + columns]
                found[token, head, : len(part)] = part
        return arrays | {name: found}

    return change


def halves_swapped(name: str, bit: int) -> Change:
    """Halves of the columns exchanged in rows that have ``bit``: a swizzle undone wrongly."""

    def change(arrays: Arrays, question: Question) -> Arrays:
        x = arrays[name].copy()
        half = x.shape[2] // 2
        for start, stop in bounds(name, question):
            for row in range(stop - start):
                if row & bit:
                    x[start + row] = np.roll(x[start + row], half, axis=1)
        return arrays | {name: x}

    return change


# ---- what is written ----


def heads_before_tokens(array: Array, name: str, question: Question) -> Array:
    """(heads, tokens, columns) of every sequence, written as if it were (tokens, heads, ...)."""
    wrong = array.copy()
    for start, stop in bounds(name, question):
        wrong[start:stop] = array[start:stop].swapaxes(0, 1).reshape(array[start:stop].shape)
    return wrong


def padded_heads_before_tokens(array: Array, name: str, question: Question) -> Array:
    wrong = array.copy()
    longest = max(stop - start for start, stop in bounds(name, question))
    for start, stop in bounds(name, question):
        part = np.zeros((longest, *array.shape[1:]), dtype=array.dtype)
        part[: stop - start] = array[start:stop]
        wrong[start:stop] = part.swapaxes(0, 1).reshape(part.shape)[: stop - start]
    return wrong


def from_the_end(array: Array, name: str, question: Question) -> Array:
    """The last rows of the padded sequences, where the data are the first."""
    wrong = np.zeros_like(array)
    longest = max(stop - start for start, stop in bounds(name, question))
    for start, stop in bounds(name, question):
        pads = longest - (stop - start)
        if pads < stop - start:
            wrong[start : stop - pads] = array[start + pads : stop]
    return wrong


def heads_of_groups_apart(array: Array, name: str, question: Question) -> Array:
    """The i-th query head of a key/value head as head i * num_heads_kv + head_kv."""
    found = np.zeros_like(array)
    for head in range(question.num_heads_q):
        head_kv, i = divmod(head, question.group)
        to = i * question.num_heads_kv + head_kv
        if name == "lse":
            found[to] = array[head]
        else:
            found[:, to] = array[:, head]
    return found


def halves_of_columns(array: Array, name: str, question: Question) -> Array:
    return np.roll(array, array.shape[-1] // 2, axis=-1)


# ---- the table ----

_OPEN: dict[str, Any] = {
    "masks": ("open", "causal"),
    "lengths_k": ("equal",),
    "lengths": (1, 60),
    "batch": (2, 3),
    "heads_kv": (1, 2),
    "groups": (1, 2),
    "head_dims": (16, 24, 32),
    "head_dims_v": (16, 32),
}
_SAME: dict[str, Any] = {"same_dims": 1.0, "lengths_k": ("equal",)}
_LONG: dict[str, Any] = {"lengths": (40, 90), "over": 64, "batch": (2, 3), "groups": (1, 2)}
_EVEN: dict[str, Any] = {"head_dims": (32, 48, 64), "head_dims_v": (32, 64)}
_HEADS: dict[str, Any] = {"heads_kv": (2, 3), "groups": (2,)}


def _planted(bug: str, *variants: tuple[Any, ...]) -> list[Planted]:
    """``variants``: in words, the stages, the fields of Odd, needs, and classes that are alike."""
    found = []
    for words, stages, odd, *more in variants:
        needs = Needs(**(_OPEN | (more[0] if more else {})))
        also = tuple(more[1]) if len(more) > 1 else ()
        found.append(Planted(bug, words, stages, Odd(**odd), needs, also))
    return found


PLANTED: tuple[Planted, ...] = (
    *_planted(
        "arguments-swapped",
        ("k and v", BOTH, {"read": swapped("k", "v")}, _SAME),
        ("k and v in the backward pass", BACKWARD, {"read": swapped("k", "v")}, _SAME),
        ("q and k", FORWARD, {"read": swapped("q", "k")}, _SAME | {"groups": (1,)}),
        ("q, k and v in turn", BOTH, {"read": rotated("q", "k", "v")}, _SAME | {"groups": (1,)}),
        ("q and dout", BACKWARD, {"read": swapped("q", "dout")}, _SAME),
        ("lse and delta", BACKWARD, {"read": swapped("lse", "delta")}),
    ),
    *_planted(
        "input-layout",
        ("v, heads first", BOTH, {"read": heads_first("v")}, {"heads_kv": (2, 3)}),
        ("q, k, v heads first", FORWARD, {"read": heads_first("q", "k", "v")}, _HEADS),
        ("dout, heads first", BACKWARD, {"read": heads_first("dout")}, _HEADS),
        ("k, columns before heads", FORWARD, {"read": columns_first("k")}, {"heads_kv": (2, 3)}),
        (
            "q, heads first in every sequence",
            FORWARD,
            {"read": heads_first_in_sequences("q")},
            _HEADS,
        ),
        ("blocks of 8 by 8 of V", FORWARD, {"in_blocks": 8}, _EVEN),
        ("a swizzle of k", BOTH, {"read": halves_swapped("k", 4)}, {"head_dims": (16, 32, 64)}),
        (
            "v, heads at multiples of the head_dim of q",
            BOTH,
            {"read": with_strides("v", lambda question: question.q.shape[2])},
            {"head_dims": (32,), "head_dims_v": (64,), "heads_kv": (2, 3)},
        ),
        (
            "q, heads at multiples of the head_dim of v",
            BOTH,
            {"read": with_strides("q", lambda question: question.v.shape[2])},
            {"head_dims": (64,), "head_dims_v": (32,), "heads_kv": (2, 3)},
        ),
        (
            "heads for tokens",
            FORWARD,
            {"over_heads": True},
            {"heads_kv": (3, 4), "groups": (1,), "masks": ("open",)},
        ),
    ),
    *_planted(
        "statistics-misplaced",
        ("lse, tokens first", BACKWARD, {"read": heads_first("lse")}, _HEADS),
        ("lse of the first sequence", BACKWARD, {"read": by_index(lambda h, b, i: (h, i), "lse")}),
        (
            "delta of row i & ~8",
            BACKWARD,
            {"read": by_index(lambda h, b, i: (h, b + (i & ~8)), "delta")},
            {"lengths": (12, 70)},
        ),
        (
            "lse of the next head",
            BACKWARD,
            {"read": by_index(lambda h, b, i: (h + 1, b + i), "lse")},
            _HEADS,
        ),
        ("lse of a transposed tile", BACKWARD, {"lse_by_key": 32}, {"lengths": (20, 70)}),
        (
            "lse of a transposed tile of fewer keys",
            BACKWARD,
            {"lse_by_key": 16, "tile_n": 16},
            {"lengths": (40, 70)},
        ),
        (
            "delta of the first sequence",
            BACKWARD,
            {"read": by_index(lambda h, b, i: (h, i), "delta")},
        ),
    ),
    *_planted(
        "stale-tile",
        ("V of the tile before", FORWARD, {"stale": "PV", "by": -1}, _LONG),
        ("K of the next tile in dq", BACKWARD, {"stale": "dQ", "by": 1}, _LONG),
        ("P of the tile before", BACKWARD, {"stale": "dV", "by": -1, "at_end": "zeros"}, _LONG),
        ("dS of the next tile", BACKWARD, {"stale": "dK", "by": 1, "at_end": "own"}, _LONG),
        (
            "rows of dS 8 apart",
            BACKWARD,
            {"partner": {"dK": lambda i: i ^ 8}, "tile_m": 16},
            {"lengths": (12, 70)},
        ),
        (
            "rows of P 16 apart",
            BACKWARD,
            {"partner": {"dV": lambda i: i ^ 16}},
            {"lengths": (20, 70)},
        ),
    ),
    *_planted(
        "gqa-reduction-map",
        (
            "h % num_heads_kv",
            BACKWARD,
            {"head_of": lambda h, question: h % question.num_heads_kv},
            _HEADS,
        ),
        (
            "groups from behind",
            BACKWARD,
            {"head_of": lambda h, question: question.num_heads_kv - 1 - h // question.group},
            _HEADS,
            ("transposed",),
        ),
    ),
    *_planted(
        "constant-factor",
        (
            "dq twice",
            BACKWARD,
            {"factors": {"dq": lambda question: 2.0}},
            {},
            ("tile-counted-twice",),
        ),
        (
            "dv a group's part",
            BACKWARD,
            {"factors": {"dv": lambda question: 1 / question.group}},
            {"groups": (2, 4)},
            ("gqa-group-not-summed",),
        ),
        ("all gradients", BACKWARD, {"factors": dict.fromkeys(("dq", "dk", "dv"), lambda q: 0.7)}),
        ("out negative", FORWARD, {"factors": {"out": lambda question: -1.0}}),
    ),
    *_planted(
        "transposed",
        ("dq in sequences", BACKWARD, {"stores": {"dq": heads_before_tokens}}, _HEADS),
        ("lse, heads of groups", FORWARD, {"stores": {"lse": heads_of_groups_apart}}, _HEADS),
        ("out, heads of groups", FORWARD, {"stores": {"out": heads_of_groups_apart}}, _HEADS),
        ("out padded", FORWARD, {"stores": {"out": padded_heads_before_tokens}}, _HEADS),
        (
            "dv, halves of columns",
            BACKWARD,
            {"stores": {"dv": halves_of_columns}},
            _EVEN,
            ("input-layout",),
        ),
    ),
    *_planted(
        "offsets-shifted",
        (
            "out from the end of padded sequences",
            FORWARD,
            {"stores": {"out": from_the_end}},
            {"lengths": (30, 60)},
        ),
    ),
    *_planted(
        "mask-missing-in-backward",
        (
            "the first tile of 16 queries masked, of 32 keys",
            BACKWARD,
            {"first_masked": True, "tile_m": 16},
            {"masks": ("causal",), "lengths": (40, 90), "over": 40},
        ),
        ("in tiles of 32", BACKWARD, {"masked": False}, {"masks": ("causal",), "over": 40}),
        (
            "in tiles of 16 by 64",
            BACKWARD,
            {"masked": False, "tile_m": 16, "tile_n": 64},
            {"masks": ("causal",), "lengths": (70, 120), "over": 90, "batch": (2, 3)},
        ),
    ),
    *_planted(
        "neighbour-leak",
        ("queries up to 32", BACKWARD, {"queries_past": 32}, {"lengths": (20, 60)}),
        ("queries up to 64", BACKWARD, {"queries_past": 64, "tile_m": 64}, {"lengths": (20, 90)}),
    ),
    *_planted(
        "pairs-dropped",
        ("lost updates of dq", BACKWARD, {"lost": True}, _LONG | {"masks": ("open",)}),
        (
            "lost updates of dq, causal",
            BACKWARD,
            {"lost": True, "tile_m": 16},
            _LONG | {"masks": ("causal",)},
        ),
    ),
    *_planted(
        "softmax-axis",
        ("dS over queries", BACKWARD, {"over_queries": True}, {"lengths": (10, 60)}),
        (
            "dS over queries, causal",
            BACKWARD,
            {"over_queries": True},
            {"lengths": (10, 60), "masks": ("causal",)},
        ),
    ),
)


# ---- attention ----


def sees(question: Question, b: int, i: int, keys: Array) -> Array:
    """Which of ``keys`` (numbers in the sequence) query i sees."""
    left, right = question.mask_window
    distance = keys - i - (question.lengths_k[b] - question.lengths_q[b])
    seen = keys < question.lengths_k[b]
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def tiles_of(x: Array, tile: int) -> list[Array]:
    """Tiles of rows, the last one filled with zeros."""
    whole = np.zeros((-(-len(x) // tile) * tile, *x.shape[1:]))
    whole[: len(x)] = x
    return list(whole.reshape(-1, tile, *x.shape[1:]))


def mask_tiles(question: Question, b: int, odd: Odd, rows: int) -> list[list[Array]]:
    """For every tile of queries and tile of keys who sees whom."""
    count = -(-question.lengths_k[b] // odd.tile_n) * odd.tile_n
    seen = np.zeros((-(-rows // odd.tile_m) * odd.tile_m, count), dtype=bool)
    for i in range(rows):
        seen[i] = sees(question, b, i, np.arange(count))
    return [
        list(part.reshape(odd.tile_m, -1, odd.tile_n).swapaxes(0, 1))
        for part in seen.reshape(-1, odd.tile_m, count)
    ]


def picked(odd: Odd, product: str, tiles: list[Array], loop: list[int], place: int) -> Array:
    """The tile that a product gets at a ``place`` of the loop."""
    tile = tiles[loop[place]]
    if odd.stale == product:
        if 0 <= place + odd.by < len(loop):
            tile = tiles[loop[place + odd.by]]
        elif odd.at_end == "zeros":
            tile = np.zeros_like(tile)
    if product in odd.partner:
        tile = tile[[odd.partner[product](i) for i in range(len(tile))]]
    return tile


def blocks_transposed(x: Array, size: int) -> Array:
    found = np.zeros_like(x)
    for i in range(0, x.shape[0], size):
        for j in range(0, x.shape[1], size):
            found[i : i + size, j : j + size] = x[i : i + size, j : j + size].T
    return found


def rounded(question: Question, x: Array) -> Array:
    """An operand of a matmul, which is narrow where the inputs are."""
    return x.astype(question.dtype).astype(FLOAT64) if question.dtype == BFLOAT16 else x


def forward(question: Question, odd: Odd) -> tuple[Array, Array]:
    arrays = {name: np.asarray(getattr(question, name)).astype(FLOAT64) for name in ("q", "k", "v")}
    right = arrays
    if odd.read is not None:
        arrays = odd.read(arrays, question)
    if odd.over_heads:
        return over_heads(question, arrays)
    heads, total = question.num_heads_q, len(question.q)
    out, lse = np.zeros((total, heads, right["v"].shape[2])), np.full((heads, total), -np.inf)
    for b, (start, stop) in enumerate(bounds("q", question)):
        first, last = bounds("k", question)[b]
        masks = mask_tiles(question, b, odd, stop - start)
        for head in range(heads):
            head_kv = head // question.group
            Q = tiles_of(arrays["q"][start:stop, head], odd.tile_m)
            K, V = (tiles_of(arrays[n][first:last, head_kv], odd.tile_n) for n in ("k", "v"))
            if odd.in_blocks:
                V = [blocks_transposed(x, odd.in_blocks) for x in V]
            for t, (q, of_keys) in enumerate(zip(Q, masks, strict=True)):
                loop = [j for j, seen in enumerate(of_keys) if seen.any()]
                top, total_weight = np.full(odd.tile_m, -np.inf), np.zeros(odd.tile_m)
                sums = np.zeros((odd.tile_m, out.shape[2]))
                for place, j in enumerate(loop):
                    S = np.where(of_keys[j], question.scale * q @ K[j].T, -np.inf)
                    new = np.maximum(top, S.max(axis=1))
                    safe = np.where(np.isneginf(new), 0.0, new)
                    old = np.exp(np.where(np.isneginf(top), -np.inf, top - safe))
                    P = np.exp(S - safe[:, None])
                    total_weight = total_weight * old + P.sum(axis=1)
                    v = picked(odd, "PV", V, loop, place)
                    sums = sums * old[:, None] + rounded(question, P) @ v
                    top = new
                here = slice(start + t * odd.tile_m, min(start + (t + 1) * odd.tile_m, stop))
                n = here.stop - here.start
                with np.errstate(divide="ignore"):
                    lse[head, here] = (np.log(total_weight) + top)[:n]
                out[here, head] = (sums / np.where(total_weight, total_weight, 1)[:, None])[:n]
    return out, lse


def over_heads(question: Question, arrays: Arrays) -> tuple[Array, Array]:
    shape = question.q.shape
    out, lse = np.zeros((*shape[:2], question.v.shape[2])), np.full(shape[1::-1], -np.inf)
    for token in range(int(question.cu_seqlens_q[-1])):
        S = question.scale * arrays["q"][token] @ arrays["k"][token].T
        lse[:, token] = np.log(np.exp(S).sum(axis=1))
        out[token] = np.exp(S - lse[:, token, None]) @ arrays["v"][token]
    return out, lse


def backward(question: Question, odd: Odd, given: tuple[Array, Array]) -> Answers:
    names = ("q", "k", "v", "dout")
    arrays = {name: np.asarray(getattr(question, name)).astype(FLOAT64) for name in names}
    arrays |= {"out": np.asarray(given[0]).astype(FLOAT64)}
    arrays |= {"lse": np.asarray(given[1]).astype(FLOAT64)}
    shapes = {f"d{name}": arrays[name].shape for name in ("q", "k", "v")}
    arrays["delta"] = (arrays["dout"] * arrays["out"]).sum(axis=2).T
    if question.dlse is not None:
        arrays["delta"] = arrays["delta"] - question.dlse
    if odd.read is not None:
        arrays = odd.read(arrays, question)
    found = {name: np.zeros(shape) for name, shape in shapes.items()}
    for b, (start, stop) in enumerate(bounds("q", question)):
        first, last = bounds("k", question)[b]
        tail = -(stop - start) % odd.queries_past if odd.queries_past else 0
        end = min(stop + tail, len(question.q))
        masks = mask_tiles(question, b, odd, end - start)
        for head in range(question.num_heads_q):
            head_kv = head // question.group
            to = odd.head_of(head, question) if odd.head_of else head_kv
            Q, dO = (tiles_of(arrays[n][start:end, head], odd.tile_m) for n in ("q", "dout"))
            L, D = (tiles_of(arrays[n][head, start:end], odd.tile_m) for n in ("lse", "delta"))
            K, V = (tiles_of(arrays[n][first:last, head_kv], odd.tile_n) for n in ("k", "v"))
            dQ = np.zeros((len(Q) * odd.tile_m, shapes["dq"][2]))
            everywhere = list(range(len(K)))
            if odd.over_queries:
                D = [np.zeros_like(x) for x in D]
            for j in everywhere:
                loop = [i for i in range(len(Q)) if masks[i][j].any()]
                P, dS = ([np.zeros((odd.tile_m, odd.tile_n)) for _ in Q] for _ in range(2))
                dP = [np.zeros_like(x) for x in P]
                for i in loop:
                    S = question.scale * Q[i] @ K[j].T
                    inside = (np.arange(odd.tile_m) + i * odd.tile_m < end - start)[:, None]
                    inside = inside & (np.arange(odd.tile_n) + j * odd.tile_n < last - first)
                    inside = inside & ~np.isneginf(L[i])[:, None]
                    statistics = np.repeat(L[i][:, None], odd.tile_n, axis=1)
                    if odd.lse_by_key:
                        of_key = np.arange(odd.tile_n) % odd.lse_by_key
                        statistics = np.repeat(L[i][of_key][None], odd.tile_m, axis=0)
                        there = i * odd.tile_m + of_key < end - start
                        statistics[:, ~there] = np.inf
                    with np.errstate(over="ignore", invalid="ignore"):
                        weights = np.exp(S - statistics)
                    masked = i == loop[0] if odd.first_masked else odd.masked
                    P[i] = np.where(masks[i][j] & inside if masked else inside, weights, 0.0)
                    dP[i] = dO[i] @ V[j].T
                sums = sum((p * dp).sum(axis=0) for p, dp in zip(P, dP, strict=True))
                for i in loop:
                    dS[i] = P[i] * (dP[i] - (sums if odd.over_queries else D[i][:, None]))
                dK, dV = (
                    np.zeros((odd.tile_n, shapes["dk"][2])),
                    np.zeros((odd.tile_n, shapes["dv"][2])),
                )
                for place, i in enumerate(loop):
                    dV += rounded(question, picked(odd, "dV", P, loop, place)).T @ dO[i]
                    dK += rounded(question, picked(odd, "dK", dS, loop, place)).T @ Q[i]
                    k = picked(odd, "dQ", K, everywhere, j)
                    rows = slice(i * odd.tile_m, (i + 1) * odd.tile_m)
                    if odd.lost and (i * 5 + j * 3 + head * 7 + b) % 4 == 1:
                        continue
                    dQ[rows] += rounded(question, dS[i]) @ k
                here = slice(first + j * odd.tile_n, min(first + (j + 1) * odd.tile_n, last))
                count = here.stop - here.start
                found["dk"][here, to] += question.scale * dK[:count]
                found["dv"][here, to] += dV[:count]
            found["dq"][start:stop, head] = question.scale * dQ[: stop - start]
    return found


def answers(planted: Planted | None, question: Question) -> Answers:
    """What the plant gives, in the question's dtype; lse in float32 at least."""
    odd = planted.odd if planted else Odd()
    of = {stage: odd if planted and stage in planted.stages else Odd() for stage in BOTH}
    out, lse = forward(question, of["forward"])
    found = {"out": out, "lse": lse}
    narrow = {"out": question.dtype, "lse": FLOAT64 if question.dtype == FLOAT64 else FLOAT32}
    written = {name: written_of(x, name, question, of, narrow) for name, x in found.items()}
    if question.dout is None:
        return written
    given = written["out"], written["lse"]
    if question.out is not None and question.lse is not None:
        given = question.out, question.lse
    for name, x in backward(question, of["backward"], given).items():
        written[name] = written_of(x, name, question, of, {name: question.dtype})
    return written


def written_of(
    x: Array, name: str, question: Question, of: Mapping[str, Odd], dtypes: Mapping[str, Any]
) -> Array:
    odd = of["forward" if name in STAGES["forward"] else "backward"]
    if name in odd.factors:
        x = x * odd.factors[name](question)
    if name in odd.stores:
        x = odd.stores[name](x, name, question)
    return x.astype(dtypes[name])


def problems(plant: Planted, count: int, seed: int) -> Iterator[Question]:
    """``count`` questions on which ``plant`` shows: dtypes in turn."""

    def drawn(rng: np.random.Generator, number: int) -> Question:
        needs, dtype = replace(plant.needs, dtypes=()), plant.needs.dtypes[number % 3]
        return planted.draw(needs, rng, dtype, given=False)

    name = f"{plant.bug}, {plant.variant}"
    return planted.showing(name, count, seed, drawn, partial(shows, plant))


def shows(plant: Planted, question: Question) -> bool:
    """Whether every stage of the bug has a result that differs by more than rounding does."""
    wrong, right = answers(plant, question), answers(None, question)
    for stage in plant.stages:
        names = [name for name in STAGES[stage] if name in right]
        if not any(planted.difference(wrong[name], right[name]) > 0.02 for name in names):
            return False
    return True
