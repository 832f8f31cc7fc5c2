"""Gradients whose sums lack terms, hold them twice, or have row terms of other rows."""

from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import Question
from tests.diagnose.hooks import (
    GRADIENTS,
    STAGES_OF,
    Hooks,
    Pair,
    as_if,
    by,
    by_pairs,
    change,
    in_sequences,
    kernel,
    local,
    no_window,
    of_each,
    window,
)
from tests.diagnose.plain import FLOAT32, FLOAT64, Array, Head, Hook, Planted, answers
from tests.diagnose.problems import Needs, problems

__all__ = ["PLANTED", "answers", "problems"]
Of = Callable[[dict[str, Array], Question], Array]  # a row term, out of all arrays
B = ("dq", "dk")


# ---- other row terms ----


def delta(of: Of, *tensors: str) -> Hooks:
    """Another D, in some of the gradients."""
    read = {"read": lambda run, a: a | {"delta": of(a, run.question).astype(run.wide)}}
    return read | {"only": tensors or B}


def lse(of: Callable[[Array, Question], Array], *tensors: str) -> Hooks:
    """Another lse, where rows without keys have 0."""

    def read(run: Any, a: dict[str, Array]) -> dict[str, Array]:
        L = np.where(np.isneginf(a["lse"]), 0, a["lse"])
        return a | {"lse": of(L, run.question).astype(run.wide)}

    return {"read": read, "only": tensors or GRADIENTS}


def swapped(x: Array, question: Question | None = None) -> Array:
    return as_if((1, 0))(x, "", question)


def upper_rows(a: dict[str, Array], question: Question) -> Array:
    """Rows 8 to 15 of every 16 read those 8 before, of the whole array."""
    place = np.arange(a["delta"].shape[1])
    return a["delta"][:, np.where(place % 16 >= 8, place - 8, place)]


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


def by_queries(c: Head, x: Array) -> Array:
    return c.P * (c.dP - (c.P * c.dP).sum(axis=0))


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


def planted(
    bug: str, needs: Mapping[str, Any], *variants: tuple[Any, ...], on: str = "b"
) -> list[Planted]:
    """``variants``: in words, what is wrong, more needs, and classes that are the same function."""
    own: dict[str, Any] = {"given": on == "b"}
    own |= {"moved": 0.0} if on in "sj" else {}
    own |= {"dout": None} if on in "fj" else {}
    gives = STAGES_OF[on] if on in "sj" else ()
    found = []
    for words, wrong, *more in variants:
        wanted = Needs(**{**own, **needs, **(more[0] if more else {})})
        also = tuple(more[1:])
        found.append(Planted(bug, words, STAGES_OF[on], kernel(wrong), wanted, also, gives))
    return found


_TWO = {"batch": (2, 3), "lengths": (30, 90)}
_EQUAL = {"lengths_k": ("equal",)}
_EASY = {"masks": ("open", "causal")} | _EQUAL
_ROWS = _TWO | _EASY | {"dlse": 0.0}
_HEADS = {"heads_kv": (2, 3)}
_FINE = {"dtypes": (FLOAT64, FLOAT32, FLOAT32)}
_LONG = {"lengths": (70, 130), "batch": (1, 2), "head_dims": (32, 64), "head_dims_v": (32, 64)}
_OPEN, _CAUSAL = {"masks": ("open",)}, {"masks": ("causal",)}

PLANTED: tuple[Planted, ...] = (
    # ---- row terms ----
    *planted(
        "delta-of-another-out",
        _ROWS,
        (
            "the first 16 columns",
            delta(product_of(lambda dout, out: (dout[..., :16], out[..., :16]))),
            _LONG,
        ),
        (
            "every second column",
            delta(product_of(lambda dout, out: (dout[..., ::2], out[..., ::2]))),
            _LONG,
        ),
        ("out with a residual", delta(with_residual)),
        (
            "dout of the row before",
            delta(product_of(lambda dout, out: (np.roll(dout, 1, 0), out))),
        ),
        ("over the queries", {"dS": by_queries}, {}, "softmax-axis"),
        ("of 3 shards", by_shards(3), _OPEN),
        ("of 2 shards", by_shards(2), _OPEN),
        ("in dk alone, of half the columns", delta(lambda a, q: 0.5 * a["delta"], "dk"), _LONG),
    ),
    *planted(
        "delta-omitted",
        _ROWS,
        (
            "from the last whole tile of the pack on",
            delta(until_tile),
            {"past_end": 0.0, "lengths": (41, 59), "batch": (2, 2)},
            "delta-of-another-out",
        ),
        ("in partial tiles", delta(no_tails(32)), {}, "delta-of-another-out"),
        ("in dk alone", delta(lambda a, q: 0 * a["delta"], "dk")),
    ),
    *planted(
        "statistics-misplaced",
        _ROWS | _HEADS,
        ("D of 8 rows before", delta(upper_rows), {}, "delta-of-another-out"),
        ("D as (tokens, heads)", delta(lambda a, q: swapped(a["delta"]))),
        ("D without offset", delta(lambda a, q: local(a["delta"], "delta", q))),
        ("D of a tile of 16", delta(in_tiles(16))),
        ("lse without offset", lse(lambda L, q: local(L, "lse", q))),
        ("lse as (tokens, heads)", lse(swapped)),
        ("lse of 0", lse(lambda L, q: 0 * L)),
    ),
    *planted(
        "input-layout",
        _TWO | _HEADS | _EASY | {"dlse": 1.0},
        (
            "dlse as (tokens, heads)",
            delta(lambda a, q: a["delta"] + a["dlse"] - swapped(a["dlse"])),
        ),
    ),
    *planted(
        "lse-gradient-sign",
        _EASY | {"dlse": 1.0},
        ("dlse in base 2", delta(lambda a, q: a["delta"] + a["dlse"] * (1 - np.log(2)))),
        ("dlse twice", delta(lambda a, q: a["delta"] - a["dlse"])),
    ),
    *planted("constant-factor", _ROWS, ("dP scaled", {"dP": by(0.25), "only": B})),
    *planted(
        "mask-missing-in-backward",
        _CAUSAL | _EQUAL | {"lengths": (10, 90)},
        ("in dv alone", no_window() | {"only": ("dv",)}),
        ("in dq alone", no_window() | {"only": ("dq",)}),
    ),
    *planted(
        "causal-off-by-one",
        _CAUSAL | _EQUAL | {"lengths": (10, 60)},
        ("in dk and dv", window(right=1) | {"only": ("dk", "dv")}),
    ),
    # ---- pairs ----
    *planted(
        "pairs-dropped",
        _LONG | _EQUAL,
        ("the first query tile rounded up", rounded_up(64, 32), _CAUSAL),
        (
            "the last query tile rounded down",
            {"often": by_pairs(lambda t: t.i < t.last_i or t.first_i == t.last_i, 32, 32)},
            {"masks": ("window",), "lengths": (90, 130)},
        ),
        ("by chance", {"often": by_pairs(some_lost)}, {"lengths": (90, 130)}),
        (
            *("the diagonal in dq alone", often(lambda t: t.i != t.j, "dq", tile_n=32)),
            *(_CAUSAL, "tile-skipped"),
        ),
    ),
    *planted(
        "tile-counted-twice",
        _LONG | _EQUAL,
        (
            "the diagonal in dk and dv",
            often(lambda t: 1 + (t.i == t.j), "dk", "dv", tile_n=32),
            _CAUSAL,
        ),
        ("the last query tile", often(lambda t: 1 + (t.i == t.last_i), "dk", "dv"), _OPEN),
    ),
    *planted(
        "tail-tile-dropped",
        _LONG | _OPEN | _EQUAL | {"lengths": (102, 122)},
        ("of queries, in dk and dv", often(lambda t: t.rows.stop <= t.c.n // 32 * 32, "dk", "dv")),
    ),
    *planted(
        "gqa-group-not-summed",
        _EQUAL | {"groups": (2, 4), "lengths": (20, 90)},
        ("dv alone", often(lambda t: t.c.h % t.c.group == t.c.group - 1, "dv")),
        ("dk alone, the first", often(lambda t: t.c.h % t.c.group == 0, "dk")),
    ),
    *planted(
        "output-scale",
        _LONG | _EASY | {"scaled": 0.0},
        ("dk inside of the loop", inside("dk")),
        ("dq inside of the loop", inside("dq", 32)),
    ),
    # ---- 16 bits ----
    *planted(
        "narrow-intermediate",
        _FINE | {"dlse": 0.0},
        ("dS in float16", {"dY": of_dtype(np.float16)}, {"dout": 1e-6}),
        ("dS in float16, flushed to 0", {"dY": flushed}, {"dout": 3e-3}),
    ),
    *planted(
        "narrow-intermediate",
        {"dtypes": (FLOAT32,) * 3, "dlse": 0.0},  # beside float64's noise it is "unknown" as yet
        ("dS in float8", {"dY": of_dtype(ml_dtypes.float8_e5m2)}),
    ),
    *planted(
        "narrow-intermediate",
        _FINE | _ROWS,
        ("D in bfloat16", delta(lambda a, q: a["delta"].astype(ml_dtypes.bfloat16))),
        ("lse in bfloat16", lse(lambda L, q: L.astype(ml_dtypes.bfloat16))),
    ),
    # ---- online sums ----
    *planted(
        "no-rescale",
        _OPEN | {"lengths": (40, 120)},
        ("out by the row 8 before", rescaled(row_before, "out")),
        (
            "out by the row 8 before, from the last",
            rescaled(row_before, "out") | {"tile_n": 32, "order": "descending"},
        ),
        ("out after P V is added", rescaled(None, "out", late=True)),
        (
            "out after P V, from the last",
            rescaled(None, "out", late=True) | {"tile_n": 32, "order": "descending"},
        ),
        ("row_sum after the sum is added", rescaled(None, "row_sum", late=True)),
        ("out rescaled twice", rescaled(lambda c: c.factor**2, "out")),
        on="f",
    ),
    *planted(
        "no-rescale",
        _EASY | {"lengths": (40, 120)},
        ("e", rescaled(lambda c: np.ones_like(c.factor), "e")),
        ("tout, tiles of 32", rescaled(lambda c: np.ones_like(c.factor), "tout") | {"tile_n": 32}),
        on="j",
    ),
    # ---- double backward ----
    *planted(
        "statistics-misplaced",
        _ROWS | _HEADS,
        (
            "D as (tokens, heads), double backward",
            change(as_if((1, 0)), "delta", at="rows of second"),
        ),
        on="s",
    ),
)
