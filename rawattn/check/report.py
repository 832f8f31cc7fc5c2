"""What rawattn-check shows: tables, and notes below them.

Longer than other modules: a function a table, which share the colours, the widths and the numbers.
"""

import math
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rawattn.check.compiled import Built
from rawattn.check.progress import counted
from rawattn.check.run import Row
from rawattn.variants import TABLE

T = TypeVar("T")
COLOURS = {"pass": "green", "skipped": "yellow", "vacuous": "bold magenta", "FAIL": "bold red"}
MOST_GRIDS, MOST_NOTES = 6, 4
WORST = re.compile(r"worst at (\(.*?\)): (\S+), not (\S+)$")  # as ``diff.judge`` says it
PIPED = 200  # columns where no terminal limits them: no line is broken there
NUMBERS = 27  # columns of the error, what is allowed and the verdict, with the gaps before them
REASONS = 120  # columns from which on a row and its reason stand in one line


def console() -> Console:
    """Where results are shown: as wide as the terminal, or as $COLUMNS says, or PIPED."""
    limited = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if limited else Console(width=PIPED)


def case_table(
    rows: Iterable[Row], title: str, width: int = PIPED, *, all_tensors: bool = False
) -> Table:
    """One line for a case and backend: the tensor nearest to its allowance; and all that fail.

    In a narrow ``width`` the names of cases are broken between words.
    """
    lines = []
    for _, group in groupby(rows, key=lambda row: (row.case, row.backend)):
        found = list(group)
        shown = found if all_tensors else [row for row in found if not row.verdict.ok]
        lines += shown or [max(found, key=_strain)]
    table = _table(title)
    for column in ("case", "backend", "tensor"):
        table.add_column(column, no_wrap=True)
    for column in ("error", "allowed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    beside = (max(len(row.backend) for row in lines), max(len(row.tensor) for row in lines))
    left = width - NUMBERS - sum(max(length, len("backend")) + 1 for length in beside)
    for row in lines:
        case = "\n".join(textwrap.wrap(row.case, max(16, left)))
        numbers = (_number(row.verdict.error), _number(row.verdict.allowed))
        verdict = Text(row.verdict.verdict, COLOURS[row.verdict.verdict])
        table.add_row(case, row.backend, row.tensor, *numbers, verdict)
    return table


def case_notes(rows: Iterable[Row]) -> list[Text]:
    """What is to be said of results that are no plain pass, equal words once."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.verdict.note:
            where = f"{row.case} {row.backend} {row.tensor}{_place(row)}"
            said.setdefault((row.verdict.verdict, row.verdict.note), []).append(where)
    order = {verdict: place for place, verdict in enumerate(COLOURS)}
    return [
        Text.assemble(
            (verdict, COLOURS[verdict]),
            f" {note}: " if len(note) < 100 else f" {note}\nin ",
            ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else ""),
        )
        for (verdict, note), places in sorted(said.items(), key=lambda item: order[item[0][0]])
    ]


def in_short(rows: Sequence[Row], named: bool = False) -> Iterator[Text]:
    """The worst element of all, and what other notes there are on what is no plain pass; of those
    that have a ``named`` cause, the exceptions."""
    placed = {row: WORST.match(row.verdict.note) for row in rows if not row.verdict.ok}
    worst = max((row for row in placed if placed[row]), key=_strain, default=None)
    if worst is not None and (match := placed[worst]):
        at, got, expected = match.groups()
        where = f"{worst.tensor} at {at} of {worst.case}{_place(worst)}"
        colour = COLOURS[worst.verdict.verdict]
        yield Text.assemble(("worst", colour), f" {where}: expected {expected}, got {got}")
    others = [r for r in placed if not placed[r] and r.verdict.verdict != "skipped"]
    notes = case_notes(r for r in others if r.tensor == "-" or not named)
    yield from notes[:MOST_NOTES]
    if len(notes) > MOST_NOTES:
        yield Text(f"and {len(notes) - MOST_NOTES} more such notes")
    if skipped := [row for row in placed if row.verdict.verdict == "skipped"]:
        why = list(dict.fromkeys(row.verdict.note for row in skipped))
        lacks = "no parameter "
        if all(note.startswith(lacks) for note in why):
            names = (name for note in why for name in note.removeprefix(lacks).split(", "))
            why = [lacks + ", ".join(dict.fromkeys(names))]
        cases = f" ({counted(len(skipped), 'case')})"
        yield Text.assemble(("skipped", COLOURS["skipped"]), f" {'; '.join(why)}{cases}")


def share_grids(rows: Iterable[Row]) -> list[Group]:
    """For the first tensors that fail: the error of every sequence (down) and head (across)."""
    bad = [row for row in rows if row.verdict.verdict == "FAIL" and row.shares]
    grids = []
    for row in bad[:MOST_GRIDS]:
        title = f"{row.case}, {row.backend}: error of {row.tensor} by sequence and head"
        table = _table("")
        table.add_column("sequence")
        errors = {(share.sequence, share.head): share.error for share in row.shares}
        heads = sorted({head for _, head in errors})
        for head in heads:
            table.add_column(f"head {head}", justify="right")
        for sequence in sorted({s for s, _ in errors}, key=lambda s: (s < 0, s)):
            cells = [_shaded(errors[sequence, head], row.verdict.allowed) for head in heads]
            table.add_row("past the end" if sequence < 0 else str(sequence), *cells)
        grids.append(Group(Text(title), table))
    return grids


def compile_table(built: Sequence[Built]) -> Table:
    """One line for a row and form, over all architectures; what is wrong on which is a fault."""
    archs = sorted({b.arch for b in built}, key=lambda arch: (len(arch), arch))
    each = max(Counter((b.row, b.form) for b in built).values())
    table = _table(
        f"rows compiled for {f'{each} of ' if each < len(archs) else ''}{', '.join(archs)} "
        "(form: dtype; l, r masked left, right; a atomic; q, k, v: a direction's parts; "
        "16x64 heads of a selection, keys of a block; s blocks have factors)"
    )
    table.add_column("row", no_wrap=True)
    table.add_column("form", overflow="fold")
    for column in ("KiB", "regs", "spills", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for (row, form), group in groupby(built, key=lambda b: (b.row, b.form)):
        found = list(group)
        verdict = "pass" if all(b.ok for b in found) else "FAIL"
        table.add_row(
            row,
            form,
            f"{found[0].smem_bytes / 1024:.0f}",
            _span([b.registers for b in found]),
            _span([b.spill_bytes for b in found]),
            f"{sum(b.seconds for b in found):.1f}",
            Text(verdict, COLOURS[verdict]),
        )
    return table


def compile_faults(built: Iterable[Built]) -> list[str]:
    """Refusals, spills and compiler warnings; what several architectures share is said once."""
    found: dict[tuple[str, str, str], list[Built]] = {}
    for b in built:
        refusal = ["refused"] if b.error else []
        spill = [f"{b.spill_bytes} bytes spilled"] if b.spill_bytes else []
        for fault in [*refusal, *spill, *(warning.strip() for warning in b.warnings)]:
            found.setdefault((b.row, b.form, fault), []).append(b)
    return [
        f"{row} ({form}) {', '.join(b.arch for b in on)}: {on[0].error or fault}"
        for (row, form, fault), on in found.items()
    ]


def sections(rows: Sequence[Row], built: Sequence[Built]) -> Iterator[Table]:
    """How many results of each step are what, and how many builds of each kernel."""
    steps = _grouped(rows, _step)
    if len(steps) > 1:
        met = [verdict for verdict in COLOURS if any(r.verdict.verdict == verdict for r in rows)]
        table = _counts("step", "cases", *met)
        for step, of_step in steps.items():
            counts = Counter(row.verdict.verdict for row in of_step)
            cases = len({row.case for row in of_step})
            table.add_row(step, str(cases), *(str(counts[verdict] or "") for verdict in met))
        yield table
    kernels = _grouped(built, _kernel)
    if len(kernels) > 1:
        table = _counts("kernel", "builds", "good", "spilled bytes", "s")
        for kernel, of_kernel in kernels.items():
            good, spilled = sum(b.ok for b in of_kernel), sum(b.spill_bytes for b in of_kernel)
            seconds = sum(b.seconds for b in of_kernel)
            counted = (str(len(of_kernel)), str(good), str(spilled or ""), f"{seconds:.1f}")
            table.add_row(kernel, *counted)
        yield table


def variant_table(width: int = PIPED) -> Group:
    """The table of kernel variants with the reason for each row, below it where that is narrow."""
    names = max(len(v.name) for v in TABLE) + 1
    lines = [Text("kernel variants; of a kernel the first row that fits is taken")]
    lines += [Text(f"{'row':{names}} head_dim    tile warps stages why")]
    for v in TABLE:
        tile = f"{v.cfg.block_m}x{v.cfg.block_n}"
        sizes = f"{v.head_dim:9} {tile:>7} {v.cfg.threads // 32:5} {v.cfg.num_stages:6}"
        line = f"{v.name:{names}}{sizes if v.family != 'numba' else 'any'.rjust(9).ljust(30)}"
        if width >= REASONS:
            lines.append(Text(f"{line} {v.why}", overflow="fold"))
        else:
            why = textwrap.fill(v.why, width - 4, break_on_hyphens=False)
            lines.append(Text(line.rstrip() + textwrap.indent(f"\n{why}", "    ")))
    return Group(*lines)


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a JSON object: None for nan and inf, which JSON lacks."""
    lacks = {n for n, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {name: None if name in lacks else value for name, value in values.items()}


def _step(row: Row) -> str:
    """What a row is about: "numba dense atomic_dq", "numba sparse forward"."""
    backend, _, step = row.backend.partition("/")
    kind = "sparse" if row.case.startswith("sparse-") else "dense"
    return f"{backend} {kind} {step or 'forward'}"


def _kernel(built: Built) -> str:
    """The name of a row up to the architecture that it is written for."""
    return re.split(r"_(?=sm\d)", built.row)[0]


def _grouped(things: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def _counts(name: str, *columns: str) -> Table:
    table = _table("")
    table.add_column(name, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _strain(row: Row) -> float:
    """How much of its allowance a row uses."""
    return row.verdict.error / row.verdict.allowed if row.verdict.allowed else 0.0


def _place(row: Row) -> str:
    """Where the error of a failed row is largest."""
    if row.verdict.ok or not row.shares:
        return ""
    share = row.shares[0]
    where = f"sequence {share.sequence}" if share.sequence >= 0 else "past the end"
    return f" ({where}, head {share.head})"


def _table(title: str) -> Table:
    return Table(
        title=title or None, title_justify="left", box=None, padding=(0, 1, 0, 0), show_edge=False
    )


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2e}"


def _shaded(error: float, allowed: float) -> Text:
    return Text(_number(error), "red" if error > allowed else "green")


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"
