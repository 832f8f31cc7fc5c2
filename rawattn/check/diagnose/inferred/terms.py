"""Which terms of derivatives count otherwise than once: read by least squares. The results of these
stages are linear in how often each of their terms counts, so that one solution of each tells how
often it is there, whatever number that is."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue import first_order, second_order
from rawattn.check.diagnose.catalogue.second_order import Term, by_given_out, of_one_pass
from rawattn.check.diagnose.catalogue.sparse import selection
from rawattn.check.diagnose.engine.attention import FORWARD, Bug
from rawattn.check.diagnose.engine.effort import spent
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows
from rawattn.check.diagnose.engine.steps import LOG2_E, Step
from rawattn.check.diagnose.evidence.precision import finite
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.read.fields import number

NUMBERS = 20_000  # of a tensor that are looked at, about
NEAR, CLOSE = 1e-2, 1e-3  # of a factor to one that has a name; of what is off that may be left
CLEAR = 0.05  # of the square of what is off, where rounding leaves more than that nothing is read
MOST = 4  # bugs of one pass, for each tensor
EFFORT = 2000.0  # units, for bugs of one pass
OF_SCALE = ("constant-factor", "second-term-dropped")  # what softmax_scale may be a factor of


def single(question: Question, answers: Answers, stage: str) -> list[Bug]:
    """Bugs of one term; some tensors may tell other factors than others."""
    sample = Sample(question, answers, stage)
    return _alone(sample, [*second_order.terms(question, stage)]) if sample.wrong else []


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Of one pass of a double backward alone."""
    sample = Sample(question, answers, stage)
    if not sample.wrong:
        return
    first = bool({"ddout", "ddlse"} & sample.wrong.keys())
    terms = second_order.terms(question, stage)
    for bug in _alone(sample, [one._replace(of=partial(_of_pass, one, first)) for one in terms]):
        words = f"in the {'first' if first else 'second'} pass alone"
        yield replace(bug, variant=f"{bug.variant}, {words}")
    yield from sample.near([_of_masks(question, first)], MOST, spent() + EFFORT)


def _of_pass(term: Term, first: bool, factor: float) -> dict[str, Step]:
    return {**of_one_pass(Bug("", steps=term.of(factor)), first).steps}


def _of_masks(question: Question, first: bool) -> Iterator[Bug]:
    """Who sees whom in one pass alone."""
    listed = selection.bugs(question) if question.sparse else first_order.bugs(question)
    for bug in (b.at("second") for b in listed if b.see is not None and b.stages != FORWARD):
        yield of_one_pass(bug, first)
        if first:
            by_out = replace(bug, steps={**bug.steps, "tO": by_given_out})
            yield from (of_one_pass(by_out, first), by_out)


def _alone(sample: Sample, terms: Sequence[Term]) -> list[Bug]:
    """What a wrong tensor is off by, at some places, as so many times what a term adds to it."""
    twice = (Bug("", stages=(sample.stage,), steps=term.of(2.0)) for term in terms)
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
                bugs.setdefault(name + form, bug)
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
