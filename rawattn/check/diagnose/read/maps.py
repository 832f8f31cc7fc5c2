"""Other heads or rows of q, k or v than a query head's own, or a key's: which ones."""

from collections.abc import Callable
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.reading import in_product
from rawattn.check.diagnose.engine.attention import Context, Step
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.rows import by_rules, in_words, moves_of
from rawattn.check.diagnose.read.contexts import scores_of
from rawattn.check.diagnose.read.fields import Field, of_heads
from rawattn.check.diagnose.read.probe import Weights
from rawattn.check.diagnose.read.said import logs_of
from rawattn.check.diagnose.read.terms import Term

Array = np.ndarray
RowsOf = Callable[[Question], Array]  # for all rows those that are taken
FEW = 3  # numbers that tell a row by its scores, at least
PRODUCTS = {"k": "Q K^T", "q": "Q K^T", "v": "P V"}


def taken(of: str, heads: Array | None, rows: RowsOf | None, c: Context) -> Array:
    """q, k or v of a view, by query head, with these heads, by query head, and rows of it."""
    at = c.view.rows if of == "q" else c.view.keys
    own = c.view.heads if of == "q" else c.view.heads // c.question.group
    own = own if heads is None else heads[c.view.heads]
    at = at if rows is None else rows(c.question)[at]
    return np.asarray(getattr(c.question, of)[at][:, own].astype(np.float64).swapaxes(0, 1))


def _taking(of: str, heads: Array | None = None, rows: RowsOf | None = None) -> dict[str, Step]:
    step = "O" if of == "v" else "Y"
    return in_product(step, of.upper(), partial(taken, of, heads, rows))


def of_other_heads(of: str, heads: Array) -> Term:
    what = {"k": "keys", "q": "queries", "v": "values"}[of]
    text = f"query head h takes the {what} of head {of_heads(heads)}"
    return Term(text, "gqa-head-map", _taking(of, heads))


def heads_of(field: Field, c: Context) -> Term | None:
    """Which other heads the scores are of; ``field`` is log-weights less those of ``c``."""
    for of in "kq":
        heads = range(getattr(c.question, of).shape[1])
        tried = (_taking(of, np.full(c.question.num_heads_q, head)) for head in heads)
        left = np.array([field.left_by_head(scores_of(c, steps) - c.S) for steps in tried])
        if (left.min(axis=0) <= 1).all():
            return of_other_heads(of, left.argmin(axis=0))
    return None


def rows_of(read: Weights, second: Callable[[], Weights], noise: float) -> Term | None:
    """Which rows of k or q the scores are of, or which of v the weights multiply: by a map, by
    rules that hold on other lengths too, or one by one."""
    question = read.places.question
    for of in "kqv" if not question.sparse else "":
        found = _rows_taken(read, of, noise)
        if found is None:
            continue
        where = PRODUCTS[of]
        if of == "k" and question.mask_window == (-1, -1) and len({*found}) == len(found):
            where = "Q K^T, or P V of v,"  # nobody can tell
        name, (text, rows) = "stale-tile", _one_by_one(found)
        by = next((x for x in _maps(question) if _same(found, _by(x, of, question))), None)
        if by is not None:
            text, rows = by.words, partial(_by, by, of)
            name = "offsets-shifted" if by.words in maps.SEQUENCES else name
        elif (there := _rows_taken(second(), of, noise)) is not None:
            moves = moves_of([(question, found), (second().places.question, there)], of)
            if moves is not None:
                text, rows = in_words(moves, of), partial(by_rules, of, moves)
        text = f"{where} takes other rows of {of}: {text}"
        return Term(text, name, _taking(of, rows=rows))
    return None


def _maps(question: Question) -> list[maps.Map]:
    return [*maps.sequences(question), *maps.rows(question)]


def _one_by_one(found: Array) -> tuple[str, RowsOf]:
    at = np.flatnonzero((found >= 0) & (found != np.arange(len(found))))
    text = ", ".join(f"{found[row]} for {row}" for row in at[:6])
    return f"{text}, ... of the pack", lambda question: np.maximum(found, 0)


def _same(found: Array, wanted: Array) -> bool:
    known = (found >= 0) & (wanted >= 0) & (wanted < len(found))
    return bool(known.any() and (found == wanted)[known].all())


def _by(by: maps.Map, of: str, question: Question) -> Array:
    found = by.of(maps.geometry(question, of)).t
    rows = np.broadcast_to(found, maps.geometry(question, of).shape)[:, 0, 0]
    return np.where((rows >= 0) & (rows < len(rows)), rows, np.arange(len(rows)))


def _rows_taken(read: Weights, of: str, noise: float) -> Array | None:
    """For every row of ``of`` the one that is taken, -1 where nothing tells; None where what was
    read is not that of any rows, or of all its own."""
    if not np.isfinite(read.P).all() or (of != "v" and read.lse is None):
        return None
    order = _of_values(read, noise) if of == "v" else _of_scores(read, of, noise)
    if order is None or (order == np.arange(len(order)))[order >= 0].all():
        return None
    return order


def _of_values(read: Weights, noise: float) -> Array | None:
    a, b = (x.reshape(-1, x.shape[2]) for x in (read.right.P, read.P))
    for by in maps.sequences(read.places.question):
        order = _by(by, "v", read.places.question)
        if np.abs(a @ np.eye(len(order))[order] - b).max(initial=0.0) < noise:
            return order
    known = (a != 0).any(axis=0)
    for fine in (1e-9, 1e-4):  # of some rounding
        order = np.linalg.lstsq(a, b, rcond=fine)[0].argmax(axis=1)
        if np.abs((a * known) @ np.eye(len(order))[order] - b).max(initial=0.0) < noise:
            return np.where(known, order, -1)
    return None


def _of_scores(read: Weights, of: str, noise: float) -> Array | None:
    lse = np.asarray(read.lse)[..., None]
    seen, S = (read.P > 0) & np.isfinite(lse), read.right.S
    if (seen != read.places.right)[:, np.isfinite(read.right.lse[0])].any():
        return None  # the weights themselves are elsewhere
    T = np.where(seen, logs_of(read, seen) + lse, 0.0)
    T, seen, S = ((x.swapaxes(1, 2) if of == "q" else x) for x in (T, seen, S))
    a, there, b = (x.reshape(-1, x.shape[2]).astype(np.float64) for x in (T, seen, S))
    error = (a**2).sum(axis=0)[:, None] - 2 * a.T @ b + there.T @ b**2
    count = there.sum(axis=0)
    known = count >= FEW
    own, order = np.diag(error), error.argmin(axis=1)
    allowed = (4 * noise) ** 2 * np.maximum(count, 1)
    order = np.where(own <= allowed, np.arange(len(own)), order)
    if (error[np.arange(len(own)), order] > allowed)[known].any():
        return None
    return np.where(known, order, -1)
