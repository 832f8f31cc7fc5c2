"""Rows of the variants table as cubins: which to build for a check or the cache, how they fare."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from rawattn import jit
from rawattn.build import ARCHS, NO_DIRECTION, WHOLE, Build, distinct
from rawattn.check.cases import HALF
from rawattn.ops.arguments import args_bytes
from rawattn.problem import Problem, Selection
from rawattn.variants import HEAD_DIMS, NO_BLOCKS, TABLE, Row, method_of, select, serves
from rawattn.variants.row import largest_block
from rawattn.variants.steps import SECOND, SPARSE_STEPS, STEPS, Step

ARCH_NUMBERS = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)  # compute capabilities from 8.0 on
HEADS_A_SELECTION, KEYS_A_BLOCK = 16, 64  # what native sparse attention is published with


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


def builds(row: Row) -> list[Build]:
    """The specialisations that are compiled to check a CUDA row: masks, dtypes, atomic or not, all
    options of dense attention, without those that come to the same kernel."""
    d, atomic = row.head_dim, row.kernel.accumulates
    whole, queries = NO_DIRECTION, NO_DIRECTION
    if row.kernel.directed:
        whole, queries = WHOLE, (True, False, False)
    half, brain = HALF
    size = args_bytes(row.stem, row.family)
    if row.kernel.sparse:
        made = [
            Build(row, brain, d, d, False, True, atomic, whole, (16, 64), args_bytes=size),
            Build(row, brain, d, d, False, True, atomic, queries, (4, 16), args_bytes=size),
            Build(row, half, d, d, False, False, False, whole, (1, largest_block(row)), True, size),
        ]
    else:
        made = [
            Build(row, brain, d, d, False, True, atomic, whole, args_bytes=size),
            Build(row, brain, d, d, False, False, atomic, queries, args_bytes=size),
            Build(row, half, d, d, True, True, False, whole, args_bytes=size),
        ]
        capped = replace(made[0], softcap=row.when.softcap is not False)
        whole_rows = replace(capped, has_right=False)  # without a mask registers lie otherwise
        made = [replace(build, softcap=row.when.softcap is True) for build in made]
        made += [
            replace(capped, sinks=True, seqused_k=True),
            whole_rows,
            replace(whole_rows, atomic=False),
        ]
    return distinct(made)


def standard_builds(*, every: bool) -> list[Build]:
    """The builds that stand for the table: every form of each CUDA row, or the first alone."""
    forms = [builds(row) for row in TABLE if row.family != "numba"]
    return [build for form in forms for build in (form if every else form[:1])]


def sample_builds(archs_each: int) -> list[tuple[Build, str]]:
    """The first form of each CUDA row, for that many of the architectures that the row is meant
    for: those that its kernel, and then the whole table, has met least."""
    met: Counter[tuple[str, str]] = Counter()
    sample = []
    for build in standard_builds(every=False):
        row = build.row
        meant = [arch for arch in ARCHS if serves(row, arch_number(arch))]
        times = {arch: (met[row.stem, arch], met["", arch]) for arch in meant}
        for arch in sorted(meant, key=times.__getitem__)[:archs_each]:
            met.update([(row.stem, arch), ("", arch)])
            sample.append((build, arch))
    return sample


def library_builds(arch: str) -> list[Build]:
    """What calls on ``arch`` need: native head_dims, causal or not, default and deterministic.

    Beyond first derivatives: a direction of three parts, large problems and small ones. Of
    block-sparse attention: see ``sparse_builds``.
    """
    return distinct((*sparse_builds(arch), *_dense_builds(arch)))


def _dense_builds(arch: str) -> Iterator[Build]:
    methods = dict.fromkeys((method_of(None, False), method_of(None, True), *SECOND))
    steps = dict.fromkeys((Step("forward"), *(step for name in methods for step in STEPS[name])))
    for head_dim, dtype, right in product(HEAD_DIMS, HALF, (-1, 0)):
        sizes = (1, 1, 1, 1, 1, head_dim, head_dim)
        problem = Problem(dtype, *sizes, -1, right, 1.0, arch_number(arch), 0)
        for step in steps:
            rows = [select(step.stem, problem, by_size=small) for small in (False, True)]
            for row in dict.fromkeys(rows):
                direction = WHOLE if row.kernel.directed else NO_DIRECTION
                fixed = (dtype, head_dim, head_dim, False, right == 0, step.atomic, direction)
                if row.family != "numba":  # the widest tiles do not fit every GPU
                    yield Build(row, *fixed, args_bytes=args_bytes(row.stem, row.family))


def sparse_builds(arch: str) -> Iterator[Build]:
    """What causal calls of block-sparse attention on ``arch`` need, with the blocks of the paper
    and no factors of blocks: native head_dims, both backward passes, a direction of three parts."""
    selection = Selection(1, 16, KEYS_A_BLOCK, True, 256)
    steps = dict.fromkeys(step for name in SPARSE_STEPS for step in SPARSE_STEPS[name])
    for head_dim, dtype in product(HEAD_DIMS, HALF):
        sizes = (1, 1, 1, HEADS_A_SELECTION, 1, head_dim, head_dim)
        problem = Problem(dtype, *sizes, -1, 0, 1.0, arch_number(arch), 0)
        for step in steps:
            row = select(step.stem, problem, selection=selection)
            direction = WHOLE if row.kernel.directed else NO_DIRECTION
            blocks = (HEADS_A_SELECTION, KEYS_A_BLOCK) if row.kernel.sparse else NO_BLOCKS
            fixed = (dtype, head_dim, head_dim, False, True, step.atomic, direction, blocks)
            if row.family != "numba":  # the widest tiles do not fit every GPU
                yield Build(row, *fixed, args_bytes=args_bytes(row.stem, row.family))


def arch_number(arch: str) -> int:
    """90 for "sm_90" and for "sm_90a"; ValueError for what no kernel is compiled for."""
    found = re.fullmatch(r"sm_(\d+)(a|f|)", arch)
    since = {"": 80, "a": 90, "f": 100}  # the first to have an architecture of its own, a family
    if not found or not since[found[2]] <= int(found[1]) or int(found[1]) not in ARCH_NUMBERS:
        known = ", ".join(f"sm_{number}" for number in ARCH_NUMBERS)
        raise ValueError(
            f"no kernel is compiled for {arch!r}: expected one of {known}, or from sm_90 on with a "
            f"behind it, from sm_100 on with f. Older GPUs run the Numba kernels."
        )
    return int(found[1])


def warm_build(build: Build, arch: str) -> str:
    """Put the cubin of ``build`` into the cache; what went wrong, or ""."""
    try:
        jit.cached_build(build, arch)
    except (RuntimeError, ImportError) as error:
        return str(error)
    return ""


def compile_row(build: Build, arch: str, *, strict: bool = False) -> Built:
    """Compile one specialisation for one arch, without the cache; ``strict`` as in Built.ok."""
    name = (build.row.name, describe(build), arch)
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
    """What a build fixes beside its row: "bf16 ra qv" is masked on the right, atomic, and for a
    direction (tq, None, tv); "16x64 s" has 16 heads a selection, 64 keys a block, and factors;
    options have their names."""
    dtype = {"float16": "f16", "bfloat16": "bf16"}[build.dtype]
    flags = "l" * build.has_left + "r" * build.has_right + "a" * build.atomic
    parts = "".join(part for part, there in zip("qkv", build.direction, strict=True) if there)
    blocks = "x".join(map(str, build.blocks)) if any(build.blocks) else ""
    options = [name for name in ("softcap", "sinks", "seqused_k") if getattr(build, name)]
    return " ".join(filter(None, (dtype, flags, parts, blocks, "s" * build.scaled, *options)))
