"""Rows on their way between ranks, and back: a linear map and its transpose, for autograd.

Every rank knows from the plan which rows every other one wants, so that nothing is asked. A route
takes rows from where they are to a buffer on each rank that wants them; back, what was made of a
row comes to where it is and is summed there in float32, by ranks in their order, so that the sum
is bitwise the same on every run.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

Tokens = npt.NDArray[np.int64]


class Indices:
    """By name, on the host; on a device once they are asked for there."""

    def __init__(self, **named: Tokens) -> None:
        self._named = named
        self._there: dict[tuple[str, torch.device], Tensor] = {}

    def at(self, name: str, device: torch.device) -> Tensor:
        if (name, device) not in self._there:
            self._there[name, device] = on_device(torch.from_numpy(self._named[name]), device)
        return self._there[name, device]


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
    a rank wants of itself are copied.
    """

    def __init__(
        self, owned: Owned, wanted: Sequence[Tokens], rank: int, group: dist.ProcessGroup
    ) -> None:
        owner, place = owned.owner, owned.place
        self.group = group
        self.size, self.size_there = owned.sizes[rank], len(wanted[rank])
        # of all ranks, so that it is the same on each
        self.idle = all((owner[tokens] == r).all() for r, tokens in enumerate(wanted))
        sent = [
            place[tokens[owner[tokens] == rank]] if r != rank else place[:0]
            for r, tokens in enumerate(wanted)
        ]
        own = owner[wanted[rank]]
        received = [
            np.flatnonzero(own == r) if r != rank else place[:0] for r in range(len(owned.sizes))
        ]
        self.sent, self.received = [len(x) for x in sent], [len(x) for x in received]
        kept = np.flatnonzero(own == rank)
        self.at = Indices(
            sent=np.concatenate(sent),
            received=np.concatenate(received),
            kept=kept,
            kept_from=place[wanted[rank][kept]],
        ).at

    def start(self, x: Tensor) -> "Flight":
        """Off with the rows of ``x``, (size, ...), that others want."""
        rows = x.index_select(0, self.at("sent", x.device))
        return Flight(self, x, self._send(rows, self.sent, self.received))

    def start_back(self, g: Tensor) -> "Flight":
        """Off with what was made of others' rows, of ``g``, (size_there, ...)."""
        rows = g.index_select(0, self.at("received", g.device))
        return Flight(self, g, self._send(rows, self.received, self.sent))

    def _send(self, rows: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, Any]:
        if self.idle:
            return rows.new_empty((0, *rows.shape[1:])), None
        return send(rows, sent, received, self.group)

    def there(self, x: Tensor) -> Tensor:
        return self.start(x).land()

    def back(self, g: Tensor) -> Tensor:
        total = g.new_zeros((self.size, *g.shape[1:]), dtype=at_least_float32(g.dtype))
        self.start_back(g).land_back(total)
        return total.to(g.dtype)


class Flight:
    """Rows under way; the device goes on meanwhile."""

    def __init__(self, route: Route, x: Tensor, sending: tuple[Tensor, Any]) -> None:
        self.route, self.x = route, x
        self.rows, self.work = sending

    def land(self) -> Tensor:
        """The buffer, (size_there, ...), once they are here: the device waits, not the host."""
        route, x = self.route, self.x
        buffer = x.new_empty((route.size_there, *x.shape[1:]))
        kept = x.index_select(0, route.at("kept_from", x.device))
        buffer.index_copy_(0, route.at("kept", x.device), kept)
        self._wait()
        return buffer.index_copy_(0, route.at("received", x.device), self.rows)

    def land_back(self, total: Tensor) -> None:
        """The sums added to ``total``, (size, ...)."""
        route, g = self.route, self.x
        kept = g.index_select(0, route.at("kept", g.device)).to(total.dtype)
        total.index_add_(0, route.at("kept_from", g.device), kept)
        self._wait()
        rows, at, start = self.rows.to(total.dtype), route.at("sent", g.device), 0
        for count in route.sent:  # no row twice among those of a rank
            total.index_add_(0, at[start : start + count], rows[start : start + count])
            start += count

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()


def send(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Any]:
    """Rows by the rank that they go to; where they will lie by the rank that they come from, and
    what to wait for."""
    there = rows.new_empty((sum(received), *rows.shape[1:]))
    # as bytes: a backend need not know the dtype
    flat, flat_there = (x.flatten(1).view(torch.uint8) for x in (rows, there))
    work = dist.all_to_all_single(flat_there, flat, received, sent, group, async_op=True)
    return there, work


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


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Of sums."""
    return dtype if dtype == torch.float64 else torch.float32
