"""The rows of kernels_cu/sm90/, which are tried before those of sm80."""

from typing import Any

from rawattn.variants.row import Row, Sm90, Tiles, When, panel_of
from rawattn.variants.sm80 import BACKWARD_KV, FORWARD, SOFTCAP

_WORKS = 256  # bytes of struct Works, at most
_TURNS = 32  # bytes of a warpgroup's
_BARRIERS = 16  # bytes of the two barriers of a buffer
_ALIGNMENT = 1024  # bytes of a swizzled tile


def _bytes(elements: int, others: int) -> int:
    """Of a SmemPlan: its tiles' elements, of 16 bits, and the bytes of all else, aligned."""
    return -(-(2 * elements + others) // _ALIGNMENT) * _ALIGNMENT


def _forward_smem(c: Sm90, t: Tiles) -> int:
    d, dv = t.head_dim, t.head_dim_v
    tiles = c.q_stages * c.block_m * d + c.num_stages * c.block_n * (d + dv)
    others = _WORKS + (c.q_stages + 2 * c.num_stages) * _BARRIERS
    return _bytes(tiles, others)


def _forward(
    head_dim: int,
    block_m: int,
    block_n: int,
    why: str,
    *,
    short: bool = False,
    softcap: bool | None = None,
    **cfg: Any,
) -> Row:
    name = f"forward_sm90_d{head_dim}_{block_m}x{block_n}{'_short' if short else ''}"
    made = Sm90(block_m, block_n, consumers=block_m // 64, **cfg)
    when = When(archs=(90,), short=short, softcap=softcap)
    return Row(name, FORWARD, why, "sm90", head_dim, when, made, smem=_forward_smem)


def _backward_kv_smem(c: Sm90, t: Tiles) -> int:
    columns = t.head_dim + t.head_dim_v
    shares = c.cluster == 2 and t.head_dim % 128 == 0
    tiles = (c.kv_stages * c.block_n + c.num_stages * c.block_m) * columns
    tiles += 2 * (1 + shares) * c.block_n * c.block_m  # dS, of both CTAs
    tiles += shares * c.kv_stages * c.block_n * t.head_dim // 2  # K of the other one
    others = c.num_stages * (8 * c.block_m + 4 + _BARRIERS + 8)
    others += (2 + c.kv_stages) * _BARRIERS + 16 + _WORKS + _TURNS * c.consumers
    return _bytes(tiles, others)


def _backward_kv(
    head_dim: int,
    block_m: int,
    block_n: int,
    why: str,
    *,
    softcap: bool | None = None,
    **cfg: Any,
) -> Row:
    name = f"backward_kv_sm90_d{head_dim}_{block_m}x{block_n}{'_softcap' if softcap else ''}"
    made = Sm90(block_m, block_n, consumers=block_n // 64, **cfg)
    when = When(archs=(90,), softcap=softcap)
    return Row(
        *(name, BACKWARD_KV, why, "sm90", head_dim, when, made),
        workspace="units",
        smem=_backward_kv_smem,
    )


def _backward_kv_wide_smem(c: Sm90, t: Tiles) -> int:
    rows, (d, dv) = c.block_m, (t.head_dim, t.head_dim_v)
    of_peer = d if d // panel_of(d) < 4 else d // 2
    tiles = rows * (d + dv + of_peer + c.q_stages * d + c.num_stages * dv)
    tiles += 6 * rows * rows  # P, dS and dS of the other CTA, twice
    others = c.q_stages * (8 * rows + 4 + _BARRIERS + 8) + (3 + c.num_stages) * _BARRIERS + 24
    others += _WORKS + _TURNS * c.consumers
    return _bytes(tiles, others)


def _backward_kv_wide(head_dim: int, why: str, **cfg: Any) -> Row:
    name = f"backward_kv_sm90_d{head_dim}_64x64"
    made = Sm90(64, 64, cluster=2, **cfg)
    return Row(
        *(name, BACKWARD_KV, why, "sm90", head_dim, When(archs=(90,)), made),
        workspace="units",
        smem=_backward_kv_wide_smem,
        file="backward_kv_wide",
    )


_SHORT_ROWS = "a sequence of 64 queries leaves most of the rows empty, one stage is enough for its"
_THREE = "three warpgroups, since O takes few registers and exponentials want to be hidden"

# fmt: off
SM90: tuple[Row, ...] = (
    _forward(32, 192, 128, _THREE, registers=(32, 160), pingpong=True),
    _forward(64, 64, 128, f"{_SHORT_ROWS} keys", short=True, num_stages=1, min_ctas=2, registers=(40, 216)),
    _forward(64, 192, 128, _THREE, registers=(32, 160), pingpong=True),
    _forward(96, 192, 112, _THREE, softcap=False, registers=(32, 160), q_stages=2, pingpong=True),
    _forward(96, 128, 128, SOFTCAP, softcap=True, q_stages=2, pingpong=True),
    _forward(128, 64, 128, f"{_SHORT_ROWS} keys", short=True, num_stages=1, min_ctas=2, registers=(40, 216)),
    _forward(128, 128, 128, "O, S and P take 160 registers", q_stages=2, pingpong=True),
    _forward(192, 128, 112, "as many keys as 227 KiB hold twice", pingpong=True),
    _forward(256, 128, 64, "S and P leave registers to O, half of a diagonal tile is passed over", pingpong=True),
    _backward_kv(32, 64, 192, "three warpgroups, whose steps lie beside each other", num_stages=4, kv_stages=2, registers=(32, 160), v_steps=2),
    _backward_kv(64, 64, 192, "three warpgroups, whose steps lie beside each other", softcap=False, num_stages=4, kv_stages=2, registers=(32, 160), v_steps=1),
    _backward_kv(64, 64, 128, SOFTCAP, softcap=True, num_stages=4, kv_stages=2, v_steps=4),
    _backward_kv(96, 64, 128, "dK, dV, S, P and their gradients take 192 registers", num_stages=4, v_steps=5),
    _backward_kv(128, 64, 128, "dK, dV, S, P and their gradients take 224 registers", softcap=False, cluster=2, v_steps=1),
    _backward_kv(128, 64, 128, SOFTCAP, softcap=True, cluster=2),
    _backward_kv_wide(192, "half of dK and of dV is what registers hold", v_steps=14, q_stages=2),
    _backward_kv_wide(256, "half of dK and of dV is what registers hold", v_steps=6, q_stages=2, num_stages=1),
)
# fmt: on
