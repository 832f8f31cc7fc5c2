"""Rows of NaN, or inf, where numbers belong, while all else is right: whose, and where they come
from: a NaN in P of a row without keys reaches all that its tile adds to."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue.tiles import dead
from rawattn.check.diagnose.engine.attention import Bug, solve, views_of
from rawattn.check.diagnose.engine.question import (
    BY_ROW,
    OF_KEYS,
    OF_SLOTS,
    STAGES,
    Answers,
    Question,
    by_rows,
    given_to_backward,
)
from rawattn.check.diagnose.evidence.places import LOOPS
from rawattn.check.diagnose.evidence.structure import where

Rows = np.ndarray  # (tokens, heads)
KINDS = {"NaN": np.isnan, "+inf": np.isposinf, "-inf": np.isneginf}


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """One with what is no number in all rows of the tensors of ``stage`` that should hold some."""
    given = None if stage in ("forward", "jvp") else given_to_backward(question, answers)
    right, found = solve(question, stage, given=given), dict[str, Rows]()
    for name in (n for n in STAGES[stage] if n in answers and n in right):
        if answers[name].shape == right[name].shape:
            x, due = by_rows(name, answers[name]), by_rows(name, right[name])
            rows = ~np.isfinite(x).all(axis=2) & ~np.isnan(due).any(axis=2) & (x != due).any(axis=2)
            found[name] = rows & (question.sequence_of(name) >= 0)[:, None]
    found = {name: rows for name, rows in found.items() if rows.any()}
    if found:
        source = _source(question, found)
        text = source or f"{_places(question, answers, found)}; all else is right"
        name = "dead-rows" if source else "unknown"
        yield Bug(name, text, (stage,), store=partial(_stored, found, answers))


def _stored(found: dict[str, Rows], held: Answers, question: Question, x: Answers) -> Answers:
    """What was ``held`` in these rows, in place of what is right."""
    stored = {name: of.copy() for name, of in x.items()}
    for name, rows in found.items():
        if name in stored:
            at = rows.T if name in BY_ROW else rows
            stored[name][at] = held[name][at]
    return stored


def _places(question: Question, answers: Answers, found: dict[str, Rows]) -> str:
    """What stands in which rows, of every tensor."""
    told: dict[str, list[str]] = {}
    for name, rows in found.items():
        x = by_rows(name, answers[name])[rows]
        kinds = [kind for kind, of in KINDS.items() if of(x).any()]
        text = ", ".join(where(question, name, rows)).replace("are wrong", "")
        said = f"is {' and '.join(kinds)} in {text}".replace("is wrong", "").replace(" ,", ",")
        told.setdefault(said.strip(), []).append(name)
    return "; ".join(f"{' and '.join(names)} {text}" for text, names in told.items())


def _source(question: Question, found: dict[str, Rows]) -> str:
    """How rows without keys make all of these, "" where they do not."""
    nothing = dead(question)
    of_rows = [rows for name, rows in found.items() if rows.shape == nothing.shape]
    of_keys = [rows for name, rows in found.items() if name in OF_KEYS]
    if not nothing.any() or {*found} & {*OF_SLOTS} or len(of_rows + of_keys) < len(found):
        return ""
    names, text = " and ".join(found), ""
    if all((rows == nothing).all() for rows in of_rows):
        reached = f"NaN or inf of their P (exp of -inf + inf, or 0 times inf) gets into {names}: "
        for words, reach in _reaches(question, nothing):
            if of_keys and all((rows == reach).all() for rows in of_keys):
                return reached + words
        text = reached + "some keys of their sequences, and no others"
    within = [rows[~_reaches_of(question, nothing, rows)].any() for rows in of_keys]
    return text if of_keys and not any(within) else ""


def _reaches_of(question: Question, nothing: Rows, rows: Rows) -> Rows:
    """Keys of sequences with such rows; none where all have some, which would say nothing."""
    whole = next(reach for _, reach in _reaches(question, nothing))
    return np.zeros_like(rows) if whole.all() else whole


def _reaches(question: Question, nothing: Rows) -> Iterator[tuple[str, Rows]]:
    """Which keys (total_k, num_heads_kv) these rows may add to: by the tiles of a loop."""
    whole = 1 << 20
    for t, u in ((whole, whole), *product((1, *LOOPS), LOOPS)):
        reach = np.zeros(question.k.shape[:2], dtype=bool)
        for view in views_of(question):
            of, n, m = nothing[np.ix_(view.rows, view.heads)].T, len(view.rows), len(view.keys)
            rows, keys = np.arange(n) // t, np.arange(m) // u
            tiles = [np.eye(int(x.max(initial=0)) + 1, dtype=int)[x] for x in (rows, keys)]
            seen = np.broadcast_to(view.weight > 0, (len(view.heads), n, m)).any(axis=0)
            visited = tiles[0].T @ seen @ tiles[1] > 0
            visited |= t == whole
            spoilt = (of.any(axis=0) @ tiles[0] > 0) @ visited > 0
            reach[view.keys[spoilt[keys]], view.head_kv] = True
        words = f"the keys of tiles of {u} that a tile of {t} queries with such a row goes through"
        yield "all keys of their sequences" if t == whole else words, reach
