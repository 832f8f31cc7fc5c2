"""Row statistics that lack the running maximum, or have it in other units.

A kernel's maximum need not be that of the row: it may be older, where a small growth is not worth a
rescaling. But it always is one of the row's own scores, by which it is recognised.
"""

from collections.abc import Callable, Iterator

import numpy as np

from rawattn.check.diagnose.engine.attention import LOG2_E, Floats, contexts, solve
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows

SHARE = 0.97  # of the wrong rows must have such a score
ROWS = 16  # that must be wrong for it to be no chance

# In words, and the maximum by L, the lse that is found, and softmax_scale.
LSE: dict[str, Callable[[Floats, Floats, float], Floats]] = {
    "it is log(row_sum), without the maximum that P was taken against": lambda L, x, s: L - x,
    "the logarithm of the row sum is in base 2, the maximum is not": lambda L, x, s: (
        (LOG2_E * L - x) / (LOG2_E - 1)
    ),
    "the maximum is in base 2, the logarithm of the row sum is not": lambda L, x, s: (
        (x - L) / (LOG2_E - 1)
    ),
    "the maximum in it is not scaled": lambda L, x, s: (L - x) / (1 - 1 / s if s != 1 else np.nan),
}


@np.errstate(divide="ignore", invalid="ignore")
def of_forward(
    question: Question, answers: Answers, wrong: tuple[str, ...]
) -> tuple[str, str, tuple[str, ...]] | None:
    """The bug, its confidence and the evidence, where ``wrong`` is lse alone or out alone."""
    if question.sparse or wrong not in (("out",), ("lse",), ("tlse",)):
        return None
    (name,) = wrong
    fine = 4e-3 if np.asarray(answers[name]).dtype.itemsize == 2 and name != "lse" else 1e-4
    for bug, text, error, maximum in _maxima(question, name, answers[name]):
        rows = hits = 0
        for c in contexts(question, "forward"):
            at = np.ix_(c.view.heads, c.view.rows)
            bad = (np.abs(error[at]) > fine) & np.isfinite(c.L) & np.isfinite(maximum[at])
            distance = np.abs(maximum[at][..., None] - c.S).min(axis=2, initial=np.inf)
            near = distance <= fine * (1 + np.abs(c.L))
            rows, hits = rows + int(bad.sum()), hits + int((bad & near).sum())
        if rows >= ROWS and hits >= SHARE * rows:
            share = f"in {hits} of {rows} wrong rows what is missing is one of the row's own scores"
            return bug, "high", (f"{name}: {text}; {share}",)
    return None


def _maxima(
    question: Question, name: str, found: Floats
) -> Iterator[tuple[str, str, Floats, Floats]]:
    """What may have been done with a maximum: a class, words, what is off by row (num_heads_q,
    total_q), and the maximum that it would be."""
    lse = solve(question, "forward")["lse"]
    if name == "lse":
        x = found.astype(np.float64)
        for text, of in LSE.items():
            bug = "lse-base-2" if "base 2" in text else "lse-without-max"
            yield bug, text, x - lse, of(lse, x, question.scale)
        return
    right = by_rows(name, solve(question, "jvp" if name == "tlse" else "forward")[name])
    x = by_rows(name, found)
    factor = (x * right).sum(axis=2) / (right * right).sum(axis=2)
    rest = np.linalg.norm(np.nan_to_num(x - factor[..., None] * right), axis=2)
    if rest.max(initial=0) <= 0.02 * np.linalg.norm(np.nan_to_num(x), axis=2).max(initial=0):
        text = "every row is the right one times the row sum that it should be divided by"
        yield "not-normalised", text, factor.T - 1, lse - np.log(factor.T)
