"""Which blocks of keys each query sees, and back from a block of keys to its queries.

The arrays are those of ``rawattn.BlockTable``: an item is a query token with one selection head,
pos = i + seqlen_k - seqlen_q the place of query i among the keys of its sequence. NumPy or CuPy.
"""

from typing import Any

from rawattn.reference.dense import Array, namespace

END = 2**31 - 1  # behind the last block of an item


def named_by_pattern(
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    total_q: int,
    *,
    num_heads_sel: int,
    sliding_blocks: int,
    global_blocks: int,
    block_size: int,
) -> Array:
    """block_indices of the first ``global_blocks`` blocks, the own one and those right before."""
    xp = namespace(cu_seqlens_q)
    _, pos, _ = _places(xp, cu_seqlens_q, cu_seqlens_k, total_q)
    first = xp.broadcast_to(xp.arange(global_blocks), (total_q, global_blocks))
    near = (pos // block_size)[:, None] - xp.arange(sliding_blocks)
    named = xp.concatenate([first, near], axis=1)
    return xp.repeat(named[:, None], num_heads_sel, axis=1)


def named_by_mask(block_mask: Array) -> Array:
    """block_indices of a mask: slot n is block n, or padding."""
    xp = namespace(block_mask)
    return xp.where(block_mask, xp.arange(block_mask.shape[2]), -1)


def named_by_table(blocks: Array, slots: Array, num_selected: int) -> Array:
    """block_indices that give these ``blocks`` and ``slots`` again."""
    xp = namespace(blocks)
    blocks, slots = blocks.swapaxes(0, 1), slots.swapaxes(0, 1)
    named = xp.full((*blocks.shape[:2], num_selected + 1), -1, dtype=xp.int64)
    token = xp.arange(blocks.shape[0])[:, None, None]
    head = xp.arange(blocks.shape[1])[:, None]
    selected = slots >= 0
    named[token, head, xp.where(selected, slots, num_selected)] = xp.where(selected, blocks, -1)
    return named[..., :num_selected]


def by_query(
    block_indices: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    block_size: int,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
) -> tuple[Array, Array, Array]:
    """blocks, slots (num_heads_sel, total_q, width) and counts (num_heads_sel, total_q), int32."""
    xp = namespace(block_indices)
    total_q, num_heads_sel, num_selected = block_indices.shape
    _, pos, seqlen_k = _places(xp, cu_seqlens_q, cu_seqlens_k, total_q)
    named = block_indices.astype(xp.int64)
    slots = xp.broadcast_to(xp.arange(num_selected), named.shape)
    here, length = pos[:, None, None], seqlen_k[:, None, None]
    seen = (named >= 0) & (named < -(-length // block_size))
    if block_counts is not None:
        seen &= slots < block_counts[:, :, None]
    if causal:
        seen &= named <= here // block_size
    if include_own_block:
        column = (total_q, num_heads_sel, 1)
        own = xp.broadcast_to(here // block_size, column)
        named = xp.concatenate([named, own], axis=2)
        slots = xp.concatenate([slots, xp.full(column, -1)], axis=2)
        seen = xp.concatenate([seen, xp.broadcast_to((here >= 0) & (length > 0), column)], axis=2)
    # stable: of equal blocks the lowest slot stays first, the own block last
    named, slots = _in_order(xp, xp.where(seen, named, END), slots)
    again = xp.zeros(named.shape, dtype=bool)
    again[..., 1:] = named[..., 1:] == named[..., :-1]
    named, slots = _in_order(xp, xp.where(again, END, named), slots)
    slots = xp.where(named == END, -1, slots)
    blocks, slots = (x.swapaxes(0, 1).astype(xp.int32) for x in (named, slots))
    return blocks, slots, (blocks != END).sum(axis=2).astype(xp.int32)


def by_key(
    blocks: Array,
    slots: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    num_heads_kv: int,
    units: int,
    chunk: int,
    num_chunks: int,
    block_size: int,
    segment: int,
    segments: int,
) -> tuple[Array, Array, Array, Array, Array]:
    """starts, lengths (num_chunks, num_heads_kv, units), queries, query_slots and work, int32.

    Every entry of ``blocks`` is one of ``queries``, in the list of its chunk of query tokens, kv
    head and unit; what is left of ``queries`` is -1. work (segments, 4) has a row for every
    ``segment`` items of a list: its number, their first place, how many, 0; what is left is -1.
    """
    xp = namespace(blocks)
    num_heads_sel, total_q, _ = blocks.shape
    ratio = num_heads_sel // num_heads_kv
    head, token, place = xp.nonzero(blocks != END)
    sequence, _, _ = _places(xp, cu_seqlens_q, cu_seqlens_k, total_q)
    b = sequence[token]
    start_k = cu_seqlens_k.astype(xp.int64)[b]
    unit = start_k // block_size + b + blocks[head, token, place]
    which = (token // chunk * num_heads_kv + head // ratio) * units + unit
    item = token * ratio + head % ratio
    order = xp.argsort(which * (total_q * ratio) + item)  # no two are equal
    lengths = xp.bincount(which, minlength=num_chunks * num_heads_kv * units)
    starts = xp.cumsum(lengths) - lengths
    queries, query_slots = (xp.full(blocks.size, -1, dtype=xp.int32) for _ in range(2))
    queries[: item.size] = item[order]
    query_slots[: item.size] = slots[head, token, place][order]
    work = xp.full((segments, 4), -1, dtype=xp.int32)
    ends = xp.cumsum(-(-lengths // segment))
    row = xp.arange(int(ends[-1]) if ends.size else 0)
    of = xp.searchsorted(ends, row, side="right")
    first = (row - ends[of] + -(-lengths[of] // segment)) * segment
    number = xp.minimum(segment, lengths[of] - first)
    work[: row.size] = xp.stack([of, starts[of] + first, number, 0 * row], axis=1)
    shape = (num_chunks, num_heads_kv, units)
    starts, lengths = (x.reshape(shape).astype(xp.int32) for x in (starts, lengths))
    return starts, lengths, queries, query_slots, work


def _places(
    xp: Any, cu_seqlens_q: Array, cu_seqlens_k: Array, total_q: int
) -> tuple[Array, Array, Array]:
    """Sequence, pos and seqlen_k of every query token; -1, -1 and 0 where it has no sequence."""
    batch = cu_seqlens_q.shape[0] - 1
    cu_q, cu_k = cu_seqlens_q.astype(xp.int64), cu_seqlens_k.astype(xp.int64)
    token = xp.arange(total_q)
    if batch == 0:
        return xp.full(total_q, -1), xp.full(total_q, -1), xp.zeros(total_q, dtype=xp.int64)
    sequence = xp.searchsorted(cu_q[1:], token, side="right")
    inside = sequence < batch
    b = xp.minimum(sequence, batch - 1)
    seqlen_k = cu_k[b + 1] - cu_k[b]
    pos = token - cu_q[b + 1] + seqlen_k
    return xp.where(inside, b, -1), xp.where(inside, pos, -1), xp.where(inside, seqlen_k, 0)


def _in_order(xp: Any, named: Array, slots: Array) -> tuple[Array, Array]:
    order = xp.argsort(named, axis=-1, kind="stable")
    return xp.take_along_axis(named, order, axis=-1), xp.take_along_axis(slots, order, axis=-1)
