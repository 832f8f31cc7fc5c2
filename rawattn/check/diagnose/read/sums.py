"""What weights are divided by, lse, and their head of v. Long by what may be in a row's sum."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import first_order
from rawattn.check.diagnose.engine.attention import TILES
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, changed
from rawattn.check.diagnose.evidence.places import Array, Places, Right, log_sum, places_of
from rawattn.check.diagnose.evidence.rules import Rule, Span
from rawattn.check.diagnose.read import fields
from rawattn.check.diagnose.read.contexts import of_view
from rawattn.check.diagnose.read.fields import map_of, moved, sum_in_words, sums_of
from rawattn.check.diagnose.read.probe import Weights
from rawattn.check.diagnose.read.said import Said
from rawattn.check.diagnose.read.terms import of_other_heads
from rawattn.reference.dense import dead_to_inf

MOST = 3  # of PARTS, in a sum
ROUNDED = 8e-3  # off by less: sums or weights in 16 bits may be
TELLING = 0.1  # noise of the logarithm of what is in a row sum, at most, where it tells something
PARTS: dict[str, Callable[[Array, Array, Array], Array]] = {  # of L, sinks, and the row's maximum
    "the right lse": lambda L, sink, top: L,
    "row_max": lambda L, sink, top: top,
    "row_sum": lambda L, sink, top: np.exp(L - top),
    "": lambda L, sink, top: top**0,
    "sink": lambda L, sink, top: sink + 0 * top,
    "the larger of row_max and sink": lambda L, sink, top: np.maximum(sink, top),
}
NO_SINKS = [*PARTS][:4]
SINK = "sink"
NUMBERS = {"": "{} more than the keys that are seen", SINK: "exp(sink) {} times too often"}
KEYS: dict[str, Callable[[Places], Array]] = {  # that row sums may be over
    "the keys that must be seen": lambda places: places.rights,
    "all keys of the sequence": lambda places: places.own[None],
}


class _Rows:
    """Of what was read of the sums of rows: S and the logarithms of weights (num_heads_q, total_q,
    total_k), of pairs that are seen; rows (num_heads_q, total_q) that tell the logarithm ``total``
    of what their weights are divided by; the noise of one."""

    def __init__(self, said: Said, read: Weights) -> None:
        self.places = read.places
        self.S, self.seen = said.scores(read.places, read.right.S), read.seen
        self.logs, q = read.logs, read.places.question
        self.sinks = None if q.sinks is None else _sinks(q)
        right = read.places.rights & self.seen
        count = np.maximum(right.sum(axis=-1), 1)
        self.total = np.where(right, self.S - self.logs, 0.0).sum(axis=-1) / count
        self.noise, self.known = 3 * read.noise, right.any(axis=-1) & read.alive
        self.top = np.where(read.places.rights, self.S, -np.inf).max(axis=-1, initial=-np.inf)

    def fit(self, due: Array, times: int = 1) -> bool:
        """Whether these are the logarithms of the sums."""
        return bool(np.abs(self.total - due)[self.known].max(initial=0) < times * self.noise)


def _sinks(question: Question) -> Array:
    return np.asarray(question.sinks, dtype=np.float64)[:, None]


def say_passed(said: Said) -> None:
    """Whether weights are exp(score - lse), with the lse that was given."""
    x, names, due = _Rows(said, said.weights), [*said.names], said.weights.right.lse
    x.known &= np.isfinite(due)
    if x.fit(due, 8):
        return
    _say_mass(said, x, due)
    if "softmax" not in said.steps:
        said.names[:] = names  # it may be the lse that was read
    else:
        own = said.steps.pop("softmax")
        said.steps["bP"] = lambda c: own(c)[1]


def say_sums(said: Said, second: Callable[[], Weights]) -> None:
    """What the weights are divided by, and lse; ``second``: the same on other lengths."""
    x = _Rows(said, said.weights)
    wrongly = x.seen & ~x.places.rights & x.known[..., None]
    level = x.logs + x.total[..., None]  # of which weights are exp
    if np.abs(level - x.S)[wrongly].max(initial=0.0) >= 8 * x.noise:
        _say_filled(said, level[wrongly], x.noise)
        x.S = np.where(wrongly, level, x.S)
    due = log_sum(np.where(x.seen, x.S, -np.inf))
    with_sinks = due if x.sinks is None else np.logaddexp(due, x.sinks)
    if x.fit(with_sinks):
        said.right.append("row sums")
    elif x.sinks is not None and x.fit(due):
        said.say("the sinks are not in the row sums", "sinks-dropped")
    elif not (_say_keys(said, x, second) if x.sinks is None else _say_sink(said, x, x.sinks, due)):
        if x.fit(said.weights.right.lse):
            said.say("the row sums are those of the right scores", "")
            said.steps["softmax"] = partial(_over, lambda c: _of_rows(c, _right_lse(c)))
        else:
            _say_mass(said, x, with_sinks)
    if said.weights.lse is not None:
        _say_lse(said, x, with_sinks)


def _say_filled(said: Said, level: Array, noise: float) -> None:
    """What masked scores are."""
    text = "weights of keys that must not be seen are not those of their scores"
    if np.ptp(level) < 8 * noise:
        x = float(level.mean())
        x = float(np.round(x, 0 if abs(x - np.rint(x)) < noise else 4)) + 0.0
        capped = said.weights.places.question.softcap == -x
        text = f"masked scores are {x:.4g}, not -inf"
        text += " (the softcap is applied to masked scores)" * capped
        said.names[:] = ["mask-fill"]
        said.steps["S"] = partial(_filled, x)
    said.wrong.insert(0, text)


def _filled(number: float, c: Context) -> Array:
    """Scores of keys that are wrongly seen."""
    wrong = ~of_view(c, places_of(c.question).rights) & (c.W > 0)
    return np.asarray(np.where(wrong, number, STEPS["S"](c)))


def _say_lse(said: Said, x: _Rows, with_sinks: Array) -> None:
    """Whether lse is the logarithm of the row sums."""
    lse = np.asarray(said.weights.lse)
    known = x.known & ~(np.isneginf(lse) & (x.total - x.top < x.noise))  # of sums of nothing
    lse, total = lse[known], x.total[known]
    close = partial(np.allclose, lse, rtol=0, atol=8 * x.noise)
    if close(total) or close(with_sinks[known]):
        said.right.append("lse")
        if not close(total) and "softmax" in said.steps:
            own = said.steps["softmax"]
            said.steps["softmax"] = lambda c: (STEPS["softmax"](c)[0], own(c)[1])
        return
    if np.abs(lse - total).max() < ROUNDED:
        said.unread.append("lse is off by less than a hundredth")
    else:
        said.wrong.append("lse is not the logarithm of the row sums")


def _sum_of(factors: dict[str, float], of: str, c: Context) -> Array:
    """The sum of PARTS in place of the lse or the sink of a context."""
    L, top = c.softmax[0] if of == "L" else c.sink, c.S.max(axis=-1, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        found = np.asarray(sum(x * PARTS[name](L, c.sink, top) for name, x in factors.items()))
    return np.where(np.isneginf(L), L, found)


def _say_sink(said: Said, x: _Rows, sinks: Array, due: Array) -> bool:
    """Whether they have exp of a sum of sink and row's maximum; due: logarithms without sinks."""
    more, top = np.exp(x.total) - np.exp(due), x.top
    known = x.known & (more > 0)
    held = np.log(np.where(known, more, 1.0))
    size = np.where(known, x.noise * np.exp(x.total) / np.where(known, more, 1.0) + 1e-9, 1.0)
    names = ("sink", "row_max", "the larger of row_max and sink", "")
    basis = {name: (PARTS[name](top, sinks, top) / size)[known] for name in names}
    wanted, told = (held / size)[known], np.where(known & (size < TELLING), held, np.nan)
    factors = next(sums_of(basis, wanted, MOST), None) if known.any() else None
    if factors is not None:
        text = f"exp({sum_in_words(factors)}), in place of exp(sink)"
        said.steps |= first_order.with_sink(partial(_sum_of, factors, "sink"))
    elif other := map_of(x.places.question, [(sinks + np.zeros(top.shape), ...)], told, size):
        text = f"the sink of other rows and heads: {other[0].words}"
        sink = partial(moved, other[0], lambda c: _sinks(c.question))
        said.steps |= first_order.with_sink(sink)
    else:
        return False
    said.say(f"the row sums have {text}", "sinks-misplaced")
    return True


def _say_keys(said: Said, x: _Rows, second: Callable[[], Weights]) -> bool:
    """Whether the row sums are of other keys than the weights, all or by a rule of one bound."""
    for tile, (words, of) in product((1, *TILES), KEYS.items()):
        for rule in (Rule(()), *_bounds(x, of(x.places), tile)):
            summed = partial(_sums, rule, of, tile)
            if x.fit(summed(x)):
                other = _Rows(said, second())
                if other.fit(summed(other)):
                    words += f" with {rule}" * bool(rule.spans)
                    words += f", and zeros up to the end of a tile of {tile}" * (tile > 1)
                    said.say(f"the row sums are of {words}", "denominator")
                    said.steps["softmax"] = partial(_over_keys, rule, of, tile)
                    return True
    return False


def _padded(x: Places, there: Array, tile: int) -> Array:
    """(..., total_q, 1): how many keys of padding a tile of keys has that ends beside one that is
    ``there`` (..., total_q, total_k)."""
    return np.asarray((there & (x.j == x.m - 1)).any(axis=-1, keepdims=True) * (-x.m % tile))


def _sums(rule: Rule, of: Callable[[Places], Array], tile: int, x: _Rows) -> Array:
    """Their logarithms; rows without these keys tell nothing, where they are few, or are divided by
    1, beside their maximum."""
    there = of(x.places) & rule.holds(x.places)
    found = _with_zeros(np.where(there, x.S, -np.inf), _padded(x.places, there, tile))
    few = np.isneginf(found).mean(where=x.known) < fields.FEW
    return np.where(np.isneginf(found), x.total if few else x.top, found)


def _with_zeros(S: Array, zeros: Array) -> Array:
    """The logarithms of the sums of exp(S) and of so many ``zeros`` (..., 1)."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(log_sum(S), np.log(zeros.astype(float))[..., 0]))


def _bounds(x: _Rows, there: Array, tile: int) -> Iterator[Rule]:
    """Rules of one bound with which the row that is off most has its sum."""
    keys = np.where(there, x.S, -np.inf)
    off = np.where(x.known, np.abs(log_sum(keys) - x.total), 0.0)
    h, i = np.unravel_index(off.argmax(), off.shape)
    e = np.exp(keys[h, i] - x.total[h, i])
    last = x.places.j[i] == x.places.m[i] - 1
    e = e + last * (-x.places.m[i] % tile) * np.exp(-x.total[h, i])
    for name in x.places.features:
        of = np.broadcast_to(x.places.feature(name), x.places.j.shape)[i]
        for value in np.unique(of[e > 0]):
            for span in (Span(name, None, int(value)), Span(name, int(value), None)):
                if abs(np.log(e[span.among(of)].sum())) < x.noise:
                    yield Rule((span,))


def _over(L: Callable[[Context], Array], c: Context) -> tuple[Array, Array]:
    """Weights over exp of other numbers of rows."""
    by = L(c)
    return by, np.exp(c.S - dead_to_inf(np, by)[..., None])


def _over_keys(
    rule: Rule, of: Callable[[Places], Array], tile: int, c: Context
) -> tuple[Array, Array]:
    """Weights over the sum of other keys."""
    places = places_of(c.question)
    there = of(places) & rule.holds(places)
    keys, zeros = of_view(c, there), _padded(places, there, tile)[..., c.view.rows, :]
    unseen = ~(c.W > 0).any(axis=(0, 1))  # keys of which a view has no scores
    S = np.where(unseen, of_view(c, Right(places).S), c.G * c.cap[0])  # of masked ones too
    zeros = zeros if len(zeros) == 1 else zeros[c.view.heads]
    L = _with_zeros(np.where(keys, S, -np.inf), zeros)
    by = np.where(np.isneginf(L), c.S.max(axis=-1, initial=-np.inf), L)  # 1 in place of no sum
    with np.errstate(over="ignore"):
        return L, np.asarray(np.exp(c.S - dead_to_inf(np, by)[..., None]))


def _say_mass(said: Said, x: _Rows, due: Array) -> None:
    """What is in the row sums beside the keys that are seen; due: the logarithms without it."""
    ratio, mass = (x.total - due)[x.known], np.exp(x.total) - np.exp(due)
    total = np.where(x.known, x.total, np.nan)
    if np.ptp(ratio) < 8 * x.noise:
        mean = fields.number(float(np.exp(-ratio.mean())))
        said.say(f"the weights of a row sum to {mean}, not 1", "")
    elif other := map_of(x.places.question, [(due, ...)], total, x.noise):
        said.say(f"the row sums are those of other rows: {other[0].words}", "statistics-misplaced")
        said.steps["softmax"] = partial(_over, partial(moved, other[0], _right_lse))
    elif (held := _of_heads(x, due)) is not None:
        told = fields.in_heads(held, np.eye(len(held)))
        said.say(f"the row sums are of the keys of several heads: {told}", "accumulator-not-reset")
        said.steps["softmax"] = partial(_over, partial(_summed, held))
    elif _say_more(said, x, mass) or _say_factor(said, x, due):
        return
    elif np.abs(ratio).max() < ROUNDED:
        said.unread.append("the row sums are off by less than a hundredth, by no rule")
    elif x.sinks is not None and (often := _often(x, mass / np.exp(x.sinks))):
        said.say(f"the row sums have exp(sink) {often} too often", "denominator")
    elif often := _often(x, mass):
        said.say(f"the row sums have exp(0) of what is no key, {often}", "denominator")
    else:
        said.say("the row sums are wrong, by another number in every row", "denominator")


def _right_lse(c: Context) -> Array:
    return Right(places_of(c.question)).lse


def _of_rows(c: Context, x: Array) -> Array:
    return np.asarray(x[np.ix_(c.view.heads, c.view.rows)])


def _of_heads(x: _Rows, due: Array) -> Array | None:
    """How often the row sums of each head have those of every head, if these are whole numbers."""
    rows = x.known.all(axis=0) & np.isfinite(due).all(axis=0)
    parts, sums = np.exp(due)[:, rows], np.exp(x.total)[:, rows]
    if rows.sum() <= len(due) or len(due) == 1:
        return None
    held = np.rint(np.linalg.lstsq(parts.T, sums.T, rcond=1e-9)[0].T) + 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.abs(np.log(held @ parts) - x.total[:, rows])
    return held if off.max() < x.noise and (held >= 0).all() else None


def _summed(held: Array, c: Context) -> Array:
    with np.errstate(divide="ignore"):
        return _of_rows(c, np.log(held @ np.exp(_right_lse(c))))


def _say_factor(said: Said, x: _Rows, due: Array) -> bool:
    """Whether rows are divided by exp of a sum of PARTS; due: the right logarithms."""
    sinks = x.top if x.sinks is None else x.sinks
    names = NO_SINKS if x.sinks is None else PARTS
    basis = {name: (PARTS[name](due, sinks, x.top) / x.noise)[x.known] for name in names}
    factors = next(sums_of(basis, x.total[x.known] / x.noise, MOST), None)
    if factors is None:
        return False
    said.say(f"rows are divided by exp({sum_in_words(factors)})", "denominator")
    L = partial(_sum_of, factors, "L")
    said.steps["softmax"] = lambda c: _over(L, changed(c, softmax=STEPS["softmax"](c)))
    return True


def _often(x: _Rows, times: Array) -> str:
    """In words, where these are whole numbers; "" where they are not."""
    often = times[x.known]
    whole = np.rint(often) + 0.0
    if np.abs(often - whole).max(initial=0.0) > 0.02 or whole.min(initial=0.0) < 0:
        return ""
    of = "once for every part of the keys, or every empty one?"
    return f"{whole.min():.0f} to {whole.max():.0f} times ({of})"


def _say_more(said: Said, x: _Rows, mass: Array) -> bool:
    """Whether the ``mass`` (num_heads_q, total_q) in the row sums is that of a sink."""
    allowed = 8 * x.noise * np.maximum(np.exp(said.weights.right.lse), 1)
    for end, of in _others(x, mass).items():
        unit = np.where(x.known, of(x.places), 0.0) / allowed
        size = (unit**2).sum(axis=1)
        times = (mass / allowed * unit).sum(axis=1) / np.where(size > 0, size, 1.0)
        times = np.where(np.abs(times - np.rint(times)) < 0.02, np.rint(times), times)
        left = np.abs(mass / allowed - times[:, None] * unit)[x.known].max()
        if left < 1 and size.any() and (end in NUMBERS or (times == 1).all()):
            text = f"every key of padding up to {end}"
            text = NUMBERS.get(end, text).format(fields.by_head(times))
            name = "denominator" if end in NUMBERS else "padded-keys"
            name = "sinks-dropped" if end == SINK and (times == -1).all() else name
            said.say(f"the row sums have {text}", name)
            said.steps |= first_order.with_sink(partial(_and_more, times, of))
            return True
    return False


def _others(x: _Rows, mass: Array) -> dict[str, Callable[[Places], Array]]:
    """What may be there, and how much of it once: sinks, keys of padding by their end, a number."""
    found = {SINK: lambda places: np.exp(_sinks(places.question))} if x.sinks is not None else {}
    found["the longest sequence"] = partial(_padding, 0, 0)
    padded = int(np.rint(np.median((mass + x.places.m[:, 0])[x.known])))
    if padded > max(x.places.question.lengths_k):  # that of a sequence that is not here
        found[f"{padded} keys"] = partial(_padding, 0, padded)
    found |= {f"the end of its last tile of {t} keys": partial(_padding, t, 0) for t in TILES}
    return {**found, "": lambda places: np.ones((1, len(places.j)))}


def _padding(tile: int, length: int, places: Places) -> Array:
    """(1, total_q): keys from a sequence's end to that of a tile, to a length, or the longest's."""
    m = places.m[:, 0]
    return np.asarray(-m % tile if tile else (length or max(places.question.lengths_k)) - m)[None]


def _and_more(times: Array, of: Callable[[Places], Array], c: Context) -> Array:
    """The sink, if there is one, with what else is in the row sums, by its logarithm."""
    whole = times[:, None] * of(places_of(c.question)) + np.zeros(len(c.question.q))
    here = whole[np.ix_(c.view.heads, c.view.rows)] + (0.0 if c.sink is None else np.exp(c.sink))
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.maximum(here, 0.0)))


def say_values(said: Said) -> None:
    """Which head of v is weighted."""
    found, q = said.weights.value_head, said.weights.places.question
    if found is None or np.isnan(found).all(axis=1).any():
        return
    heads = np.nanmedian(found, axis=1)
    taken = np.clip(np.rint(heads).astype(int), 0, q.num_heads_kv - 1)
    other = not np.array_equal(taken, np.arange(q.num_heads_q) // q.group)
    if other and np.nanmax(np.abs(found - taken[:, None])) < 0.1:
        said.say_term(of_other_heads("v", taken))
