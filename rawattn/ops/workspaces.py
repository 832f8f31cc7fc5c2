"""Shapes of the sums that gradients wait in until a postprocess kernel has put them into place.

The row that fills a workspace decides how it is laid out; rows of other layouts cannot read it.

    rows     as the gradient itself, (tokens, heads, size): the Numba twins
    units    dense CUDA rows: in units of 16 rows of a sequence, see kernels_cu/base/workspace.cuh
    lanes    sparse CUDA rows: (tokens, heads, tile), where inside 16 columns the order is that of
             a lane's accumulators: place 4 q + (0, 1, 2, 3) is column 2 q + (0, 1, 8, 9)
"""

import math
from typing import TYPE_CHECKING, Literal

from rawattn.problem import Problem
from rawattn.variants import Row, tile_widths

if TYPE_CHECKING:
    from rawattn.arrays import Shape, View

FLOAT = 4  # bytes
UNIT = 16  # rows that kernels_cu/base/workspace.cuh keeps together
COUNTS, PARTS = 4, 4  # of turns: what stands in front of them all, and those of a unit
Gradient = Literal["dq", "dk", "dv"]


def check_layout(filling: Row, reading: Row) -> None:
    """Raise RuntimeError if ``reading`` cannot read what ``filling`` leaves."""
    ours, theirs = filling.workspace, reading.workspace
    if ours != theirs:
        raise RuntimeError(
            f"row {filling.name} leaves its sums as {ours}, row {reading.name} reads {theirs}. "
            f"Name rows of one layout in RAWATTN_VARIANT, or none."
        )


def accum_shape(
    row: Row, problem: Problem, gradient: Gradient, *, in_order: bool = False
) -> "Shape":
    """Shape of the workspace of ``gradient`` that ``row`` fills; of dense rows one-dimensional.

    ``in_order``: units with the turns behind them, see kernels_cu/sm90/backward.cuh.
    """
    of_q = gradient == "dq"
    tokens = problem.total_q if of_q else problem.total_k
    heads = problem.num_heads_q if of_q else problem.num_heads_kv
    widths = problem.head_dim, problem.head_dim_v
    if row.workspace == "lanes":
        widths = tile_widths(*widths)
    shape = (tokens, heads, widths[gradient == "dv"])
    if row.stem.startswith("sparse_"):
        return shape
    turns = COUNTS + heads * (tokens // UNIT + problem.batch) * PARTS
    return (math.prod(shape) + in_order * turns,)


def turns_in(dq_accum: "View", problem: Problem) -> int:
    """Where the turns begin."""
    return dq_accum.ptr + FLOAT * problem.total_q * problem.num_heads_q * problem.head_dim
