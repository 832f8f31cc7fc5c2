"""All pairs of a problem as one view, of which steps of the engine make what was read; and what its
scores are in place of the right ones: with a term of places, other functions of themselves, of
other heads, of some columns. A term fits if its steps give the log-weights that were read."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue.second_order import with_values
from rawattn.check.diagnose.engine.attention import Bug, Same, View, exact, run_steps
from rawattn.check.diagnose.engine.steps import SCORES, STEPS, Context, Step, changed
from rawattn.check.diagnose.evidence.places import Array, Places, Right, places_of
from rawattn.check.diagnose.read.fields import Field, by_head, number, of_heads, plain

Curve = Callable[[Array, float], tuple[Array, Array]]  # other scores, and their derivative
CURVES: dict[str, Curve] = {  # of uncapped scores with a number c
    "not capped": lambda S, c: (S, np.ones_like(S)),
    "capped, {c} tanh(S / {c})": lambda S, c: (c * np.tanh(S / c), 1 - np.tanh(S / c) ** 2),
    "clipped at {c}": lambda S, c: (np.clip(S, -c, c), 1.0 * (abs(S) < c)),
    "their absolute values": lambda S, c: (np.abs(S), np.sign(S)),
}
NUMBERS = (*(2.0**n for n in range(-10, 6)), 0.01, 0.1, 3.0, 5.0, 10.0, 20.0, 30.0, 50.0)
Of = Callable[[Places], Array]  # numbers (num_heads_q or 1, total_q, total_k) of places


class Term(NamedTuple):
    """What is wrong with the scores, its class, and steps that do it. values: factors, by head."""

    text: str
    name: str
    steps: Mapping[str, Step]
    values: tuple[float, ...] = ()


def of_view(c: Context, whole: Array) -> Array:
    """Of (num_heads_q or 1, total_q, total_k) the part of a view."""
    heads = c.view.heads if len(whole) > 1 else np.zeros(1, dtype=int)
    return np.asarray(whole[np.ix_(heads, c.view.rows, np.maximum(c.view.keys, 0))])


def context_of(places: Places, S: Array) -> Context:
    """What steps take, as of one view that holds all: of all heads, also K and V, and of pairs that
    no query sees; with Y such that S (num_heads_q, total_q, total_k) are the scores."""
    q, (n, m) = places.question, places.j.shape
    rows, keys, heads = (np.arange(count) for count in (n, m, q.num_heads_q))
    view = View(0, rows, keys, heads, 0, np.ones((1, n, m)))
    c = SimpleNamespace(question=q, view=view, W=view.weight, s=q.scale, r=exact, o=exact, dL=0.0)
    c.Q = q.q.astype(np.float64).swapaxes(0, 1)
    c.K, c.V = (x.astype(np.float64).swapaxes(0, 1).repeat(q.group, axis=0) for x in (q.k, q.v))
    c.G = places.gates
    c.S, c.Y, c.cap = S, S / c.G, (S / c.G, 1.0)
    if q.softcap is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            c.Y = q.softcap * np.arctanh(c.Y / q.softcap)
        c.cap = c.cap[0], 1 - (c.cap[0] / q.softcap) ** 2
    return c


def backward_of(right: Right) -> Context:
    """The same with what a backward pass has before P."""
    c, q = context_of(right.places, right.S), right.places.question
    c.given = Same((right.out, right.lse))
    c.dO, c.O = (np.asarray(x, np.float64).swapaxes(0, 1) for x in (q.dout, right.out))
    c.L, c.dP, c.D = right.lse, c.dO @ c.V.mT, (c.dO * c.O).sum(axis=-1)
    c.sink = None if q.sinks is None else np.asarray(q.sinks, np.float64)[:, None]
    c.slope, c.dL = c.G * c.cap[1], np.zeros_like(c.D)
    return c


def scores_of(c: Context, steps: Mapping[str, Step]) -> Array:
    """The scores of a context that has Y, with these steps."""
    c = changed(c)
    with np.errstate(all="ignore"):
        run_steps(c, SCORES if "Y" in steps else SCORES[1:], Bug("", steps=steps))
    return np.asarray(c.S)


def capped(change: Callable[[Context, Array], Array]) -> dict[str, Step]:
    """Other scores, as constants for every derivative."""
    cap = STEPS["cap"]
    return {"cap": lambda c: (change(c, cap(c)[0]), *cap(c)[1:])}


def term_of(field: Field, c: Context, *, many: bool = False) -> Term | None:
    """The plainest term that leaves nothing but rounding; ``many``: of many numbers."""
    makers = (_heads, _columns) if many else (_linear, _curves)
    terms = chain.from_iterable(maker(field, c) for maker in makers)
    return next((t for t in terms if field.fits(scores_of(c, t.steps) - c.S)), None)


def of_distance(field: Field, places: Places) -> tuple[str, Of]:
    """What the field may be of the distance, in words, by slopes (num_heads_q, 1, 1)."""
    slopes = field.slopes(np.abs(places.j - places.p)[None])
    return f"{by_head(slopes)} |j - i|", lambda x: np.asarray(slopes * np.abs(x.j - x.p))


def at(c: Context, of: Of) -> Array:
    return of_view(c, of(places_of(c.question)))


def adding(of: Of, text: str, name: str) -> Term:  # G comes behind it
    return Term(text, name, capped(lambda c, S: S + at(c, of) / np.where(c.G == 0, 1.0, c.G)))


def _linear(field: Field, c: Context) -> Iterator[Term]:
    """A multiple of the distance, or of the scores themselves."""
    text, of = of_distance(field, places_of(c.question))
    yield adding(of, f"added to the scores: {text}", "score-bias")
    factors = 1 + field.slopes(c.S)
    steps = capped(lambda c, S: factors[c.view.heads] * S)
    text = f"the scores are multiplied by {by_head(factors)}"
    yield Term(text, "score-scale", steps, tuple(factors.ravel().tolist()))


def of_other_heads(of: str, heads: Array) -> Term:
    """q, k or v of other heads in its product, by query head."""

    def taken(c: Context) -> Array:
        rows = c.view.rows if of == "q" else c.view.keys
        x = getattr(c.question, of)[rows][:, heads[c.view.heads]]
        return np.asarray(x.astype(np.float64).swapaxes(0, 1))

    what, step = {"k": ("keys", "Y"), "q": ("queries", "Y"), "v": ("values", "O")}[of]
    text = f"query head h takes the {what} of head {of_heads(heads)}"
    return Term(text, "gqa-head-map", {step: with_values(step, **{of.upper(): taken})})


def _heads(field: Field, c: Context) -> Iterator[Term]:
    """Scores of other heads of k, or of q."""
    for of in "kq":
        heads = range(getattr(c.question, of).shape[1])
        tried = (of_other_heads(of, np.full(c.question.num_heads_q, head)) for head in heads)
        left = np.array([field.left_by_head(scores_of(c, one.steps) - c.S) for one in tried])
        yield of_other_heads(of, left.argmin(axis=0))


def _columns(field: Field, c: Context) -> Iterator[Term]:
    """A factor for each column in the product of q and k."""
    if c.question.softcap is not None or c.question.sparse:
        return
    by = 1 + field.shares([c.s * c.Q[..., [x]] @ c.K[..., [x]].mT for x in range(c.Q.shape[2])])
    told, whole = of_columns(by)
    by = np.where(np.abs(by - np.rint(by)) < 1e-2, np.rint(by), by)
    steps: dict[str, Step] = {"Y": lambda c: STEPS["Y"](changed(c, Q=c.Q * by))}
    yield Term(f"the scores are q . k {told}", "head-dim-tail" if whole else "score-scale", steps)


def of_columns(factors: Array) -> tuple[str, bool]:
    """What a product sums in place of all columns once, and whether it lacks some, no more."""
    near = np.abs(np.diff(factors)) <= 1e-2 * np.maximum(np.abs(factors[1:]), 1.0)
    edges = [0, *(np.flatnonzero(~near) + 1).tolist(), len(factors)]
    every = ((a, b - 1, plain(np.median(factors[a:b]))) for a, b in pairwise(edges) if b > a)
    runs = [(a, b, float(x)) for a, b, x in every if abs(x - 1) > 1e-2]
    told = [f"{number(x)} times columns {a} to {b}" for a, b, x in runs if abs(x) > 1e-2]
    told += [f"without columns {a} to {b}" for a, b, x in runs if abs(x) <= 1e-2]
    return ", ".join(told[:4]) + ", ..." * (len(told) > 4), all(abs(x) <= 1e-2 for *_, x in runs)


def _curves(field: Field, c: Context) -> Iterator[Term]:
    """Functions of the scores alone, those of CURVES."""
    cap, far = c.question.softcap, field.left(np.zeros_like(c.S)) / 2
    for words, curve in CURVES.items():

        def left_by(x: float, curve: Any = curve) -> float:
            with np.errstate(invalid="ignore", over="ignore"):
                return field.left(c.G * curve(c.Y, x)[0] - c.S)

        caps = {cap: "", cap * c.s: " (the softcap, before softmax_scale)"} if cap else {}
        caps = caps if "{c}" in words else {}
        x = min((*NUMBERS, *caps), key=left_by) if "{c}" in words else 1.0
        for fine in range(15) if "{c}" in words and left_by(x) < far else ():
            x = float(min(x * 2 ** (np.linspace(-1, 1, 9) / 4**fine), key=left_by))
        few = (*caps, *(round(x, digits) for digits in range(3)))  # those that the noise leaves
        enough = max(1.0, 1.01 * left_by(x))
        x = next((y for y in few if y and left_by(y) <= enough), x)
        text = f"the scores are {words.format(c=f'{x:.4g}')}"
        text += next((of for y, of in caps.items() if np.isclose(x, y, 5e-3)), "")
        steps = {"cap": lambda c, of=curve, x=x: (*of(c.Y, x), 0.0)}
        yield Term(text, "softcap-dropped" if words == "not capped" else "softcap", steps)
