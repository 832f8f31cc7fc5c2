"""Bugs of how block-sparse kernels walk, read and invert their lists are named; right ones are not.

``tools/trials.py`` runs more of the same trials.
"""

import numpy as np
import pytest

from rawattn.check.diagnose.catalogue.sparse.lists import first_of, lists_of, walking
from rawattn.check.diagnose.catalogue.sparse.selection import bugs
from rawattn.check.diagnose.engine.attention import solve, views_of
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.inferred import blocks
from rawattn.check.diagnose.judge.cut import cost as cost_of
from rawattn.check.diagnose.judge.diagnosis import diagnose
from tests.diagnose.planted import lists as planted_lists
from tests.diagnose.planted import sparse as planted_sparse
from tests.diagnose.planted.second import DTYPES, Planted


def cost(question: Question) -> int:
    """Small problems are diagnosed soonest."""
    return sum(cost_of(question, b) for b in range(question.batch))


def name_of(planted: Planted) -> str:
    return f"{planted.bug}: {planted.variant}"


def drawn(seed: int, **needs: bool) -> Question:
    return planted_sparse.draw(np.random.default_rng(seed), DTYPES[seed % 2], **needs)


@pytest.mark.parametrize("planted", planted_lists.PLANTED[::4], ids=name_of)
def test_names_the_planted_bug(planted: Planted) -> None:
    question = min(planted_lists.problems(planted, 4, 5), key=cost)
    findings = diagnose(question, planted_lists.answers(planted, question)).findings
    found = [finding.bug for finding in findings if finding.bug != "rounding"]
    assert found[:1] and found[0] in (planted.bug, *planted.also)


@pytest.mark.parametrize("seed", range(6))
def test_does_not_accuse_what_is_right(seed: int) -> None:
    question = planted_sparse.draw(np.random.default_rng(seed), DTYPES[seed % 3])
    findings = diagnose(question, planted_lists.answers(None, question)).findings
    assert not [finding for finding in findings if finding.bug != "rounding"]


@pytest.mark.parametrize("seed", range(8))
def test_right_lists_show_the_right_views(seed: int) -> None:
    question = drawn(seed, duplicates=True, padding=True)
    found_views = walking(lambda lists: lists)(question, views_of(question))
    for right, found in zip(views_of(question), found_views, strict=True):
        seen = right.weight > 0
        assert np.array_equal(found.weight, right.weight)
        assert np.array_equal(found.slot[seen], right.slot[seen])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_blocks_are_read_off(seed: int, stage: str) -> None:
    """Of the right answers: the right ones, as far as there is something to read."""
    question = drawn(seed, gate=False)
    seen = blocks.read(question, solve(question, stage), stage)
    right = blocks.parts_of(lists_of(question))
    if seen is None:
        assert question.group * question.num_heads_kv == question.block_indices.shape[1]
        return
    assert (seen.counts == right)[seen.sure].all()
    assert seen.sure[right > 0].mean() > 0.9


def test_nothing_is_read_off_right_answers() -> None:
    question = drawn(1)
    for stage in ("forward", "backward"):
        assert not list(blocks.bugs(question, solve(question, stage), stage))


def test_dense_attention_has_no_lists() -> None:
    question = drawn(0)
    dense = Question(
        question.q, question.k, question.v, question.cu_seqlens_q, question.cu_seqlens_k
    )
    assert not list(bugs(dense))


def test_repeats() -> None:
    named = np.array([[[2, 1, 2, -1, 1]]])
    assert first_of(named, named >= 0).tolist() == [[[True, True, False, True, False]]]
