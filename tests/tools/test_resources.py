"""tools/resources.py and tools/dump_sass.py: what the compiler made of a row."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import dump_sass
import resources
from rawattn import jit
from rawattn.variants import TABLE


def test_resources_are_written_compared_and_judged(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core")
    file = tmp_path / "before.json"
    options = ["--filter", "block_order", "--jobs", "1"]
    first = CliRunner().invoke(resources.main, [*options, "--json", str(file)])
    assert first.exit_code == 0, first.output
    [(name, numbers)] = json.loads(file.read_text()).items()
    assert name.startswith("block_order_sm80 ") and 8 < numbers["registers"] < 256
    again = CliRunner().invoke(resources.main, [*options, "--against", str(file)])
    assert "nothing changed" in again.output
    file.write_text(json.dumps({name: numbers | {"registers": 1}}))
    changed = CliRunner().invoke(resources.main, [*options, "--against", str(file)])
    assert f"{name}: " in changed.output and "'registers': 1," in changed.output


def test_every_row_meant_for_an_arch_is_measured() -> None:
    names = {build.row.name for build in resources.wanted("sm_90", "").values()}
    assert names >= {row.name for row in TABLE if row.family == "sm80" and not row.when.max_ctas}


def test_sass_of_a_row_is_counted_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.core")
    program = tmp_path / "cuobjdump"
    program.write_text("#!/bin/sh\necho '        /*0090*/   HMMA.16816.F32 R4, R8, R12, R4 ;'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(shutil.which('sh') or '').parent}")
    done = CliRunner().invoke(dump_sass.main, ["block_order_sm80", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "HMMA" in done.output and "tensor core" in done.output
    [file] = (tmp_path / "out").iterdir()
    assert file.name == "block_order_sm80_sm_90_0.sass" and "HMMA.16816" in file.read_text()


def test_without_a_disassembler_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_sass, "_found", lambda tool: None)
    compiled = jit.Compiled(b"", "", 0, 0, 0, (), 0.0)
    monkeypatch.setattr(jit, "compile_build", lambda build, arch: compiled)
    done = CliRunner().invoke(dump_sass.main, ["block_order_sm80"])
    assert done.exit_code == 1 and "nvidia-cuda-nvdisasm" in done.output
