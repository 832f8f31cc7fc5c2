"""Run small problems over every kernel under compute-sanitizer: one process per tool, all at once.

    python tools/sanitize.py [--json FILE] [TOOL ...]

The problems visit the forward, every backward method, the jvp and both ways of double_backward over
all head dimensions, masks and dtypes, on CuPy arrays whose memory comes straight from the driver:
in a pool, a read past the end of an array or of memory never written would go unseen.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from rawattn.check.compiled import SECOND_STEPS
from rawattn.variants import METHODS, TABLE

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SECOND = tuple(SECOND_STEPS)  # the jvp, double_backward, and that deterministic
# which steps run the kernel of a stem; forward and the rest run in every visit
STEPS_OF = {
    **{"forward": (), "backward_preprocess": METHODS[2:], "backward_postprocess": METHODS[:1]},
    **{"backward_kv": METHODS[::2], "backward_q": METHODS[1:]},
    **{"jvp": SECOND[:1], "double_backward_out": SECOND[1:2]},
    **{"double_backward_kv": SECOND[1:], "double_backward_q": SECOND[2:]},
}
DIRECTIONS = ("q", "k", "v", "qk", "qv", "kv")  # the parts that are not None
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
# Unequal lengths, an empty side, a lone token, and more than one tile of either side.
LENGTHS_Q = (70, 0, 1, 133)
LENGTHS_K = (133, 5, 1, 70)


@dataclass(frozen=True)
class Mask:
    """What ``rawattn.forward`` takes of a mask."""

    causal: bool
    window: tuple[int, int]


MASKS = (Mask(False, (-1, -1)), Mask(True, (-1, -1)), Mask(False, (40, 20)))


@dataclass(frozen=True)
class Visit:
    """One problem; ``row`` names the rows of the variants table to prefer, with commas between.

    ``backend`` None: CUDA kernels, but for tiles that do not fit this GPU. ``steps`` come after the
    forward; ``direction`` is that of the steps beyond the backward.
    """

    dtype: str
    head_dim: int
    mask: Mask
    backend: str | None = None
    row: str = ""
    steps: tuple[str, ...] = (*METHODS, *SECOND)
    direction: str = "qkv"


def visits() -> list[Visit]:
    """Every head_dim and dtype with two of the masks, the rows that those leave out, the twins."""
    rows = [row for row in TABLE if row.family != "numba"]
    # The problems are small, and the rows for such must not take the place of the usual ones.
    first = {(row.stem, row.head_dim): row for row in reversed(rows) if not row.max_ctas}
    names = ",".join(row.name for row in first.values())
    usual = []
    for i, (head_dim, dtype) in enumerate(product(HEAD_DIMS, ("float16", "bfloat16"))):
        masks = [MASKS[(i + shift) % len(MASKS)] for shift in range(2)]
        partial = (i + i // 2) % 2  # either dtype, in turn
        direction = DIRECTIONS[i // 2 % len(DIRECTIONS)] if partial else "qkv"
        usual += [
            Visit(dtype, head_dim, masks[0], row=names, direction=direction),
            Visit(dtype, head_dim, masks[1], row=names, steps=METHODS),
        ]
    others = [
        Visit("float16", row.head_dim, MASKS[1], row=row.name, steps=STEPS_OF[row.stem])
        for row in rows
        if row is not first[row.stem, row.head_dim]
    ]
    twins = [
        Visit(dtype, 32, MASKS[1], "numba", direction=direction)
        for dtype, direction in zip(
            ("float16", "bfloat16", "float32", "float64"), ("qkv", "q", "kv", "v"), strict=True
        )
    ]
    return [*usual, *others, *twins]


def visit_all() -> None:
    """Run every problem; RuntimeError when a result is not finite."""
    import cupy
    import ml_dtypes
    import numpy as np

    import rawattn

    cupy.cuda.set_allocator(None)
    random = np.random.default_rng(0)

    def array(tokens: int, heads: int, head_dim: int, dtype: str) -> Any:
        values = random.standard_normal((tokens, heads, head_dim))
        return cupy.asarray(values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))

    def offsets(lengths: tuple[int, ...]) -> Any:
        return cupy.asarray(np.array(list(accumulate(lengths, initial=0)), np.int32))

    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    for visit in visits():
        os.environ["RAWATTN_VARIANT"] = visit.row
        q, dout, of_q = (array(total_q, 2, visit.head_dim, visit.dtype) for _ in range(3))
        k, v, of_k, of_v = (array(total_k, 1, visit.head_dim, visit.dtype) for _ in range(4))
        parts = zip("qkv", (of_q, of_k, of_v), strict=True)
        direction = [part if name in visit.direction else None for name, part in parts]
        options = {
            "cu_seqlens_k": cu_k,
            "causal": visit.mask.causal,
            "window": visit.mask.window,
            "backend": visit.backend,
        }
        out, lse = rawattn.forward(q, k, v, cu_q, return_lse=True, **options)
        results = {"out": [out], "lse": [lse]}
        passed = (dout, q, k, v, out, lse, cu_q)
        for step in visit.steps:
            if step in METHODS:
                results[step] = rawattn.backward(*passed, method=step, **options)
            elif step == "jvp":
                results[step] = rawattn.jvp(q, k, v, *direction, cu_q, **options)
            else:
                exact = step == "second/two_pass"
                results[step] = rawattn.double_backward(
                    *direction, *passed, deterministic=exact, **options
                )
        # Reading all of it here lets initcheck see what a kernel left unwritten.
        for name, arrays in results.items():
            for i, result in enumerate(arrays):
                values = result.get().astype(np.float64)
                unseeing = (values == -np.inf) & (values.ndim == 2)  # lse of rows without a key
                if not (np.isfinite(values) | unseeing).all():
                    raise RuntimeError(f"result {i} of {name} is not finite: {visit}")


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
    results = sanitize(tuple(options.tools) or TOOLS, options.timeout)
    for tool, result in results.items():
        print(f"{tool:10} errors: {result['errors']}")
        print(result.get("log", ""), end="")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["errors"] == 0 for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
