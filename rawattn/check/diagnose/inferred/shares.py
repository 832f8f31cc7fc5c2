"""Gradients that are sums of other parts than they must be: how often each part is in them is read
off one view, and planted in all.

Parts are the terms of dS and of P, the query heads of a group, and tiles of what is summed over.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from rawattn.check.diagnose.engine.attention import TILES, Bug, Context, Floats, Step, contexts
from rawattn.check.diagnose.engine.steps import STEPS, changed
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.read.contexts import of_view, places_of
from rawattn.check.diagnose.read.fields import by_head, number, sum_in_words, sums_of
from rawattn.check.diagnose.read.forms import MOST, of_terms, of_terms_in_words, terms

GRADIENTS = {"dq": "dQ", "dk": "dK", "dv": "dV"}
OPERAND = {"dQ": "dY", "dK": "dY", "dV": "P"}
NAMED = {"dY": "dS", "P": "dv"}
BY_TILE = {  # what a loop may be over, of keys and of queries
    "dQ": ("j // {0}", "(seqlen_k - 1) // {0} - j // {0}", "j // {0} % 2", "j // {0} - p // {0}"),
    "dK": ("i // {0}", "(seqlen_q - 1) // {0} - i // {0}", "i // {0} % 2", "j // {0} - p // {0}"),
}
MOST_TILES = 12
OF_P: dict[str, Callable[[Context], Floats]] = {
    "P": lambda c: c.P,
    "dS": lambda c: c.dS,
    "P^2": lambda c: c.P**2,
    "P dP": lambda c: c.P * c.dP,
    "dP": lambda c: np.where(c.W > 0, c.dP, 0.0),
}


def bugs(sample: Sample) -> Iterator[Bug]:
    """Of each wrong gradient the sums that it is, of the sequence that is looked at."""
    views = contexts(sample.question, sample.stage, sample.given) if _of(sample) else []
    for c in (c for c in views if c.view.sequence == sample.sequence):
        for name in _of(sample) if c.view.head_kv == sample.head_kv and c.S.size else ():
            step, of_keys = GRADIENTS[name], name != "dq"
            found = sample.found[name][c.view.keys if of_keys else c.view.rows]
            found = found[:, [c.view.head_kv] if of_keys else c.view.heads].swapaxes(0, 1)
            size = max(sample.wrong[name], 1e-4) * float(np.sqrt(np.mean(found**2)))
            if size and np.isfinite(found).all():
                for bug, text, planted in _sums(c, step, found / size, size):
                    yield Bug(bug, text, (sample.stage,), steps={step: planted})


def _of(sample: Sample) -> list[str]:
    of_backward = sample.stage == "backward" and not sample.question.sparse
    return [name for name in GRADIENTS if of_backward and name in sample.wrong]


def _sums(c: Context, step: str, due: Floats, size: float) -> Iterator[tuple[str, str, Step]]:
    operand, of_keys = OPERAND[step], step != "dQ"

    def part(x: Floats) -> Floats:
        """What this in the place of dS or P gives, of every head of a group."""
        return np.asarray(STEPS[step](changed(c, **{operand: x})) / size)

    def summed(x: Floats) -> Floats:
        return np.asarray((x.sum(axis=0) if of_keys else x).ravel())

    own = part(getattr(c, operand))
    names = OF_P if step == "dV" else terms(c.question)
    of = _of_p if step == "dV" else of_terms
    basis = {name: summed(part(of({name: 1.0}, c))) for name in names}
    for factors in sums_of(basis, due.ravel(), MOST):
        dlse = c.question.dlse is not None
        text, kind = _of_v(factors) if step == "dV" else of_terms_in_words(factors, dlse)
        yield kind, f"{NAMED[operand]} {text}", partial(_with, step, partial(of, factors))
        break
    if of_keys and len(own) > 1 and (by := _shares(own, due)) is not None:
        text = f"the heads of a group count {by_head(by)} times each"
        yield "gqa-group-not-summed", text, partial(_heads, step, by)
    places = places_of(c.question)
    for text in (x.format(t) for t in TILES for x in BY_TILE["dK" if of_keys else "dQ"]):
        there = of_view(c, np.broadcast_to(places.feature(text), places.j.shape)[None])
        values = np.unique(there[np.broadcast_to(c.W > 0, there.shape)])
        if 1 < len(values) <= MOST_TILES:
            parts = [part(np.where(there == x, getattr(c, operand), 0.0)) for x in values]
            by = _shares(np.stack([summed(x) for x in parts]), due)
            if by is not None:
                often = dict(zip(values.tolist(), by.tolist(), strict=True))
                yield "pairs-dropped", _often(text, often), partial(_tiles, step, text, often)
                break


def _shares(parts: Floats, due: Floats) -> Floats | None:
    """How often each of ``parts`` is in ``due``, if they are all that there is and not once each."""
    columns = parts.reshape(len(parts), -1).T
    found = np.linalg.lstsq(columns, due.ravel(), rcond=1e-9)[0]
    found = np.where(np.abs(found - np.rint(found)) < 1e-2, np.rint(found) + 0.0, found)
    left = float(np.mean((columns @ found - due.ravel()) ** 2))
    return found if left <= 1 and (found != 1).any() else None


def _often(text: str, often: Mapping[int, float]) -> str:
    some = [f"{number(x)} times where {text} is {at}" for at, x in often.items() if x != 1]
    return f"pairs count {', '.join(some[:4])}{', ...' * (len(some) > 4)}"


def _of_v(factors: Mapping[str, float]) -> tuple[str, str]:
    kind = "constant-factor" if [*factors] == ["P"] else "arguments-swapped"
    return f"is made of {sum_in_words(factors)} in place of P", kind


def _of_p(factors: Mapping[str, float], c: Context) -> Floats:
    return np.asarray(sum(x * OF_P[name](c) for name, x in factors.items()))


def _with(step: str, of: Callable[[Context], Floats], c: Context) -> Floats:
    return np.asarray(STEPS[step](changed(c, **{OPERAND[step]: of(c)})))


def _heads(step: str, by: Floats, c: Context) -> Floats:
    return np.asarray(by[:, None, None] * STEPS[step](c))


def _tiles(step: str, text: str, often: Mapping[int, float], c: Context) -> Floats:
    places = places_of(c.question)
    there = of_view(c, np.broadcast_to(places.feature(text), places.j.shape)[None])
    by = np.vectorize(lambda x: often.get(x, 1.0), otypes=[float])(there)
    return _with(step, lambda c: by * getattr(c, OPERAND[step]), c)
