"""Gradients that are sums of other parts than they must be: how often each part is in them is read
off one view, and planted in all.

Parts are the terms of dS and of P, the query heads of a group, and tiles of what is summed over.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from operator import itemgetter

import numpy as np

from rawattn.check.diagnose.engine.attention import TILES, Bug, Context, Floats, Step, contexts
from rawattn.check.diagnose.engine.steps import STEPS, changed
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.read.fields import by_head, number, sum_in_words, sums_of
from rawattn.check.diagnose.read.forms import MOST, of_terms, of_terms_in_words, terms

GRADIENTS = {"dq": "dQ", "dk": "dK", "dv": "dV"}
OPERAND = {"dQ": "dY", "dK": "dY", "dV": "P"}
NAMED = {"dY": "dS", "P": "dv"}
Feature = Callable[[Context], np.ndarray]  # a number of every pair (n, m)
MOST_TILES = 12
first = itemgetter(0)
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
    near: dict[int, tuple[float, dict[str, float]]] = {}  # of so many terms the nearest
    for factors in sums_of(basis, due.ravel(), MOST):
        left = float(np.std(sum(x * basis[name] for name, x in factors.items()) - due.ravel()))
        near[len(factors)] = min(near.get(len(factors), (math.inf, {})), (left, factors), key=first)
    for _, factors in near.values():
        dlse = c.question.dlse is not None
        text, kind = _of_v(factors) if step == "dV" else of_terms_in_words(factors, dlse)
        yield kind, f"{NAMED[operand]} {text}", partial(_with, step, partial(of, factors))
    if of_keys and len(own) > 1 and (by := _shares(own, due)) is not None:
        text = f"the heads of a group count {by_head(by)} times each"
        yield "gqa-group-not-summed", text, partial(_heads, step, by)
    near_tiles = []
    for text, feature in _loops(int(not of_keys)):
        there = np.broadcast_to(feature(c), c.W.shape)
        values = np.unique(there[c.W > 0])
        if 1 < len(values) <= MOST_TILES:
            parts = [part(np.where(there == x, getattr(c, operand), 0.0)) for x in values]
            by = _shares(np.stack([summed(x) for x in parts]), due)
            if by is not None:
                near_tiles.append((np.count_nonzero(by != 1), text, feature, values, by))
    for _, text, feature, values, by in sorted(near_tiles, key=first)[:2]:
        kind = "pairs-dropped" if by.max() <= 1 else "tile-counted-twice"
        kind = kind if np.isin(by, (0, 1, 2)).all() else "constant-factor"
        yield kind, _often(text, values, by), partial(_tiles, step, feature, values, by)


def _loops(axis: int) -> Iterator[tuple[str, Feature]]:
    """What may befall tiles of a loop over queries or, of ``axis`` 1, over keys: their numbers from
    the first, from the last, and from the first and the last one that a tile of the other side
    meets; and rows that are in two tiles, as the last one is moved back to be full."""
    at, size = (("i", "seqlen_q"), ("j", "seqlen_k"))[axis]
    other = ("keys", "queries")[axis]

    def of(f: Callable[[np.ndarray, int], np.ndarray], c: Context) -> np.ndarray:
        shape = c.S.shape[1:]
        return f(np.ogrid[: shape[0], : shape[1]][axis], shape[axis])

    for t in TILES[::-1]:
        yield f"{at} // {t}", partial(of, lambda x, n, t=t: x // t)
        text = f"({size} - 1) // {t} - {at} // {t}"
        yield text, partial(of, lambda x, n, t=t: (n - 1) // t - x // t)
        yield f"{at} // {t} % 2", partial(of, lambda x, n, t=t: x // t % 2)
        back = partial(of, lambda x, n, t=t: 1 * ((x >= n - t) & (x < n // t * t) & (n > t)))
        yield f"{at} is in the last tile of {t}, moved back to be full, and one before", back
    for t, u in product(TILES[::-1], TILES[::-1]):
        for end, last in (("first", False), ("last", True)):
            text = f"{at} // {t}, from the {end} that a tile of {u} {other} meets,"
            yield text, partial(_met, axis, t, u, last)


def _met(axis: int, t: int, u: int, last: bool, c: Context) -> np.ndarray:
    seen = (c.W > 0).any(axis=0)
    seen = seen if axis == 1 else seen.T
    count = seen.shape[1]
    met = np.add.reduceat(seen, np.arange(0, len(seen), u), axis=0) > 0
    end = count - 1 - met[:, ::-1].argmax(axis=1) if last else met.argmax(axis=1)
    found = np.arange(count) // t - np.repeat(end // t, u)[: len(seen), None]
    return found if axis == 1 else found.T


def _shares(parts: Floats, due: Floats) -> Floats | None:
    """How often each of ``parts`` is in ``due``, if they are all that there is and not alike."""
    columns = parts.reshape(len(parts), -1).T
    found = np.linalg.lstsq(columns, due.ravel(), rcond=1e-9)[0]
    found = np.where(np.abs(found - np.rint(found)) < 1e-2, np.rint(found) + 0.0, found)
    left = float(np.mean((columns @ found - due.ravel()) ** 2))
    return found if left <= 1 and np.ptp(found) > 1e-2 else None


def _often(text: str, values: np.ndarray, by: Floats) -> str:
    pairs = zip(values.tolist(), by.tolist(), strict=True)
    is_at = "" if " is in " in text else " is {}"
    some = [f"{number(x)} times where {text}{is_at.format(at)}" for at, x in pairs if x != 1]
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


def _tiles(step: str, feature: Feature, values: np.ndarray, by: Floats, c: Context) -> Floats:
    there = np.broadcast_to(feature(c), c.W.shape)
    at = np.searchsorted(values, there).clip(0, len(values) - 1)
    often = np.where(values[at] == there, by[at], 1.0)
    return _with(step, lambda c: often * getattr(c, OPERAND[step]), c)
