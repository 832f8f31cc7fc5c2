"""The choice of a row for a problem."""

from collections import Counter
from functools import lru_cache

from rawattn import env
from rawattn.problem import Problem, Selection
from rawattn.variants.row import (
    HALF,
    KIB,
    NO_BLOCKS,
    SHORT,
    Row,
    Tiles,
    smem_limit,
    tile_widths,
    twin,
)
from rawattn.variants.sm80 import SM80
from rawattn.variants.sm90 import SM90

_CUDA = (*SM90, *SM80)
TABLE: tuple[Row, ...] = (*_CUDA, *map(twin, dict.fromkeys(row.kernel for row in _CUDA)))
if _TWICE := [name for name, n in Counter(row.name for row in TABLE).items() if n > 1]:
    raise ValueError(f"rows of one name: {', '.join(_TWICE)}. Give one of each a tag=.")


def select(
    stem: str,
    problem: Problem,
    *,
    backend: str | None = None,
    by_size: bool = False,
    selection: Selection | None = None,
    workspace: str | None = None,
) -> Row:
    """The row that computes ``problem`` with kernel ``stem``: the first of the table that is able.

    ``backend`` "cuda" or "numba" forces a family; None takes CUDA where a row serves the dtype and
    arch. ``by_size`` allows rows for small grids: without it a sequence is computed by the same
    row, and to the same bits, alone and in a batch. Sparse stems take their ``selection``.
    ``workspace`` asks for a row that reads the sums of a row with that ``Row.workspace``.
    RAWATTN_VARIANT names rows to prefer. Raises ValueError when no row of a forced family serves.
    """
    preferred = env.value(env.VARIANT)
    return _of_problem(stem, problem, backend, preferred, by_size, selection, workspace)


@lru_cache(maxsize=4096)
def _of_problem(
    stem: str,
    problem: Problem,
    backend: str | None,
    preferred: str,
    by_size: bool,
    selection: Selection | None,
    workspace: str | None,
) -> Row:
    size = None
    if by_size:
        queries = problem.total_q * problem.num_heads_q
        size = (queries, problem.total_k * problem.num_heads_kv, problem.num_sms)
    return _select(
        TABLE,
        stem,
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        problem.window_left >= 0 or problem.window_right >= 0,
        problem.arch,
        backend,
        preferred,
        size,
        problem.total_q <= SHORT * problem.batch,
        problem.softcap > 0,
        selection.blocks(problem) if selection else NO_BLOCKS,
        workspace,
    )


@lru_cache(maxsize=4096)
def _select(
    table: tuple[Row, ...],
    stem: str,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    bounded: bool,
    arch: int,
    backend: str | None,
    preferred: str,
    size: tuple[int, int, int] | None,
    short: bool,
    softcap: bool,
    blocks: tuple[int, int],
    workspace: str | None,
) -> Row:
    raw = dtype in HALF and arch >= 80
    if backend == "cuda" and not raw:
        raise ValueError(
            f"backend='cuda' computes float16 and bfloat16 on GPUs from compute capability 8.0; "
            f"given {dtype} on {arch / 10:.1f}. Use backend=None or backend='numba'."
        )
    d, dv = tile_widths(head_dim, head_dim_v)
    tiles = Tiles(d, dv, True, blocks)

    def able(row: Row) -> bool:
        if row.stem != stem or dtype not in row.when.dtypes:
            return False
        if workspace is not None and row.workspace != workspace:
            return False
        if row.family == "numba":
            return backend != "cuda"
        return (
            raw
            and backend != "numba"
            and row.when.bounded in (None, bounded)
            and row.when.short <= short
            and row.when.softcap in (None, softcap)
            and (row.kernel.any_width or row.head_dim == max(d, dv))
            and row.fits(tiles, arch)
        )

    rows = [row for row in table if able(row)]
    if not rows:
        sparse = f", {blocks[0]} heads of a selection and blocks of {blocks[1]} keys"
        sums = f" and sums kept as {workspace!r}" if workspace else ""
        raise ValueError(
            f"no {'Numba' if backend == 'numba' else 'CUDA'} row of {stem} fits head_dim "
            f"{head_dim} and head_dim_v {head_dim_v}{sparse if blocks != NO_BLOCKS else ''}{sums} "
            f"into the {smem_limit(arch) // KIB} KiB of shared memory of compute capability "
            f"{arch / 10:.1f}. Use backend=None or backend='numba'."
        )
    names = names_in(preferred)
    asked = [row for row in rows if row.name in names]
    suited = [row for row in rows if not row.when.max_ctas or _is_small(row, size)]
    widest = [row for row in reversed(rows) if row.when.max_ctas]  # before a twin, if none is left
    raw_suited = [row for row in suited if row.family != "numba"]
    return (asked + raw_suited + widest + suited)[0]


def _is_small(row: Row, size: tuple[int, int, int] | None) -> bool:
    """Whether the grid for (queries, keys) of all heads on so many SMs is one the row is for."""
    if size is None:
        return False
    queries, keys, num_sms = size
    by_keys = row.kernel.outer == "keys"
    ctas = keys // row.cfg.block_n if by_keys else queries // row.cfg.block_m
    return ctas <= row.when.max_ctas * num_sms


def names_in(preferred: str) -> list[str]:
    """The names of rows that a value of RAWATTN_VARIANT has, be there such rows or not."""
    return [name.strip() for name in preferred.split(",") if name.strip()]
