"""Batches of many short sequences on a GPU: right, and to the bit what a sequence is alone.

Rows are chosen by the length of sequences, too: a long one among short ones must not tell. And a
CUDA graph serves batches that have grown past the one it was captured with.
"""

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import variants
from rawattn.check.cases import HALF, Case, make
from rawattn.check.run import judge_case
from rawattn.check.sparse_cases import SparseCase
from rawattn.variants import METHODS
from tests.shared.gpu_arrays import Arrays, assert_close, bits, host_arrays, on
from tests.shared.gpu_graphs import replays
from tests.shared.gpu_problems import ARCH, sized

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


def short(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 41, count).tolist())


MANY = [
    Case("many", short(2000, 0), short(2000, 0), dtype=HALF[0], num_heads_kv=1, group=2),
    Case("many", short(2000, 1), short(2000, 2), num_heads_kv=1, causal=True, **sized(128)),
    Case("many", short(2000, 3), short(2000, 3), HALF[1], 1, 2, window=(9, 3), **sized(96, 64)),
    SparseCase("many-sparse", short(500, 4), short(500, 5), dtype=HALF[1], num_heads_kv=1, group=4),
]


@pytest.mark.parametrize("case", MANY, ids=lambda case: f"{case}-d{case.head_dim}")
def test_many_short_sequences(case: Case) -> None:
    steps = ("atomic", "deterministic") if isinstance(case, SparseCase) else METHODS
    wrong = [row for row in judge_case(case, "cuda", steps) if not row.verdict.ok]
    assert not wrong, "\n".join(f"{r.backend} {r.tensor}: {r.verdict}" for r in wrong)


# ---- alone and in a batch ---------------------------------------------------------------------

LONG = 40  # of the sequences: one that is much longer than the others
AMONG_SHORT = (*short(LONG, 6), 300, *short(200, 7))
ALONE = [
    Case("alone", AMONG_SHORT, AMONG_SHORT, dtype, num_heads_kv=1, group=group, **sized(*d), **mask)
    for dtype, group, d, mask in (
        (HALF[1], 2, (128,), {"causal": True}),
        (HALF[0], 1, (128,), {"window": (70, 5)}),
        (HALF[0], 3, (64,), {"window": (-1, 9)}),
        (HALF[1], 1, (64, 128), {}),
        (HALF[0], 1, (256,), {"causal": True}),
    )
]


def results_of(case: Case, rows: slice, out: Any = None, lse: Any = None) -> dict[str, Any]:
    """All that is repeatable, of the sequences in some rows; with given out and lse, if any."""
    t = make(case).on("cupy")
    q, k, v, dout = (a[rows] for a in (t.q, t.k, t.v, t.dout))
    direction = [a[rows] for a in t.direction]
    whole = rows == slice(None)
    offsets = t.cu_seqlens_q if whole else cupy.asarray(np.array([0, len(q)], np.int32))
    options = {"causal": case.causal, "window": case.window, "backend": "cuda"}
    forward = rawattn.forward(q, k, v, offsets, return_lse=True, **options)
    out, lse = forward if out is None else (out[rows], lse[:, rows])
    passed = (dout, q, k, v, out, lse, offsets)
    options |= {"deterministic": True}
    tangents = rawattn.jvp(q, k, v, *direction, offsets, **options)
    options["dlse"] = t.dlse[:, rows]
    return {
        **dict(zip(("out", "lse"), forward, strict=True)),
        **dict(zip(("dq", "dk", "dv"), rawattn.backward(*passed, **options), strict=True)),
        **{f"jvp {i}": array for i, array in enumerate(tangents)},
        **{f"second {i}": array for i, array in enumerate(second(direction, passed, options))},
    }


def second(direction: Any, passed: Any, options: Any) -> Any:
    return rawattn.double_backward(*direction, *passed, **options)


@pytest.mark.parametrize("case", ALONE, ids=lambda case: f"{case}-d{case.head_dim}")
def test_a_sequence_alone_and_among_many_short_ones(case: Case) -> None:
    whole = results_of(case, slice(None))
    bounds = np.cumsum([0, *case.lengths_q]).tolist()
    filled = [b for b, length in enumerate(case.lengths_q) if length]
    for b in (filled[0], filled[7], LONG, filled[-1]):
        rows = slice(*bounds[b : b + 2])
        for name, array in results_of(case, rows, whole["out"], whole["lse"]).items():
            of_heads = array.ndim == 2
            here = whole[name][:, rows] if of_heads else whole[name][rows]
            assert bits(array) == bits(here), (b, name)


def forward_rows(head_dim: int, block_n: int) -> list[str]:
    """The rows of the forward that walk along the keys in steps of ``block_n``."""
    rows = [row for row in variants.TABLE if row.stem == "forward" and row.family == "sm80"]
    rows = [row for row in rows if row.head_dim == head_dim and variants.serves(row, ARCH)]
    return [row.name for row in rows if row.cfg.block_n == block_n]


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (70, 5)}], ids=str)
@pytest.mark.parametrize("head_dim", variants.HEAD_DIMS)
def test_rows_of_equal_steps_give_equal_bits(
    head_dim: int, mask: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = forward_rows(head_dim, 64)
    assert rows
    case = Case("rows", AMONG_SHORT, AMONG_SHORT, HALF[head_dim // 64 % 2], 1, 2, **sized(head_dim))
    t, found = make(case).on("cupy"), {}
    for row in rows:
        monkeypatch.setenv("RAWATTN_VARIANT", row)
        inputs = (t.q, t.k, t.v, t.cu_seqlens_q)
        found[row] = bits(*rawattn.forward(*inputs, return_lse=True, backend="cuda", **mask))
    assert all(result == found[rows[0]] for result in found.values()), rows


# ---- graphs -----------------------------------------------------------------------------------


def everything(a: Arrays) -> dict[str, Any]:
    """The results of every function; those whose name has "atomic" differ by rounding."""
    options: dict[str, Any] = {"causal": True, "backend": "cuda"}
    q, k, v, offsets, chosen = a["q"], a["k"], a["v"], a["cu_seqlens"], a["block_indices"]
    direction = (a["ddq"], a["ddk"], a["ddv"])
    out, lse = rawattn.forward(q, k, v, offsets, return_lse=True, **options)
    passed = (a["dout"], q, k, v, out, lse, offsets)
    results = {"forward": (out, lse)}
    for method in METHODS:
        results[method] = rawattn.backward(*passed, method=method, **options)
    results["jvp"] = rawattn.jvp(q, k, v, *direction, offsets, **options)
    for exact in (False, True):
        options["deterministic"] = exact
        name = "" if exact else "atomic "
        results[f"{name}second"] = rawattn.double_backward(*direction, *passed, **options)
    del options["deterministic"]
    out, lse = rawattn.sparse_forward(q, k, v, offsets, chosen, return_lse=True, **options)
    passed = (a["dout"], q, k, v, out, lse, offsets, chosen)
    results["sparse forward"] = (out, lse)
    for exact in (False, True):
        options["deterministic"] = exact
        name = "sparse backward" if exact else "atomic sparse backward"
        results[name] = rawattn.sparse_backward(*passed, **options)[:3]
    return results


def grown(lengths: tuple[int, ...], seed: int) -> Arrays:
    """A batch in arrays of 400 tokens."""
    host = host_arrays(lengths=(400,), seed=seed)
    host["cu_seqlens"] = np.cumsum([0, *lengths]).astype(np.int32)
    drawn = np.random.default_rng(seed).integers(0, 3, (len(host["q"]), 2, 3))
    return host | {"block_indices": drawn.astype(np.int32)}


def test_a_graph_whose_offsets_have_grown() -> None:
    """Captured with 46 tokens, replayed with 400, and with 1, in the same arrays."""
    batches = [grown(n, i) for i, n in enumerate(((5, 40, 1, 0), (70, 1, 0, 329), (0, 0, 1, 0)))]
    for results, batch in replays("cupy", everything, batches):
        for name, exact in everything(on("cupy", batch)).items():
            for found, wanted in zip(results[name], exact, strict=True):
                if "atomic" in name:
                    assert_close(found, wanted, 2.0**-7)
                else:
                    assert bits(found) == bits(wanted), name
