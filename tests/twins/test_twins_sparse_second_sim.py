"""The Numba twins of block-sparse second derivatives against the reference, as test_twins_sim.

The table of blocks is built here, entry by entry. Where a kernel has no business it finds NaN, or
an index beyond everything: in queries without keys, in gates of slots that do not count, in lists
beyond their end.
"""

import inspect
import math
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from rawattn.problem import Selection
from rawattn.reference import sparse
from tests.twins.test_twins_sim import MEMORIES, Arrays, Case

CAUSAL = (-1, 0)
UNUSED = 2**31 - 1


@dataclass(frozen=True)
class Sparse:
    """A packed problem, and which of the directions of q, k, v and block_scale (g) are there.

    ``per_head``: every query head has a selection of its own. ``gate``: there is a block_scale.
    ``no_lse`` of the packed problem is a query whose head 0 alone gets an lse of -inf.
    """

    case: Case
    given: str = "qkvg"
    num_selected: int = 3
    block_size: int = 16
    per_head: bool = False
    own: bool = True
    gate: bool = True
    counts: bool = False
    chunk: int = 8


CASES = {
    "causal": Sparse(Case((19, 3, 33), (19, 3, 33), "float32", window=CAUSAL, poisoned=1, past=2)),
    "group": Sparse(Case((5, 0, 35), (21, 4, 35), "bfloat16", 2, 3, window=CAUSAL), counts=True),
    "per head": Sparse(
        Case((7, 4), (40, 20), "float64", 2, 3, 16, 8, CAUSAL, no_lse=2), per_head=True, chunk=4
    ),
    "group of 20": Sparse(Case((3, 5), (40, 5), "float64", 1, 20, no_lse=4), chunk=256),
    "not causal": Sparse(Case((37,), (37,), "float32", group=2, past=1), num_selected=2),
    "no own block": Sparse(Case((40,), (40,), "float64", group=2, window=CAUSAL), own=False),
    "no own, open": Sparse(Case((7,), (50,), "float16", past=1), own=False, num_selected=1),
    "no gate": Sparse(Case((36,), (36,), "float32", group=2, window=CAUSAL), "qkv", gate=False),
    "dead rows": Sparse(Case((30, 6), (4, 19), "float64", 1, 2, 8, 16, CAUSAL), own=False),
    "dead rows half": Sparse(Case((19,), (2,), "bfloat16", window=CAUSAL, past=9)),
    "empty": Sparse(Case((0, 4, 0, 5, 2), (3, 0, 0, 5, 1), "float32", poisoned=3, past=1)),
    "no queries": Sparse(Case((0, 0), (5, 12), "float32")),
    "no keys": Sparse(Case((5, 12), (0, 0), "float16")),
    "batch 0": Sparse(Case((), (), "float32", past=3)),
    "strided": Sparse(Case((6,), (35,), "float16", 2, 1, 8, 16, CAUSAL, past=2, strided=True)),
    "block of 32": Sparse(Case((5, 9), (70, 33), "float32", 1, 2, past=1), block_size=32),
    "block of 128": Sparse(Case((4,), (140,), "float64", window=CAUSAL), block_size=128),
    "no selection": Sparse(Case((20,), (20,), "float64", window=CAUSAL), "qkv", 0, gate=False),
    "q": Sparse(Case((5, 4), (20, 7), "float64", group=2, head_dim_v=16), "q"),
    "k": Sparse(Case((5, 4), (20, 7), "float16", group=2, window=CAUSAL, past=1), "k"),
    "v": Sparse(Case((5, 4), (20, 7), "float64", group=2, head_dim_v=16, past=1), "v"),
    "g": Sparse(Case((5, 4), (20, 7), "float64", group=2, head_dim_v=16, past=1), "g"),
    "kv": Sparse(Case((6,), (37,), "float32", group=2, head_dim_v=24), "kv"),
    "qg": Sparse(Case((6,), (37,), "bfloat16", group=2, window=CAUSAL), "qg"),
    "nothing": Sparse(Case((5,), (20,), "float64", past=1), ""),
    "wide": Sparse(Case((3,), (18,), "float64", head_dim=256, head_dim_v=256, window=CAUSAL)),
    "one key": Sparse(Case((6, 5), (1, 1), "float32", 1, 2, 64, 8), "qk", 1, gate=False),
    "tile of 8": Sparse(Case((5,), (18,), "float32", 1, 1, 128, 136, softmax_scale=0.1)),
}


# many rows or items for the simulator; what they prove is in a smaller case too
LONG = ("group", "group of 20", "causal", "block of 32", "block of 128", "no gate", "not causal")
WHOLE = [pytest.param(n, True, marks=[pytest.mark.sweep] if n in LONG else []) for n in CASES]
NAMES = [pytest.param(n, marks=pytest.mark.sweep) if n in LONG else n for n in CASES]


def blocks_of(indices, count, position, seqlen_k, block_size, own, causal):
    """Which blocks an item has, ascending, each with its slot."""
    slots = {}
    for slot, n in enumerate(indices[:count].tolist()):
        if 0 <= n * block_size < seqlen_k and not (causal and n * block_size > position):
            slots.setdefault(n, slot)
    if own and position >= 0:
        slots.setdefault(position // block_size, -1)
    return sorted(slots.items())


class SparseArrays(Arrays):
    """A case's inputs, table of blocks and direction, and what the reference makes of them."""

    def __init__(self, name, memory, with_dlse=True):
        c = CASES[name]
        super().__init__(c.case, memory)
        self.dlse = self.dlse if with_dlse else None
        self.rng = np.random.default_rng(len(name))
        p = self.problem
        heads_sel = p.num_heads_q if c.per_head else p.num_heads_kv
        self.selection = Selection(
            heads_sel, c.num_selected, c.block_size, own=c.own, chunk=c.chunk
        )
        shape = (p.total_q, heads_sel, c.num_selected)
        most = max((-(-n // c.block_size) for n in c.case.lengths_k), default=0)
        self.indices = self.rng.integers(-1, most + 1, shape).astype(np.int32)
        self.block_counts = None
        if c.counts:
            self.block_counts = self.rng.integers(0, c.num_selected + 1, shape[:2]).astype(np.int32)
        self.build_table(c)
        self.scale = (1 + self.rng.standard_normal(shape) / 2).astype(self.real)

        def normal(like, letter):
            a = self.rng.standard_normal(like.shape).astype(like.dtype)
            a[np.isnan(like)] = np.nan
            return a if letter in c.given else None

        self.dd = [normal(*x) for x in ((self.q, "q"), (self.k, "k"), (self.v, "v"))]
        self.dd_scale = normal(self.scale, "g")
        if not c.gate:
            self.scale = None
        self.expect(c)
        for a in (self.q, self.dd[0], self.out, self.dout):
            if a is not None:
                a[self.dead.T] = np.nan
        unseen = ~self.counts_slot
        by_group = self.dead.reshape(heads_sel, p.num_heads_q // heads_sel, p.total_q)
        unseen |= by_group.all(axis=1).T[:, :, None]
        for a in (self.scale, self.dd_scale):
            if a is not None:
                a[unseen] = np.nan
        if with_dlse:
            self.dlse[self.dead] = np.nan

    def build_table(self, c):
        p, s = self.problem, self.selection
        lists = {}
        items = (s.num_heads_sel, p.total_q, s.width)
        self.blocks, self.slots = np.full(items, UNUSED, np.int32), np.full(items, -1, np.int32)
        self.counts_slot = np.zeros(self.indices.shape, dtype=bool)
        ratio, lengths = s.ratio(p), zip(c.case.lengths_q, c.case.lengths_k, strict=True)
        for b, (seqlen_q, seqlen_k) in enumerate(lengths):
            for i, head_sel in np.ndindex(seqlen_q, s.num_heads_sel):
                t = self.cu_q[b] + i
                count = (
                    s.num_selected if self.block_counts is None else self.block_counts[t, head_sel]
                )
                position, causal = i + seqlen_k - seqlen_q, c.case.window == CAUSAL
                found = blocks_of(
                    self.indices[t, head_sel],
                    count,
                    position,
                    seqlen_k,
                    c.block_size,
                    c.own,
                    causal,
                )
                for w, (n, slot) in enumerate(found):
                    self.blocks[head_sel, t, w], self.slots[head_sel, t, w] = n, slot
                    if slot >= 0:
                        self.counts_slot[t, head_sel, slot] = True
                    unit = self.cu_k[b] // c.block_size + b + n
                    place = (t // c.chunk, head_sel // ratio, unit)
                    lists.setdefault(place, []).append((t * ratio + head_sel % ratio, slot))
        shape = (s.num_chunks(p), p.num_heads_kv, s.key_units(p))
        self.starts = np.full(shape, UNUSED, np.int32)  # of an empty list: nothing to be read
        self.lengths = np.zeros(shape, np.int32)
        self.queries = np.full(max(self.blocks.size, 1), UNUSED, np.int32)
        self.query_slots = np.full(self.queries.shape, UNUSED, np.int32)
        start = 0
        for i in self.rng.permutation(len(lists)):  # lists lie in any order
            place, entries = list(lists.items())[i]
            stop = start + len(entries)
            self.starts[place], self.lengths[place] = start, len(entries)
            self.queries[start:stop] = [item for item, _ in sorted(entries)]
            self.query_slots[start:stop] = [slot for _, slot in sorted(entries)]
            start = stop

    def expect(self, c):
        options = {
            "block_size": c.block_size,
            "block_counts": self.block_counts,
            "include_own_block": c.own,
            "causal": c.case.window == CAUSAL,
            "block_scale": self.scale,
            "softmax_scale": self.problem.softmax_scale,
        }
        packed = (self.cu_q, self.cu_k, self.indices)
        with np.errstate(invalid="ignore"):  # the poisoned sequence
            out, lse = sparse.forward(self.q, self.k, self.v, *packed, **options)
            self.out, self.lse = out.astype(self.dtype), lse.astype(self.real)
            self.lse[:, self.cu_q[-1] :] = np.nan
            if c.case.no_lse is not None:
                self.lse[0, c.case.no_lse] = -np.inf
            self.dead = self.lse == -np.inf
            self.dead[:, self.cu_q[-1] :] = True
            arrays = (self.dout, self.q, self.k, self.v, self.out, self.lse, *packed)
            options |= {"ddblock_scale": self.dd_scale, "dlse": self.dlse}
            self.ddout, self.ddlse, self.gq, self.gk, self.gv, self.gg = sparse.double_backward(
                *self.dd, *arrays, **options
            )
            # what pass 1 makes of the rounded out that it is given
            alive, dout = ~self.dead.T[:, :, None], self.dout.astype(np.float64)
            rounded = self.out.astype(np.float64)
            surplus = self.ddlse.T[:, :, None] * (out - rounded)
            self.expected_ddout = self.ddout + np.where(alive, surplus, 0)
            self.delta = (dout * rounded).sum(axis=-1).T - (0 if self.dlse is None else self.dlse)
            self.ddelta = (dout * self.ddout).sum(axis=-1).T
            self.expected_ddelta = (dout * self.expected_ddout).sum(axis=-1).T

    def inputs(self):
        parts = zip(("ddq", "ddk", "ddv"), self.dd, strict=True)
        gates = {"block_scale": self.scale, "ddblock_scale": self.dd_scale}
        return {"q": self.q, "k": self.k, "v": self.v} | dict(parts) | gates

    def items(self):
        return {"blocks": self.blocks, "slots": self.slots}

    def lists(self):
        names = ("starts", "lengths", "queries", "query_slots")
        return {name: getattr(self, name) for name in names}

    def row_terms(self):
        """dout, lse, and delta, ddlse, ddelta as pass 1 leaves them, with NaN in dead rows."""
        terms = {"delta": self.delta, "ddlse": self.ddlse, "ddelta": self.ddelta}
        for name, a in terms.items():
            terms[name] = np.where(self.dead, np.nan, a).astype(self.real)
        return {"dout": self.dout, "lse": self.lse} | terms


WITHOUT_DLSE = ("dead rows", "g", "strided")


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "name, with_dlse",
    [*WHOLE, *((name, False) for name in WITHOUT_DLSE)],
)
def test_out(name, with_dlse, memory):

    a = SparseArrays(name, memory, with_dlse)
    ddout = a.poison(a.out.shape, a.dtype)
    ddlse, delta, ddelta = (a.poison(a.lse.shape, a.real) for _ in range(3))
    passed = {"out": a.out, "dout": a.dout, "lse": a.lse, "dlse": a.dlse}
    results = {"ddout": ddout, "ddlse": ddlse, "delta": delta, "ddelta": ddelta}
    a.launch("sparse_double_backward_out", **a.inputs(), **a.items(), **passed, **results)
    a.compare(a.fetch(ddout), a.expected_ddout, a.cu_q)
    a.compare(a.fetch(ddlse).T, a.ddlse.T, a.cu_q)
    a.compare(a.fetch(delta).T, np.where(a.dead, 0, a.delta).T, a.cu_q)
    a.compare(a.fetch(ddelta).T, np.where(a.dead, 0, a.expected_ddelta).T, a.cu_q)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["causal", "group", "dead rows half", "batch 0", "qg", "v"])
def test_out_without_dout_is_the_half_of_a_jvp(name, memory):

    a = SparseArrays(name, memory)
    tout, tlse = a.poison(a.out.shape, a.dtype), a.poison(a.lse.shape, a.real)
    results = {"ddout": tout, "ddlse": tlse}
    a.launch(
        "sparse_double_backward_out", **a.inputs(), **a.items(), out=a.out, lse=a.lse, **results
    )
    a.compare(a.fetch(tout), a.expected_ddout, a.cu_q)
    a.compare(a.fetch(tlse).T, a.ddlse.T, a.cu_q)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", NAMES)
def test_q(name, memory):

    a = SparseArrays(name, memory)
    gq = a.poison(a.q.shape, a.dtype)
    a.launch("sparse_double_backward_q", **a.inputs(), **a.items(), **a.row_terms(), gq=gq)
    a.compare(a.fetch(gq), a.gq, a.cu_q)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name, with_gg", [*WHOLE, ("group", False), ("g", False)])
def test_kv(name, with_gg, memory):

    a = SparseArrays(name, memory)
    with_gg = with_gg and a.scale is not None
    gg = a.place(np.zeros_like(a.scale)) if with_gg else None
    gk, gv = a.poison(a.k.shape, a.dtype), a.poison(a.v.shape, a.dtype)
    results = {"gblock_scale": gg, "gk": gk, "gv": gv}
    a.launch("sparse_double_backward_kv", **a.inputs(), **a.lists(), **a.row_terms(), **results)
    a.compare(a.fetch(gk), a.gk, a.cu_k)
    a.compare(a.fetch(gv), a.gv, a.cu_k)
    if with_gg:
        assert not a.fetch(gg)[~a.counts_slot].any()
        a.compare(a.fetch(gg), a.gg, a.cu_q)


@pytest.mark.parametrize("memory", MEMORIES)
def test_kernels_agree_on_scores_and_their_tangents(memory):
    """A query of one key has E equal to its mean, so gv is 0: two kernels come to the same E."""

    a = SparseArrays("one key", memory)
    ddlse, delta, ddelta = (a.poison(a.lse.shape, a.real) for _ in range(3))
    ddout, gk, gv = (a.poison(x.shape, a.dtype) for x in (a.out, a.k, a.v))
    passed = {"dout": a.dout, "lse": a.lse}
    sums = {"delta": delta, "ddlse": ddlse, "ddelta": ddelta}
    first = passed | sums | a.items() | {"out": a.out, "dlse": a.dlse, "ddout": ddout}
    a.launch("sparse_double_backward_out", **a.inputs(), **first)
    second = passed | sums | a.lists() | {"gk": gk, "gv": gv}
    a.launch("sparse_double_backward_kv", **a.inputs(), **second)
    tangents = np.abs(np.where(a.dead, 0, a.ddlse))
    terms = np.einsum("ht,thd->d", tangents, np.abs(np.nan_to_num(a.dout.astype(float))))
    assert np.abs(a.fetch(gv)).max() <= np.finfo(np.float32).eps * terms.max()
    assert terms.max() > 1


@pytest.mark.parametrize("given", ["qkvg", "q", "v", "g", ""])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_a_cta_allocates_fits_into_static_shared_memory(dtype, given, monkeypatch):
    from rawattn.kernels_numba import common as common_numba
    from rawattn.kernels_numba import sparse_double_backward_kv

    if not common_numba.SIMULATED:
        pytest.skip("counts the arrays of the simulator")
    sizes = {}

    def array(self, shape, dtype):
        sizes[sys._getframe(1).f_lineno] = math.prod(shape) * np.dtype(dtype).itemsize
        return np.empty(shape, dtype)

    shared = common_numba.simulator_numba.kernelapi.FakeCUDAShared
    monkeypatch.setattr(shared, "array", array)
    for head_dims in [*((d, d) for d in range(8, 257, 8)), (8, 256), (192, 128), (72, 8)]:
        kernel, block = sparse_double_backward_kv.compiled(
            dtype, *head_dims, *(letter in given for letter in "qkvg")
        )
        numbers = {"num_heads_q": 1, "num_heads_kv": 1, "num_heads_sel": 1, "block_size": 16}
        numbers |= {"batch": 0, "total_k": 0}
        names = inspect.signature(kernel.fn).parameters
        sizes.clear()
        kernel[(1, 1), 1](*(numbers.get(name, np.zeros(1, np.int32)) for name in names))
        assert 8 * block < sum(sizes.values()) <= 48 * 1024
        assert block == 16 or dtype == "float64" or max(head_dims) > 64
