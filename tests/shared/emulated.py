"""The CUDA sources themselves, run on the CPU: tests/emulator/ stands in for CUDA and for PTX.

``Kernels`` takes the place of ``launch.kernel`` on the fake GPU, so that a call goes the whole way
from ``rawattn.forward`` through ``struct Args`` into the source of its row.
"""

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawattn import build as builds
from rawattn.build import INCLUDE, NO_DIRECTION, Build, prelude
from rawattn.problem import Problem
from rawattn.variants.row import NO_BLOCKS, Row
from tests.shared import fake_gpu

EMULATOR = Path(__file__).resolve().parents[1] / "emulator"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
EARLY, LATE = 0, 1  # asynchronous copies: at once, or not before somebody has waited for them

_ENTRY = """
extern "C" __attribute__((visibility("default"))) const char* run_grid(
    const void* args, unsigned x, unsigned y, unsigned z, int threads, int shared_bytes,
    int cluster, int clusters, unsigned seed, int lateness) {{
  const unsigned grid[3] = {{x, y, z}};
  return emulator::run({stem}, args, grid, threads, shared_bytes, cluster, clusters, seed,
                       lateness);
}}
"""


def folder() -> Path:
    """Where what this process and others of its run have compiled is kept."""
    path = Path(os.environ["RAWATTN_CACHE_DIR"]) / "emulated"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _text(name: str) -> str:
    """A source; one of the emulator in the place of that of PTX."""
    own = EMULATOR / name
    text = (own if own.exists() else builds.sources_root() / name).read_text()
    text = re.sub(
        r"extern __shared__ [^;]* shared\[\];", "char* shared = emulator::own_shared();", text
    )
    return re.sub(r"\b__shared__\b", "static", text)


def whole(path: str, seen: set[str]) -> str:
    """A source with everything that it includes in the place of the includes, once each."""

    def of(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return ""
        seen.add(name)
        return whole(name, seen)

    return INCLUDE.sub(of, _text(path)).replace("#pragma once", "")


@cache
def library(path: str, stem: str, constants: str, changes: tuple[tuple[str, str], ...]) -> Any:
    """A source with its constants, compiled for this machine; ``changes`` are made to it before,
    where it has what they replace: of several kernels a bug is planted in those that can have it.
    """
    source = whole(path, set())
    for old, new in changes:
        source = source.replace(old, new)
    machine = (EMULATOR / "cuda.hpp").read_text().replace("#pragma once", "")
    text = "\n".join((machine, constants, source, _ENTRY.format(stem=stem)))
    file = folder() / f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as scratch:
            given, made = Path(scratch, "kernel.cpp"), Path(scratch, "kernel.so")
            given.write_text(text)
            # Args is another struct in every kernel: nothing may be shared between libraries
            command = [COMPILER, "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fno-gnu-unique"]
            command += ["-fvisibility=hidden", "-fno-omit-frame-pointer"]
            command += [str(given), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:  # ends the test, as no exception would that a verdict is made of
                pytest.fail(f"{stem} does not compile:\n{done.stderr[:4000]}")
            made.replace(file)
    loaded = ctypes.CDLL(str(file))
    loaded.run_grid.restype = ctypes.c_char_p
    return loaded


class Kernel:
    """What ``launch.kernel`` gives."""

    def __init__(self, kernels: "Kernels", build: Build) -> None:
        self.kernels, self.build = kernels, build

    def launch(self, grid: tuple[int, int, int], arguments: bytes, stream: int) -> None:
        build, kernels = self.build, self.kernels
        kernels.launched.append((build.row.name, stream))
        kernels.grids.append(grid)
        made = library(build.path, build.row.stem, prelude(build), kernels.changes)
        schedule = (kernels.clusters, kernels.seed, kernels.lateness)
        wrong = made.run_grid(
            arguments,
            *grid,
            build.cfg.threads,
            build.smem,
            build.cfg.cluster,
            *schedule,
        )
        assert not wrong, f"{build.row.name}: {wrong.decode()}"


class Kernels(fake_gpu.Kernels):
    """The kernels of the fake GPU by their sources, with ``changes`` made to these first.

    With a ``seed`` warps take their turns in a random order, each as long as it gets anywhere;
    with 0 all threads go on together. ``clusters`` run at once, three at most, then the next ones.
    """

    seed, lateness, clusters = 0, LATE, 1
    changes: tuple[tuple[str, str], ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.grids: list[tuple[int, int, int]] = []

    def kernel(  # type: ignore[override]
        self, row: Row, problem: Problem, *, selection: Any = None, **options: Any
    ) -> Kernel:
        """In the place of ``launch.kernel``."""
        dims = options.pop("head_dims", None) or (problem.head_dim, problem.head_dim_v)
        bounds = (problem.window_left >= 0, problem.window_right >= 0)
        blocks = selection.blocks(problem) if selection else NO_BLOCKS
        atomic, direction = options.get("atomic", False), options.get("direction", NO_DIRECTION)
        kind = (atomic, direction, blocks, options.get("scaled", False), options["args_bytes"])
        of_dense = (problem.softcap > 0, problem.has_sinks, problem.has_seqused_k)
        return Kernel(self, Build(row, problem.dtype, *dims, *bounds, *kind, *of_dense))


# ---- memory -------------------------------------------------------------------------------------

_MPROTECT = ctypes.CDLL(None, use_errno=True).mprotect
_NONE, _READ = 0, 1


def _protect(address: int, size: int, how: int) -> None:
    if _MPROTECT(ctypes.c_void_p(address), ctypes.c_size_t(size), how):
        raise OSError(ctypes.get_errno(), "mprotect")


def guarded(values: Any, dtype: Any = None) -> np.ndarray:
    """A copy whose memory ends, up to 15 bytes, where pages that nobody may touch begin; others
    lie less than a page in front of it. What was read-only stays so, for pointers too."""
    given = np.asarray(values)
    kind, page = np.dtype(dtype or given.dtype), mmap.PAGESIZE
    size = -(-given.size * kind.itemsize // 16) * 16
    inside = -(-max(size, 1) // page) * page
    whole = np.frombuffer(mmap.mmap(-1, inside + 2 * page), np.uint8)
    start = whole.ctypes.data
    copy = whole[page + inside - size : page + inside].view(kind)
    copy = copy[: given.size].reshape(given.shape)
    copy[...] = given
    _protect(start, page, _NONE)
    _protect(start + page + inside, page, _NONE)
    if not given.flags.writeable:
        _protect(start + page, inside, _READ)
    return copy


def install(monkeypatch: Any) -> Kernels:
    """The fake GPU with the sources as its kernels, and with guarded memory."""
    library.cache_clear()  # the sources may be others than those of the last test
    kernels: Kernels = fake_gpu.install(monkeypatch, Kernels)
    monkeypatch.setattr(fake_gpu, "aligned", guarded)
    arrays = types.SimpleNamespace(asarray=lambda array: fake_gpu.cupy_array(guarded(array)))
    monkeypatch.setitem(sys.modules, "cupy", arrays)
    return kernels
