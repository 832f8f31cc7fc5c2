"""A diagnosis in words: for the terminal, and as plain data for ``--json``.

Long, since every part of a diagnosis has its own words.
"""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rawattn.check.diagnose.findings import Check, Diagnosis, Finding, Level
from rawattn.check.diagnose.question import BY_ROW

COLOURS = {
    **{"proved": "bold red", "high": "bold red", "medium": "yellow", "low": "yellow"},
    **{"pass": "green", "FAIL": "bold red", "vacuous": "bold magenta", "-": "dim"},
    "rounding": "green",
}
SURE = {"proved": "proved", "high": "high confidence", "medium": "likely", "low": "a guess"}
MOST_TENSORS, MOST_PARTS = 3, 8
TRIAL = re.compile(r"[RW]\d+")  # names of what a comparison was fed: right and wrong results
KINDS = ("sequence", "head", "tile", "row")  # of parts, those that say most first
CLOSE = 0.02  # slopes this near to 1 with residuals below it are those of rounding


def render(diagnosis: Diagnosis, *, full: bool = False) -> Group:
    """The verdict, then what it rests on. ``full``: every identity and every part."""
    shown: list[RenderableType] = [Text(diagnosis.title, "bold")]
    if nothing_wrong(diagnosis):
        compared = diagnosis.checks or diagnosis.levels or diagnosis.facts
        words = ("Nothing is wrong.", "bold green") if compared else ("Nothing was compared.", "")
        shown.append(Text(*words))
    for number, finding in enumerate(diagnosis.findings, start=1):
        shown.append(_finding(finding, number if len(diagnosis.findings) > 1 else 0))
    shown += _faultless(diagnosis)
    shown += _identities(diagnosis.checks, full)
    if levels := _telling(diagnosis.levels, full):
        title = "\nslope of one over the other (least squares), and the residual that it leaves"
        shown += [Text(title, "italic"), _slopes(levels)]
    if diagnosis.facts:
        shown += [Text(), *(Text(fact, "dim") for fact in diagnosis.facts)]
    return Group(*shown)


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """All of it; numbers that JSON lacks (nan, inf) are null."""
    found: dict[str, Any] = _plain(asdict(diagnosis))
    return {"ok": nothing_wrong(diagnosis), **found}


def nothing_wrong(diagnosis: Diagnosis) -> bool:
    """Whether all that was found is rounding."""
    return all(finding.bug == "rounding" for finding in diagnosis.findings)


def _finding(finding: Finding, number: int) -> Group:
    """Side, bug and confidence in a line; below it where, why, and what to look at."""
    colour = COLOURS.get(finding.bug, COLOURS[finding.confidence])
    label = f"{SURE[finding.confidence]}; {finding.bug}"
    label = finding.bug if finding.bug == "unknown" else label  # nothing was named: no guess
    head = Text.assemble(
        f"{number}. " if number else "",
        (f"{finding.side}: {finding.title}", colour),
        (f"  [{label}]", "dim"),
    )
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    parts = (
        ("where", [finding.where]),
        ("evidence", finding.evidence),
        ("look at", [finding.look_at]),
        ("it may also be", [", or ".join(finding.alternatives)]),
    )
    for name, lines in parts:
        lines = [line for line in lines if line]
        for n, line in enumerate(lines):
            listed = Table.grid(padding=(0, 1, 0, 0))
            listed.add_row(*(("-",) if len(lines) > 1 else ()), Text(line))
            grid.add_row("" if n else name, listed)
    return Group(Text(), head, Padding(grid, (0, 0, 0, 3)))


def _faultless(diagnosis: Diagnosis) -> list[Text]:
    """The sides that were judged beside a wrong one, and of which nothing is to be said."""
    if nothing_wrong(diagnosis):
        return []
    accused = {finding.side for finding in diagnosis.findings if finding.bug != "rounding"}
    failing = {check.side for check in diagnosis.checks if check.verdict == "FAIL"}
    passing = dict.fromkeys(c.side for c in diagnosis.checks if c.verdict == "pass")
    sides = [side for side in passing if side not in accused | failing]
    return [Text(f"\n{side}: no fault is found", COLOURS["pass"]) for side in sides]


def _identities(checks: Sequence[Check], full: bool) -> list[RenderableType]:
    """The ladder of what says most; of what a comparison was fed a single line."""
    if checks and not any(TRIAL.fullmatch(check.name) for check in checks):
        some = checks if full else _relevant(checks)
        title = Text("\nidentities that must hold on a side alone", "italic")
        return [*((title, _ladder(some)) if some else (Text(),)), *_rest(checks, some)]
    if full and checks:
        return [
            Text("\nwhat it was fed, and how often its verdict was wrong", "italic"),
            _ladder(checks),
        ]
    wrong = sum(check.verdict != "pass" for check in checks)
    told = f"\n{wrong} of {len(checks)} kinds of result fool it; --full shows each"
    return [Text(told, "dim")] if wrong else []


def _relevant(checks: Sequence[Check]) -> list[Check]:
    """What fails or says nothing, and how the other sides fare there."""
    wanted = {_about(check) for check in checks if check.verdict in ("FAIL", "vacuous")}
    return [check for check in checks if _about(check) in wanted and check.verdict != "-"]


def _about(check: Check) -> tuple[str, str]:
    """The identity; what its text has in brackets may be about one side."""
    return check.name, check.text.partition(" (")[0]


def _ladder(checks: Iterable[Check]) -> Table:
    table = _table()
    for column in ("", "side"):
        table.add_column(column, no_wrap=True)
    table.add_column("what must hold", overflow="fold")
    for column in ("error", "allowed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for check in sorted(checks, key=lambda check: _rank(check.name)):
        where = check.where.removeprefix("all").removeprefix(": ")
        text = f"{check.text} ({where})" if where else check.text
        numbers = ("", "") if check.verdict == "-" else map(_number, (check.value, check.allowed))
        verdict = Text(check.verdict, COLOURS.get(check.verdict, ""))
        table.add_row(Text(check.name), Text(check.side), Text(text), *numbers, verdict)
    return table


def _rest(checks: Sequence[Check], shown: Sequence[Check]) -> list[Text]:
    """The names of the identities that are not shown, by side and outcome."""
    lines = []
    there = {(check.side, check.name) for check in shown}
    passed = {(check.side, check.name) for check in checks if check.verdict == "pass"}
    for verdict, words in (("pass", "passes"), ("-", "has nothing to check")):
        there |= passed if verdict == "-" else set()
        for side in dict.fromkeys(check.side for check in checks):
            left = {
                check.name: None
                for check in sorted(checks, key=lambda check: _rank(check.name))
                if (check.side, check.verdict) == (side, verdict)
                and (side, check.name) not in there
            }
            if left:
                end = " with" if verdict == "-" else ""
                lines.append(Text(f"{side} {words} {', '.join(left)}{end}", "dim"))
    return lines


def _telling(levels: Sequence[Level], full: bool) -> list[Level]:
    """Of the tensors that are off all of it, and the parts that explain most."""
    if full:
        return list(levels)
    chosen: list[Level] = []
    for tensor in dict.fromkeys(level.tensor for level in levels):
        of_tensor = [level for level in levels if level.tensor == tensor]
        whole = [level for level in of_tensor if level.level == "all"]
        if whole and not _off(whole[0]):
            continue
        best: list[Level] = []
        for kind in KINDS[:-1] if tensor in BY_ROW else KINDS:
            parts = [level for level in of_tensor if level.level == kind]
            best = parts if not best or _left_over(parts) < _left_over(best) / 2 else best
        worst = sorted(best, key=_off, reverse=True)[:MOST_PARTS]
        chosen += whole + [level for level in best if level in worst]
        if len({level.tensor for level in chosen}) == MOST_TENSORS:
            break
    return chosen


def _off(level: Level) -> bool:
    """Whether more than rounding is between the two sides."""
    return not (abs(level.slope - 1) < CLOSE and level.residual < CLOSE)


def _left_over(parts: Sequence[Level]) -> float:
    """What slopes of their own leave in most of ``parts``."""
    residuals = [part.residual for part in parts if math.isfinite(part.residual)]
    return statistics.median(residuals) if residuals else math.inf


def _slopes(levels: Iterable[Level]) -> Table:
    table = _table()
    for column in ("tensor", "part"):
        table.add_column(column, no_wrap=True)
    for column in ("slope", "residual", "largest error"):
        table.add_column(column, justify="right", no_wrap=True)
    last = ""
    for level in levels:
        part = level.key if level.level in level.key else f"{level.level} {level.key}".strip()
        part = "all" if level.level == "all" else part
        slope = Text(_number(level.slope, ".4f"), "red" if _off(level) else "green")
        numbers = (_number(level.residual, ".1%"), _number(level.error))
        table.add_row(Text("" if level.tensor == last else level.tensor), part, slope, *numbers)
        last = level.tensor
    return table


def _table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), show_edge=False)


def _rank(name: str) -> tuple[str, int, str]:
    """I2 before I10, and R2 before W1."""
    digits = "".join(filter(str.isdigit, name))
    return name[0] if TRIAL.fullmatch(name) else "", int(digits or 0), name


def _number(value: float, form: str = ".2g") -> str:
    if form == ".2g" and 99.5 <= abs(value) < 1e5:
        form = ".0f"  # 109, not 1.1e+02
    return "-" if math.isnan(value) else format(value, form)


def _plain(value: Any) -> Any:
    """What JSON has for ``value``."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
