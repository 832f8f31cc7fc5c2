"""What a GPU showed of these sources, kept in tools/records/<gpu>.json: tests, sanitizer, bench.

    python tools/record.py --tests --sanitizer --bench --accuracy --host   # or each on its own:
    python tools/record.py --tests --shard 2/4                   # a quarter of the tests
    python tools/record.py --sanitizer racecheck
    python tools/record.py --bench --suite paper --sustained 1
    python tools/record.py --models      # whole models, by tools/train/train_models.py
    python tools/record.py --several     # context parallelism on all GPUs here: a record of its own
    python tools/record.py --check       # exit 1 unless every record counts for these sources

A part is merged into the record of the same GPU while the sources are the same; other sources begin
a new record. A record counts when no test failed, no part of the tests is missing and all four
sanitizers ended with 0 errors; one of several GPUs when no test failed and no result of ours was
wrong. --check needs nothing but Python.
"""

import argparse
import hashlib
import json
import os
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
DIAGNOSIS = ("rawattn/check/diagnose/", "rawattn/check/cli_diagnose.py")  # and its commands
SEVERAL = "rawattn/torch/context_parallel/"  # of which one GPU runs nothing
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "gpu")
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
KEYS = {  # which row of a part it is
    "bench": ("suite", "case", "direction"),
    "accuracy": ("scores", "head_dim", "dtype", "causal"),
    "models": ("model", "attention"),
}

Record = dict[str, Any]


def sources_hash(root: Path = ROOT, several: bool = False) -> str:
    """sha256 over the relative paths and contents of what runs: rawattn/ and kernels_cu/.

    Without the diagnosis of rawattn-check, which explains wrong results and makes none, and without
    context parallelism, unless it is of ``several`` GPUs.
    """
    apart = DIAGNOSIS if several else (*DIAGNOSIS, SEVERAL)
    digest = hashlib.sha256()
    files = [f for top in ("rawattn", "kernels_cu") for f in (root / top).rglob("*")]
    for file in sorted(f for f in files if f.suffix in SUFFIXES):
        name, content = file.relative_to(root).as_posix(), file.read_bytes()
        if not name.startswith(apart):
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def faults(record: Record, now: str) -> list[str]:
    """Why a record does not count for the sources whose hash is ``now``; empty when it does."""
    tests, sanitizer = record.get("tests"), record.get("sanitizer", {})
    found = [] if record["sources"] == now else ["the sources have changed since"]
    if not tests or not tests["passed"]:
        found.append("no tests")
    elif tests["failed"]:
        found.append(f"{tests['failed']} tests failed")
    if tests and (missing := missing_shards(tests)):
        found.append(f"tests without shards {', '.join(missing)}")
    if "ranks" in record:
        found += [f"{row['contender']}: {row['error']}" for row in record["rows"] if wrong(row)]
    elif unclean := [tool for tool in SANITIZERS if sanitizer.get(tool) != 0]:
        found.append(f"no clean end of {', '.join(unclean)}")
    return found


def wrong(row: Record) -> bool:
    """Whether it is of a way of ours that gave no result, or another one than one rank."""
    return "error" in row and row["contender"].startswith(("contiguous", "zigzag"))


def missing_shards(tests: Record) -> list[str]:
    """The shards that are not in a record whose tests were run in parts."""
    shards = tests.get("shards", {})
    number = max((int(shard.split("/")[1]) for shard in shards), default=0)
    return [f"{i}/{number}" for i in range(1, number + 1) if f"{i}/{number}" not in shards]


def check(folder: Path = RECORDS, root: Path = ROOT) -> int:
    """Print what each record is worth for the present sources; 0 if there is one and all count."""
    records = sorted(folder.glob("*.json"))
    if not records:
        print(f"no GPU record in {folder.name}/")
    bad = 0
    for path in records:
        record = json.loads(path.read_text())
        found = faults(record, sources_hash(root, several="ranks" in record))
        bad += bool(found)
        print(f"{path.name}: {'does not count: ' + '; '.join(found) if found else 'counts'}")
    return 1 if bad or not records else 0


def record_path(gpu: str, folder: Path = RECORDS) -> Path:
    """The record of a GPU by its name: "NVIDIA H200" is h200.json."""
    words = re.findall(r"[a-z0-9]+", gpu.lower().removeprefix("nvidia"))
    return folder / f"{'-'.join(words)}.json"


def merge(old: Record | None, new: Record) -> Record:
    """``new`` parts over ``old``'s when the sources are the same.

    Rows of the benchmark, the accuracy and the models go by their case, sanitizer results by their
    tool, tests by their shard.
    """
    if old is None or old["sources"] != new["sources"]:
        return new

    merged = old | new
    for part, key in KEYS.items():
        rows = [row for record in (old, new) for row in record.get(part, [])]
        if rows:
            merged[part] = list({tuple(row[name] for name in key): row for row in rows}.values())
    if "sanitizer" in merged:
        merged["sanitizer"] = old.get("sanitizer", {}) | new.get("sanitizer", {})
    shards = new.get("tests", {}).get("shards", {})
    if shards:
        earlier = old.get("tests", {}).get("shards", {})
        number = next(iter(shards)).split("/")[1]
        same = {shard: counts for shard, counts in earlier.items() if shard.endswith(f"/{number}")}
        merged["tests"] = add_up(same | shards)
    return merged


def add_up(shards: dict[str, dict[str, int]]) -> Record:
    """The counts of all tests, and those of each shard."""
    names = ("passed", "failed", "skipped")
    return {name: sum(s[name] for s in shards.values()) for name in names} | {"shards": shards}


def dumps(record: Record) -> str:
    """JSON with one entry a line, and one row of a list a line, so that differences read well."""
    lines = []
    for name, value in record.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def pytest_counts(arguments: list[str]) -> dict[str, int]:
    """passed, failed and skipped of a run of pytest."""
    path = os.pathsep.join(filter(None, (str(ROOT / "tools"), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", *arguments, f"--junitxml={junit}"]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
        return count_tests(junit)


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


def run_tests(workers: int, shard: str = "") -> Record:
    """The tests marked gpu, in ``workers`` processes; the slow ones, which measure time, alone.

    ``shard``: "2/4" runs the second of four parts, and the counts are those of it.
    """
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    part = ["-p", "measure.shard", "--shard", shard] if shard else []
    for marks, processes in (("gpu and not slow", workers), ("gpu and slow", 0)):
        found = pytest_counts(["-m", marks, "-n", str(processes), "--dist", "load", *part])
        for outcome, number in found.items():
            counts[outcome] += number
    return add_up({shard: counts}) if shard else counts


def run_several(memory: int) -> Record:
    """Of context parallelism on all GPUs here: its tests, times beside other libraries, and memory
    of one document of so many tokens."""
    counts = pytest_counts(["tests/gpu/test_gpu_context_parallel.py", "-m", "gpu", "-n", "0"])
    result: Record = {"rows": []}
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "parallel.json"
        tool = [*TORCHRUN, str(ROOT / "tools" / "bench_parallel.py"), "--json", str(measured)]
        for options in ([], ["--memory", str(memory), "--only", "zigzag gather"]):
            subprocess.run([*tool, *options], cwd=ROOT, check=True)
            found = json.loads(measured.read_text())
            result |= found | {"rows": result["rows"] + found["rows"]}
    return {"tests": counts} | result


def run_sanitizer(tools: tuple[str, ...] = SANITIZERS) -> dict[str, int | None]:
    """Errors by tool, None for a tool that did not end well; its log is printed."""
    from sanitize import sanitize

    results = sanitize(tools)
    for result in results.values():
        print(result["log"], end="")
    return {tool: result["errors"] for tool, result in results.items()}


def run_bench(suites: list[str], budget: float, sustained: float) -> Record:
    """The suites beside the peers that are importable, and each backward method."""
    from measure.cases import SUITES
    from measure.timing import Plan, measure
    from rawattn.variants import METHODS

    cases = [case for name in suites for case in SUITES[name]()]
    return {"bench": measure(cases, plan=Plan(methods=METHODS, sustained=sustained), budget=budget)}


def run_accuracy(budget: float) -> tuple[Record, list[str]]:
    """Errors against float64, ours and the peers'; and what is less exact than it must be."""
    from measure.accuracy import faults, measure

    rows = measure(budget=budget)
    return {"accuracy": rows}, [fault for row in rows for fault in faults(row)]


def run_host() -> Record:
    """Host times of a call and of a process's first."""
    from measure.host import first_call_times, host_times

    return {"host": host_times(), "first_call": first_call_times()}


def run_models() -> tuple[Record, bool]:
    """Whole models trained by each attention; and whether rawattn is no slower than the best."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "models.json"
        program = ROOT / "tools" / "train" / "train_models.py"
        run = subprocess.run([sys.executable, str(program), "--json", str(result)], cwd=ROOT)
        return {"models": json.loads(result.read_text())["models"]}, run.returncode == 0


def update(options: argparse.Namespace) -> int:
    """Run the chosen parts, each written when it ends; 1 when a test or a sanitizer failed, the
    accuracy is less than it must be, or a model trains faster by another attention."""
    from rawattn.check.machine import describe, gpu_name

    if not gpu_name():
        sys.exit("Error: no CUDA device: record on a GPU; --check needs none")
    head = describe() | {"sources": sources_hash()}
    path = record_path(head["gpu"])
    path.parent.mkdir(exist_ok=True)

    def write(part: Record) -> None:
        old = json.loads(path.read_text()) if path.exists() else None
        path.write_text(dumps(merge(old, head | part)))
        print(f"{path.name}: {', '.join(part)} written")

    good = True
    if options.several:
        several = run_several(options.several)
        now = sources_hash(several=True)
        found = head | several | {"sources": now}
        path.with_stem(f"{path.stem}-x{several['ranks']}").write_text(dumps(found))
        good &= not faults(found, now)
    if options.tests:
        tests = run_tests(options.workers, options.shard)
        write({"tests": tests})
        good &= tests["failed"] == 0 < tests["passed"]
    if options.sanitizer is not None:
        sanitizer = run_sanitizer(tuple(options.sanitizer) or SANITIZERS)
        write({"sanitizer": sanitizer})
        good &= all(errors == 0 for errors in sanitizer.values())
    if options.bench:
        write(run_bench(options.suite, options.budget, options.sustained))
    if options.accuracy:
        accuracy, inexact = run_accuracy(options.budget)
        write(accuracy)
        for fault in inexact:
            print(fault)
        good &= bool(accuracy["accuracy"]) and not inexact
    if options.host:
        write(run_host())
    if options.models:
        models, fastest = run_models()
        write(models)
        good &= fastest
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the records to the sources")
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--shard", default="", metavar="I/N", help="part I of N of the tests")
    parser.add_argument("--workers", type=int, default=4, help="processes that run the tests")
    parser.add_argument("--sanitizer", nargs="*", metavar="TOOL", choices=SANITIZERS)
    parser.add_argument("--bench", action="store_true")
    suites = ["paper", "varlen", "seed", "dims", "many_short", "windows", "second", "second_length"]
    suites += ["sparse", "sparse_local", "sparse_length"]
    parser.add_argument("--suite", nargs="+", default=suites)
    parser.add_argument(
        "--budget", type=float, default=300.0, help="seconds of the benchmark, and of the accuracy"
    )
    parser.add_argument(
        "--sustained", type=float, default=0.0, help="seconds of continuous load a contender"
    )
    parser.add_argument("--accuracy", action="store_true", help="errors of the forward")
    parser.add_argument("--host", action="store_true", help="host times and first calls")
    parser.add_argument("--models", action="store_true", help="training steps of whole models")
    parser.add_argument(
        "--several",
        nargs="?",
        type=int,
        const=1_572_864,
        metavar="TOKENS",
        help="context parallelism on all GPUs here; memory of a document of so many tokens",
    )
    options = parser.parse_args()
    if options.check:
        return check()
    if options.shard and not re.fullmatch(r"[1-9]\d*/[1-9]\d*", options.shard):
        parser.error(f"--shard is I/N such as 2/4, was {options.shard}")
    measured = options.bench or options.accuracy or options.host or options.models
    measured = measured or options.several
    if not (options.tests or options.sanitizer is not None or measured):
        parser.error("choose --check or what to run; --help names it")
    return update(options)


if __name__ == "__main__":
    sys.exit(main())
