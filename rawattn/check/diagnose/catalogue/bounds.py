"""Bugs of a backward pass that walks whole tiles, and of offsets of the wrong kind."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue.maps import TILES
from rawattn.check.diagnose.catalogue.masks import bounds, within
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    OWN_P,
    STEPS,
    Bug,
    Context,
    Floats,
    See,
    Step,
    View,
    dense_views,
)
from rawattn.check.diagnose.engine.question import STAGES, Question

ALL = tuple(STAGES)
SOME_TILES = (
    "which tiles of the backward loop are masked: every one that the diagonal crosses, which are "
    "several where the tiles of the two sides differ in size"
)
QUERIES = (
    "the last tile of queries in the kernel of dk and dv: rows past the end of the sequence must "
    "be masked, or their q, dout, lse and delta loaded such that P is 0"
)


def in_tiles(question: Question) -> Iterator[Bug]:
    """A backward pass that skips tiles without a visible pair, and masks nothing in the others."""
    if question.mask_window == (-1, -1):
        return
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    sizes = [tile for tile in (8, *TILES) if tile < 2 * longest]
    alike = sorted(
        itertools.product(sizes, sizes), key=lambda pair: abs(math.log(pair[0] / pair[1]))
    )
    for rows, keys in alike:
        see = _whole_tiles(rows, keys)
        text = f"in tiles of {rows} by {keys}"
        for form, steps in (("exp(S - lse)", {}), ("softmax", OWN_P)):
            yield Bug("mask-missing-in-backward", f"{text}, {form}", BACKWARD, see, steps)


def in_some_tiles(question: Question) -> Iterator[Bug]:
    """A backward pass that masks the first or the last tile of its loop alone, where the diagonal
    crosses several, since the tiles of one side are the larger ones."""
    if question.mask_window == (-1, -1):
        return
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    sizes = [tile for tile in (8, *TILES) if tile < 2 * longest]
    pairs = [(rows, keys) for rows, keys in itertools.permutations(sizes, 2)]
    for rows, keys in sorted(pairs, key=lambda pair: abs(math.log(pair[0] / pair[1]))):
        loop, of = ("query", "key") if rows < keys else ("key", "query")
        for last in (False, True):
            see = _whole_tiles(rows, keys, last)
            end = "last" if last else "first"
            text = f"masked is the {end} {loop} tile of {min(rows, keys)} alone of those that a "
            text += f"{of} tile of {max(rows, keys)} visits"
            for form, steps in (("exp(S - lse)", {}), ("softmax", OWN_P)):
                form = f"{text}, {form}"
                yield Bug("mask-missing-in-backward", form, BACKWARD, see, steps, None, SOME_TILES)


def _whole_tiles(rows: int, keys: int, masked_at_end: bool | None = None) -> See:
    """Tiles with a visible pair are seen as a whole; all, or all but the last (the first) of those
    of the smaller side that a tile of the larger side visits."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        found = []
        for view in views:
            n, m = view.weight.shape[1:]
            padded = np.zeros((len(view.weight), -(-n // rows) * rows, -(-m // keys) * keys))
            padded[:, :n, :m] = view.weight
            blocks = padded.reshape(len(padded), -1, rows, padded.shape[2] // keys, keys)
            seen = (blocks > 0).any(axis=(2, 4), keepdims=True)
            axis = 1 if rows < keys else 3
            masked = np.zeros_like(seen)
            if masked_at_end is not None:
                number = np.cumsum(seen, axis=axis)
                masked = number == (number.max(axis=axis, keepdims=True) if masked_at_end else 1)
            blocks[...] = np.where(masked, blocks, seen)
            found.append(replace(view, weight=padded[:, :n, :m].copy()))
        return found

    return see


def leaking_queries(question: Question) -> Iterator[Bug]:
    """The last tile of queries goes on into the next sequence, in dk and dv, or in dq as well."""
    if question.batch == 1 and len(question.q) == question.cu_seqlens_q[-1]:
        return
    longest = max(question.lengths_q, default=0)
    forms: dict[str, Callable[[int], int]] = {"one query after the end": lambda n: 1}
    for tile in (tile for tile in (8, *TILES) if tile < 2 * longest):
        forms[f"queries up to a tile of {tile}"] = _to_tile(tile)
    forms["queries up to the longest length"] = lambda n: longest - n
    for text, more in forms.items():
        see = _more_queries(more)
        inside: dict[str, Step] = {"dQ": _own_dq}
        for form, steps in (("in dk and dv", inside), ("in dq too", {})):
            yield Bug("neighbour-leak", f"{text}, {form}", BACKWARD, see, steps, None, QUERIES)


def _to_tile(tile: int) -> Callable[[int], int]:
    return lambda n: -n % tile


def _more_queries(more: Callable[[int], int]) -> See:
    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        found = []
        total = len(question.q)
        for view in views:
            n, m = len(view.rows), len(view.keys)
            rows = np.arange(view.rows[0], min(view.rows[0] + n + more(n), total))
            distance = np.arange(m)[None, :] - np.arange(len(rows))[:, None] - (m - n)
            weight = within(distance, *bounds(question))
            found.append(replace(view, rows=rows, weight=weight))
        return found

    return see


def _own_dq(c: Context) -> Floats:
    length = c.question.lengths_q[c.view.sequence]
    dQ = np.asarray(STEPS["dQ"](c)).copy()
    dQ[:, length:] = 0
    return dQ


def other_offsets(question: Question) -> Iterator[Bug]:
    """cu_seqlens of 64 bits read as if they had 32, or one for the other side's."""

    for sides in ("qk", "q", "k"):
        text = f"64 bits of cu_seqlens_{sides} read as 32"
        yield Bug("offsets-shifted", text, ALL, _halves(sides))
    if question.lengths_q == question.lengths_k:
        return
    for text, start, length in (("start", True, False), ("length", False, True)):
        yield Bug(
            "offsets-shifted", f"{text} of keys by cu_seqlens_q", ALL, _keys_as(start, length)
        )
    yield Bug("offsets-shifted", "cu_seqlens_q for cu_seqlens_k", ALL, _keys_as(True, True))


def _halves(sides: str) -> See:
    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        changes: dict[str, Any] = {}
        for name in (f"cu_seqlens_{side}" for side in sides):
            wide = np.asarray(getattr(question, name), dtype="<i8")
            changes[name] = wide.view("<i4")[: len(wide)].astype(np.int64)
        return list(dense_views(replace(question, **changes), question.mask_window))

    return see


def _keys_as(start: bool, length: bool) -> See:
    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        found = []
        for view in views:
            b = view.sequence
            first = int((question.cu_seqlens_q if start else question.cu_seqlens_k)[b])
            count = (question.lengths_q if length else question.lengths_k)[b]
            keys = np.arange(first, min(first + count, len(question.k)))
            n, m = len(view.rows), len(keys)
            shift = (question.lengths_k[b] if not length else count) - n
            distance = np.arange(m)[None, :] - np.arange(n)[:, None] - shift
            found.append(replace(view, keys=keys, weight=within(distance, *bounds(question))))
        return found

    return see
