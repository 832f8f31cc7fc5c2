"""Train one model by several attentions side by side, and say how many tokens a second each took.

What is timed is whole steps: forward, backward and optimiser, over the same batches for all, which
take turns.
"""

import itertools
from collections.abc import Callable

from models import Attention
from rich.console import Console
from rich.table import Table
from training import Recipe, Setting, median_times, start, step

NOISE = 0.01  # by which the rates of two equal runs differ


def race(recipe: Recipe, setting: Setting, attentions: dict[str, Attention]) -> dict[str, float]:
    """Tokens a second of each attention, of the median time for all batches."""
    size = setting.size
    batches = recipe.batches(setting.seed, size.tokens, size.longest, setting.device)
    packs = list(itertools.islice(batches, size.steps))

    def run_of(attend: Attention) -> Callable[[], None]:
        model, optimizer = start(recipe, setting)

        def run() -> None:
            for pack in packs:
                step(recipe, setting, model, optimizer, pack, attend)

        return run

    times = median_times({name: run_of(x) for name, x in attentions.items()}, setting.device)
    tokens = sum(sum(pack.lengths) for pack in packs)
    return {name: tokens / (ms * 1e-3) for name, ms in times.items()}


def show(console: Console, rates: dict[str, float], title: str) -> bool:
    """A table of the rates; whether the first one is not below another."""
    table = Table("attention", title=title)
    for header in ("tokens a second", "to the first"):
        table.add_column(header, justify="right")
    first = next(iter(rates.values()))
    for name, rate in rates.items():
        table.add_row(name, f"{rate:,.0f}", f"{rate / first:.3f}")
    console.print(table)
    return first >= max(rates.values()) * (1 - NOISE)
