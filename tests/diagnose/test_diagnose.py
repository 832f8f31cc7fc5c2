"""The diagnosis as a whole: planted bugs are named, right implementations are not accused.

``tools/trials.py`` runs many more of the same trials.
"""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn.check.cases import dtype_of
from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.judge.cut import SCORES, cost, cut
from rawattn.check.diagnose.judge.diagnosis import diagnose, reference_of
from rawattn.check.diagnose.judge.failures import answers_of
from rawattn.check.machine import use_simulator
from rawattn.check.peer import torch_attention
from rawattn.check.run import own
from tests.diagnose import plain
from tests.diagnose.expected import KINDS
from tests.diagnose.planted import first as planted
from tests.diagnose.problems import DTYPES, draw
from tests.diagnose.test_planted import MODULES
from tools import trials

FILES = {plant.bug: module.__name__ for module in MODULES for plant in module.PLANTED}


def question_of(lengths: tuple[int, ...] = (20, 30, 46), dtype: str = "float64") -> Question:
    rng = np.random.default_rng(0)
    total, offsets = sum(lengths), np.concatenate([[0], np.cumsum(lengths)])

    def draw(heads: int) -> np.ndarray:
        return rng.standard_normal((total, heads, 16)).astype(dtype_of(dtype))

    q, k, v, dout = draw(4), draw(2), draw(2), draw(4)
    return Question(q, k, v, offsets, offsets, causal=True, dout=dout)


@pytest.mark.parametrize("bug", sorted(FILES)[::2])
def test_names_the_planted_bug(bug: str) -> None:
    """One variant and problem of every other class; tools/trials.py has all of them."""
    file = FILES[bug]
    variants = [i for i, plant in enumerate(sys.modules[file].PLANTED) if plant.bug == bug]
    found = trials.trial(file, variants[len(bug) % len(variants)], seed=len(file))
    assert found.right, found


@pytest.mark.parametrize("kind", planted.RIGHT, ids=lambda kind: kind.variant)
def test_does_not_accuse_what_is_right(kind: planted.Planted) -> None:
    found = trials.right_trial(kind, seed=len(kind.variant))
    assert found.right, found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_does_not_accuse_derivatives_options_and_lists(kind: str, dtype: np.dtype[Any]) -> None:
    question = draw(KINDS[kind], np.random.default_rng(len(kind)), dtype)
    found = diagnose(question, plain.answers(None, question)).findings
    assert not [finding for finding in found if finding.bug != "rounding"]


def test_what_fits_nothing_is_not_fitted() -> None:
    question, rng = question_of((9, 20)), np.random.default_rng(1)
    noise = {n: rng.standard_normal(x.shape) for n, x in solve(question, "forward").items()}
    assert {finding.bug for finding in diagnose(question, noise).findings} == {"other-data"}


def test_two_bugs_are_both_named() -> None:
    question = question_of()
    right = solve(question, "forward") | solve(question, "backward")
    wrong = right | {"dq": right["dq"] * 4, "lse": right["lse"] / np.log(2)}
    del wrong["out"]  # so that the backward pass has the right ones
    named = {finding.bug for finding in diagnose(question, wrong).findings}
    assert named == {"output-scale", "lse-base-2"}


def test_both_sides_are_judged() -> None:
    question = question_of()
    right = solve(question, "forward") | solve(question, "backward")
    wrong = right | {"dk": right["dk"] / question.scale}
    found = diagnose(question, right, side="A", against=("B", wrong))
    assert [(finding.side, finding.bug) for finding in found.findings] == [("B", "output-scale")]
    assert any(level.tensor == "dk" and level.slope == pytest.approx(4) for level in found.levels)


def test_zeros_on_both_sides_are_vacuous() -> None:
    """Gradients too small for float16: a comparison of them compares zeros."""
    question = question_of(dtype="float16")
    question = replace(question, dout=question.dout.astype(np.float64) * 1e-12)
    right = {name: x for name, x in solve(question, "backward").items() if name != "delta"}
    found = diagnose(question, {name: x.astype(np.float16) for name, x in right.items()})
    assert [finding.bug for finding in found.findings] == ["vacuous"]


def test_an_array_of_another_shape_is_said() -> None:
    question = question_of()
    found = diagnose(question, solve(question, "forward") | {"dq": np.zeros((3, 4, 16))})
    assert [finding.bug for finding in found.findings] == ["unknown"]
    assert "dq has shape (3, 4, 16), not (96, 4, 16)" in found.findings[0].evidence[0]
    found = diagnose(question, solve(question, "forward") | {"dq": np.zeros((96, 4, 16), bool)})
    assert found.findings[0].title == "dq has another form than it must have"


def test_what_overflows_for_a_wrong_lse_is_not_judged() -> None:
    """A backward pass is right for the lse that it had: inf in its gradients is no bug of it."""
    question = question_of(dtype="float16")
    right = solve(question, "forward")
    given = right["out"].astype(np.float16), (right["lse"] / np.log(2) - 12).astype(np.float32)
    with np.errstate(over="ignore"):
        found = {
            n: x.astype(np.float16) for n, x in solve(question, "backward", given=given).items()
        }
    assert not np.isfinite(found["dv"]).all() and not np.isnan(found["dv"]).any()
    del found["delta"]
    told = diagnose(question, {"out": given[0], "lse": given[1], **found})
    assert {finding.where.partition(":")[0] for finding in told.findings} <= {
        "forward pass",
        "forward",
    }
    assert any("not judged" in fact for fact in told.facts)


def test_an_intermediate_held_constant() -> None:
    """The first backward of seed 001's fast modes: P was saved, and has no derivative."""
    torch = pytest.importorskip("torch")
    question = replace(question_of((24,)), causal=False)
    rng = np.random.default_rng(1)
    of_q, of_k, of_v = (rng.standard_normal(x.shape) for x in (question.q, question.k, question.v))
    question = replace(question, tq=of_q, tk=of_k, tv=of_v)

    def by_head(x: np.ndarray, repeats: int = 1) -> "torch.Tensor":
        tensor = torch.from_numpy(x.swapaxes(0, 1).copy()).repeat_interleave(repeats, 0)
        return tensor.requires_grad_()

    q, dout = by_head(question.q), by_head(question.dout)
    k, v = by_head(question.k, 2), by_head(question.v, 2)
    s = question.scale
    P = torch.softmax(s * q @ k.mT, -1)
    out = P @ v
    P, delta = P.detach(), (dout * out).sum(-1, keepdim=True).detach()
    dS = P * (dout @ v.mT - delta)
    first = s * dS @ k, s * dS.mT @ q, P.mT @ dout
    moved = by_head(of_q), by_head(of_k, 2), by_head(of_v, 2)
    ddout, gq, gk, gv = torch.autograd.grad(first, (dout, q, k, v), moved)

    def back(x: "torch.Tensor", group: int = 1) -> np.ndarray:
        array = x.numpy().reshape(-1, group, *x.shape[1:]).sum(axis=1)
        return np.ascontiguousarray(array.swapaxes(0, 1))

    answers = {"ddout": back(ddout), "gq": back(gq), "gk": back(gk, 2), "gv": back(gv, 2)}
    finding = diagnose(question, answers).findings[0]
    assert finding.bug in ("second-frozen-p", "second-frozen-delta")
    assert "held constant" in finding.title


def test_a_large_problem_is_cut() -> None:
    question = question_of((700, 40, 30, 700))
    right = solve(question, "forward")
    part, answers, said = cut(question, right)
    assert sum(cost(part, b) for b in range(part.batch)) <= SCORES
    assert part.lengths_q == (40, 30) and "1 to 2" in said
    assert np.allclose(answers["out"], reference_of(part, answers)["out"])
    assert not diagnose(question, right).findings


def theirs(dtype: str, **changes: Any) -> Question:
    """A question with unequal lengths, of which one is 0."""
    rng = np.random.default_rng(len(dtype))
    offsets_q, offsets_k = np.array([0, 19, 19, 50, 66]), np.array([0, 33, 40, 80, 96])

    def draw(rows: int, heads: int) -> np.ndarray:
        return rng.standard_normal((rows, heads, 32)).astype(dtype_of(dtype))

    q, dout, k, v = draw(66, 4), draw(66, 4), draw(96, 2), draw(96, 2)
    return Question(q, k, v, offsets_q, offsets_k, dout=dout, **changes)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window": (7, 3)}, {"softmax_scale": 0.5}], ids=str
)
def test_torch_is_not_accused(dtype: str, mask: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    question = theirs(dtype, **mask)
    answers = answers_of(torch_attention(), question)
    assert set(answers) >= {"out", "dq", "dk", "dv"}
    assert not [f for f in diagnose(question, answers).findings if f.bug != "rounding"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_our_kernels_are_not_accused(dtype: str) -> None:
    """The Numba twins, in the simulator where there is no GPU."""
    use_simulator()
    question = question_of((11, 0, 17), dtype)
    for candidate in own("numba", ("atomic_dkv",)):
        found = diagnose(question, answers_of(candidate, question)).findings
        assert not [finding for finding in found if finding.bug != "rounding"]
