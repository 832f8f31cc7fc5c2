"""Bugs of a softcap, of sinks and of keys that are not in use."""

from typing import Any

import numpy as np

from tests.diagnose.hooks import STAGES_OF, Hooks, by, kernel
from tests.diagnose.plain import Head, Planted, answers
from tests.diagnose.problems import Needs, problems

__all__ = ["PLANTED", "answers", "problems"]


def of_seen(c: Head, L: Any) -> Any:
    """lse without a sink, of the scores."""
    top = np.where(np.isneginf(c.S), -np.inf, c.S).max(axis=1, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), 0, top)
    return top + np.log(np.exp(c.S - top).sum(axis=1, keepdims=True))


def raised(c: Head, right: Any) -> Any:
    """L and O with exp(sink) in a row sum that is relative to the maximum."""
    L = np.logaddexp(c.bare_L, c.sink + c.top)
    return L, c.bare_O * np.exp(c.bare_L - L)


def planted(bug: str, *variants: tuple[str, str, Hooks]) -> list[Planted]:
    there = {"softcap": 0.5, "sinks": 0.5, "seqused": 0.5} | {bug.partition("-")[0]: 1.0}
    masks = ("causal", "window", "open")[: 2 if bug == "seqused-ignored" else 3]
    usual: dict[str, Any] = {"lengths": (8, 30), "batch": (3, 3), "lengths_k": ("equal", "any")}
    heads = {"heads_kv": (2,), "groups": (1, 2, 3), "head_dims": (16,), "same_dims": 1.0}
    rest = {"scaled": 0.0, "dlse": 1.0, "past_end": 0.0, "moved": 0.0, "given": False}
    needs = Needs(masks=masks, options=there, **usual | heads | rest)
    return [
        Planted(bug, words, STAGES_OF[on], kernel(wrong | _OWN), needs, otherwise=kernel(_OWN))
        for words, on, wrong in variants
    ]


_OWN = {"own_beyond": True}
_UNCAPPED = {"cap": lambda c, x: (c.Y, 1.0, 0.0)}
_NO_SLOPE = {"cap": lambda c, x: (x[0], 1.0, 0.0)}
_NO_SINKS = {"sink": lambda c, x: None}
_ALL_KEYS = {"used": lambda c, x: c.given}

PLANTED: tuple[Planted, ...] = (
    *planted(
        "softcap-dropped",
        ("everywhere", "fbsj", _UNCAPPED),
        ("forward", "f", _UNCAPPED),
        ("backward", "b", _UNCAPPED),
        ("beyond first order", "sj", _UNCAPPED),
    ),
    *planted(
        "softcap-slope-omitted",
        ("backward", "b", _NO_SLOPE),
        ("square", "b", {"cap": lambda c, x: (x[0], 1 - x[0] ** 2, 0.0)}),
        ("tangent", "j", _NO_SLOPE),
        ("second", "s", _NO_SLOPE),
        ("its own one", "s", {"cap": lambda c, x: (*x[:2], 0.0)}),
    ),
    *planted(
        "sinks-dropped",
        ("forward", "f", _NO_SINKS),
        ("tangent", "j", _NO_SINKS),
        ("lse", "f", {"softmax": lambda c, x: (c.bare_L, x[1])}),
        ("out", "f", {"softmax": lambda c, x: (x[0], c.bare_O)}),
        ("backward", "b", {"L": of_seen}),
    ),
    *planted(
        "sinks-misplaced",
        ("of the key/value head", "f", {"sink": lambda c, x: c.question.sinks[c.h // c.group]}),
        ("of the next head", "f", {"sink": lambda c, x: c.question.sinks[c.h - 1]}),
        ("not relative to the maximum", "f", {"softmax": raised}),
    ),
    *planted(
        "sinks-gradient",
        ("sign", "b", {"dsinks": by(-1)}),
        ("zero", "bs", {"dsinks": by(0), "gsinks": by(0)}),
        ("no dlse", "b", {"D of dsinks": lambda c, D: D + c.dL}),
    ),
    *planted(
        "seqused-ignored",
        ("everywhere", "fbsj", _ALL_KEYS),
        ("forward", "f", _ALL_KEYS),
        ("backward", "b", _ALL_KEYS),
        ("diagonal", "fbsj", {"p": lambda c, p: c.i + c.given - c.n}),
    ),
)
