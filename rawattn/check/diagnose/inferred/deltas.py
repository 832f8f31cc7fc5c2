"""Was D summed up over other keys than those of its row? Tried on one view, planted where it fits.

D_i = sum_j P_ij dP_ij runs over all keys of a row. Parts of the keys that have a D of their own (a
shard of a ring, a tile), sums over the queries, and sums that go on from tile to tile are here.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    STEPS,
    TILES,
    Bug,
    Context,
    Floats,
    Step,
    changed,
)
from rawattn.check.diagnose.engine.question import OF_KEYS, Answers, Question
from rawattn.check.diagnose.inferred.tile_pairs import found_in

FITS = 0.15  # of what is wrong may be left on the view that is looked at
MOST = 2  # sums that are planted
PARTS = (2, 3, 4, 5, 6, 8)

Delta = Callable[[Context], Floats]  # (heads, n, m)


def bugs(
    question: Question, answers: Answers, contexts: Sequence[Context], wrong: frozenset[str]
) -> Iterator[Bug]:
    """Bugs of D that differ from key to key of a row, where dv is right."""
    names = sorted(wrong & {"dq", "dk"})
    if "dv" in wrong:
        return

    def error(c: Context, delta: Delta | None) -> float:
        other = c if delta is None else changed(c, dY=_dY(c, delta))
        total = 0.0
        for name in names:
            x = STEPS[f"d{name[1].upper()}"](other)
            x = x.sum(axis=0) if name in OF_KEYS else x
            total += float(((found_in(c, answers, name) - x) ** 2).sum())
        return float(np.sqrt(total))

    errors = [error(c, None) for c in contexts]
    c = contexts[int(np.argmax(errors))]
    yield from _multiples(answers, contexts, names)
    tried = [(error(c, delta), words, delta) for words, delta in _deltas(c)]
    for left, words, delta in sorted(tried, key=lambda one: one[0])[:MOST]:
        if left < FITS * max(errors):
            steps: dict[str, Step] = {"dS": _dS(delta)}
            if len(names) == 1:
                step = f"d{names[0][1].upper()}"
                steps = {step: _with(step, delta)}
            yield Bug("delta-of-another-out", words, ("backward",), steps=steps)


# The two terms of dS as they are, and with parentheses that stand elsewhere.
TERMS: dict[str, tuple[Delta, Delta]] = {
    "P o (a dP - b D)": (lambda c: c.P * c.dP, lambda c: c.P * c.D[..., None]),
    "a P o dP - b D": (lambda c: c.P * c.dP, lambda c: np.where(c.W > 0, c.D[..., None], 0.0)),
    "a P o dP - b D, masked keys too": (
        lambda c: c.P * c.dP,
        lambda c: c.D[..., None] + np.zeros_like(c.P),
    ),
    "a dP - b P o D": (
        lambda c: np.where(c.W > 0, c.dP, 0.0),
        lambda c: c.P * c.D[..., None],
    ),
}


def _multiples(
    answers: Answers, contexts: Sequence[Context], names: Sequence[str]
) -> Iterator[Bug]:
    """dS of two terms with two numbers, the same everywhere."""
    for form, terms in TERMS.items():
        found = _fitted(answers, contexts, names, terms)
        if found is None or (form == next(iter(TERMS)) and np.isclose(*found, rtol=0.02)):
            continue
        a, b = found
        bug = "delta-of-another-out" if np.isclose(a, 1, rtol=0.01) else "constant-factor"
        if np.isclose(a, 1, rtol=0.01) and abs(b) < 0.01:
            bug = "delta-omitted"
        bug = bug if form.startswith("P o (") else "softmax-backward-without-p"
        words = f"dS = {form} with a = {a:.3g} and b = {b:.3g}"

        steps: dict[str, Step] = {"dS": _of_terms(a, b, terms)}
        if len(names) == 1:
            step = f"d{names[0][1].upper()}"
            steps = {step: _with_dS(step, steps["dS"])}
        yield Bug(bug, words, ("backward",), steps=steps)
        return


def _of_terms(a: float, b: float, terms: tuple[Delta, Delta]) -> Step:
    return lambda c: c.r(a * terms[0](c) - b * terms[1](c))


def _with_dS(step: str, dS: Step) -> Step:
    return lambda c: STEPS[step](changed(c, dY=c.G * dS(c)))


def _fitted(
    answers: Answers,
    contexts: Sequence[Context],
    names: Sequence[str],
    terms: tuple[Delta, Delta],
) -> tuple[float, float] | None:
    """The numbers a and b of the terms, where they leave next to nothing of what is wrong."""
    products, targets = np.zeros((2, 2)), np.zeros(2)
    left = whole = 0.0
    for name in names:
        step = f"d{name[1].upper()}"
        for c in contexts:
            ds = terms[0](c), -terms[1](c)
            parts = [STEPS[step](changed(c, dY=c.G * x)) for x in ds]
            parts = [(x.sum(axis=0) if name in OF_KEYS else x).ravel() for x in parts]
            found = found_in(c, answers, name).ravel()
            products += [[x @ y for y in parts] for x in parts]
            targets += [x @ found for x in parts]
            left += float(found @ found)
            whole += float(((found - c.right[name].ravel()) ** 2).sum())
    if not np.linalg.det(products) > 1e-12 * np.prod(np.diag(products)):
        return None
    a, b = (float(x) for x in np.linalg.solve(products, targets))
    fits = left - float(targets @ (a, b)) <= (FITS**2) * whole
    return (a, b) if fits else None


def _dS(delta: Delta) -> Step:
    return lambda c: c.r(c.P * (c.dP - delta(c)))


def _dY(c: Context, delta: Delta) -> Floats:
    return np.asarray(c.G * _dS(delta)(c))


def _with(step: str, delta: Delta) -> Step:
    return _with_dS(step, _dS(delta))


def _deltas(c: Context) -> Iterator[tuple[str, Delta]]:
    yield "D is summed up over the queries", _minus_dlse(lambda c: _sum(c, 1))
    yield "D is summed up over all pairs of a head", _minus_dlse(lambda c: _sum(c, (1, 2)))
    yield "D is summed up over the heads too", _minus_dlse(lambda c: _sum(c, (0, 2)))
    for tile in TILES:
        if tile < len(c.view.keys):
            yield from _of_parts(f"tile of {tile} keys", _by_tile(tile))
    for count in PARTS:
        if count < len(c.view.keys):
            yield from _of_parts(f"of {count} parts of the keys", _by_count(count))
            yield from _of_parts(f"of {count} equal parts of the keys", _by_split(count))


def _sum(c: Context, axis: int | tuple[int, ...]) -> Floats:
    return np.asarray((c.P * c.dP).sum(axis=axis, keepdims=True) + 0 * c.P)


def _minus_dlse(delta: Delta) -> Delta:
    return lambda c: delta(c) - (c.dL[..., None] if np.ndim(c.dL) else 0.0)


Parts = Callable[[int], np.ndarray]  # of the number of keys: the part of each


def _by_tile(tile: int) -> Parts:
    return lambda m: np.arange(m) // tile


def _by_count(count: int) -> Parts:
    return lambda m: np.arange(m) // -(-m // count)


def _by_split(count: int) -> Parts:
    return lambda m: np.arange(m) * count // m


def _of_parts(of: str, parts: Parts) -> Iterator[tuple[str, Delta]]:
    def sums(c: Context, x: Floats, running: bool) -> Floats:
        part = parts(x.shape[2])
        one = np.equal(part[:, None], part) if not running else part[:, None] <= part
        return np.asarray(x @ one)

    def own(c: Context) -> Floats:
        weights = sums(c, c.P, False)
        return np.asarray(sums(c, c.P * c.dP, False) / np.where(weights == 0, 1.0, weights))

    def so_far(c: Context) -> Floats:
        weights = sums(c, c.P, True)
        return np.asarray(sums(c, c.P * c.dP, True) / np.where(weights == 0, 1.0, weights))

    yield f"each {of} has the D of its own out", _minus_dlse(own)
    yield f"each {of} has its own part of D", _minus_dlse(lambda c: sums(c, c.P * c.dP, False))
    yield f"each {of} has the D of the out so far", _minus_dlse(so_far)
    yield f"each {of} has the sum so far for D", _minus_dlse(lambda c: sums(c, c.P * c.dP, True))
