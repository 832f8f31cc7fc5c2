"""A diagnosis on the terminal and in JSON: the verdict first, nothing lost, nothing too wide."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.findings import Check, Diagnosis, Finding, Level, Map
from rawattn.check.diagnose.report.words import SURE, as_json, nothing_wrong, render

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
        console.print(render(diagnosis, full=full))
    return capture.get()


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 120])
def test_everything_is_said_and_fits(width: int) -> None:
    text = shown(WHOLE, width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    lines = text.splitlines()
    assert lines[0].strip() == "A against B"
    assert lines[2].startswith("1. B: padded keys are in the softmax denominator"), "verdict first"
    joined = words(text)
    for part in (*PADDED.evidence, PADDED.where, PADDED.look_at, *FACTS, SURE["high"]):
        assert words(part) in joined, part
    assert "neighbour-leak, or score-scale" in joined
    assert "2. A: both sides are zero [proved; vacuous]" in joined
    assert "(sequence 0, head 3, row 17)" in joined
    order = [
        joined.index(part) for part in ("1. B", "2. A", "must hold on a side", "slope", FACTS[0])
    ]
    assert order == sorted(order)


def test_identities_that_matter_are_shown() -> None:
    rows = [line.split()[:2] for line in shown(WHOLE).splitlines() if line.startswith("I")]
    assert rows == [["I1", "A"], ["I1", "B"], ["I6", "B"]], "what fails, and the other side there"
    assert "A passes I2, I3" in shown(WHOLE) and "A has nothing to check I10 with" in shown(WHOLE)
    everything = shown(WHOLE, full=True)
    rows = [line.split()[:2] for line in everything.splitlines() if line.startswith("I")]
    names = ["I1 A", "I1 B", "I2 A", "I3 A", "I6 B", "I10 A"]
    assert rows == [name.split() for name in names], "in order"
    assert "passes" not in everything and "(no ddq)" in everything


def test_slopes_are_those_that_explain() -> None:
    text = shown(WHOLE)
    text = text[text.index("tensor") :]
    assert "sequence 8" in text and "sequence 9" not in text, "the first ones that are off"
    assert "sequence 0" not in text
    assert "head 0" not in text, "slopes by head leave as much as that of all"
    assert "0.3333" in text and "31.0%" in text
    assert "out" not in text.split(), "right"
    assert "dk" in text.split() and " inf " in text and "nan" not in text
    everything = shown(WHOLE, full=True)
    assert "sequence 11" in everything and "head 3" in everything and "out" in everything.split()


def test_slopes_of_single_numbers_say_nothing() -> None:
    """A row of lse has one number for each head: some slope always fits."""
    whole = Level("lse", "all", "", 1.1, 0.3, 6.0)
    rows = [Level("lse", "row", f"sequence 0, row {i}", 1.0 + i, 0.0, 1.0) for i in range(9)]
    heads = [Level("lse", "head", str(h), 1.1 + h, 0.29, 6.0) for h in range(2)]
    text = shown(Diagnosis("", (PADDED,), levels=(whole, *rows, *heads)))
    assert "head 1" in text and "row 1" not in text
    rows = [replace(row, tensor="dS") for row in rows]
    heads = [replace(head, tensor="dS") for head in heads]
    text = shown(Diagnosis("", (PADDED,), levels=(replace(whole, tensor="dS"), *rows, *heads)))
    assert "row 1" in text and "head 1" not in text


def test_parts_that_say_no_more_are_one_line() -> None:
    """Equal to their whole, as a forgotten factor makes them, or all about as bad."""
    for slope, residual in ((5.66, 0.0), (0.81, 0.48)):
        whole = Level("dq", "all", "all", slope, residual, 9.0)
        heads = [Level("dq", "head", f"head {h}", slope + 0.01 * h, residual, 9) for h in range(3)]
        sequences = [Level("dq", "sequence", f"sequence {b}", slope, residual, 9) for b in range(2)]
        rows = [Level("dq", "row", f"row {i}", slope, residual, 9.0) for i in range(5)]
        diagnosis = Diagnosis("", (PADDED,), levels=(whole, *heads, *sequences, *rows))
        text = shown(diagnosis)
        assert "all (alike in each sequence and head)" in text and "--full shows all" in text
        assert "head 1" not in text and "sequence 1" not in text and "row 1" not in text
        text = shown(diagnosis, full=True)
        assert "head 1" in text and "sequence 1" in text and "row 1" in text
        assert "alike" not in text and "--full" not in text
        other = replace(sequences[1], slope=1.0, residual=0.0)
        text = shown(replace(diagnosis, levels=(whole, *heads, sequences[0], other)))
        assert "all (alike in each head)" in text and "sequence 1" in text


def test_parts_without_entries_are_left_out() -> None:
    """A row of zeros on both sides has neither slope nor error."""
    levels = (
        Level("dS", "all", "visible entries", 0.9, 0.3, 1.0),
        Level("dS", "all", "masked entries", NAN, NAN, 2.0),
        Level("dS", "row", "0", NAN, NAN, 0.0),
        Level("dS", "row", "1", 0.5, 0.0, 1.0),
    )
    text = shown(Diagnosis("", (PADDED,), levels=levels))
    parts = ("visible entries", "masked entries", "row 1")
    assert all(part in text for part in parts) and "row 0" not in text


def test_a_label_is_never_broken() -> None:
    text = shown(Diagnosis("", (replace(PADDED, title="long words " * 6),)), 80)
    assert "\n   [high confidence; padded-keys]\n" in text


def test_a_sentence_stands_once() -> None:
    repeated = replace(
        PADDED, evidence=("dv: every key is wrong", "other", "dv: every key is wrong")
    )
    assert shown(Diagnosis("", (repeated,))).count("every key is wrong") == 1


def test_sides_of_one_outcome_share_a_line() -> None:
    both = tuple(replace(check, side=side) for check in CHECKS[2:5] for side in "AB")
    text = shown(Diagnosis("", (PADDED,), both))
    assert "A and B pass I2, I3\n" in text and "A and B have nothing to check I10 with\n" in text


def test_parts_may_say_what_they_are() -> None:
    level = Level("dq", "sequence", "sequence 3 (9 tokens)", 2.0, 0.0, 1.0)
    text = shown(Diagnosis("", (PADDED,), levels=(Level("dq", "all", "all", 1, 0.3, 1), level)))
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
    assert "\nB: padded keys" in shown(replace(WHOLE, findings=(PADDED,)))


def test_a_side_without_a_fault_is_named() -> None:
    one = replace(WHOLE, findings=(PADDED,), checks=CHECKS[:2])
    assert "\nA: no fault is found" in shown(one) and "B: no fault" not in shown(one)
    assert "no fault" not in shown(WHOLE), "A has a finding too"
    assert "no fault" not in shown(replace(one, findings=())), "nothing is wrong at all"


def test_unknown_is_no_guess() -> None:
    unknown = replace(PADDED, bug="unknown", title="wrong", confidence="low")
    assert "B: wrong  [unknown]" in shown(Diagnosis("", (unknown,)))


def test_of_a_comparison_each_trial_is_shown_on_demand() -> None:
    trials = tuple(
        Check("harness", f"{letter}{n}", f"trial {letter}{n}", float(n), 0.0, verdict)
        for letter, verdict in (("W", "FAIL"), ("R", "pass"))
        for n in (1, 2)
    )
    short = shown(Diagnosis("", (PADDED,), trials))
    assert "2 of 4 kinds of result fool it; --full shows each" in short and "W1" not in short
    lines = shown(Diagnosis("", (PADDED,), trials), full=True).splitlines()
    assert [line.split()[0] for line in lines if " trial " in line] == ["R1", "R2", "W1", "W2"]


def test_places_and_numbers_are_short() -> None:
    check = Check("A", "I1", "rows sum to 1", 109.4, 1e-13, "FAIL", "all: 70 of 71 rows")
    text = shown(Diagnosis("", (PADDED,), (check, replace(check, name="I2", where="all"))))
    assert "rows sum to 1 (70 of 71 rows)" in text and "(all" not in text and " 109 " in text


def test_text_is_no_markup() -> None:
    finding = replace(PADDED, title="[red]x[/red]", where="q[0, 1]", evidence=("[/b] [1, 2]",))
    text = shown(Diagnosis("[i]", (finding,), facts=("lengths [3, 4]",)))
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
    title, look_at = CLASSES[name]
    finding = replace(PADDED, bug=name, title=title, look_at=look_at, side="candidate")
    text = shown(Diagnosis("", (finding,)), 80)
    assert words(title) in words(text) and words(look_at) in words(text)
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
