"""Masks that are not the right one: other sides, other windows, keys beside the mask.

Long by the table.
"""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.inferred.keys.pattern import (
    CHUNKS,
    KEYS,
    OPEN,
    PARTS,
    REACH,
    ROWS,
    Bools,
    Bound,
    Ints,
    Pattern,
    Place,
    beginning,
    below,
    ceil,
    ending,
    floor,
    in_brackets,
    keys,
    longest,
    own,
    plus,
    positions,
    spans,
)

WIDEST = 256  # window that nobody asked for
UNMASKED, DROPPED = "mask-missing-in-backward", "pairs-dropped"  # in a backward pass alone


def masks(question: Question) -> Iterator[Pattern]:
    """All that can matter for the question, the plainest first."""
    left, right = question.mask_window
    yield from _limits(question)
    if right >= 0:
        yield from _right_sides(question)
    if left >= 0:
        yield from _left_sides(question)
    if max(left, right) >= 0:
        yield from _windows(question)
        yield from _beside_the_mask(question)
    yield from _own_key(question)
    if right < 0:
        yield from _unasked(question)


def _limits(question: Question) -> Iterator[Pattern]:
    """Every key, or no more than some number of keys."""
    every = own("row i sees every key", lambda x: np.ones_like(x.seen))
    yield every._replace(
        bug="causal-dropped" if question.causal else "window-dropped", in_backward=UNMASKED
    )
    most = longest(question)
    for bound in sorted({*below((16, 24, 48, 96), most), *range(32, most, 32)}):
        yield from _at_most(bound)


def _at_most(count: int) -> Iterator[Pattern]:
    yield own(f"row i sees the first {count} keys at most", lambda x: x.seen & (x.j < count))
    yield own(
        f"row i sees at most {count} keys, from its first one on",
        lambda x: x.seen & (x.j < x.low + count),
    )
    yield own(
        f"row i sees the last {count} of its keys at most",
        lambda x: x.seen & (x.j >= x.high - count),
    )


# ---- the right side ---------------------------------------------------------------------------


def _right_sides(question: Question) -> Iterator[Pattern]:
    right, most = question.mask_window[1], longest(question)
    for text, at in positions(question):
        for by in sorted(range(-REACH, REACH + 1), key=abs):
            yield _shifted(plus(text, right + by), at, by)
    yield ending(
        "cu_seqlens_q[b] + i (the packed row of q)", lambda x: x.start_q + x.i + x.right + 1
    )
    yield ending("i - cu_seqlens_k[b]", lambda x: x.i - x.start_k + x.right + 1)
    yield ending("cu_seqlens_k[b] + i", lambda x: x.start_k + x.i + x.right + 1)
    yield ending("seqlen_q - 1", lambda x: np.minimum(x.high, x.n))
    for text, at in positions(question):
        for tile in below(KEYS, 2 * most):
            yield from _rounded_ends(text, at, tile, right)
        for chunk in below(CHUNKS, most):
            yield _from_chunk(text, at, chunk)
    if question.lengths_q != question.lengths_k:
        for chunk in below(CHUNKS, most):
            yield _from_chunk_of_queries(chunk)
    for rows, size in product(below(ROWS, 2 * most), below(KEYS, 2 * most)):
        yield from _diagonal_tiles(rows, size)
    for parts in PARTS:
        yield from _own_shard(parts)


def _shifted(text: str, at: Bound, by: int) -> Pattern:
    return ending(text, lambda x: at(x) + x.right + by + 1)


def _rounded_ends(text: str, at: Bound, tile: int, right: int) -> Iterator[Pattern]:
    past = in_brackets(plus(text, right + 1))
    whole = f"{tile} * ceil({past} / {tile}) - 1 (whole tiles)"
    more = ending(whole, lambda x: ceil(at(x) + x.right + 1, tile))
    yield more._replace(in_backward=UNMASKED)
    yield ending(
        f"{tile} * floor({past} / {tile}) - 1 (whole tiles)",
        lambda x: floor(at(x) + x.right + 1, tile),
    )
    yield ending(
        f"{tile} * floor({in_brackets(text)} / {tile}) - 1 (tiles before its own)",
        lambda x: floor(at(x), tile),
    )


def _from_chunk(text: str, at: Bound, chunk: int) -> Pattern:
    return ending(
        f"{in_brackets(text)} mod {chunk} (counted from a chunk of {chunk} queries)",
        lambda x: at(x) % chunk + x.right + 1,
    )


def _from_chunk_of_queries(chunk: int) -> Pattern:
    return ending(
        f"i mod {chunk} + seqlen_k - seqlen_q (counted from a chunk of {chunk} queries)",
        lambda x: x.i % chunk + x.m - x.n + x.right + 1,
    )


def _own_shard(parts: int) -> Iterator[Pattern]:
    def size(x: Place) -> int:
        return max(-(-x.m // parts), 1)

    yield ending(
        f"the end of its own shard of 1/{parts} of the keys",
        lambda x: ceil(x.p + x.right + 1, size(x)),
    )
    yield ending(
        f"the end of the shard before its own, of 1/{parts} of the keys",
        lambda x: floor(x.p, size(x)),
    )
    yield ending(
        f"i mod (seqlen_k / {parts}) (counted from the start of a shard)",
        lambda x: x.p % size(x) + x.right + 1,
    )


def _diagonal_tiles(rows: int, size: int) -> Iterator[Pattern]:
    """Loops by tiles of ``rows`` queries and ``size`` keys that get the diagonal wrong."""
    at = f"tiles of {rows} queries by {size} keys"

    def first(x: Place) -> Ints:
        """The first query's place of a query's tile."""
        return np.asarray(x.p - x.i % rows)

    def bound(x: Place) -> Ints:
        """One past the last key of the tile's last query."""
        return np.asarray(first(x) + rows + x.right)

    def loop(x: Place) -> Ints:
        return ceil(bound(x), size)

    def start(x: Place) -> Ints:
        """The first key of a key's tile."""
        return floor(x.j, size)

    def inside(x: Place) -> Bools:
        return x.between(x.low, loop(x))

    def more() -> Iterator[Pattern]:
        yield ending(f"that of the last tile, none masked; {at}", loop)
        yield own(
            f"row i sees the keys of all tiles, only the last tile is masked; {at}",
            lambda x: inside(x) & ((start(x) < loop(x) - size) | x.seen),
        )
        yield own(
            f"row i sees the keys of all tiles, only tiles that begin past the tile's first query "
            f"are masked; {at}",
            lambda x: inside(x) & ((start(x) <= first(x)) | x.seen),
        )
        yield own(
            f"row i sees the keys of all tiles, only the tile of the same number is masked; {at}",
            lambda x: inside(x) & ((x.j // size != x.i // rows) | x.seen),
        )

    def fewer() -> Iterator[Pattern]:
        yield ending(
            f"{size} * floor((first row of its tile + {rows}) / {size}) - 1 at most, the last "
            f"partial tile is left out; {at}",
            lambda x: np.minimum(x.high, floor(bound(x), size)),
        )
        yield ending(
            f"in the tile of the first query of its own tile at most; {at}",
            lambda x: np.minimum(x.high, floor(first(x) + x.right, size) + size),
        )
        yield ending(
            f"before the tile of the first query of its own tile; {at}",
            lambda x: floor(first(x), size),
        )
        yield ending(
            f"in the tile of the same number as its own at most; {at}",
            lambda x: np.minimum(x.high, (x.i // rows + 1) * size),
        )
        yield own(
            f"row i sees of its keys those in tiles of its own number or later; {at}",
            lambda x: x.seen & (x.j // size >= x.i // rows),
        )

    for pattern in more():
        yield pattern._replace(in_backward=UNMASKED)
    for pattern in fewer():
        yield pattern._replace(in_backward=DROPPED)
    yield ending(
        f"that of the tile of the same number as its own; {at}", lambda x: (x.i // rows + 1) * size
    )
    yield own(
        f"row i sees of a tile with the diagonal the keys with j mod {size} <= i mod {rows}; {at}",
        lambda x: inside(x) & ((start(x) + size - 1 <= first(x)) | (x.j % size <= x.i % rows)),
    )
    yield own(
        f"row i sees of every tile the keys with j mod {size} <= i mod {rows}; {at}",
        lambda x: inside(x) & (x.j % size <= x.i % rows),
    )


# ---- the left side ----------------------------------------------------------------------------


def _left_sides(question: Question) -> Iterator[Pattern]:
    left, most = question.mask_window[0], longest(question)
    for text, at in reversed(list(positions(question))):
        for by in sorted(range(-REACH, REACH + 1), key=abs):
            yield _left_shifted(plus(text, by - left), at, by)
    yield beginning(f"i - {left} + seqlen_q - seqlen_k", lambda x: 2 * x.i - x.p - x.left)
    yield beginning("cu_seqlens_q[b] + i - left", lambda x: x.start_q + x.i - x.left)
    yield beginning("i - left - cu_seqlens_k[b]", lambda x: x.i - x.left - x.start_k)
    yield beginning("i - left / 2", lambda x: x.p - x.left // 2)
    yield beginning("i - 2 left", lambda x: x.p - 2 * x.left)
    yield beginning("i - left - right", lambda x: x.p - x.left - x.right)
    for text, at in positions(question):
        for tile in below(KEYS, 2 * most):
            yield from _rounded_starts(text, at, tile, left)
        for rows, size in product(below((1, *ROWS), 2 * most), below((1, *KEYS), 2 * most)):
            yield from _first_tiles(text, at, rows, size)


def _left_shifted(text: str, at: Bound, by: int) -> Pattern:
    return beginning(text, lambda x: at(x) - x.left + by)


def _rounded_starts(text: str, at: Bound, tile: int, left: int) -> Iterator[Pattern]:
    first = in_brackets(plus(text, -left))
    yield beginning(
        f"{tile} * floor({first} / {tile}), that of a whole tile",
        lambda x: floor(at(x) - x.left, tile),
    )
    yield beginning(
        f"{tile} * ceil({first} / {tile}), that of a whole tile",
        lambda x: ceil(at(x) - x.left, tile),
    )


def _first_tiles(text: str, at: Bound, rows: int, size: int) -> Iterator[Pattern]:
    """Loops by tiles whose first tile is another one."""
    where = "" if text == "i" else f", places counted as {text}"
    of_tiles = f"tiles of {rows} queries by {size} keys"
    shape = f"tile{where}; {of_tiles}"

    def first(x: Place) -> Ints:
        return np.asarray(at(x) - x.i % rows - x.left)

    yield beginning(
        f"that of the tile's first query's window, rounded down to a {shape}",
        lambda x: floor(first(x), size),
    )
    for count, tiles in ((1, "first tile"), (2, "first two tiles")):
        yield _masked_first(
            f"row i sees the left edge of its window in the {tiles} alone, where the tile's first "
            f"query has it, and every key from there to its own; {of_tiles}{where}",
            lambda x: floor(np.maximum(first(x), 0), size),
            count * size,
        )
    yield beginning(
        f"its own, and not before that of the tile's first query, rounded up to a {shape}",
        lambda x: np.maximum(x.low, ceil(first(x), size)),
    )
    yield beginning(
        f"its own, and not before that of the tile's last query, rounded up to a {shape}",
        lambda x: np.maximum(x.low, ceil(first(x) + rows - 1, size)),
    )
    yield beginning(
        f"its own, and not before that of the tile's last query, rounded down to a {shape}",
        lambda x: np.maximum(x.low, floor(first(x) + rows - 1, size)),
    )


def _masked_first(text: str, start: Bound, masked: int) -> Pattern:
    return own(text, lambda x: x.seen | ((x.j >= start(x) + masked) & (x.j < x.high)))


# ---- windows ----------------------------------------------------------------------------------


def _windows(question: Question) -> Iterator[Pattern]:
    """Both sides are others."""
    left, right = question.mask_window
    sides = {
        "(right, left)": (right, left),
        "(left, left)": (left, left),
        "(right, right)": (right, right),
        "(0, 0)": (0, 0),
        "(left, 0)": (left, 0),
        "(0, right)": (0, right),
    }
    if left >= 0:
        sides["(left / 2, left / 2)"] = left // 2, left // 2
    if min(left, right) >= 0:
        sides["(left / 2, right / 2)"] = left // 2, right // 2
        sides["(2 left, 2 right)"] = 2 * left, 2 * right
        sides["(left + right, 0)"] = left + right, 0
        sides["(0, left + right)"] = 0, left + right
    for text, at in positions(question):
        for name, (before, after) in sides.items():
            yield _around(f"row i sees the window {name} around {text}", at, before, after)
    yield spans(
        "row i sees the window around cu_seqlens_q[b] + i, the packed row of q",
        lambda x: x.start_q + x.i - x.left,
        lambda x: x.start_q + x.i + x.right + 1,
    )
    yield own("row i sees what it should, counted from the last key", lambda x: x.seen[:, ::-1])
    yield own(
        "row i sees the keys from its own on (the mask is transposed)",
        lambda x: x.between(x.p - x.right, x.p + x.left + 1),
    )
    yield own("row i sees the keys after its own", lambda x: np.asarray(x.j > x.p))
    for chunk in below(CHUNKS, longest(question)):
        yield from _chunks(chunk)
    for step in (2, 3, 4, 8):
        yield _dilated(step)


def _around(text: str, at: Bound, before: int, after: int) -> Pattern:
    """A negative number of keys on a side is all of them."""
    return spans(
        text,
        lambda x: at(x) - (before if before >= 0 else OPEN),
        lambda x: at(x) + (after if after >= 0 else OPEN) + 1,
    )


def _chunks(chunk: int) -> Iterator[Pattern]:
    def same(x: Place) -> Bools:
        return np.asarray(x.j // chunk == x.p // chunk)

    yield own(f"row i sees keys of its own chunk of {chunk} alone", lambda x: x.seen & same(x))
    yield own(
        f"row i sees keys of its own chunk of {chunk} and of the one before",
        lambda x: x.seen & (x.j // chunk >= x.p // chunk - 1),
    )
    yield own(
        f"row i sees all keys of its chunk of {chunk} beside those that it should",
        lambda x: x.seen | same(x),
    )


def _dilated(step: int) -> Pattern:
    return own(
        f"row i sees every key {step} apart from its own (dilated)",
        lambda x: x.seen & ((x.p - x.j) % step == 0),
    )


# ---- keys beside the mask ---------------------------------------------------------------------


def _beside_the_mask(question: Question) -> Iterator[Pattern]:
    """Keys that are seen whatever the mask says."""
    for count in range(1, min(longest(question), 2 * REACH)):
        yield from _always_seen(count)
    for tile in below(ROWS, longest(question)):
        yield from _rows_without_mask(tile)


def _always_seen(count: int) -> Iterator[Pattern]:
    yield own(
        f"row i sees the first {keys(count)} as well, up to its own",
        lambda x: x.seen | ((x.j < count) & (x.j < x.high)),
    )
    yield own(f"row i sees the first {keys(count)} as well", lambda x: x.seen | (x.j < count))
    yield own(f"row i sees the last {keys(count)} as well", lambda x: x.seen | (x.j >= x.m - count))
    yield own(
        f"the first {count} quer{'ies see' if count > 1 else 'y sees'} every key",
        lambda x: x.seen | (x.i < count),
    )


def _rows_without_mask(tile: int) -> Iterator[Pattern]:
    yield own(
        f"the last rows, as many as do not fill a tile of {tile}, see every key",
        lambda x: x.seen | (x.i >= x.n // tile * tile),
    )
    yield own(
        f"the rows past the first tile of {tile} see every key", lambda x: x.seen | (x.i >= tile)
    )


def _own_key(question: Question) -> Iterator[Pattern]:
    yield own("row i does not see its own key", lambda x: x.seen & (x.j != x.p))
    yield own("row i sees its own key twice", lambda x: 1.0 * x.seen + (x.j == x.p))
    yield own("row i sees its own key alone", lambda x: np.asarray(x.j == x.p))
    for count in range(1, min(longest(question), 2 * REACH)):
        yield _without_first(count)


def _without_first(count: int) -> Pattern:
    return own(f"row i does not see the first {keys(count)}", lambda x: x.seen & (x.j >= count))


# ---- masks that nobody asked for --------------------------------------------------------------


def _unasked(question: Question) -> Iterator[Pattern]:
    for text, at in positions(question):
        for by in (0, 1, -1):
            yield _causal(f"row i sees keys up to {plus(text, by)} (a causal mask)", at, by)
        yield _transposed(f"row i sees keys from {text} on (a causal mask, transposed)", at)
        for width in range(min(longest(question), WIDEST)):
            yield from _window_of(text, at, width)
    for chunk in below(CHUNKS, longest(question)):
        yield from _chunks(chunk)


def _causal(text: str, at: Bound, by: int) -> Pattern:
    return spans(text, lambda x: x.low, lambda x: at(x) + by + 1)


def _transposed(text: str, at: Callable[[Place], Ints]) -> Pattern:
    return own(text, lambda x: x.seen & (x.j >= at(x)))


def _window_of(text: str, at: Bound, width: int) -> Iterator[Pattern]:
    for words, before, after in (
        (f"{width} keys before and none after {text}", width, 0),
        (f"{width} keys before and after {text}", width, width),
        (f"{width} keys before {text}, and those after it", width, OPEN),
        (f"{width} keys after {text}, and those before it", OPEN, width),
    ):
        yield _narrowed(f"row i sees {words} (a window)", at, before, after)


def _narrowed(text: str, at: Bound, before: int, after: int) -> Pattern:
    return spans(text, lambda x: np.maximum(at(x) - before, x.low), lambda x: at(x) + after + 1)
