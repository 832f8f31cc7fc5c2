"""What the twins of second derivatives and forward mode share.

All of them take a direction: three arrays like q, k and v, each of which may be absent. Which ones
are there is a constant of the compiled kernel, and a tile of an absent one has width 0.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from rawattn.kernels_numba.common import (
    LANES,
    Array,
    accumulator,
    capper,
    decoder,
    device_function,
)

Given = tuple[bool, bool, bool]  # which of the three arrays of a direction are there


@functools.cache
def live_tile_loader(dtype: str, block: int, columns: int) -> Callable[..., Any]:
    """Device function: ``tile_loader``'s for queries; those without keys (lse -inf) are zero too.

    Whatever such a row holds, NaN included, it then adds nothing to a sum over queries.
    """
    real, decode = accumulator(dtype), decoder(dtype)
    threads = block * LANES

    @device_function
    def load_tile(
        gX: Array, lse: Array, first_row: int, rows: int, head: int, sX: Array, thread: int
    ) -> None:
        for e in range(thread, block * columns, threads):
            row, column = e // columns, e % columns
            if row < rows and lse[head, first_row + row] != -math.inf:
                sX[row, column] = decode(gX[first_row + row, head, column])
            else:
                sX[row, column] = real(0)

    return load_tile


@functools.cache
def row_terms(dtype: str) -> Callable[..., Any]:
    """Device function: L, delta, ddlse, ddelta of a query; (+inf, 0, 0, 0), so P = 0, if dead."""
    real = accumulator(dtype)

    @device_function
    def terms(
        lse: Array, delta: Array, ddlse: Array, ddelta: Array, head: int, token: int, exists: bool
    ) -> Any:
        if exists and lse[head, token] != -math.inf:
            return lse[head, token], delta[head, token], ddlse[head, token], ddelta[head, token]
        return real(math.inf), real(0), real(0), real(0)

    return terms


@functools.cache
def score_and_tangent(
    dtype: str, head_dim: int, has_tq: bool, has_tk: bool, sums: str | None = None
) -> Callable[..., Any]:
    """Device function: q k^T and its tangent tq k^T + q tk^T, of one query and one key of a tile.

    Both are without softmax_scale, and added up in the dtype ``sums``, by default in dtype's own.
    """
    real, wide = accumulator(dtype), accumulator(sums or dtype)

    @device_function
    def scores(sQ: Array, sK: Array, stQ: Array, stK: Array, row: int, n: int) -> Any:
        score, tangent = wide(0), wide(0)
        for d in range(head_dim):
            score += wide(sQ[row, d]) * wide(sK[n, d])
            if has_tq:
                tangent += wide(stQ[row, d]) * wide(sK[n, d])
            if has_tk:
                tangent += wide(sQ[row, d]) * wide(stK[n, d])
        return real(score), real(tangent)

    return scores


@functools.cache
def second_scores(
    dtype: str, head_dim: int, head_dim_v: int, capped: bool, given: Given
) -> Callable[..., Any]:
    """Device function: tP, tdS, dS of one query and one key of a tile, with P = exp(S - L).

    tP = P (E - ddlse) and dS = P (dP - delta), both 0 if neither ddq nor ddk is there;
    tdS = tP (dP - delta) + P (dO ddV^T - ddelta). ``capped``: there is a softcap, and dS and tdS
    are of the scores before it.
    """
    real, cap = accumulator(dtype), capper(dtype, capped)
    has_ddq, has_ddk, has_ddv = given
    has_e = has_ddq or has_ddk
    qk_products = score_and_tangent(dtype, head_dim, has_ddq, has_ddk)

    @device_function
    def scores(
        sQ: Array,
        sK: Array,
        sV: Array,
        sdO: Array,
        sddQ: Array,
        sddK: Array,
        sddV: Array,
        row_lse: float,
        row_delta: float,
        row_ddlse: float,
        row_ddelta: float,
        row: int,
        n: int,
        scale: float,
        softcap: float,
    ) -> Any:
        score, tangent = qk_products(sQ, sK, sddQ, sddK, row, n)
        score, slope, bend = cap(scale * score, softcap)
        tangent *= scale
        probability = math.exp(score - row_lse)
        dprobability, tdprobability = real(0), real(0)
        for d in range(head_dim_v):
            if has_e:
                dprobability += sdO[row, d] * sV[n, d]
            if has_ddv:
                tdprobability += sdO[row, d] * sddV[n, d]
        tprobability, dscore = real(0), real(0)
        tdscore = probability * (tdprobability - row_ddelta)
        if has_e:
            tprobability = probability * (slope * tangent - row_ddlse)
            tdscore += tprobability * (dprobability - row_delta)
            dscore = probability * (dprobability - row_delta)
        return tprobability, slope * tdscore + bend * tangent * dscore, slope * dscore

    return scores
