"""From a build to a cubin: cache key, cache on disk, what a refusal says.

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
from typing import Any

import pytest

from rawattn import build as build_module
from rawattn import jit
from rawattn.build import INCLUDE, Build, prelude, source
from rawattn.ops.arguments import args_bytes
from rawattn.variants import TABLE, Row
from rawattn.variants.row import Sm90

ROWS = {row.name: row for row in TABLE}


def build_of(name: str, *given: Any, **more: Any) -> Build:
    """A build of the row of that name, with the size of its ``struct Args``."""
    return Build(ROWS[name], *given, **more, args_bytes=args_bytes(ROWS[name].stem))


SMALL = build_of("backward_preprocess_sm80", "bfloat16", 64, 64, False, False, False)
FORWARD = build_of("forward_sm80_d64_128x64", "bfloat16", 64, 64, False, True, False)
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
    shutil.copytree(build_module.sources_root(), copy)
    for module in (build_module, jit):
        monkeypatch.setattr(module, "sources_root", lambda: copy)
    source.cache_clear()
    yield copy
    source.cache_clear()


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
    source.cache_clear()


# --- the key -----------------------------------------------------------------------------------

BUILD_CHANGES = {
    "row": replace(FORWARD.row, cfg=replace(FORWARD.row.cfg, unroll_k=2)),
    "dtype": "float16",
    "head_dim": 56,
    "head_dim_v": 56,
    "has_left": True,
    "has_right": False,
    "atomic": True,
    "direction": (True, False, True),
    "blocks": (4, 16),
    "scaled": True,
    "args_bytes": 160,
    "softcap": True,
    "sinks": True,
    "seqused_k": True,
}
READ_BY = {"atomic": "backward_kv", "direction": "jvp"}  # what forward does not read
SPARSE = Build(
    *(next(row for row in TABLE if row.stem == "sparse_backward_kv"), "bfloat16", 64, 64),
    *(False, True, False),
    blocks=(16, 64),
)


def test_every_field_of_a_build_has_a_change_here() -> None:
    assert set(BUILD_CHANGES) == {field.name for field in fields(Build)}


@pytest.mark.parametrize("name", [name for name in BUILD_CHANGES if name != "args_bytes"])
def test_key_follows_every_field_that_the_source_reads(name: str, nvrtc: None) -> None:
    build = SPARSE if name in ("blocks", "scaled") else FORWARD
    if name in READ_BY:
        row = next(row for row in TABLE if row.stem == READ_BY[name])
        build = Build(row, "float16", row.head_dim, row.head_dim, False, True, False)
    changed = replace(build, **{name: BUILD_CHANGES[name]})
    assert jit.cache_key(changed, "sm_90") != jit.cache_key(build, "sm_90")


def test_key_does_not_follow_what_the_source_does_not_read(nvrtc: None) -> None:
    changed = replace(SMALL, has_left=True, has_right=True, atomic=True, head_dim=128)
    assert jit.cache_key(changed, "sm_90") == jit.cache_key(SMALL, "sm_90")
    words = replace(FORWARD.row, name="other", why="other", head_dim=256)
    assert jit.cache_key(replace(FORWARD, row=words), "sm_90") == jit.cache_key(FORWARD, "sm_90")


@pytest.mark.parametrize("name", ["block_m", "block_n", "num_warps", "min_ctas", "q_in_registers"])
def test_key_follows_the_choices_of_a_row(name: str, nvrtc: None) -> None:
    old = getattr(FORWARD.row.cfg, name)
    cfg = replace(FORWARD.row.cfg, **{name: not old if isinstance(old, bool) else 2 * old})
    changed = replace(FORWARD, row=replace(FORWARD.row, cfg=cfg))
    assert jit.cache_key(changed, "sm_90") != jit.cache_key(FORWARD, "sm_90")


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
    edit(sources / "sm80/key_warps.cuh", lambda text: text + "// edited\n")
    assert jit.cache_key(FORWARD, "sm_90") == before


def test_every_include_is_in_the_form_that_the_key_follows() -> None:
    for path in [
        *build_module.sources_root().rglob("*.cu"),
        *build_module.sources_root().rglob("*.cuh"),
    ]:
        for line in path.read_text().splitlines():
            if re.match(r"\s*#\s*include", line):
                assert INCLUDE.match(line), f"{path}: {line}"


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
    assert jit.cached_build(SMALL, "sm_90") == first and first.cubin.startswith(b"\x7fELF")
    assert compiles == [SMALL]
    (file,) = folder.iterdir()
    assert file.name.startswith("backward_preprocess_sm_90_") and file.suffix == ".cubin"


def test_no_cache_neither_reads_nor_writes(
    folder: Path, compiles: list[Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAWATTN_NO_CACHE", "1")
    first, second = (jit.cached_build(SMALL, "sm_90").cubin for _ in range(2))
    assert first == second and len(compiles) == 2 and not folder.exists()


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
    cubin = jit.cached_build(SMALL, "sm_90").cubin
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    repaired = jit.cached_build(SMALL, "sm_90")
    assert repaired.cubin == cubin and len(compiles) == 2
    assert jit.cached_build(SMALL, "sm_90") == repaired and len(compiles) == 2
    assert list(folder.iterdir()) == [file]


RACER = """
import hashlib, sys
import cuda.core
from rawattn import jit
from rawattn.check.compiled import builds
from rawattn.variants import TABLE
build = builds(next(row for row in TABLE if row.name == "backward_preprocess_sm80"))[0]
print("ready", flush=True)
sys.stdin.readline()
print(hashlib.sha256(jit.cached_build(build, "sm_90").cubin).hexdigest())
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


@pytest.fixture
def no_kept_warning() -> None:
    jit._no_cache.cache_clear()


def nobody_can_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)


def a_file_in_the_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("")


def no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.env, "cache_dir", lambda: Path("~/.cache/rawattn"))


def a_folder_of_that_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.cached_build(SMALL, "sm_90")
    (file,) = folder.iterdir()
    file.unlink()
    (file / "in the way").mkdir(parents=True)


@pytest.mark.parametrize(
    "trouble", [nobody_can_write, a_file_in_the_way, no_home, a_folder_of_that_name]
)
def test_without_a_cache_that_can_be_written_it_goes_on_and_says_so_once(
    trouble: Callable[[Path, pytest.MonkeyPatch], None],
    folder: Path,
    compiles: list[Build],
    monkeypatch: pytest.MonkeyPatch,
    no_kept_warning: None,
) -> None:
    trouble(folder, monkeypatch)
    before = len(compiles)
    with pytest.warns(RuntimeWarning, match=r"cannot be kept.*RAWATTN_CACHE_DIR") as said:
        for _ in range(2):
            assert jit.cached_build(SMALL, "sm_90").cubin.startswith(b"\x7fELF")
    assert len(said) == 1 and len(compiles) == before + 2
    assert not Path("~").exists() and not list(folder.parent.rglob(".writing-*"))


@posix
def test_a_cache_that_cannot_be_made_private_is_used_only_if_nobody_else_may_write_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, no_kept_warning: None
) -> None:
    def refuse(self: Path, mode: int) -> None:
        raise OSError(30, "Read-only file system")

    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", refuse)
    assert jit._private_folder(folder) == folder
    os.chmod(folder, 0o777)
    with pytest.warns(RuntimeWarning, match="others may write"):
        assert jit._private_folder(folder) is None


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
    assert any(file.read_bytes().startswith(prelude(SMALL).encode()) for file in files)
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
    assert "RAWATTN_DUMP" in text and "\0" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["sources"], "nothing is left behind"


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
        ("forward_sm80_d64_128x64", {"block_n": 40}, "BLOCK_N"),
        ("jvp_sm80_d64_64x64", {"block_n": 40}, "BLOCK_N"),
        ("double_backward_out_sm80_d64_128x48", {"block_m": 16}, "cfg::BLOCK_M"),
        ("double_backward_kv_sm80_d64_64x64", {"num_warps": 5}, "WARPS_N_KV"),
        ("backward_q_sm80_d96_64x64", {"block_m": 16}, "cfg::BLOCK_M"),
        ("backward_kv_sm80_d64_64x128", {"num_warps": 5}, "cfg::WARPS_M_S"),
        ("backward_preprocess_sm80", {"block_m": 8}, "cfg::BLOCK_M"),
        ("backward_postprocess_sm80", {"block_m": 16}, "cfg::BLOCK_M"),
    ],
)
def test_an_illegal_row_is_refused_by_the_name_of_its_field(
    name: str, change: dict[str, int], field: str, nvrtc: None
) -> None:
    given = build_of(name, "float16", 64, 64, False, False, False, (True, True, True))
    build = replace(given, row=replace(ROWS[name], cfg=replace(ROWS[name].cfg, **change)))
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
    right = ROWS[name].smem
    row = replace(ROWS[name], smem=lambda cfg, tiles: right(cfg, tiles) + error)
    build = replace(build_of(name, "float16", 64, 64, False, False, False), row=row)
    with pytest.raises(RuntimeError, match=r"static assertion failed[^\n]*\n?[^\n]*SMEM_BYTES"):
        jit.compile_build(build, "sm_90")


def test_check_spills_refuses_a_row_that_spills(
    folder: Path, monkeypatch: pytest.MonkeyPatch, nvrtc: None
) -> None:
    # four CTAs an SM leave 128 registers a thread, fewer than this row needs
    row = ROWS["forward_sm80_d32_128x64"]
    fits = build_of(row.name, "float16", 32, 32, False, False, False)
    spilling = replace(fits, row=replace(row, cfg=replace(row.cfg, min_ctas=4)))
    compiled = jit.compile_build(spilling, "sm_90")
    assert compiled.spill_bytes > 0 and compiled.registers <= 128
    monkeypatch.setattr(jit, "compile_build", lambda build, arch: compiled)
    monkeypatch.setenv("RAWATTN_CHECK_SPILLS", "1")
    for no_cache in ("0", "1"):
        monkeypatch.setenv("RAWATTN_NO_CACHE", no_cache)
        with pytest.raises(RuntimeError, match=rf"{row.name} spills {compiled.spill_bytes} bytes"):
            jit.cached_build(spilling, "sm_90")
    monkeypatch.delenv("RAWATTN_NO_CACHE")
    monkeypatch.delenv("RAWATTN_CHECK_SPILLS")
    assert jit.cached_build(spilling, "sm_90") == compiled


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


HOPPER = Row("forward_sm90_d64", FORWARD.row.kernel, "planted", "sm90", 64, cfg=Sm90(64, 64))


def test_a_spill_is_seen_on_a_cache_hit_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, nvrtc: None
) -> None:
    log = "    8 bytes spill stores, 8 bytes spill loads\nUsed 255 registers\n"
    monkeypatch.setattr("cuda.core.Program", fake_program(log))
    assert jit.cached_build(SMALL, "sm_90").spill_bytes == 16
    monkeypatch.setattr(jit, "compile_build", lambda build, arch: pytest.fail("not from the cache"))
    assert jit.cached_build(SMALL, "sm_90").spill_bytes == 16
    monkeypatch.setenv("RAWATTN_CHECK_SPILLS", "1")
    with pytest.raises(RuntimeError, match="spills 16 bytes"):
        jit.cached_build(SMALL, "sm_90")


def test_a_hopper_row_is_compiled_for_sm_90a(
    monkeypatch: pytest.MonkeyPatch, sources: Path, nvrtc: None
) -> None:
    (sources / "sm90").mkdir(exist_ok=True)
    (sources / "sm90/forward.cu").write_text(
        'static_assert(cfg::PRODUCER_REGISTERS == 40 && !cfg::PINGPONG, "");\n'
        'extern "C" __global__ void forward() { asm volatile("wgmma.fence.sync.aligned;"); }\n'
    )
    source.cache_clear()
    build = replace(FORWARD, row=HOPPER)
    assert jit.compile_build(build, "sm_90").registers > 0
    assert "BLOCK_M" not in prelude(build)
    log = "ptxas info : (C7510) wgmma serialized\nUsed 128 registers\n"
    monkeypatch.setattr("cuda.core.Program", fake_program(log))
    with pytest.raises(RuntimeError, match=r"forward_sm90_d64 for sm_90:.*serialises.*C7510"):
        jit.compile_build(build, "sm_90")
    assert jit.compile_build(SMALL, "sm_90").warnings, "of other families a warning"


def test_a_constant_that_nothing_gives_is_named(sources: Path) -> None:
    edit(sources / "sm80/forward.cu", lambda text: text + "// cfg::IN_A_COMMENT\n")
    prelude(FORWARD)
    edit(sources / "sm80/forward.cu", lambda text: text + "static_assert(cfg::NUM_STAGE);\n")
    with pytest.raises(RuntimeError, match=r"sm80/forward.cu reads cfg::NUM_STAGE, which .*Sm80"):
        prelude(FORWARD)
