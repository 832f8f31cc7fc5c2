"""Bugs of what second derivatives and forward mode read are named; right ones are not.

``tools/trials.py`` runs more of the same trials.
"""

from typing import Any

import numpy as np
import pytest

from rawattn.check.diagnose.catalogue.tangents import bugs
from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.judge.cut import cost as cost_of
from rawattn.check.diagnose.judge.diagnosis import diagnose
from tests.diagnose.planted import second as planted_second
from tests.diagnose.planted import tangents as planted_tangents
from tests.diagnose.planted.second import DTYPES, Planted


def cost(question: Question) -> int:
    """Small problems are diagnosed soonest."""
    return sum(cost_of(question, b) for b in range(question.batch))


def name_of(planted: Planted) -> str:
    return f"{planted.bug}: {planted.variant}"


@pytest.mark.parametrize("plant", planted_tangents.PLANTED[::4], ids=name_of)
def test_names_the_planted_bug(plant: Planted) -> None:
    question = min(planted_tangents.problems(plant, 4, 5), key=cost)
    findings = diagnose(question, planted_tangents.answers(plant, question)).findings
    found = [finding.bug for finding in findings if finding.bug != "rounding"]
    assert found[:1] and found[0] in (plant.bug, *plant.also)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("answers", [planted_tangents.answers, planted_second.answers])
def test_does_not_accuse_what_is_right(seed: int, answers: Any) -> None:
    question = planted_tangents.draw(np.random.default_rng(seed), DTYPES[seed])
    findings = diagnose(question, answers(None, question)).findings
    assert not [finding for finding in findings if finding.bug != "rounding"]


def test_every_bug_can_be_planted() -> None:
    """On a question with everything: none fails, and each changes something."""
    question = planted_tangents.draw(
        np.random.default_rng(3), DTYPES[0], grouped=True, heads=2, whole=True, causal=True
    )
    right = {stage: solve(question, stage) for stage in ("second", "jvp")}
    found = list(bugs(question))
    assert len(found) > 60
    for bug in found:
        for stage in bug.stages:
            wrong = solve(question, stage, bug)
            assert any(
                not np.allclose(x, right[stage][name], equal_nan=True) for name, x in wrong.items()
            ), bug
