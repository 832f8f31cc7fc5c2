"""Which sums of parts of the keys were put together wrongly? Tried on one view, planted if it fits.
Tiles that come one after the other must be rescaled by exp(old max - new max) of their own row; the
results of splits must be weighted by exp(lse of the split - lse)."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue import partial_sums
from rawattn.check.diagnose.catalogue.partial_sums import RIGHT, merged
from rawattn.check.diagnose.engine.attention import RESULTS, Bug, Context, Floats, contexts
from rawattn.check.diagnose.engine.question import BY_ROW, Answers
from rawattn.check.diagnose.inferred.sample import Sample

FITS = 0.01  # of the squares of what is wrong may be left on the view that is looked at
ROUNDED = 1e-12  # of them that may be rounding
MOST, ALIKE = 6, 60  # merges that are planted, and of which the nearest of all rows are chosen
SAME = 1e-9  # of squares: what leaves as much is alike
STEPS = {"out": "O", "lse": "L", "e": "tL", "tout": "tO"}  # by which fields of Results are made
SUMS = {
    "forward": (("out",), ("row_sum",), ("out", "row_sum")),
    "jvp": (
        *(("e",), ("tout", "ptv"), ("e", "tout", "ptv"), ("out",), ("row_sum",)),
        *(("out", "tout", "ptv"), ("tout",), ("ptv",)),
    ),
}
MERGED: dict[str, Iterable[str]] = {"out": partial_sums.WEIGHTS, "lse": partial_sums.LSES}
MERGED |= {"e": partial_sums.WEIGHTS, "tout": partial_sums.TOUTS}
SAID = {"out": "weights", "e": "weights of tlse"}
WORDS = {"e": "the sum of P o E", "tout": "the sum of (P o E) V", "ptv": "the sum of P tV"}


@np.errstate(all="ignore")
def bugs(sample: Sample) -> list[Bug]:
    """Bugs of partial sums that fit the view of a sample."""
    stage = sample.stage
    views = contexts(sample.question, stage) if sample.wrong and stage in SUMS else ()
    for c in (c for c in views if sample.has(c.view) and c.S.shape[2]):
        told = {step: name for name, step in RESULTS[stage].items() if name in sample.found}
        names = {of: told[step] for of, step in STEPS.items() if step in told}
        at = np.ix_(c.view.rows, c.view.heads)
        found = {of: sample.found[name][at].swapaxes(0, 1) for of, name in names.items()}
        found = {of: x[..., 0] if names[of] in BY_ROW else x for of, x in found.items()}
        right = {of: getattr(c, STEPS[of]) for of in names}
        off = (np.isfinite(x) & ~np.isclose(x, right[of], 1e-3, 1e-4) for of, x in found.items())
        if not any(x.any() for x in off):  # NaN alone: no numbers tell a sum
            return []
        return [*_rescaled(stage, c, found, right), *_merges(sample, c, found, right)]
    return []


def _rescaled(stage: str, c: Context, found: Answers, right: Answers) -> Iterator[Bug]:
    # rows that are right may have another loop
    same = {of: np.isclose(x, right[of], 1e-3, 1e-4) for of, x in found.items()}
    wrong, seen = sum(_left(x, right[of]) for of, x in found.items()), set[tuple[object, ...]]()
    for at, cut in partial_sums.tiles(c.question).items():
        parts = partial_sums.parts_of(c, cut)
        sums = partial_sums.totals(parts, partial_sums.RIGHTLY)
        every = partial_sums.ways(c.question).items()
        ways = ((x, way, partial_sums.totals(parts, way)) for x, way in every)
        for (words, way, others), moved in product(ways, SUMS[stage]):
            of = partial_sums.divided(parts.top, sums | {name: others[name] for name in moved})
            alike = at, *(np.round(getattr(of, name), 8).tobytes() for name in found)
            if alike in seen:  # of two tiles most ways do the same
                continue
            seen.add(alike)
            if sum(_left(x, getattr(of, n), same[n]) for n, x in found.items()) < FITS * wrong:
                said = " and ".join(WORDS.get(name, name) for name in moved)
                of_parts = partial(partial_sums.rescaled, wrong=moved, way=way)
                planted = partial_sums.steps(stage, cut, of_parts)
                yield Bug("no-rescale", f"{said} {words}, {at}", (stage,), steps=planted)


def _merges(sample: Sample, c: Context, found: Answers, right: Answers) -> list[Bug]:
    """The merges that come nearest; where all parts have keys some are alike."""
    near, stage = list[tuple[float, Bug]](), sample.stage
    off = {of: _left(x, right[of]) for of, x in found.items()}
    for at, cut in partial_sums.splits(c.question).items():
        parts, total = partial_sums.parts_of(c, cut), sum(off.values())
        forms = {of: [RIGHT] for of in found}
        for of, x in found.items():
            given = {"e": forms["e"][0]} if of == "tout" else {}
            every = MERGED[of] if off[of] > ROUNDED else ()
            left = {n: _left(x, getattr(merged(parts, **given | {of: n}), of)) for n in every}
            least = min(left.values(), default=off[of])
            if least < FITS * off[of]:
                forms[of] = [form for form in left if left[form] <= 1.01 * least + 1e-12]
                total += least - off[of]
        for chosen in product(*forms.values()):
            wrong: Any = {of: form for of, form in zip(forms, chosen, strict=True) if form != RIGHT}
            if wrong:
                planted = partial_sums.steps(stage, cut, partial(merged, **wrong))
                form = "; ".join([*(f"{SAID.get(x, x)} {y}" for x, y in wrong.items()), at])
                near.append((total, Bug("partial-merge", form, (stage,), steps=planted)))
    near.sort(key=lambda one: one[0])
    alike = [bug for total, bug in near[:ALIKE] if total <= near[0][0] + SAME]
    if len(alike) > MOST:  # most splits of few keys are the same
        return sorted(alike, key=lambda bug: sum(sample.of_wrong(bug).values()))[:MOST]
    return [bug for _, bug in near[:MOST]]


def _left(found: Floats, wanted: Floats, but: Floats | bool = False) -> float:
    """The square of what an answer is off by, in units of its size; ``but`` for some of it."""
    found = np.where(but, wanted, found)
    both = np.isfinite(found) & np.isfinite(wanted)
    size = float((found[both] ** 2).sum())
    left = float(((found[both] - wanted[both]) ** 2).sum()) / size if size else 0.0
    return left + float((np.isfinite(found) != np.isfinite(wanted)).mean())
