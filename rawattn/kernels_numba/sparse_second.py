"""What the twins of block-sparse second derivatives share.

A direction has a fourth array here, that of block_scale. With X = q k^T, its tangent
tX = tq k^T + q tk^T, and the gate g of a block and tg, the gate's direction,

    S = softmax_scale g X    E = softmax_scale (g tX + tg X)    dX = g dS    tdX = g tdS + tg dS

where dX and tdX, the gradient of X and its tangent, are without softmax_scale. Kernels that add up
in another order still have to agree on S and E: E less its mean is 0 for a query with a single key.
So dot products are added up in float64, and put together in one order.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rawattn.kernels_numba.common import Array, accumulator, decoder, device_function
from rawattn.kernels_numba.sparse import OWN, UNUSED

THREADS = 32  # of a CTA that has one query: the keys of a tile, then the columns of the result


# ---- the keys of a query and their gates --------------------------------------------------------


@device_function
def listed_keys(blocks: Array, head_sel: int, token: int, width: int, block_size: int) -> Any:
    """How many keys the blocks of an item have, those counted that it must not see."""
    count = 0
    while count < width and blocks[head_sel, token, count] != UNUSED:
        count += 1
    return count * block_size


@functools.cache
def ddgate_reader(dtype: str, has_ddgate: bool) -> Callable[..., Any]:
    """Device function: the direction of a block's gate, 0 where it has none."""
    real = accumulator(dtype)

    @device_function
    def ddgate(ddblock_scale: Array, token: int, head_sel: int, slot: int) -> Any:
        if has_ddgate and slot != OWN:
            return ddblock_scale[token, head_sel, slot]
        return real(0)

    return ddgate


# ---- scores -----------------------------------------------------------------------------------


@functools.cache
def key_product(dtype: str, columns: int) -> Callable[..., Any]:
    """Device function: the dot product, in float64, of a shared row and a row in global memory."""
    decode = decoder(dtype)

    @device_function
    def product(sX: Array, gY: Array, row: int, head: int) -> Any:
        total = np.float64(0)
        for d in range(columns):
            total += np.float64(sX[d]) * np.float64(decode(gY[row, head, d]))
        return total

    return product


@functools.cache
def gated_scores(dtype: str, has_e: bool) -> Callable[..., Any]:
    """Device function: tP, tdX, dX of one query and one key, and what they add to the gate's gg.

    With P = exp(S - L): tP = P (E - ddlse) and dS = P (dP - delta), both 0 without E;
    tdS = tP (dP - delta) + P (tdP - ddelta). The last is tdS X + dS tX.
    """
    real = accumulator(dtype)

    @device_function
    def scores(
        score: float,
        tangent: float,
        dprobability: float,
        tdprobability: float,
        gate: float,
        ddgate: float,
        row_lse: float,
        row_delta: float,
        row_ddlse: float,
        row_ddelta: float,
        scale: float,
    ) -> Any:
        probability: Any = math.exp(scale * gate * score - row_lse)
        tprobability, dscore = real(0), real(0)
        tdscore = probability * (tdprobability - row_ddelta)
        if has_e:
            tprobability = probability * (scale * (gate * tangent + ddgate * score) - row_ddlse)
            tdscore += tprobability * (dprobability - row_delta)
            dscore = probability * (dprobability - row_delta)
        tdproduct, dproduct = gate * tdscore + ddgate * dscore, gate * dscore
        return tprobability, tdproduct, dproduct, tdscore * score + dscore * tangent

    return scores
