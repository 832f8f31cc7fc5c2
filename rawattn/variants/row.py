"""What a row of the table consists of: a kernel, when it is chosen, its compile-time choices."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
HALF = ("float16", "bfloat16")
KIB = 1024
COUNTERS = 65536  # of a kernel whose CTAs share their work: more than launches run at once
SHORT = 64  # queries of a sequence, on average, that rows for short ones are for
SMALLEST = 99  # KiB of shared memory that a CTA may have on every GPU from 8.0 on
# KiB that a CTA may have (CUDA C++ programming guide, table of compute capabilities)
_SMEM_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}

Blocks = tuple[int, int]  # query heads that share a selection, keys of a block
NO_BLOCKS = (0, 0)  # of dense attention


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is true of a kernel on every row, and stands nowhere else.

    ``outer``: the side that a CTA keeps while it walks along the other, "queries" or "keys".
    ``sparse``: of block-sparse attention. ``any_width``: one row serves every head_dim, and all
    blocks. ``accumulates``: there is an atomic form, which adds the other side's gradients.
    ``directed``: it reads the parts of a direction (tq, tk, tv) that are there. ``ring``: a
    producer warp fills a ring of stages, as many as fit.
    """

    stem: str
    outer: str = "queries"
    sparse: bool = False
    any_width: bool = False
    accumulates: bool = False
    directed: bool = False
    ring: bool = False


@dataclass(frozen=True, slots=True)
class When:
    """The problems and GPUs that a row is for.

    ``archs``: only these compute capabilities (90 is 9.0). ``max_arch``: not on newer ones.
    ``min_smem_kib``: not where a CTA may have less shared memory. ``bounded``: only with a bound
    on the keys that a query sees (causal, a window), or, False, only without. ``max_ctas``: only
    for grids of at most so many CTAs for each multiprocessor, and for callers that do not need the
    same row for every batch (``select(by_size=True)``); and on GPUs where no wider row fits.
    ``softcap``: only with one, or, False, only without.
    ``short``: only for batches of SHORT queries a sequence or fewer, on average. Such a row gives a
    sequence the bits of the row that serves the others: same block_n, same order of sums.
    """

    archs: tuple[int, ...] | None = None
    max_arch: int = 999
    min_smem_kib: int = 0
    bounded: bool | None = None
    softcap: bool | None = None
    max_ctas: int = 0
    short: bool = False
    dtypes: tuple[str, ...] = HALF

    def on(self, arch: int) -> bool:
        """Whether the row is meant for GPUs of this compute capability."""
        return (
            80 <= arch <= self.max_arch
            and (self.archs is None or arch in self.archs)
            and self.min_smem_kib * KIB <= smem_limit(arch)
        )


class Tiles(NamedTuple):
    """What a kernel is specialised to beside its row, as far as shared memory depends on it."""

    head_dim: int  # native, as wide as the tile
    head_dim_v: int
    atomic: bool = False
    blocks: Blocks = NO_BLOCKS
    scaled: bool = False  # blocks have factors


@dataclass(frozen=True, slots=True)
class Sm80:
    """The choices of a kernel of kernels_cu/sm80/, each the constant of its name in capitals.

    ``warps_*``: warps along the rows of a product (S: queries, kv: keys, dq: queries), the rest lie
    along its columns. ``pieces``: a product is made in so many parts, to save registers.
    ``unroll_k``: steps of a product that the compiler may look ahead. ``min_ctas``: CTAs an SM that
    registers must leave room for. A kernel reads those that it has a use for.
    """

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

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    @property
    def cluster(self) -> int:
        """CTAs that work on one tile, as in Sm90."""
        return 1

    def constants(self) -> dict[str, int | bool]:
        return {name.upper(): value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Sm90:
    """The choices of a kernel of kernels_cu/sm90/: a producer warpgroup and ``consumers`` others.

    ``registers``: of a thread of the producer and of the consumers. ``pingpong``: the consumers
    take turns, one's softmax beside the other's products. ``num_stages``: tiles that are there at
    once of what a CTA walks over, K and V in the forward, Q and dO in the backward; ``q_stages``:
    of Q where it has its own; ``kv_stages``: of K and V in the backward. ``cluster``: CTAs that
    work on one tile. ``v_steps``: 16 columns each of V, and then of K where both share keys, which
    consumers keep in registers.
    ``min_ctas`` and ``pieces``: as of Sm80.
    """

    block_m: int
    block_n: int
    consumers: int = 2
    num_stages: int = 2
    q_stages: int = 1
    cluster: int = 1
    kv_stages: int = 1
    v_steps: int = 0
    min_ctas: int = 1
    registers: tuple[int, int] = (40, 232)
    pingpong: bool = False
    pieces: int = 1

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def entry_registers(self) -> int:
        """Of a thread when a kernel begins; what warpgroups hold later may not be more together."""
        return 65536 // (self.threads * self.min_ctas) // 8 * 8

    def constants(self) -> dict[str, int | bool]:
        given: dict[str, int | bool] = {n.upper(): v for n, v in asdict(self).items()}
        del given["REGISTERS"]
        producer, consumer = self.registers
        given["NUM_WARPS"] = 4 * (1 + self.consumers)
        return given | {"PRODUCER_REGISTERS": producer, "CONSUMER_REGISTERS": consumer}


Cfg = Sm80 | Sm90


def _no_smem(cfg: Cfg, tiles: Tiles) -> int:
    return 0


def _as_it_is(row: "Row", tiles: Tiles) -> Cfg:
    return row.cfg


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """One row: a kernel with its choices. Rows are compared by identity.

    ``head_dim``: the widest tile that the row serves. ``why``: a because. ``workspace`` names the
    layout of the float32 sums that the row adds into or reads: rows of different layouts never meet
    in one call. ``fit`` gives ``cfg`` as it is for tiles, ``smem`` the bytes of dynamic shared
    memory that such a cfg takes (a static_assert compares), ``file`` the source where it is not
    named as its kernel. ``cfg`` of a Numba twin is never read.
    """

    name: str
    kernel: Kernel
    why: str
    family: str
    head_dim: int = 256
    when: When = When()
    cfg: Cfg = Sm80()
    workspace: str = ""
    fit: Callable[["Row", Tiles], Cfg] = _as_it_is
    smem: Callable[..., int] = _no_smem
    file: str = ""

    @property
    def in_order(self) -> bool:
        """Whether the form that is not atomic adds to dQ as the atomic one does, but in order."""
        return self.family == "sm90" and self.kernel.accumulates

    @property
    def source(self) -> str:
        """The name of the file that holds the kernel, which mostly is that of the kernel."""
        return self.file or self.stem

    @property
    def stem(self) -> str:
        """The kernel's name."""
        return self.kernel.stem

    @property
    def target_suffix(self) -> str:
        """What the name of the architecture ends with: wgmma and setmaxnreg are only in sm_90a."""
        return "a" if self.family == "sm90" else ""

    def smem_bytes(self, tiles: Tiles) -> int:
        """Dynamic shared memory for these tiles."""
        return self.smem(self.fit(self, tiles), tiles)

    def fits(self, tiles: Tiles, arch: int) -> bool:
        """Whether GPUs of an arch run the row with these tiles."""
        if self.kernel.sparse and not self.kernel.any_width:
            group, block_size = tiles.blocks
            if group > self.cfg.block_m or block_size > largest_block(self):
                return False
        return self.when.on(arch) and self.smem_bytes(tiles) <= smem_limit(arch)


def twin(kernel: Kernel) -> Row:
    """The Numba row of a kernel."""
    why = "the raw kernels lack its dtype, its GPU or its widths; and the simulator runs it"
    dtypes = (*HALF, "float32", "float64")
    return Row(
        f"{kernel.stem}_numba", kernel, why, "numba", when=When(dtypes=dtypes), workspace="rows"
    )


def smem_limit(arch: int) -> int:
    """Bytes of shared memory that one CTA may have on an arch; the least where it is unknown."""
    return _SMEM_KIB.get(arch, SMALLEST) * KIB


def serves(row: Row, arch: int) -> bool:
    """Whether a row of the CUDA families is meant for GPUs of an arch, at its own head_dim."""
    return row.fits(Tiles(row.head_dim, row.head_dim, True, (16, 64)), arch)


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


def panel_of(width: int) -> int:
    """Columns of a panel of a tile, see kernels_cu/base/layout.cuh."""
    return 64 if width % 64 == 0 else 32


def block_keys(row: Row, block_size: int) -> int:
    """Keys that a sparse row takes at once: a block, or a part of one that is too large for it."""
    return min(row.cfg.block_n, block_size)


def largest_block(row: Row) -> int:
    """Keys of the largest block that a sparse row serves.

    With key blocks outer a block is two parts at most: two sums have no order that matters.
    """
    return min(128, 2 * row.cfg.block_n) if row.kernel.outer == "keys" else 128
