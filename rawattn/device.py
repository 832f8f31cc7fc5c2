"""CUDA devices and streams by way of CuPy, whatever library the arrays are of.

A stream is always a raw CUDA stream handle, a device its CUDA ordinal, and -1 the CPU.
"""

import importlib
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

from rawattn import checks


@cache
def cupy() -> Any:
    """The module; RuntimeError says what to install where there is none."""
    try:
        return importlib.import_module("cupy")
    except ImportError:
        checks.no_cupy()


@cache
def arch_of(device: int) -> int:
    """Compute capability as a number (90 for 9.0) of a CUDA ordinal, 0 for the CPU."""
    return 0 if device < 0 else int(cupy().cuda.Device(device).compute_capability)


@cache
def sms_of(device: int) -> int:
    """Multiprocessors of a CUDA ordinal, 0 for the CPU."""
    return 0 if device < 0 else int(cupy().cuda.Device(device).attributes["MultiProcessorCount"])


@cache
def has_cuda_device() -> bool:
    """Whether CuPy, a driver and at least one device are there."""
    try:
        return bool(importlib.import_module("cupy").cuda.is_available())
    except ImportError:
        return False


@cache
def _is_only_one() -> bool:
    """Whether there is one CUDA device alone, which then is the current one."""
    return bool(cupy().cuda.runtime.getDeviceCount() == 1)


def enter(device: int) -> int:
    """Make a CUDA device (-1: none) the current one.

    Returns the one for ``leave`` to go back to, -1 when nothing has changed.
    """
    if device < 0 or _is_only_one():
        return -1
    runtime = cupy().cuda.runtime
    current: int = runtime.getDevice()
    if current == device:
        return -1
    runtime.setDevice(device)
    return current


def leave(previous: int) -> None:
    """Undo ``enter``."""
    if previous >= 0:
        cupy().cuda.runtime.setDevice(previous)


class Handle(NamedTuple):
    """A raw stream handle in the form of the CUDA stream protocol."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def stream_of(handle: int) -> Any:
    """CuPy's object for a raw stream; it owns nothing of it."""
    return cupy().cuda.Stream.from_external(Handle(handle))


def on_stream(stream: int, device: int) -> AbstractContextManager[Any]:
    """In which CuPy's work goes on a raw stream of the current device; nothing on the CPU (-1)."""
    context: AbstractContextManager[Any] = nullcontext() if device < 0 else stream_of(stream)
    return context


def follow(stream: int, producer: int, device: int) -> None:
    """Order ``stream`` behind another one of a device, by an event: the host goes on."""
    with cupy().cuda.Device(device):
        event = cupy().cuda.Event(disable_timing=True)
        event.record(stream_of(producer))
        stream_of(stream).wait_event(event)


def is_capturing(stream: int) -> bool:
    """Whether what goes to a stream becomes part of a graph."""
    return bool(cupy().cuda.runtime.streamIsCapturing(stream))


_KEPT: deque[tuple[Any, list[Any]]] = deque()  # events, and what lives until they have happened


def keep(owners: Iterable[Any], stream: int) -> None:
    """Hold on to arrays until a stream of the current device has done its present work.

    For libraries that would hand the memory of a dropped array to work on streams of their own.
    Under stream capture nothing is held: a graph's arrays are its owner's to keep.
    """
    if is_capturing(stream):
        return
    cuda = cupy().cuda
    while _KEPT and _KEPT[0][0].done:
        _KEPT.popleft()
    event = cuda.Event(disable_timing=True)
    event.record(stream_of(stream))
    _KEPT.append((event, list(owners)))
