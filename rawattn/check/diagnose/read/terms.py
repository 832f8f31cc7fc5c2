"""What is added to log-weights, or multiplies dS: a function of a few things, read off a field.

A field is (num_heads_q, total_q, total_k), of numbers where ``there``; of log-weights each row is
known up to a number.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

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
PEAK = 8  # the worst of many entries over their root mean square
KINDS = ("gate", "factor", "distance", "cap", "place")


@dataclass(frozen=True)
class Term:
    """``of``: what is added. kind: of KINDS. values: numbers that the text holds, such as slopes
    by head."""

    kind: str
    text: str
    of: Of
    values: tuple[float, ...] = ()


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

    @property
    def zero(self) -> bool:
        return self.fits(np.zeros_like(self.x))


def term_of(field: Field, places: Places, S: Array, *, table: bool = False) -> Term | None:
    """The plainest term that leaves nothing but rounding; ``table``: a table of one feature."""
    formulas = (_gates, _distances, _factors, _caps) if field.by_row else (_distances,)
    for make in (_places,) if table else formulas:
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
    for text, (_, form) in GATES.items() if places.question.block_scale is not None else ():

        def of(places: Places, S: Array, form: Any = form) -> Array:
            return np.asarray(form(S, np.stack([places.of(head).gate for head in heads])) - S)

        yield Term("gate", text, of)


def _distances(field: Field, places: Places, S: Array) -> Iterator[Term]:
    for name, f in DISTANCES.items():
        x = _distance(places, f)[None]
        read = _slopes(field, x)
        slopes = _chosen(field, x, plain(read), read)

        def of(places: Places, S: Array, slopes: Array = slopes, f: Any = f) -> Array:
            return np.asarray(slopes * _distance(places, f))

        values = tuple(float(x) for x in slopes.ravel())
        yield Term("distance", f"{by_head(slopes)} {name}", of, values)


def _distance(places: Places, f: Callable[[Array], Array]) -> Array:
    return np.asarray(f(np.abs(places.j - places.p).astype(np.float64)))


def _factors(field: Field, places: Places, S: Array) -> Iterator[Term]:
    read = _slopes(field, S)
    slopes = _chosen(field, S, plain(1 + read) - 1, read)
    values = tuple(float(1 + x) for x in slopes.ravel())
    text = f"the scores are multiplied by {by_head(1 + slopes)}"
    yield Term("factor", text, lambda places, S: np.asarray(slopes * S), values)


def _chosen(field: Field, x: Array, rounded: Array, read: Array) -> Array:
    """Rounded slopes where these leave no more than those that were read."""
    same = field.left(rounded * x) <= 1.2 * field.left(read * x) + 1e-6
    return rounded if same else read


def plain(values: Array) -> Array:
    """Rounded to three digits, as somebody may have written them."""
    return np.array([float(f"{x:.3g}") for x in values.ravel()]).reshape(values.shape)


def _caps(field: Field, places: Places, S: Array) -> Iterator[Term]:
    """c tanh(S / c) in place of S, the c that leaves least."""

    def bend(c: float) -> Array:
        return np.asarray(c * np.tanh(S / c) - S)

    low, high = 0.3, 60.0
    for _ in range(4):
        tried = np.geomspace(low, high, 12)
        best = int(np.argmin([field.left(bend(c)) for c in tried]))
        low, high = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
    c = float(np.sqrt(low * high))
    c = round(c, 2) if field.left(bend(round(c, 2))) <= 1 else c
    text = f"the scores are capped, {c:.4g} tanh(S / {c:.4g})"
    yield Term("cap", text, lambda places, S: np.asarray(c * np.tanh(S / c) - S), (c,))


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

        yield Term(
            "place",
            f"it depends on {name.replace(own, 'j - i')} and the head alone",
            look,
            _few(table, x, field),
        )


def _few(table: Array, x: Array, field: Field) -> tuple[float, ...]:
    """Some values of head 0, from the place nearest to 0 on."""
    there = np.unique(np.abs(x[field.there[0]]))[:6]
    low = int(x.min())
    signs = 1 if (x[field.there[0]] >= 0).any() and (x[field.there[0]] > 0).any() else -1
    at = [int(signs * d) - low for d in there]
    return tuple(float(table[0, k]) for k in at if 0 <= k < table.shape[1])


def _means(field: Field, head: int, x: Array) -> Array:
    """Of every value of ``x`` (total_q, total_k) the mean of a head's field, rows being free."""
    there = field.there[head]
    rows, keys = np.nonzero(there)
    values, groups, size = field.x[head][rows, keys], x[rows, keys], int(x.max()) + 1
    sums, count = (np.bincount(groups, w, size) for w in (values, None))
    if not field.by_row:
        return np.asarray(sums / np.maximum(count, 1))
    share = np.zeros((len(there), size))  # the free numbers of rows eliminated
    np.add.at(share, (rows, groups), 1.0)
    per_row = np.maximum(share.sum(axis=1), 1.0)
    of_row = np.bincount(rows, values, len(there)) / per_row
    left = np.diag(count) - share.T @ (share / per_row[:, None])
    return np.asarray(np.linalg.lstsq(left, sums - share.T @ of_row, rcond=1e-10)[0])
