"""The operators of rawattn.torch.sparse_attn: schemas, what they compute, shapes of their results.

    torch.ops.rawattn.sparse_forward            (out, lse) of q, k, v, block_scale
    torch.ops.rawattn.sparse_backward           (dq, dk, dv, dblock_scale) of dout, dlse
    torch.ops.rawattn.sparse_double_backward    (ddout, ddlse, gq, gk, gv, gblock_scale)
    torch.ops.rawattn.sparse_jvp                (out, tout, lse, tlse) of tq, tk, tv, tblock_scale

As in ``varlen_ops``, with a fourth input, block_scale; without it, dblock_scale and gblock_scale
are empty tensors. A selection is block_indices with or without block_counts, of which every
operator builds the lists that it needs anew: that takes less time than an operator's launch, and
saved lists would take four times the memory of the indices. Or it is the tensors and numbers of a
BlockTable.
"""

from typing import Any

import torch
from torch import Tensor

from rawattn import api_sparse, checks
from rawattn.tables import BlockTable
from rawattn.torch.autograd import register
from rawattn.torch.operators import (
    Operators,
    define,
    fake_backward,
    fake_double_backward,
    fake_forward,
    fake_jvp,
    nothing_like,
)

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? block_scale"
DIRECTION = "Tensor? {0}q, Tensor? {0}k, Tensor? {0}v, Tensor? {0}block_scale"
GIVEN = f"Tensor dout, Tensor? dlse, {INPUTS}, Tensor out, Tensor lse"
TABLE = ("blocks", "slots", "counts", "starts", "lengths", "queries", "query_slots", "work")
OPTIONS = (
    "Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? block_indices, Tensor? block_counts, "
    + "".join(f"Tensor? {name}, " for name in TABLE)
    + "int num_selected, int chunk, int block_size, bool include_own_block, bool causal, "
    "float? softmax_scale, bool deterministic, str? backend"
)
NO_TABLE = (None,) * len(TABLE)


def selection_of(
    block_indices: Tensor | BlockTable,
    block_counts: Tensor | None,
    block_size: int,
    include_own_block: bool,
    causal: bool,
) -> tuple[tuple[Tensor | None, ...], tuple[int, int]]:
    """Tensors and numbers of a selection, as operators take them before block_size and the rest."""
    if isinstance(block_indices, BlockTable):
        table = block_indices  # which is made of these numbers again: so they are compared here
        checks.same_as_table("block_size", block_size, table.block_size)
        checks.same_as_table("include_own_block", include_own_block, table.include_own_block)
        checks.same_as_table("causal", causal, table.causal)
        tensors = (getattr(table, name) for name in TABLE)
        return (None, block_counts, *tensors), (table.num_selected, table.chunk)
    checks.block_size(block_size)
    if block_indices.dtype == torch.int64:  # once, and half of it to save for the backward
        block_indices = block_indices.clamp(-1, 2**31 - 1).int()
    return (block_indices, block_counts, *NO_TABLE), (0, 0)


def _keywords(k: Tensor, rest: tuple[Any, ...]) -> tuple[Tensor, Any, dict[str, Any]]:
    """cu_seqlens, the selection, and the keywords that all functions of ``api_sparse`` take."""
    cu_seqlens_q, cu_seqlens_k, block_indices, block_counts, *table = rest[: 4 + len(TABLE)]
    num_selected, chunk, block_size, own, causal, softmax_scale, _, backend = rest[4 + len(TABLE) :]
    selection = block_indices
    if table[0] is not None:
        selection = BlockTable(
            **dict(zip(TABLE, table, strict=True)),
            block_size=block_size,
            causal=causal,
            include_own_block=own,
            num_selected=num_selected,
            chunk=chunk,
            num_heads_sel=table[0].shape[0],
            num_heads_kv=k.shape[1],
        )
    keywords = {
        "cu_seqlens_k": cu_seqlens_k,
        "block_counts": block_counts,
        "block_size": block_size,
        "include_own_block": own,
        "causal": causal,
        "softmax_scale": softmax_scale,
        "backend": backend,
    }
    return cu_seqlens_q, selection, keywords


def _is_deterministic(rest: tuple[Any, ...]) -> bool:
    return bool(rest[-2])


# ---- what they compute ------------------------------------------------------------------------


def _compute_forward(
    q: Tensor, k: Tensor, v: Tensor, block_scale: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    cu_seqlens, selection, keywords = _keywords(k, rest)
    result: tuple[Tensor, Tensor] = api_sparse.sparse_forward(
        q, k, v, cu_seqlens, selection, block_scale=block_scale, return_lse=True, **keywords
    )
    return result


def _compute_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cu_seqlens, selection, keywords = _keywords(k, rest)
    dq, dk, dv, dblock_scale = api_sparse.sparse_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens,
        selection,
        block_scale=block_scale,
        dlse=dlse,
        deterministic=_is_deterministic(rest),
        **keywords,
    )
    return dq, dk, dv, nothing_like(lse) if block_scale is None else dblock_scale


def _compute_double_backward(
    ddq: Tensor | None,
    ddk: Tensor | None,
    ddv: Tensor | None,
    ddblock_scale: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    if block_scale is None:
        ddblock_scale = None  # of the empty tensor
    cu_seqlens, selection, keywords = _keywords(k, rest)
    *results, gblock_scale = api_sparse.sparse_double_backward(
        ddq,
        ddk,
        ddv,
        dout,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens,
        selection,
        block_scale=block_scale,
        ddblock_scale=ddblock_scale,
        dlse=dlse,
        deterministic=_is_deterministic(rest),
        **keywords,
    )
    return *results, nothing_like(lse) if block_scale is None else gblock_scale


def _compute_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_scale: Tensor | None,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    tblock_scale: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    cu_seqlens, selection, keywords = _keywords(k, rest)
    results: tuple[Tensor, ...] = api_sparse.sparse_jvp(
        q,
        k,
        v,
        tq,
        tk,
        tv,
        cu_seqlens,
        selection,
        block_scale=block_scale,
        tblock_scale=tblock_scale,
        **keywords,
    )
    return results


# ---- the operators ----------------------------------------------------------------------------

sparse_forward = define(
    "sparse_attn",
    f"sparse_forward({INPUTS}, {OPTIONS}) -> (Tensor out, Tensor lse)",
    _compute_forward,
    fake_forward,
)
sparse_backward = define(
    "sparse_attn",
    f"sparse_backward({GIVEN}, {OPTIONS}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dblock_scale)",
    _compute_backward,
    fake_backward,
)
sparse_double_backward = define(
    "sparse_attn",
    f"sparse_double_backward({DIRECTION.format('dd')}, {GIVEN}, {OPTIONS}) -> "
    "(Tensor ddout, Tensor ddlse, Tensor gq, Tensor gk, Tensor gv, Tensor gblock_scale)",
    _compute_double_backward,
    fake_double_backward,
)
sparse_jvp = define(
    "sparse_attn",
    f"sparse_jvp({INPUTS}, {DIRECTION.format('t')}, {OPTIONS}) -> "
    "(Tensor out, Tensor tout, Tensor lse, Tensor tlse)",
    _compute_jvp,
    fake_jvp,
)
SPARSE = Operators(
    "sparse_attn",
    sparse_forward,
    sparse_backward,
    sparse_double_backward,
    sparse_jvp,
    num_inputs=4,
    num_given=4 + len(TABLE),
)
register(SPARSE)
