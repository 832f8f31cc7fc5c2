"""Gradients whose sums lack terms, hold them twice, or have row terms of other rows."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import Question
from tests.diagnose.hooks import Pair, by, by_pairs, no_window, of_each, of_group, window
from tests.diagnose.plain import FLOAT32, FLOAT64, Array, Head, Hook, answers
from tests.diagnose.problems import problems
from tests.diagnose.stores import as_if, delta, in_sequences
from tests.diagnose.table import GRADIENTS, Hooks, Table, plants

__all__ = ["PLANTED", "answers", "problems"]
B = ("dq", "dk")


# ---- other row terms ----


def of_rows(of: Callable[[Array], Array], *tensors: str) -> Hooks:
    """D of other rows of the sequence."""
    return delta(lambda a, q: in_sequences(of)(a["delta"], "delta", q), *tensors or B)


def lse(of: Callable[[Array, Question], Array], *tensors: str) -> Hooks:
    """Another lse, where rows without keys have 0."""

    def read(run: Any, a: dict[str, Array]) -> dict[str, Array]:
        L = np.where(np.isneginf(a["lse"]), 0, a["lse"])
        return a | {"lse": of(L, run.question).astype(run.wide)}

    return {"read": read, "only": tensors or GRADIENTS}


def with_residual(a: dict[str, Array], question: Question) -> Array:
    heads_first = a["out"].swapaxes(0, 1)
    x = np.random.default_rng(3).standard_normal(heads_first.shape).swapaxes(0, 1)
    return (a["dout"] * (a["out"] + x)).sum(2).T - a["dlse"]


def of_dtype(dtype: Any) -> Hook:
    return lambda c, x: x.astype(dtype).astype(x.dtype)


# ---- sums ----


def often(of: Callable[[Pair], Any], *tensors: str, tile_m: int = 32, tile_n: int = 16) -> Hooks:
    return {"often": by_pairs(of, tile_m, tile_n), "only": tensors}


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


def divided(c: Head, x: Array) -> Array:
    return x / np.where(c.found["row_sum"] == 0, 1, c.found["row_sum"])


# ---- the table ----

_TWO = {"batch": (2, 3), "lengths": (30, 90)}
_EQUAL = {"lengths_k": ("equal",)}
_EASY = {"masks": ("open", "causal")} | _EQUAL
_ROWS = _TWO | _EASY | {"dlse": 0.0}
_HEADS = {"heads_kv": (2, 3)}
_FINE = {"dtypes": (FLOAT64, FLOAT32, FLOAT32)}
_SMALL = _FINE | {"dlse": 0.0}
_LONG = {"lengths": (70, 130), "batch": (1, 2), "head_dims": (32, 64), "head_dims_v": (32, 64)}
_OPEN, _CAUSAL = {"masks": ("open",)}, {"masks": ("causal",)}
_DLSE, _LONGER, _KEYS = {"dlse": 1.0}, {"lengths": (90, 130)}, {"only": ("dk", "dv")}
_IN_WINDOW = {"masks": ("window",)} | _LONGER
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
    "no-rescale": _OPEN | {"lengths": (40, 120)},
}
_FIRST_COLUMNS = delta(lambda a, q: (a["dout"] * a["out"])[..., :16].sum(2).T, *B)
_ROW_BEFORE = delta(lambda a, q: (np.roll(a["dout"], 1, 0) * a["out"]).sum(2).T, *B)
_TURNED = delta(lambda a, q: as_if((1, 0))(a["delta"], "", q), *B)
_DLSE_TURNED = delta(lambda a, q: a["delta"] + a["dlse"] - as_if((1, 0))(a["dlse"], "", q), *B)
_NO_TAILS = of_rows(lambda x: x * (np.arange(len(x)) < len(x) // 32 * 32)[:, None])
_ROUNDED_UP = {"often": by_pairs(lambda t: t.i >= -(-t.j // 2) or t.i > t.first_i, 64, 32)}
_TURNED_LSE = lse(lambda L, q: as_if((1, 0))(L, "", q))
_HALF_IN_DK = delta(lambda a, q: 0.5 * a["delta"], "dk")
_IN_FLOAT16, _IN_FLOAT8 = ({"dY": of_dtype(of)} for of in (np.float16, ml_dtypes.float8_e5m2))
_BASE_2 = delta(lambda a, q: a["delta"] + a["dlse"] * (1 - np.log(2)), *B)
_SCALED_DLSE = delta(lambda a, q: a["delta"] + a["dlse"] * (1 - q.scale), *B)
_ROUNDED_DOWN = {"often": by_pairs(lambda t: t.i < t.last_i or t.first_i == t.last_i, 32, 32)}
_OFF_DIAGONAL = often(lambda t: t.i != t.j, "dq", tile_n=32)
_DIAGONAL_TWICE = often(lambda t: 1 + (t.i == t.j), "dk", "dv", tile_n=32)
_LAST_TWICE = often(lambda t: 1 + (t.i == t.last_i), "dk", "dv")
_NO_TAIL = often(lambda t: t.rows.stop <= t.c.n // 32 * 32, "dk", "dv")
_NARROW_D = delta(lambda a, q: a["delta"].astype(ml_dtypes.bfloat16), *B)
_NARROW_L = lse(lambda L, q: L.astype(ml_dtypes.bfloat16))

_TABLE: Table = (
    # ---- row terms ----
    ("delta-of-another-out: the first 16 columns", "b", _FIRST_COLUMNS, _LONG),
    ("delta-of-another-out: out with a residual", "b", delta(with_residual, *B)),
    ("delta-of-another-out: dout of the row before", "b", _ROW_BEFORE),
    ("delta-of-another-out: in dk alone, of half the columns", "b", _HALF_IN_DK, _LONG),
    ("statistics-misplaced or delta-of-another-out: D in no partial tiles", "b", _NO_TAILS),
    ("delta-omitted: in dk alone", "b", delta(lambda a, q: 0 * a["delta"], "dk")),
    ("statistics-misplaced: D as (tokens, heads)", "b", _TURNED),
    ("statistics-misplaced: D of a tile of 16", "b", of_rows(lambda x: x[np.arange(len(x)) % 16])),
    ("statistics-misplaced: lse as (tokens, heads)", "b", _TURNED_LSE),
    ("statistics-misplaced: lse of 0", "b", lse(lambda L, q: 0 * L)),
    ("input-layout: dlse as (tokens, heads)", "b", _DLSE_TURNED, _TWO | _HEADS | _EASY | _DLSE),
    ("lse-gradient-sign: dlse in base 2", "b", _BASE_2),
    ("lse-gradient-sign: dlse times softmax_scale", "b", _SCALED_DLSE),
    ("lse-gradient-sign: dlse twice", "b", delta(lambda a, q: a["delta"] - a["dlse"], *B)),
    ("constant-factor: dP scaled", "b", {"dP": by(0.25), "only": B}, _ROWS),
    ("mask-missing-in-backward: in dv alone", "b", no_window() | {"only": ("dv",)}),
    ("mask-missing-in-backward: in dq alone", "b", no_window() | {"only": ("dq",)}),
    ("causal-off-by-one: in dk and dv", "b", window(right=1) | _KEYS),
    # ---- pairs ----
    ("pairs-dropped: the first query tile rounded up", "b", _ROUNDED_UP, _CAUSAL),
    ("pairs-dropped: the last query tile rounded down", "b", _ROUNDED_DOWN, _IN_WINDOW),
    ("pairs-dropped or tile-skipped: the diagonal in dq alone", "b", _OFF_DIAGONAL, _CAUSAL),
    ("tile-counted-twice: the diagonal in dk and dv", "b", _DIAGONAL_TWICE, _CAUSAL),
    ("tile-counted-twice: the last query tile", "b", _LAST_TWICE, _OPEN),
    ("tail-tile-dropped: of queries, in dk and dv", "b", _NO_TAIL),
    ("gqa-group-not-summed: dv alone", "b", of_group(-1, "dv")),
    ("gqa-group-not-summed: dk alone, the first", "b", of_group(0, "dk")),
    ("output-scale: dk inside of the loop", "b", inside("dk")),
    ("output-scale: dq inside of the loop", "b", inside("dq", 32)),
    # ---- 16 bits ----
    ("narrow-intermediate: dS in float16", "b", _IN_FLOAT16, _SMALL | {"dout": 1e-6}),
    # beside float64's noise it is "unknown" as yet
    ("narrow-intermediate: dS in float8", "b", _IN_FLOAT8, {"dtypes": (FLOAT32,) * 3, "dlse": 0.0}),
    ("narrow-intermediate: D in bfloat16", "b", _NARROW_D, _FINE | _ROWS),
    ("narrow-intermediate: lse in bfloat16", "b", _NARROW_L, _FINE | _ROWS),
    # ---- online sums ----
    ("no-rescale: out after P V is added", "f", rescaled(None, "out", late=True)),
    ("no-rescale: row_sum after the sum is added", "f", rescaled(None, "row_sum", late=True)),
    ("no-rescale: divided at every tile", "f", {"sum out": divided}),
    ("no-rescale: the row sum of the last tile", "f", {"sum row_sum": lambda c, x: c.part}),
    ("no-rescale: out rescaled twice", "f", rescaled(lambda c: c.factor**2, "out")),
)
_FORWARD = {"given": False, "dout": None}
PLANTED = plants(_TABLE, lambda on: {"given": True} if on == "b" else _FORWARD, _NEEDS)
