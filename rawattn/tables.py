"""Which blocks of keys every query sees, and back: the table that block-sparse kernels read.

An item is a query token with one of num_heads_sel selection heads. The table lists the blocks of
every item in ascending order, each once; and for gradients with respect to keys, the items of every
block. Built on the device by the four kernels block_lists, block_offsets, block_queries and
block_order, or by ``reference.blocks``. Nothing is read back.

Long for a module, since the contract of the table stands in the docstrings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from rawattn import arrays, call, checks, device
from rawattn.arrays import Array, Framework, Shape, View, framework_of
from rawattn.call import Call, Given, Result
from rawattn.ops import block_lists as lists_op
from rawattn.ops import block_offsets as offsets_op
from rawattn.ops import block_order as order_op
from rawattn.ops import block_queries as queries_op
from rawattn.problem import Problem, Selection
from rawattn.reference import blocks as reference

UNUSED = 2**31 - 1  # in ``blocks``, behind the last block of an item


class Kind(IntEnum):
    """What a selection is given as; the first three are the ``source`` of block_lists.cu."""

    INDICES = 0
    MASK = 1
    PATTERN = 2
    TABLE = 3


@dataclass(frozen=True, eq=False, slots=True)
class BlockTable:
    """A selection of key blocks, prepared once for several calls of the sparse functions.

    Made by ``of_indices``, ``of_mask`` or ``of_pattern``, in the caller's kind of array, all int32.
    A sparse function that gets it in the place of block_indices builds nothing.

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

    @classmethod
    def of_indices(
        cls,
        block_indices: Array,
        cu_seqlens: Array,
        *,
        num_heads_kv: int,
        cu_seqlens_k: Array | None = None,
        total_k: int | None = None,
        block_counts: Array | None = None,
        block_size: int = 64,
        include_own_block: bool = True,
        causal: bool = True,
        num_heads_q: int | None = None,
        head_dim: int = 128,
        lists: bool = True,
        backend: str | None = None,
    ) -> "BlockTable":
        """The table of blocks by number, which ``sparse_forward`` would build at every call.

        block_indices: (total_q, num_heads_kv or num_heads_q, num_selected); it and cu_seqlens,
            cu_seqlens_k, block_counts, block_size, include_own_block, causal: as in
            ``sparse_forward``.
        num_heads_kv: heads of k and v.
        total_k: tokens of k, which cu_seqlens_k does not tell: needed beside it.
        num_heads_q, head_dim: of the attention to come, for the best length of a chunk; nothing but
            speed depends on them.
        lists: also list the queries of every block of keys, which all derivatives but
            ``sparse_jvp`` ask for.
        backend: None (the best there is), "cuda", "numba" or "reference".

        Raises TypeError, ValueError or RuntimeError as ``sparse_forward`` does.
        """
        framework, offsets = _look(cu_seqlens, cu_seqlens_k)
        source = _indices(framework, block_indices, block_counts, offsets[0].device)
        shape = source.shape("block_indices")
        options = (block_size, include_own_block, causal, num_heads_q, head_dim, lists, backend)
        asked = _Asked(num_heads_kv, total_k, *options)
        return _build(framework, offsets, source, shape, asked, block_indices)

    @classmethod
    def of_mask(
        cls,
        block_mask: Array,
        cu_seqlens: Array,
        *,
        num_heads_kv: int,
        cu_seqlens_k: Array | None = None,
        total_k: int | None = None,
        block_size: int = 64,
        include_own_block: bool = True,
        causal: bool = True,
        num_heads_q: int | None = None,
        head_dim: int = 128,
        lists: bool = True,
        backend: str | None = None,
    ) -> "BlockTable":
        """The table of a mask over blocks; num_selected is num_blocks, and slot n is block n.

        block_mask: (total_q, num_heads_kv or num_heads_q, num_blocks) bool, whether a query sees a
            block of its sequence.
        cu_seqlens, num_heads_kv, cu_seqlens_k, total_k, block_size, include_own_block, causal,
            num_heads_q, head_dim, lists, backend: as in ``of_indices``, which see for errors.
        """
        framework, offsets = _look(cu_seqlens, cu_seqlens_k)
        mask = call.view_beside(framework, block_mask, "block_mask", offsets[0].device)
        source = Source(Kind.MASK, mask)
        shape = source.shape("block_mask")
        options = (block_size, include_own_block, causal, num_heads_q, head_dim, lists, backend)
        return _build(framework, offsets, source, shape, _Asked(num_heads_kv, total_k, *options))

    @classmethod
    def of_pattern(
        cls,
        cu_seqlens: Array,
        *,
        sliding_blocks: int,
        global_blocks: int = 0,
        total_q: int,
        num_heads_kv: int,
        num_heads_sel: int | None = None,
        cu_seqlens_k: Array | None = None,
        total_k: int | None = None,
        block_size: int = 64,
        include_own_block: bool = True,
        causal: bool = True,
        num_heads_q: int | None = None,
        head_dim: int = 128,
        lists: bool = True,
        backend: str | None = None,
    ) -> "BlockTable":
        """The table of the nearest blocks and the first ones, by position alone.

        sliding_blocks, global_blocks: every query selects the first global_blocks blocks of its
            sequence, its own one and the sliding_blocks - 1 before it. num_selected is their sum;
            slot global_blocks + i is the i-th block back.
        total_q: tokens of q.
        num_heads_sel: selections, num_heads_kv or num_heads_q of them; by default num_heads_kv.
        cu_seqlens, num_heads_kv, cu_seqlens_k, total_k, block_size, include_own_block, causal,
            num_heads_q, head_dim, lists, backend: as in ``of_indices``, which see for errors.
        """
        framework, offsets = _look(cu_seqlens, cu_seqlens_k)
        near, first = checks.pattern(sliding_blocks, global_blocks)
        source = Source(Kind.PATTERN, sliding_blocks=near, global_blocks=first)
        heads_sel = checks.size("num_heads_kv", num_heads_kv)
        if num_heads_sel is not None:
            heads_sel = checks.size("num_heads_sel", num_heads_sel)
        shape = (checks.size("total_q", total_q), heads_sel, near + first)
        options = (block_size, include_own_block, causal, num_heads_q, head_dim, lists, backend)
        return _build(framework, offsets, source, shape, _Asked(num_heads_kv, total_k, *options))

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

    kind: Kind
    named: View | None = None
    counts: View | None = None
    sliding_blocks: int = 0
    global_blocks: int = 0
    lists: Lists | None = None

    def shape(self, name: str) -> Shape:
        """Shape of the array that names blocks; ``name`` is for error texts."""
        shape: Shape = self.named.shape  # type: ignore[union-attr]
        checks.block_axes(name, shape)
        return shape

    def views(self) -> list[View]:
        """The arrays that a call has to wait for."""
        return [view for view in (self.named, self.counts, *(self.lists or ())) if view is not None]


# ---- look and check ---------------------------------------------------------------------------


class _Asked(NamedTuple):
    """What a table is asked for, whatever the selection."""

    num_heads_kv: int
    total_k: int | None
    block_size: int
    include_own_block: bool
    causal: bool
    num_heads_q: int | None
    head_dim: int
    lists: bool
    backend: str | None


def _look(cu_seqlens: Array, cu_seqlens_k: Array | None) -> tuple[Framework, tuple[View, View]]:
    framework = framework_of(cu_seqlens, "cu_seqlens")
    offsets_q = framework.view(cu_seqlens, "cu_seqlens")
    if cu_seqlens_k is None:
        return framework, (offsets_q, offsets_q)
    offsets_k = call.view_beside(framework, cu_seqlens_k, "cu_seqlens_k", offsets_q.device)
    return framework, (offsets_q, offsets_k)


def _indices(
    framework: Framework, block_indices: Array, block_counts: Array | None, ordinal: int
) -> Source:
    named = call.view_beside(framework, block_indices, "block_indices", ordinal)
    if block_counts is None:
        return Source(Kind.INDICES, named)
    counts = call.view_beside(framework, block_counts, "block_counts", ordinal)
    checks.block_dtype("block_counts", counts.dtype)
    if ordinal < 0 and 0 not in counts.shape:
        checks.counts("block_counts", int(counts.owner.min()))
    return Source(Kind.INDICES, named, counts)


def choose(
    given: Given,
    block_indices: Array | BlockTable,
    block_counts: Array | None,
    block_size: int,
    include_own_block: bool,
    causal: bool,
    lists: bool,
) -> tuple[Selection, Source]:
    """What a sparse function got for its selection; of a table the ``lists`` too, if needed."""
    problem = given.problem
    own = checks.flag("include_own_block", include_own_block)
    if not isinstance(block_indices, BlockTable):
        source = _indices(given.framework, block_indices, block_counts, problem.device)
        return _selection(problem, source, source.shape("block_indices"), block_size, own), source
    table = block_indices
    checks.counted_by_table(block_counts is not None)
    checks.same_as_table("block_size", block_size, table.block_size)
    checks.same_as_table("include_own_block", own, table.include_own_block)
    checks.same_as_table("causal", bool(causal), table.causal)
    checks.same_as_table("num_heads_kv", problem.num_heads_kv, table.num_heads_kv)
    checks.selection_heads(table.num_heads_sel, problem.num_heads_q, problem.num_heads_kv)
    checks.table_lists(not lists or table.starts is not None)
    sizes = (table.num_selected, table.block_size, own, table.chunk)
    selection = Selection(table.num_heads_sel, *sizes)
    beside = given._replace(framework=arrays.of_results(given.framework))
    shapes = list(_shapes(problem, selection, lists))
    if lists:  # how many segments there are hangs on the num_heads_q that the table was told
        shapes[-1] = (beside.view(table.work, "work").shape[0], 4)
    views = [
        beside.view_like(getattr(table, name), name, (shape, "int32"))
        for name, shape in zip(Lists._fields, shapes, strict=False)
    ]
    return selection, Source(Kind.TABLE, lists=Lists(*views))


def _selection(
    problem: Problem, source: Source, shape: Shape, block_size: int, own: bool
) -> Selection:
    named, counts = source.named, source.counts
    return call.pose_selection(
        problem,
        "block_mask" if source.kind == Kind.MASK else "block_indices",
        shape,
        "int32" if named is None else named.dtype,
        None if counts is None else counts.shape,
        "" if counts is None else counts.dtype,
        checks.block_size(block_size),
        own,
    )


def _pose(offsets: tuple[View, View], total_q: int, heads_sel: int, asked: _Asked) -> Problem:
    """The Problem of a table, which knows of no q, k and v."""
    offsets_q, offsets_k = offsets
    heads_kv = checks.size("num_heads_kv", asked.num_heads_kv)
    shared = offsets_k is offsets_q
    total_k = total_q if asked.total_k is None and shared else asked.total_k
    total_k = checks.size("total_k", total_k)
    num_heads_q = asked.num_heads_q
    if num_heads_q is None:  # a usual group, if the selection does not tell
        num_heads_q = 8 * heads_kv if heads_sel == heads_kv else heads_sel
    checks.heads(num_heads_q, heads_kv)
    checks.head_dim("q", asked.head_dim)
    checks.tokens("q", total_q)
    checks.tokens("k", total_k)
    shapes = (offsets_q.shape, offsets_k.shape, offsets_q.dtype, offsets_k.dtype)
    batch = call.pose_offsets(*shapes)
    if shared:
        checks.shared_cu_seqlens(total_q, total_k)
    ordinal = offsets_q.device
    call.check_backend(asked.backend, ordinal)
    if ordinal < 0:
        call.check_offsets(offsets_q, offsets_k, total_q, total_k)
    return Problem(
        dtype="float16",  # the kernels of a table read nothing of a dtype
        batch=batch,
        total_q=total_q,
        total_k=total_k,
        num_heads_q=num_heads_q,
        num_heads_kv=heads_kv,
        head_dim=asked.head_dim,
        head_dim_v=asked.head_dim,
        window_left=-1,
        window_right=0 if checks.flag("causal", asked.causal) else -1,
        softmax_scale=1.0,
        arch=device.arch_of(ordinal),
        device=ordinal,
        num_sms=device.sms_of(ordinal),
    )


# ---- the arrays -------------------------------------------------------------------------------


def _build(
    framework: Framework,
    offsets: tuple[View, View],
    source: Source,
    shape: Shape,
    asked: _Asked,
    block_indices: Array | None = None,
) -> BlockTable:
    problem = _pose(offsets, shape[0], shape[1], asked)
    own = checks.flag("include_own_block", asked.include_own_block)
    selection = _selection(problem, source, shape, asked.block_size, own)
    shapes = _shapes(problem, selection, asked.lists)
    results = [
        Result(name, (of_name, "int32"))
        for name, of_name in zip(Lists._fields, shapes, strict=False)
    ]
    results.insert(2, Result("counts", (shapes[0][:2], "int32")))

    def kernels(to: Call, blocks: View, slots: View, counts: View, *of_keys: View) -> None:
        table, cursor = Lists(blocks, slots, *of_keys), None
        if table.lengths is not None:
            to.fill(table.lengths, 0)
            cursor = to.empty((2 + selection.lists(problem),), "int32")
            to.fill(cursor, 0)
        ready_q = to.offsets(offsets[0])
        ready_k = ready_q if offsets[1] is offsets[0] else to.offsets(offsets[1])
        _fill(to, selection, source, (ready_q, ready_k), table, counts, cursor)

    # a table has no rows and sums of attention: its arrays are like its items and their counts
    like, like_counts = (shapes[0], "int32"), (shapes[0][:2], "int32")
    given = Given(framework, problem, like, like_counts, asked.backend, offsets[0])
    blocks, slots, counts, *of_keys = call.compute(
        given,
        (*offsets, *source.views()),
        results,
        empty=(UNUSED, -1, 0, 0, 0, -1, -1, -1)[: len(results)],
        nothing=not selection.width,
        reference=lambda: _by_reference(problem, selection, source, offsets, asked.lists),
        kernels=kernels,
    )
    starts, lengths, queries, query_slots, work = of_keys or (None,) * 5
    return BlockTable(
        blocks=blocks,
        slots=slots,
        counts=counts,
        starts=starts,
        lengths=lengths,
        queries=queries,
        query_slots=query_slots,
        work=work,
        block_size=selection.block_size,
        causal=problem.window_right == 0,
        include_own_block=own,
        num_selected=selection.num_selected,
        chunk=selection.chunk,
        num_heads_sel=selection.num_heads_sel,
        num_heads_kv=problem.num_heads_kv,
        block_indices=block_indices,
    )


def _shapes(problem: Problem, selection: Selection, lists: bool) -> tuple[Shape, ...]:
    """Shapes of the arrays of Lists."""
    items = (selection.num_heads_sel, problem.total_q, selection.width)
    if not lists:
        return (items, items)
    keys = (selection.num_chunks(problem), problem.num_heads_kv, selection.key_units(problem))
    entries = (items[0] * items[1] * items[2],)
    return (items, items, keys, keys, entries, entries, (selection.segments(problem), 4))


def _part(view: View, first: int, shape: Shape) -> View:
    """The elements of an int32 view from ``first`` on, as an array of ``shape``."""
    owner = view.owner[first : first + math.prod(shape)].reshape(shape)
    strides = arrays.row_major(shape)
    return View(view.ptr + 4 * first, shape, strides, view.dtype, view.device, owner)


# ---- the reference ----------------------------------------------------------------------------


def named_blocks(
    problem: Problem, selection: Selection, source: Source, offsets: Sequence[View]
) -> dict[str, Any]:
    """A selection as the reference takes it."""
    counts = None if source.counts is None else arrays.neutral(source.counts)
    if source.lists is not None:
        blocks, slots = arrays.neutral(source.lists.blocks), arrays.neutral(source.lists.slots)
        indices = reference.named_by_table(blocks, slots, selection.num_selected)
    elif source.named is None:
        indices = reference.named_by_pattern(
            arrays.neutral(offsets[0]),
            arrays.neutral(offsets[1]),
            problem.total_q,
            num_heads_sel=selection.num_heads_sel,
            sliding_blocks=source.sliding_blocks,
            global_blocks=source.global_blocks,
            block_size=selection.block_size,
        )
    else:
        indices = arrays.neutral(source.named)
        if source.kind == Kind.MASK:
            indices = reference.named_by_mask(indices)
    return {
        "block_indices": indices,
        "block_counts": counts,
        "block_size": selection.block_size,
        "include_own_block": selection.own,
        "causal": problem.window_right == 0,
    }


def _by_reference(
    problem: Problem,
    selection: Selection,
    source: Source,
    offsets: tuple[View, View],
    lists: bool,
) -> tuple[Array, ...]:
    """blocks, slots and counts, and with ``lists`` starts .. work."""
    options = named_blocks(problem, selection, source, offsets)
    cu_seqlens = [arrays.neutral(view) for view in offsets]
    by_query = reference.by_query(options.pop("block_indices"), *cu_seqlens, **options)
    if not lists:
        return tuple(by_query)
    by_key = reference.by_key(
        *by_query[:2],
        *cu_seqlens,
        num_heads_kv=problem.num_heads_kv,
        units=selection.key_units(problem),
        chunk=selection.chunk,
        num_chunks=selection.num_chunks(problem),
        block_size=selection.block_size,
        segment=selection.segment(problem),
        segments=selection.segments(problem),
    )
    return (*by_query, *by_key)


# ---- the kernels ------------------------------------------------------------------------------


def lists_of(
    call: Call, selection: Selection, source: Source, offsets: tuple[View, View], lists: bool
) -> Lists:
    """The table of a call as kernels take it, built unless it was given.

    ``offsets`` are as kernels read them. With ``lists``, those of the queries of a block too.
    """
    if source.lists is not None:
        return Lists(*map(call.dense, source.lists))  # type: ignore[arg-type]
    problem = call.problem
    items, _, *of_keys = _shapes(problem, selection, lists)
    blocks, slots = call.empty(items, "int32"), call.empty(items, "int32")
    counts = call.empty(items[:2], "int32")
    if not lists:
        table = Lists(blocks, slots)
        _fill(call, selection, source, offsets, table, counts, None)
        return table
    # lengths and the cursor behind them: one array, so that one launch zeroes both
    number = selection.lists(problem)
    zeroed = call.empty((2 * number + 2,), "int32")
    call.fill(zeroed, 0)
    lengths, cursor = _part(zeroed, 0, of_keys.pop(1)), _part(zeroed, number, (2 + number,))
    starts, *rest = (call.empty(shape, "int32") for shape in of_keys)
    table = Lists(blocks, slots, starts, lengths, *rest)
    _fill(call, selection, source, offsets, table, counts, cursor)
    return table


def _fill(
    call: Call,
    selection: Selection,
    source: Source,
    offsets: tuple[View, View],
    table: Lists,
    counts: View,
    cursor: View | None,
) -> None:
    """Blocks by query; and where ``table`` has room for them, queries by block.

    A first kernel counts the queries of each block in ``table.lengths``, a second gives each list
    its place and cuts it into segments of work, a third puts the queries into the lists by atomic
    adds, in any order, and the last sorts each list: the lists are the same on every run. lengths
    and ``cursor`` have been zeroed.
    """
    named, counted = source.named, source.counts
    if named is not None and source.kind == Kind.MASK:
        named = call.dense(named)._replace(dtype="uint8")
    elif named is not None and named.dtype == "int64":  # no int32 is as good as -1 or 2**31 - 1
        named = call.framework.clipped(named, call.stream)
    elif named is not None:
        named = call.offsets(named)
    if counted is not None:
        counted = call.offsets(counted)
    problem, stream = call.problem, call.stream
    cu_seqlens_q, cu_seqlens_k = offsets
    of_lists = lists_op.Args(
        block_indices=named,
        block_counts=counted,
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
    if cursor is None or table.work is None:
        return
    starts, lengths, queries, query_slots = table.of_keys()
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
