"""How a batch of rows becomes packed sequences, and back, without a look at what the device holds.

All shapes follow from those of the batch, so that nothing waits for the device, torch.compile sees
one graph, and a CUDA graph can be captured. What is not known then, as how many tokens are padding,
stands in offsets, and sequences that turn out to be empty do not matter. Only how many documents
there are is asked, where nothing is compiled: once a batch.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Packed(NamedTuple):
    """Offsets, how many keys are in use, and which rows of the flat batch go where."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor | None = None
    of_queries: Tensor | None = None  # indices among batch * seqlen; None: as they lie
    back: Tensor | None = None  # and where each of those rows went
    of_keys: Tensor | None = None
    seen: Tensor | None = None  # where each sequence ends; keys before may be gone from the cache

    def queries(self, x: Tensor) -> Tensor:
        return _chosen(x, self.of_queries)

    def keys(self, x: Tensor) -> Tensor:
        return _chosen(x, self.of_keys)

    def unpacked(self, out: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self.back is not None:
            out = out.index_select(0, self.back)
        return out.view(*shape, *out.shape[1:])


def _chosen(x: Tensor, indices: Tensor | None) -> Tensor:
    flat = x.flatten(0, 1)
    return flat if indices is None else flat.index_select(0, indices)


def rows(
    batch: int, seqlen_q: int, seqlen_k: int, device: torch.device, seen: Tensor | None = None
) -> Packed:
    """Each row a sequence; of its keys those that ``seen`` (batch,) tokens have filled."""
    offsets_q, offsets_k = (
        torch.arange(batch + 1, dtype=torch.int32, device=device) * n for n in (seqlen_q, seqlen_k)
    )
    if seen is None:
        return Packed(offsets_q, offsets_k)
    return Packed(offsets_q, offsets_k, seen.clamp(max=seqlen_k).to(torch.int32), seen=seen)


def documents(begins: Tensor) -> Packed:
    """Sequences that begin where ``begins`` (batch, seqlen) is True, and where a row does."""
    begins = begins.clone()
    begins[:, 0] = True
    flat = begins.reshape(-1)
    total = flat.numel()
    where = torch.arange(total, dtype=torch.int32, device=flat.device)
    if torch.compiler.is_compiling():  # as many offsets as there may be
        offsets = torch.where(flat, where, total).sort().values
    else:
        offsets = where[flat]
    offsets = F.pad(offsets, (0, 1), value=total)
    return Packed(offsets, offsets)


def without_padding(mask: Tensor, seqlen_q: int, seqlen_k: int, padded_queries: bool) -> Packed:
    """Sequences of the tokens that are none, each followed by one of the rest, without keys.

    ``mask`` is (batch, tokens so far). A window's cache has the last of these tokens, a static one
    them first and then room for more. The last seqlen_q of them are the queries, but without
    ``padded_queries``: these are none of them, or no padding.
    """
    keys = mask[:, -seqlen_k:]
    keys = F.pad(keys, (0, seqlen_k - keys.shape[1]))
    of_keys, used = _in_front(keys)
    if not padded_queries:
        of_queries, live = None, torch.full_like(used, seqlen_q)
    elif seqlen_q == seqlen_k:
        of_queries, live = of_keys, used
    else:
        of_queries, live = _in_front(mask[:, -seqlen_q:])
    row = torch.arange(len(mask), dtype=torch.int32, device=mask.device)
    ends_q = torch.stack((row * seqlen_q + live, (row + 1) * seqlen_q), 1)
    ends_k = ((row + 1) * seqlen_k)[:, None].expand(-1, 2)
    none = torch.zeros_like(used)
    return Packed(
        F.pad(ends_q.flatten(), (1, 0)),
        F.pad(ends_k.flatten(), (1, 0)),
        torch.stack((used, none), 1).flatten(),
        of_queries,
        None if of_queries is None else of_queries.argsort(),
        of_keys,
        torch.stack((mask.sum(1, dtype=torch.int32), none), 1).flatten(),
    )


def _in_front(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the flat tokens, each row's True ones before its others, and how many they are."""
    batch, seqlen = mask.shape
    row = torch.arange(batch, device=mask.device)[:, None] * seqlen
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return (row + order).flatten(), mask.sum(1, dtype=torch.int32)


def in_chunks(packed: Packed, size: int, total_k: int) -> Packed:
    """Each sequence cut where its positions, counted from its own beginning, reach a chunk."""
    lengths_q, lengths_k = packed.cu_seqlens_q.diff(), packed.cu_seqlens_k.diff()
    if packed.seqused_k is not None:
        lengths_k = packed.seqused_k
    seen = lengths_k if packed.seen is None else packed.seen
    batch = len(lengths_q)
    first = (seen - lengths_k) // size
    number = ((seen + size - 1) // size - first).clamp(min=1)
    last = number.cumsum(0)  # chunks up to and with each sequence's
    turn = torch.arange(total_k // size + 2 * batch + 1, device=last.device)  # as many may be
    of = torch.searchsorted(last, turn, right=True).clamp(max=batch - 1)
    at = (first - last + number)[of] + turn
    begins = torch.where(at == first[of], 0, at * size)

    def offsets(cu_seqlens: Tensor, lengths: Tensor) -> Tensor:
        inside = (begins - (seen - lengths)[of]).clamp(min=0).minimum(lengths[of])
        return (cu_seqlens[:-1][of] + torch.where(at == first[of], 0, inside)).to(torch.int32)

    ends = (at * size + size).minimum(seen[of])
    used = (ends - begins.maximum((seen - lengths_k)[of])).clamp(min=0)[:-1].to(torch.int32)
    return packed._replace(
        cu_seqlens_q=offsets(packed.cu_seqlens_q, lengths_q),
        cu_seqlens_k=offsets(packed.cu_seqlens_k, lengths_k),
        seqused_k=used,
    )


_found: dict[Any, tuple[Any, Packed]] = {}  # by function, tensor and numbers: of the last batches
_BATCHES = 8


def once(function: Callable[..., Packed], tensor: Tensor, *numbers: int) -> Packed:
    """``function`` of them: all layers of a batch share a tensor."""
    if torch.compiler.is_compiling():
        return function(tensor, *numbers)
    version = 0 if tensor.is_inference() else tensor._version  # these have none
    key = (function, id(tensor), version, *numbers)
    seen, result = _found.get(key, (None, None))
    if seen is None or seen() is not tensor:
        result = function(tensor, *numbers)
        while len(_found) >= _BATCHES:
            del _found[next(iter(_found))]
        _found[key] = weakref.ref(tensor), result
    assert result is not None
    return result
