"""What is read is named: planted bugs, each in words and as a bug that gives the same numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from rawattn.check.cases import Case, standard
from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from rawattn.check.diagnose.judge.failures import explain_failures, question_of, small
from rawattn.check.diagnose.read.name import read
from rawattn.check.run import evaluate
from tests.diagnose import plain
from tests.diagnose.called import asked, candidate, told, wrong
from tests.diagnose.hooks import added, by, heavier, or_seen, padding, power, seen, times, window
from tests.diagnose.plain import Head, Planted
from tests.diagnose.planted.first import leaking
from tests.diagnose.planted.keys import of_rows
from tests.diagnose.planted.softmax import capped_at
from tests.diagnose.stores import delta
from tests.diagnose.table import Hooks

CASES = {case.name: case for case in standard("small")}
FORWARD, BACKWARD = "forward", "backward"
OPEN, WINDOW, GROUP, UNEQUAL = "edges", "window-causal", "two-kv-heads", "unequal-causal"


class Bug(NamedTuple):
    """``text`` is in the first sentence; on ``case``, in a stage."""

    stage: str
    hooks: Hooks
    text: str
    case: str = "edges-causal"

    @property
    def planted(self) -> Planted:
        return wrong(self.hooks, self.stage)


def away(c: Head) -> Any:
    return abs(c.j - c.p)


def unwritten(c: Head, x: Any) -> Any:
    there = c.i % 16 < 15
    return np.where(there, x[0], -np.inf), x[1] * there


def of_sums(keys: Callable[[Head], Any], scores: str = "S") -> Hooks:
    """A softmax whose row sums are of these keys; bare scores are those of masked ones too."""

    def softmax(c: Head, x: Any) -> Any:
        S = getattr(c, scores)
        lse = np.logaddexp.reduce(np.where(keys(c), S, -np.inf), axis=1, keepdims=True)
        return lse, np.exp(c.S - lse) @ c.V

    return {"softmax": softmax}


def with_tile_sums(c: Head, dS: Any) -> Any:
    own = c.j // 16 == (c.j // 16).T
    return c.P * (c.dP - (c.P * c.dP) @ own)


def first_columns(c: Head, Y: Any) -> Any:
    return (c.s * (c.Q[:, :8] @ c.K[:, :8].T)).astype(Y.dtype)


def filled(c: Head, S: Any) -> Any:
    return np.where(c.j <= c.p, S, 0).astype(S.dtype)


def on(name: str, factor: Callable[[Head], Any]) -> Hooks:
    return {name: lambda c, x: np.where(c.seen > 0, x * factor(c), x)}


_CLIPPED = {"cap": lambda c, x: (np.clip(c.Y, -1.5, 1.5), 1.0, 0.0)}
_ROWS_OF_Q = of_rows(lambda c: (c.r >= c.start_q) & (c.r - c.start_q <= c.p))
_HALF_OF_D = delta(lambda a, q: (a["dout"] * a["out"])[..., :8].sum(2).T)
_UNSLOPED = "P dP - (P D without the softcap's slope)"
_OPEN_TILE = or_seen(lambda c: c.j // 16 == c.p // 16)
_LAST_SUMS = of_sums(lambda c: (c.j <= c.p) & (c.j >= c.p - 15))
_FEWER = {"dP": lambda c, x: c.dO[:, :-4] @ c.V[:, :-4].T}
_NAN_TAIL = {"softmax": lambda c, x: (x[0], np.where(c.i >= c.n // 16 * 16, np.nan, x[1]))}

# what is wrong, what is said first, and the case
_FORWARD: dict[str, tuple[Any, ...]] = {
    # ---- who sees whom ----
    "j <= i + 1": (window(right=1), "too many keys: j - i = 1 "),
    "j < i": (window(right=-1), "misses keys: j - i = 0 "),
    "window": (window(left=-1), "misses keys: j - i = -16", WINDOW),
    "wide": (window(left=3), "-19 <= j - i <= -17", WINDOW),
    "tail tile": (times(lambda c: c.j < c.m // 16 * 16), "j - seqlen_k // 16 * 16 >= 0"),
    "open tile": (_OPEN_TILE, "keys: j // 16 - i // 16 = 0"),
    "skipped": (times(lambda c: (c.j // 16 != 1) | (c.i < 40)), "i >= 40 and j // 16 = 1"),
    "dilated": (times(lambda c: (c.j - c.p) % 2 == 0), "(j - i) % 2 = 1"),
    "strided": (times(lambda c: c.j % 4 != 3), "j % 4 = 3"),
    "two": (times(lambda c: (c.j > 2) & (c.j - c.p != -8)), "keys: j - i = -8, or j <= 2"),
    "sink": (times(lambda c: (c.j < 4) | (away(c) < 16)), "j - i <= -16 and j >= 4"),
    "half": (times(lambda c: 2 * c.j < c.m), "keys: j // ceil(seqlen_k / 2) "),
    "head": (or_seen(lambda c: c.h == 2), "(head 2): all of them", "group3"),
    "top left": (seen(lambda c: c.j <= c.i), "j - i", UNEQUAL),
    "one key more": (leaking(1), "not its own: seqlen_k - 1 - j = -1", OPEN),
    "one key before": (leaking(before=1), "own: j = -1", OPEN),
    "tile of neighbours": (leaking(tile=16), "(seqlen_k - 1) // 16 - j // 16 = 0", OPEN),
    "third": (times(lambda c: c.j < c.m // 3 * 3), "j - seqlen_k // 3 * 3 >= 0"),
    "no rule": (times(lambda c: (7919 * c.i + c.j**2) % 11 > 0), "no plain rule"),
    # ---- scores ----
    "bias": (added(lambda c: -0.03 * away(c)), "added to the scores: -0.03 |j - i|", "group3"),
    "ALiBi": (added(lambda c: -away(c) / 2**c.h / 2), "-0.5 (head 0), -0.25 (head 1)", "group3"),
    "no scale": ({"Y": by(4)}, "by 4 (softmax_scale is missing)"),
    "factor": ({"Y": by(1.37)}, "multiplied by 1.37"),
    "softcap": (capped_at(5.0), "capped, 5 tanh(S / 5)"),
    "clipped": ({"scores": lambda c, S: np.clip(S, -1, 1)}, "the scores are clipped at 1"),
    "absolute": ({"scores": lambda c, S: np.abs(S)}, "the scores are their absolute values"),
    "no softcap, clipped": (_CLIPPED, "the scores are clipped at 1.5", "softcap"),
    "few columns": ({"Y": first_columns}, "q . k without columns 8 to 15"),
    "filled": (_OPEN_TILE | {"S": filled}, "masked scores are 0, not -inf"),
    # ---- row sums, heads, stores ----
    "padding": (heavier(lambda c: np.log(padding(c))), "up to the longest sequence"),
    "tile of padding": (heavier(lambda c: np.log(-c.m % 32)), "its last tile of 32 keys"),
    "one more": (heavier(lambda c: 0.0), "have 1 more than the keys"),
    "twice": (times(lambda c: 1 + (c.j // 8 == 1)), "2 times: 8 <= j <= 15"),
    "overlap": (times(lambda c: 1 + ((c.j > 0) & (c.j % -(-c.m // 3) == 0))), "count 2 times: "),
    "rightly summed": (_OPEN_TILE | of_sums(lambda c: c.j <= c.p), "are of the keys that must be"),
    "summed over all": (of_sums(lambda c: c.j >= 0, "bare"), "are of all keys of the sequence"),
    "summed over the last": (_LAST_SUMS, "of the keys that must be seen with j - i >= -15"),
    "h % heads": ({"kv head": lambda c, g: c.h % 2}, "keys of head h % 2", GROUP),
    "values": ({"V": lambda c, x: c.read("v", 0)}, "takes the values of head 0", GROUP),
    "NaN": (_NAN_TAIL, "rows are NaN"),
    "rows": ({"softmax": unwritten}, "rows see no key, or are not written: i % 16 = 15"),
    "of q": (_ROWS_OF_Q, "keys of the row in k - the query's first row in q >= 0 and", UNEQUAL),
    "scaled sink": ({"sink": power(2)}, "have exp(0.25 sink), in place of", "sinks"),
    "another sink": ({"sink": lambda c, x: 0.7 * x - 0.4}, "have exp(0.7 sink - 0.4), in", "sinks"),
}
_BACKWARD: dict[str, tuple[Any, ...]] = {
    "back": (on("dS", lambda c: 0.98 ** away(c)), "by exp of -0.0202 |j - i|"),
    "backward mask": (seen(lambda c: True), "too many keys: all of them"),
    "backward bias": (added(lambda c: -0.05 * away(c)), "-0.05 |j - i|"),
    "dq without scale": ({"dq": power(0)}, "dS of dq is multiplied by 4 (softmax_scale is m"),
    "dk with two": ({"dk": power(2)}, "dS of dk is multiplied by 0.25"),
    "no D": ({"D": by(0)}, "lacks the row term D"),
    "minus D": ({"D": by(-1)}, "dS is P dP + P D, not"),
    "dq without a tile": (on("dS of dq", lambda c: c.j // 16 != 1), "dq misses pairs: 16 <= j"),
    "rows of dq": (on("dS of dq", lambda c: c.i % 16 >= 4), "dS of dq misses pairs: i % 16"),
    "dk without rows": (on("dS of dk", lambda c: c.i >= 8), "dS of dk misses pairs: i <= 7"),
    "P(1 - P) dP": ({"dS": lambda c, x: c.P * (1 - c.P) * c.dP}, "dS is P dP - P^2 dP, not"),
    "dP alone": ({"dS": lambda c, x: c.P * c.dP * c.P - c.P * c.D}, "is - P D + P^2 dP"),
    "D of its tile": ({"dS": with_tile_sums}, "dS takes D over the tile of 16 keys at hand alone"),
    "slope of dP": ({"dS": lambda c, x: x + c.P * c.D * (1 - 1 / c.slope)}, _UNSLOPED, "softcap"),
    "half of D": (_HALF_OF_D, "dout . out without columns 8 to 15"),
    "fewer columns": (_FEWER, "dP = dout . v without columns 12 to 15"),
}
BUGS = {name: Bug(FORWARD, *row) for name, row in _FORWARD.items()}
BUGS |= {name: Bug(BACKWARD, *row) for name, row in _BACKWARD.items()}
FINE = ("scaled sink", "another sink")  # 16 bits do not show them
NOT_PLANTED = ("NaN",)
OFF_BY_ONE = "the causal mask is off by one key"


def alike(bug: Bug, dtype: str) -> Case:
    return replace(small(CASES[bug.case]), dtype=dtype, dlse=False)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_read_and_planted(name: str, dtype: str) -> None:
    bug = BUGS[name]
    dtype = "float64" if name in FINE else dtype
    question = question_of(alike(bug, dtype), clean=True)
    (found,) = told(bug.planted, question, bug.stage).of
    assert found.stage == bug.stage
    assert bug.text in " ".join(found.wrong) and not found.unread
    assert (found.bug is None) == (name in NOT_PLANTED)
    if found.bug is None:
        return
    answers = plain.answers(bug.planted, question)
    planted = solve(question, bug.stage, found.bug, given=question.passed)
    right = solve(question, bug.stage, given=question.passed)
    names = STAGES[bug.stage][:2] if bug.stage == FORWARD else ("dq", "dk", "dv")
    known = {n: np.isfinite(right[n]) for n in names}
    mine, *due = (
        {n: np.nan_to_num(x[n].astype(float))[known[n]] for n in names}
        for x in (answers, planted, right)
    )
    off, null = (max(abs(mine[n] - x[n]).max() for n in names) for x in due)
    assert off < (1e-4 if dtype == "float64" else 0.06) * max(1, null) and null > 5 * off


@pytest.mark.parametrize(
    ("name", "bug", "said"),
    [
        ("bias", "score-bias", "added to the scores: -0.03 |j - i|"),
        ("back", "unknown", "dS is multiplied by exp of -0.0202 |j - i|"),
        ("j <= i + 1", "causal-off-by-one", f"{OFF_BY_ONE}: the mask is j <= i + 1"),
        ("open tile", "wrong-keys", "a query sees too many keys: j // 16 - i // 16 = 0"),
        ("rows of dq", "rows-not-written", "dS of dq misses pairs: i % 16 <= 3"),
    ],
)
def test_diff_says_what_was_read(name: str, bug: str, said: str) -> None:
    judged = candidate(BUGS[name].planted, BUGS[name].stage)
    cases = [CASES[case] for case in ("edges-causal", "group3", "long")]
    assert all(any(row.verdict.verdict == "FAIL" for row in evaluate(judged, c)) for c in cases)
    found = explain_failures(judged, cases)
    (finding,) = found.findings
    assert (finding.bug, finding.confidence) == (bug, "high")
    assert finding.title.startswith(said)
    told = "\n".join(finding.evidence)
    assert all(text in told for text in ("read off entry by entry, ", " calls", "the float64 ref"))
    assert (finding.sight is None) == (name in ("bias", "back", "rows of dq"))


def test_a_function_may_want_multiples() -> None:
    """Of 4, say: such lengths are asked about; what it sees by no rule is planted as it is."""
    ask = asked(BUGS["no rule"].planted)

    def wants(stage: str) -> Any:
        def of_stage(question: Question) -> Answers:
            if (question.cu_seqlens_q % 4).any():
                raise ValueError("lengths must be multiples of 4")
            return ask(stage)(question)

        return of_stage if stage == FORWARD else None

    lengths: Any = {"lengths_q": (44, 84), "lengths_k": (44, 84), "past_q": 0, "past_k": 0}
    question = question_of(replace(CASES["edges-causal"], **lengths), clean=True)
    (found,) = read(question, wants).of
    assert "a query misses keys: by no plain rule" in found.wrong[0] and found.bug is not None


def test_what_gives_other_numbers_is_not_sure() -> None:
    """A function that is wrong for other v than it is read with: nothing is claimed of it."""
    right = candidate(plain.RIGHT, FORWARD)

    def moody(q: Any, k: Any, v: Any, cu_seqlens: Any, **options: Any) -> Any:
        out, lse = right.forward(q, k, v, cu_seqlens, **options)
        return out if (v == 0).mean() > 0.5 else (out + 0.1 * np.abs(out)).astype(q.dtype), lse

    judged = replace(right, forward=moody)
    found = explain_failures(judged, [CASES["edges-causal"]])
    assert found.findings and "read off" in " ".join(found.facts)
    assert all(finding.confidence not in ("high", "proved") for finding in found.findings)
