"""Train a byte-level transformer with native sparse attention, and one with dense, and time both.

    python tools/train/train_nsa.py                         # GPU if there is one, else a tiny model
    python tools/train/train_nsa.py --tokens 65536 --longest 65536 --steps 100
    python tools/train/train_nsa.py --layer 65536           # one layer's forward and backward alone

The two models differ in the attention layer alone: rawattn.torch's NativeSparseAttention, or
varlen_attn between projections; the data are those of train_packed.py. The exit code is 0 if
both losses fall and the sparse model's, over the last tenth of the steps, is at most MARGIN times
the dense one's, else 1.

--layer times a layer of 64 query heads on 4 key/value heads of 128 on one sequence, up to the
gradients of its input and its weights, in bfloat16, the layers taking turns. "dense, cuDNN" attends
by torch.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from contest import last_loss, learns, show_curves
from models import Attention, LanguageModel, Size, attend_rawattn
from packing import Pack, pack, texts
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_packed import cross_entropy
from training import (
    Curve,
    Recipe,
    Setting,
    bar,
    dtype_option,
    median_times,
    run_options,
    settle,
    train,
)

from rawattn.torch import NativeSparseAttention

MARGIN = 1.1


@dataclass(frozen=True)
class SparseSize(Size):
    """``heads`` query heads share ``heads_kv``; the rest as in NativeSparseAttention."""

    heads_kv: int
    block_size: int
    num_selected: int
    compress_length: int
    compress_stride: int
    window: int


SIZES = {
    "cpu": SparseSize(
        *(2, 4, 16),
        **{"tokens": 384, "longest": 256, "steps": 30, "learning_rate": 3e-3},
        **{"heads_kv": 1, "block_size": 16, "num_selected": 4},
        **{"compress_length": 16, "compress_stride": 8, "window": 24},
    ),
    "cuda": SparseSize(
        *(6, 16, 64),
        **{"tokens": 32768, "longest": 32768, "steps": 300, "learning_rate": 6e-4},
        **{"heads_kv": 1, "block_size": 64, "num_selected": 16},
        **{"compress_length": 32, "compress_stride": 16, "window": 512},
    ),
}


class DenseAttention(nn.Module):
    """Causal self-attention between projections, with grouped heads."""

    def __init__(
        self, dim: int, heads: int, heads_kv: int, head_dim: int, attend: Attention
    ) -> None:
        super().__init__()
        self.heads, self.heads_kv, self.attend = heads, heads_kv, attend
        self.project_q = nn.Linear(dim, heads * head_dim, bias=False)
        self.project_kv = nn.Linear(dim, 2 * heads_kv * head_dim, bias=False)
        self.project_out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, pack: Pack) -> Tensor:
        q = self.project_q(x).unflatten(1, (self.heads, -1))
        k, v = self.project_kv(x).unflatten(1, (2, self.heads_kv, -1)).unbind(1)
        return self.project_out(self.attend(q, k, v, pack).flatten(1))


class SparseAttention(nn.Module):
    """NativeSparseAttention of a pack."""

    def __init__(self, dim: int, size: SparseSize) -> None:
        super().__init__()
        self.layer = NativeSparseAttention(
            *(dim, size.heads, size.heads_kv, size.head_dim),
            block_size=size.block_size,
            num_selected=size.num_selected,
            compress_length=size.compress_length,
            compress_stride=size.compress_stride,
            window=size.window,
        )

    def forward(self, x: Tensor, pack: Pack) -> Tensor:
        return self.layer(x, pack.cu_seqlens, max_seqlen=max(pack.lengths))


def dense_layer(dim: int, size: SparseSize, attend: Attention = attend_rawattn) -> nn.Module:
    return DenseAttention(dim, size.heads, size.heads_kv, size.head_dim, attend)


LAYERS: dict[str, Callable[[int, SparseSize], nn.Module]] = {
    "sparse": SparseAttention,
    "dense": dense_layer,
}


class LayerBlock(nn.Module):
    """A transformer's block around one of LAYERS."""

    def __init__(self, size: SparseSize, layer: str) -> None:
        super().__init__()
        self.attention = LAYERS[layer](size.dim, size)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(size.dim), nn.LayerNorm(size.dim)
        self.mlp = nn.Sequential(
            nn.Linear(size.dim, 4 * size.dim), nn.GELU(), nn.Linear(4 * size.dim, size.dim)
        )

    def forward(self, x: Tensor, pack: Pack, _attend: Attention) -> Tensor:
        x = x + self.attention(self.norm_attention(x), pack)
        return x + self.mlp(self.norm_mlp(x))


def recipe_of(layer: str) -> Recipe:
    model = partial(LanguageModel, block=partial(LayerBlock, layer=layer))
    return Recipe(SIZES, model, texts, cross_entropy, "loss, nats per byte")


def judge(curves: list[Curve]) -> dict[str, Any]:
    """The verdict on the curves of "sparse" and "dense", and their last losses."""
    last = {curve.name: last_loss(curve) for curve in curves}
    passed = all(map(learns, curves)) and last["sparse"] <= MARGIN * last["dense"]
    return {"last_losses": last, "passed": passed}


def train_both(setting: Setting, console: Console) -> list[Curve]:
    """The curves of both models; a step of each comes before, so that no time is of compiling."""
    with bar(console) as progress:

        def run(layer: str, setting: Setting, name: str) -> Curve:
            return train(recipe_of(layer), setting, name, attend_rawattn, progress)[0]

        once = replace(setting, size=replace(setting.size, steps=1))
        for layer in LAYERS:
            run(layer, once, f"{layer}, once")
        return [run(layer, setting, layer) for layer in LAYERS]


def attend_cudnn(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> Tensor:
    """torch's attention on cuDNN; one sequence."""
    parts = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def layer_times(tokens: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Median milliseconds of forward and backward of each layer on one sequence."""
    dim, size = 2560, replace(SIZES["cuda"], heads=64, heads_kv=4, head_dim=128)
    if device == "cpu":
        dim, size = 64, SIZES["cpu"]
    layers = dict(LAYERS)
    if device == "cuda":
        layers["dense, cuDNN"] = partial(dense_layer, attend=attend_cudnn)
    where = pack((tokens,), device)
    x, dout = torch.randn((2, tokens, dim), device=device, dtype=dtype).unbind()
    x.requires_grad_()

    def call_of(layer: nn.Module) -> Callable[[], Any]:
        inputs = (x, *layer.parameters())
        return lambda: torch.autograd.grad(layer(x, where), inputs, dout)

    calls = {
        name: call_of(make(dim, size).to(device=device, dtype=dtype))
        for name, make in layers.items()
    }
    return median_times(calls, device)


def show_times(console: Console, times: dict[str, float], tokens: int) -> None:
    table = Table("layer", "ms", "sparse is faster", title=f"forward and backward, {tokens} tokens")
    for name, ms in times.items():
        table.add_row(name, f"{ms:.2f}", f"{ms / times['sparse']:.2f} x")
    console.print(table)


@click.command(help=__doc__.splitlines()[0])
@click.option("--tokens", type=click.IntRange(1), help="In a batch. Default: by the device.")
@click.option("--longest", type=click.IntRange(1), help="Sequence. Default: by the device.")
@click.option("--layer", type=click.IntRange(1), help="Only time a layer on so many tokens.")
@run_options
@dtype_option
def main(
    tokens: int | None,
    longest: int | None,
    layer: int | None,
    record: Path | None,
    **chosen: Any,
) -> None:
    setting = settle(recipe_of("sparse"), **chosen)
    console = Console(width=120)
    result: dict[str, Any] = {"torch": torch.__version__, "seed": setting.seed}
    passed = True
    if layer:
        dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
        times = layer_times(layer, setting.device, dtype)
        show_times(console, times, layer)
        result |= {"tokens": layer, "layer_ms": times}
    else:
        given = {"tokens": tokens, "longest": longest}
        size = replace(setting.size, **{name: n for name, n in given.items() if n})
        setting = replace(setting, size=size)
        curves = train_both(setting, console)
        verdict = judge(curves)
        show_curves(console, curves, f"loss, nats per byte, {size.tokens} tokens a step")
        for name, loss in verdict["last_losses"].items():
            console.print(f"{name:6} {loss:.4f} nats per byte over the last tenth of the steps")
        passed = verdict["passed"]
        console.print("[green]pass[/]" if passed else "[red]FAIL[/]")
        result |= {"size": asdict(size), "curves": [asdict(c) for c in curves], "verdict": verdict}
    if record:
        record.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
