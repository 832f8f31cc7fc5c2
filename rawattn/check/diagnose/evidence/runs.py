"""Identities between runs: questions that differ in what must not matter have the same answers.

I8, I9, I11 and I12 of ``invariants``: results may differ by another order of summation alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.reach import Bools, Float64, by_tokens, sequences
from rawattn.check.diagnose.evidence.side import Side
from rawattn.check.diagnose.evidence.structure import side_of
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
        asked = (self.other_order, self.other_neighbours, self.scaled, self.run)
        why = ""
        try:
            self.first = Side.of(self.question, self.run(), self.side)
        except Exception as error:
            why = _raised(error)
        for name, ask in zip(TEXTS, asked, strict=True):
            if why or (name == "I9" and self.question.batch < 2):
                yield self.missing(name, why or "there is one sequence")
                continue
            try:
                found = ask()
            except Exception as error:  # a function need not be able to do all of this
                yield self.missing(name, _raised(error))
                continue
            yield self.same(name, found)

    def run(self, **changes: Any) -> Answers:
        return self.call(replace(self.question, **changes))

    def missing(self, name: str, why: str) -> Check:
        return Check(self.side, name, TEXTS[name], 0.0, 0.0, "-", why)

    def other_order(self) -> Answers:
        """The last sequence first; the results are brought back to the old order."""
        q = self.question
        order: Answers = {}
        changes: dict[str, Any] = {}
        for at, of in enumerate("qk"):
            spans = [pair[at] for pair in sequences(q)]
            index = np.arange(len(q.q if of == "q" else q.k))
            turned = [index[span] for span in reversed(spans)]
            offsets = np.asarray(q.cu_seqlens_q if of == "q" else q.cu_seqlens_k)
            index = np.concatenate([index[: offsets[0]], *turned, index[offsets[-1] :]])
            changes |= by_tokens(q, of, itemgetter(index))
            back = np.cumsum(np.append(offsets[:1], np.diff(offsets)[::-1]))
            changes[f"cu_seqlens_{of}"] = back.astype(offsets.dtype)
            order[of] = np.argsort(index)
        found = Side.of(self.question, self.run(**changes), "").answers
        return {t: a[order[side_of(t)]] for t, a in found.items() if t in self.first.dtypes}

    def other_neighbours(self) -> Answers:
        """Every second sequence gets other numbers, then the others."""
        q, first = self.question, self.first
        found = {tensor: array.copy() for tensor, array in first.answers.items()}
        for parity in (0, 1):
            other = {}
            changes: dict[str, Any] = {}
            for of in "qk":
                within = q.sequence_of(of)
                other[of] = (within % 2 == parity) & (within >= 0)
                changes |= by_tokens(q, of, partial(_altered, rows=other[of]), INTEGERS)
            for tensor, array in Side.of(q, self.run(**changes), "").answers.items():
                kept, before = ~other[side_of(tensor)], first.answers[tensor]
                changed = _differ(found[tensor], before)[kept]  # already, by the others
                found[tensor][kept] = np.where(changed, found[tensor][kept], array[kept])
        return found

    def scaled(self) -> Answers:
        """A factor of 2 rounds nothing."""
        q = self.question
        double = {n: getattr(q, n) * 2 for n in ("q", "tq") if getattr(q, n) is not None}
        double = {name: array.astype(q.dtype) for name, array in double.items()}
        answers = self.run(softmax_scale=q.scale / 2, **double)
        return {t: a * 2 if t in ("dq", "gq") else a for t, a in answers.items()}

    def same(self, name: str, answers: Mapping[str, Float64]) -> Check:
        """Whether results are those of the first run but for the order in which sums are taken."""
        first, told = self.first, []
        longest = max((*self.question.lengths_q, *self.question.lengths_k), default=0)
        floor = first.ulps_of_tiny * np.sqrt(longest)
        by_row = name in ("I8", "I9")
        found = answers if by_row else Side.of(self.question, dict(answers), "").answers
        for tensor, array in found.items():
            if tensor not in first.dtypes:
                continue
            before = first.answers[tensor]
            off = np.where(_differ(array, before), np.abs(array - before), 0.0)
            size = np.where(np.isfinite(before), np.abs(before), 0.0)
            spans = [pair["qk".index(side_of(tensor))] for pair in sequences(self.question)]
            off, size = (
                np.array([a[span].max(axis=(0, 2), initial=0.0) for span in spans])[..., None]
                for a in (np.nan_to_num(off, nan=np.inf), size)
            )
            looked = np.repeat(first.finite[:, None], off.shape[1], axis=1)
            allowed = first.ulps(tensor) * size + floor
            told.append((tensor, first.judged(name, "", off, allowed, size, looked)))
        return self.worst(name, [pair for pair in told if pair[1].verdict != "-"])

    def worst(self, name: str, told: list[tuple[str, Check]]) -> Check:
        """One check for several tensors."""
        if not told:
            return self.missing(name, "no results to compare")
        failed, passed = (
            [pair for pair in told if pair[1].verdict == verdict] for verdict in ("FAIL", "pass")
        )
        _, worst = max(failed or passed or told, key=lambda pair: _ratio(pair[1]))
        tensors: dict[str, list[str]] = {}
        for tensor, check in failed:
            tensors.setdefault(check.where, []).append(tensor)
        said = "; ".join(f"{', '.join(those)}: {where}" for where, those in tensors.items())
        return replace(worst, text=TEXTS[name], where=said or worst.where)


def _raised(error: Exception) -> str:
    return f"the function raised {type(error).__name__}: {error}"


def _ratio(check: Check) -> float:
    return check.value / check.allowed if check.allowed else float(check.value > 0)


def _differ(a: Float64, b: Float64) -> Bools:
    return np.asarray((a != b) & ~(np.isnan(a) & np.isnan(b)))


def _altered(array: Array, rows: Bools) -> Array:
    """``array`` with other numbers in these rows."""
    other = array.copy()
    other[rows] = (1.0 - 2.0 * array[rows].astype(np.float64)).astype(array.dtype)
    return other
