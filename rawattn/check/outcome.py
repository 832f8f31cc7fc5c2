"""The end of run, compile and diff: what was found is shown and written, the exit code says it."""

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from rawattn.check import report
from rawattn.check.compiled import Built
from rawattn.check.diagnose.findings import Diagnosis
from rawattn.check.diagnose.report import terminal
from rawattn.check.machine import describe
from rawattn.check.run import Row


def finish(
    rows: Sequence[Row],
    built: Sequence[Built],
    began: float,
    json_file: Path | None,
    title: str = "",
    *,
    again: str = "rawattn-check run",
) -> NoReturn:
    """Show what was found, write the file, leave with the exit code.

    ``began`` is of ``time.perf_counter``; ``again`` the command that judged, without its filter.
    """
    console = report.console()
    _tables(console, rows, built, title)
    _say_what_now(console, what_now(rows, built, again))
    _leave(console, rows, built, began, json_file, {})


def finish_diff(
    rows: Sequence[Row],
    began: float,
    json_file: Path | None,
    html_file: Path | None,
    title: str,
    found: Diagnosis | None,
    about: terminal.About,
    *,
    again: str,
    flags: str = "",
    full: bool = False,
) -> NoReturn:
    """The same of somebody's function: the diagnosis first, if there is one; the tables where the
    whole is asked for. ``flags``: what the command gave to every case."""
    console = report.console()
    named = found is not None and bool(found.findings)
    if found is not None and named:
        terminal.show(console, found, about, full=full)
        console.print()
    if found is not None and html_file is not None:
        html_file.write_text(terminal.page(found, full=full), encoding="utf-8")
    if full:
        if found is not None:
            terminal.facts(console, found, full=True)
        _tables(console, rows, [], title, all_tensors=True)
    else:
        for line in report.in_short(rows, named):
            console.print(line)
    steps = list(what_now(rows, [], again, flags))
    steps = [step for step in steps if not (named and step.startswith("one case alone"))]
    _say_what_now(console, steps)
    if not full:
        more = ", all evidence, identities and slopes" if named else ""
        console.print(Text(f"\n--full shows every case and tensor{more}", "dim"))
    diagnosis = {} if found is None else {"diagnosis": terminal.as_json(found)}
    _leave(console, rows, [], began, json_file, diagnosis)


def _tables(
    console: Console,
    rows: Sequence[Row],
    built: Sequence[Built],
    title: str,
    *,
    all_tensors: bool = False,
) -> None:
    """Every case, and every build, with what is to be said of them."""
    if rows:
        console.print(report.case_table(rows, title, console.width, all_tensors=all_tensors))
    for note in report.case_notes(rows):
        console.print(note)
    for grid in report.share_grids(rows):
        console.print(grid)
    if built:
        console.print(report.compile_table(built))
    for fault in report.compile_faults(built):
        console.print(fault, style="red", markup=False)
    for section in report.sections(rows, built):
        console.print()
        console.print(section)


def _leave(
    console: Console,
    rows: Sequence[Row],
    built: Sequence[Built],
    began: float,
    json_file: Path | None,
    more: dict[str, Any],
) -> NoReturn:
    console.print()
    console.print(summary(rows, built, time.perf_counter() - began))
    if json_file is not None:
        whole = as_json(rows, built) | more
        json_file.write_text(json.dumps(whole, indent=1, allow_nan=False), encoding="utf-8")
    sys.exit(0 if passed(rows, built) else 1)


def passed(rows: Sequence[Row], built: Sequence[Built]) -> bool:
    """Nothing failed, and something was judged."""
    judged = [row for row in rows if row.verdict.verdict != "skipped"]
    fine = all(row.verdict.ok for row in judged) and all(b.ok for b in built)
    return fine and bool(judged or built)


def summary(rows: Sequence[Row], built: Sequence[Built], seconds: float) -> Text:
    """One line: how many of what, and the outcome."""
    parts = []
    for verdict in report.COLOURS:
        if count := sum(row.verdict.verdict == verdict for row in rows):
            parts.append(f"{count} {verdict}")
    if built:
        parts.append(f"{sum(b.ok for b in built)} of {len(built)} builds are good")
    good = passed(rows, built)
    text = f"{'OK' if good else 'FAILED'}: {', '.join(parts)}; {seconds:.1f} s"
    return Text(text, "bold green" if good else "bold red")


def what_now(
    rows: Sequence[Row], built: Sequence[Built], again: str, flags: str = ""
) -> Iterator[str]:
    """What is to be done where something is not right, the next command first."""
    bad = [row for row in rows if row.verdict.verdict == "FAIL"]
    if bad:
        yield f"one case alone: {again} --filter {bad[0].case}"
    if bad and again == "rawattn-check run":
        yield "a kernel that was stopped, by its name: RAWATTN_SYNC=1 in front of it"
        yield "report it with what these write: rawattn-check --json found.json; rawattn-check env"
    elif bad:
        dumped = f"rawattn-check dump {bad[0].case}{flags}"
        yield f"the inputs and right results of a case as a file: {dumped}"
    if any(row.verdict.verdict == "vacuous" for row in rows):
        yield "vacuous is no pass: zeros would have been let through, so nothing is shown"
    refused = [b for b in built if not b.ok]
    if refused:
        b = refused[0]
        yield f"one row alone: rawattn-check compile --filter {b.row} --arch {b.arch}"
        yield "its source and the compiler's words in a folder: RAWATTN_DUMP=FOLDER in front of it"
    if built and all(re.search("libnvrtc|cuda.core", b.error) for b in built):
        yield 'there is no NVRTC to compile with: pip install "rawattn[cuda13]", or [cuda12]'
    if rows and not built and all(row.verdict.verdict == "skipped" for row in rows):
        yield "nothing was judged: give the function the parameters that the notes name"


def as_json(rows: Sequence[Row], built: Sequence[Built]) -> dict[str, Any]:
    """Everything that was found; numbers that JSON lacks (nan, inf) are null."""
    results = [
        {
            **{"case": row.case, "backend": row.backend, "tensor": row.tensor},
            **report.finite(asdict(row.verdict)),
            "shares": [report.finite(asdict(share)) for share in row.shares],
        }
        for row in rows
    ]
    compiled = [asdict(b) | {"ok": b.ok} for b in built]
    return {"ok": passed(rows, built), **describe(), "rows": results, "compile": compiled}


def _say_what_now(console: Console, steps: Iterable[str]) -> None:
    steps = list(steps)
    if steps:
        console.print("\nWhat now", style="bold")
        for step in steps:
            console.print(f"  {step}", markup=False, highlight=False, soft_wrap=True)
