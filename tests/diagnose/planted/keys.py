"""Attention row by row over a list of keys, and lists that are wrong.

Separate from what rawattn-check matches answers with: a plant says, for one query at a time, which
rows of k it sees and how often, and every sum is a loop over rows. ``PLANTED``, ``problems`` and
``answers`` are as in ``planted``.

Long by the table.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count as counted
from typing import Any, NamedTuple
from zlib import crc32

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question

Array = np.ndarray[Any, Any]
ZEROS = -1  # a row of zeros in the place of k and v
FLOAT32, FLOAT64 = np.dtype("float32"), np.dtype("float64")
DTYPES = (FLOAT64, FLOAT32, np.dtype(ml_dtypes.bfloat16), np.dtype("float16"))


class Row(NamedTuple):
    """One query: number ``i`` of sequence ``b``, and its head; p is its place among the keys."""

    b: int
    i: int
    head: int
    p: int
    n: int
    m: int
    start_q: int
    start_k: int
    left: int  # of the window, past every key where there is none
    right: int
    lengths_q: list[int]
    lengths_k: list[int]
    total_k: int
    group: int

    def sees(self, j: int) -> bool:
        return self.p - self.left <= j <= self.p + self.right


Keys = list[tuple[int, float]]  # rows of k and how often each is seen
Sight = Callable[[Row], Keys]


def right_keys(x: Row) -> Keys:
    return own(x, [j for j in range(x.m) if x.sees(j)])


def own(x: Row, keys: Any) -> Keys:
    """Keys by their number in the query's own sequence."""
    return [(x.start_k + j, 1.0) for j in keys if 0 <= j < x.m]


def where(test: Callable[[Row, int], bool]) -> Sight:
    """The keys of the own sequence for which ``test`` holds."""
    return lambda x: own(x, [j for j in range(x.m) if test(x, j)])


@dataclass(frozen=True)
class Planted:
    """A bug of class ``bug``, in ``stages``. ``also``: classes that are the same function.

    mask: "causal", "open" or "window"; longer: sequences of k are longer than those of q.
    """

    bug: str
    variant: str
    sight: Sight
    mask: str = "causal"
    longer: bool = False
    equal: bool = False  # all sequences are of one length
    stages: tuple[str, ...] = ("forward", "backward")
    also: tuple[str, ...] = ()
    multiple: int = 1  # of which all lengths are
    lengths: tuple[int, int] = (34, 90)
    dropped: float = 0.0  # share of the weights
    rescaled: bool = True
    stored: str = ""  # what is stored over the next sequence's first rows
    tile: int = 32
    heads: tuple[int, ...] = (2, 4)
    dims: tuple[int, ...] = (24, 32, 64)


# ---- which keys -------------------------------------------------------------------------------


def tile_local(rows: int, keys: int) -> Sight:
    """The mask of a tile with the diagonal in it compares places within the tiles."""

    def test(x: Row, j: int) -> bool:
        first = x.i // rows * rows
        if j >= -(-(first + rows) // keys) * keys:
            return False
        return j // keys * keys + keys - 1 <= first or j % keys <= x.i % rows

    return where(test)


def bound_floored(rows: int, keys: int) -> Sight:
    return where(lambda x, j: j <= x.p and j < (x.i // rows * rows + rows) // keys * keys)


def tile_of_own_open(keys: int) -> Sight:
    return where(lambda x, j: j < (x.p // keys + 1) * keys)


def last_tile_alone_masked(rows: int, keys: int) -> Sight:
    def test(x: Row, j: int) -> bool:
        end = x.i // rows * rows + rows + x.m - x.n
        tiles = -(-end // keys)
        return j // keys < tiles - 1 or (j // keys == tiles - 1 and j <= x.p)

    return where(test)


def same_number(rows: int, keys: int) -> Sight:
    return where(lambda x, j: j <= x.p and j // keys <= x.i // rows)


def zigzag(parts: int) -> Sight:
    """The mask goes by the place of a key, where keys are stored in the order of a ring's ranks."""

    def sight(x: Row) -> Keys:
        size = x.m // (2 * parts)
        chunks = [c for rank in range(parts) for c in (rank, 2 * parts - 1 - rank)]
        keys = [c * size + r for c in chunks for r in range(size)]
        return own(x, [keys[place] for place in range(x.m) if x.sees(place)])

    return sight


def other_boundaries(x: Row) -> Keys:
    """Sequences begin where those of another batch with as many tokens did."""
    lengths = x.lengths_q[::-1]
    starts = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    token = x.start_q + x.i
    if token >= starts[-1]:
        return right_keys(x)
    b = max(b for b in range(len(lengths)) if starts[b] <= token and lengths[b])
    last = min(token + x.right + 1, starts[b + 1])
    return [(row, 1.0) for row in range(max(starts[b], token - x.left), last)]


def from_row(start: Callable[[Row], int], length: Callable[[Row], int]) -> Sight:
    def sight(x: Row) -> Keys:
        rows = range(start(x), start(x) + length(x))
        return [(row, 1.0) for row in rows if 0 <= row < x.total_k]

    return sight


def left_padded(x: Row) -> Keys:
    """Padded on the left, and a key mask for padding on the right."""
    padding = max(x.lengths_k) - x.m
    slots = [ZEROS] * padding + [x.start_k + j for j in range(x.m)]
    return [(slot, 1.0) for slot in slots[: x.m]]


def zeros_beside(number: int) -> Sight:
    return lambda x: [(ZEROS, 1.0)] * number + right_keys(x)


def times_two(test: Callable[[Row, int], bool]) -> Sight:
    return lambda x: [(x.start_k + j, 2.0 if test(x, j) else 1.0) for j in range(x.m) if x.sees(j)]


def part(number: int, parts: int) -> Callable[[Row, int], bool]:
    return lambda x, j: j // -(-x.m // parts) == number


def irregular_span(x: Row) -> Keys:
    """As if bounds of a loop were read from a wrong table."""
    first, last = (x.i * 7) % 5, x.p + (x.i * 5) % 7 - 3
    return own(x, range(first, max(last, first) + 1))


def by_document(x: Row) -> Keys:
    """Keys of its own document, of three that alternate."""
    return own(x, [j for j in range(x.m) if j % 3 == x.i % 3 or j == 0 or (j * j) % 7 == x.i % 7])


def some_heads_open(x: Row) -> Keys:
    return own(x, range(x.m)) if x.head % 2 else right_keys(x)


def longest_rows(x: Row) -> Keys:
    stop = min(x.start_k + max(x.lengths_k), x.total_k)
    return [(row, 1.0) for row in range(x.start_k, stop)]


def unclamped(x: Row) -> Keys:
    """A window that reaches into the neighbours."""
    first, last = x.start_k + x.p - x.left, x.start_k + x.p + x.right
    return [(row, 1.0) for row in range(max(first, 0), min(last + 1, x.total_k))]


def tail_of_another(tile: int) -> Sight:
    """The tail of a tile of queries is stored over the next sequence's first rows."""

    def sight(x: Row) -> Keys:
        token, start_q, start_k = x.start_q + x.i, 0, 0
        for b in range(x.b):
            n, m = x.lengths_q[b], x.lengths_k[b]
            if start_q + n <= token < start_q + n + -n % tile:
                return [(start_k + j, 1.0) for j in range(m)]
            start_q, start_k = start_q + n, start_k + m
        return right_keys(x)

    return sight


def packed_group(rows: int, tile: int) -> Sight:
    """Causal by rows that are every head of every query; cut at the end of the last key tile."""

    def sight(x: Row) -> Keys:
        last = min(x.i // rows * rows + rows, x.n) + x.m - x.n
        stop = -(-last // tile) * tile
        return own(x, range(min(x.group * x.i + x.head % x.group + 1, stop)))

    return sight


def left_edge_in_first_tile(rows: int, tile: int) -> Sight:
    """The left edge of the window is masked in the first key tile of a tile of queries alone."""

    def sight(x: Row) -> Keys:
        first = max(x.p - x.i % rows - x.left, 0) // tile * tile
        last = x.p + x.right
        return own(x, [j for j in range(last + 1) if x.sees(j) or j >= first + tile])

    return sight


def _window_left(by: Callable[[Row], int]) -> Sight:
    return where(lambda x, j: max(by(x), 0) <= j <= x.p + x.right)


_WRONG = "wrong-keys"
_BACK = {"stages": ("backward",)}
_TILES = ("tile-skipped", "tail-tile-dropped")

PLANTED: tuple[Planted, ...] = (
    Planted(_WRONG, "tile-local comparison, 32 by 16", tile_local(32, 16)),
    Planted(_WRONG, "tile-local comparison, 16 by 32", tile_local(16, 32)),
    Planted(_WRONG, "last tile of 32 left out", bound_floored(16, 32), lengths=(40, 90)),
    Planted(_WRONG, "own tile of 16 open", tile_of_own_open(16)),
    Planted(_WRONG, "own tile of 32 open, more keys", tile_of_own_open(32), longer=True),
    Planted(_WRONG, "only the last tile is masked", last_tile_alone_masked(64, 16)),
    Planted(_WRONG, "tiles by number, 16 by 32", same_number(32, 16)),
    Planted(_WRONG, "counted from a chunk", where(lambda x, j: j <= x.i % 32)),
    Planted(_WRONG, "packed row of q", where(lambda x, j: j <= x.start_q + x.i)),
    Planted(
        _WRONG, "a third of the packed row of k", where(lambda x, j: j + x.start_k // 3 <= x.p)
    ),
    Planted(
        _WRONG,
        "left side without the difference of lengths",
        _window_left(lambda x: x.i - x.left),
        "window",
        longer=True,
    ),
    Planted(
        _WRONG,
        "left side rounded down to 16",
        _window_left(lambda x: (x.p - x.left) // 16 * 16),
        "window",
    ),
    Planted(_WRONG, "sinks", where(lambda x, j: x.sees(j) or (j < 4 and j <= x.p)), "window"),
    Planted(_WRONG, "prefix of 5 seen by all", where(lambda x, j: j <= x.p or j < 5)),
    Planted(_WRONG, "zigzag, mask by place", zigzag(2), multiple=4),
    Planted(_WRONG, "boundaries of another batch", other_boundaries, "open"),
    Planted(_WRONG, "boundaries of another batch, causal", other_boundaries),
    Planted(
        _WRONG,
        "keys from cu_seqlens_q",
        from_row(lambda x: x.start_q, lambda x: x.m),
        "open",
        longer=True,
    ),
    Planted(
        _WRONG,
        "keys of the next sequence",
        from_row(lambda x: 0 if x.b else x.m, lambda x: x.lengths_k[0 if x.b else 1]),
        "open",
    ),
    Planted(
        _WRONG,
        "length of sequence 0",
        where(lambda x, j: j < x.lengths_k[0]),
        "open",
        also=("tail-tile-dropped", "tile-skipped"),
    ),
    Planted(_WRONG, "left padding", left_padded, "open"),
    Planted("padded-keys", "5 rows of zeros", zeros_beside(5), "open", also=("denominator",)),
    Planted(_WRONG, "a third is missing", where(lambda x, j: not part(1, 3)(x, j)), "open"),
    Planted(_WRONG, "a half alone", where(part(0, 2)), "open", also=_TILES),
    Planted(_WRONG, "a quarter twice", times_two(part(2, 4)), "open", also=("tile-counted-twice",)),
    Planted(
        _WRONG,
        "own shard open",
        where(lambda x, j: j < (x.p // -(-x.m // 3) + 1) * -(-x.m // 3)),
    ),
    Planted(_WRONG, "five keys more", where(lambda x, j: j <= x.p + 5)),
    Planted(_WRONG, "own key twice", times_two(lambda x, j: j == x.p), "open"),
    Planted(_WRONG, "own key hidden", where(lambda x, j: j != x.p), "open"),
    Planted(_WRONG, "every second key", where(lambda x, j: x.sees(j) and (x.p - j) % 2 == 0)),
    Planted(_WRONG, "window on both sides", where(lambda x, j: abs(j - x.p) <= x.left), "window"),
    Planted(_WRONG, "twice the window", _window_left(lambda x: x.p - 2 * x.left), "window"),
    Planted(_WRONG, "own chunk alone", where(lambda x, j: j // 16 == x.p // 16), "open"),
    Planted(_WRONG, "causal, not asked for", where(lambda x, j: j <= x.p), "open"),
    Planted(_WRONG, "a window, not asked for", where(lambda x, j: abs(j - x.p) <= 11), "open"),
    Planted(_WRONG, "transposed", where(lambda x, j: j >= x.p), also=("mask-inverted",)),
    Planted(
        _WRONG,
        "odd tiles of 16 at the end",
        where(lambda x, j: j < -(-x.m // 16) // 2 * 32),
        "open",
        also=("tail-tile-dropped", "tile-skipped"),
    ),
    Planted(
        _WRONG,
        "first key of every tile twice",
        times_two(lambda x, j: j > 0 and j % 16 == 0),
        "open",
    ),
    Planted(_WRONG, "no more than 32 keys", where(lambda x, j: x.sees(j) and j < 32)),
    Planted(
        "neighbour-leak", "as many rows as the longest", longest_rows, "open", also=("wrong-keys",)
    ),
    Planted("neighbour-leak", "window into the neighbours", unclamped, "window"),
    Planted(
        _WRONG,
        "tail rows of the sequence before",
        tail_of_another(32),
        "open",
        also=("tail-rows-stored",),
    ),
    Planted(
        _WRONG,
        "no mask in the tail tile",
        where(lambda x, j: x.sees(j) or x.i >= x.n // 16 * 16),
        also=("causal-dropped",),
    ),
    Planted("causal-dropped", "in every second head", some_heads_open),
    Planted(_WRONG, "a span of its own by row", irregular_span),
    Planted(_WRONG, "packed heads", packed_group(16, 32), heads=(4, 8)),
    Planted(_WRONG, "packed heads, 8 by 16", packed_group(8, 16), heads=(4, 8)),
    Planted(_WRONG, "left edge in the first tile", left_edge_in_first_tile(32, 16), "window"),
    Planted(_WRONG, "left edge in the first of 8", left_edge_in_first_tile(16, 8), "window"),
    Planted(_WRONG, "documents", by_document, "open", lengths=(20, 48), dims=(32,), heads=(4,)),
    Planted(_WRONG, "backward alone: five more", where(lambda x, j: j <= x.p + 5), **_BACK),
    Planted("mask-missing-in-backward", "in the own tile", tile_of_own_open(16), **_BACK),
    Planted("pairs-dropped", "tiles by number, 32 by 16", same_number(32, 16), **_BACK),
    Planted(
        "dropout", "p = 0.1", right_keys, dropped=0.1, lengths=(34, 60), dims=(64,), heads=(2,)
    ),
    Planted(
        "dropout", "p = 0.3", right_keys, dropped=0.3, lengths=(34, 60), dims=(64,), heads=(2,)
    ),
    Planted(
        "dropout",
        "p = 0.2, not rescaled",
        right_keys,
        dropped=0.2,
        rescaled=False,
        lengths=(34, 60),
        dims=(64,),
        heads=(2,),
    ),
    Planted(
        "tail-rows-stored",
        "of a query of zeros",
        right_keys,
        "open",
        stages=("forward",),
        stored="zeros",
    ),
    Planted(
        "tail-rows-stored",
        "of a query of zeros, causal",
        right_keys,
        stages=("forward",),
        stored="zeros",
    ),
    Planted(
        "tail-rows-stored", "of no key", right_keys, stages=("forward",), stored="none", tile=64
    ),
    Planted(
        "tail-rows-stored", "out of its queries", right_keys, stages=("forward",), stored="next"
    ),
    Planted(
        "tail-rows-stored",
        "out of its queries, 64",
        right_keys,
        "open",
        stages=("forward",),
        stored="next",
        tile=64,
    ),
    Planted(
        "rows-not-written",
        "out and lse",
        right_keys,
        stages=("forward",),
        stored="never",
        tile=16,
        also=("tail-tile-dropped",),
    ),
    Planted(
        "rows-not-written", "dq", right_keys, "open", stages=("backward",), stored="never", tile=16
    ),
)


# ---- what comes of it -------------------------------------------------------------------------


def rows_of(question: Question) -> Iterator[Row]:
    lengths_q, lengths_k = list(question.lengths_q), list(question.lengths_k)
    left, right = question.mask_window
    sides = (10**6 if left < 0 else left), (10**6 if right < 0 else right)
    for b, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        starts = int(question.cu_seqlens_q[b]), int(question.cu_seqlens_k[b])
        for head in range(question.num_heads_q):
            for i in range(n):
                at = b, i, head, i + m - n, n, m
                yield Row(
                    *at, *starts, *sides, lengths_q, lengths_k, len(question.k), question.group
                )


def answers(planted: Planted | None, question: Question, chance: int = 0) -> Answers:
    """out, lse, dq, dk and dv. The backward pass is given the question's out and lse, or its
    own."""
    stages = planted.stages if planted else ()
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (question.q, question.k, question.v))
    coarse = question.dtype.itemsize == 2

    def narrow(x: Array) -> Array:
        return x.astype(question.dtype).astype(np.float64) if coarse else x

    out = np.zeros((len(q), question.num_heads_q, v.shape[2]))
    lse = np.full((question.num_heads_q, len(q)), -np.inf)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dropout = np.random.default_rng(7)
    kept: dict[tuple[int, int], Array] = {}

    def seen(x: Row, stage: str) -> tuple[Array, Array, Array, Array, Array]:
        """Rows of k, their k and v, how often, and the scores."""
        sight = planted.sight if planted and stage in stages else right_keys
        pairs = sight(x)
        rows = np.array([row for row, _ in pairs], dtype=np.int64)
        often = np.array([number for _, number in pairs])
        head_kv = x.head // question.group
        K, V = k[rows, head_kv], v[rows, head_kv]
        K, V = (np.where((rows == ZEROS)[:, None], 0.0, part) for part in (K, V))
        return rows, K, V, often, question.scale * (K @ q[x.start_q + x.i, x.head])

    def factors(x: Row, size: int, stage: str) -> Array | float:
        if planted is None or not planted.dropped or stage not in stages:
            return 1.0
        place = (x.start_q + x.i, x.head)
        if place not in kept:
            whole = 1 / (1 - planted.dropped) if planted.rescaled else 1.0
            kept[place] = (dropout.random(size) >= planted.dropped) * whole
        return kept[place]

    for x in rows_of(question):
        token = x.start_q + x.i
        rows, _, V, often, S = seen(x, "forward")
        if len(rows):
            weights = often * np.exp(S - S.max())
            lse[x.head, token] = np.log(weights.sum()) + S.max()
            P = narrow(weights / weights.sum() * factors(x, len(rows), "forward"))
            out[token, x.head] = P @ V
    if planted and "forward" in stages and planted.stored == "never":
        out[never_run(planted, question)] = 0.0
        lse[:, never_run(planted, question)] = 0.0
    elif planted and "forward" in stages and planted.stored:
        _store_tails(planted, question, out, lse)
    wide = FLOAT64 if question.dtype == FLOAT64 else FLOAT32
    found = {"out": out.astype(question.dtype), "lse": lse.astype(wide)}
    if question.dout is None:
        return found
    given_out, given_lse = found["out"], found["lse"]
    if question.out is not None and question.lse is not None:
        given_out, given_lse = question.out, question.lse
    dout = np.asarray(question.dout, dtype=np.float64)
    for x in rows_of(question):
        token, head_kv = x.start_q + x.i, x.head // question.group
        rows, K, V, often, S = seen(x, "backward")
        L = float(given_lse[x.head, token])
        if not len(rows) or not np.isfinite(L):
            continue
        own_dout = dout[token, x.head]
        P = often * np.exp(S - L)
        D = own_dout @ np.asarray(given_out[token, x.head], dtype=np.float64)
        if question.dlse is not None:
            D -= float(question.dlse[x.head, token])
        kept_or_not = factors(x, len(rows), "backward")
        dS = narrow(P * (kept_or_not * (V @ own_dout) - D))
        dq[token, x.head] = question.scale * (dS @ K)
        there = rows != ZEROS
        of_key = question.scale * dS[:, None] * q[token, x.head]
        np.add.at(dk, (rows[there], head_kv), of_key[there])
        of_value = narrow(P * kept_or_not)[:, None] * own_dout
        np.add.at(dv, (rows[there], head_kv), of_value[there])
    if planted and "backward" in stages and planted.stored == "never":
        dq[never_run(planted, question)] = 0.0
    return found | {n: y.astype(question.dtype) for n, y in (("dq", dq), ("dk", dk), ("dv", dv))}


def never_run(planted: Planted, question: Question) -> list[int]:
    """Rows of q, where tiles are counted by the offsets, as if these began at tiles."""
    found: list[int] = []
    for b in range(question.batch):
        start, end = (int(question.cu_seqlens_q[b + by]) for by in (0, 1))
        tiles = -(-end // planted.tile) - -(-start // planted.tile)
        found += range(min(start + tiles * planted.tile, end), end)
    return found


def _store_tails(planted: Planted, question: Question, out: Array, lse: Array) -> None:
    """Rows past a sequence's end, up to its tile's, over those of the next; the first one last."""
    v = np.asarray(question.v, dtype=np.float64)
    stop = int(question.cu_seqlens_q[-1])
    for b in reversed(range(question.batch)):
        end = int(question.cu_seqlens_q[b + 1])
        keys = slice(int(question.cu_seqlens_k[b]), int(question.cu_seqlens_k[b + 1]))
        for row in range(end, min(end + -question.lengths_q[b] % planted.tile, stop)):
            if planted.stored == "next":
                for head in range(question.num_heads_q):
                    k = np.asarray(question.k, dtype=np.float64)[keys, head // question.group]
                    q = np.asarray(question.q, dtype=np.float64)[row, head]
                    P = np.exp(question.scale * (k @ q - (k @ q).max()))
                    out[row, head] = P / P.sum() @ v[keys, head // question.group]
                continue
            out[row], lse[:, row] = 0.0, -np.inf
            if planted.stored == "zeros":
                for head in range(question.num_heads_q):
                    out[row, head] = v[keys, head // question.group].mean(axis=0)
                lse[:, row] = np.log(keys.stop - keys.start)


def problems(planted: Planted, count: int, seed: int) -> Iterator[Question]:
    """``count`` questions on which ``planted`` shows: dtypes in turn, out and lse given or not."""
    found = 0
    for attempt in counted():
        if found == count:
            return
        if attempt >= 20 * (found + 2):
            raise RuntimeError(f"{planted.variant}: shows on no problem")
        rng = np.random.default_rng((seed, crc32(planted.variant.encode()), attempt))
        dtype = DTYPES[(seed + found) % (2 if planted.bug == "dropout" else len(DTYPES))]
        question = _draw(planted, rng, dtype)
        wrong, right = answers(planted, question), answers(None, question)
        names = ("out",) if "forward" in planted.stages else ("dq",)
        if all(_differs(wrong[name], right[name]) for name in names):
            found += 1
            if rng.random() < 0.3:
                question = replace(question, out=right["out"], lse=right["lse"])
            yield question


def _differs(wrong: Array, right: Array) -> bool:
    wrong, right = wrong.astype(FLOAT64), right.astype(FLOAT64)
    return bool(np.linalg.norm(wrong - right) > 0.03 * np.linalg.norm(right))


def _draw(planted: Planted, rng: np.random.Generator, dtype: np.dtype[Any]) -> Question:
    batch = int(rng.integers(2, 4))
    low, high = planted.lengths
    lengths = rng.integers(low, high + 1, batch)
    lengths = -(-lengths // planted.multiple) * planted.multiple
    if planted.equal:
        lengths[:] = lengths[0]
    keys = lengths + (rng.integers(5, 30, batch) if planted.longer else 0)
    heads = int(rng.choice(planted.heads))
    heads_kv = heads // int(rng.choice((1, 2)))
    dim = int(rng.choice(planted.dims))
    window, causal = (-1, -1), planted.mask == "causal"
    if planted.mask == "window":
        window = int(rng.integers(5, 14)), int(rng.choice((0, 3)))
    total_q, total_k = int(lengths.sum()), int(keys.sum())

    def normal(*shape: int) -> Array:
        drawn: Array = rng.standard_normal(shape).astype(dtype)
        return drawn

    wide = FLOAT64 if dtype == FLOAT64 else FLOAT32
    return Question(
        q=normal(total_q, heads, dim),
        k=normal(total_k, heads_kv, dim),
        v=normal(total_k, heads_kv, dim),
        cu_seqlens_q=np.cumsum([0, *lengths], dtype=np.int32),
        cu_seqlens_k=np.cumsum([0, *keys], dtype=np.int32),
        causal=causal,
        window=window,
        dout=normal(total_q, heads, dim),
        dlse=normal(heads, total_q).astype(wide) if rng.random() < 0.3 else None,
    )
