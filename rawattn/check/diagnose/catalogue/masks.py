"""Bugs of who sees whom: keys in use, masks, windows, padding, neighbours; rows without keys."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import FIRST, TILES, Bug, See, View, each, views_of
from rawattn.check.diagnose.engine.question import BY_ROW, OF_KEYS, OF_SLOTS, Answers, Question
from rawattn.check.diagnose.engine.steps import OWN_P
from rawattn.reference.dense import allowed


def distances(question: Question, view: View, top_left: bool = False) -> np.ndarray:
    """How far a key lies behind the query's own position, (n, m); keys before are negative."""
    b = view.sequence
    first_q, first_k = question.cu_seqlens_q[b], question.cu_seqlens_k[b]
    shift = 0 if top_left else question.lengths_k[b] - question.lengths_q[b]
    keys = np.where(view.keys < 0, first_k + np.arange(len(view.keys)), view.keys)
    return np.asarray((keys - first_k)[None, :] - (view.rows - first_q)[:, None] - shift)


def bounds(question: Question) -> tuple[float, float]:
    """The window with infinity for an open side."""
    left, right = question.mask_window
    return (math.inf if left < 0 else left), (math.inf if right < 0 else right)


class Window(NamedTuple):
    """Keys ``left`` and ``right`` of a query's place, counted from key 0 if ``top_left``."""

    left: float
    right: float
    top_left: bool = False

    def holds(self, distance: np.ndarray, from_first: np.ndarray) -> np.ndarray:
        """For keys that are so far behind the query's place, counted in the two ways."""
        x = from_first if self.top_left else distance
        return np.asarray((x >= -self.left) & (x <= self.right))

    def see(self, question: Question, views: tuple[View, ...]) -> Sequence[View]:
        """In the place of the question's window; of views that walk lists in no window's."""
        return [v if v.slot is not None else self.of(question, v) for v in views]

    def of(self, question: Question, view: View) -> View:
        """A view, of other rows or keys too, of what it holds."""
        seen = self.holds(*(distances(question, view, first) for first in (False, True)))
        return replace(view, weight=seen[None].astype(np.float64))


def windows(question: Question) -> Iterator[tuple[str, str, Window]]:
    """Windows that are taken for the right one: class, form, and the window."""
    left, right = bounds(question)
    if question.causal:
        yield "causal-dropped", "", Window(left, math.inf)
        yield "causal-off-by-one", "j <= i + 1", Window(left, 1)
        yield "causal-off-by-one", "j < i", Window(left, -1)
        if question.window[1] > 0:
            yield "causal-dropped", "the window's side holds", Window(left, question.window[1])
    if min(left, right) < math.inf and question.lengths_q != question.lengths_k:
        form = "top-left" if question.causal else "window"
        yield "causal-alignment", form, Window(left, right, top_left=True)
    for words, of_left, of_right in (("left", 1, 0), ("right", 0, 1), ("both sides", 1, 1)):
        of_causal = of_right and question.causal
        if of_causal or (of_left and left == math.inf) or (of_right and right == math.inf):
            continue
        for by in (1, -1):
            moved = Window(left + by * of_left, right + by * of_right)
            yield "window-off-by-one", f"{words} {by:+}", moved
        dropped = Window(math.inf if of_left else left, math.inf if of_right else right)
        yield "window-dropped", words, dropped
    if left != right:
        yield "wrong-keys", "the sides of the window, exchanged", Window(right, left)
    if right > 0:
        yield "wrong-keys", "no key behind the query is seen, as if causal", Window(left, 0)


def unmasked(question: Question) -> Iterator[tuple[str, Window]]:
    """Those of a backward pass that masks less: form, and the window."""
    left, right = bounds(question)
    if min(left, right) < math.inf:
        yield "all", Window(math.inf, math.inf)
    if max(left, right) < math.inf:
        yield "right side", Window(left, math.inf)
        yield "left side", Window(math.inf, right)


def masks(question: Question) -> Iterator[Bug]:
    if question.seqused_k is not None:
        yield Bug("seqused-ignored", "every key is seen", see=partial(_used, 1 << 40))
        for more, words in ((1, "many"), (-1, "few")):
            yield Bug("seqused-ignored", f"one key too {words} is in use", see=partial(_used, more))
        if question.mask_window != (-1, -1):
            text = "the diagonal ends at the last of all keys"
            yield Bug("seqused-ignored", text, see=each(_at_all_keys))
    yield from (Bug(name, form, FIRST, window.see) for name, form, window in windows(question))
    ways = {"exp(S - lse)": {}, "softmax": OWN_P}
    for (form, window), (words, own) in product(unmasked(question), ways.items()):
        yield Bug("mask-missing-in-backward", f"{form}, {words}", ("backward",), window.see, own)


def _used(more: int, question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """So many more keys are in use, as far as there are."""
    used = np.maximum(np.asarray(question.seqused_k).astype(np.int64) + more, 0)
    return views_of(replace(question, seqused_k=used))


def _at_all_keys(question: Question, view: View) -> View:
    """The keys in use alone, but queries are placed as if all keys were."""
    allotted = np.diff(question.cu_seqlens_k)[view.sequence]
    mask = allowed(len(view.rows), int(allotted), question.mask_window)
    return replace(view, weight=mask[None, :, : len(view.keys)].astype(np.float64))


def _more_keys(after: int = 0, before: int = 0, tile: int = 1, of: str = "memory") -> See:
    """So many more, what lies there in ``memory``, and past the end of that nothing, or, as by TMA,
    zeros (memory or zeros); rows of ``zeros``; the last one again and again (last); its ``own``.
    ``tile``: after the last one up to a whole tile; ``after`` of -1: up to the longest sequence."""

    def longer(question: Question, view: View) -> View:
        start, length = question.cu_seqlens_k[view.sequence], question.lengths_k[view.sequence]
        more = max(question.lengths_k) - length if after < 0 else after + -length % tile
        keys = np.arange(start - before, start + length + more)
        keys = np.minimum(keys, start + length - 1) if of == "last" else keys
        ends = {"zeros": start + length, "own": question.cu_seqlens_k[view.sequence + 1]}
        there = (keys >= 0) & (keys < ends.get(of, len(question.k)))
        keys = np.where(there, keys, -1) if "zeros" in of else keys[there]
        return Window(*bounds(question)).of(question, replace(view, keys=keys))

    return each(longer)


def neighbours(question: Question) -> Iterator[Bug]:
    many = 1 << 20  # keys, more than any sequence has
    if len(set(question.lengths_k)) > 1:
        yield Bug("padded-keys", "longest", FIRST, _more_keys(after=-1, of="zeros"))
    for tile in TILES:
        yield Bug("padded-keys", f"tile of {tile}", FIRST, _more_keys(tile=tile, of="zeros"))
        text = f"the last key in each place of padding, tile of {tile}"
        yield Bug("padded-keys", text, FIRST, _more_keys(tile=tile, of="last"))
    if question.batch > 1 or len(question.k) > question.cu_seqlens_k[-1]:
        # behind the keys in use there are the sequence's own ones
        name = "neighbour-leak" if question.seqused_k is None else "seqused-ignored"
        ends = (("after the end", 1, 0), ("before", 0, 1), ("on each side", 1, 1))
        for text, after, before in ends:
            yield Bug(name, f"one key {text}", FIRST, _more_keys(after, before))
        ways = {"memory": "", "memory or zeros": ", zeros past the end of all"}
        ways |= {} if question.seqused_k is None else {"own": ", none of another sequence's keys"}
        for (of, words), tile in product(ways.items(), (many, *TILES)):
            text = f"tile of {tile}{words}" if tile < many else "all that it has, in use or not"
            if of == "own" or tile < many:
                yield Bug(name, text, FIRST, _more_keys(tile=tile, of=of))


def dead(question: Question) -> np.ndarray:
    """(total_q, num_heads_q): rows of sequences that see no key."""
    alive = _row_mask(lambda seen: np.asarray(seen.any(axis=2)), question)
    return ~alive & (question.sequence_of("q") >= 0)[:, None]


def _row_mask(of: Callable[[np.ndarray], np.ndarray], question: Question) -> np.ndarray:
    """What ``of`` makes (heads, n) of who sees whom (heads, n, m), as (total_q, num_heads_q)."""
    found = np.zeros(question.q.shape[:2], dtype=bool)
    for view in views_of(question):
        shape = len(view.heads), len(view.rows)
        found[view.rows[:, None], view.heads] = np.broadcast_to(of(view.weight > 0), shape).T
    return found


def of_late(question: Question, rows: np.ndarray) -> Iterator[Bug]:
    """NaN in ``rows`` (total_q, num_heads_q) without a key where the running maximum starts."""
    sides = zip(("first", "last"), bounds(question), strict=True)
    ends = [words for words, side in sides if side < math.inf]
    packed = (t // question.group for t in (48, *TILES) if t % question.group == 0)
    for words, tile, of in product(ends, TILES, sorted({48, *TILES, *packed})):
        for more, every in {", and rows without keys": True, "": False}.items():
            late = partial(_row_mask, partial(_late, tile, of, words == "last", every))
            if np.array_equal(late(question), rows):
                form = f"from the {words} visible on, {of} by {tile}{more}"
                yield Bug("masked-tile-nan", form, FIRST, store=partial(spoilt, late))


def _late(tile: int, rows: int, last: bool, every: bool, seen: np.ndarray) -> np.ndarray:
    """Rows that see keys, or ``every`` one, but none in the tile where the running maximum starts:
    the first one, or the ``last``, of which a tile of queries sees any."""
    found, tiles = np.asarray(seen.any(axis=2)), np.arange(seen.shape[2]) // tile
    found[:] |= every
    end, none = (np.max, -1) if last else (np.min, len(tiles))
    for start in range(0, seen.shape[1], rows):
        here = seen[:, start : start + rows]
        first = end(np.where(here.any(axis=1), tiles, none), axis=1, initial=none)
        met = here & (tiles == first[:, None, None])
        found[:, start : start + rows] &= ~met.any(axis=2) & (first != none)[:, None]
    return found


def spoilt(of: Callable[[Question], np.ndarray], question: Question, answers: Answers) -> Answers:
    """NaN in these rows, and in the gradients of the keys that they would add to."""
    found, rows = {name: x.copy() for name, x in answers.items()}, of(question)
    for name, y in found.items():
        if name in BY_ROW:
            y[rows.T] = np.nan
        elif name in OF_KEYS:
            for view in views_of(question):
                if rows[view.rows][:, view.heads].any():
                    y[view.keys, view.head_kv] = np.nan
        elif name not in OF_SLOTS:
            y[rows] = np.nan
    return found
