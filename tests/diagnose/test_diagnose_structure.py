"""Where wrong rows lie is said rightly; slopes, residuals and pictures are those of the errors.

Long, one test for each thing that a page of the report may say.
"""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.structure import (
    HIGHEST,
    LOWEST,
    alike,
    bad_rows,
    fit,
    levels,
    maps,
    named,
    off,
    places,
    where,
)
from rawattn.check.diagnose.findings import Level
from rawattn.reference import dense

LENGTHS = (20, 64, 30, 47)


def asked(lengths: tuple[int, ...] = LENGTHS, lengths_k: Any = None, **changes: Any) -> Question:
    """4 heads on 2, with two rows past the end."""
    rng = np.random.default_rng(0)
    lengths_k = lengths_k or lengths
    rows, keys = sum(lengths) + 2, sum(lengths_k) + 2
    shapes = {"q": (rows, 4, 8), "k": (keys, 2, 8), "v": (keys, 2, 8), "dout": (rows, 4, 8)}
    drawn = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    offsets = {
        f"cu_seqlens_{side}": np.concatenate([[0], np.cumsum(n)]).astype(np.int32)
        for side, n in (("q", lengths), ("k", lengths_k))
    }
    return Question(**drawn | offsets | changes)


def where_in(question: Question, side: str = "q") -> tuple[np.ndarray, np.ndarray]:
    """For every token its number in its sequence, and the sequence's length; columns."""
    lengths = question.lengths_q if side == "q" else question.lengths_k
    i = np.concatenate([*(np.arange(n) for n in lengths), [-1000, -1000]])
    n = np.concatenate([np.repeat(lengths, lengths), [0, 0]])
    return i[:, None], n[:, None]


def everywhere(rows: np.ndarray, heads: int = 4) -> np.ndarray:
    return np.repeat(rows, heads, axis=1) if rows.shape[1] == 1 else rows


# ---- where ------------------------------------------------------------------------------------


def test_none_and_all() -> None:
    question = asked()
    nothing = np.zeros((163, 4), dtype=bool)
    assert where(question, "out", nothing) == ()
    # rows past the end do not count
    assert where(question, "out", ~nothing) == ("every row is wrong, in every sequence and head",)
    past = nothing.copy()
    past[-2:] = True
    assert where(question, "out", past) == ()


ROWS: dict[str, tuple[dict[str, Any], str, Any]] = {
    # a sentence, of a question like this and a tensor, when these rows are wrong
    "of every sequence, the first row": ({}, "out", lambda i, n: i == 0),
    "of every sequence, the last 3 rows": ({}, "dq", lambda i, n: n - 1 - i < 3),
    "of every sequence, all but the last row": ({}, "dq", lambda i, n: i < n - 1),
    "of every sequence, all but the first 12 rows": ({}, "dq", lambda i, n: i >= 12),
    "of every sequence, the last n % 16 of its n rows": (
        {},
        "out",
        lambda i, n: i >= n - n % 16,
    ),
    "of every sequence, the last n % 32 of its n keys": (
        {},
        "dv",
        lambda i, n: i >= n - n % 32,
    ),
    "of every sequence, the rows i with i % 16 in 3, 8 to 11": (
        {},
        "out",
        lambda i, n: np.isin(i % 16, (3, 8, 9, 10, 11)) & (n > 0),
    ),
    "of every sequence, the rows without an allowed key": (
        {"lengths_k": (20, 50, 34, 30), "causal": True},
        "out",
        lambda i, n: i + np.where(n == 64, -14, np.where(n == 47, -17, 0)) < 0,
    ),
    "of every sequence, the rows that see one key alone (here: the first row)": (
        {"causal": True},
        "dq",
        lambda i, n: i == 0,
    ),
    "of every sequence, the rows that see more than one key (here: all but the first row)": (
        {"causal": True},
        "dq",
        lambda i, n: i > 0,
    ),
    "of every sequence, the rows that do not see every key (here: all but the last row)": (
        {"causal": True},
        "dq",
        lambda i, n: i < n - 1,
    ),
    "of every sequence, the rows that see 17 keys or more (here: all but the first 16 rows)": (
        {"causal": True},
        "out",
        lambda i, n: i >= 16,
    ),
    "of every sequence, the rows that do not see the first 16 keys "
    "(here: all but the first 25 rows)": (
        {"window": (9, 9)},
        "out",
        lambda i, n: i >= 25,
    ),
}


@pytest.mark.parametrize("sentence", ROWS)
def test_rows(sentence: str) -> None:
    changes, tensor, wrong = ROWS[sentence]
    question = asked(**changes)
    side, heads = ("k", 2) if tensor in ("dk", "dv") else ("q", 4)
    i, n = where_in(question, side)
    bad = wrong(i, n) & (i >= 0)
    said = where(question, tensor, everywhere(bad, heads))
    assert sentence in said, said
    if "n % 16 of" in sentence:
        assert said[1].endswith("(all but the longest; those whose length is no multiple of 16)")


def test_keys_that_no_query_sees() -> None:
    question = asked(lengths_k=(30, 64, 30, 80), window=(4, 0))
    seen = np.zeros(len(question.k), dtype=bool)
    for rows, keys in dense.sequences(question.cu_seqlens_q, question.cu_seqlens_k):
        size = rows.stop - rows.start, keys.stop - keys.start
        seen[keys] = dense.allowed(*size, question.window).any(axis=0)
    said = where(question, "dk", everywhere(~seen[:, None], 2))
    assert "of every sequence, the keys that no query sees" in said
    said = where(question, "dk", everywhere(seen[:, None], 2))
    assert "of every sequence, the keys that some query sees" in said


def test_one_sequence_and_one_head() -> None:
    """There is no product to explain, and no sequence to name."""
    question = asked((20,))
    wrong = np.zeros((22, 1), dtype=bool)
    wrong[:20] = True
    assert where(question, "out", wrong) == ("every row is wrong",)
    wrong[3:] = False
    assert where(question, "out", wrong) == ("3 of 20 rows are wrong", "the first 3 rows")


def test_nothing_is_said_twice() -> None:
    """All rows but a few are wrong: the count says it. One head of one sequence is no plural."""
    wrong = everywhere(where_in(asked())[0] >= 0)
    wrong[[5, 30, 99], [0, 2, 3]] = False
    assert where(asked(), "out", wrong) == ("641 of 644 rows are wrong (161 tokens in 4 heads)",)
    wrong[:] = False
    wrong[20:84, 3] = True
    said = where(asked(), "out", wrong)
    assert said[1:3] == ("only head 3 of 4", "only sequence 1 (those of length 64 or more)")
    assert said[3:] == ("every row of that sequence in that head",)
    shares = (1, 17, 33, 49)
    rows = np.isin(where_in(asked())[0], shares)
    told = where(asked(), "dq", everywhere(rows))
    assert told[1:] == ("of every sequence, the rows i with i % 16 in 1",), "it is in i % 32 too"


def test_some_rows_right_by_chance() -> None:
    """They are counted; a pattern must not lack a wrong row."""
    question = asked()
    i, n = where_in(question)
    bad = everywhere((i >= n - n % 16) & (i >= 0))
    count = int(bad.sum())
    bad[18, 1] = False
    rows = f"of every sequence, the last n % 16 of its n rows ({count - 1} of {count})"
    assert rows in where(question, "out", bad)
    bad[3, 1] = True
    assert where(question, "out", bad)[-1] == (
        "no pattern of rows, tiles or lengths fits; the first wrong one is row 3 of sequence 0"
    )
    assert where(question, "out", ~bad)[-1].startswith("no pattern")


def test_sequences() -> None:
    def of(*sequences: int, **changes: Any) -> str:
        question = asked(**changes)
        wrong = np.isin(question.sequence_of("q"), sequences)
        said = where(question, "out", everywhere(wrong[:, None]))
        assert said[2:] == ("every row of those sequences",)
        return said[1]

    assert of(0, 2, 3).startswith("only sequences 0, 2, 3 (all but the longest; ")
    assert of(2, 3) == "only sequences 2, 3 (all from number 2 on)"
    assert of(1, 2, 3).startswith("only sequences 1 to 3 (all but the first; ")
    assert of(0, 2) == "only sequences 0, 2 (those of length 30 or less)"
    unequal = {"lengths_k": (20, 70, 34, 47)}
    assert of(1, 2, **unequal).startswith(
        "only sequences 1, 2 (those with unequal numbers of queries and keys"
    )
    assert (
        of(1, 3) == "only sequences 1, 3 (those with more than 32 keys; those of length 47 or more)"
    )


def test_heads() -> None:
    question = asked()
    for heads, sentence in (
        ((1, 2), "those that head % num_heads_kv gives another key/value head"),
        ((1, 3), "all but the first of every group; the last of every group"),
        ((0, 2), "all but the last of every group; the first of every group"),
    ):
        wrong = np.zeros((163, 4), dtype=bool)
        wrong[:, heads] = True
        said = where(question, "out", wrong)
        assert said[1:] == (
            f"only {named('head', heads)} of 4 ({sentence})",
            "every row of those heads",
        )
    wrong = np.zeros((163, 2), dtype=bool)
    wrong[:5, 1] = True
    assert where(question, "dv", wrong)[1] == "only kv head 1 of 2"


def test_neighbours_tile() -> None:
    """Keys of the next sequence that a tile of the one before reached."""
    question = asked()
    bad = np.zeros((163, 2), dtype=bool)
    starts = question.cu_seqlens_k[1:-1]
    for start, before in zip(starts, LENGTHS[:-1], strict=True):
        bad[start : start + -before % 32] = True
    assert where(question, "dk", bad)[-1] == (
        "of every sequence, the first keys, as many as the one before lacks to a multiple of 16 "
        "(here: the first keys, as many as the one before lacks to a multiple of 32)"
    )


def test_bad_rows() -> None:
    """Noise may differ by row; NaN is as bad as inf, unless both have it; lse is by heads."""
    question = asked()
    wanted = np.random.default_rng(1).standard_normal(question.q.shape)
    found = wanted.copy()
    found[3, 1, 4] += 0.5
    found[7, 2] = np.nan
    found[-1] = 9.0
    assert np.argwhere(bad_rows(question, "out", found, wanted, 0.1)).tolist() == [[3, 1], [7, 2]]
    noise = np.full((163, 4), 0.1)
    noise[3] = 1.0
    assert np.argwhere(bad_rows(question, "out", found, wanted, noise)).tolist() == [[7, 2]]
    lse = np.zeros((4, 163), dtype=np.float32)
    lse[2, 5] = -np.inf
    other = lse.copy()
    other[1, 8] = -np.inf
    assert np.argwhere(bad_rows(question, "lse", other, lse, 0.1)).tolist() == [[8, 1]]


# ---- slopes -----------------------------------------------------------------------------------


def test_fit() -> None:
    rng = np.random.default_rng(0)
    y, z = rng.standard_normal((2, 1000))
    assert fit(3 * y, y) == pytest.approx((3.0, 0.0, 2 * abs(y).max()), abs=1e-12)
    slope, residual, _ = fit(z, y)
    assert abs(slope) < 0.1 and residual > 0.99
    assert fit(0 * y, y)[:2] == (0.0, 0.0)
    assert fit(y, 0 * y)[:2] == (np.inf, 1.0)
    assert fit(0 * y, 0 * y) == (1.0, 0.0, 0.0)
    x = np.where(np.arange(1000) == 3, np.nan, y)
    assert fit(x, y)[0] == pytest.approx(1.0) and fit(x, y)[2] == np.inf
    assert fit(x, x)[2] == 0.0


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_levels(dtype: Any) -> None:
    question = asked()
    rng = np.random.default_rng(1)
    reference = {"dq": rng.standard_normal((163, 4, 8)), "lse": rng.standard_normal((4, 163))}
    factors = np.ones((163, 4))
    factors[84:114] = 0.25  # sequence 2
    factors[:, 3] *= 2
    dq = (reference["dq"] * factors[..., None]).astype(dtype)
    lse = reference["lse"].copy()
    lse[2, 100] += 50
    found = levels(question, {"dq": dq, "lse": lse}, reference)
    slopes = {(level.tensor, level.key): level.slope for level in found}
    eps = 0.01 if dtype == ml_dtypes.bfloat16 else 1e-6
    residuals = {(level.tensor, level.key): level.residual for level in found}
    assert slopes["dq", "head 3"] == pytest.approx(2 * slopes["dq", "head 0"], rel=0.1)
    assert residuals["dq", "sequence 0"] > 0.2
    worst = [level for level in found if level.level == "row" and level.tensor == "lse"]
    assert [(level.key, level.error) for level in worst] == [
        ("sequence 2, row 16, head 2", pytest.approx(50))
    ]
    only = levels(question, {"dq": dq}, reference, ("dq",))
    assert {level.tensor for level in only} == {"dq"}
    half = levels(question, {"dq": (reference["dq"] / 2).astype(dtype)}, reference)
    assert all(level.slope == pytest.approx(0.5, rel=eps) for level in half)
    assert all(level.residual < eps for level in half)


def test_parts_like_their_whole() -> None:
    """To within what the whole leaves unexplained."""
    whole = Level("dq", "all", "all", 0.8, 0.45, 1.0)
    assert alike([whole, replace(whole, slope=0.9, residual=0.35)], whole) and alike([], whole)
    assert not alike([whole, replace(whole, slope=1.0, residual=0.0)], whole)
    exact = replace(whole, slope=100.0, residual=1e-8)
    assert alike([replace(exact, slope=101.0)], exact)
    assert not alike([replace(exact, slope=103.0)], exact)
    assert not alike([replace(exact, slope=np.nan)], exact)
    assert off(whole) and off(replace(whole, slope=np.nan)) and off(replace(whole, slope=1.0))
    assert not off(replace(whole, slope=1.01, residual=0.004))


# ---- pictures ---------------------------------------------------------------------------------


def test_maps() -> None:
    question = asked()
    rng = np.random.default_rng(1)
    reference = {"dq": rng.standard_normal((163, 4, 8)), "dk": rng.standard_normal((163, 2, 8))}
    answers = {name: array.copy() for name, array in reference.items()}
    answers["dq"][100, 2] += 0.01
    answers["dk"][50, 1] = np.nan
    answers["dk"][-1] += 1
    found = maps(question, answers, reference, {"dq": 1e-4, "dk": 1e-3})
    assert [picture.tensor for picture in found] == ["dk", "dq"]
    dk, dq = (picture.values for picture in found)
    assert dq.shape == (163, 4) and found[1].boundaries == (0, 20, 84, 114)
    assert dq[100, 2] == pytest.approx(2.0) and dq[0, 0] == LOWEST
    assert dk[50, 1] == HIGHEST and np.isnan(dk[-1]).all() and np.isnan(dq[-2:]).all()
    assert (found[0].rows, found[0].columns) == ("token", "kv head")


def test_long_maps() -> None:
    """Many tokens share a line, which has the worst of them."""
    question = asked((700, 800))
    reference = {"out": np.zeros((1502, 4, 8))}
    answers = {"out": reference["out"].copy()}
    answers["out"][1234, 3] = 1.0
    (found,) = maps(question, answers, reference, {"out": 0.1})
    assert found.values.shape == (501, 4) and found.boundaries == (0, 233)
    assert found.rows == "line of 3 tokens"
    assert np.argwhere(found.values > 0).tolist() == [[1234 // 3, 3]]


# ---- words ------------------------------------------------------------------------------------


def test_named() -> None:
    assert named("sequence", [1]) == "sequence 1"
    assert named("head", [0, 1, 3, 4, 5]) == "heads 0, 1, 3 to 5"
    assert named("", [2, 3, 4]) == "2 to 4"
    many = range(0, 40, 2)
    assert named("row", many) == "rows 0, 2, 4, 6, 8, 10, ... (20 of them)"


def test_places() -> None:
    looked = np.ones((4, 3), dtype=bool)
    looked[2] = False
    bad = np.zeros((4, 3), dtype=bool)
    bad[1, 2] = True
    assert places(bad, looked, "kv head") == "sequence 1, kv head 2"
    bad[1] = True
    assert places(bad, looked, "head") == "sequence 1"
    bad[:] = [True, False, False]
    assert places(bad, looked, "head") == "head 0"
    bad[1, 1] = True
    assert places(bad, looked, "head") == "heads 0, 1, 4 of 9 pairs of sequence and head"
    assert places(looked, looked, "head") == "all"
