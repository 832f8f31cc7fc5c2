"""The tiles of block-sparse attention: blocks in the order in which a query walks them, and the
queries of a block in the order of its list; what is lost of either, and what overwrites what."""

from collections.abc import Callable, Collection, Iterator
from functools import partial

import numpy as np

from rawattn.check.diagnose.engine.attention import BACKWARD, FIRST, Bug
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, changed

Ints = np.ndarray
Order = Callable[[Ints, Ints, int], Ints]  # of slots, -1 for the own block, blocks, slots' number
ORDERS: dict[str, Order] = {
    "in the order of the slots": lambda slot, block, last: np.where(slot < 0, last, slot),
    "the own block first": lambda slot, block, last: slot + 1,
    "from the last slot on": lambda slot, block, last: last - slot,
    "blocks ascending": lambda slot, block, last: block,
    "blocks descending": lambda slot, block, last: block.max() - block,
}
LOTS = (1, 2, 4, 8, 16, 32, 64, 128)  # blocks, or queries, of one step of a loop
# which of so many places count, in lots of t
Share = Callable[[Ints, Ints, int], Ints]
SHARES: dict[str, Share] = {
    "the last {} alone": lambda p, n, t: p // t == (n - 1) // t,
    "at most {}, the first": lambda p, n, t: p < t,
    "at most {}, the last": lambda p, n, t: p >= n - t,
    "without the last {}": lambda p, n, t: p < n - t,
    "without the last {} where there are more": lambda p, n, t: (p < n - t) | (n <= t),
    "without the first {}": lambda p, n, t: p >= t,
    "without the first {} where there are more": lambda p, n, t: (p >= t) | (n <= t),
    "in whole lots of {} alone": lambda p, n, t: p < n // t * t,
    "in whole lots of {} alone, where there is one": lambda p, n, t: (p < n // t * t) | (n < t),
    "every other lot of {}": lambda p, n, t: p // t % 2 == 0,
}
OVERWRITES = "the last {} alone"
Place = Callable[[Context], tuple[Ints, Ints]]


def walked(c: Context, order: Order, tile: int = 0) -> tuple[Ints, Ints]:
    """The place of every key's block in its query's walk, (heads, n, m), -1 where it is not seen,
    and how many blocks, (heads, n, 1), that has; ``tile``: of tiles of so many keys of a block."""
    size, view = c.question.block_size, c.view
    key = view.keys - c.question.cu_seqlens_k[view.sequence]
    by = order(view.slot, np.broadcast_to(key // size, view.slot.shape), c.question.slots)
    if tile:
        by = by * -(-size // tile) + key % size // tile
    return _ranked(by, c.W > 0)


def in_lists(c: Context, masked: bool = False) -> tuple[Ints, Ints]:
    """The same of every query in the list of the key's block, with the length of that (heads, 1,
    m); ``masked``: the lists have queries too that see nothing of the block."""
    view, seen = c.view, c.W > 0
    block = (view.keys - c.question.cu_seqlens_k[view.sequence]) // c.question.block_size
    of_block = np.zeros((int(block.max(initial=0)) + 1, *seen.shape[1::-1]), dtype=bool)
    np.logical_or.at(of_block, block, seen.T)
    if masked:
        named, exists = (
            x[view.rows][:, view.selections] for x in (view.lists.named, view.lists.exists)
        )
        i, head, slot = np.nonzero(exists)
        of_block[named[i, head, slot], i, head] = True
    place = np.cumsum(of_block, axis=1)[block].T - 1
    return np.where(seen, place, -1), of_block.sum(axis=1)[block].T[:, None]


def _ranked(by: Ints, seen: Ints) -> tuple[Ints, Ints]:
    there = np.zeros((*seen.shape[:2], int(by.max(initial=0)) + 1), dtype=bool)
    heads, rows = np.ogrid[: seen.shape[0], : seen.shape[1]]
    np.logical_or.at(there, (heads[..., None], rows[..., None], by), seen)
    place = np.take_along_axis(np.cumsum(there, axis=2) - 1, by, 2)
    return np.where(seen, place, -1), there.sum(axis=2, keepdims=True)


def tiles(question: Question) -> dict[str, Callable[[Context], list[Ints]]]:
    """Which pairs every step of a walk has: blocks, or tiles of them."""
    found: dict[str, Callable[[Context], list[Ints]]] = {}
    for words, order in ORDERS.items():
        for tile in (0, *(t for t in (16, 32) if t < question.block_size)):
            of_tiles = f", {tile} keys at a time" * bool(tile)
            found[f"block by block, {words}{of_tiles}"] = partial(_steps, order, tile)
    return found


def _steps(order: Order, tile: int, c: Context) -> list[Ints]:
    place, count = walked(c, order, tile)
    return [place == step for step in range(int(count.max(initial=1)))]


def bugs(question: Question, wrong: Collection[str]) -> Iterator[Bug]:
    """A part of a walk, or of a list of queries, that counts alone, in what is ``wrong``."""
    tensors = [f"d{name[1].upper()}" for name in ("dk", "dv") if name in wrong]
    said = " and ".join(name for name in ("dk", "dv") if name in wrong)
    longest = max(question.lengths_q)
    for words, share in SHARES.items():
        overwrites = words == OVERWRITES
        for lot in range(1, longest) if "at most" in words else LOTS:
            for of, order in ORDERS.items() if lot < question.slots + 1 else ():
                place = partial(walked, order=order)
                text = f"of a query's blocks {words.format(lot)}, {of}"
                if overwrites and "dq" in wrong:
                    steps = {"dQ": partial(_weighed, "dQ", place, share, lot)}
                    yield Bug("tile-overwrites", f"dq, {text}", BACKWARD, steps=steps)
                elif not overwrites:
                    steps = {"S": partial(_without, place, share, lot)}
                    yield Bug("sparse-list-cut", text, FIRST, steps=steps)
            if lot < longest and tensors:
                text = f"of the queries in a block's list {words.format(lot)}"
                name = "tile-overwrites" if overwrites else "sparse-queries-lost"
                for masked in (False, True) if question.causal else (False,):
                    place = partial(in_lists, masked=masked)
                    steps = {n: partial(_weighed, n, place, share, lot) for n in tensors}
                    form = f"{said}, {text}" + ", masked ones counted" * masked
                    yield Bug(name, form, BACKWARD, steps=steps)


def _kept(c: Context, place: Place, share: Share, lot: int) -> Ints:
    at, count = place(c)
    return np.asarray((at >= 0) & share(at, count, lot))


def _without(place: Place, share: Share, lot: int, c: Context) -> Floats:
    S = np.asarray(STEPS["S"](c))  # of the sliding branch too, which has no lists
    return S if c.view.lists is None else np.where(_kept(c, place, share, lot), S, -np.inf)


def _weighed(name: str, place: Place, share: Share, lot: int, c: Context) -> Floats:
    kept = _kept(c, place, share, lot)
    return np.asarray(STEPS[name](changed(c, P=c.P * kept, dY=c.dY * kept)))
