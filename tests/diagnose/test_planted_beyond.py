"""The planted implementations of second order and of sparse attention: right but for what is meant.

Their right version is the reference's function, and a bug shows in its own stages, only there.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.engine.question import BY_ROW, OF_SLOTS, STAGES, Answers, Question
from rawattn.reference import dense, second, sparse
from tests.diagnose.planted import second as planted_second
from tests.diagnose.planted import sparse as planted_sparse
from tests.diagnose.planted.second import DTYPES, Planted, differ

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

ALLOWED = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 0.1}  # of the size of what is right
MODULES = (planted_second, planted_sparse)
PLANTED = [(module, planted) for module in MODULES for planted in module.PLANTED]


def name(value: Any) -> str:
    return f"{value.bug}, {value.variant}" if isinstance(value, Planted) else value.__name__


def of_reference(question: Question) -> Answers:
    """What ``answers`` shall be, in float64; of the right forward's out and lse."""

    def wide(array):
        return None if array is None else array.astype(np.float64)

    x, scale = question, {"softmax_scale": question.softmax_scale}
    inputs, lengths = [wide(a) for a in (x.q, x.k, x.v)], (x.cu_seqlens_q, x.cu_seqlens_k)
    direction, dout, dlse = [wide(a) for a in (x.tq, x.tk, x.tv)], wide(x.dout), wide(x.dlse)
    if not x.sparse:
        mode = scale | {"window": x.mask_window}
        forward = second.jvp(*inputs, *direction, *lengths, **mode)
        passed = (dout, *inputs, forward[0], forward[2], *lengths)
        computed = second.double_backward(*direction, *passed, dlse=dlse, **mode)
        return dict(
            zip((*STAGES["second"][:5], *STAGES["jvp"]), (*computed, *forward), strict=True)
        )
    mode = scale | {
        "block_size": x.block_size,
        "block_counts": x.block_counts,
        "include_own_block": x.own,
        "causal": x.causal,
        "block_scale": wide(x.block_scale),
    }
    forward = sparse.forward(*inputs, *lengths, x.block_indices, **mode)
    passed = (dout, *inputs, *forward, *lengths, x.block_indices)
    computed = sparse.backward(*passed, dlse=dlse, **mode)
    results = zip(("out", "lse", *STAGES["backward"][1:]), (*forward, *computed), strict=True)
    expected = {key: result for key, result in results if result is not None}
    if x.sliding is not None:
        near = dense.forward(*inputs, *lengths, window=x.sliding, **scale)
        expected |= dict(zip(("sliding out", "sliding lse"), near, strict=True))
    return expected


def of_stage(stage: str, answers: Answers) -> Answers:
    return {key: array for key, array in answers.items() if key in STAGES[stage]}


@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("module", MODULES, ids=name)
def test_the_right_version_is_the_reference(module, dtype, given):
    rng = np.random.default_rng(given)
    rows = np.float64 if dtype == np.float64 else np.float32
    for _ in range(6 if module is planted_second else 3):
        question = module.draw(rng, dtype)
        expected = of_reference(question)
        if given:
            first = "" if question.sparse else "jvp "
            out, lse = expected[f"{first}out"].astype(dtype), expected[f"{first}lse"].astype(rows)
            question = replace(question, out=out, lse=lse)
        answers = module.answers(None, question)
        assert answers.keys() == expected.keys()
        for key, right in expected.items():
            assert answers[key].dtype == (rows if key in BY_ROW + OF_SLOTS else dtype), key
            finite = np.isfinite(right)
            np.testing.assert_array_equal(np.isfinite(answers[key]), finite, key)
            error = answers[key][finite].astype(np.float64) - right[finite]
            size = np.sqrt((right[finite] ** 2).mean())
            assert abs(error).max() <= ALLOWED[dtype.name] * size, key


def test_answers_do_not_depend_on_the_tile():
    question = planted_second.draw(np.random.default_rng(1), DTYPES[0])
    answers = planted_second.answers(None, question)
    for tile in ((7, 5), (64, 128)):
        for key, array in planted_second.answers(None, question, tile=tile).items():
            np.testing.assert_allclose(array, answers[key], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("module", MODULES, ids=name)
def test_problems_come_in_every_dtype_and_with_given_results(module):
    planted = module.PLANTED[0]
    few, more = (list(module.problems(planted, count, seed=3)) for count in (1, 2))
    np.testing.assert_array_equal(few[0].q, more[0].q)
    assert [question.dtype for question in more] == list(DTYPES[:2])
    assert [question.out is None for question in more] == [True, False]


@pytest.mark.parametrize(("module", "planted"), PLANTED, ids=name)
def test_a_planted_bug_shows_in_its_stages_alone(module, planted):
    for question in module.problems(planted, 1, seed=0):
        wrong, right = module.answers(planted, question), module.answers(None, question)
        for stage in STAGES:
            here, there = of_stage(stage, wrong), of_stage(stage, right)
            if stage not in planted.stages:
                assert all(np.array_equal(here[key], there[key]) for key in there)
        touched = [s for s in STAGES if differ(of_stage(s, wrong), of_stage(s, right))]
        assert touched


def test_plants_have_classes_and_names_of_their_own():
    for _, planted in PLANTED:
        assert {planted.bug, *planted.also} <= set(CLASSES)
    labels = [(planted.bug, planted.variant) for _, planted in PLANTED]
    assert len(set(labels)) == len(labels)
