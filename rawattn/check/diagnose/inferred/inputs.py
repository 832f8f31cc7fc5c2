"""Which bug of what is read, or where results are stored? Hundreds of listed ones are tried on one
sequence; constants and orders of rows, which are too many to list, are read off."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import chain

import numpy as np

from rawattn.check.diagnose.catalogue import inputs, tile_sums
from rawattn.check.diagnose.catalogue.sparse import selection
from rawattn.check.diagnose.engine.attention import Bug, Floats, solve
from rawattn.check.diagnose.engine.effort import spent
from rawattn.check.diagnose.engine.parts import sequences
from rawattn.check.diagnose.engine.question import (
    BY_ROW,
    OF_KEYS,
    Answers,
    Question,
    by_rows,
    given_to_backward,
)
from rawattn.check.diagnose.evidence.precision import Given, relative_residual
from rawattn.check.diagnose.evidence.rows import NOWHERE, in_words, moves_of
from rawattn.check.diagnose.inferred import accumulators
from rawattn.check.diagnose.inferred.sample import WHOLE, Sample

EFFORT = 3000.0  # units, for the listed ones of one stage, at most
YIELDED = 6  # of them for each tensor, in the end
HELPS, FAR = 0.5, 0.25  # of the right one's residual, and of what was found: at most what is left
CLOSE = 5e-5  # a number that is as near to another as this is that one
MOST = 6000  # rows whose order is looked for


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs read off the answers of ``stage``; none where nothing can be read."""
    for given in _givens(question, answers, stage):
        sample = Sample(question, answers, stage, given)
        wrong = sample.wrong.keys()
        if not wrong:
            return
        if stage == "backward" and "out" in answers:
            of_forward = _rearranged(Sample(question, answers, "forward"))
            yield from (bug for bug in of_forward if stage in bug.stages)
        yield from _constants(sample)
        yield from _same_row_added(sample)
        yield from accumulators.bugs(sample)
        yield from _rearranged(sample)
        listed = inputs.candidates(question, stage, wrong, sample.found.keys() - wrong)
        of_lists = selection.candidates(question, stage, wrong) if question.sparse else ()
        of_tiles = tile_sums.candidates(question, stage, wrong)
        listed = chain(of_lists, of_tiles, listed)
        yield from sample.near(listed, YIELDED, spent() + EFFORT)


def _givens(question: Question, answers: Answers, stage: str) -> Iterator[Given]:
    """The out and lse that a backward pass may have had."""
    if stage in ("forward", "jvp"):
        yield None
        return
    given, right = given_to_backward(question, answers), solve(question, "forward")
    if given is not None:
        yield given
    others = (right["out"], right["lse"])
    pairs = zip(("out", "lse"), given or others, others, strict=True)
    off = [relative_residual(by_rows(n, x), by_rows(n, y), WHOLE) for n, x, y in pairs]
    if given is None or (question.passed is None and max(off) > 1e-2):
        yield others


# ---- constants --------------------------------------------------------------------------------


def _constants(sample: Sample) -> Iterator[Bug]:
    """A tensor that is the right one times a number, or times one for each head or column."""
    for name in sample.wrong:
        a, b = sample.found[name], by_rows(name, sample.truth[name])
        sequence = sample.sequences(name)[:, None, None]
        finite = np.isfinite(a) & np.isfinite(b) & (sequence >= 0)
        a, b = (np.where(finite, x, 0.0) for x in (a, b))
        heads, columns = (np.arange(count) for count in a.shape[1:])
        for of, number in (("", np.zeros(1, int)), ("head", heads[:, None]), ("column", columns)):
            part = np.broadcast_to(number, a.shape)
            if of and len(np.unique(part[finite])) < 2:
                continue
            above, below = (np.bincount(part.ravel(), (x * b).ravel()) for x in (a, b))
            factors = np.where(below > 0, above / np.where(below > 0, below, 1.0), 1.0)
            left = relative_residual(a, factors[part] * b, WHOLE)
            if left < 0.02 and np.abs(factors - 1).max() > max(1e-3, 2 * left):
                store = partial(_times, name, factors[part])
                form = f"{name} times {_by_part(of, factors)}"
                yield Bug("constant-factor", form, (sample.stage,), store=store)
                break


def _by_part(of: str, factors: Floats) -> str:
    """Numbers in words, neighbours that are about equal once."""
    if of != "column":
        return ", ".join(_in_words(float(x)) for x in factors) + (f" by {of}" if of else "")
    starts = [0, *(np.flatnonzero(np.abs(np.diff(factors)) > 0.02 * np.abs(factors[1:])) + 1)]
    stops = [*starts[1:], len(factors)]
    runs = [
        f"{_in_words(float(np.mean(factors[start:stop])))} from column {start} on"
        for start, stop in zip(starts, stops, strict=True)
    ]
    return ", ".join(runs[:6]) + (", ..." if len(runs) > 6 else "")


def _in_words(x: float) -> str:
    """A number, and what it is near to."""
    if x == 0 or not math.isfinite(x):
        return f"{x:.4g}"
    power = round(math.log2(abs(x)))
    known = {f"{round(x)}": float(round(x)), f"{round(x, 1):g}": round(x, 1)}
    known |= {f"{'-' if x < 0 else ''}2^{power}": math.copysign(2.0**power, x)}
    known |= {"ln 2": math.log(2), "log2(e)": 1 / math.log(2)}
    text = next((text for text, y in known.items() if math.isclose(x, y, rel_tol=CLOSE)), "")
    return f"{x:.4g}" if text in ("", f"{x:.4g}") else f"{x:.4g} = {text}"


def _times(name: str, factors: Floats, question: Question, answers: Answers) -> Answers:
    return answers | {name: answers[name] * (factors[..., 0].T if name in BY_ROW else factors)}


def _same_row_added(sample: Sample) -> Iterator[Bug]:
    """dv of a sequence and head is the right one and one row more, the same for all keys: what
    queries of 0, whose P is uniform, add with their cotangent."""
    if "dv" in sample.wrong:
        more = np.asarray(sample.found["dv"] - sample.truth["dv"])
        for _, keys in sequences(sample.question):
            more[keys] = more[keys].mean(axis=0) if more[keys].size else 0.0
        if np.isfinite(more).all() and sample.of_all("dv", sample.truth["dv"] + more) < FAR:
            size = np.abs(more).max(initial=0.0)
            form = f"one row more in every sequence and head of dv, up to {size:.3g}"

            def store(question: Question, answers: Answers) -> Answers:
                return answers | {"dv": answers["dv"] + more}

            yield Bug("padded-grad-out", form, (sample.stage,), store=store)


# ---- places of results ------------------------------------------------------------------------


def _rearranged(sample: Sample) -> Iterator[Bug]:
    """A result whose rows, or numbers, are in other places."""
    for name, noise in sample.wrong.items():
        known, here = False, {name: sample.truth[name]}
        most = min(FAR, HELPS * sample.of_all(name, sample.truth[name]))
        for bug in inputs.rearranged(sample.question, name):
            assert bug.store is not None
            moved = bug.store(sample.question, here)[name]
            if moved.shape == here[name].shape and sample.of_all(name, moved) < most:
                known = True
                yield bug
        if not known or name in BY_ROW:
            yield from _moved(sample, name, max(8 * noise, 1e-3))


UNITS = {"heads": (1, 0), "tokens": (0,), "rows": (0, 1)}  # by the first axes


def _moved(sample: Sample, name: str, allowed: float) -> Iterator[Bug]:
    """Every head, token or row as that of the right result which it equals, in another order."""
    sequence = sample.sequences(name)
    inside = np.flatnonzero(sequence >= 0)
    both = sample.found[name], by_rows(name, sample.truth[name])
    a, b = (x[inside] for x in both)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return
    for unit, axes in UNITS.items():
        x, y = _units(a, axes), _units(b, axes)
        if len(x) < 2 or len(x) > MOST or x.shape[1] < (8 if unit == "rows" else 4):
            continue
        order = _order(x, y, allowed)
        if order is None:
            continue
        by = order - np.arange(len(order))
        text = f"{name}: {np.count_nonzero(by)} of {len(x)} {unit} are in other places"
        if unit == "tokens":
            taken = np.full(len(sequence), -1)
            taken[inside] = np.where(order < 0, inside + NOWHERE, inside[order])
            side = "k" if name in OF_KEYS else "q"
            moves = moves_of([(sample.question, taken)], side)
            text = text if moves is None else f"{name}: {in_words(moves, side)}"
        if unit == "heads":
            text = f"{name}: heads in another order: {', '.join(map(str, order[:16]))}"
        bug = "transposed"
        if unit != "heads":  # are whole sequences shifted, by as many tokens each?
            there, each = order >= 0, len(x) // len(inside)
            of = np.repeat(sequence[inside], each)[there]
            shifts = {*zip(of.tolist(), by[there].tolist(), strict=True)}
            if len(shifts) == len({*of.tolist()}) and not any(shift % each for _, shift in shifts):
                bug = "offsets-shifted"
        yield Bug(bug, text, (sample.stage,), store=partial(_ordered, name, axes, inside, order))
        return


def _units(x: Floats, axes: tuple[int, ...]) -> Floats:
    x = np.moveaxis(x, axes, range(len(axes)))
    return x.reshape(x.shape[0] * (x.shape[1] if axes == (0, 1) else 1), -1)


def _ordered(
    name: str,
    axes: tuple[int, ...],
    inside: np.ndarray,
    order: np.ndarray,
    question: Question,
    answers: Answers,
) -> Answers:
    x = by_rows(name, answers[name]).astype(np.float64)
    there = np.moveaxis(x[inside], axes, range(len(axes)))
    found = np.where((order < 0)[:, None], 0.0, _units(x[inside], axes)[order])
    x[inside] = np.moveaxis(found.reshape(there.shape), range(len(axes)), axes)
    return answers | {name: x[..., 0].T if name in BY_ROW else x}


def _order(found: Floats, wanted: Floats, allowed: float) -> np.ndarray | None:
    """Of each vector the wanted one that it equals, -1 for zeros; None where some equal none, or
    all but a few their own."""
    error = np.square(wanted).sum(axis=1) - 2 * (found @ wanted.T)
    order = error.argmin(axis=1)
    left = np.square(found - wanted[order]).sum(axis=1)
    own = np.square(wanted - wanted.mean(axis=0)).sum(axis=1)
    zero = ~found.any(axis=1)
    fits = zero | (left <= allowed**2 * np.maximum(own.mean(), own[order]))
    same = zero | (order == np.arange(len(order)))
    several = len(np.unique(order[~same])) > (~same).sum() // 2
    return np.where(zero, -1, order) if fits.all() and several and same.mean() <= 0.99 else None
