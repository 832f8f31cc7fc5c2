"""Launch of kernels_cu/sm80/sparse_backward_q.cu, or of its Numba twin."""

from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import (
    SELECTION,
    layout,
    pointer,
    query_tiles,
    selection_sizes,
    sizes,
    tensor,
)
from rawattn.problem import Problem, Selection
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("TTTTPPPPPPPT", SELECTION)  # struct Args


def launch(
    variant: Variant,
    problem: Problem,
    selection: Selection,
    q: "View",
    k: "View",
    v: "View",
    dout: "View",
    lse: "View",
    delta: "View",
    blocks: "View",
    slots: "View",
    block_scale: "View | None",
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    dq: "View",
    *,
    stream: int,
) -> None:
    """dq, without atomics."""
    if variant.family == "numba":
        from rawattn.kernels_numba import sparse_backward_q as sparse_backward_q_numba

        sparse_backward_q_numba.launch(
            variant,
            problem,
            selection,
            q,
            k,
            v,
            dout,
            lse,
            delta,
            blocks,
            slots,
            block_scale,
            cu_seqlens_q,
            cu_seqlens_k,
            dq,
            stream=stream,
        )
        return
    arguments = _ARGS.pack(
        *tensor(q),
        *tensor(k),
        *tensor(v),
        *tensor(dout),
        lse.ptr,
        delta.ptr,
        blocks.ptr,
        slots.ptr,
        pointer(block_scale),
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        *tensor(dq),
        *sizes(problem),
        *selection_sizes(selection),
    )
    grid = (query_tiles(variant, problem, selection), selection.num_heads_sel, 1)
    kernel = loaded.kernel(variant, problem, selection=selection, scaled=block_scale is not None)
    kernel.launch(grid, arguments, stream)
