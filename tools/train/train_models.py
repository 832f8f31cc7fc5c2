"""Train models of transformers on packed documents, by rawattn and by other attentions.

    python tools/train/train_models.py                      # a Llama of 1.2 billion, and a gpt-oss
    python tools/train/train_models.py --model llama --attention rawattn --attention fa4
    python tools/train/train_models.py --device cpu --attention rawattn --attention sdpa

Weights are random, of the shapes below; the documents are those of train_packed.py. What is timed
is whole steps: forward, backward and optimiser. An attention counts when its losses and gradients
are rawattn's, but for about what rounding the weights changes; one that cannot train the model is
shown with the reason. no_attention stands for the rest of the model. The exit code is 0 if no
attention that counts trains more tokens a second than rawattn, else 1.
"""

import itertools
import json
import math
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from contest import FACTOR
from implementations import FLOOR, NAMES, available
from packing import TextPack, texts
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, WORK, build, token_losses
from speed import NOISE
from torch import Tensor, nn
from training import median_times, perturb, run_options

from rawattn.check.machine import describe

# Without those whose masks, or scores, have a number for each pair of tokens.
DEFAULT = tuple(name for name in NAMES if name not in ("sdpa", "eager"))
Row = dict[str, Any]  # of the results: model, attention, tokens_a_second, ms_a_step, note


# ---- whether an attention counts --------------------------------------------------------------


def outcome(model: nn.Module, pack: TextPack) -> dict[str, Tensor]:
    """The loss of each token, and the gradient of each weight of an attention by its name.

    Not of other weights: where tokens choose experts, rounding makes some choose others.
    """
    losses = token_losses(model, pack)
    losses.mean().backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if "self_attn" in name}
    model.zero_grad()
    return {"loss": losses.detach()} | {k: g for k, g in gradients.items() if g is not None}


def distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Norms of the differences, relative to the expected norm; infinite for what is not there."""
    return {
        name: float((found[name].float() - x.float()).norm() / x.float().norm())
        if name in found
        else math.inf
        for name, x in expected.items()
    }


def noise_of(model: nn.Module, pack: TextPack, expected: dict[str, Tensor]) -> dict[str, float]:
    """How far rounding the weights moves each number of ``expected``: the most of two times."""
    found = []
    for seed in (1, 2):
        rounded = deepcopy(model)
        perturb(rounded, model.dtype, seed)
        found.append(distances(outcome(rounded, pack), expected))
    return {name: max(one[name] for one in found) for name in expected}


def disagreement(found: dict[str, float], noise: dict[str, float]) -> str:
    """What is off by more than FACTOR times the noise, the worst of it; empty when nothing is."""
    ratios = {name: distance / noise[name] for name, distance in found.items()}
    wrong = [name for name, ratio in ratios.items() if not ratio <= FACTOR]
    if not wrong:
        return ""
    name = max(wrong, key=lambda name: ratios[name])
    return f"wrong: {name} is off by {ratios[name]:.1f} times what rounding the weights changes"


def reason(error: Exception) -> str:
    """The first line of it."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


# ---- the race ---------------------------------------------------------------------------------


def race(model: nn.Module, packs: list[TextPack], attentions: list[str], log: Console) -> list[Row]:
    """A row for each attention; those that can train the model take turns. rawattn's comes first.

    A wrong one is timed too, unless what it gives is not finite.
    """
    # A rate of 0 takes all of a step's work and leaves the weights, so that all turns are alike.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def run_of(implementation: str) -> Callable[[], None]:
        def run() -> None:
            model.set_attn_implementation(implementation)
            for pack in packs:
                token_losses(model, pack).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        return run

    expected = outcome(model, packs[0])
    noise = noise_of(model, packs[0], expected)
    notes: dict[str, str] = {}
    runs: dict[str, Callable[[], None]] = {}
    for name in ("rawattn", *(name for name in attentions if name != "rawattn")):
        began = time.perf_counter()
        try:
            implementation = available(name)
            model.set_attn_implementation(implementation)
            found = outcome(model, packs[0])
            notes[name] = "" if name == FLOOR else disagreement(distances(found, expected), noise)
            if all(bool(x.isfinite().all()) for x in found.values()):
                run_of(implementation)()
                runs[name] = run_of(implementation)
        except Exception as error:  # whatever an attention has to say against the model
            notes[name] = reason(error)
            model.zero_grad()
        seconds = time.perf_counter() - began
        log.print(f"{name}: {notes[name] or 'good'} ({seconds:.1f} s)", markup=False)
    times = median_times(runs, packs[0].inputs.device.type)
    return [_row(name, note, times.get(name), packs) for name, note in notes.items()]


def _row(name: str, note: str, ms: float | None, packs: list[TextPack]) -> Row:
    tokens = sum(sum(pack.lengths) for pack in packs)
    return {
        "attention": name,
        "tokens_a_second": ms and round(tokens / ms * 1e3, 1),
        "ms_a_step": ms and round(ms / len(packs), 3),
        "note": note,
    }


def rates(rows: list[Row]) -> dict[str, float]:
    """Tokens a second of the attentions that count."""
    counting = (row for row in rows if row["tokens_a_second"] and not row["note"])
    return {
        row["attention"]: row["tokens_a_second"] for row in counting if row["attention"] != FLOOR
    }


def first(rows: list[Row]) -> bool:
    """Whether no attention that counts is faster than rawattn, which must count."""
    found = rates(rows)
    return found.get("rawattn", 0.0) >= max(found.values(), default=1.0) * (1 - NOISE)


def show(console: Console, rows: list[Row], title: str) -> None:
    """The rates, and what of a step is attention's: what it takes beyond a step without any."""
    table = Table("attention", title=title)
    for header in ("tokens a second", "to rawattn", "ms a step", "of attention"):
        table.add_column(header, justify="right")
    table.add_column("note")
    by_name = {row["attention"]: row for row in rows}
    rawattn, rest = (by_name.get(n, {}).get("ms_a_step") for n in ("rawattn", FLOOR))
    for row in rows:
        cells = ["", "", "", ""]
        if ms := row["ms_a_step"]:
            cells = [f"{row['tokens_a_second']:,.0f}", "", f"{ms:.1f}", ""]
            cells[1] = f"{rawattn / ms:.3f}" if rawattn else ""
            cells[3] = f"{ms - rest:.1f}" if rest and row["attention"] != FLOOR else ""
        table.add_row(row["attention"], *cells, row["note"])
    console.print(table)


@click.command(help=__doc__.splitlines()[0])
@click.option("--model", "models", multiple=True, type=click.Choice(list(SHAPES["cuda"])))
@click.option("--attention", "attentions", multiple=True, type=click.Choice(NAMES), default=DEFAULT)
@run_options
def main(
    models: tuple[str, ...],
    attentions: tuple[str, ...],
    device: str | None,
    steps: int | None,
    seed: int,
    record: Path | None,
) -> None:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        torch.set_num_threads(1)  # tensors this small only make threads wait for each other
    work, console = WORK[device], Console(width=140)
    batches = texts(seed, work.tokens, work.longest, device)
    packs = list(itertools.islice(batches, steps or work.steps))
    rows: list[Row] = []
    good = True
    for name in models or ("llama", "gpt_oss"):
        torch.compiler.reset()  # or the second model's FlexAttention is compiled for any shape
        model = build(name, device, work.dtype, seed)
        size = sum(weight.numel() for weight in model.parameters()) / 1e6
        title = f"{name}, {size:,.0f} million weights, {work.tokens} tokens a step"
        console.print(title)
        found = race(model, packs, list(attentions), console)
        show(console, found, title)
        good &= first(found)
        rows += [{"model": name} | row for row in found]
        del model
    if record:
        head = describe() | {"transformers": transformers.__version__}
        record.write_text(json.dumps(head | {"models": rows}, indent=1) + "\n")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
