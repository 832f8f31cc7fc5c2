"""Passes beyond the first order, asked such that they are forward and backward passes.

With tv alone as direction tout, or ddout, is P tv, as out is P v. Where v is 0 the second pass of a
double backward is a backward pass of ddv, with W in the place of D.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.support import Support
from rawattn.check.diagnose.read import probe
from rawattn.check.diagnose.read.probe import Ask, Backward, Refused, Weights
from rawattn.check.diagnose.read.said import Said
from rawattn.check.diagnose.read.slopes import said_of_backward

CLEAR = 1e-6  # of the square of E - e: from there on a weight is known by what it adds to gv
WORDS = {"dS": "dS'", "dP": "dP'", "D": "W", "out": "ddout", "delta": "W"}
WORDS |= {"dq": "gq", "dk": "gk", "dv": "gv"}  # of a backward pass, as the second one has them


def read_tangents(ask: Ask, question: Question) -> Weights:
    """The weights of tout. Raises Refused, as the others do."""

    def tangents(asked: Question) -> Answers:
        answers = ask(_moved(asked))
        return {"out": answers["tout"], "lse": answers["jvp lse"]}

    return probe.read_forward(tangents, question)


def read_first_pass(ask: Ask, question: Question) -> Weights:
    """The weights of ddout, which are made with the lse that is passed."""

    def tangents(asked: Question) -> Answers:
        _, given = probe.with_right(replace(asked, dout=np.zeros_like(asked.out)))
        return {"out": ask(_moved(given))["ddout"]}

    return replace(probe.read_forward(tangents, question), value_head=None)


def read_second_pass(ask: Ask, question: Question) -> Backward:
    """P and P o (dP' - W) as gv, gq and gk have them, of a first pass that is right."""
    if question.sparse or question.softcap is not None or question.dtype.itemsize == 2:
        raise Refused("there are lists, a softcap, or numbers of 16 bits")
    return probe.read_backward(partial(_as_backward, ask), question)


def say_second_pass(read: Backward, again: Callable[[], Backward], _: Support | None) -> Said:
    """What a backward pass says, in the words of the second pass."""
    said = said_of_backward(read, again)
    word = partial(re.compile(rf"\b({'|'.join(WORDS)})\b").sub, lambda found: WORDS[found[0]])
    for told in (said.right, said.wrong, said.unread):
        told[:] = map(word, told)
    said.names[:] = (name.replace("delta-omitted", "second-w-omitted") for name in said.names)
    return said


def _moved(question: Question, **changes: np.ndarray) -> Question:
    """In the direction of tv = v alone."""
    still = {"tq": np.zeros_like(question.q), "tk": np.zeros_like(question.k)}
    return replace(question, **still | {"tv": question.v} | changes)


def _as_backward(ask: Ask, question: Question) -> Answers:
    """dq, dk and dv of a second pass. gv = (P o (E - e))^T dO tells P where each column of dO is
    one query's, that of a unit vector for q, so that tk is E."""
    right, zeros = solve(question, "backward"), np.zeros_like(question.v)
    first = np.asarray(question.out)
    asked = _moved(question, v=zeros, out=np.zeros_like(first))
    answers = ask(asked)
    found = right | {"dq": answers["gq"]}
    if np.count_nonzero(np.asarray(question.dout)) > question.num_heads_kv * first.shape[2]:
        return found
    total, weight = np.zeros((2, *zeros.shape))
    width = min(question.q.shape[2], zeros.shape[2])
    for seed in range(2):  # where E is near e, it is not in the other direction
        E, tk = np.zeros(zeros.shape), np.zeros_like(question.k)
        E[..., :width] = np.random.default_rng(seed).standard_normal(E[..., :width].shape)
        tk[..., :width] = E[..., :width] / question.scale
        centred = E - (right["dv"] * E).sum(axis=0)
        total += ask(replace(asked, tv=zeros, tk=tk))["gv"] * centred
        weight += centred**2
    dv = np.where(weight > CLEAR, total / np.maximum(weight, CLEAR), right["dv"])
    return found | {"dk": answers["gk"], "dv": dv}
