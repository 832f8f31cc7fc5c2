"""Tangents and second derivatives are sums over the directions: of which are they wrong?"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.precision import eps_of

NAMES = ("tq", "tk", "tv", "tblock_scale", "tsinks")
FAR = 64  # times the dtype's eps: what is wrong
ALONE = {  # the terms of a direction, where these results alone are wrong
    ("tq", ("gk",)): "dS^T ddq of gk",
    ("tk", ("gq",)): "dS ddk of gq",
    ("tv", ("gq", "gk")): "dout ddv^T and W of dS'",
    ("tv", ("ddout",)): "P ddv of ddout",
    ("tv", ("tout",)): "P tv of tout",
}
TERMS = {
    **{"tq": "{t}q k^T of E", "tk": "q {t}k^T of E", "tv": "P {t}v and what is made of it"},
    **{"tblock_scale": "{t}block_scale in E", "tsinks": "{t}sinks in e"},
}


def said(
    question: Question,
    stage: str,
    names: Sequence[str],
    call: Callable[[Question], Answers] | None,
) -> str:
    """In words, where some directions are wrong and not all; "" where that is not known."""
    there = {n: x for n in NAMES if (x := getattr(question, n)) is not None and np.any(x)}
    wrong: dict[str, tuple[str, ...]] = dict.fromkeys(there, tuple(names))
    if len(there) > 1:
        if call is None:
            return ""
        whole = _right(question, stage)
        for name in there:
            zeros = {other: np.zeros_like(x) for other, x in there.items() if other != name}
            asked = replace(question, **zeros)
            found, right = call(asked), _right(asked, stage)
            off = (n for n in names if n in found and _far(found[n], right[n], whole[n]))
            wrong[name] = tuple(off)
        wrong = {name: of for name, of in wrong.items() if of}
    if not wrong or len(wrong) == len(there) > 1:
        return ""
    prefix = "t" if stage == "jvp" else "dd"
    terms = {name: f"{TERMS[name].format(t=prefix)} ({', '.join(wrong[name])})" for name in wrong}
    told = "; ".join(ALONE.get((name, of), terms[name]) for name, of in wrong.items())
    alone = " or ".join(f"{name.replace('t', prefix, 1)} alone" for name in wrong)
    return f"where {alone} is given: {told}"


def _right(question: Question, stage: str) -> Answers:
    return solve(question, stage, given=question.passed if stage == "second" else None)


def _far(found: np.ndarray, right: np.ndarray, whole: np.ndarray) -> bool:
    finite = np.isfinite(right) & np.isfinite(found)
    off, size = (np.abs(np.where(finite, x, 0.0)).max(initial=0.0) for x in (found - right, whole))
    return bool(off > FAR * max(eps_of(found), 1e-6) * size)
