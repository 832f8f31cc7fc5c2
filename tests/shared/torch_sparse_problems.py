"""What the tests of sparse_attn share: a small crooked problem, and dense attention to it."""

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rawattn.torch import sparse_attn  # noqa: E402
from tests.shared.torch_problems import finite, inner, leaves, offsets  # noqa: E402

# Partial blocks, an empty sequence, one without keys (cross), one without queries (cross).
SELF = ((37, 0, 18, 1), (37, 0, 18, 1))
CROSS = ((5, 3, 0, 19), (40, 0, 20, 33))
SMALL = ((2, 1), (17, 2))
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "open": {"causal": False},
    "no_own": {"include_own_block": False, "softmax_scale": 0.3},
    "open_no_own": {"include_own_block": False, "causal": False},
}
BLOCK = 16


def draw_indices(lengths_q, lengths_k, heads_sel, num_selected, spare, generator, block=BLOCK):
    """Blocks from before the first to after the last one, some of them twice."""
    parts = []
    for rows, keys in zip((*lengths_q, spare), (*lengths_k, 3 * block), strict=True):
        blocks = -(-keys // block)
        shape = (rows, heads_sel, num_selected)
        parts.append(torch.randint(-1, blocks + 1, shape, generator=generator, dtype=torch.int32))
    return torch.cat(parts)


def slots_of(
    block_indices, lengths_q, lengths_k, *, causal=True, include_own_block=True, block_counts=None
):
    """For each sequence (heads_sel, rows, keys): the slot by which a key is seen.

    -1 for a key of an own block that is not selected, -2 for a key that is not seen.
    """
    maps, first = [], 0
    for rows, keys in zip(lengths_q, lengths_k, strict=True):
        slots = torch.full((block_indices.shape[1], rows, keys), -2)
        for i in range(rows):
            position = i + keys - rows
            for head in range(block_indices.shape[1]):
                named = block_indices[first + i, head].tolist()
                if block_counts is not None:
                    named = named[: block_counts[first + i, head]]
                own = position // BLOCK if include_own_block and position >= 0 else None
                for key in range(keys):
                    block = key // BLOCK
                    if causal and key > position:
                        continue
                    if block in named:
                        slots[head, i, key] = named.index(block)
                    elif block == own and key <= position:
                        slots[head, i, key] = -1
        maps.append(slots)
        first += rows
    return maps


def dense_attention(q, k, v, gate, slots, lengths_q, lengths_k, softmax_scale=None):
    """(out, lse) by products of whole matrices, which torch differentiates as often as asked."""
    outs, lses, row, key = [], [], 0, 0
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    for rows, keys, slot in zip(lengths_q, lengths_k, slots, strict=True):
        Q = q[row : row + rows].transpose(0, 1)
        K, V = (x[key : key + keys].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        slot = slot.repeat_interleave(heads // slot.shape[0], 0)
        S = scale * Q @ K.transpose(1, 2)
        if gate is not None:
            own = gate[row : row + rows].repeat_interleave(heads // gate.shape[1], 1)
            G = own.transpose(0, 1).gather(2, slot.clamp(min=0))
            S = S * torch.where(slot >= 0, G, 1)
        seen = slot > -2
        alive = seen.any(2)
        P = torch.where(seen, S.exp(), 0)
        total = torch.where(alive, P.sum(-1), 1)
        outs.append((P / total[..., None] @ V).transpose(0, 1))
        lses.append(torch.where(alive, total.log(), -torch.inf))
        row, key = row + rows, key + keys
    spare = q.shape[0] - row
    outs.append(q.new_zeros(spare, q.shape[1], v.shape[2]))
    lses.append(q.new_full((q.shape[1], spare), -torch.inf))
    return torch.cat(outs), torch.cat(lses, 1)


class Problem:
    """q, k, v and perhaps block_scale, a direction for each, weights of a loss, both attentions."""

    def __init__(
        self, mask="plain", lengths=SELF, *, heads=(4, 2, 2), gated=True, counted=False, selected=3
    ):
        """``heads`` are num_heads_q, num_heads_kv and those of the selection."""
        options = MASKS[mask]
        self.lengths, spare = lengths, 1
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        generator = torch.Generator().manual_seed(5)
        heads_q, heads_kv, heads_sel = heads
        rows, keys = (sum(x) + spare for x in lengths)
        self.block_indices = draw_indices(*lengths, heads_sel, selected, spare, generator)
        shapes = [(rows, heads_q, 8), (keys, heads_kv, 8), (keys, heads_kv, 16)]
        if gated:
            shapes.append(tuple(self.block_indices.shape))
        self.inputs = [draw(shape) for shape in shapes]
        self.direction = [draw(shape) for shape in shapes]
        self.dout, self.dlse = draw(rows, heads_q, 16), draw(heads_q, rows)
        self.block_counts = None
        if counted:
            shape = self.block_indices.shape[:2]
            self.block_counts = torch.randint(0, selected + 1, shape, generator=generator)
        cu_q, cu_k = map(offsets, lengths)
        self.given = (cu_q, self.block_indices)
        self.options = {
            "cu_seqlens_k": cu_k,
            "block_size": BLOCK,
            "block_counts": self.block_counts,
            **options,
        }
        masks = {name: options[name] for name in options if name != "softmax_scale"}
        slots = slots_of(self.block_indices, *lengths, block_counts=self.block_counts, **masks)
        self.dense = partial(self._dense, slots, options.get("softmax_scale"))

    def ours(self, q, k, v, gate=None, **options):
        options = {**self.options, "return_lse": True, "block_scale": gate, **options}
        return sparse_attn(q, k, v, *self.given, **options)

    def _dense(self, slots, softmax_scale, q, k, v, gate=None):
        return dense_attention(q, k, v, gate, slots, *self.lengths, softmax_scale)

    def loss_of(self, attend):
        """A loss of out and lse whose own second derivative is not zero."""

        def loss(*inputs):
            out, lse = attend(*inputs)
            return (out * self.dout).sin().sum() + (finite(lse) * self.dlse).sin().sum()

        return loss

    def hvp_of(self, attend):
        """The product of the Hessian of that loss with the direction, by two backwards."""
        inputs = leaves(self.inputs)
        grads = torch.autograd.grad(self.loss_of(attend)(*inputs), inputs, create_graph=True)
        return torch.autograd.grad(inner(grads, self.direction), inputs)

    def both(self, function):
        return function(self.ours), function(self.dense)
