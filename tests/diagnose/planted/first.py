"""The bugs that everybody has made once: of masks, offsets, scales, the softmax and its derivative.

Long by the table.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from tests.diagnose import plain
from tests.diagnose.hooks import (
    GRADIENTS,
    STAGES_OF,
    Hooks,
    bounds,
    by,
    by_pairs,
    change,
    in_sequences,
    kernel,
    no_window,
    of_each,
    stored,
    tiled,
    times,
    window,
    written_as,
)
from tests.diagnose.plain import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LN_2,
    OPEN,
    ZEROS,
    Array,
    Head,
    Kernel,
    Planted,
    finite,
)
from tests.diagnose.problems import Needs, normal, problems

__all__ = ["PLANTED", "RIGHT", "answers", "problems", "right_answers"]
HIDDEN = -1e30  # a score that stands for -inf in many kernels


# ---- what is read and written ----


def running_on(tile: int, step: int = 1) -> Any:
    """Rows of a sequence, a tile after the other, whose sums nobody clears."""

    def rows(x: Array) -> Array:
        found, total = np.zeros_like(x), np.zeros((tile, *x.shape[1:]), x.dtype)
        for start in range(0, len(x), tile)[::step]:
            part = x[start : start + tile]
            total[: len(part)] += part
            found[start : start + tile] = total[: len(part)]
        return found

    return rows


def padded(upto: int | str) -> Hooks:
    """Keys of zeros up to a multiple, or up to the longest sequence."""

    def keys(c: Head, x: Array) -> Array:
        longest = max(c.question.lengths_k)
        stop = longest if isinstance(upto, str) else -(-len(x) // upto) * upto
        return np.concatenate([x, np.full(stop - len(x), ZEROS)])

    return {"keys": keys}


def leaking(after: int = 0, before: int = 0, tile: int = 1) -> Hooks:
    """Keys of the neighbours, some or up to the end of a tile."""

    def keys(c: Head, x: Array) -> Array:
        stop = c.start_k + -(-c.m // tile) * tile + after
        return np.arange(max(c.start_k - before, 0), min(stop, c.total_k))

    return {"keys": keys}


def own_keys(c: Head, keys: Array) -> Array:
    own = (keys >= c.start_k) & (keys < c.start_k + c.m)
    return np.where(own, keys, ZEROS)


def past_dout(number: float) -> Hooks:
    """Queries of zeros up to the longest sequence, with a cotangent."""

    def rows(c: Head, x: Array) -> Array:
        return np.concatenate([x, np.full(max(c.question.lengths_q) - c.n, ZEROS)])

    def past(c: Head, right: Array, other: float) -> Array:
        return np.where((c.rows == ZEROS)[:, None], c.run.wide.type(other), right)

    return {
        "rows": rows,
        "dO": lambda c, x: past(c, x, number),
        "L": lambda c, x: past(c, x, np.log(max(c.m, 1))),
    }


def by_rows(array: Array, name: str) -> Array:
    """A view whose first axis is that of tokens."""
    return array.swapaxes(0, 1) if name in ("lse", "delta") else array


def one_row_late(array: Array, name: str, question: Question) -> Array:
    """From the second half of the sequences on, a row is written where the next one belongs."""
    start = bounds(name, question)[question.batch // 2][0]
    late = array.copy()
    by_rows(late, name)[start + 1 :] = by_rows(array, name)[start:-1]
    by_rows(late, name)[start] = -np.inf if name == "lse" else 0
    return late


def exchanged(array: Array, name: str, question: Question, tile: int, distance: int) -> Array:
    """Row r of every tile holds row r ^ distance; 0 where that lies behind the sequence."""
    wrong = np.zeros_like(array)
    for start, stop in bounds(name, question):
        r = np.arange(stop - start)
        partner = r // tile * tile + (r % tile ^ distance)
        there = partner < stop - start
        wrong[start + r[there]] = array[start + partner[there]]
    return wrong


def garbage(array: Array, name: str, question: Question, tile: int, first: int) -> Array:
    """The last rows of every tile are what happened to be in memory."""
    wrong, other = array.copy(), np.random.default_rng(5).standard_normal(array.shape)
    for start, stop in bounds(name, question):
        rows = start + np.flatnonzero(np.arange(stop - start) % tile >= first)
        wrong[rows] = other[rows]
    return wrong


def without_tail(array: Array, name: str, question: Question, tile: int) -> Array:
    """The columns past the last whole tile are none."""
    wrong = array.copy()
    wrong[..., array.shape[-1] // tile * tile :] = 0
    return wrong


def no_tail_of_queries(tile: int, lse: float = -np.inf) -> Hooks:
    """The last, partial tile of queries is not there."""

    def unwritten(run: Any, x: Array) -> Array:
        x = x.copy()
        for start, stop in bounds("lse", run.question):
            x[:, start + (stop - start) // tile * tile : stop] = lse
        return x

    rows = {"rows": lambda c, x: x[: c.n // tile * tile]}
    return tiled(tile) | rows | ({} if lse == -np.inf else {"lse": unwritten})


def other_data(at: Any, question: Question) -> Question:
    """The same problem with other numbers in it."""
    rng = np.random.default_rng((29, len(question.q), len(question.k)))
    arrays = {name: getattr(question, name) for name in ("q", "k", "v", "dout", "dlse")}
    drawn = {name: normal(rng, a.shape, a.dtype) for name, a in arrays.items() if a is not None}
    return replace(question, **drawn)


def swapped(one: str, other: str) -> Hooks:
    """Two results, each returned as the other."""
    return {"results": lambda run, x: x | {one: x[other], other: x[one]}}


def delta(of: Any) -> Hooks:
    """Another D: a function of the arrays and the question."""
    return {"read": lambda run, a: a | {"delta": of(a, run.question)}}


def delta_of(out: Any) -> Hooks:
    """D of another out."""
    return delta(lambda a, q: (a["dout"] * out(a["out"], q)).sum(2).T - a["dlse"])


def unmasked(out: Array, question: Question) -> Array:
    open_ = replace(question, causal=False, window=OPEN)
    return plain.forward(plain.Run(open_, Kernel()))["out"]


def some_lost(c: Head, x: Array) -> Array:
    """The contributions of some pairs of tiles, by chance."""
    k = c.kernel
    return by_pairs(lambda pair: c.run.chance.random() >= 0.15, k.tile_m, k.tile_n)(c, x)


# ---- the table ----


def planted(bug: str, needs: Mapping[str, Any], *variants: tuple[Any, ...]) -> list[Planted]:
    """``variants``: in words, the stages ("f b fb" is three), what is wrong, more needs."""
    found = []
    for words, stages, wrong, *more in variants:
        for where in stages.split():
            wanted = Needs(**{**needs, **(more[0] if more else {})})
            also = tuple(more[1]) if len(more) > 1 else ()
            variant = f"{words} ({' and '.join(STAGES_OF[where])})"
            found.append(Planted(bug, variant, STAGES_OF[where], kernel(wrong), wanted, also))
    return found


_CAUSAL = ("causal", "causal window")
_MASKED = (*_CAUSAL, "window")
_ALIVE = ("equal", "equal", "more")  # lengths of keys with which no query is without a key
_OPEN = {"masks": ("open",)}
_LONG = {"lengths": (17, 90)}
_OVER_32, _OVER_64 = ({"lengths": (tile - 12, 100), "over": tile} for tile in (32, 64))
_GROUPED = {"groups": (2, 3, 4)}
_HEADS = {"groups": (2, 3, 4), "heads_kv": (2, 3)}
_OWN_LSE, _OWN, _RIGHT = {"own": ("lse",)}, {"own": ("out", "lse")}, {"keeps_right": True}
_ALL_TILES = {"skips_masked": False}
_NAN = {"unguarded": ("max", "sum")} | _ALL_TILES
_MEAN = {"S": lambda c, S: np.where(c.seen > 0, S, c.run.wide.type(HIDDEN))} | _ALL_TILES
_DEAD = {"masks": ("causal",), "lengths_k": ("fewer", "any"), "lengths": (2, 60)}
_16_BIT = {
    "masks": ("open", "causal"),
    "lengths_k": ("equal",),
    "lengths": (300, 500),
    "batch": (1, 1),
    "groups": (1,),
    "heads_kv": (1,),
    "head_dims": (16, 32),
    "dtypes": (FLOAT16, BFLOAT16),
    "shows": 1.5,
}
_NARROW = of_each(
    lambda c, x: c.run.narrow(x), "sum row_sum", "sum out", "sum dq", "sum dk", "sum dv"
)
_KEPT = {name: lambda c, x: c.old + c.part for name in ("sum out", "sum row_sum")}
_UNSUBTRACTED = {"subtracts_max": False}


def _uniform(flows: bool) -> Hooks:
    """P of dead rows is uniform, and dS of them is 0 or is not."""

    def dead(c: Head) -> Array:
        return ~(c.seen > 0).any(axis=1, keepdims=True)

    return {
        "P": lambda c, P: np.where(dead(c), c.run.wide.type(1 / len(c.keys)), P),
        "dS": lambda c, dS: dS if flows else np.where(dead(c), 0, dS),
    }


def _depth(tile: int, *names: str) -> Hooks:
    return change(partial(without_tail, tile=tile), *names, at="arrays")


def _factor(of: Any, in_gradients: bool = False) -> Hooks:
    """Of the scores, beside softmax_scale."""
    factor = by(lambda c: c.run.wide.type(of(c.question)))
    return {
        "scale" if in_gradients else "Y": by(lambda c: of(c.question)) if in_gradients else factor
    }


_FACTORS = {
    "1": lambda q: 1 / q.scale,
    "1 / d": lambda q: 1 / (q.scale * q.q.shape[2]),
    "log2 e": lambda q: 1 / LN_2,
    "ln 2": lambda q: LN_2,
    "default": lambda q: q.q.shape[2] ** -0.5 / q.scale,
}


def _powers(of_q: int, of_k: int) -> Hooks:
    """Of softmax_scale in dq and dk."""
    powers = {"dq": of_q, "dk": of_k}
    return {n: lambda run, x, p=p: x * run.question.scale ** (p - 1) for n, p in powers.items()}


def _group(kept: int) -> Hooks:
    """Of a group: the one head that dk and dv hold."""
    often = {"often": lambda c, x: x * (c.h % c.group == kept % c.group)}
    return often | {"only": ("dk", "dv")}


def _overwritten(tile: int, *names: str) -> Hooks:
    """Gradients that hold what the last visited tile has added."""
    last = by_pairs(lambda t: t.j == t.last_j if "dq" in names else t.i == t.last_i, tile, tile)
    return {"often": last, "only": names}


PLANTED: tuple[Planted, ...] = (
    # ---- who sees whom ----
    *planted(
        "padded-keys",
        _OPEN,
        ("up to the longest", "f b fb", padded("longest") | _OWN_LSE),
        ("up to the longest, as autograd has it", "b fb", padded("longest") | _OWN),
        ("up to 16", "f fb", padded(16) | _OWN_LSE),
        ("up to 32", "f", padded(32)),
        ("up to 64", "f b fb", padded(64) | _OWN_LSE),
        ("up to 128", "fb", padded(128) | _OWN),
    ),
    *planted(
        "padded-grad-out",
        {"masks": ("open", "causal"), "lengths_k": ("equal",)},
        ("ones", "b", past_dout(1.0)),
        ("of a mean", "b", past_dout(0.3)),
        ("negative", "b", past_dout(-2.0)),
    ),
    *planted(
        "mask-missing-in-backward",
        {"masks": _MASKED, "lengths_k": _ALIVE, "lengths": (2, 90)},
        ("softmax over all keys", "b", no_window() | _OWN_LSE),
        ("exp(S - L)", "b", no_window()),
    ),
    *planted(
        "causal-dropped",
        {"masks": _CAUSAL, "lengths": (2, 90)},
        ("no right side", "f fb", no_window(left=False)),
        ("no mask", "f fb", no_window(), {"masks": ("causal",)}),
        ("no right side, own lse", "fb", no_window(left=False) | _OWN),
    ),
    *planted(
        "causal-off-by-one",
        {"masks": _CAUSAL},
        ("j <= i + 1", "f b fb", window(right=1), {"lengths": (2, 90)}),
        ("j < i", "f b fb", window(right=-1)),
    ),
    *planted(
        "causal-alignment",
        {"masks": ("causal", "causal window", "window"), "lengths_k": ("more", "any")},
        ("first key", "f b fb", {"p": lambda c, p: c.i}),
        ("first key, more keys", "fb", {"p": lambda c, p: c.i}, {"lengths_k": ("more",)}),
        ("first key, more queries", "f fb", {"p": lambda c, p: c.i}, {"lengths_k": ("fewer",)}),
    ),
    *planted(
        "window-off-by-one",
        {"masks": ("window", "causal window", "left"), "lengths": (6, 90)},
        ("left + 1", "f b fb", window(left=1)),
        ("left - 1", "f b fb", window(left=-1)),
        ("right + 1", "f b fb", window(right=1), {"masks": ("window", "right")}),
        ("right - 1", "f b fb", window(right=-1), {"masks": ("window", "right")}),
        ("both sides + 1", "fb", window(left=1, right=1), {"masks": ("window",)}),
    ),
    *planted(
        "window-dropped",
        {"masks": ("window", "causal window", "left"), "lengths": (10, 90)},
        ("left side", "f fb", no_window(right=False)),
        ("right side", "f fb", no_window(left=False), {"masks": ("window", "right")}),
        ("both sides", "f fb", no_window(), {"masks": ("window",)}),
    ),
    *planted(
        "neighbour-leak",
        {"masks": ("open", "open", "left")},
        ("up to 16", "f fb", leaking(tile=16)),
        ("up to 32", "b fb", leaking(tile=32)),
        ("up to 64", "f fb", leaking(tile=64)),
        ("up to 128", "f fb", leaking(tile=128)),
        ("up to 32, gradients stay", "fb", leaking(tile=32) | {"stored keys": own_keys}),
        ("one key after", "f b fb", leaking(1), {"lengths": (1, 40)}),
        (
            *("one key before", "f b fb", leaking(before=1)),
            {"masks": ("open", "causal"), "lengths": (1, 40)},
        ),
        ("one on both sides", "fb", leaking(1, 1), {"lengths": (1, 40)}),
    ),
    *planted(
        "offsets-shifted",
        {},
        ("stored a row late", "f", stored(one_row_late, "out", "lse")),
        ("stored a row late", "b", stored(one_row_late, *GRADIENTS)),
        ("stored a row late", "fb", stored(one_row_late, "out", "lse", *GRADIENTS) | _RIGHT),
        ("no first entry", "f b fb", {"spans": lambda run, x: x[1:]}),
    ),
    # ---- scores and softmax ----
    *planted(
        "output-scale",
        {},
        ("dq without", "b", _powers(0, 1)),
        ("dk without", "b", _powers(1, 0)),
        ("dq and dk without", "b", _powers(0, 0)),
        ("dq twice", "b", _powers(2, 1)),
        ("dk twice", "b", _powers(1, 2)),
        ("dq and dk twice", "b", _powers(2, 2)),
    ),
    *planted(
        "score-scale",
        {"lengths": (2, 90)},
        ("1", "f b fb", _factor(_FACTORS["1"])),
        ("1, in dq and dk too", "b fb", _factor(_FACTORS["1"], True)),
        ("1 / d", "f b fb", _factor(_FACTORS["1 / d"])),
        ("1 / d, in dq and dk too", "b fb", _factor(_FACTORS["1 / d"], True)),
        ("log2 e", "f b fb", _factor(_FACTORS["log2 e"])),
        ("ln 2", "f b fb", _factor(_FACTORS["ln 2"])),
        (
            *("the default though one is given", "f fb", _factor(_FACTORS["default"], True)),
            {"scaled": 1.0},
        ),
    ),
    *planted(
        "lse-base-2",
        {},
        ("stored alone", "f", {"lse": by(1 / LN_2)} | _RIGHT),
        ("stored, and read as natural", "f", {"lse": by(1 / LN_2)}),
        ("read as base 2", "b", {"L": by(LN_2)}),
    ),
    *planted(
        "lse-without-max",
        {},
        *(
            (words, "f", {"softmax": lambda c, x: (x[0] - finite(c.top), x[1])} | more)
            for words, more in (("stored alone", _RIGHT), ("stored and read", {}))
        ),
    ),
    *planted(
        "not-normalised",
        {},
        *(
            (
                words,
                "f",
                {"softmax": lambda c, x: (x[0], x[1] * np.exp(x[0] - finite(c.top)))} | more,
            )
            for words, more in (("stored alone", _RIGHT), ("stored and read", {}))
        ),
    ),
    *planted(
        "no-rescale",
        _LONG | {"masks": ("open", "causal", "window", "right")},
        *(
            (words, "f", {f"sum {name}": _KEPT[f"sum {name}"] for name in names} | tile, *needs)
            for words, names, tile, *needs in (
                ("acc, tiles of 16", ["out"], {}),
                ("acc, tiles of 32", ["out"], tiled(32), {"lengths": (33, 90)}),
                ("acc, from the last tile", ["out"], {"order": "descending"}),
                ("row_sum, tiles of 16", ["row_sum"], {}),
                ("row_sum, tiles of 32", ["row_sum"], tiled(32), {"lengths": (33, 90)}),
                ("both, tiles of 16", ["out", "row_sum"], {}),
            )
        ),
    ),
    *planted(
        "no-max-subtraction",
        {"large": True, "lengths": (2, 60), "dtypes": (FLOAT32, BFLOAT16), "dlse": 0.2},
        ("exp(S)", "f", _UNSUBTRACTED | {"unguarded": ("sum",)}),
        ("exp(S), division guarded", "f", _UNSUBTRACTED),
        ("exp(S) / exp(L)", "b fb", _UNSUBTRACTED | {"unguarded": ("sum",)}),
    ),
    *planted(
        "dead-rows",
        _DEAD,
        ("0 / 0", "f", {"unguarded": ("sum",)}),
        ("-inf - -inf", "f", _NAN, {}, ("masked-tile-nan",)),
        ("-inf - -inf", "fb", _NAN | {"unguarded": ("max", "sum", "lse")}),
        ("-inf - -inf, tiles skipped", "fb", {"unguarded": ("sum", "lse")}),
        ("exp(-inf - lse)", "b", {"unguarded": ("lse",)} | _ALL_TILES),
        ("mean, -1e30 for -inf", "f fb", _MEAN),
        ("mean, masked_fill", "b fb", _MEAN | _uniform(False) | _OWN),
        ("mean, a mask that is added", "fb", _MEAN | _uniform(True) | _OWN, {}, ("mask-fill",)),
    ),
    *planted(
        "masked-tile-nan",
        {"masks": ("window", "causal window", "left"), "lengths_k": _ALIVE, "lengths": (18, 90)},
        ("all tiles, 16", "f", {"unguarded": ("max",)} | _ALL_TILES),
        ("visible tiles, 16", "f", {"unguarded": ("max",)}),
        ("all tiles, 32", "f", {"unguarded": ("max",)} | _ALL_TILES | tiled(32)),
        ("visible tiles, 16 by 8", "f", {"unguarded": ("max",), "tile_n": 8}),
    ),
    *planted(
        "accumulates-in-16-bit",
        _16_BIT,
        ("key by key", "f fb", _NARROW | {"tile_m": 128, "tile_n": 1}),
        ("key by key, dq", "b", _NARROW | {"tile_m": 128, "tile_n": 1}),
        ("query by query, dk and dv", "b", _NARROW | {"tile_m": 1, "tile_n": 128}),
        ("tiles of 4 keys", "f", _NARROW | {"tile_m": 64, "tile_n": 4}),
    ),
    *planted(
        "head-dim-tail",
        {"same_dims": 0.5, "lengths": (2, 90)},
        ("of scores, 16", "f b fb", _depth(16, "q", "k"), {"head_dims": (24, 40, 56)}),
        ("of scores, 32", "f b fb", _depth(32, "q", "k"), {"head_dims": (40, 48, 56)}),
        ("of scores, 64", "fb", _depth(64, "q", "k"), {"head_dims": (72, 80, 96)}),
        (
            *("of v, 16", "f fb", _depth(16, "v", "dout")),
            {"head_dims_v": (24, 40, 56), "same_dims": 0},
        ),
        (
            *("of out as stored, 32", "f", stored(partial(without_tail, tile=32), "out")),
            {"head_dims_v": (40, 48, 56), "same_dims": 0},
        ),
        (
            *("of gradients as stored, 16", "b"),
            stored(partial(without_tail, tile=16), *GRADIENTS),
            {"head_dims": (24, 40, 56), "head_dims_v": (24, 40, 56)},
        ),
    ),
    # ---- the softmax's derivative ----
    *planted(
        "delta-omitted",
        {"lengths": (2, 90)},
        ("D = 0", "b", delta(lambda a, q: 0 * a["delta"])),
        ("D = -dL", "b", delta(lambda a, q: -a["dlse"]), {"dlse": 1.0}),
    ),
    *planted(
        "delta-of-another-out",
        {"lengths": (2, 90)},
        ("unmasked attention", "b", delta_of(unmasked), {"masks": _MASKED}),
        ("next head", "b", delta_of(lambda out, q: np.roll(out, -1, axis=1)), _GROUPED),
        (
            *("head of k", "b"),
            delta_of(lambda out, q: out[:, np.arange(q.num_heads_q) // q.group]),
            _GROUPED,
        ),
        (
            *("next row", "b"),
            delta_of(lambda out, q: np.concatenate((out[1:], np.zeros_like(out[:1])))),
        ),
    ),
    *planted(
        "lse-gradient-dropped",
        {"dlse": 1.0, "lengths": (2, 90)},
        ("D", "b", delta(lambda a, q: a["delta"] + a["dlse"])),
    ),
    *planted(
        "lse-gradient-sign",
        {"dlse": 1.0, "lengths": (2, 90)},
        ("D", "b", delta(lambda a, q: a["delta"] + 2 * a["dlse"])),
    ),
    *planted(
        "softmax-backward-without-p",
        {"lengths": (2, 90)},
        ("dS = dP - D", "b", {"dS": lambda c, x: np.where(c.seen > 0, c.Z, 0)}),
    ),
    # ---- heads, layout, tiles ----
    *planted(
        "gqa-head-map",
        _HEADS,
        ("h % heads", "f b fb", {"kv head": lambda c, g: c.h % c.question.num_heads_kv}),
    ),
    *planted(
        "gqa-group-not-summed",
        _GROUPED,
        ("last head", "b", _group(-1)),
        ("first head", "b", _group(0)),
    ),
    *planted(
        "gradients-swapped",
        {"same_dims": 1.0},
        ("dk and dv", "b", swapped("dk", "dv")),
        ("dq and dk", "b", swapped("dq", "dk"), {"groups": (1,), "lengths_k": ("equal",)}),
    ),
    *planted(
        "transposed",
        _HEADS,
        ("out by heads", "f", stored(written_as((1, 0, 2)), "out")),
        ("out by heads, not read so", "f", stored(written_as((1, 0, 2)), "out") | _RIGHT),
        ("out by columns", "f", stored(written_as((2, 1, 0)), "out")),
        ("columns of out reversed", "f", {"out": lambda run, x: x[..., ::-1]}),
        ("lse by tokens", "f", stored(written_as((1, 0)), "lse") | _RIGHT),
        ("gradients by heads", "b", stored(written_as((1, 0, 2)), *GRADIENTS)),
        ("dq by heads", "b", stored(written_as((1, 0, 2)), "dq")),
        ("dk and dv by heads", "b", stored(written_as((1, 0, 2)), "dk", "dv")),
        ("dq by columns", "b", stored(written_as((2, 1, 0)), "dq")),
        (
            *("columns of gradients reversed", "b"),
            of_each(lambda run, x: x[..., ::-1], *GRADIENTS),
        ),
    ),
    *planted(
        "tail-tile-dropped",
        _LONG,
        ("queries, 16", "f b fb", no_tail_of_queries(16)),
        ("queries, 32", "b fb", no_tail_of_queries(32), _OVER_32),
        ("queries, 64, lse 0", "f", no_tail_of_queries(64, 0.0), _OVER_64),
        ("keys, 16", "f b fb", times(lambda c: c.j < c.m // 16 * 16)),
        ("keys, 32", "f fb", times(lambda c: c.j < c.m // 32 * 32), _OVER_32),
        ("keys, 64", "b fb", times(lambda c: c.j < c.m // 64 * 64), _OVER_64),
        ("both, 16", "fb", no_tail_of_queries(16) | times(lambda c: c.j < c.m // 16 * 16)),
    ),
    *planted(
        "tile-skipped",
        _LONG | {"masks": ("open", "causal", "right")},
        ("first, 16", "f b fb", times(lambda c: c.j >= 16)),
        ("first, 32", "f b fb", times(lambda c: c.j >= 32), _OVER_32),
        ("first, 64", "fb", times(lambda c: c.j >= 64), _OVER_64),
    ),
    *planted(
        "tile-counted-twice",
        _LONG | {"masks": ("open", "causal", "right")},
        ("first, 16", "f b fb", times(lambda c: 1 + (c.j < 16))),
        ("first, 32", "f b fb", times(lambda c: 1 + (c.j < 32)), _OVER_32),
        ("first, 64", "fb", times(lambda c: 1 + (c.j < 64)), _OVER_64),
        *(
            (
                *(f"diagonal, {t}", "f b fb", times(lambda c, t=t: 1 + (c.i // t == c.j // t))),
                {"masks": ("causal",), "lengths_k": ("equal",), "lengths": (t + 1, 90)},
            )
            for t in (16, 32)
        ),
    ),
    *planted(
        "tile-overwrites",
        {"masks": ("open", "causal"), "lengths_k": ("equal",), "lengths": (20, 90)},
        ("dq, 16", "b", _overwritten(16, "dq")),
        ("dq, 32", "b", _overwritten(32, "dq"), _OVER_32),
        ("dq, 64", "b", _overwritten(64, "dq"), _OVER_64),
        ("dk and dv, 16", "b", _overwritten(16, "dk", "dv")),
        ("dk and dv, 32", "b", _overwritten(32, "dk", "dv"), _OVER_32),
        ("dk, 32", "b", _overwritten(32, "dk"), _OVER_32),
    ),
    *planted(
        "accumulator-not-reset",
        {"lengths_k": ("equal",), "lengths": (40, 90)},
        ("dk, 16", "b", stored(in_sequences(running_on(16)), "dk")),
        ("dq, 32, from the last", "b", stored(in_sequences(running_on(32, -1)), "dq")),
        ("dk and dv, 32", "b", stored(in_sequences(running_on(32)), "dk", "dv")),
    ),
    *planted(
        "tile-period",
        _LONG,
        (
            *("out, garbage in 32", "f", stored(partial(garbage, tile=32, first=28), "out")),
            {"lengths": (30, 90)},
        ),
        ("dq, garbage in 16", "b", stored(partial(garbage, tile=16, first=14), "dq")),
        (
            *("dk and dv, garbage in 16", "b"),
            stored(partial(garbage, tile=16, first=12), "dk", "dv"),
        ),
    ),
    *planted(
        "transposed",
        _LONG,
        ("out, 8 apart in 16", "f", stored(partial(exchanged, tile=16, distance=8), "out")),
        (
            *("out, 1 apart in 16", "f"),
            stored(partial(exchanged, tile=16, distance=1), "out") | _RIGHT,
        ),
        ("dq, 8 apart in 16", "b", stored(partial(exchanged, tile=16, distance=8), "dq")),
        (
            *("dk and dv, 16 apart in 32", "b"),
            stored(partial(exchanged, tile=32, distance=16), "dk", "dv"),
        ),
    ),
    # ---- no function of the inputs ----
    *planted(
        "race",
        {"lengths": (17, 90)},
        ("dk and dv", "b", of_each(some_lost, "dS of dk", "P of dv")),
        ("dq", "b", {"dS of dq": some_lost}),
        (
            *("all gradients, 32", "b"),
            of_each(some_lost, "dS of dq", "dS of dk", "P of dv") | tiled(32),
        ),
    ),
    *planted(
        "other-data", {"lengths": (4, 90)}, ("all inputs", "f b fb", {"question": other_data})
    ),
)


def _right(variant: str, wrong: Mapping[str, Any], **needs: Any) -> Planted:
    return Planted("", variant, (*STAGES,), kernel(wrong), Needs(**needs))


RIGHT: tuple[Planted, ...] = (
    _right("tiles of 4", tiled(4), lengths=(1, 40)),
    _right("tiles of 8 by 32", {"tile_m": 8, "tile_n": 32}),
    _right("tiles of 32 by 8", {"tile_m": 32, "tile_n": 8}),
    _right("tiles of 16", {}),
    _right("tiles of 64", tiled(64)),
    _right("masked tiles are computed too", {"skips_masked": False}),
    _right("from the last key", {"order": "descending"}),
    _right("tiles in any order", {"order": "shuffled", "tile_n": 8}),
    _right("partial softmaxes, merged in pairs", {"order": "pairwise", "tile_n": 8}),
    _right("two passes over the keys", {"two_pass": True}),
    _right("exp2", {"base_2": True}),
    _right("its own softmax in the backward pass", _OWN_LSE),
    _right("TF32", {"rounding": "tf32"}, dtypes=(FLOAT32,)),
    _right("float16", {}, dtypes=(FLOAT16,)),
    _right("float16, tiles of 64", tiled(64), dtypes=(FLOAT16,)),
    _right("every step in float16", {"rounding": "every step"}, dtypes=(FLOAT16,)),
    _right("every step in bfloat16", {"rounding": "every step"}, dtypes=(BFLOAT16,)),
    _right("long rows", tiled(64), lengths=(200, 400), batch=(1, 1), groups=(1, 2), heads_kv=(1,)),
    _right("large scores", {}, large=True, lengths=(2, 60)),
    _right("dead rows", {}, **_DEAD),
)


def answers(plant: Planted | None, question: Question, chance: int = 0) -> Answers:
    """out, lse, dq, dk, dv and sometimes delta, by a kernel with this bug, or by a right one."""
    found = plain.answers(plant, question, chance)
    if len(question.q) % 3:
        found.pop("delta", None)
    return found


def right_answers(kind: Planted, question: Question) -> Answers:
    """Those of a right implementation, one of RIGHT."""
    return answers(kind, question)
