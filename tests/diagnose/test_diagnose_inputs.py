"""Bugs of what is read are named, in forms that the catalogue does not list one by one."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.inferred import inputs
from rawattn.check.diagnose.judge.diagnosis import diagnose
from tests.diagnose.planted import first as planted
from tests.diagnose.planted import inputs as planted_inputs

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import trials

PLANTS = planted_inputs.PLANTED


@pytest.mark.parametrize("index", range(0, len(PLANTS), 4))
def test_names_the_planted_bug(index: int) -> None:
    found = trials.trial("tests.diagnose.planted.inputs", index, seed=index)
    assert found.right, found


def test_without_a_plant_the_loops_are_right() -> None:
    plant = planted_inputs.PLANTED[0]
    for question in planted_inputs.problems(plant, 3, seed=2):
        answers = planted_inputs.answers(None, question)
        assert not [f for f in diagnose(question, answers).findings if f.bug != "rounding"]


@pytest.mark.parametrize("kind", planted.RIGHT[:6], ids=lambda kind: kind.variant)
def test_does_not_accuse_what_is_right(kind: planted.Planted) -> None:
    found = trials.right_trial(kind, seed=len(kind.variant) + 1)
    assert found.right, found


def question_of(causal: bool = True) -> Question:
    rng = np.random.default_rng(3)
    offsets = np.array([0, 50, 91])

    def draw(heads: int) -> np.ndarray:
        return rng.standard_normal((91, heads, 32))

    q, k, v, dout = draw(4), draw(2), draw(2), draw(4)
    direction = {"tq": draw(4), "tk": draw(2), "tv": draw(2)}
    return Question(q, k, v, offsets, offsets, causal=causal, dout=dout, **direction)


def test_maps_take_what_numpy_would() -> None:
    question = question_of()
    rng = np.random.default_rng(4)
    x, rows = np.asarray(question.q), rng.standard_normal((4, 91))
    parts = [part.reshape(4, -1, 32).swapaxes(0, 1) for part in (x[:50], x[50:])]
    padded = np.zeros((50, 4, 32))
    padded[:41] = x[50:]
    turned = padded.swapaxes(0, 1).reshape(50, 4, 32)[:41]
    of_columns = {
        "(tokens, heads, columns) read as (heads, tokens, columns)": x.reshape(4, 91, 32).swapaxes(
            0, 1
        ),
        "(heads, tokens, columns) read as (tokens, heads, columns)": x.swapaxes(0, 1).reshape(
            x.shape
        ),
        "(tokens, heads, columns) read as (heads, tokens, columns), every sequence": np.concatenate(
            parts
        ),
        "(heads, tokens, columns) read as (tokens, heads, columns), every padded sequence": (
            np.concatenate((x[:50].swapaxes(0, 1).reshape(50, 4, 32), turned))
        ),
        "without the offset of the sequence": np.concatenate((x[:50], x[:41])),
        "head h % num_heads_kv": x[:, [0, 1, 0, 1]],
        "columns j ^ 16": np.roll(x, 16, axis=2),
    }
    of_rows = {
        "(heads, tokens) read as (tokens, heads)": rows.reshape(91, 4).T,
        "(tokens, heads) read as (heads, tokens)": rows.T.reshape(4, 91),
        "row i % 16": rows[:, [*(np.arange(50) % 16), *(50 + np.arange(41) % 16)]],
    }
    for name, array, wanted in (("q", x, of_columns), ("lse", rows, of_rows)):
        found = {by.words: by for by in maps.families(question, name == "lse")}
        for words, right in wanted.items():
            moved = found[words].moved(maps.geometry(question, name), array)
            assert np.array_equal(moved, right), words


def named(question: Question, answers: Answers) -> list[str]:
    return [finding.bug for finding in diagnose(question, answers).findings]


@pytest.mark.parametrize("stage", ("jvp", "second"))
def test_saved_arrays_are_unpacked_in_another_order(stage: str) -> None:
    """k and v for each other in the derivatives of second order, their directions right."""
    question = question_of()
    right = solve(question, "forward")
    given = right["out"], right["lse"]
    swapped = solve(replace(question, k=question.v, v=question.k), stage, given=given)
    assert named(question, swapped)[:1] == ["arguments-swapped"]


@pytest.mark.sweep
def test_out_in_another_layout_and_its_gradients_are_one_bug() -> None:
    question = replace(question_of(), tq=None, tk=None, tv=None)
    right = solve(question, "forward")
    stored = right["out"].swapaxes(0, 1).reshape(right["out"].shape)
    dout = np.asarray(question.dout).reshape(4, 91, 32).swapaxes(0, 1)
    gradients = solve(replace(question, dout=dout), "backward", given=(right["out"], right["lse"]))
    answers = right | gradients | {"out": stored}
    del answers["delta"]
    assert named(question, answers) == ["transposed"]


@pytest.mark.sweep
def test_a_map_of_heads_under_a_wrong_mask_is_two_bugs() -> None:
    question = question_of()
    k, v = (np.repeat(x[:40], 2, axis=1)[:, [0, 2, 1, 3]] for x in (question.k, question.v))
    offsets = np.array([0, 15, 40])
    of_keys: dict[str, Any] = {"cu_seqlens_k": offsets, "tk": None, "tv": None}
    asked = replace(question, k=question.k[:40], v=question.v[:40], **of_keys)
    dropped = replace(asked, k=k, v=v, causal=False)
    found = named(replace(asked, dout=None), solve(dropped, "forward"))
    assert found == ["gqa-head-map", "causal-dropped"]


def test_noise_of_any_kind_suggests_nothing() -> None:
    """What fits nothing must not be fitted: neither a constant, nor a map, nor an order."""
    question = question_of()
    rng = np.random.default_rng(0)
    answers = solve(question, "forward") | solve(question, "backward")
    noisy = {name: x + rng.standard_normal(x.shape) for name, x in answers.items()}
    for stage in ("forward", "backward"):
        began = time.process_time()
        assert not list(inputs.bugs(question, noisy, stage))
        assert time.process_time() - began < 10
