"""Bugs of a backward pass that walks whole tiles, and of offsets of the wrong kind."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rawattn.check.diagnose.bugs_masks import bounds, within
from rawattn.check.diagnose.bugs_operands import TILES
from rawattn.check.diagnose.engine import (
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
from rawattn.check.diagnose.question import STAGES, Question

ALL = tuple(STAGES)


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


def _whole_tiles(rows: int, keys: int) -> See:
    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        found = []
        for view in views:
            n, m = view.weight.shape[1:]
            padded = np.zeros((len(view.weight), -(-n // rows) * rows, -(-m // keys) * keys))
            padded[:, :n, :m] = view.weight
            blocks = padded.reshape(len(padded), -1, rows, padded.shape[2] // keys, keys)
            blocks[...] = (blocks > 0).any(axis=(2, 4), keepdims=True)
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
        yield Bug("neighbour-leak", f"{text}, in dk and dv", BACKWARD, see, inside)
        yield Bug("neighbour-leak", f"{text}, in dq too", BACKWARD, see)


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
