"""Rows that nobody writes: one and the same number stands in all of them."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug, solve
from rawattn.check.diagnose.engine.question import BY_ROW, STAGES, Answers, Question, by_rows
from rawattn.check.diagnose.evidence.structure import where
from rawattn.check.diagnose.inferred.sample import Sample

OFF = 1e-3  # of the size: what a row must be off by
SHARE = 0.9  # of all rows, at most
UNTOLD = ("delta", "dblock_scale", "gblock_scale")  # may be constant
Rows = np.ndarray  # (tokens, heads)
Found = dict[str, tuple[Rows, float]]  # of tensors the rows, and what they hold


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """One with all rows of the tensors of ``stage`` that hold a constant and should not."""
    sample, found = Sample(question, answers, stage), Found()
    for name in (n for n in STAGES[stage] if n in sample.wrong and n not in UNTOLD):
        of_out = found.get(name.replace("lse", "out"))
        constant = _constant(sample, name, False if of_out is None else of_out[0])
        if constant is not None:
            found[name] = constant
    if found and (_whole_sequences(question, found) or not _see_nothing(answers, found)):
        text, store = _in_words(question, found), partial(_stored, found)
        yield Bug("rows-not-written", text, (stage,), store=store)


def _constant(sample: Sample, name: str, of_out: Rows | bool) -> tuple[Rows, float] | None:
    """Which rows (tokens, heads) are constant, and what they hold; a single number is no row, so
    that it must be 0, or in the rows ``of_out``."""
    x, wanted = sample.found[name], by_rows(name, sample.truth[name])
    finite = np.isfinite(wanted).all(axis=2) & (sample.question.sequence_of(name) >= 0)[:, None]
    if not finite.any() or not x.shape[2]:
        return None
    size = float(np.sqrt(np.mean(wanted[finite] ** 2)))
    with np.errstate(invalid="ignore"):
        off = np.abs(x - wanted).max(axis=2) > OFF * size
    flat = (x == x[..., :1]).all(axis=2) & finite & off
    flat &= (x.shape[2] > 1) | (x[..., 0] == 0) | of_out
    if not flat.any():
        return None
    numbers, counts = np.unique(x[flat, 0], return_counts=True)
    number = float(numbers[counts.argmax()])
    rows = flat & (x[..., 0] == number)
    return (rows, number) if rows.sum() < SHARE * finite.sum() else None


def _see_nothing(answers: Answers, found: Found) -> bool:
    """Whether the rows of out are those of queries that see no key, as their lse says."""
    for prefix in ("", "sliding ", "jvp "):
        out, lse = found.get(f"{prefix}out"), f"{prefix}lse"
        if out is not None and lse in answers and np.isneginf(answers[lse].T[out[0]]).all():
            return True
        if lse in found and np.isneginf(found[lse][1]):
            return True
    return False


def _whole_sequences(question: Question, found: Found) -> bool:
    """Whether the rows of out are all those of some sequences that see a key."""
    if "out" not in found:
        return False
    sequence, rows = question.sequence_of("q"), found["out"][0]
    alive = np.isfinite(solve(question, "forward")["lse"]).T
    of = np.isin(sequence, sequence[rows.any(axis=1)])[:, None]
    return bool((rows == (of & alive & rows.any(axis=0))).all())


def _stored(found: Found, question: Question, answers: Answers) -> Answers:
    stored = {name: x.copy() for name, x in answers.items()}
    for name, (rows, number) in found.items():
        if name in stored:
            stored[name][rows.T if name in BY_ROW else rows] = number
    return stored


def _in_words(question: Question, found: Found) -> str:
    texts: dict[str, list[str]] = {}
    for name, (rows, number) in found.items():
        places = ", ".join([*where(question, name, rows)][1:]).replace("only ", "of ")
        texts.setdefault(f"is {number:g} in some rows, {places}", []).append(name)
    return "; ".join(f"{' and '.join(names)} {text}" for text, names in texts.items())
