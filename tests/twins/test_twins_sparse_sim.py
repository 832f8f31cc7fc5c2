"""The Numba twins of block-sparse attention against the reference, as test_twins_sim.

Each twin is fed by the reference. Keys that no query sees, queries that see no key, and factors of
slots that do not count are NaN: what a kernel reads there it must not use. Long, one twin after the
other.
"""

import importlib
import inspect
import math
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from rawattn import problem
from rawattn.problem import Selection
from rawattn.reference import blocks as lists
from rawattn.reference import sparse
from tests.twins.test_twins_sim import BOUNDS, MEMORIES, Arrays, Case

CAUSAL, OPEN = (-1, 0), (-1, -1)
UNUSED = 2**31 - 1


@dataclass(frozen=True)
class Sparse:
    """A packed problem, and how its queries select blocks.

    ``per_head``: every query head has a selection of its own. ``gate``: there is a block_scale.
    ``counts``: block_counts too. ``no_lse`` of the packed problem is a query whose head 0 alone has
    an lse of -inf. Sequences of a case whose ``skipped`` is n leave their block n to nobody but
    the queries that stand in it.
    """

    case: Case
    num_selected: int = 3
    block_size: int = 16
    per_head: bool = False
    own: bool = True
    gate: bool = True
    counts: bool = False
    chunk: int = 16
    skipped: int | None = None


CASES = {
    "causal": Sparse(
        Case((19, 3, 37), (19, 3, 37), "float32", window=CAUSAL, poisoned=1, past=2), chunk=256
    ),
    "gqa bfloat16": Sparse(
        Case((5, 0, 35), (21, 4, 35), "bfloat16", 2, 3, window=CAUSAL), counts=True
    ),
    "group 4": Sparse(
        Case((6,), (60,), "float16", 2, 4, window=CAUSAL), num_selected=4, skipped=1, gate=False
    ),
    "per head": Sparse(
        Case((7, 4), (40, 20), "float64", 2, 3, 16, 8, CAUSAL, no_lse=2), per_head=True, chunk=4
    ),
    "group of 19": Sparse(Case((3, 5), (40, 5), "float64", 1, 19, no_lse=4), chunk=2),
    "open": Sparse(Case((37,), (37,), "float64", 1, 3, past=1), num_selected=2, counts=True),
    "open, no own": Sparse(
        Case((7,), (66,), "float32", past=1), own=False, num_selected=2, skipped=2, chunk=2
    ),
    "no own": Sparse(Case((40,), (40,), "float64", 1, 2, window=CAUSAL), own=False, skipped=0),
    "no gate": Sparse(Case((36,), (36,), "float32", 1, 2, window=CAUSAL), gate=False),
    "dead rows": Sparse(Case((30, 6), (4, 19), "float64", 1, 2, 8, 16, CAUSAL), own=False),
    "dead rows half": Sparse(Case((19,), (2,), "bfloat16", window=CAUSAL, past=15)),
    "empty": Sparse(Case((0, 4, 0, 5, 2), (3, 0, 0, 5, 1), "float32", poisoned=3, past=1)),
    "no queries": Sparse(Case((0, 0), (5, 12), "float32")),
    "no keys": Sparse(Case((5, 12), (0, 0), "float16")),
    "batch 0": Sparse(Case((), (), "float32", past=17)),
    "past a unit": Sparse(Case((2,), (2,), "float32", past=31), chunk=32),
    "strided": Sparse(Case((6,), (35,), "float16", 2, 1, 8, 16, CAUSAL, past=2, strided=True)),
    "blocks of 32": Sparse(Case((5, 9), (70, 33), "float32", 1, 2, 24, 40), block_size=32),
    "blocks of 128": Sparse(Case((4,), (140,), "float64", window=CAUSAL), block_size=128),
    "own alone": Sparse(Case((20,), (20,), "float64", window=CAUSAL), 0, gate=False),
    "own alone, open": Sparse(Case((20,), (20,), "float32"), 0),
    "tile of 8": Sparse(Case((5,), (18,), "float32", head_dim=192, head_dim_v=128)),
    "tile of 4": Sparse(Case((3,), (18,), "float64", 1, 5, 256, 256, CAUSAL), chunk=2),
}


# many rows or items for the simulator; what they prove is in a smaller case too
LONG = ("gqa bfloat16", "open", "blocks of 32", "group of 19", "past a unit", "blocks of 128")
NAMES = [pytest.param(n, marks=pytest.mark.sweep) if n in LONG else n for n in CASES]


class SparseArrays(Arrays):
    """A case's inputs and table of blocks, and what the reference makes of them."""

    def __init__(self, name, memory, no_lse=True):
        c = CASES[name]
        super().__init__(c.case, memory)
        p, rng = self.problem, np.random.default_rng(len(name))
        self.c, self.causal = c, c.case.window == CAUSAL
        heads_sel = p.num_heads_q if c.per_head else p.num_heads_kv
        self.selection = Selection(
            heads_sel, c.num_selected, c.block_size, own=c.own, chunk=c.chunk
        )
        shape = (p.total_q, heads_sel, c.num_selected)
        most = max((-(-n // c.block_size) for n in c.case.lengths_k), default=0)
        self.indices = rng.integers(-1, most + 1, shape).astype(np.int32)
        self.indices[self.indices == c.skipped] = most
        self.indices[rng.random(shape) < 0.05] = UNUSED
        self.indices[rng.random(shape) < 0.05] = -UNUSED
        self.block_counts = None
        if c.counts:
            self.block_counts = rng.integers(-1, c.num_selected + 2, shape[:2]).astype(np.int32)
        self.how = {
            "block_size": c.block_size,
            "block_counts": self.block_counts,
            "include_own_block": c.own,
            "causal": self.causal,
        }
        self.build_table()
        counting = np.zeros(shape, dtype=bool)
        head, token, w = np.nonzero(self.slots >= 0)
        counting[token, head, self.slots[head, token, w]] = True
        self.scale = (1 + rng.standard_normal(shape) / 2).astype(self.real) if c.gate else None
        self.expect(no_lse)
        self.k[self.unseen], self.v[self.unseen] = np.nan, np.nan
        for a in (self.q, self.out, self.dout):
            a[self.dead.T] = np.nan
        self.given_delta[self.dead] = np.nan
        if c.gate:
            dead_items = self.dead.reshape(heads_sel, p.num_heads_q // heads_sel, p.total_q)
            dead_items = dead_items.all(axis=1)
            self.scale[~counting | dead_items.T[:, :, None]] = np.nan

    def build_table(self):
        p, s = self.problem, self.selection
        packed = (self.cu_q, self.cu_k)
        self.blocks, self.slots, self.counts = lists.by_query(self.indices, *packed, **self.how)
        by_key = lists.by_key(
            self.blocks,
            self.slots,
            *packed,
            num_heads_kv=p.num_heads_kv,
            units=s.key_units(p),
            chunk=s.chunk,
            num_chunks=s.num_chunks(p),
            block_size=s.block_size,
            segment=s.segment(p),
            segments=s.segments(p),
        )
        self.starts, self.lengths, self.queries, self.query_slots, self.work = by_key
        # a kernel must not read where an empty list begins
        self.starts = np.where(self.lengths == 0, UNUSED, self.starts).astype(np.int32)

    def expect(self, no_lse):
        p = self.problem
        packed = (self.cu_q, self.cu_k, self.indices)
        options = self.how | {"block_scale": self.scale, "softmax_scale": p.softmax_scale}
        with np.errstate(invalid="ignore"):  # the poisoned sequence
            out, lse = sparse.forward(self.q, self.k, self.v, *packed, **options)
            self.expected_out, self.expected_lse = out, lse
            self.out, self.lse = out.astype(self.dtype), lse.astype(self.real)
            self.lse[:, self.cu_q[-1] :] = np.nan
            if no_lse and self.c.case.no_lse is not None:
                self.lse[0, self.c.case.no_lse] = -np.inf
            self.dead = self.lse == -np.inf
            self.dead[:, self.cu_q[-1] :] = True
            arrays = (self.dout, self.q, self.k, self.v, self.out, self.lse, *packed)
            self.expected_grads = sparse.backward(*arrays, dlse=self.dlse, **options)
            self.given_delta = self.delta()
        self.unseen = np.ones((p.total_k, p.num_heads_kv), dtype=bool)
        for part in sparse.parts(
            self.indices, p.num_heads_q, p.num_heads_kv, *packed[:2], **self.how
        ):
            self.unseen[part.keys, part.head_kv] = ~part.mask.any(axis=(0, 1))

    def zeros(self, like):
        return self.place(np.zeros(like.shape, self.real))

    def fetch_integers(self, view):
        return self.fetch(view).astype(np.int64)


# ---- the table --------------------------------------------------------------------------------


BY_QUERY = ("blocks", "slots", "counts")


def list_blocks(a, source, indices, global_blocks=0):
    """What block_lists makes of the case: blocks, slots, counts, lengths."""
    got = {name: a.place(np.full_like(getattr(a, name), -7)) for name in BY_QUERY}
    got["lengths"] = a.place(np.zeros_like(a.lengths))
    named = {"block_indices": indices, "block_counts": a.block_counts}
    numbers = {"source": source, "global_blocks": global_blocks}
    a.launch("block_lists", **named, **got, **numbers)
    return [a.fetch_integers(view) for view in got.values()]


def compare_tables(a, got):
    for ours, theirs in zip(got, (a.blocks, a.slots, a.counts, a.lengths), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", CASES)
def test_block_lists(name, memory):
    a = SparseArrays(name, memory)
    compare_tables(a, list_blocks(a, 0, a.indices))


@pytest.mark.parametrize("memory", MEMORIES)
def test_block_lists_needs_no_lengths(memory):
    a = SparseArrays("gqa bfloat16", memory)
    got = {name: a.place(np.full_like(getattr(a, name), -7)) for name in BY_QUERY}
    named = {"block_indices": a.indices, "block_counts": a.block_counts}
    a.launch("block_lists", **named, **got, source=0, global_blocks=0)
    for name, view in got.items():
        np.testing.assert_array_equal(a.fetch_integers(view), getattr(a, name))


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["causal", "gqa bfloat16", "open, no own", "empty"])
def test_block_lists_of_a_mask(name, memory):
    a = SparseArrays(name, memory)
    mask = np.random.default_rng(1).random(a.indices.shape) < 0.5
    a.indices = lists.named_by_mask(mask).astype(np.int32)
    a.build_table()
    compare_tables(a, list_blocks(a, 1, mask.astype(np.uint8)))


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("global_blocks", [0, 1, 2])
@pytest.mark.parametrize("name", ["causal", "open", "no own", "dead rows", "per head"])
def test_block_lists_of_a_pattern(name, global_blocks, memory):
    a = SparseArrays(name, memory)
    p, s = a.problem, a.selection
    named = lists.named_by_pattern(
        a.cu_q,
        a.cu_k,
        p.total_q,
        num_heads_sel=s.num_heads_sel,
        sliding_blocks=s.num_selected - global_blocks,
        global_blocks=global_blocks,
        block_size=s.block_size,
    )
    a.indices = named.astype(np.int32)
    a.build_table()
    compare_tables(a, list_blocks(a, 2, None, global_blocks))


@pytest.fixture(params=["whole", "cut"])
def segments(request, monkeypatch):
    """Segments of work as long as a list; and of 8 rows or one item, so that lists are cut."""
    if request.param == "cut":
        monkeypatch.setattr(problem, "_SEGMENT_ROWS", 8)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", NAMES)
def test_lists_of_queries(name, memory):
    """The other three kernels of the table, one fed by the other: where a list lies is free."""
    a = SparseArrays(name, memory)
    starts = a.place(np.full_like(a.starts, -7))
    cursor = a.place(np.zeros(2 + a.starts.size, np.int32))
    work = a.place(np.full_like(a.work, -1))
    segment = a.selection.segment(a.problem)
    made = {"starts": starts, "cursor": cursor, "work": work}
    a.launch("block_offsets", lengths=a.lengths, **made, segment=segment)
    check_work(a, *map(a.fetch_integers, (starts, cursor, work)))

    fresh = np.full_like(a.queries, -7)
    unsorted, unsorted_slots, queries, query_slots = (a.place(fresh) for _ in range(4))
    given = {"starts": starts, "unsorted": unsorted, "unsorted_slots": unsorted_slots}
    a.launch("block_queries", blocks=a.blocks, slots=a.slots, cursor=cursor, **given)
    np.testing.assert_array_equal(a.fetch_integers(cursor)[2:], a.lengths.ravel())

    given |= {"queries": queries, "query_slots": query_slots}
    a.launch("block_order", lengths=a.lengths, **given)
    compare_lists(a, *map(a.fetch_integers, (starts, queries, query_slots)))


def check_work(a, starts, cursor, work):
    """Every list is cut into segments, in whatever order they lie; none follows behind the last."""
    segment, expected = a.selection.segment(a.problem), set()
    for one, (start, length) in enumerate(zip(starts.flat, a.lengths.flat, strict=True)):
        for first in range(0, length, segment):
            expected.add((one, start + first, min(segment, length - first), 0))
    assert cursor[:2].tolist() == [a.lengths.sum(), len(expected)]
    assert set(map(tuple, work[: len(expected)].tolist())) == expected
    assert (work[len(expected) :] == -1).all()


def compare_lists(a, starts, queries, query_slots):
    used = np.zeros(queries.shape, dtype=int)
    for index in np.ndindex(a.lengths.shape):
        length = a.lengths[index]
        ours = slice(starts[index], starts[index] + length)
        theirs = slice(a.starts[index], a.starts[index] + length)
        if length > 0:
            np.testing.assert_array_equal(queries[ours], a.queries[theirs])
            np.testing.assert_array_equal(query_slots[ours], a.query_slots[theirs])
            used[ours] += 1
    assert (used == (np.arange(used.size) < a.lengths.sum())).all()  # no two lists overlap


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("words", [1, 3, 200])
def test_block_order_of_long_chunks(words, memory, monkeypatch):
    """A chunk has more items than are looked at at a time, and they come in any order."""
    from rawattn.kernels_numba import block_order as block_order_numba

    monkeypatch.setattr(block_order_numba, "WORDS", words)
    a = SparseArrays("per head", memory)
    a.selection = Selection(6, 3, 16, own=True, chunk=256)
    a.build_table()
    rng, unsorted, unsorted_slots = np.random.default_rng(0), a.queries.copy(), a.query_slots.copy()
    for index in np.ndindex(a.lengths.shape):
        if length := a.lengths[index]:
            order = a.starts[index] + rng.permutation(length)
            here = slice(a.starts[index], a.starts[index] + length)
            unsorted[here], unsorted_slots[here] = a.queries[order], a.query_slots[order]
    assert (unsorted != a.queries).any()
    outputs = [a.place(np.full_like(a.queries, -7)) for _ in range(2)]
    lists_given = {"starts": a.starts, "lengths": a.lengths, "unsorted": unsorted}
    lists_given |= {"unsorted_slots": unsorted_slots}
    a.launch("block_order", **lists_given, queries=outputs[0], query_slots=outputs[1])
    compare_lists(a, a.starts, *map(a.fetch_integers, outputs))


# ---- attention --------------------------------------------------------------------------------


def query_blocks(a):
    return {"blocks": a.blocks, "slots": a.slots, "block_scale": a.scale}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", NAMES)
def test_forward(name, memory):
    a = SparseArrays(name, memory, no_lse=False)
    out, lse = a.poison(a.out.shape, a.dtype), a.poison(a.lse.shape, a.real)
    inputs = {"q": a.q, "k": a.k, "v": a.v}
    a.launch("sparse_forward", **inputs, **query_blocks(a), out=out, lse=lse)
    a.compare(a.fetch(out), a.expected_out, a.cu_q)
    a.compare(a.fetch(lse).T, a.expected_lse.T, a.cu_q)


def row_inputs(a):
    names = {"q": a.q, "k": a.k, "v": a.v, "dout": a.dout, "lse": a.lse}
    return names | {"delta": a.given_delta}


def query_lists(a):
    names = ("starts", "lengths", "queries", "query_slots")
    return {name: getattr(a, name) for name in names} | {"block_scale": a.scale}


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_backward_kv(name, direct, memory):
    """``direct``: no atomic adds. Otherwise dk, dv and dq are sums, over work and key blocks."""
    a = SparseArrays(name, memory)
    shuffled = np.random.default_rng(1).permutation(a.work)
    dq, dk, dv, dscale = a.expected_grads
    wanted = None if dscale is None else a.zeros(dscale)
    accum = [None] * 3 if direct else [a.zeros(x) for x in (a.q, a.k, a.v)]
    grads = [a.poison(x.shape, a.dtype) if direct else None for x in (a.k, a.v)]
    results = dict(zip(("dq_accum", "dk_accum", "dv_accum"), accum, strict=True))
    results |= {"dk": grads[0], "dv": grads[1], "dblock_scale": wanted}
    inputs = row_inputs(a) | query_lists(a)
    a.launch("sparse_backward_kv", **inputs, work=shuffled, **results)
    if direct:
        a.compare(a.fetch(grads[0]), dk, a.cu_k)
        a.compare(a.fetch(grads[1]), dv, a.cu_k)
    else:
        scale = a.problem.softmax_scale
        a.compare(a.fetch(accum[0]) * scale, dq, a.cu_q)
        a.compare(a.fetch(accum[1]) * scale, dk, a.cu_k)
        a.compare(a.fetch(accum[2]), dv, a.cu_k)
    if wanted is not None:
        a.compare(a.fetch(wanted), dscale, a.cu_q)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("direct", [True, False])
def test_backward_kv_of_few_gradients(direct, memory):
    """dq by atomic adds beside direct dk, dv; and no gradient of the gates that are there."""
    a = SparseArrays("per head", memory)
    dq, dk, dv, _ = a.expected_grads
    dq_accum = a.zeros(a.q) if direct else None
    results = [a.poison(x.shape, a.dtype) if direct else a.zeros(x) for x in (a.k, a.v)]
    names = ("dk", "dv") if direct else ("dk_accum", "dv_accum")
    made = dict(zip(names, results, strict=True)) | {"dq_accum": dq_accum}
    inputs = row_inputs(a) | query_lists(a) | {"work": None if direct else a.work}
    a.launch("sparse_backward_kv", **inputs, **made)
    scale = a.problem.softmax_scale
    a.compare(a.fetch(results[0]) * (1 if direct else scale), dk, a.cu_k)
    a.compare(a.fetch(results[1]), dv, a.cu_k)
    if direct:
        a.compare(a.fetch(dq_accum) * scale, dq, a.cu_q)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", NAMES)
def test_backward_q(name, memory):
    a = SparseArrays(name, memory)
    dq = a.poison(a.q.shape, a.dtype)
    a.launch("sparse_backward_q", **row_inputs(a), **query_blocks(a), dq=dq)
    a.compare(a.fetch(dq), a.expected_grads[0], a.cu_q)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_postprocess(dtype, memory):
    a = Arrays(Case((7, 4), (7, 4), dtype, num_heads_kv=2, past=2, strided=True), memory)
    accum = np.random.default_rng(0).standard_normal(a.k.shape).astype(a.real)
    accum[0, 0, :3] = [np.nan, np.inf, -np.inf]
    grad = a.poison(a.k.shape, a.dtype)
    numbers = {"total_rows": len(a.k), "num_heads": 2, "scale": 0.3}
    a.launch("sparse_postprocess", accum=accum, grad=grad, **numbers)
    expected = (accum * a.real.type(0.3)).astype(a.dtype).astype(np.float64)
    np.testing.assert_array_equal(a.fetch(grad), expected)


# ---- launch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("group, rows", [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (40, 16)])
def test_rows_of_a_tile_of_heads(group, rows):
    from rawattn.kernels_numba.sparse import head_rows

    assert head_rows(group, 16) == rows
    assert head_rows(group, 4) == 4
    assert head_rows(group, 2) == 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stem", ["sparse_forward", "sparse_backward_kv", "sparse_backward_q"])
def test_what_a_cta_allocates_fits_into_static_shared_memory(stem, dtype, monkeypatch):
    from rawattn.kernels_numba import common as common_numba

    if not common_numba.SIMULATED:
        pytest.skip("counts the arrays of the simulator")
    twin, sizes = importlib.import_module(f"rawattn.kernels_numba.{stem}"), {}

    def array(self, shape, dtype):
        sizes[sys._getframe(1).f_lineno] = math.prod(shape) * np.dtype(dtype).itemsize
        return np.empty(shape, dtype)

    shared = common_numba.simulator_numba.kernelapi.FakeCUDAShared
    monkeypatch.setattr(shared, "array", array)
    group = () if stem == "sparse_backward_kv" else (40,)
    for head_dims in [*((d, d) for d in range(8, 257, 8)), (8, 256), (192, 128), (72, 8)]:
        kernel, rows = twin.compiled(dtype, *head_dims, *group)
        numbers = {"batch": 0, "total_q": 0, "total_k": 0, "block_size": 16, "softmax_scale": 1.0}
        numbers |= dict.fromkeys(("num_heads_q", "num_heads_kv", "num_heads_sel", "chunk"), 1)
        numbers |= {"work": np.zeros((0, 4), np.int32)}
        numbers |= {"window_left": -1, "window_right": -1, "num_selected": 1, "width": 1}
        names = inspect.signature(kernel.fn).parameters
        sizes.clear()
        kernel[(1, 1, 1), 1](*(numbers.get(name, np.zeros(1, np.int32)) for name in names))
        assert 8 * rows < sum(sizes.values()) <= 48 * 1024
        assert rows == 16 or dtype == "float64" or max(head_dims) > 64
