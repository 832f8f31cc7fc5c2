"""Bugs of the softmax that have many forms: those that come near on one sequence."""

from collections.abc import Iterator
from dataclasses import replace

from rawattn.check.diagnose.catalogue import fills, rotary
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FIRST,
    STEPS,
    Bug,
    Step,
    contexts,
)
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.inferred import online
from rawattn.check.diagnose.inferred.sample import Sample


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs that the answers of ``stage`` are near to; none where nothing is wrong."""
    if question.sparse or stage not in FIRST:
        return
    sample = Sample(question, answers, stage)
    if sample.wrong:
        yield from (bug.at(stage) for _, bug in sample.near(_forms(question, answers, stage)))


def _forms(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    if stage == "forward":
        yield from online.bugs(question, answers, stage, contexts(question, stage))
    for bug in (*fills.bugs(question), *rotary.bugs(question)):
        yield bug
        if stage == "backward" and "forward" in bug.stages:
            yield own(bug)


def own(bug: Bug) -> Bug:
    """The same in a backward pass with P and D of its own: of a forward with the same bug."""
    softmax = bug.steps.get("softmax", STEPS["softmax"])
    steps: dict[str, Step] = {
        "bP": lambda c: softmax(c)[1],
        "D": lambda c: (c.P * c.dP).sum(axis=-1) - c.dL,
        **bug.steps,
    }
    return replace(bug, variant=f"{bug.variant}, own softmax", stages=BACKWARD, steps=steps)
