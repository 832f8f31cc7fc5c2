"""Run small problems over every kernel under compute-sanitizer: one process per tool, all at once.

    python tools/sanitize.py [--json FILE] [TOOL ...]

The problems are those of visits.py and visits_sparse.py, on CuPy arrays whose memory comes straight
from the driver: in a pool, a read past the end of an array or of memory never written would go
unseen.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rawattn.device import has_cuda_device
from visits import visit_dense
from visits_sparse import visit_sparse

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def visit_all() -> None:
    """Run every problem; RuntimeError when a result is not finite."""
    import cupy

    cupy.cuda.set_allocator(None)
    visit_dense()
    visit_sparse()


def errors_in(log: str) -> int | None:
    """Errors that compute-sanitizer's summary line counts (races too), None without a summary."""
    counts = [
        *re.findall(r"ERROR SUMMARY: (\d+) error", log),
        *re.findall(r"RACECHECK SUMMARY: (\d+) hazard", log),
    ]
    return sum(map(int, counts)) if counts else None


def run_tool(tool: str, timeout: float) -> dict[str, Any]:
    """One tool over all problems: its errors (None when it did not end well) and the log's end."""
    # CUDA's own Python bindings probe the driver for symbols it may lack: no error of a kernel
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = ["compute-sanitizer", "--tool", tool, *quiet, sys.executable, __file__, "--visit"]
    try:
        run = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"errors": None, "log": f"no end within {timeout:.0f} s"}
    errors = errors_in(run.stdout)
    if run.returncode and not errors:
        errors = None
    return {"errors": errors} | ({} if errors == 0 else {"log": run.stdout[-4000:]})


def sanitize(tools: tuple[str, ...] = TOOLS, timeout: float = 500.0) -> dict[str, dict[str, Any]]:
    """Every tool's result by its name. A run without one goes first: it fills the kernel cache."""
    subprocess.run([sys.executable, __file__, "--visit"], check=True, timeout=timeout)
    with ThreadPoolExecutor(len(tools)) as pool:
        results = pool.map(lambda tool: run_tool(tool, timeout), tools)
        return dict(zip(tools, results, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)}; all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds for one tool")
    parser.add_argument("--visit", action="store_true", help="only run the problems, in here")
    options = parser.parse_args()
    unknown = set(options.tools) - set(TOOLS)
    if unknown:
        parser.error(f"no such tool: {', '.join(sorted(unknown))}; there are {', '.join(TOOLS)}")
    if options.visit:
        visit_all()
        return 0
    if not has_cuda_device():
        sys.exit("Error: no CUDA device: kernels run under compute-sanitizer on a GPU alone")
    if not shutil.which("compute-sanitizer"):
        sys.exit("Error: no compute-sanitizer on PATH: it comes with NVIDIA's toolkit")
    results = sanitize(tuple(options.tools) or TOOLS, options.timeout)
    for tool, result in results.items():
        print(f"{tool:10} errors: {result['errors']}")
        print(result.get("log", ""), end="")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["errors"] == 0 for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
