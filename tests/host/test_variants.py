"""The table of kernel variants: every CUDA row compiles cleanly, every problem finds a row."""

import re
from dataclasses import replace
from itertools import product
from zlib import crc32

import pytest

from rawattn import jit, variants
from rawattn.build import ARCHS, Build
from rawattn.check.compiled import builds
from rawattn.ops.arguments import own_first
from rawattn.ops.workspaces import accum_shape
from rawattn.problem import Problem, Selection, default_chunk
from rawattn.variants import (
    TABLE,
    Row,
    Tiles,
    choice,
    select,
    serves,
    smem_limit,
    tile_width,
    tile_widths,
)
from rawattn.variants.row import Sm90, When
from rawattn.variants.sm80 import FORWARD

STEMS = (
    *("forward", "backward_preprocess", "backward_kv", "backward_q", "backward_postprocess"),
    "backward_sinks",
    *("jvp", "double_backward_out", "double_backward_kv", "double_backward_q"),
)
STEMS_SM90 = {row.stem for row in TABLE if row.family == "sm90"}
SPARSE_STEMS = tuple(sorted({row.stem for row in TABLE if row.kernel.sparse}))
CUDA_ROWS = [row for row in TABLE if row.family != "numba"]
# KiB of shared memory of an SM, of which one CTA may have all but one; 99 where it is unknown
LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 110: 99, 120: 99, 121: 99}
HEAD_DIMS = range(8, 257, 8)


def problem(
    dtype: str = "bfloat16",
    head_dim: int = 128,
    head_dim_v: int = 128,
    arch: int = 90,
    tiles: int = 4,
) -> Problem:
    """``tiles``: 64 queries and 64 keys each, over all heads."""
    tokens, dims = 64 * tiles, (head_dim, head_dim_v)
    return Problem(dtype, 2, tokens, tokens, 1, 1, *dims, -1, 0, 0.125, arch, 0)


def sparse(posed: Problem, group: int, block_size: int) -> tuple[Problem, Selection]:
    """The same problem with ``group`` query heads that share a selection."""
    selection = Selection(1, 4, block_size, own=True, chunk=256)
    return replace(posed, num_heads_q=group), selection


@pytest.fixture(autouse=True)
def no_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAWATTN_VARIANT", raising=False)


# --- every row compiles ------------------------------------------------------------------------


def faults(row: Row, arch: str, build: Build) -> list[str]:
    """What is wrong with one specialisation of a row on an arch."""
    compiled = jit.compile_build(build, arch)
    found = list(compiled.warnings)
    if compiled.spill_bytes:
        found.append(f"spills {compiled.spill_bytes} bytes")
    if " 0 bytes stack frame" not in compiled.log:
        found.append("keeps an array in local memory")
    if compiled.smem_bytes > LIMITS[int(arch.removeprefix("sm_"))] * 1024:
        found.append(f"takes {compiled.smem_bytes} bytes of shared memory")
    return [f"{row.name} {arch} {build}: {fault}" for fault in found]


@pytest.fixture
def nvrtc() -> None:
    pytest.importorskip("cuda.core")


@pytest.mark.parametrize(
    "row", {row.stem: row for row in CUDA_ROWS}.values(), ids=lambda row: row.name
)
def test_kernel_compiles_cleanly_in_one_form(row: Row, nvrtc: None) -> None:
    """On 9.0, the last row of each; the NVRTC of 12.9 is another environment's (extra cuda12)."""
    forms = builds(row)
    assert faults(row, "sm_90", forms[CUDA_ROWS.index(row) % len(forms)]) == []


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("row", CUDA_ROWS, ids=lambda row: row.name)
def test_row_compiles_cleanly_wherever_it_serves(row: Row, arch: str, nvrtc: None) -> None:
    if not serves(row, int(arch.removeprefix("sm_"))):
        pytest.skip("the row is for other GPUs")
    forms = builds(row)
    if arch != "sm_90":  # one of them, whatever other rows there are: forms differ less than archs
        # Of those with a mask under a softcap: without one rows of sm80 spill on Blackwell, as
        # jvp_sm80_d32_64x64 does 88 bytes on sm_120. To be mended on such a card.
        forms = forms[:4]
        forms = [forms[crc32(f"{row.name} {arch}".encode()) % len(forms)]]
    assert [fault for build in forms for fault in faults(row, arch, build)] == []


def test_the_archs_that_are_compiled() -> None:
    assert set(ARCHS) == {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"}


# --- the rows ----------------------------------------------------------------------------------


def test_names_are_unique_and_fit_a_list() -> None:
    names = [row.name for row in TABLE]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_row_says_what_it_is_and_why(row: Row) -> None:
    assert not re.fullmatch(r"(\d+ KiB|after \d\.\d|and|;|,|\s)*", row.why), "a because"
    assert row.stem in STEMS + SPARSE_STEMS and row.name.startswith(row.stem)
    assert row.family in ("sm90", "sm80", "numba") and row.family in row.name
    assert row.head_dim in variants.HEAD_DIMS


@pytest.mark.parametrize("row", CUDA_ROWS, ids=lambda row: row.name)
def test_row_fits_a_gpu_and_its_ctas_fit_together(row: Row) -> None:
    archs = [arch for arch in LIMITS if serves(row, arch)]
    assert archs, "no GPU can hold the row"
    kib = 1024
    for arch in archs:
        need = row.smem_bytes(Tiles(row.head_dim, row.head_dim, False, (16, 64)))
        assert need <= smem_limit(arch)
    if row.family == "sm90":  # else setmaxnreg waits for ever
        producer, consumer = row.cfg.registers
        held = producer + row.cfg.consumers * consumer
        assert held <= (1 + row.cfg.consumers) * row.cfg.entry_registers
    # an SM has one KiB more than one CTA may have, and each CTA takes one KiB of its own
    assert any(row.cfg.min_ctas * (need + kib) <= smem_limit(arch) + kib for arch in archs)


@pytest.mark.parametrize("row", CUDA_ROWS, ids=lambda row: row.name)
def test_row_is_of_use_somewhere(row: Row) -> None:
    """Each row is the first choice of some problem on some GPU: no row is shadowed by another."""
    d, small = row.head_dim, bool(row.when.max_ctas)
    if row.stem in SPARSE_STEMS:
        every = product(LIMITS, (1, 16, 64), (16, 128))
        chosen = (sparse(problem("float16", d, d, arch), *blocks) for arch, *blocks in every)
        assert any(select(row.stem, p, selection=blocks) is row for p, blocks in chosen)
        return
    tiles = 1 if row.when.short else max(4, row.when.max_ctas * 66)
    posed = [problem("float16", d, d, arch, tiles) for arch in LIMITS]
    if row.when.softcap:
        posed = [replace(p, softcap=30.0) for p in posed]
    assert any(select(row.stem, p, by_size=small) is row for p in posed)


@pytest.mark.parametrize(
    "row", [row for row in CUDA_ROWS if row.when.max_ctas], ids=lambda row: row.name
)
def test_row_for_small_problems_is_chosen_by_size_alone(row: Row) -> None:
    d = row.head_dim
    tiles = row.when.max_ctas * 66  # of 64 rows, on 132 multiprocessors; a CTA has 32 to 64
    small, large = (problem("float16", d, d, 90, n) for n in (tiles, 100 * tiles))
    assert select(row.stem, small, by_size=True) is row
    assert not select(row.stem, large, by_size=True).when.max_ctas
    assert not select(row.stem, small).when.max_ctas


@pytest.mark.parametrize(
    "row", [row for row in CUDA_ROWS if row.when.short], ids=lambda row: row.name
)
def test_row_for_short_sequences_gives_the_bits_of_the_other(row: Row) -> None:
    """As tests/gpu shows of two rows whose tiles of keys are equally long."""
    d, arch = row.head_dim, 90 if row.family == "sm90" else 80
    short, long = (select(row.stem, problem("float16", d, d, arch, tiles)) for tiles in (2, 3))
    assert short is row
    assert not long.when.short
    assert (short.cfg.block_n, short.workspace) == (long.cfg.block_n, long.workspace)


def test_limits_of_shared_memory() -> None:
    assert {arch: smem_limit(arch) for arch in LIMITS} == {a: k * 1024 for a, k in LIMITS.items()}
    assert smem_limit(999) == 99 * 1024


def test_no_cuda_row_serves_a_gpu_before_8_0() -> None:
    assert not any(serves(row, 75) for row in CUDA_ROWS)


# --- the choice --------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 103, 110, 120, 121])
@pytest.mark.parametrize("stem", STEMS)
def test_every_half_precision_problem_has_a_cuda_row_that_fits(stem: str, arch: int) -> None:
    for d in HEAD_DIMS:
        for dv in HEAD_DIMS:
            row = select(stem, problem("bfloat16" if (d + dv) % 16 else "float16", d, dv, arch))
            assert row.stem == stem
            if row.family == "numba":  # seven tiles of up to 256 columns do not fit 99 KiB
                assert stem == "double_backward_kv" and max(d, dv) > 192 and LIMITS[arch] == 99
                continue
            assert row.head_dim >= max(d, dv), (d, dv, row.name)
            need = row.smem_bytes(Tiles(*tile_widths(d, dv), atomic=True))
            assert need <= LIMITS[arch] * 1024, (d, dv, row.name)


@pytest.mark.parametrize("arch", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("stem", SPARSE_STEMS)
def test_sparse_problems_have_a_cuda_row_that_fits(stem: str, arch: int) -> None:
    """All of them on 9.0; elsewhere what does not fit is wide, or the second order."""
    dims = ((8, 8), (40, 72), (64, 64), (96, 64), (128, 128), (192, 128), (256, 256))
    for (d, dv), group, block_size in product(dims, (1, 3, 16, 48, 64), (16, 32, 64, 128)):
        posed, selection = sparse(problem("bfloat16", d, dv, arch), group, block_size)
        row = select(stem, posed, selection=selection)
        assert row.stem == stem
        if row.family == "numba":
            crowd = arch == 90 and d == 256 and group >= 48 and block_size == 128
            assert crowd or (arch != 90 and (d >= 192 or "double" in stem)), (d, dv, group)
        elif not row.kernel.any_width:
            widths, blocks = tile_widths(d, dv), (group, block_size)
            assert row.head_dim >= max(d, dv) and row.cfg.block_m >= group
            assert row.smem_bytes(Tiles(*widths, True, blocks)) <= LIMITS[arch] * 1024


@pytest.mark.parametrize(("d", "dv"), list(product(variants.HEAD_DIMS, repeat=2)))
def test_sums_of_gradients_are_read_as_wide_as_they_were_written(d: int, dv: int) -> None:
    row = next(row for row in CUDA_ROWS if row.stem == "sparse_postprocess")
    posed = problem(head_dim=d, head_dim_v=dv)
    for gradient, width in (("dq", d), ("dk", d), ("dv", dv)):
        read = tile_widths(*own_first(posed, width))[0]
        assert read == accum_shape(row, posed, gradient)[2]


def test_chunks_of_queries_keep_lists_linear_in_the_tokens() -> None:
    for total, group, head_dim in product((1, 300, 8192, 1 << 18, 1 << 24), (1, 16), (64, 256)):
        chunk = default_chunk(total, group, head_dim)
        assert chunk & (chunk - 1) == 0 and -(-total // chunk) <= 64
        p = replace(problem(), total_q=total, total_k=total, num_heads_q=group)
        selection = Selection(1, 16, 64, own=True, chunk=chunk)
        assert selection.lists(p) <= 64 * (total // 64 + p.batch)
        assert selection.segments(p) <= 17 * total * (1 + 1 / selection.segment(p))
        assert selection.is_cut(p) == (total > min(chunk, 4 * selection.segment(p)))


def test_more_than_64_heads_of_a_selection_run_on_numba() -> None:
    posed, selection = sparse(problem(), 65, 64)
    assert select("sparse_forward", posed, selection=selection).family == "numba"
    with pytest.raises(ValueError, match=r"no CUDA row of sparse_forward.*65 heads of a selection"):
        select("sparse_forward", posed, selection=selection, backend="cuda")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("arch", [0, 70, 75, 80, 90])
@pytest.mark.parametrize("stem", STEMS)
def test_numba_has_what_the_cuda_rows_have_not(stem: str, arch: int, dtype: str) -> None:
    raw = arch >= 80 and dtype in ("float16", "bfloat16")
    for d, dv in ((8, 8), (64, 128), (256, 8), (256, 256)):
        row = select(stem, problem(dtype, d, dv, arch))
        family = "sm90" if arch == 90 and stem in STEMS_SM90 else "sm80"
        assert (row.stem, row.family) == (stem, family if raw else "numba")
        assert select(stem, problem(dtype, d, dv, arch), backend="numba").family == "numba"


@pytest.mark.parametrize("stem", STEMS)
def test_forced_cuda_is_cuda_or_a_clear_refusal(stem: str) -> None:
    assert select(stem, problem(), backend="cuda") is select(stem, problem())
    for dtype, arch, given in (
        ("float32", 90, "float32 on 9.0"),
        ("float16", 75, "float16 on 7.5"),
    ):
        with pytest.raises(ValueError, match=rf"8\.0.*given {given}.*backend='numba'"):
            select(stem, problem(dtype, arch=arch), backend="cuda")


def choose(monkeypatch: pytest.MonkeyPatch, preferred: str, *args, **kwargs) -> str:
    monkeypatch.setenv("RAWATTN_VARIANT", preferred)
    return select(*args, **kwargs).name


def test_preferred_row_is_taken_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = "forward_sm90_d128_128x128", "forward_sm80_d128_64x64"
    assert select("forward", problem()).name == wide
    assert choose(monkeypatch, narrow, "forward", problem()) == narrow
    both = f"backward_kv_sm80_d128_64x64,{narrow}"
    assert choose(monkeypatch, both, "forward", problem()) == narrow
    assert choose(monkeypatch, both, "backward_kv", problem()) == "backward_kv_sm80_d128_64x64"
    assert choose(monkeypatch, "forward_numba", "forward", problem()) == "forward_numba"


def test_preferred_row_is_ignored_where_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = "forward_sm90_d128_128x128", "forward_sm80_d128_64x64"
    small_gpu, head_dim_64 = problem(arch=86), problem(head_dim=64, head_dim_v=64)
    assert choose(monkeypatch, wide, "forward", small_gpu) == narrow
    assert choose(monkeypatch, narrow, "forward", head_dim_64) == "forward_sm90_d64_192x128"
    assert choose(monkeypatch, narrow, "forward", problem("float32")) == "forward_numba"
    assert choose(monkeypatch, narrow, "forward", problem(), backend="numba") == "forward_numba"
    assert choose(monkeypatch, "no_such_row", "forward", problem()) == wide


def test_preference_does_not_leave_a_forced_family(monkeypatch: pytest.MonkeyPatch) -> None:
    for stem in STEMS:
        twin, kernel = f"{stem}_numba", select(stem, problem()).name
        assert choose(monkeypatch, twin, stem, problem(), backend="cuda") == kernel
        assert choose(monkeypatch, kernel, stem, problem(), backend="numba") == twin
        monkeypatch.delenv("RAWATTN_VARIANT")


def test_forced_cuda_without_a_row_that_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Row, "fits", lambda *row: False)
    choice._select.cache_clear()
    try:
        assert select("forward", problem()).family == "numba"
        with pytest.raises(ValueError):
            select("forward", problem(), backend="cuda")
    finally:
        choice._select.cache_clear()


def test_tile_width_is_the_least_that_holds() -> None:
    for d in range(1, 257):
        width = tile_width(d)
        assert width in variants.HEAD_DIMS and width >= d
        assert not any(d <= other < width for other in variants.HEAD_DIMS)


def test_method_is_the_callers_unless_determinism_is_asked_for() -> None:
    assert variants.METHODS == ("atomic_dq", "atomic_dkv", "deterministic")
    assert variants.method_of(None, False) in variants.METHODS
    for method in variants.METHODS:
        assert variants.method_of(method, False) == method
    assert variants.method_of(None, True) == "deterministic"
    assert variants.method_of("deterministic", True) == "deterministic"


# --- rows of another family, workspaces, the size of a GPU --------------------------------------


def planted(monkeypatch: pytest.MonkeyPatch, **changes) -> Row:
    """A Hopper row before all others."""
    cfg = Sm90(block_m=128, block_n=176, registers=(24, 240), pingpong=True)
    when = When(archs=(90,), **changes)
    row = Row("forward_sm90_d128", FORWARD, "planted", "sm90", 128, when, cfg)
    monkeypatch.setattr(choice, "TABLE", (row, *TABLE))
    return row


def test_a_hopper_row_is_chosen_on_9_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    row = planted(monkeypatch)
    for arch in LIMITS:
        assert (select("forward", problem(arch=arch)) is row) == (arch == 90)
    assert select("forward", problem(head_dim=64, head_dim_v=64)) is not row
    assert select("forward", problem("float32")).family == "numba"


@pytest.mark.parametrize("bounded", [True, False])
def test_a_row_is_chosen_by_the_mask(bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    row = planted(monkeypatch, bounded=bounded)
    for left, right in ((-1, -1), (-1, 0), (5, -1), (3, 2)):
        posed = replace(problem(), window_left=left, window_right=right)
        assert (select("forward", posed) is row) == (bounded == (left >= 0 or right >= 0))


def test_sums_are_read_by_a_row_of_the_layout_that_they_were_written_in() -> None:
    for backend in (None, "cuda", "numba"):
        for gather, read in (
            ("backward_kv", "backward_postprocess"),
            ("backward_q", "backward_postprocess"),
            ("double_backward_kv", "backward_postprocess"),
            ("sparse_backward_kv", "sparse_postprocess"),
        ):
            posed, selection = sparse(problem(), 16, 64)
            row = select(gather, posed, backend=backend, selection=selection)
            last = select(read, posed, workspace=row.workspace)
            assert row.workspace and last.workspace == row.workspace and last.stem == read
    with pytest.raises(ValueError, match=r"no CUDA row of backward_postprocess.*kept as 'rows'"):
        select("backward_postprocess", problem(), backend="cuda", workspace="rows")


def test_what_a_small_grid_is_depends_on_the_gpu() -> None:
    few = replace(problem("float16", 64, 64, tiles=200), num_sms=132)
    assert select("jvp", few, by_size=True).when.max_ctas
    assert not select("jvp", replace(few, num_sms=64), by_size=True).when.max_ctas
