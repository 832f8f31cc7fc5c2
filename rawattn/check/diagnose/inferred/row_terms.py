"""Which row terms did the gradients use? D, lse and others of every row, read off the gradients.

dq_i = s sum_j P_ij (dP_ij - D_i) K_j is linear in D_i, and P = exp(S - lse) is proportional to
exp(-lse_i): what was used of them is one number a row and head, for head_dim equations. So is it
with dk and dv, where the rows are solved for together. Where these equations hold, what was used
in place of D or lse is looked for among the numbers that a kernel has at hand.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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

Pair = tuple[Floats, Floats]  # weights (heads, n, m) and what they add up, (heads, n, columns)


@dataclass(frozen=True)
class Term:
    """A number of every row that gradients are linear in.

    right (num_heads_q, total_q); of_rows, of_keys: by tensor, what right minus wrong is per unit;
    used: the number itself by its ``right`` and the units read; steps: the bug with other numbers.
    """

    name: str
    right: Floats
    of_rows: Mapping[str, Callable[[Context], Floats]]
    of_keys: Mapping[str, Callable[[Context], Sequence[Pair]]]
    sources: Callable[[], Iterable[Source]]
    unknown: Source
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
    for name in wrong & (term.of_rows.keys() | term.of_keys.keys()):
        of = _by_rows if name in term.of_rows else _by_keys
        read = of(question, answers[name], contexts, name, term)
        if read is None:
            return
        if term.in_exponent and _counted(read):
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
    found.sort(key=lambda one: one[:2])
    for _, _, bug, words, values in found[:MOST]:
        yield Bug(bug, words, (stage,), steps=term.steps(values, wrong))
    other = both.values - term.right
    size = float((term.right**2).sum())
    times = float((both.values * term.right).sum()) / size if size else 0.0
    if not found and np.mean(both.off(times * term.right) <= SURE) >= SHARE:
        steps = term.steps(times * term.right, wrong)
        yield Bug(term.unknown.bug, f"{times:.4g} times {term.name}", (stage,), steps=steps)
    elif not found and not (term.in_exponent and np.ptp(other[wrong_rows]) < 0.1):
        steps = term.steps(both.values, wrong)
        yield Bug(term.unknown.bug, term.unknown.words, (stage,), steps=steps)


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


def _by_rows(
    question: Question, found: Floats, contexts: Sequence[Context], name: str, term: Term
) -> Read | None:
    """The units of a term in every row of a gradient of q."""
    values, errors = (np.zeros(question.q.shape[1::-1]) for _ in range(2))
    left, whole, size = 0.0, 0.0, 0.0
    for c in contexts:
        rows, heads = c.view.rows[None], c.view.heads[:, None]
        difference = c.right[name] - found[rows, heads].astype(np.float64)
        design = term.of_rows[name](c)
        square = (design**2).sum(axis=-1)
        there = square > 1e-12 * max(float(square.max(initial=0.0)), 1e-300)
        unit = np.where(there, (design * difference).sum(-1) / np.where(there, square, 1.0), 0.0)
        rest = difference - unit[..., None] * design
        left, whole = left + float((rest**2).sum()), whole + float((difference**2).sum())
        size = float(np.sqrt((rest**2).mean()))
        own = np.sqrt((rest**2).sum(axis=-1) / max(rest.shape[-1] - 1, 1))
        noise = np.maximum(own, size)
        values[heads, rows] = unit
        errors[heads, rows] = np.where(there, noise / np.sqrt(np.where(there, square, 1.0)), np.inf)
    return Read(values, errors) if left <= EXPLAINED**2 * whole else None


def _by_keys(
    question: Question, found: Floats, contexts: Sequence[Context], name: str, term: Term
) -> Read | None:
    """The units of a term in every row, from a gradient of k or v."""
    values, errors = (np.zeros(question.q.shape[1::-1]) for _ in range(2))
    left, whole = 0.0, 0.0
    for c in contexts:
        heads, n = len(c.view.heads), len(c.view.rows)
        if heads * n > MOST_ROWS:
            return None
        there = found[c.view.keys, c.view.head_kv].astype(np.float64)
        difference = c.right[name] - there
        pairs = [
            (w.reshape(heads * n, -1), x.reshape(heads * n, -1)) for w, x in term.of_keys[name](c)
        ]
        if heads * n > difference.size // 2:
            return None
        gram = sum((w @ v.T) * (x @ y.T) for w, x in pairs for v, y in pairs)
        target = sum((w * (x @ difference.T)).sum(axis=1) for w, x in pairs)
        ridge = 1e-13 * float(np.trace(gram)) / len(gram)
        inverse = np.linalg.inv(gram + max(ridge, 1e-300) * np.eye(len(gram)))
        unit = inverse @ target
        rest = difference - sum((unit[:, None] * w).T @ x for w, x in pairs)
        left, whole = left + float((rest**2).sum()), whole + float((difference**2).sum())
        noise = np.sqrt((rest**2).sum() / (difference.size - len(unit)))
        error = noise * np.sqrt(np.maximum(np.diag(inverse), 0))
        at = c.view.heads[:, None], c.view.rows[None]
        values[at], errors[at] = unit.reshape(heads, n), error.reshape(heads, n)
    return Read(values, errors) if left <= EXPLAINED**2 * whole else None


# ---- the terms of each stage ------------------------------------------------------------------


def _table(values: Floats) -> Step:
    return lambda c: values[c.view.heads[:, None], c.view.rows]


def terms(question: Question, stage: str, contexts: Sequence[Context]) -> Iterator[Term]:
    """The row terms of a stage's gradients."""
    if stage == "backward":
        yield _delta(question, contexts)
        yield _lse(question, contexts)
    elif stage == "second":
        yield _w(question, contexts)
        yield _delta_again(question, contexts)


def _delta(question: Question, contexts: Sequence[Context]) -> Term:
    def steps(values: Floats, wrong: frozenset[str]) -> dict[str, Step]:
        if {"dq", "dk"} <= wrong:
            return {"D": _table(values)}

        def other(c: Context) -> Context:
            return changed(c, dY=c.r(c.G * c.P * (c.dP - _table(values)(c)[..., None])))

        return {
            name: _with(name, other) for name, of in (("dQ", "dq"), ("dK", "dk")) if of in wrong
        }

    words = f"{OF_ANOTHER_ORIGIN}, read off the gradients"
    return Term(
        "D",
        rows_of(question, contexts, lambda c: c.D),
        {"dq": lambda c: c.s * times(c.G * c.P, c.K)},
        {"dk": lambda c: [(c.s * c.G * c.P, c.Q)]},
        lambda: of_delta(question, contexts),
        Source("delta-of-another-out", words, np.zeros(0)),
        steps,
    )


def _with(step: str, other: Callable[[Context], Context]) -> Step:
    return lambda c: STEPS[step](other(c))


def _lse(question: Question, contexts: Sequence[Context]) -> Term:
    def steps(values: Floats, wrong: frozenset[str]) -> dict[str, Step]:
        def P(c: Context) -> Floats:
            with np.errstate(over="ignore", invalid="ignore"):
                found = np.exp(c.S - _table(values)(c)[..., None])
            return np.asarray(c.r(np.where(c.W > 0, found, 0.0)))

        if len(wrong) > 2:
            return {"bP": P}

        def other(c: Context) -> Context:
            again = changed(c, P=P(c))
            again.dY = c.r(c.G * STEPS["dS"](again))
            return again

        names = {"dq": "dQ", "dk": "dK", "dv": "dV"}
        return {names[of]: _with(names[of], other) for of in wrong & names.keys()}

    words = "lse of another origin, read off the gradients"
    return Term(
        "L",
        rows_of(question, contexts, lambda c: np.where(np.isneginf(c.L), 0.0, c.L)),
        {"dq": lambda c: c.dQ},
        {"dv": lambda c: [(c.P, c.dO)]},
        lambda: of_lse(question, contexts),
        Source("statistics-misplaced", words, np.zeros(0)),
        steps,
        in_exponent=True,
    )


def _w(question: Question, contexts: Sequence[Context]) -> Term:
    right = rows_of(question, contexts, lambda c: c.w)
    words = "row terms W of another origin, read off gq and gk"
    return Term(
        "W",
        right,
        {"gq": lambda c: c.s * times(c.G * c.P, c.K)},
        {"gk": lambda c: [(c.s * c.G * c.P, c.Q)]},
        lambda: of_number(right, "W = dout . ddout", question),
        Source("statistics-misplaced", words, np.zeros(0)),
        lambda values, wrong: {"w": _table(values)},
    )


def _delta_again(question: Question, contexts: Sequence[Context]) -> Term:
    def weights(c: Context) -> Floats:
        return np.asarray(c.s * (c.G * c.tP + c.tG * c.P))

    words = "row terms D of another origin, read off gq and gk"
    return Term(
        "D",
        rows_of(question, contexts, lambda c: c.D),
        {"gq": lambda c: times(weights(c), c.K) + c.s * times(c.G * c.P, c.tK)},
        {"gk": lambda c: [(weights(c), c.Q), (c.s * c.G * c.P, c.tQ)]},
        lambda: of_delta(question, contexts),
        Source("delta-of-another-out", words, np.zeros(0)),
        lambda values, wrong: {"D": _table(values)},
    )


def of_tangents(
    question: Question, answers: Answers, stage: str, contexts: Sequence[Context]
) -> Iterator[Bug]:
    """The row term e, the tangent of lse: whatever the answers have for it."""
    name, bug = {"jvp": ("tlse", "jvp-e-omitted"), "second": ("ddlse", "second-e-omitted")}[stage]
    out = {"jvp": "tout", "second": "ddout"}[stage]
    if name not in answers or out not in answers:
        return
    found = np.asarray(answers[name], dtype=np.float64)
    right = rows_of(question, contexts, lambda c: c.e)
    size = float(np.sqrt(np.mean(right**2)))
    eps = 64 * ROUNDED[question.dtype.itemsize] * size
    if np.sqrt(np.mean((found - right) ** 2)) < eps or not np.any(found):
        return
    left = whole = 0.0
    for c in contexts:
        wrong = (
            np.asarray(answers[out][c.view.rows[None], c.view.heads[:, None]], np.float64) - c.tO
        )
        more = (_table(found)(c) - c.e)[..., None] * c.O
        left, whole = left + float(((wrong + more) ** 2).sum()), whole + float((wrong**2).sum())
    if not left <= EXPLAINED**2 * whole:
        return
    read = Read(found, np.full(found.shape, eps / SURE))
    for source in of_number(right, "e", question):
        if np.mean(read.off(source.values) <= SURE) >= SHARE:
            yield Bug(source.bug, source.words, (stage,), steps={"e": _table(source.values)})
            return
    words = f"e is not the sum of P o E but another number, the same in {name} and elsewhere"
    yield Bug(bug, words, (stage,), steps={"e": _table(found)})


def right_of(c: Context) -> dict[str, Floats]:
    """The right gradients of a context, by the names of tensors; those of keys for the group."""
    found = {}
    for name in ("dq", "dk", "dv", "gq", "gk", "gv"):
        step = name[0] + name[1].upper()
        if hasattr(c, step):
            x = getattr(c, step)
            found[name] = x.sum(axis=0) if name in OF_KEYS else x
    return found
