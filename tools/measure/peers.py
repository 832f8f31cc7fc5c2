"""The peers of the benchmark: each a function of q, k, v that torch differentiates.

A peer that is not installed, or does not cover a case, is left out.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from measure.cases import FIRST_ORDER, SECOND_ORDER, BenchCase

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """How a peer takes a tensor of ours, and how one of its own comes back."""

    there: Callable[[BenchCase, Tensor], Tensor]
    back: Callable[[BenchCase, Tensor], Tensor]


PACKED = Layout(lambda case, x: x, lambda case, x: x)
BATCHED = Layout(  # (batch, tokens, heads, head_dim)
    lambda case, x: x.view(len(case.lengths), case.lengths[0], *x.shape[1:]),
    lambda case, x: x.reshape(case.total, *x.shape[2:]),
)
HEADS_FIRST = Layout(  # (batch, heads, tokens, head_dim)
    lambda case, x: BATCHED.there(case, x).transpose(1, 2),
    lambda case, x: BATCHED.back(case, x.transpose(1, 2)),
)
HEADS_OUTSIDE = Layout(  # the same, and so in memory
    lambda case, x: HEADS_FIRST.there(case, x).contiguous(), HEADS_FIRST.back
)
ONE_SEQUENCE = Layout(  # (1, heads, all tokens, head_dim)
    lambda case, x: x.transpose(0, 1)[None].contiguous(), lambda case, x: x[0].transpose(0, 1)
)


@dataclass(frozen=True)
class Peer:
    """``attention`` gives its function for a case and that function's layout; None: not covered.

    It gets the case and its cu_seqlens, or its block_indices when it is not ``dense``. A ``sparse``
    one is asked for cases with a selection; a dense one then stands for what the selection saves.
    """

    attention: Callable[[BenchCase, Tensor], tuple[Attention, Layout] | None]
    directions: tuple[str, ...] = FIRST_ORDER
    module: str = "torch"  # what must be there to import
    dense: bool = True
    sparse: bool = False


def _sdpa(backend: str, case: BenchCase) -> tuple[Attention, Layout] | None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not case.equal_lengths or case.window >= 0:
        return None
    chosen = getattr(SDPBackend, backend)
    group = case.num_heads_q != case.num_heads_kv

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(chosen):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=group
            )

    return attention, HEADS_OUTSIDE if case.selection else HEADS_FIRST


def sdpa_flash(case: BenchCase, _cu_seqlens: Tensor) -> tuple[Attention, Layout] | None:
    """torch's scaled_dot_product_attention on FlashAttention-2; equal lengths, one head_dim."""
    return _sdpa("FLASH_ATTENTION", case) if case.head_dim == case.head_dim_v else None


def sdpa_cudnn(case: BenchCase, _cu_seqlens: Tensor) -> tuple[Attention, Layout] | None:
    """torch's scaled_dot_product_attention on cuDNN; equal lengths only."""
    return _sdpa("CUDNN_ATTENTION", case)


def torch_math(case: BenchCase, cu_seqlens: Tensor) -> tuple[Attention, Layout] | None:
    """The mathematics on N x N matrices, which torch differentiates as often as one likes."""
    if not case.equal_lengths or case.num_heads_q != case.num_heads_kv or case.window >= 0:
        return None
    n, forbidden = case.lengths[0], None
    if case.causal:
        forbidden = torch.ones(n, n, dtype=torch.bool, device=cu_seqlens.device).triu(1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * case.head_dim**-0.5
        if forbidden is not None:
            scores = scores.masked_fill(forbidden, float("-inf"))
        return scores.softmax(-1) @ v

    return attention, HEADS_OUTSIDE


def jvp_flash_attention(case: BenchCase, _cu_seqlens: Tensor) -> tuple[Attention, Layout] | None:
    """jvp_flash_attention's Triton kernel, which takes out and its tangent in one pass."""
    from jvp_flash_attention.jvp_attention import JVPAttn

    if not case.equal_lengths or case.num_heads_q != case.num_heads_kv:
        return None
    return lambda q, k, v: JVPAttn.fwd_dual(q, k, v, causal=case.causal), HEADS_OUTSIDE


def _window(case: BenchCase) -> tuple[int, int]:
    """(left, right) as the flash family spells a causal mask or window, -1 open."""
    return case.window, 0 if case.causal else -1


def torch_varlen_call(case: BenchCase, cu_seqlens: Tensor) -> Callable[..., Tensor]:
    """torch's own varlen_attn as a function of q, k, v, whichever keywords this version has."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": _window(case)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = case.num_heads_q != case.num_heads_kv
    longest = max(case.lengths)
    return lambda q, k, v: varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)


def torch_varlen(case: BenchCase, cu_seqlens: Tensor) -> tuple[Attention, Layout] | None:
    """torch's packed attention (FlashAttention-2); one head_dim."""
    if case.head_dim != case.head_dim_v:
        return None
    return torch_varlen_call(case, cu_seqlens), PACKED


def flex(case: BenchCase, _cu_seqlens: Tensor) -> tuple[Attention, Layout]:
    """FlexAttention with a document mask, compiled anew for every case."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    lengths = torch.tensor(case.lengths, device="cuda")
    document = torch.repeat_interleave(torch.arange(len(case.lengths), device="cuda"), lengths)

    def allowed(_batch: Any, _head: Any, i: Any, j: Any) -> Any:
        same = document[i] == document[j]
        if case.window >= 0:
            same = same & (i - j <= case.window)
        return same & (i >= j) if case.causal else same

    mask = torch.compile(create_block_mask)(allowed, None, None, case.total, case.total)
    compiled = torch.compile(flex_attention, dynamic=False)
    group = case.num_heads_q != case.num_heads_kv
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=group), ONE_SEQUENCE


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _flash(
    case: BenchCase, cu_seqlens: Tensor, dense: Any, varlen: Any
) -> tuple[Attention, Layout]:
    """A pair of functions of the flash family: equal lengths as a batch, others packed."""
    options: dict[str, Any] = {"causal": case.causal}
    if case.window >= 0:
        options = {"window_size": _window(case)}
    if case.equal_lengths:
        return lambda q, k, v: _first(dense(q, k, v, **options)), BATCHED
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens)
    options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(case.lengths))
    return lambda q, k, v: _first(varlen(q, k, v, **options)), PACKED


def fa4(case: BenchCase, cu_seqlens: Tensor) -> tuple[Attention, Layout]:
    """FlashAttention-4 (flash_attn.cute), forward and backward."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    return _flash(case, cu_seqlens, flash_attn_func, flash_attn_varlen_func)


def fa3_fwd(case: BenchCase, cu_seqlens: Tensor) -> tuple[Attention, Layout] | None:
    """FlashAttention-3's forward, as packaged for bfloat16."""
    import fa3_fwd_interface as fa3

    if case.dtype != "bfloat16":
        return None
    return _flash(case, cu_seqlens, fa3.flash_attn_func, fa3.flash_attn_varlen_func)


def fla_nsa(case: BenchCase, block_indices: Tensor) -> tuple[Attention, Layout] | None:
    """fla's parallel_nsa, its selected branch alone with gates of 1.

    It sees the selected blocks alone, the own one like the others, each as often as it is selected.
    """
    from fla.ops.nsa.parallel import parallel_nsa

    blocks, group = case.selection, case.num_heads_q // case.num_heads_kv
    if blocks is None or blocks.own or not case.equal_lengths or group < 16 or group & (group - 1):
        return None
    gates = torch.ones(
        (len(case.lengths), case.lengths[0], case.num_heads_q),
        dtype=getattr(torch, case.dtype),
        device=block_indices.device,
    )
    options = {
        "g_cmp": None,
        "g_slc": gates,
        "g_swa": None,
        "block_indices": BATCHED.there(case, block_indices).long(),
        "block_counts": blocks.num_selected,
        "block_size": blocks.block_size,
        "window_size": 0,
    }
    return lambda q, k, v: _first(parallel_nsa(q, k, v, **options)), BATCHED


def lucidrains_triton(case: BenchCase, block_indices: Tensor) -> tuple[Attention, Layout] | None:
    """The Triton kernel of native-sparse-attention-pytorch, its own block beside the selected.

    Padding is what its mask leaves out. It computes in float16 whatever the inputs are.
    """
    from native_sparse_attention_pytorch.triton_native_sparse_attention import native_sparse_attend

    blocks, group = case.selection, case.num_heads_q // case.num_heads_kv
    if blocks is None or not blocks.own or not case.equal_lengths or 16 % group:
        return None
    chosen = HEADS_OUTSIDE.there(case, block_indices).long()
    there = (blocks.block_size, chosen.clamp(min=0), chosen >= 0)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return native_sparse_attend(q, k, v, *there, include_block_causal=True)

    return attention, HEADS_OUTSIDE


PEERS = {
    "sdpa_flash": Peer(sdpa_flash),
    "sdpa_cudnn": Peer(sdpa_cudnn, sparse=True),
    "torch_varlen": Peer(torch_varlen, module="torch.nn.attention.varlen"),
    "flex": Peer(flex),
    "fa4": Peer(fa4, module="flash_attn.cute"),
    "fa3_fwd": Peer(fa3_fwd, ("forward",), "fa3_fwd_interface"),
    "torch_math": Peer(torch_math, SECOND_ORDER),
    "jvp_flash_attention": Peer(jvp_flash_attention, ("jvp",), "jvp_flash_attention"),
    "fla_nsa": Peer(fla_nsa, module="fla", dense=False, sparse=True),
    "lucidrains_triton": Peer(
        lucidrains_triton, module="native_sparse_attention_pytorch", dense=False, sparse=True
    ),
}


def importable(peer: str) -> bool:
    """Whether what ``peer`` needs beyond torch is installed."""
    try:
        return find_spec(PEERS[peer].module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
