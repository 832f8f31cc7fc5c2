"""Launch of kernels_cu/sm80/backward_kv.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Layout, Pointer, Tensor, key_tiles
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
    dq_accum: Pointer | None
    dk: Tensor
    dv: Tensor
    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer


LAYOUT = Layout(Args, problem=True)


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """dk and dv; with dq_accum (zeroed) also dQ / softmax_scale, by atomic adds into it."""
    if row.family == "numba":
        from rawattn.kernels_numba import backward_kv as twin

        twin.launch(row, problem, args, stream=stream)
        return
    kernel = loaded.kernel(row, problem, atomic=args.dq_accum is not None, args_bytes=LAYOUT.size)
    grid = (key_tiles(row, problem), problem.num_heads_kv, 1)
    kernel.launch(grid, LAYOUT.pack(args, problem), stream)
