"""What is read is named: planted bugs, each in words and as a bug that gives the same numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from rawattn.check.candidate import Candidate
from rawattn.check.cases import Case, standard
from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.rules import Shown, rule_of
from rawattn.check.diagnose.judge.failures import (
    _read,
    answers_of,
    explain_failures,
    question_of,
    small,
)
from rawattn.check.run import evaluate
from tests.diagnose.reading import At, Plain

CASES = {case.name: case for case in standard("small")}
FORWARD, BACKWARD = "forward", "backward"


class Bug(NamedTuple):
    """``plain`` has it; ``text`` is in the first sentence; on ``case``, in a stage."""

    plain: Plain
    text: str
    case: str = "edges-causal"
    stage: str = FORWARD


def mask(change: Callable[..., Any]) -> Plain:
    return Plain(mask=change)


def bias(change: Callable[..., Any]) -> Plain:
    return Plain(scores=lambda at, S: S + change(at))


def leak(upto: Callable[..., int], first: Callable[[int], int] = lambda a: a) -> Plain:
    """Keys from ``first`` on up to ``upto``; those of other sequences are seen by all."""
    return Plain(
        keys=lambda a, b, n: np.arange(first(a), min(n, upto(a, b))),
        mask=lambda at, seen: seen | (at.j >= at.m) | (at.j < 0),
    )


def _nan_tail(at: At, out: np.ndarray, lse: np.ndarray) -> Any:
    return np.where(at.i >= at.n // 16 * 16, np.nan, out), lse


def _without(at: At, out: np.ndarray, lse: np.ndarray) -> Any:
    there = at.i % 16 < 15
    return out * there, np.where(there[:, 0], lse, -np.inf)


def _of_queries(at: At, seen: np.ndarray) -> np.ndarray:
    j = at.key - at.start
    return np.asarray((j >= 0) & (j <= at.p))


OPEN, WINDOW, GROUP = "edges", "window-causal", "two-kv-heads"
BUGS: dict[str, Bug] = {
    # ---- who sees whom ----
    "j <= i + 1": Bug(mask(lambda at, seen: at.d <= 1), "too many keys: j - i = 1 "),
    "j < i": Bug(mask(lambda at, seen: seen & (at.d < 0)), "misses keys: j - i = 0 "),
    "window": Bug(mask(lambda at, seen: seen & (at.d > -16)), "misses keys: j - i = -16", WINDOW),
    "wide": Bug(mask(lambda at, seen: (at.d <= 0) & (at.d >= -19)), "-19 <= j - i <= -17", WINDOW),
    "tail tile": Bug(
        mask(lambda at, seen: seen & (at.j < at.m // 16 * 16)), "(seqlen_k - 1) // 16 - j // 16 = 0"
    ),
    "open tile": Bug(
        mask(lambda at, seen: seen | (at.j // 16 == at.p // 16)), "keys: j // 16 - i // 16 = 0"
    ),
    "skipped": Bug(
        mask(lambda at, seen: seen & ~((at.j // 16 == 1) & (at.i >= 40))), "<= j <= 31 and i >= 40"
    ),
    "dilated": Bug(mask(lambda at, seen: seen & (at.d % 2 == 0)), "(j - i) % 2 = 1"),
    "strided": Bug(mask(lambda at, seen: seen & (at.j % 4 != 3)), "j % 4 = 3"),
    "prefix": Bug(mask(lambda at, seen: seen | (at.j < 7)), "too many keys: j <= 6"),
    "sink": Bug(
        mask(lambda at, seen: seen & ((at.j < 4) | (at.d > -16))), "j - i <= -16 and j >= 4"
    ),
    "half": Bug(mask(lambda at, seen: seen & (2 * at.j < at.m)), "2 j - seqlen_k >= 0"),
    "head": Bug(mask(lambda at, seen: seen | (at.h == 2)), "(head 2): all of them", "group3"),
    "top left": Bug(mask(lambda at, seen: at.j <= at.i), "j - i", "unequal-causal"),
    "one key more": Bug(leak(lambda a, b: b + 1), "not its own: seqlen_k - 1 - j = -1", OPEN),
    "one key before": Bug(leak(lambda a, b: b, lambda a: max(a - 1, 0)), "own: j = -1", OPEN),
    "tile of neighbours": Bug(
        leak(lambda a, b: a + -(-(b - a) // 16) * 16), "(seqlen_k - 1) // 16 - j // 16 = 0", OPEN
    ),
    "no rule": Bug(
        mask(lambda at, seen: seen & ((7919 * at.i + at.j**2) % 11 > 0)), "no plain rule"
    ),
    # ---- scores ----
    "odd": Bug(
        bias(lambda at: -0.03 * (at.h + 1) * np.log1p(np.abs(at.d))),
        "-0.03 (h + 1) log(1 + |j - i|)",
        "group3",
    ),
    "ALiBi": Bug(
        bias(lambda at: 0.5 ** (at.h + 1) * at.d), "-0.5 (head 0), -0.25 (head 1)", "group3"
    ),
    "square": Bug(bias(lambda at: -0.001 * at.d**2), "-0.001 (j - i)^2"),
    "root": Bug(bias(lambda at: -0.1 * np.sqrt(np.abs(at.d))), "-0.1 sqrt|j - i|"),
    "waves": Bug(bias(lambda at: 0.3 * np.sin(at.d / 3)), "depends on j - i and the head alone"),
    "of keys": Bug(bias(lambda at: 0.2 * np.cos(at.j)), "it depends on j and the head alone"),
    "no scale": Bug(Plain(scores=lambda at, S: 4 * S), "by 4 (softmax_scale is missing)"),
    "factor": Bug(Plain(scores=lambda at, S: 1.37 * S), "multiplied by 1.37"),
    "softcap": Bug(Plain(scores=lambda at, S: 5 * np.tanh(S / 5)), "capped, 5 tanh(S / 5)"),
    "cos": Bug(Plain(scores=lambda at, S: np.cos(S)), ""),
    # ---- row sums, heads, stores ----
    "padding": Bug(Plain(mass=lambda at, x: at.longest - at.m), "up to the longest sequence"),
    "tile of padding": Bug(Plain(mass=lambda at, x: -at.m % 32), "its last tile of 32 keys"),
    "one more": Bug(Plain(mass=lambda at, x: 1.0), "have 1 more than the keys"),
    "twice": Bug(
        Plain(weights=lambda at, W: W * np.where(at.j // 8 == 1, 2, 1)), "2 times: 8 <= j <= 15"
    ),
    "h % heads": Bug(
        Plain(of_k=lambda h, g, n: h % n, of_v=lambda h, g, n: h % n), "keys of head h % 2", GROUP
    ),
    "values": Bug(Plain(of_v=lambda h, g, n: 0), "takes the values of head 0", GROUP),
    "NaN": Bug(Plain(stored=_nan_tail), "rows are NaN: i - seqlen_q // 16 * 16 >= 0"),
    "rows": Bug(Plain(stored=_without), "rows see no key, or are not written: i % 16 = 15"),
    "of q": Bug(
        Plain(keys=lambda a, b, n: np.arange(n), mask=_of_queries),
        "the keys of the row in k - the query's first row in q >= 0 and the row in k - the",
        "unequal-causal",
    ),
    "base 2": Bug(Plain(stored=lambda at, out, lse: (out, lse / np.log(2))), "lse is in base 2"),
    # ---- backward alone ----
    "back": Bug(
        Plain(slope=lambda at, dS: 0.98 ** np.abs(at.d) * dS), "by 0.98^|j - i|", stage=BACKWARD
    ),
    "waves of dS": Bug(
        Plain(slope=lambda at, dS: (1 + 0.2 * np.sin(at.d)) * dS), "by a factor: it", stage=BACKWARD
    ),
    "backward mask": Bug(
        mask(lambda at, seen: np.ones_like(seen)), "too many keys: all of them", stage=BACKWARD
    ),
    "backward bias": Bug(bias(lambda at: -0.05 * np.abs(at.d)), "-0.05 |j - i|", stage=BACKWARD),
    "dq without scale": Bug(
        Plain(dq_s=lambda s: 1 / s),
        "dS of dq is multiplied by 4 (softmax_scale is m",
        stage=BACKWARD,
    ),
    "dk with two": Bug(Plain(dk_s=lambda s: s), "dS of dk is multiplied by 0.25", stage=BACKWARD),
    "no D": Bug(Plain(delta=lambda dO, D: 0 * D), "lacks the row term D", stage=BACKWARD),
    "minus D": Bug(Plain(delta=lambda dO, D: -D), "D with the wrong sign", stage=BACKWARD),
    "dq without a tile": Bug(
        Plain(of_dq=lambda at, dS: np.where(at.j // 16 == 1, 0, dS)),
        "dS of dq misses pairs: 16 <= j <= 31",
        stage=BACKWARD,
    ),
    "rows of dq": Bug(
        Plain(of_dq=lambda at, dS: np.where(at.i % 16 < 4, 0, dS)),
        "dS of dq misses pairs: i % 16",
        stage=BACKWARD,
    ),
    "dk without rows": Bug(
        Plain(of_dk=lambda at, dS: np.where(at.i < 8, 0, dS)),
        "dS of dk misses pairs: i <= 7",
        stage=BACKWARD,
    ),
    "dP of another head": Bug(
        Plain(of_dP=lambda h, n: h % n), "takes dP of query head h with v of", GROUP, BACKWARD
    ),
    "one of the group": Bug(Plain(kept=1), "of query heads [1], not [0, 1, 2]", "group3", BACKWARD),
}
NOT_NAMED = ("cos",)  # a function of the scores that is in no list
NOT_PLANTED = ("cos", "NaN", "base 2", "one of the group")


def candidate(bug: Bug) -> Candidate:
    return Candidate("plain", "numpy", **{bug.stage: getattr(bug.plain, bug.stage)})


def alike(bug: Bug, dtype: str) -> Case:
    return replace(small(CASES[bug.case]), dtype=dtype, dlse=False)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_read_and_planted(name: str, dtype: str) -> None:
    bug = BUGS[name]
    question = question_of(alike(bug, dtype), clean=True)
    (found,) = _read(candidate(bug), question).of
    assert found.stage == bug.stage
    assert bug.text in " ".join(found.wrong) or name in NOT_NAMED
    assert bool(found.unread) == (name in NOT_NAMED)
    assert (found.bug is None) == (name in NOT_PLANTED)
    if found.bug is None:
        return
    answers = answers_of(candidate(bug), question)
    planted = solve(question, bug.stage, found.bug, given=question.passed)
    right = solve(question, bug.stage, given=question.passed)
    names = ("out", "lse") if bug.stage == FORWARD else ("dq", "dk", "dv")
    known = {n: np.isfinite(right[n]) for n in names}
    off, null = (
        max(np.abs(answers[n].astype(float)[known[n]] - x[n][known[n]]).max() for n in names)
        for x in (planted, right)
    )
    assert off < (1e-4 if dtype == "float64" else 0.06) * max(1, null) and null > 5 * off


def test_named_in_16_bits_too() -> None:
    for name in ("odd", "back"):
        question = question_of(alike(BUGS[name], "float16"), clean=True)
        (found,) = _read(candidate(BUGS[name]), question).of
        assert BUGS[name].text in found.wrong[0]


@pytest.mark.parametrize(
    ("name", "bug", "said"),
    [
        ("odd", "score-bias", "added to the scores: -0.03 (h + 1) log(1 + |j - i|)"),
        ("back", "unknown", "dS is multiplied by 0.98^|j - i|"),
        ("j <= i + 1", "causal-off-by-one", "the causal mask is off by one key"),
        ("open tile", "wrong-keys", "a query sees too many keys: j // 16 - i // 16 = 0"),
        ("rows of dq", "rows-not-written", "some rows are never written"),
    ],
)
def test_diff_says_what_was_read(name: str, bug: str, said: str) -> None:
    judged = candidate(BUGS[name])
    cases = [CASES[case] for case in ("edges-causal", "group3", "long")]
    assert all(any(row.verdict.verdict == "FAIL" for row in evaluate(judged, c)) for c in cases)
    found = explain_failures(judged, cases)
    (finding,) = found.findings
    assert (finding.bug, finding.confidence) == (bug, "high")
    assert finding.title.startswith(said)
    form = finding.proof.form if finding.proof else ""
    assert not form or form not in finding.title  # a title says it
    told = "\n".join(finding.evidence)
    assert "read off entry by entry, " in told and " calls" in told and "planted" in told
    assert ("." in told and " + " in told) or name in ("odd", "back", "rows of dq")


def test_a_function_may_want_multiples() -> None:
    """Of 4, say: such lengths are asked about; what it sees by no rule is planted as it is."""
    plain = Plain(mask=lambda at, seen: seen & ((7919 * at.i + at.j**2) % 11 > 0))

    def forward(q: Any, k: Any, v: Any, cu_seqlens: Any, *, causal: bool, return_lse: bool) -> Any:
        if (cu_seqlens % 4).any():
            raise ValueError("lengths must be multiples of 4")
        return plain.forward(q, k, v, cu_seqlens, causal=causal)

    case = replace(
        CASES["edges-causal"], lengths_q=(44, 84), lengths_k=(44, 84), past_q=0, past_k=0
    )
    question = question_of(case, clean=True)
    (found,) = _read(Candidate("plain", "numpy", forward=forward), question).of
    assert "a query misses keys: by no plain rule" in found.wrong[0] and found.bug is not None


def test_what_gives_other_numbers_is_not_sure() -> None:
    """A function that is wrong for other v than it is read with: nothing is claimed of it."""

    def moody(q: Any, k: Any, v: Any, cu_seqlens: Any, *, causal: bool, return_lse: bool) -> Any:
        out, lse = Plain().forward(q, k, v, cu_seqlens, causal=causal)
        wrong = out if (v == 0).mean() > 0.5 else out + 0.1 * np.abs(out)
        return wrong.astype(q.dtype), lse

    judged = Candidate("moody", "numpy", forward=moody)
    found = explain_failures(judged, [CASES["edges-causal"]])
    assert found.findings and "read off" in " ".join(found.facts)
    assert all(finding.confidence not in ("high", "proved") for finding in found.findings)


# ---- rules --------------------------------------------------------------------------------------


def shown(lengths: tuple[int, ...], inside: Callable[[Places], Any]) -> Shown:
    case = Case("", lengths, lengths, "float64", 1, causal=True, dlse=False, past_q=0, past_k=0)
    places = Places(question_of(case, clean=True))
    domain = places.right
    return Shown(places, domain, domain & inside(places))


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        (lambda at: at.j == 5, "j = 5"),
        (lambda at: at.j - at.p < -20, "j - i <= -21"),
        (lambda at: (at.j < 3) | (at.j - at.p == -8), "j - i = -8, or j <= 2"),
        (lambda at: (at.j < 3) & (at.i > 11), "j <= 2 and i >= 12"),
        (lambda at: at.j > -1, "all of them"),
        (lambda at: at.j % 8 == 7, "j % 8 = 7"),
    ],
)
def test_rules_are_the_plainest_that_hold(inside: Callable[[Places], Any], text: str) -> None:
    one, other = shown((40, 17), inside), shown((21, 53, 9), inside)
    assert str(rule_of(one, other)) == text
