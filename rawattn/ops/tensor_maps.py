"""Tensor maps: how the tensor memory accelerator of Hopper reads boxes of a packed tensor."""

import ctypes
from functools import lru_cache
from typing import Any

from rawattn.arrays import Shape
from rawattn.problem import Problem
from rawattn.variants import panel_of, tile_widths

ELEMENT_BYTES = 2


@lru_cache(maxsize=4096)
def maps_of(
    problem: Problem,
    rows: tuple[int, int],
    names: tuple[str, ...],
    pointers: tuple[int, ...],
    strides: tuple[Shape, ...],
) -> tuple[bytes, ...]:
    """The maps of the tensors of a call, of "q", "k", "v" and "dout"; ``rows`` are those of a box,
    of queries and of keys."""
    p, (of_queries, of_keys) = problem, rows
    d, dv = tile_widths(p.head_dim, p.head_dim_v)
    queries, keys = (p.total_q, p.num_heads_q), (p.total_k, p.num_heads_kv)
    kinds = {
        "q": ((*queries, p.head_dim), (of_queries, panel_of(d))),
        "k": ((*keys, p.head_dim), (of_keys, panel_of(d))),
        "v": ((*keys, p.head_dim_v), (of_keys, panel_of(dv))),
        "dout": ((*queries, p.head_dim_v), (of_queries, panel_of(dv))),
    }
    given = [(ptr, *kinds[n], of) for n, ptr, of in zip(names, pointers, strides, strict=True)]
    # a map wants memory: of a side without tokens no tile is loaded, and any other map will do
    filled = next((one for one in given if one[1][0]), given[0])
    given = [one if one[1][0] else filled for one in given]
    return tuple(map_of(p.dtype, ptr, shape, of, box) for ptr, shape, box, of in given)


def map_of(dtype: str, ptr: int, shape: Shape, strides: Shape, box: tuple[int, int]) -> bytes:
    """The 128 bytes of the map of a (tokens, heads, dim) tensor, strides in elements.

    A ``box`` is so many tokens of one head by a panel of columns: 64, swizzled by 128 bytes, or 32,
    by 64, as kernels_cu/base/layout.cuh lays out a Tile. What lies outside becomes zeros.
    """
    (tokens, heads, dim), (token_stride, head_stride, _), (rows, panel) = shape, strides, box
    # the stride of a dimension of one element is never used, but must be one
    head_stride = head_stride if heads > 1 else dim
    token_stride = token_stride if tokens > 1 else heads * head_stride
    return encode(
        ptr,
        dtype,
        (dim, heads, tokens),
        (head_stride * ELEMENT_BYTES, token_stride * ELEMENT_BYTES),
        (panel, 1, rows),
    )


def encode(ptr: int, dtype: str, dims: Shape, strides: Shape, box: Shape) -> bytes:
    """cuTensorMapEncodeTiled. Raises RuntimeError where the driver refuses."""
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = {
        "bfloat16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }[dtype]
    swizzles = driver.CUtensorMapSwizzle
    wide = box[0] * ELEMENT_BYTES == 128
    status, made = driver.cuTensorMapEncodeTiled(
        kind,
        len(dims),
        ptr,
        [driver.cuuint64_t(n) for n in dims],
        [driver.cuuint64_t(n) for n in strides],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1)] * len(dims),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B if wide else swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"no tensor map of {dims} elements of {dtype} at {ptr:#x}, strides of {strides} bytes, "
            f"boxes of {box}: {status.name}"
        )
    return _bytes_of(made)


def _bytes_of(made: Any) -> bytes:
    return ctypes.string_at(int(made.getPtr()), 128)
