"""Loss curves: how far two are apart, and whether rawattn's is no farther from torch's than noise.

Training amplifies every rounding, so rawattn's curve is held against the noise of torch's own: it
may differ from torch's by no more than FACTOR times what two runs of torch differ by.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

FACTOR = 2.0  # the noise is itself one sample; the distances of equal runs scatter by this much


@dataclass(frozen=True)
class Curve:
    name: str
    losses: list[float]  # of each step
    seconds: float


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
