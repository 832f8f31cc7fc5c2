"""Benchmark rows as tables of text, and those on the terminal; pages.py puts them into markdown.

Longer than a module should be, because a reader of one table compares it with the others.
"""

import math
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from measure.accuracy import LIMITS, SCORES, faults, to_most_exact
from measure.cases import FIRST_ORDER, SECOND_ORDER, SUITES, WORK, BenchCase
from measure.floors import GPUS, floor

Row = dict[str, Any]
Grid = list[list[str]]  # the header, then the lines
CASES: dict[str, BenchCase] = {case.name: case for suite in SUITES.values() for case in suite()}
DENSE_SUITES = ("paper", "varlen", "seed", "dims")  # in TFLOP/s; the others in milliseconds
TIME_SUITES = ("many_short", "windows")
SPARSE_SUITES = ("sparse", "sparse_local")


def ratio(row: Row, peers: Iterable[str] | None = None) -> float | None:
    """How many times faster ours is than the fastest of ``peers`` (None: of all of them)."""
    times = [ms for name, ms in row["peers"].items() if peers is None or name in peers]
    return min(times) / row["ours_ms"] if times else None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Over the values that are there, None when there is none."""
    logs = [math.log(value) for value in values if value is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _shown(values: Iterable[Any], show: Callable[[Any], str]) -> str:
    shown = ["-" if value is None else show(value) for value in values]
    return "" if set(shown) == {"-"} else " / ".join(shown)


def _pair(values: Iterable[float | None], digits: int) -> str:
    return _shown(values, lambda value: f"{value:.{digits}f}")


def floor_header(gpu: str) -> list[str]:
    """The columns that ``floor_cells`` fills; none for a GPU whose floors are not known."""
    return ["of floor", "floor by"] if gpu in GPUS else []


def floor_cells(both: list[Row | None], gpu: str) -> list[str]:
    """What part of ours' time the floor is, and the unit that sets it, forward / backward."""
    if gpu not in GPUS:
        return []
    floors = [row and floor(CASES[row["case"]], row["direction"], GPUS[gpu]) for row in both]
    shares = (row and ms[0] / row["ours_ms"] for row, ms in zip(both, floors, strict=True))
    return [_pair(shares, 2), _shown(floors, lambda found: found[1])]


def case_grid(rows: list[Row], against: list[str], gpu: str = "") -> Grid:
    """TFLOP/s, forward / backward, one line a case, one column a contender; then the ratios."""
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    methods = list(dict.fromkeys(name for row in rows for name in row.get("methods", {})))
    header = ["case", "ours", *methods, *names, f"ours to {' or '.join(against)}", "ours to best"]
    grid = [[*header, *floor_header(gpu)]]
    for case, group in groupby(rows, key=lambda row: row["case"]):
        by_direction = {row["direction"]: row for row in group}
        both = [by_direction.get(direction) for direction in FIRST_ORDER]

        def rates(name: str, both: list[Row | None] = both, case: str = case) -> str:
            return _pair((tflops(CASES[case], row, name) for row in both), 0)

        grid.append(
            [
                case,
                *map(rates, ("ours", *methods, *names)),
                _pair((row and ratio(row, against) for row in both), 2),
                _pair((row and ratio(row) for row in both), 2),
                *floor_cells(both, gpu),
            ]
        )
    return grid


def sustained_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows that were also measured under continuous load, with those times as theirs."""
    return [
        {**row, "ours_ms": row["sustained_ms"], "peers": row["peers_sustained"], "methods": {}}
        for row in rows
        if row.get("sustained_ms")
    ]


def tflops(case: BenchCase, row: Row | None, name: str) -> float | None:
    """The rate of one contender in a row, None where it was not measured."""
    if row is None:
        return None
    ms = _times(row).get(name)
    return None if ms is None else case.flop(row["direction"]) / ms * 1e-9


def _times(row: Row) -> dict[str, float]:
    return {"ours": row["ours_ms"], **row["peers"], **row.get("methods", {})}


def line_grid(rows: list[Row]) -> Grid:
    """One line a case and direction: milliseconds, TFLOP/s of ours, the ratio, memory."""
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    header = ["case", "direction", "ours ms", "ours TFLOP/s", *(f"{name} ms" for name in names)]
    grid = [[*header, "ours to best", "ours GiB", *(f"{name} GiB" for name in names)]]
    for row in sorted(rows, key=lambda row: list(WORK).index(row["direction"])):
        memory = row["peers_gib"]
        grid.append(
            [
                row["case"],
                row["direction"],
                three_digits(row["ours_ms"]),
                f"{row['ours_tflops']:.0f}",
                *(_peer_ms(row, name) for name in names),
                _pair([ratio(row)], 2),
                three_digits(row["ours_gib"]),
                *(three_digits(memory[n]) if n in memory else "" for n in names),
            ]
        )
    return grid


def time_grid(rows: list[Row], gpu: str = "") -> Grid:
    """Milliseconds, forward / backward, one line a case; how many times faster ours is than each
    peer, and the geometric means of that."""
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    methods = list(dict.fromkeys(name for row in rows for name in row.get("methods", {})))
    header = ["case", *(f"{name} ms" for name in ("ours", *methods, *names))]
    grid = [[*header, *(f"ours to {name}" for name in names), *floor_header(gpu)]]

    def cell(both: list[Row | None], name: str) -> str:
        return _shown((row and _times(row).get(name) for row in both), three_digits)

    for case, group in groupby(rows, key=lambda row: row["case"]):
        by_direction = {row["direction"]: row for row in group}
        both = [by_direction.get(direction) for direction in FIRST_ORDER]
        ratios = (_pair((row and ratio(row, [name]) for row in both), 2) for name in names)
        times = (cell(both, name) for name in ("ours", *methods, *names))
        grid.append([case, *times, *ratios, *floor_cells(both, gpu)])
    by_direction = [[row for row in rows if row["direction"] == d] for d in FIRST_ORDER]
    means = (
        _pair((geometric_mean(ratio(row, [name]) for row in rs) for rs in by_direction), 2)
        for name in names
    )
    blank = [""] * len(floor_header(gpu))
    return [*grid, ["geometric mean", *[""] * (len(header) - 1), *means, *blank]] if names else grid


def three_digits(value: float) -> str:
    """0.0123, 1.23, 123, 1234: three significant digits, never an exponent."""
    places = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(0, places)}f}"


def _peer_ms(row: Row, name: str) -> str:
    if name in row["peers"]:
        return three_digits(row["peers"][name])
    return "out of memory" if "OutOfMemory" in row.get("errors", {}).get(name, "") else ""


def summary_grid(rows: list[Row], against: list[str]) -> Grid:
    """Geometric means of the ratios, forward / backward, by suite and over head_dim <= 128; under
    continuous load too where that was measured."""
    suites = (*DENSE_SUITES, *TIME_SUITES)
    rows = [row for row in rows if row["suite"] in suites]
    groups = {suite: [row for row in rows if row["suite"] == suite] for suite in suites}
    groups["all with head_dim <= 128"] = [r for r in rows if CASES[r["case"]].head_dim <= 128]
    columns: dict[str, tuple[Callable[[list[Row]], list[Row]], list[str] | None]] = {
        f"ours to {' or '.join(against)}": (list, against),
        "ours to best": (list, None),
    }
    if sustained_rows(rows):
        columns["ours to best, sustained"] = (sustained_rows, None)
    grid = [["cases", *columns]]
    for name, members in groups.items():
        line = [name]
        for chosen, peers in columns.values():
            by_direction = (
                [r for r in chosen(members) if r["direction"] == d] for d in FIRST_ORDER
            )
            line.append(
                _pair((geometric_mean(ratio(r, peers) for r in rs) for rs in by_direction), 2)
            )
        if members:
            grid.append(line)
    return grid


def peers_grid(rows: list[Row], directions: tuple[str, ...]) -> Grid:
    """Geometric means of the ratios to each peer, by suite, the directions in one cell."""
    rows = [row for row in rows if row["direction"] in directions]
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    grid = [["cases", *(f"ours to {name}" for name in names)]]
    for suite in dict.fromkeys(row["suite"] for row in rows):
        members = [row for row in rows if row["suite"] == suite]
        by_direction = [[row for row in members if row["direction"] == d] for d in directions]
        means = (
            [geometric_mean(ratio(row, [name]) for row in rs) for rs in by_direction]
            for name in names
        )
        grid.append([suite, *(_pair(mean, 2) for mean in means)])
    return grid


def accuracy_grid(rows: list[Row]) -> Grid:
    """Errors of out relative to its size, and of lse, full / causal, one line for scores, head_dim
    and dtype; ours to the most exact peer's: 2.00 is twice as far off."""
    names = list(dict.fromkeys(name for row in rows for name in row["peers_rms"]))
    header = ["scores", "head_dim", "dtype", "ours", *names, "ours to most exact", "limit"]
    grid = [[*header, "lse error"]]

    def line_of(row: Row) -> tuple[int, int, str]:
        return SCORES.index(row["scores"]), row["head_dim"], row["dtype"]

    def error(rms: float) -> str:
        return three_digits(rms) if rms else "exact"

    for (scores, head_dim, dtype), group in groupby(sorted(rows, key=line_of), key=line_of):
        by_mask = {row["causal"]: row for row in group}
        both = [by_mask.get(causal) for causal in (False, True)]
        grid.append(
            [
                *(SCORES[scores], str(head_dim), dtype),
                _shown((row and row["ours_rms"] for row in both), error),
                *(_shown((row and row["peers_rms"].get(n) for row in both), error) for n in names),
                _pair((row and to_most_exact(row) for row in both), 2),
                str(LIMITS.get(SCORES[scores], "exact")),
                _shown((row and row["lse_error"] for row in both), lambda found: f"{found:.0e}"),
            ]
        )
    return grid


def old_summary(rows: list[Row]) -> list[dict[str, Any]]:
    """By suite and direction: how many times faster than the old sources, and the worst case."""
    found = []
    for suite, direction in dict.fromkeys((row["suite"], row["direction"]) for row in rows):
        ratios = {
            row["case"]: row["old_ms"] / row["ours_ms"]
            for row in rows
            if (row["suite"], row["direction"]) == (suite, direction) and "old_ms" in row
        }
        if ratios:
            worst = min(ratios, key=lambda case: ratios[case])
            found.append(
                {
                    "suite": suite,
                    "direction": direction,
                    "cases": len(ratios),
                    "old_to_new": round(geometric_mean(ratios.values()) or 0.0, 4),
                    "worst": round(ratios[worst], 4),
                    "worst_case": worst,
                }
            )
    return found


def old_grid(summary: list[dict[str, Any]]) -> Grid:
    """The same as a table: above 1 the new sources are the faster ones."""
    header = ["suite", "direction", "cases", "old to new", "worst", "worst case"]
    lines = ([str(value) for value in line.values()] for line in summary)
    return [header, *lines]


def rows_grid(rows: list[Row]) -> Grid:
    """Which rows of the table of variants the cases ran on."""
    grid = [["row", "kernels", "cases"]]
    for name, family in sorted({(row["row"], row["kernels"]) for row in rows if "row" in row}):
        members = dict.fromkeys(row["suite"] for row in rows if row.get("row") == name)
        grid.append([name, family, ", ".join(members)])
    return grid


def models_grid(rows: list[Row]) -> Grid:
    """Tokens a second of training whole models, and in brackets the ms of a step that are the
    attention's, those beyond a step without any; of the attentions that trained some model."""
    steps = {(row["model"], row["attention"]): row for row in rows if row["ms_a_step"]}
    names = list(dict.fromkeys(name for _, name in steps))
    grid = [["model", *names]]
    for model in dict.fromkeys(row["model"] for row in rows):
        rest = steps.get((model, "no_attention"), {}).get("ms_a_step")
        cells = []
        for name in names:
            row = steps.get((model, name))
            beyond = row["ms_a_step"] - rest if row and rest else 0.0
            cell = f"{row['tokens_a_second']:,.0f}" if row else "-"
            cell += f" ({beyond:.1f})" if beyond else ""
            cells.append(f"{cell}, wrong" if row and row["note"] else cell)
        grid.append([model, *cells])
    return grid


def grids(result: dict[str, Any], against: list[str]) -> dict[str, Grid]:
    """Every table that ``result`` has the numbers for, by the name of its markers."""
    rows, gpu = result.get("bench", []), result["gpu"]
    tables = {}
    for suite in SUITES:
        if members := [row for row in rows if row["suite"] == suite]:
            if suite in DENSE_SUITES:
                tables[suite] = case_grid(members, against, gpu)
            elif suite in TIME_SUITES:
                tables[suite] = time_grid(members, gpu)
            else:
                tables[suite] = (time_grid if suite in SPARSE_SUITES else line_grid)(members)
    if sustained := sustained_rows(rows):
        tables["sustained"] = case_grid(sustained, against, gpu)
    if accuracy := result.get("accuracy"):
        tables["accuracy"] = accuracy_grid(accuracy)
    if [row for row in rows if row["suite"] in (*DENSE_SUITES, *TIME_SUITES)]:
        tables["summary"] = summary_grid(rows, against)
    if members := [row for row in rows if row["suite"].startswith("second")]:
        tables["summary_second"] = peers_grid(members, SECOND_ORDER)
    if members := [row for row in rows if row["suite"] in SPARSE_SUITES]:
        tables["summary_sparse"] = peers_grid(members, FIRST_ORDER)
    if len(variants := rows_grid(rows)) > 1:
        tables["rows"] = variants
    for name, unit, digits in (("host", "us per call", 1), ("first_call", "seconds", 2)):
        if times := result.get(name):
            lines = [[what, f"{time:.{digits}f}"] for what, time in times.items()]
            tables[name] = [["", unit], *lines]
    if models := result.get("models"):
        tables["summary_models"] = models_grid(models)
    if summary := result.get("old"):
        tables["old"] = old_grid(summary)
    return tables


def machine_line(result: dict[str, Any]) -> str:
    """On what the numbers were measured."""
    versions = result["versions"]
    known = [f"{name} {versions[name]}" for name in ("torch", "cupy-cuda13x") if name in versions]
    return ", ".join([result["gpu"], f"driver {result['driver']}", *known])


def print_tables(result: dict[str, Any], against: list[str]) -> None:
    """The tables, the peers that failed, and what is less exact than it must be, to the
    terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=200)
    for name, (header, *lines) in grids(result, against).items():
        table = Table(*header, title=f"{name}: {machine_line(result)}")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    failures = {
        f"{row['case']} {row['direction']} {peer}: {error}"
        for row in result.get("bench", [])
        for peer, error in row.get("errors", {}).items()
    }
    accuracy = result.get("accuracy", [])
    failures |= {
        f"accuracy d{row['head_dim']} {row['dtype']} {peer}: {error}"
        for row in accuracy
        for peer, error in row.get("errors", {}).items()
    }
    for failure in (*sorted(failures), *(fault for row in accuracy for fault in faults(row))):
        console.print(failure, markup=False)
