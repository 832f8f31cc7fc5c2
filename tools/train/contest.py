"""Train one model by rawattn and by torch, and say whether rawattn did as well.

Training amplifies every rounding, so rawattn's loss curve is held against the noise of torch's own:
it may differ from torch's by no more than FACTOR times what two runs of torch differ by. Long for a
module, since what trains, judges and shows the curves is of no use alone.
"""

import itertools
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import Attention, attend_math, attend_rawattn
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from training import Autocast, Curve, Recipe, Setting, bar, settle, train

FACTOR = 2.0  # the noise is itself one sample; the distances of equal runs scatter by this much


def compare(
    recipe: Recipe,
    ours: Attention,
    theirs: Callable[[Setting], Attention],
    *,
    device: str | None,
    steps: int | None,
    dtype: str | None,
    attention: str,
    seed: int,
    record: Path | None,
    runs: int = 1,
    perturbed: int = 0,
    gradients: bool = False,
) -> bool:
    """Train by both, show and record the curves; whether all is well.

    ``runs`` of torch show its noise; where they are bitwise the same, a perturbed one does instead.
    That many ``perturbed`` runs come in any case. ``gradients``: judge those of the trained model
    too, against dense mathematics in float64.
    """
    setting = settle(recipe, device, steps, dtype, seed)
    console = Console(width=120)
    curves: list[Curve] = []
    with bar(console) as progress:

        def run(name: str, attend: Attention, perturbed: int = 0) -> nn.Module:
            curve, model = train(recipe, setting, name, attend, progress, perturbed)
            curves.append(curve)
            return model

        if attention != "torch":
            model = run("rawattn", ours)
        mine = len(curves)
        if attention != "rawattn":
            for i in range(runs):
                model = run(f"torch {i + 1}", theirs(setting))
            if runs > 1 and not any(distance(curves[mine], curve) for curve in curves[mine + 1 :]):
                del curves[mine + 1 :]
                perturbed = max(1, perturbed)
            for i in range(perturbed):
                run(f"perturbed {i + 1}", theirs(setting), i + 1)
    verdict = judge(curves[0] if mine else None, curves[mine:])
    show(console, curves, verdict, recipe.title)
    if gradients and attention == "both":
        verdict |= judge_gradients(recipe, setting, model, ours, theirs(setting))
        for name in ("gradient_error", "gradient_error_of_torch", "gradient_allowed"):
            console.print(f"{name:24} {verdict[name]:.2e}")
        verdict["passed"] &= verdict["gradient_error"] <= verdict["gradient_allowed"]
    console.print("[green]pass[/]" if verdict["passed"] else "[red]FAIL[/]")
    if record:
        write(record, setting, curves, verdict)
    return bool(verdict["passed"])


def write(
    record: Path, setting: Setting, curves: list[Curve], verdict: dict[str, Any], **more: Any
) -> None:
    """What was trained where, the curves and the verdict, as JSON."""
    gpu = setting.device == "cuda"
    result = {
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "dtype": str(setting.dtype).removeprefix("torch."),
        "seed": setting.seed,
        "torch": torch.__version__,
        "size": asdict(setting.size),
        **more,
        "curves": [asdict(curve) for curve in curves],
        "verdict": verdict,
    }
    record.write_text(json.dumps(result, indent=1) + "\n")


def compare_with_math(recipe: Recipe, **chosen: Any) -> bool:
    """``compare`` with dense mathematics, which alone of torch's has the recipe's derivatives.

    No mask. Its runs are bitwise the same, so perturbed ones show the noise; gradients count too.
    """
    ours, theirs = (partial(attend, causal=False) for attend in (attend_rawattn, attend_math))
    return compare(recipe, ours, lambda _: theirs, perturbed=2, gradients=True, **chosen)


def judge_gradients(
    recipe: Recipe, setting: Setting, model: nn.Module, ours: Attention, theirs: Attention
) -> dict[str, float]:
    """How far the loss's gradients of the next seed's first batch are from those in float64.

    The error of rawattn's may be FACTOR times that of torch's in the same dtype, and one rounding.
    """
    size = setting.size
    pack = next(recipe.batches(setting.seed + 1, size.tokens, size.longest, setting.device))

    def gradient(model: nn.Module, attend: Attention, autocast: Autocast) -> Tensor:
        loss = recipe.loss(model, pack, attend, autocast)
        return torch.cat(
            [g.double().flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]
        )

    exact = gradient(deepcopy(model).double(), theirs, nullcontext)
    mine, its = (
        float((gradient(model, attend, setting.autocast) - exact).norm() / exact.norm())
        for attend in (ours, theirs)
    )
    return {
        "gradient_error": mine,
        "gradient_error_of_torch": its,
        "gradient_allowed": FACTOR * its + torch.finfo(setting.dtype).eps,
    }


# ---- curves -----------------------------------------------------------------------------------


def distance(a: Curve, b: Curve) -> float:
    """Root mean square over the steps of the difference of two loss curves."""
    square = [(x - y) ** 2 for x, y in zip(a.losses, b.losses, strict=True)]
    return math.sqrt(sum(square) / len(square))


def learns(curve: Curve) -> bool:
    """Whether the last tenth of the steps has a lower loss than the first one had."""
    return last_loss(curve) < curve.losses[0]


def last_loss(curve: Curve) -> float:
    """The mean over the last tenth of the steps."""
    last = curve.losses[-max(1, len(curve.losses) // 10) :]
    return sum(last) / len(last)


def judge(ours: Curve | None, theirs: list[Curve]) -> dict[str, Any]:
    """The verdict and the numbers behind it, which are None where the runs do not tell.

    ``noise`` is the largest distance of two runs of torch, ``deviation`` the mean distance of
    rawattn's run from them, ``allowed`` how large it may be: a loss is a float32 number, so no
    curve is better known than to one rounding of it.
    """
    pairs = itertools.combinations(theirs, 2)
    noise = max((distance(a, b) for a, b in pairs), default=None)
    deviation = allowed = None
    passed = all(learns(curve) for curve in [*theirs, *([ours] if ours else [])])
    if ours and theirs:
        deviation = sum(distance(ours, curve) for curve in theirs) / len(theirs)
        if noise is not None:
            allowed = FACTOR * noise + torch.finfo(torch.float32).eps * max(ours.losses)
            passed = passed and deviation <= allowed
    return {"noise": noise, "deviation": deviation, "allowed": allowed, "passed": passed}


def spark(losses: list[float], columns: int = 40) -> str:
    """A curve in one line of text."""
    chosen = losses[:: -(-len(losses) // columns)]
    low, high = min(chosen), max(chosen)
    return "".join("▁▂▃▄▅▆▇█"[int(7.99 * (x - low) / ((high - low) or 1))] for x in chosen)


def show(console: Console, curves: list[Curve], verdict: dict[str, Any], title: str) -> None:
    """The curves and the verdict."""
    show_curves(console, curves, title)
    for name in ("deviation", "noise", "allowed"):
        if verdict[name] is not None:
            console.print(f"{name:9} {verdict[name]:.2e} (root mean square over the steps)")
    if verdict["allowed"] is None:
        console.print("judged: only whether the loss falls (the rest takes both attentions)")


def show_curves(console: Console, curves: list[Curve], title: str) -> None:
    """About every tenth step as a row, differences counted from the first curve; steps/s."""
    first, *others = curves
    steps = len(first.losses)
    table = Table("step", *(curve.name for curve in curves), title=title)
    for curve in others:
        table.add_column(f"{first.name} minus\n{curve.name}", justify="right")
    for step in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
        values = [curve.losses[step] for curve in curves]
        table.add_row(
            str(step + 1),
            *(f"{value:.5f}" for value in values),
            *(f"{values[0] - value:+.1e}" for value in values[1:]),
        )
    console.print(table)
    for curve in curves:
        rate = steps / curve.seconds
        console.print(f"{curve.name:17} {spark(curve.losses)} {rate:.1f} steps/s", highlight=False)
