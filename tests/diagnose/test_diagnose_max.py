"""Row statistics with a maximum that is not the row's: kernels that rescale only now and then."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.judge.diagnosis import diagnose
from tests.diagnose.test_diagnose import question_of

TILE, SLACK = 16, 2.0  # keys of a tile; growth of the maximum that is not worth a rescaling


def statistics(question: Question) -> tuple[np.ndarray, np.ndarray]:
    """The maximum and the row sum that a lazy kernel has at the end, (heads, tokens)."""
    tops, sums = (np.zeros(question.q.shape[1::-1]) for _ in range(2))
    for b in range(question.batch):
        start, stop = question.cu_seqlens_q[b : b + 2]
        for head in range(question.num_heads_q):
            keys = question.k[start:stop, head // question.group].astype(np.float64)
            for i in range(start, stop):
                scores = keys[: i - start + 1] @ question.q[i, head] * question.scale
                top, total = -math.inf, 0.0
                for first in range(0, len(scores), TILE):
                    tile = scores[first : first + TILE]
                    if tile.max() > top + SLACK:
                        total *= math.exp(top - tile.max()) if total else 0.0
                        top = tile.max()
                    total += np.exp(tile - top).sum()
                tops[head, i], sums[head, i] = top, total
    return tops, sums


def wrong(question: Question, form: str) -> Answers:
    answers = {name: x.copy() for name, x in solve(question, "forward").items()}
    top, total = statistics(question)
    if form == "no maximum":
        answers["lse"] = np.log(total)
    elif form == "log2 of the sum":
        answers["lse"] = top + np.log2(total)
    elif form == "base 2 of the maximum":
        answers["lse"] = top / math.log(2) + np.log(total)
    else:
        answers["out"] = answers["out"] * total.T[..., None]
    return {name: x.astype(question.q.dtype) for name, x in answers.items()}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("form", "bug"),
    [
        ("no maximum", "lse-without-max"),
        ("log2 of the sum", "lse-base-2"),
        ("base 2 of the maximum", "lse-base-2"),
        ("not divided", "not-normalised"),
    ],
)
def test_a_stale_maximum_is_recognised(form: str, bug: str, dtype: str) -> None:
    question = question_of(dtype=dtype)
    findings = diagnose(question, wrong(question, form)).findings
    assert [(finding.bug, finding.confidence) for finding in findings] == [(bug, "high")]


def test_other_numbers_are_no_maximum() -> None:
    question: Any = replace(question_of(), dout=None)
    right = solve(question, "forward")
    rng = np.random.default_rng(0)
    off = {"lse": right["lse"] - rng.uniform(0, 2, right["lse"].shape)}
    assert [finding.bug for finding in diagnose(question, right | off).findings] == ["unknown"]
