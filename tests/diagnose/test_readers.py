"""What reads bugs off the answers: maps of indices, parts of a softmax, counts of keys."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rawattn.check.candidate import Candidate
from rawattn.check.cases import Case
from rawattn.check.diagnose.catalogue import maps, partial_sums
from rawattn.check.diagnose.engine.attention import Bug, solve
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.inferred.keys.fields import field_of
from rawattn.check.diagnose.judge import failures
from tests.diagnose.reading import At, Plain


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


@pytest.mark.parametrize(
    ("cuts", "of"),
    [
        (partial_sums.splits, partial_sums.merged),
        (
            partial_sums.tiles,
            partial(partial_sums.rescaled, wrong=(), way=partial_sums.WAYS["rescaled twice"]),
        ),
    ],
    ids=["merged", "one after the other"],
)
def test_right_parts_make_the_whole(cuts: Callable[..., dict], of: Callable[..., object]) -> None:
    """With the right weights, parts of the keys give what all keys give."""
    question = question_of()
    right = solve(question, "forward")
    for cut in cuts(question).values():
        bug = Bug("", steps=partial_sums.steps("forward", cut, of))
        for name, found in solve(question, "forward", bug).items():
            assert np.allclose(found, right[name])


Times = Callable[[At], Any]
COUNTS: dict[str, Times] = {
    "a tile is missed": lambda at: (at.d <= 0) & (at.j // 16 != 1),
    "one key too many": lambda at: at.d <= 1,
    "every third key twice": lambda at: (at.d <= 0) * np.where(at.j % 3 == 0, 2, 1),
    "of one head all": lambda at: (at.d <= 0) | (at.h == 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_those_that_were_planted(name: str) -> None:
    times = COUNTS[name]
    case = Case("", (20, 33), (20, 33), "float64", causal=True, dlse=False, past_q=0, past_k=0)
    posed = failures.question_of(replace(case, head_dim=16), clean=True)
    seen: dict[tuple[int, int], Any] = {}

    def weights(at: At, W: Any) -> Any:
        seen[at.n, at.h] = np.broadcast_to(times(at), W.shape)
        return W * times(at)

    plain = Plain(mask=lambda at, right: times(at) > 0, weights=weights)
    candidate = Candidate("plain", "numpy", forward=plain.forward)
    field = field_of(posed, failures.answers_of(candidate, posed), "out")
    assert field is not None and field.told.mean() > 0.9 and not field.zeros.any()
    for (n, h), wanted in seen.items():
        first = 0 if n == 20 else 20
        here = np.s_[h, first : first + n, first : first + n]
        assert (field.counts[here] == wanted)[field.told[here]].all()
