"""Some queries of a sequence, and patterns: in words and in numbers which keys these see."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.question import Question

Ints = np.ndarray
Bools = np.ndarray
Weights = tuple[Ints, np.ndarray]  # rows of k, -1 for a row of zeros; how often (queries, keys)

ROWS = (16, 24, 32, 48, 64, 80, 96, 128)
KEYS = (8, 16, 24, 32, 48, 64, 80, 96, 128)
CHUNKS = (4, 8, 16, 24, 32, 48, 64, 80, 96, 100, 128, 256)
PARTS = (2, 3, 4, 5, 6, 8)
REACH = 64  # how far a side of the mask may be off
OPEN = 1 << 30  # a side past every key


@dataclass(frozen=True)
class Place:
    """Some queries of a sequence: ``rows`` counted from its first one."""

    question: Question
    sequence: int
    rows: Ints

    @cached_property
    def n(self) -> int:
        return int(self.question.lengths_q[self.sequence])

    @cached_property
    def m(self) -> int:
        return int(self.question.lengths_k[self.sequence])

    @cached_property
    def start_q(self) -> int:
        return int(self.question.cu_seqlens_q[self.sequence])

    @cached_property
    def start_k(self) -> int:
        return int(self.question.cu_seqlens_k[self.sequence])

    @cached_property
    def i(self) -> Ints:
        return np.asarray(self.rows[:, None])

    @cached_property
    def j(self) -> Ints:
        return np.arange(self.m)[None]

    @cached_property
    def p(self) -> Ints:
        """The query's own place among the keys."""
        return np.asarray(self.i + (self.m - self.n))

    @cached_property
    def left(self) -> int:
        left = self.question.mask_window[0]
        return OPEN if left < 0 else left

    @cached_property
    def right(self) -> int:
        right = self.question.mask_window[1]
        return OPEN if right < 0 else right

    @cached_property
    def low(self) -> Ints:
        """The first key of the right mask, and one past the last."""
        return np.asarray(np.maximum(self.p - self.left, 0))

    @cached_property
    def high(self) -> Ints:
        return np.asarray(np.clip(self.p + self.right + 1, 0, self.m))

    @cached_property
    def seen(self) -> Bools:
        return self.between(self.low, self.high)

    @cached_property
    def keys(self) -> Ints:
        return self.start_k + np.arange(self.m)

    def between(self, low: Ints | int, high: Ints | int) -> Bools:
        return np.asarray((self.j >= low) & (self.j < high))


Bound = Callable[[Place], Ints]


class Pattern(NamedTuple):
    """``text`` says in words what a query i sees; ``bug`` is the class that it belongs to, and
    ``in_backward`` that in a backward pass alone, where this is another one."""

    text: str
    of: Callable[[Place], Weights]
    bug: str = "wrong-keys"
    in_backward: str = ""


def own(text: str, seen: Callable[[Place], np.ndarray]) -> Pattern:
    """Keys of the query's own sequence."""
    return Pattern(text, lambda x: (x.keys, seen(x)))


def spans(text: str, low: Bound, high: Bound) -> Pattern:
    return own(text, lambda x: x.between(low(x), high(x)))


def ending(text: str, high: Bound) -> Pattern:
    """Another last key."""
    return spans(f"the last key that row i sees is {text}", lambda x: x.low, high)


def beginning(text: str, low: Bound) -> Pattern:
    """Another first key."""
    return spans(f"the first key that row i sees is {text}", low, lambda x: x.high)


def part(text: str, within: Callable[[Place], Bools], tile: bool = False) -> Iterator[Pattern]:
    """Some keys, of a ``tile`` or others, are left out, alone or counted twice."""
    left_out = own(f"row i does not see {text}", lambda x: x.seen & ~within(x))
    yield left_out._replace(bug="tile-skipped") if tile else left_out
    yield own(f"row i sees {text} alone", lambda x: x.seen & within(x))
    twice = own(f"row i sees {text} twice", lambda x: x.seen * (1 + within(x)))
    yield twice._replace(bug="tile-counted-twice") if tile else twice


def right_pattern() -> Pattern:
    return own("what it should", lambda x: x.seen)


def positions(question: Question) -> Iterator[tuple[str, Bound]]:
    """A query's place among the keys: from the last one, and from the first."""
    if question.lengths_q == question.lengths_k:
        yield "i", lambda x: x.p
    else:
        yield "i + seqlen_k - seqlen_q", lambda x: x.p
        yield "i", lambda x: x.i


def plus(text: str, number: int) -> str:
    return f"{text} {'+' if number > 0 else '-'} {abs(number)}" if number else text


def in_brackets(text: str) -> str:
    return f"({text})" if " " in text else text


def keys(count: int) -> str:
    return f"{count} key{'s' if count > 1 else ''}"


def longest(question: Question) -> int:
    return max((*question.lengths_q, *question.lengths_k), default=0)


def below(sizes: Iterable[int], most: int) -> list[int]:
    return [size for size in sizes if size < most]


def ceil(x: Ints | int, tile: int) -> Ints:
    return np.asarray(-(-x // tile) * tile)


def floor(x: Ints | int, tile: int) -> Ints:
    return np.asarray(x // tile * tile)
