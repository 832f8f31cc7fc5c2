"""Bugs of the lists of blocks in block-sparse attention: other lists, and who sees whom by them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.engine.attention import Bug, See, View, sparse_views
from rawattn.check.diagnose.engine.lists import Ints, Lists, by_token, lists_of
from rawattn.check.diagnose.engine.question import Question

TILES = (4, 6, 8, 16, 32)
Of = Callable[[Lists], Any]
Change = Callable[[Lists], Lists]
Row = tuple[str, str, Change]  # a class, words, and other lists


def listed(change: Change) -> See:
    """The views of other lists; those of the sliding branch, which have no lists, stay."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        if not views or views[0].lists is None:
            return views
        return [*sparse_views(question, change(replace(views[0].lists, times=None)), views)]

    return see


def where(**changes: Of) -> Change:
    """Lists with other fields than they had."""
    return lambda x: replace(x, **{name: of(x) for name, of in changes.items()})


def _only(counted: Of) -> Change:
    return where(counted=counted)


def _ending(stop: Of) -> Change:
    """They end at the first slot that counts where ``stop``."""
    return _only(lambda x: x.counted & (np.cumsum(stop(x) & x.counted, axis=2) == 0))


def _again(x: Lists, slots: bool = False, own: bool = False, apart: bool = False) -> Lists:
    """Blocks count again for slots that repeat them, ``apart`` but the next one, and own ones."""
    repeated = slots & x.exists
    repeated[..., 1:] &= ~(apart & (x.named[..., 1:] == x.named[..., :-1]))
    return replace(x, times=x.walked | np.concatenate([repeated, own & x.has_own], axis=2))


def _kept(future: bool, x: Lists) -> Lists:
    """Slots that name no block, or one of the ``future``, count the last one before once more."""
    skipped = ~x.is_block | (future & (x.named > x.own_block))
    last = np.maximum.accumulate(np.where(skipped, -1, x.slots), axis=2)
    named = np.take_along_axis(x.named, np.maximum(last, 0), axis=2)
    found = replace(x, named=np.where(last < 0, -1, named))
    again = np.concatenate([skipped & found.exists, x.own & False], axis=2)
    return replace(found, times=found.walked | again)


def _uncut(free: Callable[[Ints, Ints], Any]) -> Change:
    """Entries that are not cut at the query: by whether they are slots, and name the own block."""
    slots: Of = lambda x: np.arange(x.named.shape[2] + 1) < x.named.shape[2]  # noqa: E731
    own: Of = lambda x: np.concatenate([x.named == x.own_block, x.own | True], axis=2)  # noqa: E731
    return where(cut=lambda x: x.cut & np.logical_not(free(slots(x), own(x))))


def _union(size: int, x: Lists) -> Lists:
    """With the blocks of all of a tile of queries of its sequence."""
    token = np.arange(len(x.named))
    tile = np.where(x.question.sequence_of("q") < 0, token, token - x.row[:, 0, 0] % size)
    block, named = np.arange(int(x.blocks.max(initial=0))), np.where(x.exists, x.named, -1)
    seen = (named[..., None] == block).any(axis=2) | ((block == x.own_block) & x.own)
    united = np.zeros_like(seen)
    np.logical_or.at(united, tile, seen)
    every = np.concatenate([named, np.where(united[tile], block, -1)], axis=2)
    cut = np.concatenate([np.full(every.shape, x.question.causal), x.cut[..., -1:]], axis=2)
    return replace(x, named=every, counted=every >= 0, cut=cut)


MISSING, TWICE, CUT = "sparse-own-block-missing", "sparse-duplicate-twice", "sparse-list-cut"
READ, OPEN, COUNTS = "sparse-padding-read", "sparse-not-causal", "sparse-counts-ignored"
MISREAD, PLACE, UNION = "sparse-lists-misread", "sparse-other-place", "sparse-tile-union"
IN_32_BITS = where(named=lambda x: (x.named * x.size).astype(np.int32) // x.size)  # by first keys
FULL_ONES = _only(lambda x: x.counted & (x.named < x.length // x.size))
NOT_OWN = _only(lambda x: x.counted & ~((x.named == x.own_block) & x.question.causal))
NO_PADDING = _only(lambda x: np.cumsum(x.is_block, axis=2) <= x.limit)
TABLE: tuple[Row, ...] = (
    (OPEN, "everywhere", _uncut(lambda slot, own: slot)),
    (OPEN, "in the own block", _uncut(lambda slot, own: own)),
    (OPEN, "in the own block, unless it is selected", _uncut(lambda slot, own: own & ~slot)),
    (MISSING, "", where(own=lambda x: x.own & False)),
    (TWICE, "of the selection", partial(_again, slots=True)),
    (TWICE, "the own block", partial(_again, own=True)),
    (TWICE, "all", partial(_again, slots=True, own=True)),
    (TWICE, "of slots that do not follow each other", partial(_again, slots=True, apart=True)),
    (READ, "as the first block", where(named=lambda x: x.named * x.is_block)),
    (READ, "as the nearest block", where(named=lambda x: np.clip(x.named, 0, x.blocks - 1))),
    (READ, "if negative from the end", where(named=lambda x: x.named + x.blocks * (x.named < 0))),
    (READ, "past the end as the last block", where(named=lambda x: np.fmin(x.named, x.blocks - 1))),
    (READ, "if negative as the first block", where(named=lambda x: np.maximum(x.named, 0))),
    (READ, "as the block of the slot before, which counts again", partial(_kept, False)),
    (READ, "as the block before, again, those behind the query too", partial(_kept, True)),
    (READ, "by block * block_size in 32 bits", IN_32_BITS),
    (MISREAD, "block_indices: block n - 1", where(named=lambda x: x.named - 1)),
    (CUT, "a last block that is not full", FULL_ONES),
    (CUT, "without the last one", _only(lambda x: x.counted & (x.slots < x.slots[-1:]))),
    (CUT, "without the last counted", _only(lambda x: x.slots + 1 < x.limit.clip(0, x.slots.size))),
    (COUNTS, "", _only(lambda x: x.named >= 0)),
    (COUNTS, "at least one slot", _only(lambda x: x.slots < np.maximum(x.limit, 1))),
    (COUNTS, "one slot too many", _only(lambda x: x.slots < x.limit + 1)),
    (COUNTS, "so many slots that name blocks count, padding apart", NO_PADDING),
    (CUT, "at the first -1", _ending(lambda x: x.named < 0)),
    (CUT, "at the first that is no block of the sequence", _ending(lambda x: ~x.is_block)),
    (CUT, "blocks behind the own", _only(lambda x: x.counted & (x.named <= x.own_block))),
    (CUT, "at the first repeat", _ending(lambda x: x.number > 0)),
    (CUT, "an own block that is named, where causal", NOT_OWN),
    (OPEN, "in the block around the query", _uncut(lambda slot, own: slot & own)),
    (OPEN, "everywhere, the own block too", _uncut(lambda slot, own: True)),
)
PLACES: dict[str, Callable[[int, Lists], Ints]] = {  # of a query among the keys, in tiles of t
    "at i, without seqlen_k - seqlen_q": lambda t, x: x.row,
    "one key further": lambda t, x: x.place + 1,
    "at its number in q": lambda t, x: np.arange(len(x.named))[:, None, None],
    "that of the first query of its tile of {}": lambda t, x: x.place - x.row % t,
    "that of the last query of its tile of {}": lambda t, x: np.minimum(
        x.place - x.row % t + t - 1, x.length - 1
    ),
}
SHIFTS: dict[str, Callable[[Question], Any]] = {  # keys of a block that lie before the sequence
    "counted from the first packed key": lambda q: q.offsets("k")[:-1],
    "counted from the first packed query": lambda q: q.offsets("q")[:-1],
    "counted from the sequence's end": lambda q: np.negative(q.lengths_k),
}
SHIFTED: dict[str, Change] = {
    "": where(length=lambda x: x.length + x.shift, place=lambda x: x.place + x.shift),
    ", own ones alone": where(place=lambda x: x.place + x.shift, shift=lambda x: 0 * x.shift),
    ", not own ones": _only(lambda x: x.counted & ~(x.question.causal & (x.named > x.own_block))),
}
FOR = {"the own block and the mask": "place bound", "the own block": "place", "the mask": "bound"}


def rows(question: Question) -> Iterator[Row]:
    """All of them; some show nothing."""
    yield from TABLE
    for size in sorted({question.block_size // 2, 2 * question.block_size} - {0}):
        words = f"blocks of {size} keys in place of {question.block_size}"
        yield ("wrong-keys", words, partial(replace, size=size))
    selections = np.asarray(question.block_indices).shape[1]
    right = np.arange(question.num_heads_q) * selections // question.num_heads_q
    for words, of in maps.other_heads(right, selections, question.group).items():
        for factors, own in ((of, ""), (right, ", with its own gate")):
            yield ("sparse-other-heads-selection", f"{words}{own}", partial(of_heads, of, factors))
    for size in (size for size in TILES if size < 2 * max(question.lengths_q, default=0)):
        yield (UNION, f"of {size} queries", partial(_union, size))


def of_heads(of: Ints, factors: Ints, x: Lists) -> Lists:
    """Lists by query heads, of other heads."""
    moved = {name: getattr(x, name)[:, of] for name in ("named", "counted", "own", "cut")}
    return replace(x, **moved, heads=factors)


def misread(question: Question) -> Iterator[Bug]:
    """Lists that are read by a map, alone or together, and queries that stand at another key."""
    names = ["block_indices", *["block_counts"] * (question.block_counts is not None)]
    for by, some in product(maps_of(question), [names[:1], names[1:], names][: 2 * len(names) - 1]):
        text, see = f"{' and '.join(some)}, {by.words}", listed(partial(moved, by, some))
        yield Bug(MISREAD, text, see=see)
    every = {x.format(t): partial(of, t) for (x, of), t in product(PLACES.items(), TILES[2:])}
    for (words, of), (who, fields) in product(every.items(), FOR.items()):
        yield Bug(PLACE, f"{who}: {words}", see=listed(where(**dict.fromkeys(fields.split(), of))))
    for (words, of), (more, change) in product(SHIFTS.items(), SHIFTED.items()):
        yield Bug(MISREAD, f"blocks {words}{more}", see=listed(partial(_shifted, of, change)))


def _shifted(of: Callable[[Question], Any], change: Change, x: Lists) -> Lists:
    return change(replace(x, shift=by_token(x.question, of(x.question) % x.size)))


def maps_of(question: Question) -> Iterator[maps.Map]:
    """Where the lists of a query may be looked for."""
    ways = (maps.TILED, maps.LAST, "row i + {}", "row i - {}", "row i % {}")
    for words, by in product(ways, (1, *TILES)):
        if by < max(question.lengths_q, default=0) and (by > 1 or words in ways[2:4]):
            yield maps.of_rows(words, by)
    for of in maps.sequences(question, clamped=True):
        yield replace(of, words=of.words.replace("the other side", "cu_seqlens_k"))
    if np.asarray(question.block_indices).shape[1] > 1:
        yield from [*maps.heads(question)][:3]  # others are of groups
    yield from maps.layouts(False)


def moved(by: maps.Map, names: Sequence[str], x: Lists) -> Lists:
    """Lists of arrays that are read by a map."""
    g, found = maps.geometry(x.question, "dblock_scale"), dict[str, Any]()
    for name in names:
        array = np.atleast_3d(getattr(x.question, name))
        taken = by.moved(replace(g, shape=array.shape), array, -1.0)
        found[name] = taken if name == "block_indices" else taken[..., 0]
    return replace(lists_of(replace(x.question, **found)), question=x.question)
