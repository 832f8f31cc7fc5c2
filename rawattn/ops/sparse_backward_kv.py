"""Launch of kernels_cu/sm80/sparse_backward_kv.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Layout, Pointer, Tensor, block_parts, block_tiles
from rawattn.problem import Problem, Selection
from rawattn.variants import Row


class Args(NamedTuple):
    """``struct Args`` of the kernel, field for field, sizes apart."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Pointer
    delta: Pointer
    starts: Pointer
    lengths: Pointer
    queries: Pointer
    query_slots: Pointer
    work: Pointer | None
    block_scale: Pointer | None
    dblock_scale: Pointer | None
    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer
    dq_accum: Pointer | None
    dk: Tensor | None
    dv: Tensor | None
    dk_accum: Pointer | None
    dv_accum: Pointer | None


LAYOUT = Layout(Args, problem=True, selection=True)


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """dk and dv; or their sums over ``work`` by atomic adds into dk_accum and dv_accum (zeroed).

    With dq_accum (zeroed) also dQ / softmax_scale, by atomic adds; with block_scale its gradient
    into dblock_scale (zeroed).
    """
    if row.family == "numba":
        from rawattn.kernels_numba import sparse_backward_kv as twin

        twin.launch(row, problem, selection, args, stream=stream)
        return
    if args.dk_accum is None:
        grid = (block_tiles(row, problem, selection), problem.num_heads_kv, 1)
    else:
        segments = args.work.shape[0] if args.work else 0
        grid = (segments * block_parts(row, selection), 1, 1)
    atomic, scaled = args.dq_accum is not None, args.block_scale is not None
    kernel = loaded.kernel(
        row, problem, atomic=atomic, selection=selection, scaled=scaled, args_bytes=LAYOUT.size
    )
    kernel.launch(grid, LAYOUT.pack(args, problem, selection), stream)
