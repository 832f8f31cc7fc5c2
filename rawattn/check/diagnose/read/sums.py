"""What weights are divided by, lse, and their head of v. Long by what may be in a row's sum."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue import first_order
from rawattn.check.diagnose.engine.attention import TILES
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
        self.logs, sinks = read.logs, read.places.question.sinks
        self.sinks = None if sinks is None else np.asarray(sinks, dtype=np.float64)[:, None]
        right = read.places.rights & self.seen
        count = np.maximum(right.sum(axis=-1), 1)
        self.total = np.where(right, self.S - self.logs, 0.0).sum(axis=-1) / count
        self.noise, self.known = 3 * read.noise, right.any(axis=-1) & read.alive
        self.top = np.where(read.places.rights, self.S, -np.inf).max(axis=-1, initial=-np.inf)

    def fit(self, due: Array, times: int = 1) -> bool:
        """Whether these are the logarithms of the sums."""
        return bool(np.abs(self.total - due)[self.known].max(initial=0) < times * self.noise)


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
        sink = partial(moved, other[0], lambda c: np.asarray(c.question.sinks)[:, None])
        said.steps |= first_order.with_sink(sink)
    else:
        return False
    said.say(f"the row sums have {text}", "sinks-misplaced")
    return True


def _say_keys(said: Said, x: _Rows, second: Callable[[], Weights]) -> bool:
    """Whether the row sums are of other keys than the weights, all or by a rule of one bound."""
    for words, of in KEYS.items():
        for rule in (Rule(()), *_bounds(x, of(x.places))):
            if x.fit(_sums(rule, of, x)):
                other = _Rows(said, second())
                if other.fit(_sums(rule, of, other)):
                    with_rule = f" with {rule}" * bool(rule.spans)
                    said.say(f"the row sums are of {words}{with_rule}", "denominator")
                    said.steps["softmax"] = partial(_over_keys, rule, of)
                    return True
    return False


def _sums(rule: Rule, of: Callable[[Places], Array], x: _Rows) -> Array:
    """Their logarithms; rows without these keys tell nothing, where they are few, or are divided by
    1, beside their maximum."""
    found = log_sum(np.where(of(x.places) & rule.holds(x.places), x.S, -np.inf))
    few = np.isneginf(found).mean(where=x.known) < fields.FEW
    return np.where(np.isneginf(found), x.total if few else x.top, found)


def _bounds(x: _Rows, there: Array) -> Iterator[Rule]:
    """Rules of one bound with which the row that is off most has its sum."""
    keys = np.where(there, x.S, -np.inf)
    off = np.where(x.known, np.abs(log_sum(keys) - x.total), 0.0)
    h, i = np.unravel_index(off.argmax(), off.shape)
    e = np.exp(keys[h, i] - x.total[h, i])
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


def _over_keys(rule: Rule, of: Callable[[Places], Array], c: Context) -> tuple[Array, Array]:
    """Weights over the sum of other keys."""
    places = places_of(c.question)
    keys = of_view(c, of(places) & rule.holds(places))
    unseen = ~(c.W > 0).any(axis=(0, 1))  # keys of which a view has no scores
    S = np.where(unseen, of_view(c, Right(places).S), c.G * c.cap[0])  # of masked ones too
    L = log_sum(np.where(keys, S, -np.inf))
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
        lse = partial(moved, other[0], lambda c: Right(places_of(c.question)).lse)
        said.steps["softmax"] = partial(_over, lse)
    elif x.sinks is not None and (often := _often(x, mass / np.exp(x.sinks))):
        said.say(f"the row sums have exp(sink) {often} too often", "denominator")
    elif _say_more(said, x, mass) or _say_factor(said, x, due):
        return
    elif np.abs(ratio).max() < ROUNDED:
        said.unread.append("the row sums are off by less than a hundredth, by no rule")
    elif often := _often(x, mass):
        said.say(f"the row sums have exp(0) of what is no key, {often}", "denominator")
    else:
        said.say("the row sums are wrong, by another number in every row", "denominator")


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
        if left < 1 and size.any() and (not end or (times == 1).all()):
            text = f"every key of padding up to {end}"
            text = text if end else f"{fields.by_head(times)} more than the keys that are seen"
            said.say(f"the row sums have {text}", "padded-keys" if end else "denominator")
            said.steps |= first_order.with_sink(partial(_and_more, times, of))
            return True
    return False


def _others(x: _Rows, mass: Array) -> dict[str, Callable[[Places], Array]]:
    """What may be there, and how much of it once: keys of padding, by their end, or "" a number."""
    found = {"the longest sequence": partial(_padding, 0, 0)}
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
    whole = times[:, None] * of(places_of(c.question))
    with np.errstate(divide="ignore"):
        more = np.log(np.maximum(whole[np.ix_(c.view.heads, c.view.rows)], 0.0))
    return np.asarray(more if c.sink is None else np.logaddexp(more, c.sink))


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
