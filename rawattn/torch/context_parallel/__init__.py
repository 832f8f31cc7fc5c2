"""Packed attention over several GPUs: each rank has a part of the tokens of one batch.

    plan = context_parallel.plan(cu_seqlens, group, layout="zigzag")   # once a batch, on the host
    x = context_parallel.shard(tokens, plan)                          # this rank's
    ...                                                               # plan.position_ids: RoPE
    out = context_parallel.attn(q, k, v, plan, causal=True)           # in every layer

Communication is torch.distributed's. The result is that of ``varlen_attn`` on the whole batch, for
any lengths on any number of ranks, without padding; what ranks add up stands beside it in float32.
"""

from rawattn.torch.context_parallel.attend import attn
from rawattn.torch.context_parallel.estimate import Estimate, Rates
from rawattn.torch.context_parallel.planning import plan
from rawattn.torch.context_parallel.plans import Plan
from rawattn.torch.context_parallel.shards import shard, unshard

__all__ = ["Estimate", "Plan", "Rates", "attn", "plan", "shard", "unshard"]
