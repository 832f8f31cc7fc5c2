"""Equations for how often each query sees each key: one set for every query, or for every key.

A row of out and of lse, or of a gradient, is a sum over keys (or queries) in which the counts are
the only unknowns: out_i = sum_j C_ij w_ij v_j and 1 = sum_j C_ij w_ij where w = exp(S - lse),
dq_i = scale sum_j C_ij dS_ij k_j, and dk, dv likewise of a key over all queries.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rawattn.check.diagnose.engine.attention import Floats, solve
from rawattn.check.diagnose.engine.question import Answers, Question, given_to_backward
from rawattn.reference.dense import capped

Ints = np.ndarray


@dataclass(frozen=True)
class System:
    """a (tests, places, unknowns) times counts (places, unknowns) must be b (tests, places).

    Unknowns are all rows of k (or of q), and with ``zeros`` one of zeros. mass (tests, places,
    unknowns): what the counts must not make 0, and errors are relative to; None if it is known.
    """

    a: Floats
    b: Floats
    mass: Floats | None
    zeros: bool

    def errors(self, counts: Floats) -> Floats:
        """(places,): the worst test's, relative to the size of what is added up."""
        off = np.abs(np.einsum("tpu,pu->tp", self.a, counts) - self.b)
        if self.mass is not None:
            mass = np.einsum("tpu,pu->tp", self.mass, counts)
            off = np.where(mass > 0, off / np.where(mass > 0, mass, 1.0), np.inf)
        return np.asarray(off.max(axis=0, initial=0.0))


@dataclass(frozen=True, eq=False)
class Equations:
    """Those of a tensor: out (with lse), dq, dk or dv."""

    question: Question
    answers: Answers
    name: str

    @property
    def of_keys(self) -> bool:
        """Whether places are keys, and the unknowns queries."""
        return self.name in ("dk", "dv")

    @property
    def zeros(self) -> bool:
        """Whether rows of zeros would be known by what they add."""
        return self.name == "out" and self.exact

    @property
    def exact(self) -> bool:
        """Whether lse tells what the weights are divided by."""
        return self.name != "out" or "lse" in self.answers

    @property
    def heads(self) -> int:
        """As many have equations of their own."""
        q = self.question
        return q.num_heads_kv if self.of_keys else q.num_heads_q

    @cached_property
    def noise(self) -> float:
        """An error that rounding may make."""
        names = ("out", "lse") if self.name == "out" else (self.name,)
        found = next(np.asarray(self.answers[n]) for n in names if n in self.answers)
        return 0.02 if found.dtype.itemsize == 2 else 2e-3

    @cached_property
    def given(self) -> tuple[Floats, Floats]:
        """The out and the lse that a backward pass had, most likely; else the right ones."""
        given = given_to_backward(self.question, self.answers)
        if given is not None:
            return wide(given[0]), np.asarray(given[1], dtype=np.float64)
        right = solve(self.question, "forward")
        return right["out"], right["lse"]

    def of(self, places: Ints, heads: Ints, mixture: int) -> System:
        """Of rows of q (of k) and some heads; columns are added up to ``mixture`` numbers, or left
        as they are for 0."""
        if self.name == "out":
            return self._forward(places, heads, mixture)
        return (self._of_keys if self.of_keys else self._dq)(places, heads, mixture)

    def _mixed(self, x: Floats, mixture: int) -> Floats:
        """The columns of rows, as (..., tests), of about the size of one column."""
        if not mixture:
            return x
        rng = np.random.default_rng(x.shape[-1])
        by = rng.standard_normal((x.shape[-1], mixture)) / math.sqrt(x.shape[-1])
        return np.asarray(x @ by)

    def _scores(self, rows: Ints, heads: Ints) -> Floats:
        """(heads, rows, total_k)"""
        q = self.question
        k = wide(q.k)[:, heads // q.group]
        S = q.scale * np.einsum("rhd,chd->hrc", wide(q.q)[rows][:, heads], k, optimize=True)
        return np.asarray(capped(np, S, q.softcap, lambda x: x)[0])

    def _forward(self, rows: Ints, heads: Ints, mixture: int) -> System:
        q, S = self.question, self._scores(rows, heads)
        S = np.concatenate([S, np.zeros((*S.shape[:2], int(self.zeros)))], axis=2)
        level = S.max(axis=2)
        if self.exact:
            lse = np.asarray(self.answers["lse"], dtype=np.float64)[heads][:, rows]
            level = np.where(np.isfinite(lse), lse, level)
        weight = np.exp(np.minimum(S - level[..., None], 60))
        sink = 0.0 if q.sinks is None else np.exp(wide(q.sinks)[heads, None] - level)
        tests, wanted, masses = [], [], []
        if self.exact:
            tests.append(weight[:, None] * min(self.noise / 2e-3, 5.0))
            wanted.append((1 - sink + np.zeros_like(level))[:, None] * min(self.noise / 2e-3, 5.0))
        if "out" in self.answers:
            v = self._mixed(wide(q.v)[:, heads // q.group], mixture)
            v = np.concatenate([v, np.zeros((int(self.zeros), *v.shape[1:]))])
            out = self._mixed(wide(self.answers["out"])[rows][:, heads], mixture)
            size = float(np.sqrt(np.mean(v**2))) or 1.0
            apart = (v.transpose(1, 2, 0)[:, :, None] - out.transpose(1, 2, 0)[..., None]) / size
            tests.append(weight[:, None] * apart)
            wanted.append(out.transpose(1, 2, 0) / size * (sink + np.zeros_like(level))[:, None])
        if not self.exact:
            masses = [np.repeat(weight[:, None], x.shape[1], axis=1) for x in tests]
        a, b = (_flat(np.concatenate(x, axis=1)) for x in (tests, wanted))
        return System(a, b, _flat(masses[0]) if masses else None, self.zeros)

    def _pairs(self, rows: Ints, heads: Ints, keys: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """P and dS (heads, rows, keys); q and dout (rows, heads, columns)."""
        q, (out, lse) = self.question, self.given
        S = self._scores(rows, heads)[..., keys]
        v = wide(q.v)[keys][:, heads // q.group]
        dout = wide(q.dout)[rows][:, heads]
        D = (dout * out[rows][:, heads]).sum(axis=2).T
        if q.dlse is not None:
            D = D - wide(q.dlse)[heads][:, rows]
        L = lse[heads][:, rows][..., None]
        P = np.where(np.isfinite(L), np.exp(np.minimum(S - np.where(np.isfinite(L), L, 0), 60)), 0)
        dS = P * (np.einsum("rhd,chd->hrc", dout, v, optimize=True) - D[..., None])
        if q.softcap is not None:
            dS = dS * (1 - (S / q.softcap) ** 2)
        return P, dS, wide(q.q)[rows][:, heads], dout

    def _dq(self, rows: Ints, heads: Ints, mixture: int) -> System:
        q = self.question
        _, dS, *_ = self._pairs(rows, heads, np.arange(len(q.k)))
        k = self._mixed(wide(q.k)[:, heads // q.group], mixture)
        a = dS[:, None] * k.transpose(1, 2, 0)[:, :, None]
        return self._sized(a, self._mixed(wide(self.answers["dq"])[rows][:, heads], mixture), a)

    def _of_keys(self, keys: Ints, heads: Ints, mixture: int) -> System:
        q, a = self.question, np.zeros(0)
        for g in range(q.group):
            P, dS, queries, dout = self._pairs(np.arange(len(q.q)), heads * q.group + g, keys)
            weight, x = (dS, queries) if self.name == "dk" else (P, dout)
            part = (
                weight.swapaxes(1, 2)[:, None]
                * (self._mixed(x, mixture).transpose(1, 2, 0)[:, :, None])
            )
            a = a + part if a.size else part
        return self._sized(
            a, self._mixed(wide(self.answers[self.name])[keys][:, heads], mixture), a
        )

    def _sized(self, a: Floats, wanted: Floats, like: Floats) -> System:
        """With errors relative to the size of a sum over all that may be in it."""
        scale = 1.0 if self.name == "dv" else self.question.scale or 1.0
        b = wanted.transpose(1, 2, 0) / scale
        size = float(np.sqrt(np.mean(b**2))) or 1.0
        return System(_flat(a) / size, _flat(b) / size, None, False)


def _flat(x: Floats) -> Floats:
    """Heads and tests as one axis."""
    return x.reshape(-1, *x.shape[2:])


def wide(x: np.ndarray | None) -> Floats:
    """In float64, 0 for what is not finite."""
    found = np.asarray(x, dtype=np.float64)
    return np.where(np.isfinite(found), found, 0.0)
