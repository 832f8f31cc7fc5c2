"""The lists of blocks that queries walk: an entry for every slot, and a last one, the own block."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rawattn.check.diagnose.engine.question import Question
from rawattn.check.transfer import Array

Ints = np.ndarray


@dataclass(frozen=True, eq=False)
class Lists:
    """All lists of a question, (total_q, num_heads_sel, slots); (total_q, 1, 1) of a token alone.
    named: blocks. counted: slots that count. place: of the query among the keys, and bound, the
    last one that it sees of entries that are cut. size: of a block. length: of the keys, ``shift``
    of which lie before the sequence. own: whether the own block is walked where no slot names it.
    cut: of entries, at the query. times: how often entries count, if not by these. heads: whose
    factors every query head has, where lists are by query heads."""

    question: Question
    named: Ints
    counted: Ints
    place: Ints
    bound: Ints
    size: int
    length: Ints
    shift: Ints
    own: Ints
    cut: Ints
    times: Ints | None = None
    heads: Ints | None = None

    @property
    def slots(self) -> Ints:
        return np.arange(self.named.shape[2])

    @property
    def row(self) -> Ints:
        return self.question.place_of("q")[:, None, None]

    @property
    def own_block(self) -> Ints:
        return np.asarray(np.where(self.place >= 0, self.place // self.size, -1))

    @cached_property
    def blocks(self) -> Ints:
        return -(-self.length // self.size)

    @property
    def limit(self) -> Ints:
        """block_counts (total_q, num_heads_sel, 1)"""
        heads, width = np.asarray(self.question.block_indices).shape[1:]
        if self.question.block_counts is None:
            return np.full((len(self.named), heads, 1), width)
        counts = np.asarray(self.question.block_counts)  # which may be more than there are slots
        return np.asarray(counts[:, np.arange(heads) * counts.shape[1] // heads, None])

    @property
    def is_block(self) -> Ints:
        return np.asarray((self.named >= 0) & (self.named < self.blocks))

    @cached_property
    def exists(self) -> Ints:
        """A block of the sequence that counts."""
        return np.asarray(self.is_block & self.counted)

    @cached_property
    def number(self) -> Ints:
        """How many slots before name the same block."""
        return np.where(self.exists, before(self.named, self.exists), 0)

    @property
    def has_own(self) -> Ints:
        return np.asarray(self.own & (self.own_block >= 0) & (self.own_block < self.blocks))

    @cached_property
    def walked(self) -> Ints:
        """How often every entry counts."""
        if self.times is not None:
            return self.times
        first, names_own = self.exists & (self.number == 0), self.named == self.own_block
        own = self.has_own & ~(self.exists & names_own).any(axis=2, keepdims=True)
        return np.concatenate([first, own], axis=2).astype(np.int64)

    @cached_property
    def _entries(self) -> tuple[Ints, ...]:
        """Blocks, how often they count, cut, and how many before are the same."""
        own = np.broadcast_to(self.own_block, (*self.named.shape[:2], 1))
        block = np.concatenate([self.named, own], axis=2)
        return block, self.walked, self.cut, before(block, self.walked > 0)

    def keys(self, b: int, heads: Ints) -> tuple[Ints, Ints, Ints]:
        """Of some heads of block_indices, the keys of sequence ``b``, all and then those of blocks
        walked again; each one's entry, or -1, and how often it is seen (heads, n, keys)."""
        n, m = self.question.lengths_q[b], self.question.lengths_k[b]
        rows = int(self.question.cu_seqlens_q[b]) + np.arange(n)
        block, times, cut, number = (x[rows][:, heads].swapaxes(0, 1) for x in self._entries)
        not_after = np.arange(m) <= self.bound[rows, 0]
        of_key = (np.arange(m) + int(self.shift[rows[0], 0, 0])) // self.size
        walked: list[tuple[Ints, Ints, Ints]] = []
        for again in range(1 + int(number[times > 0].max(initial=0))):
            h, i, entry = np.nonzero((times > 0) & (number == again))
            of_block = np.full((len(heads), n, 1 + of_key.max(initial=0)), -1)
            of_block[h, i, block[h, i, entry]] = entry
            found = of_block[..., of_key]
            often, late = (np.take_along_axis(x, np.maximum(found, 0), 2) for x in (times, cut))
            often = np.where((found >= 0) & (not_after | ~late), often, 0)
            there = np.flatnonzero((often > 0).any(axis=(0, 1)) | (not walked))
            walked.append((there, found[..., there], often[..., there]))
        key, entry, seen = (np.concatenate(x, axis=-1) for x in zip(*walked, strict=True))
        return key, entry, seen


def by_token(question: Question, of_sequences: Array | tuple[int, ...]) -> Ints:
    """(total_q, 1, 1) a number of the token's sequence."""
    return np.asarray(np.array([*of_sequences, 0])[question.sequence_of("q")][:, None, None])


def before(block: Ints, there: Ints) -> Ints:
    """How many entries before are there and of the same block."""
    found = np.zeros(block.shape, dtype=np.int64)
    for entry in range(1, block.shape[2]):
        same = block[..., :entry] == block[..., entry : entry + 1]
        found[..., entry] = (same & there[..., :entry]).sum(axis=2)
    return found


def lists_of(question: Question) -> Lists:
    named = np.asarray(question.block_indices).astype(np.int64)
    own = np.full((*named.shape[:2], 1), question.own)
    cut = np.concatenate([np.full(named.shape, question.causal), own | True], axis=2)
    place = by_token(question, np.subtract(question.lengths_k, question.lengths_q))
    size, length = question.block_size, by_token(question, question.lengths_k)
    found = Lists(question, named, cut[..., 1:], place, place, size, length, 0 * length, own, cut)
    place = found.row + place
    return replace(found, counted=found.slots < found.limit, place=place, bound=place)
