"""Bugs with a number in them (a scale, a cap, a slope), fitted to the answers.

And the bugs of the softmax that have many forms: those that come near on one sequence.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue import fills, rotary
from rawattn.check.diagnose.catalogue.masks import bounds, distances
from rawattn.check.diagnose.catalogue.numbers import scaled
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FIRST,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    contexts,
)
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.inferred import denominator, online
from rawattn.check.diagnose.inferred.sample import CLOSE, Sample, in_words

FACTORS = 2.0 ** np.arange(-7, 7.1, 0.5)  # of a scale
CAPS = 2.0 ** np.arange(-3, 7.1, 0.5)
FITTED_TO = ("out", "lse", "dv", "dq", "dk")  # in this order, as far as they are wrong
SLOPES = np.concatenate([-(2.0 ** np.arange(1, -11, -1)), [0.0], 2.0 ** np.arange(-10, 2)])
Forms = Callable[[Floats], list[Bug]]  # of a number for every query head


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs read off the answers of ``stage``; none where nothing can be read."""
    if question.sparse or stage not in FIRST:
        return
    sample = Sample(question, answers, stage)
    if not sample.wrong:
        return
    found = sample.near(_without_numbers(question, answers, stage))
    explained = sample.explained(found)
    if not explained:
        fitted = sample.near(_fitted(question, _fitted_to(question, answers, sample)))
        explained, found = sample.explained(fitted), fitted + found
    yield from (bug.at(stage) for _, bug in found)
    if not explained:
        yield from denominator.bugs(question, answers, stage)


def _fitted_to(question: Question, answers: Answers, sample: Sample) -> Sample:
    """The forward pass, where a backward one got a wrong out and lse from it."""
    if sample.stage == "backward" and question.out is None and sample.given is not None:
        forward = Sample(question, answers, "forward")
        return forward if forward.wrong else sample
    return sample


def _without_numbers(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs in many forms, none of which has a number that is not known."""
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


# ---- fits -------------------------------------------------------------------------------------


class Fitted(NamedTuple):
    """A bug with a number for every query head. ``forms`` of it differ in what that number does
    not change; the first one is fitted."""

    forms: Forms
    grid: Floats
    by_head: tuple[bool, ...] = (False,)  # whether heads differ in it


def _families(question: Question, stage: str) -> Iterator[Fitted]:
    yield Fitted(partial(_scales, question.scale), question.scale * FACTORS, (False, True))
    yield Fitted(_caps, CAPS)
    yield Fitted(partial(_biases, BIASES), SLOPES, (True,))
    if bounds(question)[1] > 0:
        yield Fitted(partial(_biases, SYMMETRIC), SLOPES, (True,))
    for masked in fills.hidden(question):
        for forms in (fills.filled, fills.added):
            yield Fitted(partial(_of_one, forms, masked), fills.VALUES)
    if stage == "backward":
        yield Fitted(_powers, FACTORS)


def _of_one(forms: Callable[..., list[Bug]], masked: tuple[object, ...], x: Floats) -> list[Bug]:
    return forms(float(x[0]), *masked)


def _fitted(question: Question, sample: Sample) -> Iterator[Bug]:
    """Bugs whose number is fitted: to out or lse where they are wrong, else to the gradients."""
    for family in _families(question, sample.stage):
        fitted = [family]
        if sample.stage == "backward":
            fitted.append(family._replace(forms=partial(_own, family.forms)))
        for one in fitted:
            for x in _numbers(sample, one):
                for bug in one.forms(x):
                    yield bug
                    if "forward" in bug.stages:
                        yield own(bug)


def _own(forms: Forms, x: Floats) -> list[Bug]:
    return [own(bug) for bug in forms(x)]


def _numbers(sample: Sample, family: Fitted) -> Iterator[Floats]:
    """One for all heads, and one for each, as far as they help."""

    def first(x: Floats) -> Bug:
        return family.forms(x)[0]

    for by_head in family.by_head:
        # of the gradients, dq alone has its heads apart
        names = ("dq",) if by_head and sample.stage == "backward" else FITTED_TO
        for name in [name for name in names if name in sample.wrong][:2]:
            x = sample.fit(first, family.grid, by_head=by_head, name=name)
            if x is not None and not (by_head and _one(x) and False in family.by_head):
                yield x
                break


def _said(x: Floats, *, roots: bool = False) -> str:
    """A number, or one for every head."""
    if _one(x):
        return in_words(float(x[0]), roots=roots)
    return "by head " + ", ".join(in_words(float(y), roots=roots) for y in x)


def _one(x: Floats) -> bool:
    """Whether all heads have the same number."""
    return bool(np.ptp(x) <= CLOSE * np.abs(x).max())


def _of(x: Floats, c: Context) -> Floats:
    """A view's share of one number for each head."""
    found: Floats = x[c.view.heads][:, None, None]
    return found


# ---- what is fitted ---------------------------------------------------------------------------


def _scales(scale: float, x: Floats) -> list[Bug]:
    said = _said(x, roots=True)
    if _one(x):
        said += f", softmax_scale times {in_words(float(x[0]) / scale, roots=True)}"
    return [
        Bug("score-scale", f"{said}{rest}", FIRST, steps={"Y": partial(scaled, x=x, everywhere=of)})
        for rest, of in (("", True), (", scores alone", False))
    ]


def _powers(x: Floats) -> list[Bug]:
    """P to the power of x in the backward pass."""

    def P(c: Context) -> Floats:
        L = np.where(np.isneginf(c.L), np.inf, c.L)[..., None]
        return np.asarray(c.r(np.exp(_of(x, c) * (c.S - L))))

    said = f"P is exp({_said(x)} (S - lse)): exp2 where exp is meant, or without log2(e)"
    return [Bug("score-scale", said, BACKWARD, steps={"bP": P})]


def _caps(x: Floats) -> list[Bug]:
    def Y(c: Context) -> Floats:
        return np.asarray(c.r(_of(x, c) * np.tanh(STEPS["Y"](c) / _of(x, c))))

    slope: Step = lambda c: c.r(c.dS * (1 - (c.Y / _of(x, c)) ** 2))  # noqa: E731
    said = f"c tanh(score / c), c = {_said(x)}"
    return [
        Bug("softcap", said, FIRST, steps={"Y": Y, "dY": slope}),
        Bug("softcap", f"{said}, without its derivative", FIRST, steps={"Y": Y}),
    ]


# ALiBi; its rows may begin anywhere, which lse alone shows.
Bias = Callable[[Context], np.ndarray]
BIASES: dict[str, Bias] = {
    "j - i": lambda c: distances(c.question, c.view),
    "j - i, positions counted from the first key": lambda c: distances(
        c.question, c.view, top_left=True
    ),
    "j - i, positions in the packed tokens": lambda c: c.view.keys[None] - c.view.rows[:, None],
    "j": lambda c: np.arange(len(c.view.keys))[None],
    "j in the packed tokens": lambda c: np.asarray(c.view.keys[None]),
    "j - (number of keys - 1)": lambda c: np.arange(len(c.view.keys))[None] - len(c.view.keys) + 1,
}


def _absolute(of: Bias) -> Bias:
    return lambda c: np.abs(of(c))


SYMMETRIC = {f"|{form[:5]}|{form[5:]}": _absolute(BIASES[form]) for form in [*BIASES][:3]}


def _biases(forms: dict[str, Bias], x: Floats) -> list[Bug]:
    def Y(of: Bias, c: Context) -> Floats:
        return np.asarray(c.r(STEPS["Y"](c) + _of(x, c) * of(c)))

    return [
        Bug(
            "score-bias",
            f"slope ({form}), with the slope {_said(x)}",
            FIRST,
            steps={"Y": partial(Y, of)},
        )
        for form, of in forms.items()
    ]
