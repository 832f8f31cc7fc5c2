"""Numbers that were read, of pairs (num_heads_q, total_q, total_k) and of rows, as lse, D or sinks:
what fits them, in words, and which other rows, heads or sequences they are those of. And terms of
scores, by steps on all pairs as one view: of places, other functions of themselves, of other heads,
of some columns. A term fits if its steps give the log-weights that were read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.second_order import with_values
from rawattn.check.diagnose.engine.attention import Bug, Same, View, exact, run_steps
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import LOG2_E, SCORES, STEPS, Context, Step, changed
from rawattn.check.diagnose.evidence.places import Array, Places, Right, places_of

Calls = Sequence[tuple[Array, Any]]  # right numbers of rows, and where they tell something
FEW = 0.3  # of the rows that are known: a map may have nothing for so many
NEAR = {8: 1e-8, 4: 1e-5}  # numbers that are the same, by the bytes of the inputs
EXACT = {8: 1e-9, 4: 3e-6}  # the same, of a number's size
NARROW, MANY = ("bfloat16", "float16", "float32"), 20  # dtypes, and numbers that tell one
CHANCE = 0.02  # that a number is some row's by chance, at most
PEAK = 8  # the worst of many entries over their root mean square
Curve = Callable[[Array, float], tuple[Array, Array]]  # other scores, and their derivative
CURVES: dict[str, Curve] = {  # of uncapped scores with a number c
    "not capped": lambda S, c: (S, np.ones_like(S)),
    "capped, {c} tanh(S / {c})": lambda S, c: (c * np.tanh(S / c), 1 - np.tanh(S / c) ** 2),
    "clipped at {c}": lambda S, c: (np.clip(S, -c, c), 1.0 * (abs(S) < c)),
    "their absolute values": lambda S, c: (np.abs(S), np.sign(S)),
}
NUMBERS = (*(2.0**n for n in range(-10, 6)), 0.01, 0.1, 3.0, 5.0, 10.0, 20.0, 30.0, 50.0)
Of = Callable[[Places], Array]  # numbers (num_heads_q or 1, total_q, total_k) of places


@dataclass(frozen=True, eq=False)
class Field:
    """``x`` where ``there``, with a noise. by_row: rows are known up to a number, as logarithms."""

    x: Array
    there: Array
    by_row: bool
    noise: float

    @cached_property
    def own(self) -> Array:
        return self.centred(self.x)

    def centred(self, x: Array) -> Array:
        """Without the mean of each row, or of nothing; 0 where nothing is."""
        x = np.where(self.there, x, 0.0)
        if not self.by_row:
            return x
        count = np.maximum(self.there.sum(axis=-1, keepdims=True), 1)
        return np.where(self.there, x - x.sum(axis=-1, keepdims=True) / count, 0.0)

    def left_by_head(self, x: Array) -> Array:
        """What ``x`` leaves in units of the noise, or of the worst entry, which may be PEAK times
        as far off; inf for what is no number."""
        with np.errstate(invalid="ignore", over="ignore"):
            off = np.abs(self.own - self.centred(x))
            rms = np.sqrt((off**2).sum(axis=(1, 2)) / np.maximum(self.there.sum(axis=(1, 2)), 1))
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

    def slopes(self, x: Array) -> Array:
        """(heads, 1, 1): how often ``x`` is in the field; rounded where that leaves no more."""
        a, b = self.centred(x), self.own
        size = (a * a).sum(axis=(1, 2))
        found = ((a * b).sum(axis=(1, 2)) / np.where(size > 0, size, 1.0))[:, None, None]
        same = self.left(plain(found) * x) <= 1.2 * self.left(found * x) + 1e-6
        return plain(found) if same else np.asarray(found)

    def shares(self, basis: Sequence[Array]) -> Array:
        """How often each of ``basis`` is in the field, of all heads together."""
        a = np.stack([self.centred(np.broadcast_to(x, self.x.shape))[self.there] for x in basis])
        return np.asarray(np.linalg.lstsq(a @ a.T, a @ self.own[self.there], rcond=1e-12)[0])


def sums_of(basis: Mapping[str, Array], due: Array, most: int) -> Iterator[dict[str, float]]:
    """Sums of ``most`` of ``basis`` that are ``due``, both in units of what is allowed: how often
    each is there, the fewest first."""
    if not basis:
        return
    columns = np.stack([*basis.values()], axis=1)
    products, with_due = columns.T @ columns, columns.T @ due
    for count in range(1, most + 1):
        for some in map(list, combinations(range(len(basis)), count)):
            found = np.linalg.lstsq(products[np.ix_(some, some)], with_due[some], rcond=1e-12)[0]
            short = np.round(found, 4)
            found = np.where(np.abs(found - short) < 1e-7, short, found)
            whole = np.where(np.abs(found - np.rint(found)) < 1e-2, np.rint(found), found)
            fit = (x for x in (whole, found) if np.mean((columns[:, some] @ x - due) ** 2) <= 1)
            if (factors := next(fit, None)) is not None:
                names = (name for n, name in enumerate(basis) if n in some)
                yield {name: float(x) for name, x in zip(names, factors, strict=True) if x}


def sum_in_words(factors: Mapping[str, float]) -> str:
    told = ""
    for name, x in factors.items():
        size = "" if abs(x) == 1 and name else number(abs(x))
        told += f" {'-' if x < 0 else '+'} {size} {name}".replace("  ", " ").rstrip()
    return told.strip().removeprefix("+ ") or "0"


def by_head(values: Array) -> str:
    """Numbers of heads: one if they are alike, or all of them."""
    values = np.asarray(values, dtype=np.float64).ravel()
    if np.ptp(values) < 1e-2 * (float(np.abs(values).max(initial=0.0)) or 1.0):
        return number(float(values.mean()))
    return ", ".join(f"{number(value)} (head {h})" for h, value in enumerate(values[:8]))


def in_heads(found: Array, due: Array) -> str:
    """Which query heads each head of keys has, (num_heads_kv, num_heads_q), and must have."""
    heads = ([np.flatnonzero(of).tolist() for of in x] for x in (found, due))
    told = enumerate(zip(*heads, strict=True))
    return "; ".join(f"head {n} of query heads {of or 'none'}, not {own}" for n, (of, own) in told)


def of_heads(heads: Array) -> str:
    """A map from h to a head, as a formula or as a list."""
    h, top = np.arange(len(heads)), int(heads.max(initial=0)) + 1
    known = {"h": h, "0": 0 * h}
    known |= {f"h % {n}": h % n for n in range(2, top + 1)}
    known |= {f"h // {n}": h // n for n in range(2, len(heads) + 1)}
    told = (name for name, x in known.items() if np.array_equal(x, heads))
    return next(told, ", ".join(map(str, heads)))


def number(x: float) -> str:
    """In three digits, or as many as tell it from 1."""
    return f"{x:.3g}" if abs(x - 1) > 5e-3 or abs(x - 1) < 1e-6 else f"{x:.6g}"


def plain(values: Array) -> Array:
    """Rounded to three digits."""
    return np.array([float(f"{x:.3g}") for x in values.ravel()]).reshape(values.shape)


def map_of(
    question: Question, calls: Calls, held: Array, near: Array | float
) -> tuple[maps.Map, float] | None:
    """By which map rows (num_heads_q, total_q) hold the right numbers of others, up to ``near``,
    and what they hold where it has none; NaN is not known."""
    told, g = ~np.isnan(held), maps.geometry(question, "lse")
    right = np.full_like(held, np.nan)
    for x, at in calls:
        right[at] = x[at]
    for by in maps.families(question, True) if told.any() else ():
        due = np.full_like(held, np.nan)
        for x, at in calls:
            due[at] = by.moved(g, x, np.nan)[at]
        known = told & ~np.isnan(due)
        with np.errstate(invalid="ignore"):
            same = (due == held) | (np.abs(due - held) <= near)
            moved_ones = known & (np.abs(due - right) > near)
        if moved_ones.any() and same[known].all() and known.sum() > (1 - FEW) * told.sum():
            left = held[told & ~known]
            return by, float(np.median(left)) if left.size else 0.0
    return None


def other_rows(due: Array, held: Array, known: Array, itemsize: int) -> str:
    """Of which other rows numbers (heads, tokens) are, where those that are known and not their
    own, nor 0, are the right one of some row, but for a FEW; empty where they are not."""
    near, there = NEAR.get(itemsize, np.inf), np.isfinite(due)
    order = np.argsort(due[there])
    values, at = due[there][order], np.argwhere(there)[order]
    n = np.clip(np.searchsorted(values, held - near), 0, max(len(values) - 1, 0))
    if not len(values) or 2 * near * len(values) > CHANCE * float(np.ptp(values)):
        return ""
    same, none = np.abs(values[n] - held) <= near, np.abs(held) <= near
    moved = known & (np.abs(held - due) > near) & ~none
    few = (moved & ~same).sum() < FEW * moved.sum()
    pairs = [(h, t, *at[n[h, t]]) for h, t in np.argwhere(moved & same)[:3]] if few else []
    return ", ".join(f"token {t} of head {h} that of token {s} of head {g}" for h, t, g, s in pairs)


def few_bits(x: Array, itemsize: int) -> str:
    """Whether numbers are all such as a narrower dtype than that of the inputs has, and which."""
    near = EXACT.get(itemsize, 0.0) * np.abs(x)
    names = [name for name in NARROW if np.dtype(name).itemsize < itemsize]
    with np.errstate(over="ignore"):
        alike = (name for name in names if (np.abs(x.astype(name) - x) <= near).all())
    return next(alike, "") if x.size > MANY and near.any() else ""


def rows_of(x: Array, near: float) -> Array | None:
    """(num_heads_q, total_q): the number that all pairs of a row have, up to ``near``; NaN where
    none is known. None where they have several."""
    low, high = np.fmin.reduce(x, axis=-1), np.fmax.reduce(x, axis=-1)
    return None if (high > low + near).any() else np.asarray((low + high) / 2)


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
    if factors.any():  # else columns say more
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

        factors = {"": 1.0, " times ln 2": 1 / LOG2_E, " times log2(e)": LOG2_E}
        factors |= {", before softmax_scale": c.s}
        bent = cap is not None and "{c}" in words
        caps = {cap * by: f" (the softcap{of})" * bool(of) for of, by in factors.items() if bent}
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
