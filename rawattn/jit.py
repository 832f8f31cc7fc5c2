"""A build to a cubin, with a cache on disk.

The cubin is compiled by NVRTC through cuda-core, which needs no GPU and no toolkit. An entry of the
cache is a file: the digest of the rest, a line of JSON that says what the compiler said, the cubin.
"""

import hashlib
import io
import json
import os
import re
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rawattn import env
from rawattn.build import Build, prelude, source, sources_root


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and what the compiler said of it. ``seconds``: that the compile took."""

    cubin: bytes
    log: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    warnings: tuple[str, ...]
    seconds: float


def compile_build(build: Build, arch: str) -> Compiled:
    """Compile for an arch such as "sm_90", without a GPU and without the cache.

    Raises RuntimeError with row, options and log when NVRTC refuses.
    """
    from cuda.core import Program, ProgramOptions

    row = build.row
    text = prelude(build) + f'#line 1 "{build.path}"\n' + (sources_root() / build.path).read_text()
    options = _options(build, arch)
    log = io.StringIO()
    began = time.perf_counter()
    try:
        program = Program(
            text, "c++", ProgramOptions(include_path=[str(sources_root())], **options)
        )
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:
        said = f"{error}\n{log.getvalue()}".replace("\0", "")
        held = f"{env.DUMP.name}=FOLDER keeps the source"
        if env.value(env.DUMP):
            held = f"source: {_dump(build, arch, text, b'', said)}"
        raise RuntimeError(
            f"NVRTC refused row {row.name} for {arch}\n{build}\noptions {options}\n{said}\n{held}"
        ) from error
    seconds = time.perf_counter() - began
    compiled = _report(build, arch, cubin, log.getvalue().replace("\0", "").rstrip(), seconds)
    if env.value(env.DUMP):
        _dump(build, arch, text, cubin, compiled.log)
    if env.flag(env.LOG):
        print(f"rawattn: compiled {row.name} {arch} in {seconds:.2f} s", file=sys.stderr)
    return compiled


def _report(build: Build, arch: str, cubin: bytes, log: str, seconds: float) -> Compiled:
    """What the log says; RuntimeError when it says nothing, or that wgmma is serialised."""
    if "Used " not in log:
        raise RuntimeError(
            f"NVRTC gave no resource report for row {build.row.name} on {arch}; spills would go "
            f"unseen. Given log: {log!r}. Use an NVRTC of CUDA 12.9 or later."
        )
    compiled = Compiled(
        cubin,
        log,
        _number(r"Used (\d+) registers", log),
        _number(r"(\d+) bytes spill (?:stores|loads)", log),
        build.smem,
        tuple(re.findall(r".*C75\d\d.*|.*[Ww]arning.*", log)),
        seconds,
    )
    serialised = [warning for warning in compiled.warnings if "C75" in warning]
    if serialised and build.row.family == "sm90":
        raise RuntimeError(
            f"row {build.row.name} for {arch}: the compiler serialises its asynchronous matmuls, "
            f"which it is written for: {serialised[0]}. Keep accumulators out of branches and "
            f"calls between fence and wait."
        )
    return compiled


def _number(pattern: str, text: str) -> int:
    return sum(int(number) for number in re.findall(pattern, text))


def _options(build: Build, arch: str) -> dict[str, Any]:
    """``arch`` as the row's family needs it: sm_90a for wgmma and setmaxnreg."""
    specific = "" if arch.endswith(("a", "f")) else build.row.target_suffix
    options: dict[str, Any] = {
        "arch": arch + specific,
        "std": "c++17",
        "ptxas_options": ["-v"],
        "no_cache": True,
    }
    return options | ({"lineinfo": True} if env.flag(env.LINEINFO) else {})


def _dump(build: Build, arch: str, text: str, cubin: bytes, log: str) -> Path:
    """Source, log and cubin into the folder of RAWATTN_DUMP."""
    folder = Path(env.value(env.DUMP))
    folder.mkdir(parents=True, exist_ok=True)
    tag = hashlib.sha256(f"{build}".encode()).hexdigest()[:8]
    stem = folder / f"{build.row.name}_{arch}_{tag}"
    stem.with_suffix(".cu").write_text(text)
    stem.with_suffix(".log").write_text(log)
    stem.with_suffix(".cubin").write_bytes(cubin)
    return stem.with_suffix(".cu")


# --- the cache on disk -----------------------------------------------------------------------


def cache_key(build: Build, arch: str) -> str:
    """Everything a cubin depends on: sources with their includes, prelude, options, compiler."""
    options = json.dumps(_options(build, arch))
    parts = (prelude(build), source(build.path).text, options, _compiler())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _compiler() -> str:
    from cuda.bindings import nvrtc

    return "nvrtc {1}.{2}".format(*nvrtc.nvrtcVersion())


def cached_build(build: Build, arch: str) -> Compiled:
    """From the cache where it is there and whole, else compiled and, where possible, stored.

    Raises RuntimeError for a spill with RAWATTN_CHECK_SPILLS=1, for a cache of another user, and
    as ``compile_build``.
    """
    folder = None if env.flag(env.NO_CACHE) else _private_folder(env.cache_dir())
    if folder is None:
        return _checked(build, compile_build(build, arch))
    file = folder / f"{build.row.stem}_{arch}_{cache_key(build, arch)[:40]}.cubin"
    compiled = _read(file)
    if compiled is None:
        compiled = compile_build(build, arch)
        _write(file, compiled)
    return _checked(build, compiled)


def _checked(build: Build, compiled: Compiled) -> Compiled:
    if compiled.spill_bytes and env.flag(env.CHECK_SPILLS):
        raise RuntimeError(
            f"row {build.row.name} spills {compiled.spill_bytes} bytes; none is allowed with "
            f"{env.CHECK_SPILLS.name}=1. Unset it, or give the row smaller tiles."
        )
    return compiled


def _private_folder(folder: Path) -> Path | None:
    """The cache folder, made for its user alone; None, with a warning, where there can be none.

    A cubin is code: a folder that another user owns is refused, and nobody else may write ours.
    """
    if folder.parts[:1] == ("~",):  # there is neither HOME nor an entry of the user
        return _no_cache(f"no home folder is known for {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = folder.stat()
    except OSError as error:
        return _no_cache(f"{error}")
    if os.name != "posix":
        return folder
    if state.st_uid != os.getuid():
        raise RuntimeError(
            f"the kernel cache {folder} belongs to user id {state.st_uid}, not to you "
            f"({os.getuid()}); compiled kernels are code. Set {env.CACHE_DIR.name} to a folder "
            f"of your own, or {env.NO_CACHE.name}=1."
        )
    if state.st_mode & 0o077:
        try:
            folder.chmod(0o700)
        except OSError as error:  # a mount that is read-only may be read, if nobody else wrote it
            if state.st_mode & 0o022:
                return _no_cache(f"others may write {folder}: {error}")
    return folder


@cache
def _no_cache(why: str) -> None:
    """Say once that compiled kernels are not kept."""
    warnings.warn(
        f"rawattn compiles anew in every process, since compiled kernels cannot be kept: {why}. "
        f"Set {env.CACHE_DIR.name} to a folder that can be written, or {env.NO_CACHE.name}=1.",
        RuntimeWarning,
        stacklevel=2,
    )


def _read(file: Path) -> Compiled | None:
    try:
        data = file.read_bytes()
    except OSError:
        return None
    digest, payload = data[:32], data[32:]
    if hashlib.sha256(payload).digest() != digest:
        return None
    report, _, cubin = payload.partition(b"\n")
    said = json.loads(report)
    return Compiled(cubin=cubin, **said | {"warnings": tuple(said["warnings"])})


def _write(file: Path, compiled: Compiled) -> None:
    """Whole or not at all: written beside and renamed, so that processes may race."""
    said = asdict(compiled)
    cubin = said.pop("cubin")
    payload = json.dumps(said).encode() + b"\n" + cubin
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".writing-")
        with os.fdopen(handle, "wb") as stream:
            stream.write(hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, file)
    except OSError as error:
        if temporary is not None:
            os.unlink(temporary)
        _no_cache(f"{error.strerror}: {file.parent if temporary is None else file}")
