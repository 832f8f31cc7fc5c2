"""The command line of rawattn-check. Exit code 0: all that was judged is right; 1: it is not.

Longer than other modules, because the subcommands with their options and help texts stand together.
"""

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rawattn import env
from rawattn.build import ARCHS
from rawattn.check import report
from rawattn.check.candidate import Candidate, load
from rawattn.check.cases import standard
from rawattn.check.cli_diagnose import (
    dump_command,
    explain_command,
    harness_command,
    html_option,
    show,
)
from rawattn.check.compiled import (
    Built,
    arch_number,
    compile_row,
    library_builds,
    sample_builds,
    standard_builds,
    warm_build,
)
from rawattn.check.diagnose import words
from rawattn.check.diagnose.failures import SECONDS, explain_failures
from rawattn.check.diagnose.findings import Diagnosis
from rawattn.check.machine import default_framework, gpu_arch, gpu_name, use_simulator, versions
from rawattn.check.peer import torch_attention
from rawattn.check.run import Row, evaluate, jobs, judge_case
from rawattn.check.sparse import sparse_jobs
from rawattn.check.sparse_cases import standard_sparse
from rawattn.check.transfer import FRAMEWORKS
from rawattn.check.workers import work
from rawattn.variants import serves

QUICK_CASES = ("edges-causal", "unequal", "window", "all-dead", "strided", "dim-40")
QUICK_SPARSE = tuple(f"sparse-{name}" for name in ("edges-open", "counts", "no-own", "gate"))
ARCHS_EACH = 1  # architectures a row is compiled for in a run without a GPU
SECONDS_ON_GPU = 4.0  # SECONDS for a candidate that runs there

json_option = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="write all of it."
)
filter_option = click.option(
    "--filter", "text", default="", help="only cases and rows whose name contains this."
)
quick_option = click.option("--quick", is_flag=True, help="a few cases, each row compiled once.")
arch_option = click.option(
    "--arch", "archs", multiple=True, help="such as sm_90a; may be repeated."
)


@click.group(invoke_without_command=True)
@json_option
@filter_option
@quick_option
@click.pass_context
def main(context: click.Context, json_file: Path | None, text: str, quick: bool) -> None:
    """Judge rawattn on this machine; without a subcommand the same as `run`."""
    if context.invoked_subcommand is None:
        context.invoke(run, json_file=json_file, text=text, quick=quick)
    elif json_file or text or quick:
        raise click.UsageError(f"options of {context.invoked_subcommand} go behind its name")


for command in (explain_command, dump_command, harness_command):
    main.add_command(command)


@main.command()
@json_option
@filter_option
@quick_option
def run(json_file: Path | None, text: str, quick: bool) -> None:
    """Compare what is here with the float64 reference.

    With a GPU: the CUDA and the Numba kernels. Without: the Numba kernels in Numba's simulator, and
    the compilation of every CUDA row of the table, the architectures taking turns (all of them for
    every row, and the verdict on spills, are for `rawattn-check compile`).
    """
    began, arch = time.perf_counter(), gpu_arch() if gpu_name() else 0
    use_simulator()
    cases = [
        (case, backend, methods)
        for case, backend, methods in (*jobs(arch), *sparse_jobs(arch))
        if text in f"{case} {backend}" and (not quick or case.name in QUICK_CASES + QUICK_SPARSE)
    ]
    sample = [] if arch else sample_builds(1 if quick else ARCHS_EACH)
    builds = [(build, name) for build, name in sample if text in build.row.name]
    if not cases and not builds:
        raise click.UsageError(f"no case and no row has {text!r} in its name")
    calls: list[partial[Any]] = [partial(judge_case, *job) for job in cases]
    calls += [partial(compile_row, build, name) for build, name in builds]
    results = work(calls, "judging")
    rows = [row for found in results[: len(cases)] for row in found]
    place = gpu_name() or "no GPU: the simulator"
    title = f"results against the float64 reference ({place})"
    finish(rows, results[len(cases) :], began, json_file, title)


@main.command("compile")
@arch_option
@json_option
@filter_option
def compile_command(archs: tuple[str, ...], json_file: Path | None, text: str) -> None:
    """Compile the rows of the table, in all their standard forms; needs no GPU.

    Shows registers, shared memory, spills and seconds. Exit code 1 on a refusal, a spill, or a
    warning C75xx (the compiler had to serialise asynchronous matmuls).
    """
    began = time.perf_counter()
    builds = [build for build in standard_builds(every=True) if text in build.row.name]
    if not builds:
        raise click.UsageError(f"no row has {text!r} in its name")
    archs = archs or ARCHS
    calls = [
        partial(compile_row, b, arch, strict=serves(b.row, arch_number(arch)))
        for b in builds
        for arch in archs
    ]
    finish([], work(calls, "compiling"), began, json_file)


@main.command()
def variants() -> None:
    """Show the table of kernel variants and why each row is there."""
    Console().print(report.variant_table())


@main.command("env")
def env_command() -> None:
    """Show every RAWATTN_* variable, the cache folder and the versions that matter."""
    table = Table("variable", "present value", "default", "meaning", title_justify="left")
    for variable in env.VARIABLES:
        present = os.environ.get(variable.name)
        table.add_row(
            variable.name,
            "unset" if present is None else repr(present),
            repr(variable.default),
            variable.meaning,
        )
    facts = Table("what", "here", title_justify="left")
    facts.add_row("cache folder", str(env.cache_dir()))
    for name, found in versions().items():
        facts.add_row(name, found)
    console = Console()
    console.print(table)
    console.print(facts)


@main.command()
@arch_option
@filter_option
def warm(archs: tuple[str, ...], text: str) -> None:
    """Fill the cache with the kernels of native head_dims, for this GPU or the given arch.

    Both dtypes, causal and unmasked, the default backward pass and the deterministic one; `jvp` and
    `double_backward` in a direction of three parts. Of block-sparse attention causal calls with 16
    heads a selection and blocks of 64 keys.
    """
    if not archs and not gpu_name():
        raise click.UsageError("there is no GPU here: say --arch sm_90 or another")
    names = archs or (f"sm_{gpu_arch()}",)
    for name in names:
        if not re.fullmatch(r"sm_\d+[af]?", name):
            raise click.BadParameter(f"{name!r} is not of the form sm_90", param_hint="--arch")
    calls = [
        partial(warm_build, build, name)
        for name in names
        for build in library_builds(name)
        if text in build.row.name
    ]
    if not calls:
        raise click.UsageError(f"no row has {text!r} in its name")
    faults = [fault for fault in work(calls, "compiling") if fault]
    console = Console()
    for fault in faults:
        console.print(fault, style="red", markup=False)
    console.print(f"{len(calls) - len(faults)} kernels are in {env.cache_dir()}")
    sys.exit(1 if faults else 0)


@main.command("diff")
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
    "--diagnosis/--no-diagnosis", default=True, help="say which bug it is (up to half a minute)."
)
@click.option("--full", is_flag=True, help="show every identity and every part.")
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
    json_file: Path | None,
    text: str,
    quick: bool,
) -> None:
    """Judge somebody's attention function on the standard cases.

    NAME has the signature of rawattn.forward; NAME_backward, NAME_double_backward and NAME_jvp (as
    far as the file has them) have those of rawattn's functions. A NAME that ends in one of these
    words is judged alone. Each is called with the keywords that it names. Functions with a
    parameter block_indices have the signatures of rawattn.sparse_forward, sparse_backward,
    sparse_double_backward and sparse_jvp, and are judged on sparse cases. Small cases on a CPU,
    large ones on a GPU. Errors are shown by tensor, sequence and head. Where something is wrong, a
    diagnosis follows: which bug it is, with the evidence, from small problems of the kind that
    failed; with --against, which side.
    """
    began = time.perf_counter()
    use_simulator()
    framework = framework or default_framework()
    try:
        judged, other = load(candidate, framework), other_side(against, framework)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if other is not None and other.sparse != judged.sparse:
        raise click.UsageError(f"of {candidate} and {against} only one is about sparse attention")
    size = "large" if gpu_name() and framework != "numpy" else "small"
    cases = [
        case
        for case in (standard_sparse(size) if judged.sparse else standard(size))
        if text in str(case) and (not quick or case.name in QUICK_CASES + QUICK_SPARSE)
    ]
    if not cases:
        raise click.UsageError(f"no case has {text!r} in its name")
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for case in progress.track(cases, description="judging"):
            rows += evaluate(judged, case, other)
    title = f"{candidate} against {against}"
    bad = {row.case for row in rows if row.verdict.verdict in ("FAIL", "vacuous")}
    failing = [case for case in cases if str(case) in bad]
    found = Diagnosis(title, (), facts=(f"{len(cases) - len(failing)} cases are right",))
    if diagnosis and failing:
        seconds = SECONDS if size == "small" else SECONDS_ON_GPU
        found = explain_failures(judged, failing, other, against=against, seconds=seconds)
    shown = found if diagnosis else None
    finish(
        rows,
        [],
        began,
        json_file,
        title,
        all_tensors=True,
        found=shown,
        html_file=html_file,
        full=full,
    )


def other_side(against: str, framework: str) -> Candidate | None:
    """What ``--against`` names; None is the reference."""
    if against == "reference":
        return None
    return torch_attention() if against == "torch" else load(against, framework)


def finish(
    rows: Sequence[Row],
    built: Sequence[Built],
    began: float,
    json_file: Path | None,
    title: str = "",
    *,
    all_tensors: bool = False,
    found: Diagnosis | None = None,
    html_file: Path | None = None,
    full: bool = False,
) -> None:
    """Show what was found, write the files, leave with the exit code."""
    console = Console()
    if rows:
        console.print(report.case_table(rows, title, all_tensors=all_tensors))
    for note in report.case_notes(rows):
        console.print(note)
    for grid in report.share_grids(rows):
        console.print(grid)
    if built:
        console.print(report.compile_table(built))
    for fault in report.compile_faults(built):
        console.print(fault, style="red", markup=False)
    if found is not None and (found.findings or html_file):
        console.print()
        show(found, html_file, full=full)
        console.print()
    console.print(report.summary(rows, built, time.perf_counter() - began))
    if json_file is not None:
        whole = report.as_json(rows, built)
        whole |= {} if found is None else {"diagnosis": words.as_json(found)}
        json_file.write_text(json.dumps(whole, indent=1, allow_nan=False))
    sys.exit(0 if report.passed(rows, built) else 1)
