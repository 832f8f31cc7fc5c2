"""Which bug of what is read, or where results are stored? Hundreds of listed ones are tried on one
sequence; constants and orders of rows, which are too many to list, are read off."""

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue import inputs, stages, tiles
from rawattn.check.diagnose.catalogue.sparse import selection
from rawattn.check.diagnose.engine.attention import Bug, solve
from rawattn.check.diagnose.engine.effort import spent
from rawattn.check.diagnose.engine.question import OF_KEYS, Question, by_rows
from rawattn.check.diagnose.evidence.precision import relative_residual
from rawattn.check.diagnose.inferred import accumulators, dropped
from rawattn.check.diagnose.inferred.sample import WHOLE, Sample, is_wrong, stored

EFFORT = 3000.0  # units, for the listed ones of one stage, at most
YIELDED = 6  # of them for each tensor, in the end
HELPS, FAR = 0.5, 0.25  # of the right one's residual, and of what was found: at most what is left
CLOSE = 5e-5  # a number that is as near to another as this is that one


def numbers(first: Sample) -> Iterator[Bug]:
    """Bugs whose numbers are read off the answers; none where nothing can be read."""
    for sample in _samples(first):
        for of in (_constants, accumulators.bugs, _rearranged):
            yield from of(sample)
        of_tiles = tiles.sums(sample.question, sample.stage, sample.wrong.keys())
        yield from sample.near([of_tiles], YIELDED, spent() + EFFORT)


def bugs(first: Sample) -> Iterator[Bug]:
    """Of many bugs of one kind those that come near the answers."""
    question, stage = first.question, first.stage
    for sample in _samples(first):
        wrong = sample.wrong.keys()
        right, b = sample.found.keys() - wrong, sample.sequence
        families = (
            selection.candidates(question, stage, wrong) if question.sparse else (),
            tiles.of_splits(question) if stage == "forward" and not question.sparse else (),
            dropped.bugs(sample),
            inputs.candidates(question, stage, wrong, right, b),
            stages.candidates(question, stage, wrong, b),
        )
        yield from sample.near(families, YIELDED, spent() + EFFORT)


def _samples(first: Sample) -> Iterator[Sample]:
    """With the out and lse that a backward pass may have had, those where something is wrong."""
    q, given = first.question, first.given
    if first.wrong:
        yield first
    if first.wrong and given is not None and q.passed is None and is_wrong(q, given):
        right = solve(q, "forward")
        other = Sample(q, first.answers, first.stage, (right["out"], right["lse"]))
        yield from [other] * bool(other.wrong)


def _constants(sample: Sample) -> Iterator[Bug]:
    """A tensor that is the right one times a number."""
    q = sample.question
    for name in sample.wrong:
        a, b = sample.found[name], by_rows(name, sample.truth[name])
        inside = (sample.question.sequence_of(name) >= 0)[:, None, None]
        a, b = (np.where(np.isfinite(a * b) & inside, x, 0.0) for x in (a, b))
        factor = float((a * b).sum() / max((b * b).sum(), np.finfo(float).tiny))
        left = relative_residual(a, factor * b, WHOLE)
        if left < 0.02 and abs(factor - 1) > max(1e-3, 2 * left):
            store, form = stored(name, partial(np.multiply, factor)), _in_words(factor, q)
            yield Bug("constant-factor", f"{name} times {form}", (sample.stage,), store=store)


def _in_words(x: float, q: Question) -> str:
    """A number, and what it is near to."""
    known = {"ln 2": math.log(2), "log2(e)": 1 / math.log(2)}
    known |= {"softmax_scale": q.scale, "1 / softmax_scale": 1 / q.scale}
    known["1 / group: the mean over its heads, not their sum"] = 1 / q.group if q.group > 1 else 0.0
    if x and math.isfinite(x):
        power = round(math.log2(abs(x)))
        known[f"{'-' * (x < 0)}2^{power}"] = math.copysign(2.0**power, x)
    near = [text for text, y in known.items() if math.isclose(x, y, rel_tol=CLOSE)]
    return " = ".join([f"{x:.4g}", *near])


def _rearranged(sample: Sample) -> Iterator[Bug]:
    """Results whose rows, or numbers, are in other places; those of keys alone, and together."""
    of_keys = tuple(name for name in sample.wrong if name in OF_KEYS)
    most = {n: min(FAR, HELPS * sample.of_all(n, sample.truth[n])) for n in sample.wrong}
    for names in dict.fromkeys([*((name,) for name in sample.wrong), of_keys]):
        here = {name: sample.truth[name] for name in names}
        for bug in inputs.rearranged(sample.question, names) if names else ():
            assert bug.store is not None
            moved = {n: x for n, x in bug.store(sample.question, here).items() if n in here}
            shapes = all(moved[n].shape == x.shape for n, x in here.items())
            if shapes and all(sample.of_all(n, x) < most[n] for n, x in moved.items()):
                yield bug
