"""The plan of a packed batch on several ranks, asked for: ``plan``."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rawattn.torch.context_parallel.agreement import Group, agree, process_group
from rawattn.torch.context_parallel.layout import LAYOUTS
from rawattn.torch.context_parallel.plans import Plan, one_of

METHODS = ("auto", "gather", "ring", "ulysses")
Offsets = Sequence[int] | Tensor | np.ndarray[Any, Any]


def plan(
    cu_seqlens: Offsets,
    group: Group | None = None,
    *,
    cu_seqlens_k: Offsets | None = None,
    layout: str = "contiguous",
    method: str = "auto",
    min_chunk: int = 128,
    overlap: int | None = None,
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
        the cuts; "zigzag": equal tokens and equal work under a causal mask. Documents are dealt out
        whole, but for one between two ranks; what is too long for that is cut into 2 x ranks
        chunks, of which each rank has an early and a late one.
    method: "gather" (each rank gets the keys that its rows see, and computes at once), "ring" (by
        turns, the keys of one rank after the other, merged by lse: least memory), "ulysses" (all
        tokens of a share of the heads), or "auto", which takes the one estimated to be fastest.
    min_chunk: such chunks have so many tokens or more.
    overlap: in how many parts, by heads, keys come in "gather" and "ring", so that one is computed
        while the next is on its way; as many of these as divide the key heads. By default 4 where
        they are large, else 1.
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
        one_of("layout", layout, tuple(LAYOUTS))
        one_of("method", method, METHODS)
        for name, number in (("min_chunk", min_chunk), ("overlap", overlap)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}: expected 1 or more")
    except (TypeError, ValueError) as found:
        error = found
    of_group = process_group(group)
    agree(of_group, "plan", (offsets, layout, method, min_chunk, overlap), error)
    ranks = dist.get_world_size(of_group)
    ranges = LAYOUTS[layout](offsets, ranks, min_chunk)
    of_rank = of_group, dist.get_rank(of_group), ranks
    return Plan(*of_rank, offsets["q"], offsets["k"], layout, method, overlap, ranges)


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
