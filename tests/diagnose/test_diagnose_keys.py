"""Queries that see other keys than they should: found from the numbers, and named."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rawattn.check.diagnose.engine.attention import solve, views_of
from rawattn.check.diagnose.engine.question import Answers
from rawattn.check.diagnose.inferred.keys import seen
from rawattn.check.diagnose.inferred.keys.fields import field_of
from rawattn.check.diagnose.judge.diagnosis import diagnose
from tests.diagnose.planted import first as planted
from tests.diagnose.planted import keys as planted_keys
from tests.diagnose.planted.keys import PLANTED, Planted, answers, problems

CATALOGUED = ("length of sequence 0", "a half alone", "odd tiles of 16 at the end")
FIELDS = (  # an interval, one less, some twice, rows of zeros, others, by head, past its sequence
    "own shard open",
    "own key hidden",
    "a quarter twice",
    "5 rows of zeros",
    "left padding",
    "every second key",
    "packed heads",
    "as many rows as the longest",
    "backward alone: five more",
)
WHOLE = ("own tile of 16 open", "boundaries of another batch, causal", "p = 0.1")
QUIET = pytest.mark.filterwarnings("error::RuntimeWarning")


def small(plant: Planted) -> Planted:
    """The same on shorter sequences."""
    low, high = plant.lengths
    dims = (64,) if plant.bug == "dropout" else (32,)
    return replace(plant, lengths=(low, min(high, max(low + 16, 48))), heads=(2,), dims=dims)


def distance(wrong: Answers, planted_ones: Answers, names: tuple[str, ...]) -> float:
    """The largest residual over the size."""
    found = 0.0
    for name in names:
        a, b = (np.asarray(x[name], dtype=np.float64) for x in (wrong, planted_ones))
        finite = np.isfinite(a)
        if not np.array_equal(a[~finite], b[~finite]):
            return float("inf")
        a, b = a[finite], b[finite]
        if not np.isfinite(b).all():
            return float("inf")
        found = max(found, float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    return found


def test_it_is_separate() -> None:
    text = Path(planted_keys.__file__).read_text()
    imports = [line for line in text.splitlines() if line.startswith(("from raw", "import raw"))]
    assert [line.split()[1] for line in imports] == ["rawattn.check.diagnose.engine.question"]
    assert len({(plant.bug, plant.variant) for plant in PLANTED}) == len(PLANTED)


@QUIET
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.variant)
def test_reads_the_keys_off_the_answers(plant: Planted) -> None:
    question = next(problems(small(plant), 1, seed=PLANTED.index(plant)))
    wrong = answers(small(plant), question)
    stage = plant.stages[-1]
    given = question.out, question.lse
    if question.out is None:
        given = wrong["out"], wrong["lse"]
    names = ("out", "lse") if stage == "forward" else ("dq", "dk", "dv")
    bugs = list(seen.bugs(question, wrong, stage))
    assert bugs or plant.variant in CATALOGUED
    assert len(bugs) <= 25
    noise = 0.02 if question.dtype.itemsize == 2 else 1e-4
    fitting = {
        bug.name
        for bug in bugs
        if distance(wrong, solve(question, stage, bug, given=given), names) < noise
    }
    assert fitting & {plant.bug, *plant.also} or plant.variant in CATALOGUED


@pytest.mark.parametrize("variant", WHOLE)
def test_names_them(variant: str) -> None:
    plant = small(next(plant for plant in PLANTED if plant.variant == variant))
    question = next(problems(plant, 1, seed=2))
    findings = diagnose(question, answers(plant, question)).findings
    assert [finding.bug for finding in findings] == [plant.bug]


@QUIET
@pytest.mark.parametrize("kind", planted.RIGHT, ids=lambda kind: kind.variant)
def test_finds_nothing_in_what_is_right(kind: planted.Planted) -> None:
    question = next(planted.problems(kind, 1, seed=3))
    right = planted.right_answers(kind, question)
    for stage in question.stages:
        assert not list(seen.bugs(question, right, stage))


@pytest.mark.parametrize("variant", FIELDS)
def test_counts_are_those_that_were_planted(variant: str) -> None:
    plant = small(next(plant for plant in PLANTED if plant.variant == variant))
    question = next(problems(plant, 1, seed=2))
    name = "out" if "forward" in plant.stages else "dv"
    field = field_of(question, answers(plant, question), name)
    assert field is not None
    wanted, zeros = np.zeros_like(field.counts), np.zeros_like(field.zeros)
    for x in planted_keys.rows_of(question):
        for key, often in plant.sight(x):
            where = x.head, x.start_q + x.i
            if key == planted_keys.ZEROS:
                zeros[where] += often
            else:
                wanted[(*where, key)] += often
    assert field.told.mean() > 0.9
    assert (field.counts == wanted)[field.told].all()
    assert (field.zeros == zeros).all()
    if name == "out":
        (view, *_) = field.see(question, views_of(question))
        seen = (
            wanted[np.ix_(view.heads, view.rows)].sum() + zeros[np.ix_(view.heads, view.rows)].sum()
        )
        assert view.weight.sum() * len(view.heads) / len(view.weight) == seen
