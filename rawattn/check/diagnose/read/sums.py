"""What weights are divided by, lse, and their head of v. What may be in the sum of a row is made of
``Rows``; it must give what was read, here and on other lengths, and is planted as it is."""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import islice, product
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue.maps import Map, geometry
from rawattn.check.diagnose.catalogue.partial_sums import Keys, parts_of_keys
from rawattn.check.diagnose.engine.attention import STEPS, TILES, Context
from rawattn.check.diagnose.evidence.places import Array, Places, Right, log_sum, places_of
from rawattn.check.diagnose.evidence.structure import Rule, Span, where
from rawattn.check.diagnose.read import fields
from rawattn.check.diagnose.read.probe import Weights
from rawattn.check.diagnose.read.said import Said
from rawattn.reference.dense import dead_to_inf

MOST, TRIED = 3, 600  # of what rows have, in a sum; sums of keys, of which noise may leave many
SINK, MORE = "sink", "the larger of row_max and sink"
ROUNDED = 8e-3  # off by less: sums or weights in 16 bits may be
TELLING = 0.1  # noise of the logarithm of what is in a row sum, at most, where it tells something
OF_ROWS = {"due": "", "beside": ", each beside its own row's maximum,"}
OF_PARTS: dict[str, Callable[..., Any]] = {  # by keys of a part, those of rows, and what they see
    "with keys": lambda part, j, right: len(part) > 0,
    "of which a row sees a key": lambda part, j, right: (np.isin(j, part) & right).any(axis=1),
    "of the keys": lambda part, j, right: 1,
}
KEYS: dict[str, Callable[[Places], Array]] = {  # that row sums may be over
    "the keys that must be seen": lambda places: places.rights,
    "all keys of the sequence": lambda places: places.own[None],
}


class Rows:
    """Of ``places`` the scores S (num_heads_q, total_q, total_k), and of rows (num_heads_q,
    total_q) the logarithms of the sums of what is seen, with sinks (``due``) and without
    (``bare``), and the largest score that is right, ``top``; ``beside``: due, less that."""

    def __init__(self, places: Places, S: Array, seen: Array, due: Array | None = None) -> None:
        self.places, self.S, sinks = places, S, places.question.sinks
        self.bare = log_sum(np.where(seen, S, -np.inf))
        of_row = np.zeros_like(self.bare)
        self.sinks: Any = None if sinks is None else np.asarray(sinks, float)[:, None] + of_row
        with_sinks = self.bare if self.sinks is None else np.logaddexp(self.bare, self.sinks)
        self.due = with_sinks if due is None else due
        self.top = np.where(places.rights, S, -np.inf).max(axis=-1, initial=-np.inf)
        with np.errstate(invalid="ignore"):
            self.beside = self.due - self.top


class _Read(Rows):
    """With what was read: whose logarithm ``total`` is of what the weights of a row are divided by,
    of rows that are ``known``, and the noise of one."""

    def __init__(self, said: Said, read: Weights, due: Array | None = None) -> None:
        super().__init__(read.places, said.scores(read.places, read.right.S), read.seen, due)
        right = read.places.rights & read.seen
        self.seen, self.logs = read.seen, read.logs
        self.total = np.where(right, self.S - self.logs, 0.0).sum(-1) / np.maximum(right.sum(-1), 1)
        self.noise, self.known = 3 * read.noise, right.any(axis=-1) & read.alive

    def fit(self, L: Array, times: int = 1) -> bool:
        """Whether these are the logarithms of the sums. NaN of rows that have none: they tell
        nothing, where they are few, or are divided by 1 beside their maximum."""
        none = np.isnan(L)
        few = none[self.known].sum() < fields.FEW * self.known.sum()
        off = np.abs(self.total - np.where(none, self.total if few else self.top, L))
        return bool(off[self.known].max(initial=0) < times * self.noise)


Logs = Callable[[Rows], Array]
Form = tuple[str, str, Logs]  # in words, the class, and what rows are divided by


def say_sums(said: Said, second: Callable[[], Weights]) -> None:
    """What the weights are divided by, or whether by the lse that was passed, and lse; ``second``:
    the same on other lengths. And what scores keys that must not be seen have, if not their own."""
    read, passed = said.weights, said.weights.passed
    given = read.right.lse if passed else None
    x = _Read(said, read, given)
    x.known &= np.isfinite(x.due) | (not passed)
    wrongly = x.seen & ~x.places.rights & x.known[..., None]
    level = x.logs + x.total[..., None]  # of which weights are exp
    if np.abs(level - x.S)[wrongly].max(initial=0.0) >= 8 * x.noise:
        _say_filled(said, level[wrongly], x.noise)
        Rows.__init__(x, x.places, np.where(wrongly, level, x.S), x.seen, given)
    if not x.fit(x.due, 8 if passed else 1):
        _say_form(said, x, None if passed else second)
    elif not passed:
        said.right.append("row sums")
    if passed and "softmax" in said.steps:
        own = said.steps.pop("softmax")
        said.steps["bP"] = lambda c: own(c)[1]
    elif not passed and read.lse is not None:
        _say_lse(said, x)


@np.errstate(all="ignore")
def _say_form(said: Said, x: _Read, second: Callable[[], Weights] | None) -> None:
    """The first form that gives what was read, or what can be said without one."""
    right, in_some = np.abs(x.total - x.due) < x.noise, ""
    wrong = x.known & ~right
    for text, name, L in _forms(x, second is None):
        held = L(x)
        if x.fit(held) and (second is None or (y := _Read(said, second())).fit(L(y))):
            said.say(text, name)
            said.steps["softmax"] = partial(_over, lru_cache(maxsize=2)(partial(_planted, said, L)))
            return
        if not in_some and (right & x.known).any() and x.fit(np.where(right, x.total, held)):
            in_some = text
    mass = np.exp(x.total) - np.exp(x.due)
    if np.abs((x.total - x.due)[x.known]).max() < ROUNDED:
        said.unread.append("the row sums are off by less than a hundredth, by no rule")
    elif x.sinks is not None and (often := _often(x, mass / np.exp(x.sinks))):
        said.say(f"the row sums have exp(sink) {often} too often", "denominator")
    elif often := _often(x, mass):
        said.say(f"the row sums have exp(0) of what is no key, {often}", "denominator")
    else:  # of a backward pass it may be the lse that was read
        places = ", ".join(where(x.places.question, "lse", wrong.T))
        text = f"in some rows {in_some}: {places}" if in_some else ""
        said.say(text or _of_rows(x, wrong, places, not second), "denominator" * bool(second))


def _of_rows(x: _Read, wrong: Array, places: str, passed: bool) -> str:
    """What row sums are that no form gives in the rows that are ``wrong``, which lie there."""
    q, text = x.places.question, "the row sums are wrong, by another number in every row"
    times = np.exp(x.due - x.total)[x.known]
    if passed and np.abs(times - np.rint(times)).max(initial=0.0) < 0.02:
        return f"rows of q count {times.min():.0f} to {times.max():.0f} times in dv: {places}"
    if dtype := fields.few_bits(x.total[x.known], q.dtype.itemsize):
        return f"the lse that rows are divided by is kept in {dtype}"
    for of, beside in OF_ROWS.items():
        held = np.where(x.known, x.total - x.top * bool(beside), np.nan)
        if told := fields.other_rows(getattr(x, of), held, x.known, q.dtype.itemsize):
            text = f"the row sums{beside} are those of other rows: {told}"
    more = np.log(np.exp(x.total) - np.exp(x.due))
    for rows in (x.due, x.total):
        if told := fields.other_rows(rows, more, wrong, q.dtype.itemsize):
            text = f"the row sums hold, beside their own, those of other rows: {told}"
    return text


@np.errstate(all="ignore")
def _planted(said: Said, L: Logs, places: Places) -> Array:
    """What rows of a problem are divided by."""
    return L(Rows(places, said.scores(places, Right(places).S), said.support.at(places) > 0))


@np.errstate(all="ignore")
def _over(L: Callable[[Places], Array], c: Context) -> tuple[Array, Array]:
    """Weights over exp of other numbers of rows, lse and P."""
    by = L(places_of(c.question))[np.ix_(c.view.heads, c.view.rows)]
    none = np.isnan(by)
    top = np.where(none, c.S.max(axis=-1, initial=-np.inf), by)
    return np.where(none, -np.inf, by), np.exp(c.S - dead_to_inf(np, top)[..., None])


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
        said.steps["S"] = lambda c: np.where(
            fields.of_view(c, places_of(c.question).rights) | (c.W == 0), STEPS["S"](c), x
        )
    said.wrong.insert(0, text)


def _say_lse(said: Said, x: _Read) -> None:
    """Whether lse is the logarithm of the row sums."""
    lse = np.asarray(said.weights.lse)
    known = x.known & ~(np.isneginf(lse) & (x.total - x.top < x.noise))  # of sums of nothing
    lse, total = lse[known], x.total[known]
    close = partial(np.allclose, lse, rtol=0, atol=8 * x.noise)
    if close(total) or close(x.due[known]):
        said.right.append("lse")
        if not close(total) and "softmax" in said.steps:
            own = said.steps["softmax"]
            said.steps["softmax"] = lambda c: (STEPS["softmax"](c)[0], own(c)[1])
    elif np.abs(lse - total).max() < ROUNDED:
        said.unread.append("lse is off by less than a hundredth")
    else:
        said.wrong.append("lse is not the logarithm of the row sums")


def _forms(x: _Read, passed: bool) -> Iterator[Form]:
    """What rows may be divided by; ``passed``: with an lse that was made before."""
    if not passed:
        yield from islice(_of_keys(x), TRIED) if x.sinks is None else _of_sink(x)
        yield "the row sums are those of the right scores", "", lambda x: Right(x.places).lse
    ratio, mass = (x.total - x.due)[x.known], np.exp(x.total) - np.exp(x.due)
    if np.ptp(ratio) < 8 * x.noise:
        mean = float(ratio.mean())
        text = f"the weights of a row sum to {fields.number(np.exp(-mean))}, not 1"
        yield text, "", lambda x: x.due + mean
    for name, beside in OF_ROWS.items():
        total = np.where(x.known, x.total - x.top * bool(beside), np.nan)
        other = fields.map_of(x.places.question, [(getattr(x, name), ...)], total, x.noise)
        if other is not None:
            text = f"the row sums{beside} are those of other rows: {other[0].words}"
            yield text, "statistics-misplaced", partial(_moved, other[0], name)
    yield from _with_more(x, mass)
    basis = {name: (of / x.noise)[x.known] for name, of in _parts(x).items()}
    for factors in fields.sums_of(basis, x.total[x.known] / x.noise, MOST):
        text = f"rows are divided by exp({fields.sum_in_words(factors)})"
        yield text, "denominator", partial(_sum_of, factors)


def _parts(x: Rows) -> dict[str, Array]:
    """Numbers of rows of which others may be sums."""
    sums = np.exp(x.due - dead_to_inf(np, x.top))
    found = {"the right lse": x.due, "row_max": x.top, "row_sum": sums, "": np.ones_like(x.top)}
    return found if x.sinks is None else found | {SINK: x.sinks, MORE: np.maximum(x.sinks, x.top)}


def _sum_of(factors: dict[str, float], x: Rows) -> Array:
    parts = _parts(x)
    found = np.asarray(sum(by * parts[name] for name, by in factors.items()))
    return np.where(np.isneginf(x.due), x.due, found)


def _of_sink(x: _Read) -> Iterator[Form]:
    """Nothing, exp of a sum of sink and row's maximum, or that of other rows, for exp(sink)."""
    yield "the sinks are not in the row sums", "sinks-dropped", lambda x: x.bare
    more = np.exp(x.total) - np.exp(x.bare)
    known = x.known & (more > 0)
    held = np.log(np.where(known, more, 1.0))
    size = np.where(known, x.noise * np.exp(x.total) / np.where(known, more, 1.0) + 1e-9, 1.0)
    parts = _parts(x)
    basis = {name: (parts[name] / size)[known] for name in ("row_max", SINK, MORE, "")}
    for factors in fields.sums_of(basis, (held / size)[known], MOST) if known.any() else ():
        text = f"the row sums have exp({fields.sum_in_words(factors)}), in place of exp(sink)"
        yield text, "sinks-misplaced", partial(_with_sink, partial(_sum_of, factors))
    told = np.where(known & (size < TELLING), held, np.nan)
    if (other := fields.map_of(x.places.question, [(x.sinks, ...)], told, size)) is not None:
        text = f"the row sums have the sink of other rows and heads: {other[0].words}"
        yield text, "sinks-misplaced", partial(_with_sink, partial(_moved, other[0], "sinks"))


def _with_sink(sink: Logs, x: Rows) -> Array:
    return np.asarray(np.logaddexp(x.bare, sink(x)))


def _moved(by: Map, name: str, x: Rows) -> Array:
    found = by.moved(geometry(x.places.question, "lse"), getattr(x, name))
    return np.asarray(found + x.top * bool(OF_ROWS.get(name)))


def _of_keys(x: _Read) -> Iterator[Form]:
    """Sums of other keys than the weights', all or by a rule of one bound."""
    for tile, (words, of) in product((1, *TILES), KEYS.items()):
        for rule in (Rule(()), *_bounds(x, of(x.places), tile)):
            text = words + f" with {rule}" * bool(rule.spans)
            text += f", and zeros up to the end of a tile of {tile}" * (tile > 1)
            yield f"the row sums are of {text}", "denominator", partial(_sums, rule, of, tile)


def _sums(rule: Rule, of: Callable[[Places], Array], tile: int, x: Rows) -> Array:
    """With zeros for the padding of a tile whose last key is there; NaN of no keys."""
    p = x.places
    there = of(p) & rule.holds(p)
    zeros = (there & (p.j == p.m - 1)).any(axis=-1) * (-p.m % tile)[:, 0]
    found = np.logaddexp(log_sum(np.where(there, x.S, -np.inf)), np.log(zeros.astype(float)))
    return np.where(np.isneginf(found), np.nan, found)


def _bounds(x: _Read, there: Array, tile: int) -> Iterator[Rule]:
    """Rules of one bound with which the row that is off most has its sum."""
    keys = np.where(there, x.S, -np.inf)
    off = np.where(x.known, np.abs(log_sum(keys) - x.total), 0.0)
    h, i = np.unravel_index(off.argmax(), off.shape)
    e = np.exp(keys[h, i] - x.total[h, i])
    e = e + (x.places.j[i] == x.places.m[i] - 1) * (-x.places.m[i] % tile) * np.exp(-x.total[h, i])
    for name in x.places.features:
        of = np.broadcast_to(x.places.feature(name), x.places.j.shape)[i]
        for value in np.unique(of[e > 0]):
            for span in (Span(name, None, int(value)), Span(name, int(value), None)):
                if abs(np.log(e[span.among(of)].sum())) < x.noise:
                    yield Rule((span,))


def _often(x: _Read, times: Array) -> str:
    """In words, where these are whole numbers; "" where they are not."""
    often = times[x.known]
    whole = np.rint(often) + 0.0
    if np.abs(often - whole).max(initial=0.0) > 0.02 or whole.min(initial=0.0) < 0:
        return ""
    low, high = whole.min(), whole.max()
    return f"{high:.0f} times" if low == high else f"{low:.0f} to {high:.0f} times"


def _with_more(x: _Read, mass: Array) -> Iterator[Form]:
    """With so many times a sink, a number, or keys of padding, which are there once."""
    padded = int(np.rint(np.median((mass + x.places.m[:, 0])[x.known])))
    lengths = x.places.question.lengths_k
    ends = {"the longest sequence": (0, 0)}  # a tile, or a length
    ends |= {f"{padded} keys": (0, padded)} if padded > max(lengths) else {}  # which is not here
    ends |= {f"the end of its last tile of {t} keys": (t, 0) for t in TILES}
    units: dict[str, Logs] = {end: partial(_padding, *of) for end, of in ends.items()}
    one: tuple[str, Logs] = (SINK, lambda x: np.exp(x.sinks))
    units |= [("", lambda x: np.ones_like(x.top)) if x.sinks is None else one]
    for end, of in units.items():
        unit = np.where(x.known, of(x), 0.0)
        times = (mass * unit).sum(axis=1) / np.maximum((unit**2).sum(axis=1), 1e-30)
        times = np.where(np.abs(times - np.rint(times)) < 0.02, np.rint(times), times)[:, None]
        name = "padded-keys" if end in ends else "denominator"
        text = {"": "{} more than the keys that are seen", SINK: "exp(sink) {} times too often"}
        said = text.get(end, f"every key of padding up to {end}").format(fields.by_head(times))
        if end in ends:
            times = np.ones_like(times)
        elif end and (times == -1).all():
            name = "sinks-dropped"
        yield f"the row sums have {said}", name, partial(_and_more, times, of)
    parts = parts_of_keys(x.places.question) if x.sinks is not None else {}
    for (of_part, there), (cut, keys) in product(OF_PARTS.items(), parts.items()):
        words = f"the row sums have exp(sink) once for every part {of_part}, {cut}, not once"
        yield words, "denominator", partial(_and_more, np.ones((1, 1)), partial(_once, there, keys))


def _padding(tile: int, length: int, x: Rows) -> Array:
    """Keys from a sequence's end to that of a tile, to a length, or to the longest's."""
    m = x.places.m[:, 0]
    keys = -m % tile if tile else (length or max(x.places.question.lengths_k)) - m
    return np.asarray(keys + np.zeros_like(x.top))


def _once(there: Callable[..., Any], keys: Keys, x: Rows) -> Array:
    """The sink for all but one of the parts that are there for a row."""
    p, count = x.places, np.zeros(len(x.places.m))
    for m in np.unique(p.m):
        rows = p.m[:, 0] == m
        count[rows] = sum((there(part, p.j[rows], p.right[rows]) for part in keys(int(m))), 0)
    return np.asarray((count - 1) * np.exp(x.sinks))


def _and_more(times: Array, of: Logs, x: Rows) -> Array:
    return np.asarray(np.log(np.maximum(np.exp(x.due) + times * of(x), 0.0)))


def say_values(said: Said) -> None:
    """Which head of v is weighted."""
    found, q = said.weights.value_head, said.weights.places.question
    if found is None or np.isnan(found).all(axis=1).any():
        return
    taken = np.clip(np.rint(np.nanmedian(found, axis=1)).astype(int), 0, q.num_heads_kv - 1)
    other = not np.array_equal(taken, np.arange(q.num_heads_q) // q.group)
    if other and np.nanmax(np.abs(found - taken[:, None])) < 0.1:
        said.say_term(fields.of_other_heads("v", taken))
