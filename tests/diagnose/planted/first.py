"""Packed attention by loops over tiles, as kernels run it, and the same with bugs planted in it.

Separate from rawattn.reference, and from what rawattn-check matches answers with: nothing of them
is used here. What is not right is a field of ``Kernel``; PLANTED lists what a class of bugs may
look like, ``problems`` draws questions on which one of them shows, ``answers`` computes it. With
the fields as they are by default, and in every variant of RIGHT, nothing is wrong.

Long by the table of bugs and by ``Kernel``; the two loops are ``forward`` and ``backward``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count as counted
from itertools import pairwise
from math import log
from typing import Any, NamedTuple
from zlib import crc32

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import STAGES, Answers, Question

Array = np.ndarray[Any, Any]
Store = Callable[[Array, str, Question], Array]  # what is written, the name of it, the problem
Span = tuple[int, int]  # first and one past the last
KeyTiles = list[tuple[slice, Array]]  # in their order, and which of the queries sees which key

FLOAT64, FLOAT32, FLOAT16 = (np.dtype(f"float{bits}") for bits in (64, 32, 16))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN = -1e30  # a score that stands for -inf in many kernels
LN_2 = log(2)


@dataclass(frozen=True)
class Kernel:
    """One implementation: how it computes, which is right, and what it does wrong (nothing).

    A field that names a tile means tiles of ``tile_m`` queries or ``tile_n`` keys, counted from the
    start of a sequence.
    """

    # how it cuts, orders and rounds
    tile_m: int = 16
    tile_n: int = 16
    order: str = "ascending"  # of key tiles; "descending", "shuffled", "pairwise"
    two_pass: bool = False  # the row maximum first, then the sums
    base_2: bool = False  # exp2 of scores in units of ln 2
    rounding: str = "operands"  # "tf32"; "every step"
    skips_masked: bool = True  # tiles of which no query sees a key
    # who sees whom
    masked: bool = True
    open_left: bool = False
    open_right: bool = False
    left: int = 0  # added to the window's sides
    right: int = 0
    top_left: bool = False  # the diagonal begins at the first key
    padding: str = ""  # "tile", "longest": keys of zeros behind the sequence, up to there
    leak: bool = False  # keys up to the tile's end, whomever they belong to
    after: int = 0  # keys of neighbours
    before: int = 0
    leaked_stored: bool = True  # their gradients are added to the neighbour's
    tail_q: bool = True  # the last, partial tile of queries is there
    tail_k: bool = True
    unwritten_lse: float = -np.inf
    first_tile: int = 1  # how often the first tile of keys counts
    diagonal_tile: int = 1
    first_offset: bool = True  # False: cu_seqlens is read from its second entry on
    head_map: str = "h // group"
    # scores and softmax
    factor: str = ""  # of FACTORS: in front of the scores, beside softmax_scale
    factor_in_gradients: bool = False
    depth_tile: int = 0  # columns of q and k past the last whole tile are left out
    depth_tile_v: int = 0
    masked_score: float = -np.inf
    subtracts_max: bool = True
    guards_max: bool = True  # no maximum of -inf is subtracted
    guards_sum: bool = True  # no division by a row sum of 0
    guards_lse: bool = True
    unscaled: tuple[str, ...] = ()  # "acc", "row_sum": not rescaled when the maximum moves
    normalised: bool = True
    max_in_lse: bool = True
    narrow_sums: bool = False
    # backward alone
    recompute: tuple[str, ...] = ()  # "out", "lse": its own, not those it is given
    lse_factor: float = 1.0
    delta: str = "out"  # "none", "lse alone", "unmasked", "next head", "kv head", "next row"
    dlse_sign: int = -1
    p_in_ds: bool = True
    scale_powers: tuple[int, int] = (1, 1)  # of softmax_scale in dq and dk
    kept_head: int | None = None  # of a group: the one that dk and dv hold
    overwrites: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()  # to which the contributions of some tiles, by chance, are lost
    past_dout: float = 0.0  # cotangent of rows of padding up to the longest sequence
    uniform_dead: str = (
        ""  # P of dead rows is uniform; "stopped": their dS is 0, "flows": it is not
    )
    # around it
    stores: Mapping[str, Store] = field(default_factory=dict)
    exchanged: tuple[str, ...] = ()  # two gradients, each returned as the other
    keeps_right: bool = False  # its backward pass knows the right out and lse nonetheless
    other_inputs: bool = False


@dataclass(frozen=True)
class Needs:
    """What a problem must be like for a bug to show, and to be no other bug as well."""

    masks: tuple[str, ...] = ("open", "causal", "window", "causal window", "left", "right")
    lengths_k: tuple[str, ...] = ("equal", "equal", "more", "any")
    lengths: Span = (1, 90)
    over: int = 0  # one sequence at least is longer than this
    batch: Span = (2, 5)
    groups: tuple[int, ...] = (1, 2, 3, 4)
    heads_kv: tuple[int, ...] = (1, 2, 3)
    head_dims: tuple[int, ...] = (16, 24, 32, 48, 64)
    head_dims_v: tuple[int, ...] = (16, 24, 32, 48, 64)
    same_dims: float = 0.7  # how often head_dim_v is head_dim
    scaled: float = 0.3  # how often softmax_scale is given
    dlse: float = 0.4
    past_end: float = 0.3
    large: bool = False  # scores past the range of float32's exp
    dtypes: tuple[np.dtype[Any], ...] = (FLOAT64, FLOAT32, BFLOAT16)
    shows: float = 8.0  # by how much a result changes: in units of the dtype's eps, of its norm


@dataclass(frozen=True)
class Planted:
    """A bug of class ``bug``, in ``stages``. ``also``: classes that are the same function."""

    bug: str
    variant: str
    stages: tuple[str, ...]
    kernel: Kernel
    needs: Needs = Needs()
    also: tuple[str, ...] = ()

    def at(self, stage: str) -> Kernel:
        return self.kernel if stage in self.stages else Kernel()


# What the scores are multiplied by, beside softmax_scale.
FACTORS: dict[str, Callable[[Question], float]] = {
    "": lambda question: 1.0,
    "1": lambda question: 1 / question.scale,
    "1 / d": lambda question: 1 / (question.scale * question.q.shape[2]),
    "log2 e": lambda question: 1 / LN_2,
    "ln 2": lambda question: LN_2,
    "default": lambda question: question.q.shape[2] ** -0.5 / question.scale,
}


# ---- what is written ----


def tokens_as_heads(array: Array, name: str, question: Question) -> Array:
    """Written as (heads, tokens, ...), or (tokens, heads), and read as if it were not."""
    return array.swapaxes(0, 1).reshape(array.shape)


def tokens_as_columns(array: Array, name: str, question: Question) -> Array:
    return array.swapaxes(0, 2).reshape(array.shape)


def columns_reversed(array: Array, name: str, question: Question) -> Array:
    return array[..., ::-1]


def by_rows(array: Array, name: str) -> Array:
    """A view whose first axis is that of tokens."""
    return array.swapaxes(0, 1) if name in ("lse", "delta") else array


def bounds(name: str, question: Question) -> list[int]:
    cu_seqlens = question.cu_seqlens_k if name in ("dk", "dv") else question.cu_seqlens_q
    return [int(offset) for offset in cu_seqlens]


def one_row_late(array: Array, name: str, question: Question) -> Array:
    """From the second half of the sequences on, a row is written where the next one belongs."""
    start = bounds(name, question)[question.batch // 2]
    late = array.copy()
    by_rows(late, name)[start + 1 :] = by_rows(array, name)[start:-1]
    by_rows(late, name)[start] = -np.inf if name == "lse" else 0
    return late


def rows_exchanged(tile: int, distance: int) -> Store:
    """Row r of every tile holds row r ^ distance; 0 where that lies behind the sequence."""

    def store(array: Array, name: str, question: Question) -> Array:
        wrong = np.zeros_like(array)
        edges = bounds(name, question)
        for start, stop in pairwise(edges):
            r = np.arange(stop - start)
            partner = r // tile * tile + (r % tile ^ distance)
            there = partner < stop - start
            wrong[start + r[there]] = array[start + partner[there]]
        return wrong

    return store


def rows_of_garbage(tile: int, first: int) -> Store:
    """The last rows of every tile are what happened to be in memory."""

    def store(array: Array, name: str, question: Question) -> Array:
        wrong = array.copy()
        garbage = np.random.default_rng(5).standard_normal(array.shape)
        edges = bounds(name, question)
        for start, stop in pairwise(edges):
            rows = start + np.flatnonzero(np.arange(stop - start) % tile >= first)
            wrong[rows] = garbage[rows]
        return wrong

    return store


def without_tail(tile: int) -> Store:
    """The columns past the last whole tile are not written."""

    def store(array: Array, name: str, question: Question) -> Array:
        wrong = array.copy()
        wrong[..., array.shape[-1] // tile * tile :] = 0
        return wrong

    return store


def in_base_2(array: Array, name: str, question: Question) -> Array:
    return array / LN_2


# ---- the table ----

STAGES_OF = {"f": ("forward",), "b": ("backward",), "fb": ("forward", "backward")}


def _planted(bug: str, needs: Mapping[str, Any], *variants: tuple[Any, ...]) -> list[Planted]:
    """``variants``: in words, the stages ("f b fb" is three), the fields of Kernel, more needs."""
    found = []
    for words, stages, kernel, *more in variants:
        for where in stages.split():
            wanted = Needs(**{**needs, **(more[0] if more else {})})
            also = more[1] if len(more) > 1 else ()
            variant = f"{words} ({' and '.join(STAGES_OF[where])})"
            found.append(
                Planted(bug, variant, STAGES_OF[where], Kernel(**kernel), wanted, tuple(also))
            )
    return found


def _stored(store: Store, *names: str) -> dict[str, Any]:
    return {"stores": dict.fromkeys(names, store)}


def _tiles(tile: int) -> dict[str, int]:
    return {"tile_m": tile, "tile_n": tile}


_CAUSAL = ("causal", "causal window")
_MASKED = (*_CAUSAL, "window")
_ALIVE = ("equal", "equal", "more")  # lengths of keys with which no query is without a key
_OPEN = {"masks": ("open",)}
_GRADIENTS = ("dq", "dk", "dv")
_LONG = {"lengths": (17, 90)}
_OVER_32, _OVER_64 = ({"lengths": (tile - 12, 100), "over": tile} for tile in (32, 64))
_GROUPED = {"groups": (2, 3, 4)}
_HEADS = {"groups": (2, 3, 4), "heads_kv": (2, 3)}
_OWN_LSE, _OWN = {"recompute": ("lse",)}, {"recompute": ("out", "lse")}
_NAN = {"guards_max": False, "guards_sum": False, "skips_masked": False}
_MEAN = {"masked_score": HIDDEN, "skips_masked": False}
_DEAD = {"masks": ("causal",), "lengths_k": ("fewer", "any"), "lengths": (2, 60)}
_NARROW = {"narrow_sums": True}
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

PLANTED: tuple[Planted, ...] = (
    # ---- who sees whom ----
    *_planted(
        "padded-keys",
        _OPEN,
        ("up to the longest", "f b fb", {"padding": "longest"} | _OWN_LSE),
        ("up to the longest, as autograd has it", "b fb", {"padding": "longest"} | _OWN),
        ("up to 16", "f fb", {"padding": "tile"} | _tiles(16) | _OWN_LSE),
        ("up to 32", "f", {"padding": "tile"} | _tiles(32)),
        ("up to 64", "f b fb", {"padding": "tile"} | _tiles(64) | _OWN_LSE),
        ("up to 128", "fb", {"padding": "tile"} | _tiles(128) | _OWN),
    ),
    *_planted(
        "padded-grad-out",
        {"masks": ("open", "causal"), "lengths_k": ("equal",)},
        ("ones", "b", {"past_dout": 1.0}),
        ("of a mean", "b", {"past_dout": 0.3}),
        ("negative", "b", {"past_dout": -2.0}),
    ),
    *_planted(
        "mask-missing-in-backward",
        {"masks": _MASKED, "lengths_k": _ALIVE, "lengths": (2, 90)},
        ("softmax over all keys", "b", {"masked": False} | _OWN_LSE),
        ("exp(S - L)", "b", {"masked": False}),
    ),
    *_planted(
        "causal-dropped",
        {"masks": _CAUSAL, "lengths": (2, 90)},
        ("no right side", "f fb", {"open_right": True}),
        ("no mask", "f fb", {"masked": False}, {"masks": ("causal",)}),
        ("no right side, own lse", "fb", {"open_right": True} | _OWN),
    ),
    *_planted(
        "causal-off-by-one",
        {"masks": _CAUSAL},
        ("j <= i + 1", "f b fb", {"right": 1}, {"lengths": (2, 90)}),
        ("j < i", "f b fb", {"right": -1}),
    ),
    *_planted(
        "causal-alignment",
        {"masks": ("causal", "causal window", "window"), "lengths_k": ("more", "any")},
        ("first key", "f b fb", {"top_left": True}),
        ("first key, more keys", "fb", {"top_left": True}, {"lengths_k": ("more",)}),
        ("first key, more queries", "f fb", {"top_left": True}, {"lengths_k": ("fewer",)}),
    ),
    *_planted(
        "window-off-by-one",
        {"masks": ("window", "causal window", "left"), "lengths": (6, 90)},
        ("left + 1", "f b fb", {"left": 1}),
        ("left - 1", "f b fb", {"left": -1}),
        ("right + 1", "f b fb", {"right": 1}, {"masks": ("window", "right")}),
        ("right - 1", "f b fb", {"right": -1}, {"masks": ("window", "right")}),
        ("both sides + 1", "fb", {"left": 1, "right": 1}, {"masks": ("window",)}),
    ),
    *_planted(
        "window-dropped",
        {"masks": ("window", "causal window", "left"), "lengths": (10, 90)},
        ("left side", "f fb", {"open_left": True}),
        ("right side", "f fb", {"open_right": True}, {"masks": ("window", "right")}),
        ("both sides", "f fb", {"masked": False}, {"masks": ("window",)}),
    ),
    *_planted(
        "neighbour-leak",
        {"masks": ("open", "open", "left")},
        ("up to 16", "f fb", {"leak": True} | _tiles(16)),
        ("up to 32", "b fb", {"leak": True} | _tiles(32)),
        ("up to 64", "f fb", {"leak": True} | _tiles(64)),
        ("up to 128", "f fb", {"leak": True} | _tiles(128)),
        ("up to 32, gradients stay", "fb", {"leak": True, "leaked_stored": False} | _tiles(32)),
        ("one key after", "f b fb", {"after": 1}, {"lengths": (1, 40)}),
        (
            "one key before",
            "f b fb",
            {"before": 1},
            {"masks": ("open", "causal"), "lengths": (1, 40)},
        ),
        ("one on both sides", "fb", {"before": 1, "after": 1}, {"lengths": (1, 40)}),
    ),
    *_planted(
        "offsets-shifted",
        {},
        ("stored a row late", "f", _stored(one_row_late, "out", "lse")),
        ("stored a row late", "b", _stored(one_row_late, *_GRADIENTS)),
        (
            "stored a row late",
            "fb",
            _stored(one_row_late, "out", "lse", *_GRADIENTS) | {"keeps_right": True},
        ),
        ("no first entry", "f b fb", {"first_offset": False}),
    ),
    # ---- scores and softmax ----
    *_planted(
        "output-scale",
        {},
        ("dq without", "b", {"scale_powers": (0, 1)}),
        ("dk without", "b", {"scale_powers": (1, 0)}),
        ("dq and dk without", "b", {"scale_powers": (0, 0)}),
        ("dq twice", "b", {"scale_powers": (2, 1)}),
        ("dk twice", "b", {"scale_powers": (1, 2)}),
        ("dq and dk twice", "b", {"scale_powers": (2, 2)}),
    ),
    *_planted(
        "score-scale",
        {"lengths": (2, 90)},
        ("1", "f b fb", {"factor": "1"}),
        ("1, in dq and dk too", "b fb", {"factor": "1", "factor_in_gradients": True}),
        ("1 / d", "f b fb", {"factor": "1 / d"}),
        ("1 / d, in dq and dk too", "b fb", {"factor": "1 / d", "factor_in_gradients": True}),
        ("log2 e", "f b fb", {"factor": "log2 e"}),
        ("ln 2", "f b fb", {"factor": "ln 2"}),
        (
            "the default though one is given",
            "f fb",
            {"factor": "default", "factor_in_gradients": True},
            {"scaled": 1.0},
        ),
    ),
    *_planted(
        "lse-base-2",
        {},
        ("stored alone", "f", _stored(in_base_2, "lse") | {"keeps_right": True}),
        ("stored, and read as natural", "f", _stored(in_base_2, "lse")),
        ("read as base 2", "b", {"lse_factor": LN_2}),
    ),
    *_planted(
        "lse-without-max",
        {},
        ("stored alone", "f", {"max_in_lse": False, "keeps_right": True}),
        ("stored and read", "f", {"max_in_lse": False}),
    ),
    *_planted(
        "not-normalised",
        {},
        ("stored alone", "f", {"normalised": False, "keeps_right": True}),
        ("stored and read", "f", {"normalised": False}),
    ),
    *_planted(
        "no-rescale",
        _LONG | {"masks": ("open", "causal", "window", "right")},
        ("acc, tiles of 16", "f", {"unscaled": ("acc",)}),
        ("acc, tiles of 32", "f", {"unscaled": ("acc",)} | _tiles(32), {"lengths": (33, 90)}),
        ("acc, from the last tile", "f", {"unscaled": ("acc",), "order": "descending"}),
        ("row_sum, tiles of 16", "f", {"unscaled": ("row_sum",)}),
        (
            "row_sum, tiles of 32",
            "f",
            {"unscaled": ("row_sum",)} | _tiles(32),
            {"lengths": (33, 90)},
        ),
        ("both, tiles of 16", "f", {"unscaled": ("acc", "row_sum")}),
    ),
    *_planted(
        "no-max-subtraction",
        {"large": True, "lengths": (2, 60), "dtypes": (FLOAT32, BFLOAT16), "dlse": 0.2},
        ("exp(S)", "f", {"subtracts_max": False, "guards_sum": False}),
        ("exp(S), division guarded", "f", {"subtracts_max": False}),
        ("exp(S) / exp(L)", "b fb", {"subtracts_max": False, "guards_sum": False}),
    ),
    *_planted(
        "dead-rows",
        _DEAD,
        ("0 / 0", "f", {"guards_sum": False}),
        ("-inf - -inf", "f", _NAN, {}, ("masked-tile-nan",)),
        ("-inf - -inf", "fb", _NAN | {"guards_lse": False}),
        ("-inf - -inf, tiles skipped", "fb", {"guards_sum": False, "guards_lse": False}),
        ("exp(-inf - lse)", "b", {"guards_lse": False, "skips_masked": False}),
        ("mean, -1e30 for -inf", "f fb", _MEAN),
        (
            "mean, masked_fill",
            "b fb",
            _MEAN | {"uniform_dead": "stopped"} | _OWN,
        ),
        (
            "mean, a mask that is added",
            "fb",
            _MEAN | {"uniform_dead": "flows"} | _OWN,
            {},
            ("mask-fill",),
        ),
    ),
    *_planted(
        "masked-tile-nan",
        {"masks": ("window", "causal window", "left"), "lengths_k": _ALIVE, "lengths": (18, 90)},
        ("all tiles, 16", "f", {"guards_max": False, "skips_masked": False}),
        ("visible tiles, 16", "f", {"guards_max": False}),
        ("all tiles, 32", "f", {"guards_max": False, "skips_masked": False} | _tiles(32)),
        ("visible tiles, 16 by 8", "f", {"guards_max": False, "tile_n": 8}),
    ),
    *_planted(
        "accumulates-in-16-bit",
        _16_BIT,
        ("key by key", "f fb", _NARROW | {"tile_m": 128, "tile_n": 1}),
        ("key by key, dq", "b", _NARROW | {"tile_m": 128, "tile_n": 1}),
        ("query by query, dk and dv", "b", _NARROW | {"tile_m": 1, "tile_n": 128}),
        ("tiles of 4 keys", "f", _NARROW | {"tile_m": 64, "tile_n": 4}),
    ),
    *_planted(
        "head-dim-tail",
        {"same_dims": 0.5, "lengths": (2, 90)},
        *(
            (f"of scores, {tile}", "f b fb", {"depth_tile": tile}, {"head_dims": dims})
            for tile, dims in ((16, (24, 40, 56)), (32, (40, 48, 56)))
        ),
        ("of scores, 64", "fb", {"depth_tile": 64}, {"head_dims": (72, 80, 96)}),
        ("of v, 16", "f fb", {"depth_tile_v": 16}, {"head_dims_v": (24, 40, 56), "same_dims": 0}),
        (
            "of out as stored, 32",
            "f",
            _stored(without_tail(32), "out"),
            {"head_dims_v": (40, 48, 56), "same_dims": 0},
        ),
        (
            "of gradients as stored, 16",
            "b",
            _stored(without_tail(16), *_GRADIENTS),
            {"head_dims": (24, 40, 56), "head_dims_v": (24, 40, 56)},
        ),
    ),
    # ---- the softmax's derivative ----
    *_planted(
        "delta-omitted",
        {"lengths": (2, 90)},
        ("D = 0", "b", {"delta": "none"}),
        ("D = -dL", "b", {"delta": "lse alone"}, {"dlse": 1.0}),
    ),
    *_planted(
        "delta-of-another-out",
        {"lengths": (2, 90)},
        ("unmasked attention", "b", {"delta": "unmasked"}, {"masks": _MASKED}),
        ("next head", "b", {"delta": "next head"}, {"groups": (2, 3, 4)}),
        ("head of k", "b", {"delta": "kv head"}, {"groups": (2, 3, 4)}),
        ("next row", "b", {"delta": "next row"}),
    ),
    *_planted(
        "lse-gradient-dropped", {"dlse": 1.0, "lengths": (2, 90)}, ("D", "b", {"dlse_sign": 0})
    ),
    *_planted("lse-gradient-sign", {"dlse": 1.0, "lengths": (2, 90)}, ("D", "b", {"dlse_sign": 1})),
    *_planted(
        "softmax-backward-without-p", {"lengths": (2, 90)}, ("dS = dP - D", "b", {"p_in_ds": False})
    ),
    # ---- heads, layout, tiles ----
    *_planted("gqa-head-map", _HEADS, ("h % heads", "f b fb", {"head_map": "h % heads"})),
    *_planted(
        "gqa-group-not-summed",
        _GROUPED,
        ("last head", "b", {"kept_head": -1}),
        ("first head", "b", {"kept_head": 0}),
    ),
    *_planted(
        "gradients-swapped",
        {"same_dims": 1.0},
        ("dk and dv", "b", {"exchanged": ("dk", "dv")}),
        ("dq and dk", "b", {"exchanged": ("dq", "dk")}, {"groups": (1,), "lengths_k": ("equal",)}),
    ),
    *_planted(
        "transposed",
        _HEADS,
        ("out by heads", "f", _stored(tokens_as_heads, "out")),
        ("out by heads, not read so", "f", _stored(tokens_as_heads, "out") | {"keeps_right": True}),
        ("out by columns", "f", _stored(tokens_as_columns, "out")),
        ("columns of out reversed", "f", _stored(columns_reversed, "out")),
        ("lse by tokens", "f", _stored(tokens_as_heads, "lse") | {"keeps_right": True}),
        ("gradients by heads", "b", _stored(tokens_as_heads, *_GRADIENTS)),
        ("dq by heads", "b", _stored(tokens_as_heads, "dq")),
        ("dk and dv by heads", "b", _stored(tokens_as_heads, "dk", "dv")),
        ("dq by columns", "b", _stored(tokens_as_columns, "dq")),
        ("columns of gradients reversed", "b", _stored(columns_reversed, *_GRADIENTS)),
    ),
    *_planted(
        "tail-tile-dropped",
        _LONG,
        ("queries, 16", "f b fb", {"tail_q": False} | _tiles(16)),
        ("queries, 32", "b fb", {"tail_q": False} | _tiles(32), _OVER_32),
        ("queries, 64, lse 0", "f", {"tail_q": False, "unwritten_lse": 0.0} | _tiles(64), _OVER_64),
        ("keys, 16", "f b fb", {"tail_k": False} | _tiles(16)),
        ("keys, 32", "f fb", {"tail_k": False} | _tiles(32), _OVER_32),
        ("keys, 64", "b fb", {"tail_k": False} | _tiles(64), _OVER_64),
        ("both, 16", "fb", {"tail_q": False, "tail_k": False} | _tiles(16)),
    ),
    *_planted(
        "tile-skipped",
        _LONG | {"masks": ("open", "causal", "right")},
        ("first, 16", "f b fb", {"first_tile": 0} | _tiles(16)),
        ("first, 32", "f b fb", {"first_tile": 0} | _tiles(32), _OVER_32),
        ("first, 64", "fb", {"first_tile": 0} | _tiles(64), _OVER_64),
    ),
    *_planted(
        "tile-counted-twice",
        _LONG | {"masks": ("open", "causal", "right")},
        ("first, 16", "f b fb", {"first_tile": 2} | _tiles(16)),
        ("first, 32", "f b fb", {"first_tile": 2} | _tiles(32), _OVER_32),
        ("first, 64", "fb", {"first_tile": 2} | _tiles(64), _OVER_64),
        *(
            (
                f"diagonal, {tile}",
                "f b fb",
                {"diagonal_tile": 2} | _tiles(tile),
                {"masks": ("causal",), "lengths_k": ("equal",), "lengths": (tile + 1, 90)},
            )
            for tile in (16, 32)
        ),
    ),
    *_planted(
        "tile-overwrites",
        {"masks": ("open", "causal"), "lengths_k": ("equal",), "lengths": (20, 90)},
        ("dq, 16", "b", {"overwrites": ("dq",)} | _tiles(16)),
        ("dq, 32", "b", {"overwrites": ("dq",)} | _tiles(32), _OVER_32),
        ("dq, 64", "b", {"overwrites": ("dq",)} | _tiles(64), _OVER_64),
        ("dk and dv, 16", "b", {"overwrites": ("dk", "dv")} | _tiles(16)),
        ("dk and dv, 32", "b", {"overwrites": ("dk", "dv")} | _tiles(32), _OVER_32),
        ("dk, 32", "b", {"overwrites": ("dk",)} | _tiles(32), _OVER_32),
    ),
    *_planted(
        "tile-period",
        _LONG,
        ("out, 8 apart in 16", "f", _stored(rows_exchanged(16, 8), "out")),
        ("out, 1 apart in 16", "f", _stored(rows_exchanged(16, 1), "out") | {"keeps_right": True}),
        ("out, garbage in 32", "f", _stored(rows_of_garbage(32, 28), "out"), {"lengths": (30, 90)}),
        ("dq, 8 apart in 16", "b", _stored(rows_exchanged(16, 8), "dq")),
        ("dq, garbage in 16", "b", _stored(rows_of_garbage(16, 14), "dq")),
        ("dk and dv, 16 apart in 32", "b", _stored(rows_exchanged(32, 16), "dk", "dv")),
        ("dk and dv, garbage in 16", "b", _stored(rows_of_garbage(16, 12), "dk", "dv")),
    ),
    # ---- no function of the inputs ----
    *_planted(
        "race",
        {"lengths": (17, 90)},
        ("dk and dv", "b", {"dropped": ("dk", "dv")}),
        ("dq", "b", {"dropped": ("dq",)}),
        ("all gradients, 32", "b", {"dropped": _GRADIENTS} | _tiles(32)),
    ),
    *_planted("other-data", {"lengths": (4, 90)}, ("all inputs", "f b fb", {"other_inputs": True})),
)


def _right(variant: str, kernel: Mapping[str, Any], **needs: Any) -> Planted:
    dtypes = needs.pop("dtypes", (FLOAT64, FLOAT32, BFLOAT16))
    return Planted("", variant, (*STAGES,), Kernel(**kernel), Needs(dtypes=dtypes, **needs))


RIGHT: tuple[Planted, ...] = (
    _right("tiles of 4", _tiles(4), lengths=(1, 40)),
    _right("tiles of 8 by 32", {"tile_m": 8, "tile_n": 32}),
    _right("tiles of 32 by 8", {"tile_m": 32, "tile_n": 8}),
    _right("tiles of 16", {}),
    _right("tiles of 64", _tiles(64)),
    _right("masked tiles are computed too", {"skips_masked": False}),
    _right("from the last key", {"order": "descending"}),
    _right("tiles in any order", {"order": "shuffled", "tile_n": 8}),
    _right("partial softmaxes, merged in pairs", {"order": "pairwise", "tile_n": 8}),
    _right("two passes over the keys", {"two_pass": True}),
    _right("exp2", {"base_2": True}),
    _right("its own softmax in the backward pass", _OWN_LSE),
    _right("TF32", {"rounding": "tf32"}, dtypes=(FLOAT32,)),
    _right("float16", {}, dtypes=(FLOAT16,)),
    _right("float16, tiles of 64", _tiles(64), dtypes=(FLOAT16,)),
    _right("every step in float16", {"rounding": "every step"}, dtypes=(FLOAT16,)),
    _right("every step in bfloat16", {"rounding": "every step"}, dtypes=(BFLOAT16,)),
    _right("long rows", _tiles(64), lengths=(200, 400), batch=(1, 1), groups=(1, 2), heads_kv=(1,)),
    _right("large scores", {}, large=True, lengths=(2, 60)),
    _right("dead rows", {}, **_DEAD),
)


# ---- the arithmetic ----


class Arithmetic:
    """How a kernel computes for inputs of ``dtype``: sums in ``wide``, operands of products not."""

    def __init__(self, dtype: np.dtype[Any], rounding: str) -> None:
        self.dtype, self.rounding = dtype, rounding
        self.wide = FLOAT64 if dtype == FLOAT64 else FLOAT32

    def narrow(self, array: Array) -> Array:
        return array.astype(self.dtype).astype(self.wide)

    def operand(self, array: Array) -> Array:
        if self.rounding == "tf32":
            bits = array.astype(FLOAT32).view(np.uint32)
            even = np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
            return ((bits + even) & np.uint32(0xFFFFE000)).view(FLOAT32)
        return array if self.dtype == self.wide else self.narrow(array)

    def step(self, array: Array) -> Array:
        """The result of a product that is no sum's operand."""
        return self.narrow(array) if self.rounding == "every step" else array


class Sequence(NamedTuple):
    """One sequence: where its rows begin and how many there are; ``keys``: what is taken for keys.

    ``keys`` counts from the first key, and may begin before or end behind the sequence.
    """

    start_q: int
    seqlen_q: int
    start_k: int
    seqlen_k: int
    queries: int
    keys: Span


class Run:
    """The arrays of a question as a kernel has them on chip, and its loops over them."""

    def __init__(self, question: Question, kernel: Kernel, chance: int = 0) -> None:
        self.question, self.kernel = question, kernel
        self.number = Arithmetic(question.dtype, kernel.rounding)
        self.wide = self.number.wide
        self.chance = np.random.default_rng((chance, len(question.q)))
        self.scale = question.scale * FACTORS[kernel.factor](question)
        self.q, self.k = (self._operand(a, kernel.depth_tile) for a in (question.q, question.k))
        self.v = self._operand(question.v, kernel.depth_tile_v)
        self.dout = self._operand(question.dout, kernel.depth_tile_v)

    def _operand(self, array: Array | None, tile: int) -> Any:
        if array is None:
            return None
        operand = self.number.operand(array.astype(self.wide))
        return without_tail(tile)(operand, "", self.question) if tile else operand

    def sequences(self) -> Iterator[Sequence]:
        kernel, question = self.kernel, self.question
        cu_q, cu_k = (
            [int(offset) for offset in cu[0 if kernel.first_offset else 1 :]]
            for cu in (question.cu_seqlens_q, question.cu_seqlens_k)
        )
        longest = max(question.lengths_k)
        for b in range(len(cu_q) - 1):
            seqlen_q, seqlen_k = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
            whole_k, tiles_k = seqlen_k // kernel.tile_n, -(-seqlen_k // kernel.tile_n)
            begin, end = -min(kernel.before, cu_k[b]), seqlen_k + kernel.after
            if kernel.leak:
                end = tiles_k * kernel.tile_n
            if not kernel.tail_k:
                end = whole_k * kernel.tile_n
            end = min(end, len(question.k) - cu_k[b])
            if kernel.padding:
                end = longest if kernel.padding == "longest" else tiles_k * kernel.tile_n
            queries = max(question.lengths_q) if kernel.past_dout else seqlen_q
            if not kernel.tail_q:
                queries = seqlen_q // kernel.tile_m * kernel.tile_m
            yield Sequence(cu_q[b], seqlen_q, cu_k[b], seqlen_k, queries, (begin, end))

    def visits(self, sequence: Sequence) -> list[tuple[slice, KeyTiles]]:
        """Every tile of queries, with the tiles of keys that it visits."""
        tiles = _cut(sequence.queries, self.kernel.tile_m)
        return [(slice(*tile), self.key_tiles(sequence, tile)) for tile in tiles]

    def key_tiles(self, sequence: Sequence, queries: Span) -> KeyTiles:
        kernel, (begin, end) = self.kernel, sequence.keys
        tiles = _cut(end - begin, kernel.tile_n)
        tiles = tiles[:1] * kernel.first_tile + tiles[1:]
        if kernel.diagonal_tile > 1:
            tiles += [tile for tile in tiles if tile[0] == queries[0]]
        if kernel.order == "descending":
            tiles = tiles[::-1]
        if kernel.order == "shuffled":
            tiles = [tiles[place] for place in self.chance.permutation(len(tiles))]
        i = np.arange(*queries)
        found = [(slice(*tile), self.mask(sequence, i, np.arange(*tile) + begin)) for tile in tiles]
        return [(keys, mask) for keys, mask in found if mask.any() or not kernel.skips_masked]

    def mask(self, sequence: Sequence, i: Array, j: Array) -> Array:
        kernel, (left, right) = self.kernel, self.question.mask_window
        offset = 0 if kernel.top_left else sequence.seqlen_k - sequence.seqlen_q
        distance = j - (i[:, None] + offset)
        mask = np.ones(distance.shape, dtype=bool)
        if kernel.masked and left >= 0 and not kernel.open_left:
            mask &= distance >= -(left + kernel.left)
        if kernel.masked and right >= 0 and not kernel.open_right:
            mask &= distance <= right + kernel.right
        return mask

    def head_of_keys(self, head: int) -> int:
        question = self.question
        by_group = self.kernel.head_map == "h // group"
        return head // question.group if by_group else head % question.num_heads_kv

    def queries_of(self, array: Array, sequence: Sequence, head: int, past: float = 0.0) -> Array:
        """The rows of one head; ``past`` in those behind the sequence."""
        rows = np.full((max(sequence.queries, sequence.seqlen_q), array.shape[2]), past, self.wide)
        start, size = sequence.start_q, sequence.seqlen_q
        rows[:size] = array[start : start + size, head]
        return rows

    def keys_of(self, array: Array, sequence: Sequence, head: int) -> Array:
        """The keys of one head, those that are none too: zeros where they are padding."""
        begin, end = sequence.keys
        there = min(end, sequence.seqlen_k) if self.kernel.padding else end
        rows = np.zeros((end - begin, array.shape[2]), self.wide)
        rows[: there - begin] = array[sequence.start_k + begin : sequence.start_k + there, head]
        return rows

    def scores(self, Q: Array, K: Array, mask: Array) -> Array:
        S = self.number.step(self.wide.type(self.scale) * (Q @ K.T))
        return np.where(mask, S, self.wide.type(self.kernel.masked_score))

    def exp(self, S: Array) -> Array:
        return np.exp2(S / self.wide.type(LN_2)) if self.kernel.base_2 else np.exp(S)


def _cut(size: int, tile: int) -> list[Span]:
    return [(first, min(first + tile, size)) for first in range(0, size, tile)]


# ---- forward ----


class Softmax(NamedTuple):
    """The state of an online softmax: of a tile of queries, over the keys seen so far."""

    row_max: Array
    row_sum: Array
    acc: Array


def forward(question: Question, kernel: Kernel) -> tuple[Array, Array]:
    """out and lse, in the arithmetic's wide dtype."""
    run = Run(question, kernel)
    out = np.zeros((*question.q.shape[:2], question.v.shape[2]), run.wide)
    lse = np.full(question.q.shape[1::-1], -np.inf, run.wide)
    for sequence in run.sequences():
        start, visits = sequence.start_q, run.visits(sequence)
        lse[:, start : start + sequence.seqlen_q] = kernel.unwritten_lse
        for head in range(question.num_heads_q):
            head_kv = run.head_of_keys(head)
            Q = run.queries_of(run.q, sequence, head)
            K, V = (run.keys_of(a, sequence, head_kv) for a in (run.k, run.v))
            for tile, key_tiles in visits:
                seen = [(run.scores(Q[tile], K[keys], m), V[keys]) for keys, m in key_tiles]
                state = softmax(run, seen, (tile.stop - tile.start, V.shape[1]))
                rows = slice(start + tile.start, start + tile.stop)
                out[rows, head], lse[head, rows] = finished(kernel, state)
    return out, lse


def softmax(run: Run, tiles: list[tuple[Array, Array]], shape: tuple[int, int]) -> Softmax:
    """``tiles``: scores and values, in the order in which they are visited."""
    nothing = Softmax(
        np.full(shape[0], -np.inf, run.wide),
        np.zeros(shape[0], run.wide),
        np.zeros(shape, run.wide),
    )
    if run.kernel.order == "pairwise" and tiles:
        states = [softmax_step(run, nothing, S, V) for S, V in tiles]
        while len(states) > 1:
            pairs = zip(states[::2], states[1::2], strict=False)
            odd = states[len(states) // 2 * 2 :]
            states = [merged(one, other) for one, other in pairs] + odd
        return states[0]
    state = nothing
    if run.kernel.two_pass and tiles:
        state = state._replace(row_max=np.maximum.reduce([S.max(axis=1) for S, _ in tiles]))
    for S, V in tiles:
        state = softmax_step(run, state, S, V)
    return state


def softmax_step(run: Run, state: Softmax, S: Array, V: Array) -> Softmax:
    kernel = run.kernel
    keep = run.number.narrow if kernel.narrow_sums else lambda sums: sums
    row_max = np.maximum(state.row_max, S.max(axis=1))
    shift = np.where(np.isneginf(row_max), 0, row_max) if kernel.guards_max else row_max
    if not kernel.subtracts_max:
        row_max = shift = np.zeros_like(row_max)
    P = run.number.step(run.exp(S - shift[:, None]))
    rescale = run.exp(state.row_max - shift) if kernel.subtracts_max else np.ones_like(shift)
    of_sum = 1 if "row_sum" in kernel.unscaled else rescale
    of_acc = 1 if "acc" in kernel.unscaled else rescale[:, None]
    row_sum = keep(state.row_sum * of_sum + P.sum(axis=1))
    acc = keep(state.acc * of_acc + run.number.operand(P) @ V)
    return Softmax(row_max, row_sum, acc)


def merged(one: Softmax, other: Softmax) -> Softmax:
    """The softmax over the keys of both."""
    row_max = np.maximum(one.row_max, other.row_max)
    shift = np.where(np.isneginf(row_max), 0, row_max)
    a, b = (np.exp(state.row_max - shift) for state in (one, other))
    row_sum = a * one.row_sum + b * other.row_sum
    return Softmax(row_max, row_sum, a[:, None] * one.acc + b[:, None] * other.acc)


def finished(kernel: Kernel, state: Softmax) -> tuple[Array, Array]:
    """What a tile of queries writes: rows of out, and of lse."""
    row_max, row_sum, acc = state
    divisor = np.where(row_sum == 0, 1, row_sum) if kernel.guards_sum else row_sum
    out = acc / divisor[:, None] if kernel.normalised else acc
    return out, (row_max if kernel.max_in_lse else 0) + np.log(row_sum)


# ---- backward ----


def backward(
    question: Question, kernel: Kernel, out: Array, lse: Array, chance: int
) -> dict[str, Array]:
    """delta, dq, dk, dv, in the arithmetic's wide dtype."""
    run = Run(question, kernel, chance)
    if kernel.recompute:
        own_out, own_lse = forward(question, kernel)
        out = own_out if "out" in kernel.recompute else out
        lse = own_lse if "lse" in kernel.recompute else lse
    lse = lse.astype(run.wide) * run.wide.type(kernel.lse_factor)
    delta = preprocess(run, out)
    dq, dk, dv = (np.zeros(a.shape, run.wide) for a in (question.q, question.k, question.v))
    in_gradients = run.scale if kernel.factor_in_gradients else question.scale
    scale_q, scale_k = (run.wide.type(in_gradients**power) for power in kernel.scale_powers)
    for sequence in run.sequences():
        rows = slice(sequence.start_q, sequence.start_q + sequence.seqlen_q)
        visits, (begin, end) = run.visits(sequence), sequence.keys
        if kernel.padding or not kernel.leaked_stored:
            begin, end = max(begin, 0), min(end, sequence.seqlen_k)
        stored = slice(begin - sequence.keys[0], end - sequence.keys[0])
        keys = slice(sequence.start_k + begin, sequence.start_k + end)
        for head in range(question.num_heads_q):
            head_kv = run.head_of_keys(head)
            L, D = lse[head, rows], delta[head, rows]
            dQ, dK, dV = backward_head(run, sequence, visits, head, L, D)
            dq[rows, head] = scale_q * dQ[: sequence.seqlen_q]
            if (
                kernel.kept_head is None
                or head % question.group == kernel.kept_head % question.group
            ):
                dk[keys, head_kv] += scale_k * dK[stored]
                dv[keys, head_kv] += dV[stored]
    return {"delta": delta, "dq": dq, "dk": dk, "dv": dv}


def preprocess(run: Run, out: Array) -> Array:
    """delta: D = rowsum(dO o O) - dL."""
    kernel, question, dO = run.kernel, run.question, run.dout
    out = out.astype(run.wide)
    if kernel.delta == "unmasked":
        out = forward(question, replace(kernel, masked=False))[0]
    elif kernel.delta == "next head":
        out = np.roll(out, -1, axis=1)
    elif kernel.delta == "kv head":
        out = out[:, np.arange(question.num_heads_q) // question.group]
    elif kernel.delta == "next row":
        out = np.concatenate((out[1:], np.zeros_like(out[:1])))
    delta = (dO * out).sum(axis=2).T * (0 if kernel.delta in ("none", "lse alone") else 1)
    if question.dlse is not None and kernel.delta != "none":
        delta = delta + kernel.dlse_sign * question.dlse.astype(run.wide)
    return delta


def backward_head(
    run: Run,
    sequence: Sequence,
    visits: list[tuple[slice, KeyTiles]],
    head: int,
    lse: Array,
    delta: Array,
) -> tuple[Array, Array, Array]:
    """The gradients of one sequence by one query head; dQ and dK still without softmax_scale."""
    kernel, number, head_kv = run.kernel, run.number, run.head_of_keys(head)
    keep = number.narrow if kernel.narrow_sums else lambda sums: sums
    Q = run.queries_of(run.q, sequence, head)
    dO = run.queries_of(run.dout, sequence, head, kernel.past_dout)
    K, V = (run.keys_of(a, sequence, head_kv) for a in (run.k, run.v))
    dQ, dK, dV = (np.zeros_like(a) for a in (Q, K, V))
    L, D = (np.zeros(len(Q), run.wide) for _ in range(2))
    L[: len(lse)], D[: len(lse)] = lse, delta
    L[len(lse) :] = log(max(sequence.seqlen_k, 1))  # queries of 0: uniform over all keys
    for tile, key_tiles in visits:
        if kernel.uniform_dead:
            dead = ~np.concatenate([mask for _, mask in key_tiles], axis=1).any(axis=1)
        for keys, mask in key_tiles:
            P = probabilities(run, run.scores(Q[tile], K[keys], mask), L[tile])
            dP = number.step(dO[tile] @ V[keys].T)
            Z = dP - D[tile, None]
            dS = P * Z if kernel.p_in_ds else np.where(mask, Z, 0)
            if kernel.uniform_dead:
                P[dead] = 1 / len(K)
                dS[dead] = P[dead] * Z[dead] if kernel.uniform_dead == "flows" else 0
            dS, P = number.operand(dS), number.operand(P)
            parts = (
                ("dq", dQ, tile, dS @ K[keys]),
                ("dk", dK, keys, dS.T @ Q[tile]),
                ("dv", dV, keys, P.T @ dO[tile]),
            )
            for name, sums, place, part in parts:
                if name in kernel.dropped and run.chance.random() < 0.15:
                    continue
                sums[place] = keep(part if name in kernel.overwrites else sums[place] + part)
    return dQ, dK, dV


def probabilities(run: Run, S: Array, L: Array) -> Array:
    """P = exp(S - L), with 0 in a row without keys."""
    if run.kernel.guards_lse:
        L = np.where(np.isneginf(L), np.inf, L)
    if not run.kernel.subtracts_max:
        return np.exp(S) / np.exp(L)[:, None]
    return run.number.step(run.exp(S - L[:, None]))


# ---- questions and answers ----


def answers(planted: Planted | None, question: Question, chance: int = 0) -> Answers:
    """out, lse, dq, dk, dv and sometimes delta, by a kernel with this bug, or by a right one.

    The backward pass works with the question's out and lse, or with those that its own forward
    pass gave. ``chance`` numbers the calls: only a race gives other results in another call.
    """
    first, second = (
        Kernel() if planted is None else planted.at(s) for s in ("forward", "backward")
    )
    wide = Arithmetic(question.dtype, "").wide
    computed: Answers = {}
    with np.errstate(all="ignore"):
        asked = _other(question) if first.other_inputs else question
        computed |= _written(asked, first, forward(asked, first), wide)
        if question.dout is None:
            return computed
        asked = _other(question) if second.other_inputs else question
        out, lse = asked.out, asked.lse
        if out is None or lse is None:
            right = first.keeps_right or (second.other_inputs and not first.other_inputs)
            own = _written(asked, Kernel(), forward(asked, Kernel()), wide) if right else computed
            out, lse = own["out"], own["lse"]
        gradients = backward(asked, second, out, lse, chance)
    if second.exchanged:
        one, other = second.exchanged
        gradients[one], gradients[other] = gradients[other], gradients[one]
    for name, array in gradients.items():
        array = second.stores[name](array, name, question) if name in second.stores else array
        computed[name] = array if name == "delta" else array.astype(question.dtype)
    if len(question.q) % 3:
        del computed["delta"]
    return computed


def right_answers(kind: Planted, question: Question) -> Answers:
    """Those of a right implementation, one of RIGHT."""
    return answers(kind, question)


def _written(
    question: Question, kernel: Kernel, results: tuple[Array, Array], wide: np.dtype[Any]
) -> Answers:
    computed = dict(zip(("out", "lse"), results, strict=True))
    for name, store in kernel.stores.items():
        if name in computed:
            computed[name] = store(computed[name], name, question)
    return {"out": computed["out"].astype(question.dtype), "lse": computed["lse"].astype(wide)}


def _other(question: Question) -> Question:
    """The same problem with other numbers in it."""
    rng = np.random.default_rng((29, len(question.q), len(question.k)))
    arrays = {name: getattr(question, name) for name in ("q", "k", "v", "dout", "dlse")}
    drawn = {name: _normal(rng, a.shape, a.dtype) for name, a in arrays.items() if a is not None}
    return replace(question, **drawn, out=None, lse=None)


def showing(
    name: str,
    count: int,
    seed: int,
    drawn: Callable[[np.random.Generator, int], Question],
    shown: Callable[[Question], bool],
) -> Iterator[Question]:
    """The first ``count`` that are ``shown`` of questions ``drawn``, whose number goes with rng."""
    found = 0
    for attempt in counted():
        if found == count:
            return
        if attempt >= 30 * (found + 4):
            raise RuntimeError(f"{name}: shows on no problem")
        rng = np.random.default_rng((seed, crc32(name.encode()), attempt))
        question = drawn(rng, found)
        if shown(question):
            found += 1
            yield question


def problems(planted: Planted, count: int, seed: int) -> Iterator[Question]:
    """``count`` questions on which ``planted`` shows: dtypes in turn, out and lse given or not."""

    def drawn(rng: np.random.Generator, number: int) -> Question:
        turn, place = divmod(number, len(planted.needs.dtypes))
        given = (seed + turn + place) % 2 == 1
        return draw(planted.needs, rng, planted.needs.dtypes[place], given=given)

    def shown(question: Question) -> bool:
        return not planted.bug or shows(planted, question)

    return showing(f"{planted.bug}, {planted.variant}", count, seed, drawn, shown)


def shows(planted: Planted, question: Question) -> bool:
    """Whether the bug changes a result of every stage of its own by more than rounding does."""
    wrong, right = answers(planted, question), answers(None, question)
    names = [name for stage in planted.stages for name in STAGES[stage] if name in right]
    floor = 1e-3 if question.dtype in (FLOAT64, FLOAT32) else float(_eps(question.dtype))
    bound = floor * (1 if question.dtype in (FLOAT64, FLOAT32) else planted.needs.shows)
    return any(difference(wrong[name], right[name]) > bound for name in names)


def difference(wrong: Array, right: Array) -> float:
    """Norm of the difference over the norm of ``right``; inf where shapes, NaN or inf differ."""
    if wrong.shape != right.shape:
        return float("inf")
    wrong, right = wrong.astype(FLOAT64), right.astype(FLOAT64)
    finite = np.isfinite(right)
    same = np.array_equal(wrong[~finite], right[~finite], equal_nan=True)
    if not same or not np.isfinite(wrong[finite]).all():
        return float("inf")
    error, size = (np.linalg.norm(a) for a in (wrong[finite] - right[finite], right[finite]))
    return float(error / size) if size > 0 else float(error > 0)


def _eps(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def draw(needs: Needs, rng: np.random.Generator, dtype: np.dtype[Any], *, given: bool) -> Question:
    """A random problem. ``given``: the backward pass is given the right out and lse."""
    lengths_q, lengths_k = _lengths(needs, rng)
    heads_kv = int(rng.choice(needs.heads_kv))
    heads_q = heads_kv * int(rng.choice(needs.groups))
    dim = int(rng.choice(needs.head_dims))
    dim_v = dim if rng.random() < needs.same_dims else int(rng.choice(needs.head_dims_v))
    past_q, past_k = rng.integers(1, 8, 2) * (rng.random() < needs.past_end)
    rows_q, rows_k = sum(lengths_q) + int(past_q), sum(lengths_k) + int(past_k)
    q, k = (rng.standard_normal(s) for s in ((rows_q, heads_q, dim), (rows_k, heads_kv, dim)))
    softmax_scale = round(rng.uniform(0.1, 0.4), 3) if rng.random() < needs.scaled else None
    if needs.large:
        _enlarge(rng, q, k, dim**-0.5 if softmax_scale is None else softmax_scale)
    window, causal = _window(str(rng.choice(needs.masks)), rng)
    wide = Arithmetic(dtype, "").wide
    question = Question(
        q=q.astype(dtype),
        k=k.astype(dtype),
        v=_normal(rng, (rows_k, heads_kv, dim_v), dtype),
        cu_seqlens_q=np.cumsum([0, *lengths_q], dtype=np.int32),
        cu_seqlens_k=np.cumsum([0, *lengths_k], dtype=np.int32),
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        dout=_normal(rng, (rows_q, heads_q, dim_v), dtype),
        dlse=_normal(rng, (heads_q, rows_q), wide) if rng.random() < needs.dlse else None,
    )
    if not given:
        return question
    right = answers(None, replace(question, dout=None))
    return replace(question, out=right["out"], lse=right["lse"])


def _lengths(needs: Needs, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Of queries and of keys."""
    batch = int(rng.integers(needs.batch[0], needs.batch[1] + 1))
    queries = rng.integers(needs.lengths[0], needs.lengths[1] + 1, batch)
    one = rng.integers(batch)
    if queries.max() <= needs.over:
        queries[one] = needs.over + rng.integers(1, 30)
    kind = str(rng.choice(needs.lengths_k))
    if kind == "more":
        keys = queries + rng.integers(2, 30, batch)
    elif kind == "fewer":
        keys = np.maximum(queries - rng.integers(2, 30, batch), 1)
    elif kind == "any":
        keys = rng.integers(needs.lengths[0], needs.lengths[1] + 1, batch)
        keys[one] = max(keys[one], queries[one]) if needs.over else keys[one]
    else:
        keys = queries
    return [int(n) for n in queries], [int(n) for n in keys]


def _window(mask: str, rng: np.random.Generator) -> tuple[tuple[int, int], bool]:
    left, right = int(rng.integers(2, 20)), int(rng.integers(2, 10))
    windows = {"window": (left, right), "left": (left, -1), "right": (-1, right)}
    windows["causal window"] = (left, -1)
    return windows.get(mask, (-1, -1)), mask in _CAUSAL


def _enlarge(rng: np.random.Generator, q: Array, k: Array, scale: float) -> None:
    """Some rows of q, and all keys, get a common direction: scores around 130, and around -130."""
    direction = rng.standard_normal(q.shape[2])
    direction /= np.linalg.norm(direction)
    k += 4 * direction
    rows = rng.random(q.shape[:2]) < 0.2
    signs = rng.choice((-1, 1), int(rows.sum()))
    q[rows] += 130 / (4 * scale) * signs[:, None] * direction


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return rng.standard_normal(shape).astype(dtype)
