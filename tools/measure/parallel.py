"""Attention over several ranks beside one rank alone and beside other libraries, in one run.

Others compute with rawattn's kernels too, by flash-attn's names, so that what differs is who sends
what when. Every time is that of the slowest rank, of a forward and its backward. Long, since all
contenders stand beside what takes their time.
"""

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rawattn import api
from rawattn.torch import context_parallel as cp
from rawattn.torch import flash_attn, varlen_attn
from rawattn.torch.context_parallel import exchange, peer_memory

Row = dict[str, Any]
Step = Callable[[], tuple[Tensor, ...]]  # out, dq, dk and dv of this rank's tokens
LAYOUTS, METHODS = ("contiguous", "zigzag"), ("auto", "gather", "ring", "ulysses")
FLOPS = 14  # a pair, a head and a number of head_dim: two products forward, five backward
SAME = 0.05  # relative distance of results in 16 bits above which one is wrong
MEAN, GRAIN = 8192, 128  # of documents: tokens, and of what their length is a multiple
WARM_UP = 2
LEAD_CYCLES = 40_000_000  # of the wait before a step, some 20 ms: no step's launch takes as long


@dataclass(frozen=True)
class Case:
    """Causal self-attention of packed documents."""

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128

    @property
    def offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    @property
    def flop(self) -> float:
        pairs = sum(n * (n + 1) // 2 for n in self.lengths)
        return float(FLOPS * pairs * self.heads[0] * self.head_dim)


def documents(tokens: int, mean: int, grain: int) -> tuple[int, ...]:
    """Lengths between a quarter and 7 quarters of the mean, the same at every call."""
    drawn, lengths = random.Random(tokens), []
    while room := tokens - sum(lengths):
        lengths.append(min(room, drawn.randint(mean // 4, 7 * mean // 4) // grain * grain or grain))
    return tuple(lengths)


def cases(tokens: tuple[int, ...], on_gpu: bool) -> list[Case]:
    """One document, and documents. Small ones where there is no GPU."""
    mean, grain = (MEAN, GRAIN) if on_gpu else (64, 16)
    small: dict[str, Any] = {} if on_gpu else {"heads": (8, 4), "head_dim": 16}
    return [
        case
        for n in tokens
        for case in (
            Case(f"one {n}", (n,), **small),
            Case(f"documents {n}", documents(n, mean, grain), **small),
        )
    ]


def tensors(case: Case, device: torch.device) -> list[Tensor]:
    """q, k, v and dout of the whole batch; the same on every rank."""
    made = torch.Generator(device).manual_seed(0)
    (heads, heads_kv), dtype = case.heads, torch.bfloat16
    return [
        torch.randn(case.offsets[-1], n, case.head_dim, generator=made, device=device, dtype=dtype)
        for n in (heads, heads_kv, heads_kv, heads)
    ]


class Contender(NamedTuple):
    """A forward and a backward of this rank's part, and which part of a whole tensor that is."""

    step: Step
    own: Callable[[Tensor], Tensor]
    method: str = ""


def contender(
    attend: Callable[..., Tensor],
    whole: list[Tensor],
    own: Callable[[Tensor], Tensor],
    method: str = "",
) -> Contender:
    *parts, dout = (own(x) for x in whole)
    inputs = [x.detach().clone().requires_grad_() for x in parts]
    dout = dout.clone()

    def step() -> tuple[Tensor, ...]:
        out = attend(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, dout)

    return Contender(step, own, method)


# ---- contenders -------------------------------------------------------------------------------


def whole_batch(case: Case, device: torch.device) -> Callable[..., Tensor]:
    """Attention of one rank to all tokens."""
    offsets = torch.tensor(case.offsets, dtype=torch.int32, device=device)
    return lambda *qkv: only(varlen_attn(*qkv, offsets, causal=True))


def by_plan(plan: cp.Plan) -> Callable[..., Tensor]:
    """Attention of all ranks."""
    return lambda *qkv: only(cp.attn(*qkv, plan, causal=True))


def only(out: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """out, of a call that gives no lse."""
    assert isinstance(out, Tensor)
    return out


def alone(case: Case, whole: list[Tensor]) -> Contender:
    """The whole batch on every rank: what one card does."""
    return contender(whole_batch(case, whole[0].device), whole, lambda x: x)


def ours(case: Case, whole: list[Tensor], layout: str, method: str) -> Contender:
    plan = cp.plan(case.offsets, layout=layout, method=method)
    return contender(by_plan(plan), whole, lambda x: cp.shard(x, plan), method)


def ring_flash_attn(module: str) -> ModuleType:
    """A module of the library, on rawattn's kernels. Not its package, which imports its adapters
    of transformers; nor its forms for dense batches, whose kernels have no names here."""
    stand_in: Any = ModuleType("flash_attn.flash_attn_interface")
    stand_in.__dict__.update(vars(flash_attn))
    stand_in._flash_attn_forward = stand_in._flash_attn_backward = None
    found = PathFinder.find_spec("ring_flash_attn")
    if found is None:
        raise ModuleNotFoundError("No module named 'ring_flash_attn'")
    package = ModuleType("ring_flash_attn")
    package.__path__ = [*(found.submodule_search_locations or ())]
    sys.modules |= {
        "flash_attn": stand_in,
        "flash_attn.flash_attn_interface": stand_in,
        "ring_flash_attn": package,
    }
    return import_module(f"ring_flash_attn.{module}")


def zigzag_ring(case: Case, whole: list[Tensor]) -> Contender:
    library = ring_flash_attn("zigzag_ring_flash_attn_varlen")
    rank, ranks = _where()
    offsets = torch.tensor(case.offsets, dtype=torch.int32, device=whole[0].device) // ranks
    longest = max(case.lengths) // ranks

    def own(x: Tensor) -> Tensor:
        chunks = [d.chunk(2 * ranks) for d in x.split(case.lengths)]
        return torch.cat([part for c in chunks for part in (c[rank], c[2 * ranks - 1 - rank])])

    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = library.zigzag_ring_flash_attn_varlen_func(
            *qkv, offsets, longest, causal=True
        )
        return out

    return contender(attend, whole, own)


def llama3(case: Case, whole: list[Tensor]) -> Contender:
    library = ring_flash_attn("llama3_flash_attn_varlen")
    rank, ranks = _where()
    offsets = torch.tensor(case.offsets, dtype=torch.int32, device=whole[0].device)
    *where, keys = library.llama3_flash_attn_prepare_cu_seqlens(offsets, True, rank, ranks)

    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = library.llama3_flash_attn_varlen_func(
            *(*qkv, *where), heads_k_stride=1, local_k_slice=keys, causal=True
        )
        return out

    return contender(attend, whole, lambda x: x.chunk(ranks)[rank])


def deepspeed_ulysses(case: Case, whole: list[Tensor]) -> Contender:
    import_module("deepspeed").init_distributed(verbose=False)
    layer, (rank, ranks) = import_module("deepspeed.sequence.layer"), _where()
    offsets = torch.tensor(case.offsets, dtype=torch.int32, device=whole[0].device)

    def local(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        return only(varlen_attn(q[0], k[0], v[0], offsets, causal=True))[None]

    split = layer.DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = split(*(x[None] for x in qkv), 0)[0]
        return out

    return contender(attend, whole, lambda x: x.chunk(ranks)[rank])


PEERS = {
    "ring-flash-attn zigzag": zigzag_ring,
    "ring-flash-attn llama3": llama3,
    "DeepSpeed Ulysses": deepspeed_ulysses,
}


def _where() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# ---- times and memory -------------------------------------------------------------------------


class Took(NamedTuple):
    """Milliseconds of a step, and of its launch on the host alone."""

    ms: float
    host_ms: float


def took(step: Step, device: torch.device) -> Took:
    """By the slowest rank. On GPUs a step is queued behind a wait, as it is in training behind what
    precedes it, and begins when all ranks are there."""
    dist.barrier()
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        meeting = torch.zeros(1, device=device)
        torch.cuda.synchronize()
        torch.cuda._sleep(LEAD_CYCLES)  # type: ignore[no-untyped-call]
        dist.all_reduce(meeting)
        begin.record()
        began = time.perf_counter()
        step()
        host = (time.perf_counter() - began) * 1e3
        end.record()
        torch.cuda.synchronize()
        return Took(most(begin.elapsed_time(end), device), most(host, device))
    began = time.perf_counter()
    step()
    taken = (time.perf_counter() - began) * 1e3
    return Took(most(taken, device), most(taken, device))


def most(number: float, device: torch.device) -> float:
    """Over the ranks."""
    found = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def peak(step: Step, device: torch.device) -> float:
    """GiB that a rank has at most during the step, with inputs, and outboxes of any earlier step;
    inf where they do not do."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    enough = True
    try:
        step()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        enough = False
    gib = (torch.cuda.max_memory_allocated() + peer_memory.held(device)) / 2**30
    return most(gib if enough else float("inf"), device)


def distance(found: Iterable[Tensor], wanted: Iterable[Tensor], device: torch.device) -> float:
    """The largest of the tensors', over the size of what is wanted; NaN is far."""
    apart = max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
        for a, b in zip(found, wanted, strict=True)
    )
    return most(apart if apart == apart else float("inf"), device)


@contextmanager
def without_sending() -> Iterator[None]:
    """Attention alone: nothing comes, but noise, as zeros would spare power."""
    real, noise = exchange.send, dict[torch.dtype, Tensor]()

    def filled(rows: Tensor) -> None:
        known = noise.get(rows.dtype)
        if known is None or known.numel() < rows.numel():
            known = noise[rows.dtype] = torch.randn_like(rows).flatten()
        rows.copy_(known[: rows.numel()].view(rows.shape))

    def send(loads: Sequence[exchange.Load], group: dist.ProcessGroup) -> list[Any]:
        del group
        for load in loads:
            for rows in load.into:
                filled(rows)
        return []

    exchange.send = send
    try:
        yield
    finally:
        exchange.send = real


@contextmanager
def without_attending() -> Iterator[None]:
    """Communication alone, with what is packed for it and merged after it."""
    real = api.forward, api.backward

    def forward(q: Tensor, _k: Tensor, v: Tensor, *_: Any, **named: Any) -> tuple[Tensor, Tensor]:
        out = named.get("out")
        out = q.new_zeros((*q.shape[:2], v.shape[2])) if out is None else out
        return out, q.new_zeros((q.shape[1], q.shape[0]), dtype=torch.float32)

    def backward(_do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **named: Any) -> Any:
        dq = named.get("dq")
        return torch.zeros_like(q) if dq is None else dq, torch.zeros_like(k), torch.zeros_like(v)

    api.forward, api.backward = forward, backward  # type: ignore[assignment]
    try:
        yield
    finally:
        api.forward, api.backward = real


def measure(
    case: Case, device: torch.device, rounds: int, peers: bool, only: str = ""
) -> list[Row]:
    """Of each contender time, share of what the ranks could do, memory; or what it raised."""
    whole, ranks = tensors(case, device), dist.get_world_size()
    makes: dict[str, Callable[[], Contender]] = {"one rank": lambda: alone(case, whole)}
    for layout, method in itertools.product(LAYOUTS, METHODS):
        makes[f"{layout} {method}"] = partial(ours, case, whole, layout, method)
    if peers:
        makes |= {name: partial(make, case, whole) for name, make in PEERS.items()}
    makes = {name: make for name, make in makes.items() if name == "one rank" or only in name}
    wanted = makes["one rank"]().step()
    found: dict[str, Contender] = {}
    rows: dict[str, Row] = {name: {} for name in makes}
    for name, make in makes.items():
        try:
            found[name] = make()
            results = found[name].step()
        except Exception as error:  # foreign code: it may fail in any way, and the rest goes on
            rows[name]["error"] = f"{type(error).__name__}: {error}"[:200]
            found.pop(name, None)
            continue
        apart = distance(results, [found[name].own(x) for x in wanted], device)
        rows[name] |= {"distance": apart, "gib": round(peak(found[name].step, device), 3)}
        if not apart <= SAME:
            rows[name]["error"] = "another result than one rank's"
    times: dict[str, list[Took]] = {name: [] for name in found}
    order = list(found.items())
    for _ in range(WARM_UP + rounds):
        for name, each in order:
            times[name].append(took(each.step, device))
        order.reverse()  # so that nobody always follows the longest step
    alone_ms = statistics.median(each.ms for each in times["one rank"][WARM_UP:])
    for name, each in found.items():
        ms, host_ms = (statistics.median(x) for x in zip(*times[name][WARM_UP:], strict=True))
        rows[name] |= {"ms": ms, "share": alone_ms / (ranks * ms), "host_ms": host_ms}
        if each.method in METHODS[1:]:
            with without_sending():
                rows[name]["attention_ms"] = took(each.step, device).ms
            with without_attending():
                rows[name]["communication_ms"] = took(each.step, device).ms
    rows["one rank"]["tflops"] = round(case.flop / alone_ms * 1e-9, 4)
    return [{"case": case.name, "contender": name} | row for name, row in rows.items()]


def memory_of(tokens: int, device: torch.device, only: str = "") -> list[Row]:
    """What a rank takes at most for one document, and how long: alone, and by each way of ours, of
    its part."""
    case = Case(f"memory of one {tokens}", (tokens,))
    rows = []
    for layout, method in [("", "one rank"), *itertools.product(LAYOUTS, METHODS[1:])]:
        name = f"{layout} {method}".strip()
        if not layout or only in name:
            gib, ms = _peak_of_own(case, layout, method, device)
            took = {"gib": gib, "ms": ms} if gib < float("inf") else {"error": "out of memory"}
            rows.append({"case": case.name, "contender": name} | took)
    return rows


def _peak_of_own(case: Case, layout: str, method: str, device: torch.device) -> tuple[float, float]:
    """GiB and milliseconds, without the whole batch beside it."""
    plan = cp.plan(case.offsets, layout=layout, method=method) if layout else None
    count = case.offsets[-1] if plan is None else plan.num_tokens()
    part = Case(case.name, (count,), case.heads, case.head_dim)
    attend = whole_batch(case, device) if plan is None else by_plan(plan)

    def step() -> tuple[Tensor, ...]:
        return contender(attend, tensors(part, device), lambda x: x).step()

    began = time.perf_counter()
    gib = round(peak(step, device), 3)
    return gib, (time.perf_counter() - began) * 1e3
