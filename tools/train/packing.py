"""Packed training data: text of unequal length, and waves of unequal length."""

import itertools
import math
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

START = 256  # the token in front of every document; the others are its bytes
CHANNELS = 4  # of a wave


@dataclass(frozen=True)
class Pack:
    """One batch: sequences side by side. ``cu_seqlens`` is (sequences + 1,) int32."""

    positions: Tensor  # of each token within its sequence
    cu_seqlens: Tensor
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class TextPack(Pack):
    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class WavePack(Pack):
    """``x`` and ``noise`` are (tokens, CHANNELS); ``chance`` is uniform, a row per sequence."""

    x: Tensor
    noise: Tensor
    chance: Tensor  # (sequences, 3)
    owner: Tensor  # the sequence of each token


def pack(lengths: tuple[int, ...], device: str) -> Pack:
    """Where the tokens of sequences of these lengths are."""
    offsets = [0, *itertools.accumulate(lengths)]
    return Pack(
        positions=torch.tensor([i for n in lengths for i in range(n)], device=device),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=device),
        lengths=lengths,
    )


def documents(seed: int, longest: int) -> Iterator[bytes]:
    """The .py files of the standard library for ever, in an order that ``seed`` alone decides.

    A file of more than ``longest`` bytes becomes several documents, cut at blank lines if possible.
    """
    paths = [*_sources()]
    random.Random(seed).shuffle(paths)
    for path in itertools.cycle(paths):
        text = path.read_bytes()
        while len(text) > longest:
            blank = text.rfind(b"\n\n", 0, longest)
            end = longest if blank < 0 else blank + 2
            yield text[:end]
            text = text[end:]
        if text:
            yield text


@cache
def _sources() -> tuple[Path, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    return tuple(p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts)


def texts(seed: int, tokens: int, longest: int, device: str) -> Iterator[TextPack]:
    """Batches of exactly ``tokens`` bytes; a document that ends none goes on in the next one."""
    source, rest = documents(seed, longest), b""
    while True:
        pieces: list[bytes] = []
        room = tokens
        while room:
            rest = rest or next(source)
            pieces.append(rest[:room])
            rest, room = rest[room:], room - len(pieces[-1])
        yield TextPack(
            **vars(pack(tuple(map(len, pieces)), device)),
            inputs=torch.tensor([t for p in pieces for t in (START, *p[:-1])], device=device),
            targets=torch.tensor(list(b"".join(pieces)), device=device),
        )


def waves(seed: int, tokens: int, longest: int, device: str) -> Iterator[WavePack]:
    """Batches of exactly ``tokens`` samples: each sequence is a wave of its own frequencies."""
    lengths_source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    while True:
        lengths: list[int] = []
        while room := tokens - sum(lengths):
            lengths.append(min(room, lengths_source.randint(longest // 8, longest)))
        where = pack(tuple(lengths), "cpu")
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        frequency, phase = torch.rand((2, len(lengths), CHANNELS), generator=generator)
        angle = (0.05 + 0.4 * frequency[owner]) * where.positions[:, None]
        drawn = {
            "x": torch.sin(angle + 2 * math.pi * phase[owner]) * math.sqrt(2),
            "noise": torch.randn((tokens, CHANNELS), generator=generator),
            "chance": torch.rand((len(lengths), 3), generator=generator),
            "owner": owner,
            "positions": where.positions,
            "cu_seqlens": where.cu_seqlens,
        }
        yield WavePack(**{k: x.to(device) for k, x in drawn.items()}, lengths=where.lengths)
