"""Lists of blocks that are read as other numbers, and queries that stand at another key."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue.sparse.lists import listed, where
from rawattn.check.diagnose.engine.attention import TILES, Bug
from rawattn.check.diagnose.engine.lists import Ints, Lists
from rawattn.check.diagnose.engine.question import STAGES, Question

Number = Callable[[Lists], Ints]
NAME = "sparse-lists-misread"
NUMBERS: dict[str, Number] = {  # of blocks that are named
    "block n - 1": lambda x: x.named - 1,
    "block n + 1": lambda x: x.named + 1,
    "block 2 n": lambda x: 2 * x.named,
}
PLACES: dict[str, Number] = {  # of a query among the keys
    "at i, without seqlen_k - seqlen_q": lambda x: x.row,
    "at its token in the pack": lambda x: x.row + x.start,
    "one key further": lambda x: x.place + 1,
    "one key before": lambda x: x.place - 1,
}
OF_PLACES = {"the own block and the mask": ("place", "bound"), "the own block": ("place",)}
OF_PLACES |= {"the mask": ("bound",)}


def bugs(question: Question) -> Iterator[Bug]:
    """All of them; most show nothing."""
    stages = tuple(STAGES)
    for words, number in NUMBERS.items():
        yield Bug(NAME, f"block_indices: {words}", stages, listed(where(named=number)))
    tiles = {f"where query i // {t} * {t} stands": partial(_of_tile, t) for t in TILES}
    for (words, number), (what, fields) in product((PLACES | tiles).items(), OF_PLACES.items()):
        see = listed(where(**dict.fromkeys(fields, number)))
        yield Bug("sparse-other-place", f"{what}: {words}", stages, see)


def _of_tile(tile: int, x: Lists) -> Ints:
    """The place of the first query of a tile."""
    return np.asarray(x.place - x.row % tile)
