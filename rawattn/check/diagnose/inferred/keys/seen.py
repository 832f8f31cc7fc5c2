"""Which keys does each query see? Read off the answers, and planted as a bug.

Sums over the keys that a query sees give its out, its lse and its dq. Some thousand patterns of
``known_patterns`` are tried on such sums of some rows; those that come nearest are planted as bugs,
and judged like any other. Where none does, the keys are looked for row by row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rawattn.check.diagnose.engine.attention import FIRST, NO_BUG, Bug, Floats, See, View, solve
from rawattn.check.diagnose.engine.effort import over, spend, spent
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.structure import by_rows
from rawattn.check.diagnose.inferred.keys import counts, groups, past_end, spans, unwritten
from rawattn.check.diagnose.inferred.keys.known_patterns import patterns
from rawattn.check.diagnose.inferred.keys.pattern import Pattern, Place, right_pattern
from rawattn.check.diagnose.inferred.keys.sums import (
    Sums,
    out_and_lse,
    size_of,
    some_heads,
    sums_of,
)

FEW, MANY = 12, 40  # rows of the first look, and of the second one in every sequence
SEQUENCES, HEADS = 6, 4  # that are looked at
CLOSER = 0.3  # of the error that the right keys leave
SPARE = 3.0  # times the least error: as good
FOR_PATTERNS = 4000.0  # units of effort
OF_A_PATTERN, OF_A_TERM = 0.3, 1e-6
YIELDED = 5
NOISE = 8.0  # units of rounding that need no other keys
EXACT = 0.003, 0.03  # error that leaves nothing to explain: of wide numbers, of 16 bits
UNSURE = 2  # patterns that explain a part alone, which may be half of two bugs


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs read off the answers of ``stage``; none where nothing can be read."""
    untouched = list(unwritten.bugs(question, answers, stage))
    yield from untouched
    if question.sparse or (untouched and _explained(question, answers, stage, untouched[0])):
        return
    if stage == "jvp":
        answers = {name.removeprefix("jvp "): x for name, x in answers.items() if "jvp " in name}
    found, enough = _read(_Asked(question, answers), "forward")
    yield from found
    if stage != "forward" and not enough:
        yield from _read(_Asked(question, answers), "backward")[0]


class _Asked:
    """A question with answers as a key of a cache: equal to the same objects alone."""

    def __init__(self, question: Question, answers: Answers) -> None:
        self.question, self.answers = question, answers

    def __hash__(self) -> int:
        return hash((id(self.question), id(self.answers)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Asked):
            return False
        return other.question is self.question and other.answers is self.answers


@lru_cache(maxsize=4)
def _read(asked: _Asked, stage: str) -> tuple[tuple[Bug, ...], bool]:
    """The bugs that the answers of a pass tell, and whether one explains all that is wrong."""
    question, answers = asked.question, asked.answers
    wrong = wrong_rows(question, answers, stage)
    if wrong is None or not wrong.any():
        return (), False
    if stage != "forward":
        return _keys(question, answers, stage, wrong)
    stored = tuple(past_end.bugs(question, answers, wrong))
    if _out_alone(question, answers):
        return stored or tuple(counts.dropout(question, answers, stage)), True
    found, enough = _keys(question, answers, stage, wrong)
    return (*stored, *found), enough or bool(stored)


def _keys(
    question: Question, answers: Answers, stage: str, wrong: np.ndarray
) -> tuple[tuple[Bug, ...], bool]:
    """The bugs of other keys than the right ones, that explain the ``wrong`` rows."""
    stages = (*FIRST, "second", "jvp")
    patterns_found, exact = nearest(question, answers, stage)

    def name(p: Pattern) -> str:
        return (p.in_backward if stage == "backward" else "") or p.bug

    found = [Bug(name(p), p.text, stages, planted(p)) for p in patterns_found]
    if not exact and not wrong.all():
        patterns_found, exact = nearest(question, answers, stage, wrong)
        found = [] if exact else found
        for p in patterns_found if exact else ():
            text = f"{p.text}; some rows alone"
            found.append(Bug(name(p), text, stages, planted(p, wrong)))
    if exact:  # where several are the same function, the plainest one's class
        return tuple(bug for bug in found if bug.name == found[0].name), True
    by_group = tuple(groups.bugs(question, answers, stage, exact_of(answers, stage)))
    if by_group:
        return by_group, True
    makers = [counts.bugs(question, answers, wrong, stage)]
    if stage == "forward":
        makers.insert(0, spans.bugs(question, answers, wrong))
    for maker in makers:
        more = tuple(maker)
        if more:
            return (*found, *more), True
    return tuple(found), False


def _out_alone(question: Question, answers: Answers) -> bool:
    """Whether lse is right, and so are the keys: what is wrong comes after the row sums."""
    if not {"out", "lse"} <= set(answers):
        return False
    of_lse = wrong_rows(question, {"lse": answers["lse"]}, "forward")
    return of_lse is not None and not of_lse.any()


def planted(pattern: Pattern, wrong: np.ndarray | None = None) -> See:
    """Views of what ``pattern`` says, in the ``wrong`` rows (total_q, heads) alone."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        found = []
        for view in views:
            first = int(question.cu_seqlens_q[view.sequence])
            place = Place(question, view.sequence, view.rows - first)
            keys, weight = pattern.of(place)
            weight = np.broadcast_to(weight, (len(view.rows), len(keys)))[None].astype(np.float64)
            if wrong is not None:
                here = wrong[view.rows[:, None], view.heads].T[..., None]  # (heads, n, 1)
                weight = np.concatenate([weight * here, view.weight * ~here], axis=2)
                keys = np.concatenate([keys, view.keys])
            found.append(replace(view, keys=keys, weight=weight))
        return found

    return see


def _explained(question: Question, answers: Answers, stage: str, bug: Bug) -> bool:
    """Whether a bug of the forward pass leaves nothing to explain."""
    left = wrong_rows(question, answers, stage, bug) if stage == "forward" else None
    return left is not None and not left.any()


def wrong_rows(
    question: Question, answers: Answers, stage: str, bug: Bug = NO_BUG
) -> np.ndarray | None:
    """Rows (total_q, heads) that the right keys, or a ``bug``, do not explain; None where nothing
    can be said."""
    names = [n for n in (("out", "lse") if stage == "forward" else ("dq",)) if n in answers]
    if not names:
        return None
    found = np.zeros(question.q.shape[:2], dtype=bool)
    given = out_and_lse(question, answers) if stage == "backward" else None
    right = solve(question, stage, bug, given=given)
    for name in names:
        a, b = (
            by_rows(name, np.asarray(x, dtype=np.float64)) for x in (answers[name], right[name])
        )
        with np.errstate(invalid="ignore"):
            off = np.where(a == b, 0.0, a - b)
        size = float(np.sqrt(np.mean(b[np.isfinite(b)] ** 2))) if np.isfinite(b).any() else 1.0
        off = np.where(np.isfinite(off), np.abs(off), 0.0).max(axis=2)
        found |= off > exact_of(answers, stage) * (size or 1.0)
    return found


@dataclass(frozen=True)
class _Look:
    """Sums of some rows with the errors that the right keys leave."""

    sums: Sums
    null: dict[str, Floats]


def nearest(
    question: Question, answers: Answers, stage: str, wrong: np.ndarray | None = None
) -> tuple[list[Pattern], bool]:
    """The patterns that explain what the right keys do not, and whether one does so wholly.

    wrong: the rows (total_q, heads) to be explained, all by default.
    """
    looks = _looks(question, answers, stage, wrong)
    if not looks:
        return [], False
    noise = NOISE * eps_of_stage(answers, stage)
    null = {test: size_of(look.null[test] for look in looks) for test in looks[0].null}
    tests = tuple(test for test in null if null[test] > noise)
    if not tests:
        return [], False
    first = _first_look(looks, tests)
    first_null = {test: size_of([first.null[test]]) for test in tests}
    best: dict[str, list[tuple[float, int, Pattern]]] = {test: [] for test in tests}
    until = spent() + FOR_PATTERNS
    for place, pattern in enumerate(patterns(question)):
        spend(OF_A_PATTERN + OF_A_TERM * first.sums.terms.size)
        if over(until):
            break
        errors = first.sums.errors(pattern)
        near = [t for t in tests if size_of([errors[t]]) < CLOSER * first_null[t]]
        if not near:
            continue
        every = [look.sums.errors(pattern) for look in looks]
        for test in near:
            left = size_of(errors[test] for errors in every)
            if left < CLOSER * null[test]:
                best[test].append((left, place, pattern))
    chosen: dict[int, Pattern] = {}
    exact = {}
    for test, of_test in best.items():
        if not of_test:
            continue
        least = min(left for left, _, _ in of_test)
        exact[test] = least < exact_of(answers, stage)
        spare = SPARE * max(least, noise / NOISE)
        good = sorted((place, pattern) for left, place, pattern in of_test if left <= spare)
        chosen |= dict(good[: YIELDED if exact[test] else UNSURE])
    whole = {"dq"} & set(exact) or {"own dq"} & set(exact) or set(tests)
    return [chosen[place] for place in sorted(chosen)], all(exact.get(test) for test in whole)


def _looks(
    question: Question, answers: Answers, stage: str, wrong: np.ndarray | None
) -> list[_Look]:
    """Of the sequences and the rows that are looked at."""
    heads = np.arange(question.num_heads_q)
    if wrong is not None:
        heads = heads[wrong.any(axis=0)]
    heads = some_heads(heads, HEADS)
    lengths = [(n, b) for b, n in enumerate(question.lengths_q) if n]
    found = []
    for n, b in sorted(lengths, reverse=True)[:SEQUENCES]:
        rows = np.arange(n)
        first = int(question.cu_seqlens_q[b])
        if wrong is not None:
            rows = rows[wrong[first : first + n, heads].any(axis=1)]
        if not len(rows):
            continue
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, MANY).astype(int))]
        sums = sums_of(question, answers, stage, Place(question, b, rows), heads)
        if sums is None:
            continue
        if wrong is not None:
            here = wrong[first + sums.place.rows][:, heads].T
            sums = replace(sums, counts=here.astype(np.float64))
        found.append(_Look(sums, sums.errors(right_pattern())))
    return found


def _first_look(looks: Sequence[_Look], tests: Sequence[str]) -> _Look:
    """Some rows of the sequence that is the farthest off, wrong ones and others."""
    worst = max(looks, key=lambda look: max(size_of([look.null[test]]) for test in tests))
    by_row = np.max([worst.null[test].max(axis=0) for test in tests], axis=0)
    order = np.argsort(-by_row, kind="stable")
    middle = len(order) // 2
    wrong = order[np.linspace(0, max(middle - 1, 0), 2 * FEW // 3).astype(int)]
    rest = order[np.linspace(middle, len(order) - 1, FEW // 3).astype(int)]
    chosen = np.unique(np.concatenate([wrong, rest]))
    null = {test: errors[:, chosen] for test, errors in worst.null.items()}
    return _Look(worst.sums.part(chosen), null)


def exact_of(answers: Answers, stage: str) -> float:
    """An error, of the size of what a stage stores, that is no bug of keys."""
    return EXACT[eps_of_stage(answers, stage) > 1e-3]


def eps_of_stage(answers: Answers, stage: str) -> float:
    """A unit of rounding of what a stage has stored."""
    names = ("out", "lse") if stage == "forward" else ("dq",)
    found = next((np.asarray(answers[name]) for name in names if name in answers), None)
    if found is None or found.dtype.itemsize == 2:
        return 2.0**-8
    return float(max(np.finfo(found.dtype).eps, 1e-12))
