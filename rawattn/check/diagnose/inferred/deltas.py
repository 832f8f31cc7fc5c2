"""Were lse and D those of parts of the keys, or of more than a row?

D_i = sum_j P_ij dP_ij runs over all keys of a row. Parts of the keys that have statistics of their
own (a shard of a ring, a tile), sums over the queries, and sums that go on from tile to tile are
tried on one view, and planted where they fit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue.partial_sums import Cut, splits
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    changed,
)
from rawattn.check.diagnose.engine.question import OF_KEYS, Answers, Question
from rawattn.check.diagnose.inferred.gradients import WEIGHTS, found_in

FITS = 0.15  # of what is wrong may be left on the view that is looked at
MOST = 2  # changes that are planted

Change = Callable[[Context], Context]  # another P, or another dY


def bugs(
    question: Question, answers: Answers, contexts: Sequence[Context], wrong: frozenset[str]
) -> Iterator[Bug]:
    """Bugs of dS, and of statistics that differ from key to key of a row."""
    yield from tried(answers, contexts, sorted(wrong), _changes(question, "dv" in wrong))


def tried(
    answers: Answers,
    contexts: Sequence[Context],
    names: Sequence[str],
    changes: Iterable[tuple[str, str, Change]],
) -> Iterator[Bug]:
    """Of changes, each with its class and in words, those that give these gradients on the view
    that is the most wrong."""

    def error(c: Context, change: Change) -> float:
        other = change(c)
        return sum(
            float(np.square(found_in(c, answers, n) - gradient(other, n)).sum()) for n in names
        )

    errors = [error(c, lambda c: c) for c in contexts]
    worst = int(np.argmax(errors))
    c = contexts[worst]
    near = [(error(c, change), bug, words, change) for bug, words, change in changes]
    for left, bug, words, change in sorted(near, key=lambda one: one[0])[:MOST]:
        if left < FITS**2 * errors[worst]:
            yield Bug(bug, words, BACKWARD, steps=of_gradients(names, change))


def of_gradients(names: Iterable[str], change: Change) -> dict[str, Step]:
    """A change in the kernels of these gradients alone."""

    def step(name: str, c: Context) -> Floats:
        return np.asarray(STEPS[name](change(c)))

    return {WEIGHTS[name][0]: partial(step, WEIGHTS[name][0]) for name in names}


def gradient(c: Context, name: str) -> Floats:
    """The gradient of a context, of keys for all heads of the group."""
    found = STEPS[WEIGHTS[name][0]](c)
    return np.asarray(found.sum(axis=0) if name in OF_KEYS else found)


def _with(c: Context, dS: Floats) -> Context:
    return changed(c, dY=c.G * dS)


# ---- statistics of parts ------------------------------------------------------------------------


def _changes(question: Question, of_weights: bool) -> Iterator[tuple[str, str, Change]]:
    """Other D, where P is right; else the lse of parts too."""
    cuts = splits(question).items()
    if of_weights:
        for text, cut in cuts:
            for delta, words in ((False, "lse of its own"), (True, "lse and D of its own")):
                change = partial(_own, cut=cut, lse=True, delta=delta)
                yield "partial-merge", f"each part has the {words}: {text}", change
        return
    axes = (("the queries", (1,)), ("all pairs of a head", (1, 2)), ("the heads too", (0, 2)))
    for over, axis in axes:
        yield "delta-of-another-out", f"D is summed up over {over}", partial(_summed, axis=axis)
    for text, cut in cuts:
        for divided, words in ((True, "the D of the out"), (False, "the sum for D")):
            for so_far, rest in ((False, "of its own"), (True, "so far")):
                change = partial(_own, cut=cut, divided=divided, so_far=so_far)
                yield "delta-of-another-out", f"each part has {words} {rest}: {text}", change


def _summed(c: Context, axis: tuple[int, ...]) -> Context:
    D = (c.P * c.dP).sum(axis=axis, keepdims=True) - _dlse(c)
    return _with(c, c.P * (c.dP - D))


def _dlse(c: Context) -> Floats | float:
    return c.dL[..., None] if np.ndim(c.dL) else 0.0


def _own(
    c: Context,
    cut: Cut,
    *,
    lse: bool = False,
    delta: bool = True,
    so_far: bool = False,
    divided: bool = True,
) -> Context:
    """Statistics of the part that a key is in, or of all parts up to it."""
    part = np.zeros(c.P.shape[2])
    for number, keys in enumerate(cut(len(part))):
        part[keys] = number
    one = part[:, None] <= part if so_far else np.equal(part[:, None], part)
    weights = c.P @ one if divided else 1.0
    weights = np.where(weights == 0, 1.0, weights)
    P = c.P / weights if lse else c.P
    D = (c.P * c.dP) @ one / weights - _dlse(c) if delta else c.D[..., None]
    return changed(_with(c, P * (c.dP - D)), P=P)
