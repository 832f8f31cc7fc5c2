"""One side of a comparison, and how an identity of its numbers is judged.

Identities are linear in the answers. What rounding may do to one is measured: the right answers
are computed with their operations rounded, and the identity is asked of these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.attention import NONE, Rounding, empty, exact, solve
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.precision import (
    HELD_TO,
    TINY,
    coarsest,
    narrowest,
    ways_to_round,
)
from rawattn.check.diagnose.evidence.reach import BY_TOKENS, Bools, Float64, Ints, Reach, sequences
from rawattn.check.diagnose.evidence.structure import by_rows, places, side_of
from rawattn.check.diagnose.findings import Check

Terms = Sequence[tuple[Float64, str]]  # inner products of an array with an answer

MARGIN = 12  # times what rounding was measured to do
ULPS = {2: 8, 4: 256, 8: 256}  # by itemsize: what another order of a sum may change in a result
OF_Q = ("q", "tq", "dout", "dlse")


@dataclass(frozen=True)
class Side:
    """One side: ``answers`` in float64 as (tokens, heads, width), or what is ``wrong`` with them.

    dtypes: of the answers, the narrowest that holds them; ``dtype``: the coarsest. x: the inputs
    in float64 like that, 0 where there are none or nobody looks at them. finite: which sequences
    have no NaN or inf in them.
    """

    question: Question
    name: str
    answers: dict[str, Float64]
    wrong: dict[str, str]
    dtypes: dict[str, np.dtype[Any]]
    dtype: np.dtype[Any]
    reach: Reach
    x: dict[str, Float64]
    finite: Bools

    @classmethod
    def of(cls, question: Question, answers: Answers, name: str) -> "Side":
        shapes = {
            n: x.shape for stage in question.stages for n, x in empty(question, stage).items()
        }
        shapes |= {f"sliding {n}": shapes[n] for n in ("out", "lse")}
        good, wrong = {}, {}
        for tensor, array in answers.items():
            wanted = shapes.get(tensor, array.shape)
            if array.shape == wanted:
                good[tensor] = by_rows(tensor, array)
            else:
                wrong[tensor] = f"{tensor} has shape {array.shape}, not {wanted}"
        dtypes = {tensor: narrowest(np.asarray(answers[tensor])) for tensor in good}
        if question.out is not None:
            good["given out"] = by_rows("out", question.out)
        reach = Reach(question)
        given = good, wrong, dtypes, coarsest(question, answers)
        return cls(question, name, *given, reach, *_inputs(question, reach))

    @property
    def alive(self) -> Bools:
        """(total_q, num_heads_q): which queries see any key."""
        return np.asarray(self.reach.count > 0)

    @property
    def unit(self) -> float:
        """The error of one rounding."""
        return HELD_TO[self.dtype] / 2

    def lacks(self, *tensors: str) -> str:
        """What of ``tensors`` is not there, in words; empty if all is."""
        lost = [t for t in tensors if t not in self.answers]
        return "; ".join(self.wrong.get(t, f"there is no {t}") for t in lost)

    # ---- what rounding does -------------------------------------------------------------------

    @cached_property
    def clean(self) -> Question:
        """The question with ``x`` for its inputs."""
        names = [f.name for f in fields(Question) if f.name in (*OF_Q, *BY_TOKENS["k"])]
        given: dict[str, Any] = {
            n: self.x[n] for n in names if getattr(self.question, n) is not None
        }
        if "dlse" in given:
            given["dlse"] = given["dlse"][..., 0].T
        return replace(self.question, **given)

    @cached_property
    def right(self) -> dict[str, Float64]:
        """The exact answers, by rows."""
        return self._solved(NONE, exact)

    @cached_property
    def rounded(self) -> list[dict[str, Float64]]:
        """Right answers with every operation rounded, once each way."""
        ways, factor = ways_to_round(self.dtype)
        found = []
        for r in ways:
            other = self._solved(Rounding(r, r), r)
            found.append(
                {n: self.right[n] + factor * (x - self.right[n]) for n, x in other.items()}
            )
        return found

    def _solved(
        self, rounding: Rounding, store: Callable[[Float64], Float64]
    ) -> dict[str, Float64]:
        q = self.clean
        forward = solve(q, "forward", rounding=rounding)
        given = q.passed or (store(forward["out"]), forward["lse"])
        found = dict(forward)
        for stage in q.stages[1:]:
            found |= solve(q, stage, rounding=rounding, given=given)
        found["given out"] = np.asarray(given[0]).astype(np.float64)
        return {n: store(by_rows(n, x)) for n, x in found.items() if x.ndim > 1}

    # ---- sums over a sequence and a key/value head: (batch, num_heads_kv, width) --------------

    def total(self, array: Float64, of: str) -> Float64:
        """Over rows (of "q" or "k") and the heads that belong to a key/value head."""
        q = self.question
        spans = (rows if of == "q" else keys for rows, keys in sequences(q))
        sums = np.array([array[span].sum(axis=0) for span in spans])
        shape = (q.batch, q.num_heads_kv, array.shape[1] // q.num_heads_kv, array.shape[2])
        return np.asarray(sums.reshape(shape).sum(axis=2))

    def product(self, a: Float64, tensor: str, of: dict[str, Float64] | None = None) -> Float64:
        """<a, answer>, without the rows of queries that see nothing; width 1."""
        array = (self.answers if of is None else of)[tensor]
        if side_of(tensor) == "q" and array.shape[1] == self.alive.shape[1]:
            array = np.where(self.alive[..., None], array, 0.0)
        return self.total((a * array).sum(axis=2, keepdims=True), side_of(tensor))

    def ulps(self, tensor: str) -> float:
        """What part of the size of an answer the order of sums may change."""
        dtype = self.dtypes[tensor]
        if self.question.dtype.itemsize == 2:  # then there is such arithmetic behind it
            dtype = self.question.dtype
        if dtype not in HELD_TO:
            return 0.0
        eps = HELD_TO[dtype] if dtype.itemsize == 2 else float(np.finfo(dtype).eps)
        return ULPS[dtype.itemsize] * eps

    @property
    def ulps_of_tiny(self) -> float:
        """The error of a sum's term that is too small for its error to be relative."""
        return 32 * self.unit * TINY.get(self.dtype, 0.0)

    # ---- identities ---------------------------------------------------------------------------

    def missing(self, name: str, text: str, why: str) -> Check:
        return Check(self.name, name, text, 0.0, 0.0, "-", why)

    def balance(self, name: str, text: str, left: Terms, right: Terms, why: str = "") -> Check:
        """The sum of the inner products ``left`` is that of ``right``; not so for a reason ``why``.

        A rounding that always goes towards zero is a factor, so each product has its own noise.
        """
        terms = (*left, *right)
        if why := self.lacks(*(tensor for _, tensor in terms)) or why:
            return self.missing(name, text, why)
        signs = [1.0] * len(left) + [-1.0] * len(right)

        def products(of: dict[str, Float64]) -> list[Float64]:
            return [s * self.product(a, t, of) for s, (a, t) in zip(signs, terms, strict=True)]

        found = products(self.answers)
        noise = np.square([self.unit * x for x in found]).sum(axis=0)
        for n, (a, tensor) in enumerate(terms):
            off = max((np.abs(x[tensor] - self.right[tensor]) for x in self.rounded), key=np.sum)
            noise = noise + self.product(a**2, tensor, {tensor: off**2})
            each = [products(x)[n] - products(self.right)[n] for x in self.rounded]
            noise = noise + np.square(each).max(axis=0)
        off = np.sum(found, axis=0)
        size = np.maximum(
            *(abs(np.sum(x, axis=0)) for x in (found[: len(left)], found[len(left) :]))
        )
        return self.sums(name, text, off, noise, size)

    def total_is(self, name: str, text: str, tensor: str, wanted: Float64) -> Check:
        """The total of an answer is ``wanted``."""
        of = side_of(tensor)
        found, right = (self.total(x[tensor], of) for x in (self.answers, self.right))
        noise = self.unit**2 * (self.total(self.right[tensor] ** 2, of) + wanted**2)
        for x in self.rounded:
            noise = noise + np.square(self.total(x[tensor], of) - right)
            noise = noise + self.total(np.square(x[tensor] - self.right[tensor]), of)
        noise = noise.mean(axis=2, keepdims=True)
        size = np.maximum(abs(found), abs(wanted))
        size = size if wanted.any() else self.unless_zero(tensor, found)
        return self.sums(name, text, found - wanted, noise, size)

    def unless_zero(self, tensor: str, like: Float64) -> Float64:
        """The size of what must be 0: any number is too large to be nothing, a tensor of 0 not."""
        return np.full_like(like, np.inf if self.answers[tensor].any() else 0.0)

    def sums(self, name: str, text: str, off: Float64, noise: Float64, size: Float64) -> Check:
        looked = np.repeat(self.finite[:, None], self.question.num_heads_kv, axis=1)
        return self.judged(name, text, off, MARGIN * np.sqrt(noise), size, looked)

    def off_by(self, tensor: str, among: Bools) -> Float64:
        """What rounding does to elements of an answer, squared, by row: in a row and in others,
        since one sample of it may be small by chance."""
        right = self.right[tensor]
        off = [np.square(x[tensor] - right).mean(axis=2, keepdims=True) for x in self.rounded]
        noise = np.asarray(np.max(off, axis=0) + self.unit**2 * (right**2).mean(axis=2)[..., None])
        inside = among & (self.question.sequence_of("q") >= 0)[:, None]
        inside = inside & np.append(self.finite, False)[self.question.sequence_of("q")][:, None]
        return noise + (noise[inside].mean() if inside.any() else 0.0)

    def rows(
        self,
        name: str,
        text: str,
        off: Float64,
        noise: Float64 | float,
        size: Float64,
        looked: Bools,
    ) -> Check:
        """off = 0, in the rows and heads of q that are ``looked`` at; noise: squared."""
        within = self.question.sequence_of("q")
        looked = looked & np.append(self.finite, False)[within][:, None]
        return self.judged(name, text, off, MARGIN * np.sqrt(noise), size, looked, within)

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


def _inputs(q: Question, reach: Reach) -> tuple[dict[str, Float64], Bools]:
    alive, seen = reach.count[..., None] > 0, reach.seen[..., None]
    like = {"tq": q.q, "dout": np.broadcast_to(0.0, (*q.q.shape[:2], q.v.shape[2]))}
    like |= {"dlse": np.broadcast_to(0.0, (*q.q.shape[:2], 1)), "tk": q.k, "tv": q.v}
    found = {}
    finite = np.ones(q.batch + 1, dtype=bool)
    for of, names, there in (("q", OF_Q, alive), ("k", BY_TOKENS["k"], seen)):
        for name in names:
            given = getattr(q, name)
            if given is None:
                found[name] = np.zeros(like[name].shape)
                continue
            wide = np.asarray(given).astype(np.float64)
            found[name] = np.where(there, wide.T[..., None] if wide.ndim == 2 else wide, 0.0)
            finite[q.sequence_of(of)[~np.isfinite(found[name]).all(axis=(1, 2))]] = False
    for name, gate in (("gate", q.block_scale), ("tgate", q.tblock_scale)):
        found[name] = np.zeros((len(q.q), 1, 1)) if gate is None else np.asarray(gate, np.float64)
    return found, finite[:-1]


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
