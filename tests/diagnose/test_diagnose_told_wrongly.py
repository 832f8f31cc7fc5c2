"""What the diagnosis has told wrongly of kernels that it had not seen, one test a point.

The kernels are ``plain`` with hooks for what is not right; right ones are among them, and must not
be accused. Long, since every point has its own kernel.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn.check import cli_diagnose
from rawattn.check.candidate import Candidate
from rawattn.check.cases import standard
from rawattn.check.diagnose.engine.attention import Bug, views_of
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from rawattn.check.diagnose.findings import Diagnosis, Finding
from rawattn.check.diagnose.judge import failures, match
from rawattn.check.diagnose.judge.diagnosis import diagnose, of_all
from rawattn.check.diagnose.judge.failures import explain_failures
from rawattn.check.diagnose.logs.explain import explain_log
from tests.diagnose import plain
from tests.diagnose.called import candidate, wrong
from tests.diagnose.called import told as read_off
from tests.diagnose.hooks import by, of_each, seen, window
from tests.diagnose.plain import BFLOAT16, FLOAT32, FLOAT64, ZEROS, Array, Head
from tests.diagnose.problems import packed
from tests.diagnose.table import Hooks


def computed(question: Question, hooks: Hooks | None = None, *stages: str) -> Answers:
    """Forward and backward, with ``hooks`` in both, or in ``stages`` alone."""
    found = plain.answers(wrong(hooks or {}, *(stages or STAGES)), question)
    found.pop("delta", None)
    return found


def rounded(dtype: Any, *names: str) -> Hooks:
    """With nothing else rounded but results; P when it is divided by its sum."""

    def narrow(c: Head, x: Array) -> Array:
        return x.astype(dtype).astype(x.dtype)

    def softmax(c: Head, x: Any) -> Any:
        return x[0], narrow(c, np.exp(c.S - x[0])) @ c.V

    of_out = {"softmax": softmax} if "P" in names else {}
    return of_each(narrow, *names) | of_out | {"rounding": "results"}


CASES = {case.name: case for case in standard("small")}


def of_diff(hooks: Hooks, case: str) -> tuple[Finding, ...]:
    """What `diff` says of a forward pass with ``hooks``."""
    return explain_failures(candidate(wrong(hooks, "forward"), "forward"), [CASES[case]]).findings


def only(answers: Answers, *names: str) -> Answers:
    return {name: answers[name] for name in names}


def first(diagnosis: Diagnosis) -> Finding:
    assert diagnosis.findings, "nothing is said to be wrong"
    return diagnosis.findings[0]


def told(diagnosis: Diagnosis) -> str:
    """All that is said of what is wrong."""
    return " ".join(" ".join((one.title, one.look_at, *one.evidence)) for one in diagnosis.findings)


def names(diagnosis: Diagnosis) -> list[str]:
    return [one.bug for one in diagnosis.findings]


def test_an_lse_that_cancels_is_judged_by_what_went_in() -> None:
    """1: scores of a single token that add up to nearly 0 are as wrong as their terms are large."""
    question = packed((1, 30, 1, 20), heads=(1, 1), dim=64)
    query, k = question.q[0, 0], question.k.copy()
    k[0, 0] -= query * ((query @ k[0, 0]) / (query @ query)) * np.float32(1 - 1e-6)
    question = replace(question, k=k)
    answers = computed(question)
    assert abs(answers["lse"][0, 0]) < 1e-5
    assert not diagnose(question, only(answers, "out", "lse")).findings
    assert not diagnose(question, answers).findings


@pytest.mark.parametrize("lengths", [(5, 7, 9), (20, 30, 46)])
@pytest.mark.parametrize("tensors", [("dq",), ("dk", "dv"), ("dq", "dk", "dv")], ids="-".join)
def test_a_doubled_gradient_is_a_factor(lengths: tuple[int, ...], tensors: tuple[str, ...]) -> None:
    """2: a workspace that is not zeroed doubles all of it; where every sequence is a tile, so does
    a tile that counts twice."""
    question = packed(lengths)
    answers = computed(question)
    found = diagnose(question, answers | {name: 2 * answers[name] for name in tensors})
    assert names(found) == ["constant-factor"]
    assert all(name in first(found).where for name in tensors)


DECAYED = {"dS": lambda c, x: x * 0.98 ** abs(c.j - c.p)}


def test_a_right_dv_rules_out_another_p() -> None:
    """4, and the hint of 7.5: a factor on dS alone is no bias of the scores, which dv had too."""
    question = packed()
    found = diagnose(question, computed(question, DECAYED))
    assert names(found) == ["unknown"]
    assert "a factor on dS" in first(found).look_at


@pytest.mark.parametrize("tile", [64, 128])
def test_keys_past_the_last_token_are_zeros(tile: int) -> None:
    """5: TMA fills a tile with zeros where the array ends."""

    def keys(c: Head, x: Array) -> Array:
        rows = np.arange(c.start_k, c.start_k - c.m // -tile * tile)
        return np.where(rows < c.total_k, rows, ZEROS)

    question = packed(causal=False, dout=None)
    found = diagnose(question, computed(question, {"keys": keys}))
    assert names(found) == ["neighbour-leak"]
    assert f"tile of {tile}" in told(found)


def test_one_cause_beats_two() -> None:
    """6: what explains dq, dk and dv at once is told, and not one bug of dq and one of the rest."""
    question = packed((9, 12), causal=False)
    right = match.Stage(question, {}, "backward", np.inf).rights[0].answers

    def off(name: str, *tensors: str) -> Bug:
        back: Any = {"store": lambda question, x: x | {t: x[t][::-1] for t in tensors}}
        return Bug(name, "", ("backward",), **back)

    one = off("offsets-shifted", "dq", "dk", "dv")
    two = [off("transposed", "dq"), off("tile-skipped", "dk", "dv")]
    answers = one.store(question, right) if one.store else right
    answers = {name: answers[name] for name in ("dq", "dk", "dv")}
    work = match.Stage(question, answers, "backward", np.inf)
    work.usual = work.planted(two)
    whole = work.planted([one])
    work.families = [lambda: whole]
    verdict = match._verdict(work, match.ladder(question.dtype))
    assert {explained.name for explained in verdict.explained} == {"offsets-shifted"}


@pytest.mark.parametrize("sequence", [1, 3])
@pytest.mark.parametrize("tensors", [("out", "lse"), ("out", "lse", "dq", "dk", "dv")], ids=len)
def test_a_sequence_that_nobody_writes(sequence: int, tensors: tuple[str, ...]) -> None:
    """8: 0 and -inf in all rows of a sequence are no rows of the one before."""
    question = packed((20, 30, 46, 5))
    answers = only(computed(question), *tensors)
    rows = slice(*map(int, question.cu_seqlens_q[sequence : sequence + 2]))
    for name, x in answers.items():
        (x.T if name == "lse" else x)[rows] = -np.inf if name == "lse" else 0
    found = first(diagnose(question, answers))
    assert (found.bug, found.confidence) == ("rows-not-written", "high")
    assert f"of sequence {sequence}" in found.title


FAULTS: dict[str, Callable[[Array], Array]] = {
    # of rows, which row is read: a buffer that is not waited for, or overwritten too early
    "the tile before": lambda i: np.where(i < 16, i, i - 16),
    "the second for the first": lambda i: np.where((i < 16) & (i + 16 < len(i)), i + 16, i),
    "an empty first": lambda i: np.where(i < 16, ZEROS, i),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operand", ["K", "V"])
def test_a_stale_stage(fault: str, operand: str) -> None:
    """9: a tile of K or V that is that of another stage is no layout."""

    def read(c: Head, x: Array) -> Array:
        row = FAULTS[fault](np.arange(len(x)))
        return np.where(row[:, None] == ZEROS, 0, x[row]).astype(x.dtype)

    question = packed((50, 90, 70), heads=(2, 1), dout=None)
    found = first(diagnose(question, computed(question, {operand: read})))
    assert (found.bug, found.confidence) == ("stale-tile", "high")


FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("steps", "dtype", "of"),
    [("P Y dS dP", BFLOAT16, FLOAT32), ("P dS", FLOAT8, BFLOAT16), ("Y", BFLOAT16, BFLOAT16)],
    ids=str,
)
def test_a_narrow_intermediate_is_named(steps: str, dtype: Any, of: Any) -> None:
    """7: the slope is 1, and what is left of one tensor rounded alone is next to nothing."""
    question = packed((50, 30), of, heads=(2, 1))
    for step in steps.split():
        found = diagnose(question, computed(question, rounded(dtype, step)))
        assert {*names(found)} <= {"rounding", "narrow-intermediate"}
        assert f"{step.replace('Y', 'S')} in {dtype}" in told(found)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_what_is_too_coarse_for_a_test_is_not_said_to_be_right(dtype: Any) -> None:
    """Of 10 bits float32 may be, by TF32; float64 may not."""
    (one,) = of_diff(rounded(dtype, "P"), "group3")
    assert one.bug == "narrow-intermediate" and one.where == "forward: out"


def test_of_16_bits_what_is_coarser_than_need_be_is_said() -> None:
    """An lse in 16 bits leaves gradients within the rounding of these."""
    question = packed((50, 30), BFLOAT16, heads=(2, 1))
    (one,) = diagnose(question, computed(question, rounded(BFLOAT16, "L"), "backward")).findings
    assert one.bug == "rounding" and "lse in bfloat16" in one.title
    assert not diagnose(question, computed(question, {"rounding": "results"}, "backward")).findings


def test_a_coarse_result_is_said_to_be_coarse() -> None:
    """7: a percent of dq, as bfloat16 in every operation leaves, is not nothing."""
    question = packed((50, 30), BFLOAT16, heads=(2, 1), causal=False)
    sums = (f"sum {x}" for x in ("row_sum", "out", "dq", "dk", "dv"))
    every = rounded(BFLOAT16, "Y", "P", "dP", "dS", "L", "D", *sums)
    found = diagnose(question, computed(question, every | {"rounding": "every step"}))
    assert names(found) == ["rounding"]
    assert "of its size" in told(found)


def test_a_busy_machine_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """7.2: what is not tried depends on what was computed, not on how long that took."""
    question = packed((9, 12))
    wrong = computed(question, DECAYED)
    idle = diagnose(question, wrong)
    for clock in ("perf_counter", "process_time", "monotonic", "time"):
        late = iter(range(0, 10**9, 10**4))
        monkeypatch.setattr(time, clock, lambda late=late: float(next(late)))
    assert diagnose(question, wrong).findings == idle.findings


def test_a_search_that_is_cut_short_says_so() -> None:
    """7.2: and is less sure."""
    question = packed((9, 12), causal=False)
    answers = computed(question)
    wrong = answers | {"dq": answers["dk"][:, [0, 0, 1, 1]], "dk": 2 * answers["dk"]}
    whole, cut = diagnose(question, wrong), diagnose(question, wrong, until=0.0)
    assert not any("cut short" in fact for fact in whole.facts)
    assert any("cut short" in fact for fact in cut.facts)
    assert all(finding.confidence != "high" for finding in cut.findings)


# ---- files that leave something out -------------------------------------------------------------


def explained(path: Path, question: Question, answers: Answers, *without: str) -> Diagnosis:
    """What `explain` says of a file without some of its entries."""
    names = question.__dataclass_fields__.keys() - {"out", "lse", "own", "block_size", *without}
    given = {name: getattr(question, name) for name in names}
    np.savez(path, **{name: x for name, x in given.items() if x is not None}, **answers)
    return cli_diagnose._of_files(str(path))


@pytest.mark.parametrize(
    ("options", "without", "words"),
    [
        ({}, ("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens = [0, 12, 22, 30]"),
        ({"softmax_scale": 0.4}, ("softmax_scale",), "softmax_scale = 0.4"),
        ({"window": (3, -1)}, ("window",), "window = (3, -1)"),
        ({"dlse": True}, ("dlse",), "a cotangent of lse (dlse)"),
    ],
    ids=["cu_seqlens", "softmax_scale", "window", "dlse"],
)
def test_what_a_file_leaves_out_accuses_nobody(
    tmp_path: Path, options: dict[str, Any], without: tuple[str, ...], words: str
) -> None:
    """D1, and 3: right results of another option than the one that is assumed."""
    question = packed((12, 10, 8), **options)
    answers = computed(question)
    found = explained(tmp_path / "a.npz", question, answers, *without)
    assert names(found) == ["vacuous"]
    assert first(found).title == f"right if {words} was meant, which is not said"


def test_a_bug_beside_an_option_that_is_not_said(tmp_path: Path) -> None:
    """D1: with the mask that was meant the bug has a name, and is the only one."""
    question = packed((12, 10, 8))
    answers = computed(question)
    wrong = answers | {"dk": answers["dk"] * np.float32(question.scale)}
    found = explained(tmp_path / "a.npz", question, wrong, "causal")
    assert names(found) == ["output-scale"]
    assert any("causal = True is not said" in fact for fact in found.facts)


def test_rows_of_nan_are_of_no_option_that_is_not_said(tmp_path: Path) -> None:
    question = packed((12, 10, 8), dout=None)
    answers = computed(question)
    answers["out"][20:] = np.nan
    found = explained(tmp_path / "a.npz", question, answers, "softmax_scale")
    assert first(found).bug == "unknown" and "NaN" in told(found)


@pytest.mark.parametrize("name", ["grad_logsumexp", "d_lse", "dsoftmax_lse"])
def test_a_dlse_by_another_name(tmp_path: Path, name: str) -> None:
    """3"""
    question = packed((12, 10, 8), dlse=True)
    answers = computed(question) | {name: np.asarray(question.dlse)}
    assert not explained(tmp_path / "a.npz", question, answers, "dlse").findings


def test_nan_all_over_is_no_bug_that_has_a_name() -> None:
    """D2"""
    question = packed()
    out = computed(question)["out"]
    found = first(diagnose(question, {"out": np.full_like(out, np.nan)}))
    assert (found.bug, found.title) == ("unknown", "out: every element is NaN")
    out[40:] = np.nan
    said = told(diagnose(question, {"out": out}))
    assert "out is NaN in some rows, of sequences 1, 2 of 3" in said


def test_a_copy_of_an_input_is_a_copy() -> None:
    """D13"""
    question = packed((9, 12), heads=(2, 2))
    assert first(diagnose(question, {"out": question.v})).title == "out: a copy of v"


# ---- a function that is asked -------------------------------------------------------------------


def in_float64(factor: float) -> Candidate:
    """A forward pass with NumPy's own dtype, whose scores have a ``factor``."""
    whole = candidate(wrong({"Y": by(factor)}, "forward"), "forward")

    def forward(*inputs: Array, **options: Any) -> Any:
        return whole.forward(*(x.astype(np.float64) for x in inputs[:3]), inputs[3], **options)

    return replace(whole, forward=forward)


@pytest.mark.parametrize(("factor", "bugs"), [(1.0, []), (1.3, ["score-scale"])])
def test_a_wrong_dtype_is_named_and_hides_nothing(factor: float, bugs: list[str]) -> None:
    """7.1 and D3"""
    case = replace(CASES["group8"], lengths_q=(9, 20), lengths_k=(9, 20))
    found = failures.explain_failure({failures.SIDE: in_float64(factor)}, case)
    assert names(found) == ["wrong-dtype", *bugs]
    assert "out is float64; it must be float16" in told(found)


def test_rows_that_see_nothing_leave_lapack_in_peace(capfd: pytest.CaptureFixture[str]) -> None:
    """7.4: least squares are not given infinity."""
    question = packed((40, 30), heads=(1, 1), causal=False)
    answers = only(computed(question), "out", "lse")
    answers["lse"][:, ::5] = -800.0  # exp(S - lse) is then more than float64 holds
    answers["out"][1::3] *= 0.5
    assert diagnose(question, answers).findings
    assert "DLASCL" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("form", "bug", "words"),
    [
        (lambda c: c.P * c.dP - c.D, "softmax-backward-without-p", "P dP - D, not P dP - P D"),
        (lambda c: c.P * (c.dP - c.D / 2), "delta-of-another-out", "P dP - 0.5 P D"),
    ],
    ids=["parentheses", "half of D"],
)
def test_the_parts_of_ds(form: Callable[[Head], Array], bug: str, words: str) -> None:
    """10: parentheses that stand elsewhere, and D times something."""
    question, hooks = packed((40, 30), heads=(2, 1)), {"dS": lambda c, x: form(c) * (c.seen > 0)}
    readings = read_off(wrong(hooks, "backward"), question, "backward")
    found = diagnose(question, computed(question, hooks), told=readings)
    assert names(found) == [bug]
    assert f"dS is {words}" in told(found)


def test_printed_weights_tell_the_scale_of_the_scores() -> None:
    """D12: log P of one side is sqrt(head_dim) times that of the other."""
    S = 0.3 * np.random.default_rng(0).standard_normal((6, 6))

    def text(name: str, scores: Array) -> str:
        P = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        rows = ",\n        ".join("[" + ", ".join(f"{x:.4f}" for x in row) + "]" for row in P)
        return f"{name}:\ntensor([{rows}])\n"

    found = explain_log(text("P_reference", S) + text("P_cuda", 4 * S))
    assert names(found) == ["score-scale"]
    assert first(found).side == "cuda" and "sqrt(16)" in told(found)


# ---- what a fourth set showed ------------------------------------------------------------------


def test_nan_of_a_neighbour_is_no_proof_of_offsets() -> None:
    """Keys of a tile that runs on into the next sequence weigh 0, and 0 NaN is NaN: who reads which
    NaN says little, and many bugs do it alike."""
    leak = {
        "keys": lambda c, x: np.arange(c.start_k, min(c.total_k, c.start_k + c.m + 7)),
        "seen": lambda c, x: x & (c.j < c.m),
    }
    findings = of_diff(leak, "strided")
    assert findings and all(one.confidence not in ("high", "proved") for one in findings)


def test_what_cannot_be_planted_is_no_crash() -> None:
    def see(question: Question, views: Any) -> Any:
        raise ValueError("read on other lengths")

    question = packed()
    wrong = computed(question, {"Y": by(1.7)})
    with pytest.warns(match.SearchFailed, match="read on other lengths"):
        work = match.Stage(question, wrong, "forward", np.inf)
        work.read = [Bug("wrong-keys", see=see)]
        found = work.verdict()
    assert found is not None and not found.sound


def test_rows_that_are_stored_elsewhere_are_no_offsets() -> None:
    """A few rows in the place of others; offsets shift whole sequences."""
    question = packed(dim=32)
    answers = computed(question)
    for stop in np.cumsum(question.lengths_k):
        answers["dk"][stop - 1] = answers["dk"][stop - 20]
    found = first(diagnose(question, answers))
    assert found.bug == "unknown"


@pytest.mark.parametrize(("factor", "text"), [(1.0018, "by 1.0018"), (2.0, "by 2 (2)")])
def test_a_factor_near_1_is_not_called_1(factor: float, text: str) -> None:
    assert text in of_diff({"Y": by(factor)}, "group3")[0].title


def test_a_coarse_row_sum_is_no_mass_of_another_row() -> None:
    question = packed((50, 90, 70), heads=(2, 1))
    rng = np.random.default_rng(0)
    sums = (1 + 2.0**-9 * rng.uniform(-1, 1, (2, 210))).astype(np.float32)
    answers = only(computed(question), "out", "lse")
    answers = {"out": answers["out"] / sums.T[..., None], "lse": answers["lse"] + np.log(sums)}
    assert "denominator" not in names(diagnose(question, answers))


# ---- what a fifth set showed -------------------------------------------------------------------


def test_a_sequence_without_keys_has_no_nearest_score() -> None:
    """With a sink its rows have a sum and an lse."""
    question = packed(lengths_k=(20, 0, 46), causal=False, sinks=np.zeros(4, FLOAT32))
    answers = only(computed(question), "out", "lse")
    for view in views_of(question):
        for head in view.heads:
            scores = question.q[view.rows, head] @ question.k[view.keys, view.head_kv].T
            m = question.scale * scores.max(axis=1, initial=-99)
            answers["lse"][head, view.rows] = m + np.exp(answers["lse"][head, view.rows] - m)
    assert first(diagnose(question, answers)).where == "forward: lse"


def as_if_contiguous(x: Array) -> Array:
    base = x if x.base is None else x.base
    return base.reshape(-1)[: x.size].reshape(x.shape)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("strided", "the strides of k are ignored, as if they were contiguous"),
        ("edges", "rows of out past the last sequence must be 0, and are not"),
    ],
)
def test_strides_and_rows_past_the_end(case: str, text: str) -> None:
    right = candidate(plain.RIGHT, "forward")

    def forward(q: Array, k: Array, v: Array, offsets: Array, **options: Any) -> Any:
        k = as_if_contiguous(k) if case == "strided" else k
        out, lse = right.forward(q, k, v, offsets, **options)
        out[offsets[-1] if case == "edges" else len(out) :] = 0.5
        return out, lse

    (found,) = explain_failures(replace(right, forward=forward), [CASES[case]]).findings
    assert (found.title, found.confidence) == (text, "high")


def test_rows_past_the_end_of_a_file(tmp_path: Path) -> None:
    question = packed((12, 10, 8))
    offsets = np.array([0, 12, 22])
    question = replace(question, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    answers = computed(question)
    assert not explained(tmp_path / "a.npz", question, answers).findings
    answers["out"][25:] = 3.0
    found = first(explained(tmp_path / "a.npz", question, answers))
    assert found.title == "rows of out past the last sequence must be 0, and are not"


def test_the_finest_numbers_are_believed_first() -> None:
    wrongs = {"Y": by(1.3)}, {"lse": by(1.44269504)}
    scaled, in_base_2 = (candidate(wrong(hooks, "forward"), "forward") for hooks in wrongs)

    def forward(q: Array, *others: Any, **options: Any) -> Any:
        taken = scaled if q.dtype == np.float64 else in_base_2
        return taken.forward(q, *others, **options)

    cases = [CASES[name] for name in ("edges-causal", "group3", "two-kv-heads", "window")]
    found = explain_failures(replace(scaled, forward=forward), cases).findings
    assert [one.bug for one in found[:2]] == ["score-scale", "lse-base-2"]
    assert [one.confidence for one in found[:2]] == ["high", "low"]


def test_rows_behind_those_that_are_judged() -> None:
    question = packed((291, 300, 49), heads=(1, 1), dim=128, causal=False)
    assert of_all(question, computed(question), "A", []) == []
    cut = replace(question, k=question.k[np.arange(640) % 256])
    found = of_all(question, only(computed(cut), "out", "lse"), "A", [])
    assert found[0].title == "rows of out, lse are wrong, from row 0 of out on"
    assert "offsets in memory" in found[0].look_at
    answers = computed(question)
    answers["out"][500:] *= 1.1
    (one,) = of_all(question, only(answers, "out", "lse"), "A", [])
    assert one.title == "rows of out are wrong, from row 500 of out on"


# ---- what hides in a few sequences --------------------------------------------------------------


def test_nan_of_some_sequences_hides_nothing_in_the_others() -> None:
    """Queries before the first key have an lse of -inf; aligned otherwise they see keys, and
    P = exp(S + inf) is NaN."""
    question = packed((20, 37, 9, 48), lengths_k=(41, 50, 16, 33))
    found = computed(question, seen(lambda c: c.j <= c.i), "backward")
    rows = {of: question.sequence_of(of) == 3 for of in "qk"}
    for name, of in {"dq": "q", "dk": "k", "dv": "k"}.items():
        found[name][rows[of]] = np.nan
    finding = first(diagnose(question, found))
    assert finding.bug == "causal-alignment"


def test_a_copy_of_another_result_is_told() -> None:
    question = packed((20, 37))
    found = computed(question)
    finding = first(diagnose(question, found | {"dk": found["dv"]}))
    assert finding.title == "dk: a copy of dv" and finding.confidence == "proved"


def test_sinks_of_sequences_without_keys_are_asked_for() -> None:
    sinks = np.array([0.3, -0.4, 0.1, 0.7])
    question = packed((20, 7, 9), FLOAT64, lengths_k=(20, 0, 9), sinks=sinks)
    found = computed(question)
    found["lse"][:, 20:27] = -np.inf
    assert "sequences without keys" in first(diagnose(question, only(found, "out", "lse"))).title


def test_what_cancels_in_second_order_is_no_bug() -> None:
    """With one key P' = P (E - e) is 0, or what rounding leaves of it."""
    question = packed((20, 1, 9), FLOAT64, moved=True)
    found = plain.answers(wrong({}, *STAGES), question)
    found["gv"][20] += 1e-17
    assert not diagnose(question, found).findings


def test_a_nan_of_rows_without_keys_is_followed_to_the_keys_that_it_reaches() -> None:
    """A mask that multiplies: 0 times exp(-inf + inf) is in dv of keys that other rows see."""
    question = packed((40, 30), lengths_k=(16, 30), heads=(2, 1), causal=True)
    answers = computed(question)
    answers["dv"][3:16] = np.nan
    found = first(diagnose(question, answers))
    assert found.bug == "dead-rows" and "gets into dv" in found.title
    answers["dv"][20] = np.nan  # of a sequence that has none of them
    assert first(diagnose(question, answers)).bug != "dead-rows"


def test_a_bug_of_some_rows_is_told_with_the_rows() -> None:
    question = packed((40, 30), heads=(2, 1), causal=True)
    lanes = np.arange(70) % 40 % 4 == 3
    answers, wrongly = computed(question), computed(question, window(right=1))
    answers["out"] = np.where(lanes[:, None, None], wrongly["out"], answers["out"])
    found = first(diagnose(question, answers))
    assert found.confidence == "medium" and "the rows with i % 4 = 3" in found.title


def test_an_operand_of_one_product_and_parts_in_fewer_bits_are_named() -> None:
    question = packed((50, 30), FLOAT32, heads=(2, 1))
    answers = computed(question)
    answers["dk"] = computed(question, rounded(BFLOAT16, "dS"))["dk"]
    assert "dS of dS^T Q, there alone, in bfloat16" in told(diagnose(question, answers))
