"""Benchmark rows as plots."""

from itertools import product
from pathlib import Path
from typing import Any

from measure.cases import FIRST_ORDER
from measure.tables import CASES, SPARSE_SUITES, Row, tflops


def plot(rows: list[Row], folder: Path) -> list[Path]:
    """paper over sequence length, one file per head_dim; varlen and seed as bars; the sparse suites
    over the tokens, for groups of 16 heads; time and memory of ever longer sequences."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for head_dim in sorted({CASES[r["case"]].head_dim for r in rows if r["suite"] == "paper"}):
        members = [
            r for r in rows if r["suite"] == "paper" and CASES[r["case"]].head_dim == head_dim
        ]
        columns = {
            mask: [row for row in members if CASES[row["case"]].causal == causal]
            for mask, causal in (("full", False), ("causal", True))
        }
        paths.append(
            _plot_lines(columns, f"head_dim {head_dim}", folder / f"paper_d{head_dim}.png")
        )
    for suite in ("varlen", "seed"):
        if members := [r for r in rows if r["suite"] == suite]:
            paths.append(_plot_bars(members, suite, folder / f"{suite}.png"))
    for suite in SPARSE_SUITES:
        members = [r for r in rows if r["suite"] == suite and CASES[r["case"]].num_heads_q == 64]
        columns = {
            f"head_dim {head_dim}": [r for r in members if CASES[r["case"]].head_dim == head_dim]
            for head_dim in sorted({CASES[row["case"]].head_dim for row in members})
        }
        if columns:
            title = f"{suite}: 64 query heads on 4 kv heads, 16 blocks of 64 keys"
            paths.append(_plot_lines(columns, title, folder / f"{suite}.png"))
    for suite, title in (
        ("second_length", "second backward: one causal sequence, 16 heads of 128"),
        ("sparse_length", "16 blocks of 64 keys: one causal sequence, 64 heads on 4 of 128"),
    ):
        if members := [r for r in rows if r["suite"] == suite]:
            paths.append(_plot_growth(members, title, folder / f"{suite}.png"))
    return paths


def _names(rows: list[Row]) -> list[str]:
    return ["ours", *dict.fromkeys(name for row in rows for name in row["peers"])]


def _plot_lines(columns: dict[str, list[Row]], title: str, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(columns), figsize=(5.5 * len(columns), 8), sharex=True, squeeze=False
    )
    for line, direction in zip(axes, FIRST_ORDER, strict=True):
        for axis, (column, rows) in zip(line, columns.items(), strict=True):
            members = [(CASES[r["case"]], r) for r in rows if r["direction"] == direction]
            for name in _names([row for _, row in members]):
                points = [
                    (case.lengths[0], rate)
                    for case, row in members
                    if (rate := tflops(case, row, name)) is not None
                ]
                axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
            axis.set(title=f"{direction}, {column}", xscale="log")
            axis.set(xlabel="sequence length", ylabel="TFLOP/s", ylim=(0, None))
            if members:
                axis.legend()
    return _save(figure, title, path)


def _plot_bars(rows: list[Row], title: str, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(12, 9))
    for axis, direction in zip(axes, FIRST_ORDER, strict=True):
        members = [row for row in rows if row["direction"] == direction]
        names = _names(members)
        for offset, name in enumerate(names):
            rates = [tflops(CASES[row["case"]], row, name) or 0.0 for row in members]
            places = [i + offset / (len(names) + 1) for i in range(len(members))]
            axis.bar(places, rates, width=1 / (len(names) + 1), label=name)
        axis.set_xticks(range(len(members)), [row["case"] for row in members], rotation=30)
        axis.set(title=direction, ylabel="TFLOP/s")
        axis.legend()
    return _save(figure, title, path)


def _plot_growth(rows: list[Row], title: str, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5))
    for axis, what, unit in zip(
        axes, ("time", "peak extra memory"), ("milliseconds", "GiB"), strict=True
    ):
        for direction, name in product(dict.fromkeys(r["direction"] for r in rows), _names(rows)):
            points = [
                (CASES[row["case"]].lengths[0], value)
                for row in rows
                if row["direction"] == direction and (value := _amount(row, name, unit)) is not None
            ]
            label = f"{name}, {direction}"
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axis.set(title=what, xlabel="tokens", ylabel=unit, yscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend()
    return _save(figure, title, path)


def _amount(row: Row, name: str, unit: str) -> float | None:
    ours, theirs = ("ours_ms", "peers") if unit == "milliseconds" else ("ours_gib", "peers_gib")
    amount: float | None = {"ours": row[ours], **row[theirs]}.get(name)
    return amount


def _save(figure: Any, title: str, path: Path) -> Path:
    from matplotlib import pyplot

    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
