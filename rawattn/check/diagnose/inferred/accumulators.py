"""Results that are sums of other parts than they must be, as they are read off: a tile, or a head,
that holds others too, by whole factors; and gradients of keys by how often they have each head of
a group."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from rawattn.check.diagnose.engine.attention import BACKWARD, RESULTS, Bug, Given, contexts
from rawattn.check.diagnose.engine.question import BY_ROW, Answers, Question, by_rows
from rawattn.check.diagnose.engine.steps import STEPS, Floats
from rawattn.check.diagnose.evidence.places import TILES
from rawattn.check.diagnose.inferred.sample import Sample, stored
from rawattn.check.diagnose.read.fields import by_head, in_heads

MOST = 400  # units
WHOLE = 0.1  # how near to whole numbers factors must be
LEFT = 0.05  # of what is too much, at most
Units = np.ndarray  # (count, size): of each the rows, -1 for none


def bugs(sample: Sample) -> Iterator[Bug]:
    """Of each wrong result the largest tiles of which that is so, or the heads."""
    for name in sample.wrong:
        of, truth = sample.question.sequence_of(name), by_rows(name, sample.truth[name])
        for tile in (0,) if name in BY_ROW else (*TILES[:1:-1], 0):  # of 0 rows: heads
            axis = int(not tile)
            heads = np.arange(truth.shape[1])[:, None]
            units = _units(sample.question, name, tile) if tile else heads
            right, found, inside = (
                _cut(np.where(of[:, None, None] >= 0, x, 0.0).swapaxes(0, axis), units)
                for x in (truth, sample.found[name], np.ones_like(truth))
            )
            held = _held(right, found - right, inside > 0)
            if held is None:
                continue
            whole, unit = held + np.eye(len(held)), f"tiles of {tile} rows" if tile else "heads"
            moved = bool((np.sort(whole) == np.eye(len(whole))[-1]).all())
            if moved or name not in BY_ROW:
                if moved:
                    taken = enumerate(whole.argmax(axis=1))
                    which = ", ".join(f"{a} that of {b}" for a, b in taken if a != b)
                    bug, text = "transposed", f"{name}: {unit} hold what others must: {which}"
                else:
                    sequence = of[units[:, 0]] if tile else 0 * heads[:, 0]
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


def of_heads(sample: Sample) -> Iterator[Bug]:
    """How often each head of a wrong gradient of keys has every query head, in the sequence that is
    looked at, if they are all that there is."""
    q, rows = sample.question, sample.question.span("k", sample.sequence)
    own = np.repeat(np.eye(q.num_heads_kv), q.group, axis=1)
    for name in [n for n in ("dk", "dv") if n in sample.wrong and q.num_heads_q > 1]:
        due = sample.found[name][rows].swapaxes(0, 1).reshape(q.num_heads_kv, -1)
        unit = max(sample.wrong[name], 1e-4) * float(np.sqrt(np.mean(due**2)))
        if not unit or not np.isfinite(due).all():
            continue
        parts = _parts(q, sample.given, name)[rows].swapaxes(0, 1).reshape(q.num_heads_q, -1) / unit
        found = np.linalg.lstsq(parts.T, due.T / unit, rcond=1e-9)[0].T
        by = np.where(np.abs(found - np.rint(found)) < 1e-2, np.rint(found) + 0.0, found)
        of_others = np.where(own > 0, 0.0, by).any()
        uneven = of_others or np.ptp(by[own > 0]) > 1e-2
        if uneven and np.mean((by @ parts - due / unit) ** 2) <= 1:
            text = f"the heads of a group count {by_head(by[own > 0])} times each"
            text = f"{name}, {in_heads(by, own)}" if of_others else text
            bug = "gqa-reduction-map" if of_others else "gqa-group-not-summed"
            yield Bug(bug, text, BACKWARD, store=partial(_of_heads, by, name, sample))


def _parts(question: Question, given: Given, name: str) -> Floats:
    """What every query head adds to a gradient of keys, (total_k, num_heads_q, width)."""
    found = np.zeros((len(question.k), question.num_heads_q, getattr(question, name[1]).shape[2]))
    for c in contexts(question, "backward", given):
        x = STEPS[RESULTS["backward"][name]](c)
        np.add.at(found, (c.view.keys[:, None], c.view.heads), x.swapaxes(0, 1))
    return found


def _of_heads(by: Floats, name: str, of: Sample, question: Question, answers: Answers) -> Answers:
    given = of.given if question is of.question else question.passed
    return answers | {name: np.einsum("kh,nhd->nkd", by, _parts(question, given, name))}
