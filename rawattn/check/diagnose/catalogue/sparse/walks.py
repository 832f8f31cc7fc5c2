"""The tiles of block-sparse attention: blocks in the order in which a query walks them, and the
queries of a block in the order of its list; what is lost of either, and what overwrites what."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import stages
from rawattn.check.diagnose.engine.attention import BACKWARD, FORWARD, RESULTS, Bug, View, each
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
Steps = Callable[[Context], list[Ints]]  # which pairs every step, or every part, has
LOTS = (1, 2, 4, 8, 16, 32, 64, 128)  # queries of one step of a loop
OVERWRITES, REPEATED = "the last {} alone", "in lots of {}, the last one filled with the last"
SHARED = {OVERWRITES: "tile-overwrites", REPEATED: "sparse-spare-lanes"}
# how often each of so many places counts, in lots of t
Share = Callable[[Ints, Ints, int], Ints]
SHARES: dict[str, Share] = {
    OVERWRITES: lambda p, n, t: p // t == (n - 1) // t,
    "at most {}, the first": lambda p, n, t: p < t,
    "in whole lots of {} alone": lambda p, n, t: p < n // t * t,
    REPEATED: lambda p, n, t: 1 + (p == n - 1) * (-n % t),
}
Places = Callable[[Question, View], tuple[Ints, Ints]]
Kept = Callable[[Question, View], Ints]  # how often every pair counts
Row = tuple[str, str, Kept]  # a class and words


def sees_block(question: Question, view: View) -> Ints:
    """Whether every query sees a key of the key's block, (heads, n, m)."""
    block = (view.keys - question.cu_seqlens_k[view.sequence]) // question.block_size
    of_block = np.zeros((int(block.max(initial=0)) + 1, *view.weight.shape[1::-1]), dtype=bool)
    np.logical_or.at(of_block, block, view.weight.T > 0)
    return np.asarray(of_block[block].T)


def in_lists(question: Question, view: View) -> tuple[Ints, Ints]:
    """The place of every query in the list of the key's block, (heads, n, m), -1 where it does not
    see the key, and the length of that list, (heads, 1, m)."""
    there = sees_block(question, view)
    return np.where(view.weight > 0, there.cumsum(axis=1) - 1, -1), there.sum(axis=1, keepdims=True)


def _steps(order: Order, c: Context) -> list[Ints]:
    """Pairs by the place of the key's block in the query's walk."""
    place, _ = in_walk(order, c.question, c.view)
    return [place == step for step in range(int(place.max(initial=0)) + 1)]


def in_walk(order: Order, question: Question, view: View) -> tuple[Ints, Ints]:
    """The place of the key's block in the walk of every query, (heads, n, m), -1 where it does not
    see the key, and the length of that walk, (heads, n, 1)."""
    seen = view.weight > 0
    if view.slot is None:  # of the sliding branch
        return np.where(seen, 0, -1), np.ones((*seen.shape[:2], 1), dtype=np.int64)
    block = (view.keys - question.cu_seqlens_k[view.sequence]) // question.block_size
    by = order(view.slot, np.broadcast_to(block, view.slot.shape), question.slots)
    there = np.zeros((*seen.shape[:2], int(by.max(initial=0)) + 1), dtype=bool)
    heads, rows = np.ogrid[: seen.shape[0], : seen.shape[1]]
    np.logical_or.at(there, (heads[..., None], rows[..., None], by), seen)
    place = np.where(seen, np.take_along_axis(np.cumsum(there, axis=2) - 1, by, 2), -1)
    return place, there.sum(axis=2, keepdims=True)


def _parted(order: Order, size: int, rest: bool, c: Context) -> list[Ints]:
    """Pairs by so many steps of a walk at a time; ``rest``: all behind the first ones at once."""
    steps = _steps(order, c)
    cuts = [size] if rest else range(size, len(steps), size)
    return [np.asarray(part.any(axis=0)) for part in np.split(np.array(steps), cuts)]


def _shared(order: Order, parts: int, up: int, c: Context) -> list[Ints]:
    """Pairs by so many equal parts of every query's own walk."""
    place, count = in_walk(order, c.question, c.view)
    part = np.where(place < 0, -1, (place * parts + up * (parts - 1)) // np.maximum(count, 1))
    return [part == number for number in range(parts)]


def splits(question: Question) -> dict[str, Steps]:
    """Parts of the slots, the own block being one more, that are merged."""
    count = question.slots + question.own
    found: dict[tuple[int, ...], str] = {}
    for parts, up in product((2, 3, 4, count), (0, 1)):
        part = tuple((slot * parts + up * (parts - 1)) // count for slot in range(count))
        found.setdefault(part, f"{parts} parts of the slots, the {('first', 'last')[up]} longer")
    parted: dict[str, Steps] = {x: partial(of_slots, y) for y, x in found.items() if any(y)}
    parted["the own block and the rest"] = _own_and_rest
    for (words, order), size, rest in product(ORDERS.items(), (1, 2, 4), (False, True)):
        text = f"{size} blocks and the rest" if rest else f"parts of {size} blocks"
        parted[f"{text}, {words}"] = partial(_parted, order, size, rest)
    for (words, order), parts, up in product(ORDERS.items(), (2, 3, 4), (0, 1)):
        text = f"{parts} parts of a query's walk, the {('first', 'last')[up]} longer, {words}"
        parted[text] = partial(_shared, order, parts, up)
    return parted


def of_slots(part: tuple[int, ...], c: Context) -> list[Ints]:
    """Pairs by the part of their slot, the own block's last."""
    if c.view.slot is None:  # of the sliding branch
        return [c.W > 0]
    of = np.array(part)[np.where(c.view.slot < 0, len(part) - 1, c.view.slot)]
    return [(c.W > 0) & (of == number) for number in range(max(part) + 1)]


def _own_and_rest(c: Context) -> list[Ints]:
    """Pairs of the own block, whether a slot names it or not, and all others."""
    if c.view.lists is None:
        return [c.W > 0]
    block = (c.view.keys - c.question.cu_seqlens_k[c.view.sequence]) // c.question.block_size
    own = c.view.lists.own_block[c.view.rows, 0] == block
    return [(c.W > 0) & own, (c.W > 0) & ~own]


TILES: dict[str, Steps] = {f"block by block, {of}": partial(_steps, x) for of, x in ORDERS.items()}
WALKS: dict[str, Places] = {
    f"blocks that a query walks, {of},": partial(in_walk, order) for of, order in ORDERS.items()
}
LISTS: dict[str, Places] = {"queries in a block's list": in_lists}
KINDS = {"dq": ("sparse-list-cut", WALKS), "dk dv": ("sparse-queries-lost", LISTS)}


def bugs(question: Question, wrong: Collection[str]) -> Iterator[Bug]:
    """Walks, or lists of queries, of which parts count otherwise, in what is ``wrong``."""
    for of, kind in KINDS.items():
        names = [name for name in of.split() if name in wrong]
        for name, text, kept in _shares(question, *kind) if names else ():
            steps = {x: partial(_weighed, x, kept) for x in [RESULTS["backward"][n] for n in names]}
            yield Bug(name, f"{' and '.join(names)}, {text}", BACKWARD, steps=steps)


def cut(question: Question, of: str = "dq") -> Iterator[Bug]:
    """The same of walks, or lists, that everything is made of, but for the last block alone."""
    rows = (row for row in _shares(question, *KINDS[of]) if row[0] != SHARED[OVERWRITES])
    yield from (Bug(name, text, see=each(_kept, kept)) for name, text, kept in rows)


def _shares(question: Question, name: str, every: Mapping[str, Places]) -> Iterator[Row]:
    """Shares of walks or of lists; blocks that one head, or one query, of a tile sees."""
    most = question.slots + 1 if every is WALKS else max(question.lengths_q)
    for (of, places), (words, share) in product(every.items(), SHARES.items()):
        for lot in range(1, most) if "at most" in words else (lot for lot in LOTS if lot < most):
            kept = partial(_shared_out, places, share, lot)
            yield SHARED.get(words, name), f"of the {of} {words.format(lot)}", kept
    for tile, last, whose in product(LOTS[:-1], (0, 1), ("head of its group", "query")):
        text = f"the {('first', 'last')[last]} {whose} sees, by tiles of {tile} queries"
        yield name, f"only blocks that {text}", partial(_as_another, whose != "query", last, tile)


def _as_another(head: bool, last: int, tile: int, question: Question, view: View) -> Ints:
    there, row = sees_block(question, view), np.arange(view.weight.shape[1])
    if not head:
        return there[:, np.minimum(row - row % tile + last * (tile - 1), row[-1])]
    return np.logical_or.reduceat(there[[-last]], row[::tile], axis=1)[:, row // tile]


def _shared_out(places: Places, share: Share, lot: int, question: Question, view: View) -> Ints:
    at, count = places(question, view)
    return (at >= 0) * share(at, count, lot)


def _kept(kept: Kept, question: Question, view: View) -> View:
    listed = view.slot is not None  # else of the sliding branch
    return replace(view, weight=view.weight * kept(question, view)) if listed else view


def stale(question: Question) -> Iterator[Bug]:
    """v of a block from the stage of another step of a query's walk."""
    for (of, order), (words, which) in product(ORDERS.items(), stages.LOOPS.items()):
        text = f"V in P V {words} of the blocks that a query walks, {of}"
        yield Bug("stale-tile", text, FORWARD, steps={"O": partial(_stale_out, order, which, "O")})
        steps = {"tO": partial(_stale_out, order, which, "tO")}
        yield Bug("stale-tile", text.replace("V", "tV"), ("jvp", "second"), steps=steps)


def _stale_out(order: Order, which: stages.Which, step: str, c: Context) -> Floats:
    """A product with P where the other's rows, in place, are those of another block of the walk."""
    keys, size = c.W.shape[2], c.question.block_size
    place, count = in_walk(order, c.question, c.view)
    blocks = np.full((*place.shape[:2], int(count.max(initial=0)) + 1), -1)
    h, i, j = np.nonzero(place >= 0)
    blocks[h, i, place[h, i, j]] = j // size
    steps = np.zeros((blocks.shape[2] + 1, blocks.shape[2]), dtype=np.int64)
    for n in range(1, len(steps)):
        steps[n, :n] = np.minimum(which(np.arange(n)), n)  # behind the last one there is none
    other = blocks[h, i, steps[count[h, i, 0], place[h, i, j]]]
    key = np.where(other < 0, keys, np.minimum(other * size + j % size, keys))
    P = np.zeros((*place.shape[:2], keys + 1))
    np.add.at(P, (h, i, key), c.P[h, i, j])
    P = P[..., :-1] * (place >= 0)
    if step == "O":
        return np.asarray(STEPS["O"](changed(c, P=P)))
    return np.asarray(STEPS[step](changed(c, P=P, tP=0 * P)) + STEPS[step](changed(c, P=0 * P)))


def _weighed(step: str, kept: Kept, c: Context) -> Floats:
    """A product of pairs as often as they count."""
    often = kept(c.question, c.view)
    return np.asarray(STEPS[step](changed(c, P=c.P * often, dY=c.dY * often)))
