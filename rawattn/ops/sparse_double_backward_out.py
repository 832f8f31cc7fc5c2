"""Launch of kernels_cu/sm80/sparse_double_backward_out.cu, or of its Numba twin."""

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

_ARGS = layout("TTTTTTTTPPPPPPPPTPPP", SELECTION)  # struct Args


def launch(
    variant: Variant,
    problem: Problem,
    selection: Selection,
    q: "View",
    k: "View",
    v: "View",
    ddq: "View | None",
    ddk: "View | None",
    ddv: "View | None",
    out: "View",
    dout: "View | None",
    lse: "View",
    dlse: "View | None",
    blocks: "View",
    slots: "View",
    block_scale: "View | None",
    ddblock_scale: "View | None",
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    ddout: "View",
    ddlse: "View",
    delta: "View | None",
    ddelta: "View | None",
    *,
    stream: int,
) -> None:
    """ddout and ddlse in a direction, and for the second pass delta and ddelta.

    Without dout the direction's ddout and ddlse alone: forward mode behind ``sparse_forward``.
    """
    if variant.family == "numba":
        from rawattn.kernels_numba import (
            sparse_double_backward_out as sparse_double_backward_out_numba,
        )

        sparse_double_backward_out_numba.launch(
            variant,
            problem,
            selection,
            q,
            k,
            v,
            ddq,
            ddk,
            ddv,
            out,
            dout,
            lse,
            dlse,
            blocks,
            slots,
            block_scale,
            ddblock_scale,
            cu_seqlens_q,
            cu_seqlens_k,
            ddout,
            ddlse,
            delta,
            ddelta,
            stream=stream,
        )
        return
    arguments = _ARGS.pack(
        *tensor(q),
        *tensor(k),
        *tensor(v),
        *tensor(ddq),
        *tensor(ddk),
        *tensor(ddv),
        *tensor(out),
        *tensor(dout),
        lse.ptr,
        pointer(dlse),
        blocks.ptr,
        slots.ptr,
        pointer(block_scale),
        pointer(ddblock_scale),
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        *tensor(ddout),
        ddlse.ptr,
        pointer(delta),
        pointer(ddelta),
        *sizes(problem),
        *selection_sizes(selection),
    )
    direction = (ddq is not None, ddk is not None, ddv is not None)
    grid = (query_tiles(variant, problem, selection), selection.num_heads_sel, 1)
    kernel = loaded.kernel(
        variant, problem, direction=direction, selection=selection, scaled=block_scale is not None
    )
    kernel.launch(grid, arguments, stream)
