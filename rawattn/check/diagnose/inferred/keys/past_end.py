"""Rows past a sequence's end that are stored: over the first rows of the next sequence."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import FORWARD, Bug, Floats, Store, solve
from rawattn.check.diagnose.engine.question import BY_ROW, Answers, Question
from rawattn.check.diagnose.evidence.structure import by_rows
from rawattn.check.diagnose.inferred.keys.pattern import ROWS, Place
from rawattn.check.diagnose.inferred.keys.sums import wide

NEAR = 0.03  # of the size: what is looked at more closely
QUERIES = ("the next sequence's queries", "queries of zeros", "the last query again", "no key")


class _Tail(NamedTuple):
    """Rows of q that the last tile of ``sequence`` covers beyond its end."""

    sequence: int
    rows: np.ndarray


def bugs(question: Question, answers: Answers, wrong: np.ndarray) -> Iterator[Bug]:
    """Those that explain all ``wrong`` rows (total_q, heads)."""
    rows = np.flatnonzero(wrong.any(axis=1))
    right = solve(question, "forward")
    names = tuple(name for name in ("out", "lse") if name in answers)
    found: dict[tuple[str, bytes], tuple[int, Bug]] = {}
    for tile in (8, *ROWS):
        tails = list(_tails(question, tile))
        if not tails or np.setdiff1d(rows, np.concatenate([tail.rows for tail in tails])).size:
            continue
        for text in QUERIES:
            stored = [(tail, _stored(question, tail, text)) for tail in tails]
            for over in (names, *((name,) for name in names if len(names) > 1)):
                chosen = _chosen(stored, answers, right, over, rows)
                if chosen:
                    after = ", ".join(str(tail.sequence) for tail, _ in reversed(chosen))
                    said = f"rows of {text}, tile of {tile}, after sequence {after}"
                    said += "" if over == names else f"; {over[0]} alone"
                    bug = Bug("tail-rows-stored", said, FORWARD, store=_store(chosen, over))
                    there = np.concatenate([tail.rows for tail, _ in chosen])
                    missing = sum(len(tail.rows) for tail in tails) - len(there)
                    key = text, there.tobytes()
                    if key not in found or missing < found[key][0]:
                        found[key] = missing, bug
                    break
    yield from (bug for _, bug in sorted(found.values(), key=lambda one: one[0]))


def _tails(question: Question, tile: int) -> Iterator[_Tail]:
    """The last sequence first, since its tail is stored first where sequences come in order."""
    for b in reversed(range(question.batch)):
        n, end = question.lengths_q[b], int(question.cu_seqlens_q[b + 1])
        rows = np.arange(end, min(end + -n % tile, int(question.cu_seqlens_q[-1])))
        if len(rows):
            yield _Tail(b, rows)


def _chosen(
    stored: Sequence[tuple[_Tail, Answers]],
    answers: Answers,
    right: Answers,
    names: Sequence[str],
    wrong: np.ndarray,
) -> list[tuple[_Tail, Answers]]:
    """What of these tails is there; nothing unless all ``wrong`` rows are."""
    found = []
    for tail, values in stored:
        near = np.all([_near(name, answers, values, right, tail) for name in names], axis=0)
        if np.isin(tail.rows[near], wrong).any():
            part = {name: x[:, near] if name in BY_ROW else x[near] for name, x in values.items()}
            found.append((tail._replace(rows=tail.rows[near]), part))
    covered = [tail.rows for tail, _ in found]
    return [] if not found or np.setdiff1d(wrong, np.concatenate(covered)).size else found


def _stored(question: Question, tail: _Tail, text: str) -> Answers:
    """out and lse of the rows of a tail, with the keys of its sequence."""
    b, heads = tail.sequence, np.arange(question.num_heads_q)
    place = Place(question, b, tail.rows - int(question.cu_seqlens_q[b]))
    n, m = len(tail.rows), place.m
    seen = place.seen & (text != "no key")
    queries = tail.rows
    if text == "the last query again":
        queries = np.full(n, int(question.cu_seqlens_q[b + 1]) - 1)
        last = Place(question, b, np.array([place.n - 1]))
        seen = np.repeat(last.seen, n, axis=0)
    q = wide(question.q)[queries] * (text != "queries of zeros")
    own = slice(place.start_k, place.start_k + m)
    k, v = (wide(x)[own][:, heads // question.group] for x in (question.k, question.v))
    S = np.einsum("rhd,chd->hrc", q, k, optimize=True) * question.scale
    S = np.where(seen, S, -np.inf)
    top = S.max(axis=2, initial=-np.inf)
    top = np.where(np.isneginf(top), 0.0, top)
    P = np.exp(S - top[..., None])
    sums = P.sum(axis=2)
    out = np.einsum("hrc,chd->rhd", P / np.where(sums == 0, 1.0, sums)[..., None], v, optimize=True)
    with np.errstate(divide="ignore"):
        return {"out": out, "lse": top + np.log(sums)}


def _store(chosen: Sequence[tuple[_Tail, Answers]], names: Sequence[str]) -> Store:
    def store(question: Question, answers: Answers) -> Answers:
        found = {name: x.copy() for name, x in answers.items()}
        for tail, stored in chosen:
            for name in names:
                if name in BY_ROW:
                    found[name][:, tail.rows] = stored[name]
                else:
                    found[name][tail.rows] = stored[name]
        return found

    return store


def _near(name: str, answers: Answers, stored: Answers, right: Answers, tail: _Tail) -> np.ndarray:
    """Which of these rows are what is stored there rather than the right ones."""
    found, wanted = (
        by_rows(name, np.asarray(x[name], dtype=np.float64))[tail.rows] for x in (answers, right)
    )
    finite = wanted[np.isfinite(wanted)]
    size = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0

    def off(x: Floats) -> Floats:
        with np.errstate(invalid="ignore"):
            difference = np.where(found == x, 0.0, np.abs(found - x))
        return np.asarray(np.nan_to_num(difference, nan=np.inf).max(axis=(1, 2)))

    of_stored = off(by_rows(name, stored[name]))
    return np.asarray((of_stored < NEAR * size) & (of_stored < off(wanted)))
