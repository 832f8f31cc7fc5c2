"""Launch of kernels_cu/sm80/double_backward_q.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Layout, Pointer, Tensor, given, query_tiles
from rawattn.problem import Problem
from rawattn.variants import Row


class Args(NamedTuple):
    """``struct Args`` of the kernel, field for field, sizes apart."""

    q: Tensor
    k: Tensor
    v: Tensor
    ddq: Tensor | None
    ddk: Tensor | None
    ddv: Tensor | None
    dout: Tensor
    lse: Pointer
    delta: Pointer
    ddlse: Pointer
    ddelta: Pointer
    gq: Tensor
    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer
    seqused_k: Pointer | None


LAYOUT = Layout(Args, problem=True)


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """gq, without atomics."""
    if row.family == "numba":
        from rawattn.kernels_numba import double_backward_q as twin

        twin.launch(row, problem, args, stream=stream)
        return
    kernel = loaded.kernel(
        row, problem, direction=given(args.ddq, args.ddk, args.ddv), args_bytes=LAYOUT.size
    )
    grid = (query_tiles(row, problem), problem.num_heads_q, 1)
    kernel.launch(grid, LAYOUT.pack(args, problem), stream)
