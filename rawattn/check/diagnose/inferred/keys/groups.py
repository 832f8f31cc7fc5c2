"""Masks that go by a head's place in its group, as where the heads of a group are packed as rows.

A kernel that has a row for every query and every head of a group must not compare such a row's
number with that of a key.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import FIRST, Bug, See, View
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.inferred.keys.pattern import (
    KEYS,
    ROWS,
    Bools,
    Ints,
    Place,
    below,
    ceil,
    floor,
    longest,
)
from rawattn.check.diagnose.inferred.keys.sums import Sums, size_of, some_heads, sums_of

FEW, MANY = 10, 40  # rows of the first look, and of the second one in every sequence
SEQUENCES, HEADS = 3, 4  # that are looked at
TOLD = 3  # patterns that are as good
DIVISORS = (2, 3, 4, 8, 16)

At = Callable[[Place, Ints], Ints]  # of rows and heads (heads, 1, 1): a row's place, (h, rows, 1)


class Mask(NamedTuple):
    """In words, and which keys (heads, rows, keys) are seen."""

    text: str
    seen: Callable[[Place, Ints], Bools]


def bugs(question: Question, answers: Answers, stage: str, exact: float) -> Iterator[Bug]:
    """Those that explain the answers; ``exact``: what an error may be."""
    if question.group == 1 or max(question.mask_window) < 0:
        return
    looks = list(_looks(question, answers, stage))
    if not looks:
        return
    first = looks[0].part(np.unique(np.linspace(0, len(looks[0].place.rows) - 1, FEW).astype(int)))
    told: list[tuple[float, int, Mask]] = []
    for number, mask in enumerate(_masks(question)):
        if _error([first], mask) < exact:
            left = _error(looks, mask)
            if left < exact:
                told.append((left, number, mask))
    if told:
        least = min(left for left, _, _ in told)
        as_good = [mask for left, _, mask in told if left <= 3 * least + 1e-9]
        for mask in as_good[:TOLD]:
            stages = (*FIRST, "second", "jvp")
            yield Bug("wrong-keys", mask.text, stages, _planted(mask))


def _looks(question: Question, answers: Answers, stage: str) -> Iterator[Sums]:
    """The longest sequences, with heads of one group."""
    heads = some_heads(np.arange(question.group), HEADS)
    lengths = [(n, b) for b, n in enumerate(question.lengths_q) if n and question.lengths_k[b]]
    for n, b in sorted(lengths, reverse=True)[:SEQUENCES]:
        rows = np.unique(np.linspace(0, n - 1, MANY).astype(int))
        sums = sums_of(question, answers, stage, Place(question, b, rows), heads)
        if sums is not None:
            yield sums


def _error(looks: Sequence[Sums], mask: Mask) -> float:
    """What is left of the worse test; of a backward pass, of that with its given lse."""
    errors: dict[str, list[np.ndarray]] = {}
    for sums in looks:
        weight = mask.seen(sums.place, sums.heads[:, None, None]).astype(np.float64)
        x = sums.place
        own = sums.terms[..., x.start_k : x.start_k + x.m]
        for test, error in sums.judge(np.einsum("khrc,hrc->khr", own, weight)).items():
            errors.setdefault(test, []).append(error)
    errors.pop("own dq", None)
    return max(size_of(of_test) for of_test in errors.values())


def _planted(mask: Mask) -> See:
    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        found = []
        for view in views:
            place = Place(
                question, view.sequence, view.rows - int(question.cu_seqlens_q[view.sequence])
            )
            weight = mask.seen(place, view.heads[:, None, None]).astype(np.float64)
            found.append(replace(view, keys=place.keys, weight=weight))
        return found

    return see


# ---- masks ------------------------------------------------------------------------------------


def _masks(question: Question) -> Iterator[Mask]:
    """The plainest first: to the last key, and cut at tiles."""
    for text, at in _places(question):
        yield _mask(f"row i of head g of a group sees what a row {text} should", at, 0, 0)
    most = 2 * longest(question)
    for text, at in _places(question):
        for packed in below((16, 32, 64, 128, 256), question.group * most):
            for tile in below(KEYS, most):
                if packed >= question.group:
                    said = (
                        f"row i of head g of a group sees what a row {text} should, in the tiles "
                        f"of {tile} keys that its tile of {packed} packed rows walks"
                    )
                    yield _mask(said, at, packed // question.group, tile)
        for rows in below(ROWS, most):
            for tile in below(KEYS, most):
                said = (
                    f"row i of head g of a group sees what a row {text} should, in the tiles of "
                    f"{tile} keys that its tile of {rows} queries walks"
                )
                yield _mask(said, at, rows, tile)


def _places(question: Question) -> Iterator[tuple[str, At]]:
    """Numbers that are taken for the query's place."""
    group, heads = question.group, question.num_heads_q

    def packed(x: Place, h: Ints) -> Ints:
        return np.asarray(group * x.i + h % group)

    yield f"{group} i + g", packed
    yield "g seqlen_q + i", lambda x, h: h % group * x.n + x.i
    yield "i + g", lambda x, h: x.p + h % group
    yield "i - g", lambda x, h: x.p - h % group
    yield "i + h, h the head", lambda x, h: x.p + h
    yield f"{heads} i + h, h the head", lambda x, h: heads * x.i + h
    for divisor in DIVISORS:
        if divisor != group:
            yield f"({group} i + g) / {divisor}", _divided(packed, divisor)
    if question.lengths_q != question.lengths_k:
        yield (
            f"{group} i + g + seqlen_k - seqlen_q",
            lambda x, h: packed(x, h) + x.m - x.n,
        )
        yield (
            f"{group} (i + seqlen_k - seqlen_q) + g",
            lambda x, h: group * x.p + h % group,
        )


def _divided(at: At, divisor: int) -> At:
    return lambda x, h: at(x, h) // divisor


def _mask(text: str, at: At, rows: int, tile: int) -> Mask:
    """Cut at the tiles of keys that a tile of ``rows`` queries walks, unless these are 0."""

    def seen(x: Place, heads: Ints) -> Bools:
        place = at(x, heads)
        found = (x.j >= place - x.left) & (x.j <= place + x.right)
        if rows:
            first = x.p - x.i % rows
            stop = ceil(np.minimum(np.minimum(first + rows, x.p - x.i + x.n) + x.right, x.m), tile)
            start = floor(np.maximum(first - x.left, 0), tile)
            found = found & (x.j < stop) & (x.j >= start)
        return np.asarray(found)

    return Mask(text, seen)
