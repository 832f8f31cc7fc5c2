"""Other heads of q, k or v than a query head's own: which ones."""

from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue.reading import in_product
from rawattn.check.diagnose.engine.attention import Context, Step
from rawattn.check.diagnose.read.contexts import scores_of
from rawattn.check.diagnose.read.fields import Field, of_heads
from rawattn.check.diagnose.read.terms import Term

Array = np.ndarray


def _taken(of: str, heads: Array, c: Context) -> Array:
    """q, k or v of a view, by query head, with these heads."""
    at = c.view.rows if of == "q" else c.view.keys
    taken = getattr(c.question, of)[at][:, heads[c.view.heads]]
    return np.asarray(taken.astype(np.float64).swapaxes(0, 1))


def _taking(of: str, heads: Array) -> dict[str, Step]:
    return in_product("O" if of == "v" else "Y", **{of.upper(): partial(_taken, of, heads)})


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
