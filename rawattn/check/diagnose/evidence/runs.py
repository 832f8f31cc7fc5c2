"""Two equal calls have the same answers, but for another order of summation. Where they have not,
something is wrong, whatever is right."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question, by_rows
from rawattn.check.diagnose.evidence.precision import eps_of, finite

ULPS = {2: 8, 4: 256, 8: 256}  # by itemsize: what another order of a sum may change in a result
SMALLEST = 2.0**-20  # what a term may be off by in float16 that is too small for a relative error


class Race(NamedTuple):
    """Which tensors differ, by how much at most, and what rounding may change in that one."""

    tensors: str
    value: float
    allowed: float


def race_of(question: Question, call: Callable[[Question], Answers]) -> Race | None:
    """How two answers differ, where the first ones are finite; None where they are alike."""
    asked, found = replace(question, out=None, lse=None), dict[str, tuple[float, float]]()
    with suppress(Exception):  # a function may refuse to be asked again
        first, again = call(asked), call(asked)
        found = {n: _change(asked, n, first[n], x) for n, x in again.items() if n in first}
    differ = {name: change for name, change in found.items() if change[0] > change[1]}
    worst = max(differ.values(), key=lambda change: change[0] - change[1], default=None)
    return None if worst is None else Race(", ".join(differ), *worst)


def _change(q: Question, tensor: str, first: np.ndarray, again: np.ndarray) -> tuple[float, float]:
    """What a result changes by at most, and what rounding may."""
    ulps = ULPS[q.dtype.itemsize] * eps_of(q.q)  # also of results in more bits
    tiny = np.sqrt(max((*q.lengths_q, *q.lengths_k))) * SMALLEST if q.dtype == np.float16 else 0
    rows = slice(*q.offsets(tensor)[[0, -1]].tolist())
    before, now = (by_rows(tensor, x)[rows] for x in (first, again))
    with np.errstate(invalid="ignore"):
        off = np.abs(np.where(np.isfinite(before) & (now != before), now - before, 0))
    allowed = float(ulps * np.abs(finite(before)).max(initial=0.0) + tiny)
    return float(np.nan_to_num(off, nan=np.inf).max(initial=0.0)), allowed
