"""What a build puts in front of its source, and which builds stand for a row."""

import re
from dataclasses import fields, replace

import pytest

from rawattn.build import Build, distinct, prelude, source, sources_root
from rawattn.check.compiled import builds
from rawattn.ops.arguments import args_bytes
from rawattn.variants import TABLE, Row, Tiles

ROWS = {row.name: row for row in TABLE}
CUDA_ROWS = [row for row in TABLE if row.family != "numba"]
FORWARD = Build(ROWS["forward_sm80_d64_128x64"], "bfloat16", 64, 64, False, True, False)


def constants(build: Build) -> dict[str, tuple[str, str]]:
    """The prelude's constants: name -> (type, value)."""
    found = re.findall(r"constexpr (\w+) (\w+) = (\w+);$", prelude(build), re.MULTILINE)
    return {name: (kind, value) for kind, name, value in found}


@pytest.mark.parametrize("row", CUDA_ROWS, ids=lambda row: row.name)
def test_prelude_holds_the_choices_of_a_row_that_its_source_reads(row: Row) -> None:
    d = row.head_dim
    size = args_bytes(row.stem)
    build = Build(row, "float16", d, d, False, True, False, blocks=(16, 64), args_bytes=size)
    given, read = constants(build), source(build.path).names
    assert given.keys() == read, "no more and no less"
    for field in fields(build.cfg):
        if field.name.upper() in read:
            value = getattr(build.cfg, field.name)
            kind = "bool" if isinstance(value, bool) else "int"
            assert given[field.name.upper()] == (kind, str(value).lower())
    assert given["ARGS_BYTES"] == ("int", str(size))
    if "SMEM_BYTES" in read:
        assert given["SMEM_BYTES"] == ("int", str(row.smem_bytes(Tiles(d, d, False, (16, 64)))))


def test_kernels_that_know_no_mask_are_built_once() -> None:
    for stem, once in (("backward_preprocess", True), ("block_lists", True), ("forward", False)):
        row = next(row for row in TABLE if row.stem == stem)
        masks = [(left, right) for left in (False, True) for right in (False, True)]
        made = [Build(row, "bfloat16", 64, 64, *mask, False) for mask in masks]
        assert len(distinct(made)) == (1 if once else 4)


def test_prelude_spells_blocks_and_leaves_registers_to_their_factors() -> None:
    row = next(row for row in TABLE if row.stem == "sparse_forward" and row.cfg.min_ctas > 1)
    build = Build(row, "float16", 64, 64, False, True, False, blocks=(4, 16))
    plain, scaled = constants(build), constants(replace(build, scaled=True))
    assert plain["GROUP"] == ("int", "4") and plain["BLOCK_SIZE"] == ("int", "16")
    assert plain["BLOCK_N"] == ("int", "16"), "no more keys than a block has"
    assert plain["HAS_BLOCK_SCALE"] == ("bool", "false")
    assert scaled["HAS_BLOCK_SCALE"] == ("bool", "true")
    assert int(scaled["MIN_CTAS"][1]) == row.cfg.min_ctas - 1 == int(plain["MIN_CTAS"][1]) - 1
    assert scaled["NUM_STAGES"] == plain["NUM_STAGES"]


def test_prelude_spells_widths_dtype_and_masks() -> None:
    given = constants(Build(FORWARD.row, "bfloat16", 40, 72, False, True, False))
    assert given["WIDTH"] == ("int", "40") and given["HEAD_DIM"] == ("int", "64")
    assert given["WIDTH_V"] == ("int", "72") and given["HEAD_DIM_V"] == ("int", "96")
    assert given["BF16"] == ("bool", "true") and "ATOMIC" not in given
    assert given["HAS_LEFT"] == ("bool", "false") and given["HAS_RIGHT"] == ("bool", "true")
    assert constants(replace(FORWARD, dtype="float16"))["BF16"] == ("bool", "false")


def test_builds_cover_masks_dtypes_and_the_atomic_form() -> None:
    for row in CUDA_ROWS:
        made, kernel = builds(row), row.kernel
        assert made and distinct(made) == made
        if kernel.any_width:
            continue
        assert {build.dtype for build in made} == {"float16", "bfloat16"}
        masks = {(False, False), (False, True) if kernel.sparse else (True, True)}
        assert {(build.has_left, build.has_right) for build in made} >= masks
        assert {build.scaled for build in made} == ({True, False} if kernel.sparse else {False})
        assert len({build.blocks for build in made}) == (3 if kernel.sparse else 1)
        assert {b.atomic for b in made} == ({True, False} if kernel.accumulates else {False})
        assert {b.sinks and b.seqused_k for b in made} == (
            {False} if kernel.sparse else {True, False}
        )
        if not kernel.sparse:
            assert any(build.softcap for build in made) == (row.when.softcap is not False)
        directions = {(True, True, True), (True, False, False)}
        assert {b.direction for b in made} == (directions if kernel.directed else {(False,) * 3})


def test_facts_of_a_kernel_are_those_of_its_source() -> None:
    """A directed kernel is one that reads HAS_TQ, an accumulating one reads ATOMIC, and so on."""
    for kernel in {row.kernel for row in CUDA_ROWS}:
        read = source(f"sm80/{kernel.stem}.cu").names
        assert ("HAS_TQ" in read) == kernel.directed, kernel.stem
        assert ("HEAD_DIM" not in read or kernel.stem.endswith("process")) == kernel.any_width
        if kernel.accumulates:
            assert "ATOMIC" in read, kernel.stem
        if kernel.sparse and not kernel.any_width:
            assert {"GROUP", "BLOCK_SIZE"} <= read, kernel.stem


def test_no_source_reads_constants_in_a_way_that_would_not_be_seen() -> None:
    for path in [*sources_root().rglob("*.cu"), *sources_root().rglob("*.cuh")]:
        assert not re.search(r"namespace\s+cfg", path.read_text()), path
