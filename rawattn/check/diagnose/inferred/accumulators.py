"""Results of which a tile, or a head, holds others too: an accumulator that is not cleared. Which
ones is read off: what is too much in a unit is a sum of right units, with whole factors."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug, Floats
from rawattn.check.diagnose.engine.question import BY_ROW, Question, by_rows
from rawattn.check.diagnose.evidence.places import TILES
from rawattn.check.diagnose.inferred.sample import Sample, stored

MOST = 400  # units
WHOLE = 0.1  # how near to whole numbers factors must be
LEFT = 0.05  # of what is too much, at most
Units = np.ndarray  # (count, size): of each the rows, -1 for none


def bugs(sample: Sample) -> Iterator[Bug]:
    """Of each wrong result the largest tiles of which that is so, or the heads."""
    for name in (n for n in sample.wrong if n not in BY_ROW and sample.found[n].ndim == 3):
        of, truth = sample.question.sequence_of(name), by_rows(name, sample.truth[name])
        for tile in (*TILES[:1:-1], 0):  # of 0 rows: heads
            axis = int(not tile)
            heads = np.arange(truth.shape[1])[:, None]
            units = _units(sample.question, name, tile) if tile else heads
            right, found, inside = (
                _cut(np.where(of[:, None, None] >= 0, x, 0.0).swapaxes(0, axis), units)
                for x in (truth, sample.found[name], np.ones_like(truth))
            )
            held = _held(right, found - right, inside > 0)
            if held is not None:
                sequence = of[units[:, 0]] if tile else 0 * heads[:, 0]
                unit = f"tiles of {tile} rows" if tile else "heads"
                pairs = np.argwhere(held)[:4].tolist()
                which = ", ".join(f"{a} has {held[a, b]:+g} of {b}" for a, b in pairs)
                text = f"{name}: {unit} hold others too: {which}, ..."
                behind = np.triu(held) * (sequence[:, None] != sequence)  # not of earlier work
                bug = "offsets-shifted" if behind.any() else "accumulator-not-reset"
                bug = "unknown" if (held < 0).any() else bug
                store = stored(name, partial(_with, units, held, axis))
                yield Bug(bug, text, (sample.stage,), store=store)
                break


def _held(right: Floats, extra: Floats, inside: Floats) -> Floats | None:
    """How often each right unit is in what is too much in each, if these are whole numbers."""
    if not 1 < len(right) <= MOST or not np.isfinite(extra).all():
        return None
    held, there = np.zeros((len(right),) * 2), np.asarray(right.any(axis=1))
    for count in np.unique(inside.sum(axis=1)):  # a short one holds as much of the others
        own, part = inside.sum(axis=1) == count, right[there, :count].T
        of = np.linalg.lstsq(part.T @ part, part.T @ extra[own, :count].T, rcond=1e-9)[0]
        held[np.ix_(own, there)] = of.T
    whole = np.rint(held)
    left = float(np.linalg.norm(np.where(inside, extra - whole @ right, 0.0)))
    near = np.abs(held - whole).max() < WHOLE and left < LEFT * np.linalg.norm(extra)
    return whole if near and (whole - np.diag(np.diag(whole))).any() else None


def _units(question: Question, name: str, tile: int) -> Units:
    offsets = question.offsets(name).tolist()
    firsts = [(at, stop) for start, stop in pairwise(offsets) for at in range(start, stop, tile)]
    rows = np.array(firsts).reshape(-1, 2)
    places = rows[:, :1] + np.arange(tile)
    return np.where(places < rows[:, 1:], places, -1)


def _cut(x: Floats, units: Units) -> Floats:
    """(units, numbers), with zeros behind those that are shorter."""
    return np.asarray(np.concatenate([x, 0 * x[:1]])[units].reshape(len(units), -1))


def _with(units: Units, held: Floats, axis: int, given: Floats) -> Floats:
    x = given.swapaxes(0, axis).copy()
    added = (held @ _cut(x, units)).reshape(*units.shape, *x.shape[1:])
    x[units[units >= 0]] += added[units >= 0]
    return x.swapaxes(0, axis)
