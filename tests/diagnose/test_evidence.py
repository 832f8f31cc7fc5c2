"""Identities hold for right attention of every precision and fail for wrong; places are named."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.invariants import checks
from rawattn.check.diagnose.evidence.runs import Runs
from rawattn.check.diagnose.evidence.structure import named, where
from rawattn.check.diagnose.findings import Check
from tests.diagnose import plain
from tests.diagnose.planted import first, second
from tests.diagnose.problems import DTYPES, FLOAT64, KINDS, Needs, draw, packed, problems

RUNS = ("I9", "I11", "I12")
PLANTED = {f"{p.bug}: {p.variant}": p for p in (*first.PLANTED, *second.PLANTED)}


def failing(found: tuple[Check, ...]) -> set[str]:
    return {check.name for check in found if check.verdict == "FAIL"}


def of_text(found: tuple[Check, ...], text: str) -> Check:
    """The check whose text has ``text`` in it."""
    return next(check for check in found if text in check.text)


# ---- identities -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "options"])
@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("float16")], ids=str)
def test_identities_hold(dtype: np.dtype[Any], kind: str) -> None:
    for seed in range(4):
        question = draw(KINDS[kind], np.random.default_rng(seed), dtype)
        found = checks(question, plain.answers(None, question), "one")
        if seed < 2 and kind in ("dense", "sparse"):
            found += (*Runs(question, "one", partial(plain.answers, None)).checks(*RUNS),)
        for check in found:
            assert check.verdict != "FAIL", (seed, check)
            half = check.value <= 0.5 * check.allowed or check.name in RUNS
            assert half or check.verdict == "-", (seed, check)


@pytest.mark.parametrize("change", ["large scores", "keys with a mean", "small", "equal", "ones"])
@pytest.mark.parametrize("dtype", [DTYPES[2], np.dtype("float16")], ids=str)
def test_identities_hold_on_odd_numbers(dtype: np.dtype[Any], change: str) -> None:
    def changed(array: np.ndarray, factor: float, plus: float) -> np.ndarray:
        return (array.astype(np.float64) * factor + plus).astype(array.dtype)

    for seed in range(3):
        q = draw(KINDS["dense"], np.random.default_rng(seed), dtype)
        assert q.dout is not None
        changes: dict[str, dict[str, Any]] = {
            "large scores": {"q": changed(q.q, 4, 0), "k": changed(q.k, 4, 0)},
            "keys with a mean": {"q": changed(q.q, 1, 1), "k": changed(q.k, 1, 3)},
            "small": {"dout": changed(q.dout, 1e-5, 0), "dlse": None},
            "equal": {name: changed(getattr(q, name), 0, 1) for name in "qkv"},
            "ones": {"v": changed(q.v, 1, 5), "dout": changed(q.dout, 0, 1)},
        }
        q = replace(q, **changes[change])
        assert not failing(checks(q, plain.answers(None, q), "one"))


def test_zeros_fail_where_sums_are_known() -> None:
    question = replace(draw(KINDS["dense"], np.random.default_rng(2), FLOAT64), dlse=None)
    zeros = {name: np.zeros_like(a) for name, a in plain.answers(None, question).items()}
    assert of_text(checks(question, zeros, "one"), "sum of dv").verdict == "FAIL"


def test_nan_in_a_sequence_of_its_own_does_not_count() -> None:
    question = draw(Needs(batch=(3, 3), lengths=(5, 20)), np.random.default_rng(0), FLOAT64)
    k, (_, start, stop, *_) = question.k.copy(), question.cu_seqlens_k
    k[start:stop] = np.nan
    answers = plain.answers(None, question)
    assert not failing(checks(replace(question, k=k), answers, "one"))
    answers["dv"][stop] = np.nan
    check = of_text(checks(question, answers, "one"), "sum of dv")
    assert (check.verdict, check.where, check.value) == ("FAIL", "sequence 2", np.inf)


FAULTS = {
    "mask-missing-in-backward: softmax over all keys (backward)": ("sum of dk",),
    "delta-omitted: D = 0 (backward)": ("sum of dk",),
    "lse-gradient-dropped: D (backward)": ("sum of dk",),
    "gqa-group-not-summed: last head (backward)": ("sum of dv",),
    "lse-base-2: stored alone (forward)": ("exp(scores",),
    "output-scale: dq without (backward)": ("<q, dq>",),
    "gradients-swapped: dk and dv (backward)": ("sum of dv", "<q, dq>"),
    "score-scale: 1 (forward and backward)": ("exp(scores",),
    "causal-dropped: no mask (forward and backward)": ("exp(",),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_answers_fail(fault: str) -> None:
    plant = replace(PLANTED[fault], gives=())
    for question in problems(plant, 2, seed=1):
        found = checks(question, plain.answers(plant, question), "one")
        for text in FAULTS[fault]:
            assert of_text(found, text).verdict == "FAIL", (question.dtype, text)


# ---- between runs -----------------------------------------------------------------------------


RUN_FAULTS = {
    "neighbour-leak: one key after (forward and backward)": {"I9"},
    "race: dq (backward)": {"I12"},
    "score-scale: the default though one is given (forward and backward)": {"I11"},
}


@pytest.mark.parametrize("fault", RUN_FAULTS)
def test_wrong_runs_fail(fault: str) -> None:
    plant, calls = replace(PLANTED[fault], gives=()), itertools.count()
    (question,) = problems(plant, 1, seed=2)

    def call(asked: Question) -> Answers:
        return plain.answers(plant, asked, next(calls))

    found = (*Runs(question, "one", call).checks(*RUNS),)
    assert RUN_FAULTS[fault] <= failing(found), found


def test_a_function_that_cannot_do_it() -> None:
    """What it raises is the reason; what is asked of it first must work."""

    def refuses(q: Question) -> Answers:
        raise ValueError("no")

    question = draw(KINDS["dense"], np.random.default_rng(0), FLOAT64)
    found = Runs(question, "one", refuses).checks(*RUNS)
    assert {check.where for check in found} == {"the function raised ValueError: no"}


# ---- where wrong rows lie ---------------------------------------------------------------------


LENGTHS, SOME, SIDES = (20, 64, 30, 47), (3, 8, 9, 10, 11), {"window": (9, 9)}
ROWS: dict[str, tuple[dict[str, Any], str, Callable[..., Any]]] = {
    # a sentence, of a question like this and a tensor, when these rows are wrong
    "the rows with seqlen_q - 1 - i <= 2": ({}, "dq", lambda i, n: n - 1 - i < 3),
    "the rows with i >= 12": ({}, "dq", lambda i, n: i >= 12),
    "the keys with j - seqlen_k // 32 * 32 >= 0": ({}, "dv", lambda i, n: i >= n - n % 32),
    "the rows with i // 4 % 2 <= 0 and i % 16 >= 3": (
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
    said = where(question, tensor, np.repeat(bad, 2 if tensor == "dv" else 4, axis=1))
    assert sentence in said, said


def test_sequences_and_heads() -> None:
    question = packed(LENGTHS, FLOAT64, dim=8, causal=False)

    def of(wrong: Any) -> tuple[str, ...]:
        sequence, head = question.sequence_of("q")[:, None], np.arange(4)
        return where(question, "out", wrong(sequence, head) & np.ones((161, 4), dtype=bool))[1:]

    some = "only sequences 0, 2, 3 of 4", "the rows with keys seen <= 47"
    assert of(lambda b, h: b != 1) == some
    two = "only sequences 2, 3 of 4", "the rows with 30 <= keys seen <= 47"
    assert of(lambda b, h: b > 1) == two
    for heads, sentence in (((1, 2), "whether h % 2 is not h // 2 = 1"), ((1, 3), "h % 2 = 1")):
        told = f"only {named('head', heads)} of 4", f"the rows with {sentence}"
        assert of(partial(lambda some, b, h: np.isin(h, some), heads)) == told
    told = "only head 3 of 4", "only sequence 1 of 4", "every row of these"
    assert of(lambda b, h: (b == 1) & (h == 3)) == told
