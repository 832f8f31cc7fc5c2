"""What a backward pass has in place of dS = P o (dP - D): products, other row terms, another
function of each value. A form is a step of the engine, and tried on all that was read.

Long by the forms.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.reading import of_view
from rawattn.check.diagnose.engine.attention import TILES, Context, deltas
from rawattn.check.diagnose.engine.steps import times
from rawattn.check.diagnose.evidence.rules import Rule, Shown, rule_of
from rawattn.check.diagnose.read.contexts import places_of
from rawattn.check.diagnose.read.fields import of_heads, sum_in_words, sums_of
from rawattn.check.diagnose.read.maps import taken
from rawattn.check.diagnose.read.part import Part
from rawattn.check.diagnose.read.terms import of_columns

Array = np.ndarray
Of = Callable[[Context], Array]
ANOTHER, MISPLACED = "delta-of-another-out", "statistics-misplaced"
MOST, SAMPLED = 3, 40  # terms of a sum; pairs for every column
MOST_PAIRS = 0.95
TERMS: dict[str, Callable[[Array, Array, Array], Array]] = {  # of P, dP and D
    "P dP": lambda P, dP, D: P * dP,
    "P D": lambda P, dP, D: P * D,
    "dP": lambda P, dP, D: dP,
    "D": lambda P, dP, D: D + 0 * P,
    "P^2 dP": lambda P, dP, D: P * P * dP,
    "P^2 D": lambda P, dP, D: P * P * D,
    "P": lambda P, dP, D: P,
}
ROW_SUMS: dict[str, Of] = {
    "dout . dout": lambda c: (c.dO * c.dO).sum(axis=-1),
    "out . out": lambda c: (c.O * c.O).sum(axis=-1),
    "the sum of dout": lambda c: c.dO.sum(axis=-1),
    "the sum of out": lambda c: c.O.sum(axis=-1),
    "lse": lambda c: np.where(np.isfinite(c.L), c.L, 0.0),
}
OVER: dict[str, Callable[[Array, Array], Array]] = {  # of numbers of tiles: those that are summed
    "the keys of one tile of {}": lambda own, other: own == other,
    "the tiles of {} keys so far": lambda own, other: own >= other,
    "the tiles of {} keys from this one on": lambda own, other: own <= other,
}
VALUES: dict[str, Of] = {  # what may decide whether a pair is there
    "dS": lambda c: c.dY,
    "dP - D": lambda c: c.dP - c.D[..., None],
    "S": lambda c: c.S,
    "P": lambda c: c.P,
    "dP": lambda c: c.dP,
    "|dS|": lambda c: np.abs(c.dY),
    "|dP - D|": lambda c: np.abs(c.dP - c.D[..., None]),
}


@dataclass(eq=False)
class Change:
    """What is wrong with dS, in words, and its class. dY: what stands in the place of c.dY, None
    where no step tells. masked: it is right, unlike P. times: by head, a factor. whole: this is
    all of dS, so that pairs where it happens to be 0 are not missed.
    """

    text: list[str] = field(default_factory=list)
    name: str = ""
    dY: Of | None = None
    masked: bool = False
    times: Array | None = None
    whole: bool = False


def form_of(part: Part, second: Callable[[], Part | None]) -> Change | None:
    """The plainest form that gives all that was read; ``second``: the same on other lengths."""
    rows = partial(_row_terms, second=second)
    return _first(part, _sums, _other_heads, rows, _columns) or _another_term(part)


def dropped(part: Part) -> Change | None:
    """Pairs that are dropped by the sign or the size of something, where all others are right."""
    return _first(part, _values)


def _first(part: Part, *makes: Callable[[Part], Iterator[Change]]) -> Change | None:
    tried = (change for make in makes for change in make(part))
    return next((x for x in tried if x.dY is not None and part.fits(part.of(x.dY))), None)


def of_terms(c: Context, Z: Array) -> Array:
    """dY of what stands in the place of dS."""
    return np.asarray(np.where(c.W > 0, c.G * c.cap[1] * Z, 0.0))


# ---- products ---------------------------------------------------------------------------------


def _sums(part: Part) -> Iterator[Change]:
    """A sum of few of TERMS, with any factors."""
    slopes, there = part.slopes, part.known
    size = np.where(there, part.P * np.abs(slopes.dP - slopes.D), 1.0)[there] * part.noise
    of = {name: f(part.P, slopes.dP, slopes.D) for name, f in TERMS.items()}
    basis = {name: (slopes.slope * x)[there] / size for name, x in of.items()}
    for factors in sums_of(basis, slopes.dS[there] / size, MOST):
        text, name = _of_terms(factors)
        yield Change([text], name, partial(_with_terms, factors), whole=True)


def _of_terms(factors: dict[str, float]) -> tuple[str, str]:
    """What dS of these terms is called, and its class."""
    a, b = factors.get("P dP"), -factors.get("P D", 0.0)
    text = f"is {sum_in_words(factors)}, not P dP - P D"
    if not factors.keys() <= {"P dP", "P D"}:
        known = factors.keys() <= {"P dP", "P D", "dP", "D"}
        name = "softmax-backward-without-p" if known else "unknown"
        return text, "arguments-swapped" if factors == {"P": 1} else name
    if a == 1 and b in (0, -1):
        omitted = "lacks the row term D: it is P dP", "delta-omitted"
        return omitted if b == 0 else ("has D with the wrong sign", ANOTHER)
    return text, ANOTHER if a == 1 else "constant-factor"


def _with_terms(factors: dict[str, float], c: Context) -> Array:
    terms = [x * TERMS[name](c.P, c.dP, c.D[..., None]) for name, x in factors.items()]
    return of_terms(c, np.sum(terms, axis=0))


def _other_heads(part: Part) -> Iterator[Change]:
    count = part.places.question.num_heads_kv
    shape, due = (part.places.question.num_heads_q,), part.slopes.dS
    if count == 1:
        return
    off = [part.of(partial(_with_heads, np.full(shape, head))) - due for head in range(count)]
    heads = np.array([np.abs(x * part.known).sum(axis=(1, 2)) for x in off]).argmin(axis=0)
    text = f"takes dP of query head h with v of head {of_heads(heads)}"
    yield Change([text], "gqa-head-map", partial(_with_heads, heads), whole=True)


def _with_heads(heads: Array, c: Context) -> Array:
    dP = c.dO @ taken("v", heads, None, c).mT
    return of_terms(c, c.P * (dP - c.D[..., None]))


def _columns(part: Part) -> Iterator[Change]:
    """dP and D of some columns alone."""
    (c, at), slopes = part.main, part.slopes
    inside = np.zeros_like(part.known)
    inside[at] = True
    h, i, j = np.nonzero(inside & part.known)
    width = c.dO.shape[2]
    step = max(1, len(h) // (SAMPLED * width))
    h, i, j = (x[::step] for x in (h, i, j))
    of = [c.dO[h, i] * c.V[h, j], -c.dO[h, i] * c.O[h, i]]
    due = slopes.dS[h, i, j] / (part.P * slopes.slope)[h, i, j]
    found = np.linalg.lstsq(np.concatenate(of, axis=1), due, rcond=1e-9)[0]
    factors = np.rint(found).reshape(2, width)
    if np.abs(found - factors.ravel()).max(initial=0.0) > 0.2 or (factors == 1).all():
        return
    products = zip(("dP = dout . v", "D = dout . out"), factors, strict=True)
    told = [f"{name} {of_columns(x)[0]}" for name, x in products if (x != 1).any()]
    name = "head-dim-tail" if (factors[0] != 1).any() else ANOTHER
    text = f"is made of other columns: {'; '.join(told)}"
    yield Change([text], name, partial(_of_columns, factors), whole=True)


def _of_columns(factors: Array, c: Context) -> Array:
    D = (c.dO * c.O * factors[1]).sum(axis=-1) - c.dL
    dP = times(c.dO, (c.V * factors[0]).mT)
    return of_terms(c, c.P * (dP - D[..., None]))


# ---- another D --------------------------------------------------------------------------------


def _row_terms(part: Part, second: Callable[[], Part | None]) -> Iterator[Change]:
    """Another D, in all pairs or, where a rule says so, in some and the right one elsewhere."""
    (c, at), known = part.main, part.known[part.main[1]]
    some, own = [], _is_D(part, at, part.slopes.D)
    few = bool(known.any()) and own.mean(where=known) < 1 - MOST_PAIRS
    for text, name, D in _others(part):
        held = _is_D(part, at, by_pair(D(c), part.P.shape))
        if known.any() and held.mean(where=known) > MOST_PAIRS:
            yield Change([text], name, partial(with_delta, D), whole=True)
        elif not few and (own | held | ~known).all():
            some.append((text, name, D))
    there = second() if some else None
    for text, name, D in some if there is not None else ():
        rule = rule_of(*(_shown(of, D) for of in (part, there) if of is not None))
        if rule is not None:
            of_rule = partial(with_delta, partial(_where, rule, D))
            yield Change([f"{text} where {rule}"], name, of_rule, whole=True)


def _others(part: Part) -> Iterator[tuple[str, str, Of]]:
    """None; D of other rows or heads, of another out or dout; other sums of a row, or of a tile."""
    yield "has no D", "delta-omitted", lambda c: 0.0 * c.D
    q, (c, at), T = part.places.question, part.main, part.row_term
    for by in maps.families(q, True):
        yield f"takes D of {by.words}", MISPLACED, partial(_moved, "delta", by)
    for name in ("out", "dout"):
        for by in (*maps.heads(q), *maps.sequences(q), *maps.rows(q)):
            text = f"has D = dout . out with {name} of {by.words}"
            yield text, ANOTHER, partial(_moved, name, by)
    there, size = np.isfinite(T[at]), size_of(part)
    basis = {name: by_pair(of(c), T.shape)[at][there] / size for name, of in ROW_SUMS.items()}
    for factors in sums_of(basis, T[at][there] / size, 1):
        yield f"has {sum_in_words(factors)} in place of D", ANOTHER, partial(_summed, factors)
    for tile in TILES:
        for text, over in OVER.items():
            said = f"takes D over {text.format(tile)} alone: the sum of P dP there"
            yield said, "partial-merge", partial(_of_tile, tile, over)


def size_of(part: Part) -> float:
    """What a row term may be off by."""
    return part.noise * float(np.nanmax(np.abs(part.row_term), initial=1.0))


def by_pair(D: Array, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(D[..., None] if D.ndim == 2 else D, shape)


def _is_D(part: Part, at: tuple[Array, ...], D: Array) -> Array:
    """Where D is the row term, of the pairs of a call."""
    with np.errstate(invalid="ignore"):
        off = np.abs(part.row_term[at] - np.broadcast_to(D, part.P.shape)[at])
        return np.asarray(off < size_of(part))


def with_delta(D: Of, c: Context) -> Array:
    """dY of another D, (heads, n) or (heads, n, m)."""
    return of_terms(c, c.P * (c.dP - by_pair(D(c), c.P.shape)))


def _moved(name: str, by: maps.Map, c: Context) -> Array:
    """D with an array that is read by a map."""
    q, given = c.question, c.given
    whole = {"delta": deltas(q, given), "out": given[0], "dout": q.dout}[name]
    x = of_view(c, name, by.moved(maps.geometry(q, name), np.asarray(whole)))
    if name == "delta":
        return x
    return np.asarray((x * (c.dO if name == "out" else c.O)).sum(axis=-1) - c.dL)


def _summed(factors: dict[str, float], c: Context) -> Array:
    return np.asarray(sum(x * ROW_SUMS[name](c) for name, x in factors.items()))


def _of_tile(tile: int, over: Callable[[Array, Array], Array], c: Context) -> Array:
    keys = np.maximum(c.view.keys, 0)
    b, number = c.question.sequence_of("k")[keys], c.question.place_of("k")[keys] // tile
    summed = over(number[:, None], number) & (b[:, None] == b)
    return np.asarray(c.P * c.dP @ summed.T.astype(np.float64))


def _shown(part: Part, D: Of) -> Shown:
    """Pairs that tell whether they have D or its own, and those that have."""
    T, size = part.row_term, size_of(part)
    other = part.of(lambda c: by_pair(D(c), c.P.shape))
    with np.errstate(invalid="ignore"):
        telling = part.known & (np.abs(other - part.slopes.D) > 2 * size)
        there = telling & (np.abs(T - other) < size)
    return Shown(part.places, telling.any(axis=0), there.any(axis=0))


def _where(rule: Rule, D: Of, c: Context) -> Array:
    held = rule.holds(places_of(c.question))[np.ix_(c.view.rows, np.maximum(c.view.keys, 0))]
    return np.where(held, by_pair(D(c), c.P.shape), c.D[..., None])


def _another_term(part: Part) -> Change | None:
    """Whether what stands in the place of D is a number of every row, in every call."""
    for _, at in part.slopes.asked:
        T = part.row_term[at]
        low, high = (np.where(np.isfinite(T), T, x) for x in (np.inf, -np.inf))
        if (high.max(axis=-1) - low.min(axis=-1) > size_of(part)).any():
            return None
    text = "has another row term than D = dout . out"
    return Change([text], ANOTHER) if part.known.any() else None


# ---- each value -------------------------------------------------------------------------------


def _values(part: Part) -> Iterator[Change]:
    kept, gone = part.there & ~part.gone, part.gone
    for name, value in VALUES.items():
        x = part.of(value)
        for sign, word in ((1, "<"), (-1, ">")):
            low, high = (sign * x[gone]).max(), (sign * x[kept]).min(initial=np.inf)
            if low < high:
                at = sign * _between(float(low), float(high))
                dY = partial(_without, value, sign, at)
                text = f"is 0 where {name} {word} {at:.4g}"
                yield Change([text], "pairs-dropped", dY, whole=True)


def _between(low: float, high: float) -> float:
    """The plainest number between two."""
    if low <= 0 <= high:
        return 0.0
    middle = (low + min(high, low + abs(low))) / 2
    plain = (float(f"{middle:.{digits}g}") for digits in range(1, 8))
    return next((x for x in plain if low < x <= high), middle)


def _without(value: Of, sign: int, at: float, c: Context) -> Array:
    return np.where(sign * value(c) < sign * at, 0.0, c.dY)
