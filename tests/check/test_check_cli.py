"""rawattn-check: right functions leave with 0, wrong ones with 1, and the report says where.

Long by the list of faults that must be found.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner, Result

from rawattn import api, api_second, env, jit
from rawattn.build import ARCHS, NO_DIRECTION, Build
from rawattn.check import cli, compiled, machine, outcome, run
from rawattn.check.cases import DTYPES, standard
from rawattn.variants import TABLE, serves

RIGHT = """
import numpy as np
from rawattn.reference import dense, second

def mask(causal, window):
    return (window[0], 0) if causal else window

def typed(g, q):
    wide = np.float64 if q.dtype == np.float64 else np.float32
    return g.astype(q.dtype if g.ndim == 3 else wide)

def attend(q, k, v, cu_seqlens, *, cu_seqlens_k=None, causal=False, window=(-1, -1),
           softmax_scale=None, softcap=None, sinks=None, seqused_k=None, return_lse=False,
           out=None):
    result, lse = dense.forward(q, k, v, cu_seqlens, cu_seqlens_k,
                                softcap=softcap, sinks=sinks, seqused_k=seqused_k,
                                window=mask(causal, window), softmax_scale=softmax_scale)
    out[...] = result
    lse = typed(lse, q)
    return (out, lse) if return_lse else out

def attend_backward(dout, q, k, v, out, lse, cu_seqlens, *, cu_seqlens_k=None, causal=False,
                    window=(-1, -1), softmax_scale=None, softcap=None, sinks=None,
                    seqused_k=None, dlse=None):
    grads = dense.backward(dout, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, dlse=dlse,
                           softcap=softcap, sinks=sinks, seqused_k=seqused_k,
                           window=mask(causal, window), softmax_scale=softmax_scale)
    return tuple(typed(g, q) for g in grads)

def attend_double_backward(ddq, ddk, ddv, dout, q, k, v, out, lse, cu_seqlens, *,
                           cu_seqlens_k=None, causal=False, window=(-1, -1), softmax_scale=None,
                           softcap=None, sinks=None, ddsinks=None, seqused_k=None,
                           dlse=None, ddlse=None):
    ddo, ddl, *grads = second.double_backward(
        ddq, ddk, ddv, dout, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, dlse=dlse,
        window=mask(causal, window), softmax_scale=softmax_scale,
        softcap=softcap, sinks=sinks, ddsinks=ddsinks, seqused_k=seqused_k)
    ddlse[...] = ddl
    return ddo.astype(q.dtype), ddlse, *(typed(g, q) for g in grads)

def attend_jvp(q, k, v, tq, tk, tv, cu_seqlens, *, cu_seqlens_k=None, causal=False,
               window=(-1, -1), softmax_scale=None, softcap=None, sinks=None, tsinks=None,
               seqused_k=None, tout=None):
    out, tan, *rows = second.jvp(q, k, v, tq, tk, tv, cu_seqlens, cu_seqlens_k,
                                 window=mask(causal, window), softmax_scale=softmax_scale,
                                 softcap=softcap, sinks=sinks, tsinks=tsinks, seqused_k=seqused_k)
    tout[...] = tan
    return out.astype(q.dtype), tout, *(typed(x, q) for x in rows)
"""
BEYOND = "ddout ddlse gq gk gv jvp-out tout jvp-lse tlse"
# name: (text of RIGHT, what stands there in its place, tensors that must fail)
FAULTS = {
    "scaled": ("out[...] = result", "out[...] = 1.05 * result", "out"),
    "zeroed": ("out[...] = result", "out[...] = 0", "out"),
    "nan": ("out[...] = result", "out[...] = result; out[0] = np.nan", "out"),
    "heads swapped": ("out[...] = result", "out[...] = result[:, ::-1]", "out"),
    "transposed": ("out[...] = result", "out = result.swapaxes(0, 1).astype(q.dtype)", "out"),
    "writes to its input": ("out[...] = result", "q[...] = 0", "-"),
    "not written": ("out[...] = result", "out[:-4] = result[:-4]", "out"),
    "float64 result": ("out[...] = result", "out = result", "out"),
    "base of the logarithm": ("lse = typed(lse", "lse = typed(lse / np.log(2)", "lse"),
    "scale forgotten": ("softmax_scale)\n    out", "1.0)\n    out", "out lse"),
    "top-left causal": (
        "return (window[0], 0) if",
        "return (window[0], 1) if",
        f"out lse dq dk dv {BEYOND} gsinks",
    ),
    "leaks to the neighbour": (
        "    result, lse = dense",
        "    cu_seqlens, cu_seqlens_k = (np.array([0, len(x)]) for x in (q, k))\n"
        "    result, lse = dense",
        "out lse",
    ),
    "dlse forgotten": ("dlse=dlse", "dlse=None", "dq dk dsinks"),
    "gradients zero": ("typed(g, q) for", "0 * typed(g, q) for", "dq dk dv dsinks"),
    "dk and dq in turn": (
        "return tuple(typed",
        "grads = grads[1::-1] + grads[2:]\n    return tuple(typed",
        "dq dk",
    ),
    "gq, gk and gv zero": (
        "(typed(g, q) for g in grads)\n\ndef attend_jvp",
        "(0 * typed(g, q) for g in grads)\n\ndef attend_jvp",
        "gq gk gv gsinks",
    ),
    "gk a bit large": ("    ddlse[...]", "    grads[1] *= 1.3\n    ddlse[...]", "gk symmetry"),
    "ddlse not written": ("    ddlse[...] = ddl", "    pass", "ddlse"),
    "ddlse of the other sign": ("ddlse[...] = ddl", "ddlse[...] = -ddl", "ddlse"),
    "out as ddout": ("return ddo.astype", "return out.astype", "ddout"),
    "ddv forgotten": (
        "    ddq, ddk, ddv, dout",
        "    ddq, ddk, None, dout",
        "ddout gq gk gsinks symmetry",
    ),
    "dlse forgotten at second order": (
        "dlse=dlse,\n        w",
        "dlse=None,\n        w",
        "gq gk gsinks",
    ),
    "tk forgotten": ("second.jvp(q, k, v, tq, tk", "second.jvp(q, k, v, tq, None", "tout tlse"),
    "None is not zero": (
        "    out, tan",
        "    tk = k if tk is None else tk\n    out, tan",
        "tout tlse",
    ),
    "out and tout in turn": (
        "return out.astype(q.dtype), tout",
        "return tout, out.astype(q.dtype)",
        "jvp-out tout",
    ),
    "softcap forgotten": ("softcap=softcap, sinks", "softcap=None, sinks", "out lse"),
    "softcap forgotten in backward": (
        "dlse=dlse,\n                           softcap=softcap",
        "dlse=dlse,\n                           softcap=None",
        "dq dk dv",
    ),
    "sinks forgotten": ("sinks=sinks, seqused", "sinks=None, seqused", "out lse"),
    "dsinks of the other sign": (
        "return tuple(typed(g, q) for g in grads)",
        "return tuple(typed(g if g.ndim == 3 else -g, q) for g in grads)",
        "dsinks",
    ),
    "no gradient of sinks": ("for g in grads)", "for g in grads[:3])", "-"),
    "seqused_k ignored": ("seqused_k=seqused_k", "seqused_k=None", "out lse"),
}


def names(tensors: str) -> set[str]:
    """Tensors by their names, where jvp-out stands for "jvp out"."""
    return {name.replace("jvp-", "jvp ") for name in tensors.split()}


@pytest.fixture
def check() -> Callable[..., Result]:
    """Calls rawattn-check with these arguments."""
    return lambda *arguments: CliRunner().invoke(cli.main, [str(a) for a in arguments])


@pytest.fixture
def candidate(tmp_path: Path) -> Callable[..., str]:
    """Writes the right functions, with a text changed, to a file; gives FILE.py:NAME."""

    def write(old: str = "", new: str = "", file: str = "mine.py") -> str:
        assert old in RIGHT
        (tmp_path / file).write_text(RIGHT.replace(old, new, 1) if old else RIGHT)
        return f"{tmp_path / file}:attend"

    return write


def failed(file: Path) -> set[str]:
    rows = json.loads(file.read_text())["rows"]
    return {row["tensor"] for row in rows if row["verdict"] == "FAIL"}


def test_diff_passes_a_right_function_on_every_case(check, candidate, tmp_path) -> None:
    file = tmp_path / "found.json"
    result = check("diff", "--candidate", candidate(), "--framework", "numpy", "--json", file)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["ok"] and found["versions"]["numpy"] == np.__version__
    assert {row["case"] for row in found["rows"]} == {str(case) for case in standard("small")}
    tensors = names(f"out lse dq dk dv dsinks {BEYOND} gsinks symmetry")
    assert {row["tensor"] for row in found["rows"]} == tensors
    assert len(result.stdout.splitlines()) <= 4 and result.stdout.splitlines()[-1][:3] == "OK:"
    result = check("diff", "--candidate", candidate(), "--framework", "numpy", "--full")
    for heading in ("case", "backend", "tensor", "error", "allowed", "verdict"):
        assert heading in result.output
    assert "all zero by definition" in result.output, "zeros that are due are said to be so"


@pytest.mark.parametrize("fault", FAULTS)
def test_diff_catches(fault: str, check, candidate, tmp_path) -> None:
    old, new, tensors = FAULTS[fault]
    file = tmp_path / "found.json"
    place = candidate(old, new)
    arguments = ("--framework", "numpy", "--quick", "--no-diagnosis", "--json", file)
    result = check("diff", "--candidate", place, *arguments)
    assert result.exit_code == 1, result.output
    assert failed(file) == names(tensors), "these tensors and no other"
    found = json.loads(file.read_text())
    assert "FAIL" in result.output and not found["ok"] and "diagnosis" not in found


def test_diff_begins_with_the_diagnosis(check, candidate, tmp_path) -> None:
    file, page = tmp_path / "found.json", tmp_path / "page.html"
    place = candidate("dlse=dlse", "dlse=None")
    arguments = ("--framework", "numpy", "--filter", "edges-", "--json", file, "--html", page)
    result = check("diff", "--candidate", place, *arguments)
    assert result.exit_code == 1
    found = json.loads(file.read_text())["diagnosis"]
    bugs = {(finding["side"], finding["bug"]) for finding in found["findings"]}
    assert bugs == {("candidate", "lse-gradient-dropped")}, found["findings"]
    assert found["findings"][0]["title"] in " ".join(result.output.split())
    assert found["findings"][0]["title"].lower() in page.read_text(encoding="utf-8").lower()
    lines = result.stdout.rstrip().splitlines()
    assert lines[0].startswith("error[lse-gradient-dropped]: ") and lines[-1].startswith("FAILED: ")


def test_diff_writes_a_page_of_what_is_right(check, candidate, tmp_path) -> None:
    page = tmp_path / "page.html"
    arguments = ("--framework", "numpy", "--filter", "window-narrow", "--html", page)
    assert check("diff", "--candidate", candidate(), *arguments).exit_code == 0
    assert "Nothing is wrong" in page.read_text(encoding="utf-8")


def test_diff_shows_sequence_and_head(check, candidate) -> None:
    case = next(case for case in standard("small") if case.name == "unequal")
    assert case.lengths_q[:2] == (3, 17)
    place = candidate("out[...] = result", "out[...] = result; out[3:20, 1] *= 1.5")
    arguments = ("--framework", "numpy", "--no-diagnosis", "--filter", str(case))
    result = check("diff", "--candidate", place, *arguments)
    said = rf"worst out at \(\d+, 1, \d+\) of {case} \(sequence 1, head 1\): expected \S+, got \S+"
    plain = " ".join(result.output.split())
    assert result.exit_code == 1 and len(re.findall(said, plain)) == 1, "the worst element, once"
    result = check("diff", "--candidate", place, *arguments, "--full")
    assert result.exit_code == 1 and "error of out by sequence and head" in result.output
    assert re.search(r"^FAIL worst at \(\d+, 1, \d+\)", result.output, re.MULTILINE)
    assert "(sequence 1, head 1)" in " ".join(result.output.split())


def test_diff_says_what_a_function_raises(check, candidate) -> None:
    place = candidate("out[...] = result", "raise ArithmeticError('too hard')")
    result = check("diff", "--candidate", place, "--framework", "numpy", "--quick")
    assert result.exit_code == 1 and "ArithmeticError: too hard" in result.output


def test_diff_skips_cases_that_need_a_missing_parameter(check, candidate) -> None:
    plain = (
        "def plain(q, k, v, cu_seqlens, out):\n"
        "    return attend(q, k, v, cu_seqlens, cu_seqlens_k=cu_seqlens, out=out)\n\n"
        "def attend_backward"
    )
    file = candidate("def attend_backward", plain).rpartition(":")[0]
    arguments = ("diff", "--candidate", f"{file}:plain", "--framework", "numpy", "--filter")
    some, none = check(*arguments, "edges"), check(*arguments, "edges-causal")
    assert some.exit_code == 0 and "skipped no parameter causal" in some.output
    assert none.exit_code == 1, "nothing was judged"


def test_diff_leaves_dlse_out_where_double_backward_cannot_take_it(check, candidate) -> None:
    place = candidate("dlse=None, ddlse=None):", "ddlse=None):\n    dlse = None")
    arguments = ("--framework", "numpy", "--quick")
    result = check("diff", "--candidate", f"{place}_double_backward", *arguments)
    assert result.exit_code == 0, result.output


def test_diff_against_another_function(check, candidate) -> None:
    right, wrong = candidate(), candidate("out[...] = result", "out[...] = 2 * result", "other.py")
    arguments = ("diff", "--framework", "numpy", "--quick", "--no-diagnosis", "--candidate")
    assert check(*arguments, right, "--against", right).exit_code == 0
    result = check(*arguments, right, "--against", wrong)
    assert result.exit_code == 1 and "FAIL" in result.output
    assert check(*arguments, wrong, "--against", wrong).exit_code == 0, "equal to each other"
    alone = f"{right}_backward"
    assert check(*arguments, alone, "--against", right).exit_code == 0, "on what both give"


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the wrong function
def test_diff_against_torch(check, candidate, one_thread) -> None:
    torch = ("--against", "torch", "--no-diagnosis")
    arguments = ("diff", "--framework", "numpy", *torch, "--candidate")
    result = check(*arguments, candidate())
    assert result.exit_code == 0, result.output
    wrong = candidate("causal else", "causal and 0 else")
    assert check(*arguments, wrong, "--filter", "edges-causal").exit_code == 1


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("attend_jvp", "jvp-out jvp-lse tout tlse"),
        ("attend_double_backward", "ddout ddlse gq gk gv gsinks symmetry"),
        ("attend_backward", "dq dk dv dsinks"),
        ("jvp", "jvp-out jvp-lse tout tlse"),
        ("double_backward", "ddout ddlse gq gk gv gsinks symmetry"),
        ("none", f"dq dk dv dsinks {BEYOND} gsinks symmetry"),
    ],
)
def test_diff_judges_what_there_is(name: str, tensors: str, check, candidate, tmp_path) -> None:
    place = Path(candidate().rpartition(":")[0])
    text = place.read_text().replace(f"def attend_{name}(", f"def {name}(")
    if name == "none":  # no function of the very name, but three that begin with it
        text = text.replace("attend_", "none_")
    place.write_text(text)
    file = tmp_path / "found.json"
    arguments = ("--framework", "numpy", "--quick", "--json", file)
    result = check("diff", "--candidate", f"{place}:{name}", *arguments)
    assert result.exit_code == 0, result.output
    assert {row["tensor"] for row in json.loads(file.read_text())["rows"]} == names(tensors)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("no_colon.py", "FILE.py:NAME"),
        ("missing.py:attend", "no such file"),
        ("{file}:other", "no function 'other'"),
        ("{broken}:attend", "SyntaxError"),
    ],
)
def test_diff_refuses_places(place: str, message: str, check, candidate) -> None:
    files = {"file": candidate(), "broken": candidate("def mask(", "def mask((", "broken.py")}
    files = {name: file.rpartition(":")[0] for name, file in files.items()}
    result = check("diff", "--candidate", place.format(**files))
    assert result.exit_code == 2 and message in result.output


def test_a_filter_that_matches_nothing_is_an_error(check, candidate) -> None:
    for arguments in (("run",), (), ("compile",), ("diff", "--candidate", candidate())):
        result = check(*arguments, "--filter", "no such thing")
        assert result.exit_code == 2 and "no such thing" in result.output


def test_options_before_a_subcommand_are_an_error(check) -> None:
    result = check("--quick", "variants")
    assert result.exit_code == 2 and "behind its name" in result.output


def test_run_judges_and_writes_json(check, tmp_path) -> None:
    """One case with the kernels that are here, in processes as the whole run has them."""
    file = tmp_path / "found.json"
    result = check("run", "--filter", "window-narrow", "--json", file)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    tensors = {row["tensor"] for row in rows}
    assert tensors == names("out lse delta dq dk dv jvp-out jvp-lse tout tlse")
    assert all(row["verdict"] == "pass" and row["error"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("broken", "tensors"),
    [
        ("forward", "out lse"),
        ("backward_preprocess", "delta"),
        ("backward", "dq dk dv"),
        ("jvp", "jvp-out jvp-lse tout tlse"),
        ("double_backward", "ddout ddlse gq gk gv"),
    ],
)
def test_a_wrong_kernel_fails(broken: str, tensors: str, monkeypatch) -> None:
    module = api if hasattr(api, broken) else api_second
    right = getattr(module, broken)

    def wrong(*args, **kwargs):
        results = right(*args, **kwargs)
        for array in results if isinstance(results, tuple) else (results,):
            array *= array.dtype.type(1.1)
        return results

    case = next(case for case in standard("small") if case.name == "scale")
    steps = ("atomic_dq", "jvp", "second/atomic")
    rows = run.judge_case(case, "reference", steps)
    assert len(rows) == 16 and all(row.verdict.ok for row in rows), rows
    monkeypatch.setattr(module, broken, wrong)
    bad = {row.tensor for row in run.judge_case(case, "reference", steps) if not row.verdict.ok}
    assert bad == names(tensors)


@pytest.mark.parametrize("step", ["second/atomic", "second/two_pass"])
def test_the_two_ways_of_double_backward_are_asked_for(step: str, monkeypatch) -> None:
    asked, right = set(), api_second.double_backward

    def double_backward(*args, **kwargs):
        asked.add(kwargs["deterministic"])
        return right(*args, **kwargs)

    monkeypatch.setattr(api_second, "double_backward", double_backward)
    monkeypatch.setattr(run, "gpu_name", lambda: "")
    case = next(case for case in standard("small") if case.name == "scale")
    rows = run.judge_case(case, "reference", (step,))
    assert asked == {step == "second/two_pass"}
    assert ("symmetry" in {row.tensor for row in rows}) == (step == "second/atomic")


def test_jobs_visit_every_method_and_backend() -> None:
    with_gpu, without = run.jobs(90), run.jobs(0)
    assert {backend for _, backend, _ in with_gpu} == {"cuda", "numba"}
    assert all(set(steps) == set(run.STEPS) for _, _, steps in with_gpu)
    assert {backend for _, backend, _ in without} == {"numba"}
    visited = {(case.dtype, step) for case, _, steps in without for step in steps}
    assert visited == set(product(DTYPES, run.STEPS))


def test_jobs_leave_out_what_a_gpu_has_no_rows_for() -> None:
    lacking = {
        (max(case.head_dim, case.head_dim_v), step)
        for case, backend, steps in run.jobs(89)
        for step in set(run.STEPS) - set(steps)
    }
    assert lacking == {(256, "second/atomic"), (256, "second/two_pass")}
    assert {backend for _, backend, _ in run.jobs(75)} == {"numba"}


def test_compile_reports_a_row(check, tmp_path) -> None:
    pytest.importorskip("cuda.core")
    file = tmp_path / "found.json"
    result = check("compile", "--arch", "sm_80", "--filter", "backward_preprocess", "--json", file)
    assert result.exit_code == 0, result.output
    for built in json.loads(file.read_text())["compile"]:
        assert built["ok"] and built["arch"] == "sm_80" and built["registers"] > 0
        assert built["seconds"] > 0 and built["row"] in result.output


@pytest.mark.parametrize(
    ("changes", "lenient", "strict", "words"),
    [
        ({}, True, True, ""),
        ({"spill_bytes": 8}, True, False, "8 bytes spilled"),
        ({"warnings": ("ptxas info: (C7510) wgmma serialized",)}, True, False, "C7510"),
        ({"error": "NVRTC refused"}, False, False, "NVRTC refused"),
    ],
)
def test_compile_condemns(
    changes: dict, lenient: bool, strict: bool, words: str, monkeypatch, capsys
) -> None:
    clean = {"registers": 99, "spill_bytes": 0, "smem_bytes": 0, "seconds": 0.1, "warnings": ()}

    def compile_build(build, arch):
        if "error" in changes:
            raise RuntimeError(changes["error"])
        return SimpleNamespace(**(clean | changes))

    monkeypatch.setattr(jit, "compile_build", compile_build)
    build = compiled.standard_builds(every=False)[0]
    for is_strict, good in ((False, lenient), (True, strict)):
        built = compiled.compile_row(build, "sm_90a", strict=is_strict)
        assert built.ok is good and built.row == build.row.name
        with pytest.raises(SystemExit) as leaving:
            outcome.finish([], [built], 0.0, None)
        assert leaving.value.code == (0 if good else 1)
        assert words in capsys.readouterr().out


def test_standard_builds_cover_the_table() -> None:
    cuda = {row.name for row in TABLE if row.family != "numba"}
    for every in (False, True):
        assert {b.row.name for b in compiled.standard_builds(every=every)} == cuda


@pytest.mark.parametrize("each", [1, 2])
def test_sample_builds_cover_the_table_and_the_architectures(each: int) -> None:
    sample = compiled.sample_builds(each)
    assert len(sample) == len(set(sample)) <= each * len(compiled.standard_builds(every=False))
    assert {b.row.name for b, _ in sample} == {r.name for r in TABLE if r.family != "numba"}
    assert all(serves(build.row, compiled.arch_number(arch)) for build, arch in sample)
    for stem in ("forward", "backward_kv", "jvp", "double_backward_out", "double_backward_kv"):
        assert {arch for build, arch in sample if build.row.stem == stem} == set(ARCHS)


def test_forms_tell_specialisations_apart() -> None:
    builds = compiled.standard_builds(every=True)
    assert len({(b.row.name, compiled.describe(b)) for b in builds}) == len(builds)
    row = next(row for row in TABLE if row.stem == "double_backward_kv")
    build = Build(row, "bfloat16", 64, 64, False, True, True, (True, False, True))
    assert compiled.describe(build) == "bf16 ra qv"
    assert compiled.describe(replace(build, direction=NO_DIRECTION)) == "bf16 ra"
    capped = replace(build, softcap=True, seqused_k=True)
    assert compiled.describe(capped) == "bf16 ra qv softcap seqused_k"


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_library_builds_are_what_calls_ask_for(arch: str) -> None:
    builds = list(compiled.library_builds(arch))
    assert len(builds) == len(set(builds))
    assert all(serves(build.row, compiled.arch_number(arch)) for build in builds)
    second = {b for b in builds if b.row.kernel.directed}
    assert {b.direction for b in second} == {(True, True, True)}
    assert {b.direction for b in set(builds) - second} == {NO_DIRECTION}
    wide = {b.row.stem for b in second if b.head_dim == 256}
    assert ("double_backward_kv" in wide) == (arch == "sm_90"), "99 KiB hold no row"
    assert {b.atomic for b in second if b.row.stem == "double_backward_kv"} == {True, False}
    small = {b.row.name for b in builds if b.row.when.max_ctas}
    assert arch == "sm_89" or small, "rows for small problems too"


@pytest.mark.parametrize("arch", ["foo", "sm_75", "sm_999", "90", "sm_90x", "sm_80a", "sm_90f"])
def test_an_arch_that_nothing_is_compiled_for_is_refused(arch: str) -> None:
    with pytest.raises(ValueError, match=rf"for '{arch}': expected one of sm_80, .*sm_121"):
        compiled.arch_number(arch)
    assert compiled.arch_number("sm_90") == compiled.arch_number("sm_90a") == 90
    assert compiled.arch_number("sm_100f") == 100


def test_warm_fills_the_cache(check, tmp_path, monkeypatch) -> None:
    pytest.importorskip("cuda.core")
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    builds = list(compiled.library_builds("sm_90"))
    stems = {build.row.stem for build in builds}
    assert stems == {row.stem for row in TABLE}
    assert {build.dtype for build in builds} == {"float16", "bfloat16"}
    build = next(build for build in builds if build.row.stem == "backward_preprocess")
    assert compiled.warm_build(build, "sm_90") == ""
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) == 1

    def refuse(build, arch):
        raise RuntimeError("NVRTC refused")

    monkeypatch.setattr(jit, "cached_build", refuse)
    assert compiled.warm_build(build, "sm_90") == "NVRTC refused"


def test_help_names_every_subcommand(check) -> None:
    result = check("--help")
    for name in ("run", "compile", "variants", "env", "warm", "diff"):
        assert re.search(rf"^  {name} ", result.output, re.MULTILINE)


def test_simulator_is_asked_for_before_numba_is_imported(monkeypatch) -> None:
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    monkeypatch.setattr(machine, "gpu_name", lambda: "")
    machine.use_simulator()
    assert os.environ.pop("NUMBA_ENABLE_CUDASIM") == "1"
    monkeypatch.setattr(machine, "gpu_name", lambda: "a GPU")
    machine.use_simulator()
    assert "NUMBA_ENABLE_CUDASIM" not in os.environ
