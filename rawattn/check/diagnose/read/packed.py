"""The reader's questions as one packed problem, for a function that cannot be called from here: its
sequences are some of any kind, and behind them those of one question after another, as many."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import BY_TOKENS, STAGES, Answers, Question, part
from rawattn.check.diagnose.read.name import READ, Readings, read
from rawattn.check.diagnose.read.probe import OF_DERIVATIVES, Ask, Refused, problem

PAST = 128  # keys behind the first sequences, which a tile of these may have read too
ADDED = 9  # tokens at most, to a sequence of the reader's second problem


def packed(like: Question) -> Question:
    """``like``, and behind its sequences those of what would be asked. Raises Refused."""
    first = replace(like, dout=_plain(like).dout, out=None, lse=None, tsinks=None, sliding=None)
    parts = [first, *(_still(of, like) for of in _questions(_shorter(like)))]
    names = [n for of in BY_TOKENS.values() for n in of if getattr(first, n) is not None]
    given: dict[str, Any] = {}
    for name in (*names, *["seqused_k"] * (first.seqused_k is not None)):
        axis = int(name in ("dlse", "lse"))
        given[name] = np.concatenate([getattr(x, name) for x in parts], axis)
    for of in "qk":
        lengths = np.concatenate([np.diff(x.offsets(of)) for x in parts])
        given[f"cu_seqlens_{of}"] = np.append(0, np.cumsum(lengths)).astype(np.int32)
    return replace(first, **given)


def _still(question: Question, like: Question) -> Question:
    """With what ``like`` has of derivatives: v as its own direction, and zeros."""
    of = {"tq": question.q, "tk": question.k, "tblock_scale": question.block_scale}
    of |= {"dlse": question.q[..., 0].T}
    given: Any = {n: np.zeros_like(x) for n, x in of.items() if getattr(like, n) is not None}
    return replace(question, **given, tv=None if like.tv is None else question.v)


def read_packed(question: Question, answers: Answers, n: int) -> tuple[Question, Answers, Readings]:
    """The first ``n`` sequences, what was answered to them, and what the others tell, but of a
    backward pass that had a wrong forward pass's out and lse. Raises ValueError where the other
    sequences are not those of ``packed``."""
    here, given = part(question, answers, 0, n, PAST)
    told = read(_shorter(here), _asked(question, answers, here), (here, given))
    for reading in told.of:  # of other lengths than those that are judged
        reading.loose |= not reading.support.named
    forward = tuple(reading for reading in told.of if reading.stage == "forward")
    told = replace(told, of=forward) if forward and question.passed is None else told
    return replace(here, whole=question), given, told


def _asked(question: Question, answers: Answers, like: Question) -> Callable[[str], Ask | None]:
    """What ``read`` takes: a function of a stage, None where there are no results of it."""
    due, batch = _questions(_shorter(like)), like.batch
    firsts = range(batch, question.batch - batch + 1, batch)
    parts = [part(question, answers, first, first + batch) for first in firsts]
    there = [replace(one, dout=None) if question.dout is None else one for one in due]
    same = (_same(one, other) for one, (other, _) in zip(there, parts, strict=False))
    if question.batch != batch * (1 + len(due)) or not all(same):
        raise ValueError("its sequences are not those of `dump --identify`: write its file anew")

    def ask(stage: str, wanted: Question) -> Answers:
        for one, (_, found) in zip(due, parts, strict=True):
            if _same(one, wanted):
                return {name: x for name, x in found.items() if name in STAGES[stage]}
        raise Refused("it was not asked this")

    return lambda stage: partial(ask, stage) if {*STAGES[stage]} & answers.keys() else None


def _plain(question: Question) -> Question:
    """Without what is about derivatives, except dout; what the reader asks has no more."""
    changes: dict[str, Any] = dict.fromkeys((*OF_DERIVATIVES[1:], "out", "lse"))
    still = np.zeros((*question.q.shape[:2], question.v.shape[2]), question.q.dtype)
    return replace(question, **changes, dout=still if question.dout is None else question.dout)


def _shorter(question: Question) -> Question:
    """What the questions are like: with the longer of their lengths, which the reader adds, none is
    longer than the longest of ``question``, which a function may pad all of them to."""
    changes: dict[str, Any] = {}
    for of in "qk":
        lengths = np.diff(question.offsets(of))
        lengths = np.where(lengths > 2 * ADDED, lengths - ADDED, lengths)
        changes[f"cu_seqlens_{of}"] = np.append(0, np.cumsum(lengths)).astype(np.int32)
    if question.seqused_k is not None:
        changes["seqused_k"] = np.minimum(question.seqused_k, lengths).astype(np.int32)
    return replace(_plain(question), tv=question.tv, **changes)


def _questions(like: Question) -> list[Question]:
    """All that ``read`` may ask, in its order; nothing is computed for them."""
    found: list[Question] = []

    def ask(question: Question) -> Answers:
        found.append(question)
        given = {"dq": question.q, "dk": question.k, "dv": question.v, "out": question.out}
        return {name: np.zeros(np.shape(x)) for name, x in given.items()}

    for reader in (READ["forward"], READ["backward"]):
        for seed, other in ((0, False), (1, True)):
            reader(ask, problem(like, seed, other=other))
    return [_plain(question) for question in found]


def _same(one: Question, other: Question) -> bool:
    """Whether what a function is given is the same, but for out and lse, which are its own."""
    names = (field.name for field in fields(Question) if field.name not in ("out", "lse"))
    given = ((getattr(_plain(one), name), getattr(_plain(other), name)) for name in names)
    return all(a is b or (np.shape(a) == np.shape(b) and np.array_equal(a, b)) for a, b in given)
