"""Measure rawattn beside the peers that are importable, in one run, interleaved call by call.

Every number is the median GPU time of one call, the L2 cache flushed before it. An absolute number
holds only beside the numbers of the same run.

    python tools/bench.py --suite paper --suite varlen --suite seed --json bench.json
    python tools/bench.py --host
    python tools/bench.py --from tools/records/h200.json --markdown README.md --plot plots
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from cases import SUITES, BenchCase
from host import first_call_times, host_times
from machine import describe
from rawattn.variants import METHODS
from tables import markdown_tables, plot, print_tables, splice

FLUSH_BYTES = 256 << 20  # several times the largest L2 cache
LEAD_CYCLES = (
    2_000_000  # about 1 ms in which the host queues a round, so that the GPU never waits for it
)
WARM_UP_ROUNDS = 2
SAME = 0.02  # relative distance of two outputs above which one of them is wrong
DEFAULT_PEERS = ("sdpa_flash", "torch_varlen", "sdpa_cudnn", "fa4", "fa3_fwd")

Row = dict[str, Any]


def time_rounds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call; A, B, C, A, B, C, ... so that all see the same clocks."""
    import torch

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events: dict[str, list[Any]] = {name: [] for name in calls}
    for _ in range(WARM_UP_ROUNDS + rounds):
        torch.cuda._sleep(LEAD_CYCLES)
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs[WARM_UP_ROUNDS:])
        for name, pairs in events.items()
    }


def contenders_of(
    case: BenchCase, peers: Iterable[str], methods: Iterable[str], errors: dict[str, str]
) -> dict[str, Any]:
    """Ours, also by each of ``methods``, and each peer that covers ``case`` and agrees with it."""
    import torch

    from contenders import PEERS, importable, make, ours

    data = make(case)
    ready = {"ours": ours(case, data)}
    for method in methods:
        ready[method] = ours(case, data, method)
    for peer in filter(importable, peers):
        try:
            contender = PEERS[peer](case, data)
            if contender and contender.backward:
                contender.backward()
        except Exception as error:  # foreign code: it may fail in any way, and the rest goes on
            errors[peer] = f"{type(error).__name__}: {error}"[:200]
            continue
        if contender is None:
            continue
        mine, its = ready["ours"].out.float(), contender.out.float()
        distance = float(torch.linalg.vector_norm(mine - its) / torch.linalg.vector_norm(its))
        if not distance < SAME:
            errors[peer] = f"its output and ours differ by {distance:.2g} of their size"
            continue
        ready[peer] = contender
    return ready


def measure_case(
    case: BenchCase,
    directions: Iterable[str],
    peers: Iterable[str],
    methods: Iterable[str],
    rounds: int,
) -> list[Row]:
    """One row per direction, as records hold it; ``errors`` says which peers failed, and how."""
    from contenders import kernels

    errors: dict[str, str] = {}
    ready = contenders_of(case, peers, methods, errors)
    rows: list[Row] = []
    for direction in directions:
        calls = {name: getattr(contender, direction) for name, contender in ready.items()}
        if direction == "forward":  # the methods differ in the backward alone
            calls = {name: call for name, call in calls.items() if name not in METHODS}
        times = time_rounds({name: call for name, call in calls.items() if call}, rounds)
        row: Row = {
            "suite": case.suite,
            "case": case.name,
            "direction": direction,
            "kernels": kernels(case, direction),
            "ours_ms": round(times["ours"], 5),
            "ours_tflops": round(case.flop(direction) / times["ours"] * 1e-9, 1),
            "peers": {n: round(t, 5) for n, t in times.items() if n != "ours" and n not in METHODS},
        }
        if by_method := {n: round(t, 5) for n, t in times.items() if n in METHODS}:
            row["methods"] = by_method
        if errors:
            row["errors"] = errors
        rows.append(row)
    return rows


def measure(
    cases: Iterable[BenchCase],
    directions: Iterable[str] = ("forward", "backward"),
    peers: Iterable[str] = DEFAULT_PEERS,
    methods: Iterable[str] = (),
    rounds: int = 15,
    budget: float = 300.0,
) -> list[Row]:
    """The rows of every case that starts within ``budget`` seconds."""
    import torch

    began, rows = time.monotonic(), []
    for case in cases:
        if time.monotonic() - began > budget:
            click.echo(f"budget of {budget:.0f} s spent: stopped before {case.name}", err=True)
            break
        try:
            measured = measure_case(case, directions, peers, methods, rounds)
        except Exception as error:  # one case that fails must not cost the run the others
            click.echo(f"{case.name}: {type(error).__name__}: {error}", err=True)
            continue
        for row in measured:
            click.echo(f"{row['case']:24} {row['direction']:9} {row['ours_tflops']:6.0f} TFLOP/s")
        rows += measured
        torch.cuda.empty_cache()
    return rows


@click.command()
@click.option(
    "--suite", "suites", multiple=True, type=click.Choice(tuple(SUITES)), help="default: all"
)
@click.option(
    "--peers", default=",".join(DEFAULT_PEERS), show_default=True, help="flex too, on request"
)
@click.option("--only", default="", help="only cases whose name contains this")
@click.option("--direction", type=click.Choice(("forward", "backward", "both")), default="both")
@click.option(
    "--method", "methods", multiple=True, type=click.Choice(METHODS), help="also time these"
)
@click.option("--rounds", default=15, show_default=True)
@click.option(
    "--budget", default=300.0, show_default=True, help="seconds after which no case starts"
)
@click.option(
    "--against",
    default="sdpa_flash,torch_varlen",
    show_default=True,
    help="the chosen peers: the fastest of them counts",
)
@click.option("--host", is_flag=True, help="measure host times instead of the suites")
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, path_type=Path),
    help="show a JSON file or record; measure nothing",
)
@click.option("--json", "target", type=click.Path(path_type=Path))
@click.option(
    "--markdown",
    type=click.Path(exists=True, path_type=Path),
    help="write the tables between this file's markers",
)
@click.option("--plot", "plots", type=click.Path(path_type=Path), help="draw into this folder")
def main(
    suites: tuple[str, ...],
    peers: str,
    only: str,
    direction: str,
    methods: tuple[str, ...],
    rounds: int,
    budget: float,
    against: str,
    host: bool,
    source: Path | None,
    target: Path | None,
    markdown: Path | None,
    plots: Path | None,
) -> None:
    """Measure rawattn beside the peers that are importable, in one run."""
    missing = 0
    result: dict[str, Any]
    if source:
        result = json.loads(source.read_text())
    elif host:
        result = describe() | {"host": host_times(), "first_call": first_call_times()}
    else:
        cases = [case for name in suites or SUITES for case in SUITES[name]() if only in case.name]
        directions = ("forward", "backward") if direction == "both" else (direction,)
        wanted = peers.split(",") if peers else []
        result = describe() | {"bench": measure(cases, directions, wanted, methods, rounds, budget)}
        missing = len(cases) * len(directions) - len(result["bench"])
    chosen = against.split(",")
    print_tables(result, chosen)
    if target:
        target.write_text(json.dumps(result, indent=1) + "\n")
    if markdown:
        text = markdown.read_text()
        for name, body in markdown_tables(result, chosen).items():
            text = splice(text, name, body)
        markdown.write_text(text)
    if plots:
        for path in plot(result["bench"], plots):
            click.echo(path)
    if missing:
        raise click.ClickException(f"{missing} measurements are missing")


if __name__ == "__main__":
    main()
