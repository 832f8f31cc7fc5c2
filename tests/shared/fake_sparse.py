"""The kernels of block-sparse attention on the GPU of ``fake_gpu``: the reference, by raw pointer.

What a kernel hands to the next one is what the reference gets here: blocks and slots, or the lists
of queries, delta, the sums of ``sparse_double_backward_out``. A kernel that is free to choose an
order chooses an unusual one.
"""

from typing import Any

import numpy as np

from rawattn import call, passes_sparse, tables
from rawattn.arrays import is_dense
from rawattn.reference import blocks as reference
from rawattn.reference import dense, selection, sparse
from tests.shared import fake_gpu

INDICES, MASK, PATTERN = range(3)


class Kernels(fake_gpu.Kernels):
    """Stand-ins of the sparse ops/*.launch."""

    def __init__(self) -> None:
        super().__init__()
        self.selections: list[Any] = []

    def _given(self, variant: Any, problem: Any, choice: Any, views: Any, stream: int) -> Any:
        self.selections.append(choice)
        for view in filter(None, views):
            # block_scale and the like come after v, and kernels take them without strides
            if view.dtype in fake_gpu.OTHERS or view.shape[1:] == (
                choice.num_heads_sel,
                choice.num_selected,
            ):
                assert is_dense(view) or 0 in view.shape, view
        return self._note(variant, problem, views, stream)

    def stems(self) -> list[str]:
        """What has been launched."""
        return [row.rpartition("_numba")[0] or row.partition("_sm")[0] for row, _ in self.launched]

    # ---- the table ----------------------------------------------------------------------------

    def block_lists(
        self, variant: Any, problem: Any, choice: Any, source: int, *rest: Any, stream: int
    ) -> None:
        *views, global_blocks = rest
        given = self._given(variant, problem, choice, views, stream)
        named, counted, offsets_q, offsets_k, blocks, slots, counts, lengths = given
        if source == MASK:
            assert views[0].dtype == "uint8"
            named = reference.named_by_mask(named.astype(bool))
        elif source == PATTERN:
            assert named is None
            named = reference.named_by_pattern(
                offsets_q,
                offsets_k,
                problem.total_q,
                num_heads_sel=choice.num_heads_sel,
                sliding_blocks=choice.num_selected - global_blocks,
                global_blocks=global_blocks,
                block_size=choice.block_size,
            )
        options = self._options(problem, choice) | {"block_counts": counted}
        blocks[...], slots[...], counts[...] = reference.by_query(
            named, offsets_q, offsets_k, **options
        )
        if lengths is not None:
            lengths += self._by_key(problem, choice, blocks, slots, offsets_q, offsets_k)[1]

    def block_offsets(
        self, variant: Any, problem: Any, choice: Any, *views: Any, stream: int
    ) -> None:
        lengths, starts, cursor, work = self._given(variant, problem, choice, views, stream)
        assert (cursor == 0).all() and cursor.size == 2 + lengths.size and (work == -1).all()
        backwards = lengths.ravel()[::-1]  # the order of the lists is free
        starts.reshape(-1)[::-1] = np.cumsum(backwards) - backwards
        segment, segments = choice.segment(problem), []
        for one, (start, length) in enumerate(zip(starts.flat, lengths.flat, strict=True)):
            for first in range(0, length, segment):
                segments.append((one, start + first, min(segment, length - first), 0))
        cursor[:2] = lengths.sum(), len(segments)
        work[: len(segments)] = np.array(segments[::-1], np.int32).reshape(-1, 4)

    def block_queries(
        self, variant: Any, problem: Any, choice: Any, *views: Any, stream: int
    ) -> None:
        given = self._given(variant, problem, choice, views, stream)
        offsets_q, offsets_k, blocks, slots, starts, cursor, unsorted, unsorted_slots = given
        assert (cursor[2:] == 0).all()
        lists = self._by_key(problem, choice, blocks, slots, offsets_q, offsets_k)
        for at in np.ndindex(starts.shape):
            there = slice(lists[0][at], lists[0][at] + lists[1][at])
            here = slice(starts[at], starts[at] + lists[1][at])
            unsorted[here], unsorted_slots[here] = lists[2][there][::-1], lists[3][there][::-1]

    def block_order(
        self, variant: Any, problem: Any, choice: Any, *views: Any, stream: int
    ) -> None:
        given = self._given(variant, problem, choice, views, stream)
        starts, lengths, unsorted, unsorted_slots, queries, query_slots = given
        for at in np.ndindex(starts.shape):
            here = slice(starts[at], starts[at] + lengths[at])
            order = np.argsort(unsorted[here])
            queries[here], query_slots[here] = unsorted[here][order], unsorted_slots[here][order]

    # ---- attention ----------------------------------------------------------------------------

    def sparse_forward(
        self, variant: Any, problem: Any, choice: Any, *views: Any, stream: int
    ) -> None:
        given = self._given(variant, problem, choice, views, stream)
        q, k, v, blocks, slots, gate, *offsets, out, lse = given
        options = self._by_table(problem, choice, blocks, slots)
        options |= {"block_scale": gate, "softmax_scale": problem.softmax_scale}
        out[...], lse[...] = sparse.forward(q, k, v, *offsets, **options)

    def sparse_backward_kv(
        self, variant: Any, problem: Any, choice: Any, *views: Any, stream: int
    ) -> None:
        given = self._given(variant, problem, choice, views, stream)
        *terms, gate, of_gate, cu_q, cu_k, dq_accum, dk, dv, dk_accum, dv_accum = given
        *lists, work = terms[6:]
        if dk is None:
            lists[:2] = self._by_work(work, *lists[:2])
        options = self._by_lists(problem, choice, cu_q, cu_k, *lists)
        gradients = self._gradients_of(problem, [*terms[:6], gate, cu_q, cu_k], options)
        dq, *of_keys, dg = gradients
        assert (gate is None) == (of_gate is None)
        if of_gate is not None:
            assert (of_gate == 0).all()
            of_gate += dg
        if dq_accum is not None:
            assert (dq_accum == 0).all()
            dq_accum[..., : dq.shape[2]] += dq / problem.softmax_scale
        if dk is None:
            assert dq_accum is not None and choice.num_chunks(problem) > 1
            assert (dk_accum == 0).all() and (dv_accum == 0).all()
            dk_accum[..., : dq.shape[2]] += of_keys[0] / problem.softmax_scale
            dv_accum[..., : of_keys[1].shape[2]] += of_keys[1]
        else:
            assert dk_accum is dv_accum is None
            dk[...], dv[...] = of_keys

    def sparse_backward_q(
        self, variant: Any, problem: Any, choice: Any, *views: Any, stream: int
    ) -> None:
        given = self._given(variant, problem, choice, views, stream)
        *terms, blocks, slots, gate, cu_q, cu_k, dq = given
        options = self._by_table(problem, choice, blocks, slots)
        dq[...] = self._gradients_of(problem, [*terms, gate, cu_q, cu_k], options)[0]

    def sparse_postprocess(
        self, variant: Any, problem: Any, *views: Any, scale: float, stream: int
    ) -> None:
        accum, grad = self._note(variant, problem, views, stream)
        assert is_dense(views[0])
        grad[...] = accum[..., : grad.shape[2]] * scale

    # ---- second order -------------------------------------------------------------------------

    def sparse_double_backward_out(
        self, variant: Any, problem: Any, choice: Any, *views: Any, stream: int
    ) -> None:
        given = self._given(variant, problem, choice, views, stream)
        out, dout, lse, dlse, blocks, slots, gate, of_gate, *offsets = given[6:16]
        ddout, ddlse, delta, ddelta = given[16:]
        options = self._by_table(problem, choice, blocks, slots)
        options |= {"block_scale": gate, "softmax_scale": problem.softmax_scale}
        _, tout, seen, tlse = sparse.jvp(*given[:6], *offsets, tblock_scale=of_gate, **options)
        level = np.where(lse == -np.inf, 0, lse)
        np.testing.assert_allclose(level, np.where(seen == -np.inf, 0, seen), atol=0.1)
        assert np.isfinite(out.astype(float)).all()
        ddout[...], ddlse[...] = tout, tlse
        if dout is None:
            assert delta is ddelta is dlse is None
            return
        dead = np.where(lse == -np.inf, np.nan, 0)  # nobody may read them there
        delta[...] = (out.astype(float) * dout.astype(float)).sum(-1).T + dead
        delta -= 0 if dlse is None else dlse
        ddelta[...] = (tout * dout.astype(float)).sum(-1).T + dead

    def sparse_double_backward_kv(
        self, variant: Any, problem: Any, choice: Any, *views: Any, stream: int
    ) -> None:
        given = self._given(variant, problem, choice, views, stream)
        *lists, gate, of_gate, gg, cu_q, cu_k, gk, gv = given[11:]
        options = self._by_lists(problem, choice, cu_q, cu_k, *lists)
        second = self._second_of(problem, given[:11], gate, of_gate, (cu_q, cu_k), options)
        gk[...], gv[...] = second[3:5]
        assert (gate is None) == (gg is None)
        if gg is not None:
            assert (gg == 0).all()
            gg += second[5]

    def sparse_double_backward_q(
        self, variant: Any, problem: Any, choice: Any, *views: Any, stream: int
    ) -> None:
        given = self._given(variant, problem, choice, views, stream)
        blocks, slots, gate, of_gate, cu_q, cu_k, gq = given[11:]
        options = self._by_table(problem, choice, blocks, slots)
        gq[...] = self._second_of(problem, given[:11], gate, of_gate, (cu_q, cu_k), options)[2]

    # ---- for the reference --------------------------------------------------------------------

    @staticmethod
    def _options(problem: Any, choice: Any) -> dict[str, Any]:
        assert problem.window_left == -1 and problem.window_right in (-1, 0)
        return {
            "block_size": choice.block_size,
            "include_own_block": choice.own,
            "causal": problem.window_right == 0,
        }

    @staticmethod
    def _by_key(problem: Any, choice: Any, *table: np.ndarray) -> Any:
        return reference.by_key(
            *table,
            num_heads_kv=problem.num_heads_kv,
            units=choice.key_units(problem),
            chunk=choice.chunk,
            num_chunks=choice.num_chunks(problem),
            block_size=choice.block_size,
            segment=choice.segment(problem),
            segments=choice.segments(problem),
        )

    def _by_table(self, problem: Any, choice: Any, blocks: Any, slots: Any) -> dict[str, Any]:
        """What the reference wants to know, of blocks by query."""
        named = reference.named_by_table(blocks, slots, choice.num_selected)
        return self._options(problem, choice) | {"block_indices": named}

    @staticmethod
    def _by_work(work: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        """starts and lengths as the segments of work have them, whatever those themselves are."""
        begin, total = np.full(starts.shape, 2**31 - 1), np.zeros_like(lengths)
        for one, first, number, zero in work[work[:, 0] >= 0]:
            assert number > 0 and zero == 0
            total.reshape(-1)[one] += number
            begin.reshape(-1)[one] = min(begin.reshape(-1)[one], first)
        return [begin, total]

    def _by_lists(
        self, problem: Any, choice: Any, cu_q: Any, cu_k: Any, *lists: np.ndarray
    ) -> dict[str, Any]:
        """What the reference wants to know, of queries by block."""
        starts, lengths, queries, query_slots = lists
        ratio = choice.num_heads_sel // problem.num_heads_kv
        shape = (problem.total_q, choice.num_heads_sel, choice.num_selected)
        named, owned = np.full(shape, -1), 0
        for chunk, head_kv, unit in zip(*np.nonzero(lengths), strict=True):
            start, length = starts[chunk, head_kv, unit], lengths[chunk, head_kv, unit]
            items = queries[start : start + length]
            assert (np.diff(items) > 0).all()
            for item, slot in zip(items, query_slots[start : start + length], strict=True):
                token, head = item // ratio, head_kv * ratio + item % ratio
                assert token // choice.chunk == chunk
                b = np.searchsorted(cu_q[1:], token, side="right")
                if slot >= 0:
                    named[token, head, slot] = unit - cu_k[b] // choice.block_size - b
                owned += slot < 0
        assert owned == 0 or choice.own
        return self._options(problem, choice) | {"block_indices": named}

    @staticmethod
    def _gradients_of(problem: Any, terms: Any, options: Any) -> Any:
        q, k, v, dout, lse, delta, gate, *offsets = terms
        # with an out of zeros, D is -dlse: that makes it the delta that was handed over
        inputs = (dout, q, k, v, np.zeros(dout.shape), lse, *offsets)
        options = options | {"block_scale": gate, "softmax_scale": problem.softmax_scale}
        return sparse.backward(*inputs, dlse=-delta, **options)

    @staticmethod
    def _second_of(
        problem: Any, terms: Any, gate: Any, of_gate: Any, offsets: Any, options: Any
    ) -> Any:
        q, k, v, *direction, dout, lse, delta, ddlse, ddelta = terms
        alive = lse != -np.inf
        inputs = (*direction, dout, q, k, v, np.zeros(dout.shape), lse, *offsets)
        options = options | {"block_scale": gate, "softmax_scale": problem.softmax_scale}
        level = np.where(alive, -delta, 0)
        results = sparse.double_backward(*inputs, ddblock_scale=of_gate, dlse=level, **options)
        tout, tlse = results[:2]
        np.testing.assert_allclose(ddlse, tlse, rtol=1e-3, atol=1e-3)
        of_rows = (tout * dout.astype(float)).sum(-1).T
        np.testing.assert_allclose(ddelta[alive], of_rows[alive], rtol=1e-3, atol=1e-3)
        return results


def install(monkeypatch: Any) -> Kernels:
    """``fake_gpu.install``, and the sparse kernels."""
    kernels = fake_gpu.install(monkeypatch, Kernels)
    call.pose_selection.cache_clear()
    for module in (reference, selection, sparse):
        monkeypatch.setattr(module, "namespace", lambda array: np)
    for module in (tables, passes_sparse):
        for name, op in vars(module).items():
            stem = getattr(op, "__name__", "").removeprefix("rawattn.ops.")
            if name.endswith("_op") and stem != "backward_preprocess":
                monkeypatch.setattr(op, "launch", getattr(kernels, stem))
    assert dense.namespace(None) is np
    return kernels


def remove() -> None:
    """Forget what was cached of the fakes."""
    fake_gpu.remove()
    call.pose_selection.cache_clear()
