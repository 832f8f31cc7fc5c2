"""One side of a comparison, and how an identity of its numbers is judged.

Identities are linear in the answers. What rounding may do to one is measured: the right answers
are computed with their operations rounded, and the identity is asked of these.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.attention import NONE, Rounding, exact, solve
from rawattn.check.diagnose.engine.parts import sequences
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows, side_of
from rawattn.check.diagnose.evidence.precision import (
    HELD_TO,
    TINY,
    coarsest,
    narrowest,
    ways_to_round,
)
from rawattn.check.diagnose.evidence.reach import Bools, Float64, Ints, Reach
from rawattn.check.diagnose.evidence.structure import named
from rawattn.check.diagnose.findings import Check

# an array, of whose inner product with an answer it is, or 1.0 for each column on its own
Terms = Sequence[tuple[Float64 | float, str]]

MARGIN = 12  # times what rounding was measured to do
ULPS = {2: 8, 4: 256, 8: 256}  # by itemsize: what another order of a sum may change in a result
INPUTS = {"q": ("q", "tq", "dout", "dlse"), "k": ("k", "v", "tk", "tv")}


class Side:
    """One side: ``answers`` in float64 as (tokens, heads, width).

    dtypes: of the answers, the narrowest that holds them; ``dtype``: the coarsest. x: the inputs
    in float64 like that, 0 where there are none or nobody looks at them. finite: which sequences
    have no NaN or inf in them.
    """

    def __init__(self, question: Question, answers: Answers, name: str) -> None:
        self.question, self.name = question, name
        self.answers = {n: by_rows(n, x) for n, x in answers.items()}
        self.dtypes = {n: narrowest(np.asarray(answers[n])) for n in self.answers}
        self.dtype = coarsest(question, answers)
        if question.out is not None:
            self.answers["given out"] = by_rows("out", question.out)
        self.reach = Reach(question)
        self.alive: Bools = np.asarray(self.reach.count > 0)  # (total_q, num_heads_q) see any key
        self.unit = HELD_TO[self.dtype] / 2  # the error of one rounding
        self.x, self.finite = _inputs(question, self.reach)

    def lacks(self, *tensors: str) -> str:
        """What of ``tensors`` is not there, in words; empty if all is."""
        return "; ".join(f"there is no {t}" for t in tensors if t not in self.answers)

    # ---- what rounding does -------------------------------------------------------------------

    @cached_property
    def right(self) -> dict[str, Float64]:
        """The exact answers, by rows."""
        return self._solved(NONE, exact)

    @cached_property
    def rounded(self) -> list[dict[str, Float64]]:
        """Right answers with every operation rounded, once each way."""
        ways, factor = ways_to_round(self.dtype)
        found = [self._solved(Rounding(r, r), r) for r in ways]
        return [
            {n: self.right[n] + factor * (x - self.right[n]) for n, x in other.items()}
            for other in found
        ]

    def _solved(
        self, rounding: Rounding, store: Callable[[Float64], Float64]
    ) -> dict[str, Float64]:
        names = [n for of in INPUTS.values() for n in of if getattr(self.question, n) is not None]
        clean: dict[str, Any] = {n: self.x[n] for n in names}
        clean |= {n: self.x[n][..., 0].T for n in names if n == "dlse"}
        q = replace(self.question, **clean)
        forward = solve(q, "forward", rounding=rounding)
        given = q.passed or (store(forward["out"]), forward["lse"])
        found = dict(forward)
        for stage in q.stages[1:]:
            found |= solve(q, stage, rounding=rounding, given=given)
        found["given out"] = np.asarray(given[0]).astype(np.float64)
        return {n: store(by_rows(n, x)) for n, x in found.items() if x.ndim > 1}

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

    def total(self, array: Float64, of: str) -> Float64:
        """Sums over rows (of "q" or "k") and the heads that belong to a key/value head: (batch,
        num_heads_kv, width)."""
        q = self.question
        spans = (rows if of == "q" else keys for rows, keys in sequences(q))
        sums = np.array([array[span].sum(axis=0) for span in spans])
        shape = (q.batch, q.num_heads_kv, array.shape[1] // q.num_heads_kv, array.shape[2])
        return np.asarray(sums.reshape(shape).sum(axis=2))

    def product(self, a: Float64 | float, tensor: str, x: Float64) -> Float64:
        """<a, x>, x like an answer, without the rows of queries that see nothing."""
        if side_of(tensor) == "q" and x.shape[1] == self.alive.shape[1]:
            x = np.where(self.alive[..., None], x, 0.0)
        product = (a * x).sum(axis=2, keepdims=True) if np.ndim(a) else x
        return self.total(product, side_of(tensor))

    def balance(
        self,
        name: str,
        text: str,
        left: Terms,
        right: Terms = (),
        why: str = "",
        wanted: Float64 | None = None,
    ) -> Check:
        """The sum of the inner products ``left`` is that of ``right``, or what is ``wanted``; not
        so for a reason ``why``.

        A rounding that always goes towards zero is a factor, so each product has its own noise.
        """
        terms = (*left, *right)
        if why := self.lacks(*(tensor for _, tensor in terms)) or why:
            return self.missing(name, text, why)
        given = np.zeros((1, 1, 1)) if wanted is None else wanted
        sums, noise = [np.zeros_like(given), given], self.unit**2 * given**2
        for n, (a, tensor) in enumerate(terms):
            found, exact, *rounded = (
                self.product(a, tensor, x[tensor])
                for x in (self.answers, self.right, *self.rounded)
            )
            sums[n >= len(left)] = sums[n >= len(left)] + found
            off = max((np.abs(x[tensor] - self.right[tensor]) for x in self.rounded), key=np.sum)
            noise = noise + (self.unit * found) ** 2 + self.product(np.square(a), tensor, off**2)
            noise = noise + np.square([x - exact for x in rounded]).max(axis=0)
        noise = noise.mean(axis=2, keepdims=True)
        size = np.maximum(np.abs(sums[0]), np.abs(sums[1]))
        if wanted is not None and not wanted.any():
            size = self.unless_zero(terms[0][1], size)
        looked = np.repeat(self.finite[:, None], self.question.num_heads_kv, axis=1)
        return self.judged(name, text, sums[0] - sums[1], MARGIN * np.sqrt(noise), size, looked)

    def unless_zero(self, tensor: str, like: Float64) -> Float64:
        """The size of what must be 0: any number is too large to be nothing, a tensor of 0 not."""
        return np.full_like(like, np.inf if self.answers[tensor].any() else 0.0)

    def off_by(self, tensor: str, among: Bools) -> Float64:
        """What rounding does to elements of an answer, squared, by row: in a row and in others,
        since one sample of it may be small by chance."""
        right = self.right[tensor]
        off = [np.square(x[tensor] - right).mean(axis=2, keepdims=True) for x in self.rounded]
        noise = np.asarray(np.max(off, axis=0) + self.unit**2 * (right**2).mean(axis=2)[..., None])
        inside = among & np.append(self.finite, False)[self.question.sequence_of("q")][:, None]
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
    widths = {"dout": q.v.shape[2], "dlse": 1, "tv": q.v.shape[2]}
    found, finite = {}, np.ones(q.batch + 1, dtype=bool)
    for (of, names), there in zip(INPUTS.items(), (reach.count > 0, reach.seen), strict=True):
        for name in names:
            given = getattr(q, name)
            if given is None:
                found[name] = np.zeros((*there.shape, widths.get(name, q.q.shape[2])))
                continue
            wide = np.asarray(given).astype(np.float64)
            wide = wide.T[..., None] if wide.ndim == 2 else wide
            found[name] = np.where(there[..., None], wide, 0.0)
            finite[q.sequence_of(of)[~np.isfinite(found[name]).all(axis=(1, 2))]] = False
    for name, gate in (("gate", q.block_scale), ("tgate", q.tblock_scale)):
        found[name] = np.zeros((len(q.q), 1, 1)) if gate is None else np.asarray(gate, np.float64)
    return found, finite[:-1]


def _where(bad: Bools, looked: Bools, within: Ints | None, q: Question) -> str:
    """Which sequences and heads of those that were looked at are bad."""
    counts, head = "", "kv head"
    if within is not None:
        head = "head"
        counts = "" if bad[looked].all() else f": {bad.sum()} of {looked.sum()} rows"
        bad, looked = (
            np.array([mask[within == b].any(axis=0) for b in range(q.batch)])
            for mask in (bad, looked)
        )
    if bad[looked].all():
        return f"all{counts}"
    some = [
        named(what, np.flatnonzero(bad.any(axis=axis)))
        for what, axis in (("sequence", 1), (head, 0))
        if (bad.any(axis=axis) != looked.any(axis=axis)).any()
    ]
    pairs = f"{bad.sum()} of {looked.sum()} pairs of sequence and {head}"
    return (", ".join(some) or pairs) + counts
