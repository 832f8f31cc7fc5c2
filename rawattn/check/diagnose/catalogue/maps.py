"""Where an array may be read or stored by mistake: a map says for every place (token, head, column)
which one is taken for it. It knows no array but a ``Geometry``, and moves q, dk and lse alike."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import TILES, Floats
from rawattn.check.diagnose.engine.question import BY_ROW, OF_SLOTS, Question, side_of

Ints = np.ndarray
LETTERS = {"t": "tokens", "h": "heads", "d": "columns"}
NOWHERE = 1 << 40  # tokens from here there is none
STATISTICS = (*BY_ROW, "dlse", "e", "w")  # numbers of rows, which lie as (heads, tokens)


class At(NamedTuple):
    """Places, which broadcast; what is outside of the array is nothing."""

    t: Ints
    h: Ints
    j: Ints


class Row(NamedTuple):
    """Of tokens (total, 1, 1): row ``i`` of ``n`` of sequence ``b``, which begins at ``start``."""

    b: Ints
    start: Ints
    i: Ints
    n: Ints


@dataclass(frozen=True, eq=False)
class Geometry:
    """What an index is made of. ``others``: the offsets of the other side's sequences; ``group``:
    heads of the array for every key/value head."""

    shape: tuple[int, int, int]
    offsets: Ints
    others: Ints
    group: int

    @cached_property
    def everywhere(self) -> At:
        return At(*np.ogrid[tuple(slice(size) for size in self.shape)])

    @property
    def b(self) -> Ints:
        return np.arange(len(self.offsets) - 1)

    @cached_property
    def row(self) -> Row:
        """Of all tokens; those outside of sequences count as of the one before."""
        t, last = self.everywhere.t, len(self.offsets) - 2
        b = np.clip(np.searchsorted(self.offsets, t, side="right") - 1, 0, last)
        start = self.offsets[b]
        return Row(b, start, t - start, self.offsets[b + 1] - start)


@lru_cache(maxsize=32)
def geometry(question: Question, name: str) -> Geometry:
    """That of an input, a row statistic (of one column) or a result, by its name."""
    of_keys = side_of(name) == "k"
    own, other = (question.offsets(of).astype(np.int64) for of in ("kq" if of_keys else "qk"))
    like = question.v if name.endswith(("out", "v")) else question.q  # "sliding out" too
    columns = 1 if name in STATISTICS else like.shape[2]
    tokens, heads = (question.k if of_keys else question.q).shape[:2]
    if name in OF_SLOTS and question.block_indices is not None:
        return Geometry(question.block_indices.shape, own, other, 1)
    return Geometry((tokens, heads, columns), own, other, 1 if of_keys else question.group)


@dataclass(frozen=True, eq=False)
class Map:
    """``words`` for it; ``of`` the places that are taken for all of an array."""

    family: str
    words: str
    of: Callable[[Geometry], At]

    def moved(self, g: Geometry, x: Floats, nothing: float = 0.0) -> Floats:
        """All of an array, (tokens, heads, columns) or (heads, tokens), as it is found there."""
        if x.ndim == 2:
            return self.moved(g, np.asarray(x).T[..., None], nothing)[..., 0].T
        places = [*zip(self.of(g), x.shape, strict=True)]
        there = [(i >= 0) & (i < n) for i, n in places]
        t, h, j = (np.where(inside, i, 0) for (i, _), inside in zip(places, there, strict=True))
        found, inside = x[t, h, j].astype(np.float64), there[0] & there[1] & there[2]
        return found if inside.all() else np.where(inside, found, nothing)

    def in_sequence(self, g: Geometry, b: int) -> bytes:
        """What it takes for a sequence's places: those that take the same have the same."""
        inside = slice(g.offsets[b], g.offsets[b + 1])
        places = zip(self.of(g), g.shape, strict=True)
        found = (np.where((x < 0) | (x >= n), -1, x) for x, n in places)
        return b"|".join((x[inside] if len(x) > 1 else x).tobytes() for x in found)

    @property
    def stored(self) -> "Map":
        """The same of rows as they are stored: what comes later overwrites."""

        def last(g: Geometry) -> At:
            to = np.broadcast_to(self.of(g).t, (g.shape[0], 1, 1))[:, 0, 0]
            there = (to >= 0) & (to < len(to)) & (g.everywhere.t[:, 0, 0] < g.offsets[-1])
            found = np.full(len(to), -NOWHERE)
            found[to[there]] = np.flatnonzero(there)
            return g.everywhere._replace(t=found[:, None, None])

        return Map("stored", f"what is stored at {self.words}, at its own offset", last)

    def shared(self, g: Geometry, x: Floats, nothing: float = 0.0) -> Floats:
        """What rows (tokens, heads, columns) find where a map of rows added all of them up."""
        inside = g.row.i < g.row.n
        places, at = np.unique(np.where(inside, self.of(g).t, -NOWHERE), return_inverse=True)
        total = np.zeros((len(places), *g.shape[1:]))
        np.add.at(total, at.ravel(), np.where(inside, x, 0.0))
        return np.where(inside, total[at.ravel()], nothing)


WHOLE = "zeros for rows of a partial last tile of {}"
TILED, LAST = "row i // {0} * {0}", "the last row of its tile of {}"
ROWS: dict[str, Callable[[Ints, int, Ints], Ints]] = {  # row i of n; the last ones of tiles
    "row i + {}": lambda i, by, n: i + by,
    "row i - {}": lambda i, by, n: i - by,
    "row i ^ {}": lambda i, by, n: i ^ by,
    "row i & ~{}": lambda i, by, n: i & ~by,
    "row i + {}, its own in the last tile": lambda i, by, n: i + by * (i // by < (n - 1) // by),
    "row i - {}, its own in the first tile": lambda i, by, n: i - by * (i >= by),
    "row i + {}, in the first tile": lambda i, by, n: i + by * (i < np.minimum(by, n - by)),
    WHOLE: lambda i, by, n: np.where(i < n // by * by, i, -NOWHERE),
    "row i % {}": lambda i, by, n: i % by,
    TILED: lambda i, by, n: i - i % by,
    LAST: lambda i, by, n: np.minimum(i - i % by + by, n) - 1,
}
Origin = Callable[[Geometry], Ints]  # of all sequences a row, or another one
OTHERS: dict[str, Origin] = {
    "the next sequence": lambda g: g.b + 1,
    "the sequence before": lambda g: np.maximum(g.b - 1, 0),
    "this sequence, empty ones not counted": lambda g: np.unique(g.offsets).searchsorted(
        g.offsets[:-1]
    ),
}
ORIGINS: dict[str, Origin] = {  # rows where they are taken to begin
    "without the offset of the sequence": lambda g: 0 * g.b,
    "the offset of the other side": lambda g: g.others[:-1],
    "its offset and a row": lambda g: g.offsets[:-1] + 1,
    "b times the longest length": lambda g: g.b * np.diff(g.offsets).max(),
}
OF_TILES: dict[str, Callable[[int, Ints, Ints], Ints]] = {  # the same, of tiles and offsets
    "its offset rounded down to a multiple of {}": lambda t, first, b: first // t * t,
    "its offset rounded up to a multiple of {}": lambda t, first, b: -(-first // t) * t,
    "its offset and {0} b, rounded down to a multiple of {0}": lambda t, x, b: (x // t + b) * t,
}
HEADS: dict[str, Callable[[Ints, int, int], Ints]] = {  # head h of so many, a group of so many
    "the next head": lambda h, count, group: (h + 1) % count,
    "the head before": lambda h, count, group: (h - 1) % count,
    "the first head": lambda h, count, group: 0 * h,
    "the last head": lambda h, count, group: 0 * h + count - 1,
    "the first head of the group": lambda h, count, group: h - h % group,
    "the last head of the group": lambda h, count, group: h - h % group + group - 1,
    "head h // group": lambda h, count, group: h // group,
    "head h % num_heads_kv": lambda h, count, group: h % (count // group),
    "head h % group": lambda h, count, group: h % group,
}
Packed = Callable[[Ints, Ints, Ints, int], tuple[Ints, Ints]]
PACKED: dict[str, Packed] = {  # row and head that are taken for row i of n and head h of a group
    "(heads, tokens) read as (tokens, heads)": lambda i, h, n, g: divmod(i * g + h, n)[::-1],
    "(tokens, heads) read as (heads, tokens)": lambda i, h, n, g: divmod(h * n + i, g),
}


def _from(origin: Origin, g: Geometry, clamped: bool = False) -> At:
    t = origin(g)[g.row.b] + g.row.i
    return g.everywhere._replace(t=np.minimum(t, g.shape[0] - 1) if clamped else t)


def _heads(head: Callable[[Ints, int, int], Ints], g: Geometry) -> At:
    return g.everywhere._replace(h=head(g.everywhere.h, g.shape[1], g.group))


def rows(question: Question, least: int = 1) -> Iterator[Map]:
    """Other rows of the same sequence, as tiles or instructions take them, large ones first."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    for by in (by for by in (*TILES[::-1], 4, 2, 1) if least <= by < longest):
        yield from (of_rows(words, by) for words in [*ROWS][: len(ROWS) if by > 1 else 3])


def of_rows(words: str, by: int) -> Map:
    def index(g: Geometry) -> At:
        return g.everywhere._replace(t=g.row.start + ROWS[words](g.row.i, by, g.row.n))

    return Map("rows", words.format(by), index)


def sequences(question: Question, clamped: bool = False) -> Iterator[Map]:
    """The same row of another sequence, or counted from another place, which is not the same.
    clamped: past the end of all there is the last row."""
    of = ORIGINS | {f"the offset of {x}": lambda g, o=o: g.offsets[o(g)] for x, o in OTHERS.items()}
    sizes = TILES if not question.sparse else (*TILES, question.block_size)
    for (words, of_tile), t in itertools.product(OF_TILES.items(), sizes):
        of[words.format(t)] = lambda g, of=of_tile, t=t: of(t, g.offsets[:-1], g.b)
    sides = [geometry(question, name) for name in "qk"] if question.batch > 1 else []
    for words, origin in of.items():
        if any((origin(g) != g.offsets[:-1]).any() for g in sides):
            yield Map("sequences", words, partial(_from, origin, clamped=clamped))
    if any((g.others != g.offsets).any() for g in sides):
        words = "the offset of the other side"
        at_last = partial(_from, ORIGINS[words], clamped=True)
        yield Map("sequences", f"{words}, the last row past the end", at_last)


def heads(question: Question) -> Iterator[Map]:
    """The same row of other heads; those of groups mean nothing to keys."""
    h = np.arange(question.num_heads_q)
    for words in other_heads(h, len(h), question.group):
        yield Map("heads", words, partial(_heads, HEADS[words.split(" or ")[0]]))


def other_heads(own: Ints, count: int, group: int) -> dict[str, Ints]:
    """What query heads may take for their ``own`` one of so many; what is alike here once."""
    h, tables, alike = np.arange(len(own)), [*HEADS.items()], dict[bytes, list[str]]()
    found = {words: head(own, count, 1) for words, head in tables[:4]}
    found |= {words: head(h, len(own), group) % count for words, head in tables[4:] if group > 1}
    for words, taken in found.items():
        if not np.array_equal(taken, own):
            alike.setdefault(taken.tobytes(), []).append(words)
    return {" or ".join(several[:3]): found[several[0]] for several in alike.values()}


def heads_of_keys(question: Question) -> Iterator[Map]:
    """The same row of keys of other heads: of one for every query head."""
    h, q = np.arange(question.num_heads_q)[None, :, None], question
    if q.group > 1 and q.num_heads_kv > 1:
        by_remainder = partial(_heads, lambda own, count, group: h % count)
        yield Map("heads of keys", "head h % num_heads_kv", by_remainder)
    if q.group > 1:
        words = "head h, not h // group, in memory: of later tokens from num_heads_kv on"
        yield Map("heads of keys", words, partial(_strided, (0, 0), h, True))


def strides(question: Question) -> Iterator[Map]:
    """Arrays read at the strides of others, of tokens, of heads, or of both; 0 for their own."""
    q, found = question, dict[tuple[int, int], str]()
    shapes = {"k": q.k.shape[1:], "v": q.v.shape[1:], "q": q.q.shape[1:]}
    for name, (heads, width) in shapes.items():
        for words, steps in (("tokens", (1, 0)), ("heads", (0, 1)), ("tokens and heads", (1, 1))):
            key = steps[0] * heads * width, steps[1] * width
            found.setdefault(key, f"{words} as far apart as those of {name}")
    for by, whole in itertools.product(found, (False, True)):
        words = found[by] + ", within each sequence" * (not whole)
        if len({*shapes.values()}) > 1:
            yield Map("strides", words, partial(_strided, by, None, whole))


def _strided(by: tuple[int, int], head: Ints | None, whole: bool, g: Geometry) -> At:
    """Rows at other strides of tokens and heads, from the start of the array or, unless ``whole``,
    of the sequence on; behind its end memory starts again."""
    own, start = g.shape[1] * g.shape[2], 0 * g.row.start if whole else g.row.start
    place = start * own + (g.everywhere.t - start) * (by[0] or own) + g.everywhere.j
    place = place + (g.everywhere.h if head is None else head) * (by[1] or g.shape[2])
    place = place % (g.shape[0] * own)
    return At(place // own, place // g.shape[2] % g.shape[1], place % g.shape[2])


class Order(NamedTuple):
    """Memory in this order of ``LETTERS``, the last one the fastest; or so ``each`` sequence."""

    letters: str
    each: bool = False

    def numbers(self, g: Geometry) -> Ints:
        """Where everything of an array lies in memory; -1 for what is in no sequence."""
        (t, h, j), row = g.everywhere, g.row
        sizes = {"t": row.n if self.each else g.shape[0], "h": g.shape[1], "d": g.shape[2]}
        of = {"t": row.i if self.each else t, "h": h, "d": j}
        found, stride = row.start * g.shape[1] * g.shape[2] * self.each, np.ones_like(row.n)
        for letter in reversed(self.letters):
            found, stride = found + of[letter] * stride, stride * sizes[letter]
        return np.where(self.each & (row.i >= row.n), -1, found)


def _at(read: Order, written: Order, g: Geometry) -> At:
    """What is found where it is read by one order in memory that was written by another."""
    here, there = read.numbers(g), written.numbers(g)
    size, inside = there.size, there >= 0
    memory = np.full(1 + max(there.max(initial=0), here.max(initial=0)), -1)
    memory[there[inside]] = np.arange(size).reshape(g.shape)[inside]
    found = np.where(here >= 0, memory[here], -1)
    # by hand: np.unravel_index of NumPy 2.4 is wrong past 8,192 places
    rest, j = np.divmod(np.maximum(found, 0), max(g.shape[2], 1))
    t, h = np.divmod(rest, max(g.shape[1], 1))
    return At(np.where(found < 0, -1, t), h, j)


def layouts(statistics: bool) -> Iterator[Map]:
    """Memory of one order read in another: an array, or a sequence."""
    memory, *others = ("ht", "th") if statistics else ("thd", "htd", "tdh", "dht", "dth", "hdt")
    for other in [*map(Order, others), Order(others[0], True)]:
        own, end = other._replace(letters=memory), ", every sequence" * other.each
        for read, written in ((other, own), (own, other)):
            orders = (", ".join(LETTERS[x] for x in of.letters) for of in (written, read))
            text = "({}) read as ({})".format(*orders) + end
            yield Map("layouts", text, partial(_at, read, written))


def packed(question: Question) -> Iterator[Map]:
    """Rows of the heads of a group, which lie in one tile, in another order."""
    longest = max(question.lengths_q, default=0)
    parts = {"sequence": NOWHERE} | {f"tile of {t} rows": t for t in TILES if t < longest}
    forms = itertools.product(PACKED.items(), parts.items())
    for (words, of), (at, tile) in forms if question.group > 1 else ():
        yield Map("layouts", f"{words}, every {at} and group of heads", partial(_packed, of, tile))


def _packed(of: Packed, tile: int, g: Geometry) -> At:
    first, h = g.row.i // tile * tile, g.everywhere.h % g.group
    i, head = of(g.row.i - first, h, np.clip(g.row.n - first, 1, tile), g.group)
    return g.everywhere._replace(t=g.row.start + first + i, h=g.everywhere.h - h + head)


def families(question: Question, statistics: bool) -> list[Map]:
    """All maps of row statistics, or of what has columns, whose rows are of one product alone."""
    of_sequences = [*sequences(question)]
    inside = [*rows(question), *(by.stored for by in of_sequences)] if statistics else []
    return [*layouts(statistics), *packed(question), *heads(question), *inside, *of_sequences]


def overrun(question: Question) -> Iterator[Map]:
    """Rows of nothing where the last tile of a sequence before ends behind its last row."""
    for t in {*TILES, question.block_size} if question.batch > 1 else ():
        words = f"zeros up to the end of a sequence's last tile of {t} are over the next one"
        yield Map("overrun", words, partial(_overrun, t))


def _overrun(t: int, g: Geometry) -> At:
    starts, stops, token = g.offsets[:-1], g.offsets[1:], g.everywhere.t
    ends = starts + -(-(stops - starts) // t) * t
    over = ((token >= stops) & (token < ends)).any(axis=-1, keepdims=True)
    return g.everywhere._replace(t=np.where(over, -NOWHERE, token))
