"""The intermediates of a sequence: written beside the results, and where a kernel's own part."""

from pathlib import Path

import numpy as np
import pytest

from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.structure import MADE, MATRICES, intermediates, parting
from rawattn.check.diagnose.judge.failures import question_of
from rawattn.check.sparse_cases import standard_sparse
from tests.diagnose.called import call, said
from tests.diagnose.plain import FLOAT64, heads_of
from tests.diagnose.problems import packed

NAMES = [name for names in MATRICES.values() for name in names]
SIZES = {"lengths_k": (6, 11, 11), "heads": (2, 1), "dlse": True, "moved": True}


@pytest.fixture(scope="module")
def question() -> Question:
    return packed((6, 9, 9), FLOAT64, **SIZES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sequence", [0, 1])
def test_they_are_those_of_attention(question: Question, sequence: int, name: str) -> None:
    found = intermediates(question, {}, sequence)
    seen = found["P"] > 0
    by_hand = heads_of(question)
    for h in range(question.num_heads_q):
        due = np.where(seen[h], getattr(by_hand[sequence, h], name), 0.0)
        np.testing.assert_allclose(np.where(seen[h], found[name][h], 0.0), due, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_that_parts_is_named(question: Question, name: str) -> None:
    own = intermediates(question, {}, 2)
    for later in NAMES[NAMES.index(name) :]:
        own[later] = own[later].copy()
        own[later][1, 3, 2] += 0.5
    found = parting(question, {}, own)
    assert found is not None and found.step == name and name in MADE
    assert found.agree == tuple(NAMES[: NAMES.index(name)])
    place = "heads 1 to 1, most at 1; queries 3 to 3, most at 3; keys 2"
    assert all(part in found.text for part in ("sequence 2", "in 1 of", place))


def test_what_is_right(question: Question) -> None:
    """Any sequence, with anything in pairs that are not seen before the mask."""
    assert parting(question, {}, {}) is None
    for sequence in range(3):
        own = intermediates(question, {}, sequence)
        for name in ("S", "dP", "E"):
            own[name] = np.where(own["P"] > 0, own[name], np.nan)
        found = parting(question, {}, own)
        assert found is not None and found.step == "" and found.agree == tuple(NAMES)


def test_of_blocks() -> None:
    posed = question_of(next(iter(standard_sparse("small"))), clean=True)
    sequence = int(np.argmax(posed.lengths_q))
    own = intermediates(posed, {}, sequence)
    found = parting(posed, {}, own)
    assert found is not None and not found.step
    own["P"] = own["P"] * 1.3
    found = parting(posed, {}, own)
    assert found is not None and found.step == "P"


def test_dumped_and_explained(tmp_path: Path) -> None:
    given, own = tmp_path / "given.npz", tmp_path / "own.npz"
    sizes = ("--lengths", "7,12,12", "--heads", "2", "--head-dim", "16", "--causal")
    assert call("dump", *sizes, "--intermediates", "2", "--out", given).exit_code == 0
    done = call("explain", given)
    assert done.exit_code == 0
    assert "A, step by step: S, P, dP, dS, E, tP, tdS right" in said(done)
    with np.load(given) as file:
        arrays = {name: file[name] for name in (*NAMES, "out", "lse", "dq", "dk", "dv")}
    arrays["dS"][0, 5] *= 2
    np.savez(own, **arrays)
    done = call("explain", given, own)
    assert done.exit_code == 1 and "B: dS is wrong, and no result shows it" in said(done)
    for part in ("S, P, dP right; sequence 2: dS parts first", "queries 5 to 5"):
        assert part in said(done)
