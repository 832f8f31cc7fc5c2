"""Block-sparse attention is read off too: planted bugs, in words of the lists, and planted."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn.check.diagnose.engine.attention import Bug, View, solve
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.judge.failures import explain_failures, question_of, small
from rawattn.check.diagnose.read.name import read
from rawattn.check.sparse_cases import standard_sparse
from tests.diagnose import plain
from tests.diagnose.called import candidate, in_sweeps, told, wrong
from tests.diagnose.plain import FLOAT32, FLOAT64, Planted
from tests.diagnose.planted import sparse
from tests.diagnose.planted.sparse import entries_with
from tests.diagnose.problems import Needs, difference, draw, shows

GATED = Needs(blocks={"gate": True, "sliding": False}, masks=("open",), lengths=(20, 60))
KEYS = {  # what is read of a plant of the table: of its class and variant
    "sparse-not-causal: blocks that are selected": "times the key's block is named >= 1",
    "sparse-own-block-missing: not seen": "misses keys: the slot of the key's block = -1",
    "sparse-not-causal: own block where not selected": "too many keys: the slot of the key's bl",
    "sparse-list-cut: last slot": "misses keys: the slot of the key's block = ",
    "sparse-list-cut: last that counts": "slots that count behind it = 0",
    "sparse-counts-ignored: all slots": "times it is named, in slots that do not count >= 1",
    "sparse-duplicate-twice: slots": "more than once: times the key's block is named",
    "sparse-duplicate-twice: own block": "count 2 times: the slot of the key's block >= 0 and ",
    "sparse-own-block-missing: at its first": "misses keys: (j // ",
}


def plant(name: str) -> Planted:
    return next(p for p in sparse.PLANTED if f"{p.bug}: {p.variant}".startswith(name))


def posed(planted: Planted, dtype: np.dtype[Any] = FLOAT64) -> Question:
    """A problem, with other lists for every head, on which a bug shows."""
    rng = np.random.default_rng(5)
    needs = replace(planted.needs, batch=(3, 4), lengths=(20, 60))
    drawn = (draw(needs, rng, dtype, given=True) for _ in range(40))
    return next(question for question in drawn if not planted.bug or shows(planted, question))


@pytest.mark.parametrize("name", in_sweeps(KEYS, 4))
def test_bugs_are_read_and_planted(name: str) -> None:
    planted = plant(name)
    question = posed(planted)
    readings = {reading.stage: reading for reading in told(planted, question).of}
    assert set(readings) == {*planted.stages} & {"forward", "backward"}
    found = plain.answers(planted, question)
    for stage, reading in readings.items():
        words = " ".join(reading.wrong)
        assert KEYS[name] in words or reading.name == planted.bug, (stage, words)
        assert reading.bug is not None and not reading.unread
        own = None if question.passed is None else question.passed
        due = solve(question, stage, reading.bug, given=own)
        names = ("out", "lse") if stage == "forward" else ("dq", "dk", "dv")
        assert max(difference(found[n], due[n]) for n in names) < 1e-9


def first_of_tile(x: Question) -> Any:
    return np.arange(len(x.q)) - x.place_of("q") % 8


OTHERS = {  # of a right kernel whose lists differ by head: what it reads, and what is said
    "block_indices, row i // 8 * 8": lambda x: {"block_indices": x.block_indices[first_of_tile(x)]},
    "block_indices, the next head": lambda x: {"block_indices": np.roll(x.block_indices, -1, 1)},
    "block_scale, row i // 8 * 8": lambda x: {"block_scale": x.block_scale[first_of_tile(x)]},
}


@pytest.mark.parametrize("words", in_sweeps(OTHERS, 3))
def test_lists_of_others_are_read(words: str) -> None:
    case = next(x for x in standard_sparse("small") if x.name == "sparse-query-heads")
    question = question_of(small(replace(case, dtype="float64", gate=True)), clean=True)
    ask = {"forward": lambda asked: solve(replace(asked, **OTHERS[words](asked)), "forward")}
    (said,) = read(question, ask.get).of
    assert words in said.wrong[0] or said.name == "sparse-other-heads-selection", said.wrong
    assert said.bug is not None and not said.unread


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_right_is_read_as_right(dtype: np.dtype[Any], seed: int) -> None:
    question = draw(GATED, np.random.default_rng(seed), dtype, given=True)
    assert not told(plain.RIGHT, question).of


def test_diff_says_what_was_read() -> None:
    """Of a forward pass that takes the first block for padding."""
    cases = [case for case in standard_sparse("small") if case.name == "sparse-edges"]
    taken = {"entries": lambda t, x: entries_with(t, named=[b if b else -1 for b in t.named])}
    judged = candidate(wrong(taken, "forward"), "forward")
    (finding,) = explain_failures(judged, [replace(cases[0], dtype="float64")]).findings
    assert "misses keys" in finding.title and "the key's block <= 0" in finding.title
    assert finding.confidence != "low"


def test_the_sliding_branch_is_read() -> None:
    """Where it lacks the tile of 32 keys before the query's own."""

    def near(v: View) -> Any:
        i, j = ((x - x[0]) // 32 for x in (v.rows, v.keys))
        return v.weight * ((v.lists is not None) | (i[:, None] == j))

    case = next(x for x in standard_sparse("small") if x.name == "sparse-sliding")
    assert question_of(replace(case, window=(9, 2))).sliding == (9, 2)  # which causal closes
    question = question_of(small(case), clean=True)
    bug = Bug("", see=lambda question, views: [replace(v, weight=near(v)) for v in views])
    ask = {"forward": lambda asked: solve(asked, "forward", bug)}
    (said,) = read(question, ask.get).of
    assert said.stage == "sliding" and said.bug is not None
    assert "j // 32 - i // 32 = -1" in said.wrong[0]
    found, due = (solve(question, "forward", x)["sliding out"] for x in (said.bug, bug))
    assert np.allclose(found, due)
