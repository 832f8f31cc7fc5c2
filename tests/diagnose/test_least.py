"""What no rule tells is told on the smallest problem that fails, whole; and a name that only the
problem at hand bears out is not sure."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rawattn.check.cases import standard
from rawattn.check.diagnose.judge.failures import explain_failures, reference_answers
from rawattn.check.diagnose.judge.least import Asker, entries, of_shortest
from rawattn.check.diagnose.judge.proofs import finding
from rawattn.check.diagnose.read.tables import told
from tests.diagnose.called import candidate, wrong
from tests.diagnose.plain import FLOAT64, LN_2, Head, answers
from tests.diagnose.problems import packed

CASES = {case.name: case for case in standard("small")}
PROBLEM = "1 head on 1, head_dim 16, causal, float64: "


def exp_of_fours(c: Head, x: Any) -> Any:
    """An exponential that is a sixteenth too large for every fourth key."""
    return x + np.log1p(1 / 16) * (c.j % 4 == 3) * (np.abs(x) < 1)


def of_another_row(c: Head, x: Any) -> Any:
    top = c.S.max(axis=1, keepdims=True)
    there = np.minimum(c.i ^ 4, c.n - 1)[:, 0]
    return x[0], np.exp(c.S - top) @ c.V / np.exp(x[0] - top)[there]


def near_exp(c: Head, x: Any) -> Any:
    return x + np.sin(3 * np.nan_to_num(x, neginf=0)) / 500 * np.isfinite(x)


def overwritten(c: Head, x: Any) -> Any:
    return x[0], np.where(c.i % 16 < 3, np.roll(x[1], 5, axis=0), x[1])


WIDE = {"softmax": lambda c, x: (x[0], x[1] * (1 + (np.arange(x[1].shape[1]) > 11)))}
ONE = {"dS of dk": lambda c, x: x + (c.i == 2) * (c.j == 1) * c.P}
SAID = {
    "overwritten": ("forward", {"softmax": overwritten}, "rows hold weights of other rows: i = "),
    "sums": ("forward", {"softmax": of_another_row}, "maximum, are those of other rows: "),
    "near": ("forward", {"S": near_exp}, "exp is not exact: off by up to 0.00"),
    "columns": ("forward", WIDE, "out: columns 12 to 15 of 16 alone are wrong"),
}
WRONG = {
    "exp": ("forward", {"S": exp_of_fours}, "exp(S) is wrong at 1 of 16 places: i = 3: j = 3 is "),
    "dS": ("backward", ONE, "dS of dk is wrong at 1 of 9 places: i = 2: j = 1 is "),
}


@pytest.mark.parametrize("name", [*WRONG, *SAID])
def test_all_that_is_wrong_is_told(name: str) -> None:
    stage, hooks, text = (WRONG | SAID)[name]
    case = replace(CASES["edges-causal"], dtype="float64")
    (first, *_) = explain_failures(candidate(wrong(hooks, stage), stage), [case]).findings
    assert first.least.startswith("attention of 1 sequence (") and PROBLEM in first.least
    assert not first.sure and text in (first.least if name in WRONG else first.title), first


@pytest.mark.parametrize(
    "name, of, alone, units", [("ddout", "E", "tk", "v"), ("gq", "tdP", "tv", "k")]
)
def test_whose_product_an_entry_holds(name: str, of: str, alone: str, units: str) -> None:
    hooks = {of: lambda c, x: np.where(c.j == 9, np.roll(x, 5, axis=1), x)}
    question = packed((12,), FLOAT64, moved=True)
    question = replace(question, **{t: None for t in ("tq", "tk", "tv") if t != alone})
    asker: Any = Asker(None, "second", None, partial(answers, wrong(hooks, "second")))
    said = told(next(entries(asker, question, name, units)), question)
    assert f"all of j = 9, each has {of} of j -5: i = 9 to 11" in said


def test_the_shortest_sequence_of_arrays_is_told() -> None:
    question = packed((40, 3), heads=(2, 1), moved=True)
    given = reference_answers(question)
    given["gv"] = given["gv"] - np.asarray(question.dout)[:, :1]
    found = finding("A", "unknown", "second: gv", "low", [])
    assert "gv is wrong" in of_shortest(question, given, found).least


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


def test_without_what_it_is_right_is_said() -> None:
    def with_softcap(c: Head, x: Any) -> Any:
        return x + (c.question.softcap is not None) * (c.i == 2) * (c.j == 1) * c.P

    case = replace(CASES["edges-causal"], softcap=1.5, dtype="float64")
    planted = candidate(wrong({"dS of dk": with_softcap}, "backward"), "backward")
    (first, *_) = explain_failures(planted, [case]).findings
    assert "softcap, float64 (without softcap it is right): dS of dk" in first.least


def test_sums_over_all_rows_are_apart() -> None:
    """Of sinks, whose gradients have no rows: half of the scale in both passes."""
    planted = wrong({"S": lambda c, x: x / 2}, "forward", "backward")
    (first, *_) = explain_failures(candidate(planted), [CASES["sinks"], CASES["group3"]]).findings
    assert first.bug == "score-scale" and first.least
