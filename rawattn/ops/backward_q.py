"""Launch of kernels_cu/sm80/backward_q.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Layout, Pointer, Tensor, query_tiles
from rawattn.problem import Problem
from rawattn.variants import Row


class Args(NamedTuple):
    """``struct Args`` of the kernel, field for field, sizes apart."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Pointer
    delta: Pointer
    dq: Tensor
    dk_accum: Pointer | None
    dv_accum: Pointer | None
    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer
    seqused_k: Pointer | None


LAYOUT = Layout(Args, problem=True)


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """dq; with the (zeroed) accums also dK / softmax_scale and dV, by atomic adds into them."""
    if row.family == "numba":
        from rawattn.kernels_numba import backward_q as twin

        twin.launch(row, problem, args, stream=stream)
        return
    kernel = loaded.kernel(row, problem, atomic=args.dk_accum is not None, args_bytes=LAYOUT.size)
    grid = (query_tiles(row, problem), problem.num_heads_q, 1)
    kernel.launch(grid, LAYOUT.pack(args, problem), stream)
