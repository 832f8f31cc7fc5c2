"""Results of which a tile, or a head, holds others too: an accumulator that is not cleared.

Which ones is read off: what is too much in a unit is a sum of right units, with whole factors.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from rawattn.check.diagnose.engine.attention import TILES, Bug, Floats
from rawattn.check.diagnose.engine.question import BY_ROW, Answers, Question, by_rows
from rawattn.check.diagnose.inferred.sample import Sample

MOST = 400  # units
WHOLE = 0.1  # how near to whole numbers factors must be
LEFT = 0.05  # of what is too much, at most
Units = np.ndarray  # (count, 4): of each the sequence, the first row, how many, and its place


def bugs(sample: Sample) -> Iterator[Bug]:
    """Of each wrong result the largest tiles of which that is so, else heads."""
    for name in sample.wrong:
        if name in BY_ROW or sample.found[name].ndim != 3:
            continue
        for tile in (*TILES[::-1], 0):
            units = _tiles(sample.question, name, tile) if tile else np.zeros((1, 4), int)
            right, found = (
                _cut(by_rows(name, x), units) for x in (sample.truth[name], sample.found[name])
            )
            extra = found - right
            if not 1 < len(right) <= MOST or not np.isfinite(extra).all():
                continue
            held, there = np.zeros((len(right),) * 2), right.any(axis=1)
            numbers = units[:, 2] * (right.shape[1] // max(int(units[:, 2].max()), 1))
            numbers = numbers if tile else np.full(len(right), right.shape[1])
            for count in np.unique(numbers):  # a short one holds as much of the others
                own, part = numbers == count, right[there, :count].T
                of = np.linalg.lstsq(part.T @ part, part.T @ extra[own, :count].T, rcond=1e-9)[0]
                held[np.ix_(own, there)] = of.T
            whole = np.rint(held)
            inside = np.arange(right.shape[1]) < numbers[:, None]
            off = np.where(inside, extra - whole @ right, 0.0)
            left, size = float(np.linalg.norm(off)), float(np.linalg.norm(extra))
            others = whole - np.diag(np.diag(whole))
            if np.abs(held - whole).max() < WHOLE and left < LEFT * size and others.any():
                what = f"a tile of {tile} rows" if tile else "a head"
                text = f"{name}: {what} holds {_which(whole, units, right)} too"
                store = partial(_with, name, tile, whole)
                yield Bug("accumulator-not-reset", text, (sample.stage,), store=store)
                break


def _tiles(question: Question, name: str, tile: int) -> Units:
    offsets = question.offsets(name).tolist()
    found = [
        (b, start + first, min(tile, stop - start - first), first // tile)
        for b, (start, stop) in enumerate(pairwise(offsets))
        for first in range(0, stop - start, tile)
    ]
    return np.array(found).reshape(-1, 4)


def _cut(x: Floats, units: Units) -> Floats:
    """(units, numbers), with zeros behind those that are shorter; of heads where there is one
    unit without rows."""
    if not units[:, 2].any():
        return np.asarray(x.swapaxes(0, 1).reshape(x.shape[1], -1))
    found = np.zeros((len(units), int(units[:, 2].max(initial=0)), *x.shape[1:]))
    for of, (_, first, count, _) in zip(found, units, strict=True):
        of[:count] = x[first : first + count]
    return found.reshape(len(units), -1)


def _with(name: str, tile: int, held: Floats, question: Question, answers: Answers) -> Answers:
    x = answers[name]
    if not tile:
        return answers | {name: x + np.einsum("gh,thd->tgd", held, x)}
    units, y = _tiles(question, name, tile), x.copy()
    added = (held @ _cut(x, units)).reshape(len(units), -1, *x.shape[1:])
    for of, (_, first, count, _) in zip(added, units, strict=True):
        y[first : first + count] += of[:count]
    return answers | {name: y}


def _which(held: Floats, units: Units, right: Floats) -> str:
    """Whose sums each unit has beside its own."""
    order, tells = np.arange(len(held)), right.any(axis=1)
    if not units[:, 2].any():
        before: dict[str, Callable[[Floats, Floats], Floats]] = {
            "the sums of the head before": lambda a, b: a == b + 1,
            "the sums of all heads before it": lambda a, b: a > b,
        }
        told = {text: of(order[:, None], order) for text, of in before.items()}
    else:
        own = units[:, None, 0] == units[:, 0]
        alike = units[:, None, 2] == units[:, 2]
        later, next_one = order[:, None] > order, order[:, None] == order + 1
        runs = np.cumsum(np.append(0, np.diff(units[:, 2]) != 0))
        told = {
            "those of the tiles before it in its sequence": later & own,
            "those of the tiles behind it in its sequence": later.T & own,
            "that of the tile before it in its sequence": next_one & own,
            "that of the tile before it, of whatever sequence,": next_one,
            "those of the tiles before it, in all sequences,": later,
            "those of the tiles behind it, in all sequences,": later.T,
            "those of the tiles before it of its size": later & (runs[:, None] == runs),
            "those of the tiles of its size before it": later & alike,
        }
    known = (text for text, due in told.items() if np.array_equal(held[:, tells], due[:, tells]))
    pairs = ", ".join(f"{int(a)} has {int(b)}" for a, b in np.argwhere(held)[:4])
    return next(known, f"others, by their numbers in the pack: {pairs}, ...,")
