"""softcap, sinks and seqused_k: bugs of them are named, and right implementations not accused."""

from pathlib import Path

import numpy as np
import pytest

from rawattn.check.cases import standard
from rawattn.check.diagnose.engine.attention import solve
from rawattn.check.diagnose.files.npz import dump
from rawattn.check.diagnose.files.pairs import load_two
from rawattn.check.diagnose.judge.cut import cut
from rawattn.check.diagnose.judge.diagnosis import diagnose
from rawattn.check.diagnose.judge.failures import question_of, reference_answers, small
from tests.diagnose.called import call
from tests.diagnose.problems import FLOAT64, packed

CASES = {case.name: case for case in standard("small") if case.sinks or case.softcap}


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


def test_a_part_of_a_problem_keeps_its_options() -> None:
    rng, lengths = np.random.default_rng(0), (900, 30, 40, 900)
    options = {"sinks": rng.standard_normal(4), "seqused_k": np.array(lengths) - 7, "softcap": 2.0}
    question = packed(lengths, FLOAT64, causal=False, **options)
    part, answers, said = cut(question, {"out": question.q})
    assert part.lengths_k == (23, 33) and "1 to 2" in said
    assert np.array_equal(part.sinks, question.sinks) and answers["out"].shape[0] == 70
    assert not diagnose(question, solve(question, "forward")).findings


@pytest.mark.parametrize("option", ["softcap", "sinks", "seqused_k"])
def test_files_of_other_options_are_apart(option: str, tmp_path: Path) -> None:
    others = {"softcap": (2.0, 1.0), "sinks": (np.ones(4), np.zeros(4)), "seqused_k": ([9], [8])}
    for name, value in zip("ab", others[option], strict=True):
        question = packed(
            (12,), FLOAT64, **{option: np.array(value) if option != "softcap" else value}
        )
        dump(tmp_path / f"{name}.npz", question, reference_answers(question))
    pair = load_two(tmp_path / "a.npz", tmp_path / "b.npz")
    assert any(text.startswith(f"{option} ") for text in pair.apart), pair.apart


# ---- the commands -----------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["softcap", "sinks", "seqused_k"])
def test_diff_names_what_is_forgotten(option: str, candidate) -> None:
    flag = {"softcap": ("--softcap", 1.5), "sinks": ("--sinks",), "seqused_k": ("--seqused",)}
    arguments = ("--framework", "numpy", "--filter", "edges-causal", *flag[option])
    right = call("diff", "--candidate", candidate(), *arguments)
    assert right.exit_code == 0, right.output
    place = candidate("    out, lse =", f"    mask.pop('{option}', None)\n    out, lse =")
    result = call("diff", "--candidate", place, *arguments)
    assert result.exit_code == 1
    assert (
        f"{option.partition('_')[0]}-{'ignored' if '_' in option else 'dropped'}" in result.output
    )
    for command in ("--filter edges-causal", "rawattn-check dump edges-causal-bfloat16"):
        assert command in result.output
    said = result.output.partition("= again: ")[2]
    assert said.count(" ".join(map(str, flag[option]))) == 2, "the commands have the same options"


def test_what_is_dumped_is_explained_as_right(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    options = ("--softcap", 2, "--sinks", "--seqused", "--causal", "--dtype", "float64")
    result = call("dump", "--lengths", "20,31,9", "--heads-kv", 2, *options, "--out", file)
    assert result.exit_code == 0, result.output
    assert "dsinks" in result.output and "gsinks" in result.output
    assert call("explain", file).exit_code == 0
    arrays = dict(np.load(file))
    arrays["dsinks"] = arrays["dsinks"] * 2
    np.savez(file, **arrays)
    result = call("explain", file)
    assert result.exit_code == 1 and "sinks-gradient" in result.output
