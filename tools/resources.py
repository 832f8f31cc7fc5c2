"""Registers, spills and shared memory of every row of the table, to compare before and after.

    python tools/resources.py --json before.json
    python tools/resources.py --against before.json

Each row in its standard forms, for --arch (sm_90), with the NVRTC of this environment, by as many
processes as there are cores; needs no GPU. Exit code 1 where a row spills.
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from rawattn.build import Build
from rawattn.check.compiled import arch_number, compile_row, describe, standard_builds
from rawattn.variants import serves

NUMBERS = ("registers", "spill_bytes", "smem_bytes")


def measure(build: Build, arch: str) -> dict[str, Any]:
    """What the compiler said of one form of a row."""
    built = compile_row(build, arch)
    return {name: getattr(built, name) for name in (*NUMBERS, "error")}


def wanted(arch: str, text: str) -> dict[str, Build]:
    """The forms of the rows meant for an arch, whose name contains a text, by row and form."""
    builds = [b for b in standard_builds(every=True) if serves(b.row, arch_number(arch))]
    return {f"{b.row.name} {describe(b)}": b for b in builds if text in b.row.name}


def changes(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """A line for every form that is not what it was."""
    return [
        f"{name}: {before.get(name, 'new')} -> {now.get(name, 'gone')}"
        for name in sorted({*now, *before})
        if now.get(name) != before.get(name)
    ]


@click.command(help=__doc__)
@click.option("--arch", default="sm_90", show_default=True)
@click.option("--filter", "text", default="", help="only rows whose name contains this")
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the numbers")
@click.option("--against", type=click.Path(exists=True, path_type=Path), help="show what changed")
@click.option("--jobs", type=int, help="processes; as many as there are cores")
def main(arch: str, text: str, file: Path | None, against: Path | None, jobs: int | None) -> None:
    builds = wanted(arch, text)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        found = pool.map(partial(measure, arch=arch), builds.values(), chunksize=4)
        now = dict(zip(builds, found, strict=True))
    lines = [f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in now.items()]
    if file:
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if against:
        before = json.loads(against.read_text())
        kept = {name: numbers for name, numbers in before.items() if text in name}
        print(*changes(now, kept) or ["nothing changed"], sep="\n")
    bad = [name for name, n in now.items() if n["spill_bytes"] or n["error"]]
    print(f"{len(now)} forms of rows on {arch}, {len(bad)} spill or fail", *bad, sep="\n")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
