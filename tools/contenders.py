"""How rawattn and each peer compute one benchmark case: a forward and a backward call to be timed.

A peer that is not installed, or does not cover a case, is left out. Peers with an autograd graph
are timed as ``torch.autograd.grad`` over a graph built once; ours as ``rawattn.backward``.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

import rawattn
from cases import BenchCase
from rawattn.problem import Problem
from rawattn.variants import select


@dataclass(frozen=True)
class Data:
    """One case's tensors on the GPU: packed q, k, v, dout, and the sequences' offsets."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    cu_seqlens: torch.Tensor


@dataclass(frozen=True)
class Contender:
    """The calls to time; ``out`` is what the forward gave, packed, to compare with the others."""

    forward: Callable[[], Any]
    backward: Callable[[], Any] | None
    out: torch.Tensor


def make(case: BenchCase) -> Data:
    """Standard normal q, k, v and dout, the same on every run."""
    generator = torch.Generator(device="cuda").manual_seed(1)

    def packed(heads: int) -> torch.Tensor:
        shape = (case.total, heads, case.head_dim)
        dtype = getattr(torch, case.dtype)
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

    q, k, v, dout = map(
        packed, (case.num_heads_q, case.num_heads_kv, case.num_heads_kv, case.num_heads_q)
    )
    offsets = list(accumulate(case.lengths, initial=0))
    return Data(q, k, v, dout, torch.tensor(offsets, dtype=torch.int32, device="cuda"))


def ours(case: BenchCase, data: Data, method: str | None = None) -> Contender:
    """rawattn on torch tensors; ``method`` as ``rawattn.backward`` takes it."""
    q, k, v, dout, cu_seqlens = data.q, data.k, data.v, data.dout, data.cu_seqlens

    def forward() -> Any:
        return rawattn.forward(q, k, v, cu_seqlens, causal=case.causal, return_lse=True)

    out, lse = forward()

    def backward() -> Any:
        return rawattn.backward(
            dout, q, k, v, out, lse, cu_seqlens, causal=case.causal, method=method
        )

    return Contender(forward, backward, out)


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
    return select("forward" if direction == "forward" else "backward_kv", problem).family


def _graph(
    function: Callable[..., torch.Tensor],
    leaves: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    packed: Callable[[torch.Tensor], torch.Tensor],
) -> Contender:
    """A peer whose backward is torch's autograd; ``packed`` brings its output to our layout."""
    plain = tuple(leaf.detach() for leaf in leaves)
    grown = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    out = function(*grown)
    return Contender(
        forward=lambda: function(*plain),
        backward=lambda: torch.autograd.grad(out, grown, dout, retain_graph=True),
        out=packed(out.detach()),
    )


def _batched(case: BenchCase, x: torch.Tensor) -> torch.Tensor:
    return x.view(len(case.lengths), case.lengths[0], -1, case.head_dim)


def _sdpa(backend: str, case: BenchCase, data: Data) -> Contender | None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not case.equal_lengths:
        return None
    chosen = getattr(SDPBackend, backend)
    group = case.num_heads_q != case.num_heads_kv

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(chosen):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=group
            )

    q, k, v, dout = (_batched(case, x).transpose(1, 2) for x in (data.q, data.k, data.v, data.dout))
    return _graph(attention, (q, k, v), dout, lambda out: out.transpose(1, 2).reshape(data.q.shape))


def sdpa_flash(case: BenchCase, data: Data) -> Contender | None:
    """torch's scaled_dot_product_attention on FlashAttention-2; equal lengths only."""
    return _sdpa("FLASH_ATTENTION", case, data)


def sdpa_cudnn(case: BenchCase, data: Data) -> Contender | None:
    """torch's scaled_dot_product_attention on cuDNN; equal lengths only."""
    return _sdpa("CUDNN_ATTENTION", case, data)


def torch_varlen_call(case: BenchCase, cu_seqlens: torch.Tensor) -> Callable[..., torch.Tensor]:
    """torch's own varlen_attn as a function of q, k, v, whichever keywords this version has."""
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = (
        {"is_causal": case.causal}
        if "is_causal" in names
        else {"window_size": (-1, 0 if case.causal else -1)}
    )
    if "enable_gqa" in names:
        options["enable_gqa"] = case.num_heads_q != case.num_heads_kv
    longest = max(case.lengths)
    return lambda q, k, v: varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)


def torch_varlen(case: BenchCase, data: Data) -> Contender:
    """torch's packed attention (FlashAttention-2)."""
    call = torch_varlen_call(case, data.cu_seqlens)
    return _graph(call, (data.q, data.k, data.v), data.dout, lambda out: out)


def flex(case: BenchCase, data: Data) -> Contender:
    """FlexAttention with a document mask, compiled anew for every case."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    lengths = torch.tensor(case.lengths, device="cuda")
    document = torch.repeat_interleave(torch.arange(len(case.lengths), device="cuda"), lengths)

    def allowed(_batch: Any, _head: Any, i: Any, j: Any) -> Any:
        same = document[i] == document[j]
        return same & (i >= j) if case.causal else same

    mask = torch.compile(create_block_mask)(allowed, None, None, case.total, case.total)
    compiled = torch.compile(flex_attention, dynamic=False)
    group = case.num_heads_q != case.num_heads_kv
    q, k, v, dout = (
        x.transpose(0, 1)[None].contiguous() for x in (data.q, data.k, data.v, data.dout)
    )
    return _graph(
        lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=group),
        (q, k, v),
        dout,
        lambda out: out[0].transpose(0, 1),
    )


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def fa4(case: BenchCase, data: Data) -> Contender:
    """FlashAttention-4 (flash_attn.cute)."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if case.equal_lengths:
        q, k, v, dout = (_batched(case, x) for x in (data.q, data.k, data.v, data.dout))
        return _graph(
            lambda q, k, v: _first(flash_attn_func(q, k, v, causal=case.causal)),
            (q, k, v),
            dout,
            lambda out: out.reshape(data.q.shape),
        )
    options = {
        "cu_seqlens_q": data.cu_seqlens,
        "cu_seqlens_k": data.cu_seqlens,
        "max_seqlen_q": max(case.lengths),
        "max_seqlen_k": max(case.lengths),
        "causal": case.causal,
    }
    return _graph(
        lambda q, k, v: _first(flash_attn_varlen_func(q, k, v, **options)),
        (data.q, data.k, data.v),
        data.dout,
        lambda out: out,
    )


def fa3_fwd(case: BenchCase, data: Data) -> Contender | None:
    """FlashAttention-3's forward, as packaged for bfloat16."""
    import fa3_fwd_interface as fa3

    if case.dtype != "bfloat16":
        return None
    if case.equal_lengths:
        q, k, v = (_batched(case, x) for x in (data.q, data.k, data.v))

        def forward() -> torch.Tensor:
            return _first(fa3.flash_attn_func(q, k, v, causal=case.causal))
    else:
        cu_seqlens, longest = data.cu_seqlens, max(case.lengths)

        def forward() -> torch.Tensor:
            return _first(
                fa3.flash_attn_varlen_func(
                    data.q,
                    data.k,
                    data.v,
                    cu_seqlens,
                    cu_seqlens,
                    longest,
                    longest,
                    causal=case.causal,
                )
            )

    return Contender(forward, None, forward().reshape(data.q.shape))


PEERS: dict[str, Callable[[BenchCase, Data], Contender | None]] = {
    "sdpa_flash": sdpa_flash,
    "sdpa_cudnn": sdpa_cudnn,
    "torch_varlen": torch_varlen,
    "flex": flex,
    "fa4": fa4,
    "fa3_fwd": fa3_fwd,
}
_MODULES = {
    "torch_varlen": "torch.nn.attention.varlen",
    "fa4": "flash_attn.cute",
    "fa3_fwd": "fa3_fwd_interface",
}


def importable(peer: str) -> bool:
    """Whether what ``peer`` needs beyond torch is installed."""
    try:
        return find_spec(_MODULES.get(peer, "torch")) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
