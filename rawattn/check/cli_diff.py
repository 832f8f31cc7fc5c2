"""The subcommand diff: somebody's attention function on the standard cases."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import click

from rawattn.check.candidate import Candidate, load
from rawattn.check.cases import Case, standard, with_options
from rawattn.check.diagnose.findings import Diagnosis, Finding
from rawattn.check.diagnose.judge.failures import SECONDS, SIDE, explain_failures
from rawattn.check.diagnose.report.terminal import About
from rawattn.check.machine import default_framework, gpu_name, has_torch, use_simulator
from rawattn.check.options import (
    filter_option,
    html_option,
    json_option,
    quick_option,
    rare_options,
)
from rawattn.check.outcome import finish_diff
from rawattn.check.peer import torch_attention
from rawattn.check.progress import Steps, counted, say
from rawattn.check.run import Row, evaluate, is_quick
from rawattn.check.sparse_cases import standard_sparse
from rawattn.check.transfer import FRAMEWORKS

SECONDS_ON_GPU = 4.0  # SECONDS for a candidate that runs there


@click.command("diff")
@click.option("--candidate", required=True, metavar="FILE.py:NAME", help="the function to judge.")
@click.option(
    "--against",
    default="reference",
    show_default=True,
    metavar="reference|torch|FILE.py:NAME",
    help="what to compare it with.",
)
@click.option(
    "--framework",
    type=click.Choice(FRAMEWORKS),
    help="arrays the functions get; torch if it has a GPU here, else numpy.",
)
@click.option(
    "--diagnosis/--no-diagnosis", default=True, help="say which bug it is (some ten seconds)."
)
@click.option("--full", is_flag=True, help="show every case, identity and slope too.")
@rare_options
@html_option
@json_option
@filter_option
@quick_option
def diff_command(
    candidate: str,
    against: str,
    framework: str | None,
    diagnosis: bool,
    html_file: Path | None,
    full: bool,
    softcap: float | None,
    sinks: bool,
    seqused: bool,
    json_file: Path | None,
    text: str,
    quick: bool,
) -> None:
    """Judge somebody's attention function on the standard cases.

    NAME has the signature of rawattn.forward; NAME_backward, NAME_double_backward and NAME_jvp (as
    far as the file has them) have those of rawattn's functions. A NAME that ends in one of these
    words is judged alone. Each is called with the keywords that it names, with softcap, sinks and
    seqused_k where a case has them; --softcap, --sinks and --seqused give them to every case.
    Functions with a parameter block_indices have the signatures of rawattn.sparse_forward,
    sparse_backward, sparse_double_backward and sparse_jvp, and are judged on sparse cases. Small
    cases on a CPU, large ones on a GPU. Where something is wrong, it is said first which bug it is,
    with a proof from small problems of the kind that failed, and with a command that shows it
    again; with --against, which side. --full adds the errors of every case by tensor, sequence and
    head.
    """
    began = time.perf_counter()
    use_simulator()
    refuse_what_is_not_here(framework, against)
    given, framework = framework, framework or default_framework()
    try:
        judged, other = load(candidate, framework), other_side(against, framework)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if other is not None and other.sparse != judged.sparse:
        raise click.UsageError(f"of {candidate} and {against} only one is about sparse attention")
    size = "large" if gpu_name() and framework != "numpy" else "small"
    cases: list[Case] = [
        case
        for case in (standard_sparse(size) if judged.sparse else standard(size))
        if text in str(case) and (not quick or is_quick(case))
    ]
    flags = " --sinks" * sinks + " --seqused" * seqused
    flags += "" if softcap is None else f" --softcap {softcap:g}"
    if flags:
        if judged.sparse:
            raise click.UsageError(f"{candidate} is about sparse attention, which has no{flags}")
        cases = [with_options(case, softcap, sinks, seqused) for case in cases]
    if not cases:
        raise click.UsageError(f"no case has {text!r} in its name")
    rows: list[Row] = []
    say(f"{candidate} on {counted(len(cases), 'case')}, against {against}")
    with Steps("judging", [1.0] * len(cases)) as steps:
        for i, case in enumerate(cases):
            rows += evaluate(judged, case, other)
            steps.end(i)
    title = f"{candidate} against {against}"
    bad = {row.case for row in rows if row.verdict.verdict in ("FAIL", "vacuous")}
    failing = [case for case in cases if str(case) in bad]
    found = Diagnosis(title, (), facts=(f"{len(cases) - len(failing)} cases are right",))
    if diagnosis and failing:
        say(f"wrong in {counted(len(failing), 'case')}: looking for the bug, some ten seconds")
        seconds = SECONDS if size == "small" else SECONDS_ON_GPU
        found = explain_failures(judged, failing, other, against=against, seconds=seconds)
    command = ["rawattn-check", "diff", "--candidate", candidate]
    command += [] if other is None else ["--against", against]
    command += ["--framework", given] if given else []
    command += flags.split()
    judged_rows = [row for row in rows if row.verdict.verdict != "skipped"]
    wrong = sum(not row.verdict.ok for row in judged_rows)
    finish_diff(
        rows,
        began,
        json_file,
        html_file,
        title,
        found if diagnosis else None,
        About(
            files={SIDE: _file(candidate)} | ({} if other is None else {against: _file(against)}),
            functions={side: _functions(one) for side, one in ((SIDE, judged), (against, other))},
            again=lambda finding: _alone(command, finding, failing),
            tally=f"{wrong} of {len(judged_rows)} checks fail",
        ),
        again=shlex.join(command),
        flags=flags,
        full=full,
    )


def _file(place: str) -> str:
    return Path(place.rpartition(":")[0] or place).name


def _functions(one: Candidate | None) -> dict[str, str]:
    """The names of a candidate's functions, by the stages that they are."""
    stages = ("forward", "backward", "second", "jvp")
    functions = () if one is None else (one.forward, one.backward, one.double_backward, one.jvp)
    names = zip(stages, (getattr(f, "__name__", "") for f in functions), strict=False)
    return {stage: name for stage, name in names if name}


def _alone(command: list[str], finding: Finding, failing: Sequence[Case]) -> str:
    """The command that judges a case which shows the finding, and no other."""
    cases = [*finding.cases, *map(str, failing)]
    return shlex.join([*command, "--filter", cases[0]]) if cases else shlex.join(command)


def refuse_what_is_not_here(framework: str | None, against: str) -> None:
    """UsageError where every case would fail for want of a GPU or of torch."""
    if framework == "cupy" and not gpu_name():
        raise click.UsageError(
            "--framework cupy needs CuPy and a GPU, and here is none: say --framework numpy, or "
            "torch for tensors on the CPU"
        )
    if "torch" in (framework, against) and not has_torch():
        option = "--framework torch" if framework == "torch" else "--against torch"
        raise click.UsageError(f"{option} needs torch, which is not installed: pip install torch")


def other_side(against: str, framework: str) -> Candidate | None:
    """What ``--against`` names; None is the reference."""
    if against == "reference":
        return None
    return torch_attention() if against == "torch" else load(against, framework)
