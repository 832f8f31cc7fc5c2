"""What the Numba twins share: dtypes, the tile, device functions, and how arrays reach a launch.

A CTA of a twin works on square tiles: BLOCK rows of queries by BLOCK rows of keys, with LANES
threads to a row. Threads speak to each other through shared memory alone, so that the same kernel
runs on any GPU and in Numba's simulator. The device functions here name nothing of ``cuda``:
the simulator then runs them as the plain Python functions that they are.

One long module, so that a twin has one place to import from: top to bottom dtypes, tiles, sequences
and the mask, the backward's scores, the launch.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numba.cuda
import numpy as np
import numpy.typing as npt

from rawattn.arrays import View
from rawattn.problem import Problem

if "row_stack" not in vars(np):  # gone from NumPy 2.5; Numba names it at its first compilation
    vars(np)["row_stack"] = np.vstack

cuda: Any = numba.cuda  # the simulator puts itself in the place of globals of this very name
SIMULATED: bool = vars(numba.config)["ENABLE_CUDASIM"]
Array = Any  # inside a kernel: a device array, a shared array or a local one

if SIMULATED:
    from rawattn.kernels_numba import simulator as simulator_numba

    simulator_numba.take_turns()

LANES = 8  # threads that share a row of a tile; every head_dim is a multiple of it
SHARED_BYTES = 48 * 1024  # what any GPU grants a CTA without being asked


# ---- dtypes -----------------------------------------------------------------------------------


def accumulator(dtype: str) -> type[np.floating[Any]]:
    """The dtype that a kernel computes in, and that of lse, delta and the workspaces."""
    return np.float64 if dtype == "float64" else np.float32


def storage(dtype: str) -> np.dtype[Any]:
    """The dtype that Numba sees: bfloat16 is unknown to it and travels as its 16 bits."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as something that kernels can call."""
    if SIMULATED:
        return function
    jitted: Callable[..., Any] = cuda.jit(device=True)(function)
    return jitted


@functools.cache
def decoder(dtype: str) -> Callable[..., Any]:
    """Device function: an element as stored to the accumulator's dtype."""
    real = accumulator(dtype)

    @device_function
    def widen(element: Any) -> Any:
        return real(element)

    @device_function
    def widen_bfloat16(bits: Any) -> Any:
        return np.uint32(np.uint32(bits) << 16).view(np.float32)

    return widen_bfloat16 if dtype == "bfloat16" else widen


@functools.cache
def encoder(dtype: str) -> Callable[..., Any]:
    """Device function: a number to an element as stored, rounded to nearest even; NaN stays NaN."""
    element = storage(dtype).type

    @device_function
    def narrow(number: Any) -> Any:
        return element(number)

    @device_function
    def narrow_to_bfloat16(number: Any) -> Any:
        bits = np.float32(number).view(np.uint32)
        if number != number:
            return np.uint16(bits >> 16 | 0x40)  # rounding could carry a NaN over into infinity
        return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)

    return narrow_to_bfloat16 if dtype == "bfloat16" else narrow


# ---- tiles ------------------------------------------------------------------------------------


def block_rows(dtype: str, *widths: int, squares: int = 2, numbers: int = 2) -> int:
    """BLOCK: the most rows, of 16, 8, 4 and 2, whose tiles fit into static shared memory.

    ``widths`` are those of the tiles that have a head dimension, 0 where a kernel does without one.
    Beside them a CTA keeps ``squares`` square tiles and ``numbers`` numbers a row; every row of a
    tile is padded by one element.
    """
    itemsize = np.dtype(accumulator(dtype)).itemsize
    columns = sum(widths) + len(widths) + numbers
    for block in (16, 8, 4):
        if block * (columns + squares * (block + 1)) * itemsize <= SHARED_BYTES:
            return block
    return 2


@functools.cache
def tile_loader(dtype: str, block: int, columns: int) -> Callable[..., Any]:
    """Device function: ``block`` rows of one head to a shared tile; rows from ``rows`` on are zero.

    ``first_row`` counts from the start of gX. Sync before the tile is read.
    """
    real, decode = accumulator(dtype), decoder(dtype)
    threads = block * LANES

    @device_function
    def load_tile(gX: Array, first_row: int, rows: int, head: int, sX: Array, thread: int) -> None:
        for e in range(thread, block * columns, threads):
            row, column = e // columns, e % columns
            if row < rows:
                sX[row, column] = decode(gX[first_row + row, head, column])
            else:
                sX[row, column] = real(0)

    return load_tile


# ---- sequences and the mask -------------------------------------------------------------------


@device_function
def sequence(cu_seqlens: Array, batch: int, b: int, total: int) -> Any:
    """First row and length of sequence ``b``; the rows past the end see nothing: length 0.

    Offsets are clamped to the ``total`` rows, so that a broken cu_seqlens gives wrong numbers at
    worst, never an access outside the arrays.
    """
    start = min(max(int(cu_seqlens[b]), 0), total)
    if b == batch:
        return start, 0
    return start, min(max(int(cu_seqlens[b + 1]), start), total) - start


@device_function
def keys_in_use(cu_seqlens_k: Array, seqused_k: Array, batch: int, b: int, total_k: int) -> Any:
    """``sequence`` of the keys, of which there may be more than are in use."""
    start, length = sequence(cu_seqlens_k, batch, b, total_k)
    if seqused_k.shape[0] > 0 and b < batch:
        length = min(length, max(int(seqused_k[b]), 0))
    return start, length


@device_function
def find_tile(cu_seqlens: Array, batch: int, total: int, tile: int, block: int) -> Any:
    """Which tile is this: (sequence, its first row, its length, first row of the tile within it).

    Rows at or past cu_seqlens[batch] count as sequence ``batch``. A tile that does not exist starts
    at or past the length: the grid is a bound that does not know the content of cu_seqlens.
    """
    for b in range(batch):
        start, length = sequence(cu_seqlens, batch, b, total)
        tiles = (length + block - 1) // block
        if tile < tiles:
            return b, start, length, tile * block
        tile -= tiles
    start, _ = sequence(cu_seqlens, batch, batch, total)
    return batch, start, total - start, tile * block


@device_function
def key_range(m_start: int, m_stop: int, shift: int, seqlen_k: int, left: int, right: int) -> Any:
    """First key that a query in [m_start, m_stop) may see, and one past the last.

    ``shift`` is seqlen_k - seqlen_q: query i stands at key i + shift.
    """
    first, last = 0, seqlen_k
    if left >= 0:
        first = max(first, m_start + shift - left)
    if right >= 0:
        last = min(last, m_stop + shift + right)
    return first, last


@device_function
def query_range(n_start: int, n_stop: int, shift: int, seqlen_q: int, left: int, right: int) -> Any:
    """First query that may see a key in [n_start, n_stop), and one past the last."""
    first, last = 0, seqlen_q
    if right >= 0:
        first = max(first, n_start - shift - right)
    if left >= 0:
        last = min(last, n_stop - shift + left)
    return first, last


@device_function
def visible(i: int, j: int, shift: int, left: int, right: int) -> Any:
    """May query i see key j, both inside their sequence?"""
    distance = j - i - shift
    return (left < 0 or distance >= -left) and (right < 0 or distance <= right)


def tiles_bound(total: int, batch: int, block: int) -> int:
    """At least as many CTAs as there are tiles, whatever cu_seqlens holds; never zero."""
    return total // block + batch + 1


@functools.cache
def capper(dtype: str, capped: bool) -> Callable[..., Any]:
    """Device function: a score, its slope and its bend, from what they are before the softcap.

    The score is softcap tanh(x / softcap), slope and bend its derivatives; x, 1 and 0 without.
    """
    real = accumulator(dtype)

    @device_function
    def cap(x: float, softcap: float) -> Any:
        t = math.tanh(x / softcap)
        slope = real(1) - t * t
        return softcap * t, slope, real(-2) / softcap * t * slope

    @device_function
    def leave(x: float, softcap: float) -> Any:
        return x, real(1), real(0)

    return cap if capped else leave


# ---- what both orders of the backward pass do with a pair of tiles ------------------------------


@device_function
def load_row_terms(
    lse: Array, delta: Array, first_row: int, head: int, sL: Array, sD: Array, row: int
) -> None:
    """L and D of one query row; a row without keys gets L = +inf, which makes every P 0."""
    sL[row] = lse[head, first_row + row]
    if sL[row] == -math.inf:
        sL[row] = math.inf
    sD[row] = delta[head, first_row + row]


@functools.cache
def backward_scores(
    dtype: str, block: int, head_dim: int, head_dim_v: int, capped: bool
) -> Callable[..., Any]:
    """Device function: P = exp(S - L) and dS = P (dO V^T - D) of a pair of tiles.

    Thread (row, lane) fills query row ``row``. Both are 0 where the mask or an end forbids.
    ``capped``: there is a softcap, and dS is of the scores before it.
    """
    real, cap = accumulator(dtype), capper(dtype, capped)

    @device_function
    def scores(
        sQ: Array,
        sK: Array,
        sV: Array,
        sdO: Array,
        sL: Array,
        sD: Array,
        sP: Array,
        sdS: Array,
        row: int,
        lane: int,
        m_start: int,
        n_start: int,
        seqlen_q: int,
        seqlen_k: int,
        left: int,
        right: int,
        scale: float,
        softcap: float,
    ) -> None:
        i, shift = m_start + row, seqlen_k - seqlen_q
        for n in range(lane, block, LANES):
            j = n_start + n
            probability: Any = real(0)
            dscore = real(0)
            if i < seqlen_q and j < seqlen_k and visible(i, j, shift, left, right):
                score, dprobability = real(0), real(0)
                for d in range(head_dim):
                    score += sQ[row, d] * sK[n, d]
                for d in range(head_dim_v):
                    dprobability += sdO[row, d] * sV[n, d]
                score, slope, _ = cap(scale * score, softcap)
                probability = math.exp(score - sL[row])
                dscore = probability * (dprobability - sD[row]) * slope
            sP[row, n] = probability
            sdS[row, n] = dscore

    return scores


# ---- launch -----------------------------------------------------------------------------------


Filled = TypeVar("Filled", bound=tuple[Any, ...])  # an Args


def filled(args: Filled, problem: Problem, dtype: str | None = None, /, **ndim: int) -> Filled:
    """``args`` as a kernel takes them: an array without elements where one is None.

    ``ndim`` names those that may be None, with their number of axes. They are of ``dtype``, by
    default that of the accumulator.
    """
    kind = dtype or np.dtype(accumulator(problem.dtype)).name
    fields: dict[str, Any] = args._asdict()  # type: ignore[attr-defined]
    absent = {name: _absent(kind, n, problem) for name, n in ndim.items() if fields[name] is None}
    return args._replace(**absent) if absent else args  # type: ignore[attr-defined]


def _absent(dtype: str, ndim: int, problem: Problem) -> View:
    empty = np.empty((0,) * ndim, dtype)
    return View(0, empty.shape, (1,) * ndim, dtype, problem.device, empty)


class _Exported:
    """A View as Numba wants to see device memory; version 2 of the protocol never synchronises."""

    def __init__(self, view: View) -> None:
        dtype = storage(view.dtype)
        self.__cuda_array_interface__ = {
            "version": 2,
            "data": (view.ptr if math.prod(view.shape) else 0, False),
            "shape": view.shape,
            "strides": tuple(stride * dtype.itemsize for stride in view.strides),
            "typestr": dtype.str,
        }


def run(
    kernel: Any,
    grid: tuple[int, ...],
    threads: int,
    problem: Problem,
    args: tuple[Any, ...],
    sizes: Sequence[float] = (),
    *,
    written: Sequence[str],
    stream: int,
) -> None:
    """Launch ``kernel`` with the parameters that its CUDA twin has in ``struct Args``.

    ``args`` are an Args, with every array there; ``sizes`` stand between its arrays and its
    numbers. On a GPU the work is queued on ``stream``. Arrays in host memory are copied to the
    device, or into the simulator, and those of the names ``written`` back again.
    """
    views = [field for field in args if isinstance(field, View)]
    numbers = [*sizes, *(field for field in args if not isinstance(field, View))]
    with warnings.catch_warnings():
        # A small grid is a small problem, not a choice that the caller could have made better.
        warnings.filterwarnings("ignore", message=".*Grid size .* under-utilization")
        if problem.device < 0:
            copies = [cuda.to_device(np.ascontiguousarray(_host_bits(view))) for view in views]
            kernel[grid, threads](*copies, *numbers)
            results = [getattr(args, name) for name in written]
            for view, copy in zip(views, copies, strict=True):
                if any(view is result for result in results):
                    _host_bits(view)[...] = copy.copy_to_host()
            return
        with cuda.gpus[problem.device]:
            exported = [cuda.as_cuda_array(_Exported(view)) for view in views]
            kernel[grid, threads, cuda.external_stream(stream)](*exported, *numbers)


def _host_bits(view: View) -> npt.NDArray[Any]:
    """The memory of a host array as the dtype that Numba sees."""
    owner: npt.NDArray[Any] = view.owner
    return owner.view(storage(view.dtype))
