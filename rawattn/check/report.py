"""What rawattn-check shows: rich tables for people, plain dictionaries for ``--json``."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rawattn.check.compiled import Built
from rawattn.check.machine import versions
from rawattn.check.run import Row
from rawattn.variants import TABLE

COLOURS = {"pass": "green", "skipped": "yellow", "vacuous": "bold magenta", "FAIL": "bold red"}
MOST_GRIDS = 6


def case_table(rows: Iterable[Row], title: str, *, all_tensors: bool = False) -> Table:
    """One line for a case and backend: the tensor nearest to its allowance; and all that fail."""
    table = _table(title)
    for column in ("case", "backend", "tensor"):
        table.add_column(column, overflow="fold")
    for column in ("error", "allowed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for _, group in groupby(rows, key=lambda row: (row.case, row.backend)):
        found = list(group)
        shown = found if all_tensors else [row for row in found if not row.verdict.ok]
        for row in shown or [max(found, key=_strain)]:
            numbers = (_number(row.verdict.error), _number(row.verdict.allowed))
            verdict = Text(row.verdict.verdict, COLOURS[row.verdict.verdict])
            table.add_row(row.case, row.backend, row.tensor, *numbers, verdict)
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


def variant_table() -> Table:
    """The table of kernel variants with the reason for each row."""
    table = _table("kernel variants; of a kernel the first row that fits is taken")
    table.add_column("row", no_wrap=True)
    for column in ("head_dim", "tile", "warps", "stages"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in TABLE:
        cfg, width = row.cfg, "any" if row.kernel.any_width else f"{row.head_dim}"
        tile, warps = f"{cfg.block_m}x{cfg.block_n}", f"{cfg.threads // 32}"
        sizes = (width, tile, warps, f"{cfg.num_stages}")
        table.add_row(row.name, *(("any", "", "", "") if row.family == "numba" else sizes), row.why)
    return table


def as_json(rows: Sequence[Row], built: Sequence[Built]) -> dict[str, Any]:
    """Everything that was found; numbers that JSON lacks (nan, inf) are null."""
    results = [
        {
            **{"case": row.case, "backend": row.backend, "tensor": row.tensor},
            **{name: _finite(value) for name, value in asdict(row.verdict).items()},
            "shares": [
                {name: _finite(value) for name, value in asdict(share).items()}
                for share in row.shares
            ],
        }
        for row in rows
    ]
    compiled = [asdict(b) | {"ok": b.ok} for b in built]
    return {"ok": passed(rows, built), "versions": versions(), "rows": results, "compile": compiled}


def passed(rows: Sequence[Row], built: Sequence[Built]) -> bool:
    """Nothing failed, and something was judged."""
    judged = [row for row in rows if row.verdict.verdict != "skipped"]
    fine = all(row.verdict.ok for row in judged) and all(b.ok for b in built)
    return fine and bool(judged or built)


def summary(rows: Sequence[Row], built: Sequence[Built], seconds: float) -> Text:
    """One line: how many of what, and the outcome."""
    parts = []
    for verdict in COLOURS:
        if count := sum(row.verdict.verdict == verdict for row in rows):
            parts.append(f"{count} {verdict}")
    if built:
        parts.append(f"{sum(b.ok for b in built)} of {len(built)} builds are good")
    good = passed(rows, built)
    text = f"{'OK' if good else 'FAILED'}: {', '.join(parts)}; {seconds:.1f} s"
    return Text(text, "bold green" if good else "bold red")


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


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
