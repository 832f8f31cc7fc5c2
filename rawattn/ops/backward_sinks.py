"""Launch of kernels_cu/sm80/backward_sinks.cu, or of its Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Int, Layout, Pointer
from rawattn.problem import Problem
from rawattn.variants import Row


class Args(NamedTuple):
    """``struct Args`` of the kernel, field for field."""

    sinks: Pointer
    lse: Pointer
    delta: Pointer
    ddsinks: Pointer | None
    ddlse: Pointer | None
    ddelta: Pointer | None
    grad: Pointer
    cu_seqlens_q: Pointer
    batch: Int
    total_q: Int


LAYOUT = Layout(Args)


def launch(row: Row, problem: Problem, args: Args, *, stream: int) -> None:
    """grad, of the shape of sinks: dsinks, or with ddlse and ddelta gsinks."""
    if row.family == "numba":
        from rawattn.kernels_numba import backward_sinks as twin

        twin.launch(row, problem, args, stream=stream)
        return
    kernel = loaded.kernel(row, problem, args_bytes=LAYOUT.size)
    kernel.launch((problem.num_heads_q, 1, 1), LAYOUT.pack(args), stream)
