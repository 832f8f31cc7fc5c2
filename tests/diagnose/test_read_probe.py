"""What is asked of a function, entry by entry: P and dS as they are; right functions stay right."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn.check.candidate import Candidate
from rawattn.check.cases import standard
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from rawattn.check.diagnose.judge.failures import _read, question_of, small
from rawattn.check.diagnose.read import probe
from rawattn.check.diagnose.read.name import read
from tests.diagnose import plain
from tests.diagnose.called import asked, wrong
from tests.diagnose.hooks import of_each
from tests.diagnose.plain import FLOAT32
from tests.diagnose.planted import first

CASES = {case.name: case for case in standard("small")}
NAMES = ("group3", "unequal-causal", "window", "window-left-open", "decode", "dim-40-72", "scale")
WHOLE = asked(plain.RIGHT)


def question(name: str = "group3", dtype: str = "float64") -> Question:
    return question_of(replace(small(CASES[name]), dtype=dtype, dlse=False), clean=True)


RIGHT = {kind.variant: kind for kind in first.RIGHT}
RIGHT["sums in float32"] = wrong(of_each(lambda c, x: x.astype(FLOAT32), "Y", "P"), *STAGES)
KINDS = {
    "tiles of 16": ("float64", "float32"),
    "sums in float32": ("float64",),
    "every step in float16": ("float16",),
    "TF32": ("float32",),
    "its own softmax in the backward pass": ("bfloat16",),
    "from the last key": ("bfloat16",),
    "partial softmaxes, merged at the end": ("bfloat16",),
    "refuses": ("float32",),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kind", "dtype"), [(k, d) for k, some in KINDS.items() for d in some])
def test_right_functions_are_read_as_right(kind: str, dtype: str, name: str) -> None:
    refuses, ask = kind == "refuses", asked(RIGHT.get(kind, plain.RIGHT))

    def picky(stage: str) -> Any:
        def of_stage(x: Question) -> Answers:
            if refuses and ((x.v == 0).mean() > 0.5 or (x.q == 0).mean() > 0.5):
                raise ValueError("q and v must be of full rank")
            return ask(stage)(x)

        return of_stage if stage in ("forward", "backward") else None

    found = read(question(name, dtype), picky)
    assert not found.of and len(found.facts) == 2
    assert all(("cannot be read" in fact) == refuses for fact in found.facts)


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
        probe.read_forward(WHOLE("forward"), probe.problem(question(), 0))
    monkeypatch.setattr(probe, "CALLS", 3)
    with pytest.raises(probe.Refused, match="calls"):
        probe.read_backward(WHOLE("backward"), probe.problem(question(), 0))
