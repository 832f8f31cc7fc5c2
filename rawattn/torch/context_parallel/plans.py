"""The plan of a packed batch on several ranks: who has which tokens, and who needs whose.

A plan is made from numbers on the host, once a batch, and says what each rank sends without asking
the others; that all ranks made the same one is checked by a few bytes between their hosts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rawattn import checks
from rawattn.torch.context_parallel import layout as layouts
from rawattn.torch.context_parallel import stages, ulysses
from rawattn.torch.context_parallel.agreement import agree
from rawattn.torch.context_parallel.attention import Job, Work, work
from rawattn.torch.context_parallel.estimate import (
    Estimate,
    Rates,
    Share,
    Sizes,
    of_heads,
    of_stages,
    pairs_of,
)
from rawattn.torch.context_parallel.exchange import Owned, Route, are_pairs
from rawattn.torch.context_parallel.first_order import Options
from rawattn.torch.context_parallel.layout import Piece, Ranges
from rawattn.torch.context_parallel.rows import Tokens, on_device

SIDES = ("q", "k")
PARTS = (1, 2, 4, 8)  # in which heads go, where they divide


@dataclass(frozen=True, eq=False)
class Plan:
    """What a rank has of a packed batch, and what it needs of others. See ``plan``.

    group, rank, ranks: of this rank. cu_seqlens_q, cu_seqlens_k: those of the whole batch. layout,
    method, overlap: as given. ranges: by "q" and "k", of each rank, its tokens.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    layout: str
    method: str
    overlap: int | None
    ranges: dict[str, list[Ranges]]
    _made: dict[Any, Any] = field(default_factory=dict)
    _agreed: set[Any] = field(default_factory=set)

    # ---- tokens -------------------------------------------------------------------------------

    def offsets(self, side: str) -> tuple[int, ...]:
        return self.cu_seqlens_q if side == "q" else self.cu_seqlens_k

    def num_tokens(self, side: str = "q") -> int:
        """Tokens that this rank has."""
        return len(self.tokens[side][self.rank])

    @cached_property
    def tokens(self) -> dict[str, list[Tokens]]:
        """Of each rank, its tokens of queries and of keys, in the order in which it has them."""
        return {
            side: [
                np.concatenate([np.empty(0, np.int64), *(np.arange(*run) for run in own)])
                for own in ranges
            ]
            for side, ranges in self.ranges.items()
        }

    @cached_property
    def owned(self) -> dict[str, Owned]:
        """The same by token."""
        return {side: Owned(tokens) for side, tokens in self.tokens.items()}

    @cached_property
    def pieces(self) -> dict[str, list[list[Piece]]]:
        """The same as pieces of sequences."""
        return {
            side: [layouts.pieces(own, self.offsets(side)) for own in ranges]
            for side, ranges in self.ranges.items()
        }

    @cached_property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Where the pieces of sequences that this rank has begin, and its last token ends."""
        pieces = self.pieces["q"][self.rank]
        return (*(piece.row for piece in pieces), self.num_tokens())

    @cached_property
    def position_ids(self) -> Tensor:
        """(tokens here,) int64 on the CPU: where in its sequence each is, as rotary embeddings
        need it."""
        pieces = [torch.arange(p.start, p.stop) for p in self.pieces["q"][self.rank]]
        return torch.cat([torch.empty(0, dtype=torch.int64), *pieces])

    # ---- methods ------------------------------------------------------------------------------

    @cached_property
    def lengths(self) -> stages.Lengths:
        q, k = ([b - a for a, b in pairwise(x)] for x in (self.cu_seqlens_q, self.cu_seqlens_k))
        return stages.Lengths(q, k)

    def job(
        self, window: stages.Window, sizes: Sizes, device: torch.device, options: Options
    ) -> Job | ulysses.AllTokens:
        """How this rank computes; its stages, and who computes which heads, are made once."""
        method = self.best(window, sizes)
        parts = self._estimated(window, sizes)[method].parts
        if method == "ulysses":
            heads = self._heads(sizes.num_heads_q, sizes.num_heads_kv, device)
            return ulysses.AllTokens(parts, window, options, *heads)
        key = "job", method, window, device
        made: tuple[Any, ...] = self.once(key, lambda: self._routed(method, window, device))
        of_stages, all_rows, pairs = made
        return Job(of_stages, all_rows, pairs, method == "gather", parts, options)

    def _heads(self, num_heads_q: int, num_heads_kv: int, device: torch.device) -> tuple[Any, ...]:
        """Who computes which heads, and the offsets of the whole batch."""

        def made() -> tuple[Any, ...]:
            of_q, of_k = ulysses.heads_of(self.ranks, num_heads_q, num_heads_kv)
            return (
                ulysses.Heads(self.tokens["q"], of_q, self.rank, self.group),
                ulysses.Heads(self.tokens["k"], of_k, self.rank, self.group),
                *(
                    on_device(torch.tensor(self.offsets(side), dtype=torch.int32), device)
                    for side in SIDES
                ),
            )

        heads: tuple[Any, ...] = self.once(("heads", num_heads_q, num_heads_kv, device), made)
        return heads

    def best(self, window: stages.Window, sizes: Sizes) -> str:
        """The plan's method; of "auto" the one that is estimated to be fastest."""
        found = self._estimated(window, sizes)
        return min(found, key=lambda method: found[method].seconds)

    def _estimated(self, window: stages.Window, sizes: Sizes) -> dict[str, Estimate]:
        """Of the methods that may be taken."""

        def made() -> dict[str, Estimate]:
            return self._estimates(window, sizes, Rates(), self.method)

        found: dict[str, Estimate] = self.once(("estimated", window, sizes), made)
        return found

    def estimate(
        self,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        itemsize: int = 2,
        rates: Rates = Rates(),  # noqa: B008  a constant
    ) -> dict[str, Estimate]:
        """What a forward and a backward cost by each method that serves these heads.

        ``itemsize``: bytes of a number of q, k and v. ``rates``: of the machine.
        """
        sizes = Sizes(num_heads_q, num_heads_kv, head_dim, head_dim_v or head_dim, itemsize)
        return self._estimates(checks.window(window, causal), sizes, rates)

    def _estimates(
        self, window: stages.Window, sizes: Sizes, rates: Rates, method: str = "auto"
    ) -> dict[str, Estimate]:
        ways: dict[str, tuple[int, Callable[[int], Estimate]]] = {}  # with the heads that are cut
        for name in ("gather", "ring"):
            if method in (name, "auto"):
                shares = self._shares(name, window)
                way = partial(of_stages, shares, sizes, rates, name)
                ways[name] = sizes.num_heads_kv, way
        if method in ("ulysses", "auto") and sizes.num_heads_q % self.ranks == 0:
            _, keys = ulysses.heads_of(self.ranks, sizes.num_heads_q, sizes.num_heads_kv)
            tokens = self.owned["q"].sizes, self.owned["k"].sizes
            pairs = sum(
                stages.pairs((0, q), (0, k), k - q, window)
                for q, k in zip(*self.lengths, strict=True)
            )
            here = len(keys[0])
            ways["ulysses"] = here, partial(of_heads, tokens, pairs, here, sizes, rates)

        def quickest(heads: int, way: Callable[[int], Estimate]) -> Estimate:
            """By the parts in which heads go."""
            if self.overlap is not None:
                return way(gcd(self.overlap, heads))
            every = (way(parts) for parts in PARTS if heads % parts == 0)
            return min(every, key=lambda estimate: estimate.seconds)

        return {name: quickest(*way) for name, way in ways.items()}

    def _shares(self, method: str, window: stages.Window) -> list[list[Share]]:
        owner, found = self.owned["k"].owner, []
        for stage in self._stages(method, window):
            moved = np.zeros((self.ranks, self.ranks), np.int64)  # from, to
            for r, keys in enumerate(self._wanted(stage)):
                moved[:, r] = np.bincount(owner[keys], minlength=self.ranks)
            np.fill_diagonal(moved, 0)
            found.append(
                [
                    Share(
                        pairs_of(own, self.lengths, window),
                        len(own.calls),
                        sum(m.stop - m.start for call in own.calls for m in call.meetings),
                        int(moved[:, r].sum()),
                        int(moved[r].sum()),
                    )
                    for r, own in enumerate(stage)
                ]
            )
        return found

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _stages(self, method: str, window: stages.Window) -> list[list[stages.Stage]]:
        """Of each rank, without those in which none computes."""

        def made() -> list[list[stages.Stage]]:
            found = [
                [stages.stage(*share, self.lengths, window) for share in zip(*turn, strict=True)]
                for turn in self._turns(method, window)
            ]
            return [stage for stage in found if any(own.segments for own in stage)]

        of_mask: list[list[stages.Stage]] = self.once(("stages", method, window), made)
        return of_mask

    def _turns(self, method: str, window: stages.Window) -> list[tuple[list[Any], list[Any]]]:
        """Turn by turn, each rank's pieces, and the keys of each sequence that are there.

        In "gather" first those pieces whose keys are all the rank's own, while the others' keys
        come.
        """
        pieces, ranks = self.pieces["q"], range(self.ranks)
        owned: list[list[list[layouts.Range]]] = []
        for of_rank in self.pieces["k"]:
            runs: list[list[layouts.Range]] = [[] for _ in self.lengths.k]
            for piece in of_rank:
                runs[piece.sequence].append((piece.start, piece.stop))
            owned.append([stages.union(run) for run in runs])
        if method == "ring":
            return [(pieces, [owned[(r - n) % self.ranks] for r in ranks]) for n in ranks]
        every = [[(0, n)] for n in self.lengths.k]
        alone: list[list[Piece]] = [[] for _ in ranks]
        others: list[list[Piece]] = [[] for _ in ranks]
        for r in ranks:
            for piece in pieces[r]:
                within = stages.within(piece, owned[r][piece.sequence], self.lengths, window)
                (alone if within else others)[r].append(piece)
        return [(alone, [every] * self.ranks), (others, [every] * self.ranks)]

    def _wanted(self, stage: list[stages.Stage]) -> list[Tokens]:
        """The keys that come to each rank in a stage."""
        starts, none = self.cu_seqlens_k, np.empty(0, np.int64)
        return [
            np.concatenate(
                [
                    none,
                    *(np.arange(s.start, s.stop) + starts[s.sequence] for s in own.segments),
                ]
            )
            for own in stage
        ]

    def _routed(
        self, method: str, window: stages.Window, device: torch.device
    ) -> tuple[list[tuple[Route, list[Work]]], bool, bool]:
        """The stages, whether each row stands in just one of their calls, and whether each key gets
        one gradient or two."""
        found, rows = [], 0
        for stage in self._stages(method, window):
            own = stage[self.rank]
            route = Route(self.owned["k"], self._wanted(stage), self.rank, self.group)
            found.append((route, [work(call, own.segments, device) for call in own.calls]))
            rows += sum(m.stop - m.start for call in own.calls for m in call.meetings)
        pairs = are_pairs([route for route, _ in found], self.num_tokens("k"))
        return found, method == "gather" and rows == self.num_tokens(), pairs

    # ---- agreement ----------------------------------------------------------------------------

    def agreed(self, signature: Any) -> bool:
        return signature in self._agreed

    def agree(self, signature: Any, error: Exception | None) -> None:
        """That all ranks call with the same, once each; an error in the first call of a plan is
        one on all ranks. Later nobody waits to hear of one."""
        if error is not None and self._agreed:
            raise error
        if signature not in self._agreed:
            agree(self.group, "attn", signature, error)
            self._agreed.add(signature)


def one_of(name: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ValueError(f"{name} is {given!r}: expected one of {', '.join(allowed)}")
