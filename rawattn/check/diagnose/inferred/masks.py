"""Has one of the backward kernels another mask than the others? Tried, and planted where it fits.

Kernels that compute dq alone, or dk and dv alone, have masks of their own: a bug in one of them
leaves the other gradients right.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from rawattn.check.diagnose.catalogue.masks import bounds, distances, within
from rawattn.check.diagnose.engine.attention import STEPS, Bug, Context, Floats, Step, changed
from rawattn.check.diagnose.engine.question import OF_KEYS, Answers, Question
from rawattn.check.diagnose.inferred.tile_pairs import WEIGHTS, found_in
from rawattn.reference.dense import dead_to_inf

FITS = 0.1  # of what is wrong may be left on the view that is looked at
Window = tuple[float, float, bool]  # left, right, and whether the diagonal begins at the first key


def bugs(
    question: Question, answers: Answers, contexts: Sequence[Context], wrong: frozenset[str]
) -> Iterator[Bug]:
    """Bugs of the mask in those kernels alone whose gradients are ``wrong``."""
    if question.sparse or {"dq", "dk", "dv"} <= wrong:
        return
    names = sorted(wrong & {"dq", "dk", "dv"})

    def error(c: Context, window: Window | None) -> float:
        other = c if window is None else _masked(c, window)
        total = 0.0
        for name in names:
            x = STEPS[WEIGHTS[name][0]](other)
            x = x.sum(axis=0) if name in OF_KEYS else x
            total += float(((found_in(c, answers, name) - x) ** 2).sum())
        return float(np.sqrt(total))

    errors = [error(c, None) for c in contexts]
    c = contexts[int(np.argmax(errors))]
    for bug, words, window in _windows(question):
        if error(c, window) < FITS * max(errors):
            steps = {WEIGHTS[name][0]: _with(WEIGHTS[name][0], window) for name in names}
            yield Bug(bug, f"{words}, {' and '.join(names)} alone", ("backward",), steps=steps)


def _windows(question: Question) -> Iterator[tuple[str, str, Window]]:
    left, right = bounds(question)
    if min(left, right) < math.inf:
        yield "mask-missing-in-backward", "all", (math.inf, math.inf, False)
        yield "mask-missing-in-backward", "right side", (left, math.inf, False)
        yield "mask-missing-in-backward", "left side", (math.inf, right, False)
        if question.lengths_q != question.lengths_k:
            yield "causal-alignment", "top-left", (left, right, True)
    for by in (1, -1):
        if question.causal:
            yield "causal-off-by-one", f"j <= i {by:+}", (left, by, False)
        elif right < math.inf:
            yield "window-off-by-one", f"right {by:+}", (left, right + by, False)
        if left < math.inf:
            yield "window-off-by-one", f"left {by:+}", (left + by, right, False)


def _masked(c: Context, window: Window) -> Context:
    """The same with another mask in P and dS, with the lse and D of the right one."""
    seen = within(distances(c.question, c.view, window[2]), *window[:2]) > 0
    with np.errstate(over="ignore"):
        P = np.where(seen, np.exp(c.G * c.Y - dead_to_inf(np, c.L)[..., None]), 0.0)
    return changed(c, P=P, dY=np.asarray(c.G * P * (c.dP - c.D[..., None])))


def _with(step: str, window: Window) -> Step:
    def wrong(c: Context) -> Floats:
        return np.asarray(STEPS[step](_masked(c, window)))

    return wrong
