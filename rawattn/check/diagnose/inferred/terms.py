"""Which terms do the gradients hold? Read off dq, dk and dv, and planted as a bug.

A gradient is a sum of known terms, each with a coefficient of 1: least squares tell those that it
has. This module asks those that read one kind of term each: rows, pairs of tiles, lists,
rescaling, narrow dtypes.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from rawattn.check.diagnose.engine.attention import PROGRAMS, STEPS, Bug, Context, Floats, solve
from rawattn.check.diagnose.engine.question import (
    OF_KEYS,
    STAGES,
    Answers,
    Question,
    given_to_backward,
)
from rawattn.check.diagnose.inferred import (
    deltas,
    inverted_lists,
    narrow,
    online,
    row_terms,
    tile_pairs,
)

GRADIENTS = {"backward": ("dq", "dk", "dv"), "second": ("gq", "gk", "gv")}
WRONG = {2: 0.02, 4: 1e-3, 8: 1e-3}  # of the size, by the bytes of the inputs


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs read off the answers of ``stage``; none where nothing can be read."""
    if not _finite(answers, STAGES[stage]):
        return
    contexts = contexts_of(question, answers, stage)
    if not contexts:
        return
    rescaled: list[Bug] = []
    if stage in ("forward", "jvp"):
        rescaled = list(online.bugs(question, answers, stage, contexts))
    yield from rescaled
    if stage in ("jvp", "second") and not rescaled:
        yield from row_terms.of_tangents(question, answers, stage, contexts)
    there = [name for name in GRADIENTS.get(stage, ()) if name in answers]
    wrong = frozenset(name for name in there if _wrong(question, answers, contexts, name))
    if not wrong:
        return
    if question.sparse:
        lists = list(inverted_lists.bugs(question, answers, stage, contexts, wrong))
        yield from lists
        if lists:
            return
    for term in row_terms.terms(question, stage, contexts):
        yield from row_terms.bugs_of(question, answers, stage, contexts, term, wrong)
    if stage == "backward":
        yield from deltas.bugs(question, answers, contexts, wrong)
        yield from narrow.bugs(question, answers, contexts, wrong)
    if not question.sparse:
        yield from tile_pairs.bugs(question, answers, stage, contexts, wrong)


def followed(
    question: Question, answers: Answers, stage: str, noise: dict[str, float]
) -> list[narrow.Followed]:
    """What the errors of a right backward pass follow; ``noise`` of tensors as ``Fit.rms``."""
    if stage != "backward" or not _finite(answers, STAGES[stage]):
        return []
    contexts = contexts_of(question, answers, stage)
    return narrow.followed(question, answers, contexts, noise) if contexts else []


def _finite(answers: Answers, names: Iterable[str]) -> bool:
    """Whether nothing is NaN, and no gradient infinite."""
    found = [answers[name] for name in names if name in answers]
    return all(bool((np.isfinite(x) | np.isneginf(x)).all()) for x in found)


def contexts_of(question: Question, answers: Answers, stage: str) -> list[Context]:
    """The views with the right results of all steps, ``right`` by the names of gradients."""
    found: list[Context] = []
    last = PROGRAMS[stage][-1]

    def kept(c: Context) -> Floats:
        found.append(c)
        return np.asarray(STEPS[last](c))

    solve(
        question,
        stage,
        Bug("", stages=(stage,), steps={last: kept}),
        given=given_to_backward(question, answers),
    )
    for c in found:
        c.right = row_terms.right_of(c)
    return found


def _wrong(question: Question, answers: Answers, contexts: list[Context], name: str) -> bool:
    error, size = 0.0, 0.0
    for c in contexts:
        right = c.right[name]
        if name in OF_KEYS:
            found = answers[name][c.view.keys, c.view.head_kv]
        else:
            found = answers[name][c.view.rows[None], c.view.heads[:, None]]
        error += float(((found.astype(np.float64) - right) ** 2).sum())
        size += float((right**2).sum())
    return bool(np.sqrt(error) > WRONG[question.dtype.itemsize] * np.sqrt(size))
