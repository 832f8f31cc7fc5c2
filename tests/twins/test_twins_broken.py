"""What the Numba twins do with input that is broken: offsets, and numbers that are none.

A cu_seqlens that points past the tokens, falls or is negative gives wrong numbers at worst: in the
simulator every access of a kernel is checked here against the bounds of its array. A NaN or an
infinity in a query or in a key that it sees is a NaN in that row's results, not a row without keys.
"""

import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from rawattn.arrays import View, row_major
from rawattn.problem import Problem, Selection
from tests.shared import structs
from tests.shared.fake_gpu import shape_of

PROBLEM = Problem("float32", 2, 10, 20, 2, 1, 8, 8, -1, 0, 0.4, 0, -1)
SELECTION = Selection(1, 3, 16, own=True, chunk=4)
BROKEN = {
    "past the tokens": ([0, 4, 1000], [0, 7, 1000]),
    "past the tokens at once": ([0, 1000, 1000], [0, 1000, 2000]),
    "falling": ([0, 9, 3], [0, 19, 5]),
    "falling to the start": ([0, 10, 0], [0, 20, 0]),
    "negative": ([-9, 3, 10], [-30, -5, 20]),
    "all negative": ([-9, -5, -2], [-30, -20, -1]),
    "late": ([6, 8, 10], [17, 18, 20]),
    "queries alone": ([0, 5, 300], [0, 8, 20]),
    "keys alone": ([0, 5, 10], [0, 8, 700]),
    "of other lengths": ([0, 10, 10], [0, 0, 20]),
}
DENSE = ("forward", "jvp", "backward_preprocess", "backward_kv", "backward_q")
DENSE += ("backward_postprocess", "double_backward_out", "double_backward_kv", "double_backward_q")
DENSE += ("backward_sinks",)
LISTS = ("block_lists", "block_offsets", "block_queries", "block_order")
SPARSE = tuple(stem for stem in structs.STEMS if stem not in (*DENSE, *LISTS))


@pytest.fixture
def bounds(monkeypatch):
    """Every index of a kernel into an array of its call has to lie inside, and not wrap."""
    from rawattn.kernels_numba import common

    if not common.SIMULATED:
        pytest.skip("looks into the simulator")
    from numba.cuda.simulator.cudadrv.devicearray import FakeWithinKernelCUDAArray as Inside

    def checked(access):
        def within(self, index, *value):
            where = index if type(index) is tuple else (index,)
            shape = self._item._ary.shape  # self.shape takes longer than the rest of this
            for i, n in zip(where, shape, strict=True):
                if not 0 <= i < n:
                    raise AssertionError(f"{where} is outside {shape}")
            return access(self, index, *value)

        return within

    for name in ("__getitem__", "__setitem__"):
        monkeypatch.setattr(Inside, name, checked(getattr(Inside, name)))


def place(array):
    strides = row_major(array.shape)
    return View(array.ctypes.data, array.shape, strides, array.dtype.name, -1, array)


OPTIONS = ("sinks", "tsinks", "ddsinks", "seqused_k")


def arguments(stem, problem, arrays, rng):
    """An Args of arrays of the right shapes; those that are in ``arrays`` already are taken."""
    op = import_module(f"rawattn.ops.{stem}")
    values = {}
    for name, kind in structs.fields_of(stem):
        if name not in op.Args._fields:
            continue
        if name in OPTIONS and name not in arrays and stem != "backward_sinks":
            values[name] = None
            continue
        if kind != "Tensor" and not kind.endswith("*"):
            numbers = {"source": 0, "global_blocks": 0, "segment": 8, "scale": 0.5}
            numbers |= {"batch": 2, "total_rows": problem.total_q, "num_heads": 2}
            numbers |= {"total_q": problem.total_q, "num_heads_q": 2}
            values[name] = (
                numbers[name] if name in numbers else values[name.removesuffix("_size")].shape[0]
            )
            continue
        choice = SELECTION if stem in LISTS + SPARSE else None
        if stem == "backward_sinks" and name in ("sinks", "ddsinks", "grad"):
            arrays.setdefault(name, np.zeros(2, np.float32))
            values[name] = place(arrays[name])
            continue
        shape = shape_of("dq" if name in ("accum", "grad") else name, problem, choice, (8, 8))
        if stem.endswith("postprocess") and name == "accum" and stem in DENSE:
            shape = (int(np.prod(shape)),)
        if stem in SPARSE and name in ("dq_accum", "dk_accum", "dv_accum"):
            shape = (*shape[:2], 8)
        if name not in arrays:
            integers = kind.endswith("int*") or kind.endswith("void*")
            dtype = np.int32 if integers else np.float32
            arrays[name] = rng.standard_normal(shape).astype(dtype)
        values[name] = place(arrays[name])
    return op.Args(**values)


def launch(stem, args):
    choice = (SELECTION,) if stem in LISTS + SPARSE and "postprocess" not in stem else ()
    twin = import_module(f"rawattn.kernels_numba.{stem}")
    with np.errstate(all="ignore"):
        twin.launch(None, PROBLEM, *choice, args, stream=0)


def offsets(name):
    cu_q, cu_k = (np.array(x, np.int32) for x in BROKEN[name])
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "cu_seqlens": cu_q}


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("stem", DENSE)
def test_broken_offsets_stay_inside(stem, name):
    launch(stem, arguments(stem, PROBLEM, offsets(name), np.random.default_rng(0)))


def table(name, rng):
    """The arrays of a table of blocks, made by its kernels."""
    arrays = offsets(name)
    shape = (PROBLEM.total_q, 1, SELECTION.num_selected)
    arrays["block_indices"] = rng.integers(-1, 3, shape).astype(np.int32)
    arrays["lengths"] = np.zeros(shape_of("lengths", PROBLEM, SELECTION, (8, 8)), np.int32)
    arrays["cursor"] = np.zeros(2 + arrays["lengths"].size, np.int32)
    arrays["work"] = np.full((SELECTION.segments(PROBLEM) + 8, 4), -1, np.int32)
    for stem in LISTS:
        launch(stem, arguments(stem, PROBLEM, arrays, rng))
    return arrays


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("name", BROKEN)
def test_broken_offsets_of_a_selection_stay_inside(name):
    rng = np.random.default_rng(0)
    arrays = table(name, rng)
    for stem in SPARSE:
        given = arguments(stem, PROBLEM, dict(arrays), rng)
        launch(stem, given)
        if stem == "sparse_backward_kv":
            launch(stem, given._replace(dk_accum=None, dv_accum=None))


@pytest.mark.usefixtures("bounds")
def test_lists_longer_than_there_is_room_for_are_cut():
    arrays = {"lengths": np.full(shape_of("lengths", PROBLEM, SELECTION, (8, 8)), 25, np.int32)}
    arrays["cursor"] = np.zeros(2 + arrays["lengths"].size, np.int32)
    arrays["work"] = np.full((4, 4), -1, np.int32)
    launch("block_offsets", arguments("block_offsets", PROBLEM, arrays, np.random.default_rng(0)))
    places, stops = SELECTION.width * PROBLEM.total_q, arrays["starts"] + arrays["lengths"]
    assert arrays["lengths"].any() and (stops <= places).all() and (arrays["starts"] >= 0).all()
    work = arrays["work"]
    assert (work[:, 1] + work[:, 2] <= places).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("stem", ["forward", "jvp", "sparse_forward"])
def test_a_number_that_is_none_is_no_row_without_keys(stem, where, value):
    """It is in the results of the queries that see it, and of no other."""
    rng = np.random.default_rng(0)
    arrays = {
        name: np.array([0, 4, n], np.int32)
        for name, n in (("cu_seqlens_q", 10), ("cu_seqlens_k", 10))
    }
    shapes = {"q": (10, 2, 8), "k": (20, 1, 8)}
    arrays |= {
        name: np.abs(rng.standard_normal(s)).astype(np.float32) for name, s in shapes.items()
    }
    arrays[where][5, 0, 3] = value  # second query and key of the second sequence
    arrays["blocks"] = np.zeros((1, 10, SELECTION.width), np.int32)
    arrays["blocks"][:, :, 1:] = 2**31 - 1
    arrays["slots"] = np.zeros_like(arrays["blocks"])
    given = arguments(stem, replace(PROBLEM), arrays, rng)
    launch(stem, given)
    seen = np.zeros((2, 10), bool)
    seen[0, 5] = True
    if where == "k":
        seen[:, 5:] = True
    np.testing.assert_array_equal(np.isnan(arrays["lse"]), seen)
    np.testing.assert_array_equal(np.isnan(arrays["out"]).all(axis=2), seen.T)
    assert np.isfinite(arrays["lse"][~seen]).all()


def test_numba_compiles_beside_a_numpy_without_row_stack():
    """NumPy 2.5 has dropped a name that Numba looks up when it first compiles."""
    code = (
        "import numpy as np; vars(np).pop('row_stack', None)\n"
        "import rawattn.kernels_numba.common\n"
        "import numba.np.arrayobj"
    )
    environment = {"NUMBA_ENABLE_CUDASIM": "0", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
