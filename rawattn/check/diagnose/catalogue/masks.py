"""Bugs of who sees whom: masks, windows, padding, neighbours and offsets.

Long by the catalogue.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FIRST,
    OWN_P,
    TILES,
    Bug,
    See,
    Store,
    View,
    views_of,
)
from rawattn.check.diagnose.engine.question import BY_ROW, OF_KEYS, Answers, Question

# ---- masks ------------------------------------------------------------------------------------


def distances(question: Question, view: View, top_left: bool = False) -> np.ndarray:
    """How far a key lies behind the query's own position, (n, m); keys before are negative."""
    b = view.sequence
    first_q, first_k = question.cu_seqlens_q[b], question.cu_seqlens_k[b]
    shift = 0 if top_left else question.lengths_k[b] - question.lengths_q[b]
    keys = np.where(view.keys < 0, first_k + np.arange(len(view.keys)), view.keys)
    return np.asarray((keys - first_k)[None, :] - (view.rows - first_q)[:, None] - shift)


def within(distance: np.ndarray, left: float, right: float) -> np.ndarray:
    seen: np.ndarray = ((distance >= -left) & (distance <= right))[None]
    return seen.astype(np.float64)


def bounds(question: Question) -> tuple[float, float]:
    """The window with infinity for an open side."""
    left, right = question.mask_window
    return (math.inf if left < 0 else left), (math.inf if right < 0 else right)


def windowed(left: float, right: float, top_left: bool = False) -> See:
    """Another window than the question's."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        return [
            replace(v, weight=within(distances(question, v, top_left), left, right)) for v in views
        ]

    return see


def masks(question: Question) -> Iterator[Bug]:
    left, right = bounds(question)
    if question.causal:
        yield Bug("causal-dropped", "", FIRST, windowed(left, math.inf))
        yield Bug("causal-off-by-one", "j <= i + 1", FIRST, windowed(left, 1))
        yield Bug("causal-off-by-one", "j < i", FIRST, windowed(left, -1))
        if question.lengths_q != question.lengths_k:
            yield Bug("causal-alignment", "top-left", FIRST, windowed(left, 0, top_left=True))
    elif question.window != (-1, -1) and question.lengths_q != question.lengths_k:
        yield Bug("causal-alignment", "window", FIRST, windowed(left, right, top_left=True))
    for change in (1, -1):
        if left < math.inf:
            yield Bug(
                "window-off-by-one", f"left {change:+}", FIRST, windowed(left + change, right)
            )
        if right < math.inf and not question.causal:
            yield Bug(
                "window-off-by-one", f"right {change:+}", FIRST, windowed(left, right + change)
            )
        if max(left, right) < math.inf and not question.causal:
            both = windowed(left + change, right + change)
            yield Bug("window-off-by-one", f"both sides {change:+}", FIRST, both)
    if left < math.inf:
        yield Bug("window-dropped", "left", FIRST, windowed(math.inf, right))
    if right < math.inf and not question.causal:
        yield Bug("window-dropped", "right", FIRST, windowed(left, math.inf))
        if left < math.inf:
            yield Bug("window-dropped", "both sides", FIRST, windowed(math.inf, math.inf))
    if min(left, right) < math.inf:
        open_ = windowed(math.inf, math.inf)
        for name, see in (("all", open_), ("right side", windowed(left, math.inf))):
            yield Bug("mask-missing-in-backward", f"{name}, exp(S - lse)", BACKWARD, see)
            yield Bug("mask-missing-in-backward", f"{name}, softmax", BACKWARD, see, OWN_P)


# ---- padding and neighbours -------------------------------------------------------------------


def longer(
    question: Question, view: View, before: int, after: int, zeros: bool, filled: bool = False
) -> View:
    """A view with more keys on both sides: rows of zeros, or what lies there in memory; past the
    end of that nothing, or rows of zeros where it is ``filled`` with them, as by TMA."""
    b = view.sequence
    start = int(question.cu_seqlens_k[b])
    stop = start + question.lengths_k[b]
    if not zeros:
        before = min(before, start)
        after = after if filled else min(after, len(question.k) - stop)
    keys = np.arange(start - before, stop + after)
    inside = (keys >= start) & (keys < (len(question.k) if filled else stop))
    distance = (keys - start)[None, :] - (view.rows - question.cu_seqlens_q[b])[:, None]
    distance = distance - (question.lengths_k[b] - question.lengths_q[b])
    weight = within(distance, *bounds(question))
    kept = inside | (not (zeros or filled))
    return replace(view, keys=np.where(kept, keys, -1), weight=weight)


def _more_keys(
    after: Callable[[Question, int], int],
    before: int = 0,
    zeros: bool = False,
    filled: bool = False,
) -> See:
    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        lengths = question.lengths_k
        return [
            longer(question, v, before, after(question, lengths[v.sequence]), zeros, filled)
            for v in views
        ]

    return see


def _to_longest(question: Question, length: int) -> int:
    return max(question.lengths_k) - length


def _to_tile(tile: int) -> Callable[[Question, int], int]:
    return lambda question, length: -length % tile


def _exactly(count: int) -> Callable[[Question, int], int]:
    return lambda question, length: count


def neighbours(question: Question, tiles: list[int]) -> Iterator[Bug]:
    if len(set(question.lengths_k)) > 1:
        yield Bug("padded-keys", "longest", FIRST, _more_keys(_to_longest, zeros=True))
    for tile in TILES:
        yield Bug("padded-keys", f"tile of {tile}", FIRST, _more_keys(_to_tile(tile), zeros=True))
    if question.batch > 1 or len(question.k) > question.cu_seqlens_k[-1]:
        yield Bug("neighbour-leak", "one key after the end", FIRST, _more_keys(_exactly(1)))
        yield Bug("neighbour-leak", "one key before", FIRST, _more_keys(_exactly(0), before=1))
        yield Bug("neighbour-leak", "one key on each side", FIRST, _more_keys(_exactly(1), 1))
        for tile in tiles:
            yield Bug("neighbour-leak", f"tile of {tile}", FIRST, _more_keys(_to_tile(tile)))
        for tile in TILES:
            text = f"tile of {tile}, zeros past the end of all"
            yield Bug("neighbour-leak", text, FIRST, _more_keys(_to_tile(tile), filled=True))
    yield from _offsets(question)


def _offsets(question: Question) -> Iterator[Bug]:
    for b in range(question.batch):
        for by in (1, -1):
            for text, empty in (("", False), (", one row empty", True)):
                store = _shifted(b, by, empty)
                yield Bug("offsets-shifted", f"from {b} by {by:+}{text}", FIRST, store=store)
    for b in range(1, question.batch + 1):
        for by in (1, -1):
            for sides in ("qk", "q", "k"):
                text = f"cu_seqlens_{sides}[{b}:] {by:+}"
                yield Bug("offsets-shifted", text, FIRST, _other_offsets(b, by, sides))
                if b < question.batch:
                    text = f"cu_seqlens_{sides}[{b}] {by:+}"
                    yield Bug("offsets-shifted", text, FIRST, _other_offsets(b, by, sides, True))
    if question.batch > 1:
        yield Bug("offsets-shifted", "the first entry left out", FIRST, _without_first)


def _without_first(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    return [v for v in views if v.sequence > 0]


def _shifted(b: int, by: int, empty: bool) -> Store:
    """Rows from sequence ``b`` on are stored one further, or one before; one is then ``empty``."""

    def store(question: Question, answers: Answers) -> Answers:
        moved = {}
        for name, x in answers.items():
            of_keys, axis = name in OF_KEYS, int(name in BY_ROW)
            first = int((question.cu_seqlens_k if of_keys else question.cu_seqlens_q)[b])
            last = int((question.cu_seqlens_k if of_keys else question.cu_seqlens_q)[-1])
            y = np.moveaxis(x.copy(), axis, 0)
            source = np.moveaxis(x, axis, 0)
            here = slice(first + max(by, 0), min(last, len(y)) + min(by, 0))
            y[here] = source[here.start - by : here.stop - by]
            if empty and last > first:
                y[first if by > 0 else last - 1] = -np.inf if name == "lse" else 0.0
            moved[name] = np.moveaxis(y, 0, axis)
        return moved

    return store


def _other_offsets(b: int, by: int, sides: str, alone: bool = False) -> See:
    """cu_seqlens from entry ``b`` on (or that one alone) read ``by`` too large."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        def moved(offsets: Any, rows: int) -> np.ndarray:
            found = np.array(offsets, dtype=np.int64)
            found[b : b + 1 if alone else None] += by
            return np.maximum.accumulate(np.clip(found, 0, rows))

        changes: dict[str, Any] = {}
        if "q" in sides:
            changes["cu_seqlens_q"] = moved(question.cu_seqlens_q, len(question.q))
        if "k" in sides:
            changes["cu_seqlens_k"] = moved(question.cu_seqlens_k, len(question.k))
        return views_of(replace(question, **changes))

    return see
