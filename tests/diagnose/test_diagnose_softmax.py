"""Bugs in what the softmax is taken over: each plant is named, and what is right is not accused."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rawattn.check.diagnose.catalogue import partial_sums
from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.catalogue.rotary import rotated
from rawattn.check.diagnose.engine.attention import NO_BUG, Bug, solve
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.inferred import denominator, numbers
from rawattn.check.diagnose.inferred.sample import Sample, in_words
from rawattn.check.diagnose.judge.diagnosis import diagnose
from tests.diagnose.planted import first as planted
from tests.diagnose.planted import softmax as planted_softmax

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import trials

PLANTED = planted_softmax.PLANTED
RIGHT = planted.RIGHT[:: len(planted.RIGHT) // 6]


def question_of(dtype: str = "float64") -> Question:
    rng = np.random.default_rng(1)
    offsets = np.array([0, 21, 40])
    q, k, v, dout = (rng.standard_normal((40, heads, 16)).astype(dtype) for heads in (4, 2, 2, 4))
    return Question(q, k, v, offsets, offsets, causal=True, dout=dout)


def said_of(question: Question, answers: dict[str, np.ndarray]) -> str:
    finding = diagnose(question, answers).findings[0]
    return f"{finding.bug} {finding.evidence[0]}"


@pytest.mark.parametrize("plant", PLANTED[::4], ids=lambda plant: f"{plant.bug} {plant.variant}")
def test_names_the_planted_bug(plant: planted_softmax.Planted) -> None:
    """dtypes take turns; every class has at least two plants."""
    turn = PLANTED.index(plant) % 3
    *_, question = planted_softmax.problems(plant, turn + 1, seed=len(plant.variant))
    findings = diagnose(question, planted_softmax.answers(plant, question)).findings
    found = [finding for finding in findings if finding.bug != "rounding"]
    assert found and found[0].bug in (plant.bug, *plant.also), found


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.variant)
def test_does_not_accuse_what_is_right(kind: planted.Planted) -> None:
    assert trials.right_trial(kind, seed=3).right


def test_plants_are_right_without_a_bug() -> None:
    question = question_of()
    right = solve(question, "forward") | solve(question, "backward")
    for name, found in planted_softmax.answers(None, question).items():
        assert np.allclose(found, right[name], rtol=0, atol=1e-12), name


def test_every_class_has_variants() -> None:
    names = [plant.bug for plant in PLANTED]
    assert set(names) <= set(CLASSES)
    assert all(names.count(name) >= 2 for name in names)


@pytest.mark.sweep
@pytest.mark.parametrize("keys", [("dq", "dk", "dv"), ("out",)], ids=" ".join)
def test_needs_no_more_than_some_tensors(keys: tuple[str, ...]) -> None:
    question = question_of()
    for name in ("2", "by head"):
        plant = next(plant for plant in PLANTED if plant.variant == name)
        answers = planted_softmax.answers(plant, question)
        assert diagnose(question, {key: answers[key] for key in keys}).findings[0].bug == plant.bug


@pytest.mark.sweep
def test_says_the_number() -> None:
    question = question_of()
    scaled = replace(question, softmax_scale=float(37**-0.5))
    assert "1 / sqrt(37)" in said_of(question, solve(scaled, "forward"))
    right = solve(question, "forward")
    sunk = right | {"lse": np.logaddexp(right["lse"], 0.5)}
    assert "exp(0.5)" in said_of(question, sunk) or "1.649" in said_of(question, sunk)


@pytest.mark.parametrize(
    ("x", "roots", "said"),
    [
        (0.25, True, "0.25 = 1 / sqrt(16)"),
        (0.25, False, "0.25 = 2^-2"),
        (2.0, True, "2"),
        (-0.125, True, "-0.125 = -2^-3"),
        (0.123456, True, "0.1235"),
    ],
)
def test_numbers_in_words(x: float, roots: bool, said: str) -> None:
    assert in_words(x, roots=roots) == said


@pytest.mark.parametrize(
    ("cuts", "of"),
    [
        (partial_sums.splits, partial_sums.merged),
        (
            partial_sums.tiles,
            partial(partial_sums.rescaled, wrong=(), way=partial_sums.WAYS["rescaled twice"]),
        ),
    ],
    ids=["merged", "one after the other"],
)
def test_right_parts_make_the_whole(cuts: Callable[..., dict], of: Callable[..., object]) -> None:
    """With the right weights, parts of the keys give what all keys give."""
    question = question_of()
    right = solve(question, "forward")
    for cut in cuts(question).values():
        bug = Bug("", steps=partial_sums.steps("forward", cut, of))
        for name, found in solve(question, "forward", bug).items():
            assert np.allclose(found, right[name])


def test_rotation_is_undone_by_its_inverse() -> None:
    x = np.random.default_rng(0).standard_normal((3, 7, 12))
    positions = np.arange(7)
    for pairs in ("halves", "neighbours"):
        turned = rotated(x, positions, pairs, 8, 1e4)
        assert np.allclose(rotated(turned, -positions, pairs, 8, 1e4), x)
        assert not np.allclose(turned[:, 1:, :8], x[:, 1:, :8])
        assert np.array_equal(turned[..., 8:], x[..., 8:])


@pytest.mark.parametrize("of", [numbers.bugs, denominator.bugs])
def test_reads_nothing_off_right_answers(of: Callable[..., object]) -> None:
    question = question_of("float32")
    right = {name: x.astype(np.float32) for name, x in solve(question, "forward").items()}
    assert not list(of(question, right, "forward"))


def test_a_row_factor_of_chance_is_no_denominator() -> None:
    """Rows times numbers that nothing explains: not a bug of the row sum that anybody can name."""
    question = question_of()
    right = solve(question, "forward")
    factors = np.random.default_rng(2).uniform(0.5, 2, right["out"].shape[:2])
    answers = right | {"out": right["out"] * factors[..., None]}
    assert not list(denominator.bugs(question, answers, "forward"))


def test_a_sample_is_where_it_is_wrong() -> None:
    question = question_of()
    answers = {name: x.copy() for name, x in solve(question, "forward").items()}
    answers["out"][21:, 2] *= 2
    sample = Sample(question, answers, "forward")
    assert (sample.sequence, sample.head_kv, sample.wrong) == (1, 1, ("out",))
    assert sample.distances(NO_BUG)["lse"] == 0
