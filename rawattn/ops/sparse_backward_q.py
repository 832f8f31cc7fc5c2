"""Launch of kernels_cu/sm80/sparse_backward_q.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Layout, Pointer, Tensor, item_tiles
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
    blocks: Pointer
    slots: Pointer
    block_scale: Pointer | None
    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer
    dq: Tensor


LAYOUT = Layout(Args, problem=True, selection=True)


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """dq, without atomics."""
    if row.family == "numba":
        from rawattn.kernels_numba import sparse_backward_q as twin

        twin.launch(row, problem, selection, args, stream=stream)
        return
    scaled = args.block_scale is not None
    kernel = loaded.kernel(row, problem, selection=selection, scaled=scaled, args_bytes=LAYOUT.size)
    grid = (item_tiles(row, problem, selection), selection.num_heads_sel, 1)
    kernel.launch(grid, LAYOUT.pack(args, problem, selection), stream)
