"""Which sums of parts of the keys were put together wrongly? Tried on one view, planted if it fits.

Tiles that come one after the other must be rescaled by exp(old max - new max) of their own row; the
results of splits must be weighted by exp(lse of the split - lse).
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue.partial_sums import (
    LSES,
    RESCALED,
    RIGHT,
    RIGHTLY,
    WAYS,
    WEIGHTS,
    Cut,
    Results,
    divided,
    merged,
    parts_of,
    rescaled,
    splits,
    steps,
    tiles,
    totals,
)
from rawattn.check.diagnose.engine.attention import Bug, Context, contexts
from rawattn.check.diagnose.engine.question import Answers, Question

FITS = 0.1  # of what is wrong may be left on the view that is looked at
MOST = 6  # merges that are planted
TENSORS = {
    "forward": {"out": "out", "lse": "lse"},
    "jvp": {"out": "jvp out", "lse": "jvp lse", "tout": "tout", "e": "tlse"},
}
SUMS = {
    "forward": RESCALED,
    "jvp": (("e",), ("tout",), ("e", "tout"), ("out",), ("row_sum",), ("out", "tout")),
}
WORDS = {"e": "the sum of P o E", "tout": "the sum of (P o E) V + P tV"}


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs of partial sums that fit the view with the largest errors."""
    if stage not in TENSORS:
        return
    views = [c for c in contexts(question, stage) if c.S.shape[2]]
    names = {of: name for of, name in TENSORS[stage].items() if name in answers}
    rights = [
        Results(c.O, c.L, c.tL, c.tO) if stage == "jvp" else Results(c.O, c.L, c.L, c.O)
        for c in views
    ]
    errors = [_errors(c, answers, names, of) for c, of in zip(views, rights, strict=True)]
    sizes = [sum(of.values()) for of in errors]
    if not any(sizes):
        return
    worst = int(np.argmax(sizes))
    c, wrong = views[worst], errors[worst]
    with np.errstate(all="ignore"):
        for at, cut in tiles(question).items():
            parts = parts_of(c, cut)
            sums = totals(parts, RIGHTLY)
            for words, way in WAYS.items():
                others = totals(parts, way)
                for moved in SUMS[stage]:
                    of = divided(parts, sums | {name: others[name] for name in moved})
                    left = _errors(c, answers, names, of)
                    if sum(left.values()) < FITS**2 * sum(wrong.values()):
                        said = " and ".join(WORDS.get(name, name) for name in moved)
                        planted = steps(stage, cut, partial(rescaled, wrong=moved, way=way))
                        yield Bug("no-rescale", f"{said} {words}, {at}", (stage,), steps=planted)
        if stage == "forward":
            near = [_merge(c, answers, wrong, cut, at) for at, cut in splits(question).items()]
            told = sorted((one for one in near if one is not None), key=lambda one: one[0])
            yield from (bug for _, bug in told[:MOST])


def _merge(
    c: Context, answers: Answers, wrong: dict[str, float], cut: Cut, at: str
) -> tuple[float, Bug] | None:
    """The merge of these parts that comes nearest, and how near; None where none mends much."""
    parts, total, mends = parts_of(c, cut), 0.0, False
    forms = {"out": RIGHT, "lse": RIGHT}
    results: dict[str, dict[str, Results]] = {
        "out": {form: merged(parts, form, RIGHT) for form in WEIGHTS},
        "lse": {form: merged(parts, RIGHT, form) for form in LSES},
    }
    for name in wrong:
        left = {
            form: _errors(c, answers, {name: name}, of)[name] for form, of in results[name].items()
        }
        form = min(left, key=lambda form: left[form])
        if left[form] < FITS**2 * min(wrong[name], left[RIGHT]):
            mends, forms[name] = True, form
        total += left[forms[name]]
    said = f"weights {forms['out']}; lse {forms['lse']}; {at}"
    planted = steps("forward", cut, partial(merged, out=forms["out"], lse=forms["lse"]))
    return (total, Bug("partial-merge", said, ("forward",), steps=planted)) if mends else None


def _errors(c: Context, answers: Answers, names: dict[str, str], of: Results) -> dict[str, float]:
    """Squares of what a view's answers are off by, each in units of its size."""
    found = {}
    heads, rows = c.view.heads[:, None], c.view.rows
    for field, name in names.items():
        x, wanted = answers[name], getattr(of, field)
        x = np.asarray(x[(heads, rows) if x.ndim == 2 else (rows, heads)], dtype=np.float64)
        both = np.isfinite(x) & np.isfinite(wanted)
        size = float((x[both] ** 2).sum())
        found[field] = float(((x[both] - wanted[both]) ** 2).sum()) / size if size else 0.0
        found[field] += float((np.isfinite(x) != np.isfinite(wanted)).mean())
    return found
