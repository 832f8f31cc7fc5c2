"""Which row terms did the gradients use? D, lse and others of every row, read off the gradients.

dq_i = s sum_j P_ij (dP_ij - D_i) K_j is linear in D_i, and P = exp(S - lse) is proportional to
exp(-lse_i): what was used of them is one number a row and head, for head_dim equations. So is it
with dk and dv, where the rows are solved for together. Where these equations hold, what was used
in place of D or lse is looked for among the numbers that a kernel has at hand.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    changed,
    times,
)
from rawattn.check.diagnose.engine.question import OF_KEYS, Answers, Question
from rawattn.check.diagnose.evidence import structure
from rawattn.check.diagnose.inferred.deltas import of_gradients
from rawattn.check.diagnose.inferred.gradients import found_in
from rawattn.check.diagnose.inferred.row_sources import (
    Source,
    of_delta,
    of_lse,
    of_number,
    rows_of,
)

EXPLAINED = 0.15  # of what is wrong may be left by the numbers read off, at most
SURE = 6.0  # standard errors
ROUNDED = {2: 2.0**-8, 4: 2.0**-18, 8: 2.0**-18}  # of their size, by the bytes of the inputs
SHARE = 0.98  # of the wrong rows, at least, that a source must explain
MOST_ROWS = 1600  # of a group of heads, which dk and dv solve for together
OF_ANOTHER_ORIGIN = "row terms of another origin"
MOST = 4  # sources that are planted

# weights (heads, n, m), and the rows that they add up, of keys or of the heads' queries
Pair = tuple[Floats, Floats]
Of = Mapping[str, Callable[[Context], Sequence[Pair]]]
Solved = tuple[Floats, Floats, Floats]  # units and their errors (heads, n), and what they leave


@dataclass(frozen=True)
class Term:
    """A number of every row that gradients are linear in.

    right (num_heads_q, total_q); of: by tensor, weights and what they add up, so that their product
    is what right minus wrong is per unit; used: the number itself by its ``right`` and the units
    read; steps: the bug with other numbers.
    """

    name: str
    right: Floats
    of: Of
    sources: Callable[[], Iterable[Source]]
    unknown: tuple[str, str]  # class and words
    steps: Callable[[Floats, frozenset[str]], dict[str, Step]]
    in_exponent: bool = False

    def used(self, read: "Read") -> "Read":
        if not self.in_exponent:
            return Read(self.right + read.values, read.errors)
        factor = np.maximum(1 - read.values, 1e-300)
        return Read(self.right - np.log(factor), read.errors / factor)


@dataclass(frozen=True)
class Read:
    """Numbers (num_heads_q, total_q) read off a tensor, and their standard errors."""

    values: Floats
    errors: Floats

    def off(self, wanted: Floats) -> Floats:
        """By how many standard errors ``wanted`` is off."""
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.abs(self.values - wanted) / self.errors
        return np.asarray(np.where(np.isnan(found), 0.0, found))


def bugs_of(
    question: Question,
    answers: Answers,
    stage: str,
    contexts: Sequence[Context],
    term: Term,
    wrong: frozenset[str],
) -> Iterator[Bug]:
    """Bugs in which other numbers stand for a term; none where that does not explain it."""
    reads = []
    for name in wrong & term.of.keys():
        read = _read(question, answers, contexts, name, term.of[name])
        if read is None or (term.in_exponent and _counted(read)):
            return
        reads.append(term.used(read))
    if not reads:
        return
    both = _together(reads)
    rounded = ROUNDED[question.dtype.itemsize] * float(np.sqrt(np.mean(both.values**2)))
    both = Read(both.values, np.hypot(both.errors, rounded))
    wrong_rows = both.off(term.right) > SURE
    if not wrong_rows.any():
        return
    found: list[tuple[float, float, str, str, Floats]] = []
    for source in term.sources():
        off = both.off(source.values)
        if np.mean(off[wrong_rows] <= SURE) < SHARE:
            continue
        values, words = source.values, source.words
        mixed = float(np.mean(off <= SURE) < SHARE)
        if mixed:  # right in the rows that are nearer to the right numbers
            there = off < both.off(term.right)
            values = np.where(there, values, term.right)
            words = f"{words}, {_rows_in_words(question, wrong_rows & there)}"
        values = np.where(both.off(values) <= SURE, values, both.values)  # edges of what is read
        if not any(np.array_equal(values, other) for *_, other in found):
            rms = float(np.sqrt(np.mean(off[wrong_rows] ** 2)))
            found.append((mixed, rms, source.bug, words, values))
    if not found:
        found = [(0.0, 0.0, *one) for one in _nameless(term, both, wrong_rows)]
    found.sort(key=lambda one: one[:2])
    for _, _, bug, words, values in found[:MOST]:
        yield Bug(bug, words, (stage,), steps=term.steps(values, wrong))


def _nameless(term: Term, read: Read, wrong: np.ndarray) -> Iterator[tuple[str, str, Floats]]:
    """Numbers that no source has: a multiple of the right ones, or of another origin."""
    bug, words = term.unknown
    size = float((term.right**2).sum())
    times = float((read.values * term.right).sum()) / size if size else 0.0
    if np.mean(read.off(times * term.right) <= SURE) >= SHARE:
        yield bug, f"{times:.4g} times {term.name}", times * term.right
    elif not (term.in_exponent and np.ptp((read.values - term.right)[wrong]) < 0.1):
        yield bug, words, read.values


def _counted(read: Read) -> bool:
    """Whether rows are in a sum 0, 1 or more times, which is no matter of exponentials."""
    often = 1 - read.values
    other = (read.errors < 0.1) & (np.abs(read.values) > SURE * read.errors)
    near = np.abs(often - np.rint(often)) <= np.maximum(SURE * read.errors, 0.01)
    counted = near & (np.rint(often) != 1)
    return bool(np.mean(often <= 0) > 1 - SHARE or np.mean(counted[other]) > SHARE)


def _rows_in_words(question: Question, rows: np.ndarray) -> str:
    """Which rows (num_heads_q, total_q)."""
    tokens = np.flatnonzero(rows.any(axis=0))
    inside = np.flatnonzero(question.sequence_of("q") >= 0)
    if len(tokens) and tokens[-1] - tokens[0] + 1 == len(tokens) and tokens[-1] == inside[-1]:
        return f"from token {tokens[0]} on"
    said = [x for x in structure.where(question, "dq", rows.T) if not x.startswith("no pattern")]
    return "in some rows: " + "; ".join(said[-2:])


def _together(reads: Sequence[Read]) -> Read:
    """What all say, the surer the more."""
    sure = [1 / np.clip(read.errors, 1e-30, 1e30) ** 2 for read in reads]
    total = np.sum(sure, axis=0)
    values = np.sum([w * read.values for w, read in zip(sure, reads, strict=True)], axis=0)
    return Read(values / total, 1 / np.sqrt(total))


# ---- reading ----------------------------------------------------------------------------------


def _read(
    question: Question,
    answers: Answers,
    contexts: Sequence[Context],
    name: str,
    pairs_of: Callable[[Context], Sequence[Pair]],
) -> Read | None:
    """The units of a term in every row, from a gradient: of q row by row, of k and v for all rows
    of a group at once. None where they leave much of what is wrong."""
    values, errors = (np.zeros(question.q.shape[1::-1]) for _ in range(2))
    left = whole = 0.0
    for c in contexts:
        difference = c.right[name] - found_in(c, answers, name)
        of = _by_keys if name in OF_KEYS else _by_rows
        read = of(difference, pairs_of(c))
        if read is None:
            return None
        at = c.view.heads[:, None], c.view.rows[None]
        values[at], errors[at], rest = read
        left, whole = left + float((rest**2).sum()), whole + float((difference**2).sum())
    return Read(values, errors) if left <= EXPLAINED**2 * whole else None


def _by_rows(difference: Floats, pairs: Sequence[Pair]) -> Solved | None:
    """One number for the columns of every row."""
    design = np.sum([times(w, x) for w, x in pairs], axis=0)
    square = (design**2).sum(axis=-1)
    there = square > 1e-12 * max(float(square.max(initial=0.0)), 1e-300)
    safe = np.where(there, square, 1.0)
    unit = np.where(there, (design * difference).sum(-1) / safe, 0.0)
    rest = difference - unit[..., None] * design
    own = np.sqrt((rest**2).sum(axis=-1) / max(rest.shape[-1] - 1, 1))
    noise = np.maximum(own, float(np.sqrt((rest**2).mean())))
    return unit, np.where(there, noise / np.sqrt(safe), np.inf), rest


def _by_keys(difference: Floats, pairs: Sequence[Pair]) -> Solved | None:
    """The numbers of all rows and heads together, by least squares; None for too many of them."""
    heads, n, _ = pairs[0][0].shape
    if heads * n > min(MOST_ROWS, difference.size // 2):
        return None
    flat = [(w.reshape(heads * n, -1), x.reshape(heads * n, -1)) for w, x in pairs]
    gram = sum((w @ v.T) * (x @ y.T) for w, x in flat for v, y in flat)
    target = sum((w * (x @ difference.T)).sum(axis=1) for w, x in flat)
    ridge = 1e-13 * float(np.trace(gram)) / len(gram)
    inverse = np.linalg.inv(gram + max(ridge, 1e-300) * np.eye(len(gram)))
    unit = inverse @ target
    rest = difference - sum((unit[:, None] * w).T @ x for w, x in flat)
    noise = np.sqrt((rest**2).sum() / (difference.size - len(unit)))
    error = noise * np.sqrt(np.maximum(np.diag(inverse), 0))
    return unit.reshape(heads, n), error.reshape(heads, n), rest


# ---- the terms of each stage ------------------------------------------------------------------


def _table(values: Floats) -> Step:
    return lambda c: values[c.view.heads[:, None], c.view.rows]


def terms(
    question: Question, answers: Answers, stage: str, contexts: Sequence[Context]
) -> Iterator[Term]:
    """The row terms of a stage's gradients, or of its tangents."""
    another, misplaced = "delta-of-another-out", "statistics-misplaced"
    origin = "of another origin, read off"

    def right(name: str) -> Floats:
        found = rows_of(question, contexts, lambda c: getattr(c, name))
        return np.where(np.isneginf(found), 0.0, found)

    def weights(c: Context) -> Floats:
        return np.asarray(c.s * c.G * c.P)

    def moved(c: Context) -> Floats:
        return np.asarray(c.s * (c.G * c.tP + c.tG * c.P))

    def planted(step: str) -> Callable[[Floats, frozenset[str]], dict[str, Step]]:
        return lambda values, wrong: {step: _table(values)}

    deltas = partial(of_delta, question, contexts)
    if stage == "backward":
        of: Of = {"dq": lambda c: [(weights(c), c.K)], "dk": lambda c: [(weights(c), c.Q)]}
        unknown = another, f"{OF_ANOTHER_ORIGIN}, read off the gradients"
        yield Term("D", right("D"), of, deltas, unknown, _with_delta)
        of = {"dq": lambda c: [(c.s * c.dY, c.K)], "dv": lambda c: [(c.P, c.dO)]}
        lses, unknown = partial(of_lse, question, contexts), (misplaced, f"lse {origin} gradients")
        yield Term("L", right("L"), of, lses, unknown, _with_lse, in_exponent=True)
        return
    lse, bug = {"jvp": ("tlse", "jvp-e-omitted"), "second": ("ddlse", "second-e-omitted")}[stage]
    of = {"tout": lambda c: [(c.P, c.V)], "ddout": lambda c: [(c.P, c.V)]}

    def tangents() -> Iterator[Source]:
        yield from of_number(right("e"), "e", question)
        if lse in answers and np.any(answers[lse]):
            words = f"e is not the sum of P o E but another number, the same in {lse} and elsewhere"
            yield Source(bug, words, np.asarray(answers[lse], dtype=np.float64))

    yield Term("e", right("e"), of, tangents, (bug, f"e {origin} the tangents"), planted("e"))
    if stage == "second":
        of = {"gq": lambda c: [(weights(c), c.K)], "gk": lambda c: [(weights(c), c.Q)]}
        others = partial(of_number, right("w"), "W = dout . ddout", question)
        unknown = misplaced, f"row terms W {origin} gq and gk"
        yield Term("W", right("w"), of, others, unknown, planted("w"))
        of = {
            "gq": lambda c: [(moved(c), c.K), (weights(c), c.tK)],
            "gk": lambda c: [(moved(c), c.Q), (weights(c), c.tQ)],
        }
        unknown = another, f"row terms D {origin} gq and gk"
        yield Term("D", right("D"), of, deltas, unknown, planted("D"))


def _with_delta(values: Floats, wrong: frozenset[str]) -> dict[str, Step]:
    """Another D: of both kernels, or of the one whose gradient is wrong."""
    if {"dq", "dk"} <= wrong:
        return {"D": _table(values)}

    def other(c: Context) -> Context:
        return changed(c, dY=c.r(c.G * c.P * (c.dP - _table(values)(c)[..., None])))

    return of_gradients(wrong & {"dq", "dk"}, other)


def _with_lse(values: Floats, wrong: frozenset[str]) -> dict[str, Step]:
    """Another lse: of all gradients, or of those that are wrong."""

    def P(c: Context) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            found = np.exp(c.S - _table(values)(c)[..., None])
        return np.asarray(c.r(np.where(c.W > 0, found, 0.0)))

    def other(c: Context) -> Context:
        again = changed(c, P=P(c))
        again.dY = c.r(c.G * STEPS["dS"](again))
        return again

    return {"bP": P} if len(wrong) > 2 else of_gradients(wrong, other)
