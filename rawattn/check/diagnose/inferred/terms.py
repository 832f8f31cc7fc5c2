"""Which terms do the gradients hold? Read off dq, dk and dv, and planted as a bug.

A gradient is a sum of known terms, each with a coefficient of 1: least squares tell those that it
has. This module asks those that read one kind of term each: rows, rescaling, narrow dtypes.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug, Context, contexts
from rawattn.check.diagnose.engine.question import (
    OF_KEYS,
    STAGES,
    Answers,
    Question,
    given_to_backward,
)
from rawattn.check.diagnose.inferred import (
    deltas,
    narrow,
    online,
    row_terms,
)
from rawattn.check.diagnose.inferred.gradients import WEIGHTS, found_in

STEPS_OF = {"tout": "tO", "ddout": "tO"} | {name: x[0] for name, x in WEIGHTS.items()}
ROWS_OF = {
    "backward": ("dq", "dk", "dv"),
    "second": ("ddout", "gq", "gk", "gv"),
    "jvp": ("tout",),
}
WRONG = {2: 0.02, 4: 1e-3, 8: 1e-3}  # of the size, by the bytes of the inputs


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs read off the answers of ``stage``; none where nothing can be read."""
    if not _finite(answers, STAGES[stage]):
        return
    views = contexts_of(question, answers, stage)
    if not views:
        return
    if stage == "jvp" or (stage == "forward" and question.sparse):
        rescaled = list(online.bugs(question, answers, stage, views))
        yield from rescaled
        if rescaled:
            return
    there = [name for name in ROWS_OF.get(stage, ()) if name in answers]
    wrong = frozenset(name for name in there if _wrong(question, answers, views, name))
    if not wrong:
        return
    for term in row_terms.terms(question, answers, stage, views):
        yield from row_terms.bugs_of(question, answers, stage, views, term, wrong)
    if stage == "backward":
        yield from deltas.bugs(question, answers, views, wrong)
        yield from narrow.underflows()


def followed(
    question: Question, answers: Answers, stage: str, noise: dict[str, float]
) -> list[narrow.Followed]:
    """What the errors of a right backward pass follow; ``noise`` of tensors as ``Fit.rms``."""
    if stage != "backward" or not _finite(answers, STAGES[stage]):
        return []
    views = contexts_of(question, answers, stage)
    return narrow.followed(question, answers, views, noise) if views else []


def _finite(answers: Answers, names: Iterable[str]) -> bool:
    """Whether nothing is NaN, and no gradient infinite."""
    found = [answers[name] for name in names if name in answers]
    return all(bool((np.isfinite(x) | np.isneginf(x)).all()) for x in found)


def contexts_of(question: Question, answers: Answers, stage: str) -> list[Context]:
    """The views with the right results of all steps, ``right`` by the names of tensors, those of
    keys for the group."""
    found = contexts(question, stage, given_to_backward(question, answers))
    for c in found:
        grads = {name: getattr(c, STEPS_OF[name]) for name in ROWS_OF.get(stage, ())}
        c.right = {n: x.sum(axis=0) if n in OF_KEYS else x for n, x in grads.items()}
    return found


def _wrong(question: Question, answers: Answers, views: list[Context], name: str) -> bool:
    """Whether a gradient is off by more than rounding."""
    error = sum(((found_in(c, answers, name) - c.right[name]) ** 2).sum() for c in views)
    size = sum((c.right[name] ** 2).sum() for c in views)
    return bool(np.sqrt(error) > WRONG[question.dtype.itemsize] * np.sqrt(size))
