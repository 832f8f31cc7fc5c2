"""The tiles of block-sparse attention: blocks in the order in which a query walks them, and the
queries of a block in the order of its list; what is lost of either, and what overwrites what."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.engine.attention import BACKWARD, Bug
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, changed

Ints = np.ndarray
Order = Callable[[Ints, Ints, int], Ints]  # of slots, -1 for the own block, blocks, slots' number
ORDERS: dict[str, Order] = {
    "in the order of the slots": lambda slot, block, last: np.where(slot < 0, last, slot),
    "the own block first": lambda slot, block, last: slot + 1,
    "blocks ascending": lambda slot, block, last: block,
    "blocks descending": lambda slot, block, last: block.max() - block,
}
LOTS = (1, 2, 4, 8, 16, 32, 64, 128)  # queries of one step of a loop
# which of so many places count, in lots of t
Share = Callable[[Ints, Ints, int], Ints]
SHARES: dict[str, Share] = {
    "the last {} alone": lambda p, n, t: p // t == (n - 1) // t,
    "at most {}, the first": lambda p, n, t: p < t,
    "without the first {}": lambda p, n, t: p >= t,
    "in whole lots of {} alone": lambda p, n, t: p < n // t * t,
}
OVERWRITES = "the last {} alone"
GRADIENTS = {"dk": "dK", "dv": "dV"}


def in_lists(c: Context) -> tuple[Ints, Ints]:
    """The place of every query in the list of the key's block, (heads, n, m), -1 where it does not
    see the key, and the length of that list, (heads, 1, m)."""
    seen = c.W > 0
    block = (c.view.keys - c.question.cu_seqlens_k[c.view.sequence]) // c.question.block_size
    of_block = np.zeros((int(block.max(initial=0)) + 1, *seen.shape[1::-1]), dtype=bool)
    np.logical_or.at(of_block, block, seen.T)
    place = np.cumsum(of_block, axis=1)[block].T - 1
    return np.where(seen, place, -1), of_block.sum(axis=1)[block].T[:, None]


def tiles(question: Question) -> dict[str, Callable[[Context], list[Ints]]]:
    """Which pairs every step of a walk has: blocks."""
    found = {f"block by block, {of}": partial(_steps, order) for of, order in ORDERS.items()}
    return found | {"slot by slot": partial(_parts, tuple(range(question.slots + 1)))}


def _steps(order: Order, c: Context) -> list[Ints]:
    """Pairs by the place of the key's block in the query's walk."""
    seen, view = c.W > 0, c.view
    block = (view.keys - c.question.cu_seqlens_k[view.sequence]) // c.question.block_size
    by = order(view.slot, np.broadcast_to(block, view.slot.shape), c.question.slots)
    there = np.zeros((*seen.shape[:2], int(by.max(initial=0)) + 1), dtype=bool)
    heads, rows = np.ogrid[: seen.shape[0], : seen.shape[1]]
    np.logical_or.at(there, (heads[..., None], rows[..., None], by), seen)
    place = np.where(seen, np.take_along_axis(np.cumsum(there, axis=2) - 1, by, 2), -1)
    return [place == step for step in range(int(place.max(initial=0)) + 1)]


def splits(question: Question) -> dict[str, Callable[[Context], list[Ints]]]:
    """Parts of the slots, the own block being one more, that are merged."""
    count = question.slots + question.own
    found: dict[tuple[int, ...], str] = {}
    for parts, up in product((2, 3, 4, count), (0, 1)):
        part = tuple((slot * parts + up * (parts - 1)) // count for slot in range(count))
        found.setdefault(part, f"{parts} parts of the slots, the {('first', 'last')[up]} longer")
    return {words: partial(_parts, part) for part, words in found.items() if any(part)}


def _parts(part: tuple[int, ...], c: Context) -> list[Ints]:
    """Pairs by the part of their slot, the own block's last."""
    of = np.array(part)[np.where(c.view.slot < 0, len(part) - 1, c.view.slot)]
    return [(c.W > 0) & (of == number) for number in range(max(part) + 1)]


def bugs(question: Question, wrong: Collection[str]) -> Iterator[Bug]:
    """A part of a list of queries that counts alone, in what is ``wrong``."""
    names, longest = [name for name in GRADIENTS if name in wrong], max(question.lengths_q)
    for words, share in SHARES.items() if names else ():
        name = "tile-overwrites" if words == OVERWRITES else "sparse-queries-lost"
        for lot in range(1, longest) if "at most" in words else LOTS:
            if lot < longest:
                text = f"of the queries in a block's list {words.format(lot)}"
                steps = {GRADIENTS[n]: partial(_weighed, GRADIENTS[n], share, lot) for n in names}
                yield Bug(name, f"{' and '.join(names)}, {text}", BACKWARD, steps=steps)


def _weighed(step: str, share: Share, lot: int, c: Context) -> Floats:
    """A product of the pairs that count."""
    at, count = in_lists(c)
    kept = (at >= 0) & share(at, count, lot)
    return np.asarray(STEPS[step](changed(c, P=c.P * kept, dY=c.dY * kept)))
