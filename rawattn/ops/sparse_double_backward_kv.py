"""Launch of kernels_cu/sm80/sparse_double_backward_kv.cu, or of its Numba twin."""

from typing import TYPE_CHECKING

from rawattn import launch as loaded
from rawattn.ops.arguments import (
    SELECTION,
    key_tiles,
    layout,
    pointer,
    selection_sizes,
    sizes,
    tensor,
)
from rawattn.problem import Problem, Selection
from rawattn.variants import Variant

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("TTTTTTTPPPPPPPPPPPPPTT", SELECTION)  # struct Args


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
    dout: "View",
    lse: "View",
    delta: "View",
    ddlse: "View",
    ddelta: "View",
    starts: "View",
    lengths: "View",
    queries: "View",
    query_slots: "View",
    block_scale: "View | None",
    ddblock_scale: "View | None",
    gblock_scale: "View | None",
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    gk: "View",
    gv: "View",
    *,
    stream: int,
) -> None:
    """gk, gv and the gradient of block_scale (zeroed before), without atomics."""
    if variant.family == "numba":
        from rawattn.kernels_numba import (
            sparse_double_backward_kv as sparse_double_backward_kv_numba,
        )

        sparse_double_backward_kv_numba.launch(
            variant,
            problem,
            selection,
            q,
            k,
            v,
            ddq,
            ddk,
            ddv,
            dout,
            lse,
            delta,
            ddlse,
            ddelta,
            starts,
            lengths,
            queries,
            query_slots,
            block_scale,
            ddblock_scale,
            gblock_scale,
            cu_seqlens_q,
            cu_seqlens_k,
            gk,
            gv,
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
        *tensor(dout),
        lse.ptr,
        delta.ptr,
        ddlse.ptr,
        ddelta.ptr,
        starts.ptr,
        lengths.ptr,
        queries.ptr,
        query_slots.ptr,
        pointer(block_scale),
        pointer(ddblock_scale),
        pointer(gblock_scale),
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        *tensor(gk),
        *tensor(gv),
        *sizes(problem),
        *selection_sizes(selection),
    )
    direction = (ddq is not None, ddk is not None, ddv is not None)
    grid = (key_tiles(variant, problem, selection), problem.num_heads_kv, 1)
    kernel = loaded.kernel(
        variant, problem, direction=direction, selection=selection, scaled=block_scale is not None
    )
    kernel.launch(grid, arguments, stream)
