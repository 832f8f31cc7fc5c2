"""The lists of blocks read wrongly, as a table: what slots hold, which of them count, how a list is
walked, and which keys a block has. Who sees by the wrong list is up to ``selection``.

Long by the tables.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue.sparse.lists import (
    OWN,
    Cover,
    Entry,
    Lists,
    Walk,
    starts_of,
    walked,
)
from rawattn.check.diagnose.engine.question import Question

UNIONS, RARER_UNIONS = (4, 8, 16), (2, 3, 5, 6, 12, 24, 32, 48, 64, 128)
Of = Callable[[Lists], np.ndarray]


class Row(NamedTuple):
    """A class, words, and the lists; ``cover``: other keys than those of the block."""

    name: str
    words: str
    walk: Walk
    cover: Cover | None = None


def usual(question: Question) -> Iterator[Row]:
    """The rows that are planted whatever the answers are."""
    yield from _walks(question)
    yield from _slots(question)
    yield from _other_lists(question)
    yield from unions(question, UNIONS)


def rarer(question: Question) -> Iterator[Row]:
    """Those, and what is looked up where the blocks that rows saw have been read off."""
    yield from usual(question)
    yield from unions(question, RARER_UNIONS)
    tokens = np.arange(len(question.q))
    starts = starts_of(question)
    for size in (2, 3, 4, 8, 16, 32, 64, 128):
        leader = starts + (tokens - starts) // size * size
        yield Row("sparse-tile-union", f"of the first one of {size} queries", of_tokens(leader))
    for text, by in (("before", -1), ("after", 1)):
        other = of_tokens(np.clip(tokens + by, 0, len(tokens) - 1))
        yield Row("input-layout", f"block_indices, of the token {text}", other)
    for text, by in (("more", 1), ("less", -1)):
        yield Row("wrong-keys", f"blocks are numbered one {text}", _numbered(by))


def _numbered(by: int) -> Walk:
    return listed(named=lambda x: np.where(x.named >= 0, x.named + by, -1))


# ---- ways to change lists -----------------------------------------------------------------------


def listed(**changes: Of) -> Walk:
    """Lists that hold or count something else, walked as they should."""

    def walk(lists: Lists) -> Lists:
        others: dict[str, Any] = {name: of(lists) for name, of in changes.items()}
        return walked(replace(lists, **others))

    return walk


def counting(repeated: Of, own: Of | int | None = None, named: Of | None = None) -> Walk:
    """Blocks that count again unless they are ``repeated``; the own block ``own`` times."""

    def walk(lists: Lists) -> Lists:
        lists = replace(lists, named=named(lists)) if named else lists
        number = own(lists) if callable(own) else own
        return walked(lists, lists.exists & ~repeated(lists), number)

    return walk


def skipping(hidden: Of, change: Walk | None = None) -> Walk:
    """Entries that are taken for hidden ones."""

    def walk(lists: Lists) -> Lists:
        found = change(lists) if change else lists
        return replace(found, times=found.times * ~hidden(found))

    return walk


def opened(where: Of) -> Walk:
    """Entries that are not cut at the query."""
    return lambda lists: replace(lists, whole=lists.whole | where(lists))


def ending(stop: Of) -> Walk:
    """Lists that end at the first slot that counts where ``stop``."""
    return listed(counted=lambda x: x.counted & (np.cumsum(stop(x) & x.counted, axis=2) == 0))


def of_tokens(token: np.ndarray) -> Walk:
    """Every token walks the slots of another one, and its own block."""
    return listed(named=lambda x: x.named[token], counted=lambda x: x.counted[token])


# ---- slots --------------------------------------------------------------------------------------


def _slots(question: Question) -> Iterator[Row]:
    """What slots hold, and which of them count."""
    width = np.asarray(question.block_indices).shape[2]
    slot = np.arange(width)
    name = "sparse-last-slot-dropped"
    dropped = {"the last one": slot == width - 1}
    dropped |= {f"those after a multiple of {n}": slot >= width // n * n for n in (2, 4, 8, 16)}
    if width > 1:
        dropped["the first one"] = slot == 0
    for text, gone in dropped.items():
        yield Row(name, text, _but(gone))
    for text, stop in STOPS.items():
        yield Row("sparse-list-cut", text, ending(stop))
    number: Of = lambda x: slot < x.exists.sum(axis=2, keepdims=True)  # noqa: E731
    text = "after as many slots as there are named blocks"
    yield Row("sparse-list-cut", text, listed(counted=lambda x: x.counted & number(x)))
    for text, read in PADDING.items():
        yield Row("sparse-padding-read", text, listed(named=read))
        again = counting(REPEATED["of the selection"], 1, read)
        yield Row("sparse-padding-read", f"{text}, every time", again)
    if question.block_counts is None:
        return
    counts = np.clip(question.block_counts, 0, width)
    name, of_named = "sparse-counts-ignored", "it counts named blocks, not slots"
    yield Row(
        "sparse-last-slot-dropped", "the last one that counts", _limited(counts.clip(0, width) - 1)
    )
    yield Row(name, "", _limited(np.full_like(counts, width)))
    yield Row(name, "one slot too many", _limited(counts.clip(0, width) + 1))
    yield Row(
        name, of_named, listed(counted=lambda x: np.cumsum(x.is_block, 2) <= counts[..., None])
    )
    yield Row(name, "that of the first head for all", _limited(counts[:, :1] + 0 * counts))
    turned, swapped = counts.T.reshape(counts.shape), counts.reshape(counts.shape[::-1]).T
    yield Row("input-layout", "block_counts, (T, H) as (H, T)", _limited(swapped))
    yield Row("input-layout", "block_counts, (H, T) as (T, H)", _limited(turned))


def _but(gone: np.ndarray) -> Walk:
    return listed(counted=lambda x: x.counted & ~gone)


def _limited(counts: np.ndarray) -> Walk:
    return listed(counted=lambda x: np.arange(x.named.shape[2]) < counts[..., None] + 0 * x.named)


STOPS: dict[str, Of] = {
    "at the first -1": lambda x: x.named < 0,
    "at the first that is no block of the sequence": lambda x: ~x.exists,
    "at the first repeat": lambda x: x.repeats,
    "at the first block behind the query's own": lambda x: x.exists & (x.named > x.own),
    "at the query's own block": lambda x: x.named == x.own,
    "at a block that is not larger than the one before": lambda x: (
        np.diff(x.named, axis=2, prepend=-1) <= 0
    ),
}


def _padding(value: Of, negative: bool = False) -> Of:
    def named(x: Lists) -> np.ndarray:
        there = ~x.is_block & (x.blocks > 0) & ((x.named < 0) | (not negative))
        return np.where(there, value(x), x.named)

    return named


PADDING: dict[str, Of] = {
    "as the first block": _padding(lambda x: 0 * x.named),
    "as the last block": _padding(lambda x: x.blocks - 1),
    "as the own block": _padding(lambda x: x.own),
    "as the nearest block": _padding(lambda x: np.clip(x.named, 0, x.blocks - 1)),
    "if negative as the first block": _padding(lambda x: 0 * x.named, True),
    "if negative from the end": _padding(lambda x: x.named + x.blocks, True),
}


# ---- walks --------------------------------------------------------------------------------------


def _walks(question: Question) -> Iterator[Row]:
    """What is hidden, what counts again, and what the own block does."""
    if question.causal:
        yield from (Row("sparse-not-causal", text, opened(of)) for text, of in OPEN.items())
        if question.own:
            everything = opened(lambda x: x.slot >= OWN)
            yield Row("sparse-not-causal", "everywhere, the own block too", everything)
        for text, first in (("first", True), ("last", False)):
            yield Row("sparse-masked-block-resets", f"the own block {text}", _reset(first))
    name = "sparse-duplicate-twice"
    for text, repeated in REPEATED.items():
        yield Row(name, text, counting(repeated))
    longest = max(question.lengths_q, default=0)
    lengths_q, lengths_k = (np.array([*n, 0]) for n in (question.lengths_q, question.lengths_k))
    numbers = {
        "seqlen_q": -(-lengths_q // question.block_size),
        "seqlen_q, rounded down": lengths_q // question.block_size,
        "seqlen_k, rounded down": lengths_k // question.block_size,
        "the longest seqlen_q": 0 * lengths_q - (-longest // question.block_size),
    }
    for text, number in numbers.items():
        blocks = number[question.sequence_of("q")][:, None, None]
        text, fewer = f"the number of blocks is that of {text}", _fewer(blocks)
        yield Row("wrong-keys", text, skipping(_behind(blocks), fewer))
        if question.own:
            yield Row("wrong-keys", f"{text}, but for the own block", fewer)
    if question.own:
        yield from _own_block(question)


def _fewer(blocks: np.ndarray) -> Walk:
    return listed(named=lambda x: np.where(x.named < blocks, x.named, -1))


def _behind(blocks: np.ndarray) -> Of:
    return lambda x: x.block >= blocks


OPEN: dict[str, Of] = {
    "everywhere": lambda x: x.slot != OWN,
    "in the block around the query": lambda x: (x.slot != OWN) & (x.block == x.own),
    "in later blocks": lambda x: (x.slot != OWN) & (x.block != x.own),
}


REPEATED: dict[str, Of] = {  # which slots are taken for repeats
    "of the selection": lambda x: x.exists & False,
    "compared with the one before alone": lambda x: _last_block(x),
    "compared with the slot before alone": lambda x: np.diff(x.named, axis=2, prepend=-1) == 0,
    "compared with the first slot alone": lambda x: (
        (x.named == x.named[..., :1]) & (np.arange(x.named.shape[2]) > 0)
    ),
}


def _own_block(question: Question) -> Iterator[Row]:
    name, size, tokens = "sparse-own-block-missing", question.block_size, np.arange(len(question.q))
    number = (tokens - starts_of(question))[:, None, None]
    offsets = np.array([*np.subtract(question.lengths_k, question.lengths_q), 0])
    place = number + offsets[question.sequence_of("q")][:, None, None]
    not_own: Walk = lambda x: walked(replace(x, question=replace(x.question, own=False)))  # noqa: E731
    yield Row(name, "", not_own)
    hidden: dict[str, Of] = {
        "where the query is its first one": lambda x: x.block * size >= place,
        "where the query is its first one, but not the sequence's": lambda x: (
            (x.block * size >= place) & (place > 0)
        ),
        "but where the query is its last one": lambda x: (x.block + 1) * size - 1 > place,
        "named or not": lambda x: x.block >= place // size,
        "that lies behind the query's number, without seqlen_k - seqlen_q": lambda x: (
            x.block * size > number
        ),
    }
    for text, of in hidden.items():
        yield Row(name, text, skipping(of))
    whole = opened(lambda x: x.block == x.own)
    yield Row("sparse-own-block-not-causal", "", whole)
    alone = opened(lambda x: x.slot == OWN)
    yield Row("sparse-own-block-not-causal", "unless it is selected", alone)
    name, repeats = "sparse-duplicate-twice", REPEATED["of the selection"]
    yield Row(name, "the own block", counting(lambda x: x.repeats, 1))
    yield Row(name, "all", counting(repeats, 1))
    for text, own in OWN_TIMES.items():
        yield Row(name, f"the own block once for every {text}", counting(lambda x: x.repeats, own))


OWN_TIMES: dict[str, Of] = {
    "slot": lambda x: x.counted.sum(axis=2, keepdims=True),
    "named block": lambda x: x.exists.sum(axis=2, keepdims=True),
}


def _last_block(lists: Lists) -> np.ndarray:
    """Slots that name the block that was named last before them."""
    found, last = np.zeros_like(lists.exists), np.full(lists.named.shape[:2], -1)
    for slot in range(lists.named.shape[2]):
        there, block = lists.exists[..., slot], lists.named[..., slot]
        found[..., slot] = there & (block == last)
        last = np.where(there, block, last)
    return found


def _reset(own_first: bool) -> Walk:
    """A block that is masked wipes out what came before."""

    def walk(lists: Lists) -> Lists:
        order = np.arange(lists.block.shape[2])
        order = np.roll(order, 1) if own_first else order
        masked = ((lists.block > lists.own) & (lists.times > 0))[..., order]
        after = np.cumsum(masked[..., ::-1], axis=2)[..., ::-1] == 0
        return replace(lists, times=lists.times * after[..., np.argsort(order)])

    return walk


# ---- lists of others ----------------------------------------------------------------------------


def _other_lists(question: Question) -> Iterator[Row]:
    """Lists of other heads, and what the memory of block_indices holds if it is read otherwise."""
    x = np.asarray(question.block_indices)
    for text, of in LAYOUTS.items():
        read = of(x.astype(np.int64))
        if read.shape == x.shape:
            yield Row("input-layout", f"block_indices, {text}", _named(read))
    for text, number in (("query", question.num_heads_q), ("kv", question.num_heads_kv)):
        if number != x.shape[1]:
            read = as_heads(x.astype(np.int64), number)
            yield Row("input-layout", f"block_indices, one for every {text} head", _named(read))
    tokens = np.arange(len(x)) - starts_of(question)
    first = np.where(question.sequence_of("q") < 0, 0, tokens)
    text = "block_indices, without the sequence's offset"
    yield Row("input-layout", text, listed(named=lambda lists: lists.named[first]))
    if x.shape[1] == 1:
        return
    heads, selections = np.arange(question.num_heads_q), x.shape[1]
    right = heads * selections // question.num_heads_q
    for text, of_head in {
        "of the first head": 0 * heads,
        "of the last head": 0 * heads + selections - 1,
        "of h modulo their number": heads % selections,
        "of the next head": (right + 1) % selections,
        "of the head before": (right - 1) % selections,
        "of the kv head's number": np.minimum(heads // question.group, selections - 1),
        "of the group's first head": heads // question.group * question.group % selections,
    }.items():
        name, gated = "sparse-other-heads-selection", question.block_scale is not None
        yield Row(name, text, _of_heads(of_head, of_head))
        if gated:
            yield Row(name, f"{text}, with its own gate", _of_heads(of_head, right))


def _of_heads(heads: np.ndarray, factors: np.ndarray) -> Walk:
    return lambda lists: replace(lists, heads=heads, factors=factors)


def _named(read: np.ndarray) -> Walk:
    """Slots that hold ``read``, perhaps of another number of heads; factors stay where they are."""

    def walk(lists: Lists) -> Lists:
        heads, query_heads = read.shape[1], len(lists.heads)
        of = np.arange(heads) * lists.counted.shape[1] // heads
        counted, of_query = lists.counted[:, of], np.arange(query_heads) * heads // query_heads
        same = heads == lists.counted.shape[1]
        return walked(
            replace(lists, named=read, counted=counted, heads=lists.heads if same else of_query)
        )

    return walk


def axes(order: tuple[int, int, int], back: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Memory with the axes in this order is read as (T, H, S), or, ``back``, the reverse."""

    def read(x: np.ndarray) -> np.ndarray:
        if back:
            shape = tuple(x.shape[axis] for axis in order)
            return np.ascontiguousarray(x.reshape(shape).transpose(np.argsort(order)))
        return np.ascontiguousarray(x.transpose(order)).reshape(x.shape)

    return read


def as_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """Memory read with the strides of another number of heads."""
    size = len(x) * heads * x.shape[2]
    flat = np.concatenate([x.reshape(-1), np.full(max(size - x.size, 0), -1)])
    return np.asarray(flat[:size].reshape(len(x), heads, x.shape[2]))


def _words(x: np.ndarray, rows: bool) -> np.ndarray:
    """int64 as int32: low and high words in turn, of the first half; ``rows``: those of every token
    and head from where they should start."""
    words = np.ascontiguousarray(x).astype("<i8").reshape(-1).view("<i4").astype(np.int64)
    if rows:
        return np.asarray(words.reshape(*x.shape[:2], -1)[..., : x.shape[2]])
    return words[: x.size].reshape(x.shape)


AXES = {
    "(T, H, S) as (T, S, H)": axes((0, 2, 1), back=True),
    "(T, S, H) as (T, H, S)": axes((0, 2, 1), back=False),
    "(T, H, S) as (H, T, S)": axes((1, 0, 2), back=True),
    "(H, T, S) as (T, H, S)": axes((1, 0, 2), back=False),
}
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "int64 as int32": lambda x: _words(x, False),
    "int64 as int32, each row from its start": lambda x: _words(x, True),
    **AXES,
}


def unions(question: Question, sizes: tuple[int, ...]) -> Iterator[Row]:
    """Queries that see what all lists of their tile hold: a tile of the sequence, or of the packed
    array."""
    sequence, token, starts = (
        question.sequence_of("q"),
        np.arange(len(question.q)),
        starts_of(question),
    )
    for size in sizes:
        if size >= 2 * max(question.lengths_q, default=0):
            continue
        tile = starts + (token - starts) // size * size
        packed = np.maximum(token // size * size, starts)
        for text, of in (("", tile), (" of the packed array", packed)):
            if not text or (size in UNIONS and (tile != packed).any()):
                of = np.where(sequence < 0, token, of)
                words = f"of {size} queries{text}"
                yield Row("sparse-tile-union", words, _union(of, True))
                if size not in UNIONS and question.causal:
                    words += ", as far as they see it"
                    yield Row("sparse-tile-union", words, _union(of, False))


def _union(tile: np.ndarray, hidden: bool) -> Walk:
    """The blocks of all of a tile, with one's own slots; ``hidden``: those behind a query too."""

    def walk(lists: Lists) -> Lists:
        of_each = lists.multiplicity(hidden) > 0
        seen = np.zeros_like(of_each)
        np.logical_or.at(seen, tile, of_each)
        return holding(lists, seen[tile])

    return walk


def holding(lists: Lists, seen: np.ndarray) -> Lists:
    """Lists that hold the blocks of ``seen`` (tokens, heads, blocks), so often, with one's own
    slots."""
    block = np.broadcast_to(np.arange(seen.shape[2]), seen.shape)
    slot = np.full(seen.shape, OWN)
    for entry in range(lists.named.shape[2] - 1, -1, -1):
        token, head = np.nonzero(lists.exists[..., entry])
        slot[token, head, lists.named[token, head, entry]] = entry
    whole = np.full(seen.shape, not lists.question.causal)
    return replace(lists, block=block, slot=slot, times=seen.astype(np.int64), whole=whole)


# ---- keys of a block ----------------------------------------------------------------------------


def _same(lists: Lists) -> Lists:
    return lists


def _unbounded(lists: Lists) -> Lists:
    """Blocks that the sequence does not have too, and the own block."""
    return walked(lists, (lists.named >= 0) & lists.counted, 1)


def covers(question: Question) -> Iterator[Row]:
    """Blocks whose keys lie elsewhere, or beyond the end of a sequence."""
    size, longest = question.block_size, max(question.lengths_k, default=0)
    if any(length % size for length in question.lengths_k):
        yield from _past_the_end(question)
    if question.batch > 1:
        packed = _starting(lambda e: e.block * size - e.first, own=False, once=True)
        yield Row("offsets-shifted", "blocks of the packed array", _unbounded, packed)
    if (np.asarray(question.cu_seqlens_k)[:-1] % size).any():
        text = "blocks start at multiples of block_size of the packed array"
        for own, part in ((True, ", the own block too"), (False, "")):
            down = _starting(lambda e: e.block * size - e.first % size, own=own)
            up = _starting(lambda e: e.block * size + -e.first % size, own=own)
            yield Row("offsets-shifted", f"{text}{part}", _same, down)
            yield Row("offsets-shifted", f"{text}, rounded up{part}", _same, up)
            text_leak = f"{text}{part}: keys before the sequence are seen"
            yield Row("neighbour-leak", text_leak, _same, down._replace(beyond="before"))
    if size < longest:
        yield from _other_sizes(question, longest)
    if question.lengths_q != question.lengths_k:
        yield from _top_left(question)


def _starting(
    start: Callable[[Entry], np.ndarray],
    width: int = 0,
    own: bool = True,
    once: bool = False,
) -> Cover:
    """Blocks of ``width`` keys from another one on; ``own``: the own block too."""

    def keys(e: Entry) -> np.ndarray:
        at = start(e)
        there = (e.key >= at) & (e.key < at + (width or e.size)) & e.open & (e.key < e.length)
        return np.asarray(there) if own else np.where(e.slot == OWN, e.right, there)

    return Cover(keys, once=once)


def _past_the_end(question: Question) -> Iterator[Row]:
    """Keys that complete the last block of a sequence: zeros, or what lies there."""

    def completed(own: bool, beyond: str) -> Cover:
        def keys(e: Entry) -> np.ndarray:
            start = (e.length - 1) // e.size * e.size
            whole = e.open[..., start : start + 1] & (e.block == start // e.size)
            behind = whole & (e.key >= e.length) & ((e.slot != OWN) | own)
            return np.asarray(e.right | behind)

        return Cover(keys, beyond)

    name = "sparse-partial-block-zeros"
    yield Row(name, "where it is selected", _same, completed(False, "zeros"))
    if question.own:
        yield Row(name, "where it is seen", _same, completed(True, "zeros"))
    if question.batch > 1 or len(question.k) > int(question.cu_seqlens_k[-1]):
        text = "up to the end of the last block"
        yield Row("neighbour-leak", text, _same, completed(False, "memory"))
        if not question.causal:
            yield Row("neighbour-leak", f"{text} or of k", _same, completed(False, "k"))


def _other_sizes(question: Question, longest: int) -> Iterator[Row]:
    """Blocks in units of another size than theirs."""
    size, name = question.block_size, "wrong-keys"
    for other in sorted({size // 2, 2 * size, 4 * size} - {0}):
        if other >= longest and not question.own:  # everything may be seen, for many reasons
            continue
        text, blocks = f"blocks of {other} keys in place of {size}", _own_by(question, other)
        for part, walk, own in (
            ("", blocks, True),
            (", the own block's number of the right size", _same, True),
            (", but for the own block", _same, False),
        ):
            cover = _starting(_at(other), other, own)
            if not part or question.own:
                yield Row(name, f"{text}{part}", walk, cover)
    for text, by in (("twice", 2.0), ("half", 0.5)):
        cover = _starting(_at(int(by * size)), own=False, once=True)
        yield Row(name, f"blocks start at {text} the block_size", _unbounded, cover)


def _at(size: int) -> Callable[[Entry], np.ndarray]:
    return lambda e: e.block * size


def _own_by(question: Question, size: int, by_number: bool = False) -> Walk:
    """The own block by another size, or by the number of the query, not its place."""
    tokens = np.arange(len(question.q)) - starts_of(question)
    offsets = np.array([*np.subtract(question.lengths_k, question.lengths_q), 0])
    place = tokens + (0 if by_number else offsets[question.sequence_of("q")])
    lengths = np.array([*question.lengths_k, 0])[question.sequence_of("q")]
    blocks, own = (-(-lengths // size))[:, None, None], (place // size)[:, None, None]
    own = np.where((own >= 0) & (own < blocks), own, -1)
    return listed(own=lambda x: own, blocks=lambda x: blocks)


def _top_left(question: Question) -> Iterator[Row]:
    """The number of a query in its sequence for its place among the keys."""
    size = question.block_size
    by_number = _own_by(question, size, by_number=True)

    def top_left(e: Entry) -> np.ndarray:
        return np.asarray((e.key // size == e.block) & (e.key <= e.i))

    def own_alone(e: Entry) -> np.ndarray:
        return np.where(e.slot == OWN, top_left(e), e.right)

    if question.causal:
        walk = by_number if question.own else _same
        yield Row("causal-alignment", "top-left", walk, Cover(top_left))
        if question.own:
            text = "top-left, but for the own block's number"
            yield Row("causal-alignment", text, _same, Cover(top_left))
    if question.own:
        text = "the block of the query's number in its place, without seqlen_k - seqlen_q"
        yield Row("sparse-own-block-missing", text, by_number)
        text += ", up to that number"
        yield Row("sparse-own-block-missing", text, by_number, Cover(own_alone))
