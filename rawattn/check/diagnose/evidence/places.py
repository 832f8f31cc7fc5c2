"""Where queries and keys of a packed problem stand, and what may be said of a pair of them. Long by
the table of features, which are all the words that there are for sets of pairs."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice, product
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.attention import sequences, solve
from rawattn.check.diagnose.engine.lists import lists_of
from rawattn.check.diagnose.engine.question import Question
from rawattn.reference.dense import capped
from rawattn.reference.selection import ABSENT, OWN

Array = np.ndarray
Features = dict[str, Callable[[], Array]]
TILES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
SPLITS = (2, 3, 4)  # parts of a sequence
LOOPS = (8, 16, 32, 64, 128)  # tiles of queries and of keys of which a loop's bounds may be made
PACKED = (4, 8, 16, 32, 64, 128)  # queries of a tile with all heads of a group
EDGES: dict[str, Callable[[Array, int, Array], Array]] = {  # of the tile of u that a row is in
    "first": lambda row, u, count: row // u * u,
    "last": lambda row, u, count: np.minimum(row // u * u + u, count) - 1,
}
OTHERS: dict[str, Callable[[Array, int], Array]] = {  # sequences whose lengths may be taken
    "the first sequence": lambda b, last: 0 * b,
    "the sequence before": lambda b, last: np.maximum(b - 1, 0),
    "the next sequence": lambda b, last: np.minimum(b + 1, last),
}
BY_TILES = re.compile(r"j // \d+ - . // \d+")
BASIC = 8  # features, the first ones, that are tried beside those of heads
PLACE = re.compile(r"\b[ip]\b")


def of_tiles(at: str, x: Array, size: str, n: Array, t: int) -> Features:
    """What an index ``at`` in a sequence of so many has by tiles of t."""
    return {
        f"{at} // {t}": lambda: x // t,
        f"({size} - 1) // {t} - {at} // {t}": lambda: (n - 1) // t - x // t,
        f"{at} - {size} // {t} * {t}": lambda: x - n // t * t,
        f"{at} % {t}": lambda: x % t,
        f"{at} // {t} % 2": lambda: x // t % 2,
    }


class Places:
    """Pairs (total_q, total_k) of every query with every key of the pack, those of other sequences
    too; i and j count in the query's own sequence, so that j may lie before or behind it. Of a
    query, (total_q, 1): its row of q, its sequence b, i, the sequence's queries n and keys in use
    m, and the key p that it stands at. own: keys of its sequence. aligned: every sequence has as
    many keys as queries, so that p is i. selection: the head of the lists that say what is seen, if
    there are any. head: a query head that has features too, to tell all heads at once by."""

    def __init__(self, question: Question, selection: int = 0, head: int | None = None) -> None:
        q, self.question, self.selection, self.head = question, question, selection, head
        self.query = np.arange(len(q.q))[:, None]
        self.b = np.asarray(q.sequence_of("q")[self.query])
        self.i = q.place_of("q")[:, None]
        self.j = np.arange(len(q.k))[None, :] - np.asarray(q.cu_seqlens_k)[self.b]
        self.n, self.m = (np.asarray(x)[self.b] for x in (q.lengths_q, q.lengths_k))
        self.p = np.asarray(self.i + self.m - self.n)
        self.own = np.asarray((self.j >= 0) & (self.j < self.m) & (self.b >= 0))
        self.aligned = q.lengths_q == q.lengths_k
        self._made: dict[str, Array] = {}

    def of(self, head: int) -> "Places":
        """The places of a query head: those of its lists."""
        q = self.question
        heads = 1 if q.block_indices is None else q.block_indices.shape[1]
        selection = head * heads // q.num_heads_q
        return self if selection == self.selection else places_of(q, selection)

    def of_head(self, head: int) -> "Places":
        return places_of(self.question, self.of(head).selection, head)

    @cached_property
    def right(self) -> Array:
        """(total_q, total_k): which key a query must see."""
        if self.question.sparse:
            free = (self.slots != OWN) & (not self.question.causal)
            return np.asarray((self.slots != ABSENT) & (free | (self.j <= self.p)))
        (left, right), away, own = self.question.mask_window, self.j - self.p, self.own
        return np.asarray(own & ((away >= -left) | (left < 0)) & ((away <= right) | (right < 0)))

    @property
    def rights(self) -> Array:
        """(num_heads_q, total_q, total_k): the same of every query head."""
        return np.stack([self.of(head).right for head in range(self.question.num_heads_q)])

    @cached_property
    def slots(self) -> Array:
        """(total_q, total_k): the slot that names the key's block, OWN of the own one, ABSENT."""
        return np.asarray(_slots(self.question)[self.selection][self.query[:, 0]])

    @cached_property
    def gates(self) -> Array | float:
        """Factors of the scores, like ``rights``; 1 where no slot names the key's block."""
        if (scale := self.question.block_scale) is None:
            return 1.0
        found = []
        for of in map(self.of, range(self.question.num_heads_q)):
            of_rows = np.asarray(scale, np.float64)[self.query[:, 0], of.selection]
            taken = np.take_along_axis(of_rows, np.maximum(of.slots, 0), axis=1)
            found.append(np.where(of.slots >= 0, taken, 1.0))
        return np.stack(found)

    def feature(self, name: str) -> Array:
        """An integer of every pair, or of every query (total_q, 1), by what it is called, here or
        where all lengths are equal, which p is i for. Raises ValueError."""
        for known in (name, PLACE.sub("i" if self.aligned else "p", name)):
            if known in self.features:
                if known not in self._made:
                    self._made[known] = np.asarray(self.features[known]())
                return self._made[known]
            if known in self.loops:
                return self.loops[known]()  # of many, of which one is asked again
        raise ValueError(f"there is no {name} here")

    @cached_property
    def features(self) -> Features:
        """All features, the plainest first."""
        i, j, p, n, m = self.i, self.j, self.p, self.n, self.m
        sequence, query = self.question.sequence_of("k")[None], self.query
        key, of = np.arange(j.shape[1])[None], "i" if self.aligned else "p"
        said = [f"j - {of}", "j", "seqlen_k - 1 - j", "i", "seqlen_q - 1 - i"]
        if not self.aligned:
            difference = "(the longest seqlen_k - the longest seqlen_q)"
            said = ["j - the longest seqlen_q", f"j - i - {difference}", *said, "j - i", "p"]
            said += ["j - i + (seqlen_k - seqlen_q)", "j - seqlen_q", "i - seqlen_k"]
        found = self._computed(*said, "seqlen_k", "seqlen_q")
        found["the sequence"] = lambda: self.b
        found["the key's sequence - the query's"] = lambda: sequence - self.b
        for t in TILES:
            found |= self._computed(f"j // {t} - {of} // {t}")
            found |= of_tiles("j", j, "seqlen_k", m, t) | of_tiles("i", i, "seqlen_q", n, t)
            found |= self._computed(f"(j - {of}) % {t}", f"(j - {of} // {t} * {t})")
            behind = partial(lambda t: j - p + i - EDGES["last"](i, t, n), t)
            found[f"(j - {of} of the last row of its tile of {t})"] = behind
            found |= self._computed(f"(j // {t} * {t} - {of})")
        found["the row of the query in q"] = lambda: query
        found |= self._computed("j - the longest seqlen_k")
        row = "the row in k - the query's first row in q"
        found |= {row: lambda: key - query + i, f"{row} - {of}": lambda: key - query + i - p}
        for parts in SPLITS:
            size, whole = f"ceil(seqlen_k / {parts})", f"j - seqlen_k // {parts} * {parts}"
            found |= self._computed(f"j // {size}", f"j % {size}", whole)
            found |= self._computed(f"i // ceil(seqlen_q / {parts})")
        if self.question.sparse:
            found = self._of_lists() | found | self._of_inverted()
        if self.question.group > 1:
            found[f"j - {self.question.group} i"] = lambda: j - self.question.group * i
        return found if self.head is None else self._of_heads(self.head) | found

    @cached_property
    def loops(self) -> Features:
        """Bounds of loops over tiles of keys, as the first and the last row of a tile of queries
        have them, and of loops over tiles of queries as keys have them: tiles a pair is behind."""
        own = "i" if self.aligned else "p"
        (left, right), shift = self.question.mask_window, self.m - self.n
        sides = {"": 0, "window_left": -max(left, 0), "window_right": max(right, 0)}
        sides = {words: by for words, by in sides.items() if by or not words}
        found, behind = Features(), lambda x, row, shift, t: x // t - (row() + shift) // t
        for at, of, x, y, count, by in (
            ("j", {"i": 0 * shift, own: shift}, self.j, self.i, self.n, 1),
            ("i", {"j": 0 * shift, f"j - {own} + i": -shift}, self.i, self.j, self.m, -1),
        ):
            for u, t in product((2, 4, *LOOPS), (4, *LOOPS)):
                for edge, (words, start), (side, wide) in product(EDGES, of.items(), sides.items()):
                    more = f" {'+' if by * wide > 0 else '-'} {side}" if side else ""
                    name = f"{at} // {t} - ({words} of the {edge} row of its tile of {u}{more})"
                    row, moved = partial(EDGES[edge], y, u, count), start + by * wide
                    found[f"{name} // {t}"] = partial(behind, x, row, moved, t)
        q = self.question
        both = ("j - seqlen_k", self.j, q.lengths_k), ("i - seqlen_q", self.i, q.lengths_q)
        for (name, x, lengths), (words, of) in product(both, OTHERS.items()):
            stop = np.asarray(lengths)[of(self.b, len(lengths) - 1)]
            for t in (1, *LOOPS):
                whole = f", in whole tiles of {t}" * (t > 1)
                found[f"{name} of {words}{whole}"] = partial(np.subtract, x, -(-stop // t) * t)
        kinds = ("{}", "ceil({} / {t}) * {t}", "{} // {t} * {t}")
        names: list[str] = []
        for t in LOOPS:
            sizes = [[kind.format(x, t=t) for kind in kinds] for x in ("seqlen_k", "seqlen_q")]
            names += [f"j - i - {m} + {n}" for m, n in [*product(*sizes)][1:]]
            names += [f"{q.group} * i // {t} - ceil(seqlen_q / {t})"] * (q.group > 1)
        for parts, t in product(SPLITS, LOOPS):
            each = f"ceil(seqlen_k / {t}) // {parts}"
            names.append(f"j // {t} // ceil(seqlen_k / {parts * t})")
            names += [f"j // {t} - {count} * {parts}" for count in (each, f"max(1, {each})")]
        found |= self._computed(*names)
        return found

    def _computed(self, *names: str) -> Features:
        """Features whose names are formulas of indices and lengths; ceil gives 1 at least."""
        sizes = {"seqlen_q": self.question.lengths_q, "seqlen_k": self.question.lengths_k}
        known: dict[str, Any] = {f"longest_{x}": max(of, default=0) for x, of in sizes.items()}
        known |= {"i": self.i, "j": self.j, "p": self.p, "seqlen_q": self.n, "seqlen_k": self.m}
        known |= {"max": np.maximum, "ceil": lambda x: np.maximum(np.ceil(x), 1).astype(int)}
        return {n: partial(eval, n.replace("the longest ", "longest_"), known) for n in names}

    def _of_heads(self, h: int) -> Features:
        """What hangs on the query head h: rows packed with those of the other heads of a group."""
        i, j, n, g = self.i, self.j, self.n, self.question.group
        packed, row = f"(packed row {g} i + h % {g})", g * i + h % g
        rows = {packed: row, f"{packed} % seqlen_q": row % np.maximum(n, 1)}
        for t in (t for t in PACKED if t < max(self.question.lengths_q)):
            first, count = i // t * t, np.maximum(np.minimum(t, n - i // t * t), 1)
            name = f"{packed} of its tile of {t}, modulo its queries"
            rows[name] = first + (row - g * first) % count
        found: Features = {"h": lambda: h + 0 * i, f"h % {g}": lambda: h % g + 0 * i}
        for t in PACKED:
            found[f"{packed} // {t} - ceil(seqlen_q / {t})"] = partial(np.add, row // t, -n // t)
        for name, at in rows.items():
            found[f"j - {name}"] = partial(np.subtract, j, at)
            found[f"j - {name} - seqlen_k + seqlen_q"] = partial(np.subtract, j - self.m + n, at)
        return found

    @property
    def by_head(self) -> list[str]:
        """Features by which all heads may be told at once: those of heads, and plain ones."""
        of_tiles = [name for name in self.features if BY_TILES.fullmatch(name)]
        return [*self._of_heads(0), *islice(self.features, BASIC), *of_tiles]

    def _of_lists(self) -> Features:
        lists, j, size = lists_of(self.question), self.j, self.question.block_size
        of = lists.named, lists.is_block, lists.counted
        named, inside, counted = (x[:, self.selection] for x in of)
        count, held = counted.sum(axis=1, keepdims=True), inside & counted
        block, slots, past = j // size, self.slots, j >= self.m

        def times(there: Array, at: Array = self.own) -> Array:
            found = (named[..., None] == block[:, None]) & there[..., None]
            return np.asarray(found.sum(axis=1) * at)

        return {
            "the slot of the key's block": lambda: slots,
            "slots that count behind it": lambda: np.where(slots >= 0, count - 1 - slots, -1),
            "times the key's block is named": lambda: times(held),
            "times it is named, in slots that do not count": lambda: times(inside & ~held),
            "times its block, counted on past the end, is named": lambda: times(counted, past),
            "negative slots of the query": lambda: (named < 0).sum(axis=1)[:, None],
            "the key's block - the query's": lambda: block - self.p // size,
            "the key's block": lambda: block,
        }

    def _of_inverted(self) -> Features:
        """Of the lists of queries that walk a block: the query's place in that of the key's."""
        walked = self.slots != ABSENT
        place = np.where(walked, np.cumsum(walked, axis=0) - 1, -1)
        count, at, size = walked.sum(axis=0), "its block's list of queries", "its length"
        found: Features = {f"the place in {at}": lambda: place}
        for t in LOOPS[:3]:
            found |= of_tiles(f"the place in {at}", place, size, count, t)
        return found


@lru_cache(maxsize=8)
def places_of(question: Question, selection: int = 0, head: int | None = None) -> Places:
    return Places(question, selection, head)


@dataclass(frozen=True, eq=False)
class Right:
    """What a right computation has of ``places``: scores S of all pairs, (num_heads_q, total_q,
    total_k), lse (num_heads_q, total_q), out like ``Question.out``."""

    places: Places

    @cached_property
    def S(self) -> Array:
        q = self.places.question
        keys = q.k.astype(np.float64).transpose(1, 2, 0).repeat(q.group, axis=0)
        Y = q.scale * (q.q.astype(np.float64).swapaxes(0, 1) @ keys)
        return np.asarray(self.places.gates * capped(np, Y, q.softcap, lambda x: x)[0])

    @cached_property
    def lse(self) -> Array:
        return solve(self.places.question, "forward")["lse"]

    @cached_property
    def out(self) -> Array:
        return solve(self.places.question, "forward")["out"]


@lru_cache(maxsize=8)
def _slots(q: Question) -> Array:
    """(num_heads_sel, total_q, total_k)."""
    heads, width = np.asarray(q.block_indices).shape[1:]
    found, lists = np.full((heads, len(q.q), len(q.k)), ABSENT), lists_of(q)
    for b, rows, keys in sequences(q):
        _, entry, _ = lists.keys(b, np.arange(heads))
        behind = q.causal & (np.arange(len(keys)) // q.block_size > lists.own_block[rows, 0])
        slot = np.where((entry < 0) | behind, ABSENT, np.where(entry == width, OWN, entry))
        found[:, rows[:, None], keys] = slot
    return found


def log_sum(x: Array) -> Array:
    """The logarithm of the sum of exp over the last axis; -inf of nothing."""
    return np.asarray(np.logaddexp.reduce(x, axis=-1))
