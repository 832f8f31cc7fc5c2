"""One sequence, on which many bugs are tried at little cost.

A bug that comes near there is worth a prediction of the whole; the others are never asked for.
"""

import math
from collections.abc import Iterable

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug, Floats, View, solve
from rawattn.check.diagnose.engine.effort import over
from rawattn.check.diagnose.engine.question import (
    OF_KEYS,
    STAGES,
    Answers,
    Question,
    given_to_backward,
)
from rawattn.check.diagnose.evidence.structure import by_rows

MOST = 80 * 80 * 2  # scores of a sample: what is longer is taken where it shows much more
CLEARS = 0.4  # of what the right computation leaves: a bug that leaves less is worth a closer look
FAR = 0.3  # of the size: what a bug may leave at most
BEST, LOOKED_AT = 8, 20  # bugs that are looked at more closely, and of which these are chosen
WRONG = 16  # units of the dtype's eps: what rounding may leave
Given = tuple[Floats, Floats] | None


def given_to(question: Question, answers: Answers, stage: str) -> Given:
    """The out and lse that a stage was given, as far as they are known."""
    return None if stage in ("forward", "jvp") else given_to_backward(question, answers)


class Sample:
    """The sequence whose answers are the most wrong, of those that are not too long; of it the
    query heads of one key/value head, unless heads differ."""

    def __init__(
        self, question: Question, answers: Answers, stage: str, given: Given = None
    ) -> None:
        self.question, self.stage = question, stage
        self.given = given or given_to(question, answers, stage)
        solved = solve(question, stage, given=self.given)
        there = [n for n in STAGES[stage] if n in answers and n in solved]
        self.truth = {n: solved[n] for n in there if answers[n].shape == solved[n].shape}
        self.found = {n: by_rows(n, answers[n]).astype(np.float64) for n in self.truth}
        self.eps = {n: eps_of(np.asarray(answers[n])) for n in self.found}
        right = {name: by_rows(name, x) for name, x in self.truth.items()}
        self.sequence, self.head_kv = 0, 0
        best = 0.0
        for b in range(question.batch):
            self.sequence = b
            size = question.lengths_q[b] * question.lengths_k[b]
            wrong = max((self._left(n, right[n], True).max() for n in right if size), default=0.0)
            merit = min(wrong, 1e3) * min(1.0, MOST / max(size * question.group, 1))
            if merit > best:
                best, found = merit, b
        self.sequence = found if best else 0
        by_head = sum(_of_kv(self._left(n, right[n], True), question) for n in right)
        self.head_kv = int(np.argmax(by_head)) if right else 0
        left = {name: self._left(name, right[name]) for name in right}
        self.left = {n: float(x.max()) for n, x in left.items()}
        self.wrong = tuple(n for n in right if self.left[n] > WRONG * self.eps[n])

    def _part(self, name: str, x: Floats, every_head: bool) -> Floats:
        """Rows and heads of the sample."""
        q = self.question
        offsets = q.cu_seqlens_k if name in OF_KEYS else q.cu_seqlens_q
        rows = slice(int(offsets[self.sequence]), int(offsets[self.sequence + 1]))
        if every_head:
            return x[rows]
        step = x.shape[1] // q.num_heads_kv
        return x[rows, self.head_kv * step : (self.head_kv + 1) * step]

    def _left(self, name: str, wanted: Floats, every_head: bool = False) -> Floats:
        """What a prediction leaves of an answer, relative to its size, by head."""
        a, b = (self._part(name, x, every_head) for x in (self.found[name], wanted))
        if not a.size:
            return np.zeros(a.shape[1])
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            difference = a - b
            left = np.einsum("nhd,nhd->h", difference, difference)
            if not np.isfinite(left).all():  # where both are inf, or NaN, they are alike
                alike = (a == b) | (np.isnan(a) & np.isnan(b))
                left = np.square(np.where(alike, 0.0, difference)).sum(axis=(0, 2))
            size = np.einsum("nhd,nhd->h", a, a)
            if not np.isfinite(size).all():
                size = np.square(np.where(np.isfinite(a), a, 0.0)).sum(axis=(0, 2))
            left = np.where(left == 0, 0.0, np.sqrt(left / size))
        return np.asarray(np.where(np.isnan(left), np.inf, left))

    def _answers(self, bug: Bug) -> Answers:
        """What the answers of the sample are with a bug, by rows."""

        def here(view: View) -> bool:
            return view.sequence == self.sequence and view.head_kv == self.head_kv

        with np.errstate(all="ignore"):
            answers = solve(self.question, self.stage, bug, given=self.given, only=here)
        return {name: by_rows(name, answers[name]) for name in self.found}

    def distances(self, bug: Bug) -> dict[str, float]:
        """What a bug leaves of every answer."""
        answers = self._answers(bug)
        return {name: float(self._left(name, answers[name]).max()) for name in self.found}

    def near(
        self, bugs: Iterable[Bug], each: int = 0, until: float = math.inf
    ) -> list[tuple[float, Bug]]:
        """Those that come near on all answers, or on one of the wrong ones, and how near: the
        nearest first. each: so many for each of the wrong ones, by all of it."""
        found: list[tuple[float, int, Bug, dict[str, float]]] = []
        for number, bug in enumerate(bugs):
            if over(until):
                break
            if self.stage not in bug.stages:
                continue
            left = self.distances(bug)
            near = {n: left[n] for n in self.wrong if left[n] < min(FAR, CLEARS * self.left[n])}
            if near:
                found.append((sum(min(x, 2.0) for x in left.values()), number, bug, near))
        found.sort(key=lambda one: one[:2])
        if not each:
            return [(off, bug) for off, _, bug, _ in found[:BEST]]
        best: dict[int, tuple[float, Bug]] = {}
        for name in self.wrong:
            first = [one for one in found if name in one[3]]
            first.sort(key=lambda one: (one[3][name], one[1]))
            if len(first) > each:
                first = sorted(first[:LOOKED_AT], key=lambda one: self._planted(one[2], name))
            best |= {number: (off, bug) for off, number, bug, _ in first[:each]}
        return list(best.values())

    def _planted(self, bug: Bug, name: str) -> float:
        with np.errstate(all="ignore"):
            answers = solve(self.question, self.stage, bug, given=self.given)
        return self.of_all(name, answers[name])

    def sequences(self, name: str) -> np.ndarray:
        """For every row of an answer its sequence, -1 past the last one."""
        return self.question.sequence_of("k" if name in OF_KEYS else "q")

    def of_all(self, name: str, wanted: Floats) -> float:
        """What a prediction leaves of all of an answer, not of the sample alone."""
        inside = self.sequences(name) >= 0
        return residual(self.found[name][inside], by_rows(name, wanted)[inside])


def residual(found: Floats, wanted: Floats) -> float:
    """Root mean square of what ``wanted`` leaves, over that of what was found, where it is
    finite."""
    finite = np.isfinite(found)
    if not np.array_equal(finite, np.isfinite(wanted)):
        return math.inf
    a, b = found[finite].astype(np.float64), wanted[finite]
    size, left = float(np.square(a).sum()), float(np.square(a - b).sum())
    return math.sqrt(left / size) if size else (0.0 if not left else math.inf)


def _of_kv(of_heads: Floats, question: Question) -> Floats:
    """A number of each key/value head: of its query heads the largest."""
    return np.asarray(np.minimum(of_heads, 1e3).reshape(question.num_heads_kv, -1).max(axis=1))


def eps_of(x: np.ndarray) -> float:
    """The distance of neighbouring numbers; for 16 bits what is left of it in a mean."""
    return 2.0**-11 if x.dtype.itemsize == 2 else float(np.finfo(x.dtype).eps)
