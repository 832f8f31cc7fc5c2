"""Launch of kernels_cu/sm90/forward.cu, of kernels_cu/sm80/forward.cu, or of their Numba twin."""

from functools import lru_cache
from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.arrays import Shape, View
from rawattn.ops.arguments import Layout, Pointer, Tensor, query_tiles
from rawattn.ops.softcaps import CAP_SIZES, cap_sizes
from rawattn.ops.tensor_maps import maps_of
from rawattn.ops.works import NO_COUNTER, NUMBERS, grid_of, with_counter
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
    sinks: Pointer | None
    seqused_k: Pointer | None


LAYOUT = Layout(Args, problem=True)
MAPS = ("q", "k", "v")
LAYOUT_SM90 = Layout(Args, problem=True, maps=MAPS, numbers=(*NUMBERS, *CAP_SIZES))


def launch(row: Row, problem: Problem, args: Args, *, stream: int, counted: bool = False) -> None:
    """out, lse of packed q, k, v; the device is current, every check has been made.

    ``counted``: the launch may have a counter of its own, as it runs once and not in a graph.
    """
    if row.family == "numba":
        from rawattn.kernels_numba import forward as twin

        twin.launch(row, problem, args, stream=stream)
        return
    if row.family == "sm90":
        _launch_sm90(row, problem, args, stream, counted)
        return
    kernel = loaded.kernel(row, problem, args_bytes=LAYOUT.size)
    kernel.launch(
        (query_tiles(row, problem), problem.num_heads_q, 1), LAYOUT.pack(args, problem), stream
    )


def _launch_sm90(row: Row, problem: Problem, args: Args, stream: int, counted: bool) -> None:
    """A grid of as many CTAs as run at once; each takes one tile after the other."""
    q, k, v, out = args[:4]
    grid, packed = _packed(
        row,
        problem,
        tuple(0 if x is None else x.ptr for x in args),
        (q.strides, k.strides, v.strides, out.strides),
    )
    if counted:
        packed = with_counter(LAYOUT_SM90, packed)
    loaded.kernel(row, problem, args_bytes=LAYOUT_SM90.size).launch(grid, packed, stream)


@lru_cache(maxsize=4096)
def _packed(
    row: Row, problem: Problem, pointers: tuple[int, ...], strides: tuple[Shape, ...]
) -> tuple[tuple[int, int, int], bytes]:
    """The grid and the bytes of ``struct Args``, without a counter."""
    p, cfg = problem, row.cfg
    mapped = len(MAPS)
    maps = maps_of(p, (cfg.block_m, cfg.block_n), MAPS, pointers[:mapped], strides[:mapped])
    tiles = query_tiles(row, p)
    grid = grid_of(row, p, tiles * p.num_heads_q)
    every = (*strides, *[()] * (len(pointers) - len(strides)))  # Layout.pack reads but these two
    views = [
        View(ptr, (), of, p.dtype, p.device, None) for ptr, of in zip(pointers, every, strict=True)
    ]
    numbers = (tiles, NO_COUNTER, *cap_sizes(p, of_scores=True))
    return grid, LAYOUT_SM90.pack(Args._make(views), p, maps=maps, numbers=numbers)
