"""Lists of blocks, counts and factors that are read at other places than they have, or as other
numbers; and queries that stand at another key: every array by every map of ``maps``."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.first_order import with_kv
from rawattn.check.diagnose.catalogue.sparse.gates import with_gate
from rawattn.check.diagnose.catalogue.sparse.lists import listed, of_heads, where
from rawattn.check.diagnose.engine.attention import FIRST, Bug, View
from rawattn.check.diagnose.engine.lists import Ints, Lists, lists_of
from rawattn.check.diagnose.engine.question import STAGES, Question

Number = Callable[[Lists], Ints]
Move = Callable[[maps.Geometry, Ints], Ints]
NAME = "sparse-lists-misread"
NUMBERS: dict[str, Number] = {  # of blocks that are named
    "block n - 1": lambda x: x.named - 1,
    "block n + 1": lambda x: x.named + 1,
    "block n // 2": lambda x: x.named // 2,
    "block 2 n": lambda x: 2 * x.named,
    "block n ^ 1": lambda x: x.named ^ 1,
    "the n-th block from the last": lambda x: x.blocks - 1 - x.named,
    "the n-th block behind the query's own": lambda x: x.own_block + x.named,
    "the n-th block before the query's own": lambda x: x.own_block - x.named,
    "the n-th block of the pack": lambda x: x.named - x.first_block,
    "block n, of which those before the sequence are counted too": lambda x: (
        x.named + x.first_block
    ),
    "block n, at most the last": lambda x: np.minimum(x.named, x.blocks - 1),
}
TILES = (2, 4, 8, 16, 32, 64, 128)
PLACES: dict[str, Number] = {  # of a query among the keys
    "at i, without seqlen_k - seqlen_q": lambda x: x.row,
    "at its token in the pack": lambda x: x.row + x.start,
    "one key further": lambda x: x.place + 1,
    "one key before": lambda x: x.place - 1,
    "at the last key": lambda x: x.last + 0 * x.place,
}
OF_TILES: dict[str, Callable[[int, Lists], Ints]] = {
    "at p // {0} * {0}": lambda t, x: x.place // t * t,
    "at the last key of p // {}": lambda t, x: x.place // t * t + t - 1,
    "where query i // {0} * {0} stands": lambda t, x: x.place - x.row % t,
}
OF_PLACES = {"the own block and the mask": ("place", "bound"), "the own block": ("place",)}
OF_PLACES |= {"the mask": ("bound",)}
OF_SLOTS = ("block_indices", "block_counts", "block_scale")
SETS = (*((name,) for name in OF_SLOTS), OF_SLOTS[:2], OF_SLOTS)  # arrays that are read alike


def bugs(question: Question) -> Iterator[Bug]:
    """All of them; most show nothing."""
    stages = tuple(STAGES)
    for words, number in NUMBERS.items():
        for text, of in ((words, number), (f"{words}, padding as it is", partial(_kept, number))):
            yield Bug(NAME, f"block_indices: {text}", stages, listed(where(named=of)))
    places = dict(PLACES)
    for t, (words, of_tile) in product(TILES, OF_TILES.items()):
        places[words.format(t)] = partial(of_tile, t)
    for words, number in places.items():
        for what, fields in OF_PLACES.items():
            see = listed(where(**dict.fromkeys(fields, number)))
            yield Bug("sparse-other-place", f"{what}: {words}", stages, see)
    yield from _of_heads(question)
    there = [name for name in OF_SLOTS if getattr(question, name) is not None]
    for names in (names for names in SETS if {*names} <= {*there}):
        for kind, words, move in _moves(question, "block_scale" not in names):
            yield _moved(kind, f"{', '.join(names)}, {words}", question, names, move)


def _moves(question: Question, of_ints: bool) -> Iterator[tuple[str, str, Move]]:
    """How arrays like block_indices may be read: a class, words, and what is read."""
    for by in (
        *maps.layouts(False),
        *maps.sequences(question),
        *maps.rows(question),
        *maps.heads(question),
    ):
        yield NAME if by.family in ("rows", "heads") else "input-layout", by.words, by.moved
    yield "input-layout", "the first slot", lambda g, x: np.broadcast_to(x[..., :1], x.shape)
    for by_rows, more in ((False, ""), (True, ", each row from its start")) if of_ints else ():
        yield "input-layout", f"int64 as int32{more}", partial(_words, by_rows)


def _of_heads(question: Question) -> Iterator[Bug]:
    """Query heads with other key/value heads, and the lists of these or their own."""
    heads, group = np.arange(question.num_heads_q), question.group
    selections = maps.geometry(question, "dblock_scale").shape[1]
    for words, kv in maps.other_heads(heads // group, question.num_heads_kv, group).items():
        for of, lists in ((kv * group, "its lists too"), (heads, "its own lists")):
            see = partial(_with_heads, kv, of * selections // len(heads))
            yield Bug("gqa-head-map", f"{words}, {lists}", FIRST, see)


def _with_heads(
    kv: Ints, selections: Ints, question: Question, views: tuple[View, ...]
) -> Sequence[View]:
    lists = listed(partial(of_heads, selections, selections))
    return with_kv(kv, lists(question, views))


def _kept(number: Number, x: Lists) -> Ints:
    return np.where(x.is_block, number(x), x.named)


@lru_cache(maxsize=2)
def _arrays(question: Question) -> dict[str, Ints]:
    """What slots have, in the memory of the whole pack."""
    whole = question.whole or question
    found = {name: np.asarray(getattr(whole, name)) for name in OF_SLOTS}
    limit = lists_of(whole).limit
    return found | {"block_counts": np.broadcast_to(limit, found["block_indices"].shape)}


def _moved(kind: str, text: str, question: Question, names: tuple[str, ...], move: Move) -> Bug:
    """These arrays as they are read."""

    def read(name: str, question: Question) -> Ints:
        g = maps.geometry(question.whole or question, "dblock_scale")
        return move(g, _arrays(question)[name])[: len(question.q)]

    fields: dict[str, Number] = {}
    if "block_indices" in names:
        fields["named"] = lambda x: read("block_indices", x.question).astype(np.int64)
    if "block_counts" in names:
        fields["counted"] = lambda x: x.slots < read("block_counts", x.question)
    steps = with_gate(read("block_scale", question)) if "block_scale" in names else {}
    see = listed(where(**fields)) if fields else None
    return Bug(kind, text, tuple(STAGES), see, steps)


def _words(by_rows: bool, g: maps.Geometry, x: Ints) -> Ints:
    """int64 as int32: low and high words in turn, of the first half; ``by_rows``: those of every
    token and head from where they should start."""
    words = np.ascontiguousarray(x).astype("<i8").reshape(-1).view("<i4").astype(np.int64)
    if by_rows:
        return np.asarray(words.reshape(*x.shape[:2], 2 * x.shape[2])[..., : x.shape[2]])
    return words[: x.size].reshape(x.shape)
