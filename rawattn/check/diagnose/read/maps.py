"""Other heads or rows of q, k or v than a query head's own, or a key's: which ones."""

from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.second_order import with_values
from rawattn.check.diagnose.engine.attention import Context, Step
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.read.contexts import scores_of
from rawattn.check.diagnose.read.fields import Field, of_heads
from rawattn.check.diagnose.read.probe import Weights
from rawattn.check.diagnose.read.said import seen_of
from rawattn.check.diagnose.read.terms import Term

Array = np.ndarray
PRODUCTS = {"k": "Q K^T", "q": "Q K^T", "v": "P V"}


def _taken(of: str, heads: Array | None, by: maps.Map | None, c: Context) -> Array:
    """q, k or v of a view, by query head, with these heads, by query head, and rows of it."""
    at = c.view.rows if of == "q" else c.view.keys
    own = c.view.heads if of == "q" else c.view.heads // c.question.group
    own = own if heads is None else heads[c.view.heads]
    at = at if by is None else _rows(by, of, c.question)[at]
    return np.asarray(getattr(c.question, of)[at][:, own].astype(np.float64).swapaxes(0, 1))


def _rows(by: maps.Map, of: str, question: Question) -> Array:
    """For all rows those that are taken."""
    g = maps.geometry(question, of)
    rows = np.broadcast_to(by.of(g).t, g.shape)[:, 0, 0]
    return np.where((rows >= 0) & (rows < len(rows)), rows, np.arange(len(rows)))


def _taking(of: str, heads: Array | None = None, by: maps.Map | None = None) -> dict[str, Step]:
    step = "O" if of == "v" else "Y"
    return {step: with_values(step, **{of.upper(): partial(_taken, of, heads, by)})}


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


def rows_of(field: Field, c: Context, read: Weights) -> Term | None:
    """Which rows of k or q the scores are of, or which of v the weights multiply."""
    q, right = c.question, read.places.right
    every = [*maps.sequences(q), *maps.rows(q)] if not q.sparse else []
    own = (seen_of(read)[0] == right)[:, right.any(axis=1)].all()  # else weights are elsewhere
    for of, by in product("kqv" if own else "v", every):
        steps = _taking(of, by=by)
        if of == "v":
            moved = read.right.P @ np.eye(len(q.v))[_rows(by, of, q)]
            fits = bool(np.abs(moved - read.P).max(initial=0.0) < field.noise)
        else:
            fits = field.fits(scores_of(c, steps) - c.S)
        if fits:
            either = of == "k" and q.mask_window == (-1, -1)  # nobody can tell
            where = "Q K^T, or P V of v," if either else PRODUCTS[of]
            name = "offsets-shifted" if by.family == "sequences" else "stale-tile"
            return Term(f"{where} takes other rows of {of}: {by.words}", name, steps)
    return None
