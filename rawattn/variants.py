"""The table of kernel variants, and the choice of a row for a problem. Standard library only.

A row's UPPER-case twins (block_m -> BLOCK_M) become ``namespace cfg`` in front of the CUDA source.
Rows of a stem are tried in order; the first that serves the head_dim and fits the device wins.

Long for a module, since the table and what a row costs stand together.
"""

import os
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from rawattn.problem import Problem, Selection

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
_KIB = 1024
# shared memory that one CTA may have (CUDA C++ programming guide, table of compute capabilities)
_SMEM_LIMITS = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
METHODS = ("atomic_dq", "atomic_dkv", "two_pass")


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    """One row: a kernel and its compile-time choices. Rows are compared by identity.

    ``head_dim``: the widest tile the row serves. ``min_smem_kib``: GPUs whose CTAs may have less
    shared memory do not use the row. ``warps_*``: how many warps lie along the rows of a product
    (S: queries, kv: keys, dq: queries); the rest lie along its columns. ``pieces``: a product is
    made in so many parts, to save registers. ``unroll_k``: steps of a product the compiler may
    look ahead. ``max_ctas``: the row is for small problems, whose grid has no more CTAs, and for
    callers that do not need the same row for every batch (``select(by_size=True)``); and for GPUs
    on which no wider row fits. ``max_arch``: newer GPUs do not use the row: compiled for them it
    spills.
    Fields that a kernel does not use stay at their default.
    """

    name: str
    stem: str
    why: str
    family: str = "sm80"
    head_dim: int = 256
    min_smem_kib: int = 0
    max_arch: int = 999
    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 1
    min_ctas: int = 1
    q_in_registers: bool = False
    pieces: int = 1
    unroll_k: int = 4
    warps_m_s: int = 0
    warps_n_kv: int = 0
    warps_m_dq: int = 0
    max_ctas: int = 0


_STEMS = (
    *("forward", "backward_preprocess", "backward_kv", "backward_q", "backward_postprocess"),
    *("jvp", "double_backward_out", "double_backward_kv", "double_backward_q"),
)
LIST_STEMS = ("block_lists", "block_offsets", "block_queries", "block_order")
SPARSE_STEMS = (
    *LIST_STEMS,
    *("sparse_forward", "sparse_backward_kv", "sparse_backward_q", "sparse_postprocess"),
    *("sparse_double_backward_out", "sparse_double_backward_kv", "sparse_double_backward_q"),
)
_ANY_WIDTH = (  # stems whose one row serves every head_dim
    *("backward_preprocess", "backward_postprocess", "sparse_postprocess"),
    *LIST_STEMS,
)
RING_STEMS = (  # a producer warp fills a ring of stages, as many as fit
    *("sparse_forward", "sparse_backward_q"),
    *("sparse_double_backward_out", "sparse_double_backward_q"),
)
_SMS = 132  # multiprocessors of an H100 or H200: a grid with fewer CTAs leaves some idle
_BIG = 163  # KiB of shared memory: 8.0, 8.7, 9.0, 10.0, 10.3; the other GPUs from 8.6 on have 99


NO_BLOCKS = (0, 0)  # of dense attention


def _dense(stem: str, head_dim: int, m: int, n: int, why: str, **fields: Any) -> Variant:
    name = f"{stem}_sm80_d{head_dim}_{m}x{n}"
    return Variant(name, stem, why, head_dim=head_dim, block_m=m, block_n=n, **_warps(fields))


def _sparse(stem: str, head_dim: int, m: int, why: str, **fields: Any) -> Variant:
    name = f"sparse_{stem}_sm80_d{head_dim}_{m}_{fields.get('min_smem_kib', 99)}"
    return Variant(name, f"sparse_{stem}", why, head_dim=head_dim, block_m=m, **_warps(fields))


def _warps(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with the table's short names, s, kv and dq, spelt out."""
    names = {"s": "warps_m_s", "kv": "warps_n_kv", "dq": "warps_m_dq"}
    return {names.get(name, name): value for name, value in fields.items()}


_forward = partial(_dense, "forward", min_ctas=2)
_backward_kv = partial(_dense, "backward_kv")
_backward_q = partial(_dense, "backward_q")
_jvp = partial(_dense, "jvp", min_ctas=2)
_double_out = partial(_dense, "double_backward_out", min_ctas=2)
_double_kv = partial(_dense, "double_backward_kv")
_double_q = partial(_dense, "double_backward_q")

_WIDEST = "the widest key tile that fits: least dQ traffic"

_HOPPER = 227  # KiB: two CTAs of such a row fit 9.0, 10.0 and 10.3 alone

# fmt: off
TABLE: tuple[Variant, ...] = (
    _forward(32, 128, 64, "bound by exp2; Q in registers", q_in_registers=True),
    _forward(64, 128, 64, "32 rows a warp halve the reads of K and V", q_in_registers=True, min_smem_kib=_BIG),
    _forward(64, 64, 64, "99 KiB: smaller warps, more of them", q_in_registers=True),
    _forward(96, 128, 64, "as head_dim 128, without a spill on any arch"),
    _forward(128, 128, 64, "two CTAs of 255 registers hide each other's softmax", min_smem_kib=_BIG),
    _forward(128, 64, 64, "99 KiB: two CTAs still fit"),
    _forward(192, 128, 64, "O takes 96 registers at 16 rows a warp", num_warps=8, min_ctas=1),
    _forward(256, 64, 64, "O takes 128 registers; 96 KiB fit every GPU", min_ctas=1),
    Variant("backward_preprocess_sm80", "backward_preprocess", "bound by memory: 16 bytes a lane", num_warps=8),
    _backward_kv(32, 64, 128, "two CTAs an SM", num_warps=4, s=2, kv=4, dq=2, num_stages=2, pieces=2),
    _backward_kv(64, 64, 96, "two CTAs an SM, products of 32 x 48 a warp", num_warps=4, s=2, kv=2, dq=2, min_smem_kib=_BIG),
    _backward_kv(64, 64, 128, "99 KiB; pieces keep S and dP small", num_warps=4, s=2, kv=4, dq=2, num_stages=2, pieces=4),
    _backward_kv(96, 64, 128, _WIDEST, num_warps=8, s=2, kv=4, dq=4, num_stages=2, unroll_k=2),
    _backward_kv(96, 64, 64, "99 KiB", num_warps=8, s=4, kv=4, dq=4),
    _backward_kv(128, 64, 128, _WIDEST, num_warps=8, s=2, kv=4, dq=2, num_stages=2),
    _backward_kv(128, 64, 64, "99 KiB", num_warps=8, s=4, kv=4, dq=4),
    _backward_kv(192, 64, 64, "dK and dV take 96 registers", num_warps=8, s=4, kv=2, dq=2),
    _backward_kv(192, 32, 32, "99 KiB", num_warps=4, s=2, kv=2, dq=2),
    _backward_kv(256, 64, 64, "dK and dV take 128 registers", num_warps=8, s=4, kv=2, dq=2, unroll_k=2),
    _backward_kv(256, 32, 32, "99 KiB", num_warps=4, s=2, kv=2, dq=2, unroll_k=2),
    _backward_q(32, 128, 64, "16 rows a warp, K and V prefetched", num_warps=8, kv=4, num_stages=2),
    _backward_q(64, 128, 64, "16 rows a warp, K and V prefetched", num_warps=8, kv=4, num_stages=2),
    _backward_q(96, 64, 64, "16 rows a warp", num_warps=4, kv=4),
    _backward_q(128, 64, 64, "16 rows a warp, two CTAs an SM", num_warps=4, kv=2),
    _backward_q(192, 64, 32, "dQ takes 96 registers", num_warps=4, kv=2),
    _backward_q(256, 64, 32, "dQ takes 128 registers", num_warps=4, kv=2, pieces=2),
    _backward_q(256, 32, 32, "99 KiB", num_warps=2, kv=2, pieces=2),
    Variant("backward_postprocess_sm80", "backward_postprocess", "bound by memory: one unit of 16 rows a warp"),
    _jvp(32, 64, 64, "three CTAs an SM", min_ctas=3),
    _jvp(64, 64, 96, "few CTAs: wide key tiles meet at fewer barriers", unroll_k=2, max_ctas=2 * _SMS, max_arch=90),
    _jvp(64, 64, 64, "O and tO take 64 registers at 16 rows a warp"),
    _jvp(96, 64, 64, "O and tO take 96 registers at 16 rows a warp", max_arch=90),
    _jvp(96, 64, 32, "after 9.0"),
    _jvp(128, 64, 48, "O and tO take 128 registers at 16 rows a warp", unroll_k=8, min_smem_kib=_HOPPER, max_arch=90),
    _jvp(128, 64, 32, "163 KiB: two CTAs still fit; after 9.0"),
    _jvp(192, 64, 48, "columns of O and tO in two CTAs: they would take 192 registers", pieces=2, unroll_k=2, min_smem_kib=_BIG),
    _jvp(192, 64, 32, "99 KiB", min_ctas=1, pieces=2),
    _jvp(256, 64, 32, "columns of O and tO in two CTAs: they would take 256 registers", min_ctas=1, pieces=2, min_smem_kib=_BIG),
    _jvp(256, 32, 32, "99 KiB", num_warps=2, min_ctas=1, pieces=2, unroll_k=2),
    _double_out(32, 64, 64, "three CTAs an SM", min_ctas=3),
    _double_out(64, 64, 96, "few CTAs: more of them, wide key tiles; after 9.0", max_ctas=2 * _SMS),
    _double_out(64, 128, 48, "32 rows a warp halve the reads of keys and values", max_arch=90),
    _double_out(96, 128, 32, "32 rows a warp", unroll_k=2, max_arch=90),
    _double_out(96, 64, 64, "after 9.0"),
    _double_out(128, 64, 64, "ddO takes 64 registers at 16 rows a warp", unroll_k=8, min_smem_kib=_HOPPER),
    _double_out(128, 64, 32, "163 KiB: two CTAs still fit"),
    _double_out(192, 64, 64, "ddO takes 96 registers", min_ctas=1, min_smem_kib=_BIG),
    _double_out(192, 64, 32, "99 KiB", min_ctas=1),
    _double_out(256, 64, 48, "ddO takes 128 registers", min_ctas=1, unroll_k=2, max_arch=90),
    _double_out(256, 32, 32, "99 KiB; after 9.0", num_warps=2, min_ctas=1),
    _double_kv(32, 64, 128, "two CTAs an SM", s=2, kv=4, dq=2, min_ctas=2, pieces=2, max_arch=90),
    _double_kv(32, 64, 64, "after 9.0", s=2, kv=2, dq=2, min_ctas=2),
    _double_kv(64, 64, 64, "two CTAs an SM", s=2, kv=2, dq=2, min_ctas=2),
    _double_kv(96, 64, 64, "two CTAs an SM", s=2, kv=2, dq=2, min_ctas=2, pieces=2, unroll_k=2, min_smem_kib=_HOPPER),
    _double_kv(96, 32, 64, "163 KiB: two CTAs still fit", s=2, kv=2, dq=2, min_ctas=2, pieces=2),
    _double_kv(128, 64, 32, "99 KiB; few CTAs: as many as there can be", num_warps=8, s=4, kv=2, dq=2, unroll_k=8, max_ctas=_SMS),
    _double_kv(128, 64, 64, "163 KiB; few CTAs", num_warps=8, s=4, kv=2, dq=2, max_ctas=2 * _SMS, min_smem_kib=_BIG),
    _double_kv(128, 64, 128, _WIDEST, num_warps=8, s=2, kv=4, dq=2, pieces=2, unroll_k=2),
    _double_kv(192, 64, 64, "gK and gV take 96 registers", num_warps=8, s=4, kv=2, dq=2),
    _double_kv(192, 32, 32, "163 KiB and 99 KiB", s=2, kv=2, dq=2),
    _double_kv(256, 32, 64, "gK and gV take 128 registers", num_warps=8, s=2, kv=2, dq=2),
    _double_kv(256, 32, 32, "163 KiB; 99 KiB hold no row", s=2, kv=2, dq=2),
    _double_q(32, 64, 64, "16 rows a warp"),
    _double_q(64, 128, 32, "32 rows a warp; spills but on 9.0", min_ctas=2, min_smem_kib=_HOPPER, max_arch=90),
    _double_q(64, 64, 64, "the other GPUs", min_ctas=2),
    _double_q(96, 64, 64, "16 rows a warp", min_ctas=2, unroll_k=2),
    _double_q(128, 64, 48, "16 rows a warp", min_ctas=2, unroll_k=2, min_smem_kib=_HOPPER),
    _double_q(128, 64, 32, "163 KiB: two CTAs still fit", min_ctas=2),
    _double_q(192, 64, 48, "gQ takes 96 registers", unroll_k=2),
    _double_q(192, 64, 16, "99 KiB"),
    _double_q(256, 64, 32, "gQ takes 128 registers", unroll_k=2, min_smem_kib=_HOPPER, max_arch=90),
    _double_q(256, 32, 16, "163 KiB and 99 KiB; after 9.0", num_warps=2),
    Variant("block_lists_sm80", "block_lists", "a warp ranks an item's blocks", block_m=32, num_warps=4),
    Variant("block_offsets_sm80", "block_offsets", "one atomic add for 1024 lists", num_warps=32),
    Variant("block_queries_sm80", "block_queries", "bound by atomic adds of integers", block_m=64, num_warps=8),
    Variant("block_order_sm80", "block_order", "a warp orders a list", num_warps=4),
    Variant("sparse_postprocess_sm80", "sparse_postprocess", "bound by memory: 16 columns a thread", num_warps=8),
    _sparse("forward", 32, 48, "queries outer, the blocks that a CTA's queries share loaded once: L2 decides; four producers an SM", num_warps=4, num_stages=8, min_ctas=4, min_smem_kib=_BIG, max_arch=90),
    _sparse("forward", 32, 64, "99 KiB; more than 48 heads of a selection", num_warps=5, num_stages=8),
    _sparse("forward", 64, 48, "queries outer, the blocks that a CTA's queries share loaded once: L2 decides; four producers an SM", num_warps=4, num_stages=8, min_ctas=4, min_smem_kib=_BIG, max_arch=90),
    _sparse("forward", 64, 64, "more than 48 heads of a selection", num_warps=5, num_stages=8, min_ctas=3, min_smem_kib=_BIG, max_arch=90),
    _sparse("forward", 64, 64, "99 KiB; after 9.0", num_warps=5, num_stages=8),
    _sparse("forward", 96, 64, "queries outer: L2 decides; two CTAs an SM", num_warps=5, num_stages=8, min_ctas=2, min_smem_kib=_BIG, max_arch=90),
    _sparse("forward", 96, 64, "99 KiB; after 9.0", num_warps=5, num_stages=8),
    _sparse("forward", 128, 64, "queries outer: L2 decides; two CTAs an SM", num_warps=5, num_stages=8, min_ctas=2, min_smem_kib=_HOPPER, max_arch=90),
    _sparse("forward", 128, 64, "163 and 99 KiB; after 9.0", num_warps=5, num_stages=8),
    _sparse("forward", 192, 64, "O takes 96 registers", num_warps=5, num_stages=8, pieces=2, unroll_k=2),
    _sparse("forward", 256, 64, "O takes 128 registers", num_warps=5, num_stages=8, pieces=2, block_n=32),
    _sparse("backward_kv", 32, 128, "key blocks outer, queries gathered: dK and dV stay in registers, products decide", num_warps=8, s=4, kv=2, dq=4, num_stages=2),
    _sparse("backward_kv", 64, 64, "key blocks outer, queries gathered: products decide; three CTAs an SM", num_warps=4, s=2, kv=2, dq=2, min_ctas=3, unroll_k=2, min_smem_kib=_HOPPER),
    _sparse("backward_kv", 64, 64, "163 and 99 KiB", num_warps=4, s=2, kv=2, dq=2),
    _sparse("backward_kv", 96, 64, "99 KiB", num_warps=8, s=4, kv=2, dq=2),
    _sparse("backward_kv", 128, 128, "key blocks outer, queries gathered: products decide; two stages", num_warps=8, s=4, kv=2, dq=4, num_stages=2, unroll_k=8, min_smem_kib=_HOPPER),
    _sparse("backward_kv", 128, 64, "99 KiB", num_warps=8, s=4, kv=2, dq=2),
    _sparse("backward_kv", 192, 64, "163 KiB", num_warps=8, s=4, kv=2, dq=2, unroll_k=2, min_smem_kib=_BIG),
    _sparse("backward_kv", 192, 64, "99 KiB", num_warps=8, s=4, kv=2, dq=2, block_n=32),
    _sparse("backward_kv", 256, 48, "163 KiB", num_warps=8, s=3, kv=2, dq=1, unroll_k=1, min_smem_kib=_BIG),
    _sparse("backward_kv", 256, 64, "more than 48 heads of a selection", num_warps=8, s=4, kv=2, dq=2, block_n=32, min_smem_kib=_BIG),
    _sparse("backward_q", 32, 64, "two stages and more", num_warps=5, num_stages=8),
    _sparse("backward_q", 64, 64, "queries outer: L2 decides; two CTAs an SM", num_warps=5, num_stages=8, min_ctas=2, min_smem_kib=_BIG, max_arch=90),
    _sparse("backward_q", 64, 64, "99 KiB; after 9.0", num_warps=5, num_stages=8),
    _sparse("backward_q", 96, 64, "99 KiB", num_warps=5, num_stages=8),
    _sparse("backward_q", 128, 64, "queries outer: L2 decides; two CTAs an SM", unroll_k=2, num_warps=5, num_stages=8, min_ctas=2, min_smem_kib=_HOPPER, max_arch=90),
    _sparse("backward_q", 128, 64, "163 and 99 KiB; after 9.0", num_warps=5, num_stages=8),
    _sparse("backward_q", 192, 64, "dQ takes 96 registers", num_warps=5, num_stages=8, block_n=32),
    _sparse("backward_q", 256, 64, "dQ takes 128 registers", num_warps=5, num_stages=8, pieces=2, unroll_k=2, block_n=32, min_smem_kib=_BIG),
    _sparse("double_backward_out", 32, 64, "16 rows a warp", num_warps=5, num_stages=8),
    _sparse("double_backward_out", 64, 64, "16 rows a warp", num_warps=5, num_stages=8),
    _sparse("double_backward_out", 96, 64, "16 rows a warp", num_warps=5, num_stages=8, block_n=32),
    _sparse("double_backward_out", 128, 64, "163 KiB", num_warps=5, num_stages=8, min_smem_kib=_BIG, max_arch=90),
    _sparse("double_backward_out", 128, 64, "99 KiB; after 9.0", num_warps=5, num_stages=8, block_n=32),
    _sparse("double_backward_out", 192, 64, "163 KiB", num_warps=5, num_stages=8, unroll_k=2, block_n=32, min_smem_kib=_BIG),
    _sparse("double_backward_out", 256, 64, "163 KiB", num_warps=5, num_stages=8, pieces=2, block_n=32, min_smem_kib=_BIG),
    _sparse("double_backward_q", 32, 64, "16 rows a warp", num_warps=5, num_stages=8),
    _sparse("double_backward_q", 64, 64, "16 rows a warp", num_warps=5, num_stages=8, pieces=2),
    _sparse("double_backward_q", 96, 64, "16 rows a warp", num_warps=5, num_stages=8, block_n=32),
    _sparse("double_backward_q", 128, 64, "163 KiB", num_warps=5, num_stages=8, block_n=32, min_smem_kib=_BIG),
    _sparse("double_backward_q", 128, 64, "99 KiB", num_warps=5, num_stages=8, block_n=32),
    _sparse("double_backward_q", 192, 64, "163 KiB", num_warps=5, num_stages=8, pieces=2, unroll_k=2, block_n=32, min_smem_kib=_BIG),
    _sparse("double_backward_q", 256, 64, "163 KiB", num_warps=5, num_stages=8, unroll_k=1, block_n=16, min_smem_kib=_BIG),
    _sparse("double_backward_kv", 32, 64, "eight warps", num_warps=8, s=4, kv=2, dq=2),
    _sparse("double_backward_kv", 64, 64, "eight warps", num_warps=8, s=4, kv=2, dq=2),
    _sparse("double_backward_kv", 96, 64, "163 KiB", num_warps=8, s=4, kv=2, dq=2, min_smem_kib=_BIG),
    _sparse("double_backward_kv", 96, 64, "99 KiB", num_warps=8, s=4, kv=2, dq=2, block_n=32),
    _sparse("double_backward_kv", 128, 64, "163 KiB", num_warps=8, s=4, kv=2, dq=2, min_smem_kib=_BIG),
    _sparse("double_backward_kv", 128, 64, "99 KiB", num_warps=8, s=4, kv=2, dq=2, block_n=32),
    _sparse("double_backward_kv", 192, 64, "227 KiB", num_warps=8, s=4, kv=2, dq=2, min_smem_kib=_HOPPER),
    _sparse("double_backward_kv", 256, 32, "gK and gV take 128 registers", num_warps=8, s=2, kv=2, dq=2, min_smem_kib=_HOPPER),
    _sparse("double_backward_kv", 256, 64, "163 KiB", num_warps=8, s=4, kv=2, dq=2, block_n=32, min_smem_kib=_BIG),
    *(Variant(f"{stem}_numba", stem, "any dtype, any GPU, and the simulator", "numba") for stem in _STEMS + SPARSE_STEMS),
)
# fmt: on


def tile_width(head_dim: int) -> int:
    """The native head_dim whose tile holds ``head_dim``; the rest is filled with zeros on chip."""
    return next(width for width in HEAD_DIMS if width >= head_dim)


def tile_widths(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The tiles' widths for Q and K, and for V and O.

    Beside 128 or more both are multiples of 64: such rows cut a product into up to four columns.
    """
    d, dv = tile_width(head_dim), tile_width(head_dim_v)
    step = 64 if max(d, dv) >= 128 else 32
    return -(-d // step) * step, -(-dv // step) * step


Blocks = tuple[int, int]  # query heads that share a selection, keys of a block


def smem_bytes(
    variant: Variant, head_dim: int, head_dim_v: int, atomic: bool, blocks: Blocks = NO_BLOCKS
) -> int:
    """Dynamic shared memory of a row for tiles of these widths; CUDA checks it by static_assert.

    ``blocks`` are (query heads that share a selection, keys of a block) of a sparse row.
    """
    if variant.stem in SPARSE_STEMS:
        return _sparse_smem_bytes(variant, head_dim, head_dim_v, blocks)
    m, n, stages = variant.block_m, variant.block_n, variant.num_stages
    d, dv = head_dim, head_dim_v
    piece = dv // variant.pieces
    elements = {
        "forward": m * max(d, dv) + n * (d + dv),
        "backward_kv": (n + stages * m) * (d + dv) + 2 * m * n + stages * 4 * m,
        "backward_q": (m + stages * n) * (d + dv) + (2 * m * n if atomic else 0),
        "backward_postprocess": m * d,
        "backward_preprocess": 0,
        "jvp": 2 * m * max(d, piece) + 2 * n * (d + piece),
        "double_backward_out": max(2 * m * d, m * dv) + 2 * n * (d + dv),
        "double_backward_kv": (2 * n + m) * (d + dv) + m * d + 3 * m * n + 8 * m,
        "double_backward_q": (m + 2 * n) * (d + dv) + m * d,
    }
    return 2 * elements[variant.stem]


def block_keys(variant: Variant, block_size: int) -> int:
    """Keys that a sparse row takes at once: a block, or a part of one that is too large for it."""
    return min(variant.block_n, block_size)


def largest_block(variant: Variant) -> int:
    """Keys of the largest block that a sparse row serves.

    With key blocks outer a block is two parts at most: two sums have no order that matters.
    """
    return min(128, 2 * variant.block_n) if variant.stem.endswith("_kv") else 128


def ring_stages(variant: Variant, head_dim: int, head_dim_v: int, blocks: Blocks) -> int:
    """Stages of a sparse row's ring: as many as fit its share of shared memory."""
    room = (variant.min_smem_kib or 99) * _KIB // variant.min_ctas
    fixed, stage = _ring_bytes(variant, head_dim, head_dim_v, blocks)
    room -= fixed + (_KIB if variant.min_ctas > 1 else 0)  # the driver keeps 1 KiB for each CTA
    return max(1, min(variant.num_stages, room // stage))


def _ring_bytes(variant: Variant, d: int, dv: int, blocks: Blocks) -> tuple[int, int]:
    """Bytes of the tiles of queries, and of a stage with its slots, barriers and queue entries.

    Queues are as long as there are stages, and one entry more.
    """
    m, n = variant.block_m, block_keys(variant, blocks[1])
    entry, items = 16 * (m // 16), m // max(blocks[0], 1)
    together = max(d, dv) if (d % 64 == 0) == (dv % 64 == 0) else d + dv
    rows, keys = {
        "sparse_forward": (together, d + dv),
        "sparse_backward_q": (d + dv, d + dv),
        "sparse_double_backward_out": (2 * d + dv, 2 * (d + dv)),
        "sparse_double_backward_q": (2 * d + dv, 2 * (d + dv)),
    }[variant.stem]
    return 2 * m * rows + entry, 2 * n * keys + 16 + 4 * items + entry


def _sparse_smem_bytes(variant: Variant, d: int, dv: int, blocks: Blocks) -> int:
    if variant.stem in _ANY_WIDTH:
        return 0
    m, n, stages = variant.block_m, block_keys(variant, blocks[1]), variant.num_stages
    items = m // max(blocks[0], 1)
    if variant.stem == "sparse_backward_kv":
        tiles = (n + stages * m) * (d + dv) + 2 * m * max(n, 32)
        return _multiple(2 * tiles + 4 * ((2 * stages + 4) * m + 3 * _multiple(2 * items, 4)), 128)
    if variant.stem == "sparse_double_backward_kv":
        tiles = (2 * n + m) * (d + dv) + m * d + 3 * m * max(n, 32)
        return _multiple(2 * tiles + 4 * (8 * m + 2 * _multiple(2 * items, 4)), 128)
    fixed, stage = _ring_bytes(variant, d, dv, blocks)
    return _multiple(fixed + ring_stages(variant, d, dv, blocks) * stage, 128)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def smem_limit(arch: int) -> int:
    """Bytes of shared memory that one CTA may have on an arch; the least where it is unknown."""
    return _SMEM_LIMITS.get(arch, 99) * _KIB


def serves(row: Variant, arch: int) -> bool:
    """Whether a row of the CUDA families is meant for GPUs of an arch, at its own head_dim."""
    return arch >= 80 and _fits(row, row.head_dim, row.head_dim, arch, (16, 64))


def _fits(row: Variant, d: int, dv: int, arch: int, blocks: Blocks = NO_BLOCKS) -> bool:
    if row.stem in SPARSE_STEMS and row.stem not in _ANY_WIDTH:
        group, block_size = blocks
        if group > row.block_m or block_size > largest_block(row):
            return False
    need = max(smem_bytes(row, d, dv, True, blocks), row.min_smem_kib * _KIB)
    return need <= smem_limit(arch) and arch <= row.max_arch


def select(
    stem: str,
    problem: Problem,
    *,
    backend: str | None = None,
    by_size: bool = False,
    selection: Selection | None = None,
) -> Variant:
    """The row that computes ``problem`` with kernel ``stem``.

    ``backend`` "cuda" or "numba" forces a family; None takes CUDA where a row serves the dtype and
    arch. ``by_size`` allows rows for small problems: without it a sequence is computed by the same
    row, and to the same bits, alone and in a batch. Sparse stems take their ``selection``.
    RAWATTN_VARIANT names rows to prefer. Raises
    ValueError when no row of a forced family serves.
    """
    preferred = os.environ.get("RAWATTN_VARIANT", "")
    widths = problem.head_dim, problem.head_dim_v
    queries, keys = problem.total_q * problem.num_heads_q, problem.total_k * problem.num_heads_kv
    size = (queries, keys) if by_size else None
    blocks = selection.blocks(problem) if selection else NO_BLOCKS
    return _select(stem, problem.dtype, *widths, problem.arch, backend, preferred, size, blocks)


@lru_cache(maxsize=4096)
def _select(
    stem: str,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    arch: int,
    backend: str | None,
    preferred: str,
    size: tuple[int, int] | None,
    blocks: Blocks,
) -> Variant:
    d, dv = tile_widths(head_dim, head_dim_v)
    raw = dtype in ("float16", "bfloat16") and arch >= 80
    if backend == "cuda" and not raw:
        raise ValueError(
            f"backend='cuda' computes float16 and bfloat16 on GPUs from compute capability 8.0; "
            f"given {dtype} on {arch / 10:.1f}. Use backend=None or backend='numba'."
        )
    rows = [row for row in TABLE if row.stem == stem]
    twins = [row for row in rows if row.family == "numba"] if backend != "cuda" else []
    kernels = [row for row in rows if row.family != "numba" and _width_fits(row, max(d, dv))]
    able = (
        [row for row in kernels if _fits(row, d, dv, arch, blocks)]
        if raw and backend != "numba"
        else []
    )
    able += twins
    if not able:
        sparse = f", {blocks[0]} heads of a selection and blocks of {blocks[1]} keys"
        raise ValueError(
            f"no CUDA row of {stem} fits head_dim {head_dim} and head_dim_v {head_dim_v}"
            f"{sparse if blocks != NO_BLOCKS else ''} into the {smem_limit(arch) // _KIB} KiB of "
            f"shared memory of compute capability {arch / 10:.1f}. Use backend=None or "
            f"backend='numba'."
        )
    names = [name.strip() for name in preferred.split(",")]
    asked = [row for row in able if row.name in names]
    suited = [row for row in able if not row.max_ctas or _is_small(row, size)]
    widest = [row for row in reversed(able) if row.max_ctas]  # before a twin, if nothing else fits
    raw_suited = [row for row in suited if row.family != "numba"]
    return (asked + raw_suited + widest + suited)[0]


def _is_small(row: Variant, size: tuple[int, int] | None) -> bool:
    """Whether the grid for (queries, keys) of all heads is one that the row is meant for."""
    if size is None:
        return False
    keys_outer = row.stem.endswith("_kv")
    ctas = size[1] // row.block_n if keys_outer else size[0] // row.block_m
    return ctas <= row.max_ctas


def _width_fits(row: Variant, width: int) -> bool:
    return row.stem in _ANY_WIDTH or row.head_dim == width


def method_of(problem: Problem, method: str | None, deterministic: bool) -> str:
    """How the backward accumulates: the caller's choice, else the fastest that is allowed."""
    if deterministic:
        return "two_pass"
    return method or "atomic_dq"
