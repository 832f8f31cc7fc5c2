"""Time and memory of rawattn beside its peers, in one run, interleaved call by call.

Interleaved calls see a card that is never long busy with one of them; ``sustained`` is the other
time: each contender alone, back to back, on a card that was brought to its power limit before.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import click

from measure.cases import BenchCase
from rawattn.variants import METHODS

FLUSH_BYTES = 256 << 20  # several times the largest L2 cache
LEAD_CYCLES = (
    2_000_000  # about 1 ms in which the host queues a round, so that the GPU never waits for it
)
LONGEST_LEAD = 16  # times the first, where the host is slow; who waits for the GPU is late with any
WARM_UP_ROUNDS = 2
OLD = "old"  # the contender that is an older rawattn
# Relative distance of two results above which one of them is wrong: derivatives in 16 bits are
# farther from the truth than values.
SAME = {"forward": 0.02, "backward": 0.05, "second": 0.05, "jvp": 0.05}
DEFAULT_PEERS = (
    *("sdpa_flash", "torch_varlen", "sdpa_cudnn", "fa4", "fa3_fwd"),
    *("torch_math", "jvp_flash_attention", "fla_nsa", "lucidrains_triton"),
)
LATE = 0.05  # of the calls under continuous load, for which the GPU may wait
HEAT_SIZE = 8192  # rows of the square product that heats

Row = dict[str, Any]
Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Plan:
    """How a row is measured.

    ``rounds`` of interleaved calls, each queued in ``lead`` GPU cycles, or more where the host is
    slow (0: the host's time counts too). ``sustained``: seconds of continuous load for each
    contender, 0 for none, after ``heat`` seconds of matrix products. ``old``: an older rawattn,
    timed as one more contender.
    """

    peers: tuple[str, ...] = DEFAULT_PEERS
    methods: tuple[str, ...] = ()
    rounds: int = 15
    lead: int = LEAD_CYCLES
    sustained: float = 0.0
    heat: float = 1.0
    old: ModuleType | None = None


def time_rounds(calls: Calls, rounds: int, lead: int = LEAD_CYCLES) -> dict[str, float]:
    """Median milliseconds of each call; A, B, C, C, B, A, ... so that all see the same clocks and
    none is always the first of a round.

    A time that began before the host had queued the whole call has the host's in it and does not
    count. Where more than half of a call's are such the lead grows, up to LONGEST_LEAD times.
    """
    longest = lead * LONGEST_LEAD
    while True:
        times = _interleaved(calls, rounds, lead)
        timely = {name: [ms for ms, late in of if not late] for name, of in times.items()}
        if lead >= longest or all(len(of) > rounds // 2 for of in timely.values()):
            break
        lead *= 4
    return {
        name: statistics.median(timely[name] or [ms for ms, _ in of]) for name, of in times.items()
    }


def _interleaved(calls: Calls, rounds: int, lead: int) -> dict[str, list[tuple[float, bool]]]:
    """Milliseconds of each call in each round, and whether the host was late with it."""
    import torch

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events: dict[str, list[Any]] = {name: [] for name in calls}
    order = list(calls.items())
    for _ in range(WARM_UP_ROUNDS + rounds):
        torch.cuda._sleep(lead)
        for name, call in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            events[name].append((start, end, lead > 0 and start.query()))
        order.reverse()
    torch.cuda.synchronize()
    return {
        name: [(start.elapsed_time(end), late) for start, end, late in of[WARM_UP_ROUNDS:]]
        for name, of in events.items()
    }


def heat(seconds: float) -> None:
    """Keep the tensor cores busy for so long: the power limit then sets the clocks."""
    import torch

    x = torch.randn(HEAT_SIZE, HEAT_SIZE, device="cuda", dtype=torch.bfloat16)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        for _ in range(10):
            x @ x
        torch.cuda.synchronize()


def time_sustained(calls: Calls, guess: dict[str, float], plan: Plan) -> dict[str, float]:
    """Milliseconds of a call in a queue of nothing else, ``plan.sustained`` seconds long.

    ``guess`` are the times that say how many calls that is. The first quarter goes untimed, in
    which clocks settle to this contender. Who keeps the GPU waiting for the host is left out.
    """
    import torch

    times = {}
    heat(plan.heat)
    for name, call in calls.items():
        number = max(4, int(plan.sustained * 1e3 / guess[name]))
        untimed = number // 3
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(untimed + number)]
        late = 0
        for index, end in enumerate(ends):
            call()
            late += index >= untimed and ends[index - 1].query()
            end.record()
        torch.cuda.synchronize()
        if late <= LATE * number:
            times[name] = ends[untimed - 1].elapsed_time(ends[-1]) / number
    return times


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


def measure_row(case: BenchCase, direction: str, plan: Plan) -> Row:
    """What records hold of it; ``errors`` says which contenders failed, or disagreed, and how."""
    from measure.contenders import DIRECTIONS, chosen_row, make, methods_of, ours, theirs
    from measure.peers import importable

    data, compared = make(case), DIRECTIONS[direction].results
    errors: dict[str, str] = {}
    call, result, gib = with_memory(ours(case, data, direction))
    mine, calls, memory = result[:compared], {"ours": call}, {"ours": gib}
    for method in methods_of(case, plan.methods) if direction == "backward" else ():
        calls[method] = ours(case, data, direction, method).prepare()
    others = {peer: partial(theirs, peer) for peer in filter(importable, plan.peers)}
    if plan.old:
        others[OLD] = partial(ours, api=plan.old)
    for name, contend in others.items():
        try:
            contender = contend(case, data, direction)
            if contender is None:
                continue
            call, result, gib = with_memory(contender)
            its = map(contender.packed, result[:compared])
            apart = distances(mine, its) if contender.same else []
        except Exception as error:  # foreign code: it may fail in any way, and the rest goes on
            errors[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        if not all(distance < SAME[direction] for distance in apart):
            shown = ", ".join(f"{distance:.2g}" for distance in apart)
            errors[name] = f"its results and ours differ by {shown} of their size"
            continue
        calls[name], memory[name] = call, gib
    times = time_rounds(calls, plan.rounds, plan.lead)
    row: Row = {"suite": case.suite, "case": case.name, "direction": direction}
    row |= dict(zip(("kernels", "row"), chosen_row(case, direction), strict=True))
    row |= _by_kind(times, "{}_ms", "{}", 5)
    row["ours_tflops"] = round(case.flop(direction) / row["ours_ms"] * 1e-9, 1)
    row |= _by_kind(memory, "{}_gib", "{}_gib", 4)
    if plan.sustained:
        timed = {name: call for name, call in calls.items() if name not in METHODS}
        row |= _by_kind(time_sustained(timed, times, plan), "{}_sustained_ms", "{}_sustained", 5)
        row["sustained_ms"] = row.pop("ours_sustained_ms", None)
    if by_method := {name: round(ms, 5) for name, ms in times.items() if name in METHODS}:
        row["methods"] = by_method
    if errors:
        row["errors"] = errors
    return row


def _by_kind(values: dict[str, float], own: str, peers: str, digits: int) -> Row:
    """A row's fields: ours and the old one's each in its own, the peers' in one together."""
    rounded = {name: round(x, digits) for name, x in values.items() if name not in METHODS}
    fields = {own.format(name): rounded.pop(name) for name in ("ours", OLD) if name in rounded}
    return fields | {peers.format("peers"): rounded}


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
    plan: Plan | None = None,
    budget: float = 300.0,
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
            row = measure_row(case, direction, plan or Plan())
        except Exception as error:  # one that fails must not cost the run the others
            click.echo(f"{name}: {type(error).__name__}: {error}", err=True)
            continue
        finally:
            torch.cuda.empty_cache()
        against = f"  {row['old_ms'] / row['ours_ms']:.3f} old/new" if "old_ms" in row else ""
        measured = f"{row['ours_tflops']:6.0f} TFLOP/s {row['ours_gib']:8.3f} GiB"
        click.echo(f"{name:34} {measured}{against}")
        rows.append(row)
    return rows
