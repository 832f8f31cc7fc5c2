"""Whole numbers that solve a system of equations: how often each query sees each key.

Most rows see an interval of keys, or the right ones and an interval more, or less: two unknowns,
which any row tells. Other rows are solved for by least squares, where equations are enough; and
what comes out as no whole numbers says that it is something else.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import Floats
from rawattn.check.diagnose.engine.effort import spend
from rawattn.check.diagnose.inferred.keys.systems import Equations, Ints, System

MIXED = 32  # tests of a row that an interval must pass
NEAR = 3  # on each side, of the ends that come nearest by one test
ANCHORS = 4  # tests by which ends are found
AT_ONCE = 32  # places that are solved for together
ENOUGH, FEWEST = 1.05, 0.6  # equations of an unknown, without bounds and within
STEPS = 150  # of the solver within bounds
CLEAR, MOSTLY = 0.3, 0.9  # how far a count may be from a whole one, and how many must be nearer
TWICE = 3.0  # the best error: as good
EXACT = 1 / 300  # of the noise: nothing left
MOST = 3  # times that a pair may be there
OF_A_ROW, OF_A_TEST, OF_A_TERM = 0.4, 1e-5, 1e-7  # units of effort


class Solved(NamedTuple):
    """counts (places, unknowns). told: whether these explain a place, sure: and no others do."""

    counts: Floats
    told: np.ndarray
    sure: np.ndarray


@dataclass(frozen=True)
class _Kind:
    """Counts that are those of the ``base``, and ``sign`` in an interval beside."""

    right: bool
    sign: int


KINDS = _Kind(False, 1), _Kind(True, -1), _Kind(True, 1)


def solved(equations: Equations, places: Ints, heads: Ints, right: Floats, near: Ints) -> Solved:
    """The counts of some places, which ``heads`` share; ``right`` (places, unknowns). near: the
    unknowns of the own sequence."""
    noise = equations.noise
    system = equations.of(places, heads, max(2, MIXED // (4 * len(heads))))
    right = np.concatenate([right, np.zeros((len(right), int(system.zeros)))], axis=1)
    null = system.errors(right)
    found = Solved(right.copy(), null <= noise, null <= noise * EXACT)
    ways = [_intervals(system, right, null, kind, noise, ~found.sure) for kind in KINDS]
    ways.append(_nothing(equations, places, heads, right))
    if system.zeros:
        ways.append(_zeros(system, right, noise))
    plain = ways[0].sure & (ways[0].counts == right).all(axis=1)
    for way in sorted(ways, key=lambda way: -int((way.told & ~found.told).sum())):
        better = way.told & ~found.told
        better |= way.told & ~found.sure & (system.errors(way.counts) * TWICE < null)
        for mine, other in zip(found, way, strict=True):
            mine[better] = other[better]
    found.sure[plain & (found.counts == right).all(axis=1)] = True  # no other interval is as near
    _wholes(equations, places, heads, right, near, found)
    return found


# ---- intervals --------------------------------------------------------------------------------


def _intervals(
    system: System, right: Floats, null: Floats, kind: _Kind, noise: float, chosen: np.ndarray
) -> Solved:
    """Of the ``chosen`` places."""
    found = Solved(right.copy(), np.zeros(len(right), bool), np.zeros(len(right), bool))
    last = system.a.shape[2] - int(system.zeros)
    for place in np.flatnonzero(chosen):
        spend(OF_A_ROW + OF_A_TEST * system.a[:, place].size)
        base = right[place] if kind.right else np.zeros_like(right[place])
        own = np.flatnonzero(right[place])
        a = system.a[:, place]
        wanted = kind.sign * (system.b[:, place] - a @ base)
        sums = _up_to(a[:, :last])
        low, high = _ends(sums, wanted, own)
        off = np.abs(sums[:, high] - sums[:, low] - wanted[:, None])
        if system.mass is not None:
            mass = system.mass[:, place]
            of = _up_to(mass[:, :last])
            total = (mass @ base)[:, None] + kind.sign * (of[:, high] - of[:, low])
            off = np.where(total > 1e-12, off / np.where(total > 1e-12, total, 1.0), np.inf)
        error = off.max(axis=0, initial=0.0)
        if not len(error) or error.min() > noise:
            continue
        good = np.flatnonzero(error <= max(TWICE * error.min(), noise * EXACT))
        ends = np.array([own[0], own[-1] + 1]) if len(own) and not kind.right else None
        apart = high - low if ends is None else np.abs(low - ends[0]) + np.abs(high - ends[1])
        best = good[np.argmin(apart[good])]
        counts = base.copy()
        counts[low[best] : high[best]] += kind.sign
        if counts.min(initial=0) < 0:
            continue
        spans = {(int(low[x]), int(high[x])) for x in good}
        found.counts[place], found.told[place] = counts, True
        found.sure[place] = len(spans) == 1
    return found


def _up_to(x: Floats) -> Floats:
    """(tests, unknowns + 1): sums of all before."""
    return np.concatenate([np.zeros((len(x), 1)), np.cumsum(x, axis=1)], axis=1)


def _ends(sums: Floats, wanted: Floats, own: Ints) -> tuple[Ints, Ints]:
    """Intervals that may pass all tests: those that come nearest by one of some tests, and those
    that begin or end where the ``own`` unknowns do."""
    every = np.arange(sums.shape[1])
    pairs = []
    for test in np.unique(np.linspace(0, len(sums) - 1, ANCHORS).astype(int)):
        order = np.argsort(sums[test])
        at = np.searchsorted(sums[test][order], sums[test] + wanted[test])
        for by in range(-NEAR, NEAR):
            pairs.append((every, order[np.clip(at + by, 0, len(order) - 1)]))
    if len(own):
        pairs += [(np.full_like(every, own[0]), every), (every, np.full_like(every, own[-1] + 1))]
    low, high = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return low[high > low], high[high > low]


# ---- nothing, and rows of zeros -----------------------------------------------------------------


def _nothing(equations: Equations, places: Ints, heads: Ints, right: Floats) -> Solved:
    """No unknown at all: rows whose lse says so, or that are zeros."""
    answers = equations.answers
    if equations.name == "out" and equations.exact:
        there = np.isneginf(np.asarray(answers["lse"], dtype=np.float64)[heads][:, places])
    else:
        found = np.asarray(answers[equations.name])[places][:, heads]
        there = (found == 0).all(axis=2).T
    told = there.all(axis=0) & right.any(axis=1)
    return Solved(np.zeros_like(right), told, told.copy())


def _zeros(system: System, right: Floats, noise: float) -> Solved:
    """The right unknowns, and as many rows of zeros as the rest of the sum is made of."""
    left = system.b - np.einsum("tpu,pu->tp", system.a, right)
    of_one = system.a[..., -1]
    square = (of_one**2).sum(axis=0)
    count = (of_one * left).sum(axis=0) / np.where(square > 0, square, 1.0)
    counts = right.copy()
    counts[:, -1] = np.rint(np.clip(count, 0, 1e6))
    told = (counts[:, -1] > 0) & (system.errors(counts) <= noise)
    return Solved(counts, told, told.copy())


# ---- any others -------------------------------------------------------------------------------


def _wholes(
    equations: Equations, places: Ints, heads: Ints, right: Floats, near: Ints, found: Solved
) -> None:
    """Put what least squares say of the unknowns ``near`` into the places that are not told."""
    todo = np.flatnonzero(~found.told)
    for part in (todo[start : start + AT_ONCE] for start in range(0, len(todo), AT_ONCE)):
        system = equations.of(places[part], heads, 0)
        near = np.concatenate([near, [system.a.shape[2] - 1] * int(system.zeros)]).astype(int)
        near = np.unique(near)
        tests = len(system.a) + int(not equations.exact)
        if tests < (FEWEST if equations.exact else ENOUGH) * len(near):
            return
        spend(OF_A_TERM * len(part) * tests * len(near) ** 2)
        a, b = (x.swapaxes(0, 1) for x in (system.a[..., near], system.b))
        if system.mass is not None:
            a = np.concatenate([a, system.mass[:1][..., near].swapaxes(0, 1)], axis=1)
            b = np.concatenate([b, np.ones((len(b), 1))], axis=1)
        x = least_squares(a, b) if tests >= ENOUGH * len(near) else within_bounds(a, b)
        if system.mass is not None:
            top = np.where(x > 0.5 * x.max(axis=1, keepdims=True), x, np.nan)
            x = x / np.nanmedian(top, axis=1, keepdims=True)
        norm = np.sqrt((a**2).sum(axis=1))
        known = norm > 10 * equations.noise * norm.max(axis=1, keepdims=True)
        whole = np.clip(np.rint(x), 0, None)
        off = np.abs(x - whole)
        counts = np.zeros_like(right[part])
        counts[:, near] = np.where(known | (off < CLEAR), whole, right[part][:, near])
        good = system.errors(counts) < equations.noise
        good &= ((off < CLEAR) | ~known).mean(axis=1) > MOSTLY
        good &= counts[:, : right.shape[1] - int(system.zeros)].max(axis=1, initial=0.0) <= MOST
        for mine, other in zip(found, (counts, good, good), strict=True):
            mine[part[good]] = other[good]


def least_squares(a: Floats, b: Floats) -> Floats:
    """x (places, unknowns) of a (places, tests, unknowns) times x = b (places, tests)."""
    norm, gram, right = _normal(a, b)
    gram = gram + 1e-13 * np.eye(gram.shape[1])
    return np.asarray(np.linalg.solve(gram, right[..., None])[..., 0] / norm)


def within_bounds(a: Floats, b: Floats) -> Floats:
    """The same between 0 and 1, which needs fewer equations: alternating directions."""
    norm, gram, right = _normal(a, b)
    rho = 0.1
    inverse = np.linalg.inv(gram + rho * np.eye(gram.shape[1]))
    z, u = 0.5 * norm, np.zeros_like(norm)
    for _ in range(STEPS):
        y = (inverse @ (right + rho * (z - u))[..., None])[..., 0]
        z = np.clip(y + u, 0, norm)
        u += y - z
    return np.asarray(z / norm)


def _normal(a: Floats, b: Floats) -> tuple[Floats, Floats, Floats]:
    """Normal equations of columns of length 1."""
    norm = np.sqrt((a**2).sum(axis=1))
    norm = np.maximum(norm, np.maximum(1e-9 * norm.max(axis=1, keepdims=True), 1e-300))
    scaled = a / norm[:, None]
    turned = scaled.swapaxes(1, 2)
    return norm, turned @ scaled, (turned @ b[..., None])[..., 0]
