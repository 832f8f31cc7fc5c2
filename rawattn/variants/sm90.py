"""The rows of kernels_cu/sm90/, which are tried before those of sm80."""

from typing import Any

from rawattn.variants.row import Row, Sm90, Tiles, When
from rawattn.variants.sm80 import FORWARD

_TILE = 56  # bytes of struct QueryTile
_BARRIERS = 16  # bytes of the two barriers of a buffer
_ALIGNMENT = 1024  # bytes of a swizzled tile


def _forward_smem(c: Sm90, t: Tiles) -> int:
    d, dv = t.head_dim, t.head_dim_v
    tiles = c.q_stages * c.block_m * d + c.num_stages * c.block_n * (d + dv)
    others = 2 * _TILE + (c.q_stages + 2 * c.num_stages + 2) * _BARRIERS + 8
    return -(-(2 * tiles + others) // _ALIGNMENT) * _ALIGNMENT


def _forward(
    head_dim: int, block_m: int, block_n: int, why: str, *, short: bool = False, **cfg: Any
) -> Row:
    name = f"forward_sm90_d{head_dim}_{block_m}x{block_n}{'_short' if short else ''}"
    made = Sm90(block_m, block_n, consumers=block_m // 64, **cfg)
    when = When(archs=(90,), short=short)
    return Row(name, FORWARD, why, "sm90", head_dim, when, made, smem=_forward_smem)


_SHORT_ROWS = "a sequence of 64 queries leaves most of the rows empty, one stage is enough for its"
_THREE = "three warpgroups, since O takes few registers and exponentials want to be hidden"

# fmt: off
SM90: tuple[Row, ...] = (
    _forward(32, 192, 128, _THREE, registers=(32, 160), pingpong=True),
    _forward(64, 64, 128, f"{_SHORT_ROWS} keys", short=True, num_stages=1, min_ctas=2, registers=(40, 216)),
    _forward(64, 192, 128, _THREE, registers=(32, 160), pingpong=True),
    _forward(96, 192, 112, _THREE, registers=(32, 160), q_stages=2, pingpong=True),
    _forward(128, 64, 128, f"{_SHORT_ROWS} keys", short=True, num_stages=1, min_ctas=2, registers=(40, 216)),
    _forward(128, 128, 128, "O, S and P take 160 registers", q_stages=2, pingpong=True),
    _forward(192, 128, 112, "as many keys as 227 KiB hold twice", pingpong=True),
    _forward(256, 128, 64, "S and P leave registers to O, half of a diagonal tile is passed over", pingpong=True),
)
# fmt: on
