"""Launch of kernels_cu/sm90/forward.cu, of kernels_cu/sm80/forward.cu, or of their Numba twin."""

from functools import lru_cache
from itertools import count
from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.arrays import Shape, View
from rawattn.ops.arguments import Layout, Pointer, Tensor, query_tiles
from rawattn.ops.tensor_maps import map_of
from rawattn.problem import Problem
from rawattn.variants import COUNTERS, Row, panel_of, tile_widths


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
NUMBERS = (("num_tiles", "i"), ("counter", "i"))
LAYOUT_SM90 = Layout(Args, problem=True, maps=("q", "k", "v"), numbers=NUMBERS)


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


_launches = count()
_COUNTER = LAYOUT_SM90.offset("counter")


def _launch_sm90(row: Row, problem: Problem, args: Args, stream: int, counted: bool) -> None:
    """A grid of as many CTAs as run at once; each takes one tile after the other."""
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = args
    grid, packed = _packed(
        row,
        problem,
        (q.ptr, k.ptr, v.ptr, out.ptr, lse.ptr, cu_seqlens_q.ptr, cu_seqlens_k.ptr),
        (q.strides, k.strides, v.strides, out.strides),
    )
    if counted:  # launches that may run at the same time have different ones
        counter = (next(_launches) % COUNTERS).to_bytes(4, "little")
        packed = packed[:_COUNTER] + counter + packed[_COUNTER + 4 :]
    loaded.kernel(row, problem, args_bytes=LAYOUT_SM90.size).launch(grid, packed, stream)


@lru_cache(maxsize=4096)
def _packed(
    row: Row, problem: Problem, pointers: tuple[int, ...], strides: tuple[Shape, ...]
) -> tuple[tuple[int, int, int], bytes]:
    """The grid and the bytes of ``struct Args``, without a counter."""
    p, cfg = problem, row.cfg
    shapes = (
        (p.total_q, p.num_heads_q, p.head_dim),
        (p.total_k, p.num_heads_kv, p.head_dim),
        (p.total_k, p.num_heads_kv, p.head_dim_v),
    )
    d, dv = map(panel_of, tile_widths(p.head_dim, p.head_dim_v))
    boxes = ((cfg.block_m, d), (cfg.block_n, d), (cfg.block_n, dv))
    mapped = list(zip(pointers, shapes, strides, boxes, strict=False))
    if not p.total_k:  # no tile of keys is loaded, and a map wants memory
        mapped = mapped[:1] * 3
    maps = tuple(map_of(p.dtype, *of) for of in mapped)
    tiles = query_tiles(row, p)
    ctas = min(tiles * p.num_heads_q, p.num_sms * cfg.min_ctas)
    every = (*strides, *[()] * (len(pointers) - len(strides)))  # Layout.pack reads but these two
    views = [
        View(ptr, (), of, p.dtype, p.device, None) for ptr, of in zip(pointers, every, strict=True)
    ]
    return (ctas, 1, 1), LAYOUT_SM90.pack(Args._make(views), p, maps=maps, numbers=(tiles, -1))
