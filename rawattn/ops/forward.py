"""Launch of kernels_cu/sm90/forward.cu, of kernels_cu/sm80/forward.cu, or of their Numba twin."""

from itertools import count
from typing import NamedTuple

from rawattn import launch as loaded
from rawattn.ops.arguments import Int, Layout, Pointer, Tensor, query_tiles
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


class HopperArgs(NamedTuple):
    """``struct Args`` of the kernel of sm90: maps of q, k and v in front, sizes apart."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Pointer
    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer
    num_tiles: Int
    counter: Int


LAYOUT = Layout(Args, problem=True)
LAYOUT_SM90 = Layout(HopperArgs, problem=True, maps=("q", "k", "v"))


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


def _launch_sm90(row: Row, problem: Problem, args: Args, stream: int, counted: bool) -> None:
    """A grid of as many CTAs as run at once; each takes one tile after the other."""
    d, dv = tile_widths(problem.head_dim, problem.head_dim_v)
    # without keys no tile of them is loaded, and a map wants memory
    k, v = (args.k, args.v) if problem.total_k else (args.q, args.q)
    maps = (
        map_of(args.q, row.cfg.block_m, panel_of(d)),
        map_of(k, row.cfg.block_n, panel_of(d)),
        map_of(v, row.cfg.block_n, panel_of(dv)),
    )
    num_tiles = query_tiles(row, problem)
    ctas = min(num_tiles * problem.num_heads_q, problem.num_sms * row.cfg.min_ctas)
    counter = next(_launches) % COUNTERS if counted else -1
    hopper = HopperArgs(*args, num_tiles=num_tiles, counter=counter)
    kernel = loaded.kernel(row, problem, args_bytes=LAYOUT_SM90.size)
    kernel.launch((ctas, 1, 1), LAYOUT_SM90.pack(hopper, problem, maps=maps), stream)
