"""Identities between runs: questions that differ in what must not matter have the same answers.

I8, I9, I11 and I12 of ``invariants``: results may differ by another order of summation alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.parts import by_tokens, sequences
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows, side_of
from rawattn.check.diagnose.evidence.precision import TINY, eps_of, finite, narrowest
from rawattn.check.diagnose.evidence.rows import Bools, Float64
from rawattn.check.diagnose.evidence.side import Side
from rawattn.check.diagnose.findings import Check
from rawattn.check.transfer import Array

Call = Callable[[Question], Answers]

TEXTS = {
    "I8": "the sequences in another order give the same",
    "I9": "other numbers in the neighbours change nothing",
    "I11": "2 q with half the softmax_scale gives the same",
    "I12": "running again gives the same",
}
ULPS = {2: 8, 4: 256, 8: 256}  # by itemsize: what another order of a sum may change in a result
INTEGERS = ("block_indices", "block_counts")


class Runs:
    """``call`` and its answers to the question itself, which every other run is compared with."""

    def __init__(self, question: Question, side: str, call: Call) -> None:
        # an out and lse that a backward was given would not belong to the changed inputs
        self.question = replace(question, out=None, lse=None)
        self.side, self.call = side, call

    def checks(self) -> Iterator[Check]:
        asks = (self.other_order, self.other_neighbours, self.scaled, self.run)
        asked = list(zip(TEXTS.items(), asks, strict=True))[-1 if self.question.rare else 0 :]
        for (name, text), ask in asked:
            why = "there is one sequence" if name == "I9" and self.question.batch < 2 else ""
            if not why:
                try:
                    yield self.same(name, ask())
                except Exception as error:  # a function need not be able to do all of this
                    why = f"the function raised {type(error).__name__}: {error}"
            if why:
                yield Check(self.side, name, text, 0.0, 0.0, "-", why)

    @cached_property
    def first(self) -> Side:
        return Side(self.question, self.call(self.question), self.side)

    def run(self, **changes: Any) -> dict[str, Float64]:
        """The answers by rows, those that the first run gave too."""
        answers, before = self.call(replace(self.question, **changes)), self.first.answers
        return {name: by_rows(name, x) for name, x in answers.items() if name in before}

    def other_order(self) -> dict[str, Float64]:
        """The last sequence first; the results are brought back to the old order."""
        q, back, changes = self.question, {}, dict[str, Any]()
        for of in "qk":
            offsets, sequence = q.offsets(of), q.sequence_of(of)
            order = np.argsort(np.where(sequence < 0, 1, -sequence), kind="stable")
            changes |= by_tokens(q, of, itemgetter(order))
            turned = np.cumsum(np.append(0, np.diff(offsets)[::-1]))
            changes[f"cu_seqlens_{of}"] = turned.astype(offsets.dtype)
            back[of] = np.argsort(order)
        return {t: x[back[side_of(t)]] for t, x in self.run(**changes).items()}

    def other_neighbours(self) -> dict[str, Float64]:
        """Every second sequence gets other numbers, then the others."""
        first, found = self.first.answers, dict(self.first.answers)
        for parity in (0, 1):
            changes, other = dict[str, Any](), dict[str, Bools]()
            for of in "qk":
                sequence = self.question.sequence_of(of)
                other[of] = (sequence >= 0) & (sequence % 2 == parity)
                change = partial(_altered, rows=other[of])
                changes |= by_tokens(self.question, of, change, INTEGERS)
            for t, x in self.run(**changes).items():
                changed = _differ(x, first[t]) & ~other[side_of(t)][:, None, None]
                found[t] = np.where(changed, x, found[t])
        return found

    def scaled(self) -> dict[str, Float64]:
        """A factor of 2 rounds nothing."""
        q = self.question
        double = {n: getattr(q, n) * 2 for n in ("q", "tq") if getattr(q, n) is not None}
        double = {name: array.astype(q.dtype) for name, array in double.items()}
        answers = self.run(softmax_scale=q.scale / 2, **double)
        return {t: a * 2 if t in ("dq", "gq") else a for t, a in answers.items()}

    def same(self, name: str, answers: dict[str, Float64]) -> Check:
        """Whether results are those of the first run but for the order in which sums are taken:
        the largest differences of every sequence and tensor."""
        first, q = self.first, self.question
        off, allowed = np.zeros((2, q.batch, len(answers), 1))
        # the error of a term that is too small for its error to be relative
        tiny = 32 * first.unit * TINY.get(first.dtype, 0.0)
        tiny *= np.sqrt(max((*q.lengths_q, *q.lengths_k), default=0))
        for n, (tensor, x) in enumerate(answers.items()):
            before = first.answers[tensor]
            # behind results of 16-bit inputs there is such arithmetic
            dtype = q.dtype if q.dtype.itemsize == 2 else narrowest(before)
            ulps = ULPS[dtype.itemsize] * eps_of(np.empty(0, dtype))
            differs = np.where(_differ(x, before), np.abs(x - before), 0.0)
            for b, spans in enumerate(sequences(q)):
                rows = spans["qk".index(side_of(tensor))]
                off[b, n] = np.nan_to_num(differs[rows], nan=np.inf).max(initial=0.0)
                allowed[b, n] = ulps * np.abs(finite(before[rows])).max(initial=0.0) + tiny
        looked = first.finite[:, None] & np.ones(off.shape[:2], dtype=bool)
        return first.judged(name, TEXTS[name], off, allowed, looked, columns=[*answers])


def _differ(a: Float64, b: Float64) -> Bools:
    return np.asarray((a != b) & ~(np.isnan(a) & np.isnan(b)))


def _altered(array: Array, rows: Bools) -> Array:
    """``array`` with other numbers in these rows."""
    other = array.copy()
    other[rows] = (1.0 - 2.0 * array[rows].astype(np.float64)).astype(array.dtype)
    return other
