"""Bugs of block-sparse attention: ``lists`` of blocks, ``walks``, ``gates``, the sliding branch."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain

import numpy as np

from rawattn.check.diagnose.catalogue.masks import windows
from rawattn.check.diagnose.catalogue.sparse import gates, walks
from rawattn.check.diagnose.catalogue.sparse.lists import UNION, listed, misread, rows
from rawattn.check.diagnose.catalogue.tiles import tiles
from rawattn.check.diagnose.engine.attention import FORWARD, Bug, See, View, each, views_of
from rawattn.check.diagnose.engine.question import Question


@lru_cache(maxsize=1)
def bugs(question: Question) -> tuple[Bug, ...]:
    """Every bug of the catalogue that can matter for the question."""
    return tuple(_bugs(question))


def _bugs(question: Question) -> Iterator[Bug]:
    different = _differing(question)
    found = [(name, words, listed(change)) for name, words, change in rows(question)]
    last = "a last block that is selected"
    found.append(("padded-keys", f"zeros in {last}", each(_completed, True)))
    found.append(("neighbour-leak", f"up to the end of {last}", each(_completed, False)))
    for name, words, see in found:
        if different(see) or name == UNION:  # of sizes that are alike here other lengths tell
            yield Bug(name, words, see=see)
    if question.block_scale is not None:
        yield from gates.bugs(question, different)
    if question.sliding is not None:
        for name, form, window in windows(replace(question, window=question.sliding)):
            yield Bug(name, f"sliding, {form}", FORWARD, window.see)


def of_weights(question: Question) -> Iterator[Bug]:
    """All that change who sees whom, how often, or by what factor, whether they show or not."""
    yield from (Bug(name, words, see=listed(change)) for name, words, change in rows(question))
    if question.block_scale is not None:
        yield from gates.bugs(question, lambda see: True)
    yield from chain(misread(question), gates.misread(question), walks.cut(question))


def candidates(question: Question, stage: str, wrong: Collection[str]) -> Iterator[Bug]:
    """More of a stage, tried on one sequence: other arrays, parts of walks, tiles."""
    of_walks = chain(walks.cut(question), walks.bugs(question, wrong), walks.stale(question))
    of_lists = chain(misread(question), gates.misread(question))
    every = chain(of_lists, of_walks, tiles(question))
    yield from (bug for bug in every if stage in bug.stages)


def _differing(question: Question) -> Callable[[See], bool]:
    """Whether a bug shows other views than the right ones, and than all that were asked before."""
    seen = set[bytes]()

    def different(see: See) -> bool:
        found: list[object] = []
        for view in see(question, views_of(question)):
            found += [view.keys, view.weight]
            if question.block_scale is not None:
                found += [np.where(view.weight > 0, np.asarray(view.slot), -1), view.selections]
        key = b"".join(np.asarray(x, dtype=np.float64).tobytes() for x in found)
        new = key not in seen
        seen.add(key)
        return new

    different(lambda question, views: views)
    return different


def _completed(zeros: bool, question: Question, view: View) -> View:
    """Keys that complete a last block that is selected: zeros, or what lies there."""
    count, there, size = question.lengths_k[view.sequence], len(view.keys), question.block_size
    if view.slot is None or not count:
        return view
    stop = int(view.keys[count - 1]) + 1
    keys = np.arange(stop, stop - count % -size)
    keys = np.where(zeros | (keys >= len(question.k)), -1, keys)
    like = np.append(np.arange(there), np.full(len(keys), (count - 1) // size * size))
    weight, slot = view.weight[..., like], view.slot[..., like]
    weight[..., there:] *= slot[..., there:] >= 0
    return replace(view, keys=np.append(view.keys, keys), weight=weight, slot=slot)
