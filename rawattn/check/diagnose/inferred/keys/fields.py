"""How often every query sees every key, as one tensor tells it: read, and named."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rawattn.check.diagnose.catalogue.masks import Window, unmasked, windows
from rawattn.check.diagnose.engine.attention import Floats, See, View
from rawattn.check.diagnose.engine.effort import over, spent
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.structure import named
from rawattn.check.diagnose.evidence.support import (
    AGAIN,
    LESS,
    MORE,
    OTHER,
    Support,
    in_rules,
    seen_as,
)
from rawattn.check.diagnose.inferred.keys.counts import solved
from rawattn.check.diagnose.inferred.keys.systems import Equations, Ints

FEW, MANY = 24, 240  # places of the first look, and of the second one
MISSING = 0.1  # of all places, at most, without counts
HEADS = 4  # that are looked at where all share a mask
FOR_READING = 3000.0  # units of effort
MOST = 4_000_000  # pairs of a query and a row of k, of all heads
FEWEST = 0.05  # share of the wrong pairs that is no noise
TOLD = 3  # rows that are told of where no rule is found
PADDING = {"to the longest sequence": 0, **{f"to tiles of {t}": t for t in (8, 16, 32, 64, 128)}}
BACKWARD_ONLY = "mask-missing-in-backward"


@dataclass(frozen=True, eq=False)
class Field:
    """counts (num_heads_q, total_q, total_k), zeros (num_heads_q, total_q): how often a query sees
    a row of k, and rows of zeros. told, sure: pairs (as counts) that were read, and for certain.
    """

    question: Question
    counts: Floats
    zeros: Floats
    sure: np.ndarray
    told: np.ndarray

    @cached_property
    def places(self) -> Places:
        return Places(self.question)

    @cached_property
    def wrong(self) -> np.ndarray:
        """(num_heads_q, total_q)"""
        off = (self.counts != self.places.right) & self.sure
        return np.asarray(off.any(axis=2) | (self.zeros > 0))

    @cached_property
    def support(self) -> Support:
        """The counts in rules."""
        return in_rules(self.places, self.counts, self.sure)

    @cached_property
    def by_rule(self) -> bool:
        """Whether rules say all that is told."""
        return self.support.named and bool(
            (self.support.at(self.places) == self.counts)[self.told].all()
        )

    @property
    def as_read(self) -> "Field":
        """The same without rules."""
        found = replace(self)
        parts = tuple(replace(part, rule=None) for part in self.support.parts)
        found.__dict__["support"] = Support(self.places, self.counts, parts)
        return found

    def at(self, places: Places) -> Floats:
        """(num_heads_q, total_q, total_k)"""
        return np.asarray(self.support.at(places), dtype=np.float64)

    @property
    def see(self) -> See:
        """The same as a change of views."""
        see = seen_as(self.at)
        return _with_zeros(see, self._padding[1]) if self.zeros.any() else see

    @cached_property
    def _padding(self) -> tuple[str, Floats]:
        """How many rows of zeros each query sees, in words too; (num_heads_q, total_q)."""
        m, longest = self.places.m[:, 0], max(self.question.lengths_k)
        often = float(np.median(self.zeros[self.told.any(axis=2)]))
        ways = {f"{int(often)} rows of zeros": np.full(len(m), often)}
        for text, tile in PADDING.items():
            ways[f"rows of zeros {text}"] = -m % tile if tile else longest - m
        for text, many in ways.items():
            same = (many == self.zeros)[self.told.any(axis=2)]
            if same.mean() > 1 - FEWEST:
                return text, np.broadcast_to(many, self.zeros.shape).astype(np.float64)
        return "rows of zeros", self.zeros

    # ---- in words -----------------------------------------------------------------------------

    def named(self, backward: bool) -> tuple[str, str]:
        """The class, and which keys, in words."""
        for name, words, window in self._windows(backward):
            if self._is(window):
                return name, words
        words = "; ".join(part.text(self.question.num_heads_q, "") for part in self.support.parts)
        words = words if self.support.named else f"keys by row: {self._by_row()}"
        if self.zeros.any():
            words = "; ".join(filter(None, (f"{self._padding[0]} are seen", words)))
        return self._class(backward), words

    def _windows(self, backward: bool) -> Iterator[tuple[str, str, Window]]:
        if backward:
            for words, window in unmasked(self.question):
                yield BACKWARD_ONLY, words, window
        yield from windows(self.question)

    def _is(self, window: Window) -> bool:
        """Whether it is that window in all heads that are wrong."""
        x = self.places
        due = window.holds(x.j - x.p, x.j - x.i) & x.own
        heads = self.wrong.any(axis=1)
        same = (self.counts == due) | ~self.sure
        return bool(not self.zeros.any() and same[heads].all())

    def _class(self, backward: bool) -> str:
        kinds = self._kinds()
        if self.zeros.any():
            return "wrong-keys" if kinds else "padded-keys"
        if kinds == {OTHER}:
            return "neighbour-leak"
        if backward and kinds == {LESS}:
            return "pairs-dropped"
        rules = [part.rule for part in self.support.parts]
        spans = [span for rule in rules if rule is not None for span in rule.spans]
        tiled = any("//" in span.feature for span in spans)
        by_distance = spans and all(span.feature in ("j - i", "j - p") for span in spans)
        if backward and kinds == {MORE} and not (self.support.named and by_distance):
            return BACKWARD_ONLY
        one = len(spans) == 1 and spans[0].low == spans[0].high and "ceil" not in str(spans[0])
        if tiled and one and spans[0].feature.startswith(("j //", "(seqlen_k - 1) //")):
            kind = kinds.pop() if len(kinds) == 1 else ""
            return {LESS: "tile-skipped", AGAIN: "tile-counted-twice"}.get(kind, "wrong-keys")
        return "wrong-keys"

    def _kinds(self) -> set[str]:
        """In which ways pairs are wrong; where no rule is found but for a few, which are noise."""
        count = {
            part.kind: int(self.support.inside(part.kind)[list(part.heads)].sum())
            for part in self.support.parts
        }
        least = 0 if self.support.named else FEWEST * sum(count.values())
        return {kind for kind, pairs in count.items() if pairs > least}

    def _by_row(self) -> str:
        found = []
        x = self.places
        heads = self.question.num_heads_q
        rows = np.flatnonzero(self.wrong.any(axis=0))
        for row in rows[np.unique(np.linspace(0, len(rows) - 1, TOLD).astype(int))]:
            head = int(self.wrong[:, row].argmax())
            j = x.j[row][self.counts[head, row] > 0]
            again = x.j[row][self.counts[head, row] > 1]
            twice = f" ({named('', again)} more than once)" if len(again) else ""
            who = f"row {x.i[row, 0]} of sequence {x.b[row, 0]}"
            who += (
                f", head {head}," if heads > 1 and np.ptp(self.counts[:, row], axis=0).any() else ""
            )
            found.append(f"{who} sees {named('key', j) if len(j) else 'no key'}{twice}")
        return ", ".join(found)


def _with_zeros(see: See, count: Floats) -> See:
    """Views with as many rows of zeros, ``count`` (num_heads_q, total_q), as one row that counts so
    often."""

    def more(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        found = []
        for view in see(question, views):
            zeros = count[np.ix_(view.heads, view.rows)][..., None]
            weight = np.broadcast_to(view.weight, (len(view.heads), *view.weight.shape[1:]))
            weight = np.concatenate([weight, zeros], axis=2)
            found.append(replace(view, keys=np.append(view.keys, -1), weight=weight))
        return found

    return more


# ---- reading ----------------------------------------------------------------------------------


def field_of(question: Question, answers: Answers, name: str) -> Field | None:
    """What ``name`` tells; None where it tells nothing."""
    q = question
    if len(q.q) * len(q.k) * q.num_heads_q > MOST:
        return None
    equations = Equations(question, answers, name)
    every = np.arange(equations.heads)
    some = every[np.unique(np.linspace(0, len(every) - 1, HEADS).astype(int))]
    for groups in ([some], [np.array([head]) for head in every]):
        if _read(equations, groups[:HEADS], FEW) is None:
            continue
        length = len(q.k if equations.of_keys else q.q)
        found = None
        for most in (MANY, length)[: 1 + (length > MANY)]:
            read = _read(equations, groups, most)
            found = None if read is None else _field(equations, read)
            if found is None or found.by_rule:
                break
        return found
    return None


def _read(
    equations: Equations, groups: Sequence[Ints], most: int
) -> list[tuple[Floats, np.ndarray, np.ndarray]] | None:
    """counts (places, unknowns), told and sure (places,), of each group; None unless nearly all
    places are told."""
    q, until = equations.question, spent() + FOR_READING
    x = Places(q)
    offsets = np.asarray(q.cu_seqlens_k if equations.of_keys else q.cu_seqlens_q)
    others = np.asarray(q.cu_seqlens_q if equations.of_keys else q.cu_seqlens_k)
    right = (x.right.T if equations.of_keys else x.right).astype(np.float64)
    inside = np.arange(offsets[0], offsets[-1])
    places = inside
    if most < len(inside):
        places = inside[np.unique(np.linspace(0, len(inside) - 1, most).astype(int))]
    found = []
    for heads in groups:
        counts = right.copy()
        counts = np.concatenate([counts, np.zeros((len(counts), int(equations.zeros)))], axis=1)
        told, sure = np.zeros((2, len(right)), dtype=bool)
        for b in range(q.batch):
            here = places[(places >= offsets[b]) & (places < offsets[b + 1])]
            near = np.arange(others[b], others[b + 1])
            if over(until):
                return None
            if len(here):
                one = solved(equations, here, heads, right[here], near)
                counts[here], told[here], sure[here] = one
        if told[places].mean() < 1 - MISSING:
            return None
        found.append((counts, told, sure))
    return found


def _field(
    equations: Equations, found: Sequence[tuple[Floats, np.ndarray, np.ndarray]]
) -> Field | None:
    q = equations.question
    counts, told, sure = (np.stack(x) for x in zip(*found, strict=True))
    zeros = np.zeros((len(counts), len(q.q)))
    if equations.zeros:
        zeros, counts = counts[..., -1], counts[..., :-1]
        few = zeros > 0
        if few[told].mean() < FEWEST:  # misread: a kernel pads all rows of a tile
            zeros, sure, told = np.zeros_like(zeros), sure & ~few, told & ~few
    pairs = [np.broadcast_to(x[..., None], counts.shape) for x in (sure, told)]
    if equations.of_keys:
        counts, *pairs = (x.swapaxes(1, 2) for x in (counts, *pairs))
    times = q.num_heads_q // len(counts)
    field = Field(q, *(np.repeat(x, times, axis=0) for x in (counts, zeros, *pairs)))
    return field if field.wrong.any() else None
