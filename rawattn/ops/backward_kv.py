"""Launch of backward_kv.cu of kernels_cu/sm90/ or kernels_cu/sm80/, or of their Numba twin."""

from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Layout, Pointer, Tensor, key_tiles
from rawattn.ops.softcaps import CAP_SIZES, cap_sizes
from rawattn.ops.tensor_maps import maps_of
from rawattn.ops.works import NO_COUNTER, NUMBERS, grid_of, with_counter
from rawattn.ops.workspaces import turns_in
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
    seqused_k: Pointer | None


LAYOUT = Layout(Args, problem=True)
MAPS = ("q", "k", "v", "dout")
LAYOUT_SM90 = Layout(Args, problem=True, maps=MAPS, numbers=(("turns", "P"), *NUMBERS, *CAP_SIZES))
BOX = 64  # rows of K and V that are loaded at a time


def launch(
    row: Row,
    problem: Problem,
    args: Args,
    *,
    stream: int,
    counted: bool = False,
    in_order: bool = False,
) -> None:
    """dk and dv; with dq_accum (zeroed) also dQ / softmax_scale, by atomic adds into it.

    ``counted``: as of forward.launch. ``in_order``: what is added to an element of dQ is so in the
    same order every time; behind dQ's sums in dq_accum are zeros for the turns.
    """
    if row.family == "numba":
        from rawattn.kernels_numba import backward_kv as twin

        twin.launch(row, problem, args, stream=stream)
        return
    layout = LAYOUT_SM90 if row.family == "sm90" else LAYOUT
    atomic = args.dq_accum is not None and not in_order
    kernel = loaded.kernel(row, problem, atomic=atomic, args_bytes=layout.size)
    tiles = key_tiles(row, problem)
    if row.family != "sm90":
        kernel.launch((tiles, problem.num_heads_kv, 1), layout.pack(args, problem), stream)
        return
    mapped = args.q, args.k, args.v, args.dout
    pointers, strides = tuple(x.ptr for x in mapped), tuple(x.strides for x in mapped)
    maps = maps_of(problem, (row.cfg.block_m, BOX), MAPS, pointers, strides)
    turns = turns_in(args.dq_accum, problem) if in_order and args.dq_accum else 0
    packed = layout.pack(
        args,
        problem,
        maps=maps,
        numbers=(turns, tiles, NO_COUNTER, *cap_sizes(problem, of_scores=False)),
    )
    if counted:
        packed = with_counter(layout, packed)
    kernel.launch(grid_of(row, problem, tiles * problem.num_heads_kv), packed, stream)
