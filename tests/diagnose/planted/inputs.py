"""Bugs in what is read and where results are stored, and operands that belong to another tile."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question
from tests.diagnose.hooks import by, by_pairs, meeting, of_each, tiled
from tests.diagnose.plain import Array, Head, Run, answers, tiles
from tests.diagnose.problems import problems
from tests.diagnose.stores import apart, as_if, change, in_sequences, local, read_as, stored
from tests.diagnose.table import FEW, GRADIENTS, Hooks, Table, plants

__all__ = ["PLANTED", "answers", "problems"]


# ---- what is read ----


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
    before = c.V[c.loop[max(c.place - 1, 0)]][: len(V)]
    return np.concatenate([before, 0 * V[len(before) :]])


def masked_by_tiles(first_alone: bool, tile_m: int = 32, tile_n: int = 32) -> Hooks:
    """Tiles that meet are not masked, or but for the first one of a tile of keys."""

    def see(c: Head, x: Array) -> Array:
        c.seen, found = x, np.zeros(x.shape, bool)
        for pair in meeting(c, tile_m, tile_n):
            masked = first_alone and pair.i == pair.first_i
            found[pair.rows, pair.keys] = x[pair.rows, pair.keys] if masked else True
        return found

    return {"seen": see}


# ---- what is written ----


def heads_of_groups_apart(array: Array, name: str, question: Question) -> Array:
    """The i-th query head of a key/value head as head i * num_heads_kv + head_kv."""
    order = np.arange(question.num_heads_q).reshape(question.num_heads_kv, -1).T.ravel()
    return array[order] if name == "lse" else array[:, order]


# ---- the table ----

_USUAL = FEW | {"masks": ("open", "causal"), "lengths_k": ("equal",), "lengths": (1, 60)}
_USUAL |= {"head_dims_v": (16, 32), "given": False, "least": 0.02, "past_end": 0.3}
_SAME: dict[str, Any] = {"same_dims": 1.0}
_SINGLE = _SAME | {"groups": (1,)}
_LONG: dict[str, Any] = {"lengths": (40, 90), "over": 64}
_HEADS: dict[str, Any] = {"heads_kv": (2, 3), "groups": (2,)}
_SEVERAL: dict[str, Any] = {"heads_kv": (2, 3)}
_CAUSAL = {"masks": ("causal",)}
_HALF = {"dk": lambda run, x: x * np.where(np.arange(x.shape[2]) < x.shape[2] // 2, 1.0, 5.7)}
_OVER_40 = {"lengths": (40, 90), "over": 40}
_THREE = {"heads_kv": (3, 4), "groups": (1,), "masks": ("open",)}
_BY_REMAINDER = {"stored kv head": lambda c, g: c.h % c.question.num_heads_kv}
_FROM_BEHIND = {"stored kv head": lambda c, g: c.question.num_heads_kv - 1 - g}
_MEAN = {"dv": by(lambda run: 1 / run.question.group)}

_FROM_12, _FROM_20 = {"lengths": (12, 70)}, {"lengths": (20, 70)}
_TURNED = as_if((1, 0, 2))
_HEADS_FIRST = in_sequences(lambda x: x.swapaxes(0, 1).reshape(x.shape))
_BEFORE = in_sequences(lambda x: x[np.arange(len(x)) & ~8])
_8_APART, _16_APART = (lambda c, x, far=far: apart(far, 2 * far)(x) for far in (8, 16))
_HASHED: Any = lambda t: (t.i * 5 + t.j * 3 + t.c.h * 7 + t.c.b) % 4 != 1  # noqa: E731
_LOST, _LOST_16 = ({"dS of dq": by_pairs(_HASHED, tile, 32)} for tile in (32, 16))
_NEXT_K = {"K of dq": lambda c, K: c.read("k", (c.g + 1) % c.question.num_heads_kv)}
_K_BY_REMAINDER = {"K": lambda c, K: c.read("k", c.h % c.question.num_heads_kv)}
# the last tile of queries goes on; what is stored is not more than the own ones
_ROWS_PAST = {"rows": lambda c, x: np.arange(x[0], min(x[0] - c.n // -32 * 32, len(c.question.q)))}
_NEXT_LSE = change(lambda x, *_: np.roll(x, -1, 0), "lse")
_GROUPS = {"groups": (2, 3), "heads_kv": (2, 3), "lengths": (10, 90)}
_HEADS_ON: Any = lambda x, *_: np.cumsum(x, axis=1)  # noqa: E731
_NEEDS = {"mask-missing-in-backward": _CAUSAL, "pairs-dropped": _LONG}
_TABLE: Table = (
    ("arguments-swapped: k and v", "fb", read_as(k="v", v="k"), _SAME),
    ("arguments-swapped: q and k", "f", read_as(q="k", k="q"), _SINGLE),
    ("arguments-swapped: q, k and v in turn", "fb", read_as(q="k", k="v", v="q"), _SINGLE),
    ("arguments-swapped: q and dout", "b", read_as(q="dout", dout="q"), _SAME),
    ("input-layout: v, heads first", "fb", change(_TURNED, "v"), _SEVERAL),
    ("input-layout: q, k, v heads first", "f", change(_TURNED, "q", "k", "v"), _HEADS),
    ("input-layout: dout, heads first", "b", change(_TURNED, "dout"), _HEADS),
    ("input-layout: k, columns before heads", "f", change(as_if((0, 2, 1)), "k"), _SEVERAL),
    ("input-layout: heads for tokens", "f", {"results": over_heads}, _THREE),
    ("statistics-misplaced: lse, tokens first", "b", change(_TURNED, "lse"), _HEADS),
    ("statistics-misplaced: lse of the first sequence", "b", change(local, "lse")),
    ("statistics-misplaced: delta of row i & ~8", "b", change(_BEFORE, "delta"), _FROM_12),
    ("statistics-misplaced: lse of the next head", "b", _NEXT_LSE, _HEADS),
    ("statistics-misplaced: delta of the first sequence", "b", change(local, "delta")),
    ("stale-tile: V of the tile before", "f", {"V tile": stale_values}, _LONG),
    ("stale-tile: K of the next tile in dq", "b", {"K of dq": stale(False, 1)}, _LONG),
    ("gqa-head-map: K of the next head in dq", "b", _NEXT_K, _GROUPS),
    ("gqa-head-map: h % heads, K alone", "b", _K_BY_REMAINDER, _GROUPS),
    ("stale-tile: P of the tile before", "b", {"P of dv": stale(True, -1, zeros=True)}, _LONG),
    ("stale-tile: dS of the next tile", "b", {"dS of dk": stale(True, 1)}, _LONG),
    ("stale-tile: rows of dS 8 apart", "b", {"dS of dk": _8_APART}, _FROM_12),
    ("stale-tile: rows of P 16 apart", "b", {"P of dv": _16_APART}, _FROM_20),
    ("gqa-reduction-map: h % num_heads_kv", "b", _BY_REMAINDER, _HEADS),
    ("gqa-reduction-map or transposed: groups from behind", "b", _FROM_BEHIND, _HEADS),
    ("constant-factor or tile-counted-twice: dq twice", "b", {"dq": by(2.0)}),
    ("constant-factor or gqa-group-not-summed: dv a group's part", "b", _MEAN, {"groups": (2, 4)}),
    ("constant-factor: all gradients", "b", of_each(by(0.7), *GRADIENTS)),
    ("constant-factor: out negative", "f", {"out": by(-1.0)}),
    ("transposed: dq in sequences", "b", stored(_HEADS_FIRST, "dq"), _HEADS),
    ("transposed: lse, heads of groups", "f", stored(heads_of_groups_apart, "lse"), _HEADS),
    ("transposed: out, heads of groups", "f", stored(heads_of_groups_apart, "out"), _HEADS),
    ("mask-missing-in-backward: but for the first tile", "b", masked_by_tiles(True, 16), _OVER_40),
    ("mask-missing-in-backward: in tiles of 32", "b", masked_by_tiles(False), {"over": 40}),
    ("neighbour-leak: queries up to 32", "b", _ROWS_PAST, {"lengths": (20, 60)}),
    ("pairs-dropped: lost updates of dq", "b", _LOST, {"masks": ("open",)}),
    ("pairs-dropped: lost updates of dq, causal", "b", _LOST_16, _CAUSAL),
)
PLANTED = plants(_TABLE, lambda on: _USUAL, _NEEDS, every=tiled(32))
