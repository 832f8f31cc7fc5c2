"""Run small problems over every kernel under compute-sanitizer: all tools at once, on all cores.

    python tools/sanitize.py [--json FILE] [TOOL ...]

The problems are those of visits.py and visits_sparse.py, on CuPy arrays whose memory comes straight
from the driver: in a pool, a read past the end of an array or of memory never written would go
unseen.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rawattn.device import has_cuda_device
from visits import visit_dense
from visits_sparse import visit_sparse

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")

Result = dict[str, Any]


def visit_all(part: str = "1/1") -> None:
    """Run every problem, or every second with "1/2"; RuntimeError when a result is not finite."""
    import cupy

    cupy.cuda.set_allocator(None)
    number, parts = map(int, part.split("/"))
    visit_dense(slice(number - 1, None, parts))
    visit_sparse(slice(number - 1, None, parts))


def errors_in(log: str) -> int | None:
    """Errors that compute-sanitizer's summary line counts (races too), None without a summary."""
    counts = [
        *re.findall(r"ERROR SUMMARY: (\d+) error", log),
        *re.findall(r"RACECHECK SUMMARY: (\d+) hazard", log),
    ]
    return sum(map(int, counts)) if counts else None


def run_part(tool: str, part: str, timeout: float) -> Result:
    """One tool over a part of the problems: its errors, None when it did not end well, and an
    excerpt of its log. Without a tool the problems alone run, which fills the kernel cache."""
    command = [sys.executable, __file__, "--visit", part]
    if tool:
        # CUDA's own Python bindings probe the driver for symbols it may lack: no error of a kernel
        quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = ["compute-sanitizer", "--tool", tool, *quiet, *command]
    try:
        run = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"errors": None, "log": f"{part}: no end within {timeout:.0f} s\n"}
    errors = errors_in(run.stdout) if tool else 0
    if run.returncode and not errors:
        errors = None
    return {"errors": errors, "log": "" if errors == 0 else excerpt(run.stdout)}


def excerpt(log: str) -> str:
    """What the tool reported first, without the host's stack, and how the program ended."""
    reported = [line for line in log.splitlines() if line.startswith("=========")]
    first = [line for line in reported if "Host Frame" not in line][:40]
    return "\n".join([*first, log[-1500:]])


def sanitize(tools: tuple[str, ...] = TOOLS, timeout: float = 500.0) -> dict[str, Result]:
    """Every tool's result by its name; what has not ended after ``timeout`` seconds is given up.

    Instrumenting a kernel takes longer than running it, and is the work of one core: the problems
    go to as many processes as there are cores.
    """
    deadline = time.monotonic() + timeout
    parts = max(1, (os.cpu_count() or 1) // len(tools))

    def run_all(tools: tuple[str, ...], parts: int) -> dict[str, Result]:
        left = deadline - time.monotonic()
        names = [f"{i + 1}/{parts}" for i in range(parts)]
        with ThreadPoolExecutor(len(tools) * parts) as pool:
            runs = {t: [pool.submit(run_part, t, name, left) for name in names] for t in tools}
        return {tool: together([run.result() for run in of]) for tool, of in runs.items()}

    plain = run_all(("",), parts * len(tools))[""]
    if plain["errors"] is None:
        raise RuntimeError(f"the problems do not run without a tool:\n{plain['log']}")
    return run_all(tools, parts)


def together(parts: list[Result]) -> Result:
    """The result of all parts: their errors added up, None when one of them is."""
    errors = [part["errors"] for part in parts]
    log = "".join(part["log"] for part in parts)
    return {"errors": None if None in errors else sum(errors), "log": log}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)}; all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds for all")
    parser.add_argument("--visit", metavar="I/N", help="only run a part of the problems, in here")
    options = parser.parse_args()
    unknown = set(options.tools) - set(TOOLS)
    if unknown:
        parser.error(f"no such tool: {', '.join(sorted(unknown))}; there are {', '.join(TOOLS)}")
    if options.visit:
        visit_all(options.visit)
        return 0
    if not has_cuda_device():
        sys.exit("Error: no CUDA device: kernels run under compute-sanitizer on a GPU alone")
    if not shutil.which("compute-sanitizer"):
        sys.exit("Error: no compute-sanitizer on PATH: it comes with NVIDIA's toolkit")
    results = sanitize(tuple(options.tools) or TOOLS, options.timeout)
    for tool, result in results.items():
        print(f"{tool:10} errors: {result['errors']}")
        print(result["log"], end="")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["errors"] == 0 for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
