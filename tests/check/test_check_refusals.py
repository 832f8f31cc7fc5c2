"""What cannot be done is refused before the work, in a line that says what can."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import rawattn
from rawattn import env
from rawattn.build import ARCHS
from rawattn.check import cli, cli_diff, machine, options
from rawattn.variants import TABLE, serves

CANDIDATE = "def attend(q, k, v, cu_seqlens):\n    raise SystemExit('called')\n"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Calls rawattn-check, which must not begin to work."""

    def refused(*arguments: object, code: int = 2) -> str:
        result = CliRunner().invoke(cli.main, [str(a) for a in arguments])
        assert result.exit_code == code, result.output
        assert code == 0 or "Error: " in result.output
        return " ".join(result.output.split())

    def work(*arguments: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(cli, "work", work)
    monkeypatch.setattr(cli_diff, "evaluate", work)
    return refused


@pytest.fixture
def candidate(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(CANDIDATE)
    return f"{tmp_path / 'mine.py'}:attend"


@pytest.mark.parametrize("command", ["compile", "warm"])
@pytest.mark.parametrize("arch", ["foo", "sm_75", "sm_999", "90", "sm_80a", "compute_90", ""])
def test_architectures_without_rows(command: str, arch: str, check) -> None:
    said = check(command, "--arch", "sm_90", "--arch", arch)
    assert repr(arch) in said and all(name in said for name in ARCHS)


def test_files_in_folders_that_are_not_there(check, candidate: str, tmp_path: Path) -> None:
    file = tmp_path / "no" / "such.json"
    for arguments in (
        ("run", "--json", file),
        ("compile", "--json", file),
        ("diff", "--candidate", candidate, "--json", file),
        ("diff", "--candidate", candidate, "--html", file),
        ("dump", "--lengths", "3", "--out", file),
    ):
        assert f"there is no folder {file.parent}" in check(*arguments)
    assert "is a directory" in check("run", "--json", tmp_path)


@pytest.mark.parametrize("variable", [env.CACHE_DIR.name, env.DUMP.name])
def test_folders_that_are_files(variable: str, check, candidate: str, monkeypatch) -> None:
    file = candidate.rpartition(":")[0]
    monkeypatch.setenv(variable, file)
    for command in (("run",), ("warm", "--arch", "sm_90"), ("diff", "--candidate", candidate)):
        said = check(*command)
        assert f"{variable} is {file!r}" in said and "no folder" in said
    assert f"{variable} is {file!r}" in check("env", code=0), "which shows what is wrong"


def test_frameworks_that_are_not_here(check, candidate: str, monkeypatch) -> None:
    monkeypatch.setattr(cli_diff, "gpu_name", lambda: "")
    said = check("diff", "--candidate", candidate, "--framework", "cupy")
    assert "needs CuPy and a GPU" in said and "--framework numpy" in said
    monkeypatch.setattr(cli_diff, "has_torch", lambda: False)
    for option, name in (("--framework", "torch"), ("--against", "torch")):
        said = check("diff", "--candidate", candidate, option, name)
        assert f"{option} torch needs torch" in said and "pip install torch" in said


@pytest.mark.parametrize("lengths", ["-3,4", "3,-1", "three"])
def test_lengths_that_are_none(lengths: str, check, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for option in ("--lengths", "--lengths-k"):
        assert repr(lengths) in check("dump", "--lengths", "3,4", option, lengths)
    assert not list(tmp_path.iterdir())


@pytest.mark.sweep
def test_warm_finds_every_row_or_says_why_not(check, monkeypatch) -> None:
    for arch in ("sm_86", "sm_90"):
        for row in TABLE:
            if row.family != "numba" and serves(row, int(arch[3:])):
                assert row.name in {build.row.name for build in cli.to_warm(arch, row.name)}
    assert "first called" in check("warm", "--arch", "sm_90", "--filter", "forward_numba")
    assert "`rawattn-check variants`" in check("warm", "--arch", "sm_90", "--filter", "nothing")
    row = next(row for row in TABLE if row.family != "numba" and not serves(row, 86))
    said = check("warm", "--arch", "sm_86", "--filter", row.name)
    assert f"{row.name} is not for sm_86" in said


def test_doubts_about_the_environment() -> None:
    row = TABLE[0].name
    assert (
        options.doubts({"RAWATTN_LOG": "1", "RAWATTN_VARIANT": f"{row}, {row},", "OTHER": ""}) == []
    )
    doubts = options.doubts({"RAWATTN_CACH_DIR": "x", "RAWATTN_VARIANT": f"{row},{row[:-1]},quux"})
    assert len(doubts) == 3
    assert "RAWATTN_CACH_DIR" in doubts[0] and "is RAWATTN_CACHE_DIR meant" in doubts[0]
    assert repr(row[:-1]) in doubts[1] and f"is {row} meant" in doubts[1]
    assert "'quux'" in doubts[2] and "meant" not in doubts[2]


def test_doubts_are_said_by_every_command(check, monkeypatch) -> None:
    monkeypatch.setenv("RAWATTN_CACH_DIR", "x")
    monkeypatch.setenv(env.LOG.name, "please")
    assert "is RAWATTN_CACHE_DIR meant" in check("variants", code=0)
    said = check("env", code=0)
    assert said.count("is RAWATTN_CACHE_DIR meant") == 1 and "'please'" in said
    for name in (*(variable.name for variable in env.VARIABLES), "numpy", "driver", "NVRTC"):
        assert name in said


def test_the_version_is_that_of_the_package(check) -> None:
    assert rawattn.__version__ == machine.versions()["rawattn"]
    assert rawattn.__version__ in check("--version", code=0)
    with pytest.raises(AttributeError, match="no attribute 'version'"):
        _ = rawattn.version


def test_nvrtc_is_named_or_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bindings:
        answer = (0, 12, 9)

        def nvrtcVersion(self) -> tuple[int, int, int]:
            return self.answer

    class Lacking(Bindings):
        answer = property(lambda self: 1 / 0)

    found = {"cuda.bindings.nvrtc": Bindings()}
    monkeypatch.setattr(machine.importlib, "import_module", lambda name: found[name])
    assert machine.nvrtc() == "12.9"
    found["cuda.bindings.nvrtc"] = Lacking()
    assert machine.nvrtc() == "none"
    found.clear()
    assert machine.nvrtc() == "none"
