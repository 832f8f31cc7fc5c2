"""Rows of the variants table as cubins: which to build for a check or the cache, how they fare."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rawattn import jit
from rawattn.check.cases import HALF
from rawattn.jit import Build
from rawattn.problem import Problem
from rawattn.variants import HEAD_DIMS, TABLE, method_of, select

# the kernels of a call, and whether they add atomically; those of each method of backward
SHARED_STEPS = (("forward", False), ("backward_preprocess", False), ("backward_postprocess", False))
METHOD_STEPS = {
    "atomic_dq": (("backward_kv", True),),
    "atomic_dkv": (("backward_q", True),),
    "two_pass": (("backward_kv", False), ("backward_q", False)),
}


@dataclass(frozen=True, slots=True)
class Built:
    """One specialisation of a table row, compiled for one arch; ``error`` where NVRTC refused."""

    row: str
    form: str
    arch: str
    registers: int = 0
    smem_bytes: int = 0
    spill_bytes: int = 0
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    error: str = ""
    strict: bool = False

    @property
    def serialized(self) -> bool:
        """ptxas said (C75xx) that it serialises the asynchronous matmuls of the kernel."""
        return any("C75" in warning for warning in self.warnings)

    @property
    def ok(self) -> bool:
        """It compiles; ``strict``: without a spill and without serialised matmuls."""
        return not (self.error or (self.strict and (self.spill_bytes or self.serialized)))


def standard_builds(*, every: bool) -> list[Build]:
    """The builds that stand for the table: every form of each CUDA row, or the first alone."""
    forms = [jit.builds(row) for row in TABLE if row.family != "numba"]
    return [build for form in forms for build in (form if every else form[:1])]


def library_builds(arch: str) -> Iterator[Build]:
    """What calls on ``arch`` need: native head_dims, causal or not, default and two_pass."""
    number = int(re.sub(r"\D", "", arch))
    for head_dim in HEAD_DIMS:
        for dtype in HALF:
            for right in (-1, 0):
                sizes = (1, 1, 1, 1, 1, head_dim, head_dim)
                problem = Problem(dtype, *sizes, -1, right, 1.0, number, 0)
                default = METHOD_STEPS[method_of(problem, None, False)]
                for stem, atomic in (*SHARED_STEPS, *default, *METHOD_STEPS["two_pass"]):
                    row = select(stem, problem, backend="cuda")
                    yield Build(row, dtype, head_dim, head_dim, False, right == 0, atomic)


def warm_build(build: Build, arch: str) -> str:
    """Put the cubin of ``build`` into the cache; what went wrong, or ""."""
    try:
        jit.cached_build(build, arch)
    except (RuntimeError, ImportError) as error:
        return str(error)
    return ""


def compile_row(build: Build, arch: str, *, strict: bool = False) -> Built:
    """Compile one specialisation for one arch, without the cache; ``strict`` as in Built.ok."""
    name = (build.variant.name, describe(build), arch)
    try:
        compiled = jit.compile_build(build, arch)
    except (RuntimeError, ImportError) as error:
        return Built(*name, error=str(error), strict=strict)
    return Built(
        *name,
        compiled.registers,
        compiled.smem_bytes,
        compiled.spill_bytes,
        compiled.seconds,
        compiled.warnings,
        strict=strict,
    )


def describe(build: Build) -> str:
    """What a build fixes beside its row: "bf16 ra" is masked on the right and atomic."""
    dtype = {"float16": "f16", "bfloat16": "bf16"}[build.dtype]
    flags = "l" * build.has_left + "r" * build.has_right + "a" * build.atomic
    return f"{dtype} {flags}".rstrip()
