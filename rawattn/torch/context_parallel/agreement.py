"""That all ranks of a group call with the same: a few bytes between their hosts, once.

What one rank finds wrong, it tells the others, which would wait for it otherwise.
"""

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh


def process_group(group: Group | None) -> dist.ProcessGroup:
    """The process group that is meant, of which this rank is one."""
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


_hosts: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def of_hosts(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks whose messages need no GPU."""
    if "gloo" in dist.get_backend_config(group):
        return group
    if group not in _hosts:
        ranks = dist.get_process_group_ranks(group)
        options: Any = getattr(group._get_backend(torch.device("cuda")), "options", None)
        made = dist.new_group(
            ranks,
            timeout=getattr(options, "_timeout", None),
            backend="gloo",
            use_local_synchronization=True,
        )
        assert isinstance(made, dist.ProcessGroup)
        _hosts[group] = made
    return _hosts[group]


def agree(group: dist.ProcessGroup, what: str, signature: Any, error: Exception | None) -> None:
    """Raise on every rank if any has an ``error``, or another ``signature`` than the first."""
    said = None if error is None else f"{type(error).__name__}: {error}"
    digest = hashlib.sha256(repr(signature).encode()).hexdigest()
    short = repr(signature)[:300]
    heard: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, (what, digest, short, said), of_hosts(group))
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
