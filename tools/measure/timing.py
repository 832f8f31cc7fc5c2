"""Time and memory of rawattn beside its peers, in one run, interleaved call by call."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import click

from measure.cases import BenchCase
from rawattn.variants import METHODS

FLUSH_BYTES = 256 << 20  # several times the largest L2 cache
LEAD_CYCLES = (
    2_000_000  # about 1 ms in which the host queues a round, so that the GPU never waits for it
)
WARM_UP_ROUNDS = 2
# Relative distance of two results above which one of them is wrong: derivatives in 16 bits are
# farther from the truth than values.
SAME = {"forward": 0.02, "backward": 0.05, "second": 0.05, "jvp": 0.05}
DEFAULT_PEERS = (
    *("sdpa_flash", "torch_varlen", "sdpa_cudnn", "fa4", "fa3_fwd"),
    *("torch_math", "jvp_flash_attention", "fla_nsa", "lucidrains_triton"),
)

Row = dict[str, Any]


def time_rounds(
    calls: dict[str, Callable[[], Any]], rounds: int, lead: int = LEAD_CYCLES
) -> dict[str, float]:
    """Median milliseconds of each call; A, B, C, A, B, C, ... so that all see the same clocks."""
    import torch

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events: dict[str, list[Any]] = {name: [] for name in calls}
    for _ in range(WARM_UP_ROUNDS + rounds):
        torch.cuda._sleep(lead)
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


def with_memory(contender: Any) -> tuple[Callable[[], Any], tuple[Any, ...], float]:
    """The call to time, what it gave, and the most memory that building and calling it took, GiB.

    That is beyond the inputs: out and lse, workspaces, results, and a peer's graph. What compiling
    and tuning take is over by then.
    """
    import torch

    contender.prepare()()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call = contender.prepare()
    result = call()
    torch.cuda.synchronize()
    return call, result, (torch.cuda.max_memory_allocated() - before) / 2**30


def distances(results: Iterable[Any], expected: Iterable[Any]) -> list[float]:
    """Of each tensor from the expected one, relative to the size of that."""
    from torch.linalg import vector_norm

    pairs = ((mine.float(), its.float()) for mine, its in zip(results, expected, strict=True))
    return [float(vector_norm(mine - its) / vector_norm(its)) for mine, its in pairs]


def measure_row(
    case: BenchCase,
    direction: str,
    peers: Iterable[str],
    methods: Iterable[str],
    rounds: int,
    lead: int = LEAD_CYCLES,
) -> Row:
    """What records hold of it; ``errors`` says which peers failed, or disagreed, and how."""
    from measure.contenders import DIRECTIONS, kernels, make, methods_of, ours, theirs
    from measure.peers import importable

    data, compared = make(case), DIRECTIONS[direction].results
    errors: dict[str, str] = {}
    call, result, gib = with_memory(ours(case, data, direction))
    mine, calls, memory = result[:compared], {"ours": call}, {"ours": gib}
    for method in methods_of(case, methods) if direction == "backward" else ():
        calls[method] = ours(case, data, direction, method).prepare()
    for peer in filter(importable, peers):
        try:
            contender = theirs(peer, case, data, direction)
            if contender is None:
                continue
            call, result, gib = with_memory(contender)
            its = map(contender.packed, result[:compared])
            apart = distances(mine, its) if contender.same else []
        except Exception as error:  # foreign code: it may fail in any way, and the rest goes on
            errors[peer] = f"{type(error).__name__}: {error}"[:200]
            continue
        if not all(distance < SAME[direction] for distance in apart):
            shown = ", ".join(f"{distance:.2g}" for distance in apart)
            errors[peer] = f"its results and ours differ by {shown} of their size"
            continue
        calls[peer], memory[peer] = call, gib
    times = {name: round(ms, 5) for name, ms in time_rounds(calls, rounds, lead).items()}
    memory = {name: round(gib, 4) for name, gib in memory.items()}
    row: Row = {
        "suite": case.suite,
        "case": case.name,
        "direction": direction,
        "kernels": kernels(case, direction),
        "ours_ms": times.pop("ours"),
        "ours_tflops": 0.0,
        "peers": {name: ms for name, ms in times.items() if name not in METHODS},
        "ours_gib": memory.pop("ours"),
        "peers_gib": memory,
    }
    row["ours_tflops"] = round(case.flop(direction) / row["ours_ms"] * 1e-9, 1)
    if by_method := {name: ms for name, ms in times.items() if name in METHODS}:
        row["methods"] = by_method
    if errors:
        row["errors"] = errors
    return row


def warm_up() -> None:
    """Let cuBLAS take its workspaces, which come from torch's memory, before any is counted."""
    import torch

    for dtype in (torch.float16, torch.bfloat16):
        x = torch.ones(1, 64, 64, dtype=dtype, device="cuda", requires_grad=True)
        (x @ x).sum().backward()


def wanted(cases: Iterable[BenchCase], directions: Iterable[str]) -> list[tuple[BenchCase, str]]:
    """What to measure: every case in each direction, or in those of its suite."""
    return [(case, direction) for case in cases for direction in directions or case.directions]


def measure(
    cases: Iterable[BenchCase],
    directions: Iterable[str] = (),
    peers: Iterable[str] = DEFAULT_PEERS,
    methods: Iterable[str] = (),
    rounds: int = 15,
    budget: float = 300.0,
    lead: int = LEAD_CYCLES,
) -> list[Row]:
    """The rows that start within ``budget`` seconds; without ``directions``, those of each case."""
    import torch

    warm_up()
    began, rows = time.monotonic(), []
    for case, direction in wanted(cases, directions):
        name = f"{case.name} {direction}"
        if time.monotonic() - began > budget:
            click.echo(f"budget of {budget:.0f} s spent: stopped before {name}", err=True)
            break
        try:
            row = measure_row(case, direction, peers, methods, rounds, lead)
        except Exception as error:  # one that fails must not cost the run the others
            click.echo(f"{name}: {type(error).__name__}: {error}", err=True)
            continue
        finally:
            torch.cuda.empty_cache()
        click.echo(f"{name:34} {row['ours_tflops']:6.0f} TFLOP/s {row['ours_gib']:8.3f} GiB")
        rows.append(row)
    return rows
