"""All tokens of some heads in the place of some tokens of all heads (DeepSpeed Ulysses, arXiv
2309.14509): attention itself is that of one process, for a rank's share of the heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rawattn.torch.context_parallel.exchange import (
    Indices,
    Tokens,
    at_least_float32,
    exchange,
    send,
)
from rawattn.torch.varlen import varlen_attn


class Heads:
    """From the tokens ``owned`` by each rank, of all heads, to all tokens in their order, of the
    ``heads`` of each rank, equally many. A head may go to several ranks; back, it is summed."""

    def __init__(
        self,
        owned: Sequence[Tokens],
        heads: Sequence[Sequence[int]],
        rank: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.heads, self.group, self.ranks = heads, group, len(owned)
        self.sizes, self.size = [len(tokens) for tokens in owned], len(owned[rank])
        chosen = np.concatenate([*heads])
        self.each_once = bool((np.diff(chosen) == 1).all())  # and in their order
        tokens = np.concatenate(owned)
        by_token = np.argsort(tokens, kind="stable")  # of what the ranks have, one after the other
        self.in_order = bool((np.diff(tokens) == 1).all())
        self.at = Indices(heads=chosen, by_token=by_token, by_rank=tokens).at

    def there(self, x: Tensor) -> Tensor:
        chosen = x if self.each_once else x.index_select(1, self.at("heads", x.device))
        parts = chosen.view(self.size, self.ranks, len(self.heads[0]), *x.shape[2:])
        parts = parts.transpose(0, 1).flatten(0, 1)
        rows = self._exchanged(parts, [self.size] * self.ranks, self.sizes)
        return self._ordered(rows, "by_token")

    def back(self, g: Tensor) -> Tensor:
        rows = self._exchanged(self._ordered(g, "by_rank"), self.sizes, [self.size] * self.ranks)
        parts = rows.view(self.ranks, self.size, *rows.shape[1:]).transpose(0, 1)
        if self.each_once:
            return parts.flatten(1, 2)
        count = 1 + max(head for own in self.heads for head in own)
        total = g.new_zeros((self.size, count, *g.shape[2:]), dtype=at_least_float32(g.dtype))
        for r, own in enumerate(self.heads):
            for n, head in enumerate(own):
                total[:, head] += parts[:, r, n]
        return total.to(g.dtype)

    def _ordered(self, rows: Tensor, way: str) -> Tensor:
        return rows if self.in_order else rows.index_select(0, self.at(way, rows.device))

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        there, work = send(rows.contiguous(), sent, received, self.group)
        work.wait()
        return there


def heads_of(ranks: int, num_heads_q: int, num_heads_kv: int) -> tuple[list[list[int]], ...]:
    """Each rank's query heads, and the key heads beside them, each for as many of these.

    Where ranks outnumber key heads, or cut their groups, a key head goes to several.
    """
    count, group = num_heads_q // ranks, num_heads_q // num_heads_kv
    of_one = gcd(count, group)
    queries = [list(range(r * count, (r + 1) * count)) for r in range(ranks)]
    return queries, [[own[n] // group for n in range(0, count, of_one)] for own in queries]


@dataclass(frozen=True, eq=False)
class AllTokens:
    """Who gets which heads: of queries and of keys, with the offsets of the whole batch."""

    of_q: Heads
    of_k: Heads
    sinks: slice
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, heads: AllTokens, **options: Any
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows."""
    out, lse = varlen_attn(
        *(exchange(q, heads.of_q), exchange(k, heads.of_k), exchange(v, heads.of_k)),
        *(heads.cu_seqlens_q, heads.cu_seqlens_k),
        sinks=None if sinks is None else sinks[heads.sinks],
        return_lse=True,
        **options,
    )
    own_lse = exchange(lse.t()[..., None], heads.of_q, back=True)
    return exchange(out, heads.of_q, back=True), own_lse[..., 0].t()
