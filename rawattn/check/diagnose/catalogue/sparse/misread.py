"""Lists of blocks, counts and factors that are read at other places than they have, or as other
numbers; and queries that stand at another key: every array by every map of ``TOKENS``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.first_order import with_kv
from rawattn.check.diagnose.catalogue.sparse.gates import with_gate
from rawattn.check.diagnose.catalogue.sparse.lists import listed, of_heads, where
from rawattn.check.diagnose.engine.attention import FIRST, Bug, View
from rawattn.check.diagnose.engine.lists import Ints, Lists
from rawattn.check.diagnose.engine.question import OF_SLOTS, STAGES, Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, Step

Number = Callable[[Lists], Ints]
Move = Callable[[Ints], Ints]
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
FILLS = (0.0, -1.0, -10.0, -100.0, -1e4)
FILLED: dict[str, Number] = {
    "blocks behind the query's own left out": lambda x: x.counted & (x.named <= x.own_block),
    "blocks behind the query's own too": lambda x: x.counted,
}
HEADS: dict[str, Callable[[Ints, int, int], Ints]] = {  # of so many, in groups of so many
    "h % num_heads_kv": lambda h, count, group: h % count,
    "the first head": lambda h, count, group: 0 * h,
    "the next head": lambda h, count, group: (h // group + 1) % count,
    "heads reversed": lambda h, count, group: count - 1 - h // group,
    "h // num_heads_kv": lambda h, count, group: np.minimum(h // count, count - 1),
}
SETS: tuple[tuple[str, ...], ...] = (
    *(("block_indices",), ("block_counts",), ("block_scale",)),
    *(("block_indices", "block_counts"), ("block_indices", "block_counts", "block_scale")),
)


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
    yield from (*_filled(question), *_of_heads(question))
    geometry = maps.geometry(question, OF_SLOTS[0])
    there = [n for n in SETS[-1] if getattr(question, n) is not None]
    for names in (names for names in SETS if set(names) <= {*there}):
        for by in (*maps.rows(question), *maps.sequences(question), *maps.heads(question)):
            text = f"{', '.join(names)}: {by.words}"
            yield _moved(text, question, names, partial(by.moved, geometry))


def _of_heads(question: Question) -> Iterator[Bug]:
    """Query heads with other key/value heads, and the lists of these or their own."""
    heads, count, group = np.arange(question.num_heads_q), question.num_heads_kv, question.group
    selections = maps.geometry(question, OF_SLOTS[0]).shape[1]
    for words, head in HEADS.items() if count > 1 else ():
        kv = head(heads, count, group)
        for of, lists in ((kv * group, "its lists too"), (heads, "its own lists")):
            see = partial(_with_heads, kv, of * selections // len(heads))
            yield Bug("gqa-head-map", f"{words}, {lists}", FIRST, see)


def _with_heads(
    kv: Ints, selections: Ints, question: Question, views: tuple[View, ...]
) -> Sequence[View]:
    lists = listed(partial(of_heads, selections, selections))
    return with_kv(kv, lists(question, views))


def _filled(question: Question) -> Iterator[Bug]:
    """Masked scores that are numbers, of keys in blocks that are walked."""
    for (words, kept), value in product(FILLED.items(), FILLS):
        see = listed(where(counted=kept, cut=lambda x: x.cut & False))
        for how in ("", "added"):
            text = f"{value:g} {how or 'in their place'}, {words}"
            steps = {"S": partial(_fill, value, how)}
            yield Bug("mask-fill", text, FIRST, see, steps)


def _fill(value: float, how: str, c: Context) -> Floats:
    view, S = c.view, np.asarray(STEPS["S"](c))
    if view.lists is None:
        return S
    key = view.keys - c.question.cu_seqlens_k[view.sequence]
    masked = (key > view.lists.bound[view.rows, 0]) & (c.question.causal | (view.slot < 0))
    return np.where(masked & (c.W > 0), value + S * (how != ""), S)


def _kept(number: Number, x: Lists) -> Ints:
    return np.where(x.is_block, number(x), x.named)


def _moved(text: str, question: Question, names: tuple[str, ...], move: Move) -> Bug:
    """These arrays by one map."""
    fields: dict[str, Number] = {}
    if "block_indices" in names:
        fields["named"] = lambda x: move(x.named).astype(np.int64)
    if "block_counts" in names:
        fields["counted"] = lambda x: x.slots < move(np.broadcast_to(x.limit, x.named.shape))
    steps: Mapping[str, Step] = {}
    if "block_scale" in names:
        steps = with_gate(move(np.asarray(question.block_scale)))
    see = listed(where(**fields)) if fields else None
    return Bug(NAME, text, tuple(STAGES), see, steps)
