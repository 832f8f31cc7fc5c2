"""Row statistics that lack the running maximum, or have it in other units.

A kernel's maximum need not be that of the row: it may be older, where a small growth is not worth a
rescaling. But it always is one of the row's own scores, by which it is recognised.
"""

from collections.abc import Callable, Iterator

import numpy as np

from rawattn.check.diagnose.engine.attention import LOG2_E, Floats, solve, views_of
from rawattn.check.diagnose.engine.question import Answers, Question

SHARE = 0.97  # of the wrong rows must have such a score
ROWS = 16  # that must be wrong for it to be no chance


# bug, in words, and the maximum by L, the lse that is found, and softmax_scale
LSE: tuple[tuple[str, str, Callable[[Floats, Floats, float], Floats]], ...] = (
    (
        "lse-without-max",
        "it is log(row_sum), without the maximum that P was taken against",
        lambda L, x, s: L - x,
    ),
    (
        "lse-base-2",
        "the logarithm of the row sum is in base 2, the maximum is not",
        lambda L, x, s: (LOG2_E * L - x) / (LOG2_E - 1),
    ),
    (
        "lse-base-2",
        "the maximum is in base 2, the logarithm of the row sum is not",
        lambda L, x, s: (x - L) / (LOG2_E - 1),
    ),
    (
        "lse-without-max",
        "the maximum in it is not scaled",
        lambda L, x, s: (L - x) / (1 - 1 / s) if s != 1 else np.full_like(L, np.nan),
    ),
)


def of_forward(
    question: Question, answers: Answers, wrong: tuple[str, ...]
) -> tuple[str, str, tuple[str, ...]] | None:
    """The bug, its confidence and the evidence, where ``wrong`` is lse alone or out alone."""
    if question.sparse or len(wrong) != 1 or wrong[0] not in ("out", "lse", "tlse"):
        return None
    name = wrong[0]
    right = solve(question, "jvp" if name == "tlse" else "forward")
    lse = right["jvp lse" if name == "tlse" else "lse"]
    found = np.asarray(answers[name]).astype(np.float64)
    if name == "lse":
        for bug, text, maximum_of in LSE:
            with np.errstate(invalid="ignore"):
                maximum = maximum_of(lse, found, question.scale)
            share = _share(question, lse, found - lse, maximum)
            if share:
                return bug, "high", (f"lse: {text}; {share}",)
        return None
    factor = _factors(found, right[name])
    if factor is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        maximum = lse - np.log(factor)
    coarse = np.asarray(answers[name]).dtype.itemsize == 2
    share = _share(question, lse, factor - 1, maximum, 4e-3 if coarse else 1e-4)
    text = f"{name}: every row is the right one times the row sum that it should be divided by"
    return ("not-normalised", "high", (f"{text}; {share}",)) if share else None


def _factors(found: Floats, right: Floats) -> Floats | None:
    """(heads, tokens): what every row is a multiple of the right one by; None if it is none."""
    if found.ndim == 2:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(found / right)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = (found * right).sum(axis=2) / (right * right).sum(axis=2)
    rest = np.linalg.norm(np.nan_to_num(found - factor[..., None] * right), axis=2)
    if rest.max(initial=0) > 0.02 * np.linalg.norm(np.nan_to_num(found), axis=2).max(initial=0):
        return None
    return np.asarray(factor.T)


def _share(
    question: Question, lse: Floats, error: Floats, maximum: Floats, fine: float = 1e-4
) -> str:
    """In words, if ``maximum`` is one of the row's scores in nearly all wrong rows."""
    rows = hits = 0
    for head, tokens, scores in _scores(question):
        with np.errstate(invalid="ignore"):
            bad = np.abs(error[head, tokens]) > fine
            bad &= np.isfinite(lse[head, tokens]) & np.isfinite(maximum[head, tokens])
            distance = np.abs(maximum[head, tokens, None] - scores).min(axis=1, initial=np.inf)
        near = distance <= fine * (1 + np.abs(lse[head, tokens]))
        rows, hits = rows + int(bad.sum()), hits + int((bad & near).sum())
    if rows < ROWS or hits < SHARE * rows:
        return ""
    return f"in {hits} of {rows} wrong rows what is missing is one of the row's own scores"


def _scores(question: Question) -> Iterator[tuple[int, np.ndarray, Floats]]:
    """Head, tokens, and their scores; inf for keys that they do not see."""
    for view in views_of(question):
        for i, head in enumerate(view.heads):
            q = question.q[view.rows, head].astype(np.float64)
            k = question.k[view.keys, view.head_kv].astype(np.float64)
            seen = view.weight[min(i, len(view.weight) - 1)] > 0
            yield int(head), view.rows, np.where(seen, question.scale * q @ k.T, np.inf)
