"""rawattn inside Hugging Face transformers: one call registers attention and its mask.

    rawattn.torch.register_with_transformers()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="rawattn")

Long for what it does, since each way that transformers packs or pads a batch stands here once.
"""

import importlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rawattn.torch.varlen import varlen_attn

NAME = "rawattn"


def register_with_transformers(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` of every transformers model (version 5 on) rawattn's.

    Batches may be packed (``cu_seq_lens_q`` and ``cu_seq_lens_k``, as DataCollatorWithFlattening
    gives them, or ``position_ids`` that begin anew) or padded on either side (``attention_mask``);
    sliding windows, sinks, softcap, values of another width than the keys (MLA), encoders,
    ``generate`` with a cache and gradient checkpointing are served, derivatives included.

    Raises ValueError for a name that transformers keeps for its own implementations.
    """
    if "flash" in name.lower() or name in ("eager", "sdpa", "flex_attention"):
        raise ValueError(
            f"register_with_transformers: name is {name!r}: transformers treats names with 'flash' "
            f"in them, 'eager', 'sdpa' and 'flex_attention' as its own; expected another one, as "
            f"{NAME!r}"
        )
    transformers = importlib.import_module("transformers")
    masks = importlib.import_module("transformers.masking_utils")
    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, masks.flash_attention_mask)


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
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for a registered name.

    query is (batch, num_heads_q, seqlen_q, head_dim), key and value (batch, num_heads_kv,
    seqlen_k, ...). ``attention_mask`` is None, or (batch, seqlen_k) and says which keys are no
    padding. ``sliding_window`` counts the query's own key. ``s_aux`` are sinks. Returns out
    (batch, seqlen_q, num_heads_q, head_dim_v), 0 for padding, and None.

    Raises ValueError for dropout, and for a mask of more axes.
    """
    if dropout:
        raise ValueError(
            f"rawattn: attention dropout is {dropout}, which it does not have; set the config's "
            "attention_dropout to 0.0, or the model to eval()"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # (batch, seqlen, heads, ...)
    packed = _packed(q, k, attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k)
    side = -1 if sliding_window is None else sliding_window - 1
    out = varlen_attn(
        packed.queries(q),
        packed.keys(k),
        packed.keys(v),
        packed.cu_seqlens_q,
        packed.cu_seqlens_k,
        causal=bool(causal),
        window=(side, side),
        softmax_scale=scaling,
        softcap=softcap or None,
        sinks=s_aux,
        seqused_k=packed.seqused_k,
    )
    assert isinstance(out, Tensor)
    return packed.unpacked(out, q.shape[:2]), None


class _Packed(NamedTuple):
    """How a batch becomes packed, and back; without indices it lies so already."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    of_queries: Tensor | None = None  # indices of tokens among batch * seqlen
    of_keys: Tensor | None = None
    seqused_k: Tensor | None = None

    def queries(self, x: Tensor) -> Tensor:
        return _chosen(x, self.of_queries)

    def keys(self, x: Tensor) -> Tensor:
        return _chosen(x, self.of_keys)

    def unpacked(self, out: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self.of_queries is None:
            return out.view(*shape, *out.shape[1:])
        whole = out.new_zeros((shape[0] * shape[1], *out.shape[1:]))
        return whole.index_copy(0, self.of_queries, out).view(*shape, *out.shape[1:])


def _chosen(x: Tensor, indices: Tensor | None) -> Tensor:
    flat = x.flatten(0, 1)
    return flat if indices is None else flat.index_select(0, indices)


def _packed(
    q: Tensor,
    k: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
) -> _Packed:
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    if cu_seq_lens_q is not None:
        offsets_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        return _Packed(cu_seq_lens_q, offsets_k)
    if attention_mask is not None:
        unpadded: _Packed = _once(_without_padding, attention_mask, seqlen_q, seqlen_k)
        return unpadded
    if position_ids is not None and batch == 1 and seqlen_q == seqlen_k > 1:
        if (starts := _once(_starts, position_ids)) is not None:
            return _Packed(starts, starts)
    used = None
    if position_ids is not None and seqlen_q != seqlen_k:  # a cache, which may have room for more
        last = position_ids[:, -1].expand(batch)
        used = (last + 1).clamp(max=seqlen_k).to(torch.int32)
    offsets_q, offsets_k = (_equal(batch, n, q.device) for n in (seqlen_q, seqlen_k))
    return _Packed(offsets_q, offsets_k, seqused_k=used)


_found: dict[Any, tuple[Any, Any]] = {}  # by function, tensor and numbers: of the last batches
_BATCHES = 8


def _once(function: Callable[..., Any], tensor: Tensor, *numbers: int) -> Any:
    """``function`` of them, which waits for the device; all layers of a batch share a tensor."""
    if torch.compiler.is_compiling():
        return function(tensor, *numbers)
    key = (function, id(tensor), tensor._version, *numbers)
    seen, result = _found.get(key, (None, None))
    if seen is None or seen() is not tensor:
        result = function(tensor, *numbers)
        while len(_found) >= _BATCHES:
            del _found[next(iter(_found))]
        _found[key] = weakref.ref(tensor), result
    return result


def _equal(batch: int, seqlen: int, device: torch.device) -> Tensor:
    """Offsets of sequences of one length."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen


def _starts(position_ids: Tensor) -> Tensor | None:
    """Offsets of the documents of a row, which begin where positions do; None where it is one."""
    positions = position_ids.reshape(-1)
    begins = torch.nonzero(positions == positions.min()).reshape(-1)
    if begins.numel() == 1:
        return None
    end = begins.new_full((1,), positions.numel())
    return torch.cat([begins, end]).to(torch.int32)


def _without_padding(mask: Tensor, seqlen_q: int, seqlen_k: int) -> _Packed:
    """Tokens that are no padding; the last seqlen_q that the mask speaks of are the queries.

    A window's cache has the last of these tokens, a static one them first and then room for more.
    """
    if mask.dim() != 2:
        raise ValueError(
            f"rawattn: attention_mask has shape {tuple(mask.shape)}: expected (batch, seqlen_k), "
            "which tokens are no padding; a mask of pairs of tokens is not supported"
        )
    mask = mask[:, -seqlen_k:].bool()
    keys = torch.nn.functional.pad(mask, (0, seqlen_k - mask.shape[1]))
    of_keys = torch.nonzero(keys.reshape(-1)).reshape(-1)
    cu_seqlens_k = _offsets_of(keys)
    if seqlen_q == seqlen_k:
        return _Packed(cu_seqlens_k, cu_seqlens_k, of_keys, of_keys)
    queries = mask[:, -seqlen_q:]
    of_queries = torch.nonzero(queries.reshape(-1)).reshape(-1)
    return _Packed(_offsets_of(queries), cu_seqlens_k, of_queries, of_keys)


def _offsets_of(mask: Tensor) -> Tensor:
    lengths = mask.sum(dim=1, dtype=torch.int32)
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
