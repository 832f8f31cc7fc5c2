"""What bugs are read off by: maps of indices, and parts of a softmax."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from rawattn.check.diagnose.catalogue import maps, partial_sums
from rawattn.check.diagnose.engine.attention import Bug, solve
from rawattn.check.diagnose.inferred.row_numbers import carried
from tests.diagnose.problems import packed


def test_maps_take_what_numpy_would() -> None:
    question = packed((50, 41), np.float64, dim=32, moved=True)
    x, rows = np.asarray(question.q), np.random.default_rng(4).standard_normal((4, 91))
    heads_first, tokens_first = "(heads, tokens, columns)", "(tokens, heads, columns)"
    parts = [part.reshape(4, -1, 32).swapaxes(0, 1) for part in (x[:50], x[50:])]
    of_columns = {
        f"{tokens_first} read as {heads_first}": x.reshape(4, 91, 32).swapaxes(0, 1),
        f"{heads_first} read as {tokens_first}": x.swapaxes(0, 1).reshape(x.shape),
        f"{tokens_first} read as {heads_first}, every sequence": np.concatenate(parts),
        "without the offset of the sequence": np.concatenate((x[:50], x[:41])),
        "head h % num_heads_kv or head h % group": x[:, [0, 1, 0, 1]],
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


def test_sums_are_carried_over_the_inner_loops() -> None:
    question = packed((50, 41), np.float64, dim=32, moved=True)
    x = np.random.default_rng(5).standard_normal((4, 91))
    assert np.allclose(carried(question, "bm|h", 16, x), x.cumsum(axis=0))
    of_tiles = carried(question, "bh|m", 16, x)
    assert np.allclose(of_tiles[:, 32:48], x[:, 32:48] + x[:, 16:32] + x[:, :16])
    assert np.allclose(carried(question, "hm|b", 64, x)[:, 50:], x[:, 50:] + x[:, :41])


RESCALED = partial(partial_sums.rescaled, wrong=(), way=partial_sums.WAYS["rescaled twice"])
WAYS = [(partial_sums.splits, partial_sums.merged), (partial_sums.tiles, RESCALED)]


@pytest.mark.parametrize(("cuts", "of"), WAYS, ids=["merged", "one after the other"])
def test_right_parts_make_the_whole(cuts: Callable[..., dict], of: Callable[..., object]) -> None:
    """With the right weights, parts of the keys give what all keys give."""
    question = packed((50, 41), np.float64, dim=32, moved=True)
    right = solve(question, "forward")
    for cut in cuts(question).values():
        bug = Bug("", steps=partial_sums.steps("forward", cut, of))
        for name, found in solve(question, "forward", bug).items():
            assert np.allclose(found, right[name])
