"""Loops over keys that leave some out or take some twice, and keys in another order."""

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.inferred.keys.pattern import (
    KEYS,
    OPEN,
    PARTS,
    REACH,
    Bools,
    Ints,
    Pattern,
    Place,
    Weights,
    below,
    keys,
    longest,
    own,
    part,
)

TILES = 16  # of a sequence, that are tried one by one


def loops(question: Question) -> Iterator[Pattern]:
    """All that can matter for the question."""
    yield from _ends(question)
    for parts in PARTS:
        for number in range(parts):
            yield from _shards(parts, number)
    for tile in below(KEYS, longest(question)):
        yield from _tiles(tile, min(-(-longest(question) // tile), TILES))
    for step, remainder in ((2, 0), (2, 1), (3, 0), (4, 0), (4, 3)):
        yield from _every(step, remainder)
    if max(question.mask_window) >= 0:
        yield from _orders()


# ---- where they end ---------------------------------------------------------------------------


def _ends(question: Question) -> Iterator[Pattern]:
    if question.lengths_q != question.lengths_k:
        yield own("row i sees the first seqlen_q keys", lambda x: x.seen & (x.j < x.n))
        for tile in below(KEYS, 2 * longest(question)):
            yield _tiles_of_queries(tile)
    for count in range(1, min(longest(question), REACH)):
        yield _without_last(count)
    for name, of in (("shortest", min), ("longest", max)):
        yield _as_many_as(f"the {name} sequence", of(question.lengths_k, default=0))
    for b in range(question.batch):
        yield _as_many_as(f"sequence {b}", question.lengths_k[b])


def _tiles_of_queries(tile: int) -> Pattern:
    return own(
        f"row i sees the keys of the first ceil(seqlen_q / {tile}) tiles of {tile}",
        lambda x: x.seen & (x.j < -(-x.n // tile) * tile),
    )


def _without_last(count: int) -> Pattern:
    return own(f"row i does not see the last {keys(count)}", lambda x: x.seen & (x.j < x.m - count))


def _as_many_as(text: str, count: int) -> Pattern:
    return own(f"row i sees as many keys as {text} has, at most", lambda x: x.seen & (x.j < count))


# ---- parts ------------------------------------------------------------------------------------


def _shards(parts: int, number: int) -> Iterator[Pattern]:
    """Shards and splits of the keys; the last one takes what is left."""
    last = number == parts - 1

    def within(x: Place, size: Ints | int, first: Ints | int = 0) -> Bools:
        size = np.maximum(size, 1)
        start = first + number * size
        return x.between(start, OPEN if last else start + size)

    text = f"part {number} of {parts} of the keys"
    yield from part(text, lambda x: within(x, -(-x.m // parts)))
    yield from part(f"{text}, rounded down", lambda x: within(x, x.m // parts))
    yield from part(
        f"{text} that it should see", lambda x: within(x, -(-(x.high - x.low) // parts), x.low)
    )


def _tiles(tile: int, count: int) -> Iterator[Pattern]:
    for number in range(count):
        yield from part(f"tile {number} of {tile} keys", _numbered(tile, OPEN, number), tile=True)
    for every, number in ((2, 0), (2, 1), (3, 2), (4, 3)):
        text = f"the tiles of {tile} keys whose number is {number} modulo {every}"
        yield from part(text, _numbered(tile, every, number))
    yield own(
        f"row i does not see the last tile of {tile} keys where the number of tiles is odd",
        lambda x: x.seen & (x.j < -(-x.m // tile) // 2 * 2 * tile),
    )
    yield from part(
        f"the first key of every tile of {tile} but the first",
        lambda x: (x.j % tile == 0) & (x.j > 0),
    )
    yield from part(f"the last key of every tile of {tile}", lambda x: x.j % tile == tile - 1)
    yield own(
        f"row i does not see the tile of {tile} keys before its own",
        lambda x: x.seen & (x.j // tile != x.p // tile - 1),
    )
    yield own(
        f"row i does not see the keys of its own tile of {tile}",
        lambda x: x.seen & (x.j // tile != x.p // tile),
    )
    yield own(
        f"row i does not see the first tile of {tile} keys that has some of its own",
        lambda x: x.seen & (x.j // tile != x.low // tile),
    )
    yield own(
        f"row i does not see the last tile of {tile} keys that has some of its own",
        lambda x: x.seen & (x.j // tile != (x.high - 1) // tile),
    )


def _numbered(tile: int, every: int, number: int) -> Callable[[Place], Bools]:
    return lambda x: np.asarray(x.j // tile % every == number)


def _every(step: int, remainder: int) -> Iterator[Pattern]:
    yield from part(
        f"the keys whose number is {remainder} modulo {step}", lambda x: x.j % step == remainder
    )


# ---- another order ----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def order_of(name: str, parts: int, m: int) -> Ints:
    """Which key lies at each place of k, in an order that ``name`` and ``parts`` say."""
    key = np.arange(m)
    if not m:
        return key
    if name == "zigzag":
        size = max(-(-m // (2 * parts)), 1)
        chunks = [c for rank in range(parts) for c in (rank, 2 * parts - 1 - rank)]
        return np.concatenate([key[c * size : (c + 1) * size] for c in chunks])
    if name == "striped":
        return np.concatenate([key[rank::parts] for rank in range(parts)])
    if name == "parts reversed":
        size = max(-(-m // parts), 1)
        return np.concatenate([key[c * size : (c + 1) * size] for c in reversed(range(parts))])
    if name == "rolled":
        return np.roll(key, parts)
    if name == "pairs of tiles exchanged":
        return np.argsort((key // parts) ^ 1, kind="stable")
    if name == "tiles reversed":
        return np.concatenate([key[s : s + parts][::-1] for s in range(0, m, parts)])
    return key[::-1]


def _orders() -> Iterator[Pattern]:
    """The mask is made for another order of keys than the one in which they lie."""
    named = [(name, parts) for name in ("zigzag", "striped", "parts reversed") for parts in PARTS]
    named += [("reversed", 1), *(("rolled", by) for by in (1, -1, 2, -2, 4, -4, 8, -8))]
    named += [("pairs of tiles exchanged", tile) for tile in (1, *KEYS)]
    named += [("tiles reversed", tile) for tile in KEYS]
    for name, parts in named:
        yield from _ordered(name, parts)


def _ordered(name: str, parts: int) -> Iterator[Pattern]:
    words = f"in another order: {name} ({parts})"

    def order(m: int) -> Ints:
        return order_of(name, parts, m)

    def queries(x: Place, places: Ints) -> Bools:
        """What the queries at other places see."""
        return Place(x.question, x.sequence, places[x.rows]).seen

    def both(x: Place) -> Weights:
        return x.start_k + order(x.m), queries(x, np.argsort(order(x.n)))

    yield Pattern(
        f"the mask goes by the place of a key where keys are stored {words}",
        lambda x: (x.start_k + order(x.m), x.seen),
    )
    yield Pattern(
        f"the mask goes by the number of a key {words}",
        lambda x: (x.start_k + np.argsort(order(x.m)), x.seen),
    )
    yield own(f"the mask goes by the place of a query {words}", lambda x: queries(x, order(x.n)))
    yield own(
        f"the mask goes by the number of a query {words}",
        lambda x: queries(x, np.argsort(order(x.n))),
    )
    yield Pattern(f"the mask goes by the places of queries and keys {words}", both)
