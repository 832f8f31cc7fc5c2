"""What stands in the place of a step of ``plain``: the forms that many bugs share."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tests.diagnose.plain import ZEROS, Array, Head, Hook, in_window, tiles
from tests.diagnose.table import Hooks


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


def or_seen(test: Callable[[Head], Any]) -> Hooks:
    return {"seen": lambda c, x: x | test(c)}


def times(number: Callable[[Head], Any]) -> Hooks:
    """How often keys count that are seen, or whether."""
    return {"seen": lambda c, x: x * number(c)}


def window(left: int = 0, right: int = 0) -> Hooks:
    """Sides of the window that are moved, where it has them."""
    return {"seen": lambda c, x: in_window(c.p, c.j, c.window, left, right)}


def no_window(left: bool = True, right: bool = True) -> Hooks:
    return {"window": lambda c, x: (-1 if left else x[0], -1 if right else x[1])}


def with_zeros(number: Callable[[Head], int]) -> Hooks:
    """So many keys of zeros behind the others."""
    return {"keys": lambda c, x: np.concatenate([x, np.full(number(c), ZEROS)])}


def padding(c: Head) -> int:
    """Up to the longest sequence."""
    return max(c.question.lengths_k) - c.m


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
