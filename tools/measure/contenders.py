"""How rawattn and each peer compute one benchmark case in one direction: a call to be timed.

The backward of a peer is ``torch.autograd.grad`` over a graph built once, its second backward the
same over the graph of the first, with respect to dout, q, k and v, and its forward mode that of
dual tensors. Ours are rawattn's own functions, one call each; ``api`` is the package that has them,
this one or an older one beside it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

import rawattn
from measure.cases import BenchCase
from measure.peers import PEERS, Attention
from measure.selections import block_indices
from rawattn.problem import Problem, Selection, default_chunk
from rawattn.variants import METHODS, select

DETERMINISTIC = METHODS[-1]  # what ``deterministic=True`` takes

Call = Callable[[], tuple[Tensor, ...]]


class Data(NamedTuple):
    """One case's packed tensors, and the sequences' offsets.

    ddq, ddk and ddv are the cotangents of dq, dk and dv in a second backward, and the tangents of
    q, k and v in forward mode. ``block_indices`` are those of a case with a selection.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    ddq: Tensor
    ddk: Tensor
    ddv: Tensor
    cu_seqlens: Tensor
    block_indices: Tensor | None


@dataclass(frozen=True)
class Contender:
    """``prepare`` gives the call to time; ``packed`` brings a tensor of its result to our layout.

    Memory that is neither an input nor one in another layout is taken by the two alone. ``same``:
    it should give what ours does.
    """

    prepare: Callable[[], Call]
    packed: Callable[[Tensor], Tensor]
    same: bool = True


def make(case: BenchCase, device: str = "cuda") -> Data:
    """Standard normal tensors, the same on every run."""
    generator = torch.Generator(device=device).manual_seed(1)

    def packed(heads: int, dim: int) -> Tensor:
        shape, dtype = (case.total, heads, dim), getattr(torch, case.dtype)
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    q, k = (case.num_heads_q, case.head_dim), (case.num_heads_kv, case.head_dim)
    v, out = (case.num_heads_kv, case.head_dim_v), (case.num_heads_q, case.head_dim_v)
    tensors = (packed(*shape) for shape in (q, k, v, out, q, k, v))
    offsets = list(accumulate(case.lengths, initial=0))
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    return Data(*tensors, cu_seqlens, block_indices(case, generator) if case.selection else None)


def _function(api: ModuleType, name: str, case: BenchCase, data: Data) -> Callable[..., Any]:
    """rawattn's function of that name, or the block-sparse one, with what the case says of it.

    A selection is given as it comes: every call makes its own table of it.
    """
    if case.selection is None:
        return partial(getattr(api, name), causal=case.causal, window=(case.window, -1))
    return partial(
        getattr(api, f"sparse_{name}"),
        block_indices=data.block_indices,
        block_size=case.selection.block_size,
        include_own_block=case.selection.own,
        causal=case.causal,
    )


def _our_forward(api: ModuleType, case: BenchCase, data: Data, _method: str | None) -> Call:
    function = _function(api, "forward", case, data)
    return lambda: function(data.q, data.k, data.v, data.cu_seqlens, return_lse=True)


def _our_backward(api: ModuleType, case: BenchCase, data: Data, method: str | None) -> Call:
    function = _function(api, "backward", case, data)
    out, lse = _our_forward(api, case, data, None)()
    inputs = (data.dout, data.q, data.k, data.v, out, lse, data.cu_seqlens)
    if case.selection is None:
        return lambda: function(*inputs, method=method)
    return lambda: function(*inputs, deterministic=method == DETERMINISTIC)


def _our_second(api: ModuleType, case: BenchCase, data: Data, _method: str | None) -> Call:
    function = _function(api, "double_backward", case, data)
    out, lse = _our_forward(api, case, data, None)()
    first = (data.dout, data.q, data.k, data.v, out, lse, data.cu_seqlens)
    _function(api, "backward", case, data)(
        *first
    )  # its memory counts, as its graph does for a peer
    inputs = (data.ddq, data.ddk, data.ddv, *first)

    def call() -> tuple[Tensor, ...]:
        ddout, _ddlse, *gradients = function(*inputs)
        return (ddout, *gradients)

    return call


def _our_jvp(api: ModuleType, case: BenchCase, data: Data, _method: str | None) -> Call:
    function = _function(api, "jvp", case, data)
    inputs = (data.q, data.k, data.v, data.ddq, data.ddk, data.ddv, data.cu_seqlens)
    return lambda: function(*inputs)


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

    ours: Callable[[ModuleType, BenchCase, Data, str | None], Call]
    theirs: Callable[[Attention, Data], Call]
    results: int  # how many leading tensors of what both give
    stem: str  # the kernel whose family stands for it, dense and block-sparse
    sparse_stem: str


_DOUBLE = ("double_backward_kv", "sparse_double_backward_kv")
DIRECTIONS = {
    "forward": Direction(_our_forward, _forward, 1, "forward", "sparse_forward"),
    "backward": Direction(_our_backward, _backward, 3, "backward_kv", "sparse_backward_kv"),
    "second": Direction(_our_second, _second, 4, *_DOUBLE),
    "jvp": Direction(_our_jvp, _jvp, 2, "jvp", "sparse_double_backward_out"),
}


def methods_of(case: BenchCase, methods: Iterable[str]) -> list[str]:
    """Those of ``methods`` that the case's backward has: a block-sparse one, the deterministic."""
    return [name for name in methods if case.selection is None or name == DETERMINISTIC]


def ours(
    case: BenchCase,
    data: Data,
    direction: str,
    method: str | None = None,
    api: ModuleType = rawattn,
) -> Contender:
    """rawattn on torch tensors; ``method`` as ``rawattn.backward`` takes it."""
    prepare = partial(DIRECTIONS[direction].ours, api, case, data, method)
    return Contender(prepare, lambda x: x)


def theirs(name: str, case: BenchCase, data: Data, direction: str) -> Contender | None:
    """The peer of that name; None when it does not cover the case in this direction."""
    peer = PEERS[name]
    suited = peer.sparse if case.selection else peer.dense
    if case.alone or direction not in peer.directions or not suited:
        return None
    chosen = peer.attention(case, data.cu_seqlens if peer.dense else data.block_indices)
    if chosen is None:
        return None
    attention, layout = chosen
    brought = (layout.there(case, x) for x in data[: Data._fields.index("cu_seqlens")])
    packed = Data(*brought, data.cu_seqlens, data.block_indices)
    prepare = partial(DIRECTIONS[direction].theirs, attention, packed)
    return Contender(prepare, partial(layout.back, case), same=not (case.selection and peer.dense))


def chosen_row(case: BenchCase, direction: str) -> tuple[str, str]:
    """The kernel family that ours runs on, sm80, sm90 or numba, and its row's name."""
    major, minor = torch.cuda.get_device_capability()
    problem = Problem(
        dtype=case.dtype,
        batch=len(case.lengths),
        total_q=case.total,
        total_k=case.total,
        num_heads_q=case.num_heads_q,
        num_heads_kv=case.num_heads_kv,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        window_left=case.window,
        window_right=0 if case.causal else -1,
        softmax_scale=case.head_dim**-0.5,
        arch=10 * major + minor,
        device=torch.cuda.current_device(),
    )
    if case.selection is None:
        row = select(DIRECTIONS[direction].stem, problem)
        return row.family, row.name
    blocks = case.selection
    selection = Selection(
        num_heads_sel=case.num_heads_kv,
        num_selected=blocks.num_selected,
        block_size=blocks.block_size,
        own=blocks.own,
        chunk=default_chunk(case.total, problem.group, case.head_dim),
    )
    row = select(DIRECTIONS[direction].sparse_stem, problem, selection=selection)
    return row.family, row.name
