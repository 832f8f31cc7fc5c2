"""The plain implementation is right without a bug; its bugs show, and where they are planted."""

import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.engine.question import STAGES
from rawattn.check.diagnose.judge.failures import reference_answers
from tests.diagnose import hooks, plain, stores
from tests.diagnose.planted import first
from tests.diagnose.problems import DTYPES, KINDS, difference, draw, problems
from tools import trials

MODULES = [importlib.import_module(file) for file in trials.FILES]
PLANTED = [plant for module in MODULES for plant in module.PLANTED]
NOT_BUGS = {"vacuous", "unknown", "rounding", "wrong-dtype"}
NOISE = {"float64": 1e-11, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


def name_of(plant: plain.Planted) -> str:
    return f"{plant.bug}: {plant.variant}"


def test_it_is_separate() -> None:
    files = [Path(str(module.__file__)) for module in (*MODULES, hooks, plain, stores)]
    lines = itertools.chain.from_iterable(file.read_text().splitlines() for file in files)
    own = {line.split()[1] for line in lines if line.startswith(("from raw", "import raw"))}
    assert own == {"rawattn.check.diagnose.engine.question"}


def test_every_class_is_planted() -> None:
    assert {plant.bug for plant in PLANTED} == set(CLASSES) - NOT_BUGS
    assert {name for plant in PLANTED for name in plant.also} <= set(CLASSES)
    assert len(set(map(name_of, PLANTED))) >= len(PLANTED) - 3, "a name is another seed"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_right_version_is_the_engine(kind: str, dtype: np.dtype[Any]) -> None:
    for seed in range(8):
        question = draw(KINDS[kind], np.random.default_rng(seed), dtype, given=kind == "dense")
        found, expected = plain.answers(None, question), reference_answers(question)
        assert found.keys() == expected.keys()
        for name in expected.keys() - {"delta"}:
            assert difference(found[name], expected[name]) < NOISE[dtype.name], name


@pytest.mark.parametrize("kind", first.RIGHT, ids=lambda kind: kind.variant)
def test_right_ones_are_right(kind: plain.Planted) -> None:
    for question in problems(kind, 2, seed=4):
        expected = reference_answers(question)
        noise = 1e-3 if kind.variant == "TF32" else NOISE[question.dtype.name]
        for name, x in first.right_answers(kind, question).items():
            assert name == "delta" or difference(x, expected[name]) < noise, name


@pytest.mark.parametrize("plant", PLANTED[::9], ids=name_of)
def test_a_bug_shows_in_its_stages_alone(plant: plain.Planted) -> None:
    """Or where the backward pass is given what a wrong forward pass has stored."""
    (question,) = problems(plant, 1, seed=1)
    wrong, right = (plain.answers(p, question) for p in (plant, None))
    if question.passed is None and "forward" in plant.stages:
        return
    for stage in set(STAGES) - set(plant.stages):
        names = [name for name in STAGES[stage] if name in wrong]
        assert all(difference(wrong[n], right[n]) < NOISE[question.dtype.name] for n in names)


def test_only_a_race_depends_on_the_call() -> None:
    for bug in ("race", "transposed"):
        plant = next(plant for plant in first.PLANTED if plant.bug == bug)
        question = next(problems(plant, 1, seed=1))
        one, other = (first.answers(plant, question, chance) for chance in (0, 1))
        same = all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)
        assert same == (bug != "race"), bug
