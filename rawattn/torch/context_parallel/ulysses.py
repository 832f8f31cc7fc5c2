"""All tokens of some heads in the place of some tokens of all heads (DeepSpeed Ulysses, arXiv
2309.14509): attention itself is that of one process, for a rank's share of the heads.

In first order a share goes in parts, so that one is computed while the next comes and the last goes
home.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rawattn import api
from rawattn.torch.context_parallel.exchange import Flight, Load, exchange, flight, flights
from rawattn.torch.context_parallel.first_order import Options
from rawattn.torch.context_parallel.rows import Moves, Tokens, at_least_float32
from rawattn.torch.context_parallel.stages import Window
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
        self.heads, self.group, self.rank = heads, group, rank
        self.sizes, self.size = [len(tokens) for tokens in owned], len(owned[rank])
        self.each_once = len({*np.concatenate([*heads])}) == sum(map(len, heads))
        self.moves = [Moves(np.arange(len(tokens)), tokens) for tokens in owned]

    def part(self, rank: int, n: int, parts: int) -> Sequence[int]:
        """Those of a rank's heads that are the n-th of so many parts."""
        size = len(self.heads[rank]) // parts
        return self.heads[rank][n * size : (n + 1) * size]

    def load(self, x: Tensor, n: int = 0, parts: int = 1) -> Load:
        """A part of each rank's heads, of ``x``, (size, heads, ...); it lands as (all tokens, heads
        here, ...)."""
        to = [_chosen(x, self.part(r, n, parts)) for r in range(len(self.heads))]
        buffer = x.new_empty((sum(self.sizes), *to[0].shape[1:]))
        inside = [moves.inside(buffer) for moves in self.moves]
        into = [
            x.new_empty((moves.count, *buffer.shape[1:])) if there is None else there
            for moves, there in zip(self.moves, inside, strict=True)
        ]

        def land() -> Tensor:
            for moves, there, rows in zip(self.moves, inside, into, strict=True):
                if there is None:
                    moves.copy(rows, buffer)
            return buffer

        return Load(to, into, land)

    def load_back(self, g: Tensor, total: Tensor, n: int = 0, parts: int = 1) -> Load:
        """The part ``g``, (all tokens, heads here, ...), to where its tokens are; it lands in its
        heads of ``total``, (size, heads, ...), added to what there is if a head is computed more
        than once."""
        into = [g.new_empty((self.size, *g.shape[1:])) for _ in self.heads]

        def land() -> Tensor:
            for r, rows in enumerate(into):
                own = self.part(r, n, parts)
                if self.each_once:
                    total.narrow(1, own[0], len(own)).copy_(rows)
                else:
                    for at, head in enumerate(own):
                        total[:, head] += rows[:, at]
            return total

        return Load([moves.back.taken(g) for moves in self.moves], into, land)

    def total(self, g: Tensor) -> Tensor:
        """Where the parts of ``g`` land: of all heads, as wide as sums are."""
        count = 1 + max(head for own in self.heads for head in own)
        shape = self.size, count, *g.shape[2:]
        return (
            g.new_empty(shape)
            if self.each_once
            else g.new_zeros(shape, dtype=at_least_float32(g.dtype))
        )

    def there(self, x: Tensor) -> Tensor:
        return flight([self.load(x)], self.group).land()[0]

    def back(self, g: Tensor) -> Tensor:
        return flight([self.load_back(g, self.total(g))], self.group).land()[0].to(g.dtype)


def _chosen(x: Tensor, heads: Sequence[int]) -> Tensor:
    if list(heads) == list(range(heads[0], heads[0] + len(heads))):
        return x.narrow(1, heads[0], len(heads))
    return torch.stack([x.select(1, head) for head in heads], 1)


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
    """Who gets which heads: of queries and of keys, with the offsets of the whole batch, and how to
    compute. ``parts``: in so many a rank's heads come."""

    parts: int
    window: Window
    options: Options
    of_q: Heads
    of_k: Heads
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    def coming(self, *loads: tuple[Heads, Tensor]) -> list[Flight]:
        """Of all parts, under way one after the other."""
        fleet = [[of.load(x, n, self.parts) for of, x in loads] for n in range(self.parts)]
        return flights(fleet, self.of_q.group)

    def home(self, n: int, *loads: tuple[Heads, Tensor, Tensor]) -> Flight:
        return flight(
            [of.load_back(g, total, n, self.parts) for of, g, total in loads], self.of_q.group
        )

    def computed(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, ...]:
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=at_least_float32(q.dtype))
        kept: list[Tensor] = []
        home: list[Flight] = []
        coming = self.coming((self.of_q, q), (self.of_k, k), (self.of_k, v))
        for n, arriving in enumerate(coming):
            own = self.of_q.part(self.of_q.rank, n, self.parts)
            q_there, k_there, v_there = arriving.land()
            made, made_lse = api.forward(
                q_there,
                k_there,
                v_there,
                self.cu_seqlens_q,
                cu_seqlens_k=self.cu_seqlens_k,
                window=self.window,
                sinks=None if sinks is None else sinks[own[0] : own[-1] + 1],
                return_lse=True,
                **self.options.named,
            )
            kept += [q_there, k_there, v_there, made, made_lse]
            home.append(self.home(n, (self.of_q, made, out), (self.of_q, made_lse.t(), lse.t())))
        for under_way in home:
            under_way.land()
        return out, lse, *kept

    def gradients(
        self, dout: Tensor, dlse: Tensor | None, *saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _, *kept = saved
        totals = self.of_q.total(q), self.of_k.total(k), self.of_k.total(v)
        home: list[Flight] = []
        cotangents = [dout] if dlse is None else [dout, dlse.t()]
        for n, arriving in enumerate(self.coming(*((self.of_q, x) for x in cotangents))):
            dout_there, *more = arriving.land()
            q_there, k_there, v_there, out_there, lse_there = kept[5 * n : 5 * n + 5]
            made = api.backward(
                dout_there,
                q_there,
                k_there,
                v_there,
                out_there,
                lse_there,
                self.cu_seqlens_q,
                cu_seqlens_k=self.cu_seqlens_k,
                window=self.window,
                dlse=more[0].t().contiguous() if more else None,
                deterministic=self.options.deterministic,
                **self.options.named,
            )
            of = self.of_q, self.of_k, self.of_k
            home.append(self.home(n, *zip(of, made, totals, strict=True)))
        for under_way in home:
            under_way.land()
        dq, dk, dv = (x.to(of.dtype) for x, of in zip(totals, (q, k, v), strict=True))
        return dq, dk, dv

    def composed(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same of differentiable pieces, whatever they are asked for."""
        own = self.of_q.heads[self.of_q.rank]
        named: dict[str, Any] = self.options.named
        out, lse = varlen_attn(
            *(exchange(q, self.of_q), exchange(k, self.of_k), exchange(v, self.of_k)),
            *(self.cu_seqlens_q, self.cu_seqlens_k),
            window=self.window,
            sinks=None if sinks is None else sinks[own[0] : own[-1] + 1],
            return_lse=True,
            deterministic=self.options.deterministic,
            **named,
        )
        own_lse = exchange(lse.t()[..., None], self.of_q, back=True)
        return exchange(out, self.of_q, back=True), own_lse[..., 0].t()
