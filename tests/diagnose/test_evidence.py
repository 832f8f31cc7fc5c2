"""Other runs of right functions give the same, of wrong ones not; places are named."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.structure import where
from rawattn.check.diagnose.judge.proofs import of_race
from tests.diagnose import plain
from tests.diagnose.planted import first, second
from tests.diagnose.problems import DTYPES, FLOAT64, KINDS, draw, packed, problems

PLANTED = {f"{p.bug}: {p.variant}": p for p in (*first.PLANTED, *second.PLANTED)}


# ---- other runs -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "sparse", "options"])
@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("float16")], ids=str)
def test_right_runs_are_alike(dtype: np.dtype[Any], kind: str) -> None:
    for seed in range(2):
        question = draw(KINDS[kind], np.random.default_rng(seed), dtype)
        assert not of_race(question, partial(plain.answers, None), "kernel")


def test_wrong_runs_differ() -> None:
    plant, calls = replace(PLANTED["race: dq (backward)"], gives=()), itertools.count()
    (question,) = problems(plant, 1, seed=2)

    def call(asked: Question) -> Answers:
        return plain.answers(plant, asked, next(calls))

    (race,) = of_race(question, call, "kernel")
    assert (race.bug, race.confidence) == ("race", "proved") and "dq" in race.where


def test_a_function_that_cannot_do_it() -> None:
    def refuses(q: Question) -> Answers:
        raise ValueError("no")

    question = draw(KINDS["dense"], np.random.default_rng(0), FLOAT64)
    assert not of_race(question, refuses, "kernel")


# ---- where wrong rows lie ---------------------------------------------------------------------


LENGTHS, SOME, SIDES = (20, 64, 30, 47), (3, 8, 9, 10, 11), {"window": (9, 9)}
ROWS: dict[str, tuple[dict[str, Any], str, Callable[..., Any]]] = {
    # a sentence, of a question like this and a tensor, when these rows are wrong
    "the rows with seqlen_q - 1 - i <= 2": ({}, "dq", lambda i, n: n - 1 - i < 3),
    "the rows with i >= 12": ({}, "dq", lambda i, n: i >= 12),
    "the keys with j - seqlen_k // 32 * 32 >= 0": ({}, "dv", lambda i, n: i >= n - n % 32),
    "the rows with i % 8 <= 3 and i % 16 >= 3": (
        {},
        "out",
        lambda i, n: np.isin(i % 16, SOME),
    ),
    "the rows with keys seen <= 12": (SIDES, "out", lambda i, n: (i < 3) | (n - 1 - i < 3)),
}


@pytest.mark.parametrize("sentence", ROWS)
def test_rows(sentence: str) -> None:
    changes, tensor, wrong = ROWS[sentence]
    i = np.concatenate([np.arange(n) for n in LENGTHS])
    bad = wrong(i, np.repeat(LENGTHS, LENGTHS))[:, None]
    question = packed(LENGTHS, FLOAT64, dim=8, **{"causal": False} | changes)
    said = [*where(question, tensor, np.repeat(bad, 2 if tensor == "dv" else 4, axis=1))]
    assert sentence in said, said


def test_sequences_and_heads() -> None:
    question = packed(LENGTHS, FLOAT64, dim=8, causal=False)

    def of(wrong: Any) -> tuple[str, ...]:
        sequence, head = question.sequence_of("q")[:, None], np.arange(4)
        wrong_rows = wrong(sequence, head) & np.ones((161, 4), dtype=bool)
        return (*where(question, "out", wrong_rows),)

    some = "only sequences 0, 2, 3 of 4", "the rows with keys seen <= 47"
    assert of(lambda b, h: b != 1) == some
    two = "only sequences 2, 3 of 4", "the rows with 30 <= keys seen <= 47"
    assert of(lambda b, h: b > 1) == two
    odd = "only heads 1, 3 of 4", "the rows with h % 2 = 1"
    assert of(lambda b, h: h % 2 == 1) == odd
    told = "only head 3 of 4", "only sequence 1 of 4", "every row of these"
    assert of(lambda b, h: (b == 1) & (h == 3)) == told
