"""Which terms of derivatives count otherwise than once: read by least squares. The results of these
stages are linear in how often each of their terms counts, so that one solution of each tells how
often it is there, whatever number that is."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import first_order, second_order
from rawattn.check.diagnose.catalogue.reading import of_view
from rawattn.check.diagnose.catalogue.second_order import (
    Term,
    by_given_out,
    multiple,
    of_one_pass,
    with_values,
)
from rawattn.check.diagnose.catalogue.sparse import selection
from rawattn.check.diagnose.engine.attention import FIRST, FORWARD, TILES, Bug, View, each, solve
from rawattn.check.diagnose.engine.effort import spent
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows
from rawattn.check.diagnose.engine.steps import LOG2_E, STEPS, Context, Floats, Step, times
from rawattn.check.diagnose.evidence.places import places_of
from rawattn.check.diagnose.evidence.precision import finite
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.read.fields import number
from rawattn.check.diagnose.read.terms import of_view as of_pairs

NUMBERS = 20_000  # of a tensor that are looked at, about
NEAR, CLOSE = 1e-2, 1e-3  # of a factor to one that has a name; of what is off that may be left
CLEAR = 0.05  # of the square of what is off, where rounding leaves more than that nothing is read
STEP, TOLD = 1e-3, 1e-2  # of a factor of all scores; of what is off, that it may leave
MOST = 4  # bugs of one pass, for each tensor
EFFORT = 2000.0  # units, for bugs of one pass
OF_SCALE = ("constant-factor", "second-term-dropped")  # what softmax_scale may be a factor of


def single(sample: Sample) -> list[Bug]:
    """Bugs of one term; some tensors may tell other factors than others."""
    if sample.stage in FIRST and (of_scale := [*_of_scale(sample)]):
        return of_scale
    return [] if sample.stage == "forward" or not sample.wrong else _alone(sample)


def _of_scale(sample: Sample) -> Iterator[Bug]:
    """A factor of scores, or of exponents, that is off by so little that results change in
    proportion to it."""
    made: dict[str, Callable[[float], dict[str, Step]]] = {
        "the scores are": lambda by: {"Y": lambda c: by * STEPS["Y"](c)},
    }
    if sample.stage == "backward":
        made["S - lse is"] = lambda by: {
            "bP": with_values("bP", S=multiple("S", by), L=multiple("L", by))
        }
    for words, steps in made.items():
        one, due, by = sample.planted(Bug("", stages=FIRST, steps=steps(1 + STEP))), [], []
        for name in sample.wrong:
            right, there = by_rows(name, sample.truth[name]), np.isfinite(sample.found[name])
            there &= (sample.question.sequence_of(name) >= 0)[:, None, None] & np.isfinite(right)
            due.append((sample.found[name] - right)[there])
            by.append((by_rows(name, one[name]) - right)[there] / STEP)
        off, of = np.concatenate([*due, np.zeros(0)]), np.concatenate([*by, np.zeros(0)])
        factor = float(of @ off) / max(float(of @ of), 1e-30)
        left = np.linalg.norm(off - factor * of)
        if 0 < abs(factor) < STEP and left < TOLD * np.linalg.norm(off):
            text = f"{words} multiplied by {1 + factor:.10g}, as by log2(e) in too few digits"
            yield Bug("score-scale", text, FIRST, steps=steps(1 + factor))


def bugs(sample: Sample) -> Iterator[Bug]:
    """Of one pass of a double backward alone, or of the tangents of a jvp alone."""
    question, stage = sample.question, sample.stage
    if not sample.wrong:
        return
    first = bool({"ddout", "ddlse"} & sample.wrong.keys())
    if stage == "second":
        yield from _alone(sample, partial(of_one_pass, first=first))
    of_masks = _of_tangents(question) if stage == "jvp" else _of_masks(question, first)
    yield from sample.near([of_masks], MOST, spent() + EFFORT)


def _listed(question: Question) -> Iterator[Bug]:
    """Who sees whom: listed bugs, and no mask in the tiles that are visited."""
    masked = question.mask_window != (-1, -1) and not question.sparse
    sizes = sorted(product(TILES, TILES), key=lambda two: max(two) // min(two))
    for tile, other in sizes[:13] if masked else ():  # square ones, and those twice as long
        text = f"all keys of tiles of {tile} queries and {other} keys in which some are seen"
        yield Bug("wrong-keys", text, see=each(_whole_tiles, tile, other))
    listed = selection.bugs(question) if question.sparse else first_order.bugs(question)
    yield from (b for b in listed if b.see is not None and b.stages != FORWARD)


def _whole_tiles(tile: int, other: int, _: Question, view: View) -> View:
    seen = view.weight > 0
    for axis, size in ((1, tile), (2, other)):
        count = seen.shape[axis]
        found = np.logical_or.reduceat(seen, np.arange(0, count, size), axis) if count else seen
        seen = found.take(np.arange(count) // size, axis)
    return replace(view, weight=seen.astype(np.float64))


def _of_masks(question: Question, first: bool) -> Iterator[Bug]:
    """Who sees whom in one pass alone, in the first one also in the products with E alone."""
    for bug in (b.at("second") for b in _listed(question)):
        yield of_one_pass(bug, first)
        if first:
            by_out, of_E = (replace(bug, steps={**bug.steps, "tO": x}) for x in OF_E.values())
            yield from (of_one_pass(by_out, first), by_out)
            yield of_one_pass(replace(of_E, variant=bug.variant + [*OF_E][1]), first)


def _of_tangents(question: Question) -> Iterator[Bug]:
    """Who sees whom in the tangents alone, whose P is exp(S - lse) with the right lse; that of rows
    without keys may be there as it is, or a number."""
    for bug in _listed(question):
        for (more, step), none in product(OF_E.items(), (0.0, np.inf, -np.inf)):
            softmax = partial(_by_right_lse, none)
            steps: dict[str, Step] = {**bug.steps, "softmax": softmax, "tO": step}
            steps["O"] = lambda c: of_view(c, "out", _right(c.question)["out"])
            yield Bug(bug.name, bug.variant + more, ("jvp",), bug.see, steps)


def _by_right_lse(none: float, c: Context) -> tuple[Floats, Floats]:
    right = of_view(c, "lse", _right(c.question)["lse"])
    L = np.where(np.isneginf(right), none, right)[..., None]
    return right, np.where(np.isneginf(c.S), 0.0, np.exp(c.S - L))


_right = lru_cache(maxsize=4)(partial(solve, stage="forward"))


def _of_E_alone(c: Context) -> Floats:
    """The tangent of out whose P tV is of the right pairs alone."""
    right = c.P * of_pairs(c, places_of(c.question).rights)
    return np.asarray(times(c.P * c.E, c.V) + times(right, c.tV) - c.e[..., None] * c.O)


OF_E: dict[str, Step] = {
    ", in the tangents alone": by_given_out,
    ", in the products with E alone": _of_E_alone,
}


def _alone(sample: Sample, plant: Callable[[Bug], Bug] = lambda bug: bug) -> list[Bug]:
    """What a wrong tensor is off by, at some places, as so many times what a term adds to it."""
    terms = [*second_order.terms(sample.question, sample.stage)]
    twice = (plant(Bug("", stages=(sample.stage,), steps=term.of(2.0))) for term in terms)
    added = [sample.planted(bug) for bug in twice]
    bugs: dict[str, Bug] = {}
    for tensor, noise in sample.wrong.items():
        found, right = sample.found[tensor], by_rows(tensor, sample.truth[tensor])
        there = np.isfinite(found) & np.isfinite(right)
        at = np.flatnonzero(there & (sample.question.sequence_of(tensor) >= 0)[:, None, None])
        at = at[:: max(1, len(at) // NUMBERS)]
        due, size = (found - right).ravel()[at], right.ravel()[at]
        allowed = max(float(noise**2 * (size @ size)), CLOSE**2 * float(due @ due))
        for term, one in zip(terms, added, strict=True) if allowed < CLEAR * due @ due else ():
            of = finite(by_rows(tensor, one[tensor]) - right).ravel()[at]
            by = float(of @ due) / float(of @ of) if of.any() else 0.0
            if due @ due - by * (of @ due) <= allowed:
                name, form, factor = _told(sample, term, 1 + by)
                bug = Bug(name, form, (sample.stage,), steps=term.of(factor))
                bugs.setdefault(name + form, plant(bug))
    return [*bugs.values()]


def _told(sample: Sample, term: Term, factor: float) -> tuple[str, str, float]:
    """The class of what counts so often, in words, and the number that is meant."""
    s = sample.question.scale
    scales = {"without s": 1 / s, "with s twice": s, "in base 2": LOG2_E, "times ln 2": 1 / LOG2_E}
    known = {"with the wrong sign": -1.0, "twice": 2.0, "half of it": 0.5, **scales}
    if abs(factor) < NEAR:
        return term.name, term.none, 0.0
    near = {words: x for words, x in known.items() if abs(factor / x - 1) < NEAR}
    if not near:
        return term.other, f"{term.text}, times {number(factor)}", factor
    of_scale = near.keys() & scales.keys() and term.other in OF_SCALE
    scale = "output-scale" if sample.stage == "backward" else "tangent-scale"
    name = scale if of_scale else term.other
    return name, f"{term.text} {' or '.join(near)}", next(iter(near.values()))
