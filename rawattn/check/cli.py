"""The command line of rawattn-check. Exit code 0: all that was judged is right; 1: it is not.

Longer than other modules, because the small subcommands with their help texts stand together.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from rawattn import env
from rawattn.build import ARCHS, Build
from rawattn.check import report
from rawattn.check.cli_diagnose import dump_command, explain_command, harness_command
from rawattn.check.cli_diff import diff_command
from rawattn.check.compiled import (
    arch_number,
    compile_row,
    library_builds,
    sample_builds,
    standard_builds,
    warm_build,
)
from rawattn.check.machine import describe, gpu_arch, gpu_name, nvrtc, use_simulator
from rawattn.check.options import (
    arch_option,
    doubts,
    filter_option,
    json_option,
    quick_option,
    refuse_no_folders,
)
from rawattn.check.outcome import finish
from rawattn.check.progress import counted, duration, say
from rawattn.check.run import is_quick, jobs, judge_case
from rawattn.check.sparse import sparse_jobs
from rawattn.check.workers import processes, work
from rawattn.variants import TABLE, serves

ARCHS_EACH = 1  # architectures a row is compiled for in a run without a GPU
# Measured without a GPU, on one core: a case in the simulator, a build, and the start of a process
SECONDS_A_CASE, SECONDS_A_BUILD, SECONDS_TO_START = 2.4, 0.8, 3.0
Calls = list[partial[Any]]


@click.group(invoke_without_command=True)
@click.version_option(package_name="rawattn")
@json_option
@filter_option
@quick_option
@click.pass_context
def main(context: click.Context, json_file: Path | None, text: str, quick: bool) -> None:
    """Judge rawattn on this machine; without a subcommand the same as `run`."""
    if context.invoked_subcommand != "env":
        refuse_no_folders()
        for doubt in doubts():
            say(doubt)
    if context.invoked_subcommand is None:
        context.invoke(run, json_file=json_file, text=text, quick=quick)
    elif json_file or text or quick:
        raise click.UsageError(f"options of {context.invoked_subcommand} go behind its name")


for command in (diff_command, explain_command, dump_command, harness_command):
    main.add_command(command)


@main.command()
@json_option
@filter_option
@quick_option
def run(json_file: Path | None, text: str, quick: bool) -> None:
    """Compare what is here with the float64 reference.

    With a GPU: the CUDA and the Numba kernels. Without: the Numba kernels in Numba's simulator, and
    the compilation of every CUDA row of the table, the architectures taking turns (all of them for
    every row, and the verdict on spills, are for `rawattn-check compile`). --quick: a few cases,
    and one row of each kernel, in less than a minute.
    """
    began, arch = time.perf_counter(), gpu_arch() if gpu_name() else 0
    use_simulator()
    cases = [
        (case, backend, methods)
        for case, backend, methods in (*jobs(arch), *sparse_jobs(arch))
        if text in f"{case} {backend}" and (not quick or is_quick(case))
    ]
    sample = [] if arch else sample_builds(ARCHS_EACH)
    builds = [(build, name) for build, name in sample if text in build.row.name]
    if quick:  # the first row of each kernel
        firsts: dict[str, tuple[Build, str]] = {}
        for build, name in builds:
            firsts.setdefault(build.row.stem, (build, name))
        builds = list(firsts.values())
    if not cases and not builds:
        raise click.UsageError(f"no case and no row has {text!r} in its name")
    calls: Calls = [partial(judge_case, *job) for job in cases]
    calls += [partial(compile_row, build, name) for build, name in builds]
    weights = [SECONDS_A_CASE] * len(cases) + [SECONDS_A_BUILD] * len(builds)
    kinds = {"case": len(cases), "build": len(builds)}
    what = " and ".join(counted(number, thing) for thing, number in kinds.items() if number)
    results = begin(what, calls, "judging", weights, known=not arch)
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
    calls: Calls = [
        partial(compile_row, b, arch, strict=serves(b.row, arch_number(arch)))
        for b in builds
        for arch in archs
    ]
    what = f"{counted(len(builds), 'form')} of rows for {', '.join(archs)} with NVRTC {nvrtc()}"
    finish([], begin(what, calls, "compiling", [SECONDS_A_BUILD] * len(calls)), began, json_file)


@main.command()
def variants() -> None:
    """Show the table of kernel variants and why each row is there."""
    console = report.console()
    console.print(report.variant_table(console.width))


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
    machine = describe()
    for name, found in (machine.pop("versions") | machine).items():
        facts.add_row(name, found)
    console = report.console()
    console.print(table)
    console.print(facts)
    try:
        refuse_no_folders()
        wrong = []
    except click.UsageError as error:
        wrong = [error.message]
    for line in (*wrong, *doubts()):
        console.print(Text(line, "bold red"), soft_wrap=True)


@main.command()
@arch_option
@filter_option
def warm(archs: tuple[str, ...], text: str) -> None:
    """Fill the cache with the kernels of native head_dims, for this GPU or the given arch.

    Both dtypes, causal and unmasked, the default backward pass and the deterministic one; `jvp` and
    `double_backward` in a direction of three parts. Of block-sparse attention causal calls with 16
    heads a selection and blocks of 64 keys. Rows that --filter names and these calls do not take
    are compiled in the forms of `rawattn-check compile`.
    """
    if not archs and not gpu_name():
        raise click.UsageError("there is no GPU here: say --arch sm_90 or another")
    names = archs or (f"sm_{gpu_arch()}",)
    calls: Calls = [partial(warm_build, b, name) for name in names for b in to_warm(name, text)]
    if not calls:
        raise click.UsageError(why_not_warmed(names, text))
    what = f"{counted(len(calls), 'kernel')} for {', '.join(names)} with NVRTC {nvrtc()}"
    weights = [SECONDS_A_BUILD] * len(calls)
    faults = [fault for fault in begin(what, calls, "compiling", weights) if fault]
    console = report.console()
    for fault in dict.fromkeys(faults):
        console.print(fault, style="red", markup=False)
    console.print(f"{len(calls) - len(faults)} kernels are in {env.cache_dir()}", soft_wrap=True)
    sys.exit(1 if faults else 0)


def to_warm(arch: str, text: str) -> list[Build]:
    """The builds of usual calls on ``arch`` whose rows are named, and those of a row that is named
    in full; where that is none, those of all named rows that serve."""
    usual = [build for build in library_builds(arch) if text in build.row.name]
    met = {build.row.name for build in usual}
    return usual + [
        build
        for build in standard_builds(every=True)
        if (text == build.row.name or (not usual and text in build.row.name))
        and build.row.name not in met
        and serves(build.row, arch_number(arch))
    ]


def why_not_warmed(archs: tuple[str, ...], text: str) -> str:
    """Why there is nothing to compile for rows that ``text`` is in the name of."""
    named = [row for row in TABLE if text in row.name]
    if not named:
        return f"no row has {text!r} in its name; `rawattn-check variants` lists them"
    if all(row.family == "numba" for row in named):
        return f"{named[0].name} is a Numba kernel: Numba compiles it when it is first called"
    name = next(row.name for row in named if row.family != "numba")
    return f"{name} is not for {', '.join(archs)}; `rawattn-check variants` says what it is for"


def begin(
    what: str, calls: Calls, label: str, weights: list[float], *, known: bool = True
) -> list[Any]:
    """Say what is to be done and, where that is ``known``, how long it takes; then do it."""
    number = processes(len(calls))
    seconds = SECONDS_TO_START + max(*weights, sum(weights) / number)
    takes = f": about {duration(seconds)}" if known else ""
    say(f"{what}, {number} at a time{takes}")
    return work(calls, label, weights)
