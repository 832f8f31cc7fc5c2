"""Row of the table -> prelude + source -> cubin -> kernel on a device, with a cache on disk.

The cubin is compiled by NVRTC through cuda-core, which needs no GPU and no toolkit, and
loaded by CuPy. Longer than a module should be, because what a build is made of, what its cache
entry is keyed by and what is loaded must agree, and stand together.
"""

import hashlib
import io
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from rawattn import env
from rawattn.problem import Problem, Selection
from rawattn.variants import (
    LIST_STEMS,
    NO_BLOCKS,
    RING_STEMS,
    SPARSE_STEMS,
    Blocks,
    Variant,
    block_keys,
    largest_block,
    ring_stages,
    smem_bytes,
    tile_widths,
)

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
_OF_THE_CHOICE = (  # fields that say when a row is chosen; the kernel does not see them
    *("name", "stem", "why", "family", "head_dim"),
    *("min_smem_kib", "max_arch", "max_ctas"),
)
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_ACCUMULATING = (  # stems with an atomic form
    *("backward_kv", "backward_q", "double_backward_kv", "sparse_backward_kv"),
)
_DIRECTED = (
    *("jvp", "double_backward_out", "double_backward_kv", "double_backward_q"),
    *("sparse_double_backward_out", "sparse_double_backward_kv", "sparse_double_backward_q"),
)
_OF_LISTS = ("bfloat16", 32, 32, False, False, False)  # one build of LIST_STEMS serves all problems
Direction = tuple[bool, bool, bool]  # which parts of (tq, tk, tv), or (ddq, ddk, ddv), are there
NO_DIRECTION = (False, False, False)


@dataclass(frozen=True, slots=True)
class Build:
    """A row specialised to what is fixed at compile time.

    Of a sparse row, ``blocks`` are (query heads that share a selection, keys of a block), and
    ``scaled`` says that blocks have factors.
    """

    variant: Variant
    dtype: str
    head_dim: int
    head_dim_v: int
    has_left: bool
    has_right: bool
    atomic: bool
    direction: Direction = NO_DIRECTION
    blocks: Blocks = NO_BLOCKS
    scaled: bool = False

    @property
    def smem(self) -> int:
        """Dynamic shared memory in bytes."""
        widths = tile_widths(self.head_dim, self.head_dim_v)
        return smem_bytes(self.variant, *widths, self.atomic, self.blocks)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and what the compiler said of it."""

    cubin: bytes
    log: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    warnings: tuple[str, ...]
    seconds: float


def builds(variant: Variant) -> list[Build]:
    """The specialisations that are compiled to check a CUDA row: masks, dtypes, atomic or not."""
    d = variant.head_dim
    atomic = variant.stem in _ACCUMULATING
    whole, queries = NO_DIRECTION, NO_DIRECTION
    if variant.stem in _DIRECTED:
        whole, queries = (True, True, True), (True, False, False)
    if variant.stem in LIST_STEMS:
        return [Build(variant, *_OF_LISTS)]
    if variant.stem in SPARSE_STEMS:
        largest = largest_block(variant)
        return [
            Build(variant, "bfloat16", d, d, False, True, atomic, whole, (16, 64)),
            Build(variant, "bfloat16", d, d, False, True, atomic, queries, (4, 16)),
            Build(variant, "float16", d, d, False, False, False, whole, (1, largest), True),
        ]
    return [
        Build(variant, "bfloat16", d, d, False, True, atomic, whole),
        Build(variant, "bfloat16", d, d, False, False, atomic, queries),
        Build(variant, "float16", d, d, True, True, False, whole),
    ]


def sources_root() -> Path:
    """The folder of the CUDA sources: package data, in a checkout beside the package."""
    try:
        return Path(str(resources.files("rawattn.kernels_cu")))
    except ModuleNotFoundError:
        return Path(__file__).resolve().parent.parent / "kernels_cu"


def prelude(build: Build) -> str:
    """The constants of a build as ``namespace cfg``, to stand in front of the source."""
    row = {
        field.name.upper(): getattr(build.variant, field.name)
        for field in fields(Variant)
        if field.name not in _OF_THE_CHOICE
    }
    width, width_v = tile_widths(build.head_dim, build.head_dim_v)
    constants: dict[str, int | bool] = row | {
        "HEAD_DIM": width,
        "HEAD_DIM_V": width_v,
        "WIDTH": build.head_dim,
        "WIDTH_V": build.head_dim_v,
        "BF16": build.dtype == "bfloat16",
        "HAS_LEFT": build.has_left,
        "HAS_RIGHT": build.has_right,
        "ATOMIC": build.atomic,
        "HAS_TQ": build.direction[0],
        "HAS_TK": build.direction[1],
        "HAS_TV": build.direction[2],
        "HAS_SCALE": build.scaled,
        "SMEM_BYTES": build.smem,
    }
    if build.variant.stem in SPARSE_STEMS:
        constants |= {
            "GROUP": build.blocks[0],
            "BLOCK_SIZE": build.blocks[1],
            "BLOCK_N": block_keys(build.variant, build.blocks[1]),
        }
    if build.scaled:  # factors take registers that a CTA less leaves
        constants["MIN_CTAS"] = max(1, build.variant.min_ctas - 1)
    if build.variant.stem in RING_STEMS:
        constants["NUM_STAGES"] = ring_stages(build.variant, width, width_v, build.blocks)
    lines = [
        f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {str(value).lower()};"
        for name, value in constants.items()
    ]
    unused = "#pragma nv_diag_suppress 177"  # a kernel need not use every constant
    return "\n".join([unused, "namespace cfg {", *lines, "}  // namespace cfg", ""])


@cache
def _closure(path: str) -> str:
    """The text of a source and of everything it includes."""
    texts: dict[str, str] = {}
    pending = [path]
    while pending:
        name = pending.pop()
        if name not in texts:
            texts[name] = (sources_root() / name).read_text()
            pending += _INCLUDE.findall(texts[name])
    return "\0".join(f"{name}\0{texts[name]}" for name in sorted(texts))


def compile_build(build: Build, arch: str) -> Compiled:
    """Compile for an arch such as "sm_90", without a GPU and without the cache.

    Raises RuntimeError with row, options, log and file when NVRTC refuses.
    """
    from cuda.core import Program, ProgramOptions

    variant = build.variant
    path = f"{variant.family}/{variant.stem}.cu"
    source = prelude(build) + f'#line 1 "{path}"\n' + (sources_root() / path).read_text()
    options = _options(arch)
    log = io.StringIO()
    began = time.perf_counter()
    program = Program(source, "c++", ProgramOptions(include_path=[str(sources_root())], **options))
    try:
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:
        dump = _dump(build, arch, source, b"", f"{error}\n{log.getvalue()}")
        raise RuntimeError(
            f"NVRTC refused row {variant.name} for {arch}\n{build}\noptions {options}\n"
            f"{error}\n{log.getvalue()}\nsource: {dump}"
        ) from error
    seconds = time.perf_counter() - began
    text = log.getvalue().rstrip("\0")
    if "Used " not in text:
        raise RuntimeError(
            f"NVRTC gave no resource report for row {variant.name} on {arch}; spills would go "
            f"unseen. Given log: {text!r}. Use an NVRTC of CUDA 12.9 or later."
        )
    compiled = Compiled(
        cubin,
        text,
        _number(r"Used (\d+) registers", text),
        _number(r"(\d+) bytes spill stores", text) + _number(r"(\d+) bytes spill loads", text),
        build.smem,
        tuple(re.findall(r".*C75\d\d.*|.*[Ww]arning.*", text)),
        seconds,
    )
    if env.value(env.DUMP):
        _dump(build, arch, source, cubin, text)
    if env.flag(env.LOG):
        print(f"rawattn: compiled {variant.name} {arch} in {seconds:.2f} s", file=sys.stderr)
    return compiled


def _options(arch: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "arch": arch,
        "std": "c++17",
        "ptxas_options": ["-v"],
        "no_cache": True,
    }
    return options | ({"lineinfo": True} if env.flag(env.LINEINFO) else {})


def _number(pattern: str, text: str) -> int:
    return sum(int(number) for number in re.findall(pattern, text))


def _dump(build: Build, arch: str, source: str, cubin: bytes, log: str) -> Path:
    folder = Path(env.value(env.DUMP) or tempfile.mkdtemp(prefix="rawattn-"))
    folder.mkdir(parents=True, exist_ok=True)
    tag = hashlib.sha256(f"{build}".encode()).hexdigest()[:8]
    stem = folder / f"{build.variant.name}_{arch}_{tag}"
    stem.with_suffix(".cu").write_text(source)
    stem.with_suffix(".log").write_text(log)
    stem.with_suffix(".cubin").write_bytes(cubin)
    return stem.with_suffix(".cu")


# --- the cache on disk -----------------------------------------------------------------------


def cache_key(build: Build, arch: str) -> str:
    """Everything a cubin depends on: sources with their includes, prelude, options, compiler."""
    path = f"{build.variant.family}/{build.variant.stem}.cu"
    parts = (prelude(build), _closure(path), json.dumps(_options(arch)), _compiler())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _compiler() -> str:
    from cuda.bindings import nvrtc

    return "nvrtc {1}.{2}".format(*nvrtc.nvrtcVersion())


def cached_build(build: Build, arch: str) -> bytes:
    """The cubin, from the cache where it is there and whole, else compiled and stored."""
    if env.flag(env.NO_CACHE):
        return _checked(build, compile_build(build, arch))
    folder = _private_folder(env.cache_dir())
    file = folder / f"{build.variant.stem}_{arch}_{cache_key(build, arch)[:40]}.cubin"
    cubin = _read(file)
    if cubin is None:
        cubin = _checked(build, compile_build(build, arch))
        _write(file, cubin)
    return cubin


def _checked(build: Build, compiled: Compiled) -> bytes:
    if compiled.spill_bytes and env.flag(env.CHECK_SPILLS):
        raise RuntimeError(
            f"row {build.variant.name} spills {compiled.spill_bytes} bytes; none is allowed with "
            f"{env.CHECK_SPILLS.name}=1. Unset it, or give the row smaller tiles."
        )
    return compiled.cubin


def _private_folder(folder: Path) -> Path:
    """The cache folder, made for its user alone. A cubin is code: nobody else may write it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.name == "posix":
        state = folder.stat()
        if state.st_uid != os.getuid():
            raise RuntimeError(
                f"the kernel cache {folder} belongs to user id {state.st_uid}, not to you "
                f"({os.getuid()}); compiled kernels are code. Set {env.CACHE_DIR.name} to a folder "
                f"of your own, or {env.NO_CACHE.name}=1."
            )
        if state.st_mode & 0o077:
            folder.chmod(0o700)
    return folder


def _read(file: Path) -> bytes | None:
    try:
        data = file.read_bytes()
    except OSError:
        return None
    digest, payload = data[:32], data[32:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def _write(file: Path, payload: bytes) -> None:
    """Whole or not at all: written beside and renamed, so that processes may race."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, file)
    except OSError:
        os.unlink(temporary)
        raise


# --- kernels on a device ---------------------------------------------------------------------


class Kernel:
    """A kernel on one device, ready to launch."""

    def __init__(self, build: Build, arch: str) -> None:
        import cupy
        import numpy

        cubin = cached_build(build, arch)
        with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
            file.write(cubin)
        try:
            raw = cupy.RawModule(path=file.name).get_function(build.variant.stem)
            if build.smem > 48 * 1024:
                raw.max_dynamic_shared_size_bytes = build.smem
            self._function = raw.kernel
            self._raw = raw
        finally:
            os.unlink(file.name)
        self._threads = (32 * build.variant.num_warps, 1, 1)
        self._smem = build.smem
        self._name = build.variant.name
        self._wait = env.flag(env.SYNC)
        self._by_value = numpy.frombuffer  # a one-element array is what CuPy passes by value

    def launch(self, grid: tuple[int, int, int], arguments: bytes, stream: int) -> None:
        """Launch on a raw stream handle; ``arguments`` are the bytes of ``struct Args``."""
        self._function(
            grid,
            self._threads,
            (self._by_value(arguments, dtype=f"V{len(arguments)}"),),
            self._smem,
            _stream(stream),
        )
        if self._wait:
            self._synchronize(stream)

    def _synchronize(self, stream: int) -> None:
        try:
            _stream(stream).synchronize()
        except Exception as error:
            raise RuntimeError(f"kernel {self._name} failed: {error}") from error


class _Handle(NamedTuple):
    """A raw stream handle, in the form that CuPy takes."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


@lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    import cupy

    return cupy.cuda.Stream.from_external(_Handle(handle))


def kernel(
    variant: Variant,
    problem: Problem,
    *,
    atomic: bool = False,
    head_dims: tuple[int, int] | None = None,
    direction: Direction = NO_DIRECTION,
    selection: Selection | None = None,
    scaled: bool = False,
) -> Kernel:
    """The loaded kernel of a row for a problem, compiled at its first use.

    The device must be current. ``head_dims`` stand in for the problem's (head_dim, head_dim_v)
    where a kernel handles one tensor, which may be V's. ``selection`` and ``scaled`` (are there
    factors of blocks) are for sparse rows.
    """
    if variant.stem in LIST_STEMS:
        of_lists = (*_OF_LISTS, NO_DIRECTION, NO_BLOCKS, False)
        return _kernel(variant, *of_lists, problem.arch, problem.device)
    return _kernel(
        variant,
        problem.dtype,
        *(head_dims or (problem.head_dim, problem.head_dim_v)),
        problem.window_left >= 0,
        problem.window_right >= 0,
        atomic,
        direction,
        selection.blocks(problem) if selection else NO_BLOCKS,
        scaled,
        problem.arch,
        problem.device,
    )


@cache
def _kernel(
    variant: Variant,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    has_left: bool,
    has_right: bool,
    atomic: bool,
    direction: Direction,
    blocks: Blocks,
    scaled: bool,
    arch: int,
    device: int,
) -> Kernel:
    widths, mask = (head_dim, head_dim_v), (has_left, has_right)
    build = Build(variant, dtype, *widths, *mask, atomic, direction, blocks, scaled)
    return Kernel(build, f"sm_{arch}")
