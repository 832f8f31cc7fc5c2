"""Launch of kernels_cu/sm80/sparse_double_backward_out.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Layout, Pointer, Tensor, given, item_tiles
from rawattn.problem import Problem, Selection
from rawattn.variants import Row


class Args(NamedTuple):
    """``struct Args`` of the kernel, field for field, sizes apart."""

    q: Tensor
    k: Tensor
    v: Tensor
    ddq: Tensor | None
    ddk: Tensor | None
    ddv: Tensor | None
    out: Tensor
    dout: Tensor | None
    lse: Pointer
    dlse: Pointer | None
    blocks: Pointer
    slots: Pointer
    block_scale: Pointer | None
    ddblock_scale: Pointer | None
    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer
    ddout: Tensor
    ddlse: Pointer
    delta: Pointer | None
    ddelta: Pointer | None


LAYOUT = Layout(Args, problem=True, selection=True)


def launch(row: Row, problem: Problem, selection: Selection, args: Args, *, stream: int) -> None:
    """ddout and ddlse in a direction, and for the second pass delta and ddelta.

    Without dout the direction's ddout and ddlse alone: forward mode behind ``sparse_forward``.
    """
    if row.family == "numba":
        from rawattn.kernels_numba import sparse_double_backward_out as twin

        twin.launch(row, problem, selection, args, stream=stream)
        return
    direction, scaled = given(args.ddq, args.ddk, args.ddv), args.block_scale is not None
    kernel = loaded.kernel(
        row,
        problem,
        direction=direction,
        selection=selection,
        scaled=scaled,
        args_bytes=LAYOUT.size,
    )
    grid = (item_tiles(row, problem, selection), selection.num_heads_sel, 1)
    kernel.launch(grid, LAYOUT.pack(args, problem, selection), stream)
