"""The CUDA sources with softcap, sinks and seqused_k, run on the CPU.

Compilers take the time, so every kernel is compiled for few problems: the forward for all of them,
the ways of the backward for one each, and what is beyond for one with "all" options, and for every
other one with less. Hopper's own kernels are of first order; the rest is that of the sm80 family.
"""

import sys
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn.variants import METHODS
from tests.shared import emulated, fake_gpu
from tests.shared.optional import OPTIONS, Problem, Run, runs, wrong

BOUNDS = {np.float16: 4e-3, ml_dtypes.bfloat16: 3e-2}
LENGTHS = ((70, 3, 0, 5, 133), (133, 0, 2, 5, 70), (100, 0, 2, 9, 60))
PROBLEMS = {
    "64": Problem(*LENGTHS, 64, 64),
    "128": Problem(*LENGTHS, 128, 64, window=(-1, -1), group=1),
    "wide": Problem(*LENGTHS, 192, 256, window=(40, 20), group=1, num_heads_kv=1),
    "narrow": Problem(*LENGTHS, 40, 32, scale=10.0, group=3, num_heads_kv=1, past=0),
}
FAMILIES = ("sm80", "sm90")
KERNELS = {name: max(i - 1, 0) for i, name in enumerate(OPTIONS)}  # those of both softcaps are one


def turn_of(name: str, problem: str) -> int:
    return KERNELS[name] + list(PROBLEMS).index(problem)


CASES = [
    (name, problem, family)
    for name, problem, family in product(OPTIONS, PROBLEMS, FAMILIES)
    if family == "sm80" or turn_of(name, problem) % 2 == 0
]
ON_HOPPER = ("forward", METHODS[0], METHODS[-1])


def is_chosen(case: tuple[str, str, str], number: int, run: Run) -> bool:
    """Whether the run with this number, of ``optional.runs``, is one of a case."""
    name, problem, family = case
    if family == "sm90" or run.name == "forward":
        return run.name in ON_HOPPER
    turns = len(PROBLEMS) * (1 if run.name in METHODS or name == "all" else 2)
    return (number + turn_of(name, problem)) % turns == 0


def dtype_of(case: tuple[str, str, str]) -> Any:
    name, problem, _ = case
    return list(BOUNDS)[(KERNELS[name] + list(PROBLEMS).index(problem) // 2) % 2]


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_kernels(
    case: tuple[str, str, str], kernels: emulated.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, problem, family = case
    monkeypatch.setattr(fake_gpu.GPU, "compute_capability", family.removeprefix("sm"))
    dtype = dtype_of(case)
    place, texts = sys.modules["cupy"].asarray, []
    given = runs(PROBLEMS[problem], dtype, OPTIONS[name], place, backend="cuda")
    for number, run in enumerate(given):
        if is_chosen(case, number, run):
            texts += wrong(run, BOUNDS[dtype])
    assert not texts, "\n".join(texts)
    forwards = [row for row, _ in kernels.launched if row.startswith("forward")]
    assert forwards and all(family in row for row in forwards)


def test_every_run_is_chosen() -> None:
    """Beside each option every function, and beside all of them every run."""
    for name in OPTIONS:
        own = [case for case in CASES if case[0] == name]
        given = list(enumerate(runs(PROBLEMS["narrow"], np.float16, OPTIONS[name], np.asarray)))
        chosen = {run.name for number, run in given if any(is_chosen(c, number, run) for c in own)}
        assert {*METHODS, "forward"} <= chosen
        assert {run.split()[0] for run in chosen - {*METHODS}} == {
            "forward",
            "jvp",
            "double_backward",
        }
        assert name != "all" or chosen == {run.name for _, run in given}
        for family in FAMILIES:
            assert {dtype_of(case) for case in own if case[2] == family} == set(BOUNDS)
