"""Bugs with a number in them (a scale, a cap, a slope), fitted to the answers.

And the bugs of the softmax that have many forms: those that come near on one sequence.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue import fills, merges, rotary
from rawattn.check.diagnose.catalogue.masks import bounds, distances
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FIRST,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    times,
)
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.inferred import denominator
from rawattn.check.diagnose.inferred.sample import CLOSE, Sample, in_words

LN_2 = math.log(2)
FACTORS = 2.0 ** np.arange(-7, 7.1, 0.5)  # of a scale
CAPS = 2.0 ** np.arange(-3, 7.1, 0.5)
FITTED_TO = ("out", "lse", "dv", "dq", "dk")  # in this order, as far as they are wrong
SLOPES = np.concatenate([-(2.0 ** np.arange(1, -11, -1)), [0.0], 2.0 ** np.arange(-10, 2)])


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs read off the answers of ``stage``; none where nothing can be read."""
    if question.sparse or stage not in FIRST:
        return
    sample = Sample(question, answers, stage)
    if not sample.wrong:
        return
    found = sample.near(_without_numbers(question, stage))
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


def _without_numbers(question: Question, stage: str) -> Iterator[Bug]:
    """Bugs in many forms, none of which has a number that is not known."""
    for bug in (
        *merges.bugs(question),
        *fills.bugs(question),
        *rotary.bugs(question),
        *_normalised(),
    ):
        yield bug
        if stage == "backward" and "forward" in bug.stages and stage in bug.stages:
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

    forms: Callable[[Floats], list[Bug]]
    grid: Floats
    by_head: tuple[bool, ...]  # whether heads differ in it


def _families(question: Question, sample: Sample) -> Iterator[Fitted]:
    yield Fitted(_scales(question.scale), question.scale * FACTORS, (False, True))
    yield Fitted(_caps, CAPS, (False,))
    yield Fitted(_biases, SLOPES, (True,))
    if bounds(question)[1] > 0:
        yield Fitted(_symmetric_biases, SLOPES, (True,))
    for forms in (*fills.filled(question), *fills.added(question)):
        yield Fitted(forms, fills.VALUES, (False,))
    if sample.stage == "backward":
        for forms in (_powers, *map(_other_bases, (LN_2, 1 / LN_2))):
            yield Fitted(forms, FACTORS, (False,))


def _fitted(question: Question, sample: Sample) -> Iterator[Bug]:
    """Bugs whose number is fitted: to out or lse where they are wrong, else to the gradients."""
    for family in _families(question, sample):
        fitted = [family]
        if sample.stage == "backward":
            fitted.append(family._replace(forms=_own(family.forms)))
        for one in fitted:
            for x in _numbers(sample, one):
                for bug in one.forms(x):
                    yield bug
                    if "forward" in bug.stages:
                        yield own(bug)


def _own(forms: Callable[[Floats], list[Bug]]) -> Callable[[Floats], list[Bug]]:
    return lambda x: [own(bug) for bug in forms(x)]


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


# ---- scales -----------------------------------------------------------------------------------


def _scales(scale: float) -> Callable[[Floats], list[Bug]]:
    def forms(x: Floats) -> list[Bug]:
        said = _said(x, roots=True)
        if _one(x):
            said += f", softmax_scale times {in_words(float(x[0]) / scale, roots=True)}"
        return [
            Bug("score-scale", f"{said}{rest}", FIRST, steps={"Y": _scaled(x, everywhere)})
            for rest, everywhere in (("", True), (", scores alone", False))
        ]

    return forms


def _scaled(x: Floats, everywhere: bool) -> Step:
    def Y(c: Context) -> Floats:
        scores: Floats = c.r(_of(x, c) * c.r(times(c.Q, c.K.T)))
        if everywhere:
            c.s = _of(x, c)
        return scores

    return Y


def _powers(x: Floats) -> list[Bug]:
    """P to the power of x in the backward pass."""
    return [_backward_weights(x, x, f"exp({_said(x)} (S - lse))")]


def _other_bases(factor: float) -> Callable[[Floats], list[Bug]]:
    of_lse = f"{factor:.4g} lse"
    return lambda x: [
        _backward_weights(x, np.full_like(x, factor), f"exp({_said(x)} S - {of_lse})")
    ]


def _backward_weights(x: Floats, of_lse: Floats, text: str) -> Bug:
    def P(c: Context) -> Floats:
        L = np.where(np.isneginf(c.L), np.inf, c.L * _of(of_lse, c)[..., 0])
        return np.asarray(c.r(np.exp(_of(x, c) * c.S - L[..., None])))

    said = f"P is {text}: exp2 where exp is meant, or without log2(e)"
    return Bug("score-scale", said, BACKWARD, steps={"bP": P})


def _normalised() -> Iterator[Bug]:
    """q and k brought to one length, as some models want."""
    for text, length in (("root mean square 1", math.sqrt), ("length 1", lambda d: 1.0)):

        def Y(c: Context, length: Callable[[float], float] = length) -> Floats:
            def to_length(x: Floats) -> Floats:
                size = np.sqrt(np.square(x).sum(axis=-1, keepdims=True))
                return np.asarray(x * length(x.shape[-1]) / np.where(size == 0, 1.0, size))

            return np.asarray(c.r(c.s * c.r(times(to_length(c.Q), to_length(c.K).T))))

        yield Bug("score-scale", f"rows of q and k have {text}", FIRST, steps={"Y": Y})


# ---- caps and biases --------------------------------------------------------------------------


def _caps(x: Floats) -> list[Bug]:
    def Y(c: Context) -> Floats:
        return np.asarray(c.r(_of(x, c) * np.tanh(STEPS["Y"](c) / _of(x, c))))

    slope: Step = lambda c: c.r(c.dS * (1 - (c.Y / _of(x, c)) ** 2))  # noqa: E731
    said = f"c tanh(score / c), c = {_said(x)}"
    return [
        Bug("softcap", said, FIRST, steps={"Y": Y, "dY": slope}),
        Bug("softcap", f"{said}, without its derivative", FIRST, steps={"Y": Y}),
    ]


def _biases(x: Floats) -> list[Bug]:
    """ALiBi with these slopes; rows may begin anywhere, which lse alone shows."""
    forms: dict[str, Callable[[Context], np.ndarray]] = {
        "j - i": _from_end,
        "j - i, positions counted from the first key": _from_start,
        "j - i, positions in the packed tokens": _packed,
        "j": lambda c: _from_start(c)[:1],
        "j in the packed tokens": lambda c: np.asarray(c.view.keys[None]),
        "j - (number of keys - 1)": lambda c: _from_start(c)[:1] - len(c.view.keys) + 1,
    }
    return [_biased(x, form, of) for form, of in forms.items()]


def _symmetric_biases(x: Floats) -> list[Bug]:
    forms: dict[str, Callable[[Context], np.ndarray]] = {
        "|j - i|": lambda c: np.abs(_from_end(c)),
        "|j - i|, positions counted from the first key": lambda c: np.abs(_from_start(c)),
        "|j - i|, positions in the packed tokens": lambda c: np.abs(_packed(c)),
    }
    return [_biased(x, form, of) for form, of in forms.items()]


def _biased(x: Floats, form: str, of: Callable[[Context], np.ndarray]) -> Bug:
    text = f"slope ({form}), with the slope {_said(x)}"
    biased: Step = lambda c: c.r(STEPS["Y"](c) + _of(x, c) * of(c))  # noqa: E731
    return Bug("score-bias", text, FIRST, steps={"Y": biased})


def _from_end(c: Context) -> np.ndarray:
    return distances(c.question, c.view)


def _from_start(c: Context) -> np.ndarray:
    return distances(c.question, c.view, top_left=True)


def _packed(c: Context) -> np.ndarray:
    return np.asarray(c.view.keys[None, :] - c.view.rows[:, None])
