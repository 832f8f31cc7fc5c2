"""Arrays that are read or stored as others: hooks of whole arrays, by sequences and axes."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from rawattn.check.diagnose.engine.question import Question
from tests.diagnose.plain import Array
from tests.diagnose.table import Hooks


def delta(of: Callable[..., Array], *only: str) -> Hooks:
    """Another D: a function of the arrays and the question."""
    read = {"read": lambda run, a: a | {"delta": of(a, run.question).astype(run.wide)}}
    return read | ({"only": only} if only else {})


def apart(distance: int, tile: int) -> Callable[[Array], Array]:
    """Row r of every tile is row r ^ distance; zeros behind the last."""

    def of(x: Array) -> Array:
        whole = np.zeros((-(-len(x) // tile) * tile, *x.shape[1:]), x.dtype)
        whole[: len(x)] = x
        return whole[np.arange(len(x)) ^ distance]

    return of


def bounds(name: str, question: Question) -> list[tuple[int, int]]:
    of_keys = name.lstrip("dgt") in ("k", "v")
    offsets = question.cu_seqlens_k if of_keys else question.cu_seqlens_q
    return list(pairwise(int(offset) for offset in offsets))


def change(of: Callable[..., Array], *names: str, at: str = "read") -> Hooks:
    """Arrays as ``of`` has them: a function of an array, its name and the question."""
    return {at: lambda run, a: a | {n: of(a[n], n, run.question) for n in names if n in a}}


def read_as(at: str = "read", **others: str) -> Hooks:
    """Arrays in the place of others; delta is still that of the right ones."""
    return {at: lambda run, a: a | {name: a[other] for name, other in others.items()}}


def stored(of: Callable[..., Array], *names: str) -> Hooks:
    """Results as ``of`` has them."""
    return dict.fromkeys(names, lambda run, x: of(x, run.name, run.question))


def as_if(order: tuple[int, ...]) -> Callable[..., Array]:
    """Memory with its axes in another order, read as if they were in the right one."""

    def of(x: Array, name: str, question: Question) -> Array:
        axes = order[: x.ndim]
        return x.reshape([x.shape[a] for a in axes]).transpose(np.argsort(axes))

    return of


def written_as(order: tuple[int, ...]) -> Callable[..., Array]:
    return lambda x, name, question: x.transpose(order).reshape(x.shape)


def by_sequences(of: Callable[[Array, int, int], Array]) -> Callable[..., Array]:
    """Every sequence's rows: ``of`` all rows, the first one of them and where they end."""

    def change(x: Array, name: str, question: Question) -> Array:
        found = x.copy()
        rows, there = (a.T if x.ndim == 2 else a for a in (found, x))
        for start, stop in bounds(name, question):
            rows[start:stop] = of(there, start, stop)
        return found

    return change


def in_sequences(of: Callable[[Array], Array]) -> Callable[..., Array]:
    """``of`` every sequence's rows alone."""
    return by_sequences(lambda x, start, stop: of(x[start:stop]))


# read by the number of the row in its sequence, without the sequence's offset
local = by_sequences(lambda x, start, stop: x[: stop - start])
