"""Where queries and keys of a packed problem stand, and what may be said of a pair of them.

Long by the table of features.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rawattn.check.diagnose.engine.question import Question
from rawattn.reference.dense import capped, dead_to_inf

Array = np.ndarray
TILES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, eq=False)
class Places:
    """Pairs (total_q, total_k) of every query with every key of the pack, those of other sequences
    too; i and j count in the query's own sequence, so that j may lie before or behind it.
    """

    question: Question

    @cached_property
    def b(self) -> Array:
        """(total_q, 1) sequence of the query."""
        return self.question.sequence_of("q")[:, None]

    @cached_property
    def i(self) -> Array:
        """(total_q, 1)."""
        q = self.question
        return np.asarray(np.arange(len(q.q))[:, None] - np.asarray(q.cu_seqlens_q)[self.b])

    @cached_property
    def j(self) -> Array:
        """(total_q, total_k)."""
        q = self.question
        return np.asarray(np.arange(len(q.k))[None, :] - np.asarray(q.cu_seqlens_k)[self.b])

    @cached_property
    def n(self) -> Array:
        """(total_q, 1) queries of the sequence."""
        return np.array(np.asarray(self.question.lengths_q)[self.b])

    @cached_property
    def m(self) -> Array:
        """(total_q, 1) its keys in use."""
        return np.array(np.asarray(self.question.lengths_k)[self.b])

    @cached_property
    def p(self) -> Array:
        """(total_q, 1) the key that a query stands at."""
        return np.asarray(self.i + self.m - self.n)

    @cached_property
    def own(self) -> Array:
        return np.asarray((self.j >= 0) & (self.j < self.m))

    @cached_property
    def right(self) -> Array:
        """(total_q, total_k): which key a query must see."""
        left, right = self.question.mask_window
        seen = self.own.copy()
        seen &= (self.j - self.p >= -left) | (left < 0)
        seen &= (self.j - self.p <= right) | (right < 0)
        return seen

    @cached_property
    def aligned(self) -> bool:
        """Whether every sequence has as many keys as queries, so that p is i."""
        return self.question.lengths_q == self.question.lengths_k

    @cached_property
    def features(self) -> dict[str, Array]:
        """Integers of every pair, or of every query (total_q, 1), the plainest first, by what they
        are called."""
        i, j, p, n, m = self.i, self.j, self.p, self.n, self.m
        key, query = np.arange(j.shape[1])[None], np.arange(j.shape[0])[:, None]
        of = "i" if self.aligned else "p"
        found = {f"j - {of}": j - p, "j": j, "seqlen_k - 1 - j": m - 1 - j}
        found |= {"i": i, "seqlen_q - 1 - i": n - 1 - i}
        if not self.aligned:
            found |= {"j - i": j - i, "p": p}
        found |= {"seqlen_k": m, "seqlen_q": n, "the sequence": self.b}
        sequence = self.question.sequence_of("k")[None]
        found["the key's sequence - the query's"] = sequence - self.b
        for t in TILES:
            found |= {
                f"j // {t} - {of} // {t}": j // t - p // t,
                f"j // {t}": j // t,
                f"(seqlen_k - 1) // {t} - j // {t}": (m - 1) // t - j // t,
                f"j - seqlen_k // {t} * {t}": j - m // t * t,
                f"i // {t}": i // t,
                f"i - seqlen_q // {t} * {t}": i - n // t * t,
                f"j % {t}": j % t,
                f"i % {t}": i % t,
                f"(j - {of}) % {t}": (j - p) % t,
                f"j // {t} % 2": j // t % 2,
                f"j // {t} - {of} // {t} % 2": (j // t - p // t) % 2,
                f"(j - {of} // {t} * {t})": j - p // t * t,
                f"(j // {t} * {t} - {of})": j // t * t - p,
            }
        width = self.question.v.shape[2]
        found |= {"the row of the key in k": key, "the row of the query in q": query}
        found["the row in k - the row in q"] = key - query
        found |= {
            "2 j - seqlen_k": 2 * j - m,
            "j - the longest seqlen_k": j - max(self.question.lengths_k),
        }
        found["j - the seqlen_k of sequence 0"] = j - self.question.lengths_k[0]
        found |= {"the row in k - i": key - i, "the row in k - seqlen_k": key - m}
        found["the column of out"] = key % width  # in which weights of this key are read
        return found


@dataclass(frozen=True, eq=False)
class Right:
    """What a right computation has of ``places``: scores S of all pairs and weights P, both
    (num_heads_q, total_q, total_k), lse (num_heads_q, total_q), out like ``Question.out``.
    """

    places: Places

    @cached_property
    def S(self) -> Array:
        q = self.places.question
        keys = q.k.astype(np.float64).transpose(1, 2, 0).repeat(q.group, axis=0)
        Y = q.scale * (q.q.astype(np.float64).swapaxes(0, 1) @ keys)
        return np.asarray(capped(np, Y, q.softcap, lambda x: x)[0])

    @cached_property
    def lse(self) -> Array:
        q = self.places.question
        found = log_sum(np.where(self.places.right, self.S, -np.inf))
        if q.sinks is not None:
            found = np.logaddexp(found, np.asarray(q.sinks, dtype=np.float64)[:, None])
        return found

    @cached_property
    def P(self) -> Array:
        seen = np.where(self.places.right, self.S, -np.inf)
        return np.asarray(np.exp(seen - dead_to_inf(np, self.lse)[..., None]))

    @cached_property
    def out(self) -> Array:
        q = self.places.question
        v = q.v.astype(np.float64).swapaxes(0, 1).repeat(q.group, axis=0)
        return np.asarray((self.P @ v).swapaxes(0, 1))


def log_sum(x: Array) -> Array:
    """The logarithm of the sum of exp over the last axis; -inf of nothing."""
    top = x.max(axis=-1, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(x - top[..., None]).sum(axis=-1)) + top)
