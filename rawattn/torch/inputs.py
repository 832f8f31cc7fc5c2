"""Before a call: what callers hand over is checked, cast by autocast, and seen or not by torch.

The core checks again what it computes. Here stands what torch and Python would say less clearly
before a call gets there, and what only torch knows of.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rawattn import checks

Remedies = dict[str, str]
# What callers of other packed attentions pass, and what says or replaces it here.
FOREIGN: Remedies = {
    **dict.fromkeys(
        ("max_seqlen_q", "max_seqlen_k", "max_seqlen", "max_q", "max_k"),
        "leave it out: the kernels read the lengths from cu_seqlens",
    ),
    **dict.fromkeys(("window_size", "sliding_window"), "pass window=(left, right)"),
    **dict.fromkeys(("scale", "sm_scale"), "pass softmax_scale"),
    **dict.fromkeys(
        ("dropout_p", "attn_dropout"),
        "leave it out: there is no dropout of probabilities, as with dropout_p=0.0",
    ),
    **dict.fromkeys(
        ("return_attn_probs", "return_softmax", "return_aux"),
        "pass return_lse=True: probabilities, exp(scores - lse), are never stored",
    ),
    **dict.fromkeys(
        ("logits_soft_cap", "logits_softcap", "attn_logit_softcapping"),
        "varlen_attn takes softcap: scores become softcap * tanh(score / softcap)",
    ),
    **dict.fromkeys(
        ("s_aux", "sink", "attn_sink", "learnable_sink"),
        "varlen_attn takes sinks, a logit of each query head",
    ),
    **dict.fromkeys(
        ("cache_seqlens", "seqlens_k", "kv_lens"),
        "varlen_attn takes seqused_k, how many keys of each sequence are in use",
    ),
    "seqused_q": "all queries are computed: pass those in use, packed",
    **dict.fromkeys(
        ("num_splits", "pack_gqa", "sm_margin"),
        "leave it out: how to compute is chosen from the shapes",
    ),
    "attention_chunk": "chunks are sequences of their own: cut cu_seqlens at them",
    "is_causal": "pass causal",
    "enable_gqa": "leave it out: query heads share key heads wherever there are more of them",
    "batch_invariant": "pass deterministic",
    **dict.fromkeys(("cu_seq_q", "cu_seqlens", "indptr"), "pass cu_seqlens_q"),
    "cu_seq_k": "pass cu_seqlens_k",
    **dict.fromkeys(
        ("attn_mask", "attn_bias", "alibi_slopes", "score_mod", "mask_mod"),
        "leave it out, or use torch's flex_attention, which bends scores at will",
    ),
    **dict.fromkeys(
        ("block_table", "page_table", "leftpad_k"),
        "there are no paged caches: pass the keys in use as one packed tensor, with cu_seqlens_k",
    ),
}

NEEDED = ("q", "k", "v", "cu_seqlens_q")


def refuse_foreign(
    function: str,
    last: str,
    positional: tuple[Any, ...],
    keywords: dict[str, Any],
    remedies: Remedies = FOREIGN,
) -> NoReturn:
    """Arguments that ``function``, whose positional ones end with ``last``, does not have."""
    if positional:
        raise TypeError(
            f"{function} got {len(positional)} positional arguments after {last}: expected the "
            "others by keyword; leave lengths out, as the kernels read them from cu_seqlens, and "
            "write causal=, window= or softmax_scale="
        )
    name = next(iter(keywords))
    remedy = remedies.get(name, f"help(rawattn.torch.{function}) lists those that there are")
    raise TypeError(f"{function} got {name}, which is no argument of it; {remedy}")


def check_call(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, validate: bool, **others: Any
) -> None:
    """Dense torch tensors, all of them meta or none, and q, k and v packed.

    cu_seqlens_k and ``others`` may be None. Of other devices the core says more.
    """
    packed = (("q", q), ("k", k), ("v", v))
    offsets = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    for name, x in (*packed, *offsets, *others.items()):
        if x is None and name not in NEEDED:
            continue
        check_tensor(name, x)
        if x.is_meta is not q.is_meta:
            raise TypeError(
                f"{name} is on device {x.device} beside q on {q.device}: expected all tensors of a "
                f"call on one device; move {name} there"
            )
    for name, x in packed:
        if x.dim() != 3:
            checks.rank(name, tuple(x.shape))
    if validate:
        _check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0])
        if cu_seqlens_k is not None:
            _check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0])


def check_tensor(name: str, x: Any) -> None:
    """A dense torch tensor of any device and shape."""
    if x is None:
        raise TypeError(f"{name} is None: expected a torch tensor; pass {name}")
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} is a {type(x).__qualname__}: expected a torch tensor; convert it by "
            "torch.as_tensor, or pass arrays of other libraries to rawattn itself"
        )
    if x.is_nested:
        raise TypeError(
            f"{name} is a nested tensor: expected a packed one, all tokens along the first axis; "
            "pass the values() of a jagged tensor, and its offsets() as cu_seqlens_q"
        )
    if x.layout is not torch.strided:
        raise TypeError(
            f"{name} has layout {x.layout}: expected torch.strided; pass {name}.to_dense()"
        )


def _check_offsets(name: str, offsets: Tensor, total: int) -> None:
    """The content, which the device has to be waited for."""
    if torch.compiler.is_compiling() or offsets.is_meta:
        raise ValueError(
            f"validate=True has to read {name}, which compiled code and meta tensors do not allow: "
            "expected validate=False there; validate before"
        )
    checks.cu_seqlens(name, tuple(offsets.shape), str(offsets.dtype).removeprefix("torch."))
    checks.offsets(name, offsets.tolist(), total)


def cast_by_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype of autocast where it is on; float64 is left alone."""
    device = q.device.type if isinstance(q, Tensor) else "meta"  # no tensor is refused later on
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def is_unseen(q: Any, k: Any, v: Any, other: Tensor | None = None) -> bool:
    """Whether nobody would see the operator: no gradient, mode, transform, tangent or subclass.

    Then a call may go straight to the core, which halves its time on the host. Spelled out, since
    a loop over the tensors would cost more than all the rest.
    """
    wanted = torch.is_grad_enabled()
    return (
        not torch.compiler.is_compiling()  # first: the compiler knows little of the rest
        and type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and not (wanted and (q.requires_grad or k.requires_grad or v.requires_grad))
        and (other is None or (type(other) is Tensor and not (wanted and other.requires_grad)))
        and not q.is_meta
        and forward_ad._current_level < 0
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )
