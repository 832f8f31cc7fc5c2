"""rawattn behind torch's own packed attention (torch >= 2.11).

    torch.nn.attention.activate_flash_attention_impl("RAWATTN")

puts every caller of ``torch.nn.attention.varlen.varlen_attn`` on rawattn's kernels, its backward
too; ``restore_flash_attention_impl()`` takes it back. What rawattn does not do there (paged keys,
split keys, no cu_seq_k) goes where it went before, and a warning says so once. torch's operator has
no gradient through lse and no second derivative: for these take ``rawattn.torch.varlen_attn``.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rawattn import api

NAME = "RAWATTN"
_told: set[str] = set()


def register() -> None:
    """Make the name known to torch, where it has such names."""
    from torch.nn import attention

    if known := getattr(attention, "register_flash_attention_impl", None):
        known(NAME, register_fn=activate)


def activate() -> "_Active":
    """In the place of torch's kernels, on CUDA and CPU tensors, until the handle is removed."""
    from torch.nn.attention import varlen

    library: Any = torch.library.Library("torch_attn", "IMPL")  # type: ignore[no-untyped-call]
    kernels = {
        "_varlen_attn": _forward,
        "_varlen_attn_out": _out,
        "_varlen_attn_backward": _backward,
    }
    for name, ours in kernels.items():
        if (operator := getattr(varlen, name, None)) is not None:
            kernel = _kernel(operator._init_fn, ours)
            for device in ("CUDA", "CPU"):
                library.impl(name, kernel, device)
    return _Active(library)


class _Active:
    """What torch keeps while the name is active."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def remove(self) -> None:
        self._library._destroy()


def _kernel(before: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """``ours`` with torch's arguments by name, or what was there ``before``."""
    signature = inspect.signature(before)

    def kernel(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        bound.apply_defaults()
        given = bound.arguments
        if why := _lacking(given):
            _tell(why)
            return before(*args, **keywords)
        return ours(given)

    return kernel


def _lacking(given: dict[str, Any]) -> str:
    """What of a call rawattn does not do; empty where it does all."""
    if given.get("block_table") is not None:
        return "paged keys (block_table)"
    if given["cu_seq_k"] is None:
        return "keys without cu_seq_k"
    if given.get("num_splits") not in (None, 0, 1):
        return "split keys (num_splits)"
    if given["query"].shape[-1] % 8 or given["query"].shape[-1] > 256:
        return "head sizes that are no multiple of 8, or above 256"
    return ""


def _tell(why: str) -> None:
    if why not in _told:
        _told.add(why)
        warnings.warn(
            f"rawattn does not do {why}: such calls of torch's varlen_attn go to torch's kernels",
            stacklevel=3,
        )


def _options(given: dict[str, Any]) -> dict[str, Any]:
    left, right = given.get("window_size") or (-1, -1)
    return {
        "cu_seqlens_k": given["cu_seq_k"],
        "causal": given["is_causal"],
        "window": (left, right),
        "softmax_scale": given.get("scale"),
        "seqused_k": given.get("seqused_k"),
    }


def _qkv(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return given["query"], given["key"], given["value"]


def _forward(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _qkv(given)
    out, lse = api.forward(q, k, v, given["cu_seq_q"], return_lse=True, **_options(given))
    return out, lse, torch.zeros((2,), dtype=torch.uint64, device=q.device)  # of no dropout


def _out(given: dict[str, Any]) -> Tensor:
    q, k, v = _qkv(given)
    offsets, options = given["cu_seq_q"], _options(given)
    _, lse = api.forward(q, k, v, offsets, return_lse=True, out=given["out"], **options)
    found: Tensor = lse
    return found


def _backward(given: dict[str, Any]) -> tuple[Tensor, ...]:
    passed = (given["grad_out"], *_qkv(given), given["out"], given["lse"], given["cu_seq_q"])
    return api.backward(*passed, **_options(given))
