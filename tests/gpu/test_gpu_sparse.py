"""The CUDA kernels of block-sparse attention on a GPU, judged by the tolerance of autograd.

The truth is torch's autograd of dense attention with the selection as a mask, in float64; the error
allowed is that of the same in the kernels' dtype. There is NaN in a sequence between others, in
blocks that nobody selects, in factors of slots that do not count and in the arrays of the results.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rawattn
from rawattn.check.transfer import to_numpy
from rawattn.variants import Row
from tests.shared.gpu_arrays import assert_close, bits, moved
from tests.shared.gpu_drawn import draw_case, lay_out
from tests.shared.gpu_problems import faults, judge, place, poisoned, sized
from tests.shared.gpu_sparse import (
    OF_FIRST,
    Posed,
    Sparse,
    host_of,
    in_chunks,
    options_of,
    pairs,
    pose,
    run_backward,
    run_forward,
    table_of,
)
from tests.shared.gpu_sparse_random import FIRST, MIXED, SIZES, Chunk, edges, fitting, other_rows

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


def run_all(posed: Posed, **options: Any) -> dict[str, Any]:
    """Forward and backward, repeatable to the bit."""
    options = {"backend": "cuda"} | options
    return run_forward(posed, **options) | run_backward(posed, deterministic=True, **options)


# ---- 500 problems -----------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", FIRST + MIXED, ids=str)
def test_500_problems(chunk: Chunk) -> None:
    """By the fastest way and by the repeatable one; every third problem by way of a table."""
    wrong = []
    for i, sparse in enumerate(chunk.problems()):
        posed = pose(sparse)
        table = table_of(posed, backend="cuda") if i % 3 == 1 else None
        found = faults(posed, run_forward(posed, table, backend="cuda"))
        for deterministic in (False, True):
            options = {"backend": "cuda", "deterministic": deterministic}
            found += faults(posed, run_backward(posed, table, **options))
        wrong += [f"{sparse.spelled()}\n  {fault}" for fault in found]
    assert not wrong, "\n".join(wrong)


# ---- chunks of queries, long lists ------------------------------------------------------------


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks of 64 query tokens, where one selection belongs to a key/value head."""
    yield from in_chunks(64, monkeypatch)


CHUNKED = [next(FIRST[i].problems()) for i in (0, 3, 4, 7, 9, 13, 17, 20)]
CHUNKED += [next(chunk.problems()) for chunk in MIXED]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("sparse", CHUNKED, ids=str)
def test_chunks(sparse: Sparse) -> None:
    posed = pose(sparse)
    table = table_of(posed, backend="cuda")
    assert table.starts.shape[0] > 1 and table.chunk <= 64
    judge(posed, run_all(posed))
    judge(posed, run_all(posed, table=table))
    judge(posed, run_backward(posed, backend="cuda"))
    judge(posed, run_backward(posed, table, backend="cuda"))


def long_lists(index: int, tokens: int) -> Sparse:
    """Two sequences all of whose queries select the first block, with kernels of ``SIZES``."""
    dims, group, block_size, kinds, _ = SIZES[index]
    causal, gate = kinds[0]
    lengths = (tokens, 70)
    changes = {"dtype": FIRST[index].dtype, "group": group, "num_heads_kv": 1, "causal": causal}
    case = poisoned(f"long-{index}", lengths, **changes, **sized(*dims))
    return Sparse(case, block_size, num_selected=1, own=False, gate=gate, all_first=True)


LONG = [long_lists(0, 1000), long_lists(3, 1500), long_lists(17, 600)]


@pytest.mark.parametrize("sparse", LONG, ids=str)
def test_long_lists(sparse: Sparse) -> None:
    posed = pose(sparse)
    judge(posed, run_all(posed))
    judge(posed, run_backward(posed, backend="cuda"))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("sparse", LONG, ids=str)
def test_long_lists_in_chunks(sparse: Sparse) -> None:
    posed = pose(sparse)
    judge(posed, run_all(posed))
    judge(posed, run_backward(posed, backend="cuda"))


# ---- repeatability ----------------------------------------------------------------------------

REPEATED = [
    edges("repeated-64", dtype="float16"),
    replace(edges("repeated-128", dtype="bfloat16", **sized(128)), gate=False),
    replace(next(FIRST[9].problems()), num_selected=5),
]


@pytest.mark.parametrize("sparse", REPEATED, ids=str)
def test_bitwise_repeatable(sparse: Sparse) -> None:
    """On every run, and with a table that is built once."""
    posed = pose(sparse)
    table = table_of(posed, backend="cuda")
    runs = [bits(*run_all(posed, table=given).values()) for given in (None, table) * 3]
    assert all(run == runs[0] for run in runs)
    again = table_of(posed, backend="cuda")
    assert bits(*run_all(posed, table=again).values()) == runs[0]


@pytest.mark.usefixtures("small_chunks")
def test_bitwise_repeatable_in_chunks() -> None:
    posed = pose(REPEATED[0])
    runs = [bits(*run_all(posed).values()) for _ in range(4)]
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("sparse", REPEATED, ids=str)
def test_the_fastest_way_differs_by_rounding(sparse: Sparse) -> None:
    posed = pose(sparse)
    exact = run_backward(posed, backend="cuda", deterministic=True)
    for name, array in run_backward(posed, backend="cuda").items():
        against = to_numpy(exact[name])
        verdict = posed.targets[name].judge(to_numpy(array), against=against)
        assert verdict.ok, (name, verdict)


@pytest.mark.parametrize("sparse", REPEATED[:2], ids=str)
def test_a_sequence_alone_and_in_a_batch(sparse: Sparse) -> None:
    posed = pose(sparse)
    t, c, whole = posed.tensors, posed.chosen, run_all(posed)
    for b, rows, keys in pairs(sparse.case):
        if b in sparse.case.poisoned or rows.start == rows.stop:
            continue
        q, k, v = t.q[rows], t.k[keys], t.v[keys]
        offsets = [torch.tensor([0, len(x)], dtype=torch.int32, device=q.device) for x in (q, k)]
        options = options_of(posed) | {
            "cu_seqlens_k": offsets[1],
            "block_counts": c.block_counts[rows],
            "block_scale": c.block_scale[rows] if sparse.gate else None,
        }
        chosen = (offsets[0], c.block_indices[rows])
        out, lse = rawattn.sparse_forward(q, k, v, *chosen, return_lse=True, **options)
        passed = (t.dout[rows], q, k, v, posed.out[rows], posed.lse[:, rows], *chosen)
        options |= {"dlse": t.dlse[:, rows], "deterministic": True}
        alone = (out, lse, *rawattn.sparse_backward(*passed, **options))
        for name, array in zip(OF_FIRST, alone, strict=True):
            at = keys if name in ("dk", "dv") else place(name, rows, keys)
            assert array is None or bits(array) == bits(whole[name][at]), name


# ---- rows of the table ------------------------------------------------------------------------


OTHER_ROWS = other_rows(FIRST, ("forward", "backward"))


@pytest.mark.parametrize("row", OTHER_ROWS, ids=[row.name for row in OTHER_ROWS])
def test_other_row(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAWATTN_VARIANT", row.name)
    sparse = next(fitting(row), None)
    assert sparse is not None, "a row that serves nothing"
    posed = pose(sparse)
    judge(posed, run_all(posed))
    judge(posed, run_backward(posed, backend="cuda"))


# ---- beside dense attention -------------------------------------------------------------------


def test_sliding_is_dense_attention_in_a_window() -> None:
    posed = pose(edges("sliding", dtype="float16"))
    t, alone = posed.tensors, run_forward(posed)
    for window, usual in ((None, (63, 0)), (100, (100, 0)), ((40, -1), (40, -1))):
        options = options_of(posed) | {"return_lse": True, "return_sliding": True}
        inputs = (t.q, t.k, t.v, t.cu_seqlens_q)
        results = rawattn.sparse_forward(
            *inputs, posed.chosen.block_indices, window=window, **options
        )
        assert bits(*results[:2]) == bits(*alone.values())
        mask = {"causal": True, "window": usual, "cu_seqlens_k": t.cu_seqlens_k}
        dense = rawattn.forward(*inputs, return_lse=True, **mask)
        assert bits(*results[2:]) == bits(*dense)


def test_every_block_is_dense_attention() -> None:
    posed = pose(replace(edges("every", dtype="float16"), gate=False, counts=False))
    t, case = posed.tensors, posed.sparse.case
    qkv = tuple(x.nan_to_num(1.0) for x in (t.q, t.k, t.v))
    mask = torch.ones(len(t.q), 1, 4, dtype=torch.bool, device=t.q.device)
    offsets = {"cu_seqlens_k": t.cu_seqlens_k}
    sizes = {"num_heads_kv": case.num_heads_kv, "total_k": len(t.k)}
    table = rawattn.BlockTable.of_mask(mask, t.cu_seqlens_q, **sizes, **offsets)
    sparse = rawattn.sparse_forward(*qkv, t.cu_seqlens_q, table, return_lse=True, **offsets)
    options = {"causal": True, **offsets}
    dense = rawattn.forward(*qkv, t.cu_seqlens_q, return_lse=True, **options)
    assert_close(sparse[0], dense[0], 2.0**-10)
    torch.testing.assert_close(sparse[1], dense[1], rtol=0, atol=1e-4)
    passed = (t.dout.nan_to_num(1.0), *qkv, *dense, t.cu_seqlens_q)
    grads = rawattn.sparse_backward(*passed, table, **offsets)
    for found, wanted in zip(grads, rawattn.backward(*passed, **options), strict=False):
        assert_close(found, wanted, 2.0**-10)


# ---- any shape and layout ---------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 8, 12, 19])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_lengths_strides_heads_and_selections(index: int, data: st.DataObject) -> None:
    """With the kernels of ``SIZES[index]``."""
    dims, group, block_size, kinds, _ = SIZES[index]
    (causal, gate), dtype = kinds[0], FIRST[index].dtype
    fixed = {"dtype": dtype, "group": group, "causal": causal, "window": (-1, -1), **sized(*dims)}
    name = f"any-{data.draw(st.integers(0, 9), 'seed')}"
    case, qkv = draw_case(data, name=name, **fixed)
    sparse = Sparse(
        case,
        block_size,
        num_selected=data.draw(st.integers(1, 9), "num_selected"),
        own=data.draw(st.booleans(), "own"),
        gate=gate,
        counts=data.draw(st.booleans(), "counts"),
    )
    posed, (host, chosen) = pose(sparse), host_of(sparse)
    t, c = lay_out(data, host, ("dout",), qkv), chosen.on("cupy")
    options = options_of(posed) | {
        "cu_seqlens_k": t.cu_seqlens_k,
        "block_counts": c.block_counts,
        "block_scale": c.block_scale if gate else None,
        "backend": "cuda",
    }
    inputs = (t.q, t.k, t.v)
    which = (t.cu_seqlens_q, c.block_indices)
    results = dict(
        zip(
            ("out", "lse"),
            rawattn.sparse_forward(*inputs, *which, return_lse=True, **options),
            strict=True,
        )
    )
    options |= {"dlse": t.dlse, "deterministic": data.draw(st.booleans(), "deterministic")}
    passed = (moved(to_numpy(x)) for x in (posed.out, posed.lse))
    grads = rawattn.sparse_backward(t.dout, *inputs, *passed, *which, **options)
    results |= zip(("dq", "dk", "dv", "dblock_scale"), grads, strict=True)
    for name, array in results.items():
        if array is None:
            continue
        verdict = posed.targets[name].judge(to_numpy(array))
        # Lengths of 0 and 1 alone may leave a result so small that zeros would pass.
        assert verdict.verdict in ("pass", "vacuous"), (name, verdict)


def test_wild_indices_are_padding() -> None:
    """Whatever is no block of the sequence counts for nothing, int32 or not."""
    posed = pose(replace(edges("wild", dtype="float16"), gate=False))
    t, given = posed.tensors, to_numpy(posed.chosen.block_indices)
    rng = np.random.default_rng(0)
    some = rng.random(given.shape) < 0.4
    tame = torch.from_numpy(np.where(some, -1, given)).to(t.q.device)
    options = options_of(posed) | {"return_lse": True}
    inputs = (t.q, t.k, t.v, t.cu_seqlens_q)
    wanted = bits(*rawattn.sparse_forward(*inputs, tame, **options))
    narrow = rng.choice([-(2**31), -2, 2**31 - 1, 2**30, 2**26, 10**9], given.shape)
    wide = rng.choice([2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**63), -(2**33) + 1], given.shape)
    for garbage, dtype in ((narrow, np.int32), (narrow, np.int64), (wide, np.int64)):
        indices = torch.from_numpy(np.where(some, garbage, given).astype(dtype)).to(t.q.device)
        assert bits(*rawattn.sparse_forward(*inputs, indices, **options)) == wanted
