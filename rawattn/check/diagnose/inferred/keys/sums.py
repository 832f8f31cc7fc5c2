"""Sums over the keys that a query sees, which its out, its lse and its dq must be.

Terms are there for every row of k and for a row of zeros, so that any choice of keys can be tried
by adding up.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from rawattn.check.diagnose.engine.attention import Floats, solve
from rawattn.check.diagnose.engine.question import Answers, Question, given_to_backward
from rawattn.check.diagnose.inferred.keys.pattern import Pattern, Place

Ints = np.ndarray


@dataclass(frozen=True)
class Sums:
    """What to add up over the keys that some rows of a sequence see, and what must come out.

    terms (kinds, heads, rows, keys and one of zeros). wanted (heads, rows), by name; ``counts``
    (heads, rows) is 0 for what does not matter.
    """

    place: Place
    heads: Ints
    terms: Floats
    wanted: dict[str, Floats]
    counts: Floats

    def part(self, chosen: np.ndarray) -> "Sums":
        """The same of some rows."""
        return replace(
            self,
            place=replace(self.place, rows=self.place.rows[chosen]),
            terms=np.ascontiguousarray(self.terms[:, :, chosen]),
            wanted={name: x[:, chosen] for name, x in self.wanted.items()},
            counts=self.counts[:, chosen],
        )

    def errors(self, pattern: Pattern) -> dict[str, Floats]:
        """How far off every row (heads, rows) is with the keys of ``pattern``, by test."""
        keys, weight = pattern.of(self.place)
        if not len(keys):
            return self.judge(np.zeros(self.terms.shape[:3]))
        weight = np.asarray(weight, dtype=np.float64)
        weight = np.broadcast_to(weight, (len(self.place.rows), len(keys)))
        first = int(keys[0])
        straight = first >= 0 and bool((keys == np.arange(first, first + len(keys))).all())
        terms = self.terms[..., first : first + len(keys)] if straight else self.terms[..., keys]
        return self.judge(np.einsum("khrc,rc->khr", terms, weight))

    def judge(self, added: Floats) -> dict[str, Floats]:
        """How far off every row is, given the sums (kinds, heads, rows)."""
        raise NotImplementedError


class Forward(Sums):
    """Sums of exp(S), and of exp(S) times two mixtures of the columns of v."""

    def judge(self, added: Floats) -> dict[str, Floats]:
        mass = added[0]
        safe = np.where(mass > 0, mass, 1.0)
        errors = {}
        if "out" in self.wanted:
            off = (added[1] / safe - self.wanted["out"], added[2] / safe - self.wanted["other out"])
            errors["out"] = np.maximum(*np.abs(off)) * self.counts
        if "lse" in self.wanted:
            off_lse = np.where(mass > 0, np.log(safe) - self.wanted["lse"], 1.0)
            errors["lse"] = np.abs(off_lse) * self.counts
        return errors


class Backward(Sums):
    """Sums of P (dP - D) k with the lse and the out that there are, and what a pass needs that
    makes its own P and D over the keys that it sees."""

    def judge(self, added: Floats) -> dict[str, Floats]:
        given, mass, values, keys, both = added
        mass = np.where(mass > 0, mass, 1.0)
        own = both / mass - values / mass * keys / mass
        return {
            "dq": np.abs(given - self.wanted["dq"]) * self.counts,
            "own dq": np.abs(own - self.wanted["dq"]) * self.counts,
        }


def sums_of(
    question: Question, answers: Answers, stage: str, place: Place, heads: Ints
) -> Sums | None:
    """Of the rows of ``place``; None where nothing can be added up."""
    if stage == "forward":
        return _forward(question, answers, place, heads)
    if stage == "backward" and "dq" in answers:
        return _backward(question, answers, place, heads)
    return None


def some_heads(heads: Ints, most: int) -> Ints:
    """As many at most, spread over all."""
    places = np.unique(np.linspace(0, len(heads) - 1, most).astype(int))
    return np.asarray(np.asarray(heads)[places])


def wide(x: np.ndarray | None) -> Floats:
    """In float64, 0 for what is not finite."""
    found = np.asarray(x, dtype=np.float64)
    return np.where(np.isfinite(found), found, 0.0)


def scores(question: Question, place: Place, heads: Ints) -> Floats:
    """(heads, rows, keys and one of zeros)."""
    q = wide(question.q)[place.start_q + place.rows][:, heads]
    k = wide(question.k)[:, heads // question.group]
    S = np.einsum("rhd,chd->hrc", q, k, optimize=True) * question.scale
    return np.concatenate([S, np.zeros((*S.shape[:2], 1))], axis=2)


def mixtures(width: int) -> Floats:
    """(2, width): what columns are added up with."""
    mixed: Floats = np.random.default_rng(width).standard_normal((2, width)) / math.sqrt(width)
    return mixed


def _of_keys(x: Floats, mixture: Floats, of_head: Ints) -> Floats:
    """Rows of k or v (heads, keys and one of zeros), their columns added up."""
    mixed = (x @ mixture).T[of_head]
    return np.concatenate([mixed, np.zeros((len(mixed), 1))], axis=1)


def _forward(question: Question, answers: Answers, place: Place, heads: Ints) -> Sums | None:
    rows = place.start_q + place.rows
    S = scores(question, place, heads)
    top = S.max(axis=2)
    weight = np.exp(S - top[..., None])
    wanted: dict[str, Floats] = {}
    finite = np.ones(len(rows), dtype=bool)
    terms = [weight]
    values = wide(question.v)
    for name, mixture in zip(("out", "other out"), mixtures(question.v.shape[2]), strict=True):
        mixed = _of_keys(values, mixture, heads // question.group)
        size = float(np.sqrt(np.mean(mixed**2))) or 1.0
        terms.append(weight * mixed[:, None] / size)
        if "out" in answers:
            out = np.asarray(answers["out"], dtype=np.float64)[rows][:, heads]
            finite &= np.isfinite(out).all(axis=(1, 2))
            wanted[name] = (wide(out) @ mixture).T / size
    if "lse" in answers:
        lse = np.asarray(answers["lse"], dtype=np.float64)[heads][:, rows]
        finite &= np.isfinite(lse).all(axis=0)
        wanted["lse"] = wide(lse) - top
    if not wanted or not finite.any():
        return None
    found = Forward(place, heads, np.stack(terms), wanted, np.ones_like(top))
    return found.part(finite)


def out_and_lse(question: Question, answers: Answers) -> tuple[Floats, Floats]:
    """The out and the lse that a backward pass had, most likely; else the right ones."""
    given = given_to_backward(question, answers)
    if given is not None:
        return given
    right = solve(question, "forward")
    return right["out"], right["lse"]


def _backward(question: Question, answers: Answers, place: Place, heads: Ints) -> Sums | None:
    rows, of_head = place.start_q + place.rows, heads // question.group
    out, lse = out_and_lse(question, answers)
    S = scores(question, place, heads)
    dout = wide(question.dout)[rows][:, heads]
    dP = np.einsum("rhd,chd->hrc", dout, wide(question.v)[:, of_head], optimize=True)
    dP = np.concatenate([dP, np.zeros((*dP.shape[:2], 1))], axis=2)
    dL = np.zeros(dP.shape[:2])
    if question.dlse is not None:
        dL = wide(question.dlse)[heads][:, rows]
    D = (dout * wide(out)[rows][:, heads]).sum(axis=2).T - dL
    with np.errstate(over="ignore"):
        P = np.exp(S - np.asarray(lse, dtype=np.float64)[heads][:, rows][..., None])
    dq = np.asarray(answers["dq"], dtype=np.float64)[rows][:, heads]
    finite = np.isfinite(dq).all(axis=(1, 2)) & np.isfinite(P).all(axis=(0, 2))
    if not finite.any():
        return None
    mixture = mixtures(question.k.shape[2])[0]
    keys = _of_keys(wide(question.k), mixture, of_head)[:, None]
    wanted = (wide(dq) @ mixture).T / (question.scale or 1.0)
    size = float(np.sqrt(np.mean(wanted[:, finite] ** 2))) or 1.0
    weight = np.exp(S - S.max(axis=2, keepdims=True))
    P = np.where(np.isfinite(P), P, 0.0)
    terms = [
        P * (dP - D[..., None]) * keys / size,
        weight,
        weight * dP,
        weight * keys / size,
        weight * (dP + dL[..., None]) * keys / size,
    ]
    found = Backward(place, heads, np.stack(terms), {"dq": wanted / size}, np.ones_like(D))
    return found.part(finite)


def size_of(parts: Iterable[Floats]) -> float:
    """Root mean square."""
    x = np.concatenate([part.ravel() for part in parts])
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
