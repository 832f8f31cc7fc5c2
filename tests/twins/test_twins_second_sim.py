"""The Numba twins of second derivatives and forward mode against the reference, as test_twins_sim.

Each twin is fed by the reference. Where a query sees no key all that is of it, lse aside, is NaN:
what a kernel reads there it must not use.
"""

import importlib
import inspect
import math
import sys

import numpy as np
import pytest

from rawattn.reference import second
from tests.twins.test_twins_sim import MEMORIES, Arrays, Case

CAUSAL = (-1, 0)
STEMS = ("jvp", "double_backward_out", "double_backward_kv", "double_backward_q")

CASES = {  # and which of the three arrays of the direction are there
    "causal": (Case((17, 3, 16), (17, 3, 16), "float32", window=CAUSAL, poisoned=1, past=2), "qkv"),
    "gqa bfloat16": (Case((5, 0, 9), (19, 4, 9), "bfloat16", group=3, window=CAUSAL), "qkv"),
    "gqa double": (Case((7, 4), (3, 18), "float64", 2, 3, 16, no_lse=2), "qkv"),
    "window": (Case((20,), (20,), "float64", window=(3, 2), past=1), "qkv"),
    "left": (Case((18,), (20,), "float32", window=(2, -1)), "qkv"),
    "dead rows": (Case((20, 6), (4, 9), "float64", 1, 2, 8, 16, window=(1, 0)), "qkv"),
    "dead rows half": (Case((19,), (2,), "bfloat16", window=CAUSAL, past=20), "qkv"),
    "empty": (Case((0, 4, 0, 5, 2), (3, 0, 0, 5, 1), "float32", poisoned=3, past=1), "qkv"),
    "no queries": (Case((0, 0), (5, 12), "float32"), "qkv"),
    "no keys": (Case((5, 12), (0, 0), "float16"), "qkv"),
    "batch 0": (Case((), (), "float32", past=3), "qkv"),
    "strided": (Case((17,), (5,), "float16", 2, 1, 8, 16, (5, 0), past=2, strided=True), "qkv"),
    "q": (Case((5, 4), (4, 7), "float64", group=2, head_dim_v=16), "q"),
    "k": (Case((5, 4), (4, 7), "float16", group=2, window=CAUSAL, past=1), "k"),
    "v": (Case((5, 4), (4, 7), "float64", group=2, head_dim_v=16, past=1), "v"),
    "qk": (Case((9,), (10,), "bfloat16", head_dim=24, head_dim_v=8, poisoned=0), "qk"),
    "qv": (Case((9,), (5,), "float64", group=2, window=CAUSAL), "qv"),
    "kv": (Case((4,), (17,), "float32", group=2, window=(-1, 3)), "kv"),
    "nothing": (Case((5,), (6,), "float64", past=1), ""),
    "tile of 8": (Case((9,), (3,), "float32", head_dim=128, head_dim_v=136), "qkv"),
    "tile of 2": (Case((3,), (4,), "float64", head_dim=256, head_dim_v=256, window=CAUSAL), "qkv"),
}


class SecondArrays(Arrays):
    """A case's inputs with a direction (ddq, ddk, ddv), and what the reference makes of them."""

    def __init__(self, name, memory, with_dlse=True):
        case, given = CASES[name]
        super().__init__(case, memory)
        self.dlse = self.dlse if with_dlse else None
        self.dead = self.lse == -np.inf
        self.dead[:, self.cu_q[-1] :] = True
        alive, dout = ~self.dead.T, self.dout.astype(np.float64)
        rng = np.random.default_rng(len(name))

        def normal(like, letter):
            a = rng.standard_normal(like.shape).astype(self.dtype)
            a[np.isnan(like)] = np.nan
            return a if letter in given else None

        self.dd = [normal(*x) for x in ((self.q, "q"), (self.k, "k"), (self.v, "v"))]
        sequences = (self.cu_q, self.cu_k)
        with np.errstate(invalid="ignore"):  # the poisoned sequence
            out, self.tout, lse, self.tlse = second.jvp(
                self.q, self.k, self.v, *self.dd, *sequences, **self.options
            )
            np.testing.assert_array_equal(out, self.expected_out)
            np.testing.assert_array_equal(lse, self.expected_lse)
            arrays = (self.dout, self.q, self.k, self.v, self.out, self.lse, *sequences)
            self.ddout, self.ddlse, self.gq, self.gk, self.gv = second.double_backward(
                *self.dd, *arrays, dlse=self.dlse, **self.options
            )
            # what pass 1 makes of the rounded out that it is given
            rounded = self.out.astype(np.float64)
            surplus = self.ddlse.T[:, :, None] * (out - rounded)
            self.expected_ddout = self.ddout + np.where(alive[:, :, None], surplus, 0)
            self.delta = (dout * rounded).sum(axis=-1).T - (0 if self.dlse is None else self.dlse)
            self.ddelta = (dout * self.ddout).sum(axis=-1).T
            self.expected_ddelta = (dout * self.expected_ddout).sum(axis=-1).T
        for a in (self.q, self.dd[0], self.out, self.dout):
            if a is not None:
                a[self.dead.T] = np.nan
        if with_dlse:
            self.dlse[self.dead] = np.nan

    def inputs(self, of="dd"):
        parts = zip(("q", "k", "v"), self.dd, strict=True)
        return {"q": self.q, "k": self.k, "v": self.v} | {of + name: dd for name, dd in parts}

    def row_terms(self):
        """dout, lse, and delta, ddlse, ddelta as pass 1 leaves them, with NaN in dead rows."""
        terms = {"delta": self.delta, "ddlse": self.ddlse, "ddelta": self.ddelta}
        for name, a in terms.items():
            terms[name] = np.where(self.dead, np.nan, a).astype(self.real)
        return {"dout": self.dout, "lse": self.lse} | terms


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", [name for name in CASES if name != "gqa double"])
def test_jvp(name, memory):
    a = SecondArrays(name, memory)
    out, tout = a.poison(a.out.shape, a.dtype), a.poison(a.out.shape, a.dtype)
    lse, tlse = a.poison(a.lse.shape, a.real), a.poison(a.lse.shape, a.real)
    a.launch("jvp", **a.inputs("t"), out=out, tout=tout, lse=lse, tlse=tlse)
    a.compare(a.fetch(out), a.expected_out, a.cu_q)
    a.compare(a.fetch(tout), a.tout, a.cu_q)
    a.compare(a.fetch(lse).T, a.expected_lse.T, a.cu_q)
    a.compare(a.fetch(tlse).T, a.tlse.T, a.cu_q)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "name, with_dlse", [*((name, True) for name in CASES), ("dead rows", False), ("k", False)]
)
def test_double_backward_out(name, with_dlse, memory):
    a = SecondArrays(name, memory, with_dlse)
    ddout = a.poison(a.out.shape, a.dtype)
    ddlse, delta, ddelta = (a.poison(a.lse.shape, a.real) for _ in range(3))
    accum = a.poison((a.q.size,), a.real) if with_dlse else None
    a.launch(
        "double_backward_out",
        **a.inputs(),
        out=a.out,
        dout=a.dout,
        lse=a.lse,
        dlse=a.dlse,
        ddout=ddout,
        ddlse=ddlse,
        delta=delta,
        ddelta=ddelta,
        gq_accum=accum,
        gq_accum_size=a.q.size if with_dlse else 0,
    )
    if accum is not None:
        assert not a.fetch(accum).any()
    a.compare(a.fetch(ddout), a.expected_ddout, a.cu_q)
    a.compare(a.fetch(ddlse).T, a.ddlse.T, a.cu_q)
    a.compare(a.fetch(delta).T, np.where(a.dead, 0, a.delta).T, a.cu_q)
    a.compare(a.fetch(ddelta).T, np.where(a.dead, 0, a.expected_ddelta).T, a.cu_q)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", CASES)
def test_double_backward_kv(name, memory):
    a = SecondArrays(name, memory)
    atomic = name not in ("gqa bfloat16", "dead rows", "empty", "q", "v")
    accum = a.place(np.zeros(a.q.size, a.real)) if atomic else None
    gk, gv = a.poison(a.k.shape, a.dtype), a.poison(a.v.shape, a.dtype)
    results = {"gq_accum": accum, "gk": gk, "gv": gv}
    a.launch("double_backward_kv", **a.inputs(), **a.row_terms(), **results)
    a.compare(a.fetch(gk), a.gk, a.cu_k)
    a.compare(a.fetch(gv), a.gv, a.cu_k)
    if atomic:
        gq = a.fetch(accum).reshape(a.q.shape) * a.problem.softmax_scale
        a.compare(gq, a.gq, a.cu_q)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", CASES)
def test_double_backward_q(name, memory):
    a = SecondArrays(name, memory)
    gq = a.poison(a.q.shape, a.dtype)
    a.launch("double_backward_q", **a.inputs(), **a.row_terms(), gq=gq)
    a.compare(a.fetch(gq), a.gq, a.cu_q)


@pytest.mark.parametrize("given", ["qkv", "q", "v", ""])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stem", STEMS)
def test_what_a_cta_allocates_fits_into_static_shared_memory(stem, dtype, given, monkeypatch):
    from rawattn.kernels_numba import common as common_numba

    if not common_numba.SIMULATED:
        pytest.skip("counts the arrays of the simulator")
    twin, sizes = importlib.import_module(f"rawattn.kernels_numba.{stem}"), {}

    def array(self, shape, dtype):
        sizes[sys._getframe(1).f_lineno] = math.prod(shape) * np.dtype(dtype).itemsize
        return np.empty(shape, dtype)

    shared = common_numba.simulator_numba.kernelapi.FakeCUDAShared
    monkeypatch.setattr(shared, "array", array)
    for head_dims in [*((d, d) for d in range(8, 257, 8)), (8, 256), (192, 128), (72, 8)]:
        kernel, block = twin.compiled(
            dtype, *head_dims, False, *(letter in given for letter in "qkv")
        )
        numbers = {"num_heads_q": 1, "num_heads_kv": 1, "window_left": -1, "window_right": -1}
        numbers |= {"batch": 0, "total_q": 0, "total_k": 0, "softmax_scale": 1.0}
        numbers |= {"gq_accum_size": 0, "softcap": 0.0}
        names = inspect.signature(kernel.fn).parameters
        sizes.clear()
        kernel[(1, 1), 1](*(numbers.get(name, np.zeros(1, np.int32)) for name in names))
        assert 8 * block < sum(sizes.values()) <= 48 * 1024
        assert block == 16 or dtype == "float64" or max(head_dims) > 64
