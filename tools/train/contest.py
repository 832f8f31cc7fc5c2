"""Train one model by rawattn and by torch, and say whether rawattn did as well."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from train.curves import FACTOR, Curve, distance, judge, show
from train.models import Attention, attend_math, attend_rawattn
from train.training import Autocast, Recipe, Setting, bar, settle, train


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
        gpu = setting.device == "cuda"
        result = {
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "dtype": str(setting.dtype).removeprefix("torch."),
            "seed": seed,
            "torch": torch.__version__,
            "size": asdict(setting.size),
            "curves": [asdict(curve) for curve in curves],
            "verdict": verdict,
        }
        record.write_text(json.dumps(result, indent=1) + "\n")
    return bool(verdict["passed"])


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
