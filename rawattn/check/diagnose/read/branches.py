"""What is asked such that it is a dense forward pass: the sliding branch of block-sparse attention,
and passes beyond the first order. With tv alone as direction tout, or ddout, is P tv."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.attention import FORWARD, STEPS, Bug, Context, View, changed
from rawattn.check.diagnose.engine.question import LISTS, Answers, Question
from rawattn.check.diagnose.read import probe
from rawattn.check.diagnose.read.probe import Ask, Weights


@lru_cache(maxsize=8)
def alone(question: Question) -> Question:
    """The dense problem that the branch is; ``question`` without one is no such problem."""
    without: dict[str, Any] = dict.fromkeys((*LISTS, "sliding"))
    return replace(question, **without, window=question.sliding or (-1, -1))


def asked(like: Question, ask: Ask) -> Ask:
    """Asks for the branch's results, by a forward pass whose lists name nothing."""

    def branch(question: Question) -> Answers:
        given: dict[str, Any] = {"causal": like.causal, "window": like.window}
        for name in LISTS[:3]:
            if (x := getattr(like, name)) is not None:
                shape = (len(question.q), *x.shape[1:])
                given[name] = np.full(shape, -1 if name == LISTS[0] else 1, x.dtype)
        answers = ask(replace(question, **given, sliding=like.sliding))
        return {name: answers[f"sliding {name}"] for name in ("out", "lse")}

    return branch


def planted(bug: Bug) -> Bug:
    """A bug of the dense problem in the branch alone, whose views have no lists."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        there = bug.see is not None and views and views[0].lists is None
        return bug.see(alone(question), views) if bug.see and there else views

    def step(name: str, c: Context) -> Any:
        if c.view.lists is not None:
            return STEPS[name](c)
        return bug.steps[name](changed(c, question=alone(c.question)))

    steps = {name: partial(step, name) for name in bug.steps}
    return replace(bug, stages=FORWARD, steps=steps, see=bug.see and see)


def read_tangents(ask: Ask, question: Question) -> Weights:
    """The weights of tout. Raises Refused, as the others do."""

    def tangents(asked: Question) -> Answers:
        answers = ask(_moved(asked))
        return {"out": answers["tout"], "lse": answers["jvp lse"]}

    return probe.read_forward(tangents, question)


def read_first_pass(ask: Ask, question: Question) -> Weights:
    """The weights of ddout, which are made with the lse that is passed."""

    def tangents(asked: Question) -> Answers:
        _, given = probe.with_right(replace(asked, dout=np.zeros_like(asked.out)))
        return {"out": ask(_moved(given))["ddout"]}

    return replace(probe.read_forward(tangents, question), value_head=None)


def _moved(question: Question) -> Question:
    """In the direction of tv = v alone."""
    still = {"tq": np.zeros_like(question.q), "tk": np.zeros_like(question.k)}
    return replace(question, **still, tv=question.v)
