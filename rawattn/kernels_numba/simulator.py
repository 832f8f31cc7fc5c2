"""Numba's CUDA simulator, with the threads of a CTA taking turns; imported where it is in use.

The simulator starts a Python thread for each CUDA thread and lets them run at once. That has two
faults: a shared array is looked up and made without a lock, so that now and then two threads get
one each and the result is wrong; and they all fight for the interpreter, which costs most of the
time.
Here one thread runs at a time: up to its next barrier or its end, then the next one does. When it
is the first one's turn again, all have come to the barrier. Runs are repeatable, and a kernel that
lacks a barrier is wrong every time. The threads of a CTA then serve the next one.
"""

import os
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
from numba.cuda import simulator

kernel: Any = simulator.kernel
kernelapi: Any = simulator.kernelapi
devicearray: Any = simulator.cudadrv.devicearray


class _Turns:
    """Who runs: each thread of a CTA has a lock that is free when it is its turn."""

    def __init__(self, threads: list["_Worker"]) -> None:
        self.locks = [thread.lock for thread in threads]
        self.after = [*range(1, len(threads)), 0]  # a ring of the threads that still run
        self.before = [len(threads) - 1, *range(len(threads) - 1)]
        self.over = threading.Lock()
        self.over.acquire()

    def wait(self, me: int) -> None:
        self.locks[me].acquire()

    def pass_on(self, me: int) -> None:
        self.locks[self.after[me]].release()

    def leave(self, me: int) -> None:
        before, after = self.before[me], self.after[me]
        self.after[before], self.before[after] = after, before
        (self.over if after == me else self.locks[after]).release()


class _Worker(getattr(kernel, "BlockThread", threading.Thread)):  # type: ignore[misc]
    """A thread of one CTA after the other: to start one costs more than most of them run."""

    def __init__(self, *of_cta: Any) -> None:
        super().__init__(None, *of_cta, False)
        self.exception: tuple[Exception, Any] | None = None
        self.lock = threading.Lock()
        self.lock.acquire()
        self.start()

    def run(self) -> None:
        while True:
            self.lock.acquire()
            try:
                self.work()
            except Exception as error:
                where = f"tid={list(self.threadIdx)} ctaid={list(self.blockIdx)}"
                self.exception = type(error)(f"{where}: {error}"), error.__traceback__
            finally:  # a thread that raises keeps nobody waiting
                self._manager.turns.leave(self.turn)


_idle: dict[tuple[int, ...], list[list[_Worker]]] = {}  # the threads of CTAs, by their shape
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # threads do not come along


def _run_block(self: Any, grid_point: tuple[int, ...], *arguments: Any) -> None:
    """The whole life of a CTA: BlockManager.run."""
    shape = self._block_dim
    try:
        threads = _idle.setdefault(shape, []).pop()
    except IndexError:
        threads = [_Worker(self, grid_point, point) for point in np.ndindex(*shape)]
    self.turns = _Turns(threads)
    at, work = kernel.Dim3(*grid_point), partial(self._f, *arguments)
    for turn, thread in enumerate(threads):
        thread.turn, thread.work, thread.exception = turn, work, None
        thread._manager, thread.blockIdx = self, at
    threads[0].lock.release()
    self.turns.over.acquire()
    failed = next((thread.exception for thread in threads if thread.exception), None)
    for thread in threads:
        del thread.work, thread._manager
    _idle[shape].append(threads)
    if failed:
        raise failed[0].with_traceback(failed[1])


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


def _read(name: str, slow: Any) -> Any:
    """``slow``, a way to read an array inside of a kernel, without its detours for plain numbers.

    The simulator's own lists all that an array has to find out whether it has a shape.
    """

    def attribute(self: Any, name: str) -> Any:
        array = self._item._ary
        return getattr(array, name) if hasattr(np.ndarray, name) else slow(self, name)

    def element(self: Any, index: Any) -> Any:
        found = self._item._ary[index]
        return slow(self, index) if isinstance(found, np.ndarray | np.void) else found

    return attribute if name == "__getattr__" else element


def take_turns() -> None:
    """Put the above in place; a Numba whose simulator has other private names is left as it is."""
    names = ("BlockManager", "BlockThread", "Dim3")
    if all(hasattr(kernel, n) for n in names) and hasattr(kernelapi, "FakeCUDAShared"):
        kernelapi.FakeCUDAShared.array = _shared_array
        kernel.BlockManager.run = _run_block
        kernel.BlockThread.syncthreads = _syncthreads
    inside = getattr(devicearray, "FakeWithinKernelCUDAArray", object)
    for name in ("__getattr__", "__getitem__"):
        if name in vars(inside):
            setattr(inside, name, _read(name, vars(inside)[name]))
