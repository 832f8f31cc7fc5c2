"""What is added to log-weights, or multiplies dS: a function of a few things, read off a field.

A field is (num_heads_q, total_q, total_k), of numbers where ``there``; of log-weights each row is
known up to a number.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue import options
from rawattn.check.diagnose.engine.attention import STEPS, TILES, Context, Step, changed, times
from rawattn.check.diagnose.evidence.places import Places

Array = np.ndarray
Of = Callable[[Places, Array], Array]  # of places and scores S, (num_heads_q, total_q, total_k)
DISTANCES: dict[str, Callable[[Array], Array]] = {
    "|j - i|": lambda d: d,
    "log(1 + |j - i|)": np.log1p,
    "(j - i)^2": lambda d: d * d,
    "sqrt|j - i|": np.sqrt,
}
GATES: dict[str, tuple[str, Callable[[Array, Array], Array]]] = {  # a class; of S and the gates
    "the scores lack block_scale": ("sparse-gate-ignored", lambda S, G: S / G),
    "the scores have block_scale twice": ("sparse-gate-on-p", lambda S, G: S * G),
    "block_scale multiplies weights, not scores": (
        "sparse-gate-on-p",
        lambda S, G: S / G + np.log(G),
    ),
}
CURVES: dict[str, options.Curve] = {
    "capped, {c} tanh(S / {c})": lambda S, c: (c * np.tanh(S / c), 1 - np.tanh(S / c) ** 2),
    "not capped": lambda S, c: (S, np.ones_like(S)),
    **options.CURVES,
    "rounded to multiples of {c}": lambda S, c: (c * np.rint(S / c), np.ones_like(S)),
}
NUMBERS = (*(2.0**n for n in range(-10, 6)), 0.01, 0.1, 3.0, 5.0, 10.0, 20.0, 30.0, 50.0)
KNOTS = 24  # of a function of the scores
MANY = 4  # keys of a part of a row, on average, that tell something
PEAK = 8  # the worst of many entries over their root mean square


@dataclass(frozen=True)
class Term:
    """``of``: what is added. values: numbers that the text holds, such as slopes by head. name: the
    class of bugs; steps: as of engine.Bug, none of what is added."""

    text: str
    of: Of
    values: tuple[float, ...] = ()
    name: str = "score-bias"
    steps: Mapping[str, Step] = field(default_factory=dict)
    table: bool = False


@dataclass(frozen=True, eq=False)
class Field:
    """``x`` where ``there``. by_row: each row is known up to a number. noise: of one entry."""

    x: Array
    there: Array
    by_row: bool
    noise: float

    def centred(self, x: Array | None = None) -> Array:
        """Without the mean of each row, or of nothing; 0 where nothing is."""
        x = np.where(self.there, self.x if x is None else x, 0.0)
        if not self.by_row:
            return x
        count = np.maximum(self.there.sum(axis=-1, keepdims=True), 1)
        return np.where(self.there, x - x.sum(axis=-1, keepdims=True) / count, 0.0)

    def left_by_head(self, x: Array) -> Array:
        """What ``x`` leaves in units of the noise, or of the worst entry, which may be PEAK times
        as far off; inf for what is no number."""
        with np.errstate(invalid="ignore", over="ignore"):
            off = np.abs(self.centred() - self.centred(x))
            count = np.maximum(self.there.sum(axis=(1, 2)), 1)
            rms = np.sqrt((off**2).sum(axis=(1, 2)) / count)
        worst = np.maximum(rms, off.max(axis=(1, 2), initial=0.0) / PEAK) / self.noise
        return np.where(np.isfinite(worst), worst, np.inf)

    def left(self, x: Array) -> float:
        """The same of the worst head."""
        return float(self.left_by_head(x).max(initial=0.0))

    def fits(self, x: Array) -> bool:
        return self.left(x) <= 1

    def shares(self, basis: Sequence[Array]) -> Array:
        """How often each of ``basis`` is in the field, of all heads together."""
        a = np.stack([self.centred(np.broadcast_to(x, self.x.shape))[self.there] for x in basis])
        return np.asarray(np.linalg.lstsq(a @ a.T, a @ self.centred()[self.there], rcond=1e-12)[0])

    @property
    def zero(self) -> bool:
        return self.fits(np.zeros_like(self.x))


def term_of(field: Field, places: Places, S: Array, *, table: bool = False) -> Term | None:
    """The plainest term that leaves nothing but rounding; ``table``: a table of one feature."""
    formulas = (_gates, _distances, _factors, _curves) if field.by_row else (_distances,)
    tables = (_columns, _factors_by_place, _places) if field.by_row else (_places,)
    for make in tables if table else formulas:
        for term in make(field, places, S):
            if field.fits(term.of(places, S)):
                return term
    return None


def _slopes(field: Field, x: Array) -> Array:
    """(heads, 1, 1): how often ``x`` is in the field, in each head."""
    a, b = field.centred(x), field.centred()
    size = (a * a).sum(axis=(1, 2))
    found = (a * b).sum(axis=(1, 2)) / np.where(size > 0, size, 1.0)
    return np.asarray(found)[:, None, None]


def by_head(values: Array) -> str:
    """Numbers of heads: one if they are alike, a multiple of h + 1, or all of them."""
    values = np.asarray(values, dtype=np.float64).ravel()
    size = float(np.abs(values).max(initial=0.0)) or 1.0
    if np.ptp(values) < 1e-2 * size:
        return number(float(values.mean()))
    steps = values / (np.arange(len(values)) + 1)
    if np.ptp(steps) < 1e-2 * np.abs(steps).max():
        return f"{steps.mean():.3g} (h + 1)"
    return ", ".join(f"{number(value)} (head {h})" for h, value in enumerate(values[:8]))


def number(x: float) -> str:
    """In three digits, or as many as tell it from 1."""
    return f"{x:.3g}" if abs(x - 1) > 5e-3 or abs(x - 1) < 1e-6 else f"{x:.6g}"


def _gates(field: Field, places: Places, S: Array) -> Iterator[Term]:
    heads = range(places.question.num_heads_q)
    for text, (name, form) in GATES.items() if places.question.block_scale is not None else ():

        def of(places: Places, S: Array, form: Any = form) -> Array:
            return np.asarray(form(S, np.stack([places.of(head).gate for head in heads])) - S)

        def gated(c: Context, form: Any = form) -> Array:
            with np.errstate(divide="ignore", invalid="ignore"):
                Y = form(c.G * c.cap[0], np.broadcast_to(c.G, c.Y.shape))
            return np.asarray(STEPS["S"](changed(c, G=1.0, cap=(Y,))))

        yield Term(text, of, (), name, {"S": gated})


def _distances(field: Field, places: Places, S: Array) -> Iterator[Term]:
    for name, f in DISTANCES.items():
        x = _distance(places, f)[None]
        read = _slopes(field, x)
        slopes = _chosen(field, x, plain(read), read)

        def of(places: Places, S: Array, slopes: Array = slopes, f: Any = f) -> Array:
            return np.asarray(slopes * _distance(places, f))

        values = tuple(float(x) for x in slopes.ravel())
        yield Term(f"{by_head(slopes)} {name}", of, values)


def _distance(places: Places, f: Callable[[Array], Array]) -> Array:
    return np.asarray(f(np.abs(places.j - places.p).astype(np.float64)))


def _factors(field: Field, places: Places, S: Array) -> Iterator[Term]:
    read = _slopes(field, S)
    slopes = _chosen(field, S, plain(1 + read) - 1, read)
    values = tuple(float(1 + x) for x in slopes.ravel())
    text = f"the scores are multiplied by {by_head(1 + slopes)}"

    def capped(c: Context) -> Array:
        return np.asarray((1 + slopes[c.view.heads]) * STEPS["cap"](c)[0])

    steps: dict[str, Step] = {"Y": lambda c: STEPS["Y"](c) * (1 + slopes[c.view.heads])}
    if places.question.softcap is not None:  # the factor of what is capped
        steps = {"cap": lambda c: (capped(c), *STEPS["cap"](c)[1:])}
    yield Term(text, lambda places, S: slopes * S, values, "score-scale", steps)


def _chosen(field: Field, x: Array, rounded: Array, read: Array) -> Array:
    """Rounded slopes where these leave no more than those that were read."""
    same = field.left(rounded * x) <= 1.2 * field.left(read * x) + 1e-6
    return rounded if same else read


def plain(values: Array) -> Array:
    """Rounded to three digits, as somebody may have written them."""
    return np.array([float(f"{x:.3g}") for x in values.ravel()]).reshape(values.shape)


def _curves(field: Field, places: Places, S: Array) -> Iterator[Term]:
    """Functions of the scores alone: those of CURVES; any other one in numbers."""
    cap, smooth = places.question.softcap, _of_scores(field, S) is not None
    for words, curve in CURVES.items():
        fine = words.startswith("rounded")
        if not (smooth or fine) or (cap is None and words == "not capped"):
            continue

        def of(places: Places, S: Array, c: float, curve: Any = curve) -> Array:
            return np.asarray(curve(_uncapped(S, cap), c)[0] - S)

        def left_by(c: float, of: Any = of) -> float:
            return field.left(of(places, S, c))

        c, low, high = 1.0, 0.3, 60.0
        if "{c}" in words:
            c = min((*NUMBERS, *([cap] if cap else ())), key=left_by)
            for _ in range(0 if fine or left_by(c) <= 1 else 5):
                tried = np.geomspace(low, high, 8)
                best = int(np.argmin([left_by(x) for x in tried]))
                low, high = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
                c = min(c, float(np.sqrt(low * high)), key=left_by)
            c = round(c, 2) if c > 0.1 and left_by(round(c, 2)) <= 1 else c
        name = "softcap-dropped" if words == "not capped" else "softcap"
        text = f"the scores are {words.format(c=f'{c:.4g}')}"
        steps: dict[str, Step] = {"cap": partial(options.bent, curve, c)}
        yield Term(text, partial(of, c=c), (c,), name, steps)


def _of_scores(field: Field, S: Array) -> tuple[Array, Array] | None:
    """Scores and a function of them at these, in straight lines, if that is nearly all there is."""
    knots = np.unique(np.quantile(S[field.there], np.linspace(0, 1, KNOTS)))
    if len(knots) < 4:
        return None
    values = field.shares([np.interp(S, knots, row) for row in np.eye(len(knots))])
    found = np.interp(S, knots, values)
    left = np.square(field.centred() - field.centred(found)).sum()
    noise = field.noise**2 * field.there.sum()
    nearly = left < max(0.02 * np.square(field.centred()).sum(), noise)
    return (knots, values) if nearly else None


def loosely(field: Field, places: Places, S: Array) -> tuple[str, str]:
    """What the field depends on where no term says what it is, and the class of bugs; "" of none:
    a function of the scores, or one number for every row and part of the keys."""
    if (curve := _of_scores(field, S)) is not None:
        at = np.unique(np.rint(curve[0][1:-1] * 2)) / 2 + 0.0
        found = at + np.interp(at, *curve) - np.interp(0.0, *curve)
        told = ", ".join(f"{x:g} is {y:.3g}" for x, y in zip(at, found, strict=True))
        return f"the scores are another function of the right ones alone: {told}", "softcap"
    parts = {f"every second tile of {t} keys": places.j // t % 2 for t in TILES}
    parts |= {f"each of {n} equal parts": places.j // -(-places.m // n) for n in (2, 3, 4)}
    parts |= {f"each tile of {t} keys": places.j // t for t in TILES[::-1]}
    groups = np.arange(len(places.j))[:, None]
    for name, part in parts.items():
        index = groups * (part.max() + 2) + np.maximum(part, -1) + 1
        if len(np.unique(index[field.there[0]])) * MANY > field.there[0].sum():
            continue  # too few keys a part to tell
        level = np.stack([_means_of(field, h, index) for h in range(len(S))])
        if replace(field, by_row=False).fits(level):
            text = f"the weights of {name} are off by a factor, another one in every row"
            return text, "no-rescale" if "each tile" in name else "partial-merge"
    return "", ""


def _means_of(field: Field, head: int, index: Array) -> Array:
    """The mean of a head's field where ``index`` is the same."""
    return np.asarray(_means(replace(field, by_row=False), head, index)[index])


def _uncapped(S: Array, cap: float | None) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return S if cap is None else np.asarray(cap * np.arctanh(S / cap))


def _columns(field: Field, places: Places, S: Array) -> Iterator[Term]:
    """A factor for each column in the product of q and k."""
    q = places.question
    if q.softcap is not None or q.sparse:
        return

    def product(places: Places, column: int) -> Array:
        q = places.question
        rows, keys = (np.asarray(x[..., column], dtype=np.float64).T for x in (q.q, q.k))
        return np.asarray(q.scale * rows[..., None] * keys.repeat(q.group, axis=0)[:, None])

    columns = range(q.q.shape[2])
    found = 1 + field.shares([product(places, column) for column in columns])
    weights = np.where(np.abs(found - np.rint(found)) < 1e-2, np.rint(found), found)
    changes = [0, *(np.flatnonzero(np.abs(np.diff(weights)) > 1e-2) + 1), len(weights)]
    runs = [(a, b - 1, weights[a]) for a, b in pairwise(changes) if abs(weights[a] - 1) > 1e-2]
    told = [f"times {by_head(w)} in columns {a} to {b}" for a, b, w in runs if w]
    told += [f"without columns {a} to {b}" for a, b, w in runs if not w]

    def of(places: Places, S: Array) -> Array:
        wrong = (x for x in columns if weights[x] != 1)
        return np.asarray(sum((weights[x] - 1) * product(places, x) for x in wrong))

    name = "head-dim-tail" if all(not w for *_, w in runs) else "score-scale"
    text = f"the scores are q . k {', '.join(told[:4])}{', ...' * (len(told) > 4)}"
    steps: dict[str, Step] = {"Y": lambda c: c.s * times(c.Q * weights, c.K.T)}
    yield Term(text, of, (), name, steps)


def _factors_by_place(field: Field, places: Places, S: Array) -> Iterator[Term]:
    """Few factors of the scores, each for a run of values of one feature."""
    own = "i" if places.aligned else "p"
    names = ["j", "seqlen_k - 1 - j", "i", "seqlen_q - 1 - i", f"j - {own}"]
    names += [f"j // {t} - {own} // {t}" for t in TILES]
    for name in names:
        x = np.broadcast_to(places.feature(name), places.j.shape)
        known, at = np.unique(x[field.there.any(axis=0)], return_inverse=True)
        index = np.zeros(x.shape, dtype=int)
        index[field.there.any(axis=0)] = at
        if len(known) < 2:
            continue
        factors = 1 + np.stack([_means(field, h, index, S) for h in range(len(S))]).mean(axis=0)
        edges = np.flatnonzero(np.abs(np.diff(factors)) > 1e-2 * np.abs(factors[1:])) + 1
        runs = list(pairwise([0, *edges, len(known)]))
        if not 1 < len(runs) < 5:
            continue
        values = plain(np.array([np.median(factors[a:b]) for a, b in runs]))
        ends = [int(known[a]) for a, _ in runs[1:]]

        def factor(
            places: Places, name: str = name, ends: Any = ends, values: Array = values
        ) -> Array:
            return np.asarray(values[np.digitize(places.feature(name), ends)])

        def of(places: Places, S: Array, factor: Any = factor) -> Array:
            return np.asarray((factor(places) - 1) * S)

        def Y(c: Context, factor: Any = factor) -> Array:
            places = Places(c.question)
            whole = np.broadcast_to(factor(places), places.j.shape)
            at = np.ix_(c.view.rows, np.maximum(c.view.keys, 0))
            return np.asarray(STEPS["Y"](c) * whole[at])

        told = [f"{number(values[0])} where {name} < {ends[0]}"]
        told += [f"{number(v)} from {e} on" for v, e in zip(values[1:], ends, strict=True)]
        text = f"the scores are multiplied by {', '.join(told)}"
        yield Term(text, of, tuple(values), "score-scale", {"Y": Y})


def _places(field: Field, places: Places, S: Array) -> Iterator[Term]:
    """Group means: what depends on one feature and the head alone."""
    own = "j - i" if places.aligned else "j - p"
    names = [own, "j", "seqlen_k - 1 - j"]
    names += [] if field.by_row else ["i", "seqlen_q - 1 - i"]
    for name in names:
        x = np.broadcast_to(places.feature(name), places.j.shape)
        first = int(x.min())
        table = np.stack([_means(field, h, x - first) for h in range(len(field.x))])

        def look(
            places: Places, S: Array, name: str = name, first: int = first, table: Array = table
        ) -> Array:
            at = np.clip(places.feature(name) - first, 0, table.shape[1] - 1)
            return np.asarray(table[:, np.broadcast_to(at, places.j.shape)])

        text = f"it depends on {name.replace(own, 'j - i')} and the head alone"
        yield Term(text, look, _few(table, x, field), table=True)


def _few(table: Array, x: Array, field: Field) -> tuple[float, ...]:
    """Some values of head 0, from the place nearest to 0 on."""
    there = np.unique(np.abs(x[field.there[0]]))[:6]
    low = int(x.min())
    signs = 1 if (x[field.there[0]] >= 0).any() and (x[field.there[0]] > 0).any() else -1
    at = [int(signs * d) - low for d in there]
    return tuple(float(table[0, k]) for k in at if 0 <= k < table.shape[1])


def _means(field: Field, head: int, x: Array, unit: Array | None = None) -> Array:
    """Of every value of ``x`` (total_q, total_k) the mean of a head's field, or how often it holds
    ``unit``, like the field; rows being free."""
    there = field.there[head]
    rows, keys = np.nonzero(there)
    values, groups, size = field.x[head][rows, keys], x[rows, keys], int(x.max()) + 1
    weights = np.ones(len(rows)) if unit is None else unit[head][rows, keys]
    sums, squares = (np.bincount(groups, w * weights, size) for w in (values, weights))
    if not field.by_row:
        return np.asarray(sums / np.maximum(squares, 1))
    share = np.zeros((len(there), size))  # the free numbers of rows eliminated
    np.add.at(share, (rows, groups), weights)
    per_row = np.maximum(np.bincount(rows, minlength=len(there)), 1.0)
    of_row = np.bincount(rows, values, len(there)) / per_row
    left = np.diag(squares) - share.T @ (share / per_row[:, None])
    return np.asarray(np.linalg.lstsq(left, sums - share.T @ of_row, rcond=1e-10)[0])
