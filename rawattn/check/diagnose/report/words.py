"""A diagnosis in words: for the terminal, and as plain data for ``--json``.

Long, since every part of a diagnosis has its own words.
"""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rawattn.check.diagnose.engine.question import BY_ROW
from rawattn.check.diagnose.evidence.structure import alike, off
from rawattn.check.diagnose.findings import Check, Diagnosis, Finding, Level

COLOURS = {
    **{"proved": "bold red", "high": "bold red", "medium": "yellow", "low": "yellow"},
    **{"pass": "green", "FAIL": "bold red", "vacuous": "bold magenta", "-": "dim"},
    "rounding": "green",
}
SURE = {"proved": "proved", "high": "high confidence", "medium": "likely", "low": "a guess"}
MOST_PARTS, MOST_SLOPES = 8, 16  # of one tensor, and about so many in all
TRIAL = re.compile(r"[RW]\d+")  # names of what a comparison was fed: right and wrong results
KINDS = ("sequence", "head", "tile", "row")  # of parts, those that say most first
WHOLE_KINDS = KINDS[:2]  # of which each part is there, not the worst alone
UNSEEN = 5e-4  # residuals below it are printed as 0.0%


def render(diagnosis: Diagnosis, *, full: bool = False) -> Group:
    """The verdict, then what it rests on. ``full``: every identity and every part."""
    shown: list[RenderableType] = [Text(diagnosis.title, "bold")]
    if nothing_wrong(diagnosis):
        compared = diagnosis.checks or diagnosis.levels or diagnosis.facts
        words = ("Nothing is wrong.", "bold green") if compared else ("Nothing was compared.", "")
        shown.append(Text(*words))
    for n, finding in enumerate(diagnosis.findings, start=1):
        shown.append(_finding(finding, n if len(diagnosis.findings) > 1 else 0))
    shown += _faultless(diagnosis)
    shown += _identities(diagnosis.checks, full)
    if levels := list(diagnosis.levels) if full else _telling(diagnosis.levels):
        title = "slope of one over the other (least squares), and the residual that it leaves"
        fewer = len(levels) < len(diagnosis.levels)
        shown += [_title(title, fewer), _slopes(levels)]
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


def _finding(finding: Finding, place: int) -> Group:
    """Side, bug and confidence in a line; below it where, why, and what to look at."""
    colour = COLOURS.get(finding.bug, COLOURS[finding.confidence])
    label = f"{SURE[finding.confidence]}; {finding.bug}"
    label = finding.bug if finding.bug == "unknown" else label  # nothing was named: no guess
    title = Text.assemble(
        f"{place}. " if place else "", (f"{finding.side}: {finding.title}", colour)
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
        lines = list(dict.fromkeys(line for line in lines if line))
        for n, line in enumerate(lines):
            listed = Table.grid(padding=(0, 1, 0, 0))
            listed.add_row(*(("-",) if len(lines) > 1 else ()), Text(line))
            grid.add_row("" if n else name, listed)
    below = Padding(grid, (0, 0, 0, 3), expand=False)
    return Group(Text(), _Headline(title, Text(f"[{label}]", "dim")), below)


class _Headline(NamedTuple):
    """A title with its label behind it; below it where a line is too short for both."""

    title: Text
    label: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text.assemble(self.title, "  ", self.label)
        if line.cell_len <= options.max_width:
            yield line
        else:
            yield self.title
            yield Padding(self.label, (0, 0, 0, 3), expand=False)


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
        title = _title("identities that must hold on a side alone", len(some) < len(checks))
        return [*((title, _ladder(some)) if some else (Text(),)), *_rest(checks, some)]
    if full and checks:
        return [_title("what it was fed, and how often its verdict was wrong"), _ladder(checks)]
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
    for column in ("name", "side"):
        table.add_column(column, no_wrap=True)
    table.add_column("what must hold", overflow="fold")
    for column in ("error", "allowed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for check in sorted(checks, key=lambda check: _rank(check.name)):
        where = check.place
        text = f"{check.text} ({where})" if where else check.text
        numbers = ("", "") if check.verdict == "-" else map(readable, (check.value, check.allowed))
        verdict = Text(check.verdict, COLOURS.get(check.verdict, ""))
        table.add_row(Text(check.name), Text(check.side), Text(text), *numbers, verdict)
    return table


def _rest(checks: Sequence[Check], shown: Sequence[Check]) -> list[Text]:
    """The names of the identities that are not shown, by side and outcome."""
    there = {(check.side, check.name) for check in shown}
    passed = {(check.side, check.name) for check in checks if check.verdict == "pass"}
    left: dict[tuple[str, str], list[str]] = {}  # sides by outcome and names
    for verdict, known in (("pass", there), ("-", there | passed)):
        for side in dict.fromkeys(check.side for check in checks):
            here = {c.name for c in checks if (c.side, c.verdict) == (side, verdict)}
            names = sorted((name for name in here if (side, name) not in known), key=_rank)
            if names:
                left.setdefault((verdict, ", ".join(names)), []).append(side)
    lines = []
    for (verdict, which), sides in left.items():
        who, one = " and ".join(sides), len(sides) == 1
        if verdict == "pass":
            lines.append(f"{who} {'passes' if one else 'pass'} {which}")
        else:
            lines.append(f"{who} {'has' if one else 'have'} nothing to check {which} with")
    return [Text(line, "dim") for line in lines]


def _telling(levels: Sequence[Level]) -> list[Level]:
    """Of the tensors that are off a line for all, and the parts that explain most if any do."""
    chosen: list[Level] = []
    for tensor in dict.fromkeys(level.tensor for level in levels):
        of_tensor = [level for level in levels if level.tensor == tensor]
        all_, *others = [level for level in of_tensor if level.level == "all"]
        if not off(all_):
            continue
        best: list[Level] = []
        left, same = max(all_.residual, UNSEEN), []
        for kind in KINDS[:-1] if tensor in BY_ROW else KINDS:
            parts = [level for level in of_tensor if level.level == kind]
            if alike(parts, all_):
                same += [kind] if kind in WHOLE_KINDS and len(parts) > 1 else []
            elif _left_over(parts) < left / 2 or (kind in WHOLE_KINDS and not best):
                best, left = parts, _left_over(parts)
        key = f"{all_.key or 'all'} (alike in each {' and '.join(same)})" if same else all_.key
        there = [part for part in best if part.error or not math.isnan(part.slope)]
        worst = sorted(there, key=off, reverse=True)[:MOST_PARTS]
        chosen += [replace(all_, key=key), *others, *(part for part in there if part in worst)]
        if len(chosen) >= MOST_SLOPES:
            break
    return chosen


def _left_over(parts: Sequence[Level]) -> float:
    """What slopes of their own leave in most of ``parts``."""
    residuals = [part.residual for part in parts if math.isfinite(part.residual)]
    return max(statistics.median(residuals), UNSEEN) if residuals else math.inf


def _slopes(levels: Iterable[Level]) -> Table:
    table = _table()
    for column in ("tensor", "part"):
        table.add_column(column, no_wrap=True)
    for column in ("slope", "residual", "largest error"):
        table.add_column(column, justify="right", no_wrap=True)
    last = ""
    for level in levels:
        part = level.key if level.level in level.key else f"{level.level} {level.key}".strip()
        part = level.key or "all" if level.level == "all" else part
        form = ".4f" if abs(level.slope) < 100 else ".5g"
        slope = Text(readable(level.slope, form), "red" if off(level) else "green")
        numbers = (readable(level.residual, ".1%"), readable(level.error))
        table.add_row(Text("" if level.tensor == last else level.tensor), part, slope, *numbers)
        last = level.tensor
    return table


def _title(words: str, fewer: bool = False) -> Text:
    """Of a table; ``fewer``: it does not have all lines."""
    return Text.assemble((f"\n{words}", "italic"), ("; --full shows all" if fewer else "", "dim"))


def _table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), show_edge=False)


def _rank(name: str) -> tuple[str, int, str]:
    """I2 before I10, and R2 before W1."""
    digits = "".join(filter(str.isdigit, name))
    return name[0] if TRIAL.fullmatch(name) else "", int(digits or 0), name


def readable(value: float, form: str = ".2g") -> str:
    """As people write it; "-" where there is none."""
    if form == ".2g" and 99.5 <= abs(value) < 1e5:
        form = ".0f"  # 109, not 1.1e+02
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    return format(value, form)


def _plain(value: Any) -> Any:
    """What JSON has for ``value``."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
