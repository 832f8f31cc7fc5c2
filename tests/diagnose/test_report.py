"""A diagnosis in words, as JSON and as a page: the verdict first, few lines, nothing lost. The
short form has a picture, and a command that shows it again."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rawattn.check.diagnose.catalogue import classes, masks
from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.evidence.support import sight_of
from rawattn.check.diagnose.findings import Diagnosis, Finding
from rawattn.check.diagnose.harness.pairs import HARNESS
from rawattn.check.diagnose.judge.diagnosis import diagnose
from rawattn.check.diagnose.report import terminal
from rawattn.check.diagnose.report.terminal import KNOWN, WIDTH, as_json, nothing_wrong, page
from tests.diagnose.called import call, in_sweeps
from tests.diagnose.problems import packed
from tests.diagnose.test_planted import MODULES

PLANTS = {plant.bug: (m, plant) for m in MODULES for plant in m.PLANTED if plant.bug != "race"}
OF_THE_TRADE = re.compile(r"\b(noise|planted|catalogue|I\d+)\b")


def captured(width: int, show: Callable[[Console], None]) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        show(console)
    return capture.get()


def told(diagnosis: Diagnosis, width: int, **about: Any) -> str:
    return captured(width, lambda to: terminal.show(to, diagnosis, terminal.About(**about)))


def all_of(diagnosis: Diagnosis, width: int = 120) -> str:
    def show(to: Console) -> None:
        terminal.show(to, diagnosis, terminal.About(), full=True)
        terminal.facts(to, diagnosis, full=True)

    return captured(width, show)


@pytest.mark.parametrize("name", in_sweeps([*PLANTS][::4], 9))
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
    assert found.findings[0].bug in page(found)


CAUSAL, WINDOW = {"causal": True}, {"causal": False, "window": (1, 1)}
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
    sizes = {"lengths_k": (keys,), "heads": (1, 1), "dim": 8, "dout": None}
    question = packed((queries,), np.float64, **sizes, **mask)
    bug = next(bug for bug in masks.masks(question) if bug.variant == form)
    sight = sight_of(question, bug)
    assert sight is not None
    lines = terminal.picture(sight)
    columns = slice(9, 9 + 2 * len(sight.keys))
    assert lines[0][columns].split() == list(map(str, range(keys)))
    assert [line[columns].rstrip() for line in lines[1:]] == wanted.split("|")
    found = diagnose(question, solve(question, "forward", bug))
    assert found.findings[0].sight is not None and found.findings[0].bug == bug.name
    text = told(found, 100)
    assert all(line.rstrip() in text for line in lines)


# ---- by the command line ------------------------------------------------------------------------

WIDER = "    mask['window'] = (-1, 1 if mask.pop('causal') else -1)\n    out, lse ="
ONE_MORE = ("    out, lse =", WIDER, "def attend_backward", "def nothing")


def test_diff_says_the_cause_and_how_to_see_it_again(candidate: Callable[..., str]) -> None:
    place = candidate(*ONE_MORE)
    arguments = ("diff", "--candidate", place, "--framework", "numpy", "--filter", "edges")
    result = call(*arguments)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("error[causal-off-by-one]: the causal mask is off by one key")
    assert "  --> attend() in mine.py, forward pass: out, lse   2 of 4 checks fail" in lines
    assert sum(line.startswith("worst ") for line in lines) == 1
    assert "case" not in [line.split()[0] for line in lines if line], "no table"
    assert "\x1b" not in result.stdout, "no colours where no terminal is"
    again = next(line for line in lines if "= again: " in line).partition("again: ")[2]
    once_more = call(*shlex.split(again)[1:])
    assert once_more.exit_code == 1 and once_more.stdout.splitlines()[0] == lines[0]
    assert "2 of 2 checks fail" in once_more.stdout, "that case alone"
    full = call(*arguments, "--full").stdout
    assert full.startswith("\n".join(lines[:8])), "the verdict first"
    parts = ("backend", "FAIL worst at (", "by sequence and head", "attention of 4 sequences")
    assert all(part in full and part not in result.stdout for part in parts)


def test_explain_repeats_itself(candidate: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "a file.npz"
    dumped = ("edges-causal", "--candidate", candidate(*ONE_MORE))
    assert call("dump", *dumped, "--framework", "numpy", "--out", file).exit_code == 0
    result = call("explain", file)
    assert result.stdout.startswith("error[causal-off-by-one]: the causal mask is off by one key")
    assert "  --> a file.npz, forward pass: out, lse\n" in result.stdout
    again = re.search(r"= again: rawattn-check (.*)\n", result.stdout)
    assert again is not None and call(*shlex.split(again[1])).stdout == result.stdout


# ---- what a class is ----------------------------------------------------------------------------


def test_explain_a_class() -> None:
    result = call("explain", "--class", "causal-off-by-one")
    known = classes.CLASSES["causal-off-by-one"]
    text = " ".join(result.stdout.split())
    assert result.exit_code == 0 and text.startswith(f"causal-off-by-one: {known.title}")
    assert all(part in text for part in known)


def test_every_class_is_told() -> None:
    assert KNOWN.keys() == {*HARNESS, *classes.CLASSES}
    assert all(known.title and known.look_at for known in KNOWN.values())
    assert "is not one of" in call("explain", "--class", "dead").output


# ---- all of it ----------------------------------------------------------------------------------

HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'<!-- [b]"
PADDED = Finding(
    "B",
    "padded-keys",
    classes.CLASSES["padded-keys"].title,
    "backward: dv; sequences 0, 1, 3 of 4 [all but the longest]",
    "high",
    ("the float64 reference with this bug gives these numbers to 0.001 of their size. " * 2,),
    classes.CLASSES["padded-keys"].look_at,
    ("neighbour-leak", "score-scale"),
)
VACUOUS = Finding("A", "vacuous", "both sides are zero", "dq", "proved", (), "the loss")
FACTS = ("attention of 4 sequences (3, 5, 9, 2 tokens), float16", "A: causal is not said")
WHOLE = Diagnosis("A against B", (PADDED, VACUOUS), ("A", "B", "C"), FACTS)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_everything_is_said_and_fits(width: int) -> None:
    text = all_of(WHOLE, width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    joined = " ".join(text.split())
    assert joined.startswith("error[padded-keys]: B: padded keys are in the softmax denominator")
    whole = (*PADDED.evidence, *PADDED.alternatives, PADDED.where, PADDED.look_at, *FACTS)
    for part in (*whole, "C: no fault is found"):
        assert " ".join(part.split()) in joined, part
    assert "warning[vacuous]: A: both sides are zero" in joined
    order = ("error[", "warning[", "C: no fault", FACTS[0])
    assert [joined.index(part) for part in order] == sorted(map(joined.index, order))


def test_nothing_wrong() -> None:
    right = replace(WHOLE, findings=())
    assert nothing_wrong(right) and "Nothing is wrong." in all_of(right)
    rounding = replace(PADDED, bug="rounding", title="the result is of bfloat16")
    assert nothing_wrong(replace(right, findings=(rounding,)))
    for finding in (PADDED, VACUOUS, replace(PADDED, bug="unknown")):
        wrong = replace(right, findings=(finding, rounding))
        assert not nothing_wrong(wrong) and "Nothing" not in all_of(wrong)
    assert "Nothing was compared." in all_of(Diagnosis("", ()))


def test_json() -> None:
    found = json.loads(json.dumps(as_json(WHOLE), allow_nan=False))
    assert found["ok"] is False and found["facts"] == list(FACTS)
    assert [finding["bug"] for finding in found["findings"]] == ["padded-keys", "vacuous"]
    assert found["judged"] == ["A", "B", "C"]
    assert as_json(replace(WHOLE, findings=()))["ok"] is True


def test_the_page_has_all_and_fetches_nothing() -> None:
    words = re.sub("<[^<>]*>", "", page(WHOLE).partition("<pre>")[2])
    assert unescape(words).split() == all_of(WHOLE, WIDTH).split()
    for part in ("http", "src=", "href", "url(", "@import", "<script", "<link", "javascript:"):
        assert part not in page(WHOLE).lower()


def test_hostile_text_stays_text() -> None:
    finding = Finding(*[HOSTILE] * 5, (HOSTILE,), HOSTILE, (HOSTILE,))
    hostile = Diagnosis(HOSTILE, (finding,), (HOSTILE, "A"), (HOSTILE,))
    source = page(hostile)
    assert "<script" not in source and "<img" not in source and "<!--" not in source
    assert source.count("&lt;script&gt;") >= 9
    assert "\x1b" not in page(replace(hostile, title="\x1b]0;\u202e"))
    assert "[b]" in all_of(hostile), "nor is it markup"
