"""What the twins of block-sparse attention share: sequences, key blocks, and rows of a tile.

An item is a query token and a selection head; its list names blocks of keys of its own sequence.
The device functions here name nothing of ``cuda``, as those of common.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rawattn.kernels_numba.common import (
    LANES,
    Array,
    accumulator,
    decoder,
    device_function,
    sequence,
)

UNUSED = 2**31 - 1  # stands in a list behind its last block
OWN = -1  # slot of a query's own block, where it is in the list without being selected


def head_rows(group: int, block: int) -> int:
    """Rows of a tile that holds one query's heads: at least a warp's 4, at most ``block``."""
    rows = 4
    while rows < group:
        rows *= 2
    return min(rows, block)


# ---- sequences and key blocks -----------------------------------------------------------------


@device_function
def find_item(
    cu_seqlens_q: Array, cu_seqlens_k: Array, batch: int, total_q: int, total_k: int, token: int
) -> Any:
    """Of query ``token``: (sequence, start of its keys, seqlen_k, the key at which it stands).

    A token at or past cu_seqlens_q[batch] is in sequence ``batch``, which has no keys.
    """
    b, last = 0, batch
    while b < last:  # the last sequence that does not start behind the token
        middle = (b + last + 1) // 2
        if int(cu_seqlens_q[middle]) <= token:
            b = middle
        else:
            last = middle - 1
    if b == batch:
        return b, 0, 0, -1
    start_k, seqlen_k = sequence(cu_seqlens_k, batch, b, total_k)
    start_q, seqlen_q = sequence(cu_seqlens_q, batch, b, total_q)
    # within the keys, even where a broken cu_seqlens has the sequence end before the token
    return b, start_k, seqlen_k, min(token - start_q - seqlen_q, -1) + seqlen_k


@device_function
def find_block(cu_seqlens_k: Array, batch: int, total_k: int, unit: int, block_size: int) -> Any:
    """Which key block is this unit: (sequence, its first key, its length, block within it).

    Keys at or past cu_seqlens_k[batch] count as sequence ``batch``. A unit that is no block gets a
    block at or past the length.
    """
    b, last = 0, batch
    while b < last:  # the last sequence whose units do not start behind this one
        middle = (b + last + 1) // 2
        start, _ = sequence(cu_seqlens_k, batch, middle, total_k)
        if start // block_size + middle <= unit:
            b = middle
        else:
            last = middle - 1
    start, length = sequence(cu_seqlens_k, batch, b, total_k)
    if b == batch:
        length = total_k - start
    block = unit - start // block_size - b
    if block < 0:  # before the first sequence, where a broken cu_seqlens does not start at 0
        return b, start, 0, 0
    return b, start, length, block


@device_function
def keys_stop(n: int, slot: int, pos: int, seqlen_k: int, block_size: int, right: int) -> Any:
    """One past the last key of block ``n`` that a query at key ``pos`` may see.

    An own block that was not selected shows its causal part alone, whatever the mask.
    """
    stop = min((n + 1) * block_size, seqlen_k)
    if right >= 0 or slot == OWN:
        stop = min(stop, pos + 1)
    return stop


@functools.cache
def gate_reader(dtype: str) -> Callable[..., Any]:
    """Device function: the factor of a block's scores, 1 where there is none."""
    real = accumulator(dtype)

    @device_function
    def gate(block_scale: Array, token: int, head_sel: int, slot: int) -> Any:
        if block_scale.shape[0] > 0 and slot != OWN:
            return block_scale[token, head_sel, slot]
        return real(1)

    return gate


# ---- tiles ------------------------------------------------------------------------------------


@functools.cache
def row_loader(dtype: str, columns: int) -> Callable[..., Any]:
    """Device function: the LANES of a row bring one token's head to a shared tile, or zeros.

    Sync before the tile is read.
    """
    real, decode = accumulator(dtype), decoder(dtype)

    @device_function
    def load_row(
        gX: Array, token: int, head: int, exists: bool, sX: Array, row: int, lane: int
    ) -> None:
        for d in range(lane, columns, LANES):
            if exists:
                sX[row, d] = decode(gX[token, head, d])
            else:
                sX[row, d] = real(0)

    return load_row


@functools.cache
def live_row_terms(dtype: str) -> Callable[..., Any]:
    """Device function: is it a query that sees keys, and its L and D; (+inf, 0) if it is not."""
    real = accumulator(dtype)

    @device_function
    def terms(lse: Array, delta: Array, head: int, token: int, exists: bool) -> Any:
        if exists and lse[head, token] != -math.inf:
            return True, lse[head, token], delta[head, token]
        return False, real(math.inf), real(0)

    return terms


@functools.cache
def products(dtype: str, head_dim: int, head_dim_v: int) -> Callable[..., Any]:
    """Device function: q k^T and dout v^T of one row of queries and one of keys.

    Added up in float64, so that S is the same in whatever order a kernel adds it up.
    """
    real = accumulator(dtype)

    @device_function
    def dots(sQ: Array, sK: Array, sdO: Array, sV: Array, row: int, n: int) -> Any:
        score, dprobability = np.float64(0), np.float64(0)
        for d in range(head_dim):
            score += np.float64(sQ[row, d]) * np.float64(sK[n, d])
        for d in range(head_dim_v):
            dprobability += np.float64(sdO[row, d]) * np.float64(sV[n, d])
        return real(score), real(dprobability)

    return dots
