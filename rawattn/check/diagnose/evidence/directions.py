"""Tangents and second derivatives are sums over the directions: of which are they wrong?"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.precision import eps_of, finite

NAMES = ("tq", "tk", "tv", "tblock_scale", "tsinks")
FAR = 64  # times the dtype's eps: what is wrong


def said(
    question: Question,
    stage: str,
    names: Sequence[str],
    call: Callable[[Question], Answers] | None,
) -> str:
    """In words, where some directions are wrong and not all; "" where that is not known."""
    there = {n: x for n in NAMES if (x := getattr(question, n)) is not None and np.any(x)}
    wrong, whole = {name: tuple(names) for name in there}, _right(question, stage)
    for name in there if len(there) > 1 else ():
        if call is None:
            return ""
        zeros = {other: np.zeros_like(x) for other, x in there.items() if other != name}
        asked = replace(question, **zeros)
        found, right = call(asked), _right(asked, stage)
        off = (n for n in names if n in found and _far(found[n], right[n], whole[n]))
        wrong[name] = tuple(off)
    of = {name: tensors for name, tensors in wrong.items() if tensors}
    if len(of) == len(there) > 1:
        return ""
    prefix = "t" if stage == "jvp" else "dd"
    given = {name.replace("t", prefix, 1): ", ".join(tensors) for name, tensors in of.items()}
    return "; ".join(f"where {name} alone is given: {tensors}" for name, tensors in given.items())


def _right(question: Question, stage: str) -> Answers:
    return solve(question, stage, given=question.passed if stage == "second" else None)


def _far(found: np.ndarray, right: np.ndarray, whole: np.ndarray) -> bool:
    with np.errstate(invalid="ignore"):
        off, size = (np.abs(finite(x)).max(initial=0.0) for x in (found - right, whole))
    return bool(off > FAR * max(eps_of(found), 1e-6) * size)
