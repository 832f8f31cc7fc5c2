"""Train one model by several attentions side by side, and say how many tokens a second each took.

What is timed is a whole step: forward, backward and optimiser. All see the same batches, in an
order that turns round, so that clocks and caches favour nobody.
"""

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from models import Attention
from packing import Pack
from rich.console import Console
from rich.table import Table
from torch import nn
from training import Recipe, Setting

NOISE = 0.01  # by which the rates of two equal runs differ


@dataclass(frozen=True)
class Racer:
    """A model of its own that one attention trains."""

    attend: Attention
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, recipe: Recipe, setting: Setting, pack: Pack) -> None:
        loss = recipe.loss(self.model, pack, self.attend, setting.autocast)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def race(
    recipe: Recipe, setting: Setting, attentions: dict[str, Attention], rounds: int = 5
) -> dict[str, float]:
    """Tokens a second of each attention, from its median time for each batch.

    The first round is not counted: kernels are compiled in it.
    """
    size, racers = setting.size, {}
    for name, attend in attentions.items():
        torch.manual_seed(setting.seed)
        model = recipe.model(size).to(setting.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
        racers[name] = Racer(attend, model, optimizer)
    batches = recipe.batches(setting.seed, size.tokens, size.longest, setting.device)
    packs = list(itertools.islice(batches, size.steps))
    times: dict[str, list[list[float]]] = {name: [[] for _ in packs] for name in racers}
    order = list(racers.items())
    for number in range(rounds + 1):
        for i, pack in enumerate(packs):
            for name, racer in order:
                seconds = _seconds(racer, recipe, setting, pack)
                if number > 0:
                    times[name][i].append(seconds)
        order.reverse()
    tokens = sum(sum(pack.lengths) for pack in packs)
    return {name: tokens / sum(map(statistics.median, each)) for name, each in times.items()}


def _seconds(racer: Racer, recipe: Recipe, setting: Setting, pack: Pack) -> float:
    wait: Any = torch.cuda.synchronize if setting.device == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    racer.step(recipe, setting, pack)
    wait()
    return time.perf_counter() - begin


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
