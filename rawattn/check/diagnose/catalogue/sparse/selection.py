"""The catalogue of bugs in block-sparse attention: lists of blocks that are read wrongly
(``lists``), who sees what of a block, factors (``gates``), and the sliding branch."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain

import numpy as np

from rawattn.check.diagnose.catalogue.masks import windows
from rawattn.check.diagnose.catalogue.sparse import gates, walks
from rawattn.check.diagnose.catalogue.sparse.lists import listed, misread, rows
from rawattn.check.diagnose.catalogue.tiles import tiles
from rawattn.check.diagnose.engine.attention import FORWARD, TILES, Bug, See, View, views_of
from rawattn.check.diagnose.engine.question import STAGES, Question

ALL = tuple(STAGES)


@lru_cache(maxsize=1)
def bugs(question: Question) -> tuple[Bug, ...]:
    """Every bug of the catalogue that can matter for the question."""
    return tuple(_bugs(question))


def _bugs(question: Question) -> Iterator[Bug]:
    different = Different(question)
    for name, words, change in rows(question):
        if different(see := listed(change)):
            yield Bug(name, words, ALL, see=see)
    for text, zeros in (("zeros", True), ("up to the end of the last block", False)):
        name = "padded-keys" if zeros else "neighbour-leak"
        for own, where in ((False, "where it is selected"), (True, "where it is seen")):
            if different(see := partial(_completed, zeros, own)):
                yield Bug(name, f"{text}, {where}", ALL, see=see)
    if question.batch > 1:
        text = "k and v without the sequence's offset"
        yield Bug("offsets-shifted", text, ALL, see=_first_keys)
    if question.block_scale is not None:
        yield from gates.bugs(question, different)
    if question.sliding is not None:
        alone = replace(question, causal=False, window=question.sliding)
        for name, form, window in windows(alone):
            yield Bug(name, f"sliding, {form}", FORWARD, window.see)


def candidates(question: Question, stage: str, wrong: Collection[str]) -> Iterator[Bug]:
    """More of a stage, to be tried on one sequence: arrays that are read elsewhere, parts of walks,
    and what dense passes have too."""
    sizes = (size for size in TILES if size < 2 * max(question.lengths_k))
    of_tiles = (bug for size in sizes for bug in tiles(question, size))
    every = chain(misread(question), walks.bugs(question, wrong), of_tiles)
    yield from (bug for bug in every if stage in bug.stages)


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


def _completed(
    zeros: bool, own: bool, question: Question, views: tuple[View, ...]
) -> Sequence[View]:
    """Keys that complete the last block of a sequence: zeros, or what lies there."""
    found, size = [], question.block_size
    for view in views:
        count = question.lengths_k[view.sequence]
        if view.slot is None or not count:
            return views
        first = (count - 1) // size * size
        stop = int(view.keys[count - 1]) + 1
        keys = np.arange(stop, stop - count % -size)
        keys = np.where(zeros | (keys >= len(question.k)), -1, keys)
        weight, slot = (
            np.repeat(x[..., first : first + 1], len(keys), 2) for x in (view.weight, view.slot)
        )
        weight = weight * (own | (slot >= 0))
        there = (weight > 0).any(axis=(0, 1))
        of_keys = np.concatenate([view.keys, keys[there]])
        weight = np.concatenate([view.weight, weight[..., there]], axis=2)
        slot = np.concatenate([view.slot, slot[..., there]], axis=2)
        found.append(replace(view, keys=of_keys, weight=weight, slot=slot))
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
