"""Benchmark rows as plots: one colour a contender everywhere, its name where its line ends.

What they share stands first, then the three kinds: rates over the sequence length, rates of single
cases as bars, and times and memory that grow with the tokens.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure.cases import FIRST_ORDER
from measure.tables import CASES, SPARSE_SUITES, Row, tflops

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {  # name shown, colour: ours the only red, FlashAttention's versions from yellow to blue
    "ours": ("rawattn", "#c1121f"),
    "sdpa_flash": ("FlashAttention-2, SDPA", "#d9a21b"),
    "torch_varlen": ("FlashAttention-2, varlen", "#8f6a00"),
    "fa3_fwd": ("FlashAttention-3", "#4c9bd6"),
    "fa4": ("FlashAttention-4", "#1b4f8f"),
    "sdpa_cudnn": ("cuDNN", "#2a9d6f"),
    "flex": ("FlexAttention", "#9c89b8"),
    "torch_math": ("torch, N x N matrices", "#555b6e"),
    "jvp_flash_attention": ("jvp-flash-attention", "#b5179e"),
    "fla_nsa": ("fla parallel_nsa", "#7b4fc9"),
    "lucidrains_triton": ("lucidrains' Triton", "#e07a5f"),
}
RATE = (
    "TFLOP/s of the products over allowed pairs: 2 x (head_dim + head_dim_v) for each in the "
    "forward, 2.5 times that in the backward"
)
NEXT = 0.052  # of the height: what two names need between them
INK = "#333333"

Points = dict[str, list[tuple[float, float]]]  # by contender


def plot(result: dict[str, Any], folder: Path) -> list[Path]:
    """Every figure that ``result`` has the rows for, as ``folder``/<name>.png."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures(result).items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def figures(result: dict[str, Any]) -> dict[str, "Figure"]:
    """paper over sequence length, one figure a head_dim; bars of varlen, seed and dims; the sparse
    suites over the tokens, for groups of 16 heads; time and memory of ever longer sequences."""
    rows, drawn = result["bench"], {}
    by_suite = {suite: [r for r in rows if r["suite"] == suite] for suite in _distinct(rows)}
    paper = by_suite.get("paper", [])
    for head_dim in sorted({CASES[row["case"]].head_dim for row in paper}):
        members = [row for row in paper if CASES[row["case"]].head_dim == head_dim]
        title = f"Dense attention, head_dim {head_dim}, 16384 tokens, 2048 channels"
        drawn[f"paper_d{head_dim}"] = _rates(members, _title(result, title, members))
    for suite, title in (
        ("varlen", "Packed documents, 32768 tokens"),
        ("seed", "Small packed problems"),
        ("dims", "The other head_dims, 16384 tokens"),
    ):
        if members := by_suite.get(suite, []):
            drawn[suite] = _bars(members, _title(result, title, members))
    for suite, title in zip(
        SPARSE_SUITES, ("drawn at random", "shared by neighbours"), strict=True
    ):
        members = [r for r in by_suite.get(suite, []) if CASES[r["case"]].num_heads_q == 64]
        if members:
            title = f"16 blocks of 64 keys a query, {title}; 64 query heads on 4"
            drawn[suite] = _times(members, _title(result, title, members))
    for suite, title in (
        ("second_length", "Second backward, one causal sequence, 16 heads of 128"),
        ("sparse_length", "16 blocks of 64 keys a query, one sequence, 64 heads of 128 on 4"),
    ):
        if members := by_suite.get(suite, []):
            drawn[suite] = _growth(members, _title(result, title, members))
    return drawn


def _distinct(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["suite"] for row in rows))


def _title(result: dict[str, Any], what: str, rows: list[Row]) -> str:
    dtypes = dict.fromkeys(CASES[row["case"]].dtype for row in rows)
    return f"{what}\n{result['gpu']}, {' and '.join(dtypes)}"


def _names(rows: list[Row]) -> list[str]:
    """The contenders there are, in the order of LOOKS."""
    present = {"ours", *(name for row in rows for name in row["peers"])}
    return [name for name in LOOKS if name in present]


def _figure(title: str, note: str, rows: int, columns: int, size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK)
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8.5, color=INK)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.tick_params(colors=INK, labelsize=9)
    return figure, axes


def _thousands(tokens: float, _place: int = 0) -> str:
    return f"{tokens / 1024:.0f}k" if tokens >= 1024 else f"{tokens:.0f}"


def _lines(axis: "Axes", points: Points, more: dict[str, str] | None = None) -> None:
    """A line a contender over powers of two, its name at the end, kept clear of the others'; no
    axis where nothing was measured.

    ``more`` is said of a contender behind its name. A line that ends early has its name above.
    """
    if not points:
        axis.set_visible(False)
        return
    for name, its in points.items():
        xs, ys = zip(*sorted(its), strict=True)
        weight = 2.6 if name == "ours" else 1.6
        axis.plot(xs, ys, color=LOOKS[name][1], linewidth=weight, marker="o", markersize=4)
    axis.set_xscale("log", base=2)
    ticks = sorted({x for its in points.values() for x, _ in its})
    axis.set_xticks(ticks, [_thousands(x) for x in ticks])
    axis.minorticks_off()
    if axis.get_yscale() == "linear":
        axis.set_ylim(0, None)
    ends = {name: max(its) for name, its in points.items()}
    if axis.get_yscale() == "log" and any(x < ticks[-1] for x, _ in ends.values()):
        low, high = axis.get_ylim()
        axis.set_ylim(low, high * (high / low) ** 0.15)  # room for a name above its line
    to_height = axis.transScale + axis.transLimits
    heights = {name: float(to_height.transform(end)[1]) for name, end in ends.items()}
    early = {name: heights.pop(name) for name, (x, _) in ends.items() if x < ticks[-1]}
    for name, height in (spread(heights, NEXT) | early).items():
        axis.annotate(
            LOOKS[name][0] + (more or {}).get(name, ""),
            (ends[name][0], height),
            xycoords=axis.get_xaxis_transform(),
            xytext=(-6, 6) if name in early else (8, 0),
            textcoords="offset points",
            horizontalalignment="right" if name in early else "left",
            verticalalignment="bottom" if name in early else "center",
            color=LOOKS[name][1],
            fontsize=9,
            fontweight="bold" if name == "ours" else "normal",
        )


def spread(heights: dict[str, float], gap: float) -> dict[str, float]:
    """The heights moved as little as keeps them ``gap`` apart, in the order they have."""
    names = sorted(heights, key=lambda name: heights[name])
    groups = [([name], heights[name]) for name in names]  # names side by side, and their middle
    merged = True
    while merged:
        merged = False
        for i in range(len(groups) - 1):
            (low, middle), (high, next_middle) = groups[i], groups[i + 1]
            if next_middle - middle < gap * (len(low) + len(high)) / 2 - 1e-9:
                together = [*low, *high]
                middle = math.fsum(heights[name] for name in together) / len(together)
                groups[i : i + 2] = [(together, middle)]
                merged = True
                break
    return {
        name: middle + gap * (i - (len(group) - 1) / 2)
        for group, middle in groups
        for i, name in enumerate(group)
    }


def _points(rows: list[Row], value: Callable[[Row, str], float | None]) -> Points:
    """Of each contender over the length of a sequence, where there is a value."""
    points: Points = {name: [] for name in _names(rows)}
    for name, its in points.items():
        for row in rows:
            if (found := value(row, name)) is not None:
                its.append((CASES[row["case"]].lengths[0], found))
    return {name: its for name, its in points.items() if its}


def _rate(row: Row, name: str) -> float | None:
    return tflops(CASES[row["case"]], row, name)


def _ms(row: Row, name: str) -> float | None:
    ms: float | None = {"ours": row["ours_ms"], **row["peers"]}.get(name)
    return ms


def _gib(row: Row, name: str) -> float | None:
    gib: float | None = {"ours": row["ours_gib"], **row["peers_gib"]}.get(name)
    return gib


def _rates(rows: list[Row], title: str) -> "Figure":
    figure, axes = _figure(title, RATE, 2, 2, (12, 8.5))
    for line, direction in zip(axes, FIRST_ORDER, strict=True):
        for axis, (mask, causal) in zip(line, (("full", False), ("causal", True)), strict=True):
            members = [
                row
                for row in rows
                if row["direction"] == direction and CASES[row["case"]].causal == causal
            ]
            _lines(axis, _points(members, _rate))
            axis.set_title(f"{direction}, {mask}", loc="left", fontsize=11, color=INK)
            axis.set_ylabel("TFLOP/s", color=INK)
        line[0].sharey(line[1])
    for axis in axes[-1]:
        axis.set_xlabel("tokens of a sequence", color=INK)
    return figure


def _bars(rows: list[Row], title: str) -> "Figure":
    figure, axes = _figure(title, RATE, 2, 1, (12, 8))
    names = _names(rows)
    for axis, direction in zip(axes[:, 0], FIRST_ORDER, strict=True):
        members = [row for row in rows if row["direction"] == direction]
        for place, row in enumerate(members):
            rates = [(name, rate) for name in names if (rate := _rate(row, name)) is not None]
            width = 0.84 / max(1, len(rates))
            for i, (name, rate) in enumerate(rates):
                where = place + width * (i - (len(rates) - 1) / 2)
                axis.bar(where, rate, width=0.92 * width, color=LOOKS[name][1])
        axis.set_xticks(range(len(members)), [row["case"].replace("_", " ") for row in members])
        axis.tick_params(axis="x", length=0, rotation=0 if len(members) < 9 else 25)
        axis.set_title(direction, loc="left", fontsize=11, color=INK)
        axis.set_ylabel("TFLOP/s", color=INK)
    from matplotlib.patches import Patch

    handles = [Patch(color=LOOKS[name][1], label=LOOKS[name][0]) for name in names]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    return figure


def _times(rows: list[Row], title: str) -> "Figure":
    note = "milliseconds of a call, lists built anew in each; cuDNN attends to every earlier key"
    figure, axes = _figure(title, note, 2, 2, (12, 8.5))
    head_dims = sorted({CASES[row["case"]].head_dim for row in rows})
    for line, direction in zip(axes, FIRST_ORDER, strict=True):
        for axis, head_dim in zip(line, head_dims, strict=False):
            members = [
                row
                for row in rows
                if row["direction"] == direction and CASES[row["case"]].head_dim == head_dim
            ]
            _log_lines(axis, _points(members, _ms), {"sdpa_cudnn": ", dense"})
            axis.set_title(f"{direction}, head_dim {head_dim}", loc="left", fontsize=11, color=INK)
            axis.set_ylabel("milliseconds", color=INK)
    for axis in axes[-1]:
        axis.set_xlabel("tokens", color=INK)
    return figure


def _log_lines(axis: "Axes", points: Points, more: dict[str, str] | None = None) -> None:
    """Lines over a logarithmic height, whose ticks are plain numbers."""
    from matplotlib.ticker import LogLocator

    axis.set_yscale("log")
    values = [value for its in points.values() for _, value in its]
    fine = max(values, default=1.0) < 300 * min(values, default=1.0)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if fine else (1,)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _lines(axis, points, more)


def _growth(rows: list[Row], title: str) -> "Figure":
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    note = "GPU time of a call, and the most memory that it takes beyond its inputs"
    figure, axes = _figure(title, note, len(directions), 2, (12, 1.2 + 4.2 * len(directions)))
    for line, direction in zip(axes, directions, strict=True):
        members = [row for row in rows if row["direction"] == direction]
        failed = {
            name: "\nout of memory beyond"
            for row in members
            for name, error in row.get("errors", {}).items()
            if "OutOfMemory" in error
        }
        for axis, (unit, value) in zip(line, (("milliseconds", _ms), ("GiB", _gib)), strict=True):
            _log_lines(axis, _points(members, value), failed)
            what = f"{direction}: {'time' if value is _ms else 'peak memory'}"
            axis.set_title(what, loc="left", fontsize=11, color=INK)
            axis.set_ylabel(unit, color=INK)
            axis.set_xlabel("tokens", color=INK)
    return figure
