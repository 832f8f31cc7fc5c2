"""Every Numba twin against the reference: in Numba's simulator, or on the GPU where there is one.

Each twin is fed by the reference, not by the twin before it, so that what is left between the two
is a float32 sum and one rounding; the bounds are that tight. The lengths sit around the tile of 16.
"""

import importlib
import math
import warnings
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from rawattn.arrays import View
from rawattn.problem import Problem
from rawattn.reference import dense

BOUNDS = {  # relative and absolute
    "float64": (1e-12, 1e-12),
    "float32": (1e-5, 1e-5),
    "float16": (2**-11 * 1.01, 2e-5),
    "bfloat16": (2**-8 * 1.01, 2e-5),
}


@dataclass(frozen=True)
class Case:
    """A packed problem with traps.

    ``poisoned`` is the index of a sequence of NaN, ``past`` counts NaN rows after the last one,
    ``no_lse`` is a query whose lse reaches the backward pass as -inf although it sees keys.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    dtype: str
    num_heads_kv: int = 1
    group: int = 1
    head_dim: int = 8
    head_dim_v: int = 8
    window: tuple[int, int] = (-1, -1)
    softmax_scale: float = 0.4
    poisoned: int = -1
    past: int = 0
    strided: bool = False
    no_lse: int | None = None


CASES = {
    "causal": Case((17, 3, 16), (17, 3, 16), "float32", window=(-1, 0), poisoned=1, past=2),
    "causal half": Case((18,), (18,), "float16", num_heads_kv=2, window=(-1, 0), past=1),
    "gqa bfloat16": Case((5, 0, 17), (21, 4, 17), "bfloat16", group=3, window=(-1, 0)),
    "gqa double": Case((7, 4), (3, 20), "float64", group=3, head_dim=16, no_lse=2),
    "window": Case((35,), (35,), "float32", window=(3, 2)),
    "left": Case((20, 18), (34, 18), "float64", window=(2, -1), past=3),
    "right": Case((34, 5), (20, 5), "float32", window=(-1, 4)),
    "own key only": Case((18,), (18,), "float64", window=(0, 0)),
    "dead rows": Case((33, 6), (4, 17), "float64", group=2, window=(1, 0), head_dim_v=16),
    "dead rows half": Case((19,), (2,), "bfloat16", window=(-1, 0), past=20),
    "empty": Case((0, 4, 0, 5, 2), (3, 0, 0, 5, 1), "float32", poisoned=3, past=1),
    "no queries": Case((0, 0), (5, 12), "float32", past=0),
    "no keys": Case((5, 12), (0, 0), "float32", past=0),
    "batch 0": Case((), (), "float32", past=3),
    "wide values": Case((9, 8), (9, 8), "float16", head_dim=24, head_dim_v=40, poisoned=0),
    "narrow values": Case((9,), (18,), "bfloat16", head_dim=40, head_dim_v=8),
    "strided": Case((18,), (17,), "float16", 2, 1, 8, 16, (5, 0), past=2, strided=True),
    "strided double": Case((6,), (7,), "float64", 2, 2, 16, 8, past=1, strided=True),
    "tile of 8": Case((9,), (10,), "float32", head_dim=192, head_dim_v=128, window=(-1, 0)),
    "tile of 4": Case((5,), (6,), "float64", head_dim=256, head_dim_v=256, window=(-1, 0)),
}


def cupy_with_gpu():
    try:
        import cupy
    except ImportError:
        return None
    return cupy if cupy.cuda.is_available() else None


MEMORIES = ["host", pytest.param("device", marks=pytest.mark.gpu)]


class Arrays:
    """One case's inputs, and Views of them in host or device memory."""

    def __init__(self, case, memory):
        self.case, self.cupy = case, cupy_with_gpu() if memory == "device" else None
        rng = np.random.default_rng(sum(case.lengths_q) + case.head_dim)
        past, heads = case.past, case.num_heads_kv * case.group
        self.cu_q, self.cu_k = (
            np.cumsum([0, *lengths]).astype(np.int32)
            for lengths in (case.lengths_q, case.lengths_k)
        )
        total_q, total_k = int(self.cu_q[-1]) + past, int(self.cu_k[-1]) + past
        self.problem = Problem(
            dtype=case.dtype,
            batch=len(case.lengths_q),
            total_q=total_q,
            total_k=total_k,
            num_heads_q=heads,
            num_heads_kv=case.num_heads_kv,
            head_dim=case.head_dim,
            head_dim_v=case.head_dim_v,
            window_left=case.window[0],
            window_right=case.window[1],
            softmax_scale=case.softmax_scale,
            arch=90 if self.cupy else 0,
            device=0 if self.cupy else -1,
        )
        self.dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
        self.real = np.dtype("float64" if case.dtype == "float64" else "float32")

        def normal(cu_seqlens, total, heads, columns):
            a = rng.standard_normal((total, heads, columns)).astype(self.dtype)
            a[cu_seqlens[-1] :] = np.nan
            if case.poisoned >= 0:
                a[cu_seqlens[case.poisoned] : cu_seqlens[case.poisoned + 1]] = np.nan
            return a

        self.q = normal(self.cu_q, total_q, heads, case.head_dim)
        self.k = normal(self.cu_k, total_k, case.num_heads_kv, case.head_dim)
        self.v = normal(self.cu_k, total_k, case.num_heads_kv, case.head_dim_v)
        self.dout = normal(self.cu_q, total_q, heads, case.head_dim_v)
        self.dlse = rng.standard_normal((heads, total_q)).astype(self.real)
        self.options = {"window": case.window, "softmax_scale": case.softmax_scale}
        with np.errstate(invalid="ignore"):  # the poisoned sequence
            out, lse = dense.forward(self.q, self.k, self.v, self.cu_q, self.cu_k, **self.options)
        self.expected_out, self.expected_lse = out, lse
        # what a backward kernel is given, with NaN where it has no business
        self.out, self.lse = out.astype(self.dtype), lse.astype(self.real)
        self.out[self.cu_q[-1] :] = np.nan
        self.lse[:, self.cu_q[-1] :] = np.nan
        if case.no_lse is not None:
            self.lse[:, case.no_lse] = -np.inf

    def expected_grads(self):
        arrays = (self.dout, self.q, self.k, self.v, self.out, self.lse, self.cu_q, self.cu_k)
        with np.errstate(invalid="ignore"):
            return dense.backward(*arrays, dlse=self.dlse, **self.options)

    def delta(self):
        """D as the reference has it, NaN past the last sequence."""
        product = (self.dout.astype(np.float64) * self.out.astype(np.float64)).sum(axis=-1)
        return (product.T - self.dlse).astype(self.real)

    def place(self, array):
        """A View of a copy of ``array``, within a larger array if the case is strided."""
        name = array.dtype.name
        bits = array.view(np.uint16) if name == "bfloat16" else array
        if self.case.strided and array.ndim == 3:
            larger = np.full((array.shape[0] + 1, array.shape[1] + 2, array.shape[2] + 8), 0x7FFF)
            larger = larger.astype(bits.dtype)  # NaN in 16 bits, and no use in any other dtype
            larger[1:, 1:-1, :-8] = bits
            index = np.s_[1:, 1:-1, :-8]
        else:
            larger, index = bits.copy(), np.s_[:]
        if self.cupy:
            owner = self.cupy.asarray(larger)[index]
            ptr = owner.data.ptr
        else:
            owner = (larger.view(array.dtype))[index]
            ptr = owner.ctypes.data
        strides = tuple(stride // array.itemsize for stride in owner.strides)
        return View(ptr, array.shape, strides, name, self.problem.device, owner)

    def poison(self, shape, dtype):
        """A View of an output whose old content must not shine through."""
        return self.place(np.full(shape, np.nan, dtype))

    def fetch(self, view):
        """The content of a View as float64."""
        host = view.owner.get() if self.cupy else view.owner
        return (host.view(self.dtype) if view.dtype == "bfloat16" else host).astype(np.float64)

    @property
    def stream(self):
        return self.cupy.cuda.get_current_stream().ptr if self.cupy else 0

    def launch(self, stem, **given):
        """Launch a twin; arrays are placed, what is not given is None, but for cu_seqlens."""
        op = importlib.import_module(f"rawattn.ops.{stem}")
        twin = importlib.import_module(f"rawattn.kernels_numba.{stem}")
        values = dict.fromkeys(op.Args._fields)
        values |= {name: value for name, value in self.packed().items() if name in values}
        values |= given
        for name, value in values.items():
            values[name] = self.place(value) if isinstance(value, np.ndarray) else value
        of_blocks = "num_heads_sel" in dict(op.LAYOUT.fields)
        choice = (self.selection,) if of_blocks else ()
        twin.launch(None, self.problem, *choice, op.Args(**values), stream=self.stream)

    def packed(self):
        return {"cu_seqlens_q": self.cu_q, "cu_seqlens_k": self.cu_k}

    def compare(self, got, expected, cu_seqlens):
        """Equal within the bounds of the dtype, rows (the first axis) of the NaN sequence aside."""
        kept = np.ones(len(expected), dtype=bool)
        if self.case.poisoned >= 0:
            kept[cu_seqlens[self.case.poisoned] : cu_seqlens[self.case.poisoned + 1]] = False
        relative, absolute = BOUNDS[self.case.dtype]
        np.testing.assert_allclose(got[kept], expected[kept], rtol=relative, atol=absolute)


# the half of a twin that is the same with and without atomic adds needs no second look in each case
FEW = ("gqa bfloat16", "dead rows", "empty", "no queries", "strided")
ATOMIC = [(name, True) for name in CASES] + [(name, False) for name in FEW]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", CASES)
def test_forward(name, memory):
    a = Arrays(CASES[name], memory)
    out, lse = a.poison(a.out.shape, a.dtype), a.poison(a.lse.shape, a.real)
    a.launch("forward", q=a.q, k=a.k, v=a.v, out=out, lse=lse)
    a.compare(a.fetch(out), a.expected_out, a.cu_q)
    a.compare(a.fetch(lse).T, a.expected_lse.T, a.cu_q)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("with_dlse", [True, False])
@pytest.mark.parametrize("name", [*FEW, "gqa double", "tile of 8"])
def test_backward_preprocess(name, with_dlse, memory):
    a = Arrays(CASES[name], memory)
    delta, accum = a.poison(a.lse.shape, a.real), a.poison(a.q.size, a.real)
    a.launch(
        "backward_preprocess",
        out=a.out,
        dout=a.dout,
        dlse=a.dlse if with_dlse else None,
        delta=delta,
        dq_accum=accum if with_dlse else None,
        total_q=a.problem.total_q,
        num_heads_q=a.problem.num_heads_q,
        dq_accum_size=a.q.size if with_dlse else 0,
    )
    expected = a.delta() if with_dlse else a.delta() + a.dlse
    np.testing.assert_allclose(a.fetch(delta), expected, rtol=1e-5, atol=1e-5)
    assert (a.fetch(accum) == 0).all() if with_dlse else np.isnan(a.fetch(accum)).all()


def row_inputs(a):
    names = {"q": a.q, "k": a.k, "v": a.v, "dout": a.dout, "lse": a.lse}
    return names | {"delta": a.delta()}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name, atomic", ATOMIC)
def test_backward_kv(name, atomic, memory):
    a = Arrays(CASES[name], memory)
    expected_dq, expected_dk, expected_dv = a.expected_grads()
    accum = a.place(np.zeros(a.q.size, a.real)) if atomic else None
    dk, dv = a.poison(a.k.shape, a.dtype), a.poison(a.v.shape, a.dtype)
    a.launch("backward_kv", **row_inputs(a), dq_accum=accum, dk=dk, dv=dv)
    a.compare(a.fetch(dk), expected_dk, a.cu_k)
    a.compare(a.fetch(dv), expected_dv, a.cu_k)
    if atomic:
        dq = a.fetch(accum).reshape(a.q.shape) * a.problem.softmax_scale
        a.compare(dq, expected_dq, a.cu_q)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name, atomic", ATOMIC)
def test_backward_q(name, atomic, memory):
    a = Arrays(CASES[name], memory)
    expected_dq, expected_dk, expected_dv = a.expected_grads()
    dk_accum = a.place(np.zeros(a.k.size, a.real)) if atomic else None
    dv_accum = a.place(np.zeros(a.v.size, a.real)) if atomic else None
    dq = a.poison(a.q.shape, a.dtype)
    a.launch("backward_q", **row_inputs(a), dq=dq, dk_accum=dk_accum, dv_accum=dv_accum)
    a.compare(a.fetch(dq), expected_dq, a.cu_q)
    if atomic:
        dk = a.fetch(dk_accum).reshape(a.k.shape) * a.problem.softmax_scale
        a.compare(dk, expected_dk, a.cu_k)
        a.compare(a.fetch(dv_accum).reshape(a.v.shape), expected_dv, a.cu_k)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_backward_postprocess_rounds_to_nearest_even(dtype, memory):
    """Ties, denormals, infinities, NaN of either sign, overflow; rows past the end become zero."""
    a = Arrays(Case((7, 4), (7, 4), dtype, num_heads_kv=2, past=2), memory)
    bits = np.random.default_rng(0).integers(0, 2**32, a.k.size, dtype=np.uint32)
    special = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]
    special += [0x7F800000, 0xFF800000, 0x80000000, 1, 0x00008000, 0x00018000, 0x477FF000]
    bits[: len(special)] = special
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        accum = bits.view(np.float32).astype(a.real)
        expected = (accum * a.real.type(0.5)).astype(a.dtype).astype(np.float64)
        expected = expected.reshape(a.k.shape)
        expected[a.cu_k[-1] :] = 0
        grad = a.poison(a.k.shape, a.dtype)
        numbers = {"batch": 2, "total_rows": len(a.k), "num_heads": 2, "scale": 0.5}
        a.launch("backward_postprocess", accum=accum, grad=grad, cu_seqlens=a.cu_k, **numbers)
    np.testing.assert_array_equal(a.fetch(grad), expected)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (2, -1), (-1, 3), (1, 2), (40, 40)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(6, 6), (4, 9), (9, 4), (1, 5)])
def test_ranges_are_those_of_the_mask(seqlen_q, seqlen_k, window):
    """For every run of queries the keys between the first and the last that any of them sees."""
    from rawattn.kernels_numba import common as common_numba

    key_range, query_range, visible = (
        getattr(f, "py_func", f)
        for f in (common_numba.key_range, common_numba.query_range, common_numba.visible)
    )
    mask, shift = dense.allowed(seqlen_q, seqlen_k, window), seqlen_k - seqlen_q
    for i, j in np.ndindex(mask.shape):
        assert visible(i, j, shift, *window) == mask[i, j]
    for seen, length, other, bounds in (
        (mask, seqlen_q, seqlen_k, key_range),
        (mask.T, seqlen_k, seqlen_q, query_range),
    ):
        for start in range(length):
            for stop in range(start + 1, length + 1):
                first, last = bounds(start, stop, shift, other, *window)
                partners = np.flatnonzero(seen[start:stop].any(axis=0))
                if len(partners):
                    assert (first, last) == (partners[0], partners[-1] + 1)
                else:
                    assert first >= last


def test_the_grid_has_a_cta_for_every_tile():
    from rawattn.kernels_numba.common import tiles_bound

    for lengths in [(), (1,), (16,), (17, 17, 17), (1,) * 40, (0, 31, 0), (15, 16, 33)]:
        for past in (0, 1, 16, 17):
            tiles = sum(math.ceil(n / 16) for n in (*lengths, past))
            assert tiles_bound(sum(lengths) + past, len(lengths), 16) >= max(tiles, 1)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_tiles_fit_into_static_shared_memory(dtype):
    from rawattn.kernels_numba.common import LANES, accumulator, block_rows

    itemsize = np.dtype(accumulator(dtype)).itemsize
    for head_dim in range(LANES, 257, LANES):
        for head_dim_v in range(LANES, 257, LANES):
            for widths in (
                (head_dim, max(head_dim, head_dim_v)),
                (head_dim, head_dim, head_dim_v, head_dim_v),
            ):
                block = block_rows(dtype, *widths)
                numbers = sum(block * (width + 1) for width in widths)
                numbers += 2 * block * (block + 1) + 2 * block
                assert numbers * itemsize <= 48 * 1024
