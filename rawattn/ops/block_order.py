"""Launch of kernels_cu/sm80/block_order.cu, or of its Numba twin."""

from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import (
    SELECTION,
    layout,
    selection_sizes,
    sizes,
)
from rawattn.problem import Problem, Selection
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("PPPPPP", SELECTION)  # struct Args


def launch(
    variant: Variant,
    problem: Problem,
    selection: Selection,
    starts: "View",
    lengths: "View",
    unsorted: "View",
    unsorted_slots: "View",
    queries: "View",
    query_slots: "View",
    *,
    stream: int,
) -> None:
    """Each list of ``unsorted`` ascending into ``queries``, its slots beside."""
    if variant.family == "numba":
        from rawattn.kernels_numba import block_order as block_order_numba

        block_order_numba.launch(
            variant,
            problem,
            selection,
            starts,
            lengths,
            unsorted,
            unsorted_slots,
            queries,
            query_slots,
            stream=stream,
        )
        return
    arguments = _ARGS.pack(
        starts.ptr,
        lengths.ptr,
        unsorted.ptr,
        unsorted_slots.ptr,
        queries.ptr,
        query_slots.ptr,
        *sizes(problem),
        *selection_sizes(selection),
    )
    grid = (-(-selection.lists(problem) // (variant.cfg.threads // 32)), 1, 1)
    kernel = loaded.kernel(variant, problem)
    kernel.launch(grid, arguments, stream)
