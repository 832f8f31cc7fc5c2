"""What rawattn-check shows: progress, tables as wide as what they hold, what to do now."""

import io
import re
import time
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner
from rich.console import Console

from rawattn.check import cli, compiled, outcome, progress, report, run, workers
from rawattn.check.compiled import Built
from rawattn.check.diff import Verdict
from rawattn.check.progress import Steps
from rawattn.check.run import Row
from rawattn.variants import TABLE

LONG = "sparse-no-rows-past-the-end-bfloat16"
RIGHT = Row("edges-float16", "numba", "out", Verdict(1e-3, 2e-3, "pass"))
WRONG = Row(LONG, "numba/second/two_pass", "gblock_scale", Verdict(0.5, 1e-3, "FAIL", "worst"))
GOOD = Built("sparse_double_backward_out_sm80_d128_64_163", "bf16 lr qkv 16x64 s", "sm_90", 255)


def shown(thing: object, width: int) -> list[str]:
    """The lines of a table in a console of this width."""
    console = Console(file=io.StringIO(), width=width)
    console.print(thing)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that progress reads."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_progress_without_a_terminal_is_a_line_a_tenth(clock, capsys) -> None:
    with Steps("judging", [1.0] * 20) as steps:
        for i in range(20):
            clock[0] += 2
            steps.end(i)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert not out and len(lines) == 10
    assert lines[1] == "judging: 4 of 20 after 8 s, about 32 s left"
    assert lines[-1] == "judging: 20 of 20 after 40 s"


def test_progress_is_quiet_where_all_ends_at_once(clock, capsys) -> None:
    with Steps("judging", [1.0] * 20) as steps:
        for i in range(20):
            steps.end(i)
    assert capsys.readouterr().err == ""


def test_progress_tells_what_is_left_from_weights_and_speaks_in_long_silences(
    clock, capsys
) -> None:
    with Steps("judging", [9.0, 0.5, 10.0, 0.5, *[0.0] * 96]) as steps:
        steps.wait()
        clock[0] = 11
        steps.wait()
        steps.wait()
        clock[0] = 22
        steps.end(1)  # too little to tell
        clock[0] = 38
        steps.end(0)
    assert capsys.readouterr().err.splitlines() == [
        "judging: 0 of 100 after 11 s",
        "judging: 1 of 100 after 22 s",
        "judging: 2 of 100 after 38 s, about 42 s left",
    ]


def test_work_gives_results_in_order_and_raises(capsys) -> None:
    calls = [partial(divmod, n, 5) for n in range(9)]
    assert workers.work(calls, "dividing") == [divmod(n, 5) for n in range(9)]
    with pytest.raises(ZeroDivisionError):
        workers.work([partial(divmod, 1, 0), *calls], "dividing")


def test_how_long_it_takes_is_said_before_the_work(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "work", lambda calls, label, weights: capsys.readouterr().err)
    monkeypatch.setattr(cli, "processes", lambda calls: 2)
    said = cli.begin("40 cases", [partial(time.sleep, 0)] * 40, "judging", [2.0] * 40)
    assert said == "40 cases, 2 at a time: about 43 s\n"
    said = cli.begin("40 cases", [partial(time.sleep, 0)] * 40, "judging", [2.0] * 40, known=False)
    assert said == "40 cases, 2 at a time\n"


def test_quick_takes_a_row_of_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "gpu_name", lambda: "")
    asked: list[partial] = []

    def begin(what, calls, *rest, **options):
        asked.extend(calls)
        raise SystemExit

    monkeypatch.setattr(cli, "begin", begin)
    CliRunner().invoke(cli.main, ["--quick"])
    builds = [call.args[0] for call in asked if call.func is compiled.compile_row]
    kernels = [build.row.stem for build in builds]
    every = [build.row.stem for build in compiled.standard_builds(every=False)]
    assert kernels == list(dict.fromkeys(every)), "each once, in the order of the table"
    cases = [call.args[0] for call in asked if call.func is run.judge_case]
    assert {case.name for case in cases} == set(run.QUICK) and len(cases) == len(run.QUICK)


@pytest.mark.parametrize("width", [80, 100, report.PIPED])
def test_no_word_of_a_table_is_broken(width: int) -> None:
    rows, built = [RIGHT, WRONG], [GOOD, replace(GOOD, row="forward_sm80_d64_128x64", form="f16")]
    lines = shown(report.case_table(rows, "", width, all_tensors=True), width)
    text = " ".join(lines)
    words = {"edges-float16", "numba/second/two_pass", "gblock_scale", "5.00e-01", "FAIL"}
    assert words <= set(text.split())
    for part in LONG.split("-"):
        assert re.search(rf"\b{part}\b", text)
    assert (LONG in text) == (width > 80) and max(map(len, lines)) <= width
    for table in (report.compile_table(built), *report.sections(rows, built)):
        lines = shown(table, width)
        assert max(map(len, lines)) <= width
    assert GOOD.row in " ".join(shown(report.compile_table(built), width))


@pytest.mark.parametrize("width", [80, report.PIPED])
def test_variants_shows_every_row_and_its_reason(width: int) -> None:
    lines = shown(report.variant_table(width), width)
    text = re.sub(r"\s+", " ", "\n".join(lines))
    for row in TABLE:
        assert re.search(
            rf"{row.name} +(any|{row.head_dim} )[^a-z]*(x[0-9 ]*)?{re.escape(row.why)}", text
        )
    assert len(lines) == len(TABLE) + 2 or width == 80
    assert max(map(len, lines)) <= width


def test_sections_count_steps_and_kernels() -> None:
    rows = [RIGHT, replace(RIGHT, tensor="lse"), replace(RIGHT, case="long"), WRONG]
    built = [GOOD, replace(GOOD, error="refused"), replace(GOOD, row="jvp_sm80_d64")]
    steps, kernels = report.sections(rows, built)
    assert [line.split() for line in shown(steps, 100)] == [
        ["step", "cases", "pass", "FAIL"],
        ["numba", "dense", "forward", "2", "3"],
        ["numba", "sparse", "second/two_pass", "1", "1"],
    ]
    assert [line.split()[:3] for line in shown(kernels, 100)] == [
        ["kernel", "builds", "good"],
        ["sparse_double_backward_out", "2", "1"],
        ["jvp", "1", "1"],
    ]
    assert not list(report.sections([RIGHT], [GOOD])), "one line would repeat the summary"


def test_what_now_names_the_next_command() -> None:
    refused = replace(GOOD, error="NVRTC refused")
    assert not list(outcome.what_now([RIGHT], [GOOD], "rawattn-check run"))
    own = "\n".join(outcome.what_now([RIGHT, WRONG], [GOOD, refused], "rawattn-check run"))
    assert f"rawattn-check run --filter {LONG}\n" in own
    assert f"rawattn-check compile --filter {GOOD.row} --arch sm_90\n" in own
    assert "libnvrtc" not in own and "NVRTC" not in own and "vacuous" not in own
    mine = "\n".join(outcome.what_now([WRONG], [], "rawattn-check diff --candidate a.py:f"))
    assert f"rawattn-check diff --candidate a.py:f --filter {LONG}\n" in mine
    assert f"rawattn-check dump {LONG}" in mine and "RAWATTN_SYNC" not in mine
    lacking = replace(GOOD, error='Failure finding "libnvrtc.so.13"')
    assert "pip install" in "\n".join(outcome.what_now([], [lacking], "rawattn-check run"))
    empty = replace(RIGHT, verdict=Verdict(0.0, 1.0, "vacuous"))
    assert "no pass" in "\n".join(outcome.what_now([empty], [], "rawattn-check run"))


def test_json_has_the_machine_and_no_nan() -> None:
    skipped = replace(RIGHT, verdict=Verdict(float("nan"), float("inf"), "skipped"))
    whole = outcome.as_json([RIGHT, skipped], [GOOD])
    assert whole["ok"] and whole["versions"]["python"] and whole["gpu"] and whole["driver"]
    assert whole["rows"][0]["error"] == 1e-3
    assert whole["rows"][1]["error"] is whole["rows"][1]["allowed"] is None
