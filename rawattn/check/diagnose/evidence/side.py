"""One side of a comparison, and how an identity of its numbers is judged.

Long, since what an array may lack decides which identities there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import BY_ROW, Answers, Question
from rawattn.check.diagnose.evidence.noise import (
    EPS,
    Arrays,
    Bools,
    Float64,
    Ints,
    Noise,
    Reach,
    narrowest,
    noise_of,
    precision,
    sequences,
)
from rawattn.check.diagnose.evidence.structure import by_rows, places, side_of
from rawattn.check.diagnose.findings import Check
from rawattn.check.transfer import Array

Terms = Sequence[tuple[Float64, str]]  # inner products of an array with an answer

MARGIN = 8  # times what roundings by half a unit amount to, added up as squares
ULPS = {2: 8, 4: 256, 8: 256}  # by itemsize: what another order of a sum may change in a result


@dataclass(frozen=True)
class Side:
    """One side: ``answers`` in float64 as (tokens, heads, width), or what is ``wrong`` with them.

    dtypes: of the answers, the narrowest that holds them. unit: the error of one rounding; tiny:
    the smallest number for which that is relative. x: the inputs.
    """

    question: Question
    name: str
    answers: dict[str, Float64]
    wrong: dict[str, str]
    dtypes: dict[str, np.dtype[Any]]
    unit: float
    tiny: float
    reach: Reach
    x: Arrays

    @classmethod
    def of(cls, question: Question, answers: Answers, name: str) -> "Side":
        eps, tiny = precision(question, answers)
        good: dict[str, Float64] = {}
        wrong, dtypes = {}, {}
        for tensor, array in answers.items():
            wanted = _shape(question, tensor)
            if wanted is None or array.shape == wanted:
                good[tensor] = by_rows(tensor, array)
                dtypes[tensor] = narrowest(np.asarray(array))
            else:
                wrong[tensor] = f"{tensor} has shape {array.shape}, not {wanted}"
        if question.out is not None:
            good["given out"] = by_rows("out", question.out)
        reach = Reach(question)
        x = Arrays(question, reach)
        return cls(question, name, good, wrong, dtypes, eps / 2, tiny, reach, x)

    def branch(self, question: Question) -> "Side":
        """The same answers to another question."""
        reach = Reach(question)
        return replace(self, question=question, reach=reach, x=Arrays(question, reach))

    @cached_property
    def noise(self) -> Noise:
        return noise_of(self.question, self.reach, self.x, self.tiny)

    @property
    def ulps_of_tiny(self) -> float:
        """The error of a sum's term that is too small for its error to be relative."""
        return 4 * MARGIN * self.unit * self.tiny

    @property
    def alive(self) -> Bools:
        """(total_q, num_heads_q): which queries see any key."""
        return self.reach.count > 0

    def lacks(self, *tensors: str) -> str:
        """What of ``tensors`` is not there, in words; empty if all is."""
        lost = [t for t in tensors if t not in self.answers]
        return "; ".join(self.wrong.get(t, f"there is no {t}") for t in lost)

    # ---- sums over a sequence and a key/value head: (batch, num_heads_kv, width) --------------

    def total(self, array: Float64, of: str) -> Float64:
        """Over rows (of "q" or "k") and the heads that belong to a key/value head."""
        q = self.question
        spans = (rows if of == "q" else keys for rows, keys in sequences(q))
        sums = np.array([array[span].sum(axis=0) for span in spans])
        shape = (q.batch, q.num_heads_kv, array.shape[1] // q.num_heads_kv, array.shape[2])
        return np.asarray(sums.reshape(shape).sum(axis=2))

    def inner(self, a: Float64, b: Float64, of: str) -> Float64:
        """Of a * b, width 1."""
        return self.total((a * b).sum(axis=2, keepdims=True), of)

    def rounded(self, array: Float64) -> Float64:
        """The noise that an array has by being stored."""
        return array**2 + self.tiny**2

    def stored(self, tensor: str) -> Float64:
        """That of the total of an answer."""
        return self.total(self.rounded(self.answers[tensor]), side_of(tensor))

    def ulps(self, tensor: str) -> float:
        """What part of the size of an answer the order of sums may change."""
        dtype = self.dtypes[tensor]
        if self.question.dtype.itemsize == 2:  # then there is such arithmetic behind it
            dtype = self.question.dtype
        if dtype not in EPS:
            return 0.0
        eps = EPS[dtype] if dtype.itemsize == 2 else float(np.finfo(dtype).eps)
        return ULPS[dtype.itemsize] * eps

    def product(self, a: Float64, tensor: str) -> Float64:
        """<a, answer>, without the rows of queries that see nothing."""
        return self.inner(a, self._there(tensor), side_of(tensor))

    def stored_product(self, a: Float64, tensor: str) -> Float64:
        """The noise that ``product`` has by the answer's being stored."""
        return self.inner(a**2, self.rounded(self._there(tensor)), side_of(tensor))

    def _there(self, tensor: str) -> Float64:
        array = self.answers[tensor]
        if side_of(tensor) == "k" or array.shape[1] != self.alive.shape[1]:
            return array
        return np.where(self.alive[..., None], array, 0.0)

    # ---- identities ---------------------------------------------------------------------------

    def missing(self, name: str, text: str, why: str) -> Check:
        return Check(self.name, name, text, 0.0, 0.0, "-", why)

    def balance(
        self, name: str, text: str, left: Terms, right: Terms, noise: Float64, why: str = ""
    ) -> Check:
        """The sum of the inner products ``left`` is that of ``right``; not so for a reason ``why``.

        A rounding that always goes towards zero is a factor, so each product has its own noise.
        """
        terms = (*left, *right)
        if why := self.lacks(*(tensor for _, tensor in terms)) or why:
            return self.missing(name, text, why)
        products = [self.product(a, tensor) for a, tensor in terms]
        for product, (a, tensor) in zip(products, terms, strict=True):
            noise = noise + product**2 + self.stored_product(a, tensor)
        sum_left, sum_right = (
            np.sum(part, axis=0) for part in (products[: len(left)], products[len(left) :])
        )
        return self.equal(name, text, sum_left, sum_right, noise)

    def equal(self, name: str, text: str, left: Float64, right: Float64, noise: Float64) -> Check:
        """left = right, for every sequence and key/value head."""
        return self._sums(name, text, left - right, noise, np.maximum(abs(left), abs(right)))

    def total_is(self, name: str, text: str, tensor: str, wanted: Float64, noise: Float64) -> Check:
        """The total of an answer is ``wanted``; its own noise is not in ``noise`` yet."""
        found = self.total(self.answers[tensor], side_of(tensor))
        noise = noise + self.stored(tensor) + wanted**2
        if wanted.any():
            return self.equal(name, text, found, wanted, noise)
        return self._sums(name, text, found, noise, self.unless_zero(tensor, found))

    def unless_zero(self, tensor: str, like: Float64) -> Float64:
        """The size of what must be 0: any number is too large to be nothing, a tensor of 0 not."""
        return np.full_like(like, np.inf if self.answers[tensor].any() else 0.0)

    def _sums(self, name: str, text: str, off: Float64, noise: Float64, size: Float64) -> Check:
        looked = np.repeat(self.x.finite[:, None], self.question.num_heads_kv, axis=1)
        return self.judged(name, text, off, self._allowed(noise), size, looked)

    def rows(
        self, name: str, text: str, off: Float64, noise: Float64, size: Float64, looked: Bools
    ) -> Check:
        """off = 0, in the rows and heads of q that are ``looked`` at."""
        within = self.question.sequence_of("q")
        looked = looked & np.append(self.x.finite, False)[within][:, None]
        return self.judged(name, text, off, self._allowed(noise), size, looked, within)

    def _allowed(self, noise: Float64) -> Float64:
        return np.asarray(MARGIN * self.unit * np.sqrt(noise))

    def judged(
        self,
        name: str,
        text: str,
        off: Float64,
        allowed: Float64,
        size: Float64,
        looked: Bools,
        within: Ints | None = None,
    ) -> Check:
        """The check of |off| <= allowed, (places, heads, width), where it is ``looked``.

        size: how large the two sides are that differ by ``off``. A place is a sequence, or with
        ``within`` a row, which is in that sequence.
        """
        off, allowed, size = np.broadcast_arrays(np.abs(off), allowed, size)
        if not looked.any() or not off.size:
            return self.missing(name, text, "no place to check it at")
        ratio = np.nan_to_num(np.where(off == 0, 0.0, off / allowed), nan=0.0, posinf=np.inf)
        ratio = np.where(np.isfinite(off), ratio, np.inf)
        ratio = np.where(looked[..., None], ratio, -1.0)
        worst = np.unravel_index(ratio.argmax(), ratio.shape)
        value = np.inf if np.isnan(off[worst]) else float(off[worst])
        bad = np.asarray((ratio > 1).any(axis=2))
        verdict, where = "pass", ""
        if bad.any():
            verdict, where = "FAIL", _where(bad, looked, within, self.question)
            where = ", ".join(filter(None, (where, "NaN" * bool(np.isnan(off[bad]).any()))))
        elif not (looked[..., None] & (size > allowed)).any():
            verdict, where = "vacuous", "zeros would pass"
        return Check(self.name, name, text, value, float(allowed[worst]), verdict, where)


def _where(bad: Bools, looked: Bools, within: Ints | None, q: Question) -> str:
    """Which places are bad."""
    if within is None:
        return places(bad, looked, "kv head")
    bad_ones, looked_ones = (
        np.array([mask[within == b].any(axis=0) for b in range(q.batch)]) for mask in (bad, looked)
    )
    text = places(bad_ones, looked_ones, "head")
    if bad[looked].all():
        return text
    row, head = (int(i) for i in np.argwhere(bad)[0])
    start = int(np.asarray(q.cu_seqlens_q)[within[row]])
    first = f"first row {row - start} of sequence {within[row]}, head {head}"
    return f"{text}: {bad.sum()} of {looked.sum()} rows, {first}"


def _shape(q: Question, tensor: str) -> tuple[int, ...] | None:
    """The shape that ``tensor`` must have; None for what has no rows, the intermediates."""
    if tensor in BY_ROW:
        return q.num_heads_q, len(q.q)
    like: dict[str, Array] = {"dq": q.q, "gq": q.q, "dk": q.k, "gk": q.k, "dv": q.v, "gv": q.v}
    if q.block_indices is not None:
        like |= dict.fromkeys(("dblock_scale", "gblock_scale"), q.block_indices)
    if tensor in like:
        return tuple(like[tensor].shape)
    outs = ("out", "sliding out", "jvp out", "tout", "ddout")
    return (*q.q.shape[:2], q.v.shape[2]) if tensor in outs else None
