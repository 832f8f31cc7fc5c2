"""Which queries has the list of every block of keys? Read off dk and dv of block-sparse attention.

dk and dv of a block are sums over the queries of its list: least squares tell how often each query
is in it, one that has not named the block too. It must be a whole number, in every list.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    times,
)
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.inferred.tile_pairs import found_in
from rawattn.reference.dense import dead_to_inf

EXPLAINED = {2: 0.15, 4: 0.02, 8: 0.02}  # of what is wrong may be left, at most; by bytes
MOST = 4  # times that a query is in a list
RIDGE, TINY = 1e-9, 1e-300

Counts = dict[tuple[int, int], Floats]  # by sequence and kv head: (heads, queries, keys)


class _Read(NamedTuple):
    """Squares of what is ``left`` of what is wrong in a block; how many queries its list lacks, has
    more than once, and has though they did not name the block."""

    left: float
    whole: float
    lost: int = 0
    more: int = 0
    others: int = 0


class _Pairs(NamedTuple):
    """P and s dY of all pairs, those too that are not in the selection; who may see whom."""

    P: Floats
    dY: Floats
    allowed: np.ndarray


def bugs(
    question: Question,
    answers: Answers,
    stage: str,
    contexts: Sequence[Context],
    wrong: frozenset[str],
) -> Iterator[Bug]:
    """The bug in which the lists are those read off; none where they explain nothing."""
    if stage != "backward" or not wrong <= {"dk", "dv"}:
        return
    counts: Counts = {}
    left, whole, lost, more, others = 0.0, 0.0, 0, 0, 0
    for c in contexts:
        with np.errstate(over="ignore", invalid="ignore"):
            pairs = _pairs(question, c)
        often = np.zeros(pairs.P.shape)
        for start in range(0, len(c.view.keys), question.block_size):
            keys = slice(start, start + question.block_size)
            with np.errstate(over="ignore", invalid="ignore"):
                read = _read(answers, c, pairs, keys, often, sorted(wrong))
            left, whole = left + read.left, whole + read.whole
            lost, more, others = lost + read.lost, more + read.more, others + read.others
        counts[c.view.sequence, c.view.head_kv] = often
    if not left <= EXPLAINED[question.dtype.itemsize] ** 2 * whole:
        return
    words = (
        f"the lists of blocks lack {lost} of their queries, have {more} more than once, and "
        f"{others} that did not name the block"
    )
    steps = {"dK": _of(question, counts, "dK"), "dV": _of(question, counts, "dV")}
    there = {step: steps[step] for step in steps if step.lower() in wrong}
    yield Bug("sparse-inverted-lists", words, BACKWARD, steps=there)


def _pairs(question: Question, c: Context) -> _Pairs:
    n, m = len(c.view.rows), len(c.view.keys)
    allowed = np.arange(m) <= np.arange(n)[:, None] + m - n
    if not question.causal:
        allowed[:] = True
    named = np.broadcast_to(c.W > 0, c.Y.shape)
    with np.errstate(over="ignore"):
        P = np.exp(np.where(named, c.S, c.Y) - dead_to_inf(np, c.L)[..., None])
    P = np.where(named, P / np.maximum(c.W, 1.0), np.where(allowed, P, 0.0))
    dY = c.s * np.where(named, c.G, 1.0) * P * (times(c.dO, c.V.T) - c.D[..., None])
    return _Pairs(P, dY, allowed)


def _read(
    answers: Answers, c: Context, pairs: _Pairs, keys: slice, often: Floats, wrong: Sequence[str]
) -> _Read:
    """Set how often each query is in the list of a block."""
    rows = np.flatnonzero(pairs.allowed[:, keys].any(axis=1))
    weights = {"dk": (pairs.dY, c.Q), "dv": (pairs.P, c.dO)}
    selections = c.view.selections
    designs, differences, of_selection = [], [], np.unique(selections)
    for name in wrong:
        w, x = weights[name]
        scale = 1 / max(float(np.sqrt(np.mean(c.right[name] ** 2))), 1e-300)
        for_one = [
            np.einsum("hij,hid->ijd", w[here][:, rows, keys], x[here][:, rows])
            for here in (selections == one for one in of_selection)
        ]
        design = np.concatenate(for_one).reshape(len(rows) * len(for_one), -1)
        designs.append(scale * design)
        differences.append(scale * found_in(c, answers, name)[keys].reshape(-1))
    design, wanted = np.concatenate(designs, axis=1), np.concatenate(differences)
    seen = np.broadcast_to(c.W > 0, often.shape)[:, rows][:, :, keys]
    named = np.asarray(seen.any(axis=2))
    usual = np.concatenate([named[selections == one].any(axis=0) for one in of_selection])
    wanted_more = wanted - usual @ design
    if len(design) > design.shape[1] // 2:
        rest = float((wanted_more**2).sum())
        often[:, rows, keys] = named[..., None]
        return _Read(rest, rest)
    gram = design @ design.T
    gram += max(RIDGE * float(np.trace(gram)) / len(gram), TINY) * np.eye(len(gram))
    count = np.clip(np.rint(usual + np.linalg.solve(gram, design @ wanted_more)), 0, MOST)
    rest = wanted - count @ design
    for place, one in enumerate(of_selection):
        of_rows = count[place * len(rows) : (place + 1) * len(rows)]
        here = np.flatnonzero(selections == one)
        often[here[:, None, None], rows[:, None], np.arange(often.shape[2])[keys]] = of_rows[
            :, None
        ]
    return _Read(
        float((rest**2).sum()),
        float((wanted_more**2).sum()),
        int((usual & (count == 0)).sum()),
        int((usual & (count > 1)).sum()),
        int((~usual & (count > 0)).sum()),
    )


def _of(question: Question, counts: Counts, step: str) -> Step:
    def with_lists(c: Context) -> Floats:
        often = counts[c.view.sequence, c.view.head_kv]
        if often.shape[1:] != c.view.weight.shape[1:]:  # another bug has added keys
            return np.asarray(STEPS[step](c))
        pairs = _pairs(question, c)
        if step == "dV":
            return np.asarray(c.r(c.o(often * pairs.P).swapaxes(1, 2) @ c.dO))
        return np.asarray(c.r(c.o(often * pairs.dY).swapaxes(1, 2) @ c.Q))

    return with_lists
