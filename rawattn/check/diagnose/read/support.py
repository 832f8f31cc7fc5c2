"""Who sees whom, as it was read: the difference from the mask in rules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rawattn.check.diagnose.engine.attention import See, View
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.read.places import Places
from rawattn.check.diagnose.read.rules import Rule, Shown, rule_of

Array = np.ndarray
MORE, LESS, OTHER = "sees too many keys", "misses keys", "sees keys that are not its own"
KINDS = (MORE, LESS, OTHER)


@dataclass(frozen=True, eq=False)
class Part:
    """Pairs of one of KINDS, alike in some ``heads``; no rule was found for it if that is None."""

    kind: str
    heads: tuple[int, ...]
    rule: Rule | None

    def text(self, heads: int, right: str) -> str:
        """In words, of so many heads."""
        who = "" if len(self.heads) == heads else f" (head {', '.join(map(str, self.heads))})"
        rule = "by no plain rule" if self.rule is None else str(self.rule)
        return f"a query {self.kind}{who}: {rule}" + right * (self.kind != OTHER)


@dataclass(frozen=True, eq=False)
class Support:
    """seen (num_heads_q, total_q, total_k) as it was read at ``places``."""

    places: Places
    seen: Array
    parts: tuple[Part, ...]

    @property
    def right(self) -> bool:
        return not self.parts

    @property
    def named(self) -> bool:
        return all(part.rule is not None for part in self.parts)

    def at(self, places: Places) -> Array:
        """Who sees whom elsewhere, (num_heads_q, total_q, total_k); ValueError where only what was
        read is known, of other lengths."""
        if not self.named:
            if _lengths(places) != _lengths(self.places):
                raise ValueError("this was read on sequences of other lengths")
            return self.seen
        found = places.right[None].repeat(places.question.num_heads_q, axis=0)
        for part in self.parts:
            if part.rule is not None:
                pairs = part.rule.holds(places) & _domain(places, part.kind)
                heads = list(part.heads)
                found[heads] = found[heads] & ~pairs if part.kind == LESS else found[heads] | pairs
        return found

    def see(self, times: Callable[[Places], Array]) -> See:
        """The same as a change of views; times: how often a pair counts."""

        def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
            places = Places(question)
            seen = self.at(places) * times(places)
            return list(_views(places, views, seen))

        return see


def support_of(
    places: Places, seen: Array, alive: Array, again: tuple[Places, Array, Array]
) -> Support:
    """The difference from the mask in rules that hold on a second problem, ``again``, too.

    seen as in Support; alive (num_heads_q, total_q): rows that were read.
    """
    parts: list[Part] = []
    other, seen_there, alive_there = again
    for kind in KINDS:
        here, there = (
            _inside(kind, *of) for of in ((places, seen, alive), (other, seen_there, alive_there))
        )
        groups: dict[bytes, list[int]] = {}
        for head, inside in enumerate(here):
            if inside.any() or there[head].any():
                groups.setdefault(inside.tobytes() + there[head].tobytes(), []).append(head)
        for heads in groups.values():
            shown = [
                Shown(of, _domain(of, kind) & live[heads[0]][:, None], inside[heads[0]])
                for of, live, inside in ((places, alive, here), (other, alive_there, there))
            ]
            parts.append(Part(kind, tuple(heads), rule_of(*shown)))
        unknown = [part for part in parts if part.kind == kind and part.rule is None]
        if len(unknown) > 1:
            heads = sorted(head for part in unknown for head in part.heads)
            parts = [part for part in parts if part not in unknown]
            parts.append(Part(kind, tuple(heads), None))
    return Support(places, seen, tuple(parts))


def _inside(kind: str, places: Places, seen: Array, alive: Array) -> Array:
    """(num_heads_q, total_q, total_k)."""
    wrong = ~seen if kind == LESS else seen
    return np.asarray(wrong & _domain(places, kind) & alive[..., None])


def _domain(places: Places, kind: str) -> Array:
    if kind == OTHER:
        return ~places.own
    return places.right if kind == LESS else places.own & ~places.right


def _views(places: Places, views: Sequence[View], seen: Array) -> Iterator[View]:
    for view in views:
        weight = seen[np.ix_(view.heads, view.rows)]
        keys = np.flatnonzero(weight.any(axis=(0, 1)) | places.own[view.rows[0]])
        yield replace(view, keys=keys, weight=weight[..., keys])


def _lengths(places: Places) -> tuple[tuple[int, ...], ...]:
    q = places.question
    return q.lengths_q, q.lengths_k, tuple(int(x) for x in q.cu_seqlens_k)
