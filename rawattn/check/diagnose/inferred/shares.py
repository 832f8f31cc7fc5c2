"""Gradients that are sums of other parts than they must be: how often each part is in them is read
off one view, and planted in all.

Parts are the terms of dS, and the query heads of a group. Of dq, whose row is s sum_j P (dP - D)
K_j, the D of every row is read.
"""

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue.second_order import with_values
from rawattn.check.diagnose.engine.attention import BACKWARD, TILES, Bug, Context, Floats, contexts
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS
from rawattn.check.diagnose.evidence.structure import where
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.read.fields import by_head, number, sums_of
from rawattn.check.diagnose.read.forms import MOST, of_terms, of_terms_in_words, terms

GRADIENTS = {"dq": "dQ", "dk": "dK", "dv": "dV"}
LEAST, KEYS = 4, 3  # columns that tell a number of a row, and keys of it
OFF, ROUNDED = 1e-2, 5  # of its size: what a D may be off by that has a name, and 16 bits


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


# ---- D of every row -----------------------------------------------------------------------------


def by_rows_of_dq(sample: Sample) -> Iterator[Bug]:
    """Another D (num_heads_q, total_q) in some rows, or in all, where that gives all of dq."""
    dq, q = sample.found.get("dq", np.zeros((0, 0, 0))), sample.question
    if "dq" not in sample.wrong or dq.shape[2] < LEAST or not np.isfinite(dq).all():
        return
    along, D, count, dL = np.zeros(dq.shape), *np.zeros((3, *dq.shape[1::-1]))
    for c in contexts(q, "backward", sample.given):
        at = np.ix_(c.view.heads, c.view.rows)
        along.swapaxes(0, 1)[at] = with_values("dQ", dY=partial(of_terms, {"P": 1.0}))(c)
        D[at], dL[at], count[at] = c.D, c.dL, (c.W > 0).sum(axis=2)
    off, size = sample.truth["dq"] - dq, np.abs(sample.truth["dq"]).max(axis=2)
    allowed = 4 * sample.wrong["dq"] * (size + np.sqrt(np.mean(size**2)))
    length, size = (along**2).sum(axis=2), np.abs(along).max(axis=2)
    more = (off * along).sum(axis=2) / np.where(length > 0, length, 1.0)
    bad = (np.abs(more) * size > allowed).T
    fits = np.abs(off - more[..., None] * along).max(axis=2) <= allowed
    held, least = D + more.T, OFF * float(np.sqrt(np.mean(D**2)))
    far = bad.any() and np.sqrt(np.mean((held - D)[bad] ** 2)) > ROUNDED * least
    if not fits.all() or not far or (count[bad] >= KEYS).mean() < 0.5:
        return
    factor = float(held[bad] @ D[bad]) / max(float(D[bad] @ D[bad]), least**2)
    known = {"0": 0 * D, "- dlse": -dL, "dlse": dL, "dout . out": D + dL}
    known |= {"dout . out + dlse": D + 2 * dL, f"{number(factor)} D": factor * D}
    what = next((n for n, x in known.items() if np.abs(held - x)[bad].max() < least), "")
    due = known.get(what, held)
    tells = bad | (np.abs(due - D) * size.T > 4 * allowed.T) | (not what)
    text = f"D is {what or 'another number'}, not dout . out{' - dlse' * bool(dL.any())}"
    planted = np.where(bad, due, D)
    steps = {"D": lambda c: np.asarray(planted[np.ix_(c.view.heads, c.view.rows)])}
    text += _rows_in_words(q, bad.T, tells.T)
    yield Bug("delta-of-another-out" if what else "unknown", text, BACKWARD, steps=steps)


def _rows_in_words(q: Question, bad: np.ndarray, tells: np.ndarray) -> str:
    """Which rows (tokens, heads) these are, of those that tell; whether the last ones of all."""
    there = np.broadcast_to((q.sequence_of("q") >= 0)[:, None] & tells, bad.shape)
    if bad[there].all():
        return ""
    rows, ends = np.arange(len(bad))[:, None], (int(q.cu_seqlens_q[-1]), len(bad))
    last = {t for t in TILES for n in ends if (bad == (rows >= n // t * t))[there].all()}
    if last and bad[ends[0] - 1].any():
        multiple = " or ".join(map(str, sorted(last)))
        return f", in the last rows of the pack, from a multiple of {multiple} on"
    return f", in some rows: {'; '.join([*where(q, 'dq', bad, tells)][1:])}"
