"""Launch of kernels_cu/sm80/sparse_backward_kv.cu, or of its Numba twin."""

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
from rawattn.variants import Variant, block_keys

if TYPE_CHECKING:
    from rawattn.arrays import View

_ARGS = layout("TTTTPPPPPPPPPPPPTTPP", SELECTION)  # struct Args


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
    starts: "View",
    lengths: "View",
    queries: "View",
    query_slots: "View",
    work: "View | None",
    block_scale: "View | None",
    dblock_scale: "View | None",
    cu_seqlens_q: "View",
    cu_seqlens_k: "View",
    dq_accum: "View | None",
    dk: "View | None",
    dv: "View | None",
    dk_accum: "View | None",
    dv_accum: "View | None",
    *,
    stream: int,
) -> None:
    """dk and dv; or their sums over ``work`` by atomic adds into dk_accum and dv_accum (zeroed).

    With dq_accum (zeroed) also dQ / softmax_scale, by atomic adds; with block_scale its gradient
    into dblock_scale (zeroed).
    """
    if variant.family == "numba":
        from rawattn.kernels_numba import sparse_backward_kv as sparse_backward_kv_numba

        sparse_backward_kv_numba.launch(
            variant,
            problem,
            selection,
            q,
            k,
            v,
            dout,
            lse,
            delta,
            starts,
            lengths,
            queries,
            query_slots,
            work,
            block_scale,
            dblock_scale,
            cu_seqlens_q,
            cu_seqlens_k,
            dq_accum,
            dk,
            dv,
            dk_accum,
            dv_accum,
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
        starts.ptr,
        lengths.ptr,
        queries.ptr,
        query_slots.ptr,
        pointer(work),
        pointer(block_scale),
        pointer(dblock_scale),
        cu_seqlens_q.ptr,
        cu_seqlens_k.ptr,
        pointer(dq_accum),
        *tensor(dk),
        *tensor(dv),
        pointer(dk_accum),
        pointer(dv_accum),
        *sizes(problem),
        *selection_sizes(selection),
    )
    if dk_accum is None:
        grid = (key_tiles(variant, problem, selection), problem.num_heads_kv, 1)
    else:
        parts = selection.block_size // block_keys(variant, selection.block_size)
        grid = ((work.shape[0] if work else 0) * parts, 1, 1)
    kernel = loaded.kernel(
        variant,
        problem,
        atomic=dq_accum is not None,
        selection=selection,
        scaled=block_scale is not None,
    )
    kernel.launch(grid, arguments, stream)
