"""Every kind of install finds the CUDA sources as package data, and carries what it should."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
PACKAGES = ("rawattn", "kernels_cu")
SHIPPED = {".py", ".cu", ".cuh", ".typed"}

FIND_SOURCES = """
from importlib.resources import files
from pathlib import Path
import rawattn
from rawattn import build
root = files("rawattn.kernels_cu")
assert build.sources_root() == Path(str(root)), build.sources_root()
assert files("rawattn").joinpath("py.typed").is_file()
for name in {names!r}:
    assert root.joinpath(name).read_text(), name
print(rawattn.__file__)
"""


def shipped() -> set[str]:
    """What an install must carry, by its path in the installed tree."""
    files = [f for top in PACKAGES for f in (ROOT / top).rglob("*") if f.suffix in SHIPPED]
    names = {f.relative_to(ROOT).as_posix() for f in files}
    return {f"rawattn/{name}" if name.startswith("kernels_cu/") else name for name in names}


def cuda_sources() -> list[str]:
    """The CUDA sources by their path below rawattn.kernels_cu."""
    folder = ROOT / "kernels_cu"
    return sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*.cu*"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree to build in, so that building leaves nothing behind here."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in TOP:
        shutil.copy(ROOT / name, folder)
    for name in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    return folder


def build(kind: str, folder: Path, target: Path) -> Path:
    """An sdist or a wheel of the tree in ``folder``, by the backend that pyproject.toml names."""
    pytest.importorskip("setuptools", minversion="77")
    target.mkdir(exist_ok=True)
    code = f"from setuptools.build_meta import build_{kind} as b; print(b({str(target)!r}))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True
    )
    return target / run.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked sdist, as an installer would: so it also proves the sdist whole."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from 3.11.4 on
        archive.extractall(folder, **safe)
    (unpacked,) = folder.iterdir()
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


def test_every_package_is_listed() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    found = {path.parent.relative_to(ROOT) for path in (ROOT / "rawattn").rglob("__init__.py")}
    names = {".".join(path.parts) for path in found} | {"rawattn.kernels_cu"}
    assert set(config["options"]["packages"].split()) == names
    modules = {path.parent for path in (ROOT / "rawattn").rglob("*.py")}
    assert {path.relative_to(ROOT) for path in modules} == found, "a folder lacks __init__.py"


@pytest.mark.slow
def test_the_wheel_carries_every_source_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert b"rawattn-check = rawattn.check.cli:main" in archive.read(entry_points)
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert names == shipped()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["wheel", *(pytest.param(k, marks=pytest.mark.sweep) for k in ("sdist", "editable"))]
)
def test_an_install_finds_the_cuda_sources(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target = tmp_path / "env"
    venv.create(target, with_pip=False)
    scripts, site = (
        Path(sysconfig.get_path(what, "venv", {"base": str(target), "platbase": str(target)}))
        for what in ("scripts", "purelib")
    )
    # The new environment sees this one's packages, but not what is installed in editable form here.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "parent.pth").write_text("\n".join(packages) + "\n")
    what = ["-e", str(request.getfixturevalue("checkout"))]
    if kind != "editable":
        what = [str(request.getfixturevalue(kind))]
    python = scripts / ("python.exe" if sys.platform == "win32" else "python")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, *options, *what], check=True, cwd=tmp_path)
    code = FIND_SOURCES.format(names=cuda_sources())
    run = subprocess.run(
        [str(python), "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    installed = Path(run.stdout.split()[-1])
    home = request.getfixturevalue("checkout") if kind == "editable" else target
    assert installed.is_relative_to(home)
    subprocess.run([str(scripts / "rawattn-check"), "--help"], cwd=tmp_path, check=True)
