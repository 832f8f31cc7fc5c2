"""Lists of keys that are wrong: who sees whom, by bounds, tiles, offsets, chunks and documents.
Long by the table."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.diagnose.hooks import or_seen, padding, seen, times, with_zeros
from tests.diagnose.plain import FLOAT16, ZEROS, Array, Head, answers
from tests.diagnose.problems import DTYPES, problems
from tests.diagnose.stores import by_sequences, stored
from tests.diagnose.table import FEW, Hooks, Table, plants

__all__ = ["PLANTED", "answers", "problems"]
Test = Callable[[Head], Any]


def ceil(x: Any, tile: int) -> Any:
    return -(-x // tile)


# ---- which keys -------------------------------------------------------------------------------


def open_tile(keys: int) -> Hooks:
    return seen(lambda c: c.j < (c.p // keys + 1) * keys)


def of_rows(test: Test) -> Hooks:
    """Any row of k may be seen; ``test`` goes by the row r, counted from the pack's first."""
    return {"keys": lambda c, x: np.arange(c.total_k)} | seen(test)


def part(c: Head, number: int, parts: int) -> Any:
    return c.j // ceil(c.m, parts) == number


def irregular_span(c: Head) -> Array:
    """As if bounds of a loop were read from a wrong table."""
    first = c.i * 7 % 5
    return (c.j >= first) & (c.j <= np.maximum(c.p + c.i * 5 % 7 - 3, first))


def by_document(c: Head) -> Array:
    """Keys of its own document, of three that alternate."""
    return (c.j % 3 == c.i % 3) | (c.j == 0) | (c.j**2 % 7 == c.i % 7)


def tails(c: Head, x: Array) -> Array:
    """The last tile of the sequence before goes on over the first rows."""
    over = (c.i < -c.question.lengths_q[c.b - 1] % 32) & (c.b > 0)
    before = (c.r < c.start_k) & (c.r >= int(c.question.cu_seqlens_k[c.b - 1]))
    return np.where(over, before, x & (c.j >= 0) & (c.j < c.m))


def left_side(by: Test) -> Hooks:
    return seen(lambda c: (c.j >= np.maximum(by(c), 0)) & (c.j <= c.p + c.window[1]))


# ---- which rows are stored --------------------------------------------------------------------


@by_sequences
def never_run(x: Array, start: int, stop: int) -> Array:
    """0 in rows of q, where tiles are counted by the offsets, as if these began at tiles."""
    found, run = x[start:stop].copy(), (ceil(stop, 16) - ceil(start, 16)) * 16
    found[run:] = 0
    return found


# ---- the table --------------------------------------------------------------------------------

_USUAL = FEW | {"lengths": (34, 90), "lengths_k": ("equal",), "same_dims": 1.0, "scaled": 0.0}
_USUAL |= {"heads_kv": (1, 2, 4), "head_dims": (24, 32, 64), "dlse": 0.3}
_USUAL |= {"dtypes": (*DTYPES, FLOAT16)}
_LONGER = {"lengths_k": ("more",)}
_DOCUMENTS = {"lengths": (20, 48), "head_dims": (32,), "heads_kv": (2, 4)}
_ROW_SIDE = left_side(lambda c: c.i - c.window[0])
_FIRST_LENGTH = times(lambda c: c.j < c.question.lengths_k[0])
_HALF, _QUARTER = times(lambda c: part(c, 0, 2)), times(lambda c: 1 + part(c, 2, 4))
_FIRST_TWICE = times(lambda c: 1 + ((c.j > 0) & (c.j % 16 == 0)))
_TAILS = {"keys": lambda c, x: np.arange(c.total_k), "seen": tails}
_LEFT_PADDED = {"keys": lambda c, x: np.concatenate([np.full(padding(c), ZEROS), x])[: len(x)]}
_AS_FROM_Q = of_rows(lambda c: (c.r >= c.start_q) & (c.r < c.start_q + c.m))
_NEXT_SEQUENCE = of_rows(
    lambda c: (c.r >= c.m * (c.b == 0)) & (c.r < sum(c.question.lengths_k[: 1 + (c.b == 0)]))
)
_AS_LONGEST = of_rows(lambda c: (c.r >= c.start_k) & (c.r - c.start_k < max(c.question.lengths_k)))
_IN_WINDOW = of_rows(lambda c: (c.j >= c.p - c.window[0]) & (c.j <= c.p + c.window[1]))
_NO_TAIL = or_seen(lambda c: c.i >= c.n // 16 * 16)


def last_row(c: Head, tile: int) -> Array:
    """Of the tile of queries that a query is in."""
    return np.minimum(c.i // tile * tile + tile, c.n) - 1


_FROM_ITS_TILE = times(lambda c: c.i // 16 >= c.j // 16)
_TO_ITS_TILE = times(lambda c: c.j // 16 <= last_row(c, 32) // 16)
_FROM_LAST_ROW = times(lambda c: c.j // 16 >= (last_row(c, 16) + c.m - c.n - c.window[0]) // 16)
_CAUSAL: Table = (
    ("wrong-keys: own tile of 16 open", "fb", open_tile(16)),
    ("wrong-keys: own tile of 32 open, more keys", "fb", open_tile(32), _LONGER),
    ("wrong-keys: tiles by number, 16 by 32", "fb", times(lambda c: c.j // 16 <= c.i // 32)),
    ("wrong-keys: counted from a chunk", "fb", seen(lambda c: c.j <= c.i % 32)),
    ("wrong-keys: packed row of q", "fb", seen(lambda c: c.j <= c.start_q + c.i)),
    ("wrong-keys: prefix of 5 seen by all", "fb", seen(lambda c: (c.j <= c.p) | (c.j < 5))),
    ("wrong-keys: five keys more", "fb", seen(lambda c: c.j <= c.p + 5)),
    ("wrong-keys or pairs-dropped: to the end of the tile, top left", "fb", _TO_ITS_TILE, _LONGER),
    ("pairs-dropped: from the tile, top left", "b", _FROM_ITS_TILE, _LONGER),
    ("wrong-keys: every second key", "fb", times(lambda c: (c.p - c.j) % 2 == 0)),
    ("wrong-keys: transposed", "fb", seen(lambda c: c.j >= c.p)),
    ("wrong-keys or tail-tile-dropped: no more than 32 keys", "fb", times(lambda c: c.j < 32)),
    ("wrong-keys or causal-dropped: no mask in the tail tile", "fb", _NO_TAIL),
    ("wrong-keys: a span of its own by row", "fb", seen(irregular_span)),
    ("wrong-keys: backward alone: five more", "b", seen(lambda c: c.j <= c.p + 5)),
    ("causal-dropped: in every second head", "fb", or_seen(lambda c: c.h % 2 == 1)),
    ("mask-missing-in-backward: in the own tile", "b", open_tile(16)),
    ("pairs-dropped: tiles by number, 32 by 16", "b", times(lambda c: c.j // 16 <= c.i // 32)),
    ("rows-not-written or tail-tile-dropped: out and lse", "f", stored(never_run, "out", "lse")),
)
_WINDOW: Table = (
    ("wrong-keys: left side without the difference of lengths", "fb", _ROW_SIDE, _LONGER),
    ("wrong-keys: from the window of a tile's last row", "f", _FROM_LAST_ROW, _LONGER),
    ("wrong-keys: sinks", "fb", or_seen(lambda c: (c.j < 4) & (c.j <= c.p))),
    ("wrong-keys: window on both sides", "fb", seen(lambda c: abs(c.j - c.p) <= c.window[0])),
    ("wrong-keys: twice the window", "fb", left_side(lambda c: c.p - 2 * c.window[0])),
    ("neighbour-leak: window into the neighbours", "fb", _IN_WINDOW),
)
_OPEN: Table = (
    ("wrong-keys or offsets-shifted: keys from cu_seqlens_q", "fb", _AS_FROM_Q, _LONGER),
    ("wrong-keys: keys of the next sequence", "fb", _NEXT_SEQUENCE),
    ("wrong-keys or tail-tile-dropped or tile-skipped: length of sequence 0", "fb", _FIRST_LENGTH),
    ("wrong-keys: left padding", "fb", _LEFT_PADDED),
    ("wrong-keys or tile-skipped or tail-tile-dropped: a half alone", "fb", _HALF),
    ("wrong-keys or tile-counted-twice: a quarter twice", "fb", _QUARTER),
    ("wrong-keys: own key twice", "fb", times(lambda c: 1 + (c.j == c.p))),
    ("wrong-keys: own key hidden", "fb", times(lambda c: c.j != c.p)),
    ("wrong-keys: own chunk alone", "fb", times(lambda c: c.j // 16 == c.p // 16)),
    ("wrong-keys: causal, not asked for", "fb", times(lambda c: c.j <= c.p)),
    ("wrong-keys: a window, not asked for", "fb", times(lambda c: abs(c.j - c.p) <= 11)),
    ("wrong-keys: first key of every tile twice", "fb", _FIRST_TWICE),
    ("neighbour-leak or wrong-keys: tail rows of the sequence before", "fb", _TAILS),
    ("wrong-keys: documents", "fb", times(by_document), _DOCUMENTS),
    ("padded-keys or denominator: 5 rows of zeros", "fb", with_zeros(lambda c: 5)),
    ("neighbour-leak or wrong-keys: as many rows as the longest", "fb", _AS_LONGEST),
    ("rows-not-written: dq", "b", stored(never_run, "dq")),
)
PLANTED = (
    *plants(_CAUSAL, lambda on: _USUAL | {"masks": ("causal",)}),
    *plants(_WINDOW, lambda on: _USUAL | {"masks": ("window",)}),
    *plants(_OPEN, lambda on: _USUAL | {"masks": ("open",)}),
)
