"""The catalogue of bugs in block-sparse attention: lists of blocks that are read wrongly
(``lists``), who sees what of a block, factors (``gates``), and the sliding branch."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue.masks import distances, within
from rawattn.check.diagnose.catalogue.sparse import gates
from rawattn.check.diagnose.catalogue.sparse.lists import listed, rows, with_keys
from rawattn.check.diagnose.engine.attention import (
    FORWARD,
    Bug,
    Identity,
    See,
    View,
    sparse_views,
    views_of,
)
from rawattn.check.diagnose.engine.question import STAGES, Question

ALL = tuple(STAGES)
Open = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of slots, and whether it is the own block
OPEN: dict[tuple[str, str], Open] = {  # selected pairs behind the query that are seen
    ("sparse-not-causal", "in the block around the query"): lambda slot, own: (slot >= 0) & own,
    ("sparse-not-causal", "in later blocks"): lambda slot, own: (slot >= 0) & ~own,
    ("sparse-own-block-not-causal", ""): lambda slot, own: own,
    ("sparse-own-block-not-causal", "unless it is selected"): lambda slot, own: own & (slot < 0),
    ("sparse-not-causal", "everywhere, the own block too"): lambda slot, own: (slot >= 0) | own,
}


def bugs(question: Question) -> tuple[Bug, ...]:
    """Every bug of the catalogue that can matter for the question."""
    key = Identity(question)
    if not _kept or _kept[0][0] != key:
        _kept[:] = [(key, tuple(_bugs(question)))]
    return _kept[0][1]


_kept: list[tuple[Identity, tuple[Bug, ...]]] = []  # those of the last question


def _bugs(question: Question) -> Iterator[Bug]:
    different = Different(question)
    for name, words, change in rows(question):
        if different(see := listed(change)):
            yield Bug(name, words, ALL, see=see)
    for (name, words), opens in OPEN.items():
        there = question.own if "own" in name else question.causal
        if there and different(see := partial(_opened, opens)):
            yield Bug(name, words, ALL, see=see)
    for text, zeros in (("zeros", True), ("up to the end of the last block", False)):
        name = "sparse-partial-block-zeros" if zeros else "neighbour-leak"
        for own, where in ((False, "where it is selected"), (True, "where it is seen")):
            if different(see := partial(_completed, zeros, own)):
                yield Bug(name, f"{text}, {where}", ALL, see=see)
    if question.batch > 1:
        text = "k and v without the sequence's offset"
        yield Bug("offsets-shifted", text, ALL, see=_first_keys)
    if question.block_scale is not None:
        yield from gates.bugs(question, different)
    if question.sliding is not None:
        yield from _sliding(question)


class Different:
    """Whether a bug shows other views than the right ones, and than all that were asked before."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.seen = {self._key(views_of(question))}

    def __call__(self, see: See) -> bool:
        key = self._key(see(self.question, views_of(self.question)))
        new = key not in self.seen
        self.seen.add(key)
        return new

    def _key(self, views: Sequence[View]) -> bytes:
        found = [x for view in views for x in (view.keys, view.weight)]
        if self.question.block_scale is not None or self.question.tblock_scale is not None:
            for view in views:
                seen = np.where(view.weight > 0, np.asarray(view.slot), -1)
                found += [seen, np.asarray(view.selections)]
        return b"".join(np.asarray(x, dtype=np.float64).tobytes() for x in found)


def _opened(opens: Open, question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """Keys behind the query that are seen too."""
    if not views or views[0].slot is None:
        return views
    found = []
    uncut = sparse_views(replace(question, causal=False))
    for view, free in zip(sparse_views(question), uncut, strict=True):
        key, size = np.arange(len(free.keys)), question.block_size
        place = np.arange(len(view.rows))[:, None] + len(key) - len(view.rows)
        own, slot = key // size == place // size, np.asarray(free.slot)
        more = opens(slot, np.broadcast_to(own, slot.shape)) & ((free.weight > 0) | own)
        weight = np.where(more, 1.0, view.weight)
        found.append(replace(view, weight=weight, slot=np.where(more, slot, np.asarray(view.slot))))
    return found


def _completed(
    zeros: bool, own: bool, question: Question, views: tuple[View, ...]
) -> Sequence[View]:
    """Keys that complete the last block of a sequence: zeros, or what lies there."""
    if not views or views[0].slot is None:
        return views
    found, size = [], question.block_size
    for view in sparse_views(question):
        count = len(view.keys)
        first, slot = (count - 1) // size * size, np.asarray(view.slot)
        stop = int(view.keys[-1]) + 1
        keys = np.arange(stop, stop - count % -size)
        keys = np.where(zeros | (keys >= len(question.k)), -1, keys)
        seen = view.weight[..., first : first + 1] * (own | (slot[..., first : first + 1] >= 0))
        shape = (*seen.shape[:2], len(keys))
        of = np.broadcast_to(slot[..., first : first + 1], shape)
        found.append(with_keys(view, keys, np.broadcast_to(seen, shape), of))
    return found


def _first_keys(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """Keys and values at the rows of the first sequence."""
    starts = question.cu_seqlens_k
    return [
        view
        if view.slot is None
        else replace(view, keys=np.where(view.keys < 0, -1, view.keys - starts[view.sequence]))
        for view in views
    ]


# ---- the sliding branch -----------------------------------------------------------------------


def _sliding(question: Question) -> Iterator[Bug]:
    left, right = (math.inf if side < 0 else side for side in question.sliding or (-1, -1))
    for change in (1, -1):
        for side, window in (
            ("left", (left + change, right)),
            ("right", (left, right + change)),
        ):
            if window != (left, right) and window[0] >= 0:
                see = _other_window(*window)
                yield Bug("sparse-sliding-off-by-one", f"{side} {change:+}", FORWARD, see)
    if left < math.inf:
        yield Bug("window-dropped", "sliding", FORWARD, _other_window(math.inf, right))


def _other_window(left: float, right: float) -> See:
    return lambda question, views: [
        view
        if view.slot is not None
        else replace(view, weight=within(distances(question, view), left, right))
        for view in views
    ]
