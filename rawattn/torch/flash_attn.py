"""The names of flash-attn 2.8, computed by rawattn: the import is the one line to change.

    from rawattn.torch.flash_attn import flash_attn_func, flash_attn_varlen_func

All seven public functions are here, with the arguments and defaults of theirs, and the functions
that ring-attention libraries call by keyword (``_flash_attn_varlen_forward`` and its relatives).
``max_seqlen`` is accepted and not needed. Unlike theirs, lse is differentiable, there are second
derivatives and forward mode, float32 and float64, and CPU tensors work.

What rawattn does not do (dropout, ALiBi slopes, paged and cached keys) is a ValueError with what to
do instead, and so is a keyword of another version or library a TypeError. Long by the signatures.
"""

from typing import Any, Never, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from rawattn import api, checks
from rawattn.torch import inputs
from rawattn.torch.inputs import check_tensor, refuse_foreign
from rawattn.torch.varlen import varlen_attn

Result = Tensor | tuple[Tensor, Tensor, None]
Window = tuple[int, int]

Lacking = dict[str, tuple[Any, str]]
# What is asked for, its value when it is not, and what to do instead.
_LACKING: Lacking = {
    "dropout_p": (0.0, "attention dropout is not supported; pass 0.0, drop out the result instead"),
    "alibi_slopes": (None, "ALiBi is not supported; pass None, rotate q and k instead"),
    "block_table": (None, "paged keys are not supported; pass the keys in use, packed"),
    "leftpad_k": (None, "padding on the left is not supported; pass the keys in use, packed"),
    "return_softmax": (False, "no kernel keeps the probabilities; pass False"),
}
# Of names that flash-attn does not use: what says it there, or who takes it.
FOREIGN = inputs.FOREIGN | {
    **dict.fromkeys(("window", "sliding_window"), "pass window_size=(left, right)"),
    **dict.fromkeys(
        ("return_lse", "return_softmax", "return_softmax_lse", "return_aux"),
        "pass return_attn_probs=True, which returns lse",
    ),
    "sinks": "rawattn.torch.varlen_attn takes it",
    "seqused_k": "rawattn.torch.varlen_attn takes it, and FlashAttention-3's flash_attn_interface",
}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **foreign: Never,
) -> Result:
    """Attention of sequences of equal length.

    q is (batch, seqlen_q, num_heads_q, head_dim), k and v (batch, seqlen_k, num_heads_kv, ...), of
    any strides. Causal and ``window_size`` are aligned at the ends of queries and keys.
    Returns out (batch, seqlen_q, num_heads_q, head_dim_v); with ``return_attn_probs`` (out, lse,
    None), lse (batch, num_heads_q, seqlen_q), natural logarithm, float32.
    """
    if foreign:
        refuse_foreign("flash_attn.flash_attn_func", "return_attn_probs", (), foreign, FOREIGN)
    _refuse("flash_attn_func", dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    _check_batched("flash_attn_func", q=q, k=k, v=v)
    batch, seqlen_q, num_heads_q, _ = q.shape
    cu_seqlens_q, cu_seqlens_k = (_offsets(batch, x.shape[1], x.device) for x in (q, k))
    out, lse = attend(
        *(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_q, cu_seqlens_k),
        softmax_scale=softmax_scale,
        softcap=softcap,
        causal=causal,
        window=window_size,
        deterministic=deterministic,
    )
    out = out.view(batch, seqlen_q, num_heads_q, v.shape[3])
    lse = lse.view(num_heads_q, batch, seqlen_q).transpose(0, 1)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Result:
    """``flash_attn_func`` of kv (batch, seqlen_k, 2, num_heads_kv, head_dim)."""
    return flash_attn_func(
        q, *_unpack("flash_attn_kvpacked_func", "kv", kv, 5, 2), *args, **options
    )


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Result:
    """``flash_attn_func`` of qkv (batch, seqlen, 3, num_heads, head_dim)."""
    return flash_attn_func(
        *_unpack("flash_attn_qkvpacked_func", "qkv", qkv, 5, 3), *args, **options
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    **foreign: Never,
) -> Result:
    """Attention within each sequence of a packed batch: :func:`rawattn.torch.varlen_attn`.

    Returns out (total_q, num_heads_q, head_dim_v); with ``return_attn_probs`` (out, lse, None), lse
    (num_heads_q, total_q), natural logarithm, float32.
    """
    if foreign:
        refuse_foreign("flash_attn.flash_attn_varlen_func", "block_table", (), foreign, FOREIGN)
    _refuse(
        "flash_attn_varlen_func",
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
    )
    out, lse = attend(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k),
        softmax_scale=softmax_scale,
        softcap=softcap,
        causal=causal,
        window=window_size,
        deterministic=deterministic,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *args: Any,
    **options: Any,
) -> Result:
    """``flash_attn_varlen_func`` of kv (total_k, 2, num_heads_kv, head_dim)."""
    k, v = _unpack("flash_attn_varlen_kvpacked_func", "kv", kv, 4, 2)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    *args: Any,
    **options: Any,
) -> Result:
    """``flash_attn_varlen_func`` of qkv (total, 3, num_heads, head_dim)."""
    q, k, v = _unpack("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 4, 3)
    packed = (q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(*packed, *args, **options)


def flash_attn_with_kvcache(*_args: Any, **_options: Any) -> NoReturn:
    """Refused: rawattn keeps no cache of keys."""
    raise ValueError(
        "flash_attn_with_kvcache: caches of keys are not supported; append to them yourself and "
        "pass the keys in use to flash_attn_varlen_func, with cu_seqlens_k"
    )


# ---- what ring-attention libraries call -------------------------------------------------------


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, None, None]:
    """(out, lse, None, None), without a gradient; lse (num_heads_q, total_q)."""
    _refuse(
        "_flash_attn_varlen_forward",
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        return_softmax=return_softmax,
        block_table=block_table,
        leftpad_k=leftpad_k,
    )
    with torch.no_grad():
        out, lse = api.forward(
            *(q, k, v, cu_seqlens_q),
            cu_seqlens_k=cu_seqlens_k,
            causal=causal,
            window=(window_size_left, window_size_right),
            softmax_scale=softmax_scale,
            softcap=softcap,
            seqused_k=seqused_k,
            return_lse=True,
        )
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """dq, dk, dv into the tensors given for them; returns D (num_heads_q, total_q).

    out and lse may be those of a larger attention, of which these keys are a part.
    """
    _refuse(
        "_flash_attn_varlen_backward",
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
    )
    with torch.no_grad():
        api.backward(
            *(dout, q, k, v, out, softmax_lse, cu_seqlens_q),
            cu_seqlens_k=cu_seqlens_k,
            causal=causal,
            window=(window_size_left, window_size_right),
            softmax_scale=softmax_scale,
            softcap=softcap,
            deterministic=deterministic,
            dq=dq,
            dk=dk,
            dv=dv,
        )
        delta: Tensor = api.backward_preprocess(out, dout)
    return delta


# ---- shared -----------------------------------------------------------------------------------


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    softmax_scale: float | None,
    softcap: float,
    causal: bool,
    window: Window,
    deterministic: bool,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of any head size: zeros fill it up to whole eights, and change no score."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    if head_dim % 8 or head_dim_v % 8:
        checks.same_head_dim(head_dim, k.shape[-1])
        q, k, v = (F.pad(x, (0, -x.shape[-1] % 8)) for x in (q, k, v))
        softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out, lse = varlen_attn(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k),
        causal=causal,
        window=checks.window(window, causal),
        softmax_scale=softmax_scale,
        softcap=softcap or None,
        seqused_k=seqused_k,
        return_lse=True,
        deterministic=deterministic,
    )
    return (out[..., :head_dim_v] if head_dim_v % 8 else out), lse


def _refuse(function: str, **given: Any) -> None:
    refuse(function, _LACKING, given)


def refuse(function: str, lacking: Lacking, given: dict[str, Any]) -> None:
    """ValueError for an argument that asks for what rawattn does not do."""
    for name, value in given.items():
        unused, remedy = lacking[name]
        if value is not None and (isinstance(value, Tensor) or value != unused):
            shown = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else value
            raise ValueError(f"{function}: {name} is {shown}: {remedy}")


def _check_batched(function: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dim() != 4:
            raise ValueError(
                f"{function}: {name} has shape {tuple(x.shape)}: expected 4 dimensions, (batch, "
                "seqlen, heads, head_dim); packed tokens go to flash_attn_varlen_func"
            )
    q, k, v = tensors.values()
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
        raise ValueError(
            f"{function}: q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and "
            f"{tuple(v.shape)}: expected one batch, and k and v of one length"
        )


def _offsets(batch: int, length: int, device: torch.device) -> Tensor:
    """cu_seqlens of sequences of one length, made on the device."""
    return torch.arange(batch + 1, device=device, dtype=torch.int32) * length


def _unpack(function: str, name: str, x: Tensor, dimensions: int, parts: int) -> Any:
    if x.dim() != dimensions or x.shape[-3] != parts:
        raise ValueError(
            f"{function}: {name} has shape {tuple(x.shape)}: expected {dimensions} dimensions, the "
            f"third from the end {parts}, for {', '.join(name)}"
        )
    return x.unbind(-3)
