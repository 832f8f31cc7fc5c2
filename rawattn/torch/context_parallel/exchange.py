"""Rows on their way between ranks, and back: a linear map and its transpose, for autograd.

Every rank knows from the plan which rows every other one wants, so that nothing is asked. A route
takes rows from where they are to a buffer on each rank that wants them; back, what was made of a
row comes to where it is and is summed there in float32, by ranks in their order, so that the sum
is bitwise the same on every run.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rawattn.torch.context_parallel.peer_memory import peer_memory
from rawattn.torch.context_parallel.rows import Moves, Tokens, at_least_float32


class Load(NamedTuple):
    """A tensor's part of what goes between ranks: what goes to each of them, where what comes from
    each lies (of equal size with what it sends), and what is then made of it."""

    to: Sequence[Tensor]
    into: Sequence[Tensor]
    land: Callable[[], Tensor]


class Flight:
    """Loads under way, together; the device goes on meanwhile."""

    def __init__(self, loads: Sequence[Load], group: dist.ProcessGroup) -> None:
        self.loads = loads
        self.works = send(loads, group)

    def land(self) -> list[Tensor]:
        """What came: the device waits, not the host."""
        for work in self.works:
            work.wait()
        return [load.land() for load in self.loads]


def flights(fleet: Sequence[Sequence[Load]], group: dist.ProcessGroup) -> list[Flight]:
    """Of loads that are under way at one time."""
    reserve(fleet, group)
    return [Flight(loads, group) for loads in fleet]


def flight(loads: Sequence[Load], group: dist.ProcessGroup) -> Flight:
    return flights([loads], group)[0]


def reserve(fleet: Sequence[Sequence[Load]], group: dist.ProcessGroup) -> None:
    """Memory for what is under way at one time; every rank calls it."""
    memory = peer_memory(group, fleet[0][0].to[0].device) if fleet else None
    if memory is not None:
        memory.reserve(fleet)


def send(loads: Sequence[Load], group: dist.ProcessGroup) -> list[Any]:
    """What to wait for. Every rank calls it, whether it sends or not.

    By copy engines where ranks reach each other's memory. Else by NCCL, in one kernel whatever the
    number of loads: those of attention leave no room for a second one until they end.
    """
    rank, device = dist.get_rank(group), loads[0].to[0].device
    for load in loads:
        if load.to[rank].numel():
            load.into[rank].copy_(load.to[rank])
    memory = peer_memory(group, device)
    if memory is not None:
        return memory.send(loads)
    messages = []
    connect(group, device)
    for tag, load in enumerate(loads):
        for r, (out, into) in enumerate(zip(load.to, load.into, strict=True)):
            for way, x in ((dist.isend, out.contiguous()), (dist.irecv, into)):
                if r != rank and x.numel():
                    # as bytes: a backend need not know the dtype; a view has any strides of one
                    flat = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
                    messages.append(dist.P2POp(way, flat, group=group, tag=tag, group_peer=r))
    return dist.batch_isend_irecv(messages) if messages else []


_connected: WeakKeyDictionary[dist.ProcessGroup, set[torch.device]] = WeakKeyDictionary()


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Once with all ranks, as NCCL needs before messages between some of them."""
    known = _connected.setdefault(group, set())
    if device.type == "cuda" and device not in known:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    known.add(device)


class Owned:
    """Who has which tokens, of all ranks: the ``owner`` of each, and its ``place`` there."""

    def __init__(self, tokens: Sequence[Tokens]) -> None:
        self.sizes = [len(own) for own in tokens]
        self.owner, self.place = (np.empty(sum(self.sizes), np.int64) for _ in range(2))
        for r, own in enumerate(tokens):
            self.owner[own], self.place[own] = r, np.arange(len(own))


class Route:
    """From ranks that have the rows ``owned`` to buffers of the rows ``wanted``, of each rank.

    Rows are named by their token; each is owned once, and wanted by any number of ranks. Rows that
    a rank wants of itself are copied, but where they lie together and are all that it wants.
    """

    def __init__(
        self, owned: Owned, wanted: Sequence[Tokens], rank: int, group: dist.ProcessGroup
    ) -> None:
        owner, place = owned.owner, owned.place
        self.group, self.rank = group, rank
        self.size, self.size_there = owned.sizes[rank], len(wanted[rank])
        own, none = owner[wanted[rank]], place[:0]
        self.sent, self.received = [], []
        for r, tokens in enumerate(wanted):
            out = place[tokens[owner[tokens] == rank]] if r != rank else none
            into = np.flatnonzero(own == r) if r != rank else none
            self.sent.append(Moves(out, np.arange(len(out))))
            self.received.append(Moves(np.arange(len(into)), into))
        kept = np.flatnonzero(own == rank)
        self.kept = Moves(place[wanted[rank][kept]], kept)
        # of all ranks, so that it is the same on each
        self.idle = all((owner[tokens] == r).all() for r, tokens in enumerate(wanted))
        self.all_here = len(self.kept.runs) == 1 and self.kept.count == self.size_there

    def load(self, x: Tensor) -> Load:
        """The rows of ``x``, (size, ...), that others want; it lands as (size_there, ...)."""
        to = [moves.taken(x) for moves in self.sent]
        if self.all_here:
            none = [x.new_empty((0, *x.shape[1:]))] * len(to)
            return Load(to, none, lambda: x.narrow(0, self.kept.runs[0][0], self.size_there))
        buffer = x.new_empty((self.size_there, *x.shape[1:]))
        inside = [moves.inside(buffer) for moves in self.received]
        into = [
            x.new_empty((moves.count, *x.shape[1:])) if there is None else there
            for moves, there in zip(self.received, inside, strict=True)
        ]

        def land() -> Tensor:
            self.kept.copy(x, buffer)
            for moves, there, rows in zip(self.received, inside, into, strict=True):
                if there is None:
                    moves.copy(rows, buffer)
            return buffer

        return Load(to, into, land)

    def load_back(self, g: Tensor, total: Tensor) -> Load:
        """What was made of others' rows, of ``g``, (size_there, ...); sums land in ``total``,
        (size, ...)."""
        into = [g.new_empty((moves.count, *g.shape[1:])) for moves in self.sent]

        def land() -> Tensor:
            self.kept.add_back(g, total)
            for moves, rows in zip(self.sent, into, strict=True):
                moves.add_back(rows, total)
            return total

        return Load([moves.back.taken(g) for moves in self.received], into, land)

    def there(self, x: Tensor) -> Tensor:
        return flight([self.load(x)], self.group).land()[0]

    def back(self, g: Tensor) -> Tensor:
        total = g.new_zeros((self.size, *g.shape[1:]), dtype=at_least_float32(g.dtype))
        flight([self.load_back(g, total)], self.group).land()
        return total.to(g.dtype)


def are_pairs(routes: Sequence[Route], size: int) -> bool:
    """Whether every one of a rank's rows gets one or two summands by these routes, one after the
    other. Then nothing need be wider than a summand: the first is copied, which this notes."""
    count = np.zeros(size, np.int64)
    every = [moves for route in routes for moves in (route.kept, *route.sent) if moves.count]
    first = []
    for moves in every:
        if (count[moves.source] == 0).all():
            first.append(moves)
        elif (count[moves.source] == 0).any():
            return False
        count[moves.source] += 1
    if any(route.idle for route in routes[1:]):  # which comes before those that travel
        return False
    if size and not 1 <= count.min() <= count.max() <= 2:
        return False
    for moves in first:
        moves.first = True
    return True


class Exchange(torch.autograd.Function):
    """A linear map between ranks, or its transpose; differentiable any number of times, both ways.

    A map has ``there`` and ``back``: every rank calls the same one.
    """

    @staticmethod
    def forward(x: Tensor, along: Any, back: bool) -> Tensor:
        result: Tensor = along.back(x) if back else along.there(x)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.along, ctx.is_back = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return exchange(g, ctx.along, not ctx.is_back), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *none: None) -> Tensor:
        return exchange(t, ctx.along, ctx.is_back)


class Nothing(torch.autograd.Function):
    """Zeros, as a function of tensors that autograd takes for any function of them, at any order.

    A rank that makes nothing of what others sent still has to take part in the way back, and in the
    way back of that.
    """

    @staticmethod
    def forward(shape: tuple[int, ...], *xs: Tensor) -> Tensor:
        return xs[0].new_zeros(shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.shape, *xs = inputs
        ctx.save_for_backward(*xs)
        ctx.save_for_forward(*xs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        xs = ctx.saved_tensors
        return None, *(nothing(x.shape, x, g, *xs) for x in xs)

    @staticmethod
    def jvp(ctx: Any, _: None, *ts: Tensor | None) -> Tensor:
        return nothing(ctx.shape, *ctx.saved_tensors, *(t for t in ts if t is not None))


def nothing(shape: tuple[int, ...], *xs: Tensor) -> Tensor:
    """Zeros of the dtype of the first one."""
    result: Tensor = Nothing.apply(shape, *xs)  # type: ignore[no-untyped-call]
    return result


def exchange(x: Tensor, along: Any, back: bool = False) -> Tensor:
    result: Tensor = Exchange.apply(x, along, back)  # type: ignore[no-untyped-call]
    return result
