"""Numbers of rows that are others in second order: a row statistic (e, W, D), or how often a term
is in a row. Results of rows are linear in each of them, so that they tell that number row by row;
what it is in place of the right one, is told of all rows at once."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.reading import of_view
from rawattn.check.diagnose.catalogue.second_order import at
from rawattn.check.diagnose.engine.attention import TILES, Bug, Same, contexts, sequences
from rawattn.check.diagnose.engine.question import BY_ROW, OF_KEYS, Answers, Question, by_rows
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, Step, row_max
from rawattn.check.diagnose.evidence.precision import finite
from rawattn.check.diagnose.evidence.structure import where
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.inferred.terms import CLEAR, CLOSE
from rawattn.check.diagnose.read.fields import sum_in_words, sums_of

LEAST = 1e-3  # of what numbers are known by in most rows: where it is less they are not known
MOST = 2  # of what a number is a sum of
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
OF_STAGE = {"second": QUANTITIES.keys(), "jvp": QUANTITIES.keys() - {"W", "D", "dlse"}}
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


def _often_in_out(of: str, more: Step) -> dict[str, Step]:
    """P tv or (P o E) v of the tangent of out."""
    if of == "P":
        return at(["ddout", "W"], P=lambda c: c.P * (1 + more(c))[..., None])
    return at(["ddout", "W"], tP=lambda c: c.tP + c.P * c.E * more(c)[..., None])


NUMBERS = {
    "second": (
        Number("e", "e", partial(_more_of, "e")),
        Number("e of the second pass", "e", partial(_e_of, "dS', gv")),
        *(Number(f"e in {x}", "e", partial(_e_of, x)) for x in ("dS'", "ddout, W", "ddout")),
        Number("ddlse", "e", partial(_more_of, "tL")),
        Number("W", "W", partial(_more_of, "w")),
        Number("D", "D", partial(_more_of, "D")),
        Number("how often P ddv is in ddout", "", partial(_often_in_out, "P")),
        Number("how often (P o E) v is in ddout", "", partial(_often_in_out, "tP")),
    ),
    "jvp": (
        Number("e", "e", partial(_more_of, "e")),
        Number("e in tout", "e", partial(_e_of, "ddout")),
        Number("tlse", "e", partial(_more_of, "tL")),
        Number("how often P tv is in tout", "", partial(_often_in_out, "P")),
        Number("how often (P o E) v is in tout", "", partial(_often_in_out, "tP")),
    ),
}


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """One of each number that alone may make a wrong result of rows what it is."""
    sample = Sample(question, answers, stage)
    for number in NUMBERS[stage] if sample.wrong else ():
        one = sample.planted(Bug("", stages=(stage,), steps=number.adding(QUANTITIES[""])))
        moved = {n for n, x in one.items() if not np.array_equal(x, sample.truth.get(n, x))}
        rows = [
            n for n in sample.wrong if n in moved and n not in OF_KEYS and n[1:] != "block_scale"
        ]
        if rows:
            tensor = max(rows, key=lambda n: sample.found[n].shape[2])
            yield from _told(sample, number, tensor, one[tensor])


def _told(sample: Sample, number: Number, tensor: str, one: Floats) -> Iterator[Bug]:
    """What the number of each row is, if a result is right but for it."""
    q, found, right = sample.question, sample.found[tensor], by_rows(tensor, sample.truth[tensor])
    there = np.isfinite(found) & np.isfinite(right) & (q.sequence_of(tensor) >= 0)[:, None, None]
    due, by = (np.where(there, x - right, 0.0) for x in (found, finite(by_rows(tensor, one))))
    size, off = (by * by).sum(axis=2), float(np.linalg.norm(due))
    allowed = max(sample.wrong[tensor] * float(np.linalg.norm(finite(right))), CLOSE * off)
    known = np.sqrt(size) > LEAST * np.sqrt(size.mean())
    size = np.where(known, size, 1.0)
    added = np.where(known, (due * by).sum(axis=2) / size, 0.0)
    left = float(np.linalg.norm(due - added[..., None] * by))
    if left > allowed or allowed**2 > CLEAR * off**2:
        return
    given = None if sample.given is None else Same(sample.given)
    own = _quantity(q, given, sample.stage, number.right)
    unit, x = allowed / np.sqrt(known.sum() * size).T[known.T], (own + added.T)[known.T]

    def fits(of: Numbers) -> bool:
        return bool(np.mean(((x - of(q, given)[known.T]) / unit) ** 2) <= 1)

    told = (one for one in _forms(sample, number, x, known.T, unit) if fits(one[2]))
    name, text, of = next(told, ("", "", partial(_held, own + added.T)))
    if not name and number.text not in BY_ROW:
        name = "unknown"
        places = where(q, tensor, known & (abs(added) > CLOSE * abs(added).max()), known)
        text = f"other numbers than {number.right or 1}, {'; '.join(places)}"
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
