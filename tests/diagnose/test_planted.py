"""The planted implementation: right without a bug; its bugs show, and where they are planted."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from rawattn.reference import dense
from tests.diagnose.planted import first as planted
from tests.diagnose.planted.first import (
    PLANTED,
    RIGHT,
    Planted,
    answers,
    difference,
    problems,
    right_answers,
)

BUGS = """
    padded-keys padded-grad-out mask-missing-in-backward causal-dropped causal-off-by-one
    causal-alignment window-off-by-one window-dropped output-scale score-scale lse-base-2
    lse-without-max gqa-head-map gqa-group-not-summed delta-omitted delta-of-another-out transposed
    neighbour-leak offsets-shifted tail-tile-dropped tile-skipped tile-counted-twice tile-overwrites
    tile-period no-rescale not-normalised dead-rows masked-tile-nan no-max-subtraction head-dim-tail
    lse-gradient-dropped lse-gradient-sign softmax-backward-without-p gradients-swapped
    accumulates-in-16-bit race other-data
""".split()
NOISE = {"float64": 1e-12, "float32": 1e-4, "float16": 1e-3, "bfloat16": 2e-2}
TF32_NOISE = 1e-3


def reference(question: Question) -> Answers:
    """The answers of rawattn.reference.dense, in float64."""

    def wide(*names):
        arrays = (getattr(question, name) for name in names)
        return [None if array is None else array.astype(np.float64) for array in arrays]

    q, k, v, dout, dlse, out, lse = wide("q", "k", "v", "dout", "dlse", "out", "lse")
    where = question.cu_seqlens_q, question.cu_seqlens_k
    how = {"window": question.mask_window, "softmax_scale": question.softmax_scale}
    computed = dict(zip(("out", "lse"), dense.forward(q, k, v, *where, **how), strict=True))
    if out is None:
        out, lse = computed["out"], computed["lse"]
    gradients = dense.backward(dout, q, k, v, out, lse, *where, dlse=dlse, **how)
    delta = (dout * out).sum(axis=2).T - (0 if dlse is None else dlse)
    return computed | {"delta": delta} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def small_problems(bug: Planted, seed: int, **needs: object) -> Iterator[Question]:
    """One problem of as few heads and sequences as show the bug, and of the first dtype."""
    few = {name: getattr(bug.needs, name)[:1] for name in ("groups", "heads_kv", "dtypes")}
    batch = (1, 1) if bug.needs.batch == (1, 1) else (2, 2)
    wanted = replace(bug.needs, **few, batch=batch, **needs)
    return problems(replace(bug, needs=wanted), 1, seed)


def test_every_class_is_planted():
    assert {bug.bug for bug in PLANTED} == set(BUGS)
    assert len({(bug.bug, bug.variant) for bug in PLANTED}) == len(PLANTED)
    assert len({kind.variant for kind in RIGHT}) == len(RIGHT)


def test_it_is_separate():
    text = Path(planted.__file__).read_text()
    imports = [line for line in text.splitlines() if line.startswith(("from raw", "import raw"))]
    assert [line.split()[1] for line in imports] == ["rawattn.check.diagnose.engine.question"]


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.variant)
def test_right_ones_are_right(kind):
    for question in problems(kind, 3, seed=4):
        noise = TF32_NOISE if kind.variant == "TF32" else NOISE[question.dtype.name]
        computed = right_answers(kind, question)
        expected = reference(question)
        for name, array in computed.items():
            assert difference(array, expected[name]) < noise, (name, question.dtype)


@pytest.mark.parametrize("name", BUGS)
def test_bugs_show_where_they_are_planted(name):
    for bug in (bug for bug in PLANTED if bug.bug == name):
        for question in small_problems(bug, seed=1):  # with out and lse given
            computed, expected = answers(bug, question), reference(question)
            noise = NOISE[question.dtype.name]
            wrong = {n for n, array in computed.items() if difference(array, expected[n]) > noise}
            touched = {n for stage in bug.stages for n in STAGES[stage]}
            assert wrong and wrong <= touched, (bug.variant, wrong)


def test_problems_take_turns():
    bug = next(bug for bug in PLANTED if bug.bug == "output-scale")
    drawn = list(problems(bug, 6, seed=2))
    assert [question.dtype.name for question in drawn] == ["float64", "float32", "bfloat16"] * 2
    given = [question.out is not None for question in drawn]
    assert given == [False, True, False, True, False, True]
    again = next(problems(bug, 1, seed=2))
    assert np.array_equal(again.q, drawn[0].q)
    assert not np.array_equal(next(problems(bug, 1, seed=3)).q, drawn[0].q)


def test_only_a_race_depends_on_the_call():
    for bug in (bug for bug in PLANTED if bug.bug in ("race", "other-data", "tile-period")):
        question = next(small_problems(bug, seed=1, lengths=(40, 90)))
        first, other = (answers(bug, question, chance) for chance in (0, 1))
        same = all(np.array_equal(first[name], other[name], equal_nan=True) for name in first)
        assert same == (bug.bug != "race"), bug.variant


def test_delta_comes_sometimes():
    kinds = [kind for kind in RIGHT if kind.variant in ("tiles of 16", "exp2")]
    found = [
        "delta" in right_answers(kind, question)
        for kind in kinds
        for question in problems(kind, 6, seed=5)
    ]
    assert any(found) and not all(found)
