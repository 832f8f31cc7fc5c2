"""Who sees whom, and how often, as it was read: the difference from the mask in rules."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rawattn.check.diagnose.engine.attention import View
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence import structure
from rawattn.check.diagnose.evidence.places import Places, places_of
from rawattn.check.diagnose.evidence.rules import Rule, Shown, rule_of

Array = np.ndarray
MORE, LESS, OTHER = "sees too many keys", "misses keys", "sees keys that are not its own"
KINDS = (MORE, LESS, OTHER)
NO_RULE = "by no plain rule"
LISTED = 8  # ranges of queries, where no rule tells them
_Read = tuple[Places, Array, Array]  # on a problem, by head: pairs that are known, or of a kind


@dataclass(frozen=True, eq=False)
class Part:
    """Pairs of one of KINDS, alike in some ``heads``; no rule was found for it if that is None, and
    ``pairs`` lists them."""

    kind: str
    heads: tuple[int, ...]
    rule: Rule | None
    pairs: str = ""

    def text(self, heads: int, verb: str = "") -> str:
        """In words, of so many heads; ``verb`` in place of the kind's."""
        who = "" if len(self.heads) == heads else f" (head {', '.join(map(str, self.heads))})"
        rule = f"{NO_RULE}, {self.pairs}" if self.rule is None else str(self.rule)
        return f"{verb or f'a query {self.kind}'}{who}: {rule}"


@dataclass(frozen=True, eq=False)
class Support:
    """seen (num_heads_q, total_q, total_k) as it was read at ``places``.

    whole: a rule for all that is seen, where that is one. second: where rules hold as well.
    """

    places: Places
    seen: Array
    parts: tuple[Part, ...]
    whole: Rule | None = None
    second: Places | None = None

    @property
    def right(self) -> bool:
        return not self.parts

    @property
    def named(self) -> bool:
        return all(part.rule is not None for part in self.parts)

    @property
    def plain(self) -> bool:
        """Whether rules are such as somebody may have written."""
        return all(part.rule is not None and part.rule.plain for part in self.parts)

    @property
    def of_rows(self) -> bool:
        """Whether keys are missed, and all of their rows."""
        left = (self.seen > 0) & self.places.right & self.inside(LESS).any(axis=-1, keepdims=True)
        return not left.any() and all(part.kind == LESS for part in self.parts)

    def inside(self, kind: str) -> Array:
        """Pairs of the places that are wrong in this way."""
        return _inside(kind, self.places, self.seen)

    def at(self, places: Places) -> Array:
        """Who sees whom elsewhere, (num_heads_q, total_q, total_k); ValueError where only what was
        read is known, of other lengths."""
        if not self.named:
            q, own = places.question, self.places.question
            same = (q.lengths_q, q.lengths_k) == (own.lengths_q, own.lengths_k)
            if not same or not np.array_equal(q.cu_seqlens_k, own.cu_seqlens_k):
                raise ValueError("this was read on sequences of other lengths")
            more = np.subtract(places.j.shape, self.seen.shape[1:])  # rows of no sequence
            return np.pad(self.seen, [(0, 0), *((0, int(n)) for n in more)])
        found = places.rights.astype(self.seen.dtype)
        for part in self.parts:
            if part.rule is not None:
                for head in part.heads:
                    of = places.of_head(head)
                    found[head][part.rule.holds(of) & _domain(of, part.kind)] = part.kind != LESS
        return found

    def see(self, question: Question, views: tuple[View, ...]) -> Sequence[View]:
        """The same as a change of views."""
        places = places_of(question)
        return list(_views(places, views, self.at(places).astype(np.float64)))


def support_of(*read: tuple[Places, Array, Array]) -> Support:
    """The difference from the mask in rules that hold on both problems that were ``read``.

    Of each its places, seen as in Support, and known, like it: pairs that were read.
    """
    parts: list[Part] = []
    (places, seen, _), (second, *_) = read
    for kind in KINDS:
        here, there = (_inside(kind, *of) for of in read)
        groups: dict[bytes, list[int]] = {}
        for head, of_both in enumerate(zip(here, there, strict=True)):
            if any(inside.any() for inside in of_both):
                groups.setdefault(b"".join(x.tobytes() for x in of_both), []).append(head)
        both = [(of, known, x) for (of, _, known), x in zip(read, (here, there), strict=True)]
        told = [Part(kind, tuple(heads), _rule(kind, both, heads[:1])) for heads in groups.values()]
        rules = {part.rule for part in told}
        if len(told) > 1 and (len(rules) > 1 or None in rules):  # one for all, if there is one
            every = tuple(range(len(seen)))
            rule = _rule(kind, both, every, by_head=True)
            told = told if rule is None else [Part(kind, every, rule)]
        same: dict[Rule | None, list[int]] = {}
        for part in told:
            same.setdefault(part.rule, []).extend(part.heads)
        for rule, of in same.items():
            listed = "" if rule else listing(places, here[of[0]])
            parts.append(Part(kind, tuple(sorted(of)), rule, listed))
    kinds, alike = {part.kind for part in parts}, all(len(x.heads) == len(seen) for x in parts)
    whole = _whole(*read, own=OTHER not in kinds) if kinds > {LESS} and alike else None
    return Support(places, seen, tuple(parts), whole, second)


def listing(places: Places, inside: Array) -> str:
    """Pairs (total_q, total_k) of the longest sequence that has some, by ranges: queries in a row
    that have the same keys, or keys at the same distances."""
    of_rows = np.where(inside.any(axis=1), places.b[:, 0], -1)
    b = int(np.bincount(of_rows + 1)[1:].argmax()) if (of_rows >= 0).any() else -1
    told: list[tuple[int, int, str]] = []  # of queries the first and the last, and their keys
    for row in np.flatnonzero((of_rows == b) & (b >= 0)):
        j, i = places.j[row][inside[row]], int(places.question.place_of("q")[row])
        forms = structure.named("", j), "i + " + structure.named("", j - i)
        same = told and told[-1][1] == i - 1 and {*told[-1][2].split("|")} & {*forms}
        if same:
            kept = "|".join(form for form in told[-1][2].split("|") if form in forms)
            told[-1] = (told[-1][0], i, kept)
        else:
            told.append((i, i, "|".join(forms)))
    words = [f"{a} to {z}" if z > a else str(a) for a, z, _ in told]
    keys = [form.partition("|")[0] for *_, form in told]
    pieces = [f"i = {rows}: j = {of}" for rows, of in zip(words, keys, strict=True)]
    more = f"; ... ({inside.sum()} pairs in all)" * (len(pieces) > LISTED)
    return f"in sequence {b}: {'; '.join(pieces[:LISTED])}{more}"


def _rule(
    kind: str, read: Sequence[_Read], heads: Iterable[int], by_head: bool = False
) -> Rule | None:
    """Of some heads on all problems; ``by_head``: of all, by which head it is."""
    shown = (
        Shown(of.of_head(head) if by_head else of, _domain(of, kind) & known[head], inside[head])
        for of, known, inside in read
        for head in heads
    )
    return rule_of(*shown, among=read[0][0].by_head if by_head else None)


def _whole(*read: _Read, own: bool) -> Rule | None:
    """A rule for what all heads see; ``own``: of the keys of their sequence alone."""
    shown = []
    for places, seen, known in read:
        if (seen != seen[:1]).any():
            return None
        domain = known[0] & (places.b >= 0) & (places.own | (not own))
        shown.append(Shown(places, domain, domain & (seen[0] > 0)))
    return rule_of(*shown)


def _inside(kind: str, places: Places, seen: Array, known: Array | bool = True) -> Array:
    """(num_heads_q, total_q, total_k)."""
    wrong = ~seen if kind == LESS else seen
    return np.asarray(wrong & _domain(places, kind) & known)


def _domain(places: Places, kind: str) -> Array:
    if kind == OTHER:
        return ~places.own
    return places.own & ~places.right if kind == MORE else places.right


def _views(places: Places, views: Sequence[View], seen: Array) -> Iterator[View]:
    for view in views:
        weight = seen[np.ix_(view.heads, view.rows)]
        keys = np.flatnonzero(weight.any(axis=(0, 1)) | places.own[view.rows[0]])
        slot = None
        if view.slot is not None:
            slot = np.stack([places.of(head).slots for head in view.heads])[:, view.rows][..., keys]
        yield replace(view, keys=keys, weight=weight[..., keys], slot=slot)
