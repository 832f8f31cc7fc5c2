"""Numbers of rows that are others in a derivative: a row statistic (e, W, D), or how often a term
has a row. Results are linear in each of them, so that they tell that number row by row; what it is
in place of the right one, is told of all rows at once."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.reading import of_view
from rawattn.check.diagnose.catalogue.second_order import at, with_values
from rawattn.check.diagnose.engine.attention import (
    PROGRAMS,
    RESULTS,
    TILES,
    Bug,
    Same,
    contexts,
    run_steps,
    sequences,
)
from rawattn.check.diagnose.engine.question import (
    BY_ROW,
    OF_KEYS,
    OF_SLOTS,
    Answers,
    Question,
    by_rows,
)
from rawattn.check.diagnose.engine.steps import (
    SCORES,
    STEPS,
    Context,
    Floats,
    Step,
    changed,
    row_max,
)
from rawattn.check.diagnose.evidence.precision import finite
from rawattn.check.diagnose.evidence.structure import where
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.inferred.terms import CLEAR, CLOSE
from rawattn.check.diagnose.read.fields import sum_in_words, sums_of
from rawattn.check.diagnose.read.terms import of_columns

LEAST = 1e-3  # of what numbers are known by in most rows: where it is less they are not known
MOST = 2  # of what a number is a sum of
MOST_ROWS = 400  # of all heads, of which a result of keys is a sum
SOLVED = 3.0  # times as much may be left of numbers that are solved for together
OF_COLUMNS = {"W": "dout . ddout", "D": "dout . out"}
OPERANDS_OF_KEYS = ("K", "V", "tK", "tV")
QUANTITIES: dict[str, Step] = {  # (heads, n) of a context that a number may hold
    **{"e": lambda c: c.e, "W": lambda c: c.w, "D": lambda c: c.D, "dlse": lambda c: c.dL},
    **{"lse": lambda c: np.where(np.isneginf(c.L), 0.0, c.L), "row_max": row_max},
    "row_sum": lambda c: np.exp(c.L - row_max(c)),
    "1 / row_sum": lambda c: np.exp(np.where(np.isneginf(c.L), 0.0, row_max(c) - c.L)),
    "": lambda c: np.ones(c.S.shape[:2]),
}
NAMES = {"e": "tangent-e-omitted", "W": "second-w-omitted", "D": "delta-of-another-out"}
NAMES[""] = "second-term-dropped"
KEPT = {"of its head": 0, "of all heads": 1, "of all heads and sequences": 2}
OF_STAGE = {
    "backward": QUANTITIES.keys() - {"e", "W"},
    "second": QUANTITIES.keys(),
    "jvp": QUANTITIES.keys() - {"W", "D", "dlse"},
}
Numbers = Callable[[Question, Same | None], Floats]  # (num_heads_q, total_q)


class Number(NamedTuple):
    """One of each row, which is ``right`` of QUANTITIES; adding: with so much more in it."""

    text: str
    right: str
    adding: Callable[[Step], Mapping[str, Step]]


def _e_of(sites: str, more: Step) -> dict[str, Step]:
    return at(sites.split(", "), tP=lambda c: c.P * (c.E - (c.e + more(c))[..., None]))


def _more_of(step: str, more: Step) -> dict[str, Step]:
    return {step: lambda c: STEPS[step](c) + more(c)}


def _D_of(step: str, more: Step) -> dict[str, Step]:
    return {step: with_values(step, D=lambda c: c.D + more(c))}


def _often(steps: str, of: str, more: Step) -> dict[str, Step]:
    """An operand that no other term of these steps has; tP of tO is that of P o E."""

    def many(c: Context) -> Floats:
        x = c.P * c.E if (steps, of) == ("tO", "tP") else getattr(c, of)
        return np.asarray(getattr(c, of) + x * more(c)[..., None])

    return {step: with_values(step, **{of: many}) for step in steps.split()}


OF_D = Number("D", "D", partial(_more_of, "D"))
NUMBERS = {
    "backward": (
        OF_D,
        Number("how often dS is in dq and dk", "", partial(_often, "dQ dK", "dY")),
        Number("how often P is in dv", "", partial(_often, "dV", "P")),
    ),
    "second": (
        Number("e", "e", partial(_more_of, "e")),
        Number("e of the second pass", "e", partial(_e_of, "dS', gv")),
        *(Number(f"e in {x}", "e", partial(_e_of, x)) for x in ("dS'", "gv", "ddout, W", "ddout")),
        Number("ddlse", "e", partial(_more_of, "tL")),
        Number("W", "W", partial(_more_of, "w")),
        OF_D,
        *(Number(f"D in {x}", "D", partial(_D_of, y)) for x, y in (("dS'", "tdS"), ("dS", "dS"))),
        Number("how often P ddv is in ddout", "", partial(_often, "tO", "P")),
        Number("how often (P o E) v is in ddout", "", partial(_often, "tO", "tP")),
        Number("how often dS' is in gq and gk", "", partial(_often, "gQ gK", "tdY")),
        Number("how often dS is in gq and gk", "", partial(_often, "gQ gK", "dY")),
        Number("how often P' is in gv", "", partial(_often, "gV", "tP")),
    ),
    "jvp": (
        Number("e", "e", partial(_more_of, "e")),
        Number("e in tout", "e", partial(_e_of, "ddout")),
        Number("tlse", "e", partial(_more_of, "tL")),
        Number("how often P tv is in tout", "", partial(_often, "tO", "P")),
        Number("how often (P o E) v is in tout", "", partial(_often, "tO", "tP")),
    ),
}


class Read(NamedTuple):
    """What was read of some numbers (num_heads_q, total_q), those that are ``known``: how much more
    they are than they must be, and what rounding leaves of one."""

    known: np.ndarray
    added: Floats
    noise: Floats


def bugs(sample: Sample) -> Iterator[Bug]:
    """One of each number that alone may make a wrong result what it is."""
    for number in NUMBERS[sample.stage] if sample.wrong else ():
        steps = number.adding(QUANTITIES[""])
        one = sample.planted(Bug("", stages=(sample.stage,), steps=steps))
        moved = {n for n, x in sample.truth.items() if not np.array_equal(one[n], x)} - {*OF_SLOTS}
        own = {n for n in moved if n not in (*OF_KEYS, "dq", "gq", "delta")}  # of the same kernel
        told = sorted(moved & sample.wrong.keys(), key=lambda n: (n in OF_KEYS, n in BY_ROW))
        if told and own <= sample.wrong.keys():
            read = _of_keys if told[0] in OF_KEYS else _of_rows
            yield from _told(sample, number, told[0], read(sample, told[0], one, steps))


def _of_rows(sample: Sample, tensor: str, one: Answers, _: Mapping[str, Step]) -> Read | None:
    """What a result of rows tells, if it is right but for the number of each."""
    found, right = sample.found[tensor], by_rows(tensor, sample.truth[tensor])
    inside = (sample.question.sequence_of(tensor) >= 0)[:, None, None]
    there = np.isfinite(found) & np.isfinite(right) & inside
    due, by = (
        np.where(there, x - right, 0.0) for x in (found, finite(by_rows(tensor, one[tensor])))
    )
    allowed = _allowed(sample, tensor, right, due)
    size = (by * by).sum(axis=2)
    known = np.sqrt(size) > LEAST * np.sqrt(size.mean())
    size = np.where(known, size, 1.0)
    added = np.where(known, (due * by).sum(axis=2) / size, 0.0)
    if np.linalg.norm(due - added[..., None] * by) > allowed:
        return None
    return Read(known.T, added.T, (allowed / np.sqrt(known.sum() * size)).T)


def _of_keys(sample: Sample, tensor: str, _: Answers, steps: Mapping[str, Step]) -> Read | None:
    """What a result of keys tells, a sum over all rows of a view, if it is right but for these."""
    shape = sample.question.q.shape[1::-1]
    known, added, noise = np.zeros(shape, dtype=bool), np.zeros(shape), np.zeros(shape)
    views = contexts(sample.question, sample.stage, sample.given)
    for c in sorted(views, key=lambda c: not sample.has(c.view)):
        at, count = (c.view.keys, c.view.head_kv), math.prod(c.S.shape[:2])
        right = by_rows(tensor, sample.truth[tensor])[at]
        due = (sample.found[tensor][at] - right).ravel()
        whole = np.isfinite(due).all() and c.view.lists is None
        if not whole or c.sink is not None or count > min(MOST_ROWS, due.size):
            return None
        by = _apart(c, sample.stage, tensor, steps).reshape(count, -1).T
        size = np.linalg.norm(by, axis=0)
        there = size > LEAST * np.sqrt((size**2).mean())
        size = np.where(there, size, 1.0)
        x = np.where(there, np.linalg.lstsq(by / size, due, rcond=1e-9)[0] / size, 0.0)
        allowed = _allowed(sample, tensor, right, due)
        if np.linalg.norm(by @ x - due) > allowed:
            return None
        here = c.view.heads[:, None], c.view.rows
        for of_all, of in ((known, there), (added, x), (noise, SOLVED * allowed / size)):
            of_all[here] = of.reshape(c.S.shape[:2])
    return Read(known, added, noise)


def _allowed(sample: Sample, tensor: str, right: Floats, due: Floats) -> float:
    """What may be left of what is off; nothing where rounding leaves too much of it."""
    off, size = (float(np.linalg.norm(finite(x))) for x in (due, right))
    rounded = sample.wrong[tensor] * size
    clear = off <= rounded or max(rounded, CLOSE * off) ** 2 <= CLEAR * off**2
    return max(rounded, CLOSE * off) if clear else 0.0


def _apart(c: Context, stage: str, tensor: str, steps: Mapping[str, Step]) -> Floats:
    """What each row adds to a result of keys with these steps, less what it must, (rows, m, d): as
    if every row were a head of its own."""
    c = changed(c, W=np.broadcast_to(c.W, c.S.shape))
    shape, found = c.S.shape[:2], []

    def split(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(split, x))
        of_rows = isinstance(x, np.ndarray) and x.shape[:2] == shape
        return x.reshape(-1, 1, *x.shape[2:]) if of_rows else x

    for planted in (steps, {}):
        rows = {n: x if n in OPERANDS_OF_KEYS else split(x) for n, x in vars(c).items()}
        each = changed(c, **rows)
        run_steps(each, PROGRAMS[stage][len(SCORES) :], Bug("", steps=planted))
        found.append(np.asarray(getattr(each, RESULTS[stage][tensor])))
    return np.asarray(found[0] - found[1])


def _told(sample: Sample, number: Number, tensor: str, read: Read | None) -> Iterator[Bug]:
    """What the number of each row is in place of the right one."""
    if read is None:
        return
    q, given = sample.question, None if sample.given is None else Same(sample.given)
    own, known = _quantity(q, given, sample.stage, number.right), read.known
    x, unit = (own + read.added)[known], read.noise[known]
    forms = _forms(sample, number, x, known, unit)
    close = (f for f in forms if np.mean(((x - f[2](q, given)[known]) / unit) ** 2) <= 1)
    name, text, of = next(close, ("", "", partial(_held, own + read.added)))
    if not name and number.text not in BY_ROW:
        off = known & (abs(read.added) > CLOSE * abs(read.added).max())
        x = (own + read.added)[off]
        alike = not number.right and np.ptp(x) < 1e-3
        name, places = "unknown", "; ".join(where(q, "lse", off.T, known.T))
        what = f"{x.mean():.3g}" if alike else "other numbers"
        text = f"{what}, not {number.right or 1}, {places}"
    if name:
        steps = number.adding(partial(_more, of, sample.stage, number.right))
        yield Bug(name, f"{number.text} holds {text}", (sample.stage,), steps=steps)


def _forms(
    sample: Sample, number: Number, x: Floats, known: np.ndarray, unit: Floats
) -> Iterator[tuple[str, str, Numbers]]:
    """What numbers may be in place of the right ones: sums of others, those of other places, and
    sums that go on from one tile of queries to the next."""
    q, stage, right = sample.question, sample.stage, number.right
    given = None if sample.given is None else Same(sample.given)
    basis = {n: _quantity(q, given, stage, n)[known] / unit for n in OF_STAGE[stage]}
    for factors in sums_of({n: of for n, of in basis.items() if of.any()}, x / unit, MOST):
        name = "not-normalised" if "row_sum" in factors and not right else NAMES[right]
        yield name, sum_in_words(factors), partial(_sum, factors, stage)
    if right in OF_COLUMNS and len(x) > 2 * q.v.shape[2]:
        columns = _columns(right, stage, q, given)[known] / unit[:, None]
        weights = np.linalg.lstsq(columns, x / unit, rcond=1e-9)[0]
        text = f"{OF_COLUMNS[right]} {of_columns(weights)[0]}"
        yield NAMES[right], text, partial(_of_columns, weights, right, stage)
    for by in maps.families(q, True) if right else ():
        yield (
            "statistics-misplaced",
            f"that of other rows: {by.words}",
            partial(_moved, by, stage, right),
        )
    for tile, (words, every) in product(TILES, KEPT.items()) if right else ():
        text = f"the sums of the tiles of {tile} queries before too, {words}"
        yield "accumulator-not-reset", text, partial(_kept, tile, every, stage, right)


def _more(of: Numbers, stage: str, right: str, c: Context) -> Floats:
    more = of(c.question, c.given) - _quantity(c.question, c.given, stage, right)
    return of_view(c, "lse", more)


@lru_cache(maxsize=16)
def _quantity(question: Question, given: Same | None, stage: str, name: str) -> Floats:
    """One of QUANTITIES of all rows; 0 of those that no view has."""
    found = np.zeros(question.q.shape[1::-1])
    for c in contexts(question, stage, given):
        found[c.view.heads[:, None], c.view.rows] = finite(QUANTITIES[name](c))
    return found


def _columns(of: str, stage: str, question: Question, given: Same | None) -> Floats:
    """What a row statistic is the sum of, (num_heads_q, total_q, columns)."""
    found = np.zeros((*question.q.shape[1::-1], question.v.shape[2]))
    for c in contexts(question, stage, given):
        found[c.view.heads[:, None], c.view.rows] = c.dO * (c.tO if of == "W" else c.O)
    return found


def _of_columns(
    weights: Floats, of: str, stage: str, question: Question, given: Same | None
) -> Floats:
    return np.asarray(_columns(of, stage, question, given) @ weights)


def _held(x: Floats, question: Question, given: Same | None) -> Floats:
    return x


def _sum(factors: dict[str, float], stage: str, question: Question, given: Same | None) -> Floats:
    parts = [x * _quantity(question, given, stage, name) for name, x in factors.items()]
    return np.asarray(sum(parts))


def _moved(by: maps.Map, stage: str, of: str, question: Question, given: Same | None) -> Floats:
    x = _quantity(question, given, stage, of)
    return by.moved(maps.geometry(question, "lse"), x)


def _kept(
    tile: int, every: int, stage: str, of: str, question: Question, given: Same | None
) -> Floats:
    """Sums that are cleared for every head (0), every sequence (1), or never (2)."""
    found, held = _quantity(question, given, stage, of).copy(), np.zeros(tile)
    for _, rows, _ in sequences(question):
        held *= every > 1
        for head in range(len(found)):
            held *= every > 0
            for start in range(0, len(rows), tile):
                here = rows[start : start + tile]
                found[head, here] += held[: len(here)]
                held[: len(here)] = found[head, here]
    return found
