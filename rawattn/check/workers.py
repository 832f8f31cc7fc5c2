"""Many independent calls in several processes."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress

MOST_WORKERS = 8


def work(calls: Sequence[partial[Any]], label: str) -> list[Any]:
    """Results of ``calls`` in their order, from one process a core, under a progress bar on stderr.

    An exception of a call is raised here, and the calls that have not begun are dropped.
    """
    context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    workers = max(1, min(len(calls), os.cpu_count() or 1, MOST_WORKERS))
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(workers, mp_context=context) as pool,
    ):
        futures = [pool.submit(call) for call in calls]
        try:
            for future in progress.track(as_completed(futures), len(futures), description=label):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]
