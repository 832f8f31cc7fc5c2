"""The problems of sanitize.py with a selection: they visit the table of blocks from every source,
the forward, both backwards, the jvp and double_backward, each with and without a gate.
"""

import os
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

import rawattn
from rawattn.variants.steps import SPARSE_STEPS
from visits import (
    HEAD_DIMS,
    LENGTHS_K,
    LENGTHS_Q,
    LIES,
    Arrays,
    memory_for,
    read,
    steps_of,
    usual_rows,
)

STEPS = {f"sparse/{name}": steps for name, steps in SPARSE_STEPS.items()}
SOURCES = ("indices", "counts", "mask", "pattern")
NUM_SELECTED = 3
# Query heads, kv heads and selection heads: a selection for 2, 1, 16 and 4 query heads.
HEADS = ((4, 2, 2), (4, 2, 4), (16, 1, 1), (4, 1, 1))
BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class SparseVisit:
    """One problem, with fields as in Visit; ``heads`` of queries, of keys and of selections."""

    dtype: str
    head_dim: int
    block_size: int
    heads: tuple[int, int, int] = (16, 1, 1)
    causal: bool = True
    own: bool = True
    gate: bool = False
    source: str = "indices"
    backend: str | None = None
    row: str = ""
    steps: tuple[str, ...] = tuple(STEPS)
    lengths_q: tuple[int, ...] = LENGTHS_Q
    lengths_k: tuple[int, ...] = LENGTHS_K
    lie: tuple[int, ...] = ()


def sparse_visits() -> list[SparseVisit]:
    """Every head_dim and dtype with and without a gate, the rows that those leave out, the twins.

    Heads, block sizes and sources take turns. Then offsets lie. The last ones have more than one
    chunk of queries, and lists that are cut into segments of work.
    """
    usual_names, rest = usual_rows(sparse=True)
    usual = [
        SparseVisit(
            dtype,
            head_dim,
            block_size=BLOCK_SIZES[(i // 4 + i // 2) % 4],
            heads=HEADS[(i // 4 + i) % 4],
            causal=i % 3 > 0,
            own=i % 5 > 0,
            gate=gate,
            source=SOURCES[(i // 8 + i) % 4],
            row=usual_names,
        )
        for i, (head_dim, dtype, gate) in enumerate(
            product(HEAD_DIMS, ("float16", "bfloat16"), (False, True))
        )
    ]
    others = [
        SparseVisit("float16", row.head_dim, 64, gate=gate, row=row.name, steps=steps)
        for row, steps in ((row, steps_of(row.stem, STEPS)) for row in rest)
        for gate in (False, True)
    ]
    twins = [
        SparseVisit(dtype, 32, 16, HEADS[i], gate=i % 2 > 0, source=SOURCES[i], backend="numba")
        for i, dtype in enumerate(("float16", "bfloat16", "float32", "float64"))
    ]
    lies = [
        SparseVisit("bfloat16", 64, 64, gate=i % 2 > 0, source=source, row=usual_names, lie=lie)
        for i, (source, lie) in enumerate(zip(SOURCES, LIES, strict=True))
    ]
    chunks = [
        replace(
            plain, backend=backend, steps=("sparse/atomic",), lengths_q=(260,), lengths_k=(270,)
        )
        for plain in (SparseVisit("float16", 32, 64, (64, 1, 1), gate=True, source="mask"),)
        for backend in (None, "numba")
    ]
    return [*usual, *others, *twins, *lies, *chunks]


def selection_of(visit: SparseVisit, arrays: Arrays, cu_q: Any, cu_k: Any) -> tuple[Any, int]:
    """What the functions take as block_indices, and how many slots a query has.

    Indices hold padding, blocks past the end and duplicates; the other sources become a table.
    """
    heads_q, heads_kv, heads = visit.heads
    total_q, total_k = sum(visit.lengths_q), sum(visit.lengths_k)
    blocks = -(-max(visit.lengths_k) // visit.block_size)
    if visit.source in ("indices", "counts"):
        shape = (total_q, heads, NUM_SELECTED)
        drawn = arrays.random.integers(-1, blocks + 1, shape).astype(np.int32)
        return arrays.put(drawn), NUM_SELECTED
    table_of: Any = rawattn.BlockTable.of_pattern
    options: dict[str, Any] = {"sliding_blocks": 2, "global_blocks": 1, "num_heads_sel": heads}
    options["total_q"] = total_q
    if visit.source == "mask":
        table_of = rawattn.BlockTable.of_mask
        drawn = arrays.random.random((total_q, heads, blocks)) < 0.5
        options = {"block_mask": arrays.put(drawn)}
    table = table_of(
        cu_seqlens=cu_q,
        num_heads_kv=heads_kv,
        num_heads_q=heads_q,
        head_dim=256,  # this makes the shortest chunks
        cu_seqlens_k=cu_k,
        total_k=total_k,
        block_size=visit.block_size,
        include_own_block=visit.own,
        causal=visit.causal,
        backend=visit.backend,
        **options,
    )
    return table, blocks if visit.source == "mask" else 3


def visit_sparse(part: slice = slice(None)) -> None:
    """Run a part of the problems; RuntimeError when a result is not finite."""
    arrays = Arrays()
    for visit in sparse_visits()[part]:
        os.environ["RAWATTN_VARIANT"] = visit.row
        with memory_for(visit):
            read(run(visit, arrays), visit)


def run(visit: SparseVisit, arrays: Arrays) -> dict[str, Any]:
    """The results of every step by its name."""
    dtype, d = visit.dtype, visit.head_dim
    heads_q, heads_kv, heads = visit.heads
    cu_q = arrays.offsets(visit.lengths_q, visit.lie)
    cu_k = arrays.offsets(visit.lengths_k, visit.lie)
    total_q, total_k = sum(visit.lengths_q), sum(visit.lengths_k)
    selected, slots = selection_of(visit, arrays, cu_q, cu_k)
    q, dout, of_q = (arrays.normal(total_q, heads_q, d, dtype=dtype) for _ in range(3))
    k, v, of_k, of_v = (arrays.normal(total_k, heads_kv, d, dtype=dtype) for _ in range(4))
    single = "float64" if dtype == "float64" else "float32"
    gate, of_gate = (
        arrays.normal(total_q, heads, slots, dtype=single) if visit.gate else None for _ in range(2)
    )
    options = {
        "cu_seqlens_k": cu_k,
        "block_size": visit.block_size,
        "include_own_block": visit.own,
        "causal": visit.causal,
        "block_scale": gate,
        "backend": visit.backend,
    }
    if visit.source == "counts":
        drawn = arrays.random.integers(0, NUM_SELECTED + 1, (total_q, heads)).astype(np.int32)
        options["block_counts"] = arrays.put(drawn)
    out, lse = rawattn.sparse_forward(q, k, v, cu_q, selected, return_lse=True, **options)
    results: dict[str, Any] = {"out": [out], "lse": [lse]}
    passed = (dout, q, k, v, out, lse, cu_q, selected)
    for step in visit.steps:
        if step == "sparse/jvp":
            results[step] = rawattn.sparse_jvp(
                q, k, v, of_q, of_k, of_v, cu_q, selected, tblock_scale=of_gate, **options
            )
        elif step == "sparse/second":
            results[step] = rawattn.sparse_double_backward(
                of_q, of_k, of_v, *passed, ddblock_scale=of_gate, **options
            )
        else:
            exact = step == "sparse/deterministic"
            results[step] = rawattn.sparse_backward(*passed, deterministic=exact, **options)
    return results
