"""Which keys does each query see? Read off the answers, and planted as a bug.

A field of counts is read of out and lse, else of the gradients, and named by rules; it is planted
like any other bug, by its rules and as it was read, so that the judge sees whether it is there.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    FIRST,
    NO_BUG,
    STEPS,
    Bug,
    Context,
    Floats,
    See,
    Step,
    changed,
    solve,
)
from rawattn.check.diagnose.engine.question import Answers, Question, given_to_backward
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.structure import by_rows
from rawattn.check.diagnose.evidence.support import seen_as
from rawattn.check.diagnose.inferred.keys import dropout, past_end, unwritten
from rawattn.check.diagnose.inferred.keys.fields import Field, field_of
from rawattn.reference.dense import dead_to_inf

EXACT = 0.003, 0.03  # error that leaves nothing to explain: of wide numbers, of 16 bits
ANYWHERE = (*FIRST, "second", "jvp")
GRADIENTS = {"dq": "dQ", "dk": "dK", "dv": "dV"}


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs read off the answers of ``stage``; none where nothing can be read."""
    untouched = list(unwritten.bugs(question, answers, stage))
    yield from untouched
    if question.sparse or (untouched and _explained(question, answers, stage, untouched[0])):
        return
    if stage == "jvp":
        answers = {name.removeprefix("jvp "): x for name, x in answers.items() if "jvp " in name}
    found, enough = _read(_Asked(question, answers), "forward")
    yield from found
    if stage != "forward" and not enough:
        yield from _read(_Asked(question, answers), "backward")[0]


class _Asked:
    """A question with answers as a key of a cache: equal to the same objects alone."""

    def __init__(self, question: Question, answers: Answers) -> None:
        self.question, self.answers = question, answers

    def __hash__(self) -> int:
        return hash((id(self.question), id(self.answers)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Asked):
            return False
        return other.question is self.question and other.answers is self.answers


@lru_cache(maxsize=4)
def _read(asked: _Asked, stage: str) -> tuple[tuple[Bug, ...], bool]:
    """The bugs that the answers of a pass tell, and whether one explains all that is wrong."""
    question, answers = asked.question, asked.answers
    if stage != "forward":
        return tuple(_of_gradients(question, answers)), True
    wrong = wrong_rows(question, answers, ("out", "lse"))
    if wrong is None or not wrong.any():
        return (), False
    found = list(past_end.bugs(question, answers, wrong))
    if not found and not _out_alone(question, answers):
        field = field_of(question, answers, "out")
        found += [] if field is None else _planted(field)
    if not found:
        found += dropout.bugs(question, answers)
    return tuple(found), bool(found)


def _planted(field: Field, backward: bool = False) -> Iterator[Bug]:
    """By rules, and as it was read where that is something else."""
    name, words = field.named(backward)
    if field.support.named:
        yield Bug(name, words, ANYWHERE, field.see)
    if not field.by_rule:
        yield Bug(name, field.as_read.named(backward)[1], ANYWHERE, field.as_read.see)


def _out_alone(question: Question, answers: Answers) -> bool:
    """Whether lse is right, and so are the keys: what is wrong comes after the row sums."""
    if not {"out", "lse"} <= set(answers):
        return False
    of_lse = wrong_rows(question, answers, ("lse",))
    return of_lse is not None and not of_lse.any()


def _explained(question: Question, answers: Answers, stage: str, bug: Bug) -> bool:
    """Whether a bug of the forward pass leaves nothing to explain."""
    left = wrong_rows(question, answers, ("out", "lse"), bug) if stage == "forward" else None
    return left is not None and not left.any()


def wrong_rows(
    question: Question, answers: Answers, names: tuple[str, ...], bug: Bug = NO_BUG
) -> np.ndarray | None:
    """Rows (tokens, heads) that the right computation, or a ``bug``, does not explain; None where
    nothing can be said. names: of one pass, and of one shape."""
    names = tuple(name for name in names if name in answers)
    if not names:
        return None
    first = np.asarray(answers[names[0]])
    exact = EXACT[first.dtype.itemsize == 2]
    backward = names[0] in GRADIENTS
    given = given_to_backward(question, answers) if backward else None
    right = solve(question, "backward" if backward else "forward", bug, given=given)
    found = np.zeros(by_rows(names[0], right[names[0]]).shape[:2], dtype=bool)
    for name in names:
        a, b = (by_rows(name, np.asarray(x[name], dtype=np.float64)) for x in (answers, right))
        with np.errstate(invalid="ignore"):
            off = np.where(a == b, 0.0, a - b)
        size = float(np.sqrt(np.mean(b[np.isfinite(b)] ** 2))) if np.isfinite(b).any() else 1.0
        off = np.where(np.isfinite(off), np.abs(off), 0.0).max(axis=2)
        found |= off > exact * (size or 1.0)
    return found


# ---- gradients --------------------------------------------------------------------------------


def _of_gradients(question: Question, answers: Answers) -> Iterator[Bug]:
    """Other keys in the backward pass, or in some of its kernels."""
    wrong = []
    for name in GRADIENTS:
        rows = wrong_rows(question, answers, (name,))
        wrong += [name] if rows is not None and rows.any() else []
    if not wrong:
        return
    fields: dict[str, Field] = {}
    for name in ("dq", "dv", "dk"):
        if name in wrong and not (name == "dk" and "dv" in fields):
            field = field_of(question, answers, name)
            fields |= {} if field is None else {name: field}
    if not fields:
        return
    sources = {"dq": ("dq", "dv", "dk"), "dk": ("dk", "dv", "dq"), "dv": ("dv", "dk", "dq")}
    of = {x: next(fields[y] for y in sources[x] if y in fields) for x in wrong}
    if len(wrong) == len(GRADIENTS.keys() & answers.keys()):
        for field in fields.values():
            yield from _planted(field, backward=True)
    if len(wrong) < len(GRADIENTS) or len(fields) > 1:
        said = {of[x].named(True) for x in wrong}
        name, words = sorted(said)[0] if len(said) > 1 else said.pop()
        kernels = f"{words}, {' and '.join(wrong)} alone" if len(wrong) < len(GRADIENTS) else words
        yield Bug(name, kernels, ("backward",), *_in_kernels(of))


def _in_kernels(of: Mapping[str, Field]) -> tuple[See, dict[str, Step]]:
    """Views of all pairs that any gradient has, and the gradients with those of their fields."""

    def pairs(places: Places) -> Floats:
        every = [field.at(places) for field in of.values()]
        return np.asarray(
            np.max([*every, np.broadcast_to(places.right, every[0].shape)], axis=0) > 0
        )

    steps = {step: _with_pairs(step, of.get(name)) for name, step in GRADIENTS.items()}
    return seen_as(pairs), steps


def _with_pairs(step: str, field: Field | None) -> Step:
    """A gradient over the pairs of ``field``, or over the right ones."""

    def wrong(c: Context) -> Floats:
        places = Places(c.question)
        x = places.right[None].repeat(c.question.num_heads_q, axis=0)
        x = x if field is None else field.at(places)
        counts = x[np.ix_(c.view.heads, c.view.rows, np.maximum(c.view.keys, 0))]
        with np.errstate(over="ignore"):
            P = np.where(counts > 0, np.exp(c.cap[0] - dead_to_inf(np, c.L)[..., None]), 0) * counts
        dY = c.cap[1] * P * (c.dP - c.D[..., None])
        return np.asarray(STEPS[step](changed(c, P=P, dY=np.asarray(dY))))

    return wrong
