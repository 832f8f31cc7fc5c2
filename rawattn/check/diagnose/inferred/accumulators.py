"""Results that are sums of other parts than they must be, as they are read off: a tile, or a head,
that holds others too, by whole factors; gradients of keys by how often they have each head of a
group; and a D of 0, by the rows of dq."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from rawattn.check.diagnose.engine.attention import BACKWARD, RESULTS, Bug, contexts
from rawattn.check.diagnose.engine.question import BY_ROW, Question, by_rows
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, changed
from rawattn.check.diagnose.evidence.places import TILES
from rawattn.check.diagnose.evidence.precision import rows_off
from rawattn.check.diagnose.evidence.structure import where
from rawattn.check.diagnose.inferred.sample import Sample, stored
from rawattn.check.diagnose.read.fields import by_head, in_heads

MOST = 400  # units
WHOLE = 0.1  # how near to whole numbers factors must be
LEFT = 0.05  # of what is too much, at most
OFF = 2.0**-7  # of its size: what a row of dq is wrong by
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
    q, dense = sample.question, not sample.question.sparse and sample.question.num_heads_q > 1
    names = [n for n in ("dk", "dv") if n in sample.wrong and dense]
    every = contexts(q, "backward", sample.given) if names else ()
    views = [c for c in every if c.view.sequence == sample.sequence and c.S.size]
    own = np.repeat(np.eye(q.num_heads_kv), q.group, axis=1)
    for name in names if views else ():
        step = RESULTS["backward"][name]
        due = sample.found[name][views[0].view.keys].swapaxes(0, 1).reshape(q.num_heads_kv, -1)
        unit = max(sample.wrong[name], 1e-4) * float(np.sqrt(np.mean(due**2)))
        if not unit or not np.isfinite(due).all():
            continue
        parts = np.concatenate([STEPS[step](c) for c in views]).reshape(q.num_heads_q, -1) / unit
        found = np.linalg.lstsq(parts.T, due.T / unit, rcond=1e-9)[0].T
        by = np.where(np.abs(found - np.rint(found)) < 1e-2, np.rint(found) + 0.0, found)
        of_others = np.where(own > 0, 0.0, by).any()
        uneven = of_others or np.ptp(by[own > 0]) > 1e-2
        if uneven and np.mean((by @ parts - due / unit) ** 2) <= 1:
            text = f"the heads of a group count {by_head(by[own > 0])} times each"
            text = f"{name}, {in_heads(by, own)}" if of_others else text
            bug = "gqa-reduction-map" if of_others else "gqa-group-not-summed"
            yield Bug(bug, text, BACKWARD, steps={step: partial(_of_heads, by, step)})


def _of_heads(by: Floats, step: str, c: Context) -> Floats:
    """What every query head of a sequence adds to the key/value head of a view."""
    every = contexts(c.question, "backward", c.given)
    here = [changed(x, r=c.r, o=c.o) for x in every if x.view.sequence == c.view.sequence]
    parts = np.concatenate([STEPS[step](x) for x in here])
    return np.asarray(by[c.view.head_kv, :, None, None] * parts)


def without_D(sample: Sample) -> Iterator[Bug]:
    """D of 0 in the rows of dq that are wrong: as a grid that is too small leaves it."""
    if "dq" not in sample.wrong:
        return
    found, due = sample.found["dq"], by_rows("dq", sample.truth["dq"])
    bad = rows_off(found, due, np.ones(due.shape[:2], dtype=bool), OFF)

    def D(c: Context) -> Floats:
        return np.where(bad[np.ix_(c.view.rows, c.view.heads)].T, 0.0, STEPS["D"](c))

    places = "; ".join(where(sample.question, "dq", bad))
    text = f"D is 0, not dout . out - dlse, in some rows: {places}"
    yield Bug("delta-of-another-out", text, BACKWARD, steps={"D": D})
