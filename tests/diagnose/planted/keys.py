"""Lists of keys that are wrong: who sees whom, by bounds, tiles, offsets, chunks and documents.

Long by the table.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import Question
from tests.diagnose.hooks import STAGES_OF, Hooks, bounds, kernel, seen, stored, times
from tests.diagnose.plain import ZEROS, Array, Head, Planted, answers
from tests.diagnose.problems import DTYPES, Needs, problems

__all__ = ["PLANTED", "answers", "problems"]
Test = Callable[[Head], Any]


def ceil(x: Any, tile: int) -> Any:
    return -(-x // tile)


def up_to(x: Array, tile: int) -> Array:
    """The first row of the tile of x."""
    return x // tile * tile


# ---- which keys -------------------------------------------------------------------------------


def tile_local(rows: int, keys: int) -> Hooks:
    """The mask of a tile with the diagonal in it compares places within the tiles."""

    def test(c: Head) -> Array:
        first = up_to(c.i, rows)
        found = (up_to(c.j, keys) + keys - 1 <= first) | (c.j % keys <= c.i % rows)
        return found & (c.j < ceil(first + rows, keys) * keys)

    return seen(test)


def last_tile_alone_masked(rows: int, keys: int) -> Hooks:
    def test(c: Head) -> Array:
        last = ceil(up_to(c.i, rows) + rows + c.m - c.n, keys) - 1
        return (c.j // keys < last) | ((c.j // keys == last) & (c.j <= c.p))

    return seen(test)


def open_tile(keys: int) -> Hooks:
    return seen(lambda c: c.j < (c.p // keys + 1) * keys)


def zigzag(parts: int) -> Hooks:
    """The mask goes by the place of a key, where keys are stored in the order of a ring's ranks."""

    def test(c: Head) -> Array:
        size = c.m // (2 * parts)
        chunks = [x for rank in range(parts) for x in (rank, 2 * parts - 1 - rank)]
        keys = np.concatenate([np.arange(x * size, (x + 1) * size) for x in chunks])
        return np.argsort(keys)[None, : c.m] <= c.p

    return seen(test)


def of_rows(test: Test) -> Hooks:
    """Any row of k may be seen; ``test`` goes by the row r, counted from the pack's first."""
    return {"keys": lambda c, x: np.arange(c.total_k)} | seen(test)


def spans(c: Head, lengths: Any) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)])


def other_boundaries(c: Head) -> Array:
    """Sequences begin where those of another batch with as many tokens did."""
    starts = spans(c, c.question.lengths_q[::-1])
    token = c.start_q + c.i
    b = np.searchsorted(starts, token, side="right") - 1
    left, right = (10**6 if side < 0 else side for side in c.window)
    stop = np.minimum(token + right + 1, starts[np.minimum(b + 1, len(starts) - 1)])
    return (c.r >= np.maximum(starts[b], token - left)) & (c.r < stop)


def next_sequence(c: Head) -> Array:
    lengths = c.question.lengths_k
    start, length = (0, lengths[0]) if c.b else (c.m, lengths[1])
    return (c.r >= start) & (c.r < start + length) & (c.i >= 0)


def with_zeros(number: Callable[[Head], int], hidden: bool = False) -> Hooks:
    """Zeros in front of the keys; hidden: as many of the last keys are not seen."""

    def keys(c: Head, x: Array) -> Array:
        zeros = np.full(number(c), ZEROS)
        return np.concatenate([zeros, x])[: len(x)] if hidden else np.concatenate([x, zeros])

    def see(c: Head, x: Array) -> Array:
        return np.where(c.r == ZEROS, True, x)

    return {"keys": keys, "seen": see}


def part(number: int, parts: int) -> Test:
    return lambda c: c.j // ceil(c.m, parts) == number


def irregular_span(c: Head) -> Array:
    """As if bounds of a loop were read from a wrong table."""
    first = c.i * 7 % 5
    return (c.j >= first) & (c.j <= np.maximum(c.p + c.i * 5 % 7 - 3, first))


def by_document(c: Head) -> Array:
    """Keys of its own document, of three that alternate."""
    return (c.j % 3 == c.i % 3) | (c.j == 0) | (c.j**2 % 7 == c.i % 7)


def some_heads(c: Head, x: Array) -> Array:
    return x | bool(c.h % 2)


def tail_of_another(tile: int) -> Hooks:
    """The tail of a tile of queries is stored over the next sequence's first rows."""

    def test(c: Head) -> Array:
        q, token = c.question, c.start_q + c.i
        found = (c.r >= c.start_k) & (c.r < c.start_k + c.m)
        found = np.broadcast_to(found, (c.n, c.total_k)).copy()
        for b in reversed(range(c.b)):
            end = int(q.cu_seqlens_q[b + 1])
            over = (token >= end) & (token < end + -q.lengths_q[b] % tile)
            start, stop = (int(x) for x in q.cu_seqlens_k[b : b + 2])
            found = np.where(over, (c.r >= start) & (c.r < stop), found)
        return found

    return of_rows(test)


def packed_group(rows: int, tile: int) -> Hooks:
    """Causal by rows that are every head of every query; cut at the end of the last key tile."""

    def test(c: Head) -> Array:
        last = np.minimum(up_to(c.i, rows) + rows, c.n) + c.m - c.n
        stop = ceil(last, tile) * tile
        return c.j < np.minimum(c.group * c.i + c.h % c.group + 1, stop)

    return seen(test)


def left_edge_in_first_tile(rows: int, tile: int) -> Hooks:
    """The left edge of the window is masked in the first key tile of a tile of queries alone."""

    def see(c: Head, x: Array) -> Array:
        first = up_to(np.maximum(c.p - c.i % rows - c.window[0], 0), tile)
        return x | ((c.j >= first + tile) & (c.j <= c.p + c.window[1]))

    return {"seen": see}


def left_side(by: Test) -> Hooks:
    return seen(lambda c: (c.j >= np.maximum(by(c), 0)) & (c.j <= c.p + c.window[1]))


def and_seen(test: Test) -> Hooks:
    return {"seen": lambda c, x: x & test(c)}


def dropout(share: float, rescaled: bool = True) -> Hooks:
    def kept(c: Head) -> Array:
        rng = np.random.default_rng((7, c.b, c.h))
        return (rng.random(c.seen.shape) >= share) / (1 - share if rescaled else 1)

    return {
        "softmax": lambda c, x: (x[0], (np.exp(c.S - x[0]) * kept(c)) @ c.V),
        "dP": lambda c, x: x * kept(c),
        "P of dv": lambda c, x: x * kept(c),
    }


# ---- which rows are stored --------------------------------------------------------------------


def never_run(x: Array, name: str, question: Question, tile: int = 16) -> Array:
    """0 in rows of q, where tiles are counted by the offsets, as if these began at tiles."""
    x = x.copy()
    for start, end in bounds("q", question):
        first = min(start + (ceil(end, tile) - ceil(start, tile)) * tile, end)
        (x.T if name == "lse" else x)[first:end] = 0.0
    return x


# ---- the table --------------------------------------------------------------------------------


def planted(bug: str, mask: str, *variants: tuple[Any, ...], on: str = "fb") -> list[Planted]:
    """``variants``: in words, what is wrong, more needs, and classes that are the same function."""
    found = []
    for words, wrong, *more in variants:
        needs = Needs(**_USUAL | {"masks": (mask,)} | (more[0] if more else {}))
        also = tuple(more[1:])
        found.append(Planted(bug, words, STAGES_OF[on], kernel(wrong), needs, also))
    return found


_USUAL: dict[str, Any] = {
    "lengths": (34, 90),
    "lengths_k": ("equal",),
    "batch": (2, 3),
    "heads_kv": (1, 2, 4),
    "groups": (1, 2),
    "head_dims": (24, 32, 64),
    "same_dims": 1.0,
    "scaled": 0.0,
    "dlse": 0.3,
    "past_end": 0.0,
    "least": 0.03,
    "dtypes": (*DTYPES, np.dtype("float16")),
}
_LONGER = {"lengths_k": ("more",)}
_SMALL = {"lengths": (34, 60), "head_dims": (64,), "heads_kv": (1, 2), "dtypes": DTYPES[:2]}
_GROUP_OF_2 = {"heads_kv": (2, 4), "groups": (1, 2)}

PLANTED: tuple[Planted, ...] = (
    *planted(
        *("wrong-keys", "causal"),
        ("tile-local comparison, 32 by 16", tile_local(32, 16)),
        ("tile-local comparison, 16 by 32", tile_local(16, 32)),
        (
            "last tile of 32 left out",
            seen(lambda c: (c.j <= c.p) & (c.j < up_to(up_to(c.i, 16) + 16, 32))),
            {"lengths": (40, 90)},
        ),
        ("own tile of 16 open", open_tile(16)),
        ("own tile of 32 open, more keys", open_tile(32), _LONGER),
        ("only the last tile is masked", last_tile_alone_masked(64, 16)),
        ("tiles by number, 16 by 32", and_seen(lambda c: c.j // 16 <= c.i // 32)),
        ("counted from a chunk", seen(lambda c: c.j <= c.i % 32)),
        ("packed row of q", seen(lambda c: c.j <= c.start_q + c.i)),
        ("a third of the packed row of k", seen(lambda c: c.j + c.start_k // 3 <= c.p)),
        ("prefix of 5 seen by all", seen(lambda c: (c.j <= c.p) | (c.j < 5))),
        ("zigzag, mask by place", zigzag(2), {"multiple": 4}),
        ("boundaries of another batch, causal", of_rows(other_boundaries)),
        ("own shard open", seen(lambda c: c.j < (c.p // ceil(c.m, 3) + 1) * ceil(c.m, 3))),
        ("five keys more", seen(lambda c: c.j <= c.p + 5)),
        ("every second key", and_seen(lambda c: (c.p - c.j) % 2 == 0)),
        ("transposed", seen(lambda c: c.j >= c.p), {}, "mask-inverted"),
        ("no more than 32 keys", and_seen(lambda c: c.j < 32), {}, "tail-tile-dropped"),
        (
            "no mask in the tail tile",
            {"seen": lambda c, x: x | (c.i >= up_to(c.n, 16))},
            *({}, "causal-dropped"),
        ),
        ("a span of its own by row", seen(irregular_span)),
        ("packed heads", packed_group(16, 32), _GROUP_OF_2),
        ("packed heads, 8 by 16", packed_group(8, 16), _GROUP_OF_2),
    ),
    *planted(
        *("wrong-keys", "causal"),
        ("backward alone: five more", seen(lambda c: c.j <= c.p + 5)),
        on="b",
    ),
    *planted(
        *("wrong-keys", "window"),
        (
            "left side without the difference of lengths",
            left_side(lambda c: c.i - c.window[0]),
            _LONGER,
        ),
        ("left side rounded down to 16", left_side(lambda c: up_to(c.p - c.window[0], 16))),
        ("sinks", {"seen": lambda c, x: x | ((c.j < 4) & (c.j <= c.p))}),
        ("window on both sides", seen(lambda c: abs(c.j - c.p) <= c.window[0])),
        ("twice the window", left_side(lambda c: c.p - 2 * c.window[0])),
        ("left edge in the first tile", left_edge_in_first_tile(32, 16)),
        ("left edge in the first of 8", left_edge_in_first_tile(16, 8)),
    ),
    *planted(
        *("wrong-keys", "open"),
        ("boundaries of another batch", of_rows(other_boundaries)),
        (
            "keys from cu_seqlens_q",
            of_rows(lambda c: (c.r >= c.start_q) & (c.r < c.start_q + c.m) & (c.i >= 0)),
            *(_LONGER, "offsets-shifted"),
        ),
        ("keys of the next sequence", of_rows(next_sequence)),
        (
            "length of sequence 0",
            and_seen(lambda c: c.j < c.question.lengths_k[0]),
            *({}, "tail-tile-dropped", "tile-skipped"),
        ),
        ("left padding", with_zeros(lambda c: max(c.question.lengths_k) - c.m, hidden=True)),
        ("a third is missing", and_seen(lambda c: ~part(1, 3)(c))),
        ("a half alone", and_seen(part(0, 2)), {}, "tile-skipped", "tail-tile-dropped"),
        ("a quarter twice", times(lambda c: 1 + part(2, 4)(c)), {}, "tile-counted-twice"),
        ("own key twice", times(lambda c: 1 + (c.j == c.p))),
        ("own key hidden", and_seen(lambda c: c.j != c.p)),
        ("own chunk alone", and_seen(lambda c: c.j // 16 == c.p // 16)),
        ("causal, not asked for", and_seen(lambda c: c.j <= c.p)),
        ("a window, not asked for", and_seen(lambda c: abs(c.j - c.p) <= 11)),
        (
            "odd tiles of 16 at the end",
            and_seen(lambda c: c.j < ceil(c.m, 16) // 2 * 32),
            *({}, "tail-tile-dropped", "tile-skipped"),
        ),
        ("first key of every tile twice", times(lambda c: 1 + ((c.j > 0) & (c.j % 16 == 0)))),
        ("tail rows of the sequence before", tail_of_another(32)),
        (
            "documents",
            and_seen(by_document),
            {"lengths": (20, 48), "head_dims": (32,), "heads_kv": (2, 4)},
        ),
    ),
    *planted(
        *("padded-keys", "open", ("5 rows of zeros", with_zeros(lambda c: 5), {}, "denominator")),
    ),
    *planted(
        *("neighbour-leak", "open"),
        (
            "as many rows as the longest",
            of_rows(
                lambda c: (
                    (c.r >= c.start_k) & (c.r < c.start_k + max(c.question.lengths_k)) & (c.i >= 0)
                )
            ),
            *({}, "wrong-keys"),
        ),
    ),
    *planted(
        *("neighbour-leak", "window"),
        (
            "window into the neighbours",
            of_rows(lambda c: (c.j >= c.p - c.window[0]) & (c.j <= c.p + c.window[1])),
        ),
    ),
    *planted("causal-dropped", "causal", ("in every second head", {"seen": some_heads})),
    *planted("mask-missing-in-backward", "causal", ("in the own tile", open_tile(16)), on="b"),
    *planted(
        *("pairs-dropped", "causal"),
        ("tiles by number, 32 by 16", and_seen(lambda c: c.j // 16 <= c.i // 32)),
        on="b",
    ),
    *planted(
        *("dropout", "causal"),
        ("p = 0.1", dropout(0.1), _SMALL),
        ("p = 0.3", dropout(0.3), _SMALL),
        ("p = 0.2, not rescaled", dropout(0.2, rescaled=False), _SMALL),
    ),
    *planted(
        *("rows-not-written", "causal"),
        ("out and lse", stored(never_run, "out", "lse"), {}, "tail-tile-dropped"),
        on="f",
    ),
    *planted("rows-not-written", "open", ("dq", stored(never_run, "dq")), on="b"),
)
