"""Attentions for the models of transformers, each made available under a name of transformers.

What is not installed, or does not serve what a model asks for, raises; the error says why.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rawattn.torch import register_with_transformers


@dataclass(frozen=True)
class Asked:
    """What a model asks for beside q, k and v: causal attention within each document."""

    cu_seqlens: Tensor  # of the documents
    longest: int  # of them
    scale: float | None
    window: int | None  # how many keys a query sees, its own among them; None: any number
    sinks: Tensor | None


Packed = Callable[[Tensor, Tensor, Tensor, Asked], Tensor]  # (tokens, heads, head_dim) each


def torch_varlen() -> Packed:
    """torch's packed attention, which is FlashAttention-2."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True

    def attend(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
        if asked.sinks is not None:
            raise NotImplementedError("no sinks, and an lse without the gradient that makes them")
        where = (asked.cu_seqlens, asked.cu_seqlens, asked.longest, asked.longest)
        window = _window(asked, -1)
        return varlen_attn(q, k, v, *where, scale=asked.scale, window_size=window, **options)

    return attend


def fa4() -> Packed:
    """FlashAttention-4."""
    from flash_attn.cute import flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
        result: Any = flash_attn_varlen_func(
            *(q, k, v),
            cu_seqlens_q=asked.cu_seqlens,
            cu_seqlens_k=asked.cu_seqlens,
            max_seqlen_q=asked.longest,
            max_seqlen_k=asked.longest,
            softmax_scale=asked.scale,
            causal=True,
            window_size=_window(asked, None),
            learnable_sink=asked.sinks,
        )
        return result[0] if isinstance(result, tuple) else result

    return attend


def cudnn() -> Packed:
    """cuDNN by its Python frontend, whose left bound of a window is the number of keys."""
    from cudnn import sdpa_torch

    def attend(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
        out, _lse = sdpa_torch(
            *(q, k, v),
            scale=asked.scale,
            is_causal=True,
            window_left=asked.window or -1,
            sinks=asked.sinks,
            cu_seqlens_q=asked.cu_seqlens,
            cu_seqlens_kv=asked.cu_seqlens,
            max_seqlen_q=asked.longest,
            max_seqlen_kv=asked.longest,
            return_lse=True,  # without it there is no backward
        )
        return out

    return attend


def nothing() -> Packed:
    """No attention: one pass over q, k and v and over their gradients, beside the model's rest."""

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Asked) -> Tensor:
        by_group = q.unflatten(1, (k.shape[1], -1))
        return (by_group + (k + v)[:, :, None]).flatten(1, 2)

    return attend


def _window(asked: Asked, whole: int | None) -> tuple[int | None, int]:
    """(left, right) as the flash family spells it; ``whole`` is its word for no limit."""
    return whole if asked.window is None else asked.window - 1, 0


FLOOR = "no_attention"
TRANSFORMERS = {"flex": "flex_attention", "sdpa": "sdpa", "eager": "eager"}  # come with it
PACKED = {"torch_varlen": torch_varlen, "cudnn": cudnn, "fa4": fa4, FLOOR: nothing}
NAMES = ("rawattn", *PACKED, *TRANSFORMERS)


def available(name: str) -> str:
    """Make the attention of that name available; what transformers calls it."""
    if name == "rawattn":
        register_with_transformers()
    elif name in PACKED:
        register(name, PACKED[name]())
    return TRANSFORMERS.get(name, name)


def register(name: str, packed: Packed) -> None:
    """Make ``attn_implementation=name`` call ``packed``; the model gets cu_seq_lens_q."""
    transformers = importlib.import_module("transformers")
    masks = importlib.import_module("transformers.masking_utils")

    def attend(
        _module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: None,
        *,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        scaling: float | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # a batch of one row
        asked = Asked(cu_seq_lens_q, max_length_q, scaling, sliding_window, s_aux)
        return packed(q, k, v, asked)[None], None

    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, masks.flash_attention_mask)
