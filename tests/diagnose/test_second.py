"""Of second derivatives and tangents: how often a term counts, and what one pass has alone."""

import ml_dtypes
import pytest

from rawattn.check.diagnose.judge.diagnosis import diagnose
from tests.diagnose.hooks import by
from tests.diagnose.plain import FLOAT64, Planted, answers
from tests.diagnose.planted.second import unmasked
from tests.diagnose.problems import packed
from tests.diagnose.table import kernel

NARROW = {"E": lambda c, x: x.astype(ml_dtypes.bfloat16).astype(x.dtype)}
NOT_ALIGNED = {"often": lambda c, x: x * (c.j // 16 <= c.i // 16)}
PLANTS = {
    "dS ddk of gq, times 0.37": {"dS tK": by(0.37)},
    "dS^T ddq of gk half of it": {"dS tQ": by(0.5)},
    "in the first pass alone": {"P in ddout": unmasked},
    "E in bfloat16": NARROW,
    "without seqlen_k - seqlen_q": NOT_ALIGNED,
}


@pytest.mark.parametrize("words", PLANTS)
def test_of_a_double_backward(words: str) -> None:
    plant = Planted("", words, ("second",), kernel(PLANTS[words]), gives=("second",))
    question = packed((21, 40), FLOAT64, lengths_k=(37, 70), moved=True)
    (found,) = diagnose(question, answers(plant, question)).findings
    assert words in found.title + found.evidence[0] and found.confidence != "low", found
