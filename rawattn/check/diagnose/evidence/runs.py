"""Identities between runs: questions that differ in what must not matter have the same answers.

I9, I11 and I12 of ``invariants``: results may differ by another order of summation alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.attention import Floats
from rawattn.check.diagnose.engine.parts import by_tokens
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows, side_of
from rawattn.check.diagnose.evidence.invariants import Off, healthy, judged, largest
from rawattn.check.diagnose.evidence.precision import eps_of, finite
from rawattn.check.diagnose.findings import Check
from rawattn.check.transfer import Array

TEXTS = {
    "I9": "other numbers in the neighbours change nothing",
    "I11": "2 q with half the softmax_scale gives the same",
    "I12": "running again gives the same",
}
ULPS = {2: 8, 4: 256, 8: 256}  # by itemsize: what another order of a sum may change in a result
SMALLEST = 2.0**-20  # what a term may be off by in float16 that is too small for a relative error
INTEGERS = ("block_indices", "block_counts")


class Runs:
    """``call`` and its answers to the question itself, which every other run is compared with."""

    def __init__(self, question: Question, side: str, call: Callable[[Question], Answers]) -> None:
        # an out and lse that a backward was given would not belong to the changed inputs
        self.question = replace(question, out=None, lse=None)
        self.side, self.call = side, call

    def checks(self, *names: str) -> Iterator[Check]:
        asks = {"I9": self.other_neighbours, "I11": self.scaled, "I12": self.run}
        for name in names:
            try:
                yield judged(self.side, name, TEXTS[name], [*self.differences(asks[name]())])
            except Exception as error:  # a function need not be able to do all of this
                why = f"the function raised {type(error).__name__}: {error}"
                yield Check(self.side, name, TEXTS[name], 0.0, 0.0, "-", why)

    @cached_property
    def first(self) -> dict[str, Floats]:
        return {name: by_rows(name, x) for name, x in self.call(self.question).items()}

    def run(self, **changes: Any) -> dict[str, Floats]:
        """The answers by rows, those that the first run gave too."""
        before, answers = self.first, self.call(replace(self.question, **changes))
        return {name: by_rows(name, x) for name, x in answers.items() if name in before}

    def other_neighbours(self) -> dict[str, Floats]:
        """Every second sequence gets other numbers, then the others."""
        first, found = self.first, dict(self.first)
        for parity in (0, 1):
            changes, other = dict[str, Any](), dict[str, np.ndarray]()
            for of in "qk":
                sequence = self.question.sequence_of(of)
                other[of] = (sequence >= 0) & (sequence % 2 == parity)
                change = partial(_altered, rows=other[of])
                changes |= by_tokens(self.question, of, change, INTEGERS)
            for t, x in self.run(**changes).items():
                changed = _differ(x, first[t]) & ~other[side_of(t)][:, None, None]
                found[t] = np.where(changed, x, found[t])
        return found

    def scaled(self) -> dict[str, Floats]:
        """A factor of 2 rounds nothing."""
        q = self.question
        double = {n: getattr(q, n) * 2 for n in ("q", "tq") if getattr(q, n) is not None}
        double = {name: array.astype(q.dtype) for name, array in double.items()}
        answers = self.run(softmax_scale=q.scale / 2, **double)
        return {t: a * 2 if t in ("dq", "gq") else a for t, a in answers.items()}

    def differences(self, answers: dict[str, Floats]) -> Iterator[Off]:
        """What results differ by from those of the first run, and what the order in which sums are
        taken may change."""
        q = self.question
        ulps = ULPS[q.dtype.itemsize] * eps_of(q.q)  # also of results in more bits
        tiny = np.sqrt(max((*q.lengths_q, *q.lengths_k))) * SMALLEST if q.dtype == np.float16 else 0
        for b, *spans, _ in healthy(q):
            for tensor, x in answers.items():
                rows = spans["qk".index(side_of(tensor))]
                now, before = x[rows], self.first[tensor][rows]
                with np.errstate(invalid="ignore"):
                    off = np.where(_differ(now, before), now - before, 0.0)
                yield Off(b, largest(off), ulps * largest(finite(before)) + tiny, tensor)


def _differ(a: Floats, b: Floats) -> np.ndarray:
    return np.asarray((a != b) & ~(np.isnan(a) & np.isnan(b)))


def _altered(array: Array, rows: np.ndarray) -> Array:
    """``array`` with other numbers in these rows."""
    other = array.copy()
    other[rows] = (1.0 - 2.0 * array[rows].astype(np.float64)).astype(array.dtype)
    return other
