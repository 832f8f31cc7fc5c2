"""The function to call in every layer."""

from typing import Any, Never

import torch
from torch import Tensor

from rawattn import checks
from rawattn.torch.context_parallel.estimate import Sizes
from rawattn.torch.context_parallel.first_order import Options, attention
from rawattn.torch.context_parallel.plans import Plan
from rawattn.torch.context_parallel.stages import Window
from rawattn.torch.inputs import cast_by_autocast, check_tensor, refuse_foreign
from rawattn.torch.varlen import varlen_attn


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *lengths: Never,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    **foreign: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the keys of all ranks.

    q is (plan.num_tokens("q"), num_heads_q, head_dim), k and v (plan.num_tokens("k"), num_heads_kv,
    ...): what this rank has. The result is this rank's part of what ``varlen_attn`` gives for the
    whole batch; the other arguments are those of it. A collective call: every rank of the plan's
    group makes the same one, in the same order, also for the backward.

    sinks: whole on every rank; a gradient is that of this rank's part, to be summed over ranks as
        that of any other parameter is.

    Derivatives as of ``varlen_attn``: twice backwards, forwards (forward_ad), in any combination.
    ``deterministic`` makes them bitwise repeatable.

    Raises as ``varlen_attn``; what one rank finds wrong at the first call of its kind is raised on
    all of them.
    """
    if lengths or foreign:
        refuse_foreign("context_parallel.attn", "plan", lengths, foreign)
    if torch._C._is_any_autocast_enabled():
        q, k, v = cast_by_autocast(q, k, v)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    options = Options(softmax_scale, softcap, deterministic, backend)
    error: Exception | None = None
    left = right = -1
    signature: tuple[Any, ...] = ()
    try:
        left, right = checks.window(window, causal)
        _check(q, k, v, sinks, plan)
        tensors = [x for x in (q, k, v, sinks) if x is not None]
        signature = (
            *((tuple(x.shape[1:]), x.dtype, x.requires_grad) for x in tensors),
            *(left, right, options, torch.is_grad_enabled()),
        )
        if not plan.agreed(signature):  # what the call itself would say, also where there is none
            _of_nothing(q, k, v, sinks, (left, right), options)
    except (TypeError, ValueError, RuntimeError) as found:
        error = found
    plan.agree(signature, error)
    sizes = Sizes(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.element_size())
    out, lse = attention(q, k, v, sinks, plan.job((left, right), sizes, q.device, options))
    return (out, lse) if return_lse else out


def _of_nothing(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: Window, options: Options
) -> None:
    """The same call of no tokens."""
    none = torch.zeros(2, dtype=torch.int32, device=q.device)
    with torch.no_grad():
        varlen_attn(
            *(q[:0], k[:0], v[:0], none),
            window=window,
            sinks=sinks,
            deterministic=options.deterministic,
            **options.named,
        )


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan) -> None:
    for name, x, of in (("q", q, "q"), ("k", k, "k"), ("v", v, "k")):
        check_tensor(name, x)
        if x.dim() != 3:
            checks.rank(name, tuple(x.shape))
        if x.shape[0] != plan.num_tokens(of):
            raise ValueError(
                f"{name} has {x.shape[0]} tokens: expected the {plan.num_tokens(of)} that the plan "
                f"gives rank {plan.rank}; cut it by context_parallel.shard(x, plan, of={of!r})"
            )
    if plan.method == "ulysses" and q.shape[1] % plan.ranks:
        raise ValueError(
            f"q has {q.shape[1]} heads on {plan.ranks} ranks: expected a multiple of these for "
            'method="ulysses"; take "gather" or "ring"'
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads and k {k.shape[1]}: expected a multiple of k's")
