"""Keys that are none of the query's own: of other sequences, and rows of zeros."""

from collections.abc import Callable, Iterator

import numpy as np

from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.inferred.keys.pattern import (
    KEYS,
    REACH,
    Bools,
    Ints,
    Pattern,
    Place,
    Weights,
    below,
    ceil,
    floor,
    longest,
)


def others(question: Question) -> Iterator[Pattern]:
    """All that can matter for the question."""
    if question.lengths_q != question.lengths_k:
        yield from _offsets_of_queries(question)
    if question.batch > 1 or len(question.k) > int(question.cu_seqlens_k[-1]):
        yield from _another_sequence(question)
        yield from _packed(question)
    yield from _zeros(question)


# ---- rows of other sequences ------------------------------------------------------------------


def _from_row(text: str, start: Callable[[Place], int], length: Callable[[Place], int]) -> Pattern:
    """Rows of k from ``start`` on, with the mask of a sequence of that length."""

    def of(x: Place) -> Weights:
        count = max(length(x), 0)
        j = np.arange(count)[None]
        p = x.i + count - x.n
        seen = (j >= p - x.left) & (j <= p + x.right)
        rows = start(x) + np.arange(count)
        inside = (rows >= 0) & (rows < len(x.question.k))
        return rows[inside], seen[:, inside]

    return Pattern(text, of)


def _offsets_of_queries(question: Question) -> Iterator[Pattern]:
    ends = question.cu_seqlens_q
    yield _from_row("keys begin at row cu_seqlens_q[b] of k", lambda x: x.start_q, lambda x: x.m)
    yield _from_row(
        "keys are the rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of k",
        lambda x: x.start_q,
        lambda x: x.n,
    )
    yield _from_row(
        "keys are seqlen_q rows of k from cu_seqlens_k[b] on", lambda x: x.start_k, lambda x: x.n
    )
    yield _from_row(
        "keys are the rows cu_seqlens_k[b] .. cu_seqlens_q[b + 1] - 1 of k",
        lambda x: x.start_k,
        lambda x: int(ends[x.sequence + 1]) - x.start_k,
    )


def _another_sequence(question: Question) -> Iterator[Pattern]:
    batch, most = question.batch, max(question.lengths_k)
    average = int(question.cu_seqlens_k[-1]) // batch
    numbers: dict[str, Callable[[int], int]] = {
        "of the next sequence": lambda b: (b + 1) % batch,
        "of the sequence before": lambda b: (b - 1) % batch,
        "of sequence 0": lambda b: 0,
        "of the last sequence": lambda b: batch - 1,
        "of the sequence of the same number from the end": lambda b: batch - 1 - b,
    }
    for text, other in numbers.items():
        yield from _keys_of(text, other)
    yield _from_row(
        "keys begin at b * (the longest length), as in a padded array",
        lambda x: x.sequence * most,
        lambda x: x.m,
    )
    yield _from_row(
        "keys begin at b * (the average length)", lambda x: x.sequence * average, lambda x: x.m
    )


def _keys_of(text: str, other: Callable[[int], int]) -> Iterator[Pattern]:
    def start(x: Place) -> int:
        return int(x.question.cu_seqlens_k[other(x.sequence)])

    def length(x: Place) -> int:
        return int(x.question.lengths_k[other(x.sequence)])

    yield _from_row(f"keys are those {text}", start, length)
    yield _from_row(
        f"keys begin with those {text}, as many as the own sequence has", start, lambda x: x.m
    )
    yield _from_row(f"keys are as many as those {text}", lambda x: x.start_k, length)


def _rows(
    text: str, low: Callable[[Place], Ints | int], high: Callable[[Place], Ints | int]
) -> Pattern:
    """Rows of k as a whole between two bounds, the own ones among them."""

    def of(x: Place) -> Weights:
        j = np.arange(len(x.question.k))
        seen = (j[None] >= low(x)) & (j[None] < high(x))
        return j, np.broadcast_to(seen, (len(x.rows), len(j)))

    return Pattern(text, of, "neighbour-leak")


def _packed(question: Question) -> Iterator[Pattern]:
    """Masks by rows of k as a whole, whose sequences do not count."""
    total, most = len(question.k), max(question.lengths_k)
    yield _rows("row i sees the keys of every sequence", lambda x: 0, lambda x: total)
    yield from _by_packed_row("the packed row of q", lambda x: x.start_q + x.i)
    yield from _by_packed_row("its own place", lambda x: x.start_k + x.p)
    yield _rows(
        "row i sees the keys of all sequences before as well",
        lambda x: 0,
        lambda x: x.start_k + x.high,
    )
    yield _rows(
        "row i sees the keys of all sequences behind as well",
        lambda x: x.start_k + x.low,
        lambda x: total,
    )
    yield _rows(
        "row i sees as many rows of k as the longest sequence has",
        lambda x: x.start_k + x.low,
        lambda x: np.minimum(x.start_k + x.p + x.right + 1, x.start_k + most),
    )
    for count in range(1, REACH):
        yield _beyond(f"{count} keys past its sequence's end", 0, count)
        yield _beyond(f"{count} keys before its sequence's start", count, 0)
        yield _beyond(f"{count} keys beyond both ends of its sequence", count, count)
    for tile in below(KEYS, 2 * longest(question)):
        yield from _whole_tiles(tile)


def _by_packed_row(words: str, at: Callable[[Place], Ints]) -> Iterator[Pattern]:
    yield _rows(
        f"row i sees keys of other sequences as well; the mask goes by {words}",
        lambda x: np.maximum(at(x) - x.left, 0),
        lambda x: at(x) + x.right + 1,
    )
    yield _rows(
        f"row i sees keys of sequences before as well, up to its own end; the mask goes by {words}",
        lambda x: np.maximum(at(x) - x.left, 0),
        lambda x: np.minimum(at(x) + x.right + 1, x.start_k + x.m),
    )
    yield _rows(
        f"row i sees keys past its sequence's end as well; the mask goes by {words}",
        lambda x: np.maximum(at(x) - x.left, x.start_k),
        lambda x: at(x) + x.right + 1,
    )
    yield _rows(f"row i sees all rows of k up to {words}", lambda x: 0, lambda x: at(x) + 1)


def _beyond(words: str, before: int, after: int) -> Pattern:
    return _rows(
        f"row i sees {words}, too",
        lambda x: x.start_k + np.where(x.low > 0, x.low, -before),
        lambda x: x.start_k + np.where(x.high < x.m, x.high, x.m + after),
    )


def _whole_tiles(tile: int) -> Iterator[Pattern]:
    yield _rows(
        f"row i sees the keys of whole tiles of {tile} rows of k as a whole",
        lambda x: floor(x.start_k + x.low, tile),
        lambda x: ceil(x.start_k + x.high, tile),
    )
    yield _rows(
        f"row i sees the keys from the tile of {tile} rows of k in which its sequence begins",
        lambda x: floor(x.start_k + x.low, tile),
        lambda x: x.start_k + x.high,
    )
    yield _rows(
        f"row i sees keys of whole tiles of {tile}, past its sequence's end",
        lambda x: x.start_k + x.low,
        lambda x: x.start_k + np.where(x.high < x.m, x.high, ceil(x.m, tile)),
    )


# ---- rows of zeros ----------------------------------------------------------------------------


def _beside(text: str, count: Callable[[Place], int], seen: Callable[[Place], Bools]) -> Pattern:
    """As many rows of zeros, and those keys of the own sequence that are ``seen``."""

    def of(x: Place) -> Weights:
        zeros = np.full(count(x), -1)
        weight = np.ones((len(x.rows), len(zeros) + x.m))
        weight[:, len(zeros) :] = seen(x)
        return np.concatenate([zeros, x.keys]), weight

    return Pattern(text, of)


def _padding(x: Place) -> int:
    """What a padded array has beside the sequence."""
    return int(max(x.question.lengths_k)) - x.m


def _zeros(question: Question) -> Iterator[Pattern]:
    as_many = "rows of zeros are seen, as many as pad the sequence to the longest"
    yield _beside(
        f"{as_many}, and as many keys from the end are hidden (padding on the left, a key mask for "
        "padding on the right)",
        _padding,
        lambda x: x.seen & (x.j < x.m - _padding(x)),
    )
    yield _beside(
        f"{as_many}, and as many keys from the start are hidden (padding on the right, a key mask "
        "for padding on the left)",
        _padding,
        lambda x: x.seen & (x.j >= _padding(x)),
    )
    yield _padded(f"{as_many}, beside the own keys", _padding)
    yield _beside(f"{as_many}, and no own key", _padding, lambda x: np.zeros_like(x.seen))
    for count in range(2, 2 * REACH):
        yield _some_zeros(count)
    for tile in KEYS:
        yield _zeros_to(tile)


def _padded(text: str, count: Callable[[Place], int]) -> Pattern:
    return _beside(text, count, lambda x: x.seen)._replace(bug="padded-keys")


def _some_zeros(count: int) -> Pattern:
    text = f"{count} rows of zeros are seen beside the own keys"
    return _padded(text, lambda x: count)


def _zeros_to(tile: int) -> Pattern:
    text = f"rows of zeros are seen, as many as pad the sequence to tiles of {tile}"
    return _padded(text, lambda x: -x.m % tile)
