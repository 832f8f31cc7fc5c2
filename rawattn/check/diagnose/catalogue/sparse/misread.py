"""Lists of blocks, counts and factors that are read at other places than they have, or as other
numbers; and queries that stand at another key: every array by every map of ``maps``."""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.sparse.gates import with_gate
from rawattn.check.diagnose.catalogue.sparse.lists import listed, where
from rawattn.check.diagnose.engine.attention import TILES, Bug
from rawattn.check.diagnose.engine.lists import Ints, Lists, lists_of
from rawattn.check.diagnose.engine.question import STAGES, Question

Number = Callable[[Lists], Ints]
Move = Callable[[maps.Geometry, Ints], Ints]
NAME = "sparse-lists-misread"
NUMBERS: dict[str, Number] = {  # of blocks that are named
    "block n - 1": lambda x: x.named - 1,
    "block n + 1": lambda x: x.named + 1,
    "the n-th block of the pack": lambda x: x.named - x.first_block,
}
PLACES: dict[str, Number] = {  # of a query among the keys
    "at i, without seqlen_k - seqlen_q": lambda x: x.row,
    "at its token in the pack": lambda x: x.row + x.start,
    "one key further": lambda x: x.place + 1,
    "one key before": lambda x: x.place - 1,
}
OF_PLACES = {"the own block and the mask": ("place", "bound"), "the own block": ("place",)}
OF_PLACES |= {"the mask": ("bound",)}
OF_SLOTS = ("block_indices", "block_counts", "block_scale")
SETS = (*((name,) for name in OF_SLOTS), OF_SLOTS[:2], OF_SLOTS)  # arrays that are read alike


def bugs(question: Question) -> Iterator[Bug]:
    """All of them; most show nothing."""
    stages = tuple(STAGES)
    for words, number in NUMBERS.items():
        yield Bug(NAME, f"block_indices: {words}", stages, listed(where(named=number)))
    tiles = {f"where query i // {t} * {t} stands": partial(_of_tile, t) for t in TILES}
    for (words, number), (what, fields) in product((PLACES | tiles).items(), OF_PLACES.items()):
        see = listed(where(**dict.fromkeys(fields, number)))
        yield Bug("sparse-other-place", f"{what}: {words}", stages, see)
    there = [name for name in OF_SLOTS if getattr(question, name) is not None]
    for names in (names for names in SETS if {*names} <= {*there}):
        for kind, words, move in _moves(question, "block_scale" not in names):
            yield _moved(kind, f"{', '.join(names)}, {words}", question, names, move)


def _moves(question: Question, of_ints: bool) -> Iterator[tuple[str, str, Move]]:
    """How arrays like block_indices may be read: a class, words, and what is read."""
    of_tokens = *maps.sequences(question), *maps.rows(question), *maps.heads(question)
    for by in (*maps.layouts(False), *of_tokens):
        yield NAME if by.family in ("rows", "heads") else "input-layout", by.words, by.moved
    if of_ints:
        yield "input-layout", "int64 as int32", _words


def _of_tile(tile: int, x: Lists) -> Ints:
    """The place of the first query of a tile."""
    return np.asarray(x.place - x.row % tile)


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


def _words(g: maps.Geometry, x: Ints) -> Ints:
    """int64 as int32: low and high words in turn, of the first half."""
    words = np.ascontiguousarray(x).astype("<i8").reshape(-1).view("<i4").astype(np.int64)
    return words[: x.size].reshape(x.shape)
