"""Rows past a sequence's end that are stored: over the first rows of the next sequence."""

from collections.abc import Iterator

import numpy as np

from rawattn.check.diagnose.engine import FORWARD, Bug, Store, solve
from rawattn.check.diagnose.key_place import ROWS, Place
from rawattn.check.diagnose.question import Answers, Question

NEAR = 0.03  # of the size: what is looked at more closely


def bugs(question: Question, answers: Answers, wrong: np.ndarray) -> Iterator[Bug]:
    """Those that explain all ``wrong`` rows (total_q, heads)."""
    right = solve(question, "forward")
    for tile in (8, *ROWS):
        rows = overwritten(question, tile)
        if not len(rows) or np.setdiff1d(np.flatnonzero(wrong.any(axis=1)), rows[:, 0]).size:
            continue
        for text, empty in (("of a query of zeros", False), ("without any key", True)):
            store = _stored(tile, empty)
            planted = store(question, right)
            if all(
                _near(name, answers[name], planted[name], rows)
                for name in ("out", "lse")
                if name in answers
            ):
                yield Bug("tail-rows-stored", f"rows {text}, tile of {tile}", FORWARD, store=store)


def overwritten(question: Question, tile: int) -> np.ndarray:
    """Rows (rows, 2) of q that the tail of a tile covers, and whose sequence's, the first last."""
    found = []
    last = int(question.cu_seqlens_q[-1])
    for b in reversed(range(question.batch)):
        n, end = question.lengths_q[b], int(question.cu_seqlens_q[b + 1])
        stop = min(end + -n % tile, last)
        found += [(row, b) for row in range(end, stop)]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _stored(tile: int, empty: bool) -> Store:
    def store(question: Question, answers: Answers) -> Answers:
        found = {name: x.copy() for name, x in answers.items()}
        v = np.asarray(question.v, dtype=np.float64)
        heads = np.arange(question.num_heads_q) // question.group
        for row, b in overwritten(question, tile):
            place = Place(question, int(b), np.array([row - question.cu_seqlens_q[b]]))
            keys = place.keys[:0] if empty else place.keys[place.seen[0]]
            if "out" in found:
                found["out"][row] = v[keys].mean(axis=0)[heads] if len(keys) else 0.0
            if "lse" in found:
                found["lse"][:, row] = np.log(len(keys)) if len(keys) else -np.inf
        return found

    return store


def _near(name: str, found: np.ndarray, planted: np.ndarray, rows: np.ndarray) -> bool:
    axis = int(name == "lse")
    a = np.take(np.asarray(found, dtype=np.float64), rows[:, 0], axis=axis)
    b = np.take(planted, rows[:, 0], axis=axis)
    with np.errstate(invalid="ignore"):
        off = np.where(a == b, 0.0, np.abs(a - b))
    size = float(np.sqrt(np.mean(planted[np.isfinite(planted)] ** 2)))
    return bool(np.isfinite(off).all() and off.max() < NEAR * size)
