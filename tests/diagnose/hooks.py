"""What stands in the place of a step of ``plain``: the forms that many bugs share, in a table."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.question import Question
from tests.diagnose.plain import OPEN, Array, Head, Hook, Kernel, Planted, in_window, tiles
from tests.diagnose.problems import Needs

Hooks = dict[str, Any]
Table = tuple[tuple[Any, ...], ...]  # of plants
FIELDS = {field.name for field in fields(Kernel)}
STAGES_OF = {
    "f": ("forward",),
    "b": ("backward",),
    "fb": ("forward", "backward"),
    "s": ("second",),
    "j": ("jvp",),
    "sj": ("second", "jvp"),
    "fbsj": ("forward", "backward", "second", "jvp"),
    "bs": ("backward", "second"),
}
GRADIENTS = ("dq", "dk", "dv")
FEW = {"batch": (2, 3), "heads_kv": (1, 2), "groups": (1, 2), "head_dims": (16, 24, 32)}
FEW |= {"past_end": 0.0, "least": 0.03}  # what most problems are like


def kernel(changes: Mapping[str, Any]) -> Kernel:
    """``changes``: fields of Kernel, and hooks by their names."""
    own = {name: value for name, value in changes.items() if name in FIELDS}
    return Kernel({n: hook for n, hook in changes.items() if n not in FIELDS}, **own)


def plants(
    table: Table,
    usual: Callable[[str], Mapping[str, Any]],
    of_class: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    named: Callable[[str, str], str] = lambda words, on: words,
    every: Hooks | None = None,
    gives: tuple[str, ...] = (),
) -> tuple[Planted, ...]:
    """A row: the class (or others that are the same function) and words, the stages ("f b" is two
    plants), what is wrong, and what its problems need besides ``usual`` and what its class needs.

    named: by words and stages. every: what all of them are like. gives: beyond first order. What is
    no field of Needs is what lists of blocks must be like.
    """
    found = []
    for name, stages, wrong, *more in table:
        classes, _, words = name.partition(": ")
        bug, *also = classes.split(" or ")
        for on in stages.split():
            wanted = {**usual(on), **(of_class or {}).get(bug, {}), **(more[0] if more else {})}
            of_blocks = {n: wanted.pop(n) for n in wanted.keys() - Needs.__dataclass_fields__}
            if "blocks" in wanted:
                wanted["blocks"] = wanted["blocks"] | of_blocks
            right, given = every or {}, () if set(on) & {"f", "b"} else gives
            place = named(words, on), STAGES_OF[on], kernel(right | wrong), Needs(**wanted)
            found.append(Planted(bug, *place, tuple(also), given, kernel(right)))
    return tuple(found)


def by(factor: Any) -> Hook:
    """So many times what is right; a number, or a function of what is at hand."""
    return lambda c, x: (factor(c) if callable(factor) else factor) * x


def of_each(hook: Hook, *names: str) -> Hooks:
    return dict.fromkeys(names, hook)


def power(number: int) -> Hook:
    """softmax_scale so often in front of what has it once."""
    return by(lambda c: c.question.scale ** (number - 1))


def tiled(tile: int) -> Hooks:
    return {"tile_m": tile, "tile_n": tile}


def of_group(kept: int, *only: str) -> Hooks:
    """Of a group: the one head that these gradients hold."""
    return {"often": lambda c, x: x * (c.h % c.group == kept % c.group), "only": only}


# ---- who sees whom ----


def seen(test: Callable[[Head], Any]) -> Hooks:
    """Who sees whom is as ``test`` has it, a function of columns i, p and rows j, r."""
    return {"seen": lambda c, x: np.broadcast_to(test(c), x.shape)}


def and_seen(test: Callable[[Head], Any]) -> Hooks:
    return {"seen": lambda c, x: x & test(c)}


def or_seen(test: Callable[[Head], Any]) -> Hooks:
    return {"seen": lambda c, x: x | test(c)}


def times(number: Callable[[Head], Any]) -> Hooks:
    """How often keys count that are seen."""
    return {"seen": lambda c, x: x * number(c)}


def window(left: int = 0, right: int = 0) -> Hooks:
    """Sides of the window that are moved, where it has them."""

    def see(c: Head, x: Array) -> Array:
        sides = c.window
        found = in_window(c.p, c.j, OPEN)
        found = found & (c.j - c.p >= -sides[0] - left) if sides[0] >= 0 else found
        return found & (c.j - c.p <= sides[1] + right) if sides[1] >= 0 else found

    return {"seen": see}


def no_window(left: bool = True, right: bool = True) -> Hooks:
    return {"window": lambda c, x: (-1 if left else x[0], -1 if right else x[1])}


# ---- scores and sums ----


def added(bias: Callable[[Head], Any]) -> Hooks:
    """To the scores."""
    return {"scores": lambda c, S: S + bias(c)}


def heavier(log_of: Callable[[Head], Any], lse_too: bool = True) -> Hooks:
    """A row sum with more in it than its keys: exp of a number, of all rows or of some."""

    def of(c: Head, x: tuple[Array, Array]) -> tuple[Array, Array]:
        whole = np.logaddexp(x[0], log_of(c)).astype(x[0].dtype)
        lighter = np.exp(x[0] - np.where(np.isneginf(whole), 0, whole))
        return (whole if lse_too else x[0]), x[1] * lighter

    return {"softmax": of}


# ---- tiles ----


class Pair(NamedTuple):
    """A pair of tiles in the loop: numbers of them, of the first and last ones that meet."""

    i: int
    j: int
    first_i: int
    last_i: int
    first_j: int
    last_j: int
    rows: slice
    keys: slice
    c: Head


def meeting(c: Head, tile_m: int, tile_n: int, all_of_them: bool = False) -> Iterator[Pair]:
    """Pairs of tiles of which some query sees some key: tile of keys by tile of keys."""
    queries, keys = tiles(len(c.rows), tile_m), tiles(len(c.keys), tile_n)
    meet = np.array([[all_of_them or (c.seen[a, b] > 0).any() for b in keys] for a in queries])
    for j, i in np.argwhere(meet.T):
        of_j, of_i = np.flatnonzero(meet[:, j]), np.flatnonzero(meet[i])
        place = (int(i), int(j), of_j[0], of_j[-1], of_i[0], of_i[-1])
        yield Pair(*place, queries[i], keys[j], c)


def by_pairs(
    number: Callable[[Pair], Any], tile_m: int = 32, tile_n: int = 16, all_of_them: bool = False
) -> Hook:
    """How often pairs of tiles count: in the place of "often", or in front of one product."""

    def often(c: Head, x: Array) -> Array:
        found = np.zeros(c.seen.shape, c.run.wide)
        for pair in meeting(c, tile_m, tile_n, all_of_them):
            found[pair.rows, pair.keys] = number(pair)
        return found * x

    return often


# ---- what is read and stored ----


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


def stored(of: Callable[..., Array], *names: str) -> Hooks:
    """Results as ``of`` has them."""
    return dict.fromkeys(names, lambda run, x: of(x, run.name, run.question))


def as_if(order: tuple[int, ...]) -> Callable[..., Array]:
    """Memory with its axes in another order, read as if they were in the right one."""
    back = np.argsort(order)
    return lambda x, name, question: x.reshape([x.shape[a] for a in order]).transpose(back)


def written_as(order: tuple[int, ...]) -> Callable[..., Array]:
    return lambda x, name, question: x.transpose(order).reshape(x.shape)


def in_sequences(of: Callable[[Array], Array]) -> Callable[..., Array]:
    """``of`` every sequence's rows."""

    def change(x: Array, name: str, question: Question) -> Array:
        found = x.copy()
        rows, there = (a.T if x.ndim == 2 else a for a in (found, x))
        for start, stop in bounds(name, question):
            rows[start:stop] = of(there[start:stop])
        return found

    return change


def local(x: Array, name: str, question: Question) -> Array:
    """Read by the number of the row in its sequence, without the sequence's offset."""
    found = x.copy()
    rows, there = (a.T if x.ndim == 2 else a for a in (found, x))
    for start, stop in bounds(name, question):
        rows[start:stop] = there[: stop - start]
    return found
