"""Bugs of block-sparse attention: of its mask, its lists of blocks, and its gates.

A token's list is made of what block_indices names (``plain.entries``), each entry is a visit of
some keys, and dk and dv may go block by block, over the lists turned round (``inverted``).

Long by the table.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import Question
from tests.diagnose.hooks import STAGES_OF, Hooks, bounds, by, kernel, of_each
from tests.diagnose.plain import (
    Array,
    Head,
    Planted,
    Run,
    Visit,
    Visits,
    answers,
    entries,
    spans,
)
from tests.diagnose.problems import Needs, problems

__all__ = ["PLANTED", "answers", "problems"]
Entries = list[tuple[int, int]]  # block and slot, -1 for the own block
Lists = dict[int, list[tuple[int, int, Visit]]]  # sequence, token and visit, by block of the pack


# ---- lists of a token -------------------------------------------------------------------------


def listed(**how: bool) -> Hooks:
    return {"entries": lambda t, x: entries(t, **how)}


def stops(reason: str) -> Hooks:
    """The list ends at a negative index, at a repeat, or after so many slots as name a block."""

    def of(t: Any, right: Entries) -> Entries:
        end, whole = t.count, t.named[: t.count]
        if reason == "negative":
            end = next((slot for slot, block in enumerate(whole) if block < 0), end)
        elif reason == "number":
            end = sum(0 <= block < t.blocks for block in whole)
        else:
            valid = [0 <= block < t.blocks for block in whole]
            repeats = (s for s in range(end) if valid[s] and whole[s] in whole[:s])
            end = next(repeats, end)
        t.count, kept = end, t.count
        found = entries(t)
        t.count = kept
        return found

    return {"entries": of}


def compared_with(which: str) -> Hooks:
    """A block is a repeat where it is the one before in the list, or the first of all slots."""

    def of(t: Any, right: Entries) -> Entries:
        found: Entries = []
        for slot, block in enumerate(t.named[: t.count]):
            before = [other for other, _ in found][-1:]
            if which == "first":
                before = t.named[:1] if slot else []
            if 0 <= block < t.blocks and block not in before:
                found.append((block, slot))
        own = t.question.own and 0 <= t.own < t.blocks
        return found + [(t.own, -1)] * (own and t.own not in [block for block, _ in found])

    return {"entries": of}


def own_for_every_slot(t: Any, right: Entries) -> Entries:
    own = t.question.own and 0 <= t.own < t.blocks
    named = [(block, slot) for block, slot in right if slot >= 0]
    return named + [(t.own, -1)] * (t.count if own else 0)


def before_place(t: Any, right: Entries) -> Entries:
    return [(block, slot) for block, slot in right if block * t.question.block_size < t.place]


def sorted_by(key: Callable[[Any, int], Any]) -> Hooks:
    """Blocks in another order than their factors."""

    def of(t: Any, right: Entries) -> Entries:
        t.named, kept = sorted(t.named, key=partial(key, t)), t.named
        found = entries(t)
        t.named = kept
        return found

    return {"entries": of}


def united(tile: int, first: bool = False) -> Hooks:
    """With the blocks of all queries of a tile, or the slots of its first one."""

    def of(t: Any, lists: list[Entries]) -> list[Entries]:
        found = []
        for i, mine in enumerate(lists):
            own = (i + t.m - t.n) // t.question.block_size
            start = i // tile * tile
            slots = {block: slot for block, slot in reversed(mine)}
            if first:
                some = [(block, slot) for block, slot in lists[start] if slot >= 0]
                if t.question.own and own >= 0 and own not in [block for block, _ in some]:
                    some.append((own, -1))
            else:
                blocks = {block for other in lists[start : start + tile] for block, _ in other}
                some = [(block, slots.get(block, -1)) for block in sorted(blocks)]
            found.append(some)
        return found

    whole = {"span": lambda t, x: (*x[:2], t.question.causal)}
    return {"lists": of} | ({} if first else whole)


def seen_past(test: Callable[[Any], Any]) -> Hooks:
    """Blocks that are not cut at the query's position."""
    return {"span": lambda t, x: (*x[:2], x[2] and not test(t))}


# ---- what a visit is --------------------------------------------------------------------------


def placed(how: str) -> Hooks:
    """Keys of a block elsewhere than where they are."""

    def span(t: Any, x: tuple[int, int, bool]) -> tuple[int, int, bool]:
        (first, stop, cut), size, end = x, t.size, t.start_k + t.m
        if how == "wide":
            first = t.start_k + t.block * 2 * size
            stop = min(first + 2 * size, end)
        elif how == "double" and t.slot >= 0:
            first = t.start_k + t.block * 2 * size
            stop = min(first + size, end)
        elif how == "total" and t.slot >= 0:
            stop = min(first + size, len(t.question.k))
        return first, stop, cut

    return {"span": span}


def of_first_rows(t: Any, visits: list[Visit]) -> list[Visit]:
    back = t.start_k
    return [
        v._replace(first=v.first - back, stop=v.stop - back, last=v.last - back) for v in visits
    ]


def apart(t: Any, visits: list[Visit]) -> list[Visit]:
    """The own block only where no other visit has its keys."""
    named = [visit for visit in visits if visit.slot >= 0]
    rows = {row for visit in named for row in range(visit.first, min(visit.stop, visit.last + 1))}
    return named + [
        visit._replace(first=row, stop=row + 1)
        for visit in visits
        for row in range(visit.first, min(visit.stop, visit.last + 1))
        if visit.slot < 0 and row not in rows
    ]


def after_masked(own_first: bool) -> Hooks:
    """What was summed before a block of which no key is seen is lost."""

    def of(t: Any, visits: list[Visit]) -> list[Visit]:
        visits = sorted(visits, key=lambda visit: own_first and visit.slot >= 0)
        hidden = [i for i, visit in enumerate(visits) if visit.first > visit.last]
        return visits[hidden[-1] + 1 :] if hidden else visits

    return {"visits": of}


# ---- lists of a block -------------------------------------------------------------------------


def inverted(of: Callable[[Question, Lists, int], Lists]) -> Hooks:
    """dk and dv by changed lists of the tokens of every block."""

    def change(run: Run, visits: Visits) -> Visits:
        q, size, found = run.question, run.question.block_size, {}
        sides = spans(q)
        blocks = [-(-m // size) for _, _, _, m in sides]
        starts = [sum(blocks[:b]) for b in range(len(blocks))]
        for sel in range(q.block_indices.shape[1]):
            lists: Lists = {
                starts[b] + i: [] for b, number in enumerate(blocks) for i in range(number)
            }
            for (b, t, head), some in visits.items():
                for visit in some if head == sel else ():
                    lists.setdefault(starts[b] + visit.block, []).append((b, t, visit))
            lists = of(q, lists, sel)
            for b, number in enumerate(blocks):
                for block in range(number):
                    for own, t, visit in lists.get(starts[b] + block, []):
                        there = _at(q, visit, sides[b], block, t)
                        found.setdefault((own, t, sel), []).append(there)
        return found

    return {"inverted": change, "only": ("dk", "dv")}


def _at(q: Question, visit: Visit, side: tuple[int, int, int, int], block: int, t: int) -> Visit:
    """A visit as block ``block`` of a sequence makes it."""
    start_q, n, start_k, m = side
    own = start_q <= t < start_q + n
    if own and block == visit.block:
        return visit
    first = start_k + block * q.block_size
    stop = min(first + q.block_size, start_k + m)
    last = start_k + t - start_q + m - n if q.causal else stop - 1
    return Visit(block, visit.slot if own else -1, first, stop, last)


def each(of: Callable[[list[Any]], list[Any]]) -> Hooks:
    return inverted(lambda q, lists, sel: {place: of(some) for place, some in lists.items()})


def shifted(q: Question, lists: Lists, sel: int) -> Lists:
    """Of every third block of a sequence the list is that of the one before."""
    found, place = {}, 0
    for m in q.lengths_k:
        for i in range(-(-m // q.block_size)):
            source = lists[place - (i % 3 == 2)]
            found[place] = [(b, t, visit._replace(block=-1)) for b, t, visit in source]
            place += 1
    return found


def repeated(q: Question, lists: Lists, sel: int, room: bool = True) -> Lists:
    """A token stands in the list as often as it names the block; what there is no room for, as if
    it did not, is not read."""
    found: Lists = {}
    for place, some in lists.items():
        found[place] = []
        for b, t, visit in some:
            named = q.block_indices[t, sel].tolist()
            limit = len(named) if q.block_counts is None else int(q.block_counts[t, sel])
            again = [s for s in range(visit.slot + 1, limit) if named[s] == visit.block]
            found[place] += [(b, t, visit)] * (1 + (len(again) if visit.slot >= 0 else 0))
        found[place] = found[place] if room else found[place][: len(some)]
    return found


# ---- what is read -----------------------------------------------------------------------------


def words(run: Run, x: Array) -> Array:
    """Indices of 64 bits read as if they had 32."""
    return np.frombuffer(x.astype("<i8").tobytes(), dtype="<i4")[: x.size].reshape(x.shape)


def words_of_rows(run: Run, x: Array) -> Array:
    return np.stack([[words(run, of_head) for of_head in row] for row in x])


def first_rows(run: Run, x: Array) -> Array:
    found = x.copy()
    for start, stop in bounds("q", run.question):
        found[start:stop] = x[: stop - start]
    return found


def as_if(order: tuple[int, int, int]) -> Hooks:
    def read(run: Run, x: Array) -> Array:
        found: Array = np.ascontiguousarray(x).reshape([x.shape[a] for a in order])
        return found.transpose(np.argsort(order))

    return {"indices": read}


def padding_read(last: bool) -> Hooks:
    def of(t: Any, right: Entries) -> Entries:
        block = t.blocks - 1 if last else 0
        t.named, kept = [block if x < 0 else x for x in t.named], t.named
        found = entries(t)
        t.named = kept
        return found

    return {"entries": of}


def selection(of: Callable[[Head, int], int]) -> Hooks:
    return {"selection": of}


def kept_head(last: bool) -> Hooks:
    """The gradient of a gate holds one head of those that share it."""
    return {"dG": lambda c, x: x * (c.h % c.group == (c.group - 1 if last else 0))}


# ---- the table --------------------------------------------------------------------------------


def planted(
    bug: str, stages: str, needs: Mapping[str, Any], *variants: tuple[Any, ...], where: str = ""
) -> list[Planted]:
    """``stages``: in all of each word together. needs: of Needs, and what blocks must be like."""
    found = []
    for on in stages.split():
        own = {name: value for name, value in needs.items() if name in Needs.__dataclass_fields__}
        moved = {"moved": 0.15} if {"s", "j"} & set(on) else {}
        blocks = {name: value for name, value in needs.items() if name not in own}
        blocks = {"sliding": False} | blocks if where else blocks
        wanted = Needs(**_USUAL | moved | own, blocks=blocks)
        names = " ".join(STAGES_OF[on])
        place = {"": {"fb": "", "fbsj": ", in every stage"}.get(on, f", {names} alone")}
        for text, wrong, *also in variants:
            variant = text + place.get(where, f", {names}")
            found.append(Planted(bug, variant, STAGES_OF[on], kernel(wrong), wanted, tuple(also)))
    return found


in_lists = partial(planted, where="lists")

_USUAL: dict[str, Any] = {
    "masks": ("open",),
    "lengths": (1, 70),
    "over": 19,
    "batch": (2, 3),
    "lengths_k": ("equal", "equal", "any"),
    "groups": (1, 2),
    "heads_kv": (1, 2),
    "head_dims": (16, 24, 32),
    "past_end": 0.0,
    "least": 0.03,
}
_CAUSAL, _OWN, _GATE, _COUNTS = ({name: True} for name in ("causal", "own", "gate", "counts"))
_TWICE, _PADDED, _OPEN = {"duplicates": True}, {"padding": True}, {"causal": False}
_GROUPED = {"groups": (2, 4)}
_SHARED_GATE = _GATE | _GROUPED | {"per_head": False}
_HEADS = {"gate": False, "heads_kv": (2, 3)}
_PER_HEAD = _GROUPED | {"gate": False, "per_head": True}
_SEVERAL = {"heads_kv": (2, 3)}

_ALL, _OWN_SELECTED = (
    seen_past(lambda t: t.slot >= 0),
    seen_past(lambda t: t.slot >= 0 and t.block == t.own),
)
_MISSING = {"entries": lambda t, x: [(block, slot) for block, slot in x if slot >= 0]}
_WHOLE_OWN, _ALWAYS_WHOLE = (
    seen_past(lambda t: t.slot < 0),
    seen_past(lambda t: t.block == t.own and t.question.own),
)
_ZEROS = {"zeros": lambda t, x: max((t.block + 1) * t.size - t.m, 0) if t.slot >= 0 else 0}
_FIRST_HEAD = selection(lambda c, right: 0)
_LAST_SLOT = {"count": lambda t, x: min(x, len(t.named) - 1)}
_LAST_COUNTED = {"count": lambda t, x: max(x - 1, 0)}
_UNCOUNTED = {"count": lambda t, x: len(t.named)}
_ANY_BLOCK = listed(any_block=True, again=True)
_LONG = {"lengths": (60, 130), "batch": (1, 2), "lengths_k": ("equal",)}


def one(c: Head, G: Any) -> Any:
    return np.ones_like(G)


_NO_GATE = of_each(one, "G in S", "G in dY")
_STILL = {"tG": by(0)}
_NO_GATE_BEYOND = _NO_GATE | {"G in E": one} | _STILL
_NO_GRADIENT = of_each(by(0), "dblock_scale", "gblock_scale")
_ON_P = {
    "scores": lambda c, x: c.Y,
    "P of out": lambda c, P: P * c.G[c.here],
    "P of dv": lambda c, P: P * c.G,
    "dP": lambda c, x: x * c.G,
    "G in dY": one,
    "dG": lambda c, x: c.P * (c.dO @ c.V.T),
}
_ON_EXP = {
    "scores": lambda c, x: c.Y + np.log(c.G),
    "G in dY": one,
    "dG": lambda c, x: c.dS / c.G,
}
_SQUARED = {
    "scores": lambda c, x: c.G**2 * c.Y,
    "G in dY": lambda c, G: G**2,
    "dG": lambda c, x: 2 * c.G * c.dS * c.Y,
}


def gate_of_block(c: Head, G: Any) -> Any:
    gate = c.question.block_scale
    by_block = gate[c.rows, c.sel][:, np.clip(c.block, 0, gate.shape[2] - 1)]
    return np.where(c.slot < 0, 1.0, by_block).astype(c.run.wide)


PLANTED: tuple[Planted, ...] = (
    *planted(
        "sparse-not-causal",
        *("fb", _CAUSAL),
        ("blocks that are selected", _ALL),
        ("own block where selected", _OWN_SELECTED),
    ),
    *planted("sparse-not-causal", "b s j fbsj", _CAUSAL, ("all blocks", _ALL)),
    *planted("sparse-not-causal", "s j", _CAUSAL, ("own block where selected", _OWN_SELECTED)),
    *planted("sparse-duplicate-twice", "fb s j", _OWN, ("own block", listed(again=True))),
    *planted("sparse-duplicate-twice", "fb b s j", _TWICE, ("slots", listed(repeats=True))),
    *planted(
        *("sparse-duplicate-twice", "fb", _TWICE),
        ("slots and own block", listed(repeats=True, again=True)),
    ),
    *planted("sparse-partial-block-zeros", "fb j fbsj", _OPEN, ("zero keys", _ZEROS)),
    *planted("sparse-padding-read", "fb s j", _PADDED, ("as block 0", padding_read(False))),
    *planted("sparse-padding-read", "fb", _PADDED, ("as the last block", padding_read(True))),
    *planted("sparse-gate-gradient-missing", "b s", _GATE, ("zeros", _NO_GRADIENT)),
    *planted(
        *("sparse-gate-gradient-missing", "s", _GATE),
        ("zeros, nor does it move", _NO_GRADIENT | _STILL),
    ),
    *planted("sparse-gate-gradient-missing", "s j", _GATE, ("does not move", _STILL)),
    *planted(
        *("sparse-gate-not-summed", "b s", _SHARED_GATE),
        ("last head", kept_head(True)),
        ("first head", kept_head(False)),
    ),
    *planted(
        "sparse-gate-ignored",
        *("fb", _GATE),
        ("everywhere", _NO_GATE),
        ("everywhere, no gradient of it", _NO_GATE | _NO_GRADIENT),
    ),
    *planted(
        "sparse-gate-ignored",
        *("b", _GATE),
        ("scores and dq, dk", _NO_GATE),
        ("dq and dk", {"G in dY": one}),
    ),
    *planted(
        "sparse-gate-ignored",
        *("s j", _GATE),
        ("everywhere", _NO_GATE_BEYOND),
        ("scores", {"G in S": one}),
        ("tangent", {"G in E": one}),
    ),
    *planted(
        "sparse-gate-ignored",
        *("s", _GATE),
        ("gq and gk", {"G in dY": one}),
        ("everywhere, no gradient of it", _NO_GATE_BEYOND | _NO_GRADIENT),
    ),
    *planted("sparse-gate-ignored", "fbsj", _GATE, ("everywhere", _NO_GATE_BEYOND)),
    *planted(
        "sparse-sliding-off-by-one",
        *("f", {"sliding": True}),
        ("one key more", {"sliding": lambda run, x: (x[0] + 1, x[1])}),
        ("one key less", {"sliding": lambda run, x: (x[0] - 1, x[1])}),
    ),
    *planted("sparse-own-block-missing", "fb b s j fbsj", _OWN, ("not seen", _MISSING)),
    *planted(
        "sparse-own-block-not-causal",
        *("fb", _OWN),
        ("where not selected", _WHOLE_OWN),
        ("selected or not", _ALWAYS_WHOLE, "sparse-not-causal"),
    ),
    *planted(
        *("sparse-own-block-not-causal", "s j", _OWN),
        ("selected or not", _ALWAYS_WHOLE, "sparse-not-causal"),
    ),
    *planted("sparse-other-heads-selection", "fb s j", _HEADS, ("of the first head", _FIRST_HEAD)),
    *planted(
        *("sparse-other-heads-selection", "fb", _HEADS),
        (
            "of the next head",
            selection(lambda c, right: (right + 1) % c.question.block_indices.shape[1]),
        ),
    ),
    *planted(
        *("sparse-other-heads-selection", "fb", _HEADS | _GROUPED | {"per_head": False}),
        (
            "head modulo num_heads_kv",
            selection(lambda c, right: c.h % c.question.block_indices.shape[1]),
        ),
    ),
    *planted(
        *("sparse-other-heads-selection", "fb", _PER_HEAD),
        ("of the group's first head", selection(lambda c, right: right - right % c.group)),
    ),
    *planted("sparse-last-slot-dropped", "fb b s j", {}, ("last slot", _LAST_SLOT)),
    *planted("sparse-last-slot-dropped", "fb", _COUNTS, ("last that counts", _LAST_COUNTED)),
    *planted("sparse-counts-ignored", "fb b s j", _COUNTS, ("all slots", _UNCOUNTED)),
    *planted(
        *("direction-ignored", "sj", _GATE),
        ("of the gate", _STILL, "sparse-gate-gradient-missing"),
    ),
    # ---- lists ----
    *in_lists(
        *("sparse-list-cut", "fb", _PADDED),
        ("after so many as named", stops("number")),
    ),
    *in_lists("sparse-list-cut", "fb b", _PADDED, ("at a negative", stops("negative"))),
    *in_lists("sparse-list-cut", "fb", _TWICE, ("at a repeat", stops("repeat"))),
    *in_lists(
        *("sparse-duplicate-twice", "fb", _TWICE),
        ("compared with the last", compared_with("last")),
        ("compared with the first", compared_with("first")),
    ),
    *in_lists(
        *("sparse-duplicate-twice", "fb", _OWN),
        ("own for every slot", {"entries": own_for_every_slot}),
    ),
    *in_lists(
        *("input-layout", "fb", {}),
        ("indices as words", {"indices": words}),
        ("indices as words of rows", {"indices": words_of_rows}),
        ("indices of first rows", {"indices": first_rows}),
    ),
    *in_lists(
        *("input-layout", "fb", _SEVERAL),
        ("indices as T S H", as_if((0, 2, 1))),
        ("indices as H T S", as_if((1, 0, 2))),
    ),
    *in_lists("neighbour-leak", "fb b", _OPEN, ("end of k", placed("total"))),
    *in_lists("sparse-gate-on-p", "fb f", _GATE, ("of P", _ON_P)),
    *in_lists("sparse-gate-on-p", "fb", _GATE, ("of exp", _ON_EXP), ("twice", _SQUARED)),
    *in_lists(
        *("sparse-gate-order", "fb", _GATE),
        ("ascending", sorted_by(lambda t, block: block)),
        ("descending", sorted_by(lambda t, block: -block)),
        ("by block", {"G": gate_of_block}),
    ),
    *in_lists(
        *("sparse-gate-order", "fb", _GATE | _PADDED),
        ("packed", sorted_by(lambda t, block: not 0 <= block < t.blocks)),
    ),
    *in_lists(
        *("sparse-tile-union", "fb", {}),
        ("of 4", united(4)),
        ("of 32", united(32)),
        ("of 6", united(6)),
        ("of the first of 8", united(8, first=True)),
    ),
    *in_lists("sparse-tile-union", "b", {}, ("of 8", united(8))),
    *in_lists(
        *("sparse-masked-block-resets", "f", _CAUSAL),
        ("own first", after_masked(True)),
        ("own last", after_masked(False)),
    ),
    *in_lists(
        *("sparse-inverted-lists", "b", {}),
        ("capacity", each(lambda some: some[:9])),
        ("first query missing", each(lambda some: some[1:])),
    ),
    *in_lists(
        *("sparse-inverted-lists", "b", _TWICE),
        ("overflow", inverted(partial(repeated, room=False))),
        ("repeats", inverted(repeated)),
    ),
    *in_lists(
        *("sparse-inverted-lists", "b", _OWN),
        ("no own", each(lambda some: [entry for entry in some if entry[2].slot >= 0])),
    ),
    *in_lists(
        *("sparse-inverted-lists", "b", _CAUSAL | _OWN | _LONG),
        ("cut", each(lambda some: some[:30])),
        ("the first one twice", each(lambda some: some[:1] + some)),
        ("one further in every third", inverted(shifted)),
    ),
    *in_lists(
        "offsets-shifted", "fb", {}, ("keys of the first", _ANY_BLOCK | {"visits": of_first_rows})
    ),
    *in_lists(
        *("wrong-keys", "fb", {}),
        ("block size doubled", _ANY_BLOCK | placed("double") | {"visits": apart}),
        ("blocks of twice the size", placed("wide")),
        ("as many as of seqlen q", {"blocks": lambda t, x: -(-t.n // t.question.block_size)}),
    ),
    *in_lists("wrong-keys", "f", _CAUSAL, ("blocks of twice the size", placed("wide"))),
    *in_lists(
        *("sparse-own-block-missing", "fb", _OWN | _CAUSAL),
        ("at its first", {"entries": before_place}),
        ("of the row", {"own block": lambda t, x: t.i // t.question.block_size}),
        ("of the next query", {"own block": lambda t, x: (t.place + 1) // t.question.block_size}),
    ),
)
