"""What a backward pass has in place of dS = P o (dP - D): products, other row terms, another
function of each value. A form is a step of the engine, and tried on all that was read.

Long by the forms.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, pairwise

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.reading import of_view
from rawattn.check.diagnose.engine.attention import TILES, Context, deltas
from rawattn.check.diagnose.engine.steps import times
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.rules import Rule, Shown, rule_of
from rawattn.check.diagnose.read.maps import of_heads, of_other_heads
from rawattn.check.diagnose.read.part import Part

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
    "S": lambda c: c.cap[0] * c.G,
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
    found = _first(part, _lacking, _sums, _other_heads, _row_terms, _columns, _tiles, _rounded)
    return found or _in_some_pairs(part, second) or _another_term(part)


def dropped(part: Part) -> Change | None:
    """Pairs that are dropped by the sign or the size of something, where all others are right."""
    return _first(part, _values)


def _first(part: Part, *makes: Callable[[Part], Iterator[Change]]) -> Change | None:
    tried = (change for make in makes for change in make(part))
    return next((x for x in tried if x.dY is not None and part.fits(part.of(x.dY))), None)


def of_terms(c: Context, Z: Array) -> Array:
    """dY of what stands in the place of dS."""
    return np.asarray(np.where(c.W > 0, c.G * c.cap[1] * Z, 0.0))


def with_delta(D: Of, c: Context) -> Array:
    """dY of another D, (heads, n) or (heads, n, m)."""
    other = D(c)
    return of_terms(c, c.P * (c.dP - (other[..., None] if other.ndim == 2 else other)))


# ---- products ---------------------------------------------------------------------------------


def _lacking(part: Part) -> Iterator[Change]:
    sparse = part.places.question.block_scale is not None
    text = "lacks block_scale" if sparse else "lacks the derivative of the softcap"
    name = "sparse-gate-ignored" if sparse else "softcap-slope-omitted"
    yield Change([text], name, lambda c: c.dS, whole=True)


def _sums(part: Part) -> Iterator[Change]:
    """A sum of few of TERMS, with any factors."""
    slopes, there = part.slopes, part.known
    size = np.where(there, part.P * np.abs(slopes.dP - slopes.D), 1.0)[there]
    of = [(slopes.slope * f(part.P, slopes.dP, slopes.D))[there] / size for f in TERMS.values()]
    columns, due = np.stack(of, axis=1), slopes.dS[there] / size
    names = [*TERMS]
    products, with_due = columns.T @ columns, columns.T @ due
    for count in range(1, MOST + 1):
        for some in map(list, combinations(range(len(TERMS)), count)):
            found = np.linalg.lstsq(products[np.ix_(some, some)], with_due[some], rcond=1e-12)[0]
            if np.mean((columns[:, some] @ found - due) ** 2) > part.noise**2:
                continue
            factors = {
                names[place]: float(np.rint(x) if near else x)
                for place, x, near in zip(
                    some, found, np.abs(found - np.rint(found)) < part.noise, strict=True
                )
            }
            text, name = _of_terms(factors)
            yield Change([text], name, partial(_with_terms, factors), whole=True)


def _of_terms(factors: dict[str, float]) -> tuple[str, str]:
    """What dS of these terms is called, and its class."""
    a, b = factors.get("P dP"), -factors.get("P D", 0.0)
    signed = [
        f"{x:+.3g} {term}".replace("+1 ", "+").replace("-1 ", "-") for term, x in factors.items()
    ]
    form = " ".join(f"{text[0]} {text[1:]}" for text in signed).removeprefix("+ ")
    if not factors.keys() <= {"P dP", "P D"}:
        known = factors.keys() <= {"P dP", "P D", "dP", "D"}
        name = "softmax-backward-without-p" if known else "unknown"
        name = "arguments-swapped" if factors == {"P": 1} else name
        return f"is {form}, not P dP - P D", name
    if a == 1 and b in (0, -1):
        text, name = "lacks the row term D: it is P dP", "delta-omitted"
        return (text, name) if b == 0 else ("has D with the wrong sign", ANOTHER)
    return f"is {form}, not P dP - P D", ANOTHER if a == 1 else "constant-factor"


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
    return of_terms(c, c.P * (of_other_heads("v", heads).dP(c) - c.D[..., None]))


# ---- another D --------------------------------------------------------------------------------


def _near(part: Part) -> Callable[[Of], bool]:
    """Whether a row term is that of about all pairs of one call, which costs little to ask."""
    (c, at), T = part.main, part.row_term
    there = np.isfinite(T[at])
    due = T[at][there]
    size = part.noise * np.abs(due).max(initial=1.0)

    def near(D: Of) -> bool:
        x = D(c)
        found = np.broadcast_to(x[..., None] if x.ndim == 2 else x, T.shape)[at][there]
        return bool((np.abs(found - due) < size).mean() > MOST_PAIRS)

    return near


def _row_terms(part: Part) -> Iterator[Change]:
    """D of other rows or heads, of another out or dout; other sums of a row."""
    near = _near(part)
    for text, name, D in _row_sums(part):
        if near(D):
            yield Change([text], name, partial(with_delta, D), whole=True)
    (c, at), T = part.main, part.row_term
    there = np.isfinite(T[at])
    for text, sums in ROW_SUMS.items():
        x, due = np.broadcast_to(sums(c)[..., None], T.shape)[at][there], T[at][there]
        a = float((x * due).sum() / max((x * x).sum(), 1e-30))
        a = float(np.rint(a)) if abs(a - np.rint(a)) < part.noise else a
        D = partial(_times, a, sums)
        said = f"has {a:.4g} {text} in place of D"
        yield Change([said], ANOTHER, partial(with_delta, D), whole=True)


def _times(a: float, of: Of, c: Context) -> Array:
    return np.asarray(a * of(c))


def _row_sums(part: Part) -> Iterator[tuple[str, str, Of]]:
    q = part.places.question
    for by in maps.families(q, True):
        yield f"takes D of {by.words}", MISPLACED, partial(_moved, "delta", by)
    for name in ("out", "dout"):
        for by in (*maps.heads(q), *maps.sequences(q), *maps.rows(q)):
            text = f"has D = dout . out with {name} of {by.words}"
            yield text, ANOTHER, partial(_moved, name, by)


def _moved(name: str, by: maps.Map, c: Context) -> Array:
    """D with an array that is read by a map."""
    q, given = c.question, c.given
    whole = {"delta": deltas(q, given), "out": given[0], "dout": q.dout}[name]
    x = of_view(c, name, by.moved(maps.geometry(q, name), np.asarray(whole)))
    if name == "delta":
        return x
    return np.asarray((x * (c.dO if name == "out" else c.O)).sum(axis=-1) - c.dL)


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
    told = [
        f"{name} sums columns {_runs(x)} of {width}"
        for name, x in zip(("dP", "D"), factors, strict=True)
        if (x != 1).any()
    ]
    name = "head-dim-tail" if (factors[0] != 1).any() else ANOTHER
    text = f"is made of few columns: {', '.join(told)}"
    yield Change([text], name, partial(_of_columns, factors), whole=True)


def _runs(x: Array) -> str:
    """The places of what is not 0, as runs; with factors that are not 1."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], x, [0]])))
    told = [
        f"{a} to {b - 1}" + (f" ({x[a]:g} times)" if x[a] != 1 else "")
        for a, b in pairwise(edges)
        if x[a]
    ]
    return ", ".join(told[:6]) + ", ..." * (len(told) > 6) or "none"


def _of_columns(factors: Array, c: Context) -> Array:
    V = np.swapaxes(c.V * factors[0], -1, -2)
    D = (c.dO * c.O * factors[1]).sum(axis=-1) - c.dL
    dP = c.dO @ V if V.ndim == 3 else times(c.dO, V)
    return of_terms(c, c.P * (dP - D[..., None]))


def _tiles(part: Part) -> Iterator[Change]:
    """D of the keys of one tile, or of some of them."""
    near = _near(part)
    for tile in TILES:
        for text, over in OVER.items():
            D = partial(_of_tile, tile, over)
            if near(D):
                text = f"takes D over {text.format(tile)} alone: the sum of P dP there"
                yield Change([text], "partial-merge", partial(with_delta, D), whole=True)


def _of_tile(tile: int, over: Callable[[Array, Array], Array], c: Context) -> Array:
    keys = np.maximum(c.view.keys, 0)
    b, number = c.question.sequence_of("k")[keys], c.question.place_of("k")[keys] // tile
    summed = over(number[:, None], number) & (b[:, None] == b)
    return np.asarray(c.P * c.dP @ summed.T.astype(np.float64))


def _in_some_pairs(part: Part, second: Callable[[], Part | None]) -> Change | None:
    """D of other rows, or none, where a rule says so, and the right one elsewhere."""
    T, D = part.row_term, part.slopes.D
    size = part.noise * np.nanmax(np.abs(T), initial=1.0)
    with np.errstate(invalid="ignore"):
        own = np.abs(T - D) < size
    if not part.known.any() or own[part.known].mean() < 0.05:
        return None
    none: tuple[str, str, Of] = "has no D", "delta-omitted", partial(_times, 0.0, lambda c: c.D)
    for text, name, D_of in (none, *_row_sums(part)):
        c, at = part.main
        other = np.broadcast_to(D_of(c)[..., None], T.shape)[at]
        if (own[at] | ~part.known[at] | (np.abs(T[at] - other) < size)).all():
            shown = [_shown(of, D_of) for of in (part, second()) if of is not None]
            rule = rule_of(*shown) if len(shown) == 2 else None
            if rule is not None:
                dY = partial(with_delta, partial(_where, rule, D_of))
                if part.fits(part.of(dY)):
                    return Change([f"{text} where {rule}"], name, dY, whole=True)
    return None


def _another_term(part: Part) -> Change | None:
    """Whether what stands in the place of D is a number of every row, in every call."""
    T = part.row_term
    size = part.noise * np.nanmax(np.abs(T), initial=1.0)
    for _, at in part.slopes.asked:
        there = np.isfinite(T[at])
        low, high = (np.where(there, T[at], x) for x in (np.inf, -np.inf))
        if (high.max(axis=-1) - low.min(axis=-1) > size).any():
            return None
    text = "has another row term than D = dout . out"
    return Change([text], ANOTHER) if part.known.any() else None


def _shown(part: Part, D: Of) -> Shown:
    """Pairs that tell whether they have D or its own, and those that have."""
    T = part.row_term
    size = part.noise * float(np.nanmax(np.abs(T), initial=1.0))
    other = part.of(lambda c: D(c)[..., None] + 0 * c.P)
    with np.errstate(invalid="ignore"):
        telling = part.known & (np.abs(other - part.slopes.D) > 2 * size)
        there = telling & (np.abs(T - other) < size)
    return Shown(part.places, telling.any(axis=0), there.any(axis=0))


def _where(rule: Rule, D: Of, c: Context) -> Array:
    held = rule.holds(Places(c.question))[np.ix_(c.view.rows, np.maximum(c.view.keys, 0))]
    return np.where(held, D(c)[..., None], c.D[..., None])


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


def _rounded(part: Part) -> Iterator[Change]:
    """Multiples of a step, numbers of few bits, or what is cut at both ends."""
    there = part.P > 1e-4
    found = part.slopes.dS[there]
    sizes = np.unique(np.abs(found[found != 0]))
    if len(found) < 64 or len(sizes) == 0:
        return
    low, high = float(found.min()), float(found.max())
    text, narrow = f"is cut at {low:.4g} and {high:.4g}", "narrow-intermediate"
    yield Change([text], narrow, lambda c: np.clip(c.dY, low, high), whole=True)
    step = float(sizes[0])
    off = np.abs(sizes / step - np.rint(sizes / step))
    if (off < 1e-2).all():
        step = float(np.mean(sizes / np.rint(sizes / step)))
        step = _between(step * (1 - 1e-5), step * (1 + 1e-5))
        for word, to in (("rounded", np.rint), ("cut down", np.trunc), ("rounded down", np.floor)):
            text = f"is {word} to multiples of {step:.6g}"
            yield Change([text], narrow, partial(_in_steps, to, step), whole=True)
    for bits in range(2, 7):
        x = np.ldexp(np.frexp(sizes)[0], bits)
        if (np.abs(x - np.rint(x)) < 1e-3).all():
            text = f"is rounded to {bits} bits"
            yield Change([text], narrow, partial(_in_bits, bits), whole=True)
            return


def _in_steps(to: Callable[[Array], Array], step: float, c: Context) -> Array:
    return np.asarray(step * to(c.dY / step))


def _in_bits(bits: int, c: Context) -> Array:
    mantissa, exponent = np.frexp(c.dY)
    return np.asarray(np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits))
