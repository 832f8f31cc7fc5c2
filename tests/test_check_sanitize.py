"""tools/sanitize.py really runs what its visits say: every row of the table, every direction."""

import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
import sanitize
from rawattn.check.compiled import METHOD_STEPS, SECOND_STEPS, SHARED_STEPS
from rawattn.problem import Problem
from rawattn.variants import METHODS, TABLE, select


class OnDevice(np.ndarray):
    """A NumPy array that passes for a CuPy array."""

    def get(self) -> np.ndarray:
        return np.asarray(self)


class Recorder:
    """Stands in for rawattn's functions: notes which rows they would run, returns zeros."""

    def __init__(self) -> None:
        self.rows: set[str] = set()
        self.directions: set[tuple[bool, ...]] = set()
        self.spoilt, self.value = "", np.nan

    def run(self, step: str, like: tuple[Any, ...], options: dict[str, Any]) -> Any:
        q, k, v = like
        dtype = "bfloat16" if q.dtype == ml_dtypes.bfloat16 else str(q.dtype)
        sizes = (len(q), len(k), q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        problem = Problem(dtype, 4, *sizes, -1, -1, 1.0, 90, 0)
        kernels = (METHOD_STEPS | SECOND_STEPS).get(step, SHARED_STEPS[:1])
        shared = [name for name, _ in SHARED_STEPS[1:]] if step in METHODS else []
        if step == "second/atomic":
            shared = ["backward_postprocess"]
        by_size = step in ("jvp", "second/atomic")  # as api_second selects
        for stem in [name for name, _ in kernels] + shared:
            row = select(stem, problem, backend=options["backend"], by_size=by_size)
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


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name in ("forward", "backward", "jvp", "double_backward"):
        monkeypatch.setattr(rawattn, name, getattr(recorder, name), raising=False)
    cuda = SimpleNamespace(set_allocator=lambda allocator: None)
    cupy = SimpleNamespace(cuda=cuda, asarray=lambda array: array.view(OnDevice))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("RAWATTN_VARIANT", "")  # visit_all sets it
    return recorder


def test_every_row_runs_and_every_direction(recorder: Recorder) -> None:
    sanitize.visit_all()
    assert recorder.rows == {row.name for row in TABLE}
    parts = ["qkv", *sanitize.DIRECTIONS]
    assert recorder.directions == {tuple(name in part for name in "qkv") for part in parts}


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("step", ["forward", *sanitize.METHODS, *sanitize.SECOND])
def test_a_result_that_is_not_finite_ends_the_visit(
    step: str, value: float, recorder: Recorder
) -> None:
    recorder.spoilt, recorder.value = step, value
    with pytest.raises(RuntimeError, match="not finite"):
        sanitize.visit_all()


def test_most_visits_are_to_the_rows_that_large_problems_get() -> None:
    small = {row.name for row in TABLE if row.max_ctas}
    alone = [visit.row for visit in sanitize.visits() if small & set(visit.row.split(","))]
    assert set(alone) == small


def test_steps_are_those_of_the_table() -> None:
    assert sanitize.METHODS == METHODS and set(sanitize.SECOND) == set(SECOND_STEPS)
    assert set(sanitize.STEPS_OF) == {row.stem for row in TABLE}
    kernels = {**METHOD_STEPS, **SECOND_STEPS}
    for stem, steps in sanitize.STEPS_OF.items():
        for step in steps:
            assert stem.endswith("process") or stem in [name for name, _ in kernels[step]]
