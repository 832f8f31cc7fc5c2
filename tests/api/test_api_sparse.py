"""The sparse functions of rawattn on every kind of array: tables, numbers, passes, refusals.

As in ``test_api.py`` the CUDA path runs on the fakes of ``fake_gpu`` and ``fake_sparse``, whose
kernels are the reference by raw pointer. Long by the kinds of array and refusals, times five
functions.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import arrays, call, problem
from rawattn.reference import dense, sparse
from rawattn.tables import UNUSED, BlockTable
from rawattn.variants import TABLE
from tests.shared import fake_gpu, fake_sparse
from tests.shared.api_case import (
    KINDS,
    KINDS_AND_DTYPES,
    TOLERANCE,
    Case,
    check_waits,
    host,
    host_values,
    named_parameters,
    on,
)
from tests.shared.api_case import spread as spread_out
from tests.shared.fake_gpu import DTYPES, GPU, MAKERS, RESULTS, STREAMS, values_of

ROWS = {row.name: row for row in TABLE}
LENGTHS = ([19, 0, 24, 1], [35, 3, 20, 0])  # the last query sequence has no keys
PARTS = ("tq", "tk", "tv", "tgate")
TABLE_STEMS = ["block_lists", "block_offsets", "block_queries", "block_order"]
DOUBLE_STEMS = [f"sparse_double_backward_{part}" for part in ("out", "kv", "q")]
ARRAYS = ("blocks", "slots", "counts", "starts", "lengths", "queries", "query_slots", "work")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_sparse.Kernels]:
    yield fake_sparse.install(monkeypatch)
    fake_sparse.remove()


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(call, "default_chunk", lambda *_: 8)
    call.pose_selection.cache_clear()
    yield
    call.pose_selection.cache_clear()


class Sparse(Case):
    """Host arrays of a sparse call, and what the reference makes of them."""

    NAMES = (*Case.NAMES, "blocks", "gate", *PARTS)

    def __init__(
        self,
        dtype: str = "float32",
        *,
        heads: tuple[int, int] = (4, 2),
        heads_sel: int | None = None,
        lengths: Any = LENGTHS,
        **options: Any,
    ) -> None:
        rng = np.random.default_rng(0)
        self.dtype, self.heads = dtype, heads
        self.statistic = "float64" if dtype == "float64" else "float32"
        self.cu_q, self.cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in lengths)
        total_q, total_k = self.cu_q[-1] + 2, self.cu_k[-1] + 2
        self.selection = {"block_size": 16, "causal": True, "include_own_block": True} | options
        self.scale = 0.3
        of_gate = (total_q, heads_sel or heads[1], 3)
        shapes = {
            "q": (total_q, heads[0], 16),
            "k": (total_k, heads[1], 16),
            "v": (total_k, heads[1], 8),
            "dout": (total_q, heads[0], 8),
            "dlse": (heads[0], total_q),
            "gate": of_gate,
        }
        shapes |= {f"t{name}": shapes[name] for name in ("q", "k", "v", "gate")}
        for name, shape in shapes.items():
            kind = self.statistic if name.endswith(("dlse", "gate")) else dtype
            values = rng.standard_normal(shape) + 1.5 * (name == "gate")
            setattr(self, name, fake_gpu.aligned(values / (1 + name.startswith("t")), DTYPES[kind]))
        self.blocks = fake_gpu.aligned(rng.integers(-2, 4, of_gate), np.int32)
        self.exact = sparse.forward(*self.inputs(), **self.options())
        self.out = fake_gpu.aligned(self.exact[0], DTYPES[dtype])
        self.lse = fake_gpu.aligned(self.exact[1], self.statistic)

    def inputs(self) -> tuple[np.ndarray, ...]:
        return (self.q, self.k, self.v, self.cu_q, self.cu_k)

    def options(self, *, gate: bool = True) -> dict[str, Any]:
        """Keywords of the reference."""
        scale = self.gate if gate else None
        given = {"block_indices": self.blocks, "block_scale": scale, "softmax_scale": self.scale}
        return self.selection | given

    def gradients(self, *, dlse: bool = True, gate: bool = True) -> Any:
        return sparse.backward(
            *(self.dout, self.q, self.k, self.v, self.out, self.lse, self.cu_q, self.cu_k),
            dlse=self.dlse if dlse else None,
            **self.options(gate=gate),
        )

    def _direction(self, parts: tuple[bool, ...]) -> list[Any]:
        pairs = zip(PARTS, parts, strict=True)
        return [getattr(self, name) if part else None for name, part in pairs]

    def tangents(self, parts: tuple[bool, ...]) -> Any:
        *direction, tgate = self._direction(parts)
        inputs = (self.q, self.k, self.v, *direction, self.cu_q, self.cu_k)
        return sparse.jvp(*inputs, tblock_scale=tgate, **self.options())

    def gradients2(self, parts: tuple[bool, ...], *, dlse: bool = True) -> Any:
        *direction, tgate = self._direction(parts)
        return sparse.double_backward(
            *direction,
            *(self.dout, self.q, self.k, self.v, self.out, self.lse, self.cu_q, self.cu_k),
            ddblock_scale=tgate,
            dlse=self.dlse if dlse else None,
            **self.options(),
        )

    def check(self, given: Any, expected: Any, statistics: tuple[int, ...]) -> None:
        """Results against expectations; ``statistics`` are the places of those of lse's dtype."""
        for place, (x, y) in enumerate(zip(given, expected, strict=True)):
            if y is None:
                assert x is None
            else:
                self.close(x, y, self.statistic if place in statistics else None)


WHOLE, NOWHERE = (True,) * 4, (False,) * 4


def keywords(a: dict[str, Any], case: Sparse, gate: bool = True) -> dict[str, Any]:
    scale = {"block_scale": a["gate"]} if gate else {}
    return case.selection | scale | {"cu_seqlens_k": a["cu_k"], "softmax_scale": case.scale}


def forward(a: dict[str, Any], case: Sparse, blocks: Any = None, **options: Any) -> Any:
    options = {"return_lse": True} | keywords(a, case) | options
    selection = a["blocks"] if blocks is None else blocks
    return rawattn.sparse_forward(a["q"], a["k"], a["v"], a["cu_q"], selection, **options)


def backward(
    a: dict[str, Any], case: Sparse, blocks: Any = None, gate: bool = True, **options: Any
) -> Any:
    options = {"dlse": a["dlse"]} | keywords(a, case, gate) | options
    names = ("dout", "q", "k", "v", "out", "lse", "cu_q")
    selection = a["blocks"] if blocks is None else blocks
    return rawattn.sparse_backward(*(a[name] for name in names), selection, **options)


def jvp(
    a: dict[str, Any],
    case: Sparse,
    blocks: Any = None,
    parts: tuple[bool, ...] = WHOLE,
    **options: Any,
) -> Any:
    *direction, tgate = (a[name] if part else None for name, part in zip(PARTS, parts, strict=True))
    options = {"tblock_scale": tgate} | keywords(a, case) | options
    selection = a["blocks"] if blocks is None else blocks
    inputs = (a["q"], a["k"], a["v"], *direction, a["cu_q"])
    return rawattn.sparse_jvp(*inputs, selection, **options)


def double_backward(
    a: dict[str, Any],
    case: Sparse,
    blocks: Any = None,
    parts: tuple[bool, ...] = WHOLE,
    **options: Any,
) -> Any:
    *direction, tgate = (a[name] if part else None for name, part in zip(PARTS, parts, strict=True))
    options = {"ddblock_scale": tgate, "dlse": a["dlse"]} | keywords(a, case) | options
    names = ("dout", "q", "k", "v", "out", "lse", "cu_q")
    selection = a["blocks"] if blocks is None else blocks
    return rawattn.sparse_double_backward(
        *direction, *(a[name] for name in names), selection, **options
    )


def block_table(a: dict[str, Any], case: Sparse, **options: Any) -> BlockTable:
    sizes = {"num_heads_kv": case.heads[1], "total_k": len(case.k), "cu_seqlens_k": a["cu_k"]}
    options = sizes | case.selection | options
    if "sliding_blocks" in options:
        return BlockTable.of_pattern(a["cu_q"], **options)
    if "block_mask" in options:
        return BlockTable.of_mask(options.pop("block_mask"), a["cu_q"], **options)
    return BlockTable.of_indices(options.pop("block_indices", a["blocks"]), a["cu_q"], **options)


def check_all(case: Sparse, a: dict[str, Any], blocks: Any = None, **options: Any) -> None:
    """All four functions against the reference."""
    case.check(forward(a, case, blocks, **options), case.exact, (1,))
    for deterministic in (False, True):
        grads = backward(a, case, blocks, deterministic=deterministic, **options)
        case.check(grads, case.gradients(), (3,))
    case.check(jvp(a, case, blocks, **options), case.tangents(WHOLE), (2, 3))
    case.check(double_backward(a, case, blocks, **options), case.gradients2(WHOLE), (1, 5))


# ---- the table, by hand -----------------------------------------------------------------------


def by_hand(case: Sparse, named: Any, counts: Any = None) -> list[list[list[tuple[int, int]]]]:
    """(block, slot) of every selection head and token, ascending, by the words of the contract."""
    size, causal, own = (case.selection[n] for n in ("block_size", "causal", "include_own_block"))
    table: list[list[list[tuple[int, int]]]] = []
    for head in range(named.shape[1]):
        table.append([])
        for token in range(len(case.q)):
            found: dict[int, int] = {}
            sequences = [b for b in range(4) if case.cu_q[b] <= token < case.cu_q[b + 1]]
            for b in sequences:
                length = int(case.cu_k[b + 1] - case.cu_k[b])
                pos = int(token - case.cu_q[b + 1]) + length
                for slot, n in enumerate(named[token, head].tolist()):
                    allowed = 0 <= n * size < length and (not causal or n * size <= pos)
                    if allowed and (counts is None or slot < counts[token, head]):
                        found.setdefault(n, slot)
                if own and pos >= 0:
                    found.setdefault(pos // size, -1)
            table[-1].append(sorted(found.items()))
    return table


def check_table(case: Sparse, table: BlockTable, expected: Any) -> None:
    """Every array of a table against the blocks and slots that each query should have."""
    x = {name: np.asarray(host_values(values_of(getattr(table, name)))) for name in ARRAYS}
    assert all(values.dtype == np.int32 for values in x.values())
    heads, tokens = len(expected), len(case.q)
    assert x["blocks"].shape == x["slots"].shape == (heads, tokens, table.width)
    ratio, size = heads // case.heads[1], case.selection["block_size"]
    lists: dict[Any, list[tuple[int, int]]] = {}
    for head, token in itertools.product(range(heads), range(tokens)):
        pairs = expected[head][token]
        count = len(pairs)
        assert x["counts"][head, token] == count
        blocks, slots = x["blocks"][head, token].tolist(), x["slots"][head, token].tolist()
        assert list(zip(blocks, slots, strict=True))[:count] == pairs
        assert set(blocks[count:]) <= {UNUSED} and set(slots[count:]) <= {-1}
        b = int(np.searchsorted(case.cu_q[1:], token, side="right"))
        for n, slot in pairs:
            unit = int(case.cu_k[b]) // size + b + n
            where = (token // table.chunk, head // ratio, unit)
            lists.setdefault(where, []).append((token * ratio + head % ratio, slot))
    chunks, units = -(-tokens // table.chunk), len(case.k) // size + 4
    assert x["starts"].shape == x["lengths"].shape == (chunks, case.heads[1], units)
    assert x["lengths"].sum() == sum(map(len, lists.values()))
    assert len(x["queries"]) == len(x["query_slots"]) == heads * tokens * table.width
    taken = np.zeros(len(x["queries"]), bool)
    for where, items in lists.items():
        start, length = x["starts"][where], x["lengths"][where]
        here = slice(start, start + length)
        given = zip(x["queries"][here].tolist(), x["query_slots"][here].tolist(), strict=True)
        assert list(given) == sorted(items)
        assert not taken[here].any()
        taken[here] = True
    check_work(x["work"], x["starts"].ravel(), x["lengths"].ravel())


def check_work(work: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
    """Every item of every list is in one segment, as a row of ``work`` says, in any order."""
    count = int((work[:, 0] >= 0).sum())
    assert work.shape[1] == 4 and (work[count:] == -1).all()
    covered: dict[int, list[int]] = {}
    for which, first, number, zero in work[:count].tolist():
        assert number > 0 and zero == 0
        covered.setdefault(which, []).extend(range(first, first + number))
    expected = {i: range(s, s + n) for i, (s, n) in enumerate(zip(starts, lengths, strict=True))}
    assert {i: sorted(places) for i, places in covered.items()} == {
        i: list(places) for i, places in expected.items() if places
    }


SELECTIONS = [
    {},
    {"causal": False},
    {"include_own_block": False},
    {"causal": False, "include_own_block": False},
    {"heads_sel": 4},
    {"heads_sel": 4, "causal": False},
    {"block_size": 32},
    {"heads": (6, 1)},
]


@pytest.mark.parametrize("with_counts", [False, True])
@pytest.mark.parametrize("options", SELECTIONS)
def test_table_of_indices(short_chunks: None, options: Any, with_counts: bool) -> None:
    case = Sparse(**options)
    counts = None
    if with_counts:
        counts = np.random.default_rng(1).integers(0, 4, case.blocks.shape[:2]).astype(np.int32)
    table = block_table(host("numpy", case), case, block_counts=counts)
    check_table(case, table, by_hand(case, case.blocks, counts))
    assert table.block_indices is case.blocks and table.chunk == 8
    assert table.num_selected == 3 and table.num_heads_sel == case.blocks.shape[1]
    assert table.width == 3 + case.selection["include_own_block"]


@pytest.mark.parametrize("options", SELECTIONS)
def test_table_of_a_mask(options: Any) -> None:
    case = Sparse(**options)
    shape = (*case.blocks.shape[:2], 5)
    mask = np.random.default_rng(2).random(shape) < 0.5
    table = block_table(host("numpy", case), case, block_mask=mask)
    check_table(case, table, by_hand(case, np.where(mask, np.arange(5), -1)))
    assert table.num_selected == 5 and table.block_indices is None


@pytest.mark.parametrize(("near", "first"), [(1, 0), (2, 1), (9, 3)])
@pytest.mark.parametrize("options", SELECTIONS)
def test_table_of_a_pattern(options: Any, near: int, first: int) -> None:
    case = Sparse(**options)
    heads_sel = case.blocks.shape[1]
    named = np.full((len(case.q), heads_sel, first + near), -1)
    for b, token in itertools.product(range(4), range(len(case.q))):
        if case.cu_q[b] <= token < case.cu_q[b + 1]:
            own = (token - case.cu_q[b + 1] + case.cu_k[b + 1] - case.cu_k[b]) // (
                case.selection["block_size"]
            )
            named[token, :] = [*range(first), *(own - i for i in range(near))]
    pattern = {"sliding_blocks": near, "global_blocks": first, "num_heads_sel": heads_sel}
    given = {"total_q": len(case.q), **pattern}
    table = block_table(host("numpy", case), case, **given)
    check_table(case, table, by_hand(case, named))
    assert table.num_selected == near + first


FAR = [2**63 - 1, -(2**63), 2**40, 2**32, -(2**32) + 1, 2**31, 2**31 - 1]


@pytest.mark.parametrize("value", FAR)
def test_padding_far_away(value: int) -> None:
    case = Sparse()
    far = np.where(case.blocks < 0, np.int64(value), case.blocks)
    assert (far == value).any()
    table = block_table(host("numpy", case), case, block_indices=far)
    check_table(case, table, by_hand(case, case.blocks))


@pytest.mark.parametrize("value", FAR)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_far_away_on_a_device(gpu: fake_sparse.Kernels, kind: str, value: int) -> None:
    """What is no int32 does not come back as another block."""
    case = Sparse()
    a = on(kind, case)
    far = np.where(case.blocks < 0, np.int64(value), case.blocks)
    a["blocks"] = MAKERS[kind](far)
    check_table(case, block_table(a, case), by_hand(case, case.blocks))
    case.check(forward(a, case), case.exact, (1,))
    case.check(backward(a, case), case.gradients(), (3,))


def test_defaults_of_a_table() -> None:
    cu = np.array([0, 70, 130], np.int32)
    given = {"num_heads_kv": 3, "total_q": 130, "sliding_blocks": 1}
    table = BlockTable.of_pattern(cu, **given)
    assert (table.block_size, table.causal, table.include_own_block) == (64, True, True)
    assert table.num_heads_sel == table.num_heads_kv == 3
    assert table.blocks[0, [0, 63, 64, 69, 70], 0].tolist() == [0, 0, 1, 1, 0]
    assert "array" not in repr(table), "printing a table of a device would wait for it"
    small = BlockTable.of_pattern(cu, lists=False, **given)
    assert small.starts is small.lengths is small.queries is small.query_slots is None
    assert small.work is None
    np.testing.assert_array_equal(small.blocks, table.blocks)


def test_hints_change_nothing_but_the_chunk() -> None:
    cu = np.array([0, 5000], np.int32)
    chunks = set()
    for hints in ({}, {"num_heads_q": 64, "head_dim": 256}, {"num_heads_q": 2, "head_dim": 64}):
        given = {"num_heads_kv": 2, "total_q": 5000, "sliding_blocks": 2}
        table = BlockTable.of_pattern(cu, **given, **hints)
        chunks.add(table.chunk)
        assert table.lengths.sum() == table.counts.sum()
    assert len(chunks) == 3


# ---- the table, on a device -------------------------------------------------------------------


SOURCES: dict[str, Any] = {
    "indices": {},
    "counts": {"block_counts": np.random.default_rng(1).integers(0, 4, (46, 2)).astype(np.int32)},
    "mask": {"block_mask": np.random.default_rng(2).random((46, 2, 5)) < 0.5},
    "pattern": {"total_q": 46, "sliding_blocks": 2, "global_blocks": 1},
}


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_table_on_a_device(
    gpu: fake_sparse.Kernels, short_chunks: None, kind: str, source: str, backend: str | None
) -> None:
    case = Sparse()
    given = SOURCES[source]
    a = on(kind, case)
    put = {name: MAKERS[kind](x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    table = block_table(a, case, backend=backend, **put)
    assert {type(getattr(table, name)) for name in ARRAYS} == {RESULTS[kind]}
    assert gpu.stems() == ([] if backend else TABLE_STEMS)
    assert {used for _, used in gpu.launched} <= {STREAMS.get(kind, STREAMS["cupy"])}
    expected = block_table(host("numpy", case), case, **given)
    for name in ("blocks", "slots", "counts", "lengths"):
        np.testing.assert_array_equal(
            values_of(getattr(table, name)), getattr(expected, name), err_msg=name
        )
    starts, lengths = (values_of(x).ravel() for x in (table.starts, table.lengths))
    check_work(values_of(table.work), starts, lengths)
    for at in zip(*np.nonzero(expected.lengths), strict=True):
        for name in ("queries", "query_slots"):
            lists = [
                values_of(getattr(x, name))[values_of(x.starts)[at] :][: expected.lengths[at]]
                for x in (table, expected)
            ]
            np.testing.assert_array_equal(*lists)
    assert GPU.entered == []


@pytest.mark.parametrize("kind", KINDS)
def test_table_without_lists(gpu: fake_sparse.Kernels, kind: str) -> None:
    case = Sparse()
    table = block_table(on(kind, case), case, lists=False)
    assert gpu.stems() == ["block_lists"] and gpu.views[0][-1] is None
    assert table.starts is table.query_slots is None
    case.check(forward(on(kind, case), case, table), case.exact, (1,))
    with pytest.raises(ValueError, match=r"no lists of queries.*lists=True"):
        backward(on(kind, case), case, table)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_built_once(gpu: fake_sparse.Kernels, short_chunks: None, kind: str) -> None:
    case = Sparse()
    a = on(kind, case)
    table = block_table(a, case)
    gpu.launched.clear()
    check_all(case, a, table)
    assert not {*gpu.stems()} & {*TABLE_STEMS}
    addresses = {view.ptr for views in gpu.views for view in views if view is not None}
    given = arrays.framework_of(table.blocks, "")
    for name in ("blocks", "slots", "starts", "lengths", "queries", "query_slots", "work"):
        assert given.view(getattr(table, name), "").ptr in addresses, "read where it lies"


@pytest.mark.parametrize("rows", [64, 8])
@pytest.mark.parametrize("told", [None, 2, 4])
def test_segments_of_a_table(
    gpu: fake_sparse.Kernels,
    short_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
    told: int | None,
    rows: int,
) -> None:
    """A table that was told of other query heads has other segments, and serves all the same."""
    monkeypatch.setattr(problem, "_SEGMENT_ROWS", rows)
    case = Sparse()
    a = on("cupy", case)
    table = block_table(a, case, num_heads_q=told)
    length = values_of(table.work)[:, 2].max()
    assert 0 < length <= rows // ((told or 16) // 2) or length == 1
    check_table(case, table, by_hand(case, case.blocks))
    for deterministic in (False, True):
        grads = backward(a, case, table, deterministic=deterministic)
        case.check(grads, case.gradients(), (3,))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ["numpy", "cupy", "torch"])
def test_tables_of_other_sources(gpu: fake_sparse.Kernels, kind: str, source: str) -> None:
    """What a table is made from matters no more: the reference agrees with the kernels."""
    case = Sparse()
    given = SOURCES[source]
    hosts = host("numpy", case)
    expected = forward(hosts, case, block_table(hosts, case, **given), block_scale=None)
    make = MAKERS.get(kind, lambda x: x)
    a = hosts if kind == "numpy" else on(kind, case)
    put = {name: make(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    for backend in (None, "reference"):
        out = forward(a, case, block_table(a, case, **put), block_scale=None, backend=backend)
        for x, y in zip(out, expected, strict=True):
            np.testing.assert_allclose(values_of(x), y, rtol=1e-5, atol=1e-5)


def test_a_window_of_one_block_is_the_own_block() -> None:
    case = Sparse("float64", include_own_block=False)
    a = host("numpy", case)
    pattern = {"total_q": len(case.q), "sliding_blocks": 1}
    alone = forward(a, case, block_table(a, case, **pattern), block_scale=None)
    nothing = np.full_like(case.blocks, -1)
    own = forward(a, case, nothing, block_scale=None, include_own_block=True)
    for x, y in zip(alone, own, strict=True):
        np.testing.assert_array_equal(x, y)


# ---- the CUDA path ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES)
def test_on_a_device(gpu: fake_sparse.Kernels, kind: str, dtype: str) -> None:
    case = Sparse(dtype)
    a = on(kind, case)
    check_all(case, a)
    for run in (forward, backward, jvp, double_backward):
        results = [x for x in run(a, case) if x is not None]
        assert {type(x) for x in results} == {RESULTS[kind]}
    assert {used for _, used in gpu.launched} == {STREAMS.get(kind, STREAMS["cupy"])}
    assert GPU.entered == []


@pytest.mark.parametrize("options", SELECTIONS)
def test_selections(gpu: fake_sparse.Kernels, short_chunks: None, options: Any) -> None:
    case = Sparse(**options)
    check_all(case, on("cupy", case))
    assert {s.block_size for s in gpu.selections} == {case.selection["block_size"]}
    assert {s.own for s in gpu.selections} == {case.selection["include_own_block"]}
    heads_sel, causal = case.blocks.shape[1], case.selection["causal"]
    assert {s.num_heads_sel for s in gpu.selections} == {heads_sel}
    assert {p.window_right for p in gpu.problems} == {0 if causal else -1}


def families(gpu: fake_sparse.Kernels) -> set[str]:
    return {ROWS[name].family for name, _ in gpu.launched}


@pytest.mark.parametrize("by_table", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_passes(
    gpu: fake_sparse.Kernels, request: pytest.FixtureRequest, several: bool, by_table: bool
) -> None:
    if several:
        request.getfixturevalue("short_chunks")
    case = Sparse("float16")
    a = on("cupy", case)
    blocks = block_table(a, case) if by_table else None
    table, one = ([], []) if by_table else (TABLE_STEMS, TABLE_STEMS[:1])

    def launched(run: Any, **options: Any) -> list[str]:
        gpu.launched.clear()
        run(a, case, blocks, **options)
        assert len(families(gpu)) == 1
        return gpu.stems()

    assert launched(forward) == [*one, "sparse_forward"]
    first = [*table, "backward_preprocess", "sparse_backward_kv"]
    sums = ["sparse_postprocess"] * (3 if several else 1)
    assert launched(backward) == [*first, *sums]
    assert launched(backward, deterministic=True) == [*first, "sparse_backward_q"]
    assert launched(double_backward) == [*table, *DOUBLE_STEMS]
    assert launched(jvp) == [*one, "sparse_forward", DOUBLE_STEMS[0]]
    assert launched(jvp, parts=NOWHERE) == [*one, "sparse_forward"]
    gpu.launched.clear()
    double_backward(a, case, blocks, parts=NOWHERE)
    assert gpu.launched == []


@pytest.mark.parametrize("run", [forward, backward, jvp, double_backward])
@pytest.mark.parametrize("stem", ["sparse_forward", "sparse_backward_kv", *DOUBLE_STEMS])
def test_one_family_for_all_passes(
    gpu: fake_sparse.Kernels, monkeypatch: pytest.MonkeyPatch, stem: str, run: Any
) -> None:
    monkeypatch.setenv("RAWATTN_VARIANT", f"{stem}_numba")
    case = Sparse("float16")
    run(on("cupy", case), case)
    assert len(families(gpu)) == 1
    if stem in gpu.stems():
        assert families(gpu) == {"numba"}


def test_numba_on_demand(gpu: fake_sparse.Kernels) -> None:
    case = Sparse("float16")
    check_all(case, on("cupy", case), backend="numba")
    block_table(on("cupy", case), case, backend="numba")
    assert families(gpu) == {"numba"}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_workspaces(gpu: fake_sparse.Kernels, short_chunks: None, dtype: str) -> None:
    case = Sparse(dtype)
    backward(on("torch", case), case)
    of_keys = gpu.views[5]
    *_, dq_accum, dk, dv, dk_accum, dv_accum = of_keys
    assert dk is dv is None
    totals = (len(case.q), len(case.k), len(case.k))
    for accum, total, views in zip(
        (dq_accum, dk_accum, dv_accum), totals, gpu.views[6:], strict=True
    ):
        assert views[0] == accum and accum.dtype == case.statistic and accum.shape[0] == total
    assert of_keys[5].shape == case.lse.shape and of_keys[5].dtype == case.statistic, "delta"
    assert len({view.ptr for view in of_keys if view is not None}) == 18


@pytest.mark.parametrize("kind", KINDS)
def test_without_gate_and_dlse(gpu: fake_sparse.Kernels, kind: str) -> None:
    case = Sparse()
    expected = case.gradients(dlse=False, gate=False)
    for deterministic in (False, True):
        options = {"gate": False, "dlse": None, "deterministic": deterministic}
        grads = backward(on(kind, case), case, **options)
        case.check(grads, expected, ())
        assert grads[3] is None
    a = on(kind, case)
    exact = sparse.forward(*case.inputs(), **case.options(gate=False))
    a["out"], a["lse"] = (MAKERS[kind](fake_gpu.aligned(x, np.float32)) for x in exact)
    results = double_backward(a, case, parts=(True, True, True, False), block_scale=None)
    assert results[5] is None and values_of(results[0]).shape == case.out.shape


DIRECTIONS = list(itertools.product((True, False), repeat=4))


@pytest.mark.parametrize("parts", DIRECTIONS)
@pytest.mark.parametrize("kind", ["numpy", "cupy", "numba"])
def test_parts_of_a_direction(gpu: fake_sparse.Kernels, kind: str, parts: tuple[bool, ...]) -> None:
    case = Sparse()
    a = host(kind, case) if kind == "numpy" else on(kind, case)
    case.check(jvp(a, case, parts=parts), case.tangents(parts), (2, 3))
    if kind != "numpy" and parts != NOWHERE:
        views = gpu.views[2]
        assert [view is not None for view in (*views[3:6], views[13])] == list(parts)
    case.check(double_backward(a, case, parts=parts), case.gradients2(parts), (1, 5))


def test_dead_rows_and_rows_of_no_sequence(gpu: fake_sparse.Kernels) -> None:
    case = Sparse()
    dead = case.lse == -np.inf
    assert dead.any(axis=0).sum() >= 3, "a sequence without keys, and two rows of none"
    a = on("torch", case)
    for backend in (None, "reference"):
        out, lse = map(values_of, forward(a, case, backend=backend))
        assert (lse[dead] == -np.inf).all() and (out[dead.T] == 0).all()
        dq, dk, dv, dg = map(values_of, backward(a, case, backend=backend))
        assert (dq[dead.T] == 0).all() and (dg[dead[::2].T] == 0).all()
        for keys in (dk, dv):
            assert (keys[case.cu_k[-1] :] == 0).all()


# ---- sliding ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "causal", "expected"),
    [
        (None, True, (15, 0)),
        (None, False, (15, 0)),
        (4, False, (4, 0)),
        ((4, 7), True, (4, 0)),
        ((4, 7), False, (4, 7)),
        (np.int64(2), True, (2, 0)),
    ],
)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_sliding(
    gpu: fake_sparse.Kernels, kind: str, given: Any, causal: bool, expected: tuple[int, int]
) -> None:
    case = Sparse(causal=causal)
    a = host(kind, case) if kind == "numpy" else on(kind, case)
    out, lse, near, near_lse = forward(a, case, return_sliding=True, window=given)
    case.close(out, case.exact[0])
    case.close(lse, case.exact[1])
    inputs = (case.q, case.k, case.v, case.cu_q, case.cu_k)
    exact = dense.forward(*inputs, window=expected, softmax_scale=case.scale)
    case.close(near, exact[0])
    case.close(near_lse, exact[1])
    pair = forward(a, case, return_sliding=True, window=given, return_lse=False)
    assert len(pair) == 2
    case.close(pair[1], exact[0])
    assert type(forward(a, case, return_lse=False)) is type(out), "out alone"


# ---- layouts ----------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of arrays that are converted to int32, from now on."""
    conversions: list[str] = []

    def note(convert: Any) -> Any:
        return lambda view, stream: conversions.append(view.dtype) or convert(view, stream)

    ways = {name: note(getattr(arrays.CUPY, name)) for name in ("as_int32", "clipped")}
    framework = dataclasses.replace(arrays.CUPY, **ways)
    monkeypatch.setattr(arrays, "CUPY", framework)
    monkeypatch.setattr(arrays, "_CHOOSERS", {})
    return conversions


def test_int64_is_converted_once(gpu: fake_sparse.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = counted(monkeypatch)
    case = Sparse()
    a = on("cupy", case)
    a["blocks"] = MAKERS["cupy"](case.blocks.astype(np.int64))
    counts = MAKERS["cupy"](np.full(case.blocks.shape[:2], 3))
    for run in (forward, backward, jvp, double_backward):
        conversions.clear()
        run(a, case, block_counts=counts)
        assert conversions == ["int64"] * 2
    conversions.clear()
    table = block_table(a, case, block_counts=counts)
    assert conversions == ["int64"] * 2
    check_all(case, a, table)
    assert conversions == ["int64"] * 2


@pytest.mark.parametrize("how", ["strided", "odd", "last", "heads"])
@pytest.mark.parametrize(("kind", "dtype"), [(k, "float16") for k in KINDS] + [("cupy", "float64")])
def test_any_layout_in(gpu: fake_sparse.Kernels, kind: str, dtype: str, how: str) -> None:
    case = Sparse(dtype)
    a = on(kind, case)
    for name in ("q", "k", "v", "dout", "out", "gate", "blocks", *PARTS):
        values = getattr(case, name)
        if name == "blocks" and how in ("odd", "last"):
            values = values.astype(np.int64)
        a[name] = MAKERS[kind](spread_out(values, how))
    for name in ("lse", "dlse"):
        a[name] = MAKERS[kind](np.asfortranarray(getattr(case, name)))
    for name in ("cu_q", "cu_k"):
        a[name] = MAKERS[kind](np.repeat(getattr(case, name), 2).astype(np.int64)[::2])
    check_all(case, a)
    counts = np.asfortranarray(np.full(case.blocks.shape[:2], 3, np.int32))
    case.check(forward(a, case, block_counts=MAKERS[kind](counts)), case.exact, (1,))
    mask = SOURCES["mask"]["block_mask"]
    wide = np.repeat(mask, 2, axis=2)[..., ::2]
    tables = [block_table(a, case, block_mask=MAKERS[kind](x)) for x in (mask, wide)]
    np.testing.assert_array_equal(*(values_of(table.blocks) for table in tables))


@pytest.mark.parametrize("how", ["dense", "strided", "odd", "last", "heads"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jax"])
def test_preallocated(gpu: fake_sparse.Kernels, kind: str, how: str) -> None:
    case = Sparse("float16")
    a = on(kind, case)

    def room(values: np.ndarray) -> Any:
        empty = fake_gpu.poison(fake_gpu.aligned(np.zeros_like(values)))
        return MAKERS[kind](empty if how == "dense" else spread_out(empty, how))

    for backend in (None, "reference"):
        given = room(case.out)
        out, _ = forward(a, case, out=given, backend=backend)
        assert out is given
        case.close(out, case.exact[0])
        for deterministic in (False, True):
            rooms = {"dq": room(case.q), "dk": room(case.k), "dv": room(case.v)}
            grads = backward(a, case, backend=backend, deterministic=deterministic, **rooms)
            case.check(grads, case.gradients(), (3,))
            for grad, given in zip(grads, rooms.values(), strict=False):
                assert grad is given


# ---- nothing to see ---------------------------------------------------------------------------


@pytest.mark.parametrize("by_table", [False, True])
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("total_q", "total_k", "batch", "selected"),
    [(0, 0, 1, 2), (0, 5, 2, 2), (5, 0, 2, 2), (4, 5, 0, 2), (4, 5, 1, 0)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_no_sequences_or_no_blocks(
    gpu: fake_sparse.Kernels,
    kind: str,
    total_q: int,
    total_k: int,
    batch: int,
    selected: int,
    backend: str | None,
    by_table: bool,
) -> None:
    make = MAKERS[kind]
    q, out = (np.ones((total_q, 2, size), np.float16) for size in (16, 8))
    k, v = (np.ones((total_k, 1, size), np.float16) for size in (16, 8))
    lse, gate = np.zeros((2, total_q), np.float32), np.ones((total_q, 1, selected), np.float32)
    cu_q, cu_k = (
        make(np.linspace(0, total if batch else 0, batch + 1).astype(np.int32))
        for total in (total_q, total_k)
    )
    inputs = [make(x) for x in (q, k, v)]
    blocks: Any = make(np.zeros((total_q, 1, selected), np.int32))
    own = {"include_own_block": bool(selected), "cu_seqlens_k": cu_k, "backend": backend}
    if by_table:
        blocks = BlockTable.of_indices(blocks, cu_q, num_heads_kv=1, total_k=total_k, **own)
        x = {name: values_of(getattr(blocks, name)) for name in ARRAYS}
        assert (x["blocks"] == UNUSED).all() and (x["slots"] == -1).all()
        assert (x["counts"] == 0).all() and (x["lengths"] == 0).all()
    options = own | {"block_scale": make(gate)}
    results = rawattn.sparse_forward(*inputs, cu_q, blocks, return_lse=True, **options)
    tangents = rawattn.sparse_jvp(*inputs, inputs[0], None, None, cu_q, blocks, **options)
    expected = [(out, 0), (lse, -np.inf), (out, 0), (out, 0), (lse, -np.inf), (lse, 0)]
    for result, (like, value) in zip([*results, *tangents], expected, strict=True):
        assert values_of(result).shape == like.shape and (values_of(result) == value).all()
    rows = (make(out), *inputs, make(out), make(lse), cu_q, blocks)
    grads = rawattn.sparse_backward(*rows, **options)
    second = rawattn.sparse_double_backward(inputs[0], None, None, *rows, **options)
    likes = (q, k, v, gate, out, lse, q, k, v, gate)
    for result, like in zip([*grads, *second], likes, strict=True):
        assert values_of(result).shape == like.shape and (values_of(result) == 0).all()
        assert values_of(result).dtype == like.dtype
    assert gpu.launched == []


def test_own_blocks_alone(gpu: fake_sparse.Kernels) -> None:
    """No slot at all, but the own block: nothing special for the kernels."""
    case = Sparse()
    case.blocks, case.gate = case.blocks[..., :0], case.gate[..., :0]
    case.exact = sparse.forward(case.q, case.k, case.v, case.cu_q, case.cu_k, **case.options())
    for a in (host("numpy", case), on("cupy", case)):
        case.check(forward(a, case), case.exact, (1,))
    assert gpu.stems() == ["block_lists", "sparse_forward"]


# ---- devices and streams ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_another_device_becomes_current_for_the_call(gpu: fake_sparse.Kernels, kind: str) -> None:
    case = Sparse()
    a = on(kind, case, device=1)
    for run in (forward, backward, jvp, double_backward, block_table):
        GPU.log.clear()
        run(a, case)
        visits = [entry for entry in GPU.log if entry[0] == "device"]
        assert visits == [("device", 1), ("device", 0)]
    assert GPU.current == 0


def test_every_input_is_waited_for(gpu: fake_sparse.Kernels) -> None:
    case = Sparse()
    a = on("numba", case)
    of_rows = "dout out lse dlse"
    for run, names in [
        (forward, "q k v cu_q cu_k blocks gate"),
        (backward, f"q k v cu_q cu_k blocks gate {of_rows}"),
        (jvp, f"q k v cu_q cu_k blocks gate {' '.join(PARTS)}"),
        (double_backward, f"q k v cu_q cu_k blocks gate {' '.join(PARTS)} {of_rows}"),
        (block_table, "cu_q cu_k blocks"),
    ]:
        check_waits(gpu, a, partial(run, a, case), names)
    counts = MAKERS["numba"](np.full(case.blocks.shape[:2], 3, np.int32))
    b = a | {"counts": counts}
    run = partial(forward, b, case, block_counts=counts)
    check_waits(gpu, b, run, "q k v cu_q cu_k blocks gate counts")
    table = block_table(a, case)
    c = a | {name: getattr(table, name) for name in ARRAYS if name != "counts"}
    c["blocks of the table"] = c.pop("blocks")
    a["blocks"].stream = 0
    names = [name for name in c if name not in ("dout", "dlse", "out", "lse", *PARTS)]
    streams = {name: 200 + i for i, name in enumerate(c)}
    for name, array in c.items():
        array.stream = streams[name]
    GPU.log.clear()
    backward(a, case, table)
    waits = {entry[2] for entry in GPU.log if entry[0] == "wait"}
    assert {streams[name] for name in names if name != "q"} <= waits


def test_without_validation_nothing_is_read_back(
    gpu: fake_sparse.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(view: arrays.View) -> Any:
        raise AssertionError("read back")

    case = Sparse("float16")
    a = on("torch", case)
    monkeypatch.setattr(arrays, "host_values", fail)
    monkeypatch.setattr(arrays, "neutral", fail)
    table = block_table(a, case)
    for run, blocks in itertools.product((forward, backward, jvp, double_backward), (None, table)):
        run(a, case, blocks)
        with pytest.raises(AssertionError, match="read back"):
            run(a, case, blocks, validate=True)


# ---- host memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("by_table", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_host_arrays(kind: str, dtype: str, by_table: bool) -> None:
    case = Sparse(dtype)
    a = host(kind, case)
    blocks = block_table(a, case) if by_table else None
    if by_table:
        assert {type(getattr(blocks, name)) for name in ARRAYS} == {type(a["q"])}
    for run, expected, statistics in [
        (forward, case.exact, (1,)),
        (backward, case.gradients(), (3,)),
        (jvp, case.tangents(WHOLE), (2, 3)),
        (double_backward, case.gradients2(WHOLE), (1, 5)),
    ]:
        results = run(a, case, blocks, validate=True)
        assert {type(x) for x in results} == {type(a["q"])}
        case.check([host_values(x) for x in results], expected, statistics)


def test_jax_in_host_memory() -> None:
    jax = pytest.importorskip("jax")
    case = Sparse("bfloat16")
    a = {name: jax.numpy.asarray(getattr(case, name)) for name in case.NAMES}
    table = block_table(a, case)
    for blocks in (None, table):
        results = forward(a, case, blocks)
        assert all(isinstance(result, jax.Array) for result in results)
        case.check([np.asarray(result) for result in results], case.exact, (1,))


def test_defaults() -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((130, heads, 16)) for heads in (4, 2, 2))
    cu, blocks = np.array([0, 70, 130]), rng.integers(0, 2, (130, 2, 1))
    out = rawattn.sparse_forward(q, k, v, cu, blocks)
    expected, lse = sparse.forward(q, k, v, cu, cu, blocks, block_size=64)
    np.testing.assert_array_equal(out, expected)
    dout = rng.standard_normal(q.shape)
    grads = rawattn.sparse_backward(dout, q, k, v, out, lse, cu, blocks)
    exact = sparse.backward(dout, q, k, v, out, lse, cu, cu, blocks, block_size=64)
    for x, y in zip(grads[:3], exact[:3], strict=True):
        np.testing.assert_array_equal(x, y)
    assert grads[3] is None


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [("numpy", "float32", {}), ("torch", "bfloat16", {"causal": False, "heads_sel": 2})],
)
def test_numba_on_host_arrays(kind: str, dtype: str, options: Any) -> None:
    pytest.importorskip("numba.cuda")
    case = Sparse(dtype, heads=(2, 1), lengths=([5, 0, 3, 1], [18, 1, 2, 0]), **options)
    a = host(kind, case)
    for blocks in (None, block_table(a, case, backend="numba")):
        results = forward(a, case, blocks, backend="numba")
        case.check([host_values(x) for x in results], case.exact, (1,))
        for deterministic in (False, True):
            options = {"backend": "numba", "deterministic": deterministic}
            results = backward(a, case, blocks, **options)
            case.check([host_values(x) for x in results], case.gradients(), (3,))
    results = jvp(a, case, backend="numba")
    case.check([host_values(x) for x in results], case.tangents(WHOLE), (2, 3))
    results = double_backward(a, case, backend="numba")
    case.check([host_values(x) for x in results], case.gradients2(WHOLE), (1, 5))


# ---- refusals: the wiring of checks -----------------------------------------------------------

A = np.zeros
I4 = np.int32
CU = np.array([0, 5], np.int32)
OF_FORWARD: dict[str, Any] = {
    "q": A((5, 4, 16)),
    "k": A((5, 2, 16)),
    "v": A((5, 2, 8)),
    "cu_seqlens": CU,
    "block_indices": A((5, 2, 3), I4),
}
OF_ROWS = {"dout": A((5, 4, 8)), "out": A((5, 4, 8)), "lse": A((4, 5))}
TABLE_5 = BlockTable.of_indices(A((5, 2, 3), I4), CU, num_heads_kv=2)
REFUSALS = [
    ({"q": [1.0]}, TypeError, "q is a list"),
    ({"k": A((5, 2, 24))}, ValueError, "k has head_dim 24"),
    ({"cu_seqlens": CU.astype(float)}, TypeError, "cu_seqlens has dtype float64"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
    ({"backend": "cuda"}, ValueError, "backend is 'cuda' beside arrays in host memory"),
    ({"validate": True, "cu_seqlens": CU + 1}, ValueError, "cu_seqlens starts at 1"),
    ({"block_indices": [[0]]}, TypeError, "block_indices is a list"),
    ({"block_indices": None}, TypeError, "block_indices is a NoneType"),
    ({"block_indices": A((5, 3), I4)}, ValueError, r"block_indices has shape \(5, 3\): .* 3 dim"),
    ({"block_indices": A((5, 2, 3))}, TypeError, "block_indices has dtype float64: .*int32"),
    ({"block_indices": A((5, 2, 3), bool)}, TypeError, "block_indices has dtype bool"),
    ({"block_indices": A((6, 2, 3), I4)}, ValueError, "block_indices has 6 tokens beside 5"),
    ({"block_indices": A((5, 3, 3), I4)}, ValueError, r"3 heads: expected 2 .* or 4 \(num_heads_q"),
    ({"block_indices": A((5, 1, 3), I4)}, ValueError, "the selection has 1 heads"),
    ({"block_size": 48}, ValueError, "block_size is 48: expected 16, 32, 64 or 128"),
    ({"block_size": 64.0}, TypeError, "block_size is 64.0: expected an integer"),
    ({"block_counts": A((5, 3), I4)}, ValueError, r"block_counts has shape \(5, 3\)"),
    ({"block_counts": A((5, 2))}, TypeError, "block_counts has dtype float64"),
    ({"block_scale": A((5, 2, 4))}, ValueError, r"block_scale has shape \(5, 2, 4\)"),
    ({"block_scale": A((5, 2, 3), np.float32)}, TypeError, "block_scale has dtype float32"),
    (
        {"block_indices": TABLE_5, "block_counts": A((5, 2), I4)},
        ValueError,
        "block_counts is given",
    ),
    ({"block_indices": TABLE_5, "block_size": 32}, ValueError, "block_size is 32 .* 64: expected"),
    ({"block_indices": TABLE_5, "causal": False}, ValueError, "causal is False beside a block tab"),
    ({"block_indices": TABLE_5, "include_own_block": False}, ValueError, "include_own_block is Fa"),
    (
        {"block_indices": TABLE_5, "k": A((5, 1, 16)), "v": A((5, 1, 8))},
        ValueError,
        "num_heads_kv is 1 beside a block table of num_heads_kv 2",
    ),
    ({"block_counts": A((5, 2), I4) - 1}, ValueError, "block_counts holds -1"),
    ({"include_own_block": "no"}, TypeError, "include_own_block is 'no'"),
    (
        {"block_indices": dataclasses.replace(TABLE_5, slots=A((2, 6, 4), I4))},
        ValueError,
        r"slots has shape \(2, 6, 4\): expected \(2, 5, 4\)",
    ),
    (
        {"block_indices": dataclasses.replace(TABLE_5, blocks=A((2, 5, 4), np.int64))},
        TypeError,
        "blocks has dtype int64: expected int32",
    ),
]
SLIDING = [
    ({"window": 3, "return_sliding": False}, ValueError, "window is 3 without return_sliding"),
    ({"window": "wide"}, TypeError, "window is 'wide'"),
    ({"window": (-3, 0)}, ValueError, r"window is \(-3, 0\)"),
    ({"window": -2}, ValueError, r"window is \(-2, 0\)"),
    ({"out": A((5, 4, 16))}, ValueError, "out has shape"),
]
GRADIENTS = [
    ({"dout": A((5, 4, 16))}, ValueError, "dout has shape"),
    ({"out": A((5, 4, 8), np.float32)}, TypeError, "out has dtype float32"),
    ({"lse": A((5, 4))}, ValueError, "lse has shape"),
    ({"dlse": A((4, 6))}, ValueError, "dlse has shape"),
    (
        {"block_indices": dataclasses.replace(TABLE_5, starts=None)},
        ValueError,
        "has no lists of queries",
    ),
    (
        {"block_indices": dataclasses.replace(TABLE_5, lengths=A((1, 2, 7), I4))},
        ValueError,
        r"lengths has shape \(1, 2, 7\): expected \(1, 2, 1\)",
    ),
]
OUTPUTS = [
    ({"dq": A((5, 2, 16))}, ValueError, "dq has shape"),
    ({"dk": A((5, 2, 16), np.float32)}, TypeError, "dk has dtype float32"),
    ({"dv": np.broadcast_to(A(8), (5, 2, 8))}, ValueError, "dv is read-only"),
]
SECOND = [
    ({"{}q": A((5, 2, 16))}, ValueError, "{}q has shape .*like q"),
    ({"{}k": A((5, 2, 16), np.float32)}, TypeError, "{}k has dtype float32"),
    ({"{}v": 0.0}, TypeError, "{}v is a float"),
    ({"{}block_scale": A((5, 2, 3))}, ValueError, "{}block_scale is given without block_scale"),
    (
        {"{}block_scale": A((5, 2, 4)), "block_scale": A((5, 2, 3))},
        ValueError,
        "{}block_scale has shape .*like block_scale",
    ),
]


def refused(function: Any, given: dict[str, Any], refusal: Any, prefix: str = "") -> None:
    changes, error, text = refusal
    named = {name.format(prefix): value for name, value in changes.items()}
    with pytest.raises(error, match=text.format(prefix) if prefix else text):
        function(**given | named)
    function(**given)


@pytest.mark.parametrize("refusal", [*REFUSALS, *SLIDING])
def test_forward_refuses(refusal: Any) -> None:
    given = OF_FORWARD | {"return_sliding": "window" in refusal[0]}
    refused(rawattn.sparse_forward, given, refusal)


@pytest.mark.parametrize("refusal", [*REFUSALS, *GRADIENTS, *OUTPUTS])
def test_backward_refuses(refusal: Any) -> None:
    refused(rawattn.sparse_backward, OF_FORWARD | OF_ROWS, refusal)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_jvp_refuses(refusal: Any) -> None:
    direction = {"tq": A((5, 4, 16)), "tk": None, "tv": None}
    refused(rawattn.sparse_jvp, OF_FORWARD | direction, refusal)


@pytest.mark.parametrize("refusal", [*REFUSALS, *GRADIENTS])
def test_double_backward_refuses(refusal: Any) -> None:
    direction = {"ddq": A((5, 4, 16)), "ddk": None, "ddv": None}
    refused(rawattn.sparse_double_backward, OF_FORWARD | OF_ROWS | direction, refusal)


@pytest.mark.parametrize("refusal", SECOND)
def test_directions_refuse(refusal: Any) -> None:
    for function, prefix, more in (
        (rawattn.sparse_jvp, "t", {}),
        (rawattn.sparse_double_backward, "dd", OF_ROWS),
    ):
        direction = {f"{prefix}{name}": None for name in ("q", "k", "v")}
        refused(function, OF_FORWARD | more | direction, refusal, prefix)


OF_TABLE = [
    ({"num_heads_kv": None}, ValueError, "num_heads_kv is None"),
    ({"num_heads_kv": 0}, ValueError, "k has 0"),
    ({"total_k": 6}, ValueError, "k has 6 tokens beside 5 of q, without cu_seqlens_k"),
    ({"cu_seqlens_k": CU}, ValueError, "total_k is None"),
    ({"cu_seqlens_k": CU[:1], "total_k": 5}, ValueError, "cu_seqlens_k has 1 offsets"),
    ({"cu_seqlens": CU[None]}, ValueError, "cu_seqlens has shape"),
    ({"cu_seqlens": CU + 1}, ValueError, "cu_seqlens starts at 1"),
    ({"head_dim": 12}, ValueError, "head size 12"),
    ({"backend": "triton"}, ValueError, "backend is 'triton'"),
    ({"block_size": 8}, ValueError, "block_size is 8"),
    ({"causal": "yes"}, TypeError, "causal is 'yes'"),
    ({"include_own_block": 1}, TypeError, "include_own_block is 1"),
]
OF_INDICES = [
    ({"block_indices": TABLE_5}, TypeError, r"block_indices is a .*BlockTable"),
    ({"block_indices": None}, TypeError, "block_indices is a NoneType"),
    ({"block_counts": A((5, 2)) - 1}, TypeError, "block_counts has dtype float64"),
    ({"block_counts": A((5, 2), I4) - 1}, ValueError, "block_counts holds -1: expected 0 or more"),
    ({"num_heads_q": 6, "num_heads_kv": 1}, ValueError, r"2 heads: expected 1 .* or 6"),
    ({"num_heads_kv": 3}, ValueError, "q has 2 heads and k has 3"),
]
OF_MASK = [
    ({"block_mask": A((5, 2, 1), I4)}, TypeError, "block_mask has dtype int"),
    ({"block_mask": A((5, 2), bool)}, ValueError, "block_mask has shape"),
    ({"block_mask": A((5, 3, 2), bool)}, ValueError, "heads and k has 2|3 heads: expected 2"),
]
OF_PATTERN = [
    ({"total_q": None}, ValueError, "total_q is None"),
    ({"total_q": 4}, ValueError, "cu_seqlens ends at 5: expected at most 4"),
    ({"num_heads_sel": 3}, ValueError, "3 heads: expected 2|q has 3 heads and k has 2"),
    ({"sliding_blocks": 0}, ValueError, "sliding_blocks is 0 and global_blocks 0: expected 1 or"),
    ({"sliding_blocks": 1.5}, TypeError, "sliding_blocks is 1.5: expected an integer"),
    ({"global_blocks": -1}, ValueError, "global_blocks -1"),
    (
        {"sliding_blocks": 2**16, "total_q": 2**20, "num_heads_kv": 1},
        ValueError,
        r"entries of a block table: expected at most 2147483647; split",
    ),
]
CONSTRUCTORS: dict[str, Any] = {
    "of_indices": ({"block_indices": A((5, 2, 3), I4)}, OF_INDICES),
    "of_mask": ({"block_mask": A((5, 2, 1), bool)}, OF_MASK),
    "of_pattern": ({"total_q": 5, "sliding_blocks": 1}, OF_PATTERN),
}


@pytest.mark.parametrize(
    ("name", "refusal"),
    [(name, x) for name, (_, more) in CONSTRUCTORS.items() for x in [*OF_TABLE, *more]],
)
def test_a_table_refuses(name: str, refusal: Any) -> None:
    given = CONSTRUCTORS[name][0] | {"cu_seqlens": CU, "num_heads_kv": 2}
    refused(getattr(BlockTable, name), given, refusal)


@pytest.mark.parametrize("name", ["blocks", "gate", "tgate", "k", "cu_k", "dout", "lse"])
def test_arrays_on_two_devices(gpu: fake_sparse.Kernels, name: str) -> None:
    case = Sparse()
    a = on("torch", case)
    a[name] = MAKERS["torch"](getattr(case, name).copy(), 1)
    with pytest.raises(ValueError, match="is on CUDA device 1 beside an array on CUDA device 0"):
        double_backward(a, case)


def test_arrays_of_two_libraries(gpu: fake_sparse.Kernels) -> None:
    case = Sparse()
    a = on("torch", case)
    for name, text in (("blocks", "block_indices"), ("gate", "block_scale")):
        with pytest.raises(TypeError, match=f"{text} is a NumPy array beside a torch CUDA array"):
            forward(a | {name: getattr(case, name)}, case)
    table = block_table(on("cupy", case), case)
    with pytest.raises(TypeError, match="blocks is a CuPy array beside a torch CUDA array"):
        forward(a, case, table)


# ---- the face ---------------------------------------------------------------------------------


def test_signatures() -> None:
    choice = "cu_seqlens_k block_size block_counts include_own_block causal block_scale"
    rows = f"{choice} softmax_scale"
    order = {
        rawattn.sparse_forward: f"q k v cu_seqlens block_indices {rows} return_lse return_sliding "
        "window out backend validate",
        rawattn.sparse_backward: f"dout q k v out lse cu_seqlens block_indices {rows} dlse "
        "deterministic dq dk dv backend validate",
        rawattn.sparse_double_backward: "ddq ddk ddv dout q k v out lse cu_seqlens block_indices "
        f"ddblock_scale {rows} dlse deterministic backend validate",
        rawattn.sparse_jvp: "q k v tq tk tv cu_seqlens block_indices tblock_scale "
        f"{rows} backend validate",
    }
    positional = (5, 8, 11, 8)
    for (function, names), count in zip(order.items(), positional, strict=True):
        parameters = named_parameters(function)
        assert [p.name for p in parameters] == names.split()
        kinds = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters]
        assert kinds.index(True) == count
