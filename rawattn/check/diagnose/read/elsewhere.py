"""Which other rows, heads or sequences the numbers of rows (lse, D, sinks) are those of."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.reading import array_of, of_view
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, changed
from rawattn.check.diagnose.evidence.places import Array
from rawattn.check.diagnose.read.probe import Weights
from rawattn.check.diagnose.read.said import logs_of, noise_of, seen_of

FEW = 0.3  # of the rows that are known: a map may have nothing for so many


def map_of(
    question: Question,
    right: Iterable[Array],
    held: Array,
    near: Array | float,
    ats: Iterable[Any] = (...,),
) -> tuple[maps.Map, float] | None:
    """By which map rows (num_heads_q, total_q) hold the ``right`` numbers of others, up to
    ``near``, and what they hold where it has none; NaN is not known. ats: which rows each of
    several ``right`` ones tells of."""
    told, g, calls = (
        ~np.isnan(held),
        maps.geometry(question, "lse"),
        list(zip(right, ats, strict=True)),
    )
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


def map_of_lse(read: Weights) -> tuple[maps.Map, float] | None:
    """The same of the lse that a backward pass takes, where nothing else is wrong with P."""
    (seen, alive), rights = seen_of(read), read.places.rights
    noise = 3 * noise_of(read.places)
    told = rights.any(axis=-1) & alive & read.telling
    gone = told & ~seen.any(axis=-1)  # rows with an lse of no keys have no weights
    if (seen != rights & ~gone[..., None])[told].any():
        return None
    held = np.where(seen & rights, read.right.S - logs_of(read, seen), np.nan)
    with np.errstate(invalid="ignore"):
        low, high = (
            np.nanmin(held, axis=-1, initial=np.inf),
            np.nanmax(held, axis=-1, initial=-np.inf),
        )
        held = np.where(gone, np.inf, np.where(told, (low + high) / 2, np.nan))
    off = np.abs(held - read.right.lse)[told]
    if (high - low > noise)[told].any() or not (off > noise).any():
        return None
    right = [np.where(np.isfinite(L), L, np.inf) for L, _ in read.calls]
    return map_of(read.places.question, right, held, noise, [at for _, at in read.calls])


def with_lse(by: maps.Map, nothing: float, c: Context) -> Array:
    """P with an lse by a map."""
    L = by.moved(maps.geometry(c.question, "lse"), array_of(c.question, c.given, "lse"), nothing)
    return np.asarray(STEPS["bP"](changed(c, L=of_view(c, "lse", L))))
