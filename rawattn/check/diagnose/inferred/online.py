"""Which running sums were not rescaled, by exp(old max - new max) of their own row, as the next
tile of keys came? Tried on one view, planted if it fits."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue.partial_sums import (
    RESCALED,
    RIGHTLY,
    WAYS,
    Results,
    divided,
    parts_of,
    rescaled,
    steps,
    tiles,
    totals,
)
from rawattn.check.diagnose.engine.attention import Bug, Context, Floats, contexts
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.inferred.sample import Sample

FITS = 0.01  # of the squares of what is wrong may be left on the view that is looked at
TENSORS = {
    "forward": {"out": "out", "lse": "lse"},
    "jvp": {"out": "jvp out", "lse": "jvp lse", "tout": "tout", "e": "tlse"},
}
SUMS = {
    "forward": RESCALED,
    "jvp": (("e",), ("tout",), ("e", "tout"), ("out",), ("row_sum",), ("out", "tout")),
}
WORDS = {"e": "the sum of P o E", "tout": "the sum of (P o E) V + P tV"}


@np.errstate(all="ignore")
def bugs(question: Question, answers: Answers, stage: str) -> list[Bug]:
    """Those that fit the view of a sample."""
    sample = Sample(question, answers, stage)
    views = contexts(question, stage) if sample.wrong and stage in TENSORS else []
    for c in (c for c in views if c.view.sequence == sample.sequence and c.S.shape[2]):
        if c.view.head_kv == sample.head_kv:
            names = {of: name for of, name in TENSORS[stage].items() if name in sample.found}
            found = {
                of: sample.found[name][c.view.rows][:, c.view.heads] for of, name in names.items()
            }
            return [*_rescaled(question, stage, c, found)]
    return []


def _rescaled(
    question: Question, stage: str, c: Context, found: dict[str, Floats]
) -> Iterator[Bug]:
    right = Results(c.O, c.L, *((c.tL, c.tO) if stage == "jvp" else (c.L, c.O)))
    wrong = sum(_left(x, getattr(right, of)) for of, x in found.items())
    for at, cut in tiles(question).items():
        parts = parts_of(c, cut)
        sums = totals(parts, RIGHTLY)
        ways = ((words, way, totals(parts, way)) for words, way in WAYS.items())
        for (words, way, others), moved in product(ways, SUMS[stage]):
            of = divided(parts, sums | {name: others[name] for name in moved})
            if sum(_left(x, getattr(of, name)) for name, x in found.items()) < FITS * wrong:
                said = " and ".join(WORDS.get(name, name) for name in moved)
                planted = steps(stage, cut, partial(rescaled, wrong=moved, way=way))
                yield Bug("no-rescale", f"{said} {words}, {at}", (stage,), steps=planted)


def _left(found: Floats, wanted: Floats) -> float:
    """The square of what an answer (n, heads, columns) is off by, in units of its size."""
    found = found.swapaxes(0, 1).reshape(wanted.shape)
    both = np.isfinite(found) & np.isfinite(wanted)
    size = float((found[both] ** 2).sum())
    left = float(((found[both] - wanted[both]) ** 2).sum()) / size if size else 0.0
    return left + float((np.isfinite(found) != np.isfinite(wanted)).mean())
