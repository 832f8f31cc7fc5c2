"""The keys that each query of block-sparse attention sees, as masks: ``blocks`` turned to keys."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rawattn.reference.blocks import END, by_query
from rawattn.reference.dense import Array, allowed, namespace, sequences

OWN = -1  # slot of the own block of a query, where it is not selected too
ABSENT = -2  # slot of a block that a query does not see


class Part(NamedTuple):
    """One key/value head of one sequence, with the selections of its query heads: one, or one each.

    That number, num_heads_sel // num_heads_kv, is called ratio. slot (ratio, seqlen_q, num_blocks)
    is the slot of every block, mask (ratio, seqlen_q, seqlen_k) says which keys are allowed.
    """

    rows: slice
    keys: slice
    heads: slice
    head_kv: int
    selections: slice
    slot: Array
    block_of_key: Array
    mask: Array

    def seen(self, x: Array) -> Array:
        """``x`` (seqlen_k, anything) with zeros in the rows of keys that nobody sees."""
        xp = namespace(x)
        return xp.where(self.mask.any(axis=(0, 1))[:, None], x, 0)

    def per_key(
        self, scale: Array | None, elsewhere: float, load: Callable[[Array], Array]
    ) -> Array | float:
        """What ``scale`` (total_q, num_heads_sel, num_selected) holds for the block of each key.

        A key whose block has no slot gets ``elsewhere``; without a scale that alone is returned.
        """
        if scale is None:
            return elsewhere
        xp, num_selected = namespace(scale), scale.shape[2]
        of_slot = load(scale[self.rows, self.selections]).swapaxes(0, 1)
        last = xp.full((*of_slot.shape[:2], 1), elsewhere, dtype=of_slot.dtype)
        index = xp.where(self.slot >= 0, self.slot, num_selected)
        of_block = xp.take_along_axis(xp.concatenate([of_slot, last], axis=2), index, axis=2)
        return of_block[..., self.block_of_key]

    def per_slot(self, x: Array, num_selected: int) -> Array:
        """Sums of x (group, seqlen_q, seqlen_k) over the keys of a slot's block and over its heads.

        Of shape (seqlen_q, ratio, num_selected); 0 for a slot that does not count.
        """
        xp, (ratio, seqlen_q, num_blocks) = namespace(x), self.slot.shape
        of_key = x.reshape(ratio, -1, *x.shape[1:]).sum(axis=1)
        of_block = of_key @ (self.block_of_key[:, None] == xp.arange(num_blocks)).astype(x.dtype)
        sums = xp.zeros((seqlen_q, ratio, num_selected), dtype=x.dtype)
        head, i, n = xp.nonzero(self.slot >= 0)
        sums[i, head, self.slot[head, i, n]] = of_block[head, i, n]
        return sums


def parts(
    block_indices: Array,
    num_heads_q: int,
    num_heads_kv: int,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    block_size: int,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
) -> Iterator[Part]:
    """Every sequence that has queries and keys, by key/value head."""
    xp, group = namespace(block_indices), num_heads_q // num_heads_kv
    ratio = block_indices.shape[1] // num_heads_kv
    blocks, slots, _ = by_query(
        block_indices,
        cu_seqlens_q,
        cu_seqlens_k,
        block_size=block_size,
        block_counts=block_counts,
        include_own_block=include_own_block,
        causal=causal,
    )
    for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k):
        seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
        not_after = allowed(seqlen_q, seqlen_k, (-1, 0), xp)
        block_of_key = xp.arange(seqlen_k) // block_size
        for head_kv in range(num_heads_kv):
            selections = slice(head_kv * ratio, (head_kv + 1) * ratio)
            n, slot_of_n = blocks[selections, rows], slots[selections, rows]
            head, i, entry = xp.nonzero(n != END)
            slot = xp.full((ratio, seqlen_q, -(-seqlen_k // block_size)), ABSENT)
            slot[head, i, n[head, i, entry]] = slot_of_n[head, i, entry]
            of_key = slot[..., block_of_key]
            mask = (of_key != ABSENT) & (not_after | ((of_key != OWN) & (not causal)))
            heads = slice(head_kv * group, (head_kv + 1) * group)
            yield Part(rows, keys, heads, head_kv, selections, slot, block_of_key, mask)
