"""Several processes on this machine that are the ranks of a group."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = 300.0  # seconds that a rank waits for the others


def run(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = TIMEOUT,
    on_gpus: bool = False,
) -> list[Any]:
    """What ``function(*args)`` returns on each rank, or the text of what it raises.

    ``function`` is found by its name in its module. A rank that ends without a word is "gone".
    ``on_gpus``: each rank sees one GPU, and they speak by NCCL.
    """
    context = multiprocessing.get_context("forkserver")  # which loads torch once for all of them
    context.set_forkserver_preload(["torch.distributed", "rawattn.torch.context_parallel"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            store = str(Path(folder) / "store")
            work = (function, rank, ranks, store, timeout, on_gpus, there, args)
            process = context.Process(target=_rank, args=work, daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        found = []
        for pipe in pipes:
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append("gone")
        for process in processes:
            process.kill()
            process.join()
    return found


def _rank(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    store: str,
    timeout: float,
    on_gpus: bool,
    pipe: Any,
    args: tuple[Any, ...],
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if on_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # it takes a minute behind the timeout
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # the first group waits until all are there, which takes a while
    for n, seconds in enumerate((TIMEOUT, timeout)):
        if n:
            dist.destroy_process_group()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            store=dist.FileStore(f"{store}{n}", ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=seconds),
        )
        dist.barrier()
    try:
        pipe.send(function(*args))
    except Exception:
        pipe.send(traceback.format_exc())
        os._exit(1)  # as a rank ends whose error nobody catches
    while True:  # until all are heard: one that ends takes its connections from the others
        time.sleep(60)
