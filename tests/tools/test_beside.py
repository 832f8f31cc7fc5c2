"""An old tree beside the present one: each computes with its own sources, whenever it looks."""

import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import rawattn.api
from measure import beside, tables

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The sources here, changed: its forward answers twice what it should, its kernels differ."""
    tree = tmp_path_factory.mktemp("old")
    for folder in ("rawattn", "kernels_cu"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (tree / "rawattn/__init__.py").open("a") as file:
        file.write(LAZY)
    with (tree / "rawattn/api.py").open("a") as file:
        file.write('\nTREE = "old"\n')
    with (tree / "kernels_cu/sm80/forward.cu").open("a") as file:
        file.write("// of the old tree\n")
    return beside.load_old(tree)


# What an old tree may do at its first call: import inside a function, read package data.
LAZY = """

def forward(q, *rest, **options):
    from rawattn.api import forward as right

    return 2 * right(q, *rest, **options)


def tree():
    from rawattn.api import TREE

    return TREE


def source(name):
    from importlib import resources

    return resources.files("rawattn.kernels_cu").joinpath(name).read_text()


def own_version():
    from importlib.metadata import version

    return version("rawattn")
"""


def arrays() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((7, 2, 16)) for _ in range(3))
    return q, k, v, np.array([0, 3, 7], np.int32)


def test_both_compute_in_turn_with_their_own_sources(old: ModuleType) -> None:
    for _ in range(2):
        new_out, old_out = rawattn.forward(*arrays()), old.forward(*arrays())
        np.testing.assert_array_equal(old_out, 2 * new_out)
    assert old.tree() == "old" and not hasattr(rawattn.api, "TREE")
    assert old.source("sm80/forward.cu").endswith("// of the old tree\n")
    assert not (ROOT / "kernels_cu/sm80/forward.cu").read_text().endswith("old tree\n")


def test_no_module_is_shared_or_replaced(old: ModuleType) -> None:
    mine = {name for name in sys.modules if name.split(".")[0] == "rawattn"}
    its = {name for name in sys.modules if name.split(".")[0] == beside.NAME}
    assert its and all(beside.NAME in (sys.modules[name].__file__ or "") for name in its)
    assert all(beside.NAME not in (sys.modules[name].__file__ or "") for name in mine)
    assert sys.modules["rawattn"] is rawattn and old.own_version() == "0"


def test_the_torch_operators_of_both_are_registered(old: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    from importlib import import_module

    import rawattn.torch

    q, k, v, cu_seqlens = map(torch.from_numpy, arrays())
    q.requires_grad_()
    results = [
        module.varlen_attn(q, k, v, cu_seqlens)
        for module in (rawattn.torch, import_module(f"{old.__name__}.torch"))
    ]
    assert torch.equal(*results) and all(result.requires_grad for result in results)


def test_what_is_no_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder rawattn"):
        beside.load_old(tmp_path)


def test_the_summary_names_the_worst_case() -> None:
    def row(case: str, new: float, old: float) -> dict[str, object]:
        return {
            "suite": "paper",
            "case": case,
            "direction": "forward",
            "ours_ms": new,
            "old_ms": old,
        }

    rows = [row("a", 1.0, 4.0), row("b", 2.0, 2.0), row("c", 1.0, 2.0)]
    (line,) = tables.old_summary([*rows, {"suite": "seed", "direction": "forward", "case": "d"}])
    assert line == {
        "suite": "paper",
        "direction": "forward",
        "cases": 3,
        "old_to_new": 2.0,
        "worst": 1.0,
        "worst_case": "b",
    }
    assert tables.old_grid([line])[1] == ["paper", "forward", "3", "2.0", "1.0", "b"]
