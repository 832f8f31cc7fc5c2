"""The kernels that build a block table, on a GPU: every number as a model in NumPy has it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import problem
from rawattn.check.cases import Case
from tests.shared.gpu_arrays import moved, numpy_of
from tests.shared.gpu_sparse import (
    FORBIDDEN,
    OWN,
    Chosen,
    Sparse,
    every_sequence,
    host_of,
    in_chunks,
    pairs,
    widened,
)
from tests.shared.gpu_sparse_random import BOTH_WAYS, CAUSAL, FIRST, Chunk

pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

UNUSED = 2**31 - 1


# ---- the model --------------------------------------------------------------------------------


def by_item(sparse: Sparse, chosen: Chosen) -> Iterator[tuple[int, int, int, list[Any]]]:
    """Token, selection head, first unit of its sequence, and (block, slot) of every item."""
    for b, rows, keys, slots in every_sequence(sparse, chosen):
        first = keys.start // sparse.block_size + b
        for row, head in np.ndindex(slots.shape[:2]):
            seen = np.flatnonzero(slots[row, head] != FORBIDDEN)
            yield rows.start + row, head, first, [(int(n), int(slots[row, head, n])) for n in seen]


def check(sparse: Sparse, chosen: Chosen, table: Any) -> None:
    """A table with its lists."""
    segment = max(1, problem._SEGMENT_ROWS // (sparse.case.num_heads_q // sparse.num_heads_sel))
    case, tokens = sparse.case, len(chosen.block_indices)
    heads, width = sparse.num_heads_sel, sparse.num_selected + sparse.own
    assert (table.num_heads_sel, table.width, table.num_selected) == (
        heads,
        width,
        sparse.num_selected,
    )
    blocks = np.full((heads, tokens, width), UNUSED)
    slots, ratio = np.full(blocks.shape, OWN), heads // case.num_heads_kv
    lists: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for token, head, first, seen in by_item(sparse, chosen):
        for at, (block, slot) in enumerate(seen):
            blocks[head, token, at], slots[head, token, at] = block, slot
            which = token // table.chunk, head // ratio, first + block
            lists.setdefault(which, []).append((token * ratio + head % ratio, slot))
    assert (numpy_of(table.blocks) == blocks).all()
    assert (numpy_of(table.slots) == slots).all()
    if table.counts is not None:
        assert (numpy_of(table.counts) == (blocks != UNUSED).sum(axis=2)).all()
    keys = sum(case.lengths_k) + case.past_k
    units = keys // sparse.block_size + len(case.lengths_k)
    chunks = max(1, -(-tokens // table.chunk))
    starts, lengths = numpy_of(table.starts), numpy_of(table.lengths)
    queries, query_slots = numpy_of(table.queries), numpy_of(table.query_slots)
    assert starts.shape == lengths.shape == (chunks, case.num_heads_kv, units)
    assert {array.dtype for array in (starts, lengths, queries, query_slots)} == {
        np.dtype(np.int32)
    }
    taken = np.zeros(len(queries), dtype=int)
    for which in np.ndindex(lengths.shape):
        wanted = sorted(lists.get(which, []))
        assert lengths[which] == len(wanted), which
        at = slice(starts[which], starts[which] + len(wanted))
        taken[at] += 1
        found = zip(queries[at].tolist(), query_slots[at].tolist(), strict=True)
        assert list(found) == wanted, which
    assert taken.max(initial=0) <= 1, "lists overlap"
    assert taken.sum() == (blocks != UNUSED).sum()
    check_work(numpy_of(table.work), starts.ravel(), lengths.ravel(), segment)


def check_work(work: Any, starts: Any, lengths: Any, segment: int) -> None:
    """A row for every ``segment`` items of a list, in any order; nothing behind the last."""
    wanted = set()
    for which, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for first in range(0, length, segment):
            wanted.add((which, start + first, min(segment, length - first), 0))
    assert set(map(tuple, work[: len(wanted)].tolist())) == wanted
    assert (work[len(wanted) :] == -1).all()


def moved_source(source: dict[str, Any]) -> dict[str, Any]:
    """What a table is made from beside block_indices, arrays on the GPU."""
    return {
        name: moved(x) if isinstance(x, np.ndarray) else x
        for name, x in source.items()
        if name != "block_indices"
    }


def build(sparse: Sparse, chosen: Chosen, source: dict[str, Any], **options: Any) -> Any:
    case, (t, _) = sparse.case, host_of(sparse)
    indices, source = source.get("block_indices"), moved_source(source)
    if indices is not None:
        table = rawattn.BlockTable.of_indices
        counts = None if chosen.block_counts is None else moved(chosen.block_counts)
        source |= {"block_indices": moved(indices), "block_counts": counts}
    elif "block_mask" in source:
        table = rawattn.BlockTable.of_mask
    else:
        table = rawattn.BlockTable.of_pattern
        source |= {"total_q": len(t.q)}
    return table(
        cu_seqlens=moved(t.cu_seqlens_q),
        num_heads_kv=case.num_heads_kv,
        num_heads_q=case.num_heads_q,
        cu_seqlens_k=moved(t.cu_seqlens_k),
        total_k=len(t.k),
        block_size=sparse.block_size,
        include_own_block=sparse.own,
        causal=case.causal,
        **source,
        **options,
    )


# ---- sources ----------------------------------------------------------------------------------

FAMILIES = pytest.mark.parametrize("backend", ["cuda", "numba"])
TABLES = [
    *FIRST[::3],
    Chunk(300, "float16", (64, 64), 8, 16, (CAUSAL, BOTH_WAYS)),
    Chunk(301, "float16", (64, 64), 4, 128, (CAUSAL, BOTH_WAYS), True),
]


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lists of all queries, and of 32 query tokens each."""
    yield from in_chunks(32 if request.param == "chunks" else 2**16, monkeypatch)


@FAMILIES
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("chunk", TABLES, ids=str)
def test_indices(chunk: Chunk, backend: str) -> None:
    for i, sparse in enumerate(chunk.problems()):
        _, chosen = host_of(sparse)
        source = {"block_indices": (chosen.block_indices, widened(chosen.block_indices))[i % 2]}
        check(sparse, chosen, build(sparse, chosen, source, backend=backend))


@FAMILIES
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("chunk", TABLES[-2:], ids=str)
def test_mask(chunk: Chunk, backend: str) -> None:
    for sparse in chunk.problems():
        t, _ = host_of(sparse)
        blocks = -(-max(sparse.case.lengths_k) // sparse.block_size) + 1
        shape = (len(t.q), sparse.num_heads_sel, blocks)
        mask = np.random.default_rng(len(t.q)).random(shape) < 0.4
        indices = np.where(mask, np.arange(blocks), -1).astype(np.int32)
        masked = replace(sparse, num_selected=blocks, counts=False)
        chosen = Chosen(indices, None, None, None)
        check(masked, chosen, build(sparse, chosen, {"block_mask": mask}, backend=backend))


@FAMILIES
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("near", "first"), [(1, 0), (2, 1), (3, 0), (5, 2)])
@pytest.mark.parametrize("chunk", TABLES[-2:], ids=str)
def test_pattern(chunk: Chunk, near: int, first: int, backend: str) -> None:
    for sparse in chunk.problems():
        t, _ = host_of(sparse)
        pos = np.full(len(t.q), -sparse.block_size * 9)
        for _, rows, keys in pairs(sparse.case):
            seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
            pos[rows] = np.arange(seqlen_q) + seqlen_k - seqlen_q
        own = pos // sparse.block_size
        columns = [np.full(len(own), n) for n in range(first)] + [own - n for n in range(near)]
        indices = np.stack(columns, axis=1)[:, None].repeat(sparse.num_heads_sel, 1)
        chosen = Chosen(indices.astype(np.int32), None, None, None)
        patterned = replace(sparse, num_selected=first + near, counts=False)
        source = {"sliding_blocks": near, "global_blocks": first}
        source |= {"num_heads_sel": sparse.num_heads_sel}
        check(patterned, chosen, build(sparse, chosen, source, backend=backend))


@FAMILIES
def test_many_short_sequences_and_long_lists(backend: str) -> None:
    """Units of sequences shorter than a block; 4000 queries of one block."""
    lengths = (*(n % 7 for n in range(400)), 4000)
    case = Case("many", lengths, lengths, num_heads_kv=2, group=2, causal=True)
    for all_first, own in ((True, False), (True, True), (False, True)):
        sparse = Sparse(case, 16, num_selected=2, own=own, all_first=all_first)
        _, chosen = host_of(sparse)
        source = {"block_indices": chosen.block_indices}
        check(sparse, chosen, build(sparse, chosen, source, backend=backend))


@FAMILIES
@pytest.mark.parametrize("own", [True, False])
def test_more_named_than_are_ranked_in_shared_memory(own: bool, backend: str) -> None:
    case = Case("crowd", (70, 3), (70, 3), num_heads_kv=2, group=2, causal=True)
    sparse = Sparse(case, 16, num_selected=1100, own=own)
    _, chosen = host_of(sparse)
    source = {"block_indices": chosen.block_indices}
    check(sparse, chosen, build(sparse, chosen, source, backend=backend))


def test_without_lists() -> None:
    sparse = next(TABLES[0].problems())
    _, chosen = host_of(sparse)
    given = {"block_indices": chosen.block_indices}
    table, whole = (build(sparse, chosen, dict(given), lists=n) for n in (False, True))
    assert table.starts is table.lengths is table.queries is table.query_slots is None
    assert table.work is None
    for name in ("blocks", "slots"):
        assert (numpy_of(getattr(table, name)) == numpy_of(getattr(whole, name))).all()
