"""Launch of kernels_cu/sm80/forward.cu, or of its Numba twin."""

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
    out: Tensor
    lse: Pointer
    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer


LAYOUT = Layout(Args, problem=True)


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """out, lse of packed q, k, v; the device is current, every check has been made."""
    if row.family == "numba":
        from rawattn.kernels_numba import forward as twin

        twin.launch(row, problem, args, stream=stream)
        return
    kernel = loaded.kernel(row, problem, args_bytes=LAYOUT.size)
    kernel.launch(
        (query_tiles(row, problem), problem.num_heads_q, 1), LAYOUT.pack(args, problem), stream
    )
