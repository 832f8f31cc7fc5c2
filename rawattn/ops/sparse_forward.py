"""Launch of kernels_cu/sm80/sparse_forward.cu, or of its Numba twin."""

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

_ARGS = layout("TTTPPPPPTP", SELECTION)  # struct Args


def launch(
    variant: Variant,
    problem: Problem,
    selection: Selection,
    q: "View",
    k: "View",
    v: "View",
    blocks: "View",
    slots: "View",
    block_scale: "View | None",
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    out: "View",
    lse: "View",
    *,
    stream: int,
) -> None:
    """out, lse over the blocks of ``blocks``; ``block_scale`` are factors or None."""
    if variant.family == "numba":
        from rawattn.kernels_numba import sparse_forward as sparse_forward_numba

        sparse_forward_numba.launch(
            variant,
            problem,
            selection,
            q,
            k,
            v,
            blocks,
            slots,
            block_scale,
            cu_seqlens_q,
            cu_seqlens_k,
            out,
            lse,
            stream=stream,
        )
        return
    arguments = _ARGS.pack(
        *tensor(q),
        *tensor(k),
        *tensor(v),
        blocks.ptr,
        slots.ptr,
        pointer(block_scale),
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        *tensor(out),
        lse.ptr,
        *sizes(problem),
        *selection_sizes(selection),
    )
    grid = (query_tiles(variant, problem, selection), selection.num_heads_sel, 1)
    kernel = loaded.kernel(variant, problem, selection=selection, scaled=block_scale is not None)
    kernel.launch(grid, arguments, stream)
