"""Train a small byte-level transformer on packed documents, by rawattn and by torch's attention.

    python tools/train/train_packed.py                      # GPU if there is one, else a tiny model
    python tools/train/train_packed.py --device cpu --steps 20 --json curve.json

The documents are the .py files of the running Python's standard library, of very unequal length,
packed one after the other into batches of a fixed number of tokens. The exit code is 0 if the loss
falls and the curves of rawattn and torch differ by no more than twice what two runs of torch do,
else 1.
"""

from typing import Any

import click
import torch.nn.functional as F
from contest import compare
from models import (
    Attention,
    LanguageModel,
    Size,
    at_least_float32,
    attend_rawattn,
    torch_attention,
)
from packing import TextPack, texts
from torch import Tensor, nn
from training import Autocast, Recipe, dtype_option, options

SIZES = {
    "cpu": Size(2, 2, 32, tokens=768, longest=320, steps=60, learning_rate=3e-3),
    "cuda": Size(6, 8, 64, tokens=32768, longest=8192, steps=300, learning_rate=6e-4),
}


def cross_entropy(
    model: nn.Module, pack: TextPack, attend: Attention, autocast: Autocast
) -> Tensor:
    """Nats per byte."""
    with autocast():
        logits = model(pack, attend)
    return F.cross_entropy(at_least_float32(logits), pack.targets)


RECIPE = Recipe(SIZES, LanguageModel, texts, cross_entropy, "loss, nats per byte")


@click.command(help=__doc__.splitlines()[0])
@options
@dtype_option
@click.option("--runs", type=click.IntRange(1), default=2, help="Runs of torch; 2 show its noise.")
def main(**chosen: Any) -> None:
    passed = compare(RECIPE, attend_rawattn, lambda s: torch_attention(s.device, s.dtype), **chosen)
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
