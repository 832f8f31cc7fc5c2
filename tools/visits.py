"""The problems of sanitize.py without a selection, and what all of its problems share.

They visit the forward, every backward method, the jvp and both ways of double_backward over all
head dimensions, masks and dtypes.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import ml_dtypes
import numpy as np

import rawattn
from rawattn.variants import METHODS, TABLE, Row
from rawattn.variants.steps import SECOND, STEPS, Step


def steps_of(stem: str, steps: Mapping[str, tuple[Step, ...]]) -> tuple[str, ...]:
    """The steps beside the forward, which runs in every visit, that run the kernel of a stem."""
    return tuple(name for name in steps if stem in [step.stem for step in steps[name]])


DIRECTIONS = ("q", "k", "v", "qk", "qv", "kv")  # the parts that are not None
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
# Unequal lengths, an empty side, a lone token, and more than one tile of either side.
LENGTHS_Q = (70, 0, 1, 133)
LENGTHS_K = (133, 5, 1, 70)
# Offsets of broken batches: past the tokens, falling, negative, not from 0, far away.
LIES = ((0, 70, 300, 1000), (0, 150, 100, 204), (-50, 10, -(2**31), 204), (9, 2**31 - 1, 5, 204))


@dataclass(frozen=True)
class Mask:
    """What ``rawattn.forward`` takes of a mask."""

    causal: bool
    window: tuple[int, int]


MASKS = (Mask(False, (-1, -1)), Mask(True, (-1, -1)), Mask(False, (40, 20)))


@dataclass(frozen=True)
class Visit:
    """One problem; ``row`` names the rows of the variants table to prefer, with commas between.

    ``backend`` None: CUDA kernels, but for tiles that do not fit this GPU. ``steps`` come after the
    forward; ``direction`` is that of the steps beyond the backward. ``lie``: offsets of queries and
    keys in the place of those of LENGTHS_Q and LENGTHS_K. The last are options of all functions:
    with ``seqused`` a part of the keys is in use.
    """

    dtype: str
    head_dim: int
    mask: Mask
    backend: str | None = None
    row: str = ""
    steps: tuple[str, ...] = (*METHODS, *SECOND)
    direction: str = "qkv"
    head_dim_v: int | None = None
    lie: tuple[int, ...] = ()
    softcap: float = 0.0
    sinks: bool = False
    seqused: bool = False


def usual_rows(sparse: bool) -> tuple[str, list[Row]]:
    """The first rows of every stem and head_dim with commas between, and the other CUDA rows.

    The problems are small and of short sequences, and the rows for such must not take the place of
    the usual ones.
    """
    rows = [r for r in TABLE if r.family != "numba" and r.kernel.sparse == sparse]
    large = [row for row in rows if not (row.when.max_ctas or row.when.short)]
    first = {(row.stem, row.head_dim): row for row in reversed(large)}
    rest = [row for row in rows if row is not first[row.stem, row.head_dim]]
    return ",".join(row.name for row in first.values()), rest


def visits() -> list[Visit]:
    """Every head_dim and dtype with two of the masks, the rows that those leave out, the twins.

    Then offsets that lie, and the jvp whose columns are shared by two CTAs beside a narrow V.
    """
    usual_names, rest = usual_rows(sparse=False)
    usual = []
    for i, (head_dim, dtype) in enumerate(product(HEAD_DIMS, ("float16", "bfloat16"))):
        masks = [MASKS[(i + shift) % len(MASKS)] for shift in range(2)]
        partial = (i + i // 2) % 2  # either dtype, in turn
        direction = DIRECTIONS[i // 2 % len(DIRECTIONS)] if partial else "qkv"
        usual += [
            Visit(dtype, head_dim, masks[0], row=usual_names, direction=direction),
            Visit(dtype, head_dim, masks[1], row=usual_names, steps=METHODS),
        ]
    others = [
        Visit(
            *("float16", row.head_dim, MASKS[1]),
            row=row.name,
            steps=steps_of(row.stem, STEPS),
            softcap=20.0 if row.when.softcap or (i % 2 and row.when.softcap is None) else 0.0,
            sinks=bool(i % 2),
            seqused=bool(i % 2),
        )
        for i, row in enumerate(rest)
    ]
    every = {"softcap": 20.0, "sinks": True, "seqused": True}
    options = [
        Visit("bfloat16", head_dim, MASKS[i % len(MASKS)], row=usual_names, **every)
        for i, head_dim in enumerate(HEAD_DIMS)
    ]
    twins = [
        Visit(dtype, 32, MASKS[1], "numba", direction=direction, sinks=True, seqused=True)
        for dtype, direction in zip(
            ("float16", "bfloat16", "float32", "float64"), ("qkv", "q", "kv", "v"), strict=True
        )
    ]
    lies = [
        Visit("bfloat16", head_dim, MASKS[i % len(MASKS)], row=usual_names, lie=lie)
        for i, (head_dim, lie) in enumerate(zip((64, 128, 32, 64), LIES, strict=True))
    ]
    narrow = Visit("float16", 256, MASKS[1], row=usual_names, steps=("jvp",), head_dim_v=32)
    return [*usual, *others, *options, *twins, *lies, narrow]


class Arrays:
    """CuPy arrays of standard normal numbers, the same in every process; offsets of sequences."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def normal(self, *shape: int, dtype: str) -> Any:
        values = self.random.standard_normal(shape)
        return self.put(values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))

    def offsets(self, lengths: Iterable[int], lie: tuple[int, ...] = ()) -> Any:
        return self.put(np.array(lie or list(accumulate(lengths, initial=0)), np.int32))

    def put(self, values: np.ndarray) -> Any:
        import cupy

        return cupy.asarray(values)


def memory_for(visit: Any) -> AbstractContextManager[Any]:
    """What a visit's arrays are allocated with: zeros where offsets lie, since of such sequences
    some tokens may be met by no kernel, and others read them."""
    if not visit.lie:
        return nullcontext()
    import cupy

    def zeros(size: int) -> Any:
        pointer = cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)
        pointer.memset_async(0, size)
        return pointer

    return cupy.cuda.using_allocator(zeros)


def read(results: Mapping[str, Iterable[Any]], visit: Any) -> None:
    """Read all results, so that initcheck sees what a kernel left unwritten.

    RuntimeError when a number is not finite.
    """
    for name, arrays in results.items():
        for i, result in enumerate(arrays):
            if result is None:
                continue
            values = result.get().astype(np.float64)
            unseeing = (values == -np.inf) & (values.ndim == 2)  # lse of rows without a key
            if not (np.isfinite(values) | unseeing).all():
                raise RuntimeError(f"result {i} of {name} is not finite: {visit}")


def visit_dense(part: slice = slice(None)) -> None:
    """Run a part of the problems; RuntimeError when a result is not finite."""
    arrays = Arrays()
    for visit in visits()[part]:
        os.environ["RAWATTN_VARIANT"] = visit.row
        with memory_for(visit):
            read(run(visit, arrays), visit)


def run(visit: Visit, arrays: Arrays) -> dict[str, Any]:
    """The results of every step by its name."""
    cu_q, cu_k = (arrays.offsets(lengths, visit.lie) for lengths in (LENGTHS_Q, LENGTHS_K))
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    d, dtype = visit.head_dim, visit.dtype
    dv = visit.head_dim_v or d
    q, of_q = (arrays.normal(total_q, 2, d, dtype=dtype) for _ in range(2))
    dout = arrays.normal(total_q, 2, dv, dtype=dtype)
    k, of_k = (arrays.normal(total_k, 1, d, dtype=dtype) for _ in range(2))
    v, of_v = (arrays.normal(total_k, 1, dv, dtype=dtype) for _ in range(2))
    parts = zip("qkv", (of_q, of_k, of_v), strict=True)
    direction = [part if name in visit.direction else None for name, part in parts]
    options = {
        "cu_seqlens_k": cu_k,
        "causal": visit.mask.causal,
        "window": visit.mask.window,
        "backend": visit.backend,
        "softcap": visit.softcap,
    }
    moved: dict[str, dict[str, Any]] = {"jvp": {}, "second": {}}
    if visit.sinks:
        options["sinks"], tangent = (arrays.normal(2, dtype="float32") for _ in range(2))
        moved = {"jvp": {"tsinks": tangent}, "second": {"ddsinks": tangent}}
    if visit.seqused:
        options["seqused_k"] = arrays.put(np.array([n // 2 for n in LENGTHS_K], np.int32))
    out, lse = rawattn.forward(q, k, v, cu_q, return_lse=True, **options)
    results: dict[str, Any] = {"out": [out], "lse": [lse]}
    passed = (dout, q, k, v, out, lse, cu_q)
    for step in visit.steps:
        if step in METHODS:
            results[step] = rawattn.backward(*passed, method=step, **options)
        elif step == "jvp":
            results[step] = rawattn.jvp(q, k, v, *direction, cu_q, **options, **moved["jvp"])
        else:
            exact = step == "second/two_pass"
            results[step] = rawattn.double_backward(
                *direction, *passed, deterministic=exact, **options, **moved["second"]
            )
    return results
