"""Gradients that are sums of other parts than they must be: how often each part (a term of dS, a
query head of a group) is in one view, planted in all; and a D of 0, by the rows of dq."""

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue.second_order import with_values
from rawattn.check.diagnose.engine.attention import BACKWARD, Bug, Context, Floats, contexts
from rawattn.check.diagnose.engine.question import by_rows
from rawattn.check.diagnose.engine.steps import STEPS
from rawattn.check.diagnose.evidence.precision import rows_off
from rawattn.check.diagnose.evidence.structure import where
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.read.fields import by_head, sums_of
from rawattn.check.diagnose.read.forms import MOST, of_terms, of_terms_in_words, terms

GRADIENTS = {"dq": "dQ", "dk": "dK", "dv": "dV"}
OFF = 2.0**-7  # of its size: what a row of dq is wrong by


def bugs(sample: Sample) -> Iterator[Bug]:
    """Of each wrong gradient the sums that it is, of the sequence that is looked at."""
    names = [n for n in GRADIENTS if n in sample.wrong and sample.stage == "backward"]
    read = names and not sample.question.sparse
    for c in contexts(sample.question, "backward", sample.given) if read else ():
        for name in names if sample.has(c.view) and c.S.size else ():
            rows, heads = c.view.rows[:, None], c.view.heads
            if name != "dq":
                rows, heads = c.view.keys[:, None], np.array([c.view.head_kv])
            due = sample.found[name][rows, heads].swapaxes(0, 1)
            unit = max(sample.wrong[name], 1e-4) * float(np.sqrt(np.mean(due**2)))
            if unit and np.isfinite(due).all():
                if name != "dv":
                    yield from _of_terms(c, GRADIENTS[name], due, unit)
                if name != "dq" and len(c.S) > 1:
                    yield from _of_heads(c, GRADIENTS[name], due, unit)


def _of_terms(c: Context, step: str, due: Floats, unit: float) -> Iterator[Bug]:
    """dS as a sum of terms that gives ``due``; ``unit`` is what rounding may leave."""
    basis = {}
    for term in terms(c.question):
        x = with_values(step, dY=partial(of_terms, {term: 1.0}))(c)
        basis[term] = (x if len(x) == len(due) else x.sum(axis=0)).ravel() / unit
    near: dict[int, tuple[float, dict[str, float]]] = {}  # of so many terms the nearest
    wanted = due.ravel() / unit
    for factors in sums_of(basis, wanted, MOST):
        left = float(np.std(sum(x * basis[term] for term, x in factors.items()) - wanted))
        if left < near.get(len(factors), (math.inf,))[0]:
            near[len(factors)] = left, factors
    for _, factors in near.values():
        text, bug = of_terms_in_words(factors, c.question.dlse is not None)
        planted = with_values(step, dY=partial(of_terms, factors))
        yield Bug(bug, f"dS {text}", BACKWARD, steps={step: planted})


def _of_heads(c: Context, step: str, due: Floats, unit: float) -> Iterator[Bug]:
    """How often each head of a group is in ``due``, if they are all that there is and not alike."""
    parts = STEPS[step](c).reshape(len(c.S), -1) / unit
    found = np.linalg.lstsq(parts.T, due.ravel() / unit, rcond=1e-9)[0]
    by = np.where(np.abs(found - np.rint(found)) < 1e-2, np.rint(found) + 0.0, found)
    if np.mean((by @ parts - due.ravel() / unit) ** 2) <= 1 and np.ptp(by) > 1e-2:
        text = f"the heads of a group count {by_head(by)} times each"
        of = {step: lambda c: by[:, None, None] * STEPS[step](c)}
        yield Bug("gqa-group-not-summed", text, BACKWARD, steps=of)


def without_D(sample: Sample) -> Iterator[Bug]:
    """D of 0 in the rows of dq that are wrong: as a grid that is too small leaves it."""
    if "dq" not in sample.wrong:
        return
    found, due = sample.found["dq"], by_rows("dq", sample.truth["dq"])
    bad = rows_off(found, due, np.ones(due.shape[:2], dtype=bool), OFF)

    def D(c: Context) -> Floats:
        return np.where(bad[np.ix_(c.view.rows, c.view.heads)].T, 0.0, STEPS["D"](c))

    places = "; ".join([*where(sample.question, "dq", bad)][1:])
    text = f"D is 0, not dout . out - dlse, in some rows: {places}"
    yield Bug("delta-of-another-out", text, BACKWARD, steps={"D": D})
