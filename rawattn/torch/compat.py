"""The signatures of torch.nn.attention.varlen, old and new, over rawattn's varlen_attn.

    from rawattn.torch import AuxRequest, varlen_attn_compat as varlen_attn
    from rawattn.torch.compat import varlen_attn_out_compat as varlen_attn_out

are the lines to change in code or tests written for torch's functions.
"""

from typing import NamedTuple, Never, Protocol

import torch
from torch import Tensor

from rawattn import api
from rawattn.torch.inputs import FOREIGN, check_tensor, refuse_foreign
from rawattn.torch.operators import fake_forward
from rawattn.torch.varlen import varlen_attn

# Of names that torch does not use: what says it there, or that torch has none.
_FOREIGN = FOREIGN | {
    "causal": "pass window_size=(-1, 0)",
    **dict.fromkeys(("window", "sliding_window"), "pass window_size=(left, right)"),
    **dict.fromkeys(("softmax_scale", "sm_scale"), "pass scale"),
    **dict.fromkeys(("return_lse", "return_attn_probs"), "pass return_aux=AuxRequest(lse=True)"),
    "deterministic": "pass batch_invariant to varlen_attn_compat",
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q"), "pass cu_seq_q"),
    "cu_seqlens_k": "pass cu_seq_k",
    **dict.fromkeys(("max_seqlen", "max_seqlen_q"), "pass max_q"),
    "max_seqlen_k": "pass max_k",
    **dict.fromkeys(("softcap", "sinks"), "torch's have none; rawattn.torch.varlen_attn takes it"),
}


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
    **foreign: Never,
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
    left, right = _checked(
        *("varlen_attn_compat", query, key, value, cu_seq_k),
        *(window_size, enable_gqa, block_table, num_splits, foreign),
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


def varlen_attn_out_compat(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: _Request | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] | list[int] | None = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    **foreign: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """``varlen_attn_compat`` into ``out``, of the shape and dtype of the result; no gradient.

    Returns out itself, or (out, lse).
    """
    left, right = _checked(
        *("varlen_attn_out_compat", query, key, value, cu_seq_k),
        *(window_size, enable_gqa, block_table, num_splits, foreign),
    )
    offsets = (cu_seq_q, cu_seq_k, seqused_k)
    lse = _forward_out(out, query, key, value, *offsets, left, right, scale)
    return (out, lse) if return_aux is not None and return_aux.lse else out


@torch.library.custom_op("rawattn::varlen_forward_out", mutates_args=("out",))
def _forward_out(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    window_left: int,
    window_right: int,
    softmax_scale: float | None,
) -> Tensor:
    """An operator, so that compiled code and modes see it; returns lse."""
    _, lse = api.forward(
        *(q, k, v, cu_seqlens_q),
        cu_seqlens_k=cu_seqlens_k,
        window=(window_left, window_right),
        softmax_scale=softmax_scale,
        seqused_k=seqused_k,
        return_lse=True,
        out=out,
    )
    found: Tensor = lse
    return found


@_forward_out.register_fake
def _(out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return fake_forward(q, k, v)[1]


def _checked(
    function: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_k: Tensor | None,
    window_size: tuple[int, int] | list[int] | None,
    enable_gqa: bool,
    block_table: Tensor | None,
    num_splits: int | None,
    foreign: dict[str, Never],
) -> tuple[int, int]:
    """The window of arguments that rawattn can do."""
    if foreign:
        refuse_foreign(f"compat.{function}", "max_k", (), foreign, _FOREIGN)
    if block_table is not None:
        raise ValueError(
            f"{function}: block_table (a paged cache of keys) is not supported; pass the keys in "
            "use as one packed tensor, with cu_seq_k"
        )
    if cu_seq_k is None:
        raise ValueError(
            f"{function}: cu_seq_k is None, which torch allows with a paged cache alone; pass "
            "cu_seq_q again where queries and keys have the same lengths"
        )
    if num_splits not in (None, 1):
        raise ValueError(
            f"{function}: num_splits={num_splits} is not supported, only None and 1: the keys of "
            "a query are never split"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() != 3:
            raise ValueError(
                f"{function}: {name} has shape {tuple(x.shape)}: expected 3 dimensions, "
                "(tokens, heads, head_dim); join batch and length"
            )
    try:
        left, right = (-1, -1) if window_size is None else window_size
    except (TypeError, ValueError):
        raise ValueError(
            f"{function}: window_size is {window_size!r}: expected two integers (left, right), "
            "inclusive, or None; pass (-1, -1) for no window"
        ) from None
    num_heads_q, num_heads_kv = query.shape[1], key.shape[1]
    if num_heads_q != num_heads_kv and not enable_gqa:
        raise ValueError(
            f"{function}: query has {num_heads_q} heads and key {num_heads_kv}; pass "
            "enable_gqa=True if query heads are to share key heads"
        )
    if num_heads_q % max(num_heads_kv, 1):
        raise ValueError(
            f"{function}: {num_heads_q} query heads are not a multiple of kv heads ({num_heads_kv})"
        )
    return left, right
