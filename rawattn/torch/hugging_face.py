"""rawattn inside Hugging Face transformers: one call registers attention and its mask.

    rawattn.torch.register_with_transformers()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="rawattn")

``hugging_face_masks`` makes the mask, ``packing`` sequences of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rawattn.torch import flash_attn
from rawattn.torch.hugging_face_masks import mask_of_keys
from rawattn.torch.packing import Packed, documents, in_chunks, once, rows, without_padding
from rawattn.torch.varlen import varlen_attn

if TYPE_CHECKING:
    from rawattn.torch.context_parallel import Plan

NAME = "rawattn"


def register_with_transformers(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` of every transformers model (version 5 on) rawattn's.

    Batches may be packed (``cu_seq_lens_q`` and ``cu_seq_lens_k``, as DataCollatorWithFlattening
    gives them, or ``position_ids`` that begin anew) or padded on either side (``attention_mask``);
    sliding windows, chunks, sinks, softcap, values of another width than the keys (MLA), encoders,
    cross-attention, ``generate`` with a cache and gradient checkpointing are served, derivatives
    included. Compiled code looks for documents in ``position_ids`` of a batch of one row alone.

    Over several GPUs, a packed batch split by ``rawattn.torch.context_parallel``: the model is
    called with ``context_parallel=plan`` and ``position_ids=plan.position_ids[None]``.

    ``name + "_flash"`` is the same for models with a vision tower: most towers hand over all images
    packed to a name with "flash" in it, and one by one to others. What transformers refuses to such
    names, as chunks, it refuses to this one, and models that name the flash attentions they are
    compatible with, as gpt-oss, do not take it.

    Raises ValueError for a name that transformers keeps for its own implementations.
    """
    if "flash" in name.lower() or name in ("eager", "sdpa", "flex_attention"):
        raise ValueError(
            f"register_with_transformers: name is {name!r}: transformers treats names with 'flash' "
            f"in them, 'eager', 'sdpa' and 'flex_attention' as its own; expected another one, as "
            f"{NAME!r}"
        )
    transformers = importlib.import_module("transformers")
    for each in (name, f"{name}_flash"):
        transformers.AttentionInterface.register(each, attend)
        transformers.AttentionMaskInterface.register(each, mask_of_keys)
    _stand_in_for_a_kernel(f"{name}_flash")


_stand_ins: set[str] = set()


def _stand_in_for_a_kernel(name: str) -> None:
    """transformers takes a name with "flash" in it for a kernel to download: give it functions."""
    hub: Any = importlib.import_module("transformers.integrations.hub_kernels")
    load = hub.load_and_register_attn_kernel

    def load_kernel(asked: str, *args: Any, **options: Any) -> Any:
        return flash_attn if asked in _stand_ins else load(asked, *args, **options)

    if not _stand_ins:
        hub.load_and_register_attn_kernel = load_kernel
    _stand_ins.add(name)


# What some models ask for in their own ways; it would change the result.
_UNSERVED = {
    "position_bias": "a bias of positions",
    "indices": "keys chosen by an indexer",
    "block_indices": "blocks of keys chosen by an indexer",
    "cache": "a paged cache (continuous batching)",
    "block_table": "a paged cache (continuous batching)",
}


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    context_parallel: "Plan | None" = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for a registered name.

    query is (batch, num_heads_q, seqlen_q, head_dim), key and value (batch, num_heads_kv,
    seqlen_k, ...). ``attention_mask`` is of ``mask_of_keys``. ``sliding_window`` counts the query's
    own key. ``s_aux`` are sinks. ``context_parallel`` is the plan of a packed batch of which the
    row is this rank's part. Returns out (batch, seqlen_q, num_heads_q, head_dim_v) and None.

    Raises ValueError for dropout, a mask of pairs of tokens, and what else is not served.
    """
    if dropout:
        raise ValueError(
            f"rawattn: attention dropout is {dropout}, which it does not have; set the config's "
            "attention_dropout (or attention_probs_dropout_prob) to 0.0, or the model to eval()"
        )
    for name in _UNSERVED.keys() & others.keys():
        if others[name] is not None:
            raise ValueError(
                f"rawattn: {type(module).__name__} passes {name}, {_UNSERVED[name]}, which is not "
                'supported; set attn_implementation to "sdpa" or "eager"'
            )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    side = -1 if sliding_window is None else sliding_window - _own_key(module, causal)
    options: dict[str, Any] = {
        "causal": causal,
        "window": (side, side),
        "softmax_scale": scaling,
        "softcap": softcap or None,
        "sinks": s_aux,
    }
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # (batch, seqlen, heads, ...)
    if context_parallel is not None:
        return _of_ranks(module, q, k, v, attention_mask, context_parallel, options), None
    if cu_seq_lens_q is not None:
        packed = Packed(cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k)
    else:
        aligned = causal or sliding_window is not None
        packed = _pack(q, k, attention_mask, position_ids, aligned)
    if (size := _chunk(module)) is not None:
        packed = in_chunks(packed, size, k.shape[0] * k.shape[1])
    out = varlen_attn(
        packed.queries(q),
        packed.keys(k),
        packed.keys(v),
        packed.cu_seqlens_q,
        packed.cu_seqlens_k,
        seqused_k=packed.seqused_k,
        **options,
    )
    assert isinstance(out, Tensor)
    return packed.unpacked(out, q.shape[:2]), None


def _of_ranks(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plan: "Plan",
    options: dict[str, Any],
) -> Tensor:
    """Of this rank's rows of a batch that a plan has split."""
    from rawattn.torch.context_parallel import attn

    padded = mask is not None and mask.dtype != torch.int32  # documents' numbers are the plan's
    if q.shape[0] != 1 or k.shape[1] != q.shape[1] or padded or _chunk(module) is not None:
        raise ValueError(
            f"rawattn: context_parallel with q {tuple(q.shape)}, k {tuple(k.shape)}, "
            f"{'a padding mask' if padded else 'no padding'}, chunks of {_chunk(module)} tokens: "
            "expected one row of packed tokens without padding, cache or chunks; cut the batch by "
            "context_parallel.shard(tokens, plan, dim=1) and pass use_cache=False"
        )
    out = attn(q[0], k[0], v[0], plan, **options)
    assert isinstance(out, Tensor)
    return out[None]


def _own_key(module: Any, causal: bool) -> int:
    """1 where a window counts the query's own key, as all do but T5Gemma's encoder."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    return int(causal or kind != "t5_gemma_module")


def _chunk(module: Any) -> int | None:
    """How many tokens a chunk of this layer has: it sees none of those before (Llama 4)."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types is None or index is None or types[index] != "chunked_attention":
        return None
    size: int | None = getattr(config, "attention_chunk_size", None)
    return size


def _pack(
    q: Tensor, k: Tensor, mask: Tensor | None, position_ids: Tensor | None, aligned: bool
) -> Packed:
    """``aligned``: where a query stands among the keys matters, which are of its own sequence."""
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    if mask is None:
        looked_at = seqlen_q == seqlen_k > 1 and (batch == 1 or not torch.compiler.is_compiling())
        if looked_at and position_ids is not None and position_ids.shape == (batch, seqlen_q):
            return once(_by_positions, position_ids)
        return rows(batch, seqlen_q, seqlen_k, q.device)
    if mask.dim() == 1:
        return rows(batch, seqlen_q, seqlen_k, q.device, mask)
    if mask.dim() != 2:
        raise ValueError(
            f"rawattn: attention_mask has shape {tuple(mask.shape)}: expected (batch, seqlen_k), "
            "which tokens are no padding; a mask of pairs of tokens is not supported"
        )
    if mask.dtype == torch.int32:
        return once(_by_numbers, mask)
    return once(_by_padding, mask, seqlen_q, seqlen_k, aligned and seqlen_q > 1)


def _by_positions(position_ids: Tensor) -> Packed:
    return documents(position_ids == position_ids.min())


def _by_numbers(numbers: Tensor) -> Packed:
    return documents(torch.nn.functional.pad(numbers.diff() != 0, (1, 0)))


def _by_padding(mask: Tensor, seqlen_q: int, seqlen_k: int, padded_queries: bool) -> Packed:
    return without_padding(mask.bool(), seqlen_q, seqlen_k, padded_queries)
