"""One sequence, on which many bugs are tried at little cost. A bug that comes near there is worth a
prediction of the whole; the others are never asked for."""

import itertools
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug, Floats, Given, Passed, Store, View, solve
from rawattn.check.diagnose.engine.effort import over, spent
from rawattn.check.diagnose.engine.question import BY_ROW, STAGES, Answers, Question, by_rows
from rawattn.check.diagnose.evidence import precision
from rawattn.check.diagnose.evidence.precision import eps_of, finite, relative_residual

LEAST, MOST = 1000, 80 * 80 * 2  # scores of a sample: others are taken where they show much more
ZERO = 1e-6  # of the square of a number: what is small in no row may be 0 but for rounding
CLEARS = 0.4  # of what the right computation leaves: a bug that leaves less is worth a closer look
FAR = 0.3  # of the size: what a bug may leave at most
LOOKED_AT = 20  # bugs of which the nearest are chosen by all of an answer
ALIKE = 80  # the same of those that leave as little
NOISE = {8: 1e-10, 4: 1e-5}  # of results, by their bytes
WHOLE = slice(None)


def stored(name: str, change: Callable[[Floats], Floats]) -> Store:
    """What ``change`` does to a result by rows, as it is stored."""
    kept: Callable[[Floats], Floats] = (lambda x: x[..., 0].T) if name in BY_ROW else (lambda x: x)
    return lambda _, answers: answers | {name: kept(change(by_rows(name, answers[name])))}


def in_rows(rows: Answers, inside: Answers, outside: Answers) -> Answers:
    """Answers ``outside``, but for rows (tokens, heads) of some of them, which are ``inside``."""
    at = {name: (of.T if name in BY_ROW else of[..., None]) for name, of in rows.items()}
    return {n: np.where(at[n], inside[n], x) if n in at else x for n, x in outside.items()}


def is_wrong(question: Question, given: Passed) -> bool:
    """Whether an out and lse are other numbers than the right ones, by more than rounding."""
    right, off = solve(question, "forward"), []
    for name, x in zip(("out", "lse"), given, strict=True):
        pair = by_rows(name, x), by_rows(name, right[name])
        off.append(relative_residual(*pair, precision.defined(question, name, right[name])))
    return max(off) > 16 * eps_of(question.q)


class Sample:
    """The sequence whose answers are the most wrong, of those that are not too long; of it the
    query heads of one key/value head, unless heads differ. found, truth: the answers by rows, and
    what is right. wrong: answers that are, all of them, and what rounding may leave of each."""

    def __init__(self, q: Question, answers: Answers, stage: str, given: Given = None) -> None:
        self.question, self.answers, self.stage = q, answers, stage
        self.given = None if stage in ("forward", "jvp") else given or q.given_to_backward(answers)
        right = solve(q, stage, given=self.given)
        names = [n for n in STAGES[stage] if n in answers and n in right]
        self.truth = {n: right[n] for n in names if answers[n].shape == right[n].shape}
        self.found = {n: by_rows(n, answers[n]) for n in self.truth}
        self.sizes: dict[tuple[str, int], Floats] = {}  # of answers of sequences, by head
        as_given = {n: np.asarray(answers[n]) for n in sorted(self.found)}
        noise = {n: max(4 * eps_of(x), NOISE.get(x.itemsize, 0)) for n, x in as_given.items()}
        self.wrong = {n: x for n, x in noise.items() if self.of_all(n, self.truth[n]) > x}
        self.sequence, self.head_kv, best = 0, 0, 0.0
        for b, (n, m) in enumerate(zip(q.lengths_q, q.lengths_k, strict=True)):
            by_head = np.zeros(q.num_heads_kv)
            for name, x in self.truth.items() if n * m else ():
                left = np.minimum(self._left(name, by_rows(name, x), b), 1.0)
                by_head += left.reshape(len(by_head), -1).max(axis=1)
            scores = max(n * m * q.group, 1)  # few of them look alike with any bug
            merit = by_head.max() * min(1.0, MOST / scores, scores / LEAST)
            if merit > best:
                best, self.sequence, self.head_kv = merit, b, int(by_head.argmax())
        self.left = self._distances(self.truth)

    def has(self, view: View) -> bool:
        return view.sequence == self.sequence and view.head_kv == self.head_kv

    def _left(self, name: str, wanted: Floats, sequence: int) -> Floats:
        """What a prediction leaves of an answer of a sequence, relative to its size, by head."""
        rows = self.question.span(name, sequence)
        left = np.square(precision.residual(self.found[name], wanted, rows)).sum(axis=(0, 2))
        if (name, sequence) not in self.sizes:
            size = np.square(finite(self.found[name][rows])).sum(axis=(0, 2))
            self.sizes[name, sequence] = size + ZERO * np.square(finite(self.found[name])).mean()
        with np.errstate(divide="ignore", invalid="ignore"):
            left = np.where(left == 0, 0.0, np.sqrt(left / self.sizes[name, sequence]))
        return np.where(np.isnan(left), np.inf, left)

    def _distances(self, answers: Answers) -> dict[str, float]:
        """What predictions leave of the sample's answers that are wrong."""
        left = {n: self._left(n, by_rows(n, answers[n]), self.sequence) for n in self.wrong}
        shape = self.question.num_heads_kv, -1
        return {n: float(x.reshape(shape)[self.head_kv].max(initial=0.0)) for n, x in left.items()}

    def allows(self, bug: Bug) -> bool:
        """Whether a bug may explain a wrong answer: it leaves less than none, or cannot be seen."""
        seen = all(self.left[name] > self.wrong[name] for name in self.wrong)
        if bug.store is not None or not seen:
            return True
        left = self._distances(self.planted(bug, self.has))
        return any(left[name] < self.left[name] for name in self.wrong)

    def planted(self, bug: Bug, only: Callable[[View], bool] | None = None) -> Answers:
        """All answers of the stage with a bug."""
        with np.errstate(all="ignore"):
            return solve(self.question, self.stage, bug, given=self.given, only=only)

    def near(self, families: Iterable[Iterable[Bug]], each: int, effort: float) -> list[Bug]:
        """Of those that come near on one of the wrong answers so many for each of these, by all of
        it. No family is tried once one gives all answers, and nothing after so much ``effort``."""
        found, until = list[tuple[dict[str, float], Bug]](), spent() + effort
        known: dict[object, dict[str, float]] = {}
        for family in families:
            before = len(found)
            for bug in itertools.takewhile(lambda _: not over(until), family):
                if bug.alike is None or bug.alike not in known:
                    known[bug.alike] = self._distances(self.planted(bug, self.has))
                left = known[bug.alike]
                near = {n: left[n] for n in self.wrong if left[n] < min(FAR, CLEARS * self.left[n])}
                if near:
                    found.append((near, bug))
            exact = [bug for of, bug in found[before:] if self._exact(of)]
            if any(self._exact(self.of_wrong(bug)) for bug in exact[:LOOKED_AT]):
                break
        best: dict[int, Bug] = {}
        for name in self.wrong:
            first = sorted((one for one in found if name in one[0]), key=lambda one: one[0][name])
            if len(first) > each:
                same = sum(one[0][name] <= first[0][0][name] for one in first)
                first = first[: max(LOOKED_AT, min(same, ALIKE))]
                first.sort(key=lambda one: self.of_wrong(one[1])[name])
            best |= {id(bug): bug for _, bug in first[:each]}
        return list(best.values())

    def _exact(self, left: Mapping[str, float]) -> bool:
        return all(left.get(name, 1.0) < noise for name, noise in self.wrong.items())

    def of_all(self, name: str, wanted: Floats) -> float:
        """What a prediction leaves of all of an answer, not of the sample alone."""
        inside = self.question.sequence_of(name) >= 0
        return relative_residual(self.found[name], by_rows(name, wanted), inside)

    def of_wrong(self, bug: Bug) -> dict[str, float]:
        """What a bug leaves of all answers that are wrong."""
        planted = self.planted(bug)
        return {name: self.of_all(name, planted[name]) for name in self.wrong}
