"""No bug, inference or pair of bugs raises or warns, whatever the shapes and the answers are.

Lengths of 0 and 1, unequal ones, selections of no slot, heads that select for themselves, rows
behind the last sequence; answers of zeros, NaN, inf, huge and random numbers.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import pytest

from rawattn.check.diagnose.engine.attention import Bug, solve, together
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from rawattn.check.diagnose.inferred import blocks
from rawattn.check.diagnose.judge import match

PAIRS = 30  # of bugs, on each stage


def drawn(rng: np.random.Generator) -> Question:
    batch, heads_kv, group = (int(rng.integers(1, n)) for n in (4, 3, 3))
    lengths_q = rng.choice([0, 1, 2, 5, 17], batch)
    lengths_k = lengths_q if rng.random() < 0.3 else rng.choice([0, 1, 2, 5, 19], batch)
    total_q, total_k = (int(n.sum() + rng.integers(3)) for n in (lengths_q, lengths_k))
    head_dim, of_v = int(rng.choice([1, 8])), int(rng.choice([4, 8]))
    dtype = rng.choice([np.dtype("float32"), np.dtype("float64")])
    slots, selecting = int(rng.choice([0, 1, 3])), heads_kv * int(rng.choice([1, group]))
    shapes = {
        "q": (total_q, heads_kv * group, head_dim),
        "k": (total_k, heads_kv, head_dim),
        "v": (total_k, heads_kv, of_v),
    }
    of_slots = (total_q, selecting, slots)

    def normal(shape: Sequence[int]) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    def sometimes(shape: Sequence[int], chance: float = 0.5) -> np.ndarray | None:
        return normal(shape) if rng.random() < chance else None

    gate = sometimes(of_slots)
    counts = rng.integers(0, slots + 1, of_slots[:2]).astype(np.int32)
    return Question(
        **{name: normal(shape) for name, shape in shapes.items()},
        cu_seqlens_q=np.cumsum([0, *lengths_q]).astype(np.int32),
        cu_seqlens_k=np.cumsum([0, *lengths_k]).astype(np.int32),
        causal=bool(rng.integers(2)),
        dout=normal((*shapes["q"][:2], of_v)),
        dlse=sometimes(shapes["q"][1::-1]),
        tq=sometimes(shapes["q"]),
        tk=sometimes(shapes["k"], 0.3),
        tv=sometimes(shapes["v"], 0.3),
        block_indices=rng.integers(-1, 4, of_slots).astype(rng.choice([np.int32, np.int64])),
        block_counts=counts if rng.random() < 0.5 else None,
        block_scale=gate,
        tblock_scale=None if gate is None else sometimes(of_slots),
        block_size=int(rng.choice([1, 4, 16])),
        own=bool(rng.integers(2)),
        sliding=(int(rng.integers(5)), 0) if rng.random() < 0.3 else None,
    )


def spoilt(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Something else: nothing, no numbers, other numbers."""
    found = x.astype(np.float32)
    kind = rng.integers(6)
    if kind == 0:
        return np.zeros_like(found)
    if kind == 1:
        return np.full_like(found, np.nan)
    if kind == 2:
        return rng.standard_normal(x.shape).astype(np.float32)
    if kind == 3:
        found.reshape(-1)[::3] = np.inf
        found.reshape(-1)[1::3] = -np.inf
    return found * np.float32(1e30 if kind == 4 else 1)


def inferred(question: Question, answers: Answers, stage: str) -> list[Bug]:
    return list(blocks.bugs(question, answers, stage))


@pytest.mark.parametrize("seed", range(12))
def test_nothing_raises(seed: int) -> None:
    rng = np.random.default_rng(seed)
    question = drawn(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers: Answers = {}
        for stage in question.stages:
            answers |= solve(question, stage)
        for stage in question.stages:
            bugs = list(match.catalogue(question, stage))
            for bug in bugs:
                solve(question, stage, bug)
            with np.errstate(invalid="ignore"):  # of answers that are no numbers
                bad = {name: spoilt(rng, x) for name, x in answers.items()}
                found = inferred(question, bad, stage)
            right = {name: x for name, x in answers.items() if name not in STAGES[stage]}
            found += inferred(
                question, right | {n: bad[n] for n in STAGES[stage] if n in bad}, stage
            )
            bugs += found
            for _ in range(PAIRS if bugs else 0):
                one, other = (bugs[int(i)] for i in rng.integers(len(bugs), size=2))
                both = together(one, other)
                if both is not None:
                    solve(question, stage, both)
