"""Benchmark rows as tables (terminal, markdown) and plots."""

import math
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from cases import SUITES, BenchCase

Row = dict[str, Any]
Grid = list[list[str]]  # the header, then the lines
CASES: dict[str, BenchCase] = {case.name: case for suite in SUITES.values() for case in suite()}
DIRECTIONS = ("forward", "backward")


def ratio(row: Row, peers: Iterable[str] | None = None) -> float | None:
    """How many times faster ours is than the fastest of ``peers`` (None: of all of them)."""
    times = [ms for name, ms in row["peers"].items() if peers is None or name in peers]
    return min(times) / row["ours_ms"] if times else None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Over the values that are there, None when there is none."""
    logs = [math.log(value) for value in values if value is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _pair(values: Iterable[float | None], digits: int) -> str:
    shown = ["-" if value is None else f"{value:.{digits}f}" for value in values]
    return "" if set(shown) == {"-"} else " / ".join(shown)


def case_grid(rows: list[Row], against: list[str]) -> Grid:
    """TFLOP/s, forward / backward, one line a case, one column a contender; then the ratios."""
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    methods = list(dict.fromkeys(name for row in rows for name in row.get("methods", {})))
    header = ["case", "ours", *methods, *names, f"ours to {' or '.join(against)}", "ours to best"]
    grid = [header]
    for case, group in groupby(rows, key=lambda row: row["case"]):
        by_direction = {row["direction"]: row for row in group}
        both = [by_direction.get(direction) for direction in DIRECTIONS]

        def rates(name: str, both: list[Row | None] = both, case: str = case) -> str:
            return _pair((_rate(CASES[case], row, name) for row in both), 0)

        grid.append(
            [
                case,
                *map(rates, ("ours", *methods, *names)),
                _pair((row and ratio(row, against) for row in both), 2),
                _pair((row and ratio(row) for row in both), 2),
            ]
        )
    return grid


def _rate(case: BenchCase, row: Row | None, name: str) -> float | None:
    if row is None:
        return None
    times = {"ours": row["ours_ms"], **row["peers"], **row.get("methods", {})}
    return case.flop(row["direction"]) / times[name] * 1e-9 if name in times else None


def summary_grid(rows: list[Row], against: list[str]) -> Grid:
    """Geometric means of the ratios, forward / backward, by suite and over head_dim <= 128."""
    groups = {suite: [row for row in rows if row["suite"] == suite] for suite in SUITES}
    groups["all with head_dim <= 128"] = [r for r in rows if CASES[r["case"]].head_dim <= 128]
    grid = [["cases", f"ours to {' or '.join(against)}", "ours to best"]]
    for name, members in groups.items():
        by_direction = [[r for r in members if r["direction"] == d] for d in DIRECTIONS]
        if members:
            grid.append(
                [
                    name,
                    _pair(
                        (geometric_mean(ratio(r, against) for r in rs) for rs in by_direction), 2
                    ),
                    _pair((geometric_mean(ratio(r) for r in rs) for rs in by_direction), 2),
                ]
            )
    return grid


def grids(result: dict[str, Any], against: list[str]) -> dict[str, Grid]:
    """Every table that ``result`` has the numbers for, by the name of its markers."""
    rows = result.get("bench", [])
    tables = {}
    for suite in SUITES:
        if members := [row for row in rows if row["suite"] == suite]:
            tables[suite] = case_grid(members, against)
    if rows:
        tables["summary"] = summary_grid(rows, against)
    for name, unit, digits in (("host", "us per call", 1), ("first_call", "seconds", 2)):
        if times := result.get(name):
            lines = [[what, f"{time:.{digits}f}"] for what, time in times.items()]
            tables[name] = [["", unit], *lines]
    return tables


def machine_line(result: dict[str, Any]) -> str:
    """On what the numbers were measured."""
    versions = result["versions"]
    known = [f"{name} {versions[name]}" for name in ("torch", "cupy-cuda13x") if name in versions]
    return ", ".join([result["gpu"], f"driver {result['driver']}", *known])


def print_tables(result: dict[str, Any], against: list[str]) -> None:
    """The tables, and the peers that failed, to the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=200)
    for name, (header, *lines) in grids(result, against).items():
        table = Table(*header, title=f"{name}: {machine_line(result)}")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    failures = {
        f"{row['case']} {peer}: {error}"
        for row in result.get("bench", [])
        for peer, error in row.get("errors", {}).items()
    }
    for failure in sorted(failures):
        console.print(failure, markup=False)


def markdown_tables(result: dict[str, Any], against: list[str]) -> dict[str, str]:
    """The tables as markdown, by the name of their markers."""
    bodies = {}
    for name, (header, *lines) in grids(result, against).items():
        table = [header, ["---"] * len(header), *lines]
        text = "\n".join(f"| {' | '.join(line)} |" for line in table)
        bodies[name] = f"{machine_line(result)}.\n\n{text}"
    return bodies


def splice(text: str, name: str, body: str) -> str:
    """``text`` with ``body`` between the markers of ``name``; ValueError when it has none."""
    start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no place for the table {name!r}: expected {start} ... {end}")
    return pattern.sub(lambda _: f"{start}\n{body}\n{end}", text, count=1)


def plot(rows: list[Row], folder: Path) -> list[Path]:
    """Suite paper over sequence length, one file per head_dim; the other suites as bars."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for head_dim in sorted({CASES[r["case"]].head_dim for r in rows if r["suite"] == "paper"}):
        members = [
            r for r in rows if r["suite"] == "paper" and CASES[r["case"]].head_dim == head_dim
        ]
        paths.append(
            _plot_lines(members, f"head_dim {head_dim}", folder / f"paper_d{head_dim}.png")
        )
    for suite in ("varlen", "seed"):
        if members := [r for r in rows if r["suite"] == suite]:
            paths.append(_plot_bars(members, suite, folder / f"{suite}.png"))
    return paths


def _names(rows: list[Row]) -> list[str]:
    return ["ours", *dict.fromkeys(name for row in rows for name in row["peers"])]


def _plot_lines(rows: list[Row], title: str, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), sharex=True)
    for line, direction in zip(axes, DIRECTIONS, strict=True):
        for axis, causal in zip(line, (False, True), strict=True):
            members = [
                (CASES[r["case"]], r)
                for r in rows
                if r["direction"] == direction and CASES[r["case"]].causal == causal
            ]
            for name in _names([row for _, row in members]):
                points = [
                    (case.lengths[0], rate)
                    for case, row in members
                    if (rate := _rate(case, row, name)) is not None
                ]
                axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
            axis.set(title=f"{direction}, {'causal' if causal else 'full'}", xscale="log")
            axis.set(xlabel="sequence length", ylabel="TFLOP/s", ylim=(0, None))
            if members:
                axis.legend()
    return _save(figure, title, path)


def _plot_bars(rows: list[Row], title: str, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(12, 9))
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        members = [row for row in rows if row["direction"] == direction]
        names = _names(members)
        for offset, name in enumerate(names):
            rates = [_rate(CASES[row["case"]], row, name) or 0.0 for row in members]
            places = [i + offset / (len(names) + 1) for i in range(len(members))]
            axis.bar(places, rates, width=1 / (len(names) + 1), label=name)
        axis.set_xticks(range(len(members)), [row["case"] for row in members], rotation=30)
        axis.set(title=direction, ylabel="TFLOP/s")
        axis.legend()
    return _save(figure, title, path)


def _save(figure: Any, title: str, path: Path) -> Path:
    from matplotlib import pyplot

    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
