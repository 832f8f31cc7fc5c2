"""Loaded kernels and what the driver is given, on a driver that only takes notes."""

import ctypes
import importlib
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rawattn import build, jit, launch
from rawattn.problem import Problem
from rawattn.variants import TABLE, Kernel, choice, select
from rawattn.variants.row import Row, Sm80

ROWS = {row.name: row for row in TABLE}
PREPROCESS = ROWS["backward_preprocess_sm80"]
PROBLEM = Problem("float16", 1, 64, 64, 2, 2, 64, 64, -1, -1, 1.0, 90, 0)


class Driver:
    """Stands in for CuPy and its driver."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.arguments: list[bytes] = []
        self.loads = self.waits = self.contexts = self.size = 0
        self.error: Exception | None = None

    def module(self, path: str) -> SimpleNamespace:
        self.loads += 1
        assert Path(path).read_bytes() == b"cubin"
        function = SimpleNamespace(kernel=SimpleNamespace(ptr=1000 + self.loads))
        return SimpleNamespace(get_function=lambda name: function)

    def launch(self, *given: int) -> None:
        *where, only, extra = given
        assert extra == 0
        self.launches.append(tuple(where))
        [pointer] = (ctypes.c_void_p * 1).from_address(only)
        self.arguments.append(ctypes.string_at(pointer, self.size))

    def synchronize(self, stream: int) -> None:
        self.waits += 1
        if self.error:
            raise self.error

    def bind(self) -> None:
        self.contexts += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    driver = Driver()
    runtime = SimpleNamespace(streamSynchronize=driver.synchronize, memGetInfo=driver.bind)
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.RawModule, cuda.runtime = driver.module, runtime  # type: ignore[attr-defined]
    api = ModuleType("cupy_backends.cuda.api")
    api.driver = SimpleNamespace(launchKernel=driver.launch)  # type: ignore[attr-defined]
    modules = {"cupy": cupy, "cupy.cuda": cuda, "cupy_backends.cuda.api": api}
    for name in ("cupy_backends", "cupy_backends.cuda"):
        modules[name] = ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    compiled = jit.Compiled(b"cubin", "", 32, 0, 0, (), 0.0)
    monkeypatch.setattr(launch, "cached_build", lambda build, arch: compiled)
    monkeypatch.setattr(launch, "_thread", launch._Thread())
    monkeypatch.delenv("RAWATTN_SYNC", raising=False)
    launch.forget()
    yield driver
    launch.forget()


def test_the_driver_gets_grid_block_memory_stream_and_the_bytes(driver: Driver) -> None:
    kernel = launch.kernel(ROWS["backward_postprocess_sm80"], PROBLEM)
    given = bytes(range(56))
    driver.size = len(given)
    kernel.launch((7, 5, 3), given, 77)
    assert driver.launches == [(1001, 7, 5, 3, 128, 1, 1, 2 * 64 * 64, 77)]
    assert driver.arguments == [given]


def test_builds_that_differ_in_nothing_that_is_read_share_a_kernel(driver: Driver) -> None:
    masked = replace(PROBLEM, window_right=0)
    first = launch.kernel(PREPROCESS, PROBLEM)
    assert launch.kernel(PREPROCESS, masked, atomic=True) is first and driver.loads == 1
    assert launch.kernel(PREPROCESS, replace(PROBLEM, dtype="bfloat16")) is not first
    assert launch.kernel(PREPROCESS, replace(PROBLEM, device=1)) is not first
    forward = ROWS["forward_sm80_d64_64x64"]
    assert launch.kernel(forward, masked) is not launch.kernel(forward, PROBLEM)
    assert launch.kernel(forward, masked) is launch.kernel(forward, masked)
    assert driver.loads == 5


def test_sync_is_read_when_launching_and_names_the_row(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = launch.kernel(PREPROCESS, PROBLEM)
    kernel.launch((1, 1, 1), b"", 0)
    assert driver.waits == 0
    monkeypatch.setenv("RAWATTN_SYNC", "1")
    kernel.launch((1, 1, 1), b"", 0)
    assert driver.waits == 1
    driver.error = RuntimeError("an illegal memory access")
    with pytest.raises(RuntimeError, match="backward_preprocess_sm80 failed: an illegal memory"):
        kernel.launch((1, 1, 1), b"", 0)


def test_every_thread_gets_the_context_once_for_a_device(driver: Driver) -> None:
    kernel = launch.kernel(PREPROCESS, PROBLEM)
    work = lambda: [kernel.launch((1, 1, 1), b"", 0) for _ in range(3)]  # noqa: E731
    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert driver.contexts == 2 and len(driver.launches) == 6


def test_a_new_kernel_is_a_source_a_launcher_and_its_rows(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three places and no fourth: select finds it, it compiles, and is launched."""
    pytest.importorskip("cuda.core")
    folder = tmp_path / "kernels_cu"
    shutil.copytree(build.sources_root(), folder)
    (folder / "sm80/planted.cu").write_text(
        '#include "base/compat.cuh"\n'
        "struct Args { float* out; };\n"
        'static_assert(sizeof(Args) == cfg::ARGS_BYTES, "cfg::ARGS_BYTES");\n'
        'static_assert(cfg::SMEM_BYTES == 2 * cfg::BLOCK_M * cfg::HEAD_DIM, "cfg::SMEM_BYTES");\n'
        'extern "C" __global__ void planted(const __grid_constant__ Args args) {\n'
        "  args.out[threadIdx.x] = cfg::NUM_WARPS;\n"
        "}\n"
    )
    for module in (build, jit):
        monkeypatch.setattr(module, "sources_root", lambda: folder)
    launch.forget()
    smem = lambda cfg, tiles: 2 * cfg.block_m * tiles.head_dim  # noqa: E731
    row = Row("planted_sm80_d64", Kernel("planted"), "planted", "sm80", 64, cfg=Sm80(), smem=smem)
    monkeypatch.setattr(choice, "TABLE", (*TABLE, row))
    (tmp_path / "planted.py").write_text(
        "from rawattn import launch as loaded\n"
        "def launch(row, problem, out, *, stream):\n"
        "    arguments = out.to_bytes(8, 'little')\n"
        "    kernel = loaded.kernel(row, problem, args_bytes=len(arguments))\n"
        "    kernel.launch((1, 1, 1), arguments, stream)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def compiled(build: build.Build, arch: str) -> jit.Compiled:
        made.append(jit.compile_build(build, arch))
        return replace(made[-1], cubin=b"cubin")

    monkeypatch.setattr(launch, "cached_build", compiled)
    driver.size = 8
    chosen = select("planted", PROBLEM)
    assert chosen is row
    importlib.import_module("planted").launch(chosen, PROBLEM, 4096, stream=0)
    assert made[0].registers and not made[0].spill_bytes
    assert driver.arguments == [(4096).to_bytes(8, "little")]
