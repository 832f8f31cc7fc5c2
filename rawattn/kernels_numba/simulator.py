"""Numba's CUDA simulator, with the threads of a CTA taking turns; imported where it is in use.

The simulator starts a Python thread for each CUDA thread and lets them run at once. That has two
faults: a shared array is looked up and made without a lock, so that now and then two threads get
one each and the result is wrong; and they all fight for the interpreter, which costs most of the
time.
Here one thread runs at a time: up to its next barrier or its end, then the next one does. When it
is the first one's turn again, all have come to the barrier. Runs are repeatable, and a kernel that
lacks a barrier is wrong every time.
"""

import sys
import threading
from typing import Any

import numpy as np
from numba.cuda import simulator

kernel: Any = simulator.kernel
kernelapi: Any = simulator.kernelapi


class _Turns:
    """Who runs: each thread of a CTA has a lock that is free when it is its turn."""

    def __init__(self, threads: int) -> None:
        self.locks = [threading.Lock() for _ in range(threads)]
        for lock in self.locks:
            lock.acquire()
        self.after = [*range(1, threads), 0]  # a ring of the threads that still run
        self.before = [threads - 1, *range(threads - 1)]

    def wait(self, me: int) -> None:
        self.locks[me].acquire()

    def pass_on(self, me: int) -> None:
        self.locks[self.after[me]].release()

    def leave(self, me: int) -> None:
        before, after = self.before[me], self.after[me]
        self.after[before], self.before[after] = after, before
        if after != me:
            self.locks[after].release()


def _run_block(self: Any, grid_point: tuple[int, ...], *arguments: Any) -> None:
    """The whole life of a CTA: BlockManager.run."""
    points = list(np.ndindex(*self._block_dim))
    self.turns = _Turns(len(points))
    threads = []

    def target() -> None:
        me = vars(threading.current_thread())["turn"]
        self.turns.wait(me)
        try:
            self._f(*arguments)
        finally:  # a thread that raises keeps nobody waiting
            self.turns.leave(me)

    for turn, point in enumerate(points):
        thread = kernel.BlockThread(target, self, grid_point, point, self._debug)
        thread.turn = turn
        threads.append(thread)
        thread.start()
    self.turns.locks[0].release()
    for thread in threads:
        thread.join()
    for thread in threads:
        if thread.exception:
            raise thread.exception[0].with_traceback(thread.exception[1])


def _syncthreads(self: Any) -> None:
    """BlockThread.syncthreads: let the others come here too."""
    turns = self._manager.turns
    turns.pass_on(self.turn)
    turns.wait(self.turn)


def _shared_array(self: Any, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
    """FakeCUDAShared.array: one array per line of source and CTA; no traceback to find the line."""
    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno
    if place not in self._allocations:
        self._allocations[place] = np.empty(shape, dtype)
    return self._allocations[place]


def take_turns() -> None:
    """Put the above in place; a Numba whose simulator has other private names is left as it is."""
    names = ("BlockManager", "BlockThread")
    if all(hasattr(kernel, n) for n in names) and hasattr(kernelapi, "FakeCUDAShared"):
        kernelapi.FakeCUDAShared.array = _shared_array
        kernel.BlockManager.run = _run_block
        kernel.BlockThread.syncthreads = _syncthreads
