"""The names of FlashAttention-3 (flash_attn_interface), computed by rawattn.

    from rawattn.torch.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

Their order of arguments is another than that of FlashAttention-2, whose names ``flash_attn`` has.
What only says how to compute (``max_seqlen``, ``num_splits``, ``pack_gqa``, ``sm_margin``) is
accepted and not needed; scales of float8, ``qv``, chunks and ``seqused_q`` are a ValueError.
"""

from typing import Any, Never

from torch import Tensor

from rawattn.torch import flash_attn
from rawattn.torch.flash_attn import FOREIGN, Lacking, Window, refuse
from rawattn.torch.inputs import refuse_foreign

_LACKING: Lacking = {
    "seqused_q": (None, "all queries are computed; pass those in use, packed"),
    "qv": (None, "scores of values are not supported; pass None"),
    **dict.fromkeys(
        ("q_descale", "k_descale", "v_descale"),
        (None, "float8 is not supported; pass float16 or bfloat16 tensors without scales"),
    ),
    "attention_chunk": (0, "chunks are sequences of their own; cut cu_seqlens at them, pass 0"),
}
Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **foreign: Never,
) -> Result:
    """Attention of sequences of equal length: q (batch, seqlen_q, num_heads_q, head_dim), k and v.

    Returns out like q; with ``return_attn_probs`` (out, lse), lse (batch, num_heads_q, seqlen_q).
    """
    given = {"qv": qv, "attention_chunk": attention_chunk, "q_descale": q_descale}
    given |= {"k_descale": k_descale, "v_descale": v_descale}
    _refuse("flash_attn_func", foreign, **given)
    out, lse, _ = flash_attn.flash_attn_func(
        *(q, k, v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=True,
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **foreign: Never,
) -> Result:
    """Attention within each sequence of a packed batch: :func:`rawattn.torch.varlen_attn`.

    Returns out (total_q, num_heads_q, head_dim_v); with ``return_attn_probs`` (out, lse), lse
    (num_heads_q, total_q), natural logarithm, float32, differentiable.
    """
    given = {"qv": qv, "attention_chunk": attention_chunk, "q_descale": q_descale}
    given |= {"k_descale": k_descale, "v_descale": v_descale, "seqused_q": seqused_q}
    _refuse("flash_attn_varlen_func", foreign, **given)
    out, lse = flash_attn.attend(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k),
        softmax_scale=softmax_scale,
        softcap=softcap,
        causal=causal,
        window=window_size,
        deterministic=deterministic,
        seqused_k=seqused_k,
    )
    return (out, lse) if return_attn_probs else out


def _refuse(function: str, foreign: dict[str, Never], **given: Any) -> None:
    """Errors for arguments of other libraries, and for those that ask for what rawattn lacks."""
    if foreign:
        name = f"flash_attn_interface.{function}"
        refuse_foreign(name, "return_attn_probs", (), foreign, FOREIGN)
    refuse(function, _LACKING, given)
