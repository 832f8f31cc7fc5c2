"""The signature of torch.nn.attention.varlen.varlen_attn, old and new, over rawattn's varlen_attn.

    from rawattn.torch import AuxRequest, varlen_attn_compat as varlen_attn

is the one line to change in code or tests written for torch's function.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from rawattn.torch.inputs import check_tensor
from rawattn.torch.varlen import varlen_attn


class AuxRequest(NamedTuple):
    """What to return besides out; torch's own AuxRequest is accepted as well."""

    lse: bool = False


class _Request(Protocol):
    @property
    def lse(self) -> bool: ...


def varlen_attn_compat(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: _Request | None = None,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] | list[int] | None = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """torch.nn.attention.varlen.varlen_attn, computed by rawattn.

    query is (total_q, num_heads_q, head_dim), key and value (total_k, num_heads_kv, head_dim),
    cu_seq_q and cu_seq_k (batch + 1,). ``is_causal`` and ``return_aux`` may stand at the positions
    torch 2.10 gave them; later versions say causal by ``window_size=(-1, 0)``. ``max_q`` and
    ``max_k`` are accepted and not needed. Unlike torch's, lse is differentiable, and every dtype
    and device of :func:`rawattn.torch.varlen_attn` works.

    Returns out, or (out, lse) with ``return_aux=AuxRequest(lse=True)``; lse is (num_heads_q,
    total_q). Raises ValueError for what rawattn does not do: ``block_table`` (paged caches),
    ``cu_seq_k=None``, more than one split.
    """
    if block_table is not None:
        raise ValueError(
            "varlen_attn_compat: block_table (a paged cache of keys) is not supported; pass the "
            "keys in use as one packed tensor, with cu_seq_k"
        )
    if cu_seq_k is None:
        raise ValueError(
            "varlen_attn_compat: cu_seq_k is None, which torch allows with a paged cache alone; "
            "pass cu_seq_q again where queries and keys have the same lengths"
        )
    if num_splits not in (None, 1):
        raise ValueError(
            f"varlen_attn_compat: num_splits={num_splits} is not supported, only None and 1: the "
            "keys of a query are never split"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() != 3:
            raise ValueError(
                f"varlen_attn_compat: {name} has shape {tuple(x.shape)}: expected 3 dimensions, "
                "(tokens, heads, head_dim); join batch and length"
            )
    try:
        left, right = (-1, -1) if window_size is None else window_size
    except (TypeError, ValueError):
        raise ValueError(
            f"varlen_attn_compat: window_size is {window_size!r}: expected two integers (left, "
            "right), inclusive, or None; pass (-1, -1) for no window"
        ) from None
    num_heads_q, num_heads_kv = query.shape[1], key.shape[1]
    if num_heads_q != num_heads_kv and not enable_gqa:
        raise ValueError(
            f"varlen_attn_compat: query has {num_heads_q} heads and key {num_heads_kv}; pass "
            "enable_gqa=True if query heads are to share key heads"
        )
    if num_heads_q % max(num_heads_kv, 1):
        raise ValueError(
            f"varlen_attn_compat: {num_heads_q} query heads are not a multiple of kv heads "
            f"({num_heads_kv})"
        )
    return varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        causal=is_causal,
        window=(left, right),
        softmax_scale=scale,
        seqused_k=seqused_k,
        return_lse=return_aux is not None and return_aux.lse,
        deterministic=batch_invariant,
    )
