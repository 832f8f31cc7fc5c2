"""Bugs of block-sparse attention: of its mask, its lists of blocks, and its gates.

A token's list is made of what block_indices names (``plain.entries``), each entry is a visit of
some keys, and dk and dv may go block by block, over the lists turned round (``inverted``).

Long by the table.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.diagnose.hooks import by, of_each
from tests.diagnose.plain import Array, Head, Run, Visit, Visits, answers, entries
from tests.diagnose.problems import problems
from tests.diagnose.table import FEW, Hooks, Table, plants, stages_of

__all__ = ["PLANTED", "answers", "problems"]
Entries = list[tuple[int, int]]  # block and slot, -1 for the own block


# ---- lists of a token -------------------------------------------------------------------------


def listed(**how: Any) -> Hooks:
    return {"entries": lambda t, x: entries(t, **how)}


def entries_with(t: Any, **others: Any) -> Any:
    return entries(SimpleNamespace(**vars(t) | others))


def until(test: Callable[[Any, int], Any]) -> Hooks:
    """The list ends at the first slot of which ``test`` is true."""

    def of(t: Any, right: Entries) -> Entries:
        return entries_with(t, count=next((s for s in range(t.count) if test(t, s)), t.count))

    return {"entries": of}


def sorted_by(key: Callable[[Any, int], Any]) -> Hooks:
    """Blocks in another order than their factors."""
    return {"entries": lambda t, x: entries_with(t, named=sorted(t.named, key=partial(key, t)))}


def full(t: Any, block: int) -> int:
    """-1 for a block that is not."""
    return block if (block + 1) * t.question.block_size <= t.m else -1


def united(tile: int) -> Hooks:
    """With the blocks of all queries of a tile."""

    def of(run: Run, lists: list[Entries]) -> list[Entries]:
        found = []
        for i, mine in enumerate(lists):
            start, slots = i // tile * tile, {block: slot for block, slot in reversed(mine)}
            blocks = {block for other in lists[start : start + tile] for block, _ in other}
            found.append([(block, slots.get(block, -1)) for block in sorted(blocks)])
        return found

    return {"lists": of, "span": lambda t, x: (*x[:2], t.question.causal)}


def seen_past(test: Callable[[Any], Any]) -> Hooks:
    """Blocks that are not cut at the query's position."""
    return {"span": lambda t, x: (*x[:2], x[2] and not test(t))}


# ---- what a visit is --------------------------------------------------------------------------


def wide(t: Any, x: tuple[int, int, bool]) -> tuple[int, int, bool]:
    """Blocks of twice the size, and so elsewhere."""
    first = t.start_k + t.block * 2 * t.size
    return first, min(first + 2 * t.size, t.start_k + t.m), x[2]


def past_end(t: Any, x: tuple[int, int, bool]) -> tuple[int, int, bool]:
    """Up to the end of k."""
    return x[0], min(x[0] + t.size, len(t.question.k)) if t.slot >= 0 else x[1], x[2]


def on_grid(t: Any, x: tuple[int, int, bool]) -> tuple[int, int, bool]:
    first = x[0] - t.start_k % t.size
    return max(first, t.start_k), min(first + t.size, t.start_k + t.m), x[2]


def of_first_rows(t: Any, visits: list[Visit]) -> list[Visit]:
    at = t.start_k
    return [v._replace(first=v.first - at, stop=v.stop - at, last=v.last - at) for v in visits]


# ---- lists of a block -------------------------------------------------------------------------


def inverted(of: Callable[[list[tuple[int, Visit]]], Any]) -> Hooks:
    """dk and dv by other lists of the tokens of every block."""

    def change(run: Run, visits: Visits) -> Visits:
        lists: dict[Any, list[tuple[int, Visit]]] = {}
        for (b, t, sel), some in visits.items():
            for visit in some:
                lists.setdefault((b, sel, visit.block), []).append((t, visit))
        found: Visits = {}
        for (b, sel, _), of_block in lists.items():
            for t, visit in of(of_block):
                found.setdefault((b, t, sel), []).append(visit)
        return found

    return {"inverted": change, "only": ("dk", "dv")}


# ---- what is read -----------------------------------------------------------------------------


def misread(of: Callable[..., Array]) -> Hooks:
    """block_indices as ``of`` has them, a function of the array, a name and the question."""
    return {"indices": lambda run, x: of(x, "", run.question)}


def from_first_key(t: Any, right: int) -> int:
    t.place = t.i
    return int(t.i // t.question.block_size)


# ---- block by block ---------------------------------------------------------------------------


def turns(c: Head) -> Any:
    """Of every copy of a key the turn of its slot in its query's walk, the own block last."""
    order = np.where(c.slot < 0, c.question.block_indices.shape[2], c.slot)
    there = np.zeros((c.n, order.max(initial=0) + 1), dtype=int)
    np.maximum.at(there.T, order, (c.seen > 0).T)
    return np.where(c.seen > 0, (np.cumsum(there, axis=1) - 1)[:, order], -1)


def added_up(c: Head, x: tuple[Array, Array]) -> tuple[Array, Array]:
    """out of sums of which the row sum alone is rescaled."""
    turn, top, out = turns(c), np.full((c.n, 1), -np.inf), 0
    for here in range(turn.max(initial=-1) + 1):
        S = np.where(turn == here, c.S, -np.inf)
        top = np.maximum(top, S.max(axis=1, keepdims=True))
        out = out + np.exp(S - np.where(np.isneginf(top), 0, top)) @ c.V
    return x[0], np.where(np.isneginf(x[0]), 0, out * np.exp(top - x[0])).astype(c.run.wide)


def merged(c: Head, x: tuple[Array, Array]) -> tuple[Array, Array]:
    """out of two halves of the slots, weighted by 2^lse."""
    count = c.question.block_indices.shape[2] + 1
    late, top = np.where(c.slot < 0, count - 1, c.slot) >= count // 2, np.maximum(x[0], -1e30)
    S = [np.where(here & (c.seen > 0), c.S, -np.inf) - top for here in (~late, late)]
    sums = [np.exp(s).sum(axis=1, keepdims=True) for s in S]
    outs = [np.exp(s) @ c.V / np.where(n, n, 1) for s, n in zip(S, sums, strict=True)]
    shares = [n ** np.log(2) for n in sums]
    out = shares[0] * outs[0] + shares[1] * outs[1]
    return x[0], (out / np.maximum(shares[0] + shares[1], 1e-30)).astype(c.run.wide)


# ---- the table --------------------------------------------------------------------------------

_USUAL: dict[str, Any] = FEW | {"masks": ("open",), "lengths": (1, 70), "over": 19, "blocks": {}}
_USUAL |= {"lengths_k": ("equal", "equal", "any")}
_CAUSAL, _OWN, _GATE, _COUNTS = ({name: True} for name in ("causal", "own", "gate", "counts"))
_TWICE, _PADDED, _OPEN = {"duplicates": True}, {"padding": True}, {"causal": False}
_OF_GATES = ("ignored", "gradient-missing", "on-p", "order")
_GROUPED = {"groups": (2, 4)}
_HEADS = {"gate": False, "heads_kv": (2, 3)}
_SHARED = _HEADS | _GROUPED | {"per_head": False}
_PER_HEAD = _GROUPED | {"gate": False, "per_head": True}
_OTHER_KEYS = _OWN | {"lengths_k": ("any",)}

_ALL = seen_past(lambda t: t.slot >= 0)
_OWN_SELECTED = seen_past(lambda t: t.slot >= 0 and t.block == t.own)
_HIDDEN: Any = lambda c: (c.j > c.p) & (c.question.causal | (c.slot < 0))  # noqa: E731
_FILLED = {"span": lambda t, x: (*x[:2], False), "scores": lambda c, x: np.where(_HIDDEN(c), 0, x)}
_AS_MANY = until(lambda t, s: s >= sum(0 <= b < t.blocks for b in t.named[: t.count]))
_UNTIL_REPEAT = until(lambda t, s: 0 <= t.named[s] < t.blocks and t.named[s] in t.named[:s])
_AS_BLOCK_0 = {"entries": lambda t, x: entries_with(t, named=[max(b, 0) for b in t.named])}
_UNTIL_NONE = until(lambda t, s: not 0 <= t.named[s] < t.blocks)
_TO_OWN = {
    "entries": lambda t, x: entries_with(t, named=[b if b <= t.own else -1 for b in t.named])
}
_TO_LAST = {"entries": lambda t, x: entries_with(t, named=[min(b, t.blocks - 1) for b in t.named])}
_FULL = {"entries": lambda t, x: entries_with(t, named=[full(t, b) for b in t.named])}
_LAST_HEAD = {"dG": lambda c, x: x * (c.h % c.group == c.group - 1)}  # of those that share a gate
_NO_OWN = inverted(lambda some: [entry for entry in some if entry[1].slot >= 0])
_SPARE_8 = inverted(lambda some: some + some[-1:] * (-len(some) % 8))
_LAST_8 = inverted(lambda some: some[(len(some) - 1) // 8 * 8 :])
_MISSING = {"entries": lambda t, x: [(block, slot) for block, slot in x if slot >= 0]}
_WHOLE_OWN = seen_past(lambda t: t.slot < 0)
_ALWAYS_WHOLE = seen_past(lambda t: t.block == t.own and t.question.own)
_ZEROS = {"zeros": lambda t, x: max((t.block + 1) * t.size - t.m, 0) if t.slot >= 0 else 0}
_BEFORE_PLACE = {"entries": lambda t, x: [e for e in x if e[0] * t.question.block_size < t.place]}
_FIRST_HEAD = {"selection": lambda c, right: 0}
_NEXT_HEAD = {"selection": lambda c, right: (right + 1) % c.question.block_indices.shape[1]}
_MODULO = {"selection": lambda c, right: c.h % c.question.block_indices.shape[1]}
_OF_FIRST = {"selection": lambda c, right: right - right % c.group}
_BLOCKS_OF_Q = {"blocks": lambda t, x: -(-t.n // t.question.block_size)}
_OWN_OF_ROW = {"own block": lambda t, x: t.i // t.question.block_size}
_OWN_OF_TILE = {"own block": lambda t, x: (t.place - t.i % 32) // t.question.block_size}
_OWN_AND_MASK = {"own block": from_first_key}
_DOUT_OF_FIRST = {"dO": lambda c, x: c.run.arrays["dout"][c.i[:, 0], c.h], "only": ("dk", "dv")}
_LSE_OF_FIRST = {"L": lambda c, x: c.row("lse", c.h - c.h % c.group)}
_OWN_OF_NEXT = {"own block": lambda t, x: (t.place + 1) // t.question.block_size}
_PACKED = sorted_by(lambda t, block: not 0 <= block < t.blocks)
_FRONT = {"dblock_scale": lambda run, x: np.take_along_axis(x, np.argsort(x == 0, 2, "stable"), 2)}
_LAST_SLOT = {"count": lambda t, x: min(x, len(t.named) - 1)}
_LAST_COUNTED = {"count": lambda t, x: max(x - 1, 0)}
_LONG = _CAUSAL | _OWN | {"lengths": (60, 130), "batch": (1, 2), "lengths_k": ("equal",)}


def one(c: Head, G: Any) -> Any:
    return np.ones_like(G)


_NO_GATE = of_each(one, "G in S", "G in dY")
_STILL = {"tG": by(0)}
_NO_GATE_BEYOND = _NO_GATE | {"G in E": one} | _STILL
_ON_P = {
    "scores": lambda c, x: c.Y,
    "P of out": lambda c, P: P * c.G[c.here],
    "P of dv": lambda c, P: P * c.G,
    "dP": lambda c, x: x * c.G,
    "G in dY": one,
    "dG": lambda c, x: c.P * (c.dO @ c.V.T),
}


def gate_but_of_own(c: Head, G: Any) -> Any:
    own = c.j[0] // c.question.block_size == c.p // c.question.block_size
    return np.where(own, 1.0, G).astype(c.run.wide)


def gate_of_last(c: Head, G: Any) -> Any:
    last = c.question.block_scale[c.rows, c.sel][:, -1:]
    return np.where(c.slot < 0, last, G).astype(c.run.wide)


_NEEDS = {
    "sparse-own-block-missing": _OWN,
    **dict.fromkeys((f"sparse-gate-{x}" for x in _OF_GATES), _GATE),
    "sparse-gate-not-summed": _GATE | _GROUPED | {"per_head": False},
    "sparse-padding-read": _PADDED,
    "sparse-counts-ignored": _COUNTS,
    "padded-keys": _OPEN,
    "window-off-by-one": {"sliding": True},
}
_TABLE: Table = (
    ("sparse-not-causal: blocks that are selected", "fb", _ALL, _CAUSAL),
    ("sparse-not-causal: own block where selected", "fb", _OWN_SELECTED, _CAUSAL),
    ("sparse-not-causal: all blocks", "b s j fbsj", _ALL, _CAUSAL),
    ("sparse-duplicate-twice: own block", "fb s j", listed(again=True), _OWN),
    ("sparse-duplicate-twice: slots", "fb b s j", listed(within=0), _TWICE),
    ("padded-keys: in the last block, zero keys", "fb j fbsj", _ZEROS),
    ("sparse-padding-read: as block 0", "fb s j", _AS_BLOCK_0),
    ("sparse-gate-gradient-missing: zeros", "b s", of_each(by(0), "dblock_scale", "gblock_scale")),
    ("sparse-gate-not-summed: last head", "b s", _LAST_HEAD),
    ("sparse-gate-ignored: everywhere", "fb", _NO_GATE),
    ("sparse-gate-ignored: scores and dq, dk", "b", _NO_GATE),
    ("sparse-gate-ignored: dq and dk", "b", {"G in dY": one}),
    ("sparse-gate-ignored: everywhere", "s j", _NO_GATE_BEYOND),
    ("sparse-gate-ignored: scores", "s j", {"G in S": one}),
    ("sparse-gate-ignored: tangent", "s j", {"G in E": one}),
    ("sparse-gate-ignored: gq and gk", "s", {"G in dY": one}),
    ("sparse-gate-ignored: everywhere", "fbsj", _NO_GATE_BEYOND),
    ("window-off-by-one: one key more", "f", {"sliding": lambda run, x: (x[0] + 1, x[1])}),
    ("sparse-own-block-missing: not seen", "fb b s j fbsj", _MISSING),
    ("sparse-not-causal: own block where not selected", "fb", _WHOLE_OWN, _OWN),
    ("sparse-not-causal: own block, selected or not", "fb s j", _ALWAYS_WHOLE, _OWN),
    ("sparse-other-heads-selection: of the first head", "fb s j", _FIRST_HEAD, _HEADS),
    ("sparse-other-heads-selection: of the next head", "fb", _NEXT_HEAD, _HEADS),
    ("sparse-other-heads-selection: head modulo num_heads_kv", "fb", _MODULO, _SHARED),
    ("sparse-other-heads-selection: of the group's first head", "fb", _OF_FIRST, _PER_HEAD),
    ("sparse-list-cut: last slot", "fb b s j", _LAST_SLOT),
    ("sparse-list-cut: last that counts", "fb", _LAST_COUNTED, _COUNTS),
    ("sparse-counts-ignored: all slots", "fb b s j", {"count": lambda t, x: len(t.named)}),
    ("direction-ignored: of the gate", "s j sj", _STILL, _GATE),
)
# of lists, whose sliding branch is off
_LISTS: Table = (
    ("sparse-list-cut: after so many as named", "fb", _AS_MANY, _PADDED),
    ("sparse-list-cut: at a negative", "fb b", until(lambda t, s: t.named[s] < 0), _PADDED),
    ("sparse-list-cut: at a repeat", "fb", _UNTIL_REPEAT, _TWICE),
    ("neighbour-leak: end of k", "fb b", {"span": past_end}, _OPEN),
    ("sparse-gate-on-p: of P", "fb f", _ON_P),
    ("sparse-padding-read: past the end as the last", "fb", _TO_LAST, _PADDED),
    ("sparse-list-cut: a block that is not full", "fb", _FULL),
    ("sparse-gate-order: of the last slot for the own block", "f", {"G": gate_of_last}, _OWN),
    ("partial-merge: halves of the slots by 2^lse", "f", {"softmax": merged}),
    ("sparse-gate-order: ascending", "fb", sorted_by(lambda t, block: block)),
    ("sparse-gate-order: none for the own block", "f", {"G": gate_but_of_own}, _OWN),
    ("sparse-gate-order: packed", "fb", _PACKED, _PADDED),
    ("sparse-tile-union: of 4", "fb", united(4)),
    ("sparse-tile-union: of 8", "b", united(8)),
    ("sparse-queries-lost: capacity", "b", inverted(lambda some: some[:9])),
    ("sparse-inverted-lists or sparse-own-block-missing: no own", "b", _NO_OWN, _OWN),
    ("offsets-shifted: keys of the first", "f", {"visits": of_first_rows}),
    ("wrong-keys: blocks of twice the size", "fb", {"span": wide}),
    ("wrong-keys: as many as of seqlen q", "fb", _BLOCKS_OF_Q),
    ("sparse-own-block-missing or wrong-keys: at its first", "fb", _BEFORE_PLACE, _CAUSAL),
    ("sparse-other-place: of the row", "fb", _OWN_OF_ROW, _CAUSAL),
    ("sparse-other-place: of the next query", "fb", _OWN_OF_NEXT, _CAUSAL),
    ("sparse-other-place: own block and mask of the row", "fb b", _OWN_AND_MASK, _OTHER_KEYS),
    ("sparse-other-place: own block of 32 queries", "fb", _OWN_OF_TILE, _OWN),
    ("sparse-lists-misread: blocks of all packed keys", "fb", {"span": on_grid}, _OPEN),
    ("sparse-gate-order: of the gradient, packed", "b", _FRONT, _PADDED),
    ("sparse-lists-misread: counted from 1", "fb f", misread(lambda x, *_: x - 1)),
    ("no-rescale: block by block", "f", {"softmax": added_up}),
    ("sparse-list-cut: at what is no block", "fb b", _UNTIL_NONE, _PADDED),
    ("sparse-list-cut: behind the own block", "fb", _TO_OWN, _OWN),
    ("tile-overwrites: the last 8 queries", "b", _LAST_8),
    ("sparse-spare-lanes: of 8 queries", "b", _SPARE_8, _OPEN),
    ("mask-fill: 0", "f", _FILLED),
    ("input-layout or offsets-shifted: dout of first rows, dk and dv", "b", _DOUT_OF_FIRST),
    ("statistics-misplaced: lse of the first head", "b", _LSE_OF_FIRST, _GROUPED),
)


def _usual(on: str) -> dict[str, Any]:
    return _USUAL | ({"moved": 0.15} if {"s", "j"} & set(on) else {})


def _staged(words: str, on: str) -> str:
    return f"{words}, {' '.join(stages_of(on))}"


def _named(words: str, on: str) -> str:
    return words + {"fb": "", "fbsj": ", in every stage"}.get(on, f"{_staged('', on)} alone")


PLANTED = (
    *plants(_TABLE, _usual, _NEEDS, named=_named),
    *plants(_LISTS, lambda on: _usual(on) | {"blocks": {"sliding": False}}, _NEEDS, named=_staged),
)
