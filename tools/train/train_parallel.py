"""Train the packed language model on several ranks, each with a part of every batch.

    torchrun --nproc-per-node 2 tools/train/train_parallel.py           # on GPUs if there are any
    torchrun --nproc-per-node 3 tools/train/train_parallel.py --device cpu --steps 20
    torchrun --nproc-per-node 8 tools/train/train_parallel.py --layout zigzag --method ring

Batches, model and steps are those of train_packed.py; gradients are averaged over the ranks by
torch's DistributedDataParallel. Then the first rank trains alone on whole batches, twice, once from
weights that differ by a rounding: the exit code is 0 if the loss falls and the ranks' curve is no
further from those than twice what they are from each other.
"""

import itertools
import os
import time
from dataclasses import replace
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from contest import judge, show, write
from models import at_least_float32, attend_rawattn
from packing import TextPack
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from train_packed import RECIPE
from training import Curve, Setting, bar, dtype_option, run_options, settle, start, train

from rawattn.torch import context_parallel as cp


@click.command(help=__doc__.splitlines()[0])
@run_options
@dtype_option
@click.option("--layout", default="contiguous", help="contiguous or zigzag.")
@click.option("--method", default="auto", help="auto, gather, ring or ulysses.")
def main(layout: str, method: str, **chosen: Any) -> None:
    """Started by torchrun, once for each rank."""
    on_gpu = chosen["device"] == "cuda" or (not chosen["device"] and torch.cuda.is_available())
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        passed = compare(layout, method, **chosen)
    finally:
        dist.destroy_process_group()
    raise SystemExit(0 if passed else 1)


def compare(
    layout: str,
    method: str,
    *,
    device: str | None,
    steps: int | None,
    dtype: str | None,
    seed: int,
    record: Any,
) -> bool:
    """Whether the ranks together train as one does alone; the first one says so to the others."""
    setting = settle(RECIPE, device, steps, dtype, seed)
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    console = Console(width=120, quiet=not first)
    said = [False]
    with bar(console) as progress:
        together = train_together(setting, layout, method, progress)
        if first:
            alone = [
                train(RECIPE, setting, name, attend_rawattn, progress, perturbed)[0]
                for perturbed, name in enumerate(("1 rank", "perturbed"))
            ]
    if first:
        verdict = judge(together, alone)
        show(console, [together, *alone], verdict, RECIPE.title)
        console.print("[green]pass[/]" if verdict["passed"] else "[red]FAIL[/]")
        if record:
            how = {"ranks": ranks, "layout": layout, "method": method}
            write(record, setting, [together, *alone], verdict, **how)
        said = [bool(verdict["passed"])]
    dist.broadcast_object_list(said, 0)
    return said[0]


def train_together(setting: Setting, layout: str, method: str, progress: Progress) -> Curve:
    """One run of all ranks; its losses are those of whole batches."""
    size, ranks = setting.size, dist.get_world_size()
    model, optimizer = start(RECIPE, setting)
    parallel = DistributedDataParallel(model)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, max(1, size.steps // 10))
    batches = RECIPE.batches(setting.seed, size.tokens, size.longest, setting.device)
    losses: list[float] = []
    begin = time.perf_counter()
    name = f"{ranks} ranks"
    for pack in progress.track(itertools.islice(batches, size.steps), size.steps, description=name):
        offsets = [0, *itertools.accumulate(pack.lengths)]
        plan = cp.plan(offsets, layout=layout, method=method)
        loss = part_of_loss(parallel, pack, plan, setting)
        optimizer.zero_grad()
        (loss * ranks).backward()  # of which the mean over the ranks is taken
        optimizer.step()
        warm_up.step()
        whole = loss.detach()
        dist.all_reduce(whole)
        losses.append(whole.item())
    return Curve(name, losses, time.perf_counter() - begin)


def part_of_loss(
    model: DistributedDataParallel, pack: TextPack, plan: cp.Plan, setting: Setting
) -> Tensor:
    """This rank's tokens' share of the mean over the batch."""

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Tensor:
        out = cp.attn(q, k, v, plan, causal=True)
        assert isinstance(out, Tensor)
        return out

    parts = {n: cp.shard(getattr(pack, n), plan) for n in ("inputs", "targets", "positions")}
    own = replace(pack, **parts)
    with setting.autocast():
        logits = model(own, attend)
    losses = F.cross_entropy(at_least_float32(logits), own.targets, reduction="sum")
    return losses / len(pack.targets)


if __name__ == "__main__":
    main()
