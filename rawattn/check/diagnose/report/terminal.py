"""A diagnosis on the terminal: a short form of each cause, and behind it what it rests on. Who sees
whom is a picture: a query a line, a key a column. The same as one page, and as plain data."""

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from itertools import zip_longest
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.findings import Diagnosis, Finding, Sight
from rawattn.check.diagnose.harness.pairs import HARNESS

HEADS = {"rounding": ("note", "bold green"), "vacuous": ("warning", "bold magenta")}
LEAST, MOST = 60, 100  # columns of what is told in sentences
LINES, EACH, ALL = 15, 3, 1000  # of a finding in short, of one proof in it, and of all there is
FORMULA = re.compile(r" ([<>]=?|[+%/]|//) ")  # where no line is broken
RIGHT = re.compile(r" right\b.*, with rounding as of ")  # a fact about tensors that are
KNOWN = HARNESS | CLASSES
UNSAID = ("sight", "planted")
SURE = {
    "proved": "these numbers show it by themselves, no reference is needed",
    "high": "no other known bug gives these numbers",
    "medium": "it fits, but does not explain all of it, or is not alone in that",
    "low": "a hint, no more",
}
WIDTH = 150  # of tables; sentences are narrower
FORMAT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>rawattn-check</title>
<style>{stylesheet}\nbody {{ color: {foreground}; background: {background}; }}</style>
<pre>{code}</pre></html>
"""


class About(NamedTuple):
    """Whom findings are about. files: where a side comes from. functions: of stages in such files.
    again: the command that shows a finding once more. tally: how many of how many checks fail."""

    files: Mapping[str, str] = {}
    functions: Mapping[str, Mapping[str, str]] = {}
    again: Callable[[Finding], str] = lambda finding: ""
    tally: str = ""


def show(console: Console, diagnosis: Diagnosis, about: About, *, full: bool = False) -> None:
    """The verdict in short, or with ``full`` all that it rests on."""
    wide = min(max(LEAST, console.width), MOST)
    sides = {finding.side for finding in diagnosis.findings} | {*about.files, *diagnosis.judged}
    for n, finding in enumerate(diagnosis.findings):
        lines = (whole if full else short)(finding, about, wide, len(sides) == 1)
        console.print(Text("\n" * (n > 0)) + Text("\n").join(lines), soft_wrap=True)
    if nothing_wrong(diagnosis):
        compared = diagnosis.judged or diagnosis.facts
        said = ("Nothing is wrong.", "bold green") if compared else ("Nothing was compared.", "")
        said = ("Nothing else is wrong.", "bold") if diagnosis.findings else said
        console.print(Text(*said))
    accused = {finding.side for finding in diagnosis.findings if finding.bug != "rounding"}
    for side in diagnosis.judged:
        if accused and side not in accused:
            console.print(Text(f"\n{side}: no fault is found", "green"))


def facts(console: Console, diagnosis: Diagnosis, *, full: bool = False) -> None:
    """What was compared, and what was read of it; what is right is told where nothing is wrong."""
    console.print()
    for fact in filter(None, (diagnosis.title, *diagnosis.facts)):
        if full or nothing_wrong(diagnosis) or not RIGHT.search(fact):
            console.print(Text(fact, "dim"))


def short(finding: Finding, about: About, width: int, alone: bool) -> list[Text]:
    """A finding in at most LINES lines. ``alone``: there is one side, which needs no name."""
    for proofs, queries in ((2, 6), (2, 5), (2, 4), (1, 5), (1, 4), (1, 0)):
        if len(found := whole(finding, about, width, alone, proofs, queries)) <= LINES:
            break
    return found


def whole(
    finding: Finding, about: About, width: int, alone: bool, proofs: int = ALL, queries: int = 6
) -> list[Text]:
    """A finding with so many proofs, cut where not all are told, and queries in its picture."""
    most = EACH if proofs < ALL else ALL
    kind, colour = HEADS.get(finding.bug, ("error", "bold red"))
    label = f"{kind}[{finding.bug}]: "
    side = "" if alone or not finding.side else f"{finding.side}: "
    head = [Text(line, "bold") for line in _wrapped(label + side + finding.title, width)]
    head[0].stylize(colour, 0, len(label) - 2)
    names, file = about.functions.get(finding.side, {}), about.files.get(finding.side, "")
    called = dict.fromkeys(names[stage] for stage in finding.stages if stage in names)
    whose = " in ".join(filter(None, (" and ".join(f"{name}()" for name in called), file)))
    whose = "" if finding.where.endswith(f"/{whose}") else whose
    where = ", ".join(dict.fromkeys(filter(None, (whose, finding.where))))
    tally = f"   {about.tally}" if about.tally else ""
    lines = head + (_led(f"  --> {where}{tally}", 6, width) if where else [])
    if finding.sight is not None and queries:
        drawn = picture(finding.sight, queries, width - 5)
        lines += [Text.assemble(("   | ", "blue"), line) for line in drawn]
    named = finding.bug != "unknown"
    for n, proof in enumerate(finding.evidence[: proofs if named else proofs + 1]):
        lines += _entry("also" if n else "proof" if named else "seen", proof, width, most)
    lines += _entry("least", finding.least, width, 2 * most)
    lines += _entry("fix" if named else "look", finding.look_at, width, most)
    if again := about.again(finding):
        lines.append(Text.assemble(("   = ", "blue"), ("again: ", "bold"), again))
    return lines + _entry("sure", sure(finding), width, most)


def _entry(label: str, text: str, width: int, most: int = EACH) -> list[Text]:
    """ "= fix:   what it says", below it what does not fit."""
    before = f"   = {label + ':':6} "
    if not text:
        return []
    first, *more = _led(before + " ".join(text.split()), len(before), width, most)
    first.stylize("bold", 5, len(before))
    return [first, *more]


def _led(text: str, indent: int, width: int, most: int = LINES) -> list[Text]:
    """Lines after an arrow or the like; the last of too many ends in dots."""
    lines = _wrapped(text, width, " " * indent)
    if len(lines) > most:
        cut = lines[most - 1][: width - 3].rpartition(" ")[0].rstrip(" ,;(")
        lines = [*lines[: most - 1], f"{cut} ..."]
    found = [Text(line) for line in lines]
    found[0].stylize("blue", 0, 5)
    return found


def _wrapped(text: str, width: int, indent: str = "    ") -> list[str]:
    whole = FORMULA.sub("\N{NO-BREAK SPACE}\\1\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(whole, width, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def picture(sight: Sight, queries: int = 6, width: int = 80) -> list[str]:
    """A header and a line for each query, with what marks mean; a narrow ``width`` takes keys."""
    while max(map(len, lines := _drawn(sight, queries))) > width and len(sight.keys) > 1:
        kept = slice(1, None) if (sight.right != sight.found)[:queries, -1].any() else slice(-1)
        right, found = sight.right[:, kept], sight.found[:, kept]
        sight = replace(sight, keys=sight.keys[kept], right=right, found=found)
    return lines


def _drawn(sight: Sight, queries: int) -> list[str]:
    right, found = sight.right[:queries], sight.found[:queries]
    wide = max(len(str(key)) for key in (*sight.keys, *sight.queries)) + 1
    own = sum(key < sight.length for key in sight.keys)
    rows = [("  key", [*map(str, sight.keys)])]
    for n, (query, a, b) in enumerate(zip(sight.queries, right, found, strict=False)):
        marks = [_mark(x, y) for x, y in zip(a, b, strict=True)]
        rows.append((f"{'' if n else 'query':6}{query:>{wide - 1}}", marks))
    lines = []
    for label, cells in rows:
        cells = [f"{cell:>{wide}}" for cell in cells]
        bar = [" |"] * (own < len(cells))  # before what follows the sequence's own keys
        lines.append(f"{label:{wide + 6}}{''.join(cells[:own] + bar + cells[own:])}".rstrip(" |"))
    due, there, width = right > 0, found > 0, max(map(len, lines)) + 3
    past = "zeros" if sight.zeros else "other keys"
    legend = {
        f"sequence {sight.sequence}, head {sight.head}": True,
        ". as it must be": (due & (right == found)).any(),
        "+ seen by mistake": (~due & there).any(),
        "- unseen by mistake": (due & ~there).any(),
        "a number: so often": (due & there & (right != found)).any(),
        f"| {past} from here on": sight.keys[-1] >= sight.length,
        "below 0: keys before its own": sight.keys[0] < 0,
    }
    notes = [text for text, holds in legend.items() if holds][: len(lines)]
    return [f"{x:{width}}{y}".rstrip() for x, y in zip_longest(lines, notes, fillvalue="")]


def _mark(right: float, found: float) -> str:
    if right == found:
        return "." if right else ""
    if right and found:
        return f"{found:g}" if found == int(found) < 10 else "x"
    return "+" if found else "-"


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """All of it that is text."""
    said = [{n: x for n, x in vars(one).items() if n not in UNSAID} for one in diagnosis.findings]
    said = [one | {"forms": [*one["forms"]]} for one in said]
    return {"ok": nothing_wrong(diagnosis), **vars(diagnosis), "findings": said}


def nothing_wrong(diagnosis: Diagnosis) -> bool:
    """Whether all that was found is rounding."""
    return all(finding.bug == "rounding" for finding in diagnosis.findings)


def sure(finding: Finding) -> str:
    others = ", or ".join(finding.alternatives)
    meant = "" if finding.bug == "vacuous" else SURE.get(finding.confidence, "")
    meant = f"{others} would look the same here" if others else meant
    return f"{finding.confidence}; {meant}".removesuffix("; ")


def page(diagnosis: Diagnosis, about: About | None = None, *, full: bool = True) -> str:
    """What ``--full`` shows, as HTML text, to be written as UTF-8; ``full``: and what is right."""
    console = Console(record=True, width=WIDTH, file=StringIO(), legacy_windows=False)
    show(console, diagnosis, about or About(), full=True)
    facts(console, diagnosis, full=full)
    text = console.export_html(code_format=FORMAT)
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
