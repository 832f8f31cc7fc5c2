"""From a row of the table to a cubin: prelude, cache key, cache on disk, what a refusal says.

Long, since each of these has its ways to go wrong, and all of them start from the same build.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rawattn import jit
from rawattn.jit import Build
from rawattn.variants import (
    LIST_STEMS,
    NO_BLOCKS,
    RING_STEMS,
    SPARSE_STEMS,
    TABLE,
    Variant,
    block_keys,
    ring_stages,
    smem_bytes,
)

ROWS = {row.name: row for row in TABLE}
SMALL = Build(ROWS["backward_preprocess_sm80"], "bfloat16", 64, 64, False, False, False)
FORWARD = Build(ROWS["forward_sm80_d64_128x64"], "bfloat16", 64, 64, False, True, False)
# no kernel sees these
HOST_ONLY = ("name", "why", "stem", "family", "head_dim", "min_smem_kib", "max_arch", "max_ctas")
posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes of POSIX")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder that does not exist yet; no other RAWATTN variable is set."""
    for name in [name for name in os.environ if name.startswith("RAWATTN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def nvrtc() -> None:
    pytest.importorskip("cuda.core")


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A copy of the CUDA sources that a test may edit, in the place of the real one."""
    copy = tmp_path / "sources"
    shutil.copytree(jit.sources_root(), copy)
    monkeypatch.setattr(jit, "sources_root", lambda: copy)
    jit._closure.cache_clear()
    yield copy
    jit._closure.cache_clear()


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, nvrtc: None) -> list[Build]:
    """The builds that were compiled and not read from the cache."""
    seen: list[Build] = []
    compile_build = jit.compile_build

    def counted(build: Build, arch: str) -> jit.Compiled:
        seen.append(build)
        return compile_build(build, arch)

    monkeypatch.setattr(jit, "compile_build", counted)
    return seen


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))
    jit._closure.cache_clear()


# --- prelude and builds ------------------------------------------------------------------------


def constants(build: Build) -> dict[str, tuple[str, str]]:
    """The prelude's constants: name -> (type, value)."""
    found = re.findall(r"^constexpr (\w+) (\w+) = (\w+);$", jit.prelude(build), re.MULTILINE)
    return {name: (kind, value) for kind, name, value in found}


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.family != "numba"], ids=lambda r: r.name
)
def test_prelude_names_every_choice_of_a_row(row: Variant) -> None:
    blocks = (16, 64) if row.stem in SPARSE_STEMS else NO_BLOCKS
    d = row.head_dim
    given = constants(Build(row, "float16", d, d, False, True, False, blocks=blocks))
    of_blocks = {"block_n": block_keys(row, 64)} if row.stem in SPARSE_STEMS else {}
    if row.stem in RING_STEMS:
        of_blocks["num_stages"] = ring_stages(row, d, d, blocks)
    for field in fields(Variant):
        value = of_blocks.get(field.name, getattr(row, field.name))
        if field.name not in HOST_ONLY:
            kind = "bool" if isinstance(value, bool) else "int"
            assert given[field.name.upper()] == (kind, str(value).lower())
    assert given["SMEM_BYTES"] == ("int", str(smem_bytes(row, d, d, False, blocks)))


def test_prelude_spells_blocks_and_leaves_registers_to_their_factors() -> None:
    row = next(row for row in TABLE if row.stem == "sparse_forward" and row.min_ctas > 1)
    build = Build(row, "float16", 64, 64, False, True, False, blocks=(4, 16))
    plain, scaled = constants(build), constants(replace(build, scaled=True))
    assert plain["GROUP"] == ("int", "4") and plain["BLOCK_SIZE"] == ("int", "16")
    assert plain["HAS_SCALE"] == ("bool", "false") and scaled["HAS_SCALE"] == ("bool", "true")
    assert int(scaled["MIN_CTAS"][1]) == row.min_ctas - 1 == int(plain["MIN_CTAS"][1]) - 1


def test_prelude_spells_widths_dtype_and_masks() -> None:
    given = constants(Build(FORWARD.variant, "bfloat16", 40, 72, False, True, True))
    assert given["WIDTH"] == ("int", "40") and given["HEAD_DIM"] == ("int", "64")
    assert given["WIDTH_V"] == ("int", "72") and given["HEAD_DIM_V"] == ("int", "96")
    assert given["BF16"] == ("bool", "true") and given["ATOMIC"] == ("bool", "true")
    assert given["HAS_LEFT"] == ("bool", "false") and given["HAS_RIGHT"] == ("bool", "true")
    assert constants(replace(FORWARD, dtype="float16"))["BF16"] == ("bool", "false")


def test_builds_cover_masks_dtypes_and_the_atomic_form() -> None:
    for row in TABLE:
        if row.family == "numba":
            continue
        made = jit.builds(row)
        if row.stem in LIST_STEMS:
            assert len(made) == 1
            continue
        assert {build.dtype for build in made} == {"float16", "bfloat16"}
        sparse = row.stem in SPARSE_STEMS
        masks = {(False, False), (False, True) if sparse else (True, True)}
        assert {(build.has_left, build.has_right) for build in made} >= masks
        assert {build.scaled for build in made} == ({True, False} if sparse else {False})
        assert len({build.blocks for build in made}) == (3 if sparse else 1)
        atomic = ("backward_kv", "backward_q", "double_backward_kv", "sparse_backward_kv")
        accumulates = row.stem in atomic
        assert {build.atomic for build in made} == ({True, False} if accumulates else {False})
        directed = row.stem == "jvp" or "double_backward" in row.stem
        directions = {(True, True, True), (True, False, False)} if directed else {(False,) * 3}
        assert {build.direction for build in made} == directions


# --- the key -----------------------------------------------------------------------------------

BUILD_CHANGES = {
    "variant": replace(FORWARD.variant, unroll_k=2),
    "dtype": "float16",
    "head_dim": 56,
    "head_dim_v": 56,
    "has_left": True,
    "has_right": False,
    "atomic": True,
    "direction": (True, False, True),
    "blocks": (4, 16),
    "scaled": True,
}
SPARSE = Build(
    *(next(row for row in TABLE if row.stem == "sparse_forward"), "bfloat16", 64, 64),
    *(False, True, False),
    blocks=(16, 64),
)


def test_every_field_of_a_build_has_a_change_here() -> None:
    assert set(BUILD_CHANGES) == {field.name for field in fields(Build)}


@pytest.mark.parametrize("name", BUILD_CHANGES)
def test_key_follows_every_field_of_a_build(name: str, nvrtc: None) -> None:
    build = SPARSE if name == "blocks" else FORWARD
    changed = replace(build, **{name: BUILD_CHANGES[name]})
    assert jit.cache_key(changed, "sm_90") != jit.cache_key(build, "sm_90")


@pytest.mark.parametrize(
    "field",
    [field for field in fields(Variant) if field.name not in ("stem", "family")],  # other sources
    ids=lambda field: field.name,
)
def test_key_follows_every_choice_of_a_row_and_not_its_words(field, nvrtc: None) -> None:
    old = getattr(FORWARD.variant, field.name)
    new = not old if isinstance(old, bool) else old + 1 if isinstance(old, int) else f"{old}, say"
    changed = replace(FORWARD, variant=replace(FORWARD.variant, **{field.name: new}))
    same = jit.cache_key(changed, "sm_90") == jit.cache_key(FORWARD, "sm_90")
    assert same == (field.name in HOST_ONLY)


@pytest.mark.parametrize(
    "file",
    ["sm80/forward.cu", "base/softmax.cuh", "base/compat.cuh"],
    ids=["source", "header", "deep"],
)
def test_key_follows_the_source_and_what_it_includes(file: str, sources: Path, nvrtc: None) -> None:
    before = jit.cache_key(FORWARD, "sm_90")
    edit(sources / file, lambda text: text + "// edited\n")
    assert jit.cache_key(FORWARD, "sm_90") != before


def test_key_does_not_follow_a_header_of_other_kernels(sources: Path, nvrtc: None) -> None:
    before = jit.cache_key(FORWARD, "sm_90")
    edit(sources / "sm80/gradient.cuh", lambda text: text + "// edited\n")
    assert jit.cache_key(FORWARD, "sm_90") == before


def test_every_include_is_in_the_form_that_the_key_follows() -> None:
    for path in [*jit.sources_root().rglob("*.cu"), *jit.sources_root().rglob("*.cuh")]:
        for line in path.read_text().splitlines():
            if re.match(r"\s*#\s*include", line):
                assert jit._INCLUDE.match(line), f"{path}: {line}"


def test_key_follows_options_arch_and_compiler(
    monkeypatch: pytest.MonkeyPatch, nvrtc: None
) -> None:
    keys = {jit.cache_key(FORWARD, "sm_90"), jit.cache_key(FORWARD, "sm_80")}
    monkeypatch.setenv("RAWATTN_LINEINFO", "1")
    keys.add(jit.cache_key(FORWARD, "sm_90"))
    monkeypatch.setattr(jit, "_compiler", lambda: "nvrtc 99.9")
    keys.add(jit.cache_key(FORWARD, "sm_90"))
    assert len(keys) == 4


# --- the cache on disk -------------------------------------------------------------------------


def test_cache_is_read_and_gives_the_same_bytes(folder: Path, compiles: list[Build]) -> None:
    first = jit.cached_build(SMALL, "sm_90")
    assert jit.cached_build(SMALL, "sm_90") == first and first.startswith(b"\x7fELF")
    assert compiles == [SMALL]
    (file,) = folder.iterdir()
    assert file.name.startswith("backward_preprocess_sm_90_") and file.suffix == ".cubin"


def test_no_cache_neither_reads_nor_writes(
    folder: Path, compiles: list[Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAWATTN_NO_CACHE", "1")
    assert jit.cached_build(SMALL, "sm_90") == jit.cached_build(SMALL, "sm_90")
    assert len(compiles) == 2 and not folder.exists()


def test_an_edited_header_is_compiled_anew(sources: Path, compiles: list[Build]) -> None:
    jit.cached_build(SMALL, "sm_90")
    edit(sources / "base/compat.cuh", lambda text: text + "// edited\n")
    jit.cached_build(SMALL, "sm_90")
    assert len(compiles) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:32],
        lambda data: data[:-1],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[32:],
    ],
    ids=["empty", "half a digest", "digest only", "truncated", "a bit", "no digest"],
)
def test_a_damaged_entry_is_a_miss_and_is_repaired(
    damage: Callable[[bytes], bytes], folder: Path, compiles: list[Build]
) -> None:
    cubin = jit.cached_build(SMALL, "sm_90")
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert jit.cached_build(SMALL, "sm_90") == cubin
    assert file.read_bytes() == whole and len(compiles) == 2
    assert list(folder.iterdir()) == [file]


RACER = """
import hashlib, sys
import cuda.core
from rawattn import jit
from rawattn.variants import TABLE
row = next(row for row in TABLE if row.name == "backward_preprocess_sm80")
build = jit.Build(row, "bfloat16", 64, 64, False, False, False)
print("ready", flush=True)
sys.stdin.readline()
print(hashlib.sha256(jit.cached_build(build, "sm_90")).hexdigest())
"""


def test_processes_that_start_at_once_share_one_whole_entry(folder: Path, nvrtc: None) -> None:
    root = Path(jit.__file__).parent.parent
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 8
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    digests = {racer.communicate(timeout=120)[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0] * 8
    assert len(digests) == 1 and len(digests.pop().strip()) == 64
    assert [file.suffix for file in folder.iterdir()] == [".cubin"]


@posix
def test_cache_folder_is_private_from_the_start(folder: Path) -> None:
    assert stat.S_IMODE(jit._private_folder(folder).stat().st_mode) == 0o700


@posix
def test_an_open_cache_folder_is_made_private(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    assert stat.S_IMODE(jit._private_folder(folder).stat().st_mode) == 0o700


@posix
def test_a_cache_folder_of_somebody_else_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(RuntimeError) as refusal:
        jit.cached_build(SMALL, "sm_90")
    for part in (str(folder), f"user id {owner}", f"{owner + 1}", "RAWATTN_CACHE_DIR"):
        assert part in str(refusal.value)
    assert not list(folder.iterdir())


# --- dumps, refusals, spills -------------------------------------------------------------------


def test_dump_writes_source_log_and_cubin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvrtc: None
) -> None:
    monkeypatch.setenv("RAWATTN_DUMP", str(tmp_path / "deep" / "dump"))
    compiled = jit.compile_build(SMALL, "sm_90")
    jit.compile_build(replace(SMALL, dtype="float16"), "sm_90")  # the same row, other files
    files = sorted((tmp_path / "deep" / "dump").iterdir())
    assert sorted(file.suffix for file in files) == [".cu"] * 2 + [".cubin"] * 2 + [".log"] * 2
    assert all(file.name.startswith("backward_preprocess_sm80_sm_90_") for file in files)
    assert any(file.read_bytes() == compiled.cubin for file in files)
    assert any(file.read_bytes().startswith(jit.prelude(SMALL).encode()) for file in files)
    assert all("registers" in file.read_text() for file in files if file.suffix == ".log")


def test_log_names_every_compile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, nvrtc: None
) -> None:
    jit.compile_build(SMALL, "sm_90")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RAWATTN_LOG", "1")
    jit.compile_build(SMALL, "sm_90")
    assert re.search(r"backward_preprocess_sm80 sm_90 in \d+\.\d\d s", capsys.readouterr().err)


def test_report_of_a_compile(nvrtc: None) -> None:
    compiled = jit.compile_build(SMALL, "sm_90")
    assert 8 <= compiled.registers <= 255 and compiled.seconds > 0
    assert (compiled.spill_bytes, compiled.smem_bytes, compiled.warnings) == (0, 0, ())


@pytest.mark.parametrize("file", ["sm80/backward_preprocess.cu", "base/ptx.cuh"])
def test_a_compile_error_shows_row_options_log_and_file(
    file: str, sources: Path, tmp_path: Path, nvrtc: None
) -> None:
    edit(sources / file, lambda text: text + "\nint broken = ;\n")
    lines = len((sources / file).read_text().splitlines())
    with pytest.raises(RuntimeError) as refusal:
        jit.compile_build(SMALL, "sm_90")
    text = str(refusal.value)
    assert "row backward_preprocess_sm80 for sm_90" in text
    assert "'arch': 'sm_90'" in text and "'std': 'c++17'" in text
    assert f"{file}({lines}): error: expected an expression" in text
    held = Path(re.search(r"source: (.+)$", text).group(1))
    assert tmp_path in held.parents and jit.prelude(SMALL) in held.read_text()
    assert "expected an expression" in held.with_suffix(".log").read_text()


def test_the_source_of_a_compile_error_goes_to_the_dump_folder(
    sources: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, nvrtc: None
) -> None:
    monkeypatch.setenv("RAWATTN_DUMP", str(tmp_path / "dump"))
    edit(sources / "sm80/backward_preprocess.cu", lambda text: text + "\nint broken = ;\n")
    with pytest.raises(RuntimeError, match=re.escape(str(tmp_path / "dump"))):
        jit.cached_build(SMALL, "sm_90")
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("forward_sm80_d64_128x64", {"block_m": 16}, "cfg::BLOCK_M"),
        ("forward_sm80_d64_128x64", {"block_n": 40}, "cfg::BLOCK_N"),
        ("jvp_sm80_d64_64x64", {"block_n": 40}, "cfg::BLOCK_N"),
        ("double_backward_out_sm80_d64_128x48", {"block_m": 16}, "cfg::BLOCK_M"),
        ("double_backward_kv_sm80_d64_64x64", {"warps_n_kv": 3}, "WARPS_N_KV"),
        ("backward_q_sm80_d96_64x64", {"block_m": 16}, "cfg::BLOCK_M"),
        ("backward_kv_sm80_d64_64x128", {"warps_m_s": 3}, "cfg::WARPS_M_S"),
        ("backward_preprocess_sm80", {"block_m": 8}, "cfg::BLOCK_M"),
        ("backward_postprocess_sm80", {"block_m": 16}, "cfg::BLOCK_M"),
    ],
)
def test_an_illegal_row_is_refused_by_the_name_of_its_field(
    name: str, change: dict[str, int], field: str, nvrtc: None
) -> None:
    given = Build(ROWS[name], "float16", 64, 64, False, False, False, (True, True, True))
    build = replace(given, variant=replace(ROWS[name], **change))
    with pytest.raises(RuntimeError, match=f'static assertion failed with "[^"]*{field}'):
        jit.compile_build(build, "sm_90")


@pytest.mark.parametrize(
    "name",
    [
        "forward_sm80_d64_128x64",
        "backward_kv_sm80_d64_64x128",
        "backward_q_sm80_d64_128x64",
        "backward_postprocess_sm80",
    ],
)
@pytest.mark.parametrize("error", [-16, 16])
def test_a_wrong_shared_memory_size_is_refused(
    name: str, error: int, monkeypatch: pytest.MonkeyPatch, nvrtc: None
) -> None:
    monkeypatch.setattr(jit, "smem_bytes", lambda *tile: smem_bytes(*tile) + error)
    build = Build(ROWS[name], "float16", 64, 64, False, False, False)
    with pytest.raises(RuntimeError, match=r"static assertion failed[^\n]*\n?[^\n]*SMEM_BYTES"):
        jit.compile_build(build, "sm_90")


def test_check_spills_refuses_a_row_that_spills(
    folder: Path, monkeypatch: pytest.MonkeyPatch, nvrtc: None
) -> None:
    # four CTAs an SM leave 128 registers a thread, fewer than this row needs
    row = replace(ROWS["forward_sm80_d32_128x64"], min_ctas=4)
    spilling = Build(row, "float16", 32, 32, False, False, False)
    compiled = jit.compile_build(spilling, "sm_90")
    assert compiled.spill_bytes > 0 and compiled.registers <= 128
    monkeypatch.setattr(jit, "compile_build", lambda build, arch: compiled)
    monkeypatch.setenv("RAWATTN_CHECK_SPILLS", "1")
    for no_cache in ("0", "1"):
        monkeypatch.setenv("RAWATTN_NO_CACHE", no_cache)
        with pytest.raises(RuntimeError, match=rf"{row.name} spills {compiled.spill_bytes} bytes"):
            jit.cached_build(spilling, "sm_90")
    assert not list(folder.iterdir())
    monkeypatch.delenv("RAWATTN_CHECK_SPILLS")
    assert jit.cached_build(spilling, "sm_90") == compiled.cubin


def fake_program(log: str) -> type:
    """A stand-in for the compiler that says ``log`` and gives a cubin of one byte."""

    class Program:
        def __init__(self, *arguments: object) -> None: ...

        def compile(self, target: str, logs) -> SimpleNamespace:
            logs.write(log)
            return SimpleNamespace(code=b"x")

    return Program


def test_a_compiler_without_a_resource_report_is_refused(
    monkeypatch: pytest.MonkeyPatch, nvrtc: None
) -> None:
    monkeypatch.setattr("cuda.core.Program", fake_program("nothing to say"))
    with pytest.raises(RuntimeError, match=r"no resource report .*'nothing to say'.*12\.9"):
        jit.compile_build(SMALL, "sm_90")


def test_report_counts_spills_and_keeps_warnings(
    monkeypatch: pytest.MonkeyPatch, nvrtc: None
) -> None:
    log = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma serialized\n"
        "    72 bytes stack frame, 120 bytes spill stores, 116 bytes spill loads\n"
        "ptxas info    : Used 128 registers, used 1 barriers, 72 bytes cumulative stack size\n"
    )
    monkeypatch.setattr("cuda.core.Program", fake_program(log))
    compiled = jit.compile_build(SMALL, "sm_90")
    assert (compiled.registers, compiled.spill_bytes, compiled.cubin) == (128, 236, b"x")
    assert [re.search(r"C\d+", line).group() for line in compiled.warnings] == ["C7510"]
