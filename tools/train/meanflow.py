"""Train a MeanFlow model of packed waves, whose loss takes a JVP, by rawattn and by torch.

    python tools/train/meanflow.py                          # GPU if there is one, else a tiny model
    python tools/train/meanflow.py --device cpu --steps 20 --json curve.json

A small transformer u(z, r, t) learns the mean velocity of the flow from waves of unequal length to
noise (arXiv 2505.13447): its target v - (t - r) du/dt takes the total derivative of u, a JVP with
the tangents (v, 0, 1), in every step, and the gradient is taken through u. torch's attention is the
dense mathematics, sequence by sequence, as no fused attention of torch has a forward mode. The exit
code is 0 if the loss falls, the curves differ by no more than twice what one rounding of the
initial weights does, and the gradients of the trained model are as near to those in float64 as
torch's are, within a factor of two; else 1.
"""

from functools import partial
from typing import Any

import click
import torch
from contest import compare_with_math
from models import Attention, Size, WaveModel, at_least_float32
from packing import CHANNELS, WavePack, waves
from torch import Tensor
from training import Autocast, Recipe, dtype_option, options

FLOWS = 0.25  # share of the sequences with r < t; for the others the loss is that of flow matching
SIZES = {
    "cpu": Size(2, 2, 32, tokens=256, longest=96, steps=30, learning_rate=2e-3),
    "cuda": Size(4, 8, 64, tokens=8192, longest=1024, steps=300, learning_rate=6e-4),
}


def meanflow_loss(
    model: WaveModel, pack: WavePack, attend: Attention, autocast: Autocast
) -> Tensor:
    """Mean square of u - stop_gradient(v - (t - r) du/dt) at a point z between wave and noise."""
    dtype = model.head.weight.dtype
    x, noise, chance = (x.to(dtype) for x in (pack.x, pack.noise, pack.chance))
    first, last, flow = chance[pack.owner].split(1, dim=1)
    t = torch.maximum(first, last)
    r = torch.where(flow < FLOWS, torch.minimum(first, last), t)
    z, v = torch.lerp(x, noise, t), noise - x
    with autocast():
        u, dudt = torch.func.jvp(
            lambda z, r, t: at_least_float32(model(z, pack, attend, r, t)),
            (z, r, t),
            (v, torch.zeros_like(r), torch.ones_like(t)),
        )
    target = v - (t - r) * dudt
    return (u - target.detach()).square().mean()


RECIPE = Recipe(
    SIZES, partial(WaveModel, outputs=CHANNELS, numbers=2), waves, meanflow_loss, "MeanFlow loss"
)


@click.command(help=__doc__.splitlines()[0])
@options
@dtype_option
def main(**chosen: Any) -> None:
    raise SystemExit(0 if compare_with_math(RECIPE, **chosen) else 1)


if __name__ == "__main__":
    main()
