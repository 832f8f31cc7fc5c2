"""Rows of a tensor by their places: copied and added, in few runs where they lie so."""

from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Tokens = npt.NDArray[np.int64]
FEW = 16  # runs, of which each is an own copy; more of them go by an index


class Moves:
    """Rows at ``source`` of one tensor that are those at ``target`` of another, none twice.

    ``first``: what comes back to them is the first that does, so that it is copied and not added.
    """

    first = False

    def __init__(self, source: Tokens, target: Tokens) -> None:
        breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
        cuts = pairwise([0, *breaks.tolist(), len(source)])
        self.count = len(source)
        self.runs = [(int(source[a]), int(target[a]), b - a) for a, b in cuts if a < b]
        self.source, self.target = source, target
        self._there: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def copy(self, x: Tensor, there: Tensor) -> None:
        """The rows of ``x`` to where they are in ``there``."""
        if len(self.runs) > FEW:
            at, to = self._at(x.device)
            there.index_copy_(0, to, x.index_select(0, at))
        else:
            for source, target, count in self.runs:
                there.narrow(0, target, count).copy_(x.narrow(0, source, count))

    def add_back(self, there: Tensor, x: Tensor) -> None:
        """What ``there`` has added to the rows of ``x``, in the dtype of this."""
        if self.first:
            self.back.copy(there.to(x.dtype), x)
        elif len(self.runs) > FEW:
            at, to = self._at(x.device)
            x.index_add_(0, at, there.index_select(0, to).to(x.dtype))
        else:
            for source, target, count in self.runs:
                x.narrow(0, source, count).add_(there.narrow(0, target, count))

    def taken(self, x: Tensor) -> Tensor:
        """The rows of ``x``, one after the other: a view where they lie so."""
        if len(self.runs) < 2:
            return x.narrow(0, self.runs[0][0] if self.runs else 0, self.count)
        rows = x.new_empty((self.count, *x.shape[1:]))
        self.copy(x, rows)
        return rows

    def inside(self, there: Tensor) -> Tensor | None:
        """Where the rows lie in ``there``, if together: what comes may come there at once."""
        if len(self.runs) == 1 and there.is_contiguous():
            return there.narrow(0, self.runs[0][1], self.count)
        return None

    @cached_property
    def back(self) -> "Moves":
        """The other way."""
        return Moves(self.target, self.source)

    def _at(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._there:
            source, target = (
                on_device(torch.from_numpy(x), device) for x in (self.source, self.target)
            )
            self._there[device] = source, target
        return self._there[device]


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Of sums."""
    return dtype if dtype == torch.float64 else torch.float32
