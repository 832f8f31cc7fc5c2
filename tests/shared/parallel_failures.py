"""Mistakes of ranks that try context parallelism: calls that are wrong on one of them or on all,
and ranks that are gone in the midst of a step.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rawattn.torch import context_parallel as cp
from rawattn.torch.context_parallel import exchange
from tests.shared.parallel_use import LENGTHS, here

# ---- calls that are wrong on some rank --------------------------------------------------------


def _other_lengths(odd: bool) -> None:
    cp.plan([0, 7, 20] if odd else [0, 8, 20])


def _other_layout(odd: bool) -> None:
    cp.plan(LENGTHS, layout="zigzag" if odd else "contiguous")


def _falling(odd: bool) -> None:
    cp.plan([0, 9, 4] if odd else [0, 4, 9])


def _no_method(odd: bool) -> None:
    cp.plan(LENGTHS, method="rings")


def _no_offsets(odd: bool) -> None:
    cp.plan(torch.tensor(LENGTHS, device="meta") if odd else LENGTHS)


def _other_batch_of_keys(odd: bool) -> None:
    cp.plan([0, 4, 9], cu_seqlens_k=[0, 9])


def _no_part(odd: bool) -> None:
    cp.plan(LENGTHS, min_chunk=0)


def _two_dimensions(odd: bool) -> None:
    cp.plan(LENGTHS, init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp")))


def _uneven_heads(odd: bool) -> None:
    plan = cp.plan(LENGTHS, method="ulysses")
    cp.attn(*here(plan, heads=(3, 3)), plan)


def _tokens(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    q, k, v = here(plan)
    cp.attn(q[1:] if odd else q, k, v, plan)


def _dtype(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    cp.attn(*here(plan, dtype=torch.float32 if odd else torch.float64), plan)


def _mask(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    cp.attn(*here(plan), plan, causal=odd)


def _window(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    cp.attn(*here(plan), plan, window=(-2, 3) if odd else (2, 3))


def _head_dim_where_one_has_no_work(odd: bool) -> None:
    plan = cp.plan([0, 1])
    x = torch.randn(plan.num_tokens(), 2, 0)
    cp.attn(x, x, x, plan)


def _sinks(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    cp.attn(*here(plan), plan, sinks=torch.zeros(3 if odd else 4))


def _gradients(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    q, k, v = here(plan)
    cp.attn(q, k.detach() if odd else k, v, plan)


def _foreign(odd: bool) -> None:
    plan = cp.plan(LENGTHS)
    cp.attn(*here(plan), plan, max_seqlen=9)


def _not_a_part(odd: bool) -> None:
    cp.shard(torch.zeros(7, 2), cp.plan(LENGTHS))


# By name: what to call, and what the error says on the odd rank and on the other one.
WRONG: dict[str, tuple[Callable[[bool], None], tuple[str, str]]] = {
    "other lengths": (_other_lengths, ("ranks disagree in plan", "ranks disagree in plan")),
    "another layout": (_other_layout, ("ranks disagree in plan", "zigzag")),
    "offsets that fall": (_falling, ("do not fall", "plan failed on another rank")),
    "no such method": (_no_method, ("expected one of auto", "expected one of auto")),
    "offsets on a device": (_no_offsets, ("on the host", "rank 1: ValueError: cu_seqlens is on")),
    "other sequences of keys": (_other_batch_of_keys, ("equally many", "equally many")),
    "chunks of nothing": (_no_part, ("min_chunk is 0", "min_chunk is 0")),
    "a mesh of two dimensions": (_two_dimensions, ("mesh['cp']", "mesh['cp']")),
    "uneven heads": (_uneven_heads, ("multiple of these", "multiple of these")),
    "tokens of another plan": (_tokens, ("context_parallel.shard", "attn failed on another rank")),
    "another dtype": (_dtype, ("ranks disagree in attn", "ranks disagree in attn")),
    "another mask": (_mask, ("ranks disagree in attn", "ranks disagree in attn")),
    "a window of -2": (_window, ("window", "attn failed on another rank")),
    "head_dim 0": (_head_dim_where_one_has_no_work, ("head size 0", "head size 0")),
    "sinks of other heads": (_sinks, ("sinks", "attn failed on another rank")),
    "a leaf without gradient": (_gradients, ("ranks disagree in attn", "ranks disagree in attn")),
    "an argument of others": (_foreign, ("leave it out", "leave it out")),
    "a tensor of another batch": (_not_a_part, ("expected the 200", "expected the 200")),
}


def wrong_calls() -> dict[str, str]:
    """What each raises on this rank; all of them return, and the group still works."""
    odd, heard = dist.get_rank() == 1, {}
    for name, (call, _) in WRONG.items():
        try:
            call(odd)
            heard[name] = "nothing"
        except (TypeError, ValueError, RuntimeError) as error:
            heard[name] = str(error)
        dist.barrier()
    return heard


def not_in_the_group() -> str:
    group = dist.new_group([0, 1])
    try:
        cp.plan(LENGTHS, group)
    except ValueError as error:
        return str(error)
    return ""


# ---- ranks that fail --------------------------------------------------------------------------


def step(plan: cp.Plan, device: str = "cpu") -> None:
    q, k, v = here(plan, device=device)
    out = cp.attn(q, k, v, plan, causal=True)
    assert isinstance(out, Tensor)
    out.square().sum().backward()
    if device != "cpu":
        torch.cuda.synchronize()  # calls return before anything has come


class Gone:
    """In the place of an exchange: at its third call the process ends without a word."""

    def __init__(self) -> None:
        self.calls, self.real = 0, exchange.send

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            os._exit(1)
        return self.real(*args, **named)


def failing(method: str, how: str, device: str = "cpu") -> float:
    """The last rank does what ``how`` says in the second step; seconds of the others' wait."""
    plan = cp.plan(LENGTHS, layout="zigzag", method=method, min_chunk=4)
    step(plan, device)
    if dist.get_rank() == dist.get_world_size() - 1:
        if how == "killed":
            exchange.send = Gone()
        elif how == "raising":
            raise ArithmeticError("on this rank alone")
        else:
            time.sleep(float(how))
            return 0.0
    began = time.monotonic()
    try:
        step(plan, device)
    except RuntimeError:
        return time.monotonic() - began
    return -1.0
