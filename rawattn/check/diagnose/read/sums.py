"""What weights are divided by, lse, and which head of v they are of.

Long by what may be in a row's sum.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue import options
from rawattn.check.diagnose.engine.attention import STEPS, TILES, Context
from rawattn.check.diagnose.evidence.places import Places, Right, log_sum
from rawattn.check.diagnose.evidence.rules import Rule, Span
from rawattn.check.diagnose.evidence.support import LESS
from rawattn.check.diagnose.read.contexts import of_view, places_of
from rawattn.check.diagnose.read.fields import by_head, number, of_heads, sum_in_words, sums_of
from rawattn.check.diagnose.read.maps import of_other_heads
from rawattn.check.diagnose.read.probe import Weights
from rawattn.check.diagnose.read.said import Said, logs_of, noise_of, seen_of
from rawattn.check.diagnose.read.terms import adding
from rawattn.reference.dense import dead_to_inf

Array = np.ndarray
ROUNDED = 8e-3  # off by less: sums or weights in 16 bits may be


class _Rows:
    """Of what was read of the sums of rows: S and the logarithms of weights (num_heads_q, total_q,
    total_k), of pairs that are seen; rows (num_heads_q, total_q) that tell the logarithm ``total``
    of what their weights are divided by; the noise of one."""

    def __init__(self, said: Said, read: Weights) -> None:
        self.places = read.places
        self.S, (self.seen, alive) = said.scores(read.places, read.right.S), seen_of(read)
        self.logs = logs_of(read, self.seen)
        right = read.places.right & self.seen
        count = np.maximum(right.sum(axis=-1), 1)
        self.total = np.where(right, self.S - self.logs, 0.0).sum(axis=-1) / count
        self.noise, self.known = 3 * noise_of(read.places), right.any(axis=-1) & alive

    def fits(self, keys: Array) -> bool:
        """Whether the sums are those of these keys."""
        off = np.abs(log_sum(np.where(keys, self.S, -np.inf)) - self.total)
        return bool(off[self.known].max(initial=0.0) < self.noise)


def say_passed(said: Said) -> None:
    """Whether weights are exp(score - lse), with the lse that was given."""
    read = said.weights
    if read.lse is None:
        return
    x, names = _Rows(said, read), [*said.names]
    rows = x.known & np.isfinite(read.lse)
    off = x.total - read.lse
    if _say_dropped(said, off, rows, x.noise):
        return
    if np.abs(off[rows]).max(initial=0.0) > 8 * x.noise:
        _say_mass(said, np.exp(x.total) - np.exp(read.lse), off, rows, x.noise)
        if "softmax" not in said.steps:
            said.names[:] = names  # it may be the lse that was read
        else:
            own = said.steps.pop("softmax")
            said.steps["bP"] = lambda c: own(c)[1]


def say_sums(said: Said, second: Callable[[], Weights]) -> None:
    """What the weights are divided by, and lse; ``second``: the same on other lengths."""
    read = said.weights
    places, q, x = read.places, read.places.question, _Rows(said, read)
    S, seen, noise, rows, total = x.S, x.seen, x.noise, x.known, x.total
    wrongly = seen & ~places.right & rows[..., None]
    level = x.logs + total[..., None]  # of which weights are exp
    if np.abs(level - S)[wrongly].max(initial=0.0) >= 8 * noise:
        _say_filled(said, level[wrongly], (level - S)[wrongly], noise)
        S = np.where(wrongly, level, S)
    due = log_sum(np.where(seen, S, -np.inf))
    if _say_dropped(said, total - read.right.lse, rows, noise):
        return
    sinks = None if q.sinks is None else np.asarray(q.sinks, dtype=np.float64)[:, None]
    with_sinks = due if sinks is None else np.logaddexp(due, sinks)
    if np.abs(total - with_sinks)[rows].max(initial=0.0) < noise:
        said.right.append("row sums")
    elif sinks is not None and np.abs(total - due)[rows].max() < noise:
        said.say("the sinks are not in the row sums", "sinks-dropped")
    elif not _say_keys(said, x, second) and (
        sinks is None or not _say_sink(said, S, due, total, rows, noise)
    ):
        _say_mass(said, np.exp(total) - np.exp(with_sinks), total - with_sinks, rows, noise)
    if read.lse is None:
        return
    lse, wanted = read.lse[rows], total[rows]
    added = None if said.term is None else said.term.added
    if added is not None and added.table and np.ptp(lse - wanted) < 8 * noise:
        by, wanted = float(np.mean(lse - wanted)), lse  # a table is known up to a number
        raised = replace(added, of=lambda places: added.of(places) + by)
        said.steps |= adding(raised).steps
    close = partial(np.allclose, lse, rtol=0, atol=8 * noise)
    if close(wanted):
        said.right.append("lse")
    elif close(with_sinks[rows]):
        said.right.append("lse")
        if "softmax" in said.steps:
            own = said.steps["softmax"]
            said.steps["softmax"] = lambda c: (STEPS["softmax"](c)[0], own(c)[1])
    elif close(due[rows]):
        said.say("the sinks are not in lse", "sinks-dropped")
    else:
        top = np.where(places.right, S, -np.inf).max(axis=-1)
        _say_lse(said, lse, total[rows], top[rows], noise)


def _say_filled(said: Said, level: Array, added: Array, noise: float) -> None:
    """What masked scores are, or what is added to them."""
    adds, text = bool(np.ptp(added) < np.ptp(level)), ""
    if np.ptp(added if adds else level) < 8 * noise:
        x = float((added if adds else level).mean())
        whole = abs(x - np.rint(x)) < noise
        x = float(np.rint(x) if whole else np.round(x, 4)) + 0.0
        text = f"{x:.4g} is added to masked scores" if adds else f"masked scores are {x:.4g}"
        said.names[:] = ["mask-fill"]
        said.steps["S"] = partial(_filled, x, adds)
    other = "weights of keys that must not be seen are not those of their scores"
    said.wrong.insert(0, f"{text}, not -inf" if text else other)


def _filled(number: float, adds: bool, c: Context) -> Array:
    """Scores of keys that are wrongly seen."""
    S = STEPS["S"](c)
    wrong = ~of_view(c, places_of(c.question).rights) & (c.W > 0)
    return np.asarray(np.where(wrong, (S if adds else 0.0) + number, S))


def _say_lse(said: Said, lse: Array, total: Array, top: Array, noise: float) -> None:
    """What lse is made of in place of the logarithm of the row sums, ``total``."""
    parts = {"the right lse": total, "row_max": top, "row_sum": np.exp(total - top), "": top**0}
    tried = sums_of({name: x / noise for name, x in parts.items()}, lse / noise, len(parts))
    factors = next(tried, None) if np.isfinite(lse).all() else None
    if factors is None:
        if np.abs(lse - total).max() < ROUNDED:
            said.unread.append("lse is off by less than a hundredth")
        else:
            said.wrong.append("lse is not the logarithm of the row sums")
        return
    base_2 = factors.keys() == {"the right lse"} and np.isclose(
        factors["the right lse"], 1 / np.log(2), atol=1e-2
    )
    factors = {"the right lse": 1 / np.log(2)} if base_2 else factors
    missing = " (a logarithm is missing)" * ("the right lse" not in factors)
    name = "lse-without-max" if factors == {"the right lse": 1, "row_max": -1} else "unknown"
    text = f"lse is {sum_in_words(factors)}{missing}"
    said.say("lse is in base 2" if base_2 else text, "lse-base-2" if base_2 else name)
    said.steps["L"] = partial(_L, factors)


def _L(factors: dict[str, float], c: Context) -> Array:
    L, top = c.softmax[0], c.S.max(axis=-1, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        parts = {"the right lse": L, "row_max": top, "row_sum": np.exp(L - top), "": 1.0}
        found = sum(x * parts[name] for name, x in factors.items())
    return np.asarray(np.where(np.isneginf(L), L, found))


def _sink(factors: dict[str, float], c: Context) -> Array:
    parts = {"sink": c.sink, "row_max": c.S.max(axis=-1, initial=-np.inf), "": 1.0}
    return np.asarray(sum(x * parts[name] for name, x in factors.items()))


def _say_sink(said: Said, S: Array, due: Array, total: Array, rows: Array, noise: float) -> bool:
    """Whether the row sums have another head's sink, or exp of a sum of the sink and of the row's
    maximum; due, total: their logarithms without sinks and as they are."""
    q, more = said.weights.places.question, np.exp(total) - np.exp(due)
    sinks = np.asarray(q.sinks, dtype=np.float64)
    known = rows & (more > 0)
    if not known.any(axis=1).all():
        return False
    wanted, size = (np.where(known, x, 1.0) for x in (more, noise * np.exp(total)))
    wanted, size = np.log(wanted), size / wanted + 1e-9
    values = np.array([np.median(row[there]) for row, there in zip(wanted, known, strict=True)])
    near = np.abs(values[:, None] - sinks).argmin(axis=1)
    if (np.abs(wanted - sinks[near, None]) <= 8 * size)[known].all():
        text = f"exp(sink) of head {of_heads(near)}"
        said.steps |= options.with_sink(lambda c: sinks[near][c.view.heads, None])
    else:
        top = np.where(said.weights.places.right, S, -np.inf).max(axis=-1)
        parts = {"sink": np.broadcast_to(sinks[:, None], top.shape), "row_max": top, "": top**0}
        basis = {name: (x / size)[known] for name, x in parts.items()}
        factors = next(sums_of(basis, (wanted / size)[known], len(parts)), None)
        if factors is None:
            return False
        text = f"exp({sum_in_words(factors)})"
        said.steps |= options.with_sink(partial(_sink, factors))
    said.say(f"the row sums have {text}, in place of exp(sink)", "sinks-misplaced")
    return True


def _say_keys(said: Said, x: _Rows, second: Callable[[], Weights]) -> bool:
    """Whether the row sums are of other keys than the weights: of the right ones, or of some by a
    rule of one bound."""
    q = said.weights.places.question
    if q.sparse or q.sinks is not None:
        return False
    if x.fits(x.places.rights):
        rule, of = None, "the keys that must be seen"
    else:
        both = x, _Rows(said, second())
        rules = (r for r in _bounds(x) if all(y.fits(r.holds(y.places) & y.seen) for y in both))
        rule = min(rules, key=lambda one: one.size, default=None)
        if rule is None:
            return False
        of = f"keys with {rule}"
    said.say(f"the row sums are of {of} alone", "denominator")
    said.steps["softmax"] = partial(_over, rule)
    return True


def _bounds(x: _Rows) -> Iterator[Rule]:
    """Rules of one bound with which the row that is off most has its sum."""
    seen = np.where(x.seen, x.S, -np.inf)
    off = np.where(x.known, np.abs(log_sum(seen) - x.total), 0.0)
    h, i = np.unravel_index(off.argmax(), off.shape)
    there, top = x.seen[h, i], seen[h, i].max()
    e, due = np.exp(seen[h, i, there] - top), x.total[h, i] - top
    for name in x.places.features:
        of = np.broadcast_to(x.places.feature(name), x.places.j.shape)[i, there]
        for value in np.unique(of):
            for span in (Span(name, None, int(value)), Span(name, int(value), None)):
                if abs(np.log(e[span.among(of)].sum()) - due) < x.noise:
                    yield Rule((span,))


def _over(rule: Rule | None, c: Context) -> tuple[Array, Array]:
    """Weights over the sum of the right keys, or of those by a rule."""
    places = places_of(c.question)
    keys = places.rights if rule is None else rule.holds(places)[None]
    L = log_sum(np.where(of_view(c, keys), c.S, -np.inf))
    with np.errstate(over="ignore"):
        return L, np.asarray(np.exp(c.S - dead_to_inf(np, L)[..., None]))


def _say_dropped(said: Said, off: Array, rows: Array, noise: float) -> bool:
    """Whether weights are missing by no rule, and the others are what they would be without that,
    times one number; off: of the logarithm of what weights are divided by, from the right one."""
    parts, places = said.support.parts, said.weights.places
    less = bool(parts) and all(part.kind == LESS and part.rule is None for part in parts)
    if places.question.sparse or not less or np.ptp(off[rows]) > 8 * noise:
        return False
    lost = said.support.inside(LESS)
    share = lost.sum() / (places.right * len(lost)).sum()
    if (lost[..., 1:] & lost[..., :-1]).sum() > (share + 0.3) * lost.sum():  # of rows, or tiles
        return False
    kept = number(float(np.exp(-off[rows].mean())))
    text = f"weights are dropped at random, and those that are kept are times {kept}"
    said.wrong.insert(0, text)
    said.names[:] = ["dropout"]
    return True


def _say_mass(said: Said, mass: Array, ratio: Array, rows: Array, noise: float) -> None:
    """What is in the row sums beside the keys that are seen; mass (num_heads_q, total_q)."""
    places = said.weights.places
    if np.ptp(ratio[rows]) < 8 * noise:
        mean = float(np.exp(-ratio[rows].mean()))
        said.say(f"the weights of a row sum to {number(mean)}, not 1", "")
        return
    allowed = 8 * noise * np.maximum(np.abs(np.exp(said.weights.right.lse)), 1)
    found: list[tuple[float, str, str, Array, Callable[[Places], Array]]] = []
    padded = int(np.rint(np.median((mass + places.m[:, 0])[rows])))
    for name, text, of in _others(max(places.question.lengths_k), padded):
        unit = np.where(rows, of(places), 0.0) / allowed
        size = (unit**2).sum(axis=1)
        times = (mass / allowed * unit).sum(axis=1) / np.where(size > 0, size, 1.0)
        times = np.where(np.abs(times - np.rint(times)) < 0.02, np.rint(times), times)
        left = float(np.abs(mass / allowed - times[:, None] * unit)[rows].max())
        if left < 1 and size.any() and (name != "denominator" or not text or (times == 1).all()):
            found.append((left, name, text, times, of))
    if not found:
        whole = np.abs(mass - np.rint(mass)) / allowed
        if np.abs(ratio[rows]).max() < ROUNDED:
            said.unread.append("the row sums are off by less than a hundredth, by no rule")
        elif whole[rows].max() < 1 and mass[rows].min() > -0.5:
            least, most = np.rint(mass[rows].min()) + 0.0, np.rint(mass[rows].max())
            text = f"{least:.0f} to {most:.0f} more than the keys that are seen, another number in"
            said.say(f"the row sums have {text} every row: exp(0) of what is no key", "denominator")
        else:
            least, most = (number(float(np.exp(x))) for x in (ratio[rows].min(), ratio[rows].max()))
            text = f"are times {least} to {most} what they must be, another number in every row"
            said.say(f"the row sums {text}", "denominator")
        return
    _, name, text, times, of = min(found, key=lambda one: one[0])
    if not text:
        text = f"{by_head(times)} more than the keys that are seen"
    elif not (times == 1).all():
        with np.errstate(divide="ignore"):
            name, text = "mask-fill", f"exp({by_head(np.log(np.abs(times)))}) for {text}"
    said.say(f"the row sums have {text}", name)
    said.steps |= options.with_sink(partial(_and_more, times, of))


def _others(longest: int, padded: int) -> Iterator[tuple[str, str, Callable[[Places], Array]]]:
    """What may be in the row sums: a class, words, and how much it is if it is there once. padded:
    a length that all sequences may be padded to, which may be that of one that is not here."""
    every = "every key of padding up to"
    yield "padded-keys", f"{every} the longest sequence", partial(_padding, 0, 0)
    if padded > longest:
        yield "padded-keys", f"{every} {padded} keys", partial(_padding, 0, padded)
    for tile in TILES:
        text = f"{every} the end of its last tile of {tile} keys"
        yield "padded-keys", text, partial(_padding, tile, 0)
    yield "denominator", "", lambda places: np.ones((1, len(places.j)))
    yield "denominator", "1, relative to the row's maximum", _exp_of_maximum
    for tile in (0, *TILES):
        of = f", of the query's own tile of {tile} and those before," if tile else ""
        yield "denominator", f"keys{of} that the mask hides", partial(_hidden, tile)


def _padding(tile: int, length: int, places: Places) -> Array:
    """(1, total_q): keys from a sequence's end to that of a tile, to a length, or the longest's."""
    m = places.m[:, 0]
    return np.asarray(-m % tile if tile else (length or max(places.question.lengths_k)) - m)[None]


def _exp_of_maximum(places: Places) -> Array:
    """(num_heads_q, total_q): exp of the largest score that is seen."""
    S = np.where(places.right, Right(places).S, -np.inf)
    return np.asarray(np.exp(S.max(axis=-1, initial=-np.inf)))


def _hidden(tile: int, places: Places) -> Array:
    """(num_heads_q, total_q): exp of the scores of keys that are hidden, summed up."""
    hidden = places.own & ~places.right
    if tile:
        hidden &= places.j < (places.p // tile + 1) * tile
    return np.asarray(np.exp(log_sum(np.where(hidden, Right(places).S, -np.inf))))


def _and_more(times: Array, of: Callable[[Places], Array], c: Context) -> Array:
    """The sink, if there is one, with what else is in the row sums, by its logarithm."""
    whole = times[:, None] * of(places_of(c.question))
    with np.errstate(divide="ignore"):
        more = np.log(np.maximum(whole[np.ix_(c.view.heads, c.view.rows)], 0.0))
    return np.asarray(more if c.sink is None else np.logaddexp(more, c.sink))


def say_values(said: Said) -> None:
    """Which head of v is weighted."""
    found = said.weights.value_head
    if found is None:
        return
    q = said.weights.places.question
    known = [row[np.isfinite(row)] for row in found]
    heads = np.array([np.median(row) if len(row) else np.nan for row in known])
    there = np.abs(found - heads[:, None]) < 0.1
    if np.isnan(heads).any() or not there[np.isfinite(found)].all():
        return
    taken = np.rint(heads).astype(int)
    there = (np.abs(taken - heads) < 0.1) & (taken >= 0) & (taken < q.num_heads_kv)
    if not np.array_equal(taken, np.arange(q.num_heads_q) // q.group) and there.all():
        said.say_term(of_other_heads("v", taken))
