"""dS of one of the two gradients as it was read, beside what it must be; and what a backward pass
has in place of dS = P o (dP - D), by steps that give all that was read."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import cached_property, partial
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import TILES, Context, changed, deltas, times
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.places import Array, Places, Right, places_of
from rawattn.check.diagnose.read import fields
from rawattn.check.diagnose.read.fields import Field, backward_of, rows_of, sum_in_words
from rawattn.check.diagnose.read.probe import TINY, Backward
from rawattn.check.diagnose.read.said import Said, listed_scores
from rawattn.reference.dense import dead_to_inf

Of = Callable[[Context], Array]
ANOTHER = "delta-of-another-out"
MOST, SAMPLED = 3, 40  # terms of a sum; pairs for every column
ALIKE = 6  # forms that what was read may have
MOST_PAIRS = 0.95
CLEAR = 0.2  # of the typical dP - D, at least, where dS tells anything
TERMS: dict[str, Callable[[Array, Array, Array], Array]] = {  # of P, dP and D
    "P dP": lambda P, dP, D: P * dP,
    "P D": lambda P, dP, D: P * D,
    "dP": lambda P, dP, D: dP,
    "D": lambda P, dP, D: D + 0 * P,
    "P^2 dP": lambda P, dP, D: P * P * dP,
    "P": lambda P, dP, D: P,
}
Which = Callable[[Array, Array, Array, int], Array]  # by a key, others, their count, and a tile
OVER: dict[str, Which] = {
    "the last tile of {} keys": lambda j, of, m, t: of // t == (m - 1) // t + 0 * j,
    "the tile of {} keys at hand": lambda j, of, m, t: of // t == j // t,
    "whole tiles of {} keys": lambda j, of, m, t: of < m // t * t + 0 * j,
    "the tiles of {} keys up to that at hand": lambda j, of, m, t: of // t <= j // t,
    "the tiles of {} keys from that at hand on": lambda j, of, m, t: of // t >= j // t,
}
POWERS = {"({} without the softcap's slope)": 0, "({} with the softcap's slope twice)": 2}
SLOPES: dict[str, Callable[[Array], Array]] = {  # of t = tanh, the capped score over the cap
    **{"": np.ones_like, "t": lambda t: t, "t^2": lambda t: t**2, "t^4": lambda t: t**4},
    "tanh(t)^2": lambda t: np.tanh(t) ** 2,
    "artanh(t)^2": lambda t: np.arctanh(np.clip(t, -1 + 1e-9, 1 - 1e-9)) ** 2,
}


class Part:
    """dS as the gradient ``name`` has it, beside what it must be with what is ``said`` of P, or the
    right one; all (num_heads_q, total_q, total_k). there: where it tells something. gone, wrongly:
    where it is 0 by mistake, or is not."""

    def __init__(self, said: Said | None, read: Backward, name: str) -> None:
        self.places, self.noise = read.weights.places, 3 * read.weights.noise
        self.slopes = slopes = copy(read.slopes[name])
        self.seen = self.places.rights if said is None else said.support.at(self.places)
        self.said, self.name = said, name
        if said is not None and (said.listed is not None or "cap" in said.steps):
            slopes.slope = self.of(lambda c: c.slope + 0 * c.S)
        self.P = self.of(lambda c: c.P)
        Z = slopes.slope * (slopes.dP - slopes.D)
        self.there = (self.P > 1e-4) & (np.abs(Z) > CLEAR * (np.sqrt(np.mean(Z**2)) or 1.0))
        self.f = np.where(self.there, slopes.dS / np.where(self.there, self.P * Z, 1.0), 1.0)
        self.gone = self.there & (np.abs(self.f) < 1e-3)
        self.wrongly = ~self.seen & (np.abs(slopes.dS) > TINY) & np.isfinite(slopes.L)
        self.known = self.there & ~self.gone
        # what stands in the place of D, of every pair, NaN where it is not known; the noise of one
        by = np.where(self.known, self.P * slopes.slope, 1.0)
        self.row_term = np.where(self.known, slopes.dP - slopes.dS / by, np.nan)
        self.of_row_term = self.noise * float(np.nanmax(np.abs(self.row_term), initial=1.0))

    def context(self, question: Question) -> Context:
        """Of a call, with what is known of P."""
        places, said = places_of(question), self.said
        c = backward_of(Right(places))
        c.W, steps = self.seen.astype(np.float64), {} if said is None else said.steps
        S = np.where(self.seen, c.S if said is None else said.scores(places, c.S), -np.inf)
        if "cap" in steps:
            c.cap = steps["cap"](c)
            c.slope = c.G * c.cap[1]
        with np.errstate(over="ignore"):
            by_right_lse = np.exp(S - dead_to_inf(np, c.L[..., None]))
        c.P = steps["bP"](changed(c, S=S)) if "bP" in steps else by_right_lse
        if said is not None and said.listed is not None:
            c.G = c.slope = listed_scores(said.listed, places, c.S)[1]
        c.dS = c.P * (c.dP - c.D[..., None])
        c.dY = c.slope * c.dS
        return c

    @cached_property
    def main(self) -> tuple[Context, Any]:
        """The call that tells of the most pairs, and where in dS it is."""
        question, at = max(self.slopes.asked, key=lambda one: np.count_nonzero(self.known[one[1]]))
        return self.context(question), at

    def of(self, dY: Callable[[Context], Array]) -> Array:
        """What a step gives, of all calls."""
        found = np.zeros_like(self.slopes.dS)
        for question, at in self.slopes.asked:
            found[at] = dY(self.context(question))[at]
        return found

    def field(self, x: Array) -> Field:
        return Field(x, self.known, False, self.noise)

    def fits(self, due: Array) -> bool:
        size = np.where(self.known, self.P * np.abs(self.slopes.dP - self.slopes.D), 1.0)
        return self.field(np.where(self.known, self.slopes.dS - due, 0.0) / size).zero

    @property
    def pairs(self) -> tuple[Places, Array, Array]:
        """Which pairs dS has, beside those of P, as ``support_of`` takes it."""
        x, right = self.places, self.places.rights
        known = np.where(right, self.there, ~self.seen & x.own)
        return x, (right & ~self.gone) | (self.wrongly & ~right), known


class Change(NamedTuple):
    """What is wrong with dS, in words, and its class. dY: what stands in the place of c.dY, None
    where no step tells. masked: it is right, unlike P. times: by head, a factor. whole: this is all
    of dS, so that pairs where it happens to be 0 are not missed."""

    text: list[str]
    name: str = ""
    dY: Of | None = None
    masked: bool = False
    times: Array | None = None
    whole: bool = False


def form_of(part: Part, second: Callable[[], Part]) -> Change | None:
    """The plainest form that gives all that was read, and what is read on other lengths too."""
    forms = (change for make in (_sums, _columns, _row_terms, _slopes) for change in make(part))
    found = [*islice((x for x in forms if x.dY is not None and part.fits(part.of(x.dY))), ALIKE)]
    if len(found) > 1:
        with contextlib.suppress(NotImplementedError, ValueError):  # nobody is known to see there
            other = second()
            found = [x for x in found if x.dY and other.fits(other.of(x.dY))] or found
    calls = (part.row_term[at] for _, at in part.slopes.asked)
    of_rows = all(rows_of(x, part.of_row_term) is not None for x in calls)
    another = Change(["has another row term than D = dout . out"], ANOTHER) if of_rows else None
    return found[0] if found else another


def _of_terms(factors: Mapping[str, float], c: Context) -> Array:
    """dY of a sum of these."""
    terms = _terms(c.P, c.dP, c.D[..., None], c.G * c.cap[1], c.question.softcap is not None)
    return np.where(c.W > 0, np.sum([x * terms[n] for n, x in factors.items()], axis=0), 0.0)


def _terms(P: Array, dP: Array, D: Array, slope: Array, capped: bool) -> dict[str, Array]:
    """TERMS with the slope as it must be; of a softcap P dP and P D with other powers of it too."""
    found = {name: slope * of(P, dP, D) for name, of in TERMS.items()}
    for (how, power), name in product(POWERS.items(), ("P dP", "P D") if capped else ()):
        found[how.format(name)] = slope**power * TERMS[name](P, dP, D)
    return found


def _sums(part: Part) -> Iterator[Change]:
    """A sum of few of TERMS, with any factors."""
    slopes, there = part.slopes, part.known
    size = np.where(there, part.P * np.abs(slopes.dP - slopes.D), 1.0)[there] * part.noise
    capped = part.places.question.softcap is not None
    found = _terms(part.P, slopes.dP, slopes.D, slopes.slope, capped)
    basis = {name: x[there] / size for name, x in found.items()}
    for factors in fields.sums_of(basis, slopes.dS[there] / size, MOST):
        text, name = _in_words(factors)
        bent = ["slope" in term for term in factors]
        if all(bent) or (any(bent) and any(x != np.rint(x) for x in factors.values())):
            continue  # _slopes tells it
        yield Change([text], name, partial(_of_terms, factors), whole=True)


def _in_words(factors: Mapping[str, float]) -> tuple[str, str]:
    """What dS of these terms is called, and its class."""
    if factors == {"P dP": 1}:
        return "lacks the row term D: it is P dP", "delta-omitted"
    name = "arguments-swapped" if factors == {"P": 1} else "unknown"
    if any("slope" in term for term in factors):
        return f"is {sum_in_words(factors)}, not slope (P dP - P D)", "softcap-slope-omitted"
    if factors.keys() == {"P dP", "P D"}:
        name = ANOTHER if factors["P dP"] == 1 else "constant-factor"
    elif factors.keys() <= {"P dP", "P D", "dP", "D"}:
        name = "softmax-backward-without-p"
    return f"is {sum_in_words(factors)}, not P dP - P D", name


def _columns(part: Part) -> Iterator[Change]:
    """dP and D of some columns alone."""
    (c, at), slopes = part.main, part.slopes
    inside = np.zeros_like(part.known)
    inside[at] = True
    h, i, j = np.nonzero(inside & part.known)
    width = c.dO.shape[2]
    h, i, j = (x[:: max(1, len(h) // (SAMPLED * width))] for x in (h, i, j))
    of = [c.dO[h, i] * c.V[h, j], -c.dO[h, i] * c.O[h, i]]
    basis = (part.P * slopes.slope)[h, i, j][:, None] * np.concatenate(of, axis=1)
    found = np.linalg.lstsq(basis, slopes.dS[h, i, j], rcond=1e-9)[0]
    factors = np.rint(found).reshape(2, width)
    if np.abs(found - factors.ravel()).max(initial=0.0) > 0.2 or (factors == 1).all():
        return
    products = zip(("dP = dout . v", "D = dout . out"), factors, strict=True)
    told = [f"{name} {fields.of_columns(x)[0]}" for name, x in products if (x != 1).any()]
    name = "head-dim-tail" if (factors[0] != 1).any() else ANOTHER
    text = f"is made of other columns: {'; '.join(told)}"
    yield Change([text], name, partial(_of_columns, factors), whole=True)


def _of_columns(factors: Array, c: Context) -> Array:
    D = (c.dO * c.O * factors[1]).sum(axis=-1) - c.dL
    return _with_delta(lambda c: D[..., None], changed(c, dP=times(c.dO, (c.V * factors[0]).mT)))


def _row_terms(part: Part) -> Iterator[Change]:
    """D of other rows or heads, or of some keys alone."""
    (c, at), known = part.main, part.known[part.main[1]]
    for text, name, D in _others() if known.any() else ():
        with np.errstate(invalid="ignore"):
            due = np.broadcast_to(D(c), part.P.shape)
            held = np.abs(part.row_term[at] - due[at]) < part.of_row_term
        if held.mean(where=known) > MOST_PAIRS:
            yield Change([f"takes D {text}"], name, partial(_with_delta, D), whole=True)


def _others() -> Iterator[tuple[str, str, Of]]:
    for (words, of), tile in product(OVER.items(), TILES):
        yield f"over {words.format(tile)} alone", ANOTHER, partial(_over, of, tile)
    for tile, own in product(TILES, TILES):
        text = f"of row j // {tile} * {tile} + i % {own}, from where the tile of keys begins"
        yield text, "statistics-misplaced", partial(_at_keys, tile, own, False)
    for tile in TILES:
        text = f"of row i // {tile} * {tile} + j % {tile}, along the other axis of a tile"
        yield text, "statistics-misplaced", partial(_at_keys, tile, tile, True)


def _over(which: Which, tile: int, c: Context) -> Array:
    """The sum of P dP over some of the keys of a sequence, for every key."""
    keys = np.maximum(c.view.keys, 0)
    b, j = c.question.sequence_of("k")[keys], c.question.place_of("k")[keys]
    same, count = b[:, None] == b, np.array([*c.question.lengths_k, 0])[b]
    return np.asarray(c.P * c.dP @ (same & which(j[:, None], j, count, tile)).mT)


def _at_keys(tile: int, own: int, across: bool, c: Context) -> Array:
    """D of tiles of ``own`` queries from the first key of a tile on, or of a tile's queries by the
    place of the key; 0 where the sequence ends."""
    q, j = c.question, c.question.place_of("k")[np.maximum(c.view.keys, 0)]
    rows, sequence, i = c.view.rows[:, None], q.sequence_of("q"), q.place_of("q")[c.view.rows]
    first, place = (i[:, None], j) if across else (j, i[:, None])
    other = rows - i[:, None] + first // tile * tile + place % own
    inside, other = other < len(q.q), np.minimum(other, len(q.q) - 1)
    D = deltas(q, c.given)[c.view.heads][:, other]
    return np.where(inside & (sequence[other] == sequence[rows]), D, 0.0)


def _with_delta(D: Of, c: Context) -> Array:
    return np.asarray(np.where(c.W > 0, c.G * c.cap[1] * c.P * (c.dP - D(c)), 0.0))


by_own_sums = partial(_with_delta, lambda c: ((c.P * c.dP).sum(axis=-1) - c.dL)[..., None])


def _slopes(part: Part) -> Iterator[Change]:
    """Another derivative of the softcap than 1 - t^2."""
    cap, slopes, there = part.places.question.softcap, part.slopes, part.known
    if cap is None:
        return
    due = (part.f * slopes.slope)[there]
    unit = part.noise * np.maximum(np.abs(due), 1e-2)
    basis = {name: of(slopes.S[there] / cap) / unit for name, of in SLOPES.items()}
    found = fields.sums_of(basis, due / unit, MOST)
    for factors in sorted(found, key=lambda of: any(x != np.rint(x) for x in of.values())):
        text = f"has the slope {sum_in_words(factors)} of the softcap, not 1 - t^2, with t its tanh"
        yield Change([text], "softcap-slope-omitted", partial(_with_slope, factors), whole=True)


def _with_slope(factors: Mapping[str, float], c: Context) -> Array:
    t = c.cap[0] / c.question.softcap
    return np.asarray(c.G * sum(x * SLOPES[name](t) for name, x in factors.items()) * c.dS)
