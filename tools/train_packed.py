"""Train a small byte-level transformer on packed documents, by rawattn and by torch's attention.

    python tools/train_packed.py                      # GPU if there is one, else a tiny model
    python tools/train_packed.py --device cpu --steps 20 --json curve.json

The documents are the .py files of the running Python's standard library, of very unequal length,
packed one after the other into batches of a fixed number of tokens. Model, initial weights and
order of the data are the same for every run; only the attention differs. Training amplifies every
rounding, so rawattn's curve is held against the noise of torch's own: the exit code is 0 if the
loss falls and the curves of rawattn and torch differ by no more than FACTOR times what two runs of
torch differ by, else 1.
"""

import inspect
import itertools
import json
import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from rawattn.torch import varlen_attn

FACTOR = 2.0  # the noise is itself one sample; the distances of equal runs scatter by this much
START = 256  # the token in front of every document; the others are its bytes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    head_dim: int
    tokens: int  # in a batch
    longest: int  # document
    steps: int
    learning_rate: float

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim


SIZES = {
    "cpu": Size(2, 2, 32, tokens=768, longest=320, steps=60, learning_rate=3e-3),
    "cuda": Size(6, 8, 64, tokens=32768, longest=8192, steps=300, learning_rate=6e-4),
}


@dataclass(frozen=True)
class Pack:
    """One batch: documents side by side. ``cu_seqlens`` is (documents + 1,) int32."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]


Attention = Callable[[Tensor, Tensor, Tensor, Pack], Tensor]


def documents(seed: int, longest: int) -> Iterator[bytes]:
    """The .py files of the standard library for ever, in an order that ``seed`` alone decides.

    A file of more than ``longest`` bytes becomes several documents, cut at blank lines if possible.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
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


def packs(seed: int, tokens: int, longest: int, device: str) -> Iterator[Pack]:
    """Batches of exactly ``tokens`` bytes; a document that ends none goes on in the next one."""
    source, rest = documents(seed, longest), b""
    while True:
        pieces: list[bytes] = []
        room = tokens
        while room:
            rest = rest or next(source)
            pieces.append(rest[:room])
            rest, room = rest[room:], room - len(pieces[-1])
        lengths = tuple(map(len, pieces))
        yield Pack(
            inputs=torch.tensor([t for p in pieces for t in (START, *p[:-1])], device=device),
            targets=torch.tensor(list(b"".join(pieces)), device=device),
            positions=torch.tensor([i for n in lengths for i in range(n)], device=device),
            cu_seqlens=torch.tensor(
                [0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device
            ),
            lengths=lengths,
        )


def attend_rawattn(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> Tensor:
    return varlen_attn(q, k, v, pack.cu_seqlens, causal=True)


def attend_by_document(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> Tensor:
    """torch's attention where it has no packed one: document by document."""
    split = (x.transpose(0, 1).split(pack.lengths, dim=1) for x in (q, k, v))
    parts = [
        F.scaled_dot_product_attention(*qkv, is_causal=True) for qkv in zip(*split, strict=True)
    ]
    return torch.cat(parts, dim=1).transpose(0, 1)


def torch_attention(device: str, dtype: torch.dtype) -> Attention:
    """torch's packed attention in the spelling of the version at hand; by document without one."""
    if device != "cuda" or dtype == torch.float32:
        return attend_by_document
    from torch.nn.attention.varlen import varlen_attn as theirs

    modern = "window_size" in inspect.signature(theirs).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if modern else {"is_causal": True}

    def attend(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> Tensor:
        longest = max(pack.lengths)
        return theirs(q, k, v, pack.cu_seqlens, pack.cu_seqlens, longest, longest, **causal)

    return attend


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


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out; positions are counted within each document."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(START + 1, size.dim)
        self.place = nn.Embedding(size.longest, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, pack: Pack, attend: Attention) -> Tensor:
        x = self.embed(pack.inputs) + self.place(pack.positions)
        for block in self.blocks:
            x = block(x, pack, attend)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Curve:
    name: str
    losses: list[float]  # mean cross entropy of each step, nats per byte
    seconds: float


def perturb(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Change every weight by at most what one rounding to ``dtype`` changes a number by."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            nudge = torch.rand(weight.shape, generator=generator) - 0.5
            weight.mul_(1 + torch.finfo(dtype).eps * nudge)


def train(
    name: str,
    attend: Attention,
    size: Size,
    device: str,
    dtype: torch.dtype,
    seed: int,
    perturbed: bool,
    progress: Progress,
) -> Curve:
    """One run from the start. Weights are float32; the rest computes in ``dtype`` by autocast."""
    torch.manual_seed(seed)
    model = Transformer(size)
    if perturbed:
        perturb(model, dtype, seed + 1)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, max(1, size.steps // 10))
    batches = packs(seed, size.tokens, size.longest, device)
    losses: list[float] = []
    begin = time.perf_counter()
    for pack in progress.track(itertools.islice(batches, size.steps), size.steps, description=name):
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            logits = model(pack, attend)
        loss = F.cross_entropy(logits.float(), pack.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()
        losses.append(loss.item())
    return Curve(name, losses, time.perf_counter() - begin)


def distance(a: Curve, b: Curve) -> float:
    """Root mean square over the steps of the difference of two loss curves."""
    square = [(x - y) ** 2 for x, y in zip(a.losses, b.losses, strict=True)]
    return math.sqrt(sum(square) / len(square))


def learns(curve: Curve) -> bool:
    """Whether the last tenth of the steps has a lower loss than the first one had."""
    last = curve.losses[-max(1, len(curve.losses) // 10) :]
    return sum(last) / len(last) < curve.losses[0]


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


def show(console: Console, curves: list[Curve], verdict: dict[str, Any], tokens: int) -> None:
    """About every tenth step as a row, differences counted from the first curve; the verdict."""
    first, *others = curves
    steps = len(first.losses)
    table = Table("step", *(curve.name for curve in curves), title="loss, nats per byte")
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
        rate = tokens * steps / curve.seconds
        console.print(
            f"{curve.name:15} {spark(curve.losses)} {rate:,.0f} tokens/s", highlight=False
        )
    for name in ("deviation", "noise", "allowed"):
        if verdict[name] is not None:
            console.print(f"{name:9} {verdict[name]:.2e} (root mean square over the steps)")
    if verdict["allowed"] is None:
        console.print("judged: only whether the loss falls (the rest takes both and --runs 2)")
    console.print("[green]pass[/]" if verdict["passed"] else "[red]FAIL[/]")


@click.command(help=__doc__.splitlines()[0])
@click.option("--device", type=click.Choice(list(SIZES)), help="Default: cuda if there is one.")
@click.option("--steps", type=click.IntRange(1), help="Default: 60 on the CPU, 300 on a GPU.")
@click.option(
    "--dtype", type=click.Choice(list(DTYPES)), help="Default: float32, on a GPU bfloat16."
)
@click.option("--attention", type=click.Choice(["rawattn", "torch", "both"]), default="both")
@click.option("--runs", type=click.IntRange(1), default=2, help="Runs of torch; 2 show its noise.")
@click.option("--seed", default=0, help="Of the initial weights and of the order of the documents.")
@click.option("--json", "record", type=click.Path(path_type=Path), help="Write all losses here.")
def main(
    device: str | None,
    steps: int | None,
    dtype: str | None,
    attention: str,
    runs: int,
    seed: int,
    record: Path | None,
) -> None:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    size = SIZES[device]
    size = Size(**{**asdict(size), "steps": steps or size.steps})
    if device == "cpu":
        torch.set_num_threads(1)  # tensors this small only make threads wait for each other
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:

        def run(name: str, attend: Attention, perturbed: bool = False) -> Curve:
            return train(name, attend, size, device, DTYPES[dtype], seed, perturbed, progress)

        ours = run("rawattn", attend_rawattn) if attention != "torch" else None
        theirs: list[Curve] = []
        if attention != "rawattn":
            attend = torch_attention(device, DTYPES[dtype])
            theirs = [run(f"torch {i + 1}", attend) for i in range(runs)]
            if runs > 1 and not any(distance(theirs[0], curve) for curve in theirs[1:]):
                # Bitwise repeatable, so there is no noise to see: make some, of one rounding.
                theirs = [theirs[0], run("torch perturbed", attend, perturbed=True)]
    curves = [*([ours] if ours else []), *theirs]
    verdict = judge(ours, theirs)
    show(console, curves, verdict, size.tokens)
    if record:
        result = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "dtype": dtype,
            "seed": seed,
            "torch": torch.__version__,
            "size": asdict(size),
            "curves": [asdict(curve) for curve in curves],
            "verdict": verdict,
        }
        record.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if verdict["passed"] else 1)


if __name__ == "__main__":
    main()
