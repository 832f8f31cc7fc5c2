"""Gradients that are sums of other parts than they must be: how often each part is in them is read
off one view, and planted in all.

Parts are the terms of dS and of P, and the query heads of a group.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug, Context, Floats, Step, contexts
from rawattn.check.diagnose.engine.steps import STEPS, changed
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.read.fields import by_head, sum_in_words, sums_of
from rawattn.check.diagnose.read.forms import MOST, of_terms, of_terms_in_words, terms

OPERANDS = {"dq": "dY", "dk": "dY", "dv": "P"}  # of their products
OF_P: dict[str, Callable[[Context], Floats]] = {  # what may stand in the place of P in dv
    "P": lambda c: c.P,
    "dS": lambda c: c.dS,
    "P^2": lambda c: c.P**2,
    "dP": lambda c: np.where(c.W > 0, c.dP, 0.0),
}
Of = Callable[[Context], Floats]


def bugs(sample: Sample) -> Iterator[Bug]:
    """Of each wrong gradient the sums that it is, of the sequence that is looked at."""
    names = [n for n in OPERANDS if n in sample.wrong and sample.stage == "backward"]
    for c in contexts(sample.question, "backward", sample.given) if names else ():
        here = c.view.sequence == sample.sequence and c.view.head_kv == sample.head_kv
        for name in names if here and c.S.size and not sample.question.sparse else ():
            rows, heads = c.view.rows[:, None], c.view.heads
            if name != "dq":
                rows, heads = c.view.keys[:, None], np.array([c.view.head_kv])
            due = sample.found[name][rows, heads].swapaxes(0, 1)
            unit = max(sample.wrong[name], 1e-4) * float(np.sqrt(np.mean(due**2)))
            if unit and np.isfinite(due).all():
                for bug, text, planted in _sums(c, name, due.ravel() / unit, unit):
                    yield Bug(bug, text, ("backward",), steps={f"d{name[1].upper()}": planted})


def _with(name: str, of: Of, c: Context) -> Floats:
    """The product of a gradient with something else in the place of dS or P."""
    return np.asarray(STEPS[f"d{name[1].upper()}"](changed(c, **{OPERANDS[name]: of(c)})))


def _sums(c: Context, name: str, due: Floats, unit: float) -> Iterator[tuple[str, str, Step]]:
    """Classes, words and steps of what gives ``due``, in units of what rounding may leave."""

    def part(of: Of) -> Floats:
        x = _with(name, of, c)
        return np.asarray((x if name == "dq" else x.sum(axis=0)).ravel() / unit)

    of = _of_P if name == "dv" else of_terms
    names = OF_P if name == "dv" else terms(c.question)
    basis = {term: part(partial(of, {term: 1.0})) for term in names}
    near: dict[int, tuple[float, dict[str, float]]] = {}  # of so many terms the nearest
    for factors in sums_of(basis, due, MOST):
        left = float(np.std(sum(x * basis[term] for term, x in factors.items()) - due))
        if factors.keys() != {"P"} and left < near.get(len(factors), (math.inf,))[0]:
            near[len(factors)] = left, factors
    for _, factors in near.values():
        text, bug = of_terms_in_words(factors, c.question.dlse is not None)
        text = f"dS {text}"
        if name == "dv":
            bug, text = "arguments-swapped", f"dv is made of {sum_in_words(factors)} in place of P"
        yield bug, text, partial(_with, name, partial(of, factors))
    if name != "dq" and len(c.S) > 1:
        parts = STEPS[f"d{name[1].upper()}"](c).reshape(len(c.S), -1)
        if (by := _shares(parts / unit, due)) is not None:
            text = f"the heads of a group count {by_head(by)} times each"
            yield "gqa-group-not-summed", text, partial(_heads, name, by)


def _of_P(factors: dict[str, float], c: Context) -> Floats:
    return np.asarray(sum(x * OF_P[term](c) for term, x in factors.items()))


def _heads(name: str, by: Floats, c: Context) -> Floats:
    return np.asarray(by[:, None, None] * STEPS[f"d{name[1].upper()}"](c))


def _shares(parts: Floats, due: Floats) -> Floats | None:
    """How often each of ``parts`` is in ``due``, if they are all that there is and not alike."""
    found = np.linalg.lstsq(parts.T, due, rcond=1e-9)[0]
    found = np.where(np.abs(found - np.rint(found)) < 1e-2, np.rint(found) + 0.0, found)
    fits = float(np.mean((found @ parts - due) ** 2)) <= 1
    return found if fits and np.ptp(found) > 1e-2 else None
