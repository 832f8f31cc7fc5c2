"""What Python hands to a kernel against what its CUDA source and its Numba twin take."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import rawattn
from rawattn import variants
from rawattn.arrays import View
from rawattn.ops import workspaces
from rawattn.ops.arguments import args_bytes, layout_of
from rawattn.problem import Problem, Selection
from tests.shared import structs

TWINS = Path(rawattn.__file__).parent / "kernels_numba"
PROBLEM = Problem("float16", 3, 5, 7, 12, 4, 64, 32, 9, -1, 0.25, 90, 0)
SELECTION = Selection(4, 6, 16, own=True, chunk=256)


@pytest.mark.parametrize(("stem", "family"), structs.SOURCES)
def test_args_are_the_struct_of_the_source(stem: str, family: str) -> None:
    """Field for field, in order, in kind and in bytes."""
    fields = [(name, structs.letters(kind)) for name, kind in structs.fields_of(stem, family)]
    assert list(layout_of(stem, family).fields) == fields
    assert args_bytes(stem, family) == structs.size_of(stem, family)


def packed(stem: str, array: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What arrives of arguments that are all different, and what was given; ``array(n)`` is one."""
    args: Any = import_module(f"rawattn.ops.{stem}").Args
    own = dict(layout_of(stem).fields)
    given = {
        name: array(n) if own[name].startswith("P") else n
        for n, name in enumerate(args._fields, start=1)
    }
    sizes = (PROBLEM, SELECTION)[: ("num_heads_kv" in own) + ("chunk" in own)]
    return structs.decode(stem, layout_of(stem).pack(args(**given), *sizes)), given


@pytest.mark.parametrize("stem", structs.STEMS)
def test_every_value_arrives_in_the_field_of_its_name(stem: str) -> None:
    arrived, given = packed(
        stem, lambda n: View(1000 * n, (8, 8, 8), (100 * n, 10 * n, 1), "float16", 0, None)
    )
    for name, kind in structs.fields_of(stem):
        if name not in given:
            source = PROBLEM if hasattr(PROBLEM, name) else SELECTION
            assert arrived[name] == getattr(source, name)
        elif kind == "Tensor":
            assert arrived[name] == (given[name].ptr, *given[name].strides[:2])
        else:
            assert arrived[name] == (given[name].ptr if kind.endswith("*") else given[name])


@pytest.mark.parametrize("stem", structs.STEMS)
def test_what_is_absent_is_null(stem: str) -> None:
    arrived, given = packed(stem, lambda n: None)
    for name, kind in structs.fields_of(stem):
        if name in given and (kind == "Tensor" or kind.endswith("*")):
            assert arrived[name] == ((0, 0, 0) if kind == "Tensor" else 0)


@pytest.mark.parametrize("stem", structs.STEMS)
def test_twin_has_the_parameters_of_its_kernel(stem: str) -> None:
    """Names in order of the function ``kernel``, wherever in the twin it stands."""
    tree = ast.parse((TWINS / f"{stem}.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    [kernel] = [function for function in functions if function.name == "kernel"]
    names = [argument.arg for argument in kernel.args.args]
    assert names == [name for name, _ in structs.fields_of(stem)]


def test_rows_of_two_layouts_do_not_meet() -> None:
    rows = {row.name: row for row in variants.TABLE}
    dense, twin = rows["backward_postprocess_numba"], rows["sparse_postprocess_numba"]
    raw = next(row for row in rows.values() if row.stem == "backward_kv" and row.family != "numba")
    workspaces.check_layout(dense, twin)
    with pytest.raises(RuntimeError, match=r"units.*rows"):
        workspaces.check_layout(raw, dense)
