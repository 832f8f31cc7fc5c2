"""Messages between ranks of one host by copy engines, beside attention, which has every SM.

NCCL's kernels wait until attention's end, or take SMs from them and keep these while one rank waits
for another. Here a rank copies what another wants into an outbox that is mapped there (CUDA IPC),
and writes the message's number into the other's memory. A stream of the other's waits for the
number, copies from the outbox to where the message belongs, and writes the number back: that part
of the outbox is free. Only the first copy is a kernel.

Both ends of an outbox know the size of every message, and find its place by counting.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from rawattn.torch.context_parallel.agreement import of_hosts

ALIGNED, LEAST = 512, 1 << 21  # bytes: where a tensor begins; of an outbox
LINE = 64  # bytes of a rank's flags: what has come of it, and what it has taken
TAKEN = LINE // 2
HANDLE = 64  # bytes that CUDA IPC gives for a memory


class Ring:
    """Places of messages in a memory of ``size`` bytes, the same for whoever counts along."""

    def __init__(self) -> None:
        self.size = self.head = self.count = 0
        self.lying: deque[tuple[int, int, int]] = deque()  # number, begin, end

    def grow(self, size: int) -> None:
        """Another memory, in which nothing lies."""
        self.size, self.head = size, 0
        self.lying.clear()

    def place(self, length: int) -> tuple[int, int, int]:
        """The number of the next message, where it begins, and the number of the last of those that
        lay there, 0 if none did."""
        begin = self.head if self.head + length <= self.size else 0
        self.head = end = begin + length
        self.count += 1
        last = max((n for n, a, b in self.lying if a < end and begin < b), default=0)
        while self.lying and self.lying[0][0] <= last:
            self.lying.popleft()
        self.lying.append((self.count, begin, end))
        return self.count, begin, last


@dataclass
class Peer:
    """Another rank: where its flags are mapped here, its outbox for this rank, and this rank's for
    it, which is a tensor of bytes."""

    flags: int
    sent: Ring = field(default_factory=Ring)
    outbox: Tensor | None = None
    known_taken: int = 0
    received: Ring = field(default_factory=Ring)
    mapped: int = 0


class Arrival:
    """That messages are where they belong."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event, self.is_waited = event, False

    def wait(self) -> None:
        """The device does, not the host."""
        self.event.wait()
        self.is_waited = True

    def __del__(self) -> None:
        if not self.is_waited:  # the memory into which they come is used by others from here on
            self.event.wait()


class PeerMemory:
    """Of a group's ranks, for one device of each."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, flags: "Own") -> None:
        self.rank, self.device, self.flags = dist.get_rank(group), device, flags
        self.hosts, self.peers = of_hosts(group), dict[int, Peer]()
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.watch = Watch(group, device)

    def connect(self, handles: Sequence[bytes]) -> None:
        """The flags of the others. Raises where a rank's memory can not be reached."""
        for r, handle in enumerate(handles):
            if r != self.rank:
                self.peers[r] = Peer(_mapped(handle, self.device))

    def reserve(self, fleet: Sequence[Sequence[Any]]) -> None:
        """Outboxes for loads that are under way at one time. Both ends grow at the same message;
        their hosts wait for each other then."""
        sizes = {r: sizes_of([load for loads in fleet for load in loads], r) for r in self.peers}
        sending: list[Any] = []
        grown: list[tuple[int, Tensor | None]] = []
        for r, (out, _) in sizes.items():
            peer = self.peers[r]
            if out > peer.sent.size:
                made = Own(_rounded(out), self.device)
                grown.append((r, peer.outbox))
                peer.outbox, size = made.tensor, made.size
                peer.sent.grow(size)
                note = torch.frombuffer(bytearray(made.handle), dtype=torch.uint8)
                sending.append(dist.isend(note, group=self.hosts, group_dst=r))
        for r, (_, into) in sizes.items():
            peer = self.peers[r]
            if into > peer.received.size:
                self.stream.synchronize()  # what came is taken
                if peer.mapped:
                    _unmap(peer.mapped)
                note = torch.empty(HANDLE, dtype=torch.uint8)
                dist.recv(note, group=self.hosts, group_src=r)
                peer.mapped = _mapped(note.numpy().tobytes(), self.device)
                peer.received.grow(_rounded(into))
                sending.append(dist.isend(note[:1], group=self.hosts, group_dst=r))
        for r, _old in grown:  # kept until nobody has it mapped
            dist.recv(torch.empty(1, dtype=torch.uint8), group=self.hosts, group_src=r)
        for work in sending:
            work.wait()

    def send(self, loads: Sequence[Any]) -> list[Arrival]:
        """The loads under way; what ``reserve`` was told of."""
        sizes = [(peer, r, *sizes_of(loads, r)) for r, peer in self.peers.items()]
        if not any(out or into for _, _, out, into in sizes):
            return []
        main = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(main)  # where they land is free
        for peer, r, length, _ in sizes:
            if length:
                number, at, last = peer.sent.place(length)
                if last > peer.known_taken:
                    _wait(main, self.flags.address + LINE * r + TAKEN, last)
                    peer.known_taken = last
                for load in loads:
                    at += _put(load.to[r], peer.outbox, at)
                _write(main, peer.flags + LINE * self.rank, number)
        for peer, r, _, length in sizes:
            if length:
                number, at, _ = peer.received.place(length)
                _wait(self.stream, self.flags.address + LINE * r, number)
                for load in loads:
                    at += _take(load.into[r], peer.mapped + at, self.stream)
                _write(self.stream, peer.flags + LINE * self.rank + TAKEN, number)
        return [Arrival(self.watch.see(self.stream.record_event()))]


def sizes_of(loads: Sequence[Any], r: int) -> tuple[int, int]:
    """Bytes in an outbox, one after the other, of what goes to a rank and of what comes from it."""
    out, into = (
        sum(_aligned(x.numel() * x.element_size()) for x in of)
        for of in ([load.to[r] for load in loads], [load.into[r] for load in loads])
    )
    return out, into


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _rounded(size: int) -> int:
    return -(-size // LEAST) * LEAST


def _put(x: Tensor, outbox: Tensor | None, at: int) -> int:
    """A copy of ``x``, whatever its strides are, ``at`` bytes into the outbox; the bytes taken."""
    assert outbox is not None
    size = x.numel() * x.element_size()
    outbox[at : at + size].view(x.dtype).view(x.shape).copy_(x)
    return _aligned(size)


# ---- the driver's -------------------------------------------------------------------------------


class Own:
    """Memory of this rank, zeros, that others can map; for as long as its tensor is there."""

    def __init__(self, size: int, device: torch.device) -> None:
        from cupy import cuda, ndarray, uint8

        with cuda.Device(device.index):
            memory = cuda.Memory(size)  # not of a pool: its handle is that of the whole of it
            self.size, self.address = size, memory.ptr
            self.handle: bytes = cuda.runtime.ipcGetMemHandle(memory.ptr)
            array = ndarray((size,), uint8, memptr=cuda.MemoryPointer(memory, 0))
            self.tensor = torch.as_tensor(array, device=device)
        self.tensor.zero_()


def _mapped(handle: bytes, device: torch.device) -> int:
    from cupy.cuda import runtime

    with torch.cuda.device(device):
        return int(runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess))


def _unmap(address: int) -> None:
    from cupy.cuda import runtime

    runtime.ipcCloseMemHandle(address)


def _take(into: Tensor, address: int, stream: torch.cuda.Stream) -> int:
    """A copy of what is at ``address`` of another rank; the bytes taken."""
    from cupy.cuda import runtime

    size = into.numel() * into.element_size()
    if size:
        runtime.memcpyAsync(
            into.data_ptr(), address, size, runtime.memcpyDeviceToDevice, stream.cuda_stream
        )
    return _aligned(size)


def _wait(stream: torch.cuda.Stream, address: int, number: int) -> None:
    """What follows on the stream comes after ``number`` was written there, or one after it."""
    from cuda.bindings import driver

    geq = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    _done(driver.cuStreamWaitValue32(stream.cuda_stream, address, number % 2**32, geq))


def _write(stream: torch.cuda.Stream, address: int, number: int) -> None:
    """What preceded on the stream is seen by whoever sees the number."""
    from cuda.bindings import driver

    _done(driver.cuStreamWriteValue32(stream.cuda_stream, address, number % 2**32, 0))


def _done(result: tuple[Any, ...]) -> None:
    if int(result[0]):
        raise RuntimeError(f"a stream memory operation failed: {result[0]}")


# ---- who reaches whom ---------------------------------------------------------------------------

_known: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, PeerMemory | None]] = (
    WeakKeyDictionary()
)


def peer_memory(group: dist.ProcessGroup, device: torch.device) -> PeerMemory | None:
    """Of the group, if all its ranks are on one host where each reaches the others' memory, and not
    while a graph is captured, in which numbers would not count on. The first call is collective.

    NCCL_P2P_DISABLE=1 forbids it, as it does NCCL.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    of_group = _known.setdefault(group, {})
    if device not in of_group:
        of_group[device] = _connected(group, device)
    return of_group[device]


def held(device: torch.device) -> int:
    """Bytes of this rank's outboxes and flags, which torch's allocator knows nothing of."""
    found = [of_group[device] for of_group in _known.values() if device in of_group]
    return sum(
        memory.flags.size + sum(peer.sent.size for peer in memory.peers.values())
        for memory in found
        if memory is not None
    )


def _connected(group: dist.ProcessGroup, device: torch.device) -> PeerMemory | None:
    ranks, hosts = dist.get_world_size(group), of_hosts(group)
    flags: Own | None = None
    if ranks > 1 and os.environ.get("NCCL_P2P_DISABLE", "0") == "0":
        try:
            from cuda.bindings import driver  # noqa: F401  is it there?

            flags = Own(LINE * ranks, device)
        except Exception as error:  # no IPC here, or no package of them
            _say(group, error)
    torch.cuda.synchronize(device)  # the flags are zero before others write
    heard: list[Any] = [None] * ranks
    dist.all_gather_object(heard, (_host(), flags and flags.handle), hosts)
    if flags is None or any(handle is None or host != heard[0][0] for host, handle in heard):
        return None
    made, failed = PeerMemory(group, device, flags), False
    try:
        made.connect([handle for _, handle in heard])
    except Exception as error:  # cards that do not reach each other
        failed = True
        _say(group, error)
    dist.all_gather_object(heard, failed, hosts)
    return None if any(heard) else made


def _host() -> str:
    """The same in all processes of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _say(group: dist.ProcessGroup, error: Exception) -> None:
    if dist.get_rank(group) == 0:
        print(f"rawattn: messages go by NCCL, not by copy engines: {error}", file=sys.stderr)


class Watch:
    """Ends the process when a message has not come within the group's timeout, as NCCL's watchdog
    does: a stream that waits for a rank that is gone would wait for ever."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        options: Any = getattr(group._get_backend(device), "options", None)
        self.timeout: timedelta = getattr(options, "_timeout", timedelta(minutes=10))
        self.rank = dist.get_rank(group)
        self.waiting: deque[tuple[torch.cuda.Event, float]] = deque()
        self.thread: threading.Thread | None = None

    def see(self, event: torch.cuda.Event) -> torch.cuda.Event:
        self.waiting.append((event, time.monotonic()))
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, name="rawattn watch", daemon=True)
            self.thread.start()
        return event

    def run(self) -> None:
        from cuda.bindings import driver

        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        driver.cuThreadExchangeStreamCaptureMode(relaxed)  # its queries break no capture
        while True:
            time.sleep(min(1.0, self.timeout.total_seconds() / 4))
            while self.waiting and self.waiting[0][0].query():  # type: ignore[no-untyped-call]
                self.waiting.popleft()
            if self.waiting:
                seconds = time.monotonic() - self.waiting[0][1]
                if seconds > self.timeout.total_seconds():
                    print(
                        f"rawattn: rank {self.rank} has waited {seconds:.0f} s for what another "
                        "rank was to send, longer than the process group's timeout: the process "
                        "ends",
                        file=sys.stderr,
                        flush=True,
                    )
                    os.abort()
