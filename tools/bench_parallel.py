"""Measure attention over several ranks, beside one rank alone and other libraries, in one run.

    torchrun --nproc-per-node 2 tools/bench_parallel.py --json parallel.json       # 4 and 8 alike
    torchrun --nproc-per-node 2 tools/bench_parallel.py --memory 1048576
    torchrun --nproc-per-node 2 tools/bench_parallel.py --device cpu --tokens 512

``share`` is the time of one rank alone over that of the ranks together times their number: 1 is
ideal. ring-flash-attn and DeepSpeed are measured where they are installed, on rawattn's kernels.
``--memory`` says what a rank takes at most, with all of the tokens and with its part of them.
"""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from measure import parallel

COLUMNS = ("ms", "share", "gib", "host_ms", "attention_ms", "communication_ms", "distance", "error")


@click.command(help=__doc__.split("\n")[0])
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda if there is one.")
@click.option("--tokens", multiple=True, type=int, help="Of a batch; default: 65536 and 131072.")
@click.option("--rounds", default=7, show_default=True, help="Of interleaved calls.")
@click.option("--peers/--no-peers", default=True, help="Other libraries too.")
@click.option("--only", help="Only contenders of whose names this is a part, and one rank.")
@click.option("--memory", type=int, help="Only memory, of one document of so many tokens.")
@click.option("--json", "record", type=click.Path(path_type=Path), help="Write it all here.")
def main(device: str | None, tokens: tuple[int, ...], record: Path | None, **how: Any) -> None:
    """Started by torchrun, once for each rank."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=2))  # others may hang
    try:
        rows = measured(torch.device(device), tokens or (65536, 131072), **how)
        if dist.get_rank() == 0:
            result = {
                "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                "torch": torch.__version__,
                "ranks": dist.get_world_size(),
                "rows": rows,
            }
            show(Console(width=140), result)
            if record:
                record.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        dist.destroy_process_group()


def measured(
    device: torch.device,
    tokens: tuple[int, ...],
    rounds: int,
    peers: bool,
    only: str | None,
    memory: int | None,
) -> list[parallel.Row]:
    if memory:
        return parallel.memory_of(memory, device, only or "")
    found = []
    for case in parallel.cases(tokens, device.type == "cuda"):
        found += parallel.measure(case, device, rounds, peers, only or "")
    return found


def show(console: Console, result: dict[str, Any]) -> None:
    """A table a case."""
    rows = result["rows"]
    for case in dict.fromkeys(row["case"] for row in rows):
        table = Table(
            "", *COLUMNS, title=f"{case} tokens, {result['ranks']} ranks, {result['gpu']}"
        )
        for row in rows:
            if row["case"] == case:
                cells = (row.get(name, "") for name in COLUMNS)
                shown = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells)
                table.add_row(row["contender"], *shown)
        console.print(table)


if __name__ == "__main__":
    main()
