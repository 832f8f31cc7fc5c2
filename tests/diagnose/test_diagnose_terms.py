"""Terms of gradients that are lost, doubled or misplaced: named, and right ones are not accused."""

import itertools
from dataclasses import replace

import pytest

from rawattn.check.diagnose.inferred import numbers, terms
from rawattn.check.diagnose.inferred.keys import seen
from rawattn.check.diagnose.judge.diagnosis import diagnose
from tests.diagnose.planted import first as planted
from tests.diagnose.planted.terms import PLANTED, answers, problems

SEED = 11
READ_OFF = [one for one in PLANTED if one.bug != "narrow-intermediate"]  # which the judge tries all
TRIED = [one for one in PLANTED if one not in READ_OFF]
NAMED = [*READ_OFF[::5], *TRIED]


def spelled(one):
    return f"{one.bug}, {one.variant}"


def small(one):
    """The same on few heads and sequences: a diagnosis takes as long as its problem is large."""
    few = {name: getattr(one.needs, name)[:1] for name in ("groups", "heads_kv")}
    dims = {"head_dims": (32,), "head_dims_v": (32,)}
    batch = (min(one.needs.batch[0], 2),) * 2
    return replace(one, needs=replace(one.needs, **few, **dims, batch=batch))


def first_bug(question, given):
    findings = [one for one in diagnose(question, given).findings if one.bug != "rounding"]
    return (findings[0].bug, findings[0].confidence) if findings else ("", "")


@pytest.mark.parametrize("one", NAMED, ids=spelled)
def test_planted_terms_are_named(one):
    question = next(problems(small(one), 1, SEED))
    assert first_bug(question, answers(one, question))[0] in (one.bug, *one.also)


@pytest.mark.parametrize("one", READ_OFF, ids=spelled)
def test_planted_terms_are_read_off(one):
    for question in problems(small(one), 2, SEED):
        given = answers(one, question)
        (stage,) = one.stages
        noise = dict.fromkeys(("dq", "dk", "dv"), 1.0) | {"dq": 0.5}
        modules = (terms, seen, numbers)
        found = [bug.name for of in modules for bug in of.bugs(question, given, stage)]
        found += [bug.bug for bug in terms.followed(question, given, stage, noise)]
        assert {one.bug, *one.also} & {*found}


@pytest.mark.parametrize("one", PLANTED[::6], ids=spelled)
def test_the_right_version_is_not_accused(one):
    question = next(problems(small(one), 1, SEED))
    assert first_bug(question, answers(None, question)) == ("", "")


@pytest.mark.parametrize("kind", planted.RIGHT[::4], ids=lambda kind: kind.variant)
def test_right_implementations_are_not_accused(kind):
    for question in itertools.islice(planted.problems(kind, 3, SEED), 2, 3):
        assert first_bug(question, planted.right_answers(kind, question)) == ("", "")
