"""Bugs of a softcap, of sinks and of keys that are not in use."""

from dataclasses import replace
from typing import Any

import numpy as np

from tests.diagnose.hooks import by
from tests.diagnose.plain import Head, answers
from tests.diagnose.planted.softmax import attended
from tests.diagnose.problems import problems
from tests.diagnose.table import Table, plants

__all__ = ["PLANTED", "answers", "problems"]


def raised(c: Head, right: Any) -> Any:
    """L and O with exp(sink) in a row sum that is relative to the maximum."""
    L = np.logaddexp(c.bare_L, c.sink + c.top)
    return L, c.bare_O * np.exp(c.bare_L - L)


_USUAL: dict[str, Any] = {
    "masks": ("causal", "window", "open"),
    **{"lengths": (8, 30), "batch": (3, 3), "lengths_k": ("equal", "any"), "given": False},
    **{"heads_kv": (2,), "groups": (1, 2, 3), "head_dims": (16,), "same_dims": 1.0},
    **{"scaled": 0.0, "dlse": 1.0, "past_end": 0.0, "moved": 0.0},
}
_UNCAPPED = {"cap": lambda c, x: (c.Y, 1.0, 0.0)}
_NO_SLOPE = {"cap": lambda c, x: (x[0], 1.0, 0.0)}
_TANH_TWICE = {"cap": lambda c, x: (x[0], 1 - np.tanh(x[0] / c.question.softcap) ** 2, 0.0)}
_BEFORE_IT = {"cap": lambda c, x: (x[0], 1 - (c.Y / c.question.softcap) ** 2, 0.0)}
_TWICE_IN_DK = {"cap": lambda c, x: (x[0], x[1] ** 2, x[2]), "only": ("dk",)}
_NO_SINKS = {"sink": lambda c, x: None}
_ALL_KEYS = {"used": lambda c, x: c.given}
_OF_GROUP = {"sink": lambda c, x: c.question.sinks[c.h // c.group]}
_NO_TSINKS = {"question": lambda run, q: replace(q, tsinks=0 * q.tsinks)}


def _always(option: str) -> dict[str, Any]:
    return {"options": {"softcap": 0.5, "sinks": 0.5, "seqused": 0.5} | {option: 1.0}}


_NEEDS = {
    **dict.fromkeys(("softcap-dropped", "softcap-slope-omitted"), _always("softcap")),
    **dict.fromkeys(("sinks-dropped", "sinks-misplaced", "sinks-gradient"), _always("sinks")),
    "seqused-ignored": _always("seqused") | {"masks": ("causal", "window")},
}
_TABLE: Table = (
    ("softcap-dropped: everywhere", "fbsj", _UNCAPPED),
    ("softcap-dropped: forward", "f", _UNCAPPED),
    ("softcap-dropped: backward", "b", _UNCAPPED),
    ("softcap-dropped: beyond first order", "sj", _UNCAPPED),
    ("softcap-slope-omitted: backward", "b", _NO_SLOPE),
    ("softcap-slope-omitted: square", "b", {"cap": lambda c, x: (x[0], 1 - x[0] ** 2, 0.0)}),
    ("softcap-slope-omitted: of the capped scores", "b", _TANH_TWICE),
    ("softcap-slope-omitted: twice in dk", "b", _TWICE_IN_DK),
    ("softcap-slope-omitted: tangent", "j", _NO_SLOPE),
    ("softcap-slope-omitted: second", "s", _NO_SLOPE),
    ("softcap-slope-omitted: its own one", "s", {"cap": lambda c, x: (*x[:2], 0.0)}),
    ("sinks-dropped: forward", "f", _NO_SINKS),
    ("sinks-dropped: tangent", "j", _NO_SINKS),
    ("sinks-dropped: lse", "f", {"softmax": lambda c, x: (c.bare_L, x[1])}),
    ("sinks-dropped: out", "f", {"softmax": lambda c, x: (x[0], c.bare_O)}),
    ("sinks-dropped: backward", "b", {"L": lambda c, L: attended(c.S, c.V)[0]}),
    ("sinks-misplaced: of the key/value head", "f", _OF_GROUP),
    ("sinks-misplaced: of the next head", "f", {"sink": lambda c, x: c.question.sinks[c.h - 1]}),
    ("sinks-misplaced: not relative to the maximum", "f", {"softmax": raised}),
    ("sinks-gradient: sign", "b", {"dsinks": by(-1)}),
    ("sinks-gradient: zero", "bs", {"dsinks": by(0), "gsinks": by(0)}),
    ("sinks-gradient: exp2", "b", {"D of dsinks": lambda c, D: D * c.P0 ** (np.log(2) - 1)}),
    ("sinks-gradient: no dlse", "b", {"D of dsinks": lambda c, D: D + c.dL}),
    ("direction-ignored: tsinks", "sj", _NO_TSINKS, _always("sinks")),
    ("seqused-ignored: everywhere", "fbsj", _ALL_KEYS),
    ("seqused-ignored: forward", "f", _ALL_KEYS),
    ("seqused-ignored: backward", "b", _ALL_KEYS),
    ("seqused-ignored: diagonal", "fbsj", {"p": lambda c, p: c.i + c.given - c.n}),
    ("softcap-slope-omitted: of the scores before it", "b", _BEFORE_IT),
)
PLANTED = plants(_TABLE, lambda on: _USUAL, _NEEDS, every={"own_beyond": True})
