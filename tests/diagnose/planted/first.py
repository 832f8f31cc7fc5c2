"""The bugs that everybody has made once: of masks, offsets, scales, the softmax and its derivative.
Long by the table."""

from dataclasses import replace
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from tests.diagnose import plain
from tests.diagnose.hooks import (
    by,
    by_pairs,
    no_window,
    of_each,
    of_group,
    padding,
    power,
    tiled,
    times,
    window,
    with_zeros,
)
from tests.diagnose.plain import BFLOAT16, FLOAT16, FLOAT32, LN_2, ZEROS, Array, Head, Planted
from tests.diagnose.problems import Needs, problems
from tests.diagnose.stores import apart, bounds, change, delta, in_sequences, stored, written_as
from tests.diagnose.table import GRADIENTS, Hooks, Table, kernel, plants, stages_of

__all__ = ["PLANTED", "RIGHT", "answers", "problems", "right_answers"]
HIDDEN = -1e30  # a score that stands for -inf in many kernels


# ---- what is read and written ----


def late(x: Array, name: str, question: Question) -> Array:
    """From the second half of the sequences on, a row is written where the next one belongs."""
    start, found = bounds(name, question)[question.batch // 2][0], x.copy()
    rows, there = (a.T if name in ("lse", "delta") else a for a in (found, x))
    rows[start + 1 :], rows[start] = there[start:-1], -np.inf if name == "lse" else 0
    return found


def without_tail(tile: int) -> Any:
    """The columns past the last whole tile are none."""
    return lambda x, *_: np.where(np.arange(x.shape[2]) < x.shape[2] // tile * tile, x, 0)


def depth(tile: int, *names: str) -> Hooks:
    return change(without_tail(tile), *names, at="arrays")


def running_on(tile: int, step: int = 1) -> Any:
    """Rows of a sequence, a tile after the other, whose sums nobody clears."""

    def rows(x: Array) -> Array:
        found, total = np.zeros_like(x), np.zeros((tile, *x.shape[1:]), x.dtype)
        for start in range(0, len(x), tile)[::step]:
            part = x[start : start + tile]
            total[: len(part)] += part
            found[start : start + tile] = total[: len(part)]
        return found

    return in_sequences(rows)


def leaking(after: int = 0, before: int = 0, tile: int = 1) -> Hooks:
    """Keys of the neighbours, some or up to the end of a tile."""

    def keys(c: Head, x: Array) -> Array:
        stop = c.start_k + -(-c.m // tile) * tile + after
        return np.arange(max(c.start_k - before, 0), min(stop, c.total_k))

    return {"keys": keys}


def no_tail_of_queries(tile: int) -> Hooks:
    """The last, partial tile of queries is not there."""
    return tiled(tile) | {"rows": lambda c, x: x[: c.n // tile * tile]}


def delta_of(out: Any) -> Hooks:
    """D of another out."""
    return delta(lambda a, q: (a["dout"] * out(a["out"], q)).sum(2).T - a["dlse"])


def unmasked(out: Array, question: Question) -> Array:
    open_ = replace(question, causal=False, window=plain.OPEN)
    return plain.forward(plain.Run(open_, plain.Kernel()))["out"]


# ---- the table ----

_CAUSAL = ("causal", "causal window")
_MASKED = (*_CAUSAL, "window")
_LEFT = ("window", "causal window", "left")
_ALIVE = ("equal", "equal", "more")  # lengths of keys with which no query is without a key
_OPEN, _RIGHT_SIDE = {"masks": ("open",)}, {"masks": ("window", "right")}
_OVER_32, _OVER_64 = ({"lengths": (tile - 12, 100), "over": tile} for tile in (32, 64))
_SHORT, _ALL, _LONG = {"lengths": (1, 40)}, {"lengths": (2, 90)}, {"lengths": (17, 90)}
_GROUPED = {"groups": (2, 3, 4)}
_HEADS = _GROUPED | {"heads_kv": (2, 3)}
_OWN_LSE, _OWN, _RIGHT = {"own": ("lse",)}, {"own": ("out", "lse")}, {"keeps_right": True}
_ALL_TILES = {"skips_masked": False}
_NAN = {"unguarded": ("max", "sum")} | _ALL_TILES
_DEAD = {"masks": ("causal",), "lengths_k": ("fewer", "any"), "lengths": (2, 60)}
_SPLIT, _SPLIT_V = {"head_dims": (24, 40, 56)}, {"head_dims_v": (24, 40, 56), "same_dims": 0}
_PLAIN, _AS_MANY = {"masks": ("open", "causal")}, {"lengths_k": ("equal",)}
_EQUAL = _PLAIN | _AS_MANY
_SQUARE = {"masks": ("causal",), "lengths_k": ("equal",), "lengths": (17, 90)}
_EASY_ONES = ("score-scale", "delta-omitted", "delta-of-another-out", "softmax-backward-without-p")
# what problems of a class must be like
_NEEDS: dict[str, dict[str, Any]] = {
    "padded-keys": _OPEN,
    "mask-missing-in-backward": {"masks": _MASKED, "lengths_k": _ALIVE} | _ALL,
    "causal-dropped": {"masks": _CAUSAL} | _ALL,
    "causal-off-by-one": {"masks": _CAUSAL},
    "causal-alignment": {"masks": _MASKED, "lengths_k": ("more", "any")},
    "window-off-by-one": {"masks": _LEFT, "lengths": (6, 90)},
    "window-dropped": {"masks": _LEFT, "lengths": (10, 90)},
    "neighbour-leak": {"masks": ("open", "open", "left")},
    **dict.fromkeys(_EASY_ONES, _ALL),
    **dict.fromkeys(("tail-tile-dropped", "race"), _LONG),
    "no-rescale": _LONG | {"masks": ("open", "causal", "window", "right")},
    "no-max-subtraction": {"large": True, "lengths": (2, 60), "dlse": 0.2}
    | {"dtypes": (FLOAT32, BFLOAT16)},
    "dead-rows": _DEAD,
    "masked-tile-nan": {"masks": _LEFT, "lengths_k": _ALIVE, "lengths": (18, 90)},
    "accumulates-in-16-bit": {"masks": ("open", "causal"), "lengths_k": ("equal",)}
    | {"lengths": (300, 500), "batch": (1, 1), "groups": (1,), "heads_kv": (1,)}
    | {"head_dims": (16, 32), "dtypes": (FLOAT16, BFLOAT16), "shows": 1.5},
    "head-dim-tail": {"same_dims": 0.5} | _ALL,
    "lse-gradient-dropped": {"dlse": 1.0} | _ALL,
    "lse-gradient-sign": {"dlse": 1.0} | _ALL,
    "gqa-head-map": _HEADS,
    "gqa-group-not-summed": _GROUPED,
    "gradients-swapped": {"same_dims": 1.0},
    "transposed": _HEADS,
    "tile-skipped": _LONG | {"masks": ("open", "causal", "right")},
    "tile-counted-twice": _LONG | {"masks": ("open", "causal", "right")},
    "tile-overwrites": _EQUAL | {"lengths": (20, 90)},
    "accumulator-not-reset": {"lengths_k": ("equal",), "lengths": (40, 90)},
}
_SUMS_OF = ("sum row_sum", "sum out", "sum dq", "sum dk", "sum dv")
_NARROW = of_each(lambda c, x: c.run.narrow(x), *_SUMS_OF)
_MEAN = {"S": lambda c, S: np.where(c.seen > 0, S, c.run.wide.type(HIDDEN))} | _ALL_TILES
_KEPT_OUT, _KEPT_SUM = ({f"sum {x}": lambda c, x: c.old + c.part} for x in ("out", "row_sum"))
_UNSUBTRACTED, _NO_SUM = {"subtracts_max": False}, {"unguarded": ("sum",)}
_FIRST_KEY = {"p": lambda c, p: c.i}
_NO_MAX = {"softmax": lambda c, x: (x[0] - plain.finite(c.top), x[1])}
_SUMS = {"softmax": lambda c, x: (x[0], x[1] * np.exp(x[0] - plain.finite(c.top)))}


def _uniform(flows: bool) -> Hooks:
    """P of dead rows is uniform, and dS of them is 0 or is not."""

    def dead(c: Head) -> Array:
        return ~(c.seen > 0).any(axis=1, keepdims=True)

    return {
        "P": lambda c, P: np.where(dead(c), c.run.wide.type(1 / len(c.keys)), P),
        "dS": lambda c, dS: dS if flows else np.where(dead(c), 0, dS),
    }


def _overwritten(tile: int, *names: str) -> Hooks:
    """Gradients that hold what the last visited tile has added."""
    last = by_pairs(lambda t: t.j == t.last_j if "dq" in names else t.i == t.last_i, tile, tile)
    return {"often": last, "only": names}


_OWN_KEYS = {"stored keys": lambda c, x: np.where((x - c.start_k) // c.m == 0, x, ZEROS)}
_8_APART, _16_APART = (in_sequences(apart(far, 2 * far)) for far in (8, 16))
_SWAPPED = {"results": lambda run, x: x | {"dk": x["dv"], "dv": x["dk"]}}
_SWAPPED_DQ = {"results": lambda run, x: x | {"dq": x["dk"], "dk": x["dq"]}}
_NEXT_HEAD = delta_of(lambda out, q: np.roll(out, -1, axis=1))
_BY_QUERY = _NARROW | {"tile_m": 1, "tile_n": 128}
_BOTH = _SPLIT_V | _SPLIT | {"same_dims": 0.5}
_NO_KEYS_TAIL = times(lambda c: c.j < c.m // 16 * 16)
_DIAGONAL = times(lambda c: 1 + (c.i // 16 == c.j // 16))
_DEFAULT = {"scale": lambda c, s: c.question.q.shape[2] ** -0.5}
_OPERANDS = ("dS of dq", "dS of dk", "P of dv")
_LOST, _LOST_32 = (
    by_pairs(lambda t: t.c.run.chance.random() >= 0.15, tile, tile) for tile in (16, 32)
)  # pairs of tiles, by chance
_BY_HEADS, _BY_COLUMNS = written_as((1, 0, 2)), written_as((2, 1, 0))

_TABLE: Table = (
    # ---- who sees whom ----
    ("padded-keys: up to the longest", "f b fb", with_zeros(padding) | _OWN_LSE),
    ("padded-keys: up to the longest, as autograd has it", "b fb", with_zeros(padding) | _OWN),
    ("padded-keys: up to 16", "f fb", with_zeros(lambda c: -c.m % 16) | _OWN_LSE),
    ("padded-keys: up to 64", "f b fb", with_zeros(lambda c: -c.m % 64) | _OWN_LSE),
    ("mask-missing-in-backward: softmax over all keys", "b", no_window() | _OWN_LSE),
    ("mask-missing-in-backward: exp(S - L)", "b", no_window()),
    ("causal-dropped: no right side", "f fb", no_window(left=False)),
    ("causal-dropped: no mask", "f fb", no_window(), {"masks": ("causal",)}),
    ("causal-dropped: no right side, own lse", "fb", no_window(left=False) | _OWN),
    ("causal-off-by-one: j <= i + 1", "f b fb", window(right=1), _ALL),
    ("causal-off-by-one: j < i", "f b fb", window(right=-1)),
    ("causal-alignment: first key", "f b fb", _FIRST_KEY),
    ("causal-alignment: first key, more queries", "f fb", _FIRST_KEY, {"lengths_k": ("fewer",)}),
    ("window-off-by-one: left + 1", "f b fb", window(left=1)),
    ("window-off-by-one: left - 1", "f b fb", window(left=-1)),
    ("window-off-by-one: right + 1", "f b fb", window(right=1), _RIGHT_SIDE),
    ("window-off-by-one: both sides + 1", "fb", window(1, 1), {"masks": ("window",)}),
    ("window-dropped: left side", "f fb", no_window(right=False)),
    ("window-dropped: right side", "f fb", no_window(left=False), _RIGHT_SIDE),
    ("window-dropped: both sides", "f fb", no_window(), {"masks": ("window",)}),
    ("neighbour-leak: up to 16", "f fb", leaking(tile=16)),
    ("neighbour-leak: up to 32, gradients stay", "fb", leaking(tile=32) | _OWN_KEYS),
    ("neighbour-leak: one key after", "f b fb", leaking(1), _SHORT),
    ("neighbour-leak: one key before", "f b fb", leaking(before=1), _SHORT | _PLAIN),
    ("neighbour-leak: one on both sides", "fb", leaking(1, 1), _SHORT),
    ("offsets-shifted: stored a row late", "f", stored(late, "out", "lse")),
    ("offsets-shifted: stored a row late", "b", stored(late, *GRADIENTS)),
    ("offsets-shifted: stored a row late", "fb", stored(late, "out", "lse", *GRADIENTS) | _RIGHT),
    # ---- scores and softmax ----
    ("output-scale: dq without", "b", {"dq": power(0)}),
    ("output-scale: dk without", "b", {"dk": power(0)}),
    ("output-scale: dq and dk without", "b", of_each(power(0), "dq", "dk")),
    ("output-scale: dq twice", "b", {"dq": power(2)}),
    ("score-scale: 1", "f b fb", {"Y": by(lambda c: 1 / c.question.scale)}),
    ("score-scale: 1, in dq and dk too", "b fb", {"scale": lambda c, s: 1.0}),
    ("score-scale: log2 e", "f b fb", {"Y": by(1 / LN_2)}),
    ("score-scale: the default though one is given", "f fb", _DEFAULT, {"scaled": 1.0}),
    ("lse-base-2: stored alone", "f", {"lse": by(1 / LN_2)} | _RIGHT),
    ("lse-base-2: stored, and read as natural", "f", {"lse": by(1 / LN_2)}),
    ("lse-base-2: read as base 2", "b", {"L": by(LN_2)}),
    ("lse-without-max: stored alone", "f", _NO_MAX | _RIGHT),
    ("lse-without-max: stored and read", "f", _NO_MAX),
    ("not-normalised: stored alone", "f", _SUMS | _RIGHT),
    ("not-normalised: stored and read", "f", _SUMS),
    ("no-rescale: acc, tiles of 16", "f", _KEPT_OUT),
    ("no-rescale: acc, from the last tile", "f", _KEPT_OUT | {"order": "descending"}),
    ("no-rescale: row_sum, tiles of 32", "f", _KEPT_SUM | tiled(32), {"lengths": (33, 90)}),
    ("no-rescale: both, tiles of 16", "f", _KEPT_OUT | _KEPT_SUM),
    ("no-max-subtraction: exp(S)", "f", _UNSUBTRACTED | _NO_SUM),
    ("no-max-subtraction: exp(S), division guarded", "f", _UNSUBTRACTED),
    ("dead-rows: 0 / 0", "f", _NO_SUM),
    ("dead-rows or masked-tile-nan: -inf - -inf", "f", _NAN),
    ("dead-rows: -inf - -inf", "fb", _NAN | {"unguarded": ("max", "sum", "lse")}),
    ("dead-rows: -inf - -inf, tiles skipped", "fb", {"unguarded": ("sum", "lse")}),
    ("dead-rows: exp(-inf - lse)", "b", {"unguarded": ("lse",)} | _ALL_TILES),
    ("dead-rows: mean, -1e30 for -inf", "f fb", _MEAN),
    ("dead-rows: mean, masked_fill", "b fb", _MEAN | _uniform(False) | _OWN),
    ("dead-rows or mask-fill: mean, a mask that is added", "fb", _MEAN | _uniform(True) | _OWN),
    ("masked-tile-nan: visible tiles, 16 by 8", "f", {"unguarded": ("max",), "tile_n": 8}),
    ("accumulates-in-16-bit: key by key", "f fb", _NARROW | {"tile_m": 128, "tile_n": 1}),
    ("accumulates-in-16-bit: query by query, dk and dv", "b", _BY_QUERY),
    ("accumulates-in-16-bit: tiles of 4 keys", "f", _NARROW | {"tile_m": 64, "tile_n": 4}),
    ("head-dim-tail: of scores, 16", "f b fb", depth(16, "q", "k"), _SPLIT),
    ("head-dim-tail: of scores, 64", "fb", depth(64, "q", "k"), {"head_dims": (72, 80, 96)}),
    ("head-dim-tail: of v, 16", "f fb", depth(16, "v", "dout"), _SPLIT_V),
    ("head-dim-tail: of out as stored, 16", "f", stored(without_tail(16), "out"), _SPLIT_V),
    ("head-dim-tail: of gradients as stored, 16", "b", stored(without_tail(16), *GRADIENTS), _BOTH),
    # ---- the softmax's derivative ----
    ("delta-omitted: D = 0", "b", delta(lambda a, q: 0 * a["delta"])),
    ("delta-omitted: D = -dL", "b", delta(lambda a, q: -a["dlse"]), {"dlse": 1.0}),
    ("delta-of-another-out: unmasked attention", "b", delta_of(unmasked), {"masks": _MASKED}),
    ("delta-of-another-out: next head", "b", _NEXT_HEAD, _GROUPED),
    ("delta-of-another-out: next row", "b", delta_of(lambda out, q: np.roll(out, -1, 0))),
    ("lse-gradient-dropped: D", "b", delta(lambda a, q: a["delta"] + a["dlse"])),
    ("lse-gradient-sign: D", "b", delta(lambda a, q: a["delta"] + 2 * a["dlse"])),
    ("softmax-backward-without-p: dS = dP - D", "b", {"dS": lambda c, x: c.Z * (c.seen > 0)}),
    # ---- heads, layout, tiles ----
    ("gqa-head-map: h % heads", "f b fb", {"kv head": lambda c, g: c.h % c.question.num_heads_kv}),
    ("gqa-group-not-summed: last head", "b", of_group(-1, "dk", "dv")),
    ("gqa-group-not-summed: first head", "b", of_group(0, "dk", "dv")),
    ("gradients-swapped: dk and dv", "b", _SWAPPED),
    ("gradients-swapped: dq and dk", "b", _SWAPPED_DQ, _AS_MANY | {"groups": (1,)}),
    ("transposed: out by heads", "f", stored(_BY_HEADS, "out")),
    ("transposed: out by heads, not read so", "f", stored(_BY_HEADS, "out") | _RIGHT),
    ("transposed: out by columns", "f", stored(_BY_COLUMNS, "out")),
    ("transposed: lse by tokens", "f", stored(written_as((1, 0)), "lse") | _RIGHT),
    ("transposed: gradients by heads", "b", stored(_BY_HEADS, *GRADIENTS)),
    ("transposed: dq by columns", "b", stored(_BY_COLUMNS, "dq")),
    ("tail-tile-dropped: queries, 16", "f b fb", no_tail_of_queries(16)),
    ("tail-tile-dropped: queries, 64", "f", no_tail_of_queries(64), _OVER_64),
    ("tail-tile-dropped: keys, 16", "f b fb", _NO_KEYS_TAIL),
    ("tail-tile-dropped: keys, 64", "b fb", times(lambda c: c.j < c.m // 64 * 64), _OVER_64),
    ("tail-tile-dropped: both, 16", "fb", no_tail_of_queries(16) | _NO_KEYS_TAIL),
    ("tile-skipped: first, 16", "f b fb", times(lambda c: c.j >= 16)),
    ("tile-counted-twice: first, 16", "f b fb", times(lambda c: 1 + (c.j < 16))),
    ("tile-counted-twice: diagonal, 16", "f b fb", _DIAGONAL, _SQUARE),
    ("tile-overwrites: dq, 16", "b", _overwritten(16, "dq")),
    ("tile-overwrites: dk and dv, 32", "b", _overwritten(32, "dk", "dv"), _OVER_32),
    ("tile-overwrites: dk, 32", "b", _overwritten(32, "dk"), _OVER_32),
    ("accumulator-not-reset: dk, 16", "b", stored(running_on(16), "dk")),
    ("accumulator-not-reset: dq, 32, from the last", "b", stored(running_on(32, -1), "dq")),
    ("accumulator-not-reset: dk and dv, 32", "b", stored(running_on(32), "dk", "dv")),
    ("transposed: out, 8 apart in 16", "f", stored(_8_APART, "out")),
    ("transposed: dk and dv, 16 apart in 32", "b", stored(_16_APART, "dk", "dv")),
    # ---- no function of the inputs ----
    ("race: dk and dv", "b", of_each(_LOST, "dS of dk", "P of dv")),
    ("race: dq", "b", {"dS of dq": _LOST}),
    ("race: all gradients, 32", "b", of_each(_LOST_32, *_OPERANDS) | tiled(32)),
)
PLANTED = plants(
    _TABLE, lambda on: {}, _NEEDS, named=lambda x, on: f"{x} ({' and '.join(stages_of(on))})"
)


def _right(variant: str, wrong: Hooks, **needs: Any) -> Planted:
    return Planted("", variant, (*STAGES,), kernel(wrong), Needs(**needs))


RIGHT: tuple[Planted, ...] = (
    _right("tiles of 4", tiled(4), lengths=(1, 40)),
    _right("tiles of 8 by 32", {"tile_m": 8, "tile_n": 32}),
    _right("tiles of 16", {}),
    _right("tiles of 64", tiled(64)),
    _right("masked tiles are computed too", {"skips_masked": False}),
    _right("from the last key", {"order": "descending"}),
    _right("tiles in any order", {"order": "shuffled", "tile_n": 8}),
    _right("partial softmaxes, merged at the end", {"order": "merged", "tile_n": 8}),
    _right("two passes over the keys", {"two_pass": True}),
    _right("exp2", {"base_2": True}),
    _right("its own softmax in the backward pass", _OWN_LSE),
    _right("TF32", {"rounding": "tf32"}, dtypes=(FLOAT32,)),
    _right("float16", {}, dtypes=(FLOAT16,)),
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


right_answers = answers  # of one of RIGHT
