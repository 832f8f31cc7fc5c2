"""tools/sanitize.py really runs what its visits say: every row of the table, every direction."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
import sanitize
import visits
import visits_sparse
from rawattn.problem import Problem, Selection
from rawattn.variants import METHODS, TABLE, select
from rawattn.variants.steps import LISTS, SECOND, STEPS, Step

LIST_STEMS = tuple(step.stem for step in LISTS)


class OnDevice(np.ndarray):
    """A NumPy array that passes for a CuPy array."""

    def get(self) -> np.ndarray:
        return np.asarray(self)


class Recorder:
    """Stands in for rawattn's functions: notes which rows they would run, returns zeros."""

    def __init__(self) -> None:
        self.rows: set[str] = set()
        self.directions: set[tuple[bool, ...]] = set()
        self.sparse: set[tuple[str, str, bool]] = set()  # rows, with which step and gate
        self.spoilt, self.value = "", np.nan

    def run(self, step: str, like: tuple[Any, ...], options: dict[str, Any]) -> Any:
        q, k, v = like
        dtype = "bfloat16" if q.dtype == ml_dtypes.bfloat16 else str(q.dtype)
        sizes = (len(q), len(k), q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        softcap = options["softcap"]
        problem = Problem(dtype, 4, *sizes, -1, -1, 1.0, 90, 0, softcap=softcap)
        by_size = step in ("jvp", "second/atomic")  # as api_second selects
        for kernel in STEPS.get(step, (Step("forward"),)):
            if kernel.of_sinks and "sinks" not in options:
                continue
            row = select(kernel.stem, problem, backend=options["backend"], by_size=by_size)
            self.rows.add(row.name)
        zeros = np.zeros_like(q).view(OnDevice)
        if step == self.spoilt:
            zeros[-1] = self.value
        return zeros

    def forward(self, q: Any, k: Any, v: Any, cu: Any, *, return_lse: bool, **options: Any) -> Any:
        out = self.run("forward", (q, k, v), options)
        return out, np.full(q.shape[1::-1], -np.inf).view(OnDevice)

    def backward(self, dout: Any, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        return (self.run(options["method"], (q, k, v), options),) * 3

    def jvp(self, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        self.directions.add(tuple(part is not None for part in rest[:3]))
        return (self.run("jvp", (q, k, v), options),) * 4

    def double_backward(self, *arrays: Any, **options: Any) -> Any:
        self.directions.add(tuple(part is not None for part in arrays[:3]))
        step = "second/two_pass" if options["deterministic"] else "second/atomic"
        return (self.run(step, arrays[4:7], options),) * 5

    def of_mask(self, cu_seqlens: Any, block_mask: Any, **options: Any) -> Any:
        assert len(block_mask) == sum(visits.LENGTHS_Q) or len(block_mask) == cu_seqlens[-1]
        assert options["total_k"] in (sum(visits.LENGTHS_K), options["cu_seqlens_k"][-1])
        return np.zeros(block_mask.shape, np.int32)

    def of_pattern(self, cu_seqlens: Any, total_q: int, num_heads_sel: int, **options: Any) -> Any:
        assert total_q in (sum(visits.LENGTHS_Q), cu_seqlens[-1])
        assert options["total_k"] in (sum(visits.LENGTHS_K), options["cu_seqlens_k"][-1])
        return np.zeros((total_q, num_heads_sel, 3), np.int32)

    def run_sparse(self, step: str, like: tuple[Any, ...], chosen: Any, options: Any) -> Any:
        (q, k, v), gate = like, options["block_scale"]
        assert len(chosen) == len(q) and (gate is None or gate.shape == chosen.shape)
        dtype = "bfloat16" if q.dtype == ml_dtypes.bfloat16 else str(q.dtype)
        sizes = (len(q), len(k), q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        problem = Problem(dtype, 4, *sizes, -1, -1, 1.0, 90, 0)
        selection = Selection(*chosen.shape[1:], options["block_size"], True, 256)
        forward = (Step("block_lists"), Step("sparse_forward"))
        for kernel in visits_sparse.STEPS.get(step, forward):
            row = select(kernel.stem, problem, backend=options["backend"], selection=selection)
            self.rows.add(row.name)
            self.sparse.add((row.name, step, gate is not None))
        zeros = np.zeros_like(q).view(OnDevice)
        if step == self.spoilt:
            zeros[-1] = self.value
        return zeros

    def sparse_forward(
        self, q: Any, k: Any, v: Any, cu: Any, chosen: Any, *, return_lse: bool, **options: Any
    ) -> Any:
        out = self.run_sparse("sparse_forward", (q, k, v), chosen, options)
        return out, np.full(q.shape[1::-1], -np.inf).view(OnDevice)

    def sparse_backward(self, dout: Any, *rest: Any, deterministic: bool, **options: Any) -> Any:
        step = "sparse/deterministic" if deterministic else "sparse/atomic"
        return (*(self.run_sparse(step, rest[:3], rest[-1], options),) * 3, None)

    def sparse_jvp(self, q: Any, k: Any, v: Any, *rest: Any, tblock_scale: Any, **options: Any):
        assert (tblock_scale is None) == (options["block_scale"] is None)
        return (self.run_sparse("sparse/jvp", (q, k, v), rest[-1], options),) * 4

    def sparse_double_backward(self, *arrays: Any, ddblock_scale: Any, **options: Any) -> Any:
        assert (ddblock_scale is None) == (options["block_scale"] is None)
        return (self.run_sparse("sparse/second", arrays[4:7], arrays[-1], options),) * 6


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    dense = ("forward", "backward", "jvp", "double_backward")
    for name in (*dense, *(f"sparse_{name}" for name in dense)):
        monkeypatch.setattr(rawattn, name, getattr(recorder, name), raising=False)
    for name in ("of_mask", "of_pattern"):
        monkeypatch.setattr(rawattn.BlockTable, name, getattr(recorder, name))
    cuda = SimpleNamespace(set_allocator=lambda _: None, using_allocator=lambda _: nullcontext())
    cupy = SimpleNamespace(cuda=cuda, asarray=lambda array: array.view(OnDevice))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("RAWATTN_VARIANT", "")  # visit_all sets it
    return recorder


def test_every_row_runs_and_every_direction(recorder: Recorder) -> None:
    for part in ("1/3", "2/3", "3/3"):
        sanitize.visit_all(part)
        assert recorder.rows < {row.name for row in TABLE} or part == "3/3"
    assert recorder.rows == {row.name for row in TABLE}
    parts = ["qkv", *visits.DIRECTIONS]
    assert recorder.directions == {tuple(name in part for name in "qkv") for part in parts}


def test_every_sparse_row_runs_in_each_of_its_steps_with_and_without_a_gate(
    recorder: Recorder,
) -> None:
    visits_sparse.visit_sparse()
    rows = {row.name: row.stem for row in TABLE if row.kernel.sparse}
    for name, stem in rows.items():
        steps = visits.steps_of(stem, visits_sparse.STEPS)
        for step in steps if stem not in ("sparse_forward", "block_lists") else ["sparse_forward"]:
            gates = {
                gate for row, with_step, gate in recorder.sparse if (row, with_step) == (name, step)
            }
            assert gates == {False, True}, (name, step)


def test_the_last_visits_have_two_chunks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits.Arrays, "put", lambda arrays, values: values)
    arrays = visits.Arrays()
    for visit in visits_sparse.sparse_visits()[-2:]:
        offsets = (arrays.offsets(lengths) for lengths in (visit.lengths_q, visit.lengths_k))
        visit = replace(visit, backend=None)
        table, slots = visits_sparse.selection_of(visit, arrays, *offsets)
        assert len(table.starts) == 2 and slots == table.num_selected


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize(
    "step", ["forward", *METHODS, *visits.SECOND, "sparse_forward", *visits_sparse.STEPS]
)
def test_a_result_that_is_not_finite_ends_the_visit(
    step: str, value: float, recorder: Recorder
) -> None:
    recorder.spoilt, recorder.value = step, value
    visit = visits_sparse.visit_sparse if step.startswith("sparse") else visits.visit_dense
    with pytest.raises(RuntimeError, match="not finite"):
        visit()


def test_most_visits_are_to_the_rows_that_large_problems_get() -> None:
    small = {row.name for row in TABLE if row.when.max_ctas or row.when.short}
    alone = [visit.row for visit in visits.visits() if small & set(visit.row.split(","))]
    assert set(alone) == small


def test_every_kernel_beside_the_forwards_is_in_a_step() -> None:
    met = {
        step.stem for steps in (STEPS, visits_sparse.STEPS) for s in steps.values() for step in s
    }
    assert met | {"forward"} == {row.stem for row in TABLE}
    assert set(STEPS) == {*METHODS, *SECOND} and visits.SECOND == SECOND
