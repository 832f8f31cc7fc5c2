"""The blocks that the queries of a benchmark case select: at random, or as neighbours do.

Both give a query as many blocks as there are up to its own, at most ``num_selected``, all distinct
and none after its own; the rest is padding, -1. So the work of a case does not depend on the draw.

``random``: every query and kv head draws for itself. ``local``, of 16 blocks:

    8   its own block and the 7 before it
    1   the sequence's first block
    5   drawn once for all queries of a block: neighbours share them
    2   drawn by every query for itself

so that two queries of one block have 14 blocks in common, and more by chance. It is a model of what
a layer learns to select: a window, a sink, and a few places that change slowly from token to token.
"""

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from measure.cases import BenchCase, Blocks

NEAR = 8  # blocks of a local selection that end with the query's own
EACH = 2  # that every query draws for itself
STEP = 1024  # queries at a time: a score for each of their blocks would fill a GPU otherwise


def block_indices(case: BenchCase, generator: Generator) -> Tensor:
    """(total, num_heads_kv, num_selected) int32, counted from the start of each sequence."""
    assert case.selection is not None
    parts = [
        _of_queries(case.selection, case.num_heads_kv, begin, min(begin + STEP, seqlen), generator)
        for seqlen in case.lengths
        for begin in range(0, seqlen, STEP)
    ]
    return torch.cat(parts)


def _of_queries(blocks: Blocks, heads: int, begin: int, end: int, generator: Generator) -> Tensor:
    """The selections of queries begin .. end - 1 of a sequence; ``begin`` starts a block."""
    device, size = generator.device, blocks.block_size
    own = torch.arange(begin, end, device=device) // size
    block = torch.arange(int(own[-1]) + 1, device=device)
    score = torch.rand(len(own), heads, len(block), device=device, generator=generator)
    if blocks.local:
        score += _shared(blocks, heads, own.unique(), block, generator)[own - own[0]]
    elif not blocks.own:
        score += (block == own[:, None])[:, None]
    allowed = block < own[:, None] if blocks.own else block <= own[:, None]
    score.masked_fill_(~allowed[:, None], -1)
    value, index = score.topk(min(blocks.num_selected, len(block)))
    index = index.masked_fill(value < 0, -1).to(torch.int32)
    return pad(index, (0, blocks.num_selected - index.shape[-1]), value=-1)


def _shared(blocks: Blocks, heads: int, own: Tensor, block: Tensor, generator: Generator) -> Tensor:
    """(own, heads, block): what the queries of a block add to their scores, 2 for what is fixed
    and 1 for what they have drawn together."""
    fixed = ((block <= own[:, None]) & (block > own[:, None] - NEAR)) | (block == 0)
    drawn = torch.rand(len(own), heads, len(block), device=own.device, generator=generator)
    drawn.masked_fill_((fixed | (block > own[:, None]))[:, None], -1)
    number = min(blocks.num_selected - NEAR - 1 - EACH, len(block))
    bonus = torch.zeros_like(drawn).scatter_(2, drawn.topk(number).indices, 1.0)
    return bonus.masked_fill_(fixed[:, None], 2.0)
