"""Of second derivatives and tangents: how often a term counts, and what one pass has alone; of all
passes what numbers of rows hold."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from rawattn.check.diagnose.judge.diagnosis import diagnose
from rawattn.check.diagnose.read.name import read
from tests.diagnose.hooks import by
from tests.diagnose.plain import FLOAT64, LN_2, Planted, answers
from tests.diagnose.planted.second import unmasked
from tests.diagnose.problems import packed
from tests.diagnose.stores import delta
from tests.diagnose.table import Hooks, kernel

NARROW = {"E": lambda c, x: x.astype(ml_dtypes.bfloat16).astype(x.dtype)}
NOT_ALIGNED = {"often": lambda c, x: x * (c.j // 16 <= c.i // 16)}
OF_FIRST_ROW = {"seen": lambda c, x: x * (c.j // 16 <= (c.i // 16 * 16 + c.m - c.n) // 16)}


def of_packed(a: Any, q: Any) -> Any:
    """D head by head of a group, read as if it were row by row."""
    D = (a["dout"] * a["out"]).sum(2).T
    for start, stop in pairwise(q.cu_seqlens_q):
        for h in range(0, len(D), q.group):
            at = slice(h, h + q.group), slice(start, stop)
            D[at] = D[at].copy().reshape(-1, q.group).T
    return D


PLANTS: dict[str, Hooks] = {
    "dS ddk of gq, times 0.37": {"dS tK": by(0.37)},
    "dS^T ddq of gk half of it": {"dS tQ": by(0.5)},
    ", of dS ddk of gq alone": {"tK of gq": lambda c, x: x * (c.j.T < 48)},
    "in the first pass alone": {"P in ddout": unmasked},
    "E in bfloat16": NARROW,
    "without seqlen_k - seqlen_q": NOT_ALIGNED,
    "W holds W - e": {"W": lambda c, x: x - (c.P * c.E).sum(axis=1, keepdims=True)},
    "ddlse holds row_sum e": {"e in tlse": lambda c, x: x * np.exp(c.L - c.S.max(1)[:, None])},
}
IN_BASE_2 = {"softmax": lambda c, x: (c.top + (x[0] - c.top) / LN_2, x[1])}
NO_LOG = {"softmax": lambda c, x: (c.top + np.exp(x[0] - c.top), x[1])}
DIVIDED_TWICE = {"softmax": lambda c, x: (x[0], x[1] * np.exp(c.top - x[0]))}
OTHER_NUMBERS = {"D": lambda c, x: x + (c.i % 16 > 11) * np.sin(c.i)}
FIRST: dict[str, tuple[str, Hooks]] = {
    "in base 2: lse holds row_max + 1.44 log(row_sum)": ("forward", IN_BASE_2),
    "lse holds row_max + row_sum": ("forward", NO_LOG),
    "out is there holds 1 / row_sum": ("forward", DIVIDED_TWICE),
    "D holds that of other rows: (heads, tokens) read as (token": ("backward", delta(of_packed)),
    "D holds D - 0.3 lse": ("backward", {"D": lambda c, x: x - 0.3 * c.L}),
    "D holds other numbers, not D, the rows with i % 16 >= 12": ("backward", OTHER_NUMBERS),
}


@pytest.mark.parametrize("words", [*PLANTS, *FIRST])
def test_of_a_stage(words: str) -> None:
    stage, hooks = FIRST[words] if words in FIRST else ("second", PLANTS[words])
    plant = Planted("", words, (stage,), kernel(hooks), gives=(stage,))
    question = packed((21, 40), FLOAT64, lengths_k=(37, 70), moved=True)
    (found,) = diagnose(question, answers(plant, question)).findings
    assert words in found.title + found.evidence[0] and found.confidence != "low", found


@pytest.mark.parametrize(
    ("stage", "wrong", "said"),
    [("jvp", OF_FIRST_ROW, "of the first row of its tile"), ("second", {}, "")],
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


def test_factors_that_one_scale_does_not_tell_apart() -> None:
    plant = Planted("", "", ("jvp",), kernel({"E": by(0.5)}), gives=("jvp",))
    question = replace(packed((21, 40), FLOAT64, moved=True), softmax_scale=0.5)
    (found,) = diagnose(question, answers(plant, question)).findings
    forms = {"with the default softmax_scale": 0.0625, "with s twice": 4.0, "half of it": 0.5}
    for form, factor in forms.items():
        other, (bug,) = replace(question, softmax_scale=4.0), found.forms[f"E {form}"].values()
        of_E = replace(plant, kernel=kernel({"E": by(factor)}))
        assert np.allclose(solve(other, "jvp", bug)["tlse"], answers(of_E, other)["tlse"])
