"""What a GPU showed of these sources, kept in tools/records/<gpu>.json: tests, sanitizer, bench.

    python tools/record.py --tests --sanitizer --bench    # each may run on its own
    python tools/record.py --check                        # exit 1 when the sources have changed

A part is merged into the record of the same GPU while the sources are the same; other sources begin
a new record. --check needs nothing but Python.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "tools" / "records"
SUFFIXES = {".py", ".cu", ".cuh"}
DIAGNOSIS = Path("rawattn", "check", "diagnose")

Record = dict[str, Any]


def sources_hash(root: Path = ROOT) -> str:
    """sha256 over the relative paths and contents of what runs: rawattn/ and kernels_cu/.

    Without the diagnosis of rawattn-check, which explains wrong results and makes none.
    """
    digest = hashlib.sha256()
    files = [f for top in ("rawattn", "kernels_cu") for f in (root / top).rglob("*")]
    files = [f for f in files if f.suffix in SUFFIXES and root / DIAGNOSIS not in f.parents]
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def check(folder: Path = RECORDS, root: Path = ROOT) -> int:
    """Print whether each record is of the present sources; 0 when all are and there is one."""
    now = sources_hash(root)
    records = sorted(folder.glob("*.json"))
    if not records:
        print(f"no GPU record in {folder.name}/")
    stale = 0
    for path in records:
        fresh = json.loads(path.read_text())["sources"] == now
        stale += not fresh
        print(f"{path.name}: {'fresh' if fresh else 'the sources have changed since'}")
    return 1 if stale or not records else 0


def record_path(gpu: str, folder: Path = RECORDS) -> Path:
    """The record of a GPU by its name: "NVIDIA H200" is h200.json."""
    words = re.findall(r"[a-z0-9]+", gpu.lower().removeprefix("nvidia"))
    return folder / f"{'-'.join(words)}.json"


def merge(old: Record | None, new: Record) -> Record:
    """``new`` parts over ``old``'s when the sources are the same; benchmark rows by their case."""
    if old is None or old["sources"] != new["sources"]:
        return new

    def key(row: Record) -> tuple[str, ...]:
        return row["suite"], row["case"], row["direction"]

    merged = old | new
    rows = {key(row): row for record in (old, new) for row in record.get("bench", [])}
    if rows:
        merged["bench"] = list(rows.values())
    return merged


def count_tests(junit: Path) -> dict[str, int]:
    """passed, failed and skipped of a junit file."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for suite in ElementTree.parse(junit).getroot().iter("testsuite"):
        total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        counts["passed"] += total - skipped - failed
        counts["failed"] += failed
        counts["skipped"] += skipped
    return counts


def run_tests(workers: int) -> dict[str, int]:
    """The tests marked gpu, in ``workers`` processes; the slow ones, which measure time, alone."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for marks, processes in (("gpu and not slow", workers), ("gpu and slow", 0)):
        with tempfile.TemporaryDirectory() as folder:
            junit = Path(folder) / "junit.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={junit}"]
            subprocess.run([*command, "-n", str(processes), "--dist", "load"], cwd=ROOT)
            for outcome, number in count_tests(junit).items():
                counts[outcome] += number
    return counts


def run_sanitizer() -> dict[str, int | None]:
    """Errors by tool, None for a tool that did not end well; its log is printed."""
    from sanitize import sanitize

    results = sanitize()
    for result in results.values():
        print(result.get("log", ""), end="")
    return {tool: result["errors"] for tool, result in results.items()}


def run_bench(suites: list[str], budget: float) -> Record:
    """The suites beside the peers that are importable, each backward method, and host times."""
    from measure.cases import SUITES
    from measure.host import first_call_times, host_times
    from measure.timing import measure
    from rawattn.variants import METHODS

    cases = [case for name in suites for case in SUITES[name]()]
    rows = measure(cases, methods=METHODS, budget=budget)
    return {"bench": rows, "host": host_times(), "first_call": first_call_times()}


def update(options: argparse.Namespace) -> int:
    """Run the chosen parts, each written when it ends; 1 when a test or a sanitizer failed."""
    from rawattn.check.machine import describe

    head = describe() | {"sources": sources_hash()}
    path = record_path(head["gpu"])
    path.parent.mkdir(exist_ok=True)

    def write(part: Record) -> None:
        old = json.loads(path.read_text()) if path.exists() else None
        path.write_text(json.dumps(merge(old, head | part), indent=1) + "\n")
        print(f"{path.name}: {', '.join(part)} written")

    good = True
    if options.tests:
        tests = run_tests(options.workers)
        write({"tests": tests})
        good &= tests["failed"] == 0 < tests["passed"]
    if options.sanitizer:
        sanitizer = run_sanitizer()
        write({"sanitizer": sanitizer})
        good &= all(errors == 0 for errors in sanitizer.values())
    if options.bench:
        write(run_bench(options.suite, options.budget))
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the records to the sources")
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--sanitizer", action="store_true")
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--workers", type=int, default=4, help="processes that run the tests")
    suites = ["paper", "varlen", "seed", "second", "second_length"]
    suites += ["sparse", "sparse_local", "sparse_length"]
    parser.add_argument("--suite", nargs="+", default=suites)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of the benchmark")
    options = parser.parse_args()
    if options.check:
        return check()
    if not (options.tests or options.sanitizer or options.bench):
        parser.error("choose --check, or any of --tests, --sanitizer, --bench")
    return update(options)


if __name__ == "__main__":
    sys.exit(main())
