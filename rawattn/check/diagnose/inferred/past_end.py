"""Rows past a sequence's end that are stored: over the first rows of the next sequence."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    FORWARD,
    NO_BUG,
    Bug,
    Floats,
    Store,
    solve,
)
from rawattn.check.diagnose.engine.question import BY_ROW, Answers, Question
from rawattn.check.diagnose.evidence.structure import bad_rows, by_rows
from rawattn.check.diagnose.inferred import unwritten

EXACT = 0.003, 0.03  # of the size: what a row must be off by; of wide numbers, of 16 bits
NEAR = 0.03  # of the size: what is looked at more closely
LONGEST = 128  # rows past an end, of the largest tile
QUERIES = ("the next sequence's queries", "queries of zeros", "the last query again", "no key")


class _Tail(NamedTuple):
    """Rows of q past the end of ``sequence``, and what is stored there."""

    sequence: int
    rows: np.ndarray
    stored: Answers


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Those that explain all wrong rows of out and lse."""
    names = tuple(name for name in ("out", "lse") if name in answers)
    if stage != "forward" or question.sparse or not names:
        return
    right = solve(question, "forward")
    untouched = next(unwritten.bugs(question, answers, stage), NO_BUG)
    due = solve(question, "forward", untouched)
    wrong = [
        bad_rows(question, name, wide(answers[name]), wide(due[name]), _allowed(answers[name]))
        for name in names
    ]
    rows = np.flatnonzero(np.any(wrong, axis=(0, 2)))
    if not len(rows):
        return
    for text in QUERIES:
        tails = [_tail(question, b, text) for b in reversed(range(question.batch))]
        for over in (names, *((name,) for name in names if len(names) > 1)):
            # the last sequence's first: where sequences come in order, it is stored first
            chosen = [_part(tail, rows, answers, right, over) for tail in tails]
            chosen = [tail for tail in chosen if len(tail.rows)]
            if chosen and np.isin(rows, np.concatenate([tail.rows for tail in chosen])).all():
                after = ", ".join(str(tail.sequence) for tail in reversed(chosen))
                said = f"rows of {text}, after sequence {after}"
                said += "" if over == names else f"; {over[0]} alone"
                yield Bug("tail-rows-stored", said, FORWARD, store=_store(chosen, over))
                break


def _part(
    tail: _Tail, wrong: np.ndarray, answers: Answers, right: Answers, names: Sequence[str]
) -> _Tail:
    """The ``wrong`` rows of a tail that are there."""
    near = [_near(name, answers, tail.stored, right, tail.rows) for name in names]
    here = np.all([*near, np.isin(tail.rows, wrong)], axis=0)
    part = {name: x[:, here] if name in BY_ROW else x[here] for name, x in tail.stored.items()}
    return tail._replace(rows=tail.rows[here], stored=part)


def _tail(question: Question, b: int, text: str) -> _Tail:
    """out and lse of rows past a sequence's end, with the keys of the sequence."""
    end, heads = int(question.cu_seqlens_q[b + 1]), np.arange(question.num_heads_q)
    rows = np.arange(end, min(end + LONGEST, int(question.cu_seqlens_q[-1])))
    own = slice(*(int(x) for x in question.cu_seqlens_k[b : b + 2]))
    again = text == "the last query again"
    queries = np.full_like(rows, end - 1) if again else rows
    left, right = question.mask_window
    apart = np.arange(own.stop - own.start)[None] - question.lengths_k[b] - (queries - end)[:, None]
    seen = ((apart >= -left) | (left < 0)) & ((apart <= right) | (right < 0)) & (text != "no key")
    q = wide(question.q)[queries] * (text != "queries of zeros")
    k, v = (wide(x)[own][:, heads // question.group] for x in (question.k, question.v))
    S = np.einsum("rhd,chd->hrc", q, k, optimize=True) * question.scale
    S = np.where(seen, S, -np.inf)
    top = S.max(axis=2, initial=-np.inf)
    top = np.where(np.isneginf(top), 0.0, top)
    P = np.exp(S - top[..., None])
    sums = P.sum(axis=2)
    out = np.einsum("hrc,chd->rhd", P / np.where(sums == 0, 1.0, sums)[..., None], v, optimize=True)
    with np.errstate(divide="ignore"):
        return _Tail(b, rows, {"out": out, "lse": top + np.log(sums)})


def _store(chosen: Sequence[_Tail], names: Sequence[str]) -> Store:
    def store(question: Question, answers: Answers) -> Answers:
        found = {name: x.copy() for name, x in answers.items()}
        for tail in chosen:
            for name in names:
                where = (slice(None), tail.rows) if name in BY_ROW else tail.rows
                found[name][where] = tail.stored[name]
        return found

    return store


def _near(
    name: str, answers: Answers, stored: Answers, right: Answers, rows: np.ndarray
) -> np.ndarray:
    """Which of these rows are what is stored there rather than the right ones."""
    found, wanted = (
        by_rows(name, np.asarray(x[name], dtype=np.float64))[rows] for x in (answers, right)
    )
    finite = wanted[np.isfinite(wanted)]
    size = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0

    def off(x: Floats) -> Floats:
        with np.errstate(invalid="ignore"):
            difference = np.where(found == x, 0.0, np.abs(found - x))
        return np.asarray(np.nan_to_num(difference, nan=np.inf).max(axis=(1, 2)))

    of_stored = off(by_rows(name, stored[name]))
    return np.asarray((of_stored < NEAR * size) & (of_stored < off(wanted)))


def wide(x: np.ndarray) -> Floats:
    """In float64, 0 for what is not finite."""
    found = np.asarray(x, dtype=np.float64)
    return np.where(np.isfinite(found), found, 0.0)


def _allowed(x: np.ndarray) -> float:
    return EXACT[x.dtype.itemsize == 2] * float(np.sqrt(np.mean(wide(x) ** 2)) or 1.0)
