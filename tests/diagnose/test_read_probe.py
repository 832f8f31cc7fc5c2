"""What is asked of a function, entry by entry: P and dS as they are; right functions stay right."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rawattn.check.candidate import Candidate
from rawattn.check.cases import standard
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.judge.failures import _read, answers_of, question_of, small
from rawattn.check.diagnose.read import probe
from tests.diagnose.reading import Plain

CASES = {case.name: case for case in standard("small")}
NAMES = ("group3", "unequal-causal", "window", "window-left-open", "decode", "dim-40-72", "scale")


def candidate(plain: Plain, stage: str = "forward") -> Candidate:
    return Candidate("plain", "numpy", **{stage: getattr(plain, stage)})


def ask(plain: Plain, stage: str) -> probe.Ask:
    return partial(answers_of, candidate(plain, stage))


def question(name: str = "group3", dtype: str = "float64", **changes: Any) -> Question:
    case = replace(small(CASES[name]), dtype=dtype, dlse=False, **changes)
    return question_of(case, clean=True)


@pytest.mark.parametrize("name", NAMES)
def test_out_of_unit_vectors_is_the_weights(name: str) -> None:
    asked = probe.problem(question(name), 0)
    read = probe.read_forward(ask(Plain(), "forward"), asked)
    assert read.P.any() and read.lse is not None
    np.testing.assert_allclose(read.P, read.right.P, atol=1e-14)
    np.testing.assert_allclose(read.lse, read.right.lse, atol=1e-13)
    heads = np.arange(asked.num_heads_q)[:, None] // asked.group
    alive = read.P.any(axis=-1)
    assert np.allclose(read.value_head[alive], np.broadcast_to(heads, alive.shape)[alive])
    assert read.calls == -(-len(asked.k) // asked.v.shape[2]) + 1


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_unit_vectors_are_the_slopes(name: str) -> None:
    asked = probe.problem(question(name), 0)
    read = probe.read_backward(ask(Plain(), "backward"), asked)
    places = Places(asked)
    for slopes in read.slopes.values():
        L = np.where(np.isneginf(slopes.L), np.inf, slopes.L)
        due = np.where(places.right, np.exp(slopes.S - L), 0.0) * slopes.Z
        assert np.abs(due).max() > 1e-3
        np.testing.assert_allclose(slopes.dS, due, atol=1e-13)
    assert read.weights.P.sum() > 1
    own = np.arange(asked.num_heads_q)[:, None] // asked.group
    assert np.array_equal(read.adds["dv"] > 0, own == np.arange(asked.num_heads_kv))


def rounded(x: np.ndarray) -> np.ndarray:
    """To 11 bits, as TF32 has them."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


RIGHT: dict[str, tuple[Plain, str]] = {
    "float64": (Plain(), "float64"),
    "float32": (Plain(), "float32"),
    "float16": (Plain(), "float16"),
    "bfloat16": (Plain(), "bfloat16"),
    "float64, sums in float32": (Plain(work=np.float32), "float64"),
    "float16, every step": (Plain(work=np.float16), "float16"),
    "TF32": (Plain(scores=lambda at, S: rounded(S)), "float32"),
    "its own softmax": (Plain(own_softmax=True), "bfloat16"),
    "keys in another order": (Plain(keys=lambda a, b, n: np.arange(a, b)[::-1]), "bfloat16"),
    "refuses": (Plain(refuses=True), "float32"),
}


@pytest.mark.parametrize("name", NAMES[:4])
@pytest.mark.parametrize("kind", RIGHT)
def test_right_functions_are_read_as_right(kind: str, name: str) -> None:
    plain, dtype = RIGHT[kind]
    if kind == "keys in another order":  # which the mask of Plain does not know of
        plain = Plain(keys=plain.hooks["keys"], mask=lambda at, seen: seen & (at.j >= 0))
    both = Candidate("right", "numpy", forward=plain.forward, backward=plain.backward)
    found = _read(both, question(name, dtype))
    assert not found.of and len(found.facts) == 2
    assert all(("cannot be read" in fact) == (kind == "refuses") for fact in found.facts)


REFUSALS = {
    "raises": lambda *a, **b: 1 / 0,
    "another shape": lambda q, k, v, cu, return_lse=False: (q[:1], np.zeros(3)),
    "no numbers": lambda q, k, v, cu, return_lse=False: (np.zeros(q.shape, bool), np.zeros(3)),
    "nothing": lambda q, k, v, cu, return_lse=False: (),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_cannot_be_read_is_a_fact(kind: str) -> None:
    found = _read(Candidate("odd", "numpy", forward=REFUSALS[kind]), question("no-dlse"))
    assert not found.of and "cannot be read off" in found.facts[0]


def test_slow_functions_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CALLS", 0)
    with pytest.raises(probe.Refused, match="0 are the limit"):
        probe.read_forward(ask(Plain(), "forward"), probe.problem(question(), 0))
    monkeypatch.setattr(probe, "CALLS", 3)
    with pytest.raises(probe.Refused, match="calls"):
        probe.read_backward(ask(Plain(), "backward"), probe.problem(question(), 0))
