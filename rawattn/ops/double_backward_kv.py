"""Launch of kernels_cu/sm80/double_backward_kv.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Layout, Pointer, Tensor, given, key_tiles
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
    gq_accum: Pointer | None
    gk: Tensor
    gv: Tensor
    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer
    seqused_k: Pointer | None


LAYOUT = Layout(Args, problem=True)


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """gk and gv; with gq_accum (zeroed) also gQ / softmax_scale, by atomic adds into it."""
    if row.family == "numba":
        from rawattn.kernels_numba import double_backward_kv as twin

        twin.launch(row, problem, args, stream=stream)
        return
    direction = given(args.ddq, args.ddk, args.ddv)
    kernel = loaded.kernel(
        row, problem, atomic=args.gq_accum is not None, direction=direction, args_bytes=LAYOUT.size
    )
    grid = (key_tiles(row, problem), problem.num_heads_kv, 1)
    kernel.launch(grid, LAYOUT.pack(args, problem), stream)
