"""The diagnosis on GPU candidates: right kernels are not accused, and it is short."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from rawattn import api
from rawattn.check.candidate import Candidate
from rawattn.check.cases import Case, standard
from rawattn.check.cli_diff import SECONDS_ON_GPU
from rawattn.check.diagnose.engine.effort import spent
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.judge.diagnosis import diagnose
from rawattn.check.diagnose.judge.failures import answers_of, explain_failures, question_of
from rawattn.check.peer import torch_attention
from rawattn.check.run import own
from rawattn.check.sparse import own_sparse
from rawattn.check.sparse_cases import SparseCase
from rawattn.variants.steps import SPARSE_STEPS, STEPS
from tests.shared.named_cases import CASES, SELECTED, SPARSE_CASES

on_gpu = pytest.mark.gpu

UNITS, CALLS = 6_000, 200  # of effort and of the candidate, which a diagnosis may take


def question(case: Case) -> Question:
    return question_of(case, clean=True)


def accusations(candidate: Candidate, asked: Question) -> list[str]:
    call = partial(answers_of, candidate)
    found = diagnose(asked, call(asked), call=call).findings
    return [str(finding) for finding in found if finding.bug != "rounding"]


@on_gpu
@pytest.mark.parametrize("name", CASES)
def test_our_kernels_are_not_accused(name: str) -> None:
    asked = question(CASES[name])
    for candidate in own("cuda", STEPS):
        assert not accusations(candidate, asked), candidate.name


@on_gpu
@pytest.mark.parametrize("name", SPARSE_CASES)
def test_our_sparse_kernels_are_not_accused(name: str) -> None:
    asked = question(SPARSE_CASES[name])
    for candidate in own_sparse("cuda", tuple(SPARSE_STEPS)):
        assert not accusations(candidate, asked), candidate.name


@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["unequal", "selected"])
def test_numba_kernels_are_not_accused(name: str, dtype: str) -> None:
    case = replace(CASES.get(name, SELECTED), dtype=dtype)
    sparse = isinstance(case, SparseCase)
    candidates = own_sparse("numba", tuple(SPARSE_STEPS)) if sparse else own("numba", STEPS)
    for candidate in candidates:
        assert not accusations(candidate, question(case)), candidate.name


@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["dense", "causal", "window", "odd"])
def test_torch_is_not_accused(name: str, dtype: str) -> None:
    pytest.importorskip("torch")
    case = replace(CASES[name], dtype=dtype, dlse=False)
    assert not accusations(torch_attention(), question(case))


def mistaken(*inputs: Any, **options: Any) -> Any:
    """A backward pass that is wrong in a way that no bug explains."""
    dq, dk, dv = api.backward(*inputs, **options)
    return [x * (1 + (x.reshape(-1) * 1e4 % 1).reshape(x.shape) / 4) for x in (dq, dk, dv)]


def doubled(*inputs: Any, **options: Any) -> Any:
    dq, dk, dv = api.backward(*inputs, **options)
    return dq, dk * 2, dv


@on_gpu
@pytest.mark.parametrize("backward", [mistaken, doubled])
def test_a_diagnosis_is_short(backward: Callable[..., Any]) -> None:
    """By what is counted, which other processes do not change."""
    calls = []

    def counted(*inputs: Any, **options: Any) -> Any:
        calls.append(len(inputs))
        return backward(*inputs, **options)

    candidate = Candidate("mistaken", "cupy", backward=counted)
    cases = [case for case in standard("large") if case.dtype == "bfloat16" and case.causal]
    began = spent()
    assert explain_failures(candidate, cases, seconds=SECONDS_ON_GPU).findings
    assert spent() - began < UNITS and len(calls) < CALLS
