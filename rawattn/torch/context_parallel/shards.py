"""This rank's part of a tensor of the whole batch, and back."""

import numpy as np
import torch
from torch import Tensor

from rawattn.torch.context_parallel.exchange import Route, exchange
from rawattn.torch.context_parallel.plans import SIDES, Plan, one_of
from rawattn.torch.context_parallel.rows import on_device


def shard(x: Tensor, plan: Plan, dim: int = 0, *, of: str = "q") -> Tensor:
    """This rank's part of ``x``, which every rank has whole, tokens along ``dim``.

    ``of``: whether they are the tokens of queries or of keys, "q" or "k".
    """
    one_of("of", of, SIDES)
    total = plan.offsets(of)[-1]
    if x.shape[dim] != total:
        raise ValueError(
            f"x has {x.shape[dim]} tokens along dim {dim}: expected the {total} of the plan"
        )
    runs = plan.ranges[of][plan.rank]
    if len(runs) == 1:
        return x.narrow(dim, runs[0][0], runs[0][1] - runs[0][0])
    tokens = torch.from_numpy(plan.tokens[of][plan.rank])
    return x.index_select(dim, on_device(tokens, x.device))


def unshard(x: Tensor, plan: Plan, dim: int = 0, *, of: str = "q") -> Tensor:
    """The whole of what ``x`` is this rank's part of, on every rank; differentiable."""
    one_of("of", of, SIDES)
    if x.shape[dim] != plan.num_tokens(of):
        raise ValueError(
            f"x has {x.shape[dim]} tokens along dim {dim}: expected the {plan.num_tokens(of)} that "
            "the plan gives this rank"
        )

    def made() -> Route:
        whole = [np.arange(plan.offsets(of)[-1])] * plan.ranks
        return Route(plan.owned[of], whole, plan.rank, plan.group)

    return exchange(x.movedim(dim, 0).contiguous(), plan.once(("unshard", of), made)).movedim(
        0, dim
    )
