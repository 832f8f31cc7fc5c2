"""Which other rows, heads or sequences the numbers of rows (lse, D, sinks) are those of."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.reading import array_of, of_view
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, changed
from rawattn.check.diagnose.evidence.places import Array
from rawattn.check.diagnose.read.probe import Weights

Calls = Sequence[tuple[Array, Any]]  # right numbers of rows, and where they tell something
FEW = 0.3  # of the rows that are known: a map may have nothing for so many


def map_of(
    question: Question, calls: Calls, held: Array, near: Array | float
) -> tuple[maps.Map, float] | None:
    """By which map rows (num_heads_q, total_q) hold the right numbers of others, up to ``near``,
    and what they hold where it has none; NaN is not known."""
    told, g = ~np.isnan(held), maps.geometry(question, "lse")
    for by in maps.families(question, True) if told.any() else ():
        due = np.full_like(held, np.nan)
        for x, at in calls:
            due[at] = by.moved(g, x, np.nan)[at]
        known = told & ~np.isnan(due)
        with np.errstate(invalid="ignore"):
            same = (due == held) | (np.abs(due - held) <= near)
        if same[known].all() and known.sum() > (1 - FEW) * told.sum():
            left = held[told & ~known]
            return by, float(np.median(left)) if left.size else 0.0
    return None


def rows_of(x: Array, near: float) -> Array | None:
    """(num_heads_q, total_q): the number that all pairs of a row have, up to ``near``; NaN where
    none is known. None where they have several."""
    low, high = np.fmin.reduce(x, axis=-1), np.fmax.reduce(x, axis=-1)
    return None if (high > low + near).any() else np.asarray((low + high) / 2)


def map_of_lse(read: Weights) -> tuple[maps.Map, float] | None:
    """The same of the lse that a backward pass takes, where nothing else is wrong with P."""
    seen, rights, noise = read.seen, read.places.rights, 3 * read.noise
    told = rights.any(axis=-1) & read.alive & read.telling
    gone = told & ~seen.any(axis=-1)  # rows with an lse of no keys have no weights
    found = np.where(seen & told[..., None], read.right.S - read.logs, np.nan)
    found[gone] = np.inf
    held = rows_of(np.where(rights, found, np.nan), noise)
    if (seen != rights & ~gone[..., None])[told].any() or held is None:
        return None
    if not (np.abs(held - read.right.lse) > noise)[told & ~gone].any():  # but for lost rows
        return None
    calls = [(np.where(np.isfinite(L), L, np.inf), at) for L, at in read.calls]
    return map_of(read.places.question, calls, held, noise)


def moved(by: maps.Map, c: Context, x: Array, nothing: float = 0.0) -> Array:
    """What rows of a view have of ``x`` (num_heads_q, total_q or 1) by a map."""
    g = maps.geometry(c.question, "lse")
    return of_view(c, "lse", by.moved(g, np.broadcast_to(x, g.shape[1::-1]), nothing))


def with_lse(by: maps.Map, nothing: float, c: Context) -> Array:
    L = moved(by, c, array_of(c.question, c.given, "lse"), nothing)
    return np.asarray(STEPS["bP"](changed(c, L=L)))
