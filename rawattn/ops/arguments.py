"""The bytes of a kernel's ``struct Args``, from the one list of its fields that Python has.

Each kernel's module has that list as ``class Args(NamedTuple)``: the arrays first, then the
kernel's own numbers. Between the two the struct holds the sizes of the problem, and of the
selection, for kernels that read them; ``pack`` fills those in.
"""

import importlib
import struct
import typing
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Annotated, Any

from rawattn.arrays import Shape, View
from rawattn.problem import Problem, Selection
from rawattn.variants import Row, block_keys

# What a field of Args is, with its letters of ``struct``; ``| None`` where it may be null.
Tensor = Annotated[View, "Pqq"]  # pointer, token stride, head stride: struct Tensor of compat.cuh
Pointer = Annotated[View, "P"]  # of a dense array
Int = Annotated[int, "i"]
Int64 = Annotated[int, "q"]
Float = Annotated[float, "f"]

MAP_BYTES = 128  # of a TensorMap, and what it is aligned to

SIZES = (  # struct Sizes
    *(("batch", "i"), ("total_q", "i"), ("total_k", "i"), ("num_heads_q", "i")),
    *(("num_heads_kv", "i"), ("window_left", "i"), ("window_right", "i"), ("softmax_scale", "f")),
    ("softcap", "f"),
)
SELECTION_SIZES = (  # struct SelectionSizes
    *(("num_heads_sel", "i"), ("num_selected", "i"), ("width", "i")),
    *(("block_size", "i"), ("chunk", "i")),
)


def sizes(problem: Problem | None, selection: Selection | None = None) -> list[float]:
    """The values of SIZES and SELECTION_SIZES; none of what is not there."""
    p, s = problem, selection
    values: list[float] = []
    if p is not None:
        values += (p.batch, p.total_q, p.total_k, p.num_heads_q, p.num_heads_kv)
        values += (p.window_left, p.window_right, p.softmax_scale, p.softcap)
    if s is not None:
        values += (s.num_heads_sel, s.num_selected, s.width, s.block_size, s.chunk)
    return values


class Layout:
    """Where the fields of an ``Args`` lie: ``fields`` as (name, letters) in order, ``size`` bytes.

    ``problem`` and ``selection`` say whose sizes the struct holds behind its arrays, ``maps`` the
    tensors whose tensor maps lie in front of all fields, ``numbers`` the fields that a launcher
    adds behind them.
    """

    def __init__(
        self,
        args: type[Any],
        *,
        problem: bool = False,
        selection: bool = False,
        maps: tuple[str, ...] = (),
        numbers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        hints = typing.get_type_hints(args, include_extras=True)
        own = [(name, _letters(hint)) for name, hint in hints.items()]
        arrays = [field for field in own if field[1].startswith("P")]
        between = (*(SIZES if problem else ()), *(SELECTION_SIZES if selection else ()))
        before = [(f"{name}_map", f"{MAP_BYTES}s") for name in maps]
        self.fields = (*before, *arrays, *between, *own[len(arrays) :], *numbers)
        # native alignment, and an end padded as C++ pads a struct
        format = "@" + "".join(letters for _, letters in self.fields) + "0q"
        end = f"{-struct.calcsize(format) % MAP_BYTES}x" if maps else ""
        self._struct = struct.Struct(format + end)
        self.size = self._struct.size
        # ``pack`` is in the way of every launch. It reads pointers and strides in one step, and
        # puts them, followed by what ``_lasting`` makes of the strides and sizes, into order.
        tensors = [name for name, letters in arrays if letters == "Pqq"]
        self._read = attrgetter(
            *(f"{name}.ptr" for name, _ in arrays), *(f"{name}.strides" for name in tensors)
        )
        self._num_arrays = len(arrays)
        order: list[int] = []
        behind = len(arrays) + len(tensors)
        for place, (_, letters) in enumerate(arrays):
            order.append(place)
            if letters == "Pqq":
                order += (behind, behind + 1)
                behind += 2
        self._order = itemgetter(*order, *range(behind, behind + len(between)))

    def offset(self, name: str) -> int:
        """Where a field begins, in bytes."""
        at = [field for field, _ in self.fields].index(name)
        before, own = "".join(letters for _, letters in self.fields[:at]), self.fields[at][1]
        return struct.calcsize(f"@{before}0{own}")

    def pack(
        self,
        args: Any,
        problem: Problem | None = None,
        selection: Selection | None = None,
        maps: tuple[bytes, ...] = (),
        numbers: tuple[float, ...] = (),
    ) -> bytes:
        """The bytes of ``struct Args``; an array that is None becomes a null pointer."""
        if None in args:
            args = args._make(_NULL if value is None else value for value in args)
        read = self._read(args)
        lasting = _lasting(read[self._num_arrays :], problem, selection)
        own = args[self._num_arrays :]
        return self._struct.pack(*maps, *self._order(read + lasting), *own, *numbers)


_NULL = View(0, (), (0, 0, 0), "", -1, None)  # in the place of an array that is None


@lru_cache(maxsize=4096)
def _lasting(
    strides: tuple[Shape, ...], problem: Problem | None, selection: Selection | None
) -> tuple[float, ...]:
    """What calls of the same shapes have in common: strides of tokens and heads, and the sizes."""
    of_tensors = (stride for token, head, _ in strides for stride in (token, head))
    return (*of_tensors, *sizes(problem, selection))


def _letters(hint: Any) -> str:
    """Letters of ``struct`` of a field; those of X for ``X | None``."""
    parts = (hint, *typing.get_args(hint))
    return str(next(p.__metadata__[0] for p in parts if hasattr(p, "__metadata__")))


def args_bytes(stem: str, family: str = "sm80") -> int:
    """Bytes of the ``struct Args`` of a kernel of a family."""
    return layout_of(stem, family).size


def layout_of(stem: str, family: str = "sm80") -> Layout:
    """That of the ``struct Args`` of a kernel of a family."""
    module = importlib.import_module(f"rawattn.ops.{stem}")
    layout: Layout = module.LAYOUT_SM90 if family == "sm90" else module.LAYOUT
    return layout


# ---- what launchers need beside it --------------------------------------------------------------


def given(*parts: View | None) -> tuple[bool, bool, bool]:
    """Which of the three parts of a direction are there."""
    of_q, of_k, of_v = parts
    return of_q is not None, of_k is not None, of_v is not None


def own_first(problem: Problem, width: int) -> tuple[int, int]:
    """(head_dim, head_dim_v), the one that is a tensor's ``width`` first.

    For kernels that handle one tensor: its tile is as wide as beside the other in a kernel of both.
    """
    head_dims = problem.head_dim, problem.head_dim_v
    return head_dims if width == problem.head_dim else head_dims[::-1]


@lru_cache(maxsize=4096)
def query_tiles(row: Row, problem: Problem) -> int:
    """CTAs along the queries of all sequences: the most that there can be."""
    return problem.total_q // row.cfg.block_m + problem.batch + 1


def key_tiles(row: Row, problem: Problem) -> int:
    """CTAs, or clusters, along the keys of all sequences: the most that there can be."""
    return problem.total_k // (row.cfg.cluster * row.cfg.block_n) + problem.batch + 1


def item_tiles(row: Row, problem: Problem, selection: Selection) -> int:
    """CTAs along the tokens of a kernel of the RING_STEMS: the most that there can be."""
    return problem.total_q // (row.cfg.block_m // selection.group(problem)) + problem.batch + 1


def block_tiles(row: Row, problem: Problem, selection: Selection) -> int:
    """CTAs along the keys of a sparse kernel with key blocks outer: the most that there can be."""
    blocks = problem.total_k // selection.block_size + problem.batch + 1
    return blocks * block_parts(row, selection)


def block_parts(row: Row, selection: Selection) -> int:
    """CTAs that share a block of keys which is too large for one."""
    return selection.block_size // block_keys(row, selection.block_size)
