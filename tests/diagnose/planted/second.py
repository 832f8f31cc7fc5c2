"""Bugs of second derivatives and of forward mode: a term left out, scaled, or held constant, and
what they read in the place of a direction, a row term or a head."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.diagnose.hooks import (
    STAGES_OF,
    Hooks,
    as_if,
    by,
    change,
    kernel,
    local,
    of_each,
)
from tests.diagnose.plain import Array, Head, Planted, answers
from tests.diagnose.problems import Needs, problems

__all__ = ["PLANTED", "answers", "problems"]
LOG2_E = float(np.log2(np.e))
ZERO = by(0)


def power(number: int) -> Any:
    """softmax_scale so often in front of what has it once."""
    return by(lambda c: c.question.scale ** (number - 1))


def right_W(c: Head, W: Array) -> Array:
    """Of the right tO, whatever tO is."""
    right = (c.P * c.E) @ c.V + c.P @ c.tV - (c.P * c.E).sum(1, keepdims=True) * c.O
    return (c.dO * right).sum(axis=1, keepdims=True)


def unmasked(c: Head, P: Array) -> Array:
    L = c.row("lse")
    return np.where(np.isneginf(L), 0, np.exp(c.bare - L))


def masked(c: Head, P: Array) -> Array:
    return np.exp(c.S - np.where(np.isneginf(c.L), np.inf, c.L))


def over_all(c: Head, P: Array) -> Array:
    weights = np.exp(c.bare - c.bare.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def group(kept: int) -> Hooks:
    often = {"often": lambda c, x: x * (c.h % c.group == kept % c.group)}
    return often | {"only": ("gk", "gv")}


def unread(*names: str) -> Hooks:
    return change(lambda x, name, question: 0 * x, *names, at="arrays")


def exchanged(*order: str) -> Hooks:
    """The directions that stand in the place of tq, tk and tv."""
    read = dict(zip(("tq", "tk", "tv"), order, strict=True))
    return {"arrays": lambda run, a: a | {name: a[other] for name, other in read.items()}}


def planted(
    bug: str, stages: str, needs: Mapping[str, Any], *variants: tuple[Any, ...]
) -> list[Planted]:
    """``variants``: in words, what is wrong, and classes that are the same function."""
    wanted = Needs(**(_USUAL | needs))
    gives = ("second", "jvp")
    return [
        Planted(bug, words, STAGES_OF[stages], kernel(wrong), wanted, tuple(also), gives)
        for words, wrong, *also in variants
    ]


_USUAL = {
    "lengths": (1, 70),
    "over": 19,
    "batch": (2, 4),
    "lengths_k": ("equal", "equal", "any"),
    "groups": (1, 2, 4),
    "heads_kv": (1, 2),
    "head_dims": (16, 24, 32, 40, 48),
    "past_end": 0.0,
    "moved": 0.15,
    "least": 0.03,
}
_NO_E = of_each(ZERO, "e in tout", "e in dS", "e in gv")
_GROUPED, _DLSE, _WHOLE = {"groups": (2, 4)}, {"dlse": 1.0}, {"moved": 0.0}
_MASKED = {"masks": ("causal", "window", "causal window"), "lengths_k": ("equal", "more")}
_SEVERAL = _WHOLE | {"heads_kv": (2, 3)}
_ALIKE = _WHOLE | {"same_dims": 1.0, "groups": (1,), "lengths_k": ("equal",)}
_W = {"W": right_W}
_TANGENT = [
    ("E without s", {"E": power(0)}),
    ("E with s twice", {"E": power(2)}),
    ("E in units of base 2", {"E": by(LOG2_E)}),
]
_STILL = {"sum e": lambda c, x: c.old + c.part}
_32 = {"tile_m": 32}

PLANTED = (
    *planted(
        "second-frozen-p",
        *("s", {}),
        ("dS' = 0", of_each(ZERO, "tP Z", "P tZ")),
        ("P' = 0 in dS'", {"tP Z": ZERO}),
        ("P' = 0 in dS' and in gv", of_each(ZERO, "tP Z", "tP of gv")),
        ("P' = 0 everywhere, E = 0", {"E": ZERO}),
    ),
    *planted(
        "second-frozen-delta",
        *("s", {}),
        ("D detached", _NO_E | _W),
        ("out detached", of_each(ZERO, "e in dS", "e in gv"), "tangent-e-omitted"),
        ("W = 0, no e in ddout", of_each(ZERO, "W", "e in tout")),
    ),
    *planted("second-w-omitted", "s", {}, ("W = 0", {"W": ZERO}, "second-frozen-delta")),
    *planted(
        "tangent-e-omitted",
        *("s", {}),
        ("in ddout and W", {"e in tout": ZERO}),
        ("in ddout", {"e in tout": ZERO} | _W),
        ("in dS'", {"e in dS": ZERO}),
        ("in gv", {"e in gv": ZERO}),
        ("all but ddlse", _NO_E),
        ("everywhere", _NO_E | {"e in tlse": ZERO}),
    ),
    *planted(
        "tangent-scale",
        *("s", {}),
        *_TANGENT,
        ("gq without s", {"gq": power(0)}),
        ("gk without s", {"gk": power(0)}),
        ("gq and gk without s", of_each(power(0), "gq", "gk")),
        ("gq and gk with s twice", of_each(power(2), "gq", "gk")),
    ),
    *planted(
        "tangent-scale",
        *("s", _WHOLE),
        ("dS ddk without s, second", {"dS tK": power(0)}),
        ("dS'^T q with s twice, second", {"tdS Q": power(2)}),
    ),
    *planted(
        "second-direct-term-dropped",
        *("s", {}),
        ("dS ddk of gq", {"dS tK": ZERO}),
        ("dS^T ddq of gk", {"dS tQ": ZERO}),
        ("both", of_each(ZERO, "dS tK", "dS tQ")),
    ),
    *planted(
        "gqa-group-not-summed", "s", _GROUPED, ("last head", group(-1)), ("first head", group(0))
    ),
    *planted(
        "lse-gradient-dropped",
        *("s", _DLSE),
        ("D without dlse", unread("dlse")),
        ("both", unread("dlse") | {"e in tlse": ZERO}),
    ),
    *planted(
        "value-term-dropped",
        *("s", {}),
        ("P ddv of ddout and W", {"P tV": ZERO}),
        ("P ddv of ddout", {"P tV": ZERO} | _W),
        ("dO ddv^T of Z'", {"tdP": ZERO}),
        ("all of ddv", of_each(ZERO, "P tV", "tdP")),
    ),
    *planted(
        "mask-missing-in-backward",
        *("s", _MASKED),
        *(
            (f"{passes} pass{more}, {words}", {"P": how, "P in ddout": first or how})
            for passes, more, first in (
                ("second", "", masked),
                ("both", "es", None),
            )
            for words, how in (("exp(S - L)", unmasked), ("softmax over all", over_all))
        ),
    ),
    *planted("tangent-e-omitted", "j", {}, ("in tout", {"e in tout": ZERO})),
    *planted("value-term-dropped", "j", {}, ("P tv", {"P tV": ZERO})),
    *planted("tangent-scale", "j", {}, *_TANGENT),
    *planted("tangent-lse-missing", "j", {}, ("tlse = 0", {"e in tlse": ZERO})),
    *planted("tangent-lse-missing", "s", _DLSE, ("ddlse = 0", {"e in tlse": ZERO})),
    *planted(
        "direction-ignored",
        *("s", {}),
        ("ddq", unread("tq")),
        ("ddk", unread("tk")),
        ("ddv", unread("tv"), "value-term-dropped"),
        ("all but ddv", unread("tq", "tk")),
        ("all but ddk", unread("tq", "tv")),
        ("all", unread("tq", "tk", "tv")),
    ),
    *planted(
        "direction-ignored",
        *("j", {}),
        ("tq", unread("tq"), "second-frozen-p"),
        ("tk", unread("tk"), "second-frozen-p"),
        ("tv", unread("tv"), "value-term-dropped"),
        ("all but tv", unread("tq", "tk"), "second-frozen-p"),
        ("all but tq", unread("tk", "tv")),
    ),
    *planted(
        "direction-ignored",
        *("sj", {}),
        ("of v", unread("tv"), "value-term-dropped"),
        ("of k", unread("tk")),
    ),
    # ---- what is read ----
    *planted(
        "no-rescale",
        *("j", {}),
        ("row sum, tile of 16, jvp", _STILL | _32),
        ("row sum, tile of 32, from the last, jvp", _STILL | {"tile_n": 32, "order": "descending"}),
        ("tout, tile of 16, jvp", {"sum tout": _STILL["sum e"]} | _32),
    ),
    *planted(
        "tile-overwrites",
        *("s", _WHOLE),
        (
            "gq, second",
            {"often": lambda c, x: x * (c.j >= (c.m - 1) // 16 * 16), "only": ("gq",)},
            "pairs-dropped",  # in a window, where the last tile is not the last that is seen
        ),
        (
            "gk, second",
            {"often": lambda c, x: x * (c.i >= (c.n - 1) // 16 * 16), "only": ("gk",)},
            *("pairs-dropped", "rows-not-written"),
        ),
    ),
    *planted(
        "input-layout",
        *("sj", {}),
        ("tk and tv without offset, second jvp", change(local, "tk", "tv", at="arrays")),
        ("tq without offset, second jvp", change(local, "tq", at="arrays")),
    ),
    *planted(
        "input-layout",
        *("sj", _SEVERAL),
        ("tk turned, second jvp", change(as_if((1, 0, 2)), "tk", at="arrays")),
    ),
    *planted(
        "arguments-swapped",
        *("sj", _ALIKE),
        ("tk and tv, second jvp", exchanged("tq", "tv", "tk")),
        ("tq and tk, second jvp", exchanged("tk", "tq", "tv")),
    ),
    *planted(
        "arguments-swapped",
        *("s", _WHOLE),
        ("ddout for dout in gv, second", {"dO of gv": lambda c, x: c.tO}),
        ("k for ddk in gq, second", {"tK of gq": lambda c, x: c.K}),
    ),
    *planted(
        "statistics-misplaced",
        *("s", _SEVERAL),
        (
            "D, heads last, second",
            change(
                lambda x, name, question: np.ascontiguousarray(x.T).reshape(x.shape),
                *("delta",),
                at="rows of second",
            ),
        ),
    ),
)
