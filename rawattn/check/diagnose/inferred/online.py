"""Which sums of parts of the keys were put together wrongly? Tried on one view, planted if it fits.

Tiles that come one after the other must be rescaled by exp(old max - new max) of their own row; the
results of splits must be weighted by exp(lse of the split - lse).
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

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
SHOWS = 0.01  # of the largest error: a view with as much is looked at, if it is the longest
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
    """Bugs of partial sums that fit the longest of the views with large errors."""
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
    telling = [
        c.S.shape[2] * (size > SHOWS * max(sizes)) for c, size in zip(views, sizes, strict=True)
    ]
    worst = int(np.argmax(telling))
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
            cuts = splits(question).items()
            near = [one for at, cut in cuts for one in _merges(c, answers, wrong, cut, at)]
            yield from (bug for _, bug in sorted(near, key=lambda one: one[0])[:MOST])


def _merges(
    c: Context, answers: Answers, wrong: dict[str, float], cut: Cut, at: str
) -> Iterator[tuple[float, Bug]]:
    """The merges of these parts that come nearest, and how near; none where none mends much."""
    parts, total = parts_of(c, cut), 0.0
    forms = {"out": [RIGHT], "lse": [RIGHT]}
    results: dict[str, dict[str, Results]] = {
        "out": {form: merged(parts, form, RIGHT) for form in WEIGHTS},
        "lse": {form: merged(parts, RIGHT, form) for form in LSES},
    }
    for name in wrong:
        left = {
            form: _errors(c, answers, {name: name}, of)[name] for form, of in results[name].items()
        }
        least = min(left.values())
        if least < FITS**2 * min(wrong[name], left[RIGHT]):  # where all parts have keys some tie
            forms[name] = [form for form in left if left[form] <= 1.01 * least + 1e-12]
        total += left[forms[name][0]]
    for out, lse in product(*forms.values()):
        if (out, lse) != (RIGHT, RIGHT):
            planted = steps("forward", cut, partial(merged, out=out, lse=lse))
            said = f"weights {out}; lse {lse}; {at}"
            yield total, Bug("partial-merge", said, ("forward",), steps=planted)


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
