"""Of second derivatives and tangents: how often a term counts, and what one pass has alone."""

from dataclasses import replace

import ml_dtypes
import pytest

from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from rawattn.check.diagnose.judge.diagnosis import diagnose
from rawattn.check.diagnose.read.name import read
from tests.diagnose.hooks import by
from tests.diagnose.plain import FLOAT64, Planted, answers
from tests.diagnose.planted.second import unmasked
from tests.diagnose.problems import packed
from tests.diagnose.table import Hooks, kernel

NARROW = {"E": lambda c, x: x.astype(ml_dtypes.bfloat16).astype(x.dtype)}
NOT_ALIGNED = {"often": lambda c, x: x * (c.j // 16 <= c.i // 16)}
OF_FIRST_ROW = {"seen": lambda c, x: x * (c.j // 16 <= (c.i // 16 * 16 + c.m - c.n) // 16)}
PLANTS = {
    "dS ddk of gq, times 0.37": {"dS tK": by(0.37)},
    "dS^T ddq of gk half of it": {"dS tQ": by(0.5)},
    "in the first pass alone": {"P in ddout": unmasked},
    "E in bfloat16": NARROW,
    "without seqlen_k - seqlen_q": NOT_ALIGNED,
    "W holds W - e": {"W": lambda c, x: x - (c.P * c.E).sum(axis=1, keepdims=True)},
}


@pytest.mark.parametrize("words", PLANTS)
def test_of_a_double_backward(words: str) -> None:
    plant = Planted("", words, ("second",), kernel(PLANTS[words]), gives=("second",))
    question = packed((21, 40), FLOAT64, lengths_k=(37, 70), moved=True)
    (found,) = diagnose(question, answers(plant, question)).findings
    assert words in found.title + found.evidence[0] and found.confidence != "low", found


@pytest.mark.parametrize(
    ("stage", "wrong", "said"),
    [
        ("jvp", OF_FIRST_ROW, "of the first row of its tile"),
        ("second", {}, ""),
    ],
)
def test_what_is_called_is_read_off(stage: str, wrong: Hooks, said: str) -> None:
    plant = Planted("", "", (stage,), kernel(wrong), gives=(stage,))
    question = packed((21, 40), FLOAT64, lengths_k=(37, 70), moved=True)

    def ask(asked: Question) -> Answers:
        return {n: x for n, x in answers(plant, asked).items() if n in STAGES[stage]}

    found = read(question, lambda of: ask if of == stage else None).of
    assert [said in "; ".join(one.wrong) and not one.unread for one in found] == [True] * bool(said)


def test_a_direction_without_the_other() -> None:
    plant = Planted("", "", ("jvp",), kernel({"E": by(0)}), gives=("jvp",))
    question = replace(packed((21, 40), FLOAT64, moved=True), tq=None)
    (found,) = diagnose(question, answers(plant, question)).findings
    assert found.bug == "direction-ignored" and "tk, where tq is None" in found.title
