"""Ways to walk the lists of blocks, and to share them among queries, other than the right ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue.sparse.lists import (
    OWN,
    Family,
    Lists,
    Walk,
    first_of,
    walked,
)
from rawattn.check.diagnose.catalogue.sparse.readings import READINGS
from rawattn.check.diagnose.engine.question import Question

TILES, RARER_TILES = (4, 8, 16), (2, 3, 5, 6, 12, 24, 32, 48, 64, 128)


def usual(question: Question) -> Family:
    """The ways to walk lists that are planted whatever the answers are."""
    yield from walks(question)
    yield from repeats(question)
    yield from counts(question)
    yield from tiles(question, TILES)


def rarer(question: Question) -> Family:
    """Those, and all that are looked up where the blocks that rows saw have been read off."""
    yield from usual(question)
    yield from rarer_walks(question)
    yield from tiles(question, RARER_TILES)
    yield from rarer_tiles(question, TILES + RARER_TILES)
    yield from leaders(question, (2, 3, 4, 8, 16, 32, 64, 128))
    yield from other_indices(question)


# ---- how a list is walked ---------------------------------------------------------------------


def walks(question: Question) -> Family:
    """Lists that end too early, or of which a block that is masked wipes out what came before."""
    name = "sparse-list-cut"

    def as_many_as_named(lists: Lists) -> Lists:
        number = lists.exists.sum(axis=2, keepdims=True)
        there = lists.exists & (np.arange(lists.named.shape[2]) < number)
        return walked(lists, there & first_of(lists.named, there))

    yield name, "at the first -1", _until(lambda lists: lists.named < 0)
    outside = _until(lambda lists: ~lists.exists)
    yield name, "at the first that is no block of the sequence", outside
    yield name, "after as many slots as there are named blocks", as_many_as_named
    if question.causal:
        name = "sparse-masked-block-resets"
        for text, own_first in (("the own block first", True), ("the own block last", False)):
            yield name, text, _reset(own_first)
    yield from fewer_blocks(question)
    if question.own:
        yield from skipped(question)


def fewer_blocks(question: Question) -> Family:
    """Sequences that are taken to have fewer blocks."""
    size, sequence = question.block_size, question.sequence_of("q")
    lengths_q, lengths_k = (np.array([*n, 0]) for n in (question.lengths_q, question.lengths_k))
    longest = max(question.lengths_q, default=0)
    numbers = {
        "seqlen_q": -(-lengths_q // size),
        "seqlen_q, rounded down": lengths_q // size,
        "seqlen_k, rounded down": lengths_k // size,
        "the longest seqlen_q": np.full_like(lengths_q, -(-longest // size)),
    }
    for text, number in numbers.items():
        for rest, own in (("", False), (", but for the own block", True)):
            if question.own or own:
                of_token = number[sequence][:, None, None]
                yield (
                    "wrong-keys",
                    f"the number of blocks is that of {text}{rest}",
                    (partial(_fewer, of_token, own)),
                )


def _fewer(number: np.ndarray, own: bool, lists: Lists) -> Lists:
    there = lists.exists & (lists.named < number)
    found = walked(lists, there & first_of(lists.named, there))
    return replace(found, times=found.times * ((found.block < number) | own))


def skipped(question: Question) -> Family:
    """Blocks that a comparison takes for hidden ones."""
    size, sequence = question.block_size, question.sequence_of("q")
    lengths_q, lengths_k = (np.array([*n, 0]) for n in (question.lengths_q, question.lengths_k))
    starts = np.array([*np.asarray(question.cu_seqlens_q)[:-1], 0])
    number = (np.arange(len(sequence)) - starts[sequence])[:, None, None]
    place = number + (lengths_k - lengths_q)[sequence][:, None, None]
    comparisons: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "where the query is its first one": lambda block: block * size >= place,
        "where the query is its first one, but not the sequence's": lambda block: (
            (block * size >= place) & (place > 0)
        ),
        "but where the query is its last one": lambda block: (block + 1) * size - 1 > place,
        "named or not": lambda block: block >= place // size,
        "that lies behind the query's number, without seqlen_k - seqlen_q": lambda block: (
            block * size > number
        ),
    }
    for text, hidden in comparisons.items():
        yield "sparse-own-block-missing", text, partial(_skipping, hidden)


def _skipping(hidden: Callable[[np.ndarray], np.ndarray], lists: Lists) -> Lists:
    return replace(lists, times=lists.times * ~hidden(lists.block))


def rarer_walks(question: Question) -> Family:
    """Lists that end for other reasons, and comparisons of a block with others."""
    name = "sparse-list-cut"
    stops: dict[str, Callable[[Lists], np.ndarray]] = {
        "at the first repeat": lambda lists: lists.exists & ~first_of(lists.named, lists.exists),
        "at the first block behind the query's own": lambda lists: (
            lists.exists & (lists.named > lists.own)
        ),
        "at the query's own block": lambda lists: lists.named == lists.own,
        "at a block that is not larger than the one before": lambda lists: (
            np.diff(lists.named, axis=2, prepend=-1) <= 0
        ),
    }
    for text, stop in stops.items():
        yield name, text, _until(stop)
    name = "sparse-duplicate-twice"
    yield name, "compared with the slot before alone", _compared(_slot_before)
    if question.own:
        for text, which in (("first", slice(0, 1)), ("last", slice(-1, None))):
            where = f"the own block compared with the {text} slot alone"
            yield name, where, _with_own(partial(_not_named_in, which))
        text = "the own block once for every block that is not it"
        yield name, text, _with_own(_number_of_others)


def _until(stop: Callable[[Lists], np.ndarray]) -> Walk:
    """The list ends at the first slot that counts where ``stop``."""

    def walk(lists: Lists) -> Lists:
        before = np.cumsum(stop(lists) & lists.counted, axis=2) == 0
        there = lists.exists & before
        return walked(lists, there & first_of(lists.named, there))

    return walk


def _reset(own_first: bool) -> Walk:
    def walk(lists: Lists) -> Lists:
        order = np.arange(lists.block.shape[2])
        order = np.roll(order, 1) if own_first else order
        masked = ((lists.block > lists.own) & (lists.times > 0))[..., order]
        after = np.cumsum(masked[..., ::-1], axis=2)[..., ::-1] == 0
        return replace(lists, times=lists.times * after[..., np.argsort(order)])

    return walk


def repeats(question: Question) -> Family:
    """Repeats that are not recognised, and the own block more than once."""
    name = "sparse-duplicate-twice"
    yield name, "compared with the one before alone", _compared(_last_block)
    yield name, "compared with the first slot alone", _compared(_first_slot)
    if question.own:
        own: dict[str, Callable[[Lists], np.ndarray]] = {
            "slot": lambda lists: lists.counted.sum(axis=2, keepdims=True),
            "named block": lambda lists: lists.exists.sum(axis=2, keepdims=True),
        }
        for text, number in own.items():
            yield name, f"the own block once for every {text}", _with_own(number)


def _compared(repeated: Callable[[Lists], np.ndarray]) -> Walk:
    return lambda lists: walked(lists, lists.exists & ~repeated(lists))


def _with_own(number: Callable[[Lists], np.ndarray]) -> Walk:
    """The own block so many times."""

    def walk(lists: Lists) -> Lists:
        there = lists.exists & first_of(lists.named, lists.exists)
        return walked(lists, there, own=number(lists))

    return walk


def _last_block(lists: Lists) -> np.ndarray:
    """Slots that name the block that was named last before them."""
    found, last = np.zeros_like(lists.exists), np.full(lists.named.shape[:2], -1)
    for slot in range(lists.named.shape[2]):
        there, block = lists.exists[..., slot], lists.named[..., slot]
        found[..., slot] = there & (block == last)
        last = np.where(there, block, last)
    return found


def _slot_before(lists: Lists) -> np.ndarray:
    return np.asarray(np.diff(lists.named, axis=2, prepend=-1) == 0)


def _first_slot(lists: Lists) -> np.ndarray:
    same = lists.named == lists.named[..., :1]
    same[..., :1] = False
    return np.asarray(same)


def _not_named_in(which: slice, lists: Lists) -> np.ndarray:
    there = lists.exists[..., which] & (lists.named[..., which] == lists.own)
    return np.asarray(~there.any(axis=2, keepdims=True))


def _number_of_others(lists: Lists) -> np.ndarray:
    others = lists.exists & (lists.named != lists.own)
    return np.asarray(others.sum(axis=2, keepdims=True))


def counts(question: Question) -> Family:
    """block_counts that counts something else."""
    if question.block_counts is None:
        return
    name = "sparse-counts-ignored"

    def limited(there: Callable[[Lists], np.ndarray]) -> Walk:
        def walk(lists: Lists) -> Lists:
            kept = there(lists) & (lists.named >= 0) & (lists.named < lists.blocks)
            return walked(lists, kept & first_of(lists.named, kept))

        return walk

    def of_named(lists: Lists) -> np.ndarray:
        exists = (lists.named >= 0) & (lists.named < lists.blocks)
        return np.asarray(np.cumsum(exists, axis=2) <= _counts_of(lists)[..., None])

    def of_others(other: Callable[[np.ndarray], np.ndarray]) -> Walk:
        return limited(
            lambda lists: np.arange(lists.named.shape[2]) < other(_counts_of(lists))[..., None]
        )

    yield name, "it counts named blocks, not slots", limited(of_named)
    if np.asarray(question.block_indices).shape[1] > 1:
        swapped = of_others(lambda given: given.reshape(given.shape[::-1]).T)
        yield "input-layout", "block_counts, (T, H) as (H, T)", swapped
        turned = of_others(lambda given: given.T.reshape(given.shape))
        yield "input-layout", "block_counts, (H, T) as (T, H)", turned
        first = of_others(lambda given: np.broadcast_to(given[:, :1], given.shape))
        yield name, "that of the first head for all", first


def _counts_of(lists: Lists) -> np.ndarray:
    """block_counts, for every head of the lists."""
    counts = np.asarray(lists.question.block_counts)
    return np.asarray(np.broadcast_to(counts, lists.named.shape[:2]))


def tiles(question: Question, sizes: Sequence[int]) -> Family:
    """Queries that see what all lists of their tile hold."""
    for size in sizes:
        for text, starts in _tiles_of(question, size):
            yield "sparse-tile-union", f"of {size} queries{text}", _union(starts)


def rarer_tiles(question: Question, sizes: Sequence[int]) -> Family:
    """The same where the mask acts before, or cuts what a query has not named itself."""
    for size in sizes:
        for text, starts in _tiles_of(question, size):
            at = f"of {size} queries{text}"
            if question.causal:
                yield "sparse-tile-union", f"{at}, as far as they see it", _union(starts, False)
            else:
                yield "sparse-tile-union", f"{at}, cut at the query", _union(starts, cut=True)
    if np.asarray(question.block_indices).shape[1] > question.num_heads_kv:
        yield "sparse-tile-union", "of the heads of a group", _union_of_heads


def leaders(question: Question, sizes: Sequence[int]) -> Family:
    """Queries that walk the list of the first or last one of their tile."""
    name, token = "sparse-tile-union", np.arange(len(question.q))
    stops = np.array([*np.asarray(question.cu_seqlens_q)[1:], 0])[question.sequence_of("q")]
    for size in sizes:
        for text, starts in _tiles_of(question, size):
            yield name, f"of the first one of {size} queries{text}", _leader(starts)
            last = np.maximum(np.minimum(starts + size, stops) - 1, starts)
            last = np.where(starts == token, np.minimum(last, len(token) - 1), last)
            yield name, f"of the last one of {size} queries{text}", _leader(last)


def _tiles_of(question: Question, size: int) -> Iterator[tuple[str, np.ndarray]]:
    """The first token of every token's tile: tiles of a sequence, or of the packed array."""
    if size >= 2 * max(question.lengths_q, default=0):
        return
    sequence, token = question.sequence_of("q"), np.arange(len(question.q))
    starts = np.array([*np.asarray(question.cu_seqlens_q)[:-1], 0])[sequence]
    tile = np.where(sequence < 0, token, starts + (token - starts) // size * size)
    yield "", tile
    packed = np.where(sequence < 0, token, np.maximum(token // size * size, starts))
    if size in TILES and (packed != tile).any():
        yield ", of the packed array", packed


def other_indices(question: Question) -> Family:
    """What the memory of block_indices holds if it is read otherwise, or for another token or head.

    Indices of other heads are left to ``selection``.
    """
    for text, read in READINGS.items():
        indices = read(question)
        if indices is not None and indices.shape == np.asarray(question.block_indices).shape:
            yield "input-layout", f"block_indices, {text}", _other_slots(partial(_read, read))
    for text, by in (("one more", 1), ("one less", -1)):
        yield "wrong-keys", f"blocks are numbered {text}", _other_slots(partial(_more, by))
    yield "wrong-keys", "blocks are counted from the end", _other_slots(_from_the_end)


def _read(read: Callable[[Question], np.ndarray | None], lists: Lists) -> np.ndarray:
    found = read(lists.question)
    return lists.named if found is None or found.shape != lists.named.shape else found


def _more(by: int, lists: Lists) -> np.ndarray:
    return np.where(lists.named >= 0, lists.named + by, -1)


def _from_the_end(lists: Lists) -> np.ndarray:
    return np.where(lists.is_block, lists.blocks - 1 - lists.named, -1)


def _other_slots(read: Callable[[Lists], np.ndarray]) -> Walk:
    def walk(lists: Lists) -> Lists:
        indices = read(lists)
        there = replace(lists, named=indices).exists
        return walked(lists, there & first_of(indices, there), indices)

    return walk


def _shared(lists: Lists, seen: np.ndarray, cut: bool = False) -> Lists:
    """Lists that hold the blocks of ``seen`` (tokens, heads, blocks), with one's own slots; those
    of others may be ``cut`` at the query."""
    block = np.broadcast_to(np.arange(seen.shape[2]), seen.shape)
    slot = np.full(seen.shape, OWN)
    for entry in range(lists.named.shape[2] - 1, -1, -1):
        token, head = np.nonzero(lists.exists[..., entry])
        slot[token, head, lists.named[token, head, entry]] = entry
    whole = (slot >= 0 if cut else np.ones_like(seen)) & (not lists.question.causal)
    return replace(lists, block=block, slot=slot, times=seen.astype(np.int64), whole=whole)


def _union(tile: np.ndarray, hidden: bool = True, cut: bool = False) -> Walk:
    def walk(lists: Lists) -> Lists:
        of_each = lists.multiplicity(hidden) > 0
        seen = np.zeros_like(of_each)
        np.logical_or.at(seen, tile, of_each)
        return _shared(lists, seen[tile], cut)

    return walk


def _union_of_heads(lists: Lists) -> Lists:
    seen, heads = lists.multiplicity(hidden=True) > 0, lists.question.num_heads_kv
    shape = len(seen), heads, seen.shape[1] // heads, seen.shape[2]
    of_group = seen.reshape(shape).any(axis=2)
    return _shared(lists, np.repeat(of_group, seen.shape[1] // heads, axis=1))


def _leader(leader: np.ndarray) -> Walk:
    """Everybody walks the slots of ``leader`` (total_q,), and his own block."""

    def walk(lists: Lists) -> Lists:
        named, counted = lists.named[leader], lists.counted[leader]
        there = replace(lists, named=named, counted=counted).exists
        return walked(lists, there & first_of(named, there), named)

    return walk
