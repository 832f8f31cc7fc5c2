"""What the CUDA sources say of their parameters: the fields of ``struct Args``, parsed.

Fields are (name, C type) in order; the sizes of a problem and of a selection stand as the fields of
their own structs.
"""

import re
import struct
from functools import cache
from pathlib import Path
from typing import Any

import rawattn

KERNELS = Path(rawattn.__file__).parent.parent / "kernels_cu"
STEMS = sorted(path.stem for path in KERNELS.glob("sm80/*.cu"))
OPS = {path.stem for path in (KERNELS.parent / "rawattn/ops").glob("*.py")}
SOURCES = sorted(
    (path.stem, path.parent.name) for path in KERNELS.glob("sm*/*.cu") if path.stem in OPS
)
MAP_BYTES = 128  # of a TensorMap, which is aligned to them too
_LETTERS = {"Tensor": "Pqq", "TensorMap": f"{MAP_BYTES}s", "int": "i", "int64_t": "q", "float": "f"}

Fields = tuple[tuple[str, str], ...]


@cache
def fields_of(stem: str, family: str = "sm80") -> Fields:
    """The fields of ``struct Args`` of a kernel."""
    text = (KERNELS / family / f"{stem}.cu").read_text()
    shared = re.findall(rf'#include "({family}/\w+\.cuh)"', text)
    return _fields(text + "".join((KERNELS / name).read_text() for name in shared), "Args")


def _fields(source: str, name: str) -> Fields:
    body = _body(source, name)
    assert body, f"no struct {name}"
    fields: list[tuple[str, str]] = []
    body = re.sub(r"//[^\n]*|__device__[^\n]*\{[^}]*\}", "", body)  # comments and functions
    for declaration in body.split(";"):
        if not declaration.strip():
            continue
        match = re.fullmatch(r"\s*(?:const )?([\w ]+?)\s*(\*?)\s*(\w+)\s*", declaration)
        assert match, f"struct {name}: what is {declaration!r}?"
        kind, pointer, field = match.groups()
        if kind.endswith("Sizes"):
            fields += _fields(_home(kind), kind)
        else:
            fields.append((field, kind + pointer))
    return tuple(fields)


def _body(source: str, name: str) -> str | None:
    found = re.search(rf"^struct {name} \{{\n(.*?)\n\}};", source, re.DOTALL | re.MULTILINE)
    return found[1] if found else None


def _home(name: str) -> str:
    """The text of the header that defines a struct."""
    return next(t for p in KERNELS.rglob("*.cuh") if _body(t := p.read_text(), name))


def letters(kind: str) -> str:
    """A C type in the letters of ``struct``."""
    return "P" if kind.endswith("*") else _LETTERS[kind]


def size_of(stem: str, family: str = "sm80") -> int:
    """Bytes of ``struct Args``."""
    return _layout(fields_of(stem, family)).size


def decode(stem: str, arguments: bytes, family: str = "sm80") -> dict[str, Any]:
    """What a kernel reads: a pointer, its (pointer, token stride, head stride), a number, or the
    bytes of a tensor map."""
    fields = fields_of(stem, family)
    values = iter(_layout(fields).unpack(arguments))
    return {
        name: (next(values), next(values), next(values)) if kind == "Tensor" else next(values)
        for name, kind in fields
    }


def _layout(fields: Fields) -> struct.Struct:
    format = "@" + "".join(letters(kind) for _, kind in fields) + "0q"
    if ("TensorMap" in dict(fields).values()) and (rest := struct.calcsize(format) % MAP_BYTES):
        format += f"{MAP_BYTES - rest}x"
    return struct.Struct(format)
