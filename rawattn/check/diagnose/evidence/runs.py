"""Questions that differ in what must not matter have the same answers, but for rounding.

Results may differ by another order of summation alone. What fails says that something is wrong
without a reference, and which bug it is.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import Floats
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows
from rawattn.check.diagnose.evidence.precision import eps_of, finite
from rawattn.check.diagnose.evidence.structure import named

ULPS = {2: 8, 4: 256, 8: 256}  # by itemsize: what another order of a sum may change in a result
SMALLEST = 2.0**-20  # what a term may be off by in float16 that is too small for a relative error


class Change(NamedTuple):
    """What a run changes at most in a result of a sequence, and what rounding may."""

    tensor: str
    sequence: int
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
                found = [*self.changes(asks[bug]())]
            if bad := [one for one in found if one.value > one.allowed]:
                places = sorted({one.sequence for one in bad})
                where = [*dict.fromkeys(one.tensor for one in bad), named("sequence", places)]
                worst = max(bad, key=lambda one: one.value - one.allowed)
                yield bug, ", ".join(where), worst

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
        for b in range(q.batch):
            for tensor, x in answers.items():
                rows = q.span(tensor, b)
                now, before = x[rows], self.first[tensor][rows]
                with np.errstate(invalid="ignore"):
                    off = np.abs(np.where(np.isfinite(before) & (now != before), now - before, 0))
                value = float(np.nan_to_num(off, nan=np.inf).max(initial=0.0))
                allowed = ulps * np.abs(finite(before)).max(initial=0.0) + tiny
                yield Change(tensor, b, value, float(allowed))
