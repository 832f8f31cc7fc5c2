"""Bugs in what is read and where results are stored, and operands that belong to another tile."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question
from tests.diagnose.hooks import (
    GRADIENTS,
    STAGES_OF,
    Hooks,
    Pair,
    as_if,
    bounds,
    by,
    by_pairs,
    change,
    in_sequences,
    kernel,
    local,
    meeting,
    of_each,
    stored,
)
from tests.diagnose.plain import Array, Head, Planted, Run, answers, tiles
from tests.diagnose.problems import Needs, problems

__all__ = ["PLANTED", "answers", "problems"]


# ---- what is read ----


def read_as(**others: str) -> Hooks:
    """Arrays in the place of others; delta is still that of the right ones."""
    return {"read": lambda run, a: a | {name: a[other] for name, other in others.items()}}


def turned(*names: str) -> Hooks:
    return change(lambda x, name, q: as_if((1, 0, 2)[: x.ndim])(x, name, q), *names)


def turned_in_sequences(x: Array) -> Array:
    return x.reshape(x.shape[1], -1, x.shape[2]).swapaxes(0, 1)


def row_index(of: Callable[[Array], Array]) -> Callable[..., Array]:
    """A row term of another row of the sequence."""
    return in_sequences(lambda x: x[of(np.arange(len(x)))])


def with_strides(x: Array, name: str, question: Question) -> Array:
    """Every head at a multiple of another array's width."""
    width = (question.q if name == "v" else question.v).shape[2]
    tokens, heads, columns = x.shape
    flat, found = x.ravel(), np.zeros_like(x)
    for token, head in np.ndindex(tokens, heads):
        part = flat[token * heads * columns + head * width :][:columns]
        found[token, head, : len(part)] = part
    return found


def partly_scaled(run: Run, x: Array) -> Array:
    """Only the first half of the columns has its factor."""
    return x * np.where(np.arange(x.shape[2]) < x.shape[2] // 2, 1.0, 5.7)


def halves_swapped(x: Array) -> Array:
    """Halves of the columns exchanged in rows that have bit 4: a swizzle undone wrongly."""
    other = np.arange(len(x)) & 4 > 0
    return np.where(other[:, None, None], np.roll(x, x.shape[2] // 2, axis=2), x)


def blocks_transposed(c: Head, x: Array, size: int = 8) -> Array:
    whole = np.zeros((-(-len(x) // size) * size, x.shape[1]), x.dtype)
    whole[: len(x)] = x
    blocks = whole.reshape(-1, size, x.shape[1] // size, size)
    return blocks.swapaxes(1, 3).reshape(whole.shape)[: len(x)]


def over_heads(run: Run, found: Answers) -> Answers:
    """Attention between the heads of a token."""
    a, q = run.arrays, run.question
    out, lse = np.zeros_like(found["out"]), np.full_like(found["lse"], -np.inf)
    for token in range(int(q.cu_seqlens_q[-1])):
        S = q.scale * a["q"][token] @ a["k"][token].T
        lse[:, token] = np.log(np.exp(S).sum(axis=1))
        out[token] = np.exp(S - lse[:, token, None]) @ a["v"][token]
    return found | {"out": out, "lse": lse}


# ---- operands of another tile ----


def stale(rows_too: bool, by_tiles: int, zeros: bool = False) -> Callable[[Head, Array], Array]:
    """Tiles of the one before or after: of queries that meet a tile of keys; or of keys, of all."""

    def of(c: Head, x: Array) -> Array:
        k, found = c.kernel, np.zeros_like(x)
        met = [(p.rows, p.keys) for p in meeting(c, k.tile_m, k.tile_n)]
        for keys in tiles(len(c.keys), k.tile_n) if rows_too else [slice(None)]:
            loop = [rows for rows, other in met if other == keys]
            loop = loop if rows_too else tiles(len(x), k.tile_n)
            for place, rows in enumerate(loop):
                there = 0 <= place + by_tiles < len(loop)
                source = loop[place + by_tiles] if there else rows
                part = x[source, keys][: rows.stop - rows.start]
                if there or not zeros:
                    found[rows, keys][: len(part)] = part
        return found

    return of


def stale_values(c: Head, V: Array) -> Array:
    """In the forward pass: V of the tile of keys before in the loop."""
    before = c.V[c.loop[max(c.place - 1, 0)]]
    found = np.zeros_like(V)
    found[: len(before)] = before[: len(V)]
    return found


def partner(distance: int, tile: int) -> Callable[[Head, Array], Array]:
    """Rows of a tile, as many apart; zeros behind the last."""

    def of(c: Head, x: Array) -> Array:
        whole = np.zeros((-(-len(x) // tile) * tile, x.shape[1]), x.dtype)
        whole[: len(x)] = x
        return whole[np.arange(len(x)) ^ distance]

    return of


def lse_by_key(number: int, tile: int = 32) -> Hooks:
    """Row j % number of a tile of queries, for key j."""

    def of(c: Head, L: Array) -> Array:
        row = c.i // 32 * 32 + c.j % tile % number
        return np.where(row < c.n, L[np.minimum(row, c.n - 1), 0], np.inf)

    return {"L": of}


def masked_by_tiles(first_alone: bool, tile_m: int = 32, tile_n: int = 32) -> Hooks:
    """Tiles that meet are not masked, or but for the first one of a tile of keys."""

    def see(c: Head, x: Array) -> Array:
        c.seen, found = x, np.zeros(x.shape, bool)
        for pair in meeting(c, tile_m, tile_n):
            masked = first_alone and pair.i == pair.first_i
            found[pair.rows, pair.keys] = x[pair.rows, pair.keys] if masked else True
        return found

    return {"seen": see}


def queries_past(tile: int) -> Hooks:
    """The last tile of queries goes on; what is stored is not more than the own ones."""

    def rows(c: Head, x: Array) -> Array:
        stop = c.start_q + -(-c.n // tile) * tile
        return np.arange(c.start_q, min(stop, len(c.question.q)))

    return {"rows": rows}


def lost(pair: Pair) -> bool:
    return (pair.i * 5 + pair.j * 3 + pair.c.h * 7 + pair.c.b) % 4 != 1


# ---- what is written ----


def heads_before_tokens(x: Array) -> Array:
    return x.swapaxes(0, 1).reshape(x.shape)


def padded_heads_before_tokens(array: Array, name: str, question: Question) -> Array:
    wrong = array.copy()
    longest = max(stop - start for start, stop in bounds(name, question))
    for start, stop in bounds(name, question):
        part = np.zeros((longest, *array.shape[1:]), dtype=array.dtype)
        part[: stop - start] = array[start:stop]
        wrong[start:stop] = heads_before_tokens(part)[: stop - start]
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
    order = np.arange(question.num_heads_q).reshape(question.num_heads_kv, -1).T.ravel()
    return array[order] if name == "lse" else array[:, order]


# ---- the table ----


def planted(bug: str, *variants: tuple[Any, ...]) -> list[Planted]:
    """``variants``: in words, the stages, what is wrong, needs, and classes that are alike."""
    found = []
    for words, stages, wrong, *more in variants:
        needs = Needs(**(_USUAL | (more[0] if more else {})))
        tile = {"tile_m": 32, "tile_n": 32}
        also = tuple(more[1:])
        found.append(Planted(bug, words, STAGES_OF[stages], kernel(tile | wrong), needs, also))
    return found


_USUAL: dict[str, Any] = {
    "masks": ("open", "causal"),
    "lengths_k": ("equal",),
    "lengths": (1, 60),
    "batch": (2, 3),
    "heads_kv": (1, 2),
    "groups": (1, 2),
    "head_dims": (16, 24, 32),
    "head_dims_v": (16, 32),
    "given": False,
    "least": 0.02,
}
_SAME: dict[str, Any] = {"same_dims": 1.0}
_SINGLE = _SAME | {"groups": (1,)}
_LONG: dict[str, Any] = {"lengths": (40, 90), "over": 64}
_EVEN: dict[str, Any] = {"head_dims": (32, 48, 64), "head_dims_v": (32, 64)}
_HEADS: dict[str, Any] = {"heads_kv": (2, 3), "groups": (2,)}
_SEVERAL: dict[str, Any] = {"heads_kv": (2, 3)}
_CAUSAL = {"masks": ("causal",)}

PLANTED: tuple[Planted, ...] = (
    *planted(
        "arguments-swapped",
        ("k and v", "fb", read_as(k="v", v="k"), _SAME),
        ("k and v in the backward pass", "b", read_as(k="v", v="k"), _SAME),
        ("q and k", "f", read_as(q="k", k="q"), _SINGLE),
        ("q, k and v in turn", "fb", read_as(q="k", k="v", v="q"), _SINGLE),
        ("q and dout", "b", read_as(q="dout", dout="q"), _SAME),
        ("lse and delta", "b", read_as(lse="delta", delta="lse")),
    ),
    *planted(
        "input-layout",
        ("v, heads first", "fb", turned("v"), _SEVERAL),
        ("q, k, v heads first", "f", turned("q", "k", "v"), _HEADS),
        ("dout, heads first", "b", turned("dout"), _HEADS),
        ("k, columns before heads", "f", change(as_if((0, 2, 1)), "k"), _SEVERAL),
        (
            *("q, heads first in every sequence", "f"),
            change(in_sequences(turned_in_sequences), "q"),
            _HEADS,
        ),
        ("blocks of 8 by 8 of V", "f", {"V": blocks_transposed}, _EVEN),
        (
            *("a swizzle of k", "fb", change(in_sequences(halves_swapped), "k")),
            {"head_dims": (16, 32, 64)},
        ),
        (
            *("v, heads at multiples of the head_dim of q", "fb", change(with_strides, "v")),
            _SEVERAL | {"head_dims": (32,), "head_dims_v": (64,), "same_dims": 0.0},
        ),
        (
            *("q, heads at multiples of the head_dim of v", "fb", change(with_strides, "q")),
            _SEVERAL | {"head_dims": (64,), "head_dims_v": (32,), "same_dims": 0.0},
        ),
        (
            *("heads for tokens", "f", {"results": over_heads}),
            {"heads_kv": (3, 4), "groups": (1,), "masks": ("open",)},
        ),
    ),
    *planted(
        "statistics-misplaced",
        ("lse, tokens first", "b", turned("lse"), _HEADS),
        ("lse of the first sequence", "b", change(local, "lse")),
        (
            *("delta of row i & ~8", "b", change(row_index(lambda i: i & ~8), "delta")),
            {"lengths": (12, 70)},
        ),
        (
            *("lse of the next head", "b"),
            change(lambda x, name, question: np.roll(x, -1, axis=0), "lse"),
            _HEADS,
        ),
        ("lse of a transposed tile", "b", lse_by_key(32), {"lengths": (20, 70)}),
        (
            *("lse of a transposed tile of fewer keys", "b", lse_by_key(16, 16)),
            {"lengths": (40, 70)},
        ),
        ("delta of the first sequence", "b", change(local, "delta")),
    ),
    *planted(
        "stale-tile",
        ("V of the tile before", "f", {"V tile": stale_values}, _LONG),
        ("K of the next tile in dq", "b", {"K of dq": stale(False, 1)}, _LONG),
        ("P of the tile before", "b", {"P of dv": stale(True, -1, zeros=True)}, _LONG),
        ("dS of the next tile", "b", {"dS of dk": stale(True, 1)}, _LONG),
        ("rows of dS 8 apart", "b", {"dS of dk": partner(8, 16)}, {"lengths": (12, 70)}),
        ("rows of P 16 apart", "b", {"P of dv": partner(16, 32)}, {"lengths": (20, 70)}),
    ),
    *planted(
        "gqa-reduction-map",
        (
            *("h % num_heads_kv", "b"),
            {"stored kv head": lambda c, g: c.h % c.question.num_heads_kv},
            _HEADS,
        ),
        (
            *("groups from behind", "b"),
            {"stored kv head": lambda c, g: c.question.num_heads_kv - 1 - g},
            *(_HEADS, "transposed"),
        ),
    ),
    *planted(
        "constant-factor",
        ("dq twice", "b", {"dq": by(2.0)}, {}, "tile-counted-twice"),
        (
            *("dv a group's part", "b", {"dv": by(lambda run: 1 / run.question.group)}),
            *({"groups": (2, 4)}, "gqa-group-not-summed"),
        ),
        ("all gradients", "b", of_each(by(0.7), *GRADIENTS)),
        ("out negative", "f", {"out": by(-1.0)}),
        ("half of dk's columns", "b", {"dk": partly_scaled}),
    ),
    *planted(
        "transposed",
        ("dq in sequences", "b", stored(in_sequences(heads_before_tokens), "dq"), _HEADS),
        ("lse, heads of groups", "f", stored(heads_of_groups_apart, "lse"), _HEADS),
        ("out, heads of groups", "f", stored(heads_of_groups_apart, "out"), _HEADS),
        ("out padded", "f", stored(padded_heads_before_tokens, "out"), _HEADS),
        (
            *("dv, halves of columns", "b"),
            {"dv": lambda run, x: np.roll(x, x.shape[-1] // 2, axis=-1)},
            *(_EVEN, "input-layout"),
        ),
    ),
    *planted(
        "offsets-shifted",
        (
            *("out from the end of padded sequences", "f", stored(from_the_end, "out")),
            {"lengths": (30, 60)},
        ),
    ),
    *planted(
        "mask-missing-in-backward",
        (
            *("the first tile of 16 queries masked, of 32 keys", "b"),
            masked_by_tiles(True, 16),
            _CAUSAL | {"lengths": (40, 90), "over": 40},
        ),
        ("in tiles of 32", "b", masked_by_tiles(False), _CAUSAL | {"over": 40}),
        (
            *("in tiles of 16 by 64", "b", masked_by_tiles(False, 16, 64)),
            _CAUSAL | {"lengths": (70, 120), "over": 90},
        ),
    ),
    *planted(
        "neighbour-leak",
        ("queries up to 32", "b", queries_past(32), {"lengths": (20, 60)}),
        ("queries up to 64", "b", queries_past(64), {"lengths": (20, 90)}),
    ),
    *planted(
        "pairs-dropped",
        (
            *("lost updates of dq", "b", {"dS of dq": by_pairs(lost, 32, 32)}),
            _LONG | {"masks": ("open",)},
        ),
        (
            *("lost updates of dq, causal", "b", {"dS of dq": by_pairs(lost, 16, 32)}),
            _LONG | _CAUSAL,
        ),
    ),
    *planted(
        "softmax-axis",
        *(
            (words, "b", {"dS": lambda c, x: c.P * (c.dP - (c.P * c.dP).sum(axis=0))}, needs)
            for words, needs in (
                ("dS over queries", {"lengths": (10, 60)}),
                ("dS over queries, causal", _CAUSAL | {"lengths": (10, 60)}),
            )
        ),
    ),
)
