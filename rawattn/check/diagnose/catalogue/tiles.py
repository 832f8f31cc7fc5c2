"""Bugs of loops over tiles, and of rows that see nothing."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue.maps import WHOLE, of_rows
from rawattn.check.diagnose.catalogue.masks import Window, bounds, distances
from rawattn.check.diagnose.catalogue.partial_sums import Keys, parts_of_keys
from rawattn.check.diagnose.catalogue.reading import stored
from rawattn.check.diagnose.catalogue.second_order import with_values
from rawattn.check.diagnose.engine.attention import FIRST, FORWARD, TILES, Bug, View, each, views_of
from rawattn.check.diagnose.engine.question import BY_ROW, OF_KEYS, OF_SLOTS, Answers, Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats

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
        yield Bug("tile-counted-twice", form, FORWARD, each(_twice_at_edges, keys))
        if question.mask_window != (-1, -1):
            form = f"the mask counts keys from the start of each part: {at}"
            yield Bug("wrong-keys", form, FORWARD, each(_from_start, keys))
    for tile, rows in product(TILES, TILES) if question.mask_window != (-1, -1) else ():
        form = f"the loop over tiles of {tile} keys ends at the first one that is masked"
        see = each(_until_masked, tile, rows)
        yield Bug("tile-skipped", f"{form} for all of a tile of {rows} queries", FORWARD, see)


def _starts(keys: Keys, view: View) -> np.ndarray:
    """Of every key where its part starts."""
    parts = [np.full(len(part), part[:1]) for part in keys(len(view.keys))]
    return np.concatenate([np.arange(0), *parts])


def _twice_at_edges(keys: Keys, question: Question, view: View) -> View:
    there = np.diff(_starts(keys, view), prepend=0) > 0
    return replace(view, weight=view.weight * np.where(there, 2.0, 1.0))


def _until_masked(tile: int, rows: int, question: Question, view: View) -> View:
    """For every tile of so many ``rows`` the keys in front of the first tile that none sees."""
    seen = view.weight[0] > 0
    tiles, found = np.arange(seen.shape[1]) // tile, view.weight.copy()
    for start in range(0, len(seen), rows):
        met = np.unique(tiles[seen[start : start + rows].any(axis=0)])
        found[:, start : start + rows] *= np.isin(tiles, met).cumprod()  # tiles ascend
    return replace(view, weight=found)


def _from_start(keys: Keys, question: Question, view: View) -> View:
    distance = distances(question, view) - _starts(keys, view)
    seen = Window(*bounds(question)).holds(distance, distance)
    return replace(view, weight=seen[None].astype(np.float64))


def _often(part: Part, tile: int, factor: float, question: Question, view: View) -> View:
    n, m = len(view.rows), len(view.keys)
    i, j = np.ogrid[:n, :m]
    there = part(i, j, n, m, tile)
    return replace(view, weight=view.weight * np.where(there, factor, 1.0))


def dead(question: Question) -> np.ndarray:
    """(total_q, num_heads_q): rows of sequences that see no key."""
    alive = _row_mask(lambda seen: np.asarray(seen.any(axis=2)), question)
    return ~alive & (question.sequence_of("q") >= 0)[:, None]


def _row_mask(of: Callable[[np.ndarray], np.ndarray], question: Question) -> np.ndarray:
    """What ``of`` makes (heads, n) of who sees whom (heads, n, m), as (total_q, num_heads_q)."""
    found = np.zeros(question.q.shape[:2], dtype=bool)
    for view in views_of(question):
        shape = len(view.heads), len(view.rows)
        found[view.rows[:, None], view.heads] = np.broadcast_to(of(view.weight > 0), shape).T
    return found


def of_late(question: Question, rows: np.ndarray) -> Iterator[Bug]:
    """NaN in ``rows`` (total_q, num_heads_q) without a key where the running maximum starts."""
    sides = zip(("first", "last"), bounds(question), strict=True)
    ends = [words for words, side in sides if side < math.inf]
    packed = (t // question.group for t in (48, *TILES) if t % question.group == 0)
    for words, tile, of in product(ends, TILES, sorted({48, *TILES, *packed})):
        for more, every in {", and rows without keys": True, "": False}.items():
            late = partial(_row_mask, partial(_late, tile, of, words == "last", every))
            if np.array_equal(late(question), rows):
                form = f"from the {words} visible on, {of} by {tile}{more}"
                yield Bug("masked-tile-nan", form, FIRST, store=partial(_spoilt, late))


def _late(tile: int, rows: int, last: bool, every: bool, seen: np.ndarray) -> np.ndarray:
    """Rows that see keys, or ``every`` one, but none in the tile where the running maximum starts:
    the first one, or the ``last``, of which a tile of queries sees any."""
    found, tiles = np.asarray(seen.any(axis=2)), np.arange(seen.shape[2]) // tile
    found[:] |= every
    end, none = (np.max, -1) if last else (np.min, len(tiles))
    for start in range(0, seen.shape[1], rows):
        here = seen[:, start : start + rows]
        first = end(np.where(here.any(axis=1), tiles, none), axis=1, initial=none)
        met = here & (tiles == first[:, None, None])
        found[:, start : start + rows] &= ~met.any(axis=2) & (first != none)[:, None]
    return found


def _spoilt(of: Callable[[Question], np.ndarray], question: Question, answers: Answers) -> Answers:
    """NaN in these rows, and in the gradients of the keys that they would add to."""
    found, rows = {}, of(question)
    for name, x in answers.items():
        y = x.copy()
        if name in BY_ROW:
            y[rows.T] = np.nan
        elif name in OF_KEYS:
            for view in views_of(question):
                if rows[view.rows][:, view.heads].any():
                    y[view.keys, view.head_kv] = np.nan
        elif name not in OF_SLOTS:
            y[rows] = np.nan
        found[name] = y
    return found


def dead_rows(question: Question) -> Iterator[Bug]:
    if not dead(question).any():
        return
    yield Bug("dead-rows", "NaN", FIRST, store=partial(_spoilt, dead))
    uniform = with_values("bP", L=lambda c: np.where(np.isneginf(c.L), np.log(c.S.shape[2]), c.L))
    yield Bug("dead-rows", "mean of v", FIRST, steps={"S": _zero_dead, "bP": uniform})


def _zero_dead(c: Context) -> Floats:
    """Scores of -1e30, say, for all keys of a row: equal, and so is their softmax."""
    return np.where((c.W > 0).any(axis=2, keepdims=True), STEPS["S"](c), 0.0)
