"""How rawattn and each peer compute one benchmark case in one direction: a call to be timed.

The backward of a peer is ``torch.autograd.grad`` over a graph built once, its second backward the
same over the graph of the first, with respect to dout, q, k and v, and its forward mode that of
dual tensors. Ours are rawattn's own functions, one call each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

import rawattn
from cases import BenchCase
from peers import PEERS, Attention
from rawattn.problem import Problem
from rawattn.variants import select

Call = Callable[[], tuple[Tensor, ...]]


class Data(NamedTuple):
    """One case's packed tensors, and the sequences' offsets.

    ddq, ddk and ddv are the cotangents of dq, dk and dv in a second backward, and the tangents of
    q, k and v in forward mode.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    ddq: Tensor
    ddk: Tensor
    ddv: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True)
class Contender:
    """``prepare`` gives the call to time; ``packed`` brings a tensor of its result to our layout.

    Memory that is neither an input nor one in another layout is taken by the two alone.
    """

    prepare: Callable[[], Call]
    packed: Callable[[Tensor], Tensor]


def make(case: BenchCase, device: str = "cuda") -> Data:
    """Standard normal tensors, the same on every run."""
    generator = torch.Generator(device=device).manual_seed(1)

    def packed(heads: int) -> Tensor:
        shape = (case.total, heads, case.head_dim)
        dtype = getattr(torch, case.dtype)
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    heads = (case.num_heads_q, case.num_heads_kv, case.num_heads_kv)
    tensors = map(packed, (*heads, case.num_heads_q, *heads))
    offsets = list(accumulate(case.lengths, initial=0))
    return Data(*tensors, torch.tensor(offsets, dtype=torch.int32, device=device))


def _our_forward(data: Data, mask: dict[str, Any], _method: str | None) -> Call:
    inputs = (data.q, data.k, data.v, data.cu_seqlens)
    return lambda: rawattn.forward(*inputs, **mask, return_lse=True)


def _our_backward(data: Data, mask: dict[str, Any], method: str | None) -> Call:
    out, lse = _our_forward(data, mask, None)()
    inputs = (data.dout, data.q, data.k, data.v, out, lse, data.cu_seqlens)
    return lambda: rawattn.backward(*inputs, **mask, method=method)


def _our_second(data: Data, mask: dict[str, Any], _method: str | None) -> Call:
    out, lse = _our_forward(data, mask, None)()
    first = (data.dout, data.q, data.k, data.v, out, lse, data.cu_seqlens)
    rawattn.backward(*first, **mask)  # its memory counts, as the graph of it does for a peer
    inputs = (data.ddq, data.ddk, data.ddv, *first)

    def call() -> tuple[Tensor, ...]:
        ddout, _ddlse, *gradients = rawattn.double_backward(*inputs, **mask)
        return (ddout, *gradients)

    return call


def _our_jvp(data: Data, mask: dict[str, Any], _method: str | None) -> Call:
    inputs = (data.q, data.k, data.v, data.ddq, data.ddk, data.ddv, data.cu_seqlens)
    return lambda: rawattn.jvp(*inputs, **mask)


def _forward(attention: Attention, data: Data) -> Call:
    return lambda: (attention(data.q, data.k, data.v),)


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def _backward(attention: Attention, data: Data) -> Call:
    leaves = _leaves(data.q, data.k, data.v)
    out = attention(*leaves)
    return lambda: torch.autograd.grad(out, leaves, data.dout, retain_graph=True)


def _second(attention: Attention, data: Data) -> Call:
    dout, *leaves = _leaves(data.dout, data.q, data.k, data.v)
    gradients = torch.autograd.grad(attention(*leaves), leaves, dout, create_graph=True)
    cotangents = (data.ddq, data.ddk, data.ddv)
    return lambda: torch.autograd.grad(gradients, (dout, *leaves), cotangents, retain_graph=True)


def _jvp(attention: Attention, data: Data) -> Call:
    pairs = ((data.q, data.ddq), (data.k, data.ddk), (data.v, data.ddv))

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad(), forward_ad.dual_level():
            out = attention(*(forward_ad.make_dual(*pair) for pair in pairs))
            return tuple(forward_ad.unpack_dual(out))

    return call


@dataclass(frozen=True)
class Direction:
    """How to compute it, by rawattn and by a peer; its ``results`` are compared."""

    ours: Callable[[Data, dict[str, Any], str | None], Call]
    theirs: Callable[[Attention, Data], Call]
    results: int  # how many leading tensors of what both give
    stem: str  # the kernel whose family stands for it


DIRECTIONS = {
    "forward": Direction(_our_forward, _forward, 1, "forward"),
    "backward": Direction(_our_backward, _backward, 3, "backward_kv"),
    "second": Direction(_our_second, _second, 4, "double_backward_kv"),
    "jvp": Direction(_our_jvp, _jvp, 2, "jvp"),
}


def ours(case: BenchCase, data: Data, direction: str, method: str | None = None) -> Contender:
    """rawattn on torch tensors; ``method`` as ``rawattn.backward`` takes it."""
    prepare = partial(DIRECTIONS[direction].ours, data, {"causal": case.causal}, method)
    return Contender(prepare, lambda x: x)


def theirs(name: str, case: BenchCase, data: Data, direction: str) -> Contender | None:
    """The peer of that name; None when it does not cover the case in this direction."""
    peer = PEERS[name]
    chosen = peer.attention(case, data.cu_seqlens) if direction in peer.directions else None
    if chosen is None:
        return None
    attention, layout = chosen
    brought = Data(*(layout.there(case, x) for x in data[:-1]), data.cu_seqlens)
    prepare = partial(DIRECTIONS[direction].theirs, attention, brought)
    return Contender(prepare, partial(layout.back, case))


def kernels(case: BenchCase, direction: str) -> str:
    """The kernel family that ours runs on for this case: sm80, sm90 or numba."""
    major, minor = torch.cuda.get_device_capability()
    problem = Problem(
        dtype=case.dtype,
        batch=len(case.lengths),
        total_q=case.total,
        total_k=case.total,
        num_heads_q=case.num_heads_q,
        num_heads_kv=case.num_heads_kv,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim,
        window_left=-1,
        window_right=0 if case.causal else -1,
        softmax_scale=case.head_dim**-0.5,
        arch=10 * major + minor,
        device=torch.cuda.current_device(),
    )
    return select(DIRECTIONS[direction].stem, problem).family
