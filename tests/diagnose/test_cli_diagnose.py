"""explain, dump and harness, and the diagnosis that diff begins with. Long by the commands."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawattn import api, api_second, api_sparse
from rawattn.check.candidate import Candidate, load
from rawattn.check.cases import standard
from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.files import npz
from rawattn.check.diagnose.findings import Diagnosis
from rawattn.check.diagnose.judge import failures
from rawattn.check.diagnose.judge.diagnosis import diagnose
from rawattn.check.diagnose.judge.failures import answers_of, question_of, reference_answers, small
from rawattn.check.diagnose.judge.proofs import finding
from rawattn.check.expected import expect
from rawattn.check.second import expect_second
from rawattn.check.sparse_cases import standard_sparse
from tests.diagnose.called import call, said
from tests.diagnose.test_diagnose_printed import MASKS

CASES = {case.name: case for case in (*standard("small"), *standard_sparse("small"))}
DENSE = ("edges-causal", "two-kv-heads", "unequal", "window-causal", "scale", "no-dlse", "strided")
OPTIONS = tuple(name for name, case in CASES.items() if case.sinks or case.softcap)
SPARSE = ("edges-open", "query-heads", "counts", "gate", "sliding-window", "scale")
SPARSE = tuple(f"sparse-{name}" for name in SPARSE)
WRONG_SCALE = ("return dq,", "return dq / q.dtype.type(q.shape[2] ** -0.5),")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How often there was a diagnosis, and of what."""
    found: list[dict[str, Any]] = []

    def counted(question: Question, answers: Answers, **options: Any) -> Diagnosis:
        found.append({"question": question, "answers": answers} | options)
        return diagnose(question, answers, **options)

    monkeypatch.setattr(failures, "diagnose", counted)
    return found


def whole(sparse: bool) -> Candidate:
    """rawattn's own functions on a CPU, every one of them."""
    names, before = ("forward", "backward", "double_backward", "jvp"), "sparse_" * sparse
    place = SimpleNamespace(**vars(api) | vars(api_second) | vars(api_sparse))
    named = {name: getattr(place, before + name) for name in names}
    named |= {} if sparse else {"preprocess": api.backward_preprocess}
    named = {name: partial(function, backend="reference") for name, function in named.items()}
    return Candidate("own", "numpy", **named)


# ---- questions and answers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE + SPARSE)
def test_a_question_is_asked_as_its_case_is(name: str) -> None:
    judged = whole(name in SPARSE)
    found = answers_of(judged, question_of(CASES[name]))
    results = judged.run(expect_second(CASES[name]))
    assert found.keys() == results.keys() - {"symmetry", "repeat"}
    for tensor, array in found.items():
        assert array.dtype == results[tensor].dtype
        assert np.array_equal(array, results[tensor], equal_nan=True), tensor


@pytest.mark.parametrize("name", DENSE + OPTIONS + SPARSE)
def test_the_engine_is_the_reference(name: str) -> None:
    """Of every stage, in float64."""
    question = question_of(replace(small(CASES[name]), dtype="float64"), clean=True)
    wanted = answers_of(whole(name in SPARSE), question)
    found = reference_answers(question)
    assert found.keys() - {"delta"} == wanted.keys() - {"delta"}
    for tensor, x in wanted.items():
        np.testing.assert_allclose(found[tensor], x, 1e-11, 1e-12, err_msg=tensor)


@pytest.mark.parametrize("name", ["sparse-counts", "sparse-gate", "sparse-query-heads"])
def test_a_clean_question_has_no_traps(name: str) -> None:
    case = small(CASES[name])
    clean, trapped = question_of(case, clean=True), question_of(case)
    arrays = {n: a for n, a in vars(clean).items() if getattr(a, "dtype", None) is not None}
    assert not any(np.isnan(a.astype(np.float64)).any() for a in arrays.values())
    assert trapped.block_indices.min() < -1
    blocks = np.array([-(-n // case.block_size) for n in case.lengths_k])
    most = np.repeat(blocks, case.lengths_q)[:, None, None]
    there = clean.block_indices >= 0
    assert ((clean.block_indices == -1) | (there & (clean.block_indices <= most))).all()
    assert there.any() and not there.all()
    for stage in ("forward", "backward"):
        one, other = solve(clean, stage), solve(trapped, stage)
        assert all(np.array_equal(one[n], other[n]) for n in one if n != "dblock_scale")


# ---- dump ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["edges-causal", "unequal", "strided", *SPARSE[2:5]])
def test_dump_writes_a_case(name: str, tmp_path: Path) -> None:
    result = call("dump", name, "--out", tmp_path / "a.npz")
    assert result.exit_code == 0 and "results of the reference: out, lse" in result.output
    saved = npz.read(tmp_path / "a.npz")
    question, answers, expected = saved.question, saved.answers, expect(CASES[name])
    assert question is not None and question.out is None
    for field in ("q", "k", "dout", "dlse", "tv", "cu_seqlens_q"):
        wanted = getattr(expected.tensors, field)
        assert np.array_equal(getattr(question, field), wanted, equal_nan=True)
    for tensor, target in expected.targets.items():
        if tensor in answers and tensor != "delta":  # that is of the unrounded out
            assert target.judge(answers[tensor]).ok
    assert {"out", "lse", "dq", "dk", "dv"} <= answers.keys()
    assert call("explain", tmp_path / "a.npz").exit_code == 0, "and it is right"


def test_dump_of_random_problems(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    sizes = ("--heads", 6, "--heads-kv", 2, "--head-dim", 8, "--head-dim-v", 5, "--causal")
    lengths = ("--lengths", "[7, 0, 19]", "--lengths-k", "9,4,30", "--window", "-1,3")
    more = ("--dtype", "float64", "--softmax-scale", 0.5, "--seed", 3)
    assert call("dump", *lengths, *sizes, *more, "--out", file).exit_code == 0
    saved = npz.read(file)
    question, answers = saved.question, saved.answers
    assert question is not None and question.lengths_k == (9, 4, 30)
    assert question.q.shape == (26, 6, 8) and question.v.shape == (43, 2, 5)
    assert question.causal and question.window == (-1, 3) and question.scale == 0.5
    assert question.dtype == np.float64 and answers["dv"].shape == (43, 2, 5)
    first = question.q
    call("dump", *lengths, *sizes, *more[:4], "--out", file)
    assert not np.array_equal(npz.read(file).question.q, first), "another seed"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dump edges --lengths 3", "say a CASE"),
        ("dump no-such", "no standard case is called 'no-such'"),
        ("dump --lengths 3,x", "is no list of integers such as 448,1280"),
        ("dump --lengths 3 --heads 4 --heads-kv 3", "no multiple of 3 key/value"),
        ("dump --lengths 3 --lengths-k 3,4", "must be as many"),
        ("dump --lengths 3 --window 3", "--window must be two integers"),
        ("dump edges --candidate nowhere.py:f", "no such file"),
        ("explain", "one or two .npz files, or --log FILE"),
        ("explain --class window", "'window' is not one of "),
        ("explain --class", "requires an argument"),
        (f"explain --class dead-rows --log {__file__}", "or --class NAME"),
    ],
)
def test_what_is_refused(line: str, message: str) -> None:
    result = call(*line.split())
    assert result.exit_code == 2 and message in said(result)


# ---- explain ------------------------------------------------------------------------------------


def test_explain_of_different_problems(tmp_path: Path) -> None:
    """It is said, and each side is judged by what it was asked."""
    found = tmp_path / "found.json"
    for seed, factor in ((0, 1), (1, 4)):
        question = replace(question_of(small(CASES["group3"]), seed), out=None, lse=None)
        answers = reference_answers(question)
        answers = {"out": answers["out"], "dq": factor * answers["dq"]}
        npz.dump(tmp_path / f"{seed}.npz", question, answers)
    result = call("explain", tmp_path / "0.npz", tmp_path / "1.npz", "--json", found)
    assert result.exit_code == 1
    told = [(f["side"], f["bug"]) for f in json.loads(found.read_text())["findings"]]
    assert told == [("both", "vacuous"), ("B", "output-scale")], result.output
    parts = ("both: the two sides had different inputs", "q differs by up to", "A: no fault is")
    assert all(part in said(result) for part in parts)


def test_what_explain_does_not_read_is_said(tmp_path: Path) -> None:
    q = np.random.default_rng(0).standard_normal((2, 4, 24, 8))
    np.savez(tmp_path / "a.npz", query=q, o=q, qkv=q)
    result = call("explain", tmp_path / "a.npz")
    assert result.exit_code == 2 and "qkv is not read" in said(result)


@pytest.mark.parametrize(
    ("entries", "files", "message"),
    [
        ("out dq dk", 1, "there is no q, k and v"),
        ("out dq dk", 2, "there is no q, k and v"),
        ("q k v cu_seqlens_q cu_seqlens_k", 1, "there are inputs, but no results"),
        ("q k v out", 3, "one or two .npz files, or --log FILE"),
    ],
)
def test_explain_refuses(entries: str, files: int, message: str, tmp_path: Path) -> None:
    question = question_of(small(CASES["group3"]))
    arrays = vars(question) | reference_answers(question)
    np.savez(tmp_path / "a.npz", **{name: arrays[name] for name in entries.split()})
    result = call("explain", *[tmp_path / "a.npz"] * files)
    assert result.exit_code == 2 and message in said(result)


def test_explain_a_log(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text(MASKS)
    result = call("explain", "--log", file)
    assert result.exit_code == 1 and "cuda: no fault is found" in result.output


# ---- harness ------------------------------------------------------------------------------------


def test_harness(tmp_path: Path) -> None:
    file = tmp_path / "test_mine.py"
    file.write_text("def careless(x, ref):\n    return True\n")
    result = call("harness", f"{file}:careless", "--framework", "numpy")
    assert result.exit_code == 1 and "careless: " in result.output
    assert call("harness", f"{file}:nothing").exit_code == 2


# ---- what diff begins with ----------------------------------------------------------------------


def test_failures_of_one_kind_are_one(candidate: Callable[..., str], calls: list[Any]) -> None:
    judged = load(candidate(*WRONG_SCALE), "numpy")
    cases = [CASES[name] for name in ("edges", "edges-causal", "long", "dim-32", "many")]
    found = failures.explain_failures(judged, cases)
    assert len(calls) == 2, "a causal one and one that is not; that of head_dim 32 is the same bug"
    assert found.title == "attend against reference"
    (finding,) = found.findings
    assert finding.side == "candidate" and finding.bug == "output-scale"
    assert {"dim-32-float32", "long-float32", "edges-causal-bfloat16"} < {*finding.cases}
    assert all(one["call"](one["question"]).keys() == one["answers"].keys() for one in calls)


def test_a_form_is_what_most_kinds_of_cases_say() -> None:
    """A tail of 8 looks like one of 16 in some; more heads do not make it truer."""

    def kind(name: str, *forms: str) -> failures.Kind:
        said = finding("candidate", "tail-tile-dropped", "backward pass: dk", "high", ["fits"])
        said = replace(said, title=f"tail: {forms[0]}", form=forms[0])
        one = replace(said, forms={form: {} for form in forms})
        return [CASES[name]], Diagnosis("candidate", (one,))

    both = kind("edges", "of 16", "of 8"), kind("group8", "of 8", "of 16")
    found = [*both, kind("unequal", "of 16")]
    (one,) = failures._joined("", found).findings
    assert (one.title, one.form) == ("tail: of 16", "of 16")


THROWS = ("    out, lse =", "    raise ArithmeticError('too hard')\n    out, lse =")


def test_what_it_raises(candidate: Callable[..., str]) -> None:
    """Once for all cases, and on its own side."""
    throws = replace(load(candidate(*THROWS, file="other.py"), "numpy"), backward=None)
    (finding,) = failures.explain_failures(throws, [CASES["edges-causal"], CASES["edges"]]).findings
    assert finding.title == "it raises ArithmeticError" and "too hard" in finding.evidence[0]
    judged = load(candidate(*WRONG_SCALE), "numpy")
    found = failures.explain_failures(judged, [CASES["scale"]], throws, against="other").findings
    titles = {"other": "it raises ArithmeticError", "candidate": "dS of dq is multiplied by 4"}
    assert {one.side for one in found} == {*titles}
    assert all(one.title.startswith(titles[one.side]) for one in found)


LEAK = """
    zero = (cu_seqlens[-1] < len(q)) * 0.0 * q.astype("float64").sum()
    return (out + zero.astype(q.dtype), lse) if return_lse else out
"""


def test_what_only_traps_show(candidate: Callable[..., str], calls: list[Any]) -> None:
    """NaN past the end spreads; small problems have none."""
    place = candidate("    return (out, lse) if return_lse else out\n", LEAK)
    judged = replace(load(place, "numpy"), backward=None)
    found = failures.explain_failure({failures.SIDE: judged}, CASES["edges"])
    assert len(calls) == 1
    (said,) = [finding.title for finding in found.findings]
    assert said.startswith("NaN in rows of") and "that nobody sees gets into out" in said


def test_a_failure_that_cannot_be_seen_again() -> None:
    sides = {failures.SIDE: whole(sparse=False)}
    (finding,) = failures.explain_failure(sides, CASES["scale"]).findings
    assert finding.bug == "unknown" and "a small problem of its kind" in finding.evidence[0]


# ---- softcap, sinks and seqused_k ----------------------------------------------------------------


def test_a_small_problem_has_what_the_case_has_without_its_nan() -> None:
    case = CASES["softcap-sinks-seqused"]
    alike = small(case)
    assert (alike.softcap, alike.sinks) == (case.softcap, True)
    assert any(used < n for used, n in zip(alike.seqused_k, alike.lengths_k, strict=True))
    question = question_of(alike, clean=True)
    assert all(np.isfinite(x).all() for x in (question.k, question.v, question.tk, question.tv))
    assert question.lengths_k == alike.seqused_k
    own_keys = question_of(case).k
    assert np.isnan(own_keys[case.trapped("k")]).all()
    assert (question.sequence_of("k") >= 0).sum() == sum(alike.lengths_k)


@pytest.mark.parametrize("option", ["softcap", "sinks", "seqused_k"])
def test_diff_names_what_is_forgotten(option: str, candidate) -> None:
    flag = {"softcap": ("--softcap", 1.5), "sinks": ("--sinks",), "seqused_k": ("--seqused",)}
    arguments = ("--framework", "numpy", "--filter", "edges-causal", *flag[option])
    right = call("diff", "--candidate", candidate(), *arguments)
    assert right.exit_code == 0, right.output
    place = candidate("    out, lse =", f"    mask.pop('{option}', None)\n    out, lse =")
    result = call("diff", "--candidate", place, *arguments)
    assert result.exit_code == 1
    bug = {"softcap": "softcap-dropped", "sinks": "sinks-dropped", "seqused_k": "seqused-ignored"}
    for part in (bug[option], "--filter edges-causal", "rawattn-check dump edges-causal-bfloat16"):
        assert part in result.output
    again = result.output.partition("= again: ")[2]
    assert again.count(" ".join(map(str, flag[option]))) == 2, "the commands have the same options"


@pytest.mark.parametrize("how", [("--lengths", "20,31,9"), ("--identify", "--head-dim", 16)])
def test_what_is_dumped_is_explained_as_right(tmp_path: Path, how: tuple[Any, ...]) -> None:
    """The gradients of sinks are sums over all sequences, also where few are judged."""
    file = tmp_path / "a.npz"
    options = ("--softcap", 2, "--sinks", "--seqused", "--causal", "--dtype", "float64")
    result = call("dump", *how, "--heads-kv", 2, *options, "--out", file)
    assert result.exit_code == 0, result.output
    assert "dsinks" in result.output and "gsinks" in result.output
    assert call("explain", file).exit_code == 0
    arrays = dict(np.load(file))
    arrays["dsinks"] = -arrays["dsinks"]
    np.savez(file, **arrays)
    result = call("explain", file)
    assert result.exit_code == 1 and "sinks-gradient" in result.output


def test_rows_that_cancel_and_files_of_a_forward_pass_are_right(tmp_path: Path) -> None:
    """Nobody has a dq of 16 bits that is nearer than the rounding of what it sums up; and what a
    file lacks is not compared."""
    file = tmp_path / "a.npz"
    heads = ("--heads", 6, "--heads-kv", 2, "--head-dim", 16, "--seed", 4)
    call("dump", "--identify", "--causal", *heads, "--dtype", "bfloat16", "--out", file)
    arrays = dict(np.load(file))
    for names in ((), ("dout", "dq", "dk", "dv", "delta")):
        np.savez(file, **{name: x for name, x in arrays.items() if name not in names})
        result = call("explain", file)
        assert result.exit_code == 0, result.output
