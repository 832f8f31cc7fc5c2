"""Which options, where nobody said them, would make a wrong answer right? Read off its numbers."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.attention import Floats, solve
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.places import places_of
from rawattn.check.diagnose.inferred.row_numbers import DELTA, read_of
from rawattn.check.diagnose.inferred.sample import Sample

STARTS, STEPS, STEP = (0.3, 1.0, 4.0), 9, 1e-4  # of Newton's method, for a scale
CELLS = 2_000_000  # intervals of all rows that are tried
NEAR = {2: 2e-2, 4: 1e-4, 8: 1e-6}  # of the values, by the bytes of the inputs

Option = tuple[str, dict[str, Any]]  # what may have been meant, in words, and as fields


def options(
    question: Question, answers: Answers, left_out: Collection[str], *, forward: bool
) -> Iterator[Option]:
    """What may have been meant of what is ``left_out``; ``forward``: the forward pass is wrong."""
    if "causal" in left_out:
        yield f"causal = {not question.causal}", {"causal": not question.causal}
    if question.sparse:
        return
    if not forward:
        # D = dout . out - dlse with some dlse, which dq tells: it is linear in that of its row
        sample = Sample(question, answers, "backward") if "dlse" in left_out else None
        if question.dlse is None and sample and "dq" in sample.wrong:
            if read := read_of(sample, DELTA):
                yield "a cotangent of lse (dlse)", {"dlse": -read[1].astype(np.float32)}
        return
    if (wanted := _read(question, answers)) is not None:
        for words, changes in _masks(question, wanted):
            as_read = np.array_equal(places_of(replace(question, **changes)).right, wanted)
            if as_read and changes.keys() <= {*left_out}:
                yield words, changes
                return
    yield from _of_scale(question, answers) if "softmax_scale" in left_out else ()


def _read(question: Question, answers: Answers) -> np.ndarray | None:
    """Which token sees which, (total_q, total_k), read off out, where all heads see one interval:
    no other one sums up to their numbers. None where they do not, or as the question says."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (question.q, question.k, question.v))
    if "out" not in answers or question.rare or len(q) * len(k) ** 2 > CELLS:
        return None
    found = np.zeros((len(q), len(k)), dtype=bool)
    heads = np.arange(q.shape[1]) // question.group
    mixed = np.random.default_rng(0).standard_normal(v.shape[2])  # one number of each row
    values = np.einsum("khd,d->hk", v[:, heads], mixed)
    out = np.einsum("qhd,d->hq", np.asarray(answers["out"], dtype=np.float64), mixed)
    scores = question.scale * np.einsum("qhd,khd->hqk", q, k[:, heads])
    for row in range(len(q)):
        weights = np.exp(scores[:, row] - scores[:, row].max(axis=1, keepdims=True))
        sums, moments = (_intervals(x) for x in (weights, weights * values))
        with np.errstate(divide="ignore", invalid="ignore"):
            off = np.abs(moments / sums - out[:, row, None, None]).max(axis=0)
        off = np.where(np.isnan(off), np.inf, off)
        first, stop = np.unravel_index(off.argmin(), off.shape)
        if off[first, stop] > NEAR[question.dtype.itemsize] * np.abs(values).max():
            return None
        found[row, first:stop] = True
    return None if np.array_equal(found, places_of(question).right) else found


def _intervals(x: Floats) -> Floats:
    """(heads, first, stop): sums of x (heads, keys); NaN where there is no interval."""
    total = np.pad(np.cumsum(x, axis=1), ((0, 0), (1, 0)))
    sums = total[:, None] - total[:, :, None]
    return np.where(np.triu(np.ones(sums.shape[1:]), 1) > 0, sums, np.nan)


def _masks(question: Question, wanted: np.ndarray) -> Iterator[Option]:
    """A window, or sequences that begin where no token sees one on the other side."""
    places = places_of(question)
    distance = np.append((places.j - places.p)[wanted & places.own], 0)
    longest = max((*question.lengths_q, *question.lengths_k))
    left, right = (-1 if n >= longest - 1 else int(n) for n in (-distance.min(), distance.max()))
    window = (left, -1 if question.causal else right)
    yield f"window = {window}", {"window": window}
    n = len(wanted)
    if wanted.shape == (n, n):
        linked = wanted | wanted.T | np.eye(n, dtype=bool)
        farthest = np.maximum.accumulate(n - 1 - linked[:, ::-1].argmax(axis=1))
        of = np.append(0, np.flatnonzero(farthest == np.arange(n)) + 1)
        yield f"cu_seqlens = {of.tolist()}", {"cu_seqlens_q": of, "cu_seqlens_k": of}


def _of_scale(question: Question, answers: Answers) -> Iterator[Option]:
    """Another softmax_scale that gives these lse: by Newton's method from several ones."""
    found = np.asarray(answers.get("lse", np.zeros(0)), dtype=np.float64)
    for start in STARTS if found.size else ():
        s = question.scale * start
        for _ in range(STEPS):
            asked = (replace(question, softmax_scale=x) for x in (s, s * (1 + STEP)))
            here, beside = (solve(one, "forward")["lse"] for one in asked)
            there = np.isfinite(here) & np.isfinite(found)
            left, by = found[there] - here[there], (beside[there] - here[there]) / (s * STEP)
            s = max(s + float(left @ by / (by @ by or 1.0)), s / 4)
        size = np.abs(found[there]).max(initial=1e-30)
        if np.abs(left).max(initial=0.0) < NEAR[question.dtype.itemsize] * size:
            yield f"softmax_scale = {s:.6g}", {"softmax_scale": s}
            return
