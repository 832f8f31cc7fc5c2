"""Train a small byte-level transformer on packed documents, by rawattn and by torch's attention.

    python tools/train/train_packed.py                      # GPU if there is one, else a tiny model
    python tools/train/train_packed.py --device cpu --steps 20 --json curve.json
    python tools/train/train_packed.py --speed              # tokens a second, beside others

The documents are the .py files of the running Python's standard library, of very unequal length,
packed one after the other into batches of a fixed number of tokens. The exit code is 0 if the loss
falls and the curves of rawattn and torch differ by no more than twice what two runs of torch do,
else 1. With --speed it is 0 if no other attention trains more tokens a second.
"""

import json
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
    packed_attentions,
    torch_attention,
)
from packing import TextPack, texts
from rich.console import Console
from speed import race, show
from torch import Tensor, nn
from training import Autocast, Recipe, dtype_option, options, settle

SIZES = {
    "cpu": Size(2, 2, 32, tokens=768, longest=320, steps=60, learning_rate=3e-3),
    "cuda": Size(6, 8, 64, tokens=32768, longest=8192, steps=300, learning_rate=6e-4),
}
BATCHES = 20  # whose steps are timed


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
@click.option("--speed", is_flag=True, help="Compare tokens a second, not curves; 20 batches.")
def main(speed: bool, **chosen: Any) -> None:
    if speed:
        raise SystemExit(0 if measure(**chosen) else 1)
    passed = compare(RECIPE, attend_rawattn, lambda s: torch_attention(s.device, s.dtype), **chosen)
    raise SystemExit(0 if passed else 1)


def measure(
    *, device: str | None, steps: int | None, dtype: str | None, seed: int, record: Any, **_: Any
) -> bool:
    """Whether no packed attention at hand trains the model faster than rawattn's."""
    setting = settle(RECIPE, device, steps or BATCHES, dtype, seed)
    rates = race(RECIPE, setting, packed_attentions(setting.device, setting.dtype))
    size = setting.size
    model = f"{size.layers} layers, {size.heads} heads of {size.head_dim}, {size.tokens} tokens"
    if record:
        record.write_text(json.dumps({"model": model, "tokens_a_second": rates}, indent=1) + "\n")
    return show(Console(width=120), rates, model)


if __name__ == "__main__":
    main()
