"""Block-sparse attention and its derivatives: look at all arrays, check them, compute.

Long for a module, since the contracts of four functions stand in the docstrings. Every query sees
a few blocks of the keys of its sequence, which block_indices names: the selected branch of native
sparse attention (arXiv 2502.11089). Per sequence and query head, with g the number of the block
that key j lies in (``block_scale``, else 1) and s = ``softmax_scale``:

    S_ij = g s q_i . k_j      P = exp(S - L)      L = logsumexp over the allowed keys      O = P V

Everything else is as in ``api`` and ``api_second``, from the tiling of FlashAttention-2 (arXiv
2307.08691) on. Queries that share a selection go through its blocks together; gradients with
respect to keys go the other way, from a block to the queries that see it (``BlockTable``).
"""

from typing import Any, Never

from rawattn import api, call, checks, passes_sparse
from rawattn.arrays import Array, View
from rawattn.call import Given, Inputs, Result, Window
from rawattn.passes_sparse import Chosen
from rawattn.reference import sparse
from rawattn.tables import BlockTable, choose, named_blocks

_OPEN = (-1, -1)
_INF = float("inf")


def sparse_forward(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens: Array,
    block_indices: Array | BlockTable,
    *extra: Never,
    cu_seqlens_k: Array | None = None,
    block_size: int = 64,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Array | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    return_sliding: bool = False,
    window: Window | int | None = None,
    out: Array | None = None,
    backend: str | None = None,
    validate: bool = False,
    **wrong: Never,
) -> Any:
    """Attention of each query to selected blocks of the keys of its sequence.

    q, k, v, cu_seqlens, cu_seqlens_k, softmax_scale, out, backend, validate: as in ``forward``.
    block_indices: (total_q, num_heads_kv or num_heads_q, num_selected) int32 or int64: blocks of
        the query's own sequence. Block n is the keys from n * block_size on, and ends with the
        sequence. What lies outside of the sequence is padding, as -1 is, or num_blocks; a block
        that is named twice counts once. int64 is converted on the device, and what is no int32 is
        padding too. With num_heads_kv on the middle axis, the query heads of a group share a
        selection. Or a BlockTable, so that nothing has to be built.
    block_size: keys of a block: 16, 32, 64 or 128.
    block_counts: (total_q, the middle axis of block_indices) int32 or int64: slots of a query from
        there on are padding. None: all count.
    include_own_block: each query also sees its own block, which holds key i + seqlen_k - seqlen_q,
        up to that key.
    causal: query i sees key j only if j <= i + seqlen_k - seqlen_q, whatever it has selected.
    block_scale: float32 (float64 for float64 inputs), of the shape of block_indices: factors on the
        scores of the blocks. A block that is named twice has the factor of the first slot, an own
        block that is not named 1. None: 1 everywhere.
    return_lse: also return the logsumexp.
    return_sliding: also return dense attention to a window, the sliding branch. Its gradients are
        those of ``backward`` with the same causal and window.
    window: of return_sliding, and only beside it: (left, right) as in ``forward``, or left alone
        for (left, 0); by default (block_size - 1, 0).

    Returns out (total_q, num_heads_q, head_dim_v) of q's dtype, or (out, lse) with lse
    (num_heads_q, total_q), natural logarithm, float32 (float64 for float64 inputs); with
    return_sliding (out, sliding_out) or (out, lse, sliding_out, sliding_lse). A query that may see
    no key has out 0 and lse -inf. A NaN or an infinity among the values of a block that some query
    selected may reach others of the same sequence that go through a tile with it; of blocks that
    nobody selected nothing is read. Nothing waits for the device. Raises as ``forward`` does.
    """
    if extra or wrong:
        checks.call_style("sparse_forward", extra, wrong)
    given, inputs = call.look(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, _OPEN, softmax_scale, backend, validate
    )
    chosen = _chosen(
        given, block_indices, block_counts, block_size, include_own_block, causal, block_scale,
        lists=False,
    )  # fmt: skip
    checks.only_sliding(window, return_sliding)
    if return_sliding:
        window = checks.sliding_window(window, chosen.selection.block_size, causal)
    out, lse = call.compute(
        given,
        (*inputs, *_views(chosen)),
        (given.result(out, "out", given.rows), Result("lse", given.sums)),
        empty=(0.0, -_INF),
        nothing=not chosen.selection.width,
        reference=lambda: sparse.forward(
            *call.neutral(inputs)[:5], **_options(given, chosen, inputs)
        ),
        kernels=lambda to, *rooms: passes_sparse.forward(to, chosen, inputs, *rooms),
    )
    answers = (out, lse) if return_lse else (out,)
    if return_sliding:
        near = api.forward(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            causal=causal,
            window=window,  # type: ignore[arg-type]
            softmax_scale=softmax_scale,
            return_lse=return_lse,
            backend=backend,
        )
        answers += near if return_lse else (near,)
    return answers if len(answers) > 1 else answers[0]


def sparse_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    cu_seqlens: Array,
    block_indices: Array | BlockTable,
    *extra: Never,
    cu_seqlens_k: Array | None = None,
    block_size: int = 64,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Array | None = None,
    softmax_scale: float | None = None,
    dlse: Array | None = None,
    deterministic: bool = False,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    backend: str | None = None,
    validate: bool = False,
    **wrong: Never,
) -> tuple[Any, Any, Any, Any]:
    """Gradients of ``sparse_forward`` for the cotangents dout of out and dlse of lse.

        D_i = dO_i . O_i - dL_i      dP = dO V^T      dS = P o (dP - D)      dV = P^T dO
        dQ = s (g o dS) K            dK = s (g o dS)^T Q      dg = s sum dS_ij q_i . k_j

    where the last sum is over the keys of the block, and the query heads that share the selection.

    q, k, v, cu_seqlens, block_indices, cu_seqlens_k, block_size, block_counts, include_own_block,
        causal, block_scale, softmax_scale, backend, validate: as in ``sparse_forward``. A
        BlockTable has to have lists.
    dout: (total_q, num_heads_q, head_dim_v) of q's dtype.
    out: (total_q, num_heads_q, head_dim_v), lse: (num_heads_q, total_q) float32 (float64 for
        float64 inputs), used as passed: with those of a larger attention, of which these blocks are
        a part, the result is this part's share of the gradients.
    dlse: (num_heads_q, total_q) of lse's dtype; None is zero.
    deterministic: bitwise the same on every run: no floating-point atomics, dq in a pass of its
        own.
    dq, dk, dv: arrays to write into, shaped like q, k, v; must not overlap an input.

    Returns (dq, dk, dv, dblock_scale): shaped like q, k, v and of their dtype, and like block_scale
    (None without it). dk and dv are summed over the query heads of a group in float32.
    dblock_scale is 0 where a slot is padding, or names a block again. Raises as ``forward`` does.
    """
    if extra or wrong:
        checks.call_style("sparse_backward", extra, wrong)
    given, inputs = call.look(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, _OPEN, softmax_scale, backend, validate
    )
    chosen = _chosen(
        given, block_indices, block_counts, block_size, include_own_block, causal, block_scale,
        lists=True,
    )  # fmt: skip
    passed = given.passed(dout, out, lse, dlse)
    results = (*given.gradients(inputs, "d", dq, dk, dv), *_like_scale(chosen, "dblock_scale"))

    def reference() -> Any:
        x, y = call.neutral(inputs), call.neutral(passed)
        arrays_ = (y.dout, x.q, x.k, x.v, y.out, y.lse, x.cu_seqlens_q, x.cu_seqlens_k)
        values = sparse.backward(*arrays_, dlse=y.dlse, **_options(given, chosen, inputs))
        return values[: len(results)]

    def kernels(to: call.Call, dq: View, dk: View, dv: View, dscale: View | None = None) -> None:
        passes_sparse.backward(to, chosen, deterministic, inputs, passed, dq, dk, dv, dscale)

    dq, dk, dv, *of_scale = call.compute(
        given,
        (*inputs, *_views(chosen), *passed),
        results,
        empty=(0.0,) * len(results),
        nothing=not chosen.selection.width,
        reference=reference,
        kernels=kernels,
    )
    return dq, dk, dv, of_scale[0] if of_scale else None


def sparse_double_backward(
    ddq: Array | None,
    ddk: Array | None,
    ddv: Array | None,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    cu_seqlens: Array,
    block_indices: Array | BlockTable,
    *extra: Never,
    ddblock_scale: Array | None = None,
    cu_seqlens_k: Array | None = None,
    block_size: int = 64,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Array | None = None,
    softmax_scale: float | None = None,
    dlse: Array | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    validate: bool = False,
    **wrong: Never,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Gradients of ``sparse_backward`` for the cotangents of dq, dk, dv and dblock_scale.

    With t = ddblock_scale, D, dP and dS = P o Z as in ``sparse_backward``:

        E = g o s (ddq K^T + Q ddk^T) + t o s Q K^T        ddL_i = sum_j P_ij E_ij
        ddO = (P o E) V + P ddv - ddL o O                  W_i = dO_i . ddO_i
        P' = P o (E - ddL)      Z = dP - D      dS' = P' o Z + P o (dO ddv^T - W)
        gQ = s ((g o dS' + t o dS) K + (g o dS) ddk)       gV = P'^T dO
        gK = s ((g o dS' + t o dS)^T Q + (g o dS)^T ddq)
        gg = s sum (dS'_ij q_i . k_j + dS_ij (ddq_i . k_j + q_i . ddk_j))

    where the last sum is over the keys of the block, and the query heads that share the selection.

    ddq, ddk, ddv: shaped like q, k, v and of their dtype, of any strides. None is zero.
    ddblock_scale: of the shape and dtype of block_scale, and only beside it. None is zero.
    dout, dlse: as they were given to ``sparse_backward``.
    q, k, v, cu_seqlens, block_indices, cu_seqlens_k, block_size, block_counts, include_own_block,
        causal, block_scale, softmax_scale, backend, validate: as in ``sparse_backward``.
    out, lse: what ``sparse_forward`` gave for the same arrays: they cannot be those of a larger
        attention, since ddL and W are sums over all its keys.
    deterministic: accepted for the sake of the other signatures; there are no atomics either way.

    Returns (ddout, ddlse, gq, gk, gv, gblock_scale): the gradients with respect to dout, dlse, q,
    k, v and block_scale, of their shapes and dtypes (ddlse also without dlse; gblock_scale None
    without block_scale). out and lse count as functions of q, k, v and block_scale. A query that
    may see no key has zeros. Raises as ``forward`` does.
    """
    if extra or wrong:
        checks.call_style("sparse_double_backward", extra, wrong)
    given, inputs = call.look(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, _OPEN, softmax_scale, backend, validate
    )
    chosen = _chosen(
        given, block_indices, block_counts, block_size, include_own_block, causal, block_scale,
        lists=True,
    )  # fmt: skip
    parts = given.direction("dd", inputs, ddq, ddk, ddv)
    of_scale = _direction_of_scale(given, chosen, ddblock_scale, "ddblock_scale")
    passed = given.passed(dout, out, lse, dlse)
    results = (
        Result("ddout", given.rows),
        Result("ddlse", given.sums),
        *given.gradients(inputs, "g", None, None, None),
        *_like_scale(chosen, "gblock_scale"),
    )

    def reference() -> Any:
        x, y, z = call.neutral(inputs), call.neutral(passed), call.neutral(parts)
        arrays_ = (y.dout, x.q, x.k, x.v, y.out, y.lse, x.cu_seqlens_q, x.cu_seqlens_k)
        moved = {"ddblock_scale": call.neutral_or_none(of_scale)}
        options = _options(given, chosen, inputs) | moved
        values = sparse.double_backward(z.q, z.k, z.v, *arrays_, dlse=y.dlse, **options)
        return values[: len(results)]

    def kernels(
        to: call.Call,
        ddout: View,
        ddlse: View,
        gq: View,
        gk: View,
        gv: View,
        gscale: View | None = None,
    ) -> None:
        rooms = (ddout, ddlse, gq, gk, gv, gscale)
        passes_sparse.double_backward(to, chosen, inputs, parts, of_scale, passed, *rooms)

    ddout, ddlse, gq, gk, gv, *gscale = call.compute(
        given,
        (*inputs, *_views(chosen), *parts, of_scale, *passed),
        results,
        empty=(0.0,) * len(results),
        nothing=not (chosen.selection.width and any((*parts, of_scale))),
        reference=reference,
        kernels=kernels,
    )
    return ddout, ddlse, gq, gk, gv, gscale[0] if gscale else None


def sparse_jvp(
    q: Array,
    k: Array,
    v: Array,
    tq: Array | None,
    tk: Array | None,
    tv: Array | None,
    cu_seqlens: Array,
    block_indices: Array | BlockTable,
    *extra: Never,
    tblock_scale: Array | None = None,
    cu_seqlens_k: Array | None = None,
    block_size: int = 64,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_scale: Array | None = None,
    softmax_scale: float | None = None,
    backend: str | None = None,
    validate: bool = False,
    **wrong: Never,
) -> tuple[Any, Any, Any, Any]:
    """``sparse_forward`` and its derivative in the direction (tq, tk, tv, tblock_scale).

        E = g o s (tq K^T + Q tk^T) + tblock_scale o s Q K^T      tlse_i = sum_j P_ij E_ij
        tout = (P o E) V + P tv - tlse o out

    q, k, v, cu_seqlens, block_indices, cu_seqlens_k, block_size, block_counts, include_own_block,
        causal, block_scale, softmax_scale, backend, validate: as in ``sparse_forward``.
    tq, tk, tv: shaped like q, k, v and of their dtype, of any strides. None is zero.
    tblock_scale: of the shape and dtype of block_scale, and only beside it. None is zero.

    Returns (out, tout, lse, tlse): out and tout (total_q, num_heads_q, head_dim_v) of q's dtype,
    lse and tlse (num_heads_q, total_q) float32 (float64 for float64 inputs). A query that may see
    no key has out 0, lse -inf and tangents 0. Raises as ``forward`` does.
    """
    if extra or wrong:
        checks.call_style("sparse_jvp", extra, wrong)
    given, inputs = call.look(
        q, k, v, cu_seqlens, cu_seqlens_k, causal, _OPEN, softmax_scale, backend, validate
    )
    chosen = _chosen(
        given, block_indices, block_counts, block_size, include_own_block, causal, block_scale,
        lists=False,
    )  # fmt: skip
    parts = given.direction("t", inputs, tq, tk, tv)
    of_scale = _direction_of_scale(given, chosen, tblock_scale, "tblock_scale")

    def reference() -> Any:
        q, k, v, *offsets = call.neutral(inputs)[:5]
        options = _options(given, chosen, inputs) | {"tblock_scale": call.neutral_or_none(of_scale)}
        return sparse.jvp(q, k, v, *call.neutral(parts), *offsets, **options)

    out, tout, lse, tlse = call.compute(
        given,
        (*inputs, *_views(chosen), *parts, of_scale),
        (
            Result("out", given.rows),
            Result("tout", given.rows),
            Result("lse", given.sums),
            Result("tlse", given.sums),
        ),
        empty=(0.0, 0.0, -_INF, 0.0),
        nothing=not chosen.selection.width,
        reference=reference,
        kernels=lambda to, *rooms: passes_sparse.jvp(to, chosen, inputs, parts, of_scale, *rooms),
    )
    return out, tout, lse, tlse


# ---- look and check ---------------------------------------------------------------------------


def _chosen(
    given: Given,
    block_indices: Array | BlockTable,
    block_counts: Array | None,
    block_size: int,
    include_own_block: bool,
    causal: bool,
    block_scale: Array | None,
    *,
    lists: bool,
) -> Chosen:
    """The selection, with the ``lists`` of a table or without, and the factors on its scores."""
    selection, source = choose(
        given, block_indices, block_counts, block_size, include_own_block, causal, lists
    )
    if block_scale is None:
        return Chosen(selection, source, None)
    shape = (given.problem.total_q, selection.num_heads_sel, selection.num_selected)
    dtype = call.statistic(given.problem.dtype)
    view = given.view_like(block_scale, "block_scale", (shape, dtype))
    return Chosen(selection, source, view)


def _direction_of_scale(
    given: Given, chosen: Chosen, array: Array | None, name: str
) -> View | None:
    """View of what block_scale moves along."""
    scale = chosen.block_scale
    checks.beside_block_scale(name, array is not None, scale is not None)
    if array is None or scale is None:
        return None
    return given.view_like(array, name, (scale.shape, scale.dtype))


def _like_scale(chosen: Chosen, name: str) -> tuple[Result, ...]:
    """The result that is like block_scale, if there is one."""
    scale = chosen.block_scale
    return () if scale is None else (Result(name, (tuple(scale.shape), scale.dtype)),)


def _views(chosen: Chosen) -> tuple[View | None, ...]:
    """The arrays of a selection."""
    return (*chosen.source.views(), chosen.block_scale)


# ---- the reference ----------------------------------------------------------------------------


def _options(given: Given, chosen: Chosen, inputs: Inputs) -> dict[str, Any]:
    """What the reference wants to know beside the arrays of dense attention."""
    problem, (selection, source, block_scale) = given.problem, chosen
    options = named_blocks(problem, selection, source, inputs[3:5])
    scale = call.neutral_or_none(block_scale)
    return options | {"block_scale": scale, "softmax_scale": problem.softmax_scale}
