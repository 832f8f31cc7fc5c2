"""Who sees whom, and how often: as it was read, in rules; with a bug, in a small part."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug, See, View, views_of
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.places import Array, Places, places_of
from rawattn.check.diagnose.evidence.structure import Rule, Shown, rules_of
from rawattn.check.diagnose.findings import Sight

MORE, LESS, OTHER = "sees too many keys", "misses keys", "sees keys that are not its own"
KINDS = (MORE, LESS, OTHER)
OWN, ANY = "sees the keys of", "sees, of all sequences, the keys of"  # and no others
NO_RULE = "by no plain rule"
COMBINED = 120  # of parts
RULES, APART = 1000, 60  # of a part: rules that are tried elsewhere, and of those not alike there
QUERIES, KEYS = 6, 8  # that a picture has room for
CELLS = 250_000  # of a sequence, beyond which it is not looked at
SHORTEST = 5  # queries and keys of a sequence that shows a mask
LOST = 2  # groups of heads that no rule tells, after which no others are looked at
Views = Sequence[View]
_Read = tuple[Places, Array, Array]  # on a problem, by head: pairs that are known, or of a kind


@dataclass(frozen=True, eq=False)
class Part:
    """Pairs of one of KINDS, alike in some ``heads``; others: rules that hold there as well."""

    kind: str
    heads: tuple[int, ...]
    rule: Rule | None
    others: Iterable[Rule] = ()

    def text(self, heads: int, verb: str = "") -> str:
        """In words, of so many heads; ``verb`` in place of the kind's."""
        who = "" if len(self.heads) == heads else f" (head {', '.join(map(str, self.heads))})"
        return f"{verb or f'a query {self.kind}'}{who}: {self.rule or NO_RULE}"


@dataclass(frozen=True, eq=False)
class Support:
    """seen (num_heads_q, total_q, total_k) as it was read at ``places``; rules hold at ``second``
    too. whole: one rule for all that is seen. listed: a change of views that is all of it."""

    places: Places
    seen: Array
    parts: tuple[Part, ...]
    whole: Part | None = None
    second: Places | None = None
    listed: See | None = None

    @property
    def told(self) -> tuple[Part, ...]:
        return self.parts if self.whole is None else (self.whole,)

    @property
    def right(self) -> bool:
        return not self.parts and self.listed is None

    @property
    def named(self) -> bool:
        return all(part.rule is not None for part in self.told)

    @property
    def plain(self) -> bool:
        return all(part.rule is not None and part.rule.plain for part in self.told)

    @property
    def of_rows(self) -> bool:
        """Whether keys are missed, and all of their rows."""
        left = (self.seen > 0) & self.places.rights & self.inside(LESS).any(axis=-1, keepdims=True)
        return not left.any() and all(part.kind == LESS for part in self.parts)

    def inside(self, kind: str) -> Array:
        return _inside(kind, self.places, self.seen)

    def at(self, places: Places) -> Array:
        """Like seen, elsewhere; NotImplementedError where it is known of no such lengths."""
        if self.listed is not None:
            return pairs_of(places.question, self.listed)
        if not self.named:
            q, own = places.question, self.places.question
            same = (q.lengths_q, q.lengths_k) == (own.lengths_q, own.lengths_k)
            if not same or not np.array_equal(q.cu_seqlens_k, own.cu_seqlens_k):
                raise NotImplementedError("this was read on sequences of other lengths")
            more = np.subtract(places.j.shape, self.seen.shape[1:])  # rows of no sequence
            return np.pad(self.seen, [(0, 0), *((0, int(n)) for n in more)])
        found = places.rights.astype(self.seen.dtype) & (self.whole is None)
        for part in self.told:
            if part.rule is not None:
                for head in part.heads:
                    of = places.of_head(head)
                    found[head][part.rule.holds(of) & _domain(of, part.kind)] = part.kind != LESS
        return found

    @property
    def by_no_rule(self) -> "Support":
        return replace(self, parts=tuple(replace(x, rule=None) for x in self.parts), whole=None)

    def others(self, places: Places) -> Iterator["Support"]:
        """The same by other rules, which are not alike at these ``places``."""
        told = []
        for part in self.told:
            rules: dict[bytes, Rule] = {}
            others = sorted(islice(part.others, RULES), key=lambda rule: len(rule.spans))
            for rule in (part.rule, *others) if part.rule else ():
                heads = (places.of_head(head) for head in part.heads)
                held = [rule.holds(of) & _domain(of, part.kind) for of in heads]
                rules.setdefault(np.packbits(held).tobytes(), rule)
            told.append([replace(part, rule=rule) for rule in [*rules.values()][:APART]])
        for parts in islice(product(*told), 1, COMBINED):
            yield replace(self, **{"parts": parts} if self.whole is None else {"whole": parts[0]})

    def see(self, question: Question, views: tuple[View, ...]) -> Sequence[View]:
        if self.listed is not None:
            return self.listed(question, views)
        places, found = places_of(question), list[View]()
        seen = self.at(places).astype(np.float64)
        for view in views:
            weight, slot = seen[np.ix_(view.heads, view.rows)], None
            keys = np.flatnonzero(weight.any(axis=(0, 1)) | places.own[view.rows[0]])
            if view.slot is not None:
                slot = np.stack([places.of(h).slots for h in view.heads])[:, view.rows][..., keys]
            found.append(replace(view, keys=keys, weight=weight[..., keys], slot=slot))
        return found


def support_of(*read: tuple[Places, Array, Array]) -> Support:
    """The difference from the mask in rules that hold on both problems that were ``read``. Of each
    its places, seen as in Support, and known, like it: pairs that were read."""
    parts: list[Part] = []
    (places, seen, _), (second, *_) = read
    for kind in KINDS:
        here, there = (_inside(kind, *of) for of in read)
        groups: dict[bytes, list[int]] = {}
        for head, of_both in enumerate(zip(here, there, strict=True)):
            if any(inside.any() for inside in of_both):
                groups.setdefault(b"".join(x.tobytes() for x in of_both), []).append(head)
        both = [(of, known, x) for (of, _, known), x in zip(read, (here, there), strict=True)]
        every = tuple(range(len(seen)))
        if places.question.sparse and groups:  # of lists that differ
            common = _part(kind, every, both, every)
            if common.rule is not None:
                parts.append(common)
                continue
        told = list[Part]()
        for heads in groups.values():  # searches that find nothing cost seconds
            lost = sum(part.rule is None for part in told) >= LOST
            one = Part(kind, tuple(heads), None) if lost else _part(kind, heads, both, heads[:1])
            told.append(one)
        rules = {part.rule for part in told}
        if len(told) > 1 and (len(rules) > 1 or None in rules):  # one for all, if there is one
            one = _part(kind, every, both, every, by_head=True)
            told = told if one.rule is None else [one]
        for rule in dict.fromkeys(part.rule for part in told):
            same = [part for part in told if part.rule == rule]
            heads = sorted(head for part in same for head in part.heads)
            parts.append(replace(same[-1], heads=tuple(heads)))
    kinds, alike = {part.kind for part in parts}, all(len(x.heads) == len(seen) for x in parts)
    whole = _whole(*read, own=OTHER not in kinds) if kinds > {LESS} and alike else None
    return Support(places, seen, tuple(parts), whole, second)


def pairs_of(question: Question, see: See) -> Array:
    """(num_heads_q, total_q, total_k): which pairs there are with a change of views."""
    found = np.zeros((question.num_heads_q, len(question.q), len(question.k)), dtype=bool)
    for view in see(question, views_of(question)):
        at = view.keys >= 0
        found[np.ix_(view.heads, view.rows, view.keys[at])] |= view.weight[..., at] > 0
    return found


def _part(
    kind: str, heads: Sequence[int], on: Sequence[_Read], of: Sequence[int], by_head: bool = False
) -> Part:
    """Of ``heads``, by what is on all problems ``of`` some; ``by_head``: by which head it is."""
    shown = []
    for (places, known, inside), head in product(on, of):
        at = places.of_head(head) if by_head else places.of(head)
        shown.append(Shown(at, _domain(at, kind) & known[head], inside[head]))
    rules = rules_of(*shown, among=on[0][0].by_head if by_head else None)
    return Part(kind, tuple(heads), next(rules, None), rules)


def _whole(*read: _Read, own: bool) -> Part | None:
    """A rule for what all heads see; ``own``: of the keys of their sequence alone."""
    sparse, heads = read[0][0].question.sparse, range(len(read[0][1]))
    if not sparse and any((seen != seen[:1]).any() for _, seen, _ in read):
        return None
    kind, both = OWN if own else ANY, [(of, known, seen > 0) for of, seen, known in read]
    whole = _part(kind, heads, both, heads if sparse else heads[:1])
    return whole if whole.rule else None


def _inside(kind: str, places: Places, seen: Array, known: Array | bool = True) -> Array:
    """(num_heads_q, total_q, total_k)."""
    domains = np.stack([_domain(places.of(head), kind) for head in range(len(seen))])
    return np.asarray((~seen if kind == LESS else seen) & domains & known)


def _domain(places: Places, kind: str) -> Array:
    if kind == OTHER:
        return ~places.own
    if kind in (OWN, ANY):
        return places.own if kind == OWN else np.broadcast_to(places.b >= 0, places.own.shape)
    return places.own & ~places.right if kind == MORE else places.right


def sight_of(question: Question, bug: Bug) -> Sight | None:
    """A part where queries see other keys with ``bug`` than they must; None where there is none."""
    if bug.see is None:
        return None
    right = views_of(question)
    try:
        found = tuple(bug.see(question, right))
    except (IndexError, ValueError):  # one that was found beside another, which changes the views
        return None
    sizes = [q * k for q, k in zip(question.lengths_q, question.lengths_k, strict=True)]
    fit = [b for b, size in enumerate(sizes) if size <= CELLS and question.lengths_q[b]]
    shorter = np.minimum(question.lengths_q, question.lengths_k)
    in_order = sorted(fit, key=lambda b: (shorter[b] < SHORTEST, sizes[b]))
    at = product(in_order, range(question.num_heads_q))
    return next(filter(None, (_of_sequence(question, *x, right, found) for x in at)), None)


def _of_sequence(q: Question, b: int, head: int, right: Views, found: Views) -> Sight | None:
    rows, length = q.lengths_q[b], q.lengths_k[b]
    seen = [list(_seen(q, views, b, head)) for views in (right, found)]
    keys = np.unique([*range(length), *(key for parts in seen for x in parts for key in x[1])])
    counts = np.zeros((2, rows, len(keys)))
    for count, parts in zip(counts, seen, strict=True):
        for here, places, weight in parts:
            np.add.at(count, np.ix_(here, np.searchsorted(keys, places)), weight)
    a, z = counts
    if np.array_equal(a, z):
        return None
    first = np.argwhere(a != z)[0] - (1, KEYS // 2)  # a wrong pair, and what is before it
    i, j = np.clip(first, 0, np.maximum(np.subtract(a.shape, (QUERIES, KEYS)), 0)).tolist()
    part = slice(i, i + QUERIES), slice(j, j + KEYS)
    zeros = any((view.keys < 0).any() for view in found)
    shown = tuple(int(key) for key in keys[part[1]])
    return Sight(b, head, tuple(range(rows)[part[0]]), shown, length, zeros, a[part], z[part])


def _seen(q: Question, views: Views, b: int, head: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Queries and keys (also rows of zeros) by their places, and how often they see these."""
    first_q, first_k = (int(q.offsets(of)[b]) for of in "qk")
    for view in views:
        here = (view.rows >= first_q) & (view.rows < first_q + q.lengths_q[b])
        if head not in view.heads or not here.any():
            continue
        weight = view.weight[list(view.heads).index(head) if len(view.weight) > 1 else 0][here]
        there = np.flatnonzero(view.keys >= 0)
        shift = view.keys[there[0]] - there[0] if len(there) else first_k
        places = np.where(view.keys < 0, np.arange(len(view.keys)) + shift, view.keys) - first_k
        some = weight.any(axis=0)
        yield view.rows[here] - first_q, places[some], weight[:, some]
