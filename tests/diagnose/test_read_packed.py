"""Kernels that cannot be called: one packed problem holds all that the reader would ask."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawattn.check.cases import Case, standard
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from rawattn.check.diagnose.files.npz import dump, read
from rawattn.check.diagnose.judge.diagnosis import diagnose
from rawattn.check.diagnose.judge.failures import question_of, reference_answers, small
from rawattn.check.diagnose.read.name import packed, read_packed
from tests.diagnose import plain
from tests.diagnose.called import asked, call, said, wrong
from tests.diagnose.hooks import window
from tests.diagnose.test_read_name import BUGS, FINE, Bug, alike

CASES = {case.name: case for case in standard("small")}
OPTIONS = {"softcap": 3.0, "sinks": True}
RIGHT = {
    "float64": alike(BUGS["bias"], "float64"),
    "bfloat16": replace(alike(BUGS["h % heads"], "bfloat16"), causal=True),
    "unequal": small(CASES["unequal-causal"]),
    "options": replace(alike(BUGS["bias"], "float32"), **OPTIONS),
    "seqused_k": replace(alike(BUGS["padding"], "float32"), seqused_k=(12, 0, 1, 30)),
}
# those see keys, or count rows, of other questions; or are too small for float32
ELSEWHERE = ("of q", "padding", "first rows of k")
NAMED = [name for name in BUGS if name not in (*ELSEWHERE, *FINE)][1::5]


def posed(case: Case) -> tuple[Question, int]:
    """With what is right for a backward pass, and how many sequences are of any kind."""
    question = question_of(case, clean=True)
    found = packed(question)
    right = reference_answers(replace(found, out=None, lse=None, dout=None))
    return replace(found, out=right["out"], lse=right["lse"]), question.batch


def alone(bug: Bug, question: Question) -> Answers:
    """What its stage gives."""
    found = asked(bug.planted)(bug.stage)
    return found(question) if found else {}


def test_directions_tell_weights_too() -> None:
    question, batch = posed(RIGHT["float64"])
    answers = plain.answers(wrong(window(right=1), "jvp"), question)
    told = read_packed(question, {n: answers[n] for n in STAGES["jvp"]}, batch)[2]
    assert [one.stage for one in told.of] == ["jvp"] and "keys: j - i = 1 " in told.of[0].wrong[0]


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_read_as_right(name: str) -> None:
    question, batch = posed(RIGHT[name])
    here, answers, told = read_packed(question, reference_answers(question), batch)
    assert told.of == () and len(told.facts) == 4, told.of
    assert all("read off" in fact and "are right" in fact for fact in told.facts)
    assert here.batch == batch and answers["dk"].shape == here.k.shape


@pytest.mark.parametrize("name", NAMED)
def test_bugs_are_read(name: str) -> None:
    bug = BUGS[name]
    question, batch = posed(alike(bug, "float32"))
    _, _, told = read_packed(question, alone(bug, question), batch)
    (reading,) = told.of
    assert reading.stage == bug.stage and bug.text in (*reading.wrong, *reading.unread)[0]


def test_what_hangs_on_the_longest_sequence_is_named() -> None:
    """It is one of the first ones, and by them the bug is found."""
    question, batch = posed(alike(BUGS["padding"], "float32"))
    answers = alone(BUGS["padding"], question)
    here, given, told = read_packed(question, answers, batch)
    (finding,) = diagnose(here, given, told=told).findings
    assert finding.bug == "padded-keys" and finding.confidence in ("high", "medium")


def test_a_backward_pass_of_a_wrong_forward_pass_is_not_accused() -> None:
    question, batch = posed(alike(BUGS["open tile"], "float32"))
    own = replace(question, out=None, lse=None)
    planted = wrong(BUGS["open tile"].hooks, "forward", "backward")
    _, _, told = read_packed(own, plain.answers(planted, own), batch)
    assert [reading.stage for reading in told.of] == ["forward"]


BIAS = "-0.03 |j - i|"
OWN = "error[sparse-own-block-missing]"


@pytest.mark.parametrize("sizes", [("--causal",), ("--causal", "--block-size", 16)], ids=len)
def test_a_file_of_another_language_is_explained(sizes: tuple[Any, ...], tmp_path: Path) -> None:
    """It has the results alone; inputs, and what they are for, are in the file that was dumped."""
    given, own = tmp_path / "given.npz", tmp_path / "own.npz"
    done = call("dump", "--out", given, "--heads", 2, "--head-dim", 32, *sizes)
    assert done.exit_code == 0 and "Nothing is wrong" in call("explain", given).output
    question = read(given).question
    assert question is not None
    missing = {"entries": lambda t, x: [entry for entry in x if entry[1] >= 0]}
    planted = wrong(missing, "forward") if question.sparse else BUGS["bias"].planted
    forward = asked(planted)("forward")
    np.savez(own, **forward(replace(question, dout=None)))  # type: ignore[arg-type, misc]
    done = call("explain", given, own, "--full")
    assert done.exit_code == 1 and "high" in done.output
    assert (OWN if question.sparse else BIAS) in " ".join(done.output.split())


def test_standard_cases_and_what_cannot_be_read(tmp_path: Path) -> None:
    given = tmp_path / "given.npz"
    call("dump", "--out", given, "group3-float64", "--identify")
    saved = read(given)
    question, answers = saved.question, saved.answers
    assert question is not None
    moved = {"q": question.q + (np.arange(len(question.q)) == len(question.q) - 1)[:, None, None]}
    names = ("cu_seqlens_q", "cu_seqlens_k")
    without_the_last = {name: getattr(question, name)[:-1] for name in names}
    for change, text in ((moved, "are not those"), (without_the_last, "write its file anew")):
        other = replace(question, **change)
        dump(tmp_path / "other.npz", other, {"out": answers["out"]}, identify=4)
        done = call("explain", tmp_path / "other.npz")
        assert done.exit_code == 2 and text in said(done)
