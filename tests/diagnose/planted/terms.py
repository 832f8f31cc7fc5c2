"""Gradients whose sums lack terms, hold them twice, or have row terms of other rows."""

from collections.abc import Callable
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import Question
from tests.diagnose.hooks import (
    GRADIENTS,
    Hooks,
    Pair,
    Table,
    as_if,
    by,
    by_pairs,
    delta,
    in_sequences,
    local,
    no_window,
    of_each,
    of_group,
    plants,
    window,
)
from tests.diagnose.plain import BFLOAT16, FLOAT32, FLOAT64, Array, Head, Hook, answers
from tests.diagnose.problems import problems

__all__ = ["PLANTED", "answers", "problems"]
Of = Callable[[dict[str, Array], Question], Array]  # a row term, out of all arrays
B = ("dq", "dk")


# ---- other row terms ----


def lse(of: Callable[[Array, Question], Array], *tensors: str) -> Hooks:
    """Another lse, where rows without keys have 0."""

    def read(run: Any, a: dict[str, Array]) -> dict[str, Array]:
        L = np.where(np.isneginf(a["lse"]), 0, a["lse"])
        return a | {"lse": of(L, run.question).astype(run.wide)}

    return {"read": read, "only": tensors or GRADIENTS}


def turned(x: Array, question: Question) -> Array:
    return as_if((1, 0))(x, "", question)


def in_tiles(tile: int) -> Of:
    """Row i % tile of the sequence."""
    of = in_sequences(lambda x: x[np.arange(len(x)) % tile])
    return lambda a, question: of(a["delta"], "delta", question)


def until_tile(a: dict[str, Array], question: Question) -> Array:
    total = a["delta"].shape[1]
    return a["delta"] * (np.arange(total) < total // 64 * 64)


def no_tails(tile: int) -> Of:
    """0 in the last rows of every sequence, those of a partial tile."""
    of = in_sequences(lambda x: x * (np.arange(len(x)) < len(x) // tile * tile)[:, None])
    return lambda a, question: of(a["delta"], "delta", question)


def product_of(of: Callable[[Array, Array], tuple[Array, Array]]) -> Of:
    """D of another dout and out, without dlse."""

    def found(a: dict[str, Array], question: Question) -> Array:
        dout, out = of(a["dout"], a["out"])
        return (dout * out).sum(axis=2).T

    return found


def with_residual(a: dict[str, Array], question: Question) -> Array:
    heads_first = a["out"].swapaxes(0, 1)
    x = np.random.default_rng(3).standard_normal(heads_first.shape).swapaxes(0, 1)
    return (a["dout"] * (a["out"] + x)).sum(2).T - a["dlse"]


def by_shards(count: int) -> Hooks:
    """Every shard of the keys has the D of its own output."""

    def dS(c: Head, x: Array) -> Array:
        found = np.zeros_like(c.P)
        for shard in np.array_split(np.arange(c.P.shape[1]), count):
            weight = c.P[:, shard].sum(axis=1)
            own = (c.P[:, shard] * c.dP[:, shard]).sum(axis=1) / np.where(weight == 0, 1, weight)
            found[:, shard] = c.P[:, shard] * (c.dP[:, shard] - own[:, None])
        return found

    return {"dS": dS}


def of_dtype(dtype: Any) -> Hook:
    return lambda c, x: x.astype(dtype).astype(x.dtype)


def flushed(c: Any, x: Array) -> Array:
    return np.where(np.abs(x) < 2.0**-14, 0, x.astype(np.float16)).astype(x.dtype)


# ---- sums ----


def often(of: Callable[[Pair], Any], *tensors: str, tile_m: int = 32, tile_n: int = 16) -> Hooks:
    return {"often": by_pairs(of, tile_m, tile_n), "only": tensors}


def some_lost(pair: Pair) -> bool:
    return crc32(bytes([pair.i, pair.j, pair.c.h, pair.c.n])) % 7 > 0


def rounded_up(tile_m: int = 32, tile_n: int = 16) -> Hooks:
    """The first query tile of a tile of keys is one too far."""
    of = by_pairs(lambda t: t.i >= -(-t.j // 2) or t.i > t.first_i, tile_m, tile_n)
    return {"often": of}


def inside(name: str, tile_n: int = 16) -> Hooks:
    """softmax_scale inside of the loop."""
    total, back = f"sum {name}", f"d{name[1].upper()}"
    hooks = {total: lambda c, x: x * c.run.wide.type(c.s), back: lambda c, x: x / c.s}
    return hooks | {"only": (name,), "tile_m": 32, "tile_n": tile_n}


def rescaled(factor: Callable[[Head], Array] | None, *names: str, late: bool = False) -> Hooks:
    """Sums that another factor rescales; late: the new tile too, which is there already."""

    def of(c: Head, x: Array) -> Array:
        other = c.factor if factor is None else factor(c)
        return (c.old + c.part) * other if late else c.old * other + c.part

    return of_each(of, *(f"sum {name}" for name in names))


def row_before(c: Head) -> Array:
    return c.factor[np.arange(len(c.factor)) & ~8]


# ---- the table ----

_TWO = {"batch": (2, 3), "lengths": (30, 90)}
_EQUAL = {"lengths_k": ("equal",)}
_EASY = {"masks": ("open", "causal")} | _EQUAL
_ROWS = _TWO | _EASY | {"dlse": 0.0}
_HEADS = {"heads_kv": (2, 3)}
_FINE = {"dtypes": (FLOAT64, FLOAT32, FLOAT32)}
_LONG = {"lengths": (70, 130), "batch": (1, 2), "head_dims": (32, 64), "head_dims_v": (32, 64)}
_OPEN, _CAUSAL = {"masks": ("open",)}, {"masks": ("causal",)}
_DLSE, _LONGER, _KEYS = {"dlse": 1.0}, {"lengths": (90, 130)}, {"only": ("dk", "dv")}
_IN_WINDOW = {"masks": ("window",)} | _LONGER
_OFF_TILE = {"past_end": 0.0, "lengths": (41, 59), "batch": (2, 2)}
_SHORT = {"head_dims": (32,), "head_dims_v": (32,), "dlse": 0.0, "heads_kv": (1,), "shows": 0.0}
_SHORT |= _EASY | {"lengths": (140, 200), "batch": (1, 2), "groups": (2, 4)}
_SHORT |= {"dtypes": (BFLOAT16,) * 3}
_NEEDS: dict[str, dict[str, Any]] = {
    "delta-of-another-out": _ROWS,
    "delta-omitted": _ROWS,
    "statistics-misplaced": _ROWS | _HEADS,
    "lse-gradient-sign": _EASY | _DLSE,
    "mask-missing-in-backward": _CAUSAL | _EQUAL | {"lengths": (10, 90)},
    "causal-off-by-one": _CAUSAL | _EQUAL | {"lengths": (10, 60)},
    "pairs-dropped": _LONG | _EQUAL,
    "tile-counted-twice": _LONG | _EQUAL,
    "tail-tile-dropped": _LONG | _OPEN | _EQUAL | {"lengths": (102, 122)},
    "gqa-group-not-summed": _EQUAL | {"groups": (2, 4), "lengths": (20, 90)},
    "output-scale": _LONG | _EASY | {"scaled": 0.0},
    "underflow-in-16-bit": _FINE | {"dlse": 0.0},
    # beside float64's noise it is "unknown" as yet
    "narrow-intermediate": {"dtypes": (FLOAT32,) * 3, "dlse": 0.0},
    "no-rescale": _OPEN | {"lengths": (40, 120)},
}
_FIRST_COLUMNS = delta(product_of(lambda dout, out: (dout[..., :16], out[..., :16])), *B)
_ROW_BEFORE = delta(product_of(lambda dout, out: (np.roll(dout, 1, 0), out)), *B)
_HALF_IN_DK = delta(lambda a, q: 0.5 * a["delta"], "dk")
_TURNED = delta(lambda a, q: turned(a["delta"], q), *B)
_LOCAL_IN_DQ = delta(lambda a, q: local(a["delta"], "delta", q), "dq")
_NEXT_IN_DV = lse(lambda L, q: np.roll(L, -1, 0), "dv")
_DLSE_TURNED = delta(lambda a, q: a["delta"] + a["dlse"] - turned(a["dlse"], q), *B)
_BASE_2 = delta(lambda a, q: a["delta"] + a["dlse"] * (1 - np.log(2)), *B)
_UNTIL_TILE = delta(until_tile, *B)
_ROUNDED_DOWN = {"often": by_pairs(lambda t: t.i < t.last_i or t.first_i == t.last_i, 32, 32)}
_OFF_DIAGONAL = often(lambda t: t.i != t.j, "dq", tile_n=32)
_DIAGONAL_TWICE = often(lambda t: 1 + (t.i == t.j), "dk", "dv", tile_n=32)
_LAST_TWICE = often(lambda t: 1 + (t.i == t.last_i), "dk", "dv")
_NO_TAIL = often(lambda t: t.rows.stop <= t.c.n // 32 * 32, "dk", "dv")
_NARROW_SUMS = of_each(of_dtype(ml_dtypes.bfloat16), "sum dk", "sum dv")
_NARROW_D = delta(lambda a, q: a["delta"].astype(ml_dtypes.bfloat16), *B)
_NARROW_L = lse(lambda L, q: L.astype(ml_dtypes.bfloat16))

_TABLE: Table = (
    # ---- row terms ----
    ("delta-of-another-out: the first 16 columns", "b", _FIRST_COLUMNS, _LONG),
    ("delta-of-another-out: out with a residual", "b", delta(with_residual, *B)),
    ("delta-of-another-out: dout of the row before", "b", _ROW_BEFORE),
    ("delta-of-another-out: of 3 shards", "b", by_shards(3), _OPEN),
    ("delta-of-another-out: in dk alone, of half the columns", "b", _HALF_IN_DK, _LONG),
    ("delta-omitted: from the last whole tile of the pack on", "b", _UNTIL_TILE, _OFF_TILE),
    ("delta-omitted: in partial tiles", "b", delta(no_tails(32), *B)),
    ("delta-omitted: in dk alone", "b", delta(lambda a, q: 0 * a["delta"], "dk")),
    ("statistics-misplaced: D as (tokens, heads)", "b", _TURNED),
    ("statistics-misplaced: D without offset, in dq alone", "b", _LOCAL_IN_DQ),
    ("statistics-misplaced: D of a tile of 16", "b", delta(in_tiles(16), *B)),
    ("statistics-misplaced: lse as (tokens, heads)", "b", lse(turned)),
    ("statistics-misplaced: lse of the next head, in dv alone", "b", _NEXT_IN_DV),
    ("statistics-misplaced: lse of 0", "b", lse(lambda L, q: 0 * L)),
    ("input-layout: dlse as (tokens, heads)", "b", _DLSE_TURNED, _TWO | _HEADS | _EASY | _DLSE),
    ("lse-gradient-sign: dlse in base 2", "b", _BASE_2),
    ("lse-gradient-sign: dlse twice", "b", delta(lambda a, q: a["delta"] - a["dlse"], *B)),
    ("constant-factor: dP scaled", "b", {"dP": by(0.25), "only": B}, _ROWS),
    ("mask-missing-in-backward: in dv alone", "b", no_window() | {"only": ("dv",)}),
    ("mask-missing-in-backward: in dq alone", "b", no_window() | {"only": ("dq",)}),
    ("causal-off-by-one: in dk and dv", "b", window(right=1) | _KEYS),
    # ---- pairs ----
    ("pairs-dropped: the first query tile rounded up", "b", rounded_up(64, 32), _CAUSAL),
    ("pairs-dropped: the last query tile rounded down", "b", _ROUNDED_DOWN, _IN_WINDOW),
    ("pairs-dropped: by chance", "b", {"often": by_pairs(some_lost)}, _LONGER),
    ("pairs-dropped or tile-skipped: the diagonal in dq alone", "b", _OFF_DIAGONAL, _CAUSAL),
    ("tile-counted-twice: the diagonal in dk and dv", "b", _DIAGONAL_TWICE, _CAUSAL),
    ("tile-counted-twice: the last query tile", "b", _LAST_TWICE, _OPEN),
    ("tail-tile-dropped: of queries, in dk and dv", "b", _NO_TAIL),
    ("gqa-group-not-summed: dv alone", "b", of_group(-1, "dv")),
    ("gqa-group-not-summed: dk alone, the first", "b", of_group(0, "dk")),
    ("output-scale: dk inside of the loop", "b", inside("dk")),
    ("output-scale: dq inside of the loop", "b", inside("dq", 32)),
    # ---- 16 bits ----
    ("underflow-in-16-bit: dS in float16", "b", {"dY": of_dtype(np.float16)}, {"dout": 1e-6}),
    ("underflow-in-16-bit: dS in float16, flushed to 0", "b", {"dY": flushed}, {"dout": 3e-3}),
    ("narrow-intermediate: dS in float8", "b", {"dY": of_dtype(ml_dtypes.float8_e5m2)}),
    ("accumulates-in-16-bit: dk and dv over tiles of 16", "b", _NARROW_SUMS, _SHORT),
    ("accumulates-in-16-bit: D in bfloat16", "b", _NARROW_D, _FINE | _ROWS),
    ("accumulates-in-16-bit: lse in bfloat16", "b", _NARROW_L, _FINE | _ROWS),
    # ---- online sums ----
    ("no-rescale: out by the row 8 before", "f", rescaled(row_before, "out")),
    ("no-rescale: out after P V is added", "f", rescaled(None, "out", late=True)),
    ("no-rescale: row_sum after the sum is added", "f", rescaled(None, "row_sum", late=True)),
    ("no-rescale: out rescaled twice", "f", rescaled(lambda c: c.factor**2, "out")),
)
_FORWARD = {"given": False, "dout": None}
PLANTED = plants(_TABLE, lambda on: {"given": True} if on == "b" else _FORWARD, _NEEDS)
