"""Which bug of what is read, or where results are stored? Hundreds of listed ones are tried on one
sequence. Read off are constants, orders of rows, tiles and heads that hold others too, how often
gradients of keys have the heads of a group, and sums of parts. Long by the kinds of numbers."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue import inputs, partial_sums, stages
from rawattn.check.diagnose.catalogue.partial_sums import RIGHT, RUNNING, merged
from rawattn.check.diagnose.catalogue.sparse import selection
from rawattn.check.diagnose.engine.attention import BACKWARD, RESULTS, Bug, Given, contexts, solve
from rawattn.check.diagnose.engine.question import BY_ROW, OF_KEYS, Answers, Question, by_rows
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats
from rawattn.check.diagnose.evidence.places import TILES
from rawattn.check.diagnose.evidence.precision import relative_residual
from rawattn.check.diagnose.evidence.structure import named
from rawattn.check.diagnose.evidence.support import NO_RULE
from rawattn.check.diagnose.inferred import terms
from rawattn.check.diagnose.inferred.sample import WHOLE, Sample, is_wrong, stored
from rawattn.check.diagnose.read.fields import by_head, in_heads, other_rows

EFFORT = 3000.0  # units, for the listed ones of one stage, at most
YIELDED = 6  # of them for each tensor, in the end
HELPS, FAR = 0.5, 0.25  # of the right one's residual, and of what was found: at most what is left
CLOSE = 5e-5  # a number that is as near to another as this is that one
UNITS = 400  # tiles, or heads, that may hold others
INTEGER = 0.1  # how near to whole numbers factors must be
LEFT = 0.05  # of what is too much, at most
FITS = 0.01  # of the squares of what is wrong may be left on the view that is looked at
ROUNDED = 1e-12  # of them that may be rounding
MOST, ALIKE = 6, 60  # merges that are planted, and of which the nearest of all rows are chosen
SAME = 1e-9  # of squares: what leaves as much is alike
FIELDS = {"out": "O", "lse": "L", "e": "tL", "tout": "tO"}  # of Results, by steps
SUMS = {  # that may be rescaled wrongly together
    "forward": "out; row_sum; out row_sum; top; row_sum top; out row_sum top",
    "jvp": "e; tout ptv; e tout ptv; out; row_sum; out tout ptv; tout; ptv",
}
MERGED: dict[str, Iterable[str]] = {"out": partial_sums.WEIGHTS, "lse": partial_sums.LSES}
MERGED |= {"e": partial_sums.WEIGHTS, "tout": partial_sums.TOUTS}
SAID = {"out": "weights", "e": "weights of tlse"}
WORDS = {"top": "row_max", "e": "the sum of P o E", "ptv": "the sum of P tV"}
WORDS |= {"tout": "the sum of (P o E) V"}
Units = np.ndarray  # (count, size): of each the rows, -1 for none


def numbers(first: Sample) -> Iterator[Bug]:
    """Bugs whose numbers are read off the answers; none where nothing can be read."""
    for sample in _samples(first):
        for of in (_constants, _added, _rearranged):
            yield from of(sample)
        of_tiles = stages.sums(sample.question, sample.stage, sample.wrong.keys())
        yield from sample.near([of_tiles], YIELDED, EFFORT)


def bugs(first: Sample) -> Iterator[Bug]:
    """Of many bugs of one kind those that come near the answers."""
    question, stage = first.question, first.stage
    for sample in _samples(first):
        wrong = sample.wrong.keys()
        right, b = sample.found.keys() - wrong, sample.sequence
        families = (
            selection.candidates(question, stage, wrong) if question.sparse else (),
            partial_sums.of_splits(question) if stage == "forward" and not question.sparse else (),
            terms.pairs_dropped(sample),
            inputs.candidates(question, stage, wrong, right, b),
            stages.candidates(question, stage, wrong, b),
        )
        yield from sample.near(families, YIELDED, EFFORT)


def _samples(first: Sample) -> Iterator[Sample]:
    """With the out and lse that a backward pass may have had, those where something is wrong."""
    q, given = first.question, first.given
    yield from [first] * bool(first.wrong)
    if first.wrong and given is not None and q.passed is None and is_wrong(q, given):
        right = solve(q, "forward")
        other = Sample(q, first.answers, first.stage, (right["out"], right["lse"]))
        yield from [other] * bool(other.wrong)


def _constants(sample: Sample) -> Iterator[Bug]:
    """A tensor that is the right one times a number."""
    q = sample.question
    for name in sample.wrong:
        a, b = sample.found[name], by_rows(name, sample.truth[name])
        inside = (sample.question.sequence_of(name) >= 0)[:, None, None]
        a, b = (np.where(np.isfinite(a * b) & inside, x, 0.0) for x in (a, b))
        factor = float((a * b).sum() / max((b * b).sum(), np.finfo(float).tiny))
        left = relative_residual(a, factor * b, WHOLE)
        if left < 0.02 and abs(factor - 1) > max(1e-3, 2 * left):
            store, form = stored(name, partial(np.multiply, factor)), _in_words(factor, q)
            yield Bug("constant-factor", f"{name} times {form}", (sample.stage,), store=store)


def _in_words(x: float, q: Question) -> str:
    """A number, and what it is near to."""
    known = {"ln 2": math.log(2), "log2(e)": 1 / math.log(2)}
    known |= {"softmax_scale": q.scale, "1 / softmax_scale": 1 / q.scale}
    known["1 / group: the mean over its heads, not their sum"] = 1 / q.group if q.group > 1 else 0.0
    if x and math.isfinite(x):
        power = round(math.log2(abs(x)))
        known[f"{'-' * (x < 0)}2^{power}"] = math.copysign(2.0**power, x)
    near = [text for text, y in known.items() if math.isclose(x, y, rel_tol=CLOSE)]
    return " = ".join([f"{x:.4g}", *near])


def _rearranged(sample: Sample) -> Iterator[Bug]:
    """Results whose rows, or numbers, are in other places; those of keys alone, and together."""
    of_keys = tuple(name for name in sample.wrong if name in OF_KEYS)
    most = {n: min(FAR, HELPS * sample.of_all(n, sample.truth[n])) for n in sample.wrong}
    for names in dict.fromkeys([*((name,) for name in sample.wrong), of_keys]):
        here = {name: sample.truth[name] for name in names}
        for bug in inputs.rearranged(sample.question, names) if names else ():
            assert bug.store is not None
            moved = {n: x for n, x in bug.store(sample.question, here).items() if n in here}
            shapes = all(moved[n].shape == x.shape for n, x in here.items())
            if shapes and all(sample.of_all(n, x) < most[n] for n, x in moved.items()):
                yield bug
    for name in sample.wrong:  # each row as one number
        inside, x = sample.question.sequence_of(name) >= 0, by_rows(name, sample.truth[name])
        mixed = np.random.default_rng(0).standard_normal(x.shape[2])
        due = np.where(inside, (x @ mixed).T, np.nan)
        held, size = (sample.found[name] @ mixed).T, sample.question.dtype.itemsize
        if places := other_rows(due, held, np.isfinite(due), size):
            text = f"{name}: rows hold those of others, {NO_RULE}: {places}"
            store = stored(name, partial(_replaced, sample.found[name]))
            yield Bug("unknown", text, (sample.stage,), store=store)


def _replaced(x: Floats, other: Floats) -> Floats:
    if x.shape != other.shape:
        raise NotImplementedError("this was read on sequences of other lengths")
    return x


def _added(sample: Sample) -> Iterator[Bug]:
    """Of each wrong result the largest tiles of which that is so, or the heads, or the columns."""
    for name in sample.wrong:
        of, truth = sample.question.sequence_of(name), by_rows(name, sample.truth[name])
        kinds = {f"tiles of {t} rows": (0, _units(sample.question, name, t)) for t in TILES[:1:-1]}
        each = [np.arange(count)[:, None] for count in truth.shape]
        kinds = (kinds if name not in BY_ROW else {}) | {"heads": (1, each[1])}
        kinds |= {"columns": (2, each[2])} if truth.shape[2] > 1 else {}
        for unit, (axis, units) in kinds.items():
            right, found, inside = (
                _cut(np.where(of[:, None, None] >= 0, x, 0.0).swapaxes(0, axis), units)
                for x in (truth, sample.found[name], np.ones_like(truth))
            )
            held = _held(right, found - right, inside > 0)
            if held is None:
                continue
            whole = held + np.eye(len(held))
            moved = bool((np.sort(whole) == np.eye(len(whole))[-1]).all())
            if moved or name not in BY_ROW:
                of_others = whole * (1 - np.eye(len(whole))) if moved else held
                pairs = dict.fromkeys((b - a, of_others[a, b]) for a, b in np.argwhere(of_others))
                told = list[str]()
                for away, often in [*pairs][:4]:
                    at = np.flatnonzero(np.diag(of_others, away) == often) - min(away, 0)
                    told.append(f"{named('', at)} has {often:+g} of {named('', at + away)}")
                if moved:
                    bug, text = "transposed", "what others must"
                else:
                    sequence, text = of[units[:, 0]] if not axis else 0 * units[:, 0], "others too"
                    behind = np.triu(held) * (sequence[:, None] != sequence)  # not of earlier work
                    bug = "offsets-shifted" if behind.any() else "accumulator-not-reset"
                    bug = "transposed" if (held < 0).any() else bug
                store = stored(name, partial(_with, units, held, axis))
                text = f"{name}: {unit} hold {text}: {', '.join(told)}"
                yield Bug(bug, text, (sample.stage,), store=store)
                break


def _held(right: Floats, extra: Floats, inside: Floats) -> Floats | None:
    """How often each right unit is in what is too much in each, if these are whole numbers."""
    if not 1 < len(right) <= UNITS or not np.isfinite(extra).all():
        return None
    held, there = np.zeros((len(right),) * 2), np.asarray(right.any(axis=1))
    for count in np.unique(inside.sum(axis=1)):  # a short one holds as much of the others
        own, part = inside.sum(axis=1) == count, right[there, :count].T
        of = np.linalg.lstsq(part.T @ part, part.T @ extra[own, :count].T, rcond=1e-9)[0]
        held[np.ix_(own, there)] = of.T
    whole = np.rint(held)
    left = float(np.linalg.norm(np.where(inside, extra - whole @ right, 0.0)))
    near = np.abs(held - whole).max() < INTEGER and left < LEFT * np.linalg.norm(extra)
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
    x[units[units >= 0]] += (held @ _cut(x, units)).reshape(*units.shape, *x.shape[1:])[units >= 0]
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


@np.errstate(all="ignore")
def of_parts(sample: Sample) -> list[Bug]:
    """Sums of parts of the keys that were put together wrongly, tried on one view: tiles one after
    the other must be rescaled by exp(old max - new max) of their own row, the results of splits
    weighted by exp(lse of the split - lse)."""
    stage = sample.stage
    views = contexts(sample.question, stage) if sample.wrong and stage in SUMS else ()
    for c in (c for c in views if sample.has(c.view) and c.S.shape[2]):
        told = {step: name for name, step in RESULTS[stage].items() if name in sample.found}
        names = {of: told[step] for of, step in FIELDS.items() if step in told}
        at = np.ix_(c.view.rows, c.view.heads)
        found = {of: sample.found[name][at].swapaxes(0, 1) for of, name in names.items()}
        found = {of: x[..., 0] if names[of] in BY_ROW else x for of, x in found.items()}
        right = {of: getattr(c, FIELDS[of]) for of in names}
        off = (np.isfinite(x) & ~np.isclose(x, right[of], 1e-3, 1e-4) for of, x in found.items())
        if any(x.any() for x in off):  # else NaN alone: no numbers tell a sum
            return [*_rescaled(stage, c, found, right), *_merges(sample, c, found, right)]
    return []


def _rescaled(stage: str, c: Context, found: Answers, right: Answers) -> Iterator[Bug]:
    # rows that are right may have another loop
    same = {of: np.isclose(x, right[of], 1e-3, 1e-4) for of, x in found.items()}
    wrong, seen = sum(_left(x, right[of]) for of, x in found.items()), set[tuple[object, ...]]()
    for at, cut in partial_sums.tiles(c.question).items():
        parts = partial_sums.parts_of(c, cut)
        sums = partial_sums.totals(parts, partial_sums.RIGHTLY)
        every = [(x, way, RUNNING) for x, way in partial_sums.ways(c.question).items()]
        every += [(x, partial_sums.RIGHTLY, x) for x in partial_sums.MAXIMA]
        ways = ((*by, partial_sums.totals(parts, *by[1:])) for by in every)
        for (words, way, kept, others), some in product(ways, SUMS[stage].split("; ")):
            moved = some.split()
            if (kept == RUNNING) == ("top" in moved):
                continue
            wrong_ones = sums | {name: others[name] for name in moved}
            of = partial_sums.divided(wrong_ones["top"], wrong_ones)
            alike = at, *(np.round(getattr(of, name), 8).tobytes() for name in found)
            if alike in seen:  # of two tiles most ways do the same
                continue
            seen.add(alike)
            if sum(_left(x, getattr(of, n), same[n]) for n, x in found.items()) < FITS * wrong:
                said = " and ".join(WORDS.get(name, name) for name in moved)
                of_parts = partial(partial_sums.rescaled, wrong=moved, way=way, kept=kept)
                planted = partial_sums.steps(stage, cut, of_parts)
                yield Bug("no-rescale", f"{said} {words}, {at}", (stage,), steps=planted)


def _merges(sample: Sample, c: Context, found: Answers, right: Answers) -> list[Bug]:
    """The merges that come nearest; where all parts have keys some are alike."""
    near, stage = list[tuple[float, Bug]](), sample.stage
    off = {of: _left(x, right[of]) for of, x in found.items()}
    for at, cut in partial_sums.splits(c.question).items():
        parts, total = partial_sums.parts_of(c, cut), sum(off.values())
        forms = {of: [RIGHT] for of in found}
        for of, x in found.items():
            given = {"e": forms["e"][0]} if of == "tout" else {}
            every = MERGED[of] if off[of] > ROUNDED else ()
            left = {n: _left(x, getattr(merged(parts, **given | {of: n}), of)) for n in every}
            least = min(left.values(), default=off[of])
            if least < FITS * off[of]:
                forms[of] = [form for form in left if left[form] <= 1.01 * least + 1e-12]
                total += least - off[of]
        for chosen in product(*forms.values()):
            wrong: Any = {of: form for of, form in zip(forms, chosen, strict=True) if form != RIGHT}
            if wrong:
                planted = partial_sums.steps(stage, cut, partial(merged, **wrong))
                form = "; ".join([*(f"{SAID.get(x, x)} {y}" for x, y in wrong.items()), at])
                near.append((total, Bug("partial-merge", form, (stage,), steps=planted)))
    near.sort(key=lambda one: one[0])
    alike = [bug for total, bug in near[:ALIKE] if total <= near[0][0] + SAME]
    if len(alike) > MOST:  # most splits of few keys are the same
        return sorted(alike, key=lambda bug: sum(sample.of_wrong(bug).values()))[:MOST]
    return [bug for _, bug in near[:MOST]]


def _left(found: Floats, wanted: Floats, but: Floats | bool = False) -> float:
    """The square of what an answer is off by, in units of its size; ``but`` for some of it."""
    found = np.where(but, wanted, found)
    both = np.isfinite(found) & np.isfinite(wanted)
    size = float((found[both] ** 2).sum())
    left = float(((found[both] - wanted[both]) ** 2).sum()) / size if size else 0.0
    return left + float((np.isfinite(found) != np.isfinite(wanted)).mean())
