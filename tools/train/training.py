"""Train a small model with the attention of one's choice; the rest is the same for every run."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from models import Attention, Size
from packing import Pack
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ROUNDS = 5  # of calls that are timed

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Recipe:
    """What to train: ``loss`` is of a model, a batch, an attention, and within autocast."""

    sizes: dict[str, Size]  # by device
    model: Callable[[Size], nn.Module]
    batches: Callable[[int, int, int, str], Iterator[Pack]]  # seed, tokens, longest, device
    loss: Callable[[nn.Module, Any, Attention, Autocast], Tensor]
    title: str


@dataclass(frozen=True)
class Setting:
    """Where and how to train; weights are float32, the rest computes in ``dtype`` by autocast."""

    device: str
    size: Size
    dtype: torch.dtype
    seed: int

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32)


@dataclass(frozen=True)
class Curve:
    name: str
    losses: list[float]  # of each step
    seconds: float


def perturb(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Change every weight by at most what one rounding to ``dtype`` changes a number by."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            nudge = torch.rand(weight.shape, generator=generator, device=device) - 0.5
            weight.mul_(1 + torch.finfo(dtype).eps * nudge)


def start(
    recipe: Recipe, setting: Setting, perturbed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model before its first step, and its optimiser; ``perturbed`` as in ``train``."""
    torch.manual_seed(setting.seed)
    model = recipe.model(setting.size)
    if perturbed:
        perturb(model, setting.dtype, setting.seed + perturbed)
    model.to(setting.device)
    return model, torch.optim.AdamW(model.parameters(), lr=setting.size.learning_rate)


def step(
    recipe: Recipe,
    setting: Setting,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pack: Pack,
    attend: Attention,
) -> Tensor:
    """Forward, backward and optimiser on one batch; its loss."""
    loss = recipe.loss(model, pack, attend, setting.autocast)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def train(
    recipe: Recipe,
    setting: Setting,
    name: str,
    attend: Attention,
    progress: Progress,
    perturbed: int = 0,
) -> tuple[Curve, nn.Module]:
    """One run from the start; ``perturbed`` is 0 or the number of the perturbation."""
    size = setting.size
    model, optimizer = start(recipe, setting, perturbed)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, max(1, size.steps // 10))
    batches = recipe.batches(setting.seed, size.tokens, size.longest, setting.device)
    losses: list[float] = []
    begin = time.perf_counter()
    for pack in progress.track(itertools.islice(batches, size.steps), size.steps, description=name):
        loss = step(recipe, setting, model, optimizer, pack, attend)
        warm_up.step()
        losses.append(loss.item())
    return Curve(name, losses, time.perf_counter() - begin), model


def median_times(calls: dict[str, Callable[[], Any]], device: str) -> dict[str, float]:
    """Milliseconds of each call; A, A, B, B, A, A, ... after a round that warms up.

    The first of two goes untimed: clocks, which the call before has left higher or lower by what
    it took from the power limit, settle to this one in it.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + ROUNDS):
        for name, call in calls.items():
            _milliseconds(call, device)
            times[name].append(_milliseconds(call, device))
    return {name: statistics.median(seen[1:]) for name, seen in times.items()}


def _milliseconds(call: Callable[[], Any], device: str) -> float:
    """Of a call, until what it has queued is done."""
    began = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def options(function: Callable[..., None]) -> Callable[..., None]:
    """The options of every tool that holds rawattn against torch, but the dtype."""
    choice = click.Choice(["rawattn", "torch", "both"])
    return run_options(click.option("--attention", type=choice, default="both")(function))


def run_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options of every training tool, but the dtype."""
    for option in (
        click.option(
            "--json", "record", type=click.Path(path_type=Path), help="Write it all here."
        ),
        click.option("--seed", default=0, help="Of the initial weights and of the data."),
        click.option("--steps", type=click.IntRange(1), help="Default: by the device."),
        click.option(
            "--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda if there is one."
        ),
    ):
        function = option(function)
    return function


dtype_option = click.option(
    "--dtype", type=click.Choice(list(DTYPES)), help="Default: float32, on a GPU bfloat16."
)


def settle(
    recipe: Recipe, device: str | None, steps: int | None, dtype: str | None, seed: int
) -> Setting:
    """The setting of these options."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        torch.set_num_threads(1)  # tensors this small only make threads wait for each other
    size = recipe.sizes[device]
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    return Setting(device, replace(size, steps=steps or size.steps), DTYPES[dtype], seed)


def bar(console: Console) -> Progress:
    """How training shows that it goes on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)
