"""Results of which a tile, or a head, holds others too: an accumulator that is not cleared.

Which ones is read off: what is too much in a unit is a sum of right units, with whole factors.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from rawattn.check.diagnose.engine.attention import TILES, Bug, Floats
from rawattn.check.diagnose.engine.question import BY_ROW, Question, by_rows
from rawattn.check.diagnose.inferred.sample import Sample, stored

MOST = 400  # units
WHOLE = 0.1  # how near to whole numbers factors must be
LEFT = 0.05  # of what is too much, at most
Units = np.ndarray  # (count, size): of each the rows, -1 for none


def bugs(sample: Sample) -> Iterator[Bug]:
    """Of each wrong result the largest tiles of which that is so."""
    for name in (n for n in sample.wrong if n not in BY_ROW and sample.found[n].ndim == 3):
        for tile in TILES[::-1]:
            truth = by_rows(name, sample.truth[name])
            units = _units(sample.question, name, tile)
            right, found = (_cut(x, units) for x in (truth, sample.found[name]))
            extra, inside = found - right, _cut(np.ones_like(truth), units) > 0
            if not 1 < len(right) <= MOST or not np.isfinite(extra).all():
                continue
            held, there = np.zeros((len(right),) * 2), np.asarray(right.any(axis=1))
            for count in np.unique(inside.sum(axis=1)):  # a short one holds as much of the others
                own, part = inside.sum(axis=1) == count, right[there, :count].T
                of = np.linalg.lstsq(part.T @ part, part.T @ extra[own, :count].T, rcond=1e-9)[0]
                held[np.ix_(own, there)] = of.T
            whole = np.rint(held)
            left = float(np.linalg.norm(np.where(inside, extra - whole @ right, 0.0)))
            others = whole - np.diag(np.diag(whole))
            near = np.abs(held - whole).max() < WHOLE and left < LEFT * np.linalg.norm(extra)
            if near and others.any():
                sequence = sample.sequences(name)[units[:, 0]]
                which = _which(whole, sequence, there)
                text = f"{name}: a tile of {tile} rows holds {which} too"
                store = stored(name, partial(_with, units, whole))
                yield Bug("accumulator-not-reset", text, (sample.stage,), store=store)
                break
        if (of_heads := _of_heads(sample, name)) is not None:
            yield of_heads


def _of_heads(sample: Sample, name: str) -> Bug | None:
    """A result of which heads hold those of others, or their sums."""
    of, x = by_rows(name, sample.truth[name]), sample.found[name]
    count = x.shape[1]
    right, found = (np.where(sample.sequences(name) >= 0, y.T, 0.0).T for y in (of, x))
    right, found = (y.swapaxes(1, 2).reshape(-1, count) for y in (right, found))
    if count < 2 or not np.isfinite(found).all():
        return None
    held = np.linalg.lstsq(right, found, rcond=1e-9)[0].T
    whole = np.rint(held) + 0.0
    left = np.linalg.norm(found - right @ whole.T) / np.linalg.norm(found)
    if np.abs(held - whole).max() > WHOLE or left > LEFT or (whole == np.eye(count)).all():
        return None
    sums = [" + ".join(map(str, row.nonzero()[0])) or "nothing" for row in whole[:8]]
    text = ", ".join(f"head {h} holds {heads}" for h, heads in enumerate(sums))
    bug = "accumulator-not-reset" if (np.diag(whole) == 1).all() else "unknown"
    store = stored(name, lambda x: np.einsum("gh,thd->tgd", whole, x))
    return Bug(bug, f"{name}: {text} of the right heads", (sample.stage,), store=store)


def _units(question: Question, name: str, tile: int) -> Units:
    offsets = question.offsets(name).tolist()
    firsts = [(at, stop) for start, stop in pairwise(offsets) for at in range(start, stop, tile)]
    rows = np.array(firsts).reshape(-1, 2)
    places = rows[:, :1] + np.arange(tile)
    return np.where(places < rows[:, 1:], places, -1)


def _cut(x: Floats, units: Units) -> Floats:
    """(units, numbers), with zeros behind those that are shorter."""
    return np.asarray(np.concatenate([x, 0 * x[:1]])[units].reshape(len(units), -1))


def _with(units: Units, held: Floats, given: Floats) -> Floats:
    added = (held @ _cut(given, units)).reshape(*units.shape, *given.shape[1:])
    x = given.copy()
    x[units[units >= 0]] += added[units >= 0]
    return x


def _which(held: Floats, sequence: np.ndarray, tells: np.ndarray) -> str:
    """Whose sums each unit has beside its own."""
    order, own = np.arange(len(held)), sequence[:, None] == sequence
    later = order[:, None] > order
    told = {
        "that of the one before it": order[:, None] == order + 1,
        "those of all before it in its sequence": later & own,
        "those of all behind it in its sequence": later.T & own,
    }
    known = (text for text, due in told.items() if np.array_equal(held[:, tells], due[:, tells]))
    pairs = ", ".join(f"{int(a)} has {int(b)}" for a, b in np.argwhere(held)[:4])
    return next(known, f"others, by their numbers in the pack: {pairs}, ...,")
