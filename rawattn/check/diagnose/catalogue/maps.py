"""Where an array may be read or stored by mistake: one vocabulary of index maps.

A map says for every place (token, head, column) which place is taken for it. It knows no array but
a ``Geometry``, so that the same map moves q, rows of dk and the numbers of lse. A map is the same
in every stage, whoever reads or stores by it.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import TILES
from rawattn.check.diagnose.engine.question import BY_ROW, OF_KEYS, OF_SLOTS, Question
from rawattn.check.diagnose.engine.steps import Floats

Ints = np.ndarray
BITS = (1, 2, 4, 8, 16, 32, 64, 128)
LETTERS = {"b": "batch", "t": "tokens", "h": "heads", "d": "columns"}
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
    heads of the array for every key/value head; ``num_heads_q``: those that read it."""

    shape: tuple[int, int, int]
    offsets: Ints
    others: Ints
    group: int
    num_heads_q: int

    @cached_property
    def longest(self) -> int:
        return int(np.diff(self.offsets).max(initial=0))

    @cached_property
    def everywhere(self) -> At:
        t, h, j = np.ogrid[tuple(slice(size) for size in self.shape)]
        return At(t, h, j)

    @cached_property
    def row(self) -> Row:
        """Of all tokens; those outside of sequences count as of the one before."""
        t, last = self.everywhere.t, len(self.offsets) - 2
        b = np.clip(np.searchsorted(self.offsets, t, side="right") - 1, 0, last)
        start = self.offsets[b]
        return Row(b, start, t - start, self.offsets[b + 1] - start)


@lru_cache(maxsize=32)
def geometry(question: Question, name: str) -> Geometry:
    """That of an input, a row statistic or a result, by its name; those of row statistics have one
    column."""
    sides = [question.offsets(of).astype(np.int64) for of in "qk"]
    of_keys = name in ("k", "v", "tk", "tv", *OF_KEYS)
    like = question.v if name.endswith(("out", "v")) else question.q  # "sliding out" too
    columns = 1 if name in STATISTICS else like.shape[2]
    tokens, heads = (question.k if of_keys else question.q).shape[:2]
    own, other = sides[::-1] if of_keys else sides
    if name in OF_SLOTS and question.block_indices is not None:
        return Geometry(question.block_indices.shape, own, other, 1, question.num_heads_q)
    group, num_heads_q = 1 if of_keys else question.group, question.num_heads_q
    return Geometry((tokens, heads, columns), own, other, group, num_heads_q)


@dataclass(frozen=True, eq=False)
class Map:
    """``words`` for it; ``of`` the places that are taken for all of an array."""

    family: str
    words: str
    of: Callable[[Geometry], At]

    def moved(self, g: Geometry, x: Floats, nothing: float = 0.0) -> Floats:
        """All of an array, (tokens, heads, columns) or (heads, tokens), as it is found there."""
        if x.ndim == 3:
            return _taken(x, self.of(g), nothing)
        return _taken(np.asarray(x).T[..., None], self.of(g), nothing)[..., 0].T


def _taken(x: Floats, at: At, nothing: float) -> Floats:
    """``x`` (tokens, heads, columns) at these places, ``nothing`` where there are none."""
    there = [(i >= 0) & (i < n) for i, n in zip(at, x.shape, strict=True)]
    t, h, j = (np.where(inside, i, 0) for i, inside in zip(at, there, strict=True))
    inside = there[0] & there[1] & there[2]
    found = x[t, h, j].astype(np.float64)
    return found if inside.all() else np.where(inside, found, nothing)


# ---- rows and heads ---------------------------------------------------------------------------

ROWS: dict[str, Callable[[Ints, int, Ints], Ints]] = {  # row i of n; the last ones of tiles
    "row i + {}": lambda i, by, n: i + by,
    "row i - {}": lambda i, by, n: i - by,
    "row i ^ {}": lambda i, by, n: i ^ by,
    "row i & ~{}": lambda i, by, n: i & ~by,
    "row i | {}": lambda i, by, n: i | by,
    "row i + {}, its own in the last tile": lambda i, by, n: i + by * (i // by < (n - 1) // by),
    "row i - {}, its own in the first tile": lambda i, by, n: i - by * (i >= by),
    "row i + {}, for those of the first tile": lambda i, by, n: (
        i + by * (i < np.minimum(by, n - by))
    ),
    "zeros for the first {} rows": lambda i, by, n: np.where(i < by, -NOWHERE, i),
    "row i % {}": lambda i, by, n: i % by,
    "row i // {0} * {0}": lambda i, by, n: i - i % by,
    "rows of the last tile of {} in the first one, nothing behind it": lambda i, by, n: np.where(
        i < by, (n - 1 - i) // by * by + i, -NOWHERE
    ),
    "rows of {} reversed": lambda i, by, n: i - i % by + by - 1 - i % by,
    "rows of {} interleaved": lambda i, by, n: i - i % by + i % by // 2 + i % 2 * (by // 2),
}
SEQUENCES: dict[str, Callable[[Geometry, Row], Ints]] = {
    "without the offset of the sequence": lambda g, row: row.i,
    "the offset of the next sequence": lambda g, row: row.start + row.n + row.i,
    "the offset of the sequence before": lambda g, row: g.offsets[np.maximum(row.b - 1, 0)] + row.i,
    "the offset of the other side": lambda g, row: g.others[row.b] + row.i,
    "rows of the sequence reversed": lambda g, row: row.start + row.n - 1 - row.i,
}
PACK: dict[str, Callable[[Geometry, Row], Ints]] = {  # whatever their sequence
    "the row before in the pack, the last one before the first": lambda g, row: (
        (row.start + row.i - 1) % g.shape[0]
    ),
    "the next row of the pack, the first one behind the last": lambda g, row: (
        (row.start + row.i + 1) % g.shape[0]
    ),
}
HEADS: dict[str, Callable[[Ints, int, int], Ints]] = {  # head h of so many, a group of so many
    "the next head": lambda h, count, group: (h + 1) % count,
    "the head before": lambda h, count, group: (h - 1) % count,
    "the first head": lambda h, count, group: 0 * h,
    "the last head": lambda h, count, group: 0 * h + count - 1,
    "heads reversed": lambda h, count, group: count - 1 - h,
    "head h // group": lambda h, count, group: h // group,
    "head h % num_heads_kv": lambda h, count, group: h % (count // group),
    "the first head of the group": lambda h, count, group: h - h % group,
    "the last head of the group": lambda h, count, group: h - h % group + group - 1,
    "head h % group * num_heads_kv + h // group": lambda h, count, group: (
        h % group * (count // group) + h // group
    ),
    "head h % num_heads_kv * group + h // num_heads_kv": lambda h, count, group: (
        h % (count // group) * group + h // (count // group)
    ),
}
HEADS_OF_KEYS: dict[str, Callable[[Ints, int], Ints]] = {  # for query head h, of so many
    "head h % num_heads_kv": lambda h, count: h % count,
    "head h // num_heads_kv": lambda h, count: h // count,
    "head h, as if there were as many": lambda h, count: h,
}


def _rows(index: Callable[[Ints, int, Ints], Ints], by: int, g: Geometry) -> At:
    return g.everywhere._replace(t=g.row.start + index(g.row.i, by, g.row.n))


def _tokens(token: Callable[[Geometry, Row], Ints], g: Geometry) -> At:
    return g.everywhere._replace(t=token(g, g.row))


def _heads(head: Callable[[Ints, int, int], Ints], g: Geometry) -> At:
    return g.everywhere._replace(h=head(g.everywhere.h, g.shape[1], g.group))


def _heads_of_keys(head: Callable[[Ints, int], Ints], g: Geometry) -> At:
    """(tokens, num_heads_q, columns); heads that there are not are those of the tokens behind."""
    (t, _, j), count = g.everywhere, g.shape[1]
    h = head(np.arange(g.num_heads_q)[None, :, None], count)
    return At(t + h // count, h % count, j)


def rows(question: Question, least: int = 1) -> Iterator[Map]:
    """Other rows of the same sequence, as tiles and instructions may take them."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    for by in (by for by in BITS if least <= by < longest):
        for words, index in ROWS.items() if by > 1 else itertools.islice(ROWS.items(), 5):
            yield Map("rows", words.format(by), partial(_rows, index, by))


def sequences(question: Question) -> Iterator[Map]:
    """The same row of another sequence, or counted from another place."""
    for words, token in SEQUENCES.items() if question.batch > 1 else ():
        yield Map("sequences", words, partial(_tokens, token))


def overflows(question: Question, name: str) -> Iterator[Map]:
    """Rows of an array whose offset in memory is cut to so many bits."""
    total, *sizes = geometry(question, name).shape
    for bits in (15, 16, 31, 32):
        rows = 2**bits // math.prod(sizes)
        if 0 < rows < total:
            words = f"row t % {rows}, as if offsets had {bits} bits"
            yield Map("overflows", words, partial(_tokens, partial(_cut_off, rows)))


def _cut_off(rows: int, g: Geometry, row: Row) -> Ints:
    return np.asarray(g.everywhere.t % rows)


def heads(question: Question) -> Iterator[Map]:
    """The same row of other heads; those of groups mean nothing to keys."""
    count = len(HEADS) if question.group > 1 else 5
    for words, head in itertools.islice(HEADS.items(), count if question.num_heads_q > 1 else 0):
        yield Map("heads", words, partial(_heads, head))


def other_heads(own: Ints, count: int, group: int) -> dict[str, Ints]:
    """What query heads may take for their ``own`` one of so many; none where there is one alone."""
    h = np.arange(len(own))
    found = {words: head(own, count, 1) for words, head in itertools.islice(HEADS.items(), 5)}
    found |= {f"head h % {count}": h % count, f"head h // {count}": h // count % count}
    found |= {
        "the group's number": h // group % count,
        "the group's first head": (h - h % group) % count,
    }
    return found if count > 1 else {}


def heads_of_keys(question: Question) -> Iterator[Map]:
    """The same row of an array of keys, of other heads for the query heads of a group."""
    for words, head in HEADS_OF_KEYS.items() if question.group > 1 else ():
        if question.num_heads_kv > 1:
            yield Map("heads of keys", words, partial(_heads_of_keys, head))


# ---- memory -----------------------------------------------------------------------------------


class Order(NamedTuple):
    """Memory in this order of ``LETTERS``, the last one the fastest; with "b" in it of sequences
    padded to the longest, ``each``: of one sequence after the other."""

    letters: str
    each: bool = False

    def numbers(self, g: Geometry) -> Ints:
        """Where everything of an array lies in memory; -1 for what is in no sequence."""
        (t, h, j), row, local = g.everywhere, g.row, self.each or "b" in self.letters
        tokens = g.longest if "b" in self.letters else row.n if self.each else g.shape[0]
        sizes = {"b": len(g.offsets) - 1, "t": tokens, "h": g.shape[1], "d": g.shape[2]}
        of = {"b": row.b, "t": row.i if local else t, "h": h, "d": j}
        found, stride = row.start * g.shape[1] * g.shape[2] * self.each, np.ones_like(row.n)
        for letter in reversed(self.letters):
            found, stride = found + of[letter] * stride, stride * sizes[letter]
        return np.where(local & (row.i >= row.n), -1, found)


def _at(g: Geometry, written: Ints, read: Ints) -> At:
    """What is found at the numbers ``read`` in memory that was ``written`` at others."""
    size, inside = written.size, written >= 0
    memory = np.full(1 + max(written.max(initial=0), read.max(initial=0)), -1)
    memory[written[inside]] = np.arange(size).reshape(g.shape)[inside]
    found = np.where(read >= 0, memory[read], -1)
    t, h, j = np.unravel_index(np.maximum(found, 0), g.shape) if size else g.everywhere
    return At(np.where(found < 0, -1, t), h, j)


def layouts(statistics: bool) -> Iterator[Map]:
    """Memory of one order that is read in another, of an array, of every sequence, of padded
    ones."""
    memory, *others = ("ht", "th") if statistics else ("thd", "htd", "tdh", "dht", "dth", "hdt")
    found = [("", False, other, "") for other in others]
    found += [("", True, others[0], ", every sequence")]
    found += [("b", False, others[0], ", every padded sequence")]
    for batch, each, other, over in found:
        for pair in ((other, memory), (memory, other)):
            read, written = (Order(batch + letters, each) for letters in pair)
            yield Map("layouts", _words(pair[1], pair[0]) + over, _as(read, written))
    batched = ("bht", "hbt") if statistics else ("bthd", "bhtd")
    for letters in batched:
        yield Map("layouts", _words(memory, letters), _as(Order(letters), Order(memory)))
    yield Map("layouts", _words(batched[0], memory), _as(Order(memory), Order(batched[0])))
    if statistics:
        of_each = _as(Order(memory, each=True), Order(memory))
        yield Map("layouts", _words(memory, memory) + " of each sequence", of_each)
        words = "(heads, longest) in place of (heads, tokens)"
        yield Map("layouts", words, _by_longest)


def _words(written: str, read: str) -> str:
    of = (", ".join(LETTERS[letter] for letter in order) for order in (written, read))
    return "({}) read as ({})".format(*of)


def _as(read: Order, written: Order) -> Callable[[Geometry], At]:
    return lambda g: _at(g, written.numbers(g), read.numbers(g))


def _by_longest(g: Geometry) -> At:
    t, h, j = g.everywhere
    return _at(g, Order("ht").numbers(g), h * g.longest + t + 0 * j)


# ---- columns ----------------------------------------------------------------------------------

Column = Callable[[Ints, Ints, int], Ints]  # of row i for column j of so many
COLUMNS: dict[str, Column] = {
    "columns reversed": lambda i, j, n: n - 1 - j,
    "halves of columns interleaved": lambda i, j, n: j // 2 + j % 2 * (n // 2),
    "even columns before odd ones": lambda i, j, n: j * 2 % n + j * 2 // n,
    "one column further": lambda i, j, n: j + 1,
}
SWIZZLES = tuple(itertools.product((4, 8, 16), ((8, 0), (4, 0), (4, 1), (2, 2))))


def _flipped(bit: int, mask: int, i: Ints, j: Ints, n: int) -> Ints:
    return np.where(i & mask != 0, j ^ bit, j) if mask else j ^ bit


def _repeated(count: int, i: Ints, j: Ints, n: int) -> Ints:
    return j % count


def _swizzled(chunk: int, modulus: int, shift: int, i: Ints, j: Ints, n: int) -> Ints:
    return np.asarray(j ^ ((i >> shift) % modulus * chunk))


def _columns(column: Column, g: Geometry) -> At:
    return g.everywhere._replace(j=column(g.row.i, g.everywhere.j, g.shape[2]))


def _by_column(tile: int, period: int, g: Geometry) -> At:
    row, j = g.row, g.everywhere.j
    return g.everywhere._replace(t=row.start + row.i - row.i % tile + j % period)


def _blocks(size: int, g: Geometry) -> At:
    row, j = g.row, g.everywhere.j
    t = row.start + row.i - row.i % size + j % size
    return g.everywhere._replace(t=t, j=j - j % size + row.i % size)


def columns(question: Question) -> Iterator[Map]:
    """Other columns of a row, by its number in its sequence: swizzles and fragments."""
    dims, forms = max(question.q.shape[2], question.v.shape[2]), dict(COLUMNS)
    for bit in (bit for bit in BITS if bit < dims):
        forms[f"columns j ^ {bit}"] = partial(_flipped, bit, 0)
        forms |= {f"columns j % {bit}": partial(_repeated, bit)} if bit > 8 else {}
        for mask in (1, 2, 4, 8) if bit > 2 else ():
            forms[f"columns j ^ {bit} in rows with bit {mask}"] = partial(_flipped, bit, mask)
    for chunk, (modulus, shift) in SWIZZLES:
        if chunk * modulus <= dims:
            text = f"chunks of {chunk} columns ^ row / {1 << shift} % {modulus}"
            forms[text] = partial(_swizzled, chunk, modulus, shift)
    for words, column in forms.items():
        yield Map("columns", words, partial(_columns, column))
    for size in (8, 16):
        yield Map("columns", f"blocks of {size} by {size} transposed", partial(_blocks, size))


def by_columns(question: Question) -> Iterator[Map]:
    """Of a tile of pairs of rows and columns: rows by the number of the column."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    sizes = [size for size in TILES if size < 2 * longest]
    for tile, period in itertools.product(sizes, sizes):
        if period <= tile:
            words = f"in tiles of {tile} rows row j % {period}"
            yield Map("by columns", words, partial(_by_column, tile, period))


def families(question: Question, statistics: bool) -> list[Map]:
    """All maps of row statistics, or of what has columns; but for rows of the latter, which are of
    one product."""
    found = [*layouts(statistics), *heads(question), *sequences(question)]
    pack = (Map("pack", words, partial(_tokens, token)) for words, token in PACK.items())
    return [*found, *(rows if statistics else columns)(question), *pack]
