"""Which blocks of keys every query sees, and back: the table that block-sparse kernels read.

An item is a query token with one of num_heads_sel selection heads. The table lists the blocks of
every item in ascending order, each once; and for gradients with respect to keys, the items of every
block. Built on the device by the four kernels block_lists, block_offsets, block_queries and
block_order, or by ``reference.blocks``. Nothing is read back.

Long for a module, since the contract of the table stands in the docstrings.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rawattn import arrays, call, checks
from rawattn.arrays import Array, Framework, Shape, View, framework_of
from rawattn.call import Call
from rawattn.ops import block_lists as lists_op
from rawattn.ops import block_offsets as offsets_op
from rawattn.ops import block_order as order_op
from rawattn.ops import block_queries as queries_op
from rawattn.problem import Problem, Selection
from rawattn.reference import blocks as reference

INDICES, MASK, PATTERN, TABLE = range(4)  # what a selection is given as
UNUSED = 2**31 - 1  # in ``blocks``, behind the last block of an item


@dataclass(frozen=True, eq=False, slots=True)
class BlockTable:
    """What ``block_table`` makes of a selection, in the caller's kind of array, all int32.

    blocks: (num_heads_sel, total_q, width) blocks of keys that each query sees, ascending; behind
        them 2**31 - 1. width is num_selected, and one more with include_own_block.
    slots: (num_heads_sel, total_q, width) where along num_selected each block was named; -1 for an
        own block that was not, and behind the last block.
    counts: (num_heads_sel, total_q) blocks of each query.
    starts, lengths: (num_chunks, num_heads_kv, key_units) where the list of (chunk of query tokens,
        key/value head, block of keys) begins in ``queries``, and how long it is. Block n of
        sequence b, whose keys start at c, is unit c // block_size + b + n.
    queries, query_slots: (num_heads_sel * total_q * width,) the items that see a block, ascending
        within a list, as token * ratio + head % ratio with ratio = num_heads_sel // num_heads_kv;
        and what ``slots`` says of them.
    work: (segments, 4) the lists cut into segments of about the same work: number of the list in
        ``lengths``, first place in ``queries``, how many items, 0. Neither the rows nor the lists
        lie in any order; rows behind the last segment are -1.
    block_size, causal, include_own_block, num_selected, num_heads_sel, num_heads_kv: of the
        selection; a call that gets the table has to say the same.
    chunk: query tokens of a chunk.
    block_indices: the array that the table was built from; None for a mask or a pattern.

    starts, lengths, queries, query_slots and work are None where the table was built with
    lists=False.
    """

    blocks: Array = field(repr=False)  # to print a device's array would wait for it
    slots: Array = field(repr=False)
    counts: Array = field(repr=False)
    starts: Array | None = field(repr=False)
    lengths: Array | None = field(repr=False)
    queries: Array | None = field(repr=False)
    query_slots: Array | None = field(repr=False)
    work: Array | None = field(repr=False)
    block_size: int
    causal: bool
    include_own_block: bool
    num_selected: int
    chunk: int
    num_heads_sel: int
    num_heads_kv: int
    block_indices: Array | None = field(default=None, repr=False)

    @property
    def width(self) -> int:
        """Blocks that a query can see."""
        return self.num_selected + self.include_own_block


class Lists(NamedTuple):
    """Views of a table's arrays, as kernels take them."""

    blocks: View
    slots: View
    starts: View | None = None
    lengths: View | None = None
    queries: View | None = None
    query_slots: View | None = None
    work: View | None = None

    def of_queries(self) -> tuple[View, View]:
        """What kernels that go along the queries read."""
        return self[:2]

    def of_keys(self) -> tuple[View, View, View, View]:
        """What kernels that go along the keys read; they have asked for it."""
        return self[2:6]  # type: ignore[return-value]


class Source(NamedTuple):
    """What a selection is given as: indices with counts or without, a mask, a pattern, a table."""

    kind: int
    named: View | None = None
    counts: View | None = None
    sliding_blocks: int = 0
    global_blocks: int = 0
    lists: Lists | None = None

    def views(self) -> list[View]:
        """The arrays that a call has to wait for."""
        return [view for view in (self.named, self.counts, *(self.lists or ())) if view is not None]


def block_table(
    block_indices: Array | None,
    cu_seqlens: Array,
    *,
    num_heads_kv: int,
    total_q: int | None = None,
    cu_seqlens_k: Array | None = None,
    total_k: int | None = None,
    block_size: int = 64,
    block_counts: Array | None = None,
    include_own_block: bool = True,
    causal: bool = True,
    block_mask: Array | None = None,
    sliding_blocks: int | None = None,
    global_blocks: int = 0,
    num_heads_sel: int | None = None,
    num_heads_q: int | None = None,
    head_dim: int = 128,
    lists: bool = True,
    backend: str | None = None,
) -> BlockTable:
    """The table of a selection of key blocks, to be built once and passed to the sparse functions.

    ``sparse_forward`` and its derivatives build it from block indices at every call; given the
    table in their place, they build nothing.

    block_indices: (total_q, num_heads_kv or num_heads_q, num_selected), or None beside one of
        block_mask and sliding_blocks; block_counts, block_size, include_own_block, causal: as in
        ``sparse_forward``.
    cu_seqlens, cu_seqlens_k: as in ``sparse_forward``.
    num_heads_kv: heads of k and v.
    total_q, total_k: tokens of q and of k. total_q is needed beside sliding_blocks alone, total_k
        beside cu_seqlens_k alone.
    block_mask: (total_q, num_heads_kv or num_heads_q, num_blocks) bool, whether a query sees a
        block of its sequence. num_selected is num_blocks, and slot n is block n.
    sliding_blocks, global_blocks: every query selects the first global_blocks blocks of its
        sequence, its own one and the sliding_blocks - 1 before it. num_selected is their sum; slot
        global_blocks + i is the i-th block back.
    num_heads_sel: selections of a pattern, num_heads_kv or num_heads_q; by default num_heads_kv.
    num_heads_q, head_dim: of the attention to come, for the best length of a chunk; nothing but
        speed depends on them.
    lists: also list the queries of every block of keys, which all derivatives but ``sparse_jvp``
        ask for.
    backend: None (the best there is), "cuda", "numba" or "reference".

    Returns a BlockTable. Raises as ``sparse_forward`` does.
    """
    indexed, masked = block_indices is not None, block_mask is not None
    sliding = sliding_blocks is not None
    checks.one_selection(indexed, masked, sliding)
    checks.only_beside("block_counts", block_counts is not None, "block_indices", indexed)
    checks.only_beside("global_blocks", bool(global_blocks), "sliding_blocks", sliding)
    checks.only_beside("num_heads_sel", num_heads_sel is not None, "sliding_blocks", sliding)
    framework = framework_of(cu_seqlens, "cu_seqlens")
    offsets_q = offsets_k = framework.view(cu_seqlens, "cu_seqlens")
    device = offsets_q.device
    if cu_seqlens_k is not None:
        offsets_k = call.view_beside(framework, cu_seqlens_k, "cu_seqlens_k", device)
    if sliding:
        near, first = checks.pattern(sliding_blocks, global_blocks)
        source = Source(PATTERN, sliding_blocks=near, global_blocks=first)
    elif masked:
        source = Source(MASK, call.view_beside(framework, block_mask, "block_mask", device))
    else:
        source = _indices(framework, block_indices, block_counts, device)
    problem, shape = _pose(
        *(source, offsets_q, offsets_k, cu_seqlens_k is None, num_heads_kv, total_q, total_k),
        *(num_heads_sel, num_heads_q, head_dim, causal, backend),
    )
    selection = _selection(problem, source, shape, block_size, include_own_block)
    previous = arrays.enter_device(device)
    try:
        stream = framework.stream(offsets_q, offsets_k, *source.views())
        room, counts, zeroed = _allocate(framework, problem, selection, lists, offsets_q)
        if call.is_empty(problem, selection):
            _fill_empty(framework, room, counts, stream)
        elif call.by_reference(problem, backend):
            with arrays.on_stream(stream, device):
                _fill_by_reference(problem, selection, source, offsets_q, offsets_k, room, counts)
        else:
            ready_q = framework.offsets(offsets_q, stream)
            shared = offsets_k is offsets_q
            offsets = ready_q, ready_q if shared else framework.offsets(offsets_k, stream)
            given = Call(framework, problem, backend, offsets_q, stream)
            _fill(given, selection, source, offsets, room, counts, zeroed)
        blocks, slots, *of_keys = (view and framework.finish(view) for view in room)
        counts_of_items = framework.finish(counts)
    finally:
        arrays.leave_device(previous)
    starts, lengths, queries, query_slots, work = of_keys
    return BlockTable(
        blocks=blocks,
        slots=slots,
        counts=counts_of_items,
        starts=starts,
        lengths=lengths,
        queries=queries,
        query_slots=query_slots,
        work=work,
        block_size=selection.block_size,
        causal=bool(causal),
        include_own_block=selection.own,
        num_selected=selection.num_selected,
        chunk=selection.chunk,
        num_heads_sel=selection.num_heads_sel,
        num_heads_kv=problem.num_heads_kv,
        block_indices=block_indices,
    )


# ---- look and check ---------------------------------------------------------------------------


def selection_given(
    framework: Framework,
    problem: Problem,
    block_indices: Array,
    block_counts: Array | None,
    block_size: int,
    include_own_block: bool,
    causal: bool,
    lists: bool,
    like: View,
) -> tuple[Selection, Source]:
    """What a sparse function got for its selection; of a table the ``lists`` too, if needed."""
    if not isinstance(block_indices, BlockTable):
        source = _indices(framework, block_indices, block_counts, like.device)
        shape = source.named.shape  # type: ignore[union-attr]
        return _selection(problem, source, shape, block_size, include_own_block), source
    table, own = block_indices, bool(include_own_block)
    checks.counted_by_table(block_counts is not None)
    checks.same_as_table("block_size", block_size, table.block_size)
    checks.same_as_table("include_own_block", own, table.include_own_block)
    checks.same_as_table("causal", bool(causal), table.causal)
    checks.same_as_table("num_heads_kv", problem.num_heads_kv, table.num_heads_kv)
    checks.selection_heads(table.num_heads_sel, problem.num_heads_q, problem.num_heads_kv)
    checks.table_lists(not lists or table.starts is not None)
    sizes = (table.num_selected, table.block_size, own, table.chunk)
    selection = Selection(table.num_heads_sel, *sizes)
    framework = arrays.of_results(framework)
    shapes = list(_shapes(problem, selection, lists))
    if lists:  # how many segments there are hangs on the num_heads_q that the table was told
        shapes[-1] = (framework.view(table.work, "work").shape[0], 4)
    views = [
        call.view_like(framework, getattr(table, name), name, shape, "int32", like)
        for name, shape in zip(Lists._fields, shapes, strict=False)
    ]
    return selection, Source(TABLE, lists=Lists(*views))


def _indices(
    framework: Framework, block_indices: Array, block_counts: Array | None, device: int
) -> Source:
    named = call.view_beside(framework, block_indices, "block_indices", device)
    if block_counts is None:
        return Source(INDICES, named)
    counts = call.view_beside(framework, block_counts, "block_counts", device)
    return Source(INDICES, named, counts)


def _selection(
    problem: Problem, source: Source, shape: Shape, block_size: int, include_own_block: bool
) -> Selection:
    named, counts = source.named, source.counts
    name = "block_mask" if source.kind == MASK else "block_indices"
    return call.pose_selection(
        problem,
        name,
        shape,
        "int32" if named is None else named.dtype,
        None if counts is None else counts.shape,
        "" if counts is None else counts.dtype,
        checks.block_size(block_size),
        bool(include_own_block),
    )


def _pose(
    source: Source,
    offsets_q: View,
    offsets_k: View,
    shared: bool,
    num_heads_kv: int,
    total_q: int | None,
    total_k: int | None,
    num_heads_sel: int | None,
    num_heads_q: int | None,
    head_dim: int,
    causal: bool,
    backend: str | None,
) -> tuple[Problem, Shape]:
    """The Problem of block_table, which knows of no q, k and v; and the shape of the selection."""
    heads_kv = checks.size_needed("num_heads_kv", num_heads_kv, "beside no k")
    if source.named is None:
        total_q = checks.size_needed("total_q", total_q, "beside sliding_blocks")
        heads_sel = heads_kv if num_heads_sel is None else num_heads_sel
        shape: Shape = (total_q, heads_sel, source.sliding_blocks + source.global_blocks)
    else:
        shape = source.named.shape
        checks.block_axes("block_mask" if source.kind == MASK else "block_indices", shape)
        total_q, heads_sel = shape[0] if total_q is None else total_q, shape[1]
    if total_k is None and shared:
        total_k = total_q
    total_k = checks.size_needed("total_k", total_k, "beside cu_seqlens_k")
    if num_heads_q is None:  # a usual group, if the selection does not tell
        num_heads_q = 8 * heads_kv if heads_sel == heads_kv else heads_sel
    checks.heads(num_heads_q, heads_kv)
    checks.head_dim("q", head_dim)
    checks.tokens("q", total_q)
    checks.tokens("k", total_k)
    checks.cu_seqlens("cu_seqlens", offsets_q.shape, offsets_q.dtype)
    checks.cu_seqlens("cu_seqlens_k", offsets_k.shape, offsets_k.dtype)
    checks.same_batch(offsets_q.shape[0], offsets_k.shape[0])
    if shared:
        checks.shared_cu_seqlens(total_q, total_k)
    call.check_backend(backend, offsets_q.device)
    problem = Problem(
        dtype="float16",  # the kernels of a table read nothing of a dtype
        batch=offsets_q.shape[0] - 1,
        total_q=total_q,
        total_k=total_k,
        num_heads_q=num_heads_q,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim,
        window_left=-1,
        window_right=0 if causal else -1,
        softmax_scale=1.0,
        arch=arrays.arch_of(offsets_q.device),
        device=offsets_q.device,
    )
    return problem, shape


# ---- the arrays -------------------------------------------------------------------------------


def _shapes(problem: Problem, selection: Selection, lists: bool) -> tuple[Shape, ...]:
    """Shapes of the arrays of Lists."""
    items = (selection.num_heads_sel, problem.total_q, selection.width)
    if not lists:
        return (items, items)
    keys = (selection.num_chunks(problem), problem.num_heads_kv, selection.key_units(problem))
    entries = (items[0] * items[1] * items[2],)
    return (items, items, keys, keys, entries, entries, (selection.segments(problem), 4))


def _allocate(
    framework: Framework, problem: Problem, selection: Selection, lists: bool, like: View
) -> tuple[Lists, View, View | None]:
    """Room for a table, and for its counts; and what holds its lengths and the cursor behind them,
    which both start from zeros."""
    items, _, *of_keys = _shapes(problem, selection, lists)
    blocks, slots = (framework.empty(items, "int32", like) for _ in range(2))
    counts = framework.empty(items[:2], "int32", like)
    if not lists:
        return Lists(blocks, slots), counts, None
    zeroed = framework.empty((2 * selection.lists(problem) + 2,), "int32", like)
    lengths = _part(zeroed, 0, of_keys.pop(1))
    starts, *rest = (framework.empty(shape, "int32", like) for shape in of_keys)
    return Lists(blocks, slots, starts, lengths, *rest), counts, zeroed


def _part(view: View, first: int, shape: Shape) -> View:
    """The elements of an int32 view from ``first`` on, as an array of ``shape``."""
    owner = view.owner[first : first + math.prod(shape)].reshape(shape)
    strides = arrays.row_major(shape)
    return View(view.ptr + 4 * first, shape, strides, view.dtype, view.device, owner)


def _fill_empty(framework: Framework, table: Lists, counts: View, stream: int) -> None:
    """The table of tokens that see nothing."""
    framework.fill(counts, 0, stream)
    for view, value in zip(table, (UNUSED, -1, 0, 0, -1, -1, -1), strict=True):
        if view is not None:
            framework.fill(view, value, stream)


# ---- the reference ----------------------------------------------------------------------------


def named_blocks(
    problem: Problem, selection: Selection, source: Source, offsets_q: View, offsets_k: View
) -> dict[str, Any]:
    """A selection as the reference takes it."""
    counts = None if source.counts is None else arrays.neutral(source.counts)
    if source.lists is not None:
        blocks, slots = arrays.neutral(source.lists.blocks), arrays.neutral(source.lists.slots)
        indices = reference.named_by_table(blocks, slots, selection.num_selected)
    elif source.named is None:
        indices = reference.named_by_pattern(
            arrays.neutral(offsets_q),
            arrays.neutral(offsets_k),
            problem.total_q,
            num_heads_sel=selection.num_heads_sel,
            sliding_blocks=source.sliding_blocks,
            global_blocks=source.global_blocks,
            block_size=selection.block_size,
        )
    else:
        indices = arrays.neutral(source.named)
        if source.kind == MASK:
            indices = reference.named_by_mask(indices)
    return {
        "block_indices": indices,
        "block_counts": counts,
        "block_size": selection.block_size,
        "include_own_block": selection.own,
        "causal": problem.window_right == 0,
    }


def _fill_by_reference(
    problem: Problem,
    selection: Selection,
    source: Source,
    offsets_q: View,
    offsets_k: View,
    table: Lists,
    counts: View,
) -> None:
    offsets = (arrays.neutral(offsets_q), arrays.neutral(offsets_k))
    options = named_blocks(problem, selection, source, offsets_q, offsets_k)
    by_query = reference.by_query(options.pop("block_indices"), *offsets, **options)
    call.store(by_query, (table.blocks, table.slots, counts))
    of_keys = [view for view in table[2:] if view is not None]
    if of_keys:
        by_key = reference.by_key(
            *(*by_query[:2], *offsets),
            num_heads_kv=problem.num_heads_kv,
            units=selection.key_units(problem),
            chunk=selection.chunk,
            num_chunks=selection.num_chunks(problem),
            block_size=selection.block_size,
            segment=selection.segment(problem),
            segments=selection.segments(problem),
        )
        call.store(by_key, tuple(of_keys))


# ---- the kernels ------------------------------------------------------------------------------


def lists_of(
    call: Call, selection: Selection, source: Source, offsets: tuple[View, View], lists: bool
) -> Lists:
    """The table of a call as kernels take it, built unless it was given."""
    if source.lists is not None:
        return Lists(*map(call.dense, source.lists))  # type: ignore[arg-type]
    problem, like = call.problem, call.like
    room, counts, zeroed = _allocate(call.framework, problem, selection, lists, like)
    _fill(call, selection, source, offsets, room, counts, zeroed)
    return room


def _fill(
    call: Call,
    selection: Selection,
    source: Source,
    offsets: tuple[View, View],
    table: Lists,
    counts: View,
    zeroed: View | None,
) -> None:
    """Blocks by query; and where ``table`` has room for them, queries by block.

    A first kernel counts the queries of each block, a second gives each list its place and cuts it
    into segments of work, a third puts the queries into the lists by atomic adds, in any order, and
    the last sorts each list: the lists are the same on every run.
    """
    problem, stream = call.problem, call.stream
    cu_seqlens_q, cu_seqlens_k = offsets
    blocks_named, counts_named = source.named, source.counts
    if blocks_named is not None and source.kind == MASK:
        blocks_named = call.dense(blocks_named)._replace(dtype="uint8")
    elif blocks_named is not None:
        blocks_named = call.framework.indices(blocks_named, stream)
    if counts_named is not None:
        counts_named = call.offsets(counts_named)
    if zeroed is not None:
        call.fill(zeroed, 0)
    of_lists = lists_op.Args(
        block_indices=blocks_named,
        block_counts=counts_named,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        blocks=table.blocks,
        slots=table.slots,
        counts=counts,
        lengths=table.lengths,
        source=source.kind,
        global_blocks=source.global_blocks,
    )
    row = call.row("block_lists", selection=selection)
    lists_op.launch(row, problem, selection, of_lists, stream=stream)
    if zeroed is None or table.work is None:
        return
    starts, lengths, queries, query_slots = table.of_keys()
    cursor = _part(zeroed, selection.lists(problem), (2 + selection.lists(problem),))
    call.fill(table.work, -1)
    unsorted = call.empty(queries.shape, "int32")
    unsorted_slots = call.empty(queries.shape, "int32")
    of_offsets = offsets_op.Args(
        lengths=lengths,
        starts=starts,
        cursor=cursor,
        work=table.work,
        segment=selection.segment(problem),
    )
    row = call.row("block_offsets", selection=selection)
    offsets_op.launch(row, problem, selection, of_offsets, stream=stream)
    of_queries = queries_op.Args(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        blocks=table.blocks,
        slots=table.slots,
        starts=starts,
        cursor=cursor,
        unsorted=unsorted,
        unsorted_slots=unsorted_slots,
    )
    row = call.row("block_queries", selection=selection)
    queries_op.launch(row, problem, selection, of_queries, stream=stream)
    of_order = order_op.Args(
        starts=starts,
        lengths=lengths,
        unsorted=unsorted,
        unsorted_slots=unsorted_slots,
        queries=queries,
        query_slots=query_slots,
    )
    row = call.row("block_order", selection=selection)
    order_op.launch(row, problem, selection, of_order, stream=stream)
