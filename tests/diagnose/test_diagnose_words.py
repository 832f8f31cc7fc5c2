"""A diagnosis on the terminal and in JSON: the verdict first, nothing lost, nothing too wide.

The short form of planted bugs is in test_report_form.
"""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.findings import Check, Diagnosis, Finding, Level, Map
from rawattn.check.diagnose.report.terminal import facts, show
from rawattn.check.diagnose.report.words import SURE, as_json, nothing_wrong

PADDED = Finding(
    "B",
    "padded-keys",
    CLASSES["padded-keys"].title,
    "backward: dv; sequences 0, 1, 3 of 4 [all but the longest]",
    "high",
    ("With this bug (to the longest) planted, dv agrees to 0.001 of its size. " * 2, "I1 fails"),
    CLASSES["padded-keys"].look_at,
    ("neighbour-leak", "score-scale"),
)
VACUOUS = Finding("A", "vacuous", "both sides are zero", "dq", "proved", (), "the loss")
NAN = math.nan
CHECKS = (
    Check("A", "I1", "rows of P sum to 1", 1e-3, 4e-3, "pass"),
    Check("B", "I1", "rows of P sum to 1", 0.75, 4e-3, "FAIL", "sequence 0, head 3, row 17"),
    Check("A", "I10", "second derivatives are symmetric", NAN, NAN, "-", "no ddq"),
    Check("A", "I2", "rows of dS sum to 0", 1e-3, 4e-3, "pass"),
    Check("A", "I3", "with one key, out is its v", 1e-3, 4e-3, "pass"),
    Check("B", "I6", "<v, dv> = <out, dout> of every sequence", 0.0, math.inf, "vacuous"),
)
LEVELS = (
    Level("dv", "all", "", 0.51, 0.31, 0.25),
    *(Level("dv", "head", str(h), 0.5, 0.3, 0.25) for h in range(4)),
    *(Level("dv", "sequence", str(b), 1 / (b + 1), 0.002, 0.25) for b in range(12)),
    Level("out", "all", "", 1.0, 0.001, 0.001),
    Level("dk", "all", "", NAN, math.inf, NAN),
)
MAP = Map("dv", "error of dv", np.array([[0.5, np.nan], [-np.inf, 2]]), "tokens", "heads", (0, 1))
FACTS = ("attention of 4 sequences (3, 5, 9, 2 tokens), float16", "A: causal is not said")
WHOLE = Diagnosis("A against B", (PADDED, VACUOUS), CHECKS, LEVELS, (MAP,), FACTS)


def shown(diagnosis: Diagnosis, width: int = 120, *, full: bool = False) -> str:
    console = Console(width=width, file=None, record=True, quiet=False, no_color=True)
    with console.capture() as capture:
        show(console, diagnosis, full=full)
        facts(console, diagnosis, full=full)
    return capture.get()


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_everything_is_said_and_fits(width: int) -> None:
    text = shown(WHOLE, width, full=True)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    verdict = "error[padded-keys]: B: padded keys are in the softmax denominator"
    assert words(text).startswith(verdict), "the verdict first"
    joined = words(text)
    for part in (*PADDED.evidence, PADDED.where, PADDED.look_at, *FACTS):
        assert words(part) in joined, part
    assert "neighbour-leak, or score-scale" in joined
    assert "warning[vacuous]: A: both sides are zero" in joined
    assert "(sequence 0, head 3, row 17)" in joined or width == 60, "broken in the table's column"
    order = [
        joined.index(part)
        for part in ("error[", "warning[", "1. B", "2. A", "must hold on a side", "slope", FACTS[0])
    ]
    assert order == sorted(order)


def test_in_short_there_are_no_tables() -> None:
    text = shown(WHOLE)
    assert "must hold" not in text and "slope" not in text and "evidence" not in text
    alone = replace(PADDED, alternatives=())
    assert f"= sure:  high; {SURE['high']}" in shown(Diagnosis("", (alone,)))
    assert "= sure:  high; neighbour-leak, or score-scale would look the same here" in text


def test_every_identity_is_shown_in_order() -> None:
    everything = shown(WHOLE, full=True)
    rows = [line.split()[:2] for line in everything.splitlines() if re.match(r"I\d+ ", line)]
    names = ["I1 A", "I1 B", "I2 A", "I3 A", "I6 B", "I10 A"]
    assert rows == [name.split() for name in names], "in order"
    assert "(no ddq)" in everything


def test_every_slope_is_shown() -> None:
    text = shown(WHOLE, full=True)
    text = text[text.index("tensor") :]
    assert "sequence 11" in text and "head 3" in text and "out" in text.split()
    assert "0.3333" in text and "31.0%" in text
    assert "dk" in text.split() and " inf " in text and "nan" not in text


def test_parts_without_entries_are_said_to_have_none() -> None:
    """A row of zeros on both sides has neither slope nor error."""
    levels = (
        Level("dS", "all", "visible entries", 0.9, 0.3, 1.0),
        Level("dS", "all", "masked entries", NAN, NAN, 2.0),
        Level("dS", "row", "0", NAN, NAN, 0.0),
        Level("dS", "row", "1", 0.5, 0.0, 1.0),
    )
    text = shown(Diagnosis("", (PADDED,), levels=levels), full=True)
    assert all(part in text for part in ("visible entries", "masked entries", "row 1"))


def test_a_sentence_stands_once() -> None:
    repeated = replace(
        PADDED, evidence=("dv: every key is wrong", "other", "dv: every key is wrong")
    )
    once = shown(Diagnosis("", (repeated,)), full=True).partition("evidence")
    assert once[0].count("every key is wrong") == once[2].count("every key is wrong") == 1


def test_parts_may_say_what_they_are() -> None:
    level = Level("dq", "sequence", "sequence 3 (9 tokens)", 2.0, 0.0, 1.0)
    levels = (Level("dq", "all", "all", 1, 0.3, 1), level)
    text = shown(Diagnosis("", (PADDED,), levels=levels), full=True)
    assert " sequence 3 (9 tokens) " in text and "all all" not in text


def test_nothing_wrong() -> None:
    right = replace(WHOLE, findings=(), checks=CHECKS[:1], levels=())
    assert nothing_wrong(right) and "Nothing is wrong." in shown(right)
    rounding = replace(PADDED, bug="rounding", title="the result is of bfloat16")
    assert nothing_wrong(replace(right, findings=(rounding,)))
    assert "the result is of bfloat16" in shown(replace(right, findings=(rounding,)))
    for finding in (PADDED, VACUOUS, replace(PADDED, bug="unknown")):
        wrong = replace(right, findings=(finding, rounding))
        assert not nothing_wrong(wrong) and "Nothing" not in shown(wrong)
    assert "Nothing was compared." in shown(Diagnosis("", ()))


def test_one_finding_has_no_number() -> None:
    assert "\nB: padded keys" in shown(replace(WHOLE, findings=(PADDED,)), full=True)


def test_one_side_needs_no_name() -> None:
    assert shown(Diagnosis("", (PADDED,))).startswith("error[padded-keys]: padded keys")


def test_a_side_without_a_fault_is_named() -> None:
    one = replace(WHOLE, findings=(PADDED,), checks=CHECKS[:2])
    assert "\nA: no fault is found" in shown(one) and "B: no fault" not in shown(one)
    assert "no fault" not in shown(WHOLE), "A has a finding too"
    assert "no fault" not in shown(replace(one, findings=())), "nothing is wrong at all"


def test_unknown_is_no_guess() -> None:
    unknown = replace(PADDED, bug="unknown", title="wrong", confidence="low")
    text = shown(Diagnosis("", (unknown,)))
    assert text.startswith("error[unknown]: wrong\n") and "= fix:" not in text
    assert "= seen:  no known bug gives your numbers" in text and "= look:" in text


def test_of_a_comparison_each_trial_is_shown_on_demand() -> None:
    trials = tuple(
        Check("harness", f"{letter}{n}", f"trial {letter}{n}", float(n), 0.0, verdict)
        for letter, verdict in (("W", "FAIL"), ("R", "pass"))
        for n in (1, 2)
    )
    assert "W1" not in shown(Diagnosis("", (PADDED,), trials))
    lines = shown(Diagnosis("", (PADDED,), trials), full=True).splitlines()
    assert [line.split()[0] for line in lines if " trial " in line] == ["R1", "R2", "W1", "W2"]


def test_places_and_numbers_are_short() -> None:
    check = Check("A", "I1", "rows sum to 1", 109.4, 1e-13, "FAIL", "all: 70 of 71 rows")
    both = (check, replace(check, name="I2", where="all"))
    text = shown(Diagnosis("", (PADDED,), both), full=True)
    assert "rows sum to 1 (70 of 71 rows)" in text and "(all" not in text and " 109 " in text


def test_text_is_no_markup() -> None:
    finding = replace(PADDED, title="[red]x[/red]", where="q[0, 1]", evidence=("[/b] [1, 2]",))
    text = shown(Diagnosis("[i]", (finding,), facts=("lengths [3, 4]",)), full=True)
    for part in ("[red]x[/red]", "q[0, 1]", "[/b] [1, 2]", "[i]", "lengths [3, 4]"):
        assert part in text


def test_json() -> None:
    found = json.loads(json.dumps(as_json(WHOLE), allow_nan=False))
    assert found["ok"] is False and found["title"] == "A against B"
    assert [finding["bug"] for finding in found["findings"]] == ["padded-keys", "vacuous"]
    assert found["findings"][0]["evidence"] == list(PADDED.evidence)
    assert found["checks"][2]["value"] is None and found["checks"][5]["allowed"] is None
    assert found["levels"][0]["slope"] == 0.51 and found["levels"][-1]["slope"] is None
    assert found["maps"][0]["values"] == [[0.5, None], [None, 2.0]]
    assert found["facts"] == list(FACTS)
    assert as_json(replace(WHOLE, findings=()))["ok"] is True


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_words_that_fit(name: str) -> None:
    title, look_at, origin, looks = CLASSES[name]
    assert origin and looks
    finding = replace(PADDED, bug=name, title=title, look_at=look_at, side="candidate")
    text = shown(Diagnosis("", (finding,)), 80)
    assert words(title) in words(text) and words(look_at) in words(text)
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
