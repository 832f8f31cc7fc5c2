"""Bugs of the lists of blocks in block-sparse attention: other questions, and who sees whom there.

A kernel that reads its lists wrongly sees what a right one sees of other lists. So a bug is a sum
of questions, each with another block_indices, block_counts, own or causal (a ``Part``): the first
in the place of the right one, the views of all others beside it. Long by the table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.engine.attention import Floats, See, View, sparse_views
from rawattn.check.diagnose.engine.question import Question

OWN = -1  # slot of the own block
TILES = (4, 6, 8, 16, 32)
Ints = np.ndarray


@dataclass(frozen=True)
class Lists:
    """The lists of a question, (total_q, num_heads_sel, slots), or (total_q, 1, 1) of a token: its
    ``own`` block, how many ``blocks`` its sequence has, its ``place`` among the keys."""

    question: Question

    @cached_property
    def named(self) -> Ints:
        return np.asarray(self.question.block_indices).astype(np.int64)

    @property
    def slots(self) -> Ints:
        return np.arange(self.named.shape[2])

    @cached_property
    def limit(self) -> Ints:
        """block_counts (total_q, num_heads_sel, 1)"""
        heads, width = self.named.shape[1:]
        if self.question.block_counts is None:
            return np.full((len(self.named), heads, 1), width)
        counts = np.clip(self.question.block_counts, 0, width)
        return np.asarray(counts[:, np.arange(heads) * counts.shape[1] // heads, None])

    @property
    def counted(self) -> Ints:
        return np.asarray(self.slots < self.limit)

    @cached_property
    def start(self) -> Ints:
        """(total_q,) where the sequence of a token begins."""
        starts = np.array([*np.asarray(self.question.cu_seqlens_q)[:-1], 0])
        return np.asarray(starts[self.question.sequence_of("q")])

    def _of_sequence(self, lengths: Sequence[int]) -> Ints:
        found = np.array([*lengths, 0])[self.question.sequence_of("q")]
        return np.asarray(found[:, None, None])

    @property
    def row(self) -> Ints:
        return np.asarray((np.arange(len(self.start)) - self.start)[:, None, None])

    @cached_property
    def place(self) -> Ints:
        q = self.question
        shift = self._of_sequence(q.lengths_k) - self._of_sequence(q.lengths_q)
        return np.asarray(self.row + shift)

    @property
    def own(self) -> Ints:
        return np.asarray(np.where(self.place >= 0, self.place // self.question.block_size, -1))

    @cached_property
    def blocks(self) -> Ints:
        return np.asarray(
            -(-self._of_sequence(self.question.lengths_k) // self.question.block_size)
        )

    @property
    def is_block(self) -> Ints:
        """A block of the sequence, counted or not."""
        return np.asarray((self.named >= 0) & (self.named < self.blocks))

    @cached_property
    def exists(self) -> Ints:
        """A block of the sequence that counts."""
        return np.asarray(self.is_block & self.counted)

    @cached_property
    def number(self) -> Ints:
        """How many slots before name the same block."""
        found = np.zeros(self.named.shape, dtype=np.int64)
        for slot in self.slots[1:]:
            same = self.named[..., :slot] == self.named[..., slot : slot + 1]
            found[..., slot] = (same & self.exists[..., :slot]).sum(axis=2)
        return np.where(self.exists, found, 0)


class Part(NamedTuple):
    """What of a question is another; which tokens have it (total_q, num_heads_sel), all by default;
    heads (num_heads_q,): whose factors a query head has, where lists are by query heads."""

    changes: Mapping[str, Any]
    tokens: Ints | None = None
    heads: Ints | None = None


Change = Callable[[Lists], Sequence[Part]]


class Row(NamedTuple):
    """A class, words, and other lists."""

    name: str
    words: str
    change: Change


@dataclass(frozen=True)
class Listed(View):
    """A view of other lists: those of ``asked``, which the next bug changes."""

    asked: Question | None = None


def listed(change: Change) -> See:
    """The views of other lists; those of the sliding branch, which have no slots, stay."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        if not views or views[0].slot is None:
            return views
        width = np.asarray(question.block_indices).shape[2]
        asked = getattr(views[0], "asked", None) or question
        parts = change(Lists(asked))
        first, *more = (_views(asked, part, width) for part in parts)
        for others in more:
            first = [
                with_keys(view, other.keys, other.weight, np.asarray(other.slot))
                for view, other in zip(first, others, strict=True)
            ]
        asked = replace(asked, **parts[0].changes)
        return [Listed(**vars(view), asked=asked) for view in first]

    return see


def _views(question: Question, part: Part, width: int) -> list[View]:
    found = []
    for view in sparse_views(replace(question, **part.changes)):
        weight, slot = view.weight, np.asarray(view.slot)
        selections = np.asarray(view.selections)
        if part.tokens is not None:
            weight = weight * part.tokens[view.rows][:, selections].T[..., None]
        selections = selections if part.heads is None else part.heads[view.heads]
        slot = np.where(slot < width, slot, OWN)
        found.append(replace(view, weight=weight, slot=slot, selections=selections))
    return found


def with_keys(view: View, keys: Ints, weight: Floats, slot: Ints) -> View:
    """``view`` with more keys."""
    there = np.flatnonzero((weight > 0).any(axis=(0, 1)))
    return replace(
        view,
        keys=np.concatenate([view.keys, keys[there]]),
        weight=np.concatenate([view.weight, weight[..., there]], axis=2),
        slot=np.concatenate([np.asarray(view.slot), slot[..., there]], axis=2),
    )


# ---- ways to change lists ---------------------------------------------------------------------

Of = Callable[[Lists], Ints]


def holding(named: Of) -> Change:
    """Slots that hold something else."""
    return lambda x: [Part({"block_indices": named(x)})]


def _counting(counted: Of) -> Change:
    """Other slots that count, those that did or not."""
    return lambda x: [Part(_only(x, counted(x)))]


def _only(x: Lists, counted: Ints) -> dict[str, Any]:
    return _no_counts(np.where(counted, x.named, -1))


def _no_counts(named: Ints) -> dict[str, Any]:
    return {"block_indices": named, "block_counts": None}


def _ending(stop: Of) -> Change:
    """Lists that end at the first slot that counts where ``stop``."""
    return _counting(lambda x: x.counted & (np.cumsum(stop(x) & x.counted, axis=2) == 0))


def _with(**changes: Any) -> Change:
    return lambda x: [Part(changes)]


def _again(repeated: Of | None, own: Of | None) -> Change:
    """Blocks that count once more for every slot that is ``repeated``, and the own block so often
    as ``own`` says (total_q, num_heads_sel, 1), where slots name it too."""

    def change(x: Lists) -> Sequence[Part]:
        parts, alone = [Part({})], {"own": False}
        there = np.zeros_like(x.exists) if repeated is None else repeated(x) & (x.number > 0)
        for slot in x.slots[there.any(axis=(0, 1))]:
            parts.append(Part(_only(x, there & (x.slots == slot)) | alone))
        if own is not None and x.question.own:
            seen = ((x.named == x.own) & x.exists).any(axis=2)
            more = own(x)[..., 0] - ~seen
            parts += [Part(_only(x, x.exists & False), more > n) for n in range(max(more.max(), 0))]
        return parts

    return change


def _own_where(kept: Of) -> Change:
    """The own block for some tokens alone (total_q, 1, 1), whether slots name it or not."""

    def change(x: Lists) -> Sequence[Part]:
        own = (x.named == x.own) & x.exists
        alone = Part(_only(x, x.exists & False), kept(x)[..., 0] & ~own.any(axis=2))
        return [Part(_only(x, x.counted & (~own | kept(x))) | {"own": False}), alone]

    return change


def _other_own(place: Of) -> Change:
    """The own block by another place of the query."""

    def change(x: Lists) -> Sequence[Part]:
        block = np.broadcast_to(place(x) // x.question.block_size, (*x.named.shape[:2], 1))
        named = ((x.named == block) & x.exists).any(axis=2, keepdims=True)
        own = np.where(named | (place(x) < 0), -1, block)  # in a slot behind all that have factors
        alone = np.concatenate([np.full(x.named.shape, -1), own], axis=2)
        cut = {"own": False, "causal": True}  # as the own block is, whatever the others are
        return [Part({"own": False}), Part(_no_counts(alone) | cut)]

    return change


def _padding(value: Of, negative: bool = False) -> Change:
    def named(x: Lists) -> Ints:
        there = ~x.is_block & (x.blocks > 0) & ((x.named < 0) | (not negative))
        return np.where(there, value(x), x.named)

    return holding(named)


def _reset(own_first: bool) -> Change:
    """What stands before a block that is masked is lost, of the own block too if it is first."""

    def change(x: Lists) -> Sequence[Part]:
        first = x.exists & (x.number == 0)
        masked = first & (x.named > x.own) & x.question.causal
        kept = first & (np.cumsum(masked[..., ::-1], axis=2)[..., ::-1] == 0)
        if not own_first or not x.question.own:
            return [Part(_only(x, kept))]
        named = ((x.named == x.own) & x.exists).any(axis=2)
        alone = Part(_only(x, x.exists & False), ~masked.any(axis=2) & ~named)
        return [Part(_only(x, kept) | {"own": False}), alone]

    return change


def _last_block(x: Lists) -> Ints:
    """Slots that name the block that was named last before them."""
    found, last = np.zeros_like(x.exists), np.full(x.named.shape[:2], -1)
    for slot in x.slots:
        there, block = x.exists[..., slot], x.named[..., slot]
        found[..., slot] = there & (block == last)
        last = np.where(there, block, last)
    return found


def _union(size: int, packed: bool, x: Lists) -> Sequence[Part]:
    """With the blocks of all of a tile of queries, of its sequence or of the packed array."""
    token, count = np.arange(len(x.start)), int(x.blocks.max(initial=0))
    tile = token // size * size if packed else x.start + (token - x.start) // size * size
    tile = np.where(x.question.sequence_of("q") < 0, token, np.maximum(tile, x.start))
    block = np.arange(count)
    seen = (np.where(x.exists, x.named, -1)[..., None] == block).any(axis=2)
    seen |= (block == x.own) & x.question.own
    united = np.zeros_like(seen)
    np.logical_or.at(united, tile, seen)
    more = np.where(united[tile], block, -1)
    named = np.where(x.exists, x.named, -1)
    every = np.concatenate([named, more], axis=2)
    return [Part(_no_counts(every))]


def _leading(size: int, x: Lists) -> Ints:
    """The slots of the first query of a tile."""
    first = x.start + (np.arange(len(x.start)) - x.start) // size * size
    return np.asarray(x.named[first])


def _of_heads(of_head: Ints, factors: Ints, x: Lists) -> Sequence[Part]:
    """Lists by query heads, of other heads."""
    counts = x.question.block_counts
    changes: dict[str, Any] = {"block_indices": x.named[:, of_head]}
    if counts is not None and counts.shape[1] > 1:
        changes["block_counts"] = counts[:, of_head]
    return [Part(changes, heads=factors)]


# ---- the table --------------------------------------------------------------------------------

TABLE: tuple[tuple[str, Mapping[str, Change]], ...] = (
    ("sparse-not-causal", {"everywhere": _with(causal=False)}),
    (
        "sparse-own-block-missing",
        {
            "": _with(own=False),
            "where the query is its first one": _own_where(
                lambda x: x.place % x.question.block_size > 0
            ),
            "but where the query is its last one": _own_where(
                lambda x: (x.place + 1) % x.question.block_size == 0
            ),
            "of the query's number, without seqlen_k - seqlen_q": _other_own(lambda x: x.row),
            "of the next query": _other_own(lambda x: x.place + 1),
        },
    ),
    (
        "sparse-duplicate-twice",
        {
            "of the selection": _again(lambda x: x.exists, None),
            "compared with the one before alone": _again(lambda x: ~_last_block(x), None),
            "compared with the first slot alone": _again(
                lambda x: x.named != x.named[..., :1], None
            ),
            "the own block": _again(None, lambda x: 1 + 0 * x.own),
            "the own block once for every slot": _again(
                None, lambda x: x.counted.sum(axis=2, keepdims=True)
            ),
            "all": _again(lambda x: x.exists, lambda x: 1 + 0 * x.own),
        },
    ),
    (
        "sparse-padding-read",
        {
            "as the first block": _padding(lambda x: 0 * x.named),
            "as the last block": _padding(lambda x: x.blocks - 1),
            "as the own block": _padding(lambda x: x.own),
            "as the nearest block": _padding(lambda x: np.clip(x.named, 0, x.blocks - 1)),
            "if negative as the first block": _padding(lambda x: 0 * x.named, True),
            "if negative from the end": _padding(lambda x: x.named + x.blocks, True),
        },
    ),
    (
        "sparse-last-slot-dropped",
        {
            "the last one": _counting(lambda x: x.counted & (x.slots < x.slots[-1:])),
            "the first one": _counting(lambda x: x.counted & (x.slots > 0)),
            "the last one that counts": _counting(lambda x: x.slots < x.limit - 1),
        },
    ),
    (
        "sparse-counts-ignored",
        {
            "": _with(block_counts=None),
            "one slot too many": _counting(lambda x: x.slots < x.limit + 1),
            "it counts named blocks, not slots": _counting(
                lambda x: np.cumsum(x.is_block, 2) <= x.limit
            ),
        },
    ),
    (
        "sparse-list-cut",
        {
            "at the first -1": _ending(lambda x: x.named < 0),
            "at the first that is no block of the sequence": _ending(lambda x: ~x.exists),
            "at the first repeat": _ending(lambda x: x.number > 0),
            "at the first block behind the query's own": _ending(
                lambda x: x.exists & (x.named > x.own)
            ),
            "at the query's own block": _ending(lambda x: x.named == x.own),
            "after as many slots as there are named blocks": _counting(
                lambda x: x.counted & (x.slots < x.exists.sum(axis=2, keepdims=True))
            ),
        },
    ),
    (
        "sparse-masked-block-resets",
        {"the own block first": _reset(True), "the own block last": _reset(False)},
    ),
)


def rows(question: Question) -> Iterator[Row]:
    """All of them; some show nothing."""
    for name, changes in TABLE:
        if question.own or name != "sparse-own-block-missing":
            yield from (Row(name, words, change) for words, change in changes.items())
    for size in sorted({question.block_size // 2, 2 * question.block_size} - {0}):
        words = f"blocks of {size} keys in place of {question.block_size}"
        yield Row("wrong-keys", words, _with(block_size=size))
    for words, read in readings(question).items():
        yield Row("input-layout", f"block_indices, {words}", holding(partial(_read, read)))
    selections = np.asarray(question.block_indices).shape[1]
    heads, group = np.arange(question.num_heads_q), question.group
    right = heads * selections // question.num_heads_q
    others = {
        "of the first head": 0 * heads,
        "of the last head": 0 * heads + selections - 1,
        "of h modulo their number": heads % selections,
        "of the next head": (right + 1) % selections,
        "of the head before": (right - 1) % selections,
        "of the kv head's number": np.minimum(heads // group, selections - 1),
        "of the group's first head": heads // group * group % selections,
    }
    for words, of_head in others.items() if selections > 1 else ():
        for factors, own in ((of_head, ""), (right, ", with its own gate")):
            change = partial(_of_heads, of_head, factors)
            yield Row("sparse-other-heads-selection", words + own, change)
    for size in (size for size in TILES if size < 2 * max(question.lengths_q, default=0)):
        for packed, words in ((False, ""), (True, " of the packed array")):
            change = partial(_union, size, packed)
            yield Row("sparse-tile-union", f"of {size} queries{words}", change)
        words = f"of the first one of {size} queries"
        yield Row("sparse-tile-union", words, holding(partial(_leading, size)))


def _read(read: Callable[[Ints], Ints], x: Lists) -> Ints:
    return read(x.named)


def readings(question: Question) -> dict[str, Callable[[Ints], Ints]]:
    """What the memory of an array like block_indices holds if it is read otherwise."""
    x, offsets = np.asarray(question.block_indices), np.asarray(question.cu_seqlens_q)
    g = maps.Geometry((len(x), x.shape[1], x.shape[2]), offsets, offsets, 1)
    found: dict[str, Callable[[Ints], Ints]] = {
        "int64 as int32": partial(_words, False),
        "int64 as int32, each row from its start": partial(_words, True),
    }
    for by in (*maps.layouts(False), *maps.sequences(question)):
        if "batch" not in by.words:
            found[by.words] = partial(_moved, by, g)
    return found


def _moved(by: maps.Map, g: maps.Geometry, x: Ints) -> Ints:
    return by.moved(g, x).astype(x.dtype)


def _words(by_rows: bool, x: Ints) -> Ints:
    """int64 as int32: low and high words in turn, of the first half; ``by_rows``: those of every
    token and head from where they should start."""
    words = np.ascontiguousarray(x).astype("<i8").reshape(-1).view("<i4").astype(np.int64)
    if by_rows:
        return np.asarray(words.reshape(*x.shape[:2], 2 * x.shape[2])[..., : x.shape[2]])
    return words[: x.size].reshape(x.shape)
