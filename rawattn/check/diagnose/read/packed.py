"""The reader's questions as one packed problem, for a function that cannot be called from here.

Whoever answers such a problem, in any language, has answered every question of ``read``: its
sequences are some of any kind, and behind them those of one question after another, each as many.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import (
    BY_ROW,
    OF_KEYS,
    OF_SINKS,
    STAGES,
    Answers,
    Question,
)
from rawattn.check.diagnose.read.name import Readings, read
from rawattn.check.diagnose.read.probe import (
    OF_DERIVATIVES,
    Ask,
    Refused,
    problem,
    read_backward,
    read_forward,
)

Array = np.ndarray
OF_ROWS, OF_OWN_KEYS = ("q", "dout"), ("k", "v")
OF_LISTS = ("block_indices", "block_counts", "block_scale")  # of rows, where there are any
PAST = 128  # keys behind the first sequences, which a tile of these may have read too
ADDED = 9  # tokens at most, to a sequence of the reader's second problem
READERS = {"forward": read_forward, "backward": read_backward}


def packed(like: Question) -> Question:
    """``like``, and behind its sequences those of what would be asked about it.

    Raises Refused where it takes too many calls.
    """
    return _joined([_plain(like), *_questions(_shorter(like))])


def read_packed(
    question: Question, answers: Answers, batch: int
) -> tuple[Question, Answers, Readings]:
    """The first ``batch`` sequences, what was answered to them, and what the others tell.

    A backward pass that had the out and lse of a wrong forward pass tells nothing. Raises
    ValueError where the other sequences are not those of ``packed``.
    """
    here, given = _part(question, answers, 0, batch, PAST)
    told = read(_shorter(here), _asked(question, answers, here))
    forward = tuple(reading for reading in told.of if reading.stage == "forward")
    if forward and question.passed is None:
        told = replace(told, of=forward)
    return replace(here, whole=question), given, told


def _asked(question: Question, answers: Answers, like: Question) -> Callable[[str], Ask | None]:
    """What ``read`` takes: a function of a stage, None where there are no results of it."""
    due, batch = _questions(_shorter(like)), like.batch
    if question.batch != batch * (1 + len(due)):
        raise ValueError(
            f"{question.batch} sequences, and `dump --identify` writes {batch * (1 + len(due))} of "
            "them: write its file anew, as this version does"
        )
    parts = [_part(question, answers, batch * n, batch) for n in range(1, 1 + len(due))]
    if not all(_same(one, part) for one, (part, _) in zip(due, parts, strict=True)):
        raise ValueError("its inputs are not those that `dump --identify` has written")

    def ask(stage: str, wanted: Question) -> Answers:
        for one, (_, found) in zip(due, parts, strict=True):
            if _same(one, wanted):
                return {name: x for name, x in found.items() if name in STAGES[stage]}
        raise Refused("it was not asked this")

    def of(stage: str) -> Ask | None:
        there = any(name in answers for name in STAGES[stage])
        return partial(ask, stage) if there else None

    return of


def _plain(question: Question) -> Question:
    """Without what is about derivatives, except dout; what the reader asks has no more."""
    changes: dict[str, Any] = dict.fromkeys((*OF_DERIVATIVES[1:], "out", "lse"))
    if question.dout is None:
        changes["dout"] = np.zeros((*question.q.shape[:2], question.v.shape[2]), question.q.dtype)
    return replace(question, **changes)


def _shorter(question: Question) -> Question:
    """What the questions are like: with the longer of their lengths, which the reader adds, none is
    longer than the longest of ``question``, which a function may pad all of them to."""
    changes: dict[str, Any] = {}
    for side in "qk":
        lengths = np.diff(getattr(question, f"cu_seqlens_{side}"))
        lengths = np.where(lengths > 2 * ADDED, lengths - ADDED, lengths)
        changes[f"cu_seqlens_{side}"] = np.append(0, np.cumsum(lengths)).astype(np.int32)
    if question.seqused_k is not None:
        changes["seqused_k"] = np.minimum(question.seqused_k, lengths).astype(np.int32)
    return replace(_plain(question), **changes)


def _questions(like: Question) -> list[Question]:
    """All that ``read`` may ask, in its order; nothing is computed for them."""
    found: list[Question] = []

    def ask(question: Question) -> Answers:
        found.append(question)
        dout = np.zeros(0) if question.dout is None else question.dout
        given = {"dq": question.q, "dk": question.k, "dv": question.v, "out": question.out}
        return {name: np.zeros(np.shape(x)) for name, x in (given | {"dout": dout}).items()}

    for reader in READERS.values():
        for seed, other in ((0, False), (1, True)):
            reader(ask, problem(like, seed, other=other))
    return [_plain(question) for question in found]


def _of_rows(question: Question) -> tuple[str, ...]:
    return (*OF_ROWS, *(name for name in OF_LISTS if getattr(question, name) is not None))


def _joined(parts: list[Question]) -> Question:
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in (*_of_rows(parts[0]), *OF_OWN_KEYS)
    }
    used = [part.seqused_k for part in parts if part.seqused_k is not None]
    if used:
        arrays["seqused_k"] = np.concatenate(used)
    for side in "qk":
        name = f"cu_seqlens_{side}"
        lengths = np.concatenate([np.diff(getattr(part, name)) for part in parts])
        arrays[name] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return replace(parts[0], **arrays)


def _part(
    question: Question, answers: Answers, first: int, count: int, past: int = 0
) -> tuple[Question, Answers]:
    """``count`` sequences from ``first`` on, and keys ``past`` them; without what is summed over
    all of them."""
    of = {side: np.asarray(getattr(question, f"cu_seqlens_{side}")) for side in "qk"}
    rows, keys = (slice(int(x[first]), int(x[first + count])) for x in of.values())
    changes: dict[str, Any] = {
        f"cu_seqlens_{side}": (x[first : first + count + 1] - x[first]).astype(np.int32)
        for side, x in of.items()
    }
    changes |= {name: getattr(question, name)[rows] for name in _of_rows(question)}
    wide = slice(keys.start, keys.stop + past)
    changes |= {name: getattr(question, name)[wide] for name in OF_OWN_KEYS}
    if question.passed is not None:
        changes |= {"out": question.passed[0][rows], "lse": question.passed[1][:, rows]}
    if question.seqused_k is not None:
        changes["seqused_k"] = question.seqused_k[first : first + count]
    found = {}
    for name, x in answers.items():
        if name in OF_SINKS:
            continue
        found[name] = x[:, rows] if name in BY_ROW else x[wide if name in OF_KEYS else rows].copy()
        if name in OF_KEYS:
            found[name][keys.stop - keys.start :] = 0
    return replace(question, **changes), found


def _same(one: Question, other: Question) -> bool:
    """Whether what a function is given is the same, but for out and lse, which are its own."""
    names = (part.name for part in fields(Question) if part.name not in ("out", "lse"))
    given = ((getattr(_plain(one), name), getattr(_plain(other), name)) for name in names)
    return all(a is b or (np.shape(a) == np.shape(b) and np.array_equal(a, b)) for a, b in given)
