"""Bugs of second derivatives and of forward mode: a term left out, scaled, or held constant, and
what they read in the place of a direction, a row term or a head."""

from typing import Any

import numpy as np

from tests.diagnose.hooks import by, of_each, of_group, power
from tests.diagnose.plain import Array, Head, answers
from tests.diagnose.problems import problems
from tests.diagnose.stores import as_if, change, local, read_as, written_as
from tests.diagnose.table import FEW, Hooks, Table, plants

__all__ = ["PLANTED", "answers", "problems"]
LOG2_E = float(np.log2(np.e))
ZERO = by(0)


def right_tO(c: Head) -> Array:
    """Whatever tO is."""
    return (c.P * c.E) @ c.V + c.P @ c.tV - (c.P * c.E).sum(1, keepdims=True) * c.O


def right_W(c: Head, W: Array) -> Array:
    return (c.dO * right_tO(c)).sum(axis=1, keepdims=True)


def detached_W(c: Head, W: Array) -> Array:
    """What the softmax takes away where D, with dlse in it, is a constant."""
    return right_W(c, W) + (c.P * c.E).sum(1, keepdims=True) * c.row("dlse")


def W_of_out(c: Head, W: Array) -> Array:
    return (c.O * right_tO(c)).sum(axis=1, keepdims=True)


def unmasked(c: Head, P: Array) -> Array:
    L = c.row("lse")
    return np.where(np.isneginf(L), 0, np.exp(c.bare - L))


def over_all(c: Head, P: Array) -> Array:
    weights = np.exp(c.bare - c.bare.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def before(of: Any, *names: str) -> Hooks:
    """Of what both passes read."""
    return change(of, *names, at="arrays")


def between(of: Any, *names: str) -> Hooks:
    """Of what the second pass reads alone."""
    return change(of, *names, at="rows of second")


def unread(*names: str) -> Hooks:
    return before(lambda x, name, question: 0 * x, *names)


_USUAL = FEW | {"lengths": (1, 70), "over": 19, "batch": (2, 4), "groups": (1, 2, 4), "moved": 0.15}
_USUAL |= {"lengths_k": ("equal", "equal", "any"), "head_dims": (16, 24, 32, 40, 48)}
_NO_E = of_each(ZERO, "e in tout", "e in dS", "e in gv")
_GROUPED, _WHOLE = {"groups": (2, 4)}, {"moved": 0.0}
_MASKED = {"masks": ("causal", "window", "causal window"), "lengths_k": ("equal", "more")}
_SEVERAL = _WHOLE | {"heads_kv": (2, 3)}
_ALIKE = _WHOLE | {"same_dims": 1.0, "groups": (1,), "lengths_k": ("equal",)}
_TK_AND_TV, _TQ_AND_TK = read_as("arrays", tk="tv", tv="tk"), read_as("arrays", tq="tk", tk="tq")
_W = {"W": right_W}
_NEEDS = {
    "gqa-group-not-summed": _GROUPED,
    "lse-gradient-dropped": {"dlse": 1.0},
    "mask-missing-in-backward": _MASKED,
    "tile-overwrites": _WHOLE,
    "statistics-misplaced": _SEVERAL,
}
_PASSES_OF_E = ("e in dS", "e in gv")
_OUT_HELD = of_each(ZERO, *_PASSES_OF_E)
_TO_IN_GV = {"dO of gv": lambda c, x: c.tO}
_PASSES = ("P", "P in ddout")
_OVER_ALL = of_each(over_all, *_PASSES)
_LAST_KEYS = {"often": lambda c, x: x * (c.j >= (c.m - 1) // 16 * 16), "only": ("gq",)}
_LAST_QUERIES = {"often": lambda c, x: x * (c.i >= (c.n - 1) // 16 * 16), "only": ("gk",)}
_STILL = {"sum e": lambda c, x: c.old + c.part}
_BY_REMAINDER = {"tK": lambda c, x: c.read("tk", c.h % c.question.num_heads_kv)}
_DDV_BY_REMAINDER = {"tV": lambda c, x: c.read("tv", c.h % c.question.num_heads_kv)}
_FIRST_KEYS = {"K of gq": lambda c, x: c.read("k", 0)}
_8_BEFORE = lambda c, x: x[np.arange(len(x)) & ~8]  # noqa: E731
_LAST_TV = {"P tV": lambda c, x: x * (c.place == len(c.loop) - 1)}
_FIRST_PE = {"sum e": lambda c, x: x if c.place == 0 else c.old * c.factor}
_WHOLE_TILES = {"E": lambda c, x: x * (c.j < c.m // 16 * 16)}
_LAST_TDS = {"tdS of gq": lambda c, x: x * (c.j >= (c.m - 1) // 16 * 16)}
_32, _DOWN = {"tile_m": 32}, {"tile_n": 32, "order": "descending"}

_TABLE: Table = (
    ("second-frozen-p: dS' = 0", "s", of_each(ZERO, "tP Z", "P tZ")),
    ("second-frozen-p: P' = 0 in dS'", "s", {"tP Z": ZERO}),
    ("second-frozen-p: P' = 0 in dS' and in gv", "s", of_each(ZERO, "tP Z", "tP of gv")),
    ("second-frozen-p: P' = 0 everywhere, E = 0", "s", {"E": ZERO}),
    ("second-frozen-delta: D detached", "s", _NO_E | {"W": detached_W}),
    ("tangent-e-omitted or second-frozen-delta: all but ddlse and W", "s", _NO_E | _W),
    ("second-frozen-delta or tangent-e-omitted: out detached", "s", _OUT_HELD),
    ("second-frozen-delta: W = 0, no e in ddout", "s", of_each(ZERO, "W", "e in tout")),
    ("second-w-omitted or second-frozen-delta: W = 0", "s", {"W": ZERO}),
    ("tangent-e-omitted: in ddout and W", "s", {"e in tout": ZERO}),
    ("tangent-e-omitted: in ddout", "s", {"e in tout": ZERO} | _W),
    ("tangent-e-omitted: in dS'", "s", {"e in dS": ZERO}),
    ("tangent-e-omitted: in gv", "s", {"e in gv": ZERO}),
    ("tangent-e-omitted: all but ddlse", "s", _NO_E),
    ("tangent-scale: E without s", "s", {"E": power(0)}),
    ("tangent-scale: E with s twice", "s", {"E": power(2)}),
    ("tangent-scale: E in units of base 2", "s", {"E": by(LOG2_E)}),
    ("tangent-scale: gq without s", "s", {"gq": power(0)}),
    ("tangent-scale: gk without s", "s", {"gk": power(0)}),
    ("tangent-scale: dS ddk without s, second", "s", {"dS tK": power(0)}, _WHOLE),
    ("tangent-scale: dS'^T q with s twice, second", "s", {"tdS Q": power(2)}, _WHOLE),
    ("second-term-dropped: dS ddk of gq", "s", {"dS tK": ZERO}),
    ("second-term-dropped: dS^T ddq of gk", "s", {"dS tQ": ZERO}),
    ("second-term-dropped: dS^T ddq of gk, the other sign", "s", {"dS tQ": by(-1)}),
    ("second-term-dropped: dS ddk and dS^T ddq", "s", of_each(ZERO, "dS tK", "dS tQ")),
    ("gqa-group-not-summed: last head", "s", of_group(-1, "gk", "gv")),
    ("gqa-group-not-summed: first head", "s", of_group(0, "gk", "gv")),
    ("lse-gradient-dropped: D without dlse", "s", unread("dlse")),
    ("tangent-lse-missing: ddlse = 0", "s", {"e in tlse": ZERO}),
    ("second-term-dropped: P ddv of ddout and W", "s", {"P tV": ZERO}),
    ("second-term-dropped: P ddv of ddout", "s", {"P tV": ZERO} | _W),
    ("second-term-dropped: dO ddv^T of Z'", "s", {"tdP": ZERO}),
    ("mask-missing-in-backward: both passes, exp(S - L)", "s", of_each(unmasked, *_PASSES)),
    ("mask-missing-in-backward: both passes, softmax over all", "s", _OVER_ALL),
    ("tangent-e-omitted: in tout", "j", {"e in tout": ZERO}),
    ("second-term-dropped: P tv", "j", {"P tV": ZERO}),
    ("tangent-scale: E without s", "j", {"E": power(0)}),
    ("tangent-scale: E with s twice", "j", {"E": power(2)}),
    ("tangent-scale: E in units of base 2", "j", {"E": by(LOG2_E)}),
    ("tangent-lse-missing: tlse = 0", "j", {"e in tlse": ZERO}),
    ("direction-ignored: ddq", "s", unread("tq")),
    ("direction-ignored: ddk", "s", unread("tk")),
    ("direction-ignored or second-term-dropped: ddv", "s", unread("tv")),
    ("direction-ignored: all", "s", unread("tq", "tk", "tv")),
    ("direction-ignored or second-frozen-p: tq", "j", unread("tq")),
    ("direction-ignored or second-term-dropped: tv", "j", unread("tv")),
    ("direction-ignored or second-term-dropped: of v", "sj", unread("tv")),
    # ---- what is read ----
    ("no-rescale: row sum, tile of 16, jvp", "j", _STILL | _32),
    ("no-rescale: row sum, tile of 32, from the last, jvp", "j", _STILL | _DOWN),
    ("no-rescale: tout, tile of 16, jvp", "j", {"sum tout": _STILL["sum e"]} | _32),
    ("tile-overwrites or pairs-dropped or rows-not-written: gq, second", "s", _LAST_KEYS),
    ("tile-overwrites or pairs-dropped or rows-not-written: gk, second", "s", _LAST_QUERIES),
    ("input-layout or offsets-shifted: tk and tv without offset", "sj", before(local, "tk", "tv")),
    ("input-layout: tk turned, second jvp", "sj", before(as_if((1, 0, 2)), "tk"), _SEVERAL),
    ("arguments-swapped: tk and tv, second jvp", "sj", _TK_AND_TV, _ALIKE),
    ("arguments-swapped: tq and tk, second jvp", "sj", _TQ_AND_TK, _ALIKE),
    ("arguments-swapped: ddout for dout in gv, second", "s", _TO_IN_GV, _WHOLE),
    ("arguments-swapped: out for dout in W, second", "s", {"W": W_of_out}, _WHOLE),
    ("arguments-swapped: k for ddk in gq, second", "s", {"tK of gq": lambda c, x: c.K}, _WHOLE),
    ("gqa-head-map: tk of h % num_heads_kv, jvp", "j", _BY_REMAINDER, _SEVERAL | _GROUPED),
    ("gqa-head-map: ddv of h % num_heads_kv", "s", _DDV_BY_REMAINDER, _SEVERAL | _GROUPED),
    ("gqa-head-map: k of the first head in gq", "s", _FIRST_KEYS, _SEVERAL),
    ("tile-overwrites or tile-skipped: P tv, last, jvp", "j", _LAST_TV, _WHOLE),
    ("tile-overwrites or tile-skipped: P o E of tlse, first, jvp", "j", _FIRST_PE, _WHOLE),
    ("tail-tile-dropped or tile-skipped: P o E, jvp", "j", _WHOLE_TILES, _WHOLE),
    ("tile-overwrites or tile-skipped: dS' k of gq, last", "s", _LAST_TDS),
    ("statistics-misplaced: W, heads last", "s", between(written_as((1, 0)), "W")),
    ("statistics-misplaced: D, heads last, second", "s", between(written_as((1, 0)), "delta")),
)
PLANTED = plants(_TABLE, lambda on: _USUAL, _NEEDS, gives=("second", "jvp"))
