"""Bugs of loops over tiles, and of gradients and tangents that lack some, or have others too."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue.inputs import stored
from rawattn.check.diagnose.catalogue.maps import WHOLE, of_rows
from rawattn.check.diagnose.catalogue.masks import Window, bounds, distances
from rawattn.check.diagnose.catalogue.partial_sums import Keys, parts_of_keys
from rawattn.check.diagnose.engine.attention import FIRST, FORWARD, TILES, Bug, View, each
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, changed

# of queries (n, 1) and keys (1, m), by their places in a view, which pairs, for a size of tile
Part = Callable[[np.ndarray, np.ndarray, int, int, int], np.ndarray]
PARTS: tuple[tuple[str, str, Part], ...] = (
    ("tail-tile-dropped", "query rows", lambda i, j, n, m, t: i >= n // t * t),
    ("tail-tile-dropped", "keys", lambda i, j, n, m, t: j >= m // t * t),
    ("tile-skipped", "first of keys", lambda i, j, n, m, t: j // t == 0),
    ("tile-skipped", "second of keys", lambda i, j, n, m, t: j // t == 1),
    ("tile-skipped", "last of keys", lambda i, j, n, m, t: j // t == (m - 1) // t),
    ("tile-skipped", "diagonal", lambda i, j, n, m, t: j // t == (i + m - n) // t),
)


def tiles(question: Question) -> Iterator[Bug]:
    longest_q, longest_k = (max(x, default=0) for x in (question.lengths_q, question.lengths_k))
    for tile in (tile for tile in TILES if tile < 2 * max(longest_q, longest_k)):
        for name, words, part in PARTS:
            text = f"{words}, tile of {tile}"
            yield Bug(name, text, FIRST, each(_often, part, tile, 0.0))
            if name == "tile-skipped" and tile < longest_k:  # else everything is doubled
                yield Bug("tile-counted-twice", text, FIRST, each(_often, part, tile, 2.0))
        if tile < longest_q:  # else nothing is stored
            text, store = f"rows stored, tile of {tile}", stored(of_rows(WHOLE, tile))
            yield Bug("tail-tile-dropped", text, store=store)


def of_splits(question: Question) -> Iterator[Bug]:
    """A forward pass in parts of the keys, which overlap, or have masks of their own."""
    for at, keys in parts_of_keys(question).items():
        form = f"the first key behind each part counts twice: {at}"
        edges = partial(lambda keys, i, j, n, m, t: np.diff(_starts(keys, m), prepend=0) > 0, keys)
        yield Bug("tile-counted-twice", form, FORWARD, each(_often, edges, 0, 2.0))
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


def _often(part: Part, tile: int, factor: float, question: Question, view: View) -> View:
    n, m = len(view.rows), len(view.keys)
    i, j = np.ogrid[:n, :m]
    return replace(view, weight=view.weight * np.where(part(i, j, n, m, tile), factor, 1.0))


# how often a tile of a loop counts, by its place from one end, and from the other
Factor = Callable[[Context, np.ndarray, np.ndarray], Floats | np.ndarray]
RESULTS = {  # that a step gives, by the first of which what is wrong is known
    **{"e": {"tlse", "ddlse"}, "tO": {"tout", "ddout"}, "dQ": {"dq"}, "dK": {"dk"}, "dV": {"dv"}},
    **{"gQ": {"gq"}, "gK": {"gk"}, "gV": {"gv"}},
}
# terms in words, and by steps the operands of no other term; of tO P is that of P tV, tP P o E
SUMS: dict[str, dict[str, tuple[str, ...]]] = {
    "P o E of {e}": {"e": ("E",)},
    "(P o E) v of {out}": {"tO": ("tP",)},
    "P {t}v of {out}": {"tO": ("P",)},
    "P o E, (P o E) v and P {t}v": {"e": ("E",), "tO": ("tP", "P")},
    "dq": {"dQ": ("dY",)},
    "dk": {"dK": ("dY",)},
    "dv": {"dV": ("P",)},
    "dk and dv": {"dK": ("dY",), "dV": ("P",)},
    "dS' k of gq": {"gQ": ("tdY",)},
    "gq": {"gQ": ("tdY", "dY")},
    "gk": {"gK": ("tdY", "dY")},
    "gv": {"gV": ("tP",)},
    "gk and gv": {"gK": ("tdY", "dY"), "gV": ("tP",)},
}
OPERANDS = {step: {x for one in SUMS.values() for x in one.get(step, ())} for step in RESULTS}
OF_QUERIES = ("dK", "dV", "gK", "gV")  # sums over these
WORDS: dict[str, dict[str, str]] = {
    "jvp": {"t": "t", "e": "tlse", "out": "tout"},
    "second": {"t": "dd", "e": "ddlse", "out": "ddout"},
}
OVER, LACKS, TWICE, SCALE = "tile-overwrites", "tile-skipped", "tile-counted-twice", "output-scale"
EVENTS: tuple[tuple[str, str, Factor], ...] = (
    (OVER, "the {} tile alone", lambda c, at, back: at == 0),
    (LACKS, "without the {} tile", lambda c, at, back: at > 0),
    (TWICE, "the {} tile twice", lambda c, at, back: 1 + (at == 0)),
    (SCALE, "s inside of the loop from the {} tile", lambda c, at, back: c.s**back),
)
Weights = Callable[[Context, int], Floats]  # of pairs, and along their axis of queries or keys


def sums(question: Question, stage: str, wrong: Collection[str]) -> Iterator[Bug]:
    """All of a stage that change something ``wrong``; of tiles that look alike large ones first."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    found = [x for x in SUMS.items() if RESULTS[next(iter(x[1]))] & {*wrong}]
    for (said, terms), tile in product(found, (tile for tile in TILES[::-1] if tile < longest)):
        for name, words, weights in _weights(question, tile):
            steps = {x: partial(_summed, x, operands, weights) for x, operands in terms.items()}
            text = f"{said.format(**WORDS.get(stage, {}))}: {words}, tile of {tile}"
            yield Bug(name, text, (stage,), steps=steps)


def _weights(question: Question, tile: int) -> Iterator[tuple[str, str, Weights]]:
    others = (tile, 2 * tile, tile // 2) if question.mask_window != (-1, -1) else ()
    for (name, words, factor), end, other in product(EVENTS, ("first", "last"), (0, *others)):
        more = f" of those that {other} rows together see something of" * (other > 0)
        yield name, words.format(end) + more, partial(_by_tile, factor, end == "last", tile, other)
    yield "tail-tile-dropped", "no partial tile", partial(_whole, tile)


def _summed(step: str, operands: Collection[str], weights: Weights, c: Context) -> Floats:
    """A step of which these operands' term is weighed."""
    right = STEPS[step](c)
    c = changed(c, tP=c.P * c.E) if step == "tO" else c
    others = {name: 0.0 * getattr(c, name) for name in OPERANDS[step] - {*operands}}
    alone, by = changed(c, **others), weights(c, int(step not in OF_QUERIES))
    weighed = changed(alone, **{name: by * getattr(c, name) for name in operands})
    return np.asarray(right + STEPS[step](weighed) - STEPS[step](alone))


def _by_tile(of: Factor, last: bool, tile: int, other: int, c: Context, axis: int) -> Floats:
    """A factor (n, m) for every tile of keys of which ``other`` queries together see any, or, of 0
    queries, for every one; of axis 0 for tiles of queries that so many keys are seen by."""
    seen = (c.W > 0).any(axis=0) | (not other)
    seen = seen if axis == 1 else seen.T
    tiles, weight = np.arange(seen.shape[1]) // tile, np.zeros(seen.shape)
    together = other or len(seen)
    for start in range(0, len(seen), max(together, 1)):
        here = slice(start, start + together)
        there = np.unique(tiles[seen[here].any(axis=0)])
        known = np.isin(tiles, there)
        at = np.searchsorted(there, tiles[known])
        ends = at, len(there) - 1 - at
        weight[here, known] = of(c, *(ends[::-1] if last else ends))
    return weight if axis == 1 else weight.T


def _whole(tile: int, c: Context, axis: int) -> Floats:
    """No pairs of a last tile that is partial."""
    at, count = np.ogrid[: c.S.shape[1], : c.S.shape[2]][axis], c.S.shape[1 + axis]
    return np.where(at < count // tile * tile, 1.0, 0.0)
