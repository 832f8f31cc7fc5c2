"""An older tree of rawattn imported beside the present one, so that one process times both.

Its Python files are copied under another package name, ``rawattn_old``, which stands in them
wherever ``rawattn`` stood: so imports inside functions, the CUDA sources that it finds as package
data, and the names of its torch operators are its own, at whatever moment they are looked up.
"""

import atexit
import importlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

NAME = "rawattn_old"


def load_old(tree: Path) -> ModuleType:
    """The package rawattn of ``tree``, a checkout with rawattn/ and kernels_cu/.

    The copy lives as long as the process may import from it. ValueError when the folders are not
    there, RuntimeError when another old tree was loaded before.
    """
    for folder in ("rawattn", "kernels_cu"):
        if not (tree / folder).is_dir():
            raise ValueError(f"no folder {folder} in {tree}: give a checkout of rawattn")
    if NAME in sys.modules:
        raise RuntimeError("one old tree a process: start another for the next")
    place = Path(tempfile.mkdtemp(prefix="rawattn-old-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    leave_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(tree / "rawattn", place / NAME, ignore=leave_out)
    shutil.copytree(tree / "kernels_cu", place / NAME / "kernels_cu", ignore=leave_out)
    for path in (place / NAME).rglob("*.py"):
        path.write_text(re.sub(r"\brawattn\b", NAME, path.read_text()))
    _describe(place)
    sys.path.append(str(place))
    importlib.invalidate_caches()
    return importlib.import_module(NAME)


def _describe(place: Path) -> None:
    """Metadata, for a tree that asks for its own version."""
    folder = place / f"{NAME}-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
