"""The lists of blocks read wrongly, as a table: what slots hold, which of them count, how often,
and what is hidden from a query. ``selection`` plants those that show something else.

Long by the table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue.sparse.lists import OWN, Lists, Walk, starts_of, walked
from rawattn.check.diagnose.engine.question import Question

UNIONS, RARER_UNIONS = (4, 8, 16), (2, 3, 5, 6, 12, 24, 32, 48, 64, 128)
LEADERS = (2, 3, 4, 8, 16, 32, 64, 128)
Of = Callable[[Lists], np.ndarray]


class Row(NamedTuple):
    """A class, words, and the lists."""

    name: str
    words: str
    walk: Walk


def usual(question: Question) -> Iterator[Row]:
    """The rows that are planted whatever the answers are."""
    yield Row("sparse-own-block-missing", "", _without_own)
    for name, change, rows in TABLE:
        yield from (Row(name, text, change(of)) for text, of in rows.items())
    yield from _layouts(question)
    if np.asarray(question.block_indices).shape[1] > 1:
        yield from _other_heads(question)
    yield from _unions(question, UNIONS)


def rarer(question: Question) -> Iterator[Row]:
    """Those, and what is looked up where the blocks that rows saw have been read off."""
    yield from usual(question)
    yield from _unions(question, RARER_UNIONS)
    tokens = np.arange(len(question.q))
    starts = starts_of(question)
    for size in LEADERS:
        leader = starts + (tokens - starts) // size * size
        yield Row("sparse-tile-union", f"of the first one of {size} queries", _of_tokens(leader))


# ---- ways to change lists -----------------------------------------------------------------------


def _listed(**changes: Of) -> Walk:
    """Lists that hold or count something else, walked as they should."""

    def walk(lists: Lists) -> Lists:
        others: dict[str, Any] = {name: of(lists) for name, of in changes.items()}
        return walked(replace(lists, **others))

    return walk


def _holding(named: Of) -> Walk:
    """Slots that hold something else."""
    return _listed(named=named)


def _counting(counted: Of) -> Walk:
    """Other slots that count, those that did or not."""
    return _listed(counted=counted)


def _ending(stop: Of) -> Walk:
    """Lists that end at the first slot that counts where ``stop``."""
    return _listed(counted=lambda x: x.counted & (np.cumsum(stop(x) & x.counted, axis=2) == 0))


def _repeating(repeated: Of) -> Walk:
    """Blocks that count again unless they are ``repeated``."""
    return lambda lists: walked(lists, lists.exists & ~repeated(lists))


def _own_again(own: Of) -> Walk:
    """The own block counts so often."""
    return lambda lists: walked(lists, own=own(lists))


def _reading_again(named: Of) -> Walk:
    """Slots that hold something else, and every block that they name counts again."""

    def walk(lists: Lists) -> Lists:
        lists = replace(lists, named=named(lists))
        return walked(lists, lists.exists, 1)

    return walk


def _hiding(hidden: Of) -> Walk:
    """Entries that are taken for hidden ones."""
    return lambda lists: replace(lists, times=lists.times * ~hidden(lists))


def _hiding_own(hidden: Of) -> Walk:
    """The same, where the own block is walked."""
    return _hiding(lambda x: x.question.own & hidden(x))


def _opening(where: Of) -> Walk:
    """Entries that are not cut at the query."""
    return lambda lists: replace(lists, whole=lists.whole | where(lists))


def _without_own(lists: Lists) -> Lists:
    return walked(replace(lists, question=replace(lists.question, own=False)))


def _of_tokens(token: np.ndarray) -> Walk:
    """Every token walks the slots of another one, and its own block."""
    return _listed(named=lambda x: x.named[token], counted=lambda x: x.counted[token])


def _last_block(lists: Lists) -> np.ndarray:
    """Slots that name the block that was named last before them."""
    found, last = np.zeros_like(lists.exists), np.full(lists.named.shape[:2], -1)
    for slot in range(lists.named.shape[2]):
        there, block = lists.exists[..., slot], lists.named[..., slot]
        found[..., slot] = there & (block == last)
        last = np.where(there, block, last)
    return found


def _reset(own_first: bool) -> Of:
    """What stands before a block that is masked."""

    def wiped(x: Lists) -> np.ndarray:
        order = np.arange(x.block.shape[2])
        order = np.roll(order, 1) if own_first else order
        masked = x.question.causal & ((x.block > x.own) & (x.times > 0))[..., order]
        after = np.cumsum(masked[..., ::-1], axis=2)[..., ::-1] > 0
        return np.asarray(after[..., np.argsort(order)])

    return wiped


def _padding(value: Of, negative: bool = False) -> Of:
    def named(x: Lists) -> np.ndarray:
        there = ~x.is_block & (x.blocks > 0) & ((x.named < 0) | (not negative))
        return np.where(there, value(x), x.named)

    return named


def _below(blocks: Of) -> Of:
    return lambda x: np.where(x.named < blocks(x), x.named, -1)


def _whole_tiles(size: int) -> Of:
    return lambda x: x.counted & (x.slots < len(x.slots) // size * size)


def _behind(blocks: Of) -> Of:
    return lambda x: x.block >= blocks(x)


# ---- the table --------------------------------------------------------------------------------

PADDING: dict[str, Of] = {
    "as the first block": _padding(lambda x: 0 * x.named),
    "as the last block": _padding(lambda x: x.blocks - 1),
    "as the own block": _padding(lambda x: x.own),
    "as the nearest block": _padding(lambda x: np.clip(x.named, 0, x.blocks - 1)),
    "if negative as the first block": _padding(lambda x: 0 * x.named, True),
    "if negative from the end": _padding(lambda x: x.named + x.blocks, True),
}
NUMBERS: dict[str, Of] = {
    "seqlen_q": lambda x: -(-x.length_q // x.size),
    "seqlen_k, rounded down": lambda x: x.length_k // x.size,
    "the longest seqlen_q": lambda x: -(-x.length_q.max(initial=0) // x.size) + 0 * x.blocks,
}
FEWER = {f"the number of blocks is that of {text}": of for text, of in NUMBERS.items()}
TABLE: tuple[tuple[str, Callable[[Of], Walk], Mapping[str, Of]], ...] = (
    (
        "sparse-not-causal",
        _opening,
        {
            "everywhere": lambda x: x.slot != OWN,
            "in the block around the query": lambda x: (x.slot != OWN) & (x.block == x.own),
            "in later blocks": lambda x: (x.slot != OWN) & (x.block != x.own),
            "everywhere, the own block too": lambda x: x.question.causal & (x.slot >= OWN),
        },
    ),
    (
        "sparse-own-block-missing",
        _hiding_own,
        {
            "where the query is its first one": lambda x: x.block * x.size >= x.place,
            "where the query is its first one, but not the sequence's": lambda x: (
                (x.block * x.size >= x.place) & (x.place > 0)
            ),
            "but where the query is its last one": lambda x: (x.block + 1) * x.size - 1 > x.place,
            "where the query is its last one": lambda x: (
                (x.slot == OWN) & ((x.block + 1) * x.size - 1 == x.place)
            ),
            "named or not": lambda x: x.block >= x.place // x.size,
            "that lies behind the query's number, without seqlen_k - seqlen_q": lambda x: (
                x.block * x.size > x.row
            ),
        },
    ),
    (
        "sparse-own-block-not-causal",
        _opening,
        {
            "": lambda x: (x.block == x.own) & x.question.own,
            "unless it is selected": lambda x: x.slot == OWN,
        },
    ),
    (
        "sparse-duplicate-twice",
        _repeating,
        {
            "of the selection": lambda x: x.exists & False,
            "compared with the one before alone": _last_block,
            "compared with the first slot alone": lambda x: (
                (x.named == x.named[..., :1]) & (x.slots > 0)
            ),
        },
    ),
    (
        "sparse-duplicate-twice",
        _own_again,
        {
            "the own block": lambda x: 1 + 0 * x.own,
            "the own block once for every slot": lambda x: x.counted.sum(axis=2, keepdims=True),
            "the own block once for every named block": lambda x: x.exists.sum(
                axis=2, keepdims=True
            ),
        },
    ),
    ("sparse-duplicate-twice", _reading_again, {"all": lambda x: x.named}),
    ("sparse-padding-read", _holding, PADDING),
    (
        "sparse-padding-read",
        _reading_again,
        {f"{text}, every time": of for text, of in PADDING.items()},
    ),
    (
        "sparse-last-slot-dropped",
        _counting,
        {
            "the last one": lambda x: x.counted & (x.slots < x.slots[-1:]),
            **{f"those after a multiple of {n}": _whole_tiles(n) for n in (2, 4, 8, 16)},
            "the first one": lambda x: x.counted & (x.slots > 0),
            "the last one that counts": lambda x: x.slots < x.limit - 1,
        },
    ),
    (
        "sparse-counts-ignored",
        _counting,
        {
            "": lambda x: x.counted | True,
            "one slot too many": lambda x: x.slots < x.limit + 1,
            "it counts named blocks, not slots": lambda x: np.cumsum(x.is_block, 2) <= x.limit,
            "that of the first head for all": lambda x: x.slots < x.limit[:, :1] + 0 * x.limit,
        },
    ),
    (
        "input-layout",
        _counting,
        {
            "block_counts, (T, H) as (H, T)": lambda x: (
                x.slots < x.limit.reshape(x.limit.shape[1::-1]).T[..., None]
            ),
            "block_counts, (H, T) as (T, H)": lambda x: (
                x.slots < x.limit[..., 0].T.reshape(x.limit.shape)
            ),
        },
    ),
    (
        "sparse-list-cut",
        _ending,
        {
            "at the first -1": lambda x: x.named < 0,
            "at the first that is no block of the sequence": lambda x: ~x.exists,
            "at the first repeat": lambda x: x.repeats,
            "at the first block behind the query's own": lambda x: x.exists & (x.named > x.own),
            "at the query's own block": lambda x: x.named == x.own,
            "at a block that is not larger than the one before": lambda x: (
                np.diff(x.named, axis=2, prepend=-1) <= 0
            ),
        },
    ),
    (
        "sparse-list-cut",
        _counting,
        {
            "after as many slots as there are named blocks": lambda x: (
                x.counted & (x.slots < x.exists.sum(axis=2, keepdims=True))
            ),
        },
    ),
    (
        "sparse-masked-block-resets",
        _hiding,
        {"the own block first": _reset(True), "the own block last": _reset(False)},
    ),
    ("wrong-keys", _hiding, {text: _behind(of) for text, of in FEWER.items()}),
    (
        "wrong-keys",
        _holding,
        {f"{text}, but for the own block": _below(of) for text, of in FEWER.items()},
    ),
)


# ---- lists of others ----------------------------------------------------------------------------


def _layouts(question: Question) -> Iterator[Row]:
    """What the memory of block_indices holds if it is read otherwise."""
    x = np.asarray(question.block_indices).astype(np.int64)
    inside = question.sequence_of("q") >= 0
    row = np.where(inside, np.arange(len(x)) - starts_of(question), 0)
    readings = {text: of(x) for text, of in LAYOUTS.items()}
    readings["one for every query head"] = _as_heads(x, question.num_heads_q)
    readings["one for every kv head"] = _as_heads(x, question.num_heads_kv)
    readings["without the sequence's offset"] = x[row]
    for text, read in readings.items():
        yield Row("input-layout", f"block_indices, {text}", _named(read))


def _named(read: np.ndarray) -> Walk:
    """Slots that hold ``read``, perhaps of another number of heads; factors stay where they are."""

    def walk(lists: Lists) -> Lists:
        number, there = read.shape[1], lists.counted.shape[1]
        if number == there:
            return walked(replace(lists, named=read))
        heads = np.arange(len(lists.heads)) * number // len(lists.heads)
        counted = lists.counted[:, np.arange(number) * there // number]
        return walked(replace(lists, named=read, counted=counted, heads=heads))

    return walk


def _axes(order: tuple[int, int, int], back: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Memory with the axes in this order is read as (T, H, S), or, ``back``, the reverse."""

    def read(x: np.ndarray) -> np.ndarray:
        if back:
            shape = tuple(x.shape[axis] for axis in order)
            return np.ascontiguousarray(x.reshape(shape).transpose(np.argsort(order)))
        return np.ascontiguousarray(x.transpose(order)).reshape(x.shape)

    return read


def _as_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """Memory read with the strides of another number of heads."""
    size = len(x) * heads * x.shape[2]
    flat = np.concatenate([x.reshape(-1), np.full(max(size - x.size, 0), -1)])
    return np.asarray(flat[:size].reshape(len(x), heads, x.shape[2]))


def _words(x: np.ndarray, rows: bool) -> np.ndarray:
    """int64 as int32: low and high words in turn, of the first half; ``rows``: those of every token
    and head from where they should start."""
    words = np.ascontiguousarray(x).astype("<i8").reshape(-1).view("<i4").astype(np.int64)
    if rows:
        return np.asarray(words.reshape(*x.shape[:2], 2 * x.shape[2])[..., : x.shape[2]])
    return words[: x.size].reshape(x.shape)


AXES = {
    "(T, H, S) as (T, S, H)": _axes((0, 2, 1), back=True),
    "(T, S, H) as (T, H, S)": _axes((0, 2, 1), back=False),
    "(T, H, S) as (H, T, S)": _axes((1, 0, 2), back=True),
    "(H, T, S) as (T, H, S)": _axes((1, 0, 2), back=False),
}
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "int64 as int32": lambda x: _words(x, False),
    "int64 as int32, each row from its start": lambda x: _words(x, True),
    **AXES,
}


def _other_heads(question: Question) -> Iterator[Row]:
    """Lists of other heads, with their factors or one's own."""
    name, selections = "sparse-other-heads-selection", np.asarray(question.block_indices).shape[1]
    heads, group = np.arange(question.num_heads_q), question.group
    right = heads * selections // question.num_heads_q
    for text, of_head in {
        "of the first head": 0 * heads,
        "of the last head": 0 * heads + selections - 1,
        "of h modulo their number": heads % selections,
        "of the next head": (right + 1) % selections,
        "of the head before": (right - 1) % selections,
        "of the kv head's number": np.minimum(heads // group, selections - 1),
        "of the group's first head": heads // group * group % selections,
    }.items():
        yield Row(name, text, _of_heads(of_head, of_head))
        yield Row(name, f"{text}, with its own gate", _of_heads(of_head, right))


def _of_heads(heads: np.ndarray, factors: np.ndarray) -> Walk:
    return lambda lists: replace(lists, heads=heads, factors=factors)


def _unions(question: Question, sizes: Sequence[int]) -> Iterator[Row]:
    """Queries that see what all lists of their tile hold: a tile of the sequence, or of the packed
    array."""
    sequence, starts = question.sequence_of("q"), starts_of(question)
    token = np.arange(len(sequence))
    for size in (one for one in sizes if one < 2 * max(question.lengths_q, default=0)):
        tile = np.where(sequence < 0, token, starts + (token - starts) // size * size)
        words = f"of {size} queries"
        yield Row("sparse-tile-union", words, _union(tile, True))
        if size in UNIONS:
            packed = np.where(sequence < 0, token, np.maximum(token // size * size, starts))
            yield Row("sparse-tile-union", f"{words} of the packed array", _union(packed, True))
        else:
            yield Row("sparse-tile-union", f"{words}, as far as they see it", _union(tile, False))


def _union(tile: np.ndarray, hidden: bool) -> Walk:
    """The blocks of all of a tile, with one's own slots; ``hidden``: those behind a query too."""

    def walk(lists: Lists) -> Lists:
        of_each = lists.multiplicity(hidden) > 0
        seen = np.zeros_like(of_each)
        np.logical_or.at(seen, tile, of_each)
        return of_blocks(lists, seen[tile])

    return walk


def of_blocks(lists: Lists, times: np.ndarray, whole: np.ndarray | bool | None = None) -> Lists:
    """Lists that hold every block so many ``times`` (tokens, heads, blocks), with one's own slots;
    ``whole``: uncut at the query, by default unless attention is causal."""
    block = np.broadcast_to(np.arange(times.shape[2]), times.shape)
    slot = np.full(times.shape, OWN)
    for entry in range(lists.named.shape[2] - 1, -1, -1):
        token, head = np.nonzero(lists.exists[..., entry])
        slot[token, head, lists.named[token, head, entry]] = entry
    whole = not lists.question.causal if whole is None else whole
    whole = np.broadcast_to(whole, times.shape)
    return replace(lists, block=block, slot=slot, times=times.astype(np.int64), whole=whole)
