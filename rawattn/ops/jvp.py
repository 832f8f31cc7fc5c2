"""Launch of kernels_cu/sm80/jvp.cu, or of its Numba twin."""

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
    tq: Tensor | None
    tk: Tensor | None
    tv: Tensor | None
    out: Tensor
    tout: Tensor
    lse: Pointer
    tlse: Pointer
    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer
    sinks: Pointer | None
    tsinks: Pointer | None
    seqused_k: Pointer | None


LAYOUT = Layout(Args, problem=True)


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """out and lse, and their tangents tout and tlse in direction (tq, tk, tv); None is zero."""
    if row.family == "numba":
        from rawattn.kernels_numba import jvp as twin

        twin.launch(row, problem, args, stream=stream)
        return
    kernel = loaded.kernel(
        row, problem, direction=given(args.tq, args.tk, args.tv), args_bytes=LAYOUT.size
    )
    grid = (query_tiles(row, problem), problem.num_heads_q, row.cfg.pieces)
    kernel.launch(grid, LAYOUT.pack(args, problem), stream)
