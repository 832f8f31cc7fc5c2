"""The kernels of block-sparse attention on the GPU of ``fake_gpu``: the reference, by raw pointer.

What a kernel hands to the next one is what the reference gets here: blocks and slots, or the lists
of queries, delta, the sums of ``sparse_double_backward_out``. A kernel that is free to choose an
order chooses an unusual one.
"""

from typing import Any

import numpy as np

from rawattn import call
from rawattn.reference import blocks as reference
from rawattn.reference import selection, sparse
from tests.shared import fake_gpu
from tests.shared.fake_gpu import MASK, PATTERN


class Kernels(fake_gpu.Kernels):
    """Stand-ins of the sparse kernels too."""

    def stems(self) -> list[str]:
        """What has been launched."""
        return [row.rpartition("_numba")[0] or row.partition("_sm")[0] for row, _ in self.launched]

    # ---- the table ----------------------------------------------------------------------------

    def block_lists(self, problem: Any, choice: Any, a: Any) -> None:
        offsets, named = (a.cu_seqlens_q, a.cu_seqlens_k), a.block_indices
        if a.source == MASK:
            assert named.dtype == np.uint8
            named = reference.named_by_mask(named.astype(bool))
        elif a.source == PATTERN:
            assert named is None
            named = reference.named_by_pattern(
                *offsets,
                problem.total_q,
                num_heads_sel=choice.num_heads_sel,
                sliding_blocks=choice.num_selected - a.global_blocks,
                global_blocks=a.global_blocks,
                block_size=choice.block_size,
            )
        options = self._options(problem, choice) | {"block_counts": a.block_counts}
        by_query = reference.by_query(named, *offsets, **options)
        a.blocks[...], a.slots[...], a.counts[...] = by_query
        if a.lengths is not None:
            a.lengths += self._by_key(problem, choice, a.blocks, a.slots, *offsets)[1]

    def block_offsets(self, problem: Any, choice: Any, a: Any) -> None:
        lengths, starts, cursor, work = a.lengths, a.starts, a.cursor, a.work
        assert (cursor == 0).all() and cursor.size == 2 + lengths.size and (work == -1).all()
        assert a.segment == choice.segment(problem)
        backwards = lengths.ravel()[::-1]  # the order of the lists is free
        starts.reshape(-1)[::-1] = np.cumsum(backwards) - backwards
        segments = []
        for one, (start, length) in enumerate(zip(starts.flat, lengths.flat, strict=True)):
            for first in range(0, length, a.segment):
                segments.append((one, start + first, min(a.segment, length - first), 0))
        cursor[:2] = lengths.sum(), len(segments)
        work[: len(segments)] = np.array(segments[::-1], np.int32).reshape(-1, 4)

    def block_queries(self, problem: Any, choice: Any, a: Any) -> None:
        assert (a.cursor[2:] == 0).all()
        offsets = (a.cu_seqlens_q, a.cu_seqlens_k)
        lists = self._by_key(problem, choice, a.blocks, a.slots, *offsets)
        for at in np.ndindex(a.starts.shape):
            there = slice(lists[0][at], lists[0][at] + lists[1][at])
            here = slice(a.starts[at], a.starts[at] + lists[1][at])
            a.unsorted[here], a.unsorted_slots[here] = lists[2][there][::-1], lists[3][there][::-1]

    def block_order(self, problem: Any, choice: Any, a: Any) -> None:
        for at in np.ndindex(a.starts.shape):
            here = slice(a.starts[at], a.starts[at] + a.lengths[at])
            order = np.argsort(a.unsorted[here])
            a.queries[here] = a.unsorted[here][order]
            a.query_slots[here] = a.unsorted_slots[here][order]

    # ---- attention ----------------------------------------------------------------------------

    def sparse_forward(self, problem: Any, choice: Any, a: Any) -> None:
        inputs = (a.q, a.k, a.v, a.cu_seqlens_q, a.cu_seqlens_k)
        a.out[...], a.lse[...] = sparse.forward(*inputs, **self._by_table(problem, choice, a))

    def sparse_backward_kv(self, problem: Any, choice: Any, a: Any) -> None:
        starts, lengths = a.starts, a.lengths
        if a.dk is None:
            starts, lengths = self._by_work(a.work, starts, lengths)
        options = self._by_lists(problem, choice, a, starts, lengths)
        dq, dk, dv, dg = self._gradients_of(a, options)
        assert (a.block_scale is None) == (a.dblock_scale is None)
        if a.dblock_scale is not None:
            assert (a.dblock_scale == 0).all()
            a.dblock_scale += dg
        if a.dq_accum is not None:
            assert (a.dq_accum == 0).all()
            a.dq_accum[..., : dq.shape[2]] += dq / problem.softmax_scale
        if a.dk is None:
            assert a.dv is None and a.dq_accum is not None and choice.num_chunks(problem) > 1
            assert (a.dk_accum == 0).all() and (a.dv_accum == 0).all()
            a.dk_accum[..., : dk.shape[2]] += dk / problem.softmax_scale
            a.dv_accum[..., : dv.shape[2]] += dv
        else:
            assert a.dk_accum is a.dv_accum is None
            a.dk[...], a.dv[...] = dk, dv

    def sparse_backward_q(self, problem: Any, choice: Any, a: Any) -> None:
        a.dq[...] = self._gradients_of(a, self._by_table(problem, choice, a))[0]

    def sparse_postprocess(self, problem: Any, a: Any) -> None:
        assert a.accum.shape[:2] == a.grad.shape[:2] == (a.total_rows, a.num_heads)
        a.grad[...] = a.accum[..., : a.grad.shape[2]] * a.scale

    # ---- second order -------------------------------------------------------------------------

    def sparse_double_backward_out(self, problem: Any, choice: Any, a: Any) -> None:
        terms, of_gate = self._terms(a), a.ddblock_scale
        options = self._by_table(problem, choice, a)
        _, tout, seen, a.ddlse[...] = sparse.jvp(*terms, tblock_scale=of_gate, **options)
        level = np.where(a.lse == -np.inf, 0, a.lse)
        np.testing.assert_allclose(level, np.where(seen == -np.inf, 0, seen), atol=0.1)
        assert np.isfinite(a.out.astype(float)).all()
        a.ddout[...] = tout
        if a.dout is None:
            assert a.delta is a.ddelta is a.dlse is None
            return
        self._row_terms(a, tout)

    def sparse_double_backward_kv(self, problem: Any, choice: Any, a: Any) -> None:
        options = self._by_lists(problem, choice, a, a.starts, a.lengths)
        second = self._second_of(a, options)
        a.gk[...], a.gv[...] = second[3:5]
        assert (a.block_scale is None) == (a.gblock_scale is None)
        if a.gblock_scale is not None:
            assert (a.gblock_scale == 0).all()
            a.gblock_scale += second[5]

    def sparse_double_backward_q(self, problem: Any, choice: Any, a: Any) -> None:
        a.gq[...] = self._second_of(a, self._by_table(problem, choice, a))[2]

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

    def _by_table(self, problem: Any, choice: Any, a: Any) -> dict[str, Any]:
        """What the reference wants to know, of blocks by query."""
        named = reference.named_by_table(a.blocks, a.slots, choice.num_selected)
        return self._scores(problem, choice, a) | {"block_indices": named}

    def _scores(self, problem: Any, choice: Any, a: Any) -> dict[str, Any]:
        options = {"block_scale": a.block_scale, "softmax_scale": problem.softmax_scale}
        return self._options(problem, choice) | options

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
        self, problem: Any, choice: Any, a: Any, starts: np.ndarray, lengths: np.ndarray
    ) -> dict[str, Any]:
        """What the reference wants to know, of queries by block."""
        cu_q, cu_k, queries = a.cu_seqlens_q, a.cu_seqlens_k, a.queries
        ratio = choice.num_heads_sel // problem.num_heads_kv
        shape = (problem.total_q, choice.num_heads_sel, choice.num_selected)
        named, owned = np.full(shape, -1), 0
        for chunk, head_kv, unit in zip(*np.nonzero(lengths), strict=True):
            start, length = starts[chunk, head_kv, unit], lengths[chunk, head_kv, unit]
            items = queries[start : start + length]
            assert (np.diff(items) > 0).all()
            for item, slot in zip(items, a.query_slots[start : start + length], strict=True):
                token, head = item // ratio, head_kv * ratio + item % ratio
                assert token // choice.chunk == chunk
                b = np.searchsorted(cu_q[1:], token, side="right")
                if slot >= 0:
                    named[token, head, slot] = unit - cu_k[b] // choice.block_size - b
                owned += slot < 0
        assert owned == 0 or choice.own
        return self._scores(problem, choice, a) | {"block_indices": named}

    @staticmethod
    def _gradients_of(a: Any, options: Any) -> Any:
        # with an out of zeros, D is -dlse: that makes it the delta that was handed over
        inputs = (a.dout, a.q, a.k, a.v, np.zeros(a.dout.shape), a.lse)
        return sparse.backward(*inputs, a.cu_seqlens_q, a.cu_seqlens_k, dlse=-a.delta, **options)

    @staticmethod
    def _second_of(a: Any, options: Any) -> Any:
        alive = a.lse != -np.inf
        inputs = (a.ddq, a.ddk, a.ddv, a.dout, a.q, a.k, a.v, np.zeros(a.dout.shape), a.lse)
        options = options | {"ddblock_scale": a.ddblock_scale, "dlse": np.where(alive, -a.delta, 0)}
        results = sparse.double_backward(*inputs, a.cu_seqlens_q, a.cu_seqlens_k, **options)
        tout, tlse = results[:2]
        np.testing.assert_allclose(a.ddlse, tlse, rtol=1e-3, atol=1e-3)
        of_rows = (tout * a.dout.astype(float)).sum(-1).T
        np.testing.assert_allclose(a.ddelta[alive], of_rows[alive], rtol=1e-3, atol=1e-3)
        return results


def install(monkeypatch: Any) -> Kernels:
    """``fake_gpu.install``, and the sparse kernels."""
    kernels: Kernels = fake_gpu.install(monkeypatch, Kernels)
    call.pose_selection.cache_clear()
    for module in (reference, selection, sparse):
        monkeypatch.setattr(module, "namespace", lambda array: np)
    return kernels


def remove() -> None:
    """Forget what was cached of the fakes."""
    fake_gpu.remove()
    call.pose_selection.cache_clear()
