"""What importing rawattn costs, and which module may import which."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rawattn

PACKAGE = Path(rawattn.__file__).parent
KERNELS = PACKAGE.parent / "kernels_cu"
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("torch", "numba", "cupy", "jax", "cuda")
# Which layers a layer may import besides itself; the leaves, and the rest of the package, none.
ARROWS = {
    "problem": set(),
    "checks": set(),
    "env": set(),
    "reference": set(),
    "variants": {"env", "problem"},
    "device": {"checks"},
    "arrays": {"checks", "device"},
    "build": {"variants"},
    "jit": {"build", "env"},
    "launch": {"build", "env", "jit", "problem", "variants"},
    # a launcher imports its twin where it launches it, and a twin its launcher's Args
    "ops": {"arrays", "kernels_numba", "launch", "problem", "variants"},
    "kernels_numba": {"arrays", "ops", "problem", "variants"},
    "call": {"arrays", "checks", "device", "problem", "variants"},
    "passes": {"arrays", "call", "ops", "variants"},
    "api": {"arrays", "call", "checks", "device", "passes", "problem", "reference", "variants"},
    "api_second": {"arrays", "call", "checks", "passes", "reference"},
    "tables": {"arrays", "call", "checks", "device", "ops", "problem", "reference"},
    "passes_sparse": {"arrays", "call", "ops", "passes", "problem", "tables", "variants"},
    "api_sparse": {"api", "arrays", "call", "checks", "passes_sparse", "reference", "tables"},
    "torch": {"api", "api_second", "api_sparse", "checks", "tables"},
    "__init__": {"api", "api_second", "api_sparse", "tables"},
}
# The same inside rawattn.torch, whose face hands names on, and inside its own package.
OF_TORCH = {
    "operators": set(),
    "inputs": set(),
    "autograd": {"operators"},
    "varlen_ops": {"autograd", "operators"},
    "varlen": {"inputs", "varlen_ops"},
    "sparse_ops": {"autograd", "operators"},
    "sparse": {"inputs", "sparse_ops", "varlen"},
    "compat": {"inputs", "operators", "varlen"},
    "packing": set(),
    "flash_attn": {"inputs", "varlen"},
    "flash_attn_interface": {"flash_attn", "inputs"},
    "sparse_compat": {"sparse"},
    "nsa": {"inputs", "sparse", "varlen"},
    "hugging_face_masks": set(),
    "hugging_face": {"context_parallel", "flash_attn", "hugging_face_masks", "packing", "varlen"},
    "provider": set(),
    "context_parallel": {"inputs", "varlen"},
    "__init__": {
        *("compat", "hugging_face", "nsa", "provider", "sparse", "sparse_compat", "varlen"),
    },
}
OF_CONTEXT_PARALLEL = {
    "rows": set(),
    "dealing": set(),
    "layout": {"dealing"},
    "agreement": set(),
    "peer_memory": {"agreement"},
    "exchange": {"peer_memory", "rows"},
    "first_order": set(),
    "stages": {"layout"},
    "estimate": {"stages"},
    "attention": {"exchange", "first_order", "rows", "stages"},
    "ulysses": {"exchange", "first_order", "rows", "stages"},
    "plans": {
        *("agreement", "attention", "estimate", "exchange", "first_order", "layout", "rows"),
        *("stages", "ulysses"),
    },
    "planning": {"agreement", "layout", "plans"},
    "shards": {"exchange", "plans", "rows"},
    "attend": {"estimate", "first_order", "plans", "stages"},
    "__init__": {"attend", "estimate", "planning", "plans", "shards"},
}
# The rooms of rawattn.check.diagnose, each of which imports none but those before it.
OF_DIAGNOSE = {
    "__init__": set(),
    "engine": set(),
    "findings": {"engine"},
    "evidence": {"engine", "findings"},
    "catalogue": {"engine"},
    "read": {"catalogue", "engine", "evidence", "findings"},
    "inferred": {"catalogue", "engine", "evidence", "read"},
    "judge": {"catalogue", "engine", "evidence", "findings", "inferred", "read"},
    "files": {"engine", "evidence"},
    "logs": {"catalogue", "evidence", "findings", "judge"},
    "harness": {"catalogue", "findings"},
    "report": {"catalogue", "engine", "evidence", "findings", "harness"},
}


def in_python(code: str) -> str:
    """What code prints in a fresh interpreter beside this package."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    return done.stdout


def layer(path: Path) -> str:
    """The part of the package that a file belongs to: a module's stem or a subpackage's name."""
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules that a file imports, and whether its import runs them (not inside a function)."""
    tree = ast.parse(path.read_text())
    at_once = {id(node) for statement in tree.body for node in walk_outside_functions(statement)}
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            whole = module.split(".")[0] == "rawattn"  # from rawattn import api: the module api
            names = [f"{module}.{alias.name}" if whole else module for alias in node.names]
        else:
            continue
        yield from ((name, id(node) in at_once) for name in names)


def walk_outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from walk_outside_functions(child)


def spelled(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


# ---- the cost ---------------------------------------------------------------------------------


def test_import_loads_nothing_heavy() -> None:
    loaded = in_python("import sys, rawattn; print(*sys.modules)").split()
    assert {"rawattn.api", "rawattn.api_second", "rawattn.api_sparse"} <= {*loaded}
    assert not [name for name in loaded if name.partition(".")[0] in HEAVY]


def test_import_takes_little_more_than_numpy() -> None:
    # The processor's time of the rest beside NumPy's own in the same process, where both meet the
    # same clocks and the same neighbours; the best of ten, since what disturbs adds to either.
    code = (
        "from time import process_time as now; start = now(); import numpy; half = now()\n"
        "import rawattn; print((now() - half) / (half - start))"
    )
    assert min(float(in_python(code)) for _ in range(10)) < 2


def test_host_arrays_load_nothing_heavy() -> None:
    code = (
        "import sys, numpy as np, rawattn\n"
        "q = np.ones((5, 2, 8), np.float32)\n"
        "out, lse = rawattn.forward(q, q, q, np.array([0, 2, 5]), return_lse=True)\n"
        "rawattn.backward(q, q, q, q, out, lse, np.array([0, 2, 5]))\n"
        "rawattn.jvp(q, q, q, q, q, q, np.array([0, 2, 5]))\n"
        "rawattn.double_backward(q, q, q, q, q, q, q, out, lse, np.array([0, 2, 5]))\n"
        "blocks = np.zeros((5, 2, 1), np.int32)\n"
        "table = rawattn.BlockTable.of_indices(blocks, np.array([0, 2, 5]), num_heads_kv=2)\n"
        "rawattn.sparse_forward(q, q, q, np.array([0, 2, 5]), table)\n"
        "rawattn.sparse_backward(q, q, q, q, out, lse, np.array([0, 2, 5]), table)\n"
        "print(*sys.modules)"
    )
    loaded = in_python(code).split()
    assert not [name for name in loaded if name.partition(".")[0] in HEAVY]


def test_public_names() -> None:
    assert sorted(rawattn.__all__) == rawattn.__all__
    for name in rawattn.__all__:
        home = getattr(rawattn, name).__module__.removeprefix("rawattn.")
        assert home in ("api", "api_second", "api_sparse", "tables")
    assert (PACKAGE / "py.typed").exists()


# ---- the arrows -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODULES, ids=spelled)
def test_arrows(path: Path) -> None:
    allowed = ARROWS.get(layer(path))
    if allowed is None:  # check stands on top, and may import everything but the torch adapter
        assert layer(path) == "check", "a new part of the package: give it its arrows"
        allowed = {*ARROWS} - {"torch"}
    used = {name.split(".")[1] for name, _ in imports(path) if name.startswith("rawattn.")}
    assert used <= allowed | {layer(path)}
    if layer(path) == "torch":
        room = path.relative_to(PACKAGE / "torch").parts[0].removesuffix(".py")
        assert imported(path, "rawattn.torch") <= OF_TORCH[room] | {room} - {path.stem}
        if room == "context_parallel":
            inside = imported(path, f"rawattn.torch.{room}")
            assert inside <= OF_CONTEXT_PARALLEL[path.stem]
    if spelled(path).startswith("check/diagnose/"):
        room = path.relative_to(PACKAGE / "check" / "diagnose").with_suffix("").parts[0]
        assert room in OF_DIAGNOSE, "a new room of the diagnosis: give it its arrows"
        assert imported(path, "rawattn.check.diagnose") <= OF_DIAGNOSE[room] | {room}


def imported(path: Path, package: str) -> set[str]:
    """The parts of a package that a file imports."""
    whole = f"{package}."
    return {
        name.removeprefix(whole).split(".")[0]
        for name, _ in imports(path)
        if name.startswith(whole)
    }


@pytest.mark.parametrize("path", MODULES, ids=spelled)
def test_heavy_libraries_stay_in_their_modules(path: Path) -> None:
    twin, adapter = layer(path) == "kernels_numba", layer(path) == "torch"
    for name, at_once in imports(path):
        root = name.partition(".")[0]
        if root == "numba":
            assert twin, "numba is imported by the twins alone"
        elif root == "torch":
            assert adapter, "torch is imported by rawattn.torch and its parts alone"
        elif root in HEAVY:
            assert not at_once, f"{name} is imported where a function needs it"


@pytest.mark.parametrize("path", MODULES, ids=spelled)
def test_twins_are_imported_where_they_are_launched(path: Path) -> None:
    for name, at_once in imports(path):
        if name.startswith("rawattn.kernels_numba") and layer(path) != "kernels_numba":
            assert not at_once, f"{name} loads numba"


def test_cuda_arrows() -> None:
    include = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
    for path in [*KERNELS.rglob("*.cuh"), *KERNELS.rglob("*.cu")]:
        for name in include.findall(path.read_text()):
            assert not name.endswith(".cu"), f"{path.name} includes {name}"
            if path.parent.name == "base":
                assert not name.startswith("sm"), f"base/{path.name} includes {name}"
            if path.parent.name != "base":
                assert name.partition("/")[0] in ("base", path.parent.name), (
                    f"{path} includes {name}"
                )
        if path.name not in ("ptx.cuh", "wgmma.cuh"):
            assert not re.search(r"\basm\b", path.read_text()), f"asm in {path.name}"
