"""Small transformers on packed sequences, and the attention functions that they take."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from packing import CHANNELS, START, Pack, TextPack
from torch import Tensor, nn

from rawattn.torch import varlen_attn

FREQUENCIES = 3  # octaves in which a number that steers a model is given to it


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    head_dim: int
    tokens: int  # in a batch
    longest: int  # sequence
    steps: int
    learning_rate: float

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim


Attention = Callable[[Tensor, Tensor, Tensor, Pack], Tensor]


def attend_rawattn(q: Tensor, k: Tensor, v: Tensor, pack: Pack, causal: bool = True) -> Tensor:
    return varlen_attn(q, k, v, pack.cu_seqlens, causal=causal)


def attend_by_sequence(q: Tensor, k: Tensor, v: Tensor, pack: Pack, causal: bool = True) -> Tensor:
    """torch's attention where it has no packed one: sequence by sequence."""
    return _by_sequence(F.scaled_dot_product_attention, q, k, v, pack, causal)


def attend_math(q: Tensor, k: Tensor, v: Tensor, pack: Pack, causal: bool = True) -> Tensor:
    """The mathematics, dense, of each sequence: torch differentiates it in any mode and order."""
    return _by_sequence(_dense, q, k, v, pack, causal)


def _by_sequence(
    function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, pack: Pack, causal: bool
) -> Tensor:
    split = (x.transpose(0, 1).split(pack.lengths, dim=1) for x in (q, k, v))
    parts = [function(*qkv, is_causal=causal) for qkv in zip(*split, strict=True)]
    return torch.cat(parts, dim=1).transpose(0, 1)


def _dense(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        square = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(square.triu(1), -math.inf)
    return scores.softmax(-1) @ v


def torch_attention(device: str, dtype: torch.dtype) -> Attention:
    """torch's packed attention in the spelling of the version at hand; by sequence without one."""
    if device != "cuda" or dtype == torch.float32:
        return attend_by_sequence
    from torch.nn.attention.varlen import varlen_attn as theirs

    modern = "window_size" in inspect.signature(theirs).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if modern else {"is_causal": True}

    def attend(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> Tensor:
        longest = max(pack.lengths)
        return theirs(q, k, v, pack.cu_seqlens, pack.cu_seqlens, longest, longest, **causal)

    return attend


def packed_attentions(device: str, dtype: torch.dtype) -> dict[str, Attention]:
    """rawattn's packed attention, then those of others that are installed."""
    found = {"rawattn": attend_rawattn, "torch": torch_attention(device, dtype)}
    if (
        device == "cuda"
        and dtype != torch.float32
        and find_spec("flash_attn")
        and find_spec("flash_attn.cute")
    ):
        from flash_attn.cute import flash_attn_varlen_func

        def attend_fa4(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> Tensor:
            longest = max(pack.lengths)
            result: Any = flash_attn_varlen_func(
                *(q, k, v),
                cu_seqlens_q=pack.cu_seqlens,
                cu_seqlens_k=pack.cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                causal=True,
            )
            return result[0] if isinstance(result, tuple) else result

        found["fa4"] = attend_fa4
    return found


def at_least_float32(x: Tensor) -> Tensor:
    """What a loss is summed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = (-1, 3, size.heads, size.head_dim)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(size.dim), nn.LayerNorm(size.dim)
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.project = nn.Linear(size.dim, size.dim, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(size.dim, 4 * size.dim), nn.GELU(), nn.Linear(4 * size.dim, size.dim)
        )

    def forward(self, x: Tensor, pack: Pack, attend: Attention) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).view(self.heads).unbind(1)
        x = x + self.project(attend(q, k, v, pack).reshape(x.shape))
        return x + self.mlp(self.norm_mlp(x))


class Trunk(nn.Module):
    """What both models share; positions are counted within each sequence."""

    def __init__(
        self,
        size: Size,
        enter: nn.Module,
        outputs: int,
        block: Callable[[Any], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.enter = enter
        self.place = nn.Embedding(size.longest, size.dim)
        self.blocks = nn.ModuleList(block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, outputs, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def compute(self, inputs: Tensor, pack: Pack, attend: Attention) -> Tensor:
        x = self.enter(inputs) + self.place(pack.positions)
        for block in self.blocks:
            x = block(x, pack, attend)
        return self.head(self.norm(x))


class LanguageModel(Trunk):
    """Bytes in, logits of the next byte out."""

    def __init__(self, size: Size, block: Callable[[Any], nn.Module] = Block) -> None:
        super().__init__(size, nn.Embedding(START + 1, size.dim), 256, block)

    def forward(self, pack: TextPack, attend: Attention) -> Tensor:
        return self.compute(pack.inputs, pack, attend)


class WaveModel(Trunk):
    """A vector per token in, ``outputs`` numbers per token out, steered by ``numbers`` numbers."""

    def __init__(self, size: Size, outputs: int, numbers: int = 0) -> None:
        features = CHANNELS + numbers * 2 * FREQUENCIES
        super().__init__(size, nn.Linear(features, size.dim), outputs)

    def forward(self, x: Tensor, pack: Pack, attend: Attention, *numbers: Tensor) -> Tensor:
        """``numbers`` are (tokens, 1) each, from 0 to 1."""
        octaves = math.pi / 2 * 2.0 ** torch.arange(FREQUENCIES, device=x.device, dtype=x.dtype)
        waves = [wave(n * octaves) for n in numbers for wave in (torch.sin, torch.cos)]
        return self.compute(torch.cat([x, *waves], dim=1), pack, attend)
