"""Columns of a result that are sums of its right columns: exchanged, left out, of another panel."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug
from rawattn.check.diagnose.engine.question import OF_SLOTS, by_rows
from rawattn.check.diagnose.engine.steps import Floats
from rawattn.check.diagnose.inferred.sample import Sample, stored
from rawattn.check.diagnose.inferred.terms import CLOSE
from rawattn.check.diagnose.read.fields import number

WHOLE = 1e-2  # how near to whole numbers factors must be, or to 0
FEW = 2  # columns that one may hold
PIECES = 4  # runs of columns that are told


def bugs(sample: Sample) -> Iterator[Bug]:
    for name, noise in sample.wrong.items():
        found, right = sample.found[name], by_rows(name, sample.truth[name])
        rows = (sample.question.sequence_of(name) >= 0)[:, None]
        rows = rows & np.isfinite(found).all(axis=2) & np.isfinite(right).all(axis=2)
        x, y, width = right[rows], found[rows], right.shape[2]
        if name in OF_SLOTS or width < 2 or len(x) < 2 * width:
            continue
        by = np.linalg.lstsq(x.T @ x, x.T @ y, rcond=1e-9)[0]
        by = np.where(np.abs(by - np.rint(by)) < WHOLE, np.rint(by) + 0.0, by)
        left, off = np.linalg.norm(x @ by - y), np.linalg.norm(y - x)
        few = np.count_nonzero(by, axis=0).max() <= FEW
        if few and left <= max(noise * np.linalg.norm(x), CLOSE * off) and left < WHOLE * off:
            text = f"{name}: {_in_words(by)}"
            bug = "head-dim-tail" if np.array_equal(by, by * np.eye(width)) else "transposed"
            yield Bug(bug, text, (sample.stage,), store=stored(name, partial(_with, by)))


def _with(by: Floats, x: Floats) -> Floats:
    return np.asarray(x @ by)


def _in_words(by: Floats) -> str:
    """What columns hold that are not right, those alike in one."""

    def held(column: int) -> tuple[tuple[int, str], ...]:
        some = np.flatnonzero(by[:, column])
        return tuple((int(s) - column, number(float(by[s, column]))) for s in some)

    told = []
    for kind, columns in groupby(range(len(by)), held):
        same = [*columns]
        of = [f"{x} times ".removeprefix("1 times ") + f"column c {d:+d}" for d, x in kind]
        if kind != ((0, "1"),):
            held_there = " and ".join(of) or "nothing"
            told.append(f"columns c = {same[0]} to {same[-1]} hold {held_there}")
    return "; ".join(told[:PIECES]) + "; ..." * (len(told) > PIECES)
