"""Identities between runs: what a function answers to questions that differ in one thing.

"I1 out" and I7 to I12 of ``invariants``. Only where a changed input is rounded again, or a result
has to be a certain number, is there room for more than another order of summation. Long by their
list.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.reach import Bools, Float64, Ints, sequences
from rawattn.check.diagnose.evidence.side import Side
from rawattn.check.diagnose.evidence.structure import side_of
from rawattn.check.diagnose.findings import Check
from rawattn.check.transfer import Array

Call = Callable[[Question], Answers]

TEXTS = {
    "I1 out": "out is 1 where v is 1",
    "I7": "moving all keys of a sequence by one vector moves lse alone",
    "I8": "the sequences in another order give the same",
    "I9": "other numbers in the neighbours change nothing",
    "I10": "<w, H u> = <u, H w>, H the second derivatives, w another direction",
    "I11": "2 q with half the softmax_scale gives the same",
    "I12": "running again gives the same",
}
NUMBERS = {  # what a question has by rows of q and of k
    "q": ("q", "dout", "dlse", "tq", "block_scale", "tblock_scale"),
    "k": ("k", "v", "tk", "tv"),
}
SELECTION = ("block_indices", "block_counts")  # by rows of q too
DIRECTION = {"tq": "gq", "tk": "gk", "tv": "gv", "tblock_scale": "gblock_scale"}


class Runs:
    """``call`` and its answers to the question itself, which every other run is compared with."""

    def __init__(self, question: Question, side: str, call: Call) -> None:
        # an out and lse that a backward was given would not belong to the changed inputs
        self.question = replace(question, out=None, lse=None)
        self.side, self.call = side, call
        self.rng = np.random.default_rng(0)

    def checks(self) -> Iterator[Check]:
        tests = (
            *(("I1 out", self.ones), ("I7", self.moved_keys), ("I8", self.other_order)),
            *(("I9", self.other_neighbours), ("I10", self.symmetry)),
            *(("I11", self.scaled), ("I12", self.again)),
        )
        try:
            self.first = self.run()
        except Exception as error:
            yield from (self.missing(name, _raised(error)) for name, _ in tests)
            return
        for name, test in tests:
            try:
                yield test()
            except Exception as error:  # a function need not be able to do all of this
                yield self.missing(name, _raised(error))

    def run(self, **changes: Any) -> Side:
        question = replace(self.question, **changes)
        return Side.of(question, self.call(question), self.side)

    def missing(self, name: str, why: str) -> Check:
        return Check(self.side, name, TEXTS[name], 0.0, 0.0, "-", why)

    def ones(self) -> Check:
        if why := self.first.lacks("out"):
            return self.missing("I1 out", why)
        one = self.run(v=np.ones_like(self.question.v))
        off, size = one.answers["out"] - 1.0, np.full_like(one.answers["out"], np.inf)
        noise = one.off_by("out", one.alive)
        return one.rows("I1 out", TEXTS["I1 out"], off, noise, size, one.alive)

    def moved_keys(self) -> Check:
        """The keys are rounded once more after they moved, as the noise of the new ones allows."""
        q, first = self.question, self.first
        if q.block_scale is not None:
            return self.missing("I7", "a gate")
        step = self.rng.standard_normal((q.batch + 1, q.num_heads_kv, q.k.shape[2]))
        finite = first.x["k"][np.isfinite(first.x["k"])]
        step *= np.sqrt(np.square(finite).mean()) if finite.size else 1.0
        step[-1] = 0.0  # rows of no sequence
        k = np.asarray(q.k).astype(np.float64) + step[q.sequence_of("k")]
        one = self.run(k=k.astype(q.dtype))
        wanted = {t: first.answers[t] for t in ("out", "tout", "ddout") if not first.lacks(t)}
        if not first.lacks("dq"):
            of_row = np.repeat(step[q.sequence_of("q")], q.group, axis=1)
            there = one.alive[..., None]
            wanted["dq"] = first.answers["dq"] + q.scale * first.x["dlse"] * np.where(
                there, of_row, 0
            )
        found = []
        for tensor, before in wanted.items():
            now = one.answers[tensor]
            noise = one.off_by(tensor, one.alive) + first.off_by(tensor, one.alive)
            noise = noise + one.unit**2 * (now**2 + before**2)
            size = np.maximum(np.abs(now), np.abs(before))
            found.append((tensor, one.rows("I7", "", now - before, noise, size, one.alive)))
        return self.worst("I7", found)

    def other_order(self) -> Check:
        """The last sequence first; the results are brought back to the old order."""
        q = self.question
        order: dict[str, Ints] = {}
        changes: dict[str, Any] = {}
        for at, of in enumerate("qk"):
            spans = [pair[at] for pair in sequences(q)]
            index = np.arange(len(q.q if of == "q" else q.k))
            turned = [index[span] for span in reversed(spans)]
            offsets = np.asarray(q.cu_seqlens_q if of == "q" else q.cu_seqlens_k)
            index = np.concatenate([index[: offsets[0]], *turned, index[offsets[-1] :]])
            names = (*NUMBERS[of], *(SELECTION if of == "q" else ()))
            changes |= _by_tokens(q, names, partial(np.take, indices=index, axis=0))
            back = np.cumsum(np.append(offsets[:1], np.diff(offsets)[::-1]))
            changes[f"cu_seqlens_{of}"] = back.astype(offsets.dtype)
            order[of] = np.argsort(index)
        answers = self.run(**changes).answers
        known = {t: a for t, a in answers.items() if t in self.first.dtypes and a.ndim == 3}
        return self.same("I8", {t: a[order[side_of(t)]] for t, a in known.items() if _has_rows(t)})

    def other_neighbours(self) -> Check:
        """Every second sequence gets other numbers, then the others."""
        q, first = self.question, self.first
        if q.batch < 2:
            return self.missing("I9", "there is one sequence")
        found = {tensor: array.copy() for tensor, array in first.answers.items()}
        for parity in (0, 1):
            other = {}
            changes: dict[str, Any] = {}
            for of, names in NUMBERS.items():
                within = q.sequence_of(of)
                other[of] = (within % 2 == parity) & (within >= 0)
                changes |= _by_tokens(q, names, partial(_altered, rows=other[of]))
            for tensor, array in self.run(**changes).answers.items():
                if _has_rows(tensor):
                    kept = ~other[side_of(tensor)]
                    found[tensor][kept] = _further(
                        first.answers[tensor][kept], found[tensor][kept], array[kept]
                    )
        return self.same("I9", found)

    def symmetry(self) -> Check:
        q, u = self.question, self.first
        if "second" not in q.stages:
            return self.missing("I10", "no direction")
        given = {part: getattr(q, part) for part in DIRECTION if getattr(q, part) is not None}
        drawn = {
            part: self.rng.standard_normal(array.shape).astype(array.dtype)
            for part, array in given.items()
        }
        w = self.run(**drawn)
        if why := u.lacks(*(DIRECTION[part] for part in given)):
            return self.missing("I10", why)

        def sums(n: int) -> list[Float64]:
            """<w, H u> and <u, H w>, of the answers, or of right ones with a rounding."""
            both = []
            for this, that in ((u, w), (w, u)):
                results = [this.answers, this.right, *this.rounded][n]
                parts = {part: that.x.get(part, that.x["tgate"]) for part in given}
                products = [this.product(a, DIRECTION[p], results) for p, a in parts.items()]
                both.append(np.sum(products, axis=0))
            return both

        (left, right), (one, other) = sums(0), sums(1)
        noise = u.unit**2 * (left**2 + right**2)
        for n in (2, 3):
            for x, due in zip(sums(n), (one, other), strict=True):
                noise = noise + np.square(x - due)
        for this, that in ((u, w), (w, u)):
            for part in given:
                a, tensor = that.x.get(part, that.x["tgate"]), DIRECTION[part]
                off = np.square(this.rounded[0][tensor] - this.right[tensor])
                noise = noise + this.product(a**2, tensor, {tensor: off})
        size = np.maximum(abs(left), abs(right))
        return u.sums("I10", TEXTS["I10"], left - right, noise, size)

    def scaled(self) -> Check:
        """A factor of 2 rounds nothing."""
        q = self.question
        double = {n: getattr(q, n) * 2 for n in ("q", "tq") if getattr(q, n) is not None}
        double = {name: array.astype(q.dtype) for name, array in double.items()}
        answers = self.run(softmax_scale=q.scale / 2, **double).answers
        return self.same("I11", {t: a * 2 if t in ("dq", "gq") else a for t, a in answers.items()})

    def again(self) -> Check:
        return self.same("I12", self.run().answers)

    def same(self, name: str, found: Mapping[str, Float64]) -> Check:
        """Whether results are those of the first run but for the order in which sums are taken."""
        first, told = self.first, []
        longest = max((*self.question.lengths_q, *self.question.lengths_k), default=0)
        floor = first.ulps_of_tiny * np.sqrt(longest)
        for tensor, array in found.items():
            if not _has_rows(tensor) or tensor not in first.dtypes:
                continue
            before = first.answers[tensor]
            off = np.where(_differ(array, before), np.abs(array - before), 0.0)
            spans = [pair["qk".index(side_of(tensor))] for pair in sequences(self.question)]
            off, size = (
                np.array([a[span].max(axis=(0, 2), initial=0.0) for span in spans])[..., None]
                for a in (np.nan_to_num(off, nan=np.inf), _finite(np.abs(before)))
            )
            looked = np.repeat(first.finite[:, None], off.shape[1], axis=1)
            allowed = first.ulps(tensor) * size + floor
            told.append((tensor, first.judged(name, "", off, allowed, size, looked)))
        return self.worst(name, told)

    def worst(self, name: str, found: list[tuple[str, Check]]) -> Check:
        """One check for several tensors."""
        told = [(tensor, check) for tensor, check in found if check.verdict != "-"]
        if not told:
            return self.missing(name, "no results to compare")
        failed, passed = (
            [pair for pair in told if pair[1].verdict == verdict] for verdict in ("FAIL", "pass")
        )
        _, worst = max(failed or passed or told, key=lambda pair: _ratio(pair[1]))
        tensors: dict[str, list[str]] = {}
        for tensor, check in failed:
            tensors.setdefault(check.where, []).append(tensor)
        said = "; ".join(f"{', '.join(those)}: {where}" for where, those in tensors.items())
        return replace(worst, text=TEXTS[name], where=said or worst.where)


def _has_rows(tensor: str) -> bool:
    return tensor not in ("S", "P", "dP", "dS")


def _finite(array: Float64) -> Float64:
    return np.asarray(np.where(np.isfinite(array), array, 0.0))


def _raised(error: Exception) -> str:
    return f"the function raised {type(error).__name__}: {error}"


def _ratio(check: Check) -> float:
    return check.value / check.allowed if check.allowed else float(check.value > 0)


def _differ(a: Float64, b: Float64) -> Bools:
    return np.asarray((a != b) & ~(np.isnan(a) & np.isnan(b)))


def _further(origin: Float64, a: Float64, b: Float64) -> Float64:
    """a where it is not ``origin`` already, else b."""
    return np.where(_differ(a, origin), a, b)


def _altered(array: Array, rows: Bools) -> Array:
    """``array`` with other numbers in these rows."""
    other = array.copy()
    other[rows] = (1.0 - 2.0 * array[rows].astype(np.float64)).astype(array.dtype)
    return other


def _by_tokens(
    q: Question, names: tuple[str, ...], change: Callable[[Array], Array]
) -> dict[str, Array]:
    """The arrays of ``q`` called ``names``, changed with their tokens as the first axis."""
    arrays = {n: np.asarray(getattr(q, n)) for n in names if getattr(q, n) is not None}
    return {n: change(a.T).T if n == "dlse" else change(a) for n, a in arrays.items()}
