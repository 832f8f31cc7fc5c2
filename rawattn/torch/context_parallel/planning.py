"""The plan of a packed batch on several ranks: who has which tokens, and who needs whose.

A plan is made from numbers on the host, once a batch, and says what each rank sends without asking
the others; that all ranks made the same one is checked by a few bytes between their hosts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rawattn.torch.context_parallel import layout as layouts
from rawattn.torch.context_parallel import stages, ulysses
from rawattn.torch.context_parallel.attention import Job, on_device, work
from rawattn.torch.context_parallel.exchange import Route, Tokens, exchange
from rawattn.torch.context_parallel.layout import LAYOUTS, Piece, Ranges

METHODS = ("auto", "gather", "ring", "ulysses")
SIDES = ("q", "k")
Group = dist.ProcessGroup | DeviceMesh
Offsets = Sequence[int] | Tensor | np.ndarray[Any, Any]


class Estimate(NamedTuple):
    """Of a forward and a backward, for the rank that has most to do.

    ``received``: bytes that come to it; ``kept``: bytes of others' keys and values at once;
    ``flops``: of its products; ``seconds``: by the rates given.
    """

    received: int
    kept: int
    flops: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Plan:
    """What a rank has of a packed batch, and what it needs of others. See ``plan``.

    group, rank, ranks: of this rank. cu_seqlens_q, cu_seqlens_k: those of the whole batch. layout,
    method: as given. ranges: by "q" and "k", of each rank, its tokens.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    layout: str
    method: str
    ranges: dict[str, list[Ranges]]
    _jobs: dict[Any, Any]
    _agreed: set[Any]

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

    def job(self, method: str, window: stages.Window, device: torch.device, **options: Any) -> Job:
        """How this rank computes; made once for a mask."""
        key = method, window, device
        if key not in self._jobs:
            made = [self._stage(keys, window, device) for keys in self._there(method)]
            self._jobs[key] = [stage for stage in made if stage is not None]
        return Job(self._jobs[key], once=method == "gather", **options)

    def heads(self, num_heads_q: int, num_heads_kv: int, device: torch.device) -> ulysses.AllTokens:
        """Who computes which heads; made once for their numbers."""
        key = num_heads_q, num_heads_kv, device
        if key not in self._jobs:
            queries, keys = ulysses.heads_of(self.ranks, num_heads_q, num_heads_kv)
            own = queries[self.rank]
            self._jobs[key] = ulysses.AllTokens(
                ulysses.Heads(self.tokens["q"], queries, self.rank, self.group),
                ulysses.Heads(self.tokens["k"], keys, self.rank, self.group),
                slice(own[0], own[-1] + 1),
                *(
                    on_device(torch.tensor(self.offsets(side), dtype=torch.int32), device)
                    for side in SIDES
                ),
            )
        made: ulysses.AllTokens = self._jobs[key]
        return made

    def _there(self, method: str) -> list[list[list[list[layouts.Range]]]]:
        """By stage and rank the keys of each sequence that are there."""
        if method == "gather":
            return [[[[(0, n)] for n in self.lengths.k]] * self.ranks]
        owned: list[list[list[layouts.Range]]] = []
        for pieces in self.pieces["k"]:
            runs: list[list[layouts.Range]] = [[] for _ in self.lengths.k]
            for piece in pieces:
                runs[piece.sequence].append((piece.start, piece.stop))
            owned.append([stages.union(run) for run in runs])
        return [[owned[(r - n) % self.ranks] for r in range(self.ranks)] for n in range(self.ranks)]

    def _stage(
        self, there: list[list[list[layouts.Range]]], window: stages.Window, device: torch.device
    ) -> Any:
        made = [
            stages.stage(pieces, keys, self.lengths, window)
            for pieces, keys in zip(self.pieces["q"], there, strict=True)
        ]
        if not any(stage.segments for stage in made):
            return None
        starts = self.cu_seqlens_k
        wanted = [
            np.concatenate(
                [
                    np.empty(0, np.int64),
                    *(np.arange(s.start, s.stop) + starts[s.sequence] for s in stage.segments),
                ]
            )
            for stage in made
        ]
        own = made[self.rank]
        route = Route(self.tokens["k"], wanted, self.rank, self.group)
        return route, [work(call, own.segments, device) for call in own.calls]

    # ---- agreement ----------------------------------------------------------------------------

    def agree(self, signature: Any, error: Exception | None) -> None:
        """That all ranks call with the same, once; an error on one is an error on all."""
        if error is None and signature in self._agreed:
            return
        agree(self.group, "attn", signature, error)
        self._agreed.add(signature)


def plan(
    cu_seqlens: Offsets,
    group: Group | None = None,
    *,
    cu_seqlens_k: Offsets | None = None,
    layout: str = "contiguous",
    method: str = "auto",
    min_chunk: int = 128,
) -> Plan:
    """Who has which tokens of a packed batch, and how its attention is computed.

    A collective call: every rank of the group makes the same plan, and all of them get a ValueError
    if they do not agree.

    cu_seqlens: (batch + 1,) offsets of the whole batch, known on the host: a list, a NumPy array or
        a CPU tensor. All of its tokens belong to a sequence.
    group: the ranks among which the batch is split: a process group, a DeviceMesh of one dimension,
        or None for all ranks.
    cu_seqlens_k: the offsets of keys where they are others.
    layout: "contiguous", equal shares of the batch as it lies: a sequence sends keys only across
        the cuts; "zigzag", where long sequences are cut into 2 x ranks chunks, of which each rank
        has an early and a late one: equal work under a causal mask.
    method: "gather" (each rank gets the keys that its rows see, and computes at once), "ring" (by
        turns, the keys of one rank after the other, merged by lse: least memory), "ulysses" (all
        tokens of a share of the heads), or "auto", which takes the one estimated to be fastest.
    min_chunk: what is cut in zigzag has chunks of so many tokens or more.
    """
    error: Exception | None = None
    offsets: dict[str, tuple[int, ...]] = {}
    try:
        offsets["q"] = _host_offsets("cu_seqlens", cu_seqlens)
        offsets["k"] = offsets["q"]
        if cu_seqlens_k is not None:
            offsets["k"] = _host_offsets("cu_seqlens_k", cu_seqlens_k)
        if len(offsets["q"]) != len(offsets["k"]):
            raise ValueError(
                f"cu_seqlens has {len(offsets['q']) - 1} sequences and cu_seqlens_k "
                f"{len(offsets['k']) - 1}: expected equally many"
            )
        _one_of("layout", layout, tuple(LAYOUTS))
        _one_of("method", method, METHODS)
    except (TypeError, ValueError) as found:
        error = found
    of_group = _group(group)
    agree(of_group, "plan", (offsets, layout, method, min_chunk), error)
    ranks = dist.get_world_size(of_group)
    ranges = {side: LAYOUTS[layout](offsets[side], ranks, min_chunk) for side in SIDES}
    return Plan(
        of_group,
        dist.get_rank(of_group),
        ranks,
        offsets["q"],
        offsets["k"],
        layout,
        method,
        ranges,
        {},
        set(),
    )


def _host_offsets(name: str, offsets: Offsets) -> tuple[int, ...]:
    if isinstance(offsets, Tensor) and offsets.device.type != "cpu":
        raise ValueError(
            f"{name} is on {offsets.device}: expected offsets on the host, since who sends what is "
            f"settled there; pass {name}.tolist(), which waits for the device, or what it was made "
            "from"
        )
    numbers = tuple(int(n) for n in offsets)
    if not numbers or numbers[0] != 0 or any(b < a for a, b in pairwise(numbers)):
        raise ValueError(
            f"{name} is {numbers[:8]}...: expected offsets that begin with 0 and do not fall"
        )
    return numbers


def _one_of(name: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ValueError(f"{name} is {given!r}: expected one of {', '.join(allowed)}")


def _group(group: Group | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: expected a process group on every rank; start "
            "by torchrun and call torch.distributed.init_process_group first"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions: expected one; pass one by its "
                "name, as in mesh['cp']"
            )
        group = group.get_group()
    found = dist.group.WORLD if group is None else group
    if found is None or dist.get_rank(found) < 0:
        raise ValueError("this rank is not in group: expected one that it belongs to")
    return found


# ---- agreement over the hosts -----------------------------------------------------------------

_hosts: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _of_hosts(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks whose messages need no GPU."""
    if "gloo" in dist.get_backend_config(group):
        return group
    if group not in _hosts:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        _hosts[group] = made
    return _hosts[group]


def agree(group: dist.ProcessGroup, what: str, signature: Any, error: Exception | None) -> None:
    """Raise on every rank if any has an ``error``, or another ``signature`` than the first."""
    said = None if error is None else f"{type(error).__name__}: {error}"
    digest = hashlib.sha256(repr(signature).encode()).hexdigest()
    short = repr(signature)[:300]
    heard: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, (what, digest, short, said), _of_hosts(group))
    if error is not None:
        raise error
    wrong = [f"rank {r}: {other[3]}" for r, other in enumerate(heard) if other[3]]
    if wrong:
        raise RuntimeError(
            f"{what} failed on another rank, so that none goes on; " + "; ".join(wrong)
        )
    others = [r for r, other in enumerate(heard) if other[:2] != heard[0][:2]]
    if others:
        raise ValueError(
            f"ranks disagree in {heard[0][0]}: rank {others[0]} called {heard[others[0]][0]} with "
            f"{heard[others[0]][2]}, rank 0 {heard[0][0]} with {heard[0][2]}: expected the same "
            "call on every rank of the group"
        )


# ---- shards -----------------------------------------------------------------------------------


def shard(x: Tensor, plan: Plan, dim: int = 0, *, of: str = "q") -> Tensor:
    """This rank's part of ``x``, which every rank has whole, tokens along ``dim``.

    ``of``: whether they are the tokens of queries or of keys, "q" or "k".
    """
    _one_of("of", of, SIDES)
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
    _one_of("of", of, SIDES)
    if x.shape[dim] != plan.num_tokens(of):
        raise ValueError(
            f"x has {x.shape[dim]} tokens along dim {dim}: expected the {plan.num_tokens(of)} that "
            "the plan gives this rank"
        )
    key = "unshard", of
    if key not in plan._jobs:
        whole = [np.arange(plan.offsets(of)[-1])] * plan.ranks
        plan._jobs[key] = Route(plan.tokens[of], whole, plan.rank, plan.group)
    return exchange(x.movedim(dim, 0).contiguous(), plan._jobs[key]).movedim(0, dim)
