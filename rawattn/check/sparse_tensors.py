"""The inputs of sparse cases, with their own traps beside those of dense ones.

Key blocks that no query selects are NaN. Selections hold padding of every kind (negative, past the
last block, so large that its product with the block size overflows), blocks of the future, and
blocks named twice; a block_scale is NaN wherever a slot does not count.
"""

import zlib
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from rawattn.check.cases import Direction, Lengths, Tensors, lse_dtype, make
from rawattn.check.sparse_cases import SparseCase
from rawattn.check.transfer import Array
from rawattn.reference.selection import ABSENT, parts

Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

PADDING = (-1, -7, -(2**31), 2**31 - 1, 2**26)  # 2**26 blocks of 64 keys are 0 modulo 2**32
WIDE = (2**32, -(2**32) + 1, 2**31)  # of int64 alone; the lower 32 bits would be blocks


@dataclass(frozen=True, slots=True)
class SparseTensors(Tensors):
    """``Tensors`` with block_indices (total_q, num_heads_sel, num_selected), block_counts (total_q,
    num_heads_sel) or None, block_scale of block_indices' shape or None, and its direction."""

    block_indices: Array
    block_counts: Array | None
    block_scale: Array | None
    tblock_scale: Array | None

    @property
    def direction(self) -> Direction:
        return self.tq, self.tk, self.tv, self.tblock_scale

    @property
    def origins(self) -> tuple[Array | None, ...]:
        return self.q, self.k, self.v, self.block_scale

    @property
    def where(self) -> tuple[Array, ...]:
        return self.cu_seqlens_q, self.block_indices

    @property
    def options(self) -> dict[str, Array]:
        return {
            "cu_seqlens_k": self.cu_seqlens_k,
            "block_counts": self.block_counts,
            "block_scale": self.block_scale,
        }

    @property
    def selection(self) -> tuple[Array, Array | None]:
        """What ``seen`` reads."""
        return self.block_indices, self.block_counts


@dataclass(frozen=True, slots=True)
class Seen:
    """Which queries (total_q, num_heads_q) see a key, which keys (total_k, num_heads_kv) a query
    sees, which of these lie in a block on somebody's list, and which slots count."""

    q: Bools
    k: Bools
    listed: Bools
    slots: Bools


def seen(case: SparseCase, selection: tuple[Array, Array | None]) -> Seen:
    """Who sees whom; nothing in the poisoned sequences is left out."""
    indices, counts = selection
    q = np.zeros((len(indices), case.num_heads_q), dtype=bool)
    k = np.zeros((len(case.sequence_of("k")), case.num_heads_kv), dtype=bool)
    listed, slots = np.zeros_like(k), np.zeros(indices.shape, dtype=bool)
    heads = (case.num_heads_q, case.num_heads_kv)
    offsets = (_offsets(case.lengths_q), _offsets(case.lengths_k))
    mode: dict[str, Any] = {"include_own_block": case.own, "causal": case.causal}
    mode |= {"block_size": case.block_size, "block_counts": counts}
    for part in parts(indices, *heads, *offsets, **mode):
        by_head = np.repeat(part.mask, case.num_heads_q // case.num_heads_sel, axis=0)
        by_head = np.broadcast_to(by_head, (case.group, *by_head.shape[1:]))
        q[part.rows, part.heads] = by_head.any(axis=2).T
        k[part.keys, part.head_kv] = part.mask.any(axis=(0, 1))
        blocks = (part.slot != ABSENT).any(axis=(0, 1))
        listed[part.keys, part.head_kv] = blocks[part.block_of_key]
        head, i, n = np.nonzero(part.slot >= 0)
        slots[part.rows.start + i, part.selections.start + head, part.slot[head, i, n]] = True
    return Seen(q, k, listed, slots)


def make_sparse(case: SparseCase, seed: int = 0) -> SparseTensors:
    """``make``, with a selection; read-only and the same everywhere as there."""
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode()), 1])
    dense = make(case, seed)
    shape = (len(dense.q), case.num_heads_sel, case.num_selected)
    indices = _indices(case, rng).astype(case.index_dtype)
    counts = rng.integers(-1, case.num_selected + 3, shape[:2]).clip(min=0).astype(np.int32)
    there = seen(case, (indices, counts if case.counts else None))
    if not case.sliding:  # that branch sees every block
        for array in (dense.k, dense.v, dense.tk, dense.tv):
            _poison(array, ~there.listed)
    count = there.slots & case.healthy("q")[:, None, None]
    gate, tangent = 1 + 0.5 * rng.standard_normal(shape), rng.standard_normal(shape)
    gate, tangent = (
        np.where(count, x, np.nan).astype(lse_dtype(case.dtype)) for x in (gate, tangent)
    )
    for array in (indices, counts, gate, tangent):
        array.flags.writeable = False
    return SparseTensors(
        **{field.name: getattr(dense, field.name) for field in fields(Tensors)},
        block_indices=indices,
        block_counts=counts if case.counts else None,
        block_scale=gate if case.gate else None,
        tblock_scale=tangent if case.gate and case.gate_direction else None,
    )


def _indices(case: SparseCase, rng: np.random.Generator) -> Integers:
    """A selection of each item: mostly blocks that it may see, and every kind of trap."""
    sequence, size = case.sequence_of("q"), case.block_size
    shape = (len(sequence), case.num_heads_sel, case.num_selected)
    length_q, length_k = (np.array([*n, 0]) for n in (case.lengths_q, case.lengths_k))
    begin = np.array([*_offsets(case.lengths_q)[:-1], 0])
    pos = np.arange(len(sequence)) - begin[sequence] + (length_k - length_q)[sequence]
    blocks = -(-length_k[sequence] // size)[:, None, None]
    own = np.maximum(pos // size, -1)[:, None, None]
    # up to the own block; of some slots to the first one that does not exist
    top = np.where(rng.random(shape) < 0.8, own, blocks)
    indices = np.floor(rng.random(shape) * (top + 1)).astype(np.int64)
    again = rng.random(shape) < 0.15  # the block of the slot before
    indices[..., 1:] = np.where(again[..., 1:], indices[..., :-1], indices[..., 1:])
    # one block of each kv head shall be nobody's, not even somebody's own
    head_kv = np.arange(case.num_heads_sel) * case.num_heads_kv // case.num_heads_sel
    nobodys = (1 + head_kv)[:, None] % np.maximum(blocks, 1)
    before = (length_k - length_q)[sequence][:, None, None] if case.own else np.inf
    shut = (blocks >= 3) & (indices == nobodys) & ((nobodys + 1) * size <= before)
    traps = PADDING + WIDE if case.index_dtype == "int64" else PADDING
    padding = rng.choice(traps, shape)
    empty = rng.random(shape[:2])[..., None] < 0.1
    indices = np.where(shut | empty | (rng.random(shape) < 0.15), padding, indices)
    nowhere = sequence < 0
    indices[nowhere] = rng.choice((0, 1, *PADDING), shape)[nowhere]
    return indices


def _offsets(lengths: Lengths) -> Integers:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _poison(array: Array | None, rows: Bools) -> None:
    """NaN into these (token, head) rows of an array that ``make`` has drawn."""
    if array is None:
        return
    whole = array if array.base is None else array.base
    whole.flags.writeable = True
    whole[: len(rows), : rows.shape[1], : array.shape[2]][rows] = np.nan
    whole.flags.writeable = False
