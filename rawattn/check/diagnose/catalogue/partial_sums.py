"""The softmax made of parts of the keys, tiles one after the other or splits that are merged. Every
part has its maximum, and sums taken against it: of its weights (row_sum), of P V (out), and in
forward mode of P o E (e), (P o E) V (tout) and P tV (ptv); the tables are of wrong weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue import stages
from rawattn.check.diagnose.catalogue.masks import Window, bounds, distances
from rawattn.check.diagnose.catalogue.sparse import walks
from rawattn.check.diagnose.engine.attention import FORWARD, TILES, Bug, View, each
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import Context, Floats, Step, times

LN_2 = np.log(2)
COUNTS = (2, 3, 4, 6, 8)  # parts of a sequence
STRIDES = (2, 4, 8, 32)  # lanes, or warps, that take every so many keys
# the keys of a view in parts, in the order of the loop: which, or which pairs (heads, n, m)
Cut = Callable[[Context], list[np.ndarray]]
Keys = Callable[[int], list[np.ndarray]]  # the same of so many keys
# what sums so far, and a part's, are times in every step of the loop: of exp(old max - new max), 1
# at the first one that has a key for the row, and of the row sum so far, both (parts, heads, n)
Way = Callable[[Floats, Floats], tuple[Floats | float, Floats | float]]
Taken = Callable[["Parts"], tuple[Floats, float]]
Weights = Callable[["Parts"], Floats]  # (parts, heads, n)


class Parts:
    """Of every part its maximum, -inf where nothing is seen, (parts, heads, n); its sums (parts,
    heads, n, columns); and the results of each alone. top: the maximum of all, 0 for none."""

    def __init__(self, tops: Floats, sums: dict[str, Floats]) -> None:
        self.tops, self.sums, self.row_sums = tops, sums, sums["row_sum"][..., 0]
        self.top = _finite(tops.max(axis=0))
        self.outs, self.lses, self.es, self.touts = divided(tops, sums)


class Results(NamedTuple):
    """What an attention kernel makes of its parts; the last two are tangents, 0 where not asked."""

    out: Floats
    lse: Floats
    e: Floats
    tout: Floats


def _tiles(size: int, m: int) -> list[np.ndarray]:
    return [np.arange(start, min(start + size, m)) for start in range(0, m, size)]


def _equal(count: int, of_tiles: int, m: int) -> list[np.ndarray]:
    """So many parts, each of whole tiles, the last ones shorter or empty."""
    found = _tiles(-(-max(m, 1) // (count * of_tiles)) * of_tiles, m)
    return found + [np.arange(0)] * (count - len(found))


def _strided(count: int, tile: int, m: int) -> list[np.ndarray]:
    return [np.flatnonzero(np.arange(m) // tile % count == first) for first in range(count)]


def _cut(keys: Keys, step: int, c: Context) -> list[np.ndarray]:
    return keys(c.S.shape[2])[::step]


def tiles(question: Question) -> dict[str, Cut]:
    """Tiles of a loop over the keys, from the first on and from the last, or over blocks."""
    if question.sparse:
        every = tuple(range(question.slots + question.own))
        return walks.TILES | {"slot by slot, the own block last": partial(walks.of_slots, every)}
    sizes, found = [t for t in TILES if t < max(question.lengths_k, default=0)], dict[str, Cut]()
    for (words, step), tile in product({"": 1, ", from the last": -1}.items(), sizes):
        found[f"tile of {tile}{words}"] = partial(_cut, partial(_tiles, tile), step)
    return found


def splits(question: Question) -> dict[str, Cut]:
    if question.sparse:
        return walks.splits(question)
    cuts = parts_of_keys(question)
    cuts |= {f"parts of each {n}th key": partial(_strided, n, 1) for n in STRIDES}
    cuts |= {f"parts of each 2nd tile of {t} keys": partial(_strided, 2, t) for t in TILES}
    return {text: partial(_cut, keys, 1) for text, keys in cuts.items()}


def parts_of_keys(question: Question) -> dict[str, Keys]:
    """Parts of so many keys; each once, where several are the same for all sequences."""
    cuts: dict[str, Keys] = {f"{count} equal parts": partial(_equal, count, 1) for count in COUNTS}
    cuts |= {f"parts of {tile} keys": partial(_tiles, tile) for tile in TILES}
    for tile, count in product(TILES, COUNTS):
        cuts[f"{count} parts of as many tiles of {tile} keys"] = partial(_equal, count, tile)
    found: dict[tuple[tuple[int, ...], ...], str] = {}
    for text, of in cuts.items():
        keys = tuple(tuple(part) for m in question.lengths_k for part in of(m) if len(part))
        if any(part[0] for part in keys):
            found.setdefault(keys, text)
    return {text: cuts[text] for text in found.values()}


def parts_of(c: Context, cut: Cut) -> Parts:
    tops, sums = [], []
    for keys in cut(c) or [np.arange(0)]:
        S = c.S[..., keys] if keys.ndim == 1 else np.where(keys, c.S, -np.inf)
        keys = keys if keys.ndim == 1 else np.arange(c.S.shape[2])
        top = S.max(axis=-1, initial=-np.inf)
        P = np.exp(S - _finite(top)[..., None])
        more = {"row_sum": P.sum(axis=-1, keepdims=True), "out": times(P, c.V[keys])}
        if hasattr(c, "E"):
            moving = P * np.where(c.W > 0, c.E, 0.0)[..., keys]
            more["e"] = moving.sum(axis=-1, keepdims=True)
            more["tout"], more["ptv"] = times(moving, c.V[keys]), times(P, c.tV[keys])
        tops.append(top)
        sums.append(more)
    return Parts(np.stack(tops), {name: np.stack([x[name] for x in sums]) for name in sums[0]})


def _finite(x: Floats) -> Floats:
    return np.where(np.isneginf(x), 0.0, x)


def _exp(x: Floats) -> Floats:
    return np.where(np.isneginf(x), 0.0, np.exp(_finite(x)))


def _power(x: float) -> Way:
    return lambda f, r: (f**x, 1.0)


def _led(x: Floats, first: float = 1.0) -> Floats:
    return np.asarray(np.insert(x, 0, first, axis=0))


WAYS: dict[str, Way] = {  # f: factors; r: row sums
    "not rescaled": _power(0),
    "rescaled after the new tile is added": lambda f, r: (f, f),
    "of weights beside the maximum before the tile": lambda f, r: (f, 1 / f),
    "rescaled twice": _power(2),
    "by the inverse factor": _power(-1),
    "by the factor of the step before, 0 at first": lambda f, r: (_led(_led(f[1:], 0.0))[:-1], 1.0),
    "by exp2 of natural units": _power(LN_2),
    "by exp of units of base 2": _power(1 / LN_2),
    "of the last tile alone": lambda f, r: (0.0, 1.0),
    "without the first rescale after a tile's own": lambda f, r: (
        f,
        1 / np.append(np.where(f[1:] > 0, f[1:], 1.0), np.ones_like(f[:1]), axis=0),
    ),
    "divided by the row sum at every tile": lambda f, r: (f / r, 1 / r),
    "divided at every tile, and not times the row sum before": lambda f, r: (f / _led(r[:-1]), 1.0),
    "rescaled after the new tile is added, the first by 0": lambda f, r: (f, _led(f[1:], 0.0)),
    "not rescaled at the last tile": lambda f, r: (np.r_[f[:-1], np.ones_like(f[:1])], 1.0),
}
for least, (units, of) in product(np.arange(1, 17) / 2, {"": 1.0, " in base 2": LN_2}.items()):
    text, small = f"not rescaled where it rises by less than {least:g}{units}", np.exp(-least * of)
    WAYS[text] = partial(lambda small, f, r: (np.where(f > small, 1.0, f), 1.0), small)


def ways(question: Question) -> dict[str, Way]:
    """WAYS, and by the maxima of scores without softmax_scale."""
    unscaled = 1 / (question.scale or 1.0)
    more = {"by exp": _power(unscaled), "by exp2": _power(LN_2 * unscaled)}
    return WAYS | {f"{text} of scores without softmax_scale": way for text, way in more.items()}


RIGHTLY = _power(1)
RUNNING = "the running maximum"
# the maximum that a tile leaves to the next one, of tiles that a row sees, and at last to lse
MAXIMA: dict[str, Callable[[Floats], Floats]] = {
    RUNNING: partial(np.maximum.accumulate, axis=0),
    "as if the maximum of each tile were the running one": lambda tops: np.take_along_axis(
        tops, np.maximum.accumulate((tops > -np.inf) * np.arange(len(tops))[:, None, None]), axis=0
    ),
}


def rescaled(parts: Parts, wrong: Sequence[str], way: Way, kept: str = RUNNING) -> Results:
    """Tile after tile, the ``wrong`` sums, or the maximum, rescaled in another way."""
    sums, others = totals(parts, RIGHTLY), totals(parts, way, kept)
    sums |= {name: others[name] for name in wrong}
    return divided(sums["top"], sums)


def totals(parts: Parts, way: Way, kept: str = RUNNING) -> dict[str, Floats]:
    """The sums against the maximum of the last step, all rescaled in one way, and the last one
    that is ``kept``, of MAXIMA."""
    there = ~np.isneginf(parts.tops)  # tiles that nobody sees are not visited
    maxima = MAXIMA[kept](parts.tops)
    before = _led(maxima[:-1], -np.inf)
    running = np.maximum(before, parts.tops)
    share = _exp(parts.tops - _finite(running))  # of sums against the maximum of their own part
    factors = np.where(np.isneginf(before), 1.0, np.exp(before - _finite(running)))
    row_sums = (_exp(parts.tops) * parts.row_sums).cumsum(axis=0) * np.exp(-_finite(running))
    old, new = way(factors, np.where(row_sums > 0, row_sums, 1.0))
    later = np.cumprod(np.where(there, old, 1.0)[::-1], axis=0)[::-1]
    weights = (new * share * np.concatenate([later[1:], np.ones_like(later[:1])]))[..., None]
    found = {name: (weights * x).sum(axis=0) for name, x in parts.sums.items()}
    return found | {"top": _finite(maxima[-1])}


def divided(top: Floats, sums: Mapping[str, Floats]) -> Results:
    """Of sums against this maximum the results."""
    total = np.where(sums["row_sum"] == 0, 1.0, sums["row_sum"])
    out, lse = sums["out"] / total, np.log(sums["row_sum"][..., 0]) + top
    if "e" not in sums:
        return Results(out, lse, np.zeros_like(lse), np.zeros_like(out))
    e = sums["e"] / total
    return Results(out, lse, e[..., 0], (sums["tout"] + sums["ptv"]) / total - e * out)


def _whole(taken: Taken, parts: Parts) -> Floats:
    lses, unit = taken(parts)
    top = _finite(lses.max(axis=0))
    return np.asarray(np.log(_exp(lses - top).sum(axis=0)) + top) / unit


def _mixed(power: float, parts: Parts) -> Floats:
    """An lse whose weights and whose logarithm are not of the same base."""
    top = _finite(parts.lses.max(axis=0))
    return np.asarray(top + np.log((_exp(parts.lses - top) ** power).sum(axis=0)))


def _shares(taken: Taken, parts: Parts) -> Floats:
    """Weights of parts; 0 for a row without keys."""
    lses, unit = taken(parts)
    return _exp(lses - unit * _finite(_whole(taken, parts)))


def _updated(parts: Parts) -> Floats:
    """Weights of a merge one by one, of a part's lse beside that of all so far, which holds it."""
    found, so_far = np.zeros_like(parts.lses), np.logaddexp.accumulate(parts.lses, axis=0)
    for n, part in enumerate(parts.lses):
        of_part = np.where(np.isneginf(part), 0.0, 1 / (1 + np.exp(so_far[n] - part)))
        found[:n] *= 1 - (of_part if n else 0.0)
        found[n] = of_part if n else 1.0
    return found


RIGHT = "right"
TAKEN: dict[str, Taken] = {  # for the lse of parts, in units of so many natural ones
    RIGHT: lambda p: (p.lses, 1.0),
    "exp2 where lse is in natural units": lambda p: (p.lses * LN_2, LN_2),
    "exp where lse is in base 2": lambda p: (p.lses / LN_2, 1 / LN_2),
    "row sums, without their maxima": lambda p: (p.lses - _finite(p.tops), 1.0),
    "maxima, without row sums": lambda p: (p.tops, 1.0),
    "an lse of 0 for a part without keys": lambda p: (_finite(p.lses), 1.0),
    "none if the first has no keys": lambda p: (np.where(p.row_sums[0] > 0, p.lses, -np.inf), 1.0),
    "none if the last has no keys": lambda p: (np.where(p.row_sums[-1] > 0, p.lses, -np.inf), 1.0),
}
SUMMED = "row sums added up as they are, beside different maxima"
UNGUARDED = "an lse of 0 for a part without keys, of rows without any too"
EXPONENTS: dict[str, Weights] = {  # of factors of the results of parts
    "exp(lse)": lambda p: p.lses,
    "exp(row_max)": lambda p: p.tops,
    "row_sum": lambda p: p.lses - _finite(p.tops),
    "1": lambda p: np.zeros_like(p.tops),
}
OVER: dict[str, Callable[[Parts, Floats], Floats]] = {  # which these factors are divided by
    "their sum": lambda p, x: np.logaddexp.reduce(x, axis=0),
    "the largest": lambda p, x: x.max(axis=0),
    "exp(lse)": lambda p, x: _whole(TAKEN[RIGHT], p),
    "exp(row_max)": lambda p, x: p.top,
    "row_sum": lambda p, x: _whole(TAKEN[RIGHT], p) - p.top,
    "": lambda p, x: 0 * p.top,
}


def _weighted(of: str, over: str, divided: bool, p: Parts) -> Floats:
    x = EXPONENTS[of](p)
    return _exp(x - _finite(OVER[over](p, x))) * (1.0 if divided else p.row_sums)


# what the results of parts are multiplied by
WEIGHTS: dict[str, Weights] = {text: partial(_shares, taken) for text, taken in TAKEN.items()} | {
    "one by one, beside an lse that holds the part already": _updated,
    SUMMED: lambda p: p.row_sums * _exp(p.tops - p.top) / p.row_sums.sum(axis=0),
    "exp2 of natural units, less the right lse of all": lambda p: _exp(
        LN_2 * (p.lses - _finite(_whole(TAKEN[RIGHT], p)))
    ),
    "the first part alone": lambda p: np.eye(len(p.tops))[0, :, None, None],
    "the last part alone": lambda p: np.eye(len(p.tops))[-1, :, None, None],
}
for of, over, own in product(EXPONENTS, OVER, (True, False)):
    text = f"{of} of each part{', not divided by its row sum' * (not own)}"
    text += f", over {over}" + " of all" * over.startswith(("exp", "row")) if over else ""
    WEIGHTS[text] = partial(_weighted, of, over, own)
LSES: dict[str, Callable[[Parts], Floats]] = {
    **{text: partial(_whole, taken) for text, taken in TAKEN.items()},
    SUMMED: lambda p: np.log(p.row_sums.sum(axis=0)) + p.top,
    UNGUARDED: partial(_whole, TAKEN["an lse of 0 for a part without keys"]),
    "the largest of the parts": lambda p: p.lses.max(axis=0),
    "of the first part alone": lambda p: p.lses[0],
    "of the last part alone": lambda p: p.lses[-1],
    "exp where lse is in base 2, and log2 of the sum": partial(_mixed, 1 / LN_2),
    "exp2 where lse is in natural units, and ln of the sum": partial(_mixed, LN_2),
}


def _moved(with_e: str, weights: str, parts: Parts, e: Floats) -> Floats:
    """The tangent of the merged out: of the parts' outs, and of their weights, with the right e, or
    that of the merge; "" for that of the outs alone."""
    e = _summed(RIGHT, parts, parts.es) if with_e == RIGHT else e
    more = (parts.es - e)[..., None] * parts.outs if with_e else 0.0
    return _summed(weights, parts, parts.touts + more)


def _summed(weights: str, parts: Parts, x: Floats) -> Floats:
    of = WEIGHTS[weights](parts)
    return np.asarray((of.reshape(*of.shape, *[1] * (x.ndim - of.ndim)) * x).sum(axis=0))


TOUTS = {
    **{text: partial(_moved, RIGHT, text) for text in WEIGHTS},
    "with that tlse": partial(_moved, "that", RIGHT),
    "without the tangents of the weights": partial(_moved, "", RIGHT),
}


def merged(
    parts: Parts, out: str = RIGHT, lse: str = RIGHT, e: str = RIGHT, tout: str = RIGHT
) -> Results:
    """The results of the parts, each divided by its own row sum, with weights of ``WEIGHTS``."""
    O = _summed(out, parts, parts.outs)  # noqa: E741
    none = np.isneginf(parts.lses).all(axis=0) & (lse != UNGUARDED)
    L = np.where(none, -np.inf, LSES[lse](parts))
    if "e" not in parts.sums:
        return Results(O, L, np.zeros_like(L), np.zeros_like(O))
    whole = _summed(e, parts, parts.es)
    return Results(O, L, whole, TOUTS[tout](parts, whole))


def steps(stage: str, cut: Cut, of: Callable[[Parts], Results]) -> Mapping[str, Step]:
    """A forward pass, or one in forward mode, whose results are made of parts."""

    def result(c: Context, name: str) -> Floats:
        with np.errstate(all="ignore"):
            c.results = of(parts_of(c, cut))
        c.O, c.L = c.results.out, c.results.lse
        return np.asarray(getattr(c.results, name))

    if stage == "forward":
        return {"L": lambda c: result(c, "lse"), "O": lambda c: c.results.out}
    return {"e": lambda c: result(c, "e"), "tO": lambda c: c.results.tout}


def of_splits(question: Question) -> Iterator[Bug]:
    """A forward pass in parts of the keys, which overlap, or have masks of their own."""
    for at, keys in parts_of_keys(question).items():
        form = f"the first key behind each part counts twice: {at}"
        edges = partial(lambda keys, i, j, n, m, t: np.diff(_starts(keys, m), prepend=0) > 0, keys)
        yield Bug("tile-counted-twice", form, FORWARD, each(stages.often, edges, 0, 2.0))
        if question.mask_window != (-1, -1):
            form = f"the mask counts keys from the start of each part: {at}"
            yield Bug("wrong-keys", form, FORWARD, each(_from_start, keys))
    for tile, rows in product(TILES, TILES) if question.mask_window != (-1, -1) else ():
        form = f"the loop over tiles of {tile} keys ends at the first one that is masked"
        see = each(_until_masked, tile, rows)
        yield Bug("tile-skipped", f"{form} for all of a tile of {rows} queries", FORWARD, see)


def _starts(keys: Keys, m: int) -> np.ndarray:
    """Of every one of so many keys where its part starts."""
    return np.concatenate([np.arange(0), *[np.full(len(part), part[:1]) for part in keys(m)]])


def _until_masked(tile: int, rows: int, question: Question, view: View) -> View:
    """For every tile of so many ``rows`` the keys in front of the first tile that none sees."""
    seen = view.weight[0] > 0
    tiles, found = np.arange(seen.shape[1]) // tile, view.weight.copy()
    for start in range(0, len(seen), rows):
        met = np.unique(tiles[seen[start : start + rows].any(axis=0)])
        found[:, start : start + rows] *= np.isin(tiles, met).cumprod()  # tiles ascend
    return replace(view, weight=found)


def _from_start(keys: Keys, question: Question, view: View) -> View:
    distance = distances(question, view) - _starts(keys, len(view.keys))
    seen = Window(*bounds(question)).holds(distance, distance)
    return replace(view, weight=seen[None].astype(np.float64))
