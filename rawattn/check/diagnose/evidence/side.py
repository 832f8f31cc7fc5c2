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
from rawattn.check.diagnose.evidence.precision import HELD_TO, coarsest, ways_to_round
from rawattn.check.diagnose.evidence.rows import Bools, Float64, Ints, Reach
from rawattn.check.diagnose.evidence.structure import named
from rawattn.check.diagnose.findings import Check

# an array, of whose inner product with an answer it is, or 1.0 for each column on its own
Terms = Sequence[tuple[Float64 | float, str]]

MARGIN = 12  # times what rounding was measured to do
INPUTS = {"q": ("q", "tq", "dout", "dlse"), "k": ("k", "v", "tk", "tv")}


class Side:
    """One side: ``answers`` in float64 as (tokens, heads, width), and what sums of theirs are
    compared with.

    dtype: the coarsest of all. x: the inputs in float64 like that, 0 where there are none or nobody
    looks at them. finite: which sequences have no NaN or inf in them.
    """

    def __init__(self, question: Question, answers: Answers, name: str) -> None:
        self.question, self.name = question, name
        self.answers = {n: by_rows(n, x) for n, x in answers.items()}
        self.dtype = coarsest(question, answers)
        self.reach = Reach(question)
        self.alive: Bools = np.asarray(self.reach.count > 0)  # (total_q, num_heads_q) see any key
        self.unit = HELD_TO[self.dtype] / 2  # the error of one rounding
        self.x, self.finite = _inputs(question, self.reach)
        dlse = question.scale * self.x["dlse"]
        self.given = {"dout": self.x["dout"]}
        self.given |= {f"softmax_scale dlse {n}": dlse * self.x[n] for n in ("q", "tq")}
        self.answers |= self.given
        if question.out is not None:
            self.answers["given out"] = by_rows("out", question.out)

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
        return {n: store(by_rows(n, x)) for n, x in found.items() if x.ndim > 1} | self.given

    def off_by(self, tensor: str, among: Bools) -> Float64:
        """What rounding does to elements of an answer, squared, by row: in a row and in others,
        since one sample of it may be small by chance."""
        right = self.right[tensor]
        off = [np.square(x[tensor] - right).mean(axis=2, keepdims=True) for x in self.rounded]
        noise = np.asarray(np.max(off, axis=0) + self.unit**2 * (right**2).mean(axis=2)[..., None])
        return noise + (noise[among].mean() if among.any() else 0.0)

    # ---- identities ---------------------------------------------------------------------------

    def product(self, a: Float64 | float, tensor: str, x: Float64) -> Float64:
        """<a, x>, x like an answer, without the rows of queries that see nothing: sums over rows
        and the heads that belong to a key/value head, (batch, num_heads_kv, width)."""
        q, of = self.question, side_of(tensor)
        if of == "q" and x.shape[1] == self.alive.shape[1]:
            x = np.where(self.alive[..., None], x, 0.0)
        x = (a * x).sum(axis=2, keepdims=True) if np.ndim(a) else x
        spans = (rows if of == "q" else keys for rows, keys in sequences(q))
        sums = np.array([x[span].sum(axis=0) for span in spans])
        shape = (q.batch, q.num_heads_kv, x.shape[1] // q.num_heads_kv, x.shape[2])
        return np.asarray(sums.reshape(shape).sum(axis=2))

    def balance(self, name: str, text: str, left: Terms, right: Terms) -> Check:
        """The sum of the inner products ``left`` is that of ``right``, 0 of none.

        A rounding that always goes towards zero is a factor, so each product has its own noise.
        """
        sums, noise = [np.zeros((1, 1, 1))] * 2, np.zeros((1, 1, 1))
        for n, (a, tensor) in enumerate((*left, *right)):
            found, exact, *rounded = (
                self.product(a, tensor, x[tensor])
                for x in (self.answers, self.right, *self.rounded)
            )
            sums[n >= len(left)] = sums[n >= len(left)] + found
            off = max((np.abs(x[tensor] - self.right[tensor]) for x in self.rounded), key=np.sum)
            noise = noise + (self.unit * found) ** 2 + self.product(np.square(a), tensor, off**2)
            noise = noise + np.square([x - exact for x in rounded]).max(axis=0)
        noise = noise.mean(axis=2, keepdims=True)
        looked = np.repeat(self.finite[:, None], self.question.num_heads_kv, axis=1)
        return self.judged(name, text, sums[0] - sums[1], MARGIN * np.sqrt(noise), looked)

    def rows(self, name: str, text: str, tensor: str, off: Float64, looked: Bools) -> Check:
        """The check that an answer is ``off`` by nothing, in the rows and heads of q that are
        ``looked`` at."""
        within = self.question.sequence_of("q")
        looked = looked & np.append(self.finite, False)[within][:, None]
        allowed = MARGIN * np.sqrt(self.off_by(tensor, looked))
        return self.judged(name, text, off, allowed, looked, within)

    def judged(
        self,
        name: str,
        text: str,
        off: Float64,
        allowed: Float64,
        looked: Bools,
        within: Ints | None = None,
        columns: Sequence[str] = (),
    ) -> Check:
        """The check of |off| <= allowed, (places, heads, width), where it is ``looked``.

        A place is a sequence, or with ``within`` a row, which is in that sequence. columns: what
        there is in place of heads.
        """
        off, allowed = np.broadcast_arrays(np.abs(off), allowed)
        if not looked.any() or not off.size:
            return Check(self.name, name, text, 0.0, 0.0, "-", "no place to check it at")
        ratio = np.nan_to_num(np.where(off == 0, 0.0, off / allowed), nan=0.0, posinf=np.inf)
        ratio = np.where(np.isfinite(off), ratio, np.inf)
        ratio = np.where(looked[..., None], ratio, -1.0)
        worst = np.unravel_index(ratio.argmax(), ratio.shape)
        value = np.inf if np.isnan(off[worst]) else float(off[worst])
        bad = np.asarray((ratio > 1).any(axis=2))
        parts: list[str] = []
        if bad.any():
            parts = [column for column, x in zip(columns, bad.T, strict=False) if x.any()]
            places = np.arange(len(bad)) if within is None else within
            of_bad, of_all = (np.unique(places[x.any(axis=1)]) for x in (bad, looked))
            parts += [named("sequence", of_bad)] * (len(of_bad) < len(of_all))
            parts = [*(parts or ["all"]), *["NaN"] * bool(np.isnan(off[bad]).any())]
        verdict, where = "FAIL" if parts else "pass", ", ".join(parts)
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
    gates = {"block_scale": q.block_scale, "tblock_scale": q.tblock_scale}
    found |= {name: np.asarray(x, np.float64) for name, x in gates.items() if x is not None}
    return found, finite[:-1]
