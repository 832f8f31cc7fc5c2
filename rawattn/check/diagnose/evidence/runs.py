"""Questions that differ in what must not matter have the same answers, but for another order of
summation. What fails says without a reference that something is wrong, and which bug it is."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import Floats
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows
from rawattn.check.diagnose.evidence.precision import eps_of, finite

ULPS = {2: 8, 4: 256, 8: 256}  # by itemsize: what another order of a sum may change in a result
SMALLEST = 2.0**-20  # what a term may be off by in float16 that is too small for a relative error


class Change(NamedTuple):
    """What a run changes at most in a result, and what rounding may."""

    tensor: str
    value: float
    allowed: float


Failed = tuple[str, str, Change]  # a bug, where it shows, and the largest change


class Runs:
    """``call`` and its answers to the question itself, which every other run is compared with."""

    def __init__(self, question: Question, call: Callable[[Question], Answers]) -> None:
        # an out and lse that a backward was given would not belong to the changed inputs
        self.question, self.call = replace(question, out=None, lse=None), call

    def failing(self, *bugs: str) -> Iterator[Failed]:
        """Those of "race" and "score-scale" that a run shows."""
        asks = {"race": self.run, "score-scale": self.scaled}
        for bug in bugs:
            found: list[Change] = []
            with suppress(Exception):  # a function need not be able to do all of this
                found = [one for one in self.changes(asks[bug]()) if one.value > one.allowed]
            if found:
                worst = max(found, key=lambda one: one.value - one.allowed)
                yield bug, ", ".join(one.tensor for one in found), worst

    @cached_property
    def first(self) -> dict[str, Floats]:
        return {name: by_rows(name, x) for name, x in self.call(self.question).items()}

    def run(self, **changes: Any) -> dict[str, Floats]:
        """The answers by rows, those that the first run gave too."""
        before, answers = self.first, self.call(replace(self.question, **changes))
        return {name: by_rows(name, x) for name, x in answers.items() if name in before}

    def scaled(self) -> dict[str, Floats]:
        """A factor of 2 rounds nothing."""
        q = self.question
        given = {n: x for n in ("q", "tq") if (x := getattr(q, n)) is not None}
        double = {n: (2 * x).astype(q.dtype) for n, x in given.items()}
        answers = self.run(softmax_scale=q.scale / 2, **double)
        return {t: a * 2 if t in ("dq", "gq") else a for t, a in answers.items()}

    def changes(self, answers: dict[str, Floats]) -> Iterator[Change]:
        """What results differ by from those of the first run, where these are finite."""
        q = self.question
        ulps = ULPS[q.dtype.itemsize] * eps_of(q.q)  # also of results in more bits
        tiny = np.sqrt(max((*q.lengths_q, *q.lengths_k))) * SMALLEST if q.dtype == np.float16 else 0
        for tensor, x in answers.items():
            rows = slice(*q.offsets(tensor)[[0, -1]].tolist())
            now, before = x[rows], self.first[tensor][rows]
            with np.errstate(invalid="ignore"):
                off = np.abs(np.where(np.isfinite(before) & (now != before), now - before, 0))
            value = float(np.nan_to_num(off, nan=np.inf).max(initial=0.0))
            yield Change(
                tensor, value, float(ulps * np.abs(finite(before)).max(initial=0.0) + tiny)
            )
