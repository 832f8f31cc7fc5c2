"""A layer of native sparse attention for packed sequences: arXiv 2502.11089, sections 3.2 and 3.3.

Every query attends three times, and sigmoid gates weigh the three results:

    compressed   to one key for every ``compress_length`` keys, at every ``compress_stride`` keys
    selected     to the ``num_selected`` blocks of keys that the compressed probabilities favour
    sliding      to the ``window`` last keys

Nothing is read back from the device. Memory is linear in the tokens: compressed attention is packed
attention too, and the probabilities that choose the blocks, tokens x blocks, exist for a chunk of
queries at a time. Long for a module, since the three branches share what is known of the packing.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rawattn.torch.inputs import check_tensor
from rawattn.torch.sparse import sparse_attn
from rawattn.torch.varlen import varlen_attn

MOST_QUERIES = 1024  # of a chunk
MOST_SCORES = 1 << 27  # compressed scores, of all heads, that exist at a time


class NativeSparseAttention(nn.Module):
    """Causal self-attention of packed sequences with compressed, selected and sliding branches.

    dim: width of the input and of the output.
    num_heads_q, num_heads_kv, head_dim, head_dim_v: as in ``varlen_attn``; head_dim_v defaults to
        head_dim. The query heads of a key/value head share a selection.
    block_size, num_selected: keys of a selected block, 16, 32, 64 or 128; blocks of each query.
    num_initial, num_local: how many of these are the first blocks of the sequence, and the query's
        own block with those before it. Without local blocks, the own block has to win like others.
    compress_length, compress_stride: keys of a compressed block, and from one to the next.
        compress_stride divides both compress_length and block_size.
    window: keys of the sliding branch, the query's own among them.
    compression: "mlp", learned (an embedding of its place is added to each key and value of a
        block, and an MLP with ``compress_hidden`` hidden units, by default twice the head size,
        makes one of all), or "mean".
    separate_kv: each branch has keys and values of its own, as in the paper; else they share them.
    rotary_base: base of rotary embeddings in the selected and sliding branches, 10000.0 for
        instance; None leaves positions to the caller. The compressed branch has its blocks' places.

    A block's importance is the sum of the probabilities of the compressed blocks that overlap it,
    each as often as it has strides in common with it, over the heads of the group (the paper's
    equations 9 and 10). The choice has no gradient; the compression learns through its own branch.
    """

    def __init__(
        self,
        dim: int,
        num_heads_q: int,
        num_heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        block_size: int = 64,
        num_selected: int = 16,
        num_initial: int = 1,
        num_local: int = 2,
        compress_length: int = 32,
        compress_stride: int = 16,
        window: int = 512,
        compression: str = "mlp",
        compress_hidden: int | None = None,
        separate_kv: bool = True,
        rotary_base: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads_q % num_heads_kv:
            raise ValueError(
                f"NativeSparseAttention: num_heads_q is {num_heads_q}: expected a multiple of "
                f"num_heads_kv ({num_heads_kv})"
            )
        if compress_length % compress_stride or block_size % compress_stride:
            raise ValueError(
                f"NativeSparseAttention: compress_stride is {compress_stride}: expected a divisor "
                f"of compress_length ({compress_length}) and of block_size ({block_size})"
            )
        if num_initial + num_local > num_selected:
            raise ValueError(
                f"NativeSparseAttention: num_initial ({num_initial}) and num_local ({num_local}) "
                f"are part of num_selected, which is only {num_selected}; raise it"
            )
        if compression not in ("mlp", "mean"):
            raise ValueError(
                f"NativeSparseAttention: compression is {compression!r}: expected 'mlp' or 'mean'"
            )
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self.num_heads_q, self.num_heads_kv = num_heads_q, num_heads_kv
        self.head_dim, self.head_dim_v = head_dim, head_dim_v
        self.block_size, self.num_selected = block_size, num_selected
        self.num_initial, self.num_local = num_initial, num_local
        self.compress_length, self.compress_stride = compress_length, compress_stride
        self.window, self.rotary_base = window, rotary_base
        self.num_kv = 3 if separate_kv else 1  # keys and values of a token
        width_kv = self.num_kv * num_heads_kv * (head_dim + head_dim_v)
        self.project_q = nn.Linear(
            dim, num_heads_q * head_dim, bias=False, device=device, dtype=dtype
        )
        self.project_kv = nn.Linear(dim, width_kv, bias=False, device=device, dtype=dtype)
        self.gate = nn.Linear(dim, 3 * num_heads_q, device=device, dtype=dtype)
        self.project_out = nn.Linear(
            num_heads_q * head_dim_v, dim, bias=False, device=device, dtype=dtype
        )
        learned, length, hidden = compression == "mlp", compress_length, compress_hidden
        self.compress_k = Compression(head_dim, length, hidden, learned, device, dtype)
        self.compress_v = Compression(head_dim_v, length, hidden, learned, device, dtype)

    def forward(self, x: Tensor, cu_seqlens: Tensor, *, max_seqlen: int | None = None) -> Tensor:
        """The output for x (total, dim), of the same shape; 0 for rows past cu_seqlens[-1].

        cu_seqlens is (batch + 1,) int32 or int64 on x's device. ``max_seqlen``, an upper bound of
        the lengths, bounds the time that choosing blocks takes: without it, it grows with the
        square of the tokens, though they be many short sequences. It changes no result. Raises
        ValueError or TypeError for an x or cu_seqlens of another kind or shape.
        """
        check_tensor("x", x)
        check_tensor("cu_seqlens", cu_seqlens)
        if x.dim() != 2 or x.shape[1] != self.project_q.in_features:
            raise ValueError(
                f"NativeSparseAttention: x has shape {tuple(x.shape)}: expected (total, "
                f"{self.project_q.in_features}), the tokens of all sequences one after the other; "
                "join batch and length, with the offsets of each sequence in cu_seqlens"
            )
        packing = pack(cu_seqlens, x.shape[0], self.compress_length, self.compress_stride)
        q = self.project_q(x).view(x.shape[0], self.num_heads_q, self.head_dim)
        widths = (self.head_dim, self.head_dim_v)
        kv = self.project_kv(x).view(x.shape[0], self.num_kv, self.num_heads_kv, sum(widths))
        pairs = [part.split(widths, -1) for part in kv.unbind(1)]
        (k, v), (k_selected, v_selected), (k_sliding, v_sliding) = pairs * (3 // self.num_kv)

        k, v = self.compress_k(k, packing), self.compress_v(v, packing)
        compressed, lse = attend_compressed(q, k, v, packing)
        block_indices = choose_blocks(
            q,
            k,
            lse,
            packing,
            block_size=self.block_size,
            num_selected=self.num_selected,
            num_initial=self.num_initial,
            num_local=self.num_local,
            max_seqlen=max_seqlen,
        )
        if self.rotary_base is not None:
            q, k_selected, k_sliding = _rotated(
                packing.position, self.rotary_base, q, k_selected, k_sliding
            )
        selected = sparse_attn(
            q,
            k_selected,
            v_selected,
            cu_seqlens,
            block_indices,
            block_size=self.block_size,
            include_own_block=False,
        )
        sliding = varlen_attn(
            q, k_sliding, v_sliding, cu_seqlens, causal=True, window=(self.window - 1, 0)
        )
        gates = self.gate(x).sigmoid().view(x.shape[0], 3, self.num_heads_q, 1).unbind(1)
        branches = (compressed, selected, sliding)
        mixed = sum(gate * branch for gate, branch in zip(gates, branches, strict=True))
        out: Tensor = self.project_out(mixed.flatten(1))
        return out


# ---- where tokens and compressed blocks stand -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packing:
    """Numbers of a packed batch, int64 on its device.

    ``batch`` itself is the sequence of the tokens, and of the blocks, that belong to none.
    """

    offsets: Tensor  # (batch + 1,) first token of each sequence
    lengths: Tensor  # (batch + 1,) tokens of each, 0 for the last
    sequence: Tensor  # (total,) of each token
    position: Tensor  # (total,) of each token in its sequence
    length: int  # tokens of a compressed block
    stride: int  # tokens from one to the next
    first_row: Tensor  # (batch + 1,) first compressed block of each sequence
    row_sequence: Tensor  # (rows,) of each compressed block; rows is an upper bound of their number
    row_token: Tensor  # (rows,) first token of each

    @property
    def total(self) -> int:
        return self.sequence.shape[0]

    @property
    def rows(self) -> int:
        return self.row_token.shape[0]


def pack(cu_seqlens: Tensor, total: int, length: int, stride: int) -> Packing:
    offsets = cu_seqlens.long()
    lengths = F.pad(offsets.diff(), (0, 1))
    token = torch.arange(total, device=offsets.device)
    sequence = _owner(offsets, token)
    counts = ((lengths - length) // stride + 1).clamp(min=0)
    first_row = counts.cumsum(0) - counts
    row = torch.arange(total // stride, device=offsets.device)
    row_sequence = _owner(first_row, row)
    row_token = offsets[row_sequence] + (row - first_row[row_sequence]) * stride
    return Packing(
        offsets=offsets,
        lengths=lengths,
        sequence=sequence,
        position=token - offsets[sequence],
        length=length,
        stride=stride,
        first_row=first_row,
        row_sequence=row_sequence,
        row_token=row_token,
    )


def _owner(offsets: Tensor, index: Tensor) -> Tensor:
    """The sequence, whose ranges begin at ``offsets``, that each index falls into."""
    return torch.searchsorted(offsets[1:].contiguous(), index, right=True)


# ---- compression ------------------------------------------------------------------------------


class Compression(nn.Module):
    """One row for each block of rows: their mean, or what an MLP that all heads share makes."""

    def __init__(
        self,
        width: int,
        length: int,
        hidden: int | None,
        learned: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.place: nn.Parameter | None = None
        if learned:
            hidden = 2 * width if hidden is None else hidden
            self.place = nn.Parameter(torch.empty(length, width, device=device, dtype=dtype))
            nn.init.normal_(self.place, std=0.02)
            self.mlp = nn.Sequential(
                nn.Linear(length * width, hidden, device=device, dtype=dtype),
                nn.GELU(),
                # A bias would do nothing to keys: it adds the same to all scores of a query.
                nn.Linear(hidden, width, bias=False, device=device, dtype=dtype),
            )

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        """(rows, heads, width) of x (total, heads, width)."""
        place = torch.arange(packing.length, device=x.device)
        tokens = (packing.row_token[:, None] + place).clamp(max=packing.total - 1)
        blocks = x.transpose(0, 1)[:, tokens]  # (heads, rows, length, width)
        if self.place is None:
            return blocks.mean(2).transpose(0, 1)
        out: Tensor = self.mlp((blocks + self.place).flatten(2))
        return out.transpose(0, 1)


def attend_compressed(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """out (total, num_heads_q, head_dim_v) and lse (num_heads_q, total) over compressed blocks.

    A query sees the blocks that have ended when it comes. All ``stride`` queries from the end of a
    block on see the same blocks, so they are one query here with ``stride`` times the heads; and
    in such a sequence, as long as the blocks are many, seeing what has ended is plain causality.
    lse has no gradient.
    """
    num_heads_q, num_heads_kv = q.shape[1], k.shape[1]
    group, stride, rows = num_heads_q // num_heads_kv, packing.stride, packing.rows
    if rows == 0:
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = q.new_full((num_heads_q, packing.total), -torch.inf, dtype=lse_dtype)
        return q.new_zeros(*q.shape[:2], v.shape[2]), lse
    head = torch.arange(num_heads_kv, device=q.device)[:, None]
    step = torch.arange(stride, device=q.device)

    # there: which token is at (rows, num_heads_kv, stride)
    tokens = packing.row_token[:, None] + packing.length - 1 + step
    ends = (packing.offsets + packing.lengths)[packing.row_sequence]
    missing = (tokens >= ends[:, None])[:, None].expand(-1, num_heads_kv, -1).flatten()
    there = tokens.clamp(max=packing.total - 1)[:, None] * num_heads_kv + head
    # and back: where (total, num_heads_kv) has gone
    since = packing.position - (packing.length - 1)
    unseen = (since < 0) | (packing.position >= packing.lengths[packing.sequence])
    row = packing.first_row[packing.sequence] + since // stride
    row, step = row.masked_fill(unseen, 0), since % stride
    back = (row[:, None] * num_heads_kv + head.T) * stride + step[:, None]
    went = (there.flatten(), missing)
    came = (back.flatten(), unseen[:, None].expand(-1, num_heads_kv).flatten())

    queries = _move(q.reshape(packing.total * num_heads_kv, -1), *went, *came)
    out, lse = varlen_attn(
        queries.view(rows, num_heads_kv * stride * group, -1),
        k,
        v,
        packing.first_row,
        causal=True,
        return_lse=True,
    )
    out = _move(out.view(rows * num_heads_kv * stride, -1), *came, *went)
    lse = lse.detach().view(num_heads_kv, stride, group, rows).transpose(1, 2).flatten(2)
    lse = lse[:, :, step * rows + row].flatten(0, 1).masked_fill(unseen, -torch.inf)
    return out.view(*q.shape[:2], v.shape[2]), lse


class _Move(torch.autograd.Function):
    """Rows of x, 0 for absent ones, by an index that names no row twice: its gradient moves back.

    Indexing's own gradient has to reckon with rows that are named twice, and is much slower.
    """

    @staticmethod
    def forward(x: Tensor, index: Tensor, absent: Tensor, *_back: Tensor) -> Tensor:
        return x[index].masked_fill_(absent[:, None], 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, absent, *back = ctx.saved_tensors
        return _move(grad, *back, index, absent), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _move(tangent, *ctx.saved_tensors)


def _move(x: Tensor, index: Tensor, absent: Tensor, *back: Tensor) -> Tensor:
    if (
        torch.compiler.is_compiling()
    ):  # which knows no jvp of a Function, and makes its own gradient
        return x[index].masked_fill(absent[:, None], 0)
    moved: Tensor = _Move.apply(x, index, absent, *back)  # type: ignore[no-untyped-call]
    return moved


# ---- selection --------------------------------------------------------------------------------


@torch.no_grad()
def choose_blocks(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    packing: Packing,
    *,
    block_size: int,
    num_selected: int,
    num_initial: int,
    num_local: int,
    max_seqlen: int | None = None,
) -> Tensor:
    """block_indices (total, num_heads_kv, num_selected) int32, in no order; -1 is padding.

    q, and k and lse of the compressed attention. Blocks of all sequences stand side by side in the
    columns of a chunk of queries, whose number, known without reading lengths, is a bound.
    """
    num_heads_q, (rows, num_heads_kv, head_dim) = q.shape[1], k.shape
    total, batch, group = packing.total, packing.offsets.shape[0] - 1, num_heads_q // num_heads_kv
    longest = total if max_seqlen is None else min(max_seqlen, total)
    parts, overlap = block_size // packing.stride, packing.length // packing.stride
    counts = (packing.lengths + block_size - 1) // block_size
    first_block = counts.cumsum(0) - counts
    chosen = q.new_full((total, num_heads_kv, num_selected), -1, dtype=torch.int32)

    def columns_of(queries: int, reach: int) -> int:
        """Bound of the blocks up to the last query, from the start of the first one's sequence."""
        return reach // block_size + min(batch, queries)

    chunk = min(total, MOST_QUERIES)
    while chunk > 1 and (
        num_heads_q * chunk * parts * columns_of(chunk, chunk + longest) > MOST_SCORES
    ):
        chunk = (chunk + 1) // 2
    for first in range(0, total, max(chunk, 1)):
        last = min(first + chunk, total)
        sequence, position = packing.sequence[first:last], packing.position[first:last]
        columns = columns_of(last - first, min(last, last - first + longest))
        column = first_block[sequence[:1]] + torch.arange(columns, device=q.device)
        owner = _owner(first_block, column)
        block = column - first_block[owner]
        own = (position // block_size)[:, None]
        seen = (sequence[:, None] == owner) & (block <= own)

        if rows:
            place = block[:, None] * parts + torch.arange(parts, device=q.device)
            row = (packing.first_row[owner][:, None] + place).clamp(max=rows - 1).flatten()
            queries = q[first:last].reshape(last - first, num_heads_kv, group, head_dim)
            scores = queries.transpose(0, 1).flatten(1, 2) @ k[row].permute(1, 2, 0)
            scores = scores.view(num_heads_kv, last - first, group, -1)
            shift = -lse[:, first:last].view(num_heads_kv, group, -1, 1).transpose(1, 2)
            mass = torch.add(shift, scores, alpha=head_dim**-0.5).exp_().sum(2)
            ended = place.flatten() * packing.stride + packing.length <= position[:, None] + 1
            mine = (sequence[:, None] == owner).repeat_interleave(parts, 1)
            mass = mass.masked_fill(~(ended & mine), 0)
            # each block's share of a compressed one: two sums, over strides of either
            mass = F.avg_pool1d(F.pad(mass, (overlap - 1, 0)), overlap, 1)
            importance = F.avg_pool1d(mass, parts, parts)
        else:
            importance = lse.new_zeros(num_heads_kv, last - first, columns)
        forced = (block < num_initial) | (own - block < num_local)
        importance = importance.masked_fill(forced, torch.inf).masked_fill(~seen, -torch.inf)
        best, index = importance.topk(min(num_selected, columns), sorted=False)
        number = block[index].masked_fill(best == -torch.inf, -1)
        chosen[first:last, :, : index.shape[2]] = number.transpose(0, 1)
    return chosen


# ---- rotary embeddings ------------------------------------------------------------------------


def _rotated(position: Tensor, base: float, *tensors: Tensor) -> list[Tensor]:
    """(total, heads, head_dim), each half-width pair turned by its position."""
    half = tensors[0].shape[2] // 2
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    powers = torch.arange(half, device=position.device, dtype=wide) / half
    angle = position[:, None, None] * base**-powers
    cos, sin = angle.cos(), angle.sin()

    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    return [turn(x) for x in tensors]
