"""torch's own attention as a candidate to compare with: one dense call a sequence."""

from typing import Any

from rawattn.check.candidate import Candidate
from rawattn.check.transfer import loaded_torch
from rawattn.reference.dense import allowed, sequences

Tensor = Any


def torch_attention() -> Candidate:
    """``scaled_dot_product_attention`` on packed torch tensors; it gives out, dq, dk and dv."""
    return Candidate("torch", "torch", _forward, _backward)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    cu_seqlens_k: Tensor,
    causal: bool,
    window: tuple[int, int],
    softmax_scale: float | None,
) -> Tensor:
    torch = loaded_torch()
    out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    mask_window = (window[0], 0) if causal else window
    for rows, keys in sequences(cu_seqlens, cu_seqlens_k):
        mask = allowed(rows.stop - rows.start, keys.stop - keys.start, mask_window)
        live = torch.from_numpy(mask.any(axis=1)).to(q.device)  # rows without keys stay 0
        if not live.any():
            continue
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q[rows][live], k[keys], v[keys])),
            attn_mask=torch.from_numpy(mask).to(q.device)[live],
            scale=softmax_scale,
            enable_gqa=True,
        )
        index = torch.arange(rows.start, rows.stop, device=q.device)[live]
        out = out.index_copy(0, index, attended[0].transpose(0, 1))
    return out


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    *,
    cu_seqlens_k: Tensor,
    causal: bool,
    window: tuple[int, int],
    softmax_scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    torch = loaded_torch()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    mask: dict[str, Any] = {
        "cu_seqlens_k": cu_seqlens_k,
        "causal": causal,
        "window": window,
        "softmax_scale": softmax_scale,
    }
    with torch.enable_grad():
        result = _forward(leaves[0], leaves[1], leaves[2], cu_seqlens, **mask)
        if not result.requires_grad:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        grads = torch.autograd.grad(result, leaves, dout, materialize_grads=True)
    return grads[0], grads[1], grads[2]
