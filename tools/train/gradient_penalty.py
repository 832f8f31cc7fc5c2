"""Train a critic with a gradient penalty (WGAN-GP) on packed waves, by rawattn and by torch.

    python tools/train/gradient_penalty.py                  # GPU if there is one, else a tiny model
    python tools/train/gradient_penalty.py --device cpu --steps 10 --json curve.json

The critic, a small transformer, tells waves of unequal length from noise (arXiv 1704.00028). The
penalty on the norm of its gradient with respect to its input makes every step differentiate a
gradient. torch's attention is the dense mathematics, sequence by sequence, as no fused attention of
torch has a second derivative. The exit code is 0 if the loss falls, the curves differ by no more
than twice what one rounding of the initial weights does, and the gradients of the trained critic
are as near to those in float64 as torch's are, within a factor of two; else 1.
"""

from functools import partial
from typing import Any

import click
import torch
from contest import compare_with_math
from models import Attention, Size, WaveModel, at_least_float32
from packing import WavePack, waves
from torch import Tensor
from training import Autocast, Recipe, dtype_option, options

WEIGHT = 10.0  # of the penalty
SIZES = {
    "cpu": Size(2, 2, 32, tokens=256, longest=96, steps=30, learning_rate=4e-4),
    "cuda": Size(4, 8, 64, tokens=8192, longest=1024, steps=40, learning_rate=2e-4),
}


def per_sequence(values: Tensor, pack: WavePack) -> Tensor:
    """The sum of a number per token over each sequence."""
    return values.new_zeros(len(pack.lengths)).index_add(0, pack.owner, values)


def critic_loss(model: WaveModel, pack: WavePack, attend: Attention, autocast: Autocast) -> Tensor:
    """Wasserstein critic and penalty: the slope between a wave and noise should have norm 1.

    A score is a sum over the sequence's tokens over the square root of their number, so that its
    slope has the same size for every length.
    """
    dtype = model.head.weight.dtype
    real, fake, chance = (x.to(dtype) for x in (pack.x, pack.noise, pack.chance))
    tokens = per_sequence(torch.ones_like(real[:, 0]), pack)

    def score(x: Tensor) -> Tensor:
        with autocast():
            values = model(x, pack, attend)
        return per_sequence(at_least_float32(values[:, 0]), pack) / tokens.sqrt()

    mix = chance[pack.owner, :1]
    between = torch.lerp(fake, real, mix).requires_grad_()
    (slope,) = torch.autograd.grad(score(between).sum(), between, create_graph=True)
    norm = per_sequence(slope.square().sum(1), pack).add(1e-12).sqrt()
    return (score(fake) - score(real) + WEIGHT * (norm - 1).square()).mean()


RECIPE = Recipe(SIZES, partial(WaveModel, outputs=1), waves, critic_loss, "loss of the critic")


@click.command(help=__doc__.splitlines()[0])
@options
@dtype_option
def main(**chosen: Any) -> None:
    raise SystemExit(0 if compare_with_math(RECIPE, **chosen) else 1)


if __name__ == "__main__":
    main()
