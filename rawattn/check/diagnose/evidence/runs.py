"""Identities between runs: questions that differ in what must not matter have the same answers.

I8, I9, I11 and I12 of ``invariants``: results may differ by another order of summation alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.parts import by_tokens, sequences
from rawattn.check.diagnose.engine.question import Answers, Question, side_of
from rawattn.check.diagnose.evidence.reach import Bools, Float64
from rawattn.check.diagnose.evidence.side import Side
from rawattn.check.diagnose.evidence.structure import named
from rawattn.check.diagnose.findings import Check
from rawattn.check.transfer import Array

Call = Callable[[Question], Answers]

TEXTS = {
    "I8": "the sequences in another order give the same",
    "I9": "other numbers in the neighbours change nothing",
    "I11": "2 q with half the softmax_scale gives the same",
    "I12": "running again gives the same",
}
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
        why = ""
        try:
            self.first = Side(self.question, self.call(self.question), self.side)
        except Exception as error:
            why = _raised(error)
        for (name, text), ask in asked:
            missing = "there is one sequence" if name == "I9" and self.question.batch < 2 else why
            if not missing:
                try:
                    yield self.same(name, ask())
                except Exception as error:  # a function need not be able to do all of this
                    missing = _raised(error)
            if missing:
                yield Check(self.side, name, text, 0.0, 0.0, "-", missing)

    def run(self, **changes: Any) -> dict[str, Float64]:
        """The answers by rows, those that the first run gave too."""
        found = Side(self.question, self.call(replace(self.question, **changes)), "").answers
        return {name: x for name, x in found.items() if name in self.first.answers}

    def other_order(self) -> dict[str, Float64]:
        """The last sequence first; the results are brought back to the old order."""
        q = self.question
        order = {}
        changes: dict[str, Any] = {}
        for of in "qk":
            offsets, sequence = q.offsets(of), q.sequence_of(of)
            index = np.arange(len(sequence))
            turned = index[sequence >= 0][np.argsort(-sequence[sequence >= 0], kind="stable")]
            index[sequence >= 0] = turned
            changes |= by_tokens(q, of, itemgetter(index))
            back = np.cumsum(np.append(offsets[:1], np.diff(offsets)[::-1]))
            changes[f"cu_seqlens_{of}"] = back.astype(offsets.dtype)
            order[of] = np.argsort(index)
        return {t: a[order[side_of(t)]] for t, a in self.run(**changes).items()}

    def other_neighbours(self) -> dict[str, Float64]:
        """Every second sequence gets other numbers, then the others."""
        q, first = self.question, self.first.answers
        found = {tensor: array.copy() for tensor, array in first.items()}
        for parity in (0, 1):
            within = {of: q.sequence_of(of) for of in "qk"}
            other = {of: (x % 2 == parity) & (x >= 0) for of, x in within.items()}
            changes: dict[str, Any] = {}
            for of in "qk":
                changes |= by_tokens(q, of, partial(_altered, rows=other[of]), INTEGERS)
            for tensor, array in self.run(**changes).items():
                kept = ~other[side_of(tensor)]
                changed = _differ(found[tensor], first[tensor])[kept]  # already, by the others
                found[tensor][kept] = np.where(changed, found[tensor][kept], array[kept])
        return found

    def scaled(self) -> dict[str, Float64]:
        """A factor of 2 rounds nothing."""
        q = self.question
        double = {n: getattr(q, n) * 2 for n in ("q", "tq") if getattr(q, n) is not None}
        double = {name: array.astype(q.dtype) for name, array in double.items()}
        answers = self.run(softmax_scale=q.scale / 2, **double)
        return {t: a * 2 if t in ("dq", "gq") else a for t, a in answers.items()}

    def same(self, name: str, answers: dict[str, Float64]) -> Check:
        """Whether results are those of the first run but for the order in which sums are taken."""
        first, q = self.first, self.question
        floor = first.ulps_of_tiny * np.sqrt(max((*q.lengths_q, *q.lengths_k), default=0))
        worst, told, vacuous = (0.0, 0.0, 0.0), [], True
        for tensor, found in answers.items():
            before = first.answers[tensor]
            off = np.where(_differ(found, before), np.abs(found - before), 0.0)
            off = np.nan_to_num(off, nan=np.inf)
            size = np.where(np.isfinite(before), np.abs(before), 0.0)
            spans = [pair["qk".index(side_of(tensor))] for pair in sequences(q)]
            off, size = (
                np.array([x[span].max(axis=(0, 2), initial=0.0) for span in spans])
                for x in (off, size)
            )
            allowed = first.ulps(tensor) * size + floor
            looked = first.finite[:, None] & np.ones(off.shape, dtype=bool)
            bad = looked & (off > allowed)
            vacuous &= not (looked & (size > allowed)).any()
            if bad.any():
                some = "" if bad.all() else f"sequence {named('', np.flatnonzero(bad.any(axis=1)))}"
                told.append(f"{tensor}: {some or 'all'}")
            with np.errstate(all="ignore"):
                ratio = np.where(looked & (off > 0), off / allowed, 0.0)
            at = np.unravel_index(ratio.argmax(), ratio.shape)
            worst = max(worst, (float(ratio[at]), float(off[at]), float(allowed[at])))
        verdict = "FAIL" if told else "vacuous" if vacuous else "pass"
        where = "; ".join(told) or "zeros would pass" * vacuous
        return Check(self.side, name, TEXTS[name], worst[1], worst[2], verdict, where)


def _raised(error: Exception) -> str:
    return f"the function raised {type(error).__name__}: {error}"


def _differ(a: Float64, b: Float64) -> Bools:
    return np.asarray((a != b) & ~(np.isnan(a) & np.isnan(b)))


def _altered(array: Array, rows: Bools) -> Array:
    """``array`` with other numbers in these rows."""
    other = array.copy()
    other[rows] = (1.0 - 2.0 * array[rows].astype(np.float64)).astype(array.dtype)
    return other
