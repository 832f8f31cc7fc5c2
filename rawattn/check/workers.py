"""Many independent calls in several processes."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import partial
from typing import Any

from rawattn.check.progress import SILENCE, Steps

MOST_WORKERS = 8


def work(
    calls: Sequence[partial[Any]], label: str, weights: Sequence[float] | None = None
) -> list[Any]:
    """Results of ``calls`` in their order, from one process a core; progress is on stderr.

    weights: the seconds that each call is thought to take; all the same by default. An exception of
    a call is raised here, and the calls that have not begun are dropped.
    """
    context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    with (
        Steps(label, list(weights or [1.0] * len(calls))) as steps,
        ProcessPoolExecutor(processes(len(calls)), mp_context=context) as pool,
    ):
        futures = {pool.submit(call): i for i, call in enumerate(calls)}
        left = set(futures)
        try:
            while left:
                ended, left = wait(left, SILENCE, FIRST_COMPLETED)
                for future in ended:
                    future.result()
                    steps.end(futures[future])
                steps.wait()
        finally:
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def processes(calls: int) -> int:
    """How many of so many calls run at a time."""
    return max(1, min(calls, os.cpu_count() or 1, MOST_WORKERS))
