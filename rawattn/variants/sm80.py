"""The kernels of kernels_cu/sm80/: their facts, their shared memory and their rows.

Of a kernel the first row that is able is taken, so the order of rows matters. Long, because a
kernel's facts, formula and rows are what an author adds and reads together.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from rawattn.variants.row import KIB, SMALLEST, Kernel, Row, Sm80, Tiles, When, block_keys

_BIG = 163  # KiB of shared memory: 8.0, 8.7, 9.0, 10.0, 10.3; the other GPUs from 8.6 on have 99
_HOPPER = 227  # KiB: 9.0, 10.0, 10.3
ALIGNMENT = 128  # bytes of a Tile (base/layout.cuh), so of every SmemPlan

FORWARD = Kernel("forward")
BACKWARD_PREPROCESS = Kernel("backward_preprocess", any_width=True)
BACKWARD_KV = Kernel("backward_kv", outer="keys", accumulates=True)
BACKWARD_Q = Kernel("backward_q", accumulates=True)
BACKWARD_SINKS = Kernel("backward_sinks", any_width=True)
BACKWARD_POSTPROCESS = Kernel("backward_postprocess", any_width=True)
JVP = Kernel("jvp", directed=True)
DOUBLE_OUT = Kernel("double_backward_out", directed=True)
DOUBLE_KV = Kernel("double_backward_kv", outer="keys", accumulates=True, directed=True)
DOUBLE_Q = Kernel("double_backward_q", directed=True)
BLOCK_LISTS = Kernel("block_lists", sparse=True, any_width=True)
BLOCK_OFFSETS = Kernel("block_offsets", sparse=True, any_width=True)
BLOCK_QUERIES = Kernel("block_queries", sparse=True, any_width=True)
BLOCK_ORDER = Kernel("block_order", sparse=True, any_width=True)
SPARSE_FORWARD = Kernel("sparse_forward", sparse=True, ring=True)
SPARSE_KV = Kernel("sparse_backward_kv", outer="keys", sparse=True, accumulates=True)
SPARSE_Q = Kernel("sparse_backward_q", sparse=True, ring=True)
SPARSE_POSTPROCESS = Kernel("sparse_postprocess", sparse=True, any_width=True)
SPARSE_DOUBLE_OUT = Kernel("sparse_double_backward_out", sparse=True, directed=True, ring=True)
SPARSE_DOUBLE_KV = Kernel("sparse_double_backward_kv", outer="keys", sparse=True, directed=True)
SPARSE_DOUBLE_Q = Kernel("sparse_double_backward_q", sparse=True, directed=True, ring=True)


# --- shared memory: bytes of a cfg that fits the tiles; static_asserts compare ------------------


def _forward_smem(c: Sm80, t: Tiles) -> int:
    d, dv = t.head_dim, t.head_dim_v
    return 2 * (c.block_m * max(d, dv) + c.block_n * (d + dv))


def _backward_kv_smem(c: Sm80, t: Tiles) -> int:
    m, n, stages = c.block_m, c.block_n, c.num_stages
    tiles = (n + stages * m) * (t.head_dim + t.head_dim_v)
    return 2 * (tiles + 2 * m * n + stages * 4 * m)


def _backward_q_smem(c: Sm80, t: Tiles) -> int:
    m, n = c.block_m, c.block_n
    tiles = (m + c.num_stages * n) * (t.head_dim + t.head_dim_v)
    return 2 * (tiles + (2 * m * n if t.atomic else 0))


def _postprocess_smem(c: Sm80, t: Tiles) -> int:
    return 2 * c.block_m * t.head_dim


def _jvp_smem(c: Sm80, t: Tiles) -> int:
    d, piece = t.head_dim, t.head_dim_v // c.pieces
    return 2 * (2 * c.block_m * max(d, piece) + 2 * c.block_n * (d + piece))


def _double_out_smem(c: Sm80, t: Tiles) -> int:
    m, d, dv = c.block_m, t.head_dim, t.head_dim_v
    return 2 * (max(2 * m * d, m * dv) + 2 * c.block_n * (d + dv))


def _double_kv_smem(c: Sm80, t: Tiles) -> int:
    m, n, d, dv = c.block_m, c.block_n, t.head_dim, t.head_dim_v
    return 2 * ((2 * n + m) * (d + dv) + m * d + 3 * m * n + 8 * m)


def _double_q_smem(c: Sm80, t: Tiles) -> int:
    d, dv = t.head_dim, t.head_dim_v
    return 2 * ((c.block_m + 2 * c.block_n) * (d + dv) + c.block_m * d)


def _sparse_kv_smem(c: Sm80, t: Tiles) -> int:
    m, n, stages = c.block_m, c.block_n, c.num_stages
    tiles = (n + stages * m) * (t.head_dim + t.head_dim_v) + 2 * m * max(n, 32)
    rest = (2 * stages + 4) * m + 3 * _multiple(2 * _items(c, t), 4)
    return _multiple(2 * tiles + 4 * rest, ALIGNMENT)


def _sparse_double_kv_smem(c: Sm80, t: Tiles) -> int:
    m, n, d, dv = c.block_m, c.block_n, t.head_dim, t.head_dim_v
    tiles = (2 * n + m) * (d + dv) + m * d + 3 * m * max(n, 32)
    return _multiple(2 * tiles + 4 * (8 * m + 2 * _multiple(2 * _items(c, t), 4)), ALIGNMENT)


def _items(c: Sm80, t: Tiles) -> int:
    """Items (a query token with a selection head) of a tile of queries."""
    return c.block_m // max(t.blocks[0], 1)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _own(row: Row) -> Sm80:
    return cast(Sm80, row.cfg)


def _of_blocks(row: Row, tiles: Tiles) -> Sm80:
    """``cfg`` for blocks: no more keys than a block has, and a CTA less where blocks have factors,
    since those take the registers that it leaves."""
    cfg = _own(row)
    min_ctas = max(1, cfg.min_ctas - tiles.scaled)
    return replace(cfg, block_n=block_keys(row, tiles.blocks[1]), min_ctas=min_ctas)


@dataclass(frozen=True)
class _Ring:
    """The shared memory of a kernel with a ring; ``columns`` are those that a row of queries and a
    row of keys take for (head_dim, head_dim_v). Not a closure: builds travel between processes."""

    columns: Callable[[int, int], tuple[int, int]]

    def _parts(self, c: Sm80, t: Tiles) -> tuple[int, int]:
        """Bytes of the tiles of queries, and of a stage with its slots, barriers and queue entries.

        Queues are as long as there are stages, and one entry more.
        """
        rows, keys = self.columns(t.head_dim, t.head_dim_v)
        entry = 16 * (c.block_m // 16)
        stage = 2 * c.block_n * keys + 16 + 4 * _items(c, t) + entry
        return 2 * c.block_m * rows + entry, stage

    def fit(self, row: Row, tiles: Tiles) -> Sm80:
        """As many stages as fit a CTA's share, of which the driver keeps 1 KiB beside others."""
        cfg, ctas = _of_blocks(row, tiles), _own(row).min_ctas
        fixed, stage = self._parts(cfg, tiles)
        room = (row.when.min_smem_kib or SMALLEST) * KIB // ctas - (KIB if ctas > 1 else 0)
        return replace(cfg, num_stages=max(1, min(cfg.num_stages, (room - fixed) // stage)))

    def smem(self, c: Sm80, t: Tiles) -> int:
        fixed, stage = self._parts(c, t)
        return _multiple(fixed + c.num_stages * stage, ALIGNMENT)


def _columns_forward(d: int, dv: int) -> tuple[int, int]:
    return _together(d, dv), d + dv


def _columns_q(d: int, dv: int) -> tuple[int, int]:
    return d + dv, d + dv


def _columns_second(d: int, dv: int) -> tuple[int, int]:
    return 2 * d + dv, 2 * (d + dv)


def _together(d: int, dv: int) -> int:
    """Columns of Q whose place O takes, where both are cut into panels of the same width."""
    return max(d, dv) if (d % 64 == 0) == (dv % 64 == 0) else d + dv


# --- the rows -----------------------------------------------------------------------------------

_WHEN = {"max_arch", "min_smem_kib", "max_ctas", "short", "softcap"}
_SHORT = {"s": "warps_m_s", "kv": "warps_n_kv", "dq": "warps_m_dq"}


def _row(name: str, kernel: Kernel, why: str, head_dim: int, fields: dict[str, Any]) -> Row:
    of_row = {key: fields.pop(key) for key in ("workspace", "fit", "smem") if key in fields}
    when = When(**{key: fields.pop(key) for key in _WHEN if key in fields})
    cfg = Sm80(**{_SHORT.get(key, key): value for key, value in fields.items()})
    return Row(name, kernel, why, "sm80", head_dim, when, cfg, **of_row)


def _any(kernel: Kernel, why: str, **fields: Any) -> Row:
    return _row(f"{kernel.stem}_sm80", kernel, why, 256, fields)


def _rows(kernel: Kernel, **of_all: Any) -> Callable[..., Row]:
    """What makes the rows of a kernel: (head_dim, block_m, block_n, why, ...), or without block_n
    for a sparse kernel, whose blocks are up to 64 keys; ``of_all`` have all rows in common. A
    ``tag`` at the end of its name tells a row from another of the same tiles."""

    def dense(head_dim: int, m: int, n: int, why: str, tag: str = "", **fields: Any) -> Row:
        tag = tag or "_short" * fields.get("short", False)
        name = f"{kernel.stem}_sm80_d{head_dim}_{m}x{n}{tag}"
        given = of_all | {"block_m": m, "block_n": n} | fields
        return _row(name, kernel, why, head_dim, given)

    def sparse(head_dim: int, m: int, why: str, **fields: Any) -> Row:
        name = f"{kernel.stem}_sm80_d{head_dim}_{m}_{fields.get('min_smem_kib', SMALLEST)}"
        return _row(name, kernel, why, head_dim, of_all | {"block_m": m} | fields)

    return sparse if kernel.sparse else dense


_forward = _rows(FORWARD, smem=_forward_smem, min_ctas=2)
_backward_kv = _rows(BACKWARD_KV, smem=_backward_kv_smem, workspace="units")
_backward_q = _rows(BACKWARD_Q, smem=_backward_q_smem, workspace="units")
_jvp = _rows(JVP, smem=_jvp_smem, min_ctas=2)
_double_out = _rows(DOUBLE_OUT, smem=_double_out_smem, min_ctas=2)
_double_kv = _rows(DOUBLE_KV, smem=_double_kv_smem, workspace="units")
_double_q = _rows(DOUBLE_Q, smem=_double_q_smem)


def _ring(columns: Callable[[int, int], tuple[int, int]]) -> dict[str, Callable[..., Any]]:
    ring = _Ring(columns)
    return {"fit": ring.fit, "smem": ring.smem}


_sparse_forward = _rows(SPARSE_FORWARD, num_warps=5, num_stages=8, **_ring(_columns_forward))
_sparse_kv = _rows(SPARSE_KV, num_warps=8, fit=_of_blocks, smem=_sparse_kv_smem, workspace="lanes")
_sparse_q = _rows(SPARSE_Q, num_warps=5, num_stages=8, **_ring(_columns_q))
_sparse_out = _rows(SPARSE_DOUBLE_OUT, num_warps=5, num_stages=8, **_ring(_columns_second))
_sparse_double_q = _rows(SPARSE_DOUBLE_Q, num_warps=5, num_stages=8, **_ring(_columns_second))
_sparse_double_kv = _rows(
    SPARSE_DOUBLE_KV, num_warps=8, fit=_of_blocks, smem=_sparse_double_kv_smem
)

_WIDEST = "the widest key tile that fits gives the least dQ traffic"
_LITTLE = "99 KiB hold no larger tiles"
_TWO_99 = "99 KiB still hold two CTAs of it"
_TWO_163 = "163 KiB still hold two CTAs of it"
_NEWER = "newer compilations of the rows above spill"
SOFTCAP = "a softcap takes registers too"
_SHARED = (
    "L2 traffic decides, so what a CTA's queries share is loaded once, by four producers an SM"
)
_L2 = "L2 traffic decides, so two CTAs an SM keep loads in flight"
_GATHERED = "products decide, since dK and dV stay in registers while queries are gathered"
_SHORT_ROWS = "a sequence of 64 queries leaves half of 128 rows empty"
_CROWD = "a tile of 64 rows holds what 48 do not: more than 48 heads of a selection"

# fmt: off
SM80: tuple[Row, ...] = (
    _forward(32, 128, 64, "exp2 is the bound, so Q stays in registers and shared memory is left alone", q_in_registers=True),
    _forward(64, 64, 64, f"{_SHORT_ROWS}, four CTAs of it an SM", softcap=False, min_ctas=4, short=True, min_smem_kib=_BIG, max_arch=90),
    _forward(64, 128, 64, "32 rows a warp halve the reads of K and V", q_in_registers=True, min_smem_kib=_BIG),
    _forward(64, 64, 64, "99 KiB hold more, smaller warps, which hide each other's waits", q_in_registers=True),
    _forward(96, 128, 64, "as head_dim 128", max_arch=90),
    _forward(96, 64, 64, _NEWER),
    _forward(128, 64, 64, f"{_SHORT_ROWS}, three CTAs of it an SM", min_ctas=3, short=True, min_smem_kib=_BIG, max_arch=90),
    _forward(128, 128, 64, "two CTAs of 255 registers hide each other's softmax", softcap=False, min_smem_kib=_BIG, max_arch=90),
    _forward(128, 64, 64, "99 KiB still hold two CTAs of it; and compiled for newer GPUs by CUDA 12.9 the row above spills"),
    _forward(192, 128, 64, "eight warps, because O takes 96 registers at 16 rows a warp", num_warps=8, min_ctas=1),
    _forward(256, 64, 64, "O takes 128 registers at 16 rows a warp; its 96 KiB fit every GPU", min_ctas=1),
    _any(BACKWARD_PREPROCESS, "memory is the bound, so a lane reads 16 bytes at once", num_warps=8),
    _backward_kv(32, 64, 128, "two CTAs an SM hide each other's waits", num_warps=4, s=2, kv=4, dq=2, num_stages=2, pieces=2),
    _backward_kv(64, 64, 96, "two CTAs an SM, with products of 32 x 48 a warp, reuse operands most", softcap=False, num_warps=4, s=2, kv=2, dq=2, min_smem_kib=_BIG),
    _backward_kv(64, 64, 128, "99 KiB hold one wide tile; pieces keep S and dP small", num_warps=4, s=2, kv=4, dq=2, num_stages=2, pieces=4),
    _backward_kv(96, 64, 128, _WIDEST, num_warps=8, s=2, kv=4, dq=4, num_stages=2, unroll_k=2),
    _backward_kv(96, 64, 64, _LITTLE, num_warps=8, s=4, kv=4, dq=4),
    _backward_kv(128, 64, 128, _WIDEST, num_warps=8, s=2, kv=4, dq=2, num_stages=2),
    _backward_kv(128, 64, 64, _LITTLE, num_warps=8, s=4, kv=4, dq=4),
    _backward_kv(192, 64, 64, "dK and dV take 96 registers a thread", num_warps=8, s=4, kv=2, dq=2),
    _backward_kv(192, 32, 32, _LITTLE, num_warps=4, s=2, kv=2, dq=2),
    _backward_kv(256, 64, 64, "dK and dV take 128 registers a thread", num_warps=8, s=4, kv=2, dq=2, unroll_k=2),
    _backward_kv(256, 32, 32, _LITTLE, num_warps=4, s=2, kv=2, dq=2, unroll_k=2),
    _backward_q(32, 128, 64, "16 rows a warp leave registers; K and V are prefetched", num_warps=8, kv=4, num_stages=2),
    _backward_q(64, 128, 64, "16 rows a warp leave registers; K and V are prefetched", num_warps=8, kv=4, num_stages=2),
    _backward_q(96, 64, 64, "dQ takes 48 registers at 16 rows a warp", num_warps=4, kv=4),
    _backward_q(128, 64, 64, "two CTAs an SM stand in for a second stage", num_warps=4, kv=2),
    _backward_q(192, 64, 32, "dQ takes 96 registers a thread", num_warps=4, kv=2),
    _backward_q(256, 64, 32, "dQ takes 128 registers a thread", num_warps=4, kv=2, pieces=2),
    _backward_q(256, 32, 32, _LITTLE, num_warps=2, kv=2, pieces=2),
    _any(BACKWARD_SINKS, "one order of a head's rows, so one CTA adds them up", num_warps=32),
    _any(BACKWARD_POSTPROCESS, "memory is the bound, so a warp takes one unit of 16 rows", smem=_postprocess_smem, workspace="units"),
    _jvp(32, 64, 64, "three CTAs an SM hide each other's softmax", min_ctas=3),
    _jvp(64, 64, 96, "few CTAs hide little of each other's waits, and wide key tiles meet at fewer barriers", softcap=False, unroll_k=2, max_ctas=2, max_arch=90),
    _jvp(64, 64, 64, "O and tO take 64 registers at 16 rows a warp"),
    _jvp(96, 64, 64, "O and tO take 96 registers at 16 rows a warp", softcap=False, max_arch=90),
    _jvp(96, 64, 32, f"{_NEWER}; and {SOFTCAP}"),
    _jvp(128, 64, 48, "O and tO take 128 registers at 16 rows a warp", softcap=False, unroll_k=8, min_smem_kib=_HOPPER, max_arch=90),
    _jvp(128, 64, 32, "163 KiB still hold two CTAs of it; and newer compilations of the row above spill", max_arch=103),
    _jvp(128, 64, 16, _NEWER),
    _jvp(192, 64, 48, "two CTAs share the columns of O and tO, which would take 192 registers", pieces=2, unroll_k=2, min_smem_kib=_BIG),
    _jvp(192, 64, 32, _LITTLE, min_ctas=1, pieces=2),
    _jvp(256, 64, 32, "two CTAs share the columns of O and tO, which would take 256 registers", min_ctas=1, pieces=2, min_smem_kib=_BIG),
    _jvp(256, 32, 32, _LITTLE, num_warps=2, min_ctas=1, pieces=2, unroll_k=2, max_arch=103),
    _jvp(256, 32, 16, _NEWER, num_warps=2, min_ctas=1, pieces=2, unroll_k=2),
    _double_out(32, 64, 64, "three CTAs an SM hide each other's waits", min_ctas=3),
    _double_out(64, 64, 96, "few CTAs of 128 rows would leave SMs idle; and newer compilations of those spill", max_ctas=2),
    _double_out(64, 128, 48, "32 rows a warp halve the reads of keys and values", softcap=False, max_arch=90),
    _double_out(96, 128, 32, "32 rows a warp halve the reads of keys and values", softcap=False, unroll_k=2, max_arch=90),
    _double_out(96, 64, 64, _NEWER),
    _double_out(128, 64, 64, "ddO takes 64 registers at 16 rows a warp", unroll_k=8, min_smem_kib=_HOPPER),
    _double_out(128, 64, 32, _TWO_163),
    _double_out(192, 64, 64, "ddO takes 96 registers a thread", min_ctas=1, min_smem_kib=_BIG),
    _double_out(192, 64, 32, _LITTLE, min_ctas=1),
    _double_out(256, 64, 48, "ddO takes 128 registers a thread", min_ctas=1, unroll_k=2, max_arch=90),
    _double_out(256, 32, 32, "99 KiB hold no larger tiles; and newer compilations of the row above spill", num_warps=2, min_ctas=1),
    _double_kv(32, 64, 128, "two CTAs an SM hide each other's waits", s=2, kv=4, dq=2, min_ctas=2, pieces=2, max_arch=90),
    _double_kv(32, 64, 64, _NEWER, s=2, kv=2, dq=2, min_ctas=2),
    _double_kv(64, 64, 64, "two CTAs an SM hide each other's waits", softcap=False, s=2, kv=2, dq=2, min_ctas=2),
    _double_kv(64, 64, 64, f"{SOFTCAP}, which pieces save", tag="_softcap", softcap=True, s=2, kv=2, dq=2, min_ctas=2, pieces=2),
    _double_kv(96, 64, 64, "two CTAs an SM hide each other's waits", s=2, kv=2, dq=2, min_ctas=2, pieces=2, unroll_k=2, min_smem_kib=_HOPPER),
    _double_kv(96, 32, 64, _TWO_163, s=2, kv=2, dq=2, min_ctas=2, pieces=2),
    _double_kv(128, 64, 32, "few CTAs leave SMs idle, so there are as many as can be; and 99 KiB hold no larger tiles", num_warps=8, s=4, kv=2, dq=2, unroll_k=8, max_ctas=1),
    _double_kv(128, 64, 64, "few CTAs leave SMs idle, so there are twice as many", num_warps=8, s=4, kv=2, dq=2, max_ctas=2, min_smem_kib=_BIG),
    _double_kv(128, 64, 128, _WIDEST, num_warps=8, s=2, kv=4, dq=2, pieces=2, unroll_k=2),
    _double_kv(192, 64, 64, "gK and gV take 96 registers a thread", num_warps=8, s=4, kv=2, dq=2),
    _double_kv(192, 32, 32, "163 KiB and 99 KiB hold no larger tiles", s=2, kv=2, dq=2),
    _double_kv(256, 32, 64, "gK and gV take 128 registers a thread", num_warps=8, s=2, kv=2, dq=2),
    _double_kv(256, 32, 32, "163 KiB hold no larger tiles, and 99 KiB none", s=2, kv=2, dq=2),
    _double_q(32, 64, 64, "16 rows a warp leave registers for a third CTA"),
    _double_q(64, 128, 32, "32 rows a warp halve the reads of keys; compiled for other GPUs than 9.0 it spills", min_ctas=2, min_smem_kib=_HOPPER, max_arch=90),
    _double_q(64, 64, 64, "16 rows a warp spill nowhere", min_ctas=2),
    _double_q(96, 64, 64, "gQ takes 48 registers at 16 rows a warp", min_ctas=2, unroll_k=2),
    _double_q(128, 64, 48, "gQ takes 64 registers at 16 rows a warp", min_ctas=2, unroll_k=2, min_smem_kib=_HOPPER),
    _double_q(128, 64, 32, _TWO_163, min_ctas=2),
    _double_q(192, 64, 48, "gQ takes 96 registers a thread", unroll_k=2),
    _double_q(192, 64, 16, _LITTLE),
    _double_q(256, 64, 32, "gQ takes 128 registers a thread", unroll_k=2, min_smem_kib=_HOPPER, max_arch=90),
    _double_q(256, 32, 16, "163 KiB and 99 KiB hold no larger tiles; and newer compilations of the row above spill", num_warps=2),
    _any(BLOCK_LISTS, "a warp ranks an item's blocks in registers", block_m=32, num_warps=4),
    _any(BLOCK_OFFSETS, "one atomic add serves 1024 lists", num_warps=32),
    _any(BLOCK_QUERIES, "atomic adds of integers are the bound", block_m=64, num_warps=8),
    _any(BLOCK_ORDER, "a warp orders a list in registers", num_warps=4),
    _any(SPARSE_POSTPROCESS, "memory is the bound, so a thread takes 16 columns", num_warps=8, workspace="lanes"),
    _sparse_forward(32, 48, _SHARED, num_warps=4, min_ctas=4, min_smem_kib=_BIG, max_arch=90),
    _sparse_forward(32, 64, f"{_CROWD}; and 99 KiB hold two CTAs"),
    _sparse_forward(64, 48, _SHARED, num_warps=4, min_ctas=4, min_smem_kib=_BIG, max_arch=90),
    _sparse_forward(64, 64, _CROWD, min_ctas=3, min_smem_kib=_BIG, max_arch=90),
    _sparse_forward(64, 64, "one CTA spills nowhere and takes all of 99 KiB"),
    _sparse_forward(96, 64, _L2, min_ctas=2, min_smem_kib=_BIG, max_arch=90),
    _sparse_forward(96, 64, "one CTA spills nowhere and takes all of 99 KiB"),
    _sparse_forward(128, 64, _L2, min_ctas=2, min_smem_kib=_HOPPER, max_arch=90),
    _sparse_forward(128, 64, "one CTA spills nowhere and takes all of 99 KiB"),
    _sparse_forward(192, 64, "O takes 96 registers a thread", pieces=2, unroll_k=2),
    _sparse_forward(256, 64, "O takes 128 registers a thread", pieces=2, block_n=32),
    _sparse_kv(32, 128, _GATHERED, s=4, kv=2, dq=4, num_stages=2),
    _sparse_kv(64, 64, f"{_GATHERED}; three CTAs an SM hide the gathers", num_warps=4, s=2, kv=2, dq=2, min_ctas=3, unroll_k=2, min_smem_kib=_HOPPER),
    _sparse_kv(64, 64, "163 KiB hold no third CTA", num_warps=4, s=2, kv=2, dq=2),
    _sparse_kv(96, 64, _LITTLE, s=4, kv=2, dq=2),
    _sparse_kv(128, 128, f"{_GATHERED}; a second stage hides the gathers", s=4, kv=2, dq=4, num_stages=2, unroll_k=8, min_smem_kib=_HOPPER),
    _sparse_kv(128, 64, _LITTLE, s=4, kv=2, dq=2),
    _sparse_kv(192, 64, "dK and dV take 96 registers a thread", s=4, kv=2, dq=2, unroll_k=2, min_smem_kib=_BIG),
    _sparse_kv(192, 64, "99 KiB hold 32 keys at once", s=4, kv=2, dq=2, block_n=32),
    _sparse_kv(256, 48, "163 KiB hold no more queries beside 64 keys", s=3, kv=2, dq=1, unroll_k=1, min_smem_kib=_BIG),
    _sparse_kv(256, 64, _CROWD, s=4, kv=2, dq=2, block_n=32, min_smem_kib=_BIG),
    _sparse_q(32, 64, "99 KiB hold two stages and more"),
    _sparse_q(64, 64, _L2, min_ctas=2, min_smem_kib=_BIG, max_arch=90),
    _sparse_q(64, 64, "one CTA spills nowhere and takes all of 99 KiB"),
    _sparse_q(96, 64, "one CTA spills nowhere and takes all of 99 KiB"),
    _sparse_q(128, 64, _L2, unroll_k=2, min_ctas=2, min_smem_kib=_HOPPER, max_arch=90),
    _sparse_q(128, 64, "one CTA spills nowhere and takes all of 99 KiB"),
    _sparse_q(192, 64, "dQ takes 96 registers a thread", block_n=32),
    _sparse_q(256, 64, "dQ takes 128 registers a thread", pieces=2, unroll_k=2, block_n=32, min_smem_kib=_BIG),
    _sparse_out(32, 64, "16 rows a warp leave registers for ddO and its tangent"),
    _sparse_out(64, 64, "16 rows a warp leave registers for ddO and its tangent"),
    _sparse_out(96, 64, "32 keys at once leave room for a second stage", block_n=32),
    _sparse_out(128, 64, "163 KiB hold whole blocks of 64 keys", min_smem_kib=_BIG, max_arch=90),
    _sparse_out(128, 64, "99 KiB hold 32 keys at once; and newer compilations of the row above spill", block_n=32),
    _sparse_out(192, 64, "ddO takes 96 registers a thread", unroll_k=2, block_n=32, min_smem_kib=_BIG, max_arch=90),
    _sparse_out(192, 64, _NEWER, unroll_k=1, block_n=32, min_smem_kib=_HOPPER),
    _sparse_out(256, 64, "ddO takes 128 registers a thread", pieces=2, block_n=32, min_smem_kib=_BIG),
    _sparse_double_q(32, 64, "16 rows a warp leave registers for gQ"),
    _sparse_double_q(64, 64, "16 rows a warp leave registers for gQ", pieces=2),
    _sparse_double_q(96, 64, "32 keys at once leave room for a second stage", block_n=32),
    _sparse_double_q(128, 64, "163 KiB hold more stages of 32 keys", block_n=32, min_smem_kib=_BIG),
    _sparse_double_q(128, 64, "99 KiB hold one stage of 32 keys", block_n=32),
    _sparse_double_q(192, 64, "gQ takes 96 registers a thread", pieces=2, unroll_k=2, block_n=32, min_smem_kib=_BIG),
    _sparse_double_q(256, 64, "gQ takes 128 registers a thread", unroll_k=1, block_n=16, min_smem_kib=_BIG),
    _sparse_double_kv(32, 64, "eight warps share gK and gV", s=4, kv=2, dq=2),
    _sparse_double_kv(64, 64, "eight warps share gK and gV", s=4, kv=2, dq=2),
    _sparse_double_kv(96, 64, "163 KiB hold whole blocks of 64 keys", s=4, kv=2, dq=2, min_smem_kib=_BIG),
    _sparse_double_kv(96, 64, "99 KiB hold 32 keys at once", s=4, kv=2, dq=2, block_n=32),
    _sparse_double_kv(128, 64, "163 KiB hold whole blocks of 64 keys", s=4, kv=2, dq=2, min_smem_kib=_BIG),
    _sparse_double_kv(128, 64, "99 KiB hold 32 keys at once", s=4, kv=2, dq=2, block_n=32),
    _sparse_double_kv(192, 64, "227 KiB hold whole blocks of 64 keys", s=4, kv=2, dq=2, min_smem_kib=_HOPPER),
    _sparse_double_kv(256, 32, "gK and gV take 128 registers a thread, which 32 queries leave", s=2, kv=2, dq=2, min_smem_kib=_HOPPER),
    _sparse_double_kv(256, 64, "163 KiB hold 32 keys at once", s=4, kv=2, dq=2, block_n=32, min_smem_kib=_BIG),
)
# fmt: on
