"""What no rule tells is told on the smallest problem that fails, whole; and a name that only the
problem at hand bears out is not sure."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn.check.cases import standard
from rawattn.check.diagnose.judge.failures import explain_failures
from tests.diagnose.called import candidate, wrong
from tests.diagnose.plain import LN_2, Head

CASES = {case.name: case for case in standard("small")}
PROBLEM = "1 head on 1, head_dim 16, causal, float64: "


def exp_of_fours(c: Head, x: Any) -> Any:
    """An exponential that is a sixteenth too large for every fourth key."""
    return x + np.log1p(1 / 16) * (c.j % 4 == 3) * (np.abs(x) < 1)


WRONG = {
    "exp": ("forward", {"S": exp_of_fours}, "exp(S) is wrong at 1 of 16 places: i = 3: j = 3 is "),
    "dS": (
        "backward",
        {"dS of dk": lambda c, x: x + (c.i == 2) * (c.j == 1) * c.P},
        "dS of dk is wrong at 1 of 9 places: i = 2: j = 1 is ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_all_that_is_wrong_is_told(name: str) -> None:
    stage, hooks, text = WRONG[name]
    case = replace(CASES["edges-causal"], dtype="float64")
    (first, *_) = explain_failures(candidate(wrong(hooks, stage), stage), [case]).findings
    assert not first.sure and text in first.least, first.least
    assert first.least.startswith("attention of 1 sequence (") and PROBLEM in first.least


def test_a_name_is_asked_on_other_problems() -> None:
    """lse in base 2, and one that is so only where keys are not in use."""
    planted = wrong({"lse": lambda c, x: x / LN_2}, "forward")
    of_used = wrong(
        {"lse": lambda c, x: x / (1 if c.question.seqused_k is None else LN_2)}, "forward"
    )
    sure, unsure = (
        explain_failures(candidate(one, "forward"), [CASES["seqused"]]).findings[0]
        for one in (planted, of_used)
    )
    assert sure.bug == unsure.bug == "lse-base-2"
    assert (sure.confidence, sure.least, unsure.confidence) == ("high", "", "medium")
    assert "without seqused_k" in unsure.evidence[1]
    assert "lse of head 0 is wrong: i = 0: it is " in unsure.least


def test_sums_over_all_rows_are_apart() -> None:
    """Of sinks, whose gradients have no rows: half of the scale in both passes."""
    planted = wrong({"S": lambda c, x: x / 2}, "forward", "backward")
    (first, *_) = explain_failures(candidate(planted), [CASES["sinks"], CASES["group3"]]).findings
    assert first.bug == "score-scale" and first.least
