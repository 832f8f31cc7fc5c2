"""What scores are in place of the right ones: with a term of places, other functions of themselves,
of some columns. A term is planted by steps, and fits if these give the log-weights that were read.

Long by the terms.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue import options
from rawattn.check.diagnose.engine.attention import STEPS, Context, Step, changed
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.read.contexts import capped, of_view, places_of, scores_of
from rawattn.check.diagnose.read.fields import Field, by_head, number, runs_of

Array = np.ndarray
DISTANCES: dict[str, Callable[[Array], Array]] = {
    "|j - i|": lambda d: d,
    "log(1 + |j - i|)": np.log1p,
}
CURVES: dict[str, options.Curve] = {
    "capped, {c} tanh(S / {c})": lambda S, c: (c * np.tanh(S / c), 1 - np.tanh(S / c) ** 2),
    "not capped": lambda S, c: (S, np.ones_like(S)),
    **options.CURVES,
}
NUMBERS = (*(2.0**n for n in range(-10, 6)), 0.01, 0.1, 3.0, 5.0, 10.0, 20.0, 30.0, 50.0)
KNOTS = 24  # of a function of the scores


@dataclass(frozen=True, eq=False)
class Function:
    """``of``: numbers (num_heads_q or 1, total_q, total_k) of places. values: those that the text
    holds, such as slopes by head; table: some of many."""

    text: str
    of: Callable[[Places], Array]
    values: tuple[float, ...]
    table: bool = False

    def __str__(self) -> str:
        told = ", ".join(f"{value - self.values[0]:.4g}" for value in self.values)
        return f"{self.text}{TABLE}{told}, ...)" if self.table else self.text

    def at(self, c: Context) -> Array:
        return of_view(c, self.of(places_of(c.question)))


TABLE = " (head 0, nearest first: "  # before its values


@dataclass(frozen=True, eq=False)
class Term:
    """What is wrong with the scores, its class, and the steps that do it. values: numbers that the
    text holds, such as factors by head; added: what is added to them."""

    text: str
    name: str
    steps: Mapping[str, Step] = field(default_factory=dict)
    values: tuple[float, ...] = ()
    added: Function | None = None


def term_of(field: Field, c: Context, *, table: bool = False) -> Term | None:
    """The plainest term that leaves nothing but rounding; ``table``: of many numbers."""
    added = (adding(f) for f in functions(field, places_of(c.question), table=table))
    plain = (added, _factors(field, c), _curves(field, c))
    parts = (_columns(field, c), added) if table else plain
    terms = (term for part in parts for term in part)
    return next((t for t in terms if field.fits(scores_of(c, t.steps) - c.S)), None)


def functions(field: Field, places: Places, *, table: bool = False) -> Iterator[Function]:
    """What the field may be of the distance; ``table``: of one feature and the head alone."""
    for name, f in DISTANCES.items() if not table else ():
        slopes = field.slopes(_by_distance(f, np.ones((1, 1, 1)), places))
        values = tuple(float(slope) for slope in slopes.ravel())
        yield Function(f"{by_head(slopes)} {name}", partial(_by_distance, f, slopes), values)
    own = "j - i" if places.aligned else "j - p"
    names = [own, "j", "seqlen_k - 1 - j", *(() if field.by_row else ("i", "seqlen_q - 1 - i"))]
    for name in names if table else ():
        x = np.broadcast_to(places.feature(name), places.j.shape)
        known = np.unique(x[field.there.any(axis=0)])
        index = np.searchsorted(known, x).clip(0, len(known) - 1)
        values_of = np.stack([field.means(head, index) for head in range(len(field.x))])
        nearest = values_of[0][np.argsort(np.abs(known), kind="stable")[:6]]
        text = f"what depends on {name.replace(own, 'j - i')} and the head alone"
        look = partial(_looked_up, name, known, values_of)
        yield Function(text, look, tuple(map(float, nearest)), table=True)


def function_of(field: Field, places: Places) -> Function | None:
    """The plainest function that leaves nothing but rounding."""
    tried = (f for table in (False, True) for f in functions(field, places, table=table))
    return next((f for f in tried if field.fits(f.of(places))), None)


def adding(f: Function, text: str = "added to the scores: {}", name: str = "score-bias") -> Term:
    steps = capped(lambda c, S: S + f.at(c) / np.where(c.G == 0, 1.0, c.G))  # G comes behind it
    return Term(text.format(f), name, steps, f.values, f)


def _by_distance(f: Callable[[Array], Array], slopes: Array, places: Places) -> Array:
    return np.asarray(slopes * f(np.abs(places.j - places.p).astype(np.float64)))


def _looked_up(name: str, known: Array, values: Array, places: Places) -> Array:
    x = np.broadcast_to(places.feature(name), places.j.shape)
    return np.asarray(values[:, np.searchsorted(known, x).clip(0, len(known) - 1)])


def _factors(field: Field, c: Context) -> Iterator[Term]:
    factors = 1 + field.slopes(c.S)
    steps = capped(lambda c, S: factors[c.view.heads] * S)
    text = f"the scores are multiplied by {by_head(factors)}"
    yield Term(text, "score-scale", steps, tuple(float(x) for x in factors.ravel()))


def _columns(field: Field, c: Context) -> Iterator[Term]:
    """A factor for each column in the product of q and k."""
    if c.question.softcap is not None or c.question.sparse:
        return
    products = [c.s * c.Q[..., [x]] @ c.K[..., [x]].mT for x in range(c.Q.shape[2])]
    weights = 1 + field.shares(products)
    told, whole = of_columns(weights)
    weights = np.where(np.abs(weights - np.rint(weights)) < 1e-2, np.rint(weights), weights)
    steps: dict[str, Step] = {"Y": lambda c: STEPS["Y"](changed(c, Q=c.Q * weights))}
    name = "head-dim-tail" if whole else "score-scale"
    yield Term(f"the scores are q . k {told}", name, steps)


def of_columns(factors: Array) -> tuple[str, bool]:
    """What a product sums in place of all columns once, and whether it lacks some, no more."""
    runs = [run for run in runs_of(factors) if abs(run[2] - 1) > 1e-2]
    told = [f"{number(x)} times columns {a} to {b}" for a, b, x in runs if abs(x) > 1e-2]
    told += [f"without columns {a} to {b}" for a, b, x in runs if abs(x) <= 1e-2]
    text = ", ".join(told[:4]) + ", ..." * (len(told) > 4)
    return text, all(abs(x) <= 1e-2 for *_, x in runs)


def _curves(field: Field, c: Context) -> Iterator[Term]:
    """Functions of the scores alone: those of CURVES; any other one in numbers."""
    cap, smooth = c.question.softcap, _of_scores(field, c.S) is not None
    for words, curve in CURVES.items() if smooth else ():
        if cap is None and words == "not capped":
            continue

        def left_by(x: float, curve: Any = curve) -> float:
            with np.errstate(invalid="ignore", over="ignore"):
                return field.left(c.G * curve(c.Y, x)[0] - c.S)

        caps = (cap, cap * c.s) if cap else ()
        x = min((*NUMBERS, *caps), key=left_by) if "{c}" in words else 1.0
        for step in (2.0, 1.2, 1.05, 1.01, 1.002) if "{c}" in words and left_by(x) > 1 else ():
            x = float(min(x * step ** np.linspace(-1, 1, 9), key=left_by))
        x = round(x, 2) if x > 0.1 and left_by(round(x, 2)) <= 1 else x
        name = "softcap-dropped" if words == "not capped" else "softcap"
        text = f"the scores are {words.format(c=f'{x:.4g}')}"
        text += " (the softcap, before softmax_scale)" * bool(caps and np.isclose(x, caps[1], 5e-3))
        yield Term(text, name, {"cap": partial(options.bent, curve, x)}, (x,))


def _of_scores(field: Field, S: Array) -> tuple[Array, Array] | None:
    """Scores and a function of them at these, in straight lines, if that is nearly all there is."""
    knots = np.unique(np.quantile(S[field.there], np.linspace(0, 1, KNOTS)))
    if len(knots) < 4:
        return None
    values = field.shares([np.interp(S, knots, row) for row in np.eye(len(knots))])
    found = np.interp(S, knots, values)
    left = np.square(field.own - field.centred(found)).sum()
    noise = field.noise**2 * field.there.sum()
    nearly = left < max(0.02 * np.square(field.own).sum(), noise)
    return (knots, values) if nearly else None


def loosely(field: Field, S: Array) -> tuple[str, str] | None:
    """In numbers, where no term says what they are: another function of the scores, and the class
    of bugs."""
    if (curve := _of_scores(field, S)) is None:
        return None
    at = np.unique(np.rint(curve[0][1:-1] * 2)) / 2 + 0.0
    found = at + np.interp(at, *curve) - np.interp(0.0, *curve)
    told = ", ".join(f"{x:g} is {y:.3g}" for x, y in zip(at, found, strict=True))
    return f"the scores are another function of the right ones alone: {told}", "softcap"
