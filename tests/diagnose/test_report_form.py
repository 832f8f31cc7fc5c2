"""The short form of a diagnosis: the verdict first, few lines, a picture, a command that works."""

import importlib
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from rawattn.check import cli
from rawattn.check.diagnose.catalogue import classes, masks
from rawattn.check.diagnose.engine.attention import Bug, solve
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.picture import picture
from rawattn.check.diagnose.evidence.sight import mask_rule, sight_of
from rawattn.check.diagnose.findings import Diagnosis, Finding
from rawattn.check.diagnose.harness.causes import HARNESS
from rawattn.check.diagnose.judge.diagnosis import diagnose
from rawattn.check.diagnose.report import glossary, terminal
from rawattn.check.diagnose.report.page import page

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import trials

MODULES = [importlib.import_module(file) for file in trials.FILES]
PLANTS = {plant.bug: (m, plant) for m in MODULES for plant in m.PLANTED if plant.bug != "race"}
SAMPLE = [
    name if n % 7 == 0 else pytest.param(name, marks=pytest.mark.sweep)
    for n, name in enumerate(PLANTS)
]
OF_THE_TRADE = re.compile(r"\b(noise|planted|catalogue|I\d+)\b")


def told(diagnosis: Diagnosis, width: int, *, full: bool = False, **about: Any) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        terminal.show(console, diagnosis, terminal.About(**about), full=full)
    return capture.get()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_cause_is_short(name: str) -> None:
    """At most 15 lines, none too wide but for the command, and no words of the trade."""
    module, plant = PLANTS[name]
    question = next(iter(module.problems(plant, 1, 7)))
    found = diagnose(question, module.answers(plant, question))
    assert found.findings
    again = "rawattn-check diff --candidate somewhere/of/some/length/mine.py:attention --filter x"
    for width in (60, 80, 120):
        for finding in found.findings:
            one = Diagnosis("", (finding,))
            lines = told(one, width, again=lambda finding: again, tally="3 of 9 checks fail")
            lines = lines.splitlines()
            assert lines[0].startswith((f"error[{finding.bug}]: ", "note[", "warning["))
            assert len(lines) <= terminal.LINES, "\n".join(lines)
            own = [line for line in lines if not line.startswith("   = again: ")]
            assert max(map(len, own)) <= width and f"   = again: {again}" in lines
            said = [line for line in own if not line.startswith(("error[", "   = fix"))]
            assert not OF_THE_TRADE.search("\n".join(said)), "\n".join(lines)
    assert "<h1" in page(found)


def of_lengths(queries: int, keys: int, **mask: Any) -> Question:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((rows, 1, 8)) for rows in (queries, keys, keys))
    return Question(q, k, v, np.array([0, queries]), np.array([0, keys]), **mask)


CAUSAL, WINDOW = {"causal": True}, {"window": (1, 1)}
PICTURES = {
    "j <= i + 1": (6, 6, CAUSAL, ". +|. . +|. . . +|. . . . +|. . . . . +|. . . . . ."),
    "j < i": (5, 5, CAUSAL, "-|. -|. . -|. . . -|. . . . -"),
    "top-left": (3, 5, CAUSAL, ". - -|. . - -|. . . - -"),
    "left -1": (4, 4, WINDOW, ". .|- . .|  - . .|    - ."),
    "right +1": (4, 4, WINDOW, ". . +|. . . +|  . . .|    . ."),
    "both sides": (4, 4, WINDOW, ". . + +|. . . +|+ . . .|+ + . ."),
}


@pytest.mark.parametrize("form", PICTURES)
def test_the_picture_is_right(form: str) -> None:
    """Who sees whom, with the bug beside the right mask, as written down by hand."""
    queries, keys, mask, wanted = PICTURES[form]
    question = of_lengths(queries, keys, **mask)
    bug = next(bug for bug in masks.masks(question) if bug.variant == form)
    sight = sight_of(question, bug)
    assert sight is not None
    lines = picture(sight)
    columns = slice(9, 9 + 2 * len(sight.keys))
    assert lines[0][columns].split() == list(map(str, range(keys)))
    assert [line[columns].rstrip() for line in lines[1:]] == [
        " ".join(row[::2]).rstrip() for row in (f"{row:{2 * keys}}" for row in wanted.split("|"))
    ]
    found = diagnose(question, solve(question, "forward", bug))
    assert found.findings[0].proof is not None and found.findings[0].bug == bug.name
    text = told(found, 100)
    assert all(line.rstrip() in text for line in lines)


def test_the_sentence_has_the_form_and_what_it_must_be() -> None:
    question = of_lengths(6, 6, **CAUSAL)
    assert mask_rule(question) == "j <= i"
    assert mask_rule(of_lengths(4, 6, **WINDOW)).startswith("i + seqlen_k - seqlen_q - 1 <= j")
    bug = next(bug for bug in masks.masks(question) if bug.variant == "j <= i + 1")
    text = " ".join(told(diagnose(question, solve(question, "forward", bug)), 120).split())
    assert text.startswith(
        "error[causal-off-by-one]: each query sees one key too many: the mask is j <= i + 1, "
        "it must be j <= i --> forward pass: out, lse"
    )
    assert "the float64 reference with j <= i + 1 gives your numbers exactly (with j <= i " in text


def test_keys_of_others_and_zeros_are_set_apart() -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((12, 1, 4))
    question = Question(q, q, q, np.array([0, 5, 12]), np.array([0, 5, 12]))
    after, pads = (
        next(b for b in masks.neighbours(question, []) if b.variant == variant)
        for variant in ("one key after the end", "longest")
    )
    for bug, words in ((after, "| other keys from here on"), (pads, "| zeros from here on")):
        sight = sight_of(question, bug)
        assert sight is not None
        lines = picture(sight)
        assert words in "\n".join(lines) and ". | +" in lines[1], lines
    assert sight_of(question, Bug("x", steps={"O": lambda c: c.P})) is None


# ---- by the command line ------------------------------------------------------------------------

WRONG = """
from rawattn import api

def attend(q, k, v, cu_seqlens, *, return_lse=False, causal=False, cu_seqlens_k=None):
    window = (-1, 1) if causal else (-1, -1)
    return api.forward(q, k, v, cu_seqlens, cu_seqlens_k=cu_seqlens_k, window=window,
                       return_lse=return_lse, backend="reference")
"""


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def test_diff_says_the_cause_and_how_to_see_it_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG)
    place = f"{tmp_path / 'mine.py'}:attend"
    arguments = ("diff", "--candidate", place, "--framework", "numpy", "--filter", "edges")
    result = call(*arguments)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("error[causal-off-by-one]: each query sees one key too many")
    assert "  --> attend() in mine.py, forward pass: out, lse   2 of 4 checks fail" in lines
    assert sum(line.startswith("worst ") for line in lines) == 1
    assert "case" not in [line.split()[0] for line in lines if line], "no table"
    assert "\x1b" not in result.stdout, "no colours where no terminal is"
    again = next(line for line in lines if "= again: " in line).partition("again: ")[2]
    once_more = call(*shlex.split(again)[1:])
    assert once_more.exit_code == 1 and once_more.stdout.splitlines()[0] == lines[0]
    assert "2 of 2 checks fail" in once_more.stdout, "that case alone"
    full = call(*arguments, "--full").stdout
    assert full.startswith("\n".join(lines[:10])), "the verdict first"
    for part in (
        "backend",
        "FAIL worst at (",
        "by sequence and head",
        "With this bug (j <= i + 1)",
    ):
        assert part in full and part not in result.stdout
    for part in ("identities that must hold", "slope of one over the other", "I12", "shown by "):
        assert part in full and part not in result.stdout


def test_explain_repeats_itself(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG)
    file = tmp_path / "a file.npz"
    dumped = ("edges-causal", "--candidate", f"{tmp_path / 'mine.py'}:attend")
    assert call("dump", *dumped, "--framework", "numpy", "--out", file).exit_code == 0
    result = call("explain", file)
    assert result.stdout.startswith("error[causal-off-by-one]: each query sees one key too many")
    assert "  --> a file.npz, forward pass: out, lse\n" in result.stdout
    again = re.search(r"= again: rawattn-check (.*)\n", result.stdout)
    assert again is not None and call(*shlex.split(again[1])).stdout == result.stdout


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    finding = Finding("A", "dead-rows", "rows are not 0", "out", "high", (), "the guard")

    def printed() -> str:
        console = Console(force_terminal=True, color_system="standard", width=80)
        with console.capture() as capture:
            terminal.show(console, Diagnosis("", (finding,)))
        return capture.get()

    assert "\x1b[1;31m" in printed()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\d", printed())


def test_no_line_is_narrower_than_60_columns() -> None:
    words = " ".join(["word"] * 40)
    finding = Finding("A", "dead-rows", words, "out", "high", (words,), words)
    one = partial(told, Diagnosis("", (finding,)))
    assert one(20) == one(60) and one(100) == one(400) != one(80)


# ---- what a class is ----------------------------------------------------------------------------


def test_explain_a_class() -> None:
    result = call("explain", "--class", "causal-off-by-one")
    known = classes.CLASSES["causal-off-by-one"]
    said = " ".join(result.stdout.split())
    assert result.exit_code == 0 and said.startswith(f"causal-off-by-one: {known.title}")
    assert all(part in said for part in known) and "query 0 . +" in said


@pytest.mark.parametrize("name", glossary.KNOWN)
def test_every_class_is_told(name: str) -> None:
    console = Console(width=60, no_color=True)
    with console.capture() as capture:
        terminal.show_class(console, name)
    lines = capture.get().splitlines()
    said = " ".join(" ".join(lines).split())
    known = {**HARNESS, **classes.CLASSES}[name]
    assert known.title in said and known.origin and known.looks in said
    assert len(lines) <= terminal.LINES + 8 and max(map(len, lines)) <= 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("caual-of-by-one",), "near to it: causal-off-by-one"),
        (("window",), "near to it: window-dropped, window-off-by-one"),
        (("xyz",), "there is no class 'xyz'; none is near to it"),
        ((), "requires an argument"),
        (("dead-rows", "--log", __file__), "or --class NAME"),
    ],
)
def test_classes_that_do_not_exist(arguments: tuple[str, ...], message: str) -> None:
    result = call("explain", "--class", *arguments)
    said = " ".join("".join(c for c in result.output if c not in "│╭╮╰╯─").split())
    assert result.exit_code == 2 and message in said
