"""From a caller's arrays to launches: look at them, check them, and make room for the results.

Every public function goes the same way: ``look`` gives Views of what all calls have and the Problem
that they pose, Given's methods those of what follows from it, preallocated results too; ``compute``
chooses the stream behind all of them and lets the reference or the kernels fill the results. What
kernels need on their way is a Call. Long, since the way is read from one end to the other.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from rawattn import arrays, checks, device, variants
from rawattn.arrays import Array, Framework, Shape, View, framework_of
from rawattn.problem import Problem, Selection, default_chunk
from rawattn.variants import Row

Window = tuple[int, int]
Like = tuple[Shape, str]  # shape and dtype
_new = tuple.__new__  # _new(Call, (...)) is Call(...) in half the time
_View = TypeVar("_View", View, View | None)


class Inputs(NamedTuple):
    """What every call has; without cu_seqlens of the keys, both offsets are the same View."""

    q: View
    k: View
    v: View
    cu_seqlens_q: View
    cu_seqlens_k: View
    sinks: View | None
    seqused_k: View | None


class Passed(NamedTuple):
    """Cotangents of out and lse, and out and lse themselves."""

    dout: View
    out: View
    lse: View
    dlse: View | None


class Parts(NamedTuple):
    """A direction: what q, k and v move along; None is zero."""

    q: View | None
    k: View | None
    v: View | None


class Result(NamedTuple):
    """What a result is like, and the caller's array for it, if there is one."""

    name: str
    like: Like
    array: Array | None = None
    view: View | None = None  # of the array


# ---- on the way to kernels --------------------------------------------------------------------


class Call(NamedTuple):
    """What goes with every launch of a call. ``backend`` is a family of rows that was asked for."""

    framework: Framework
    problem: Problem
    backend: str | None
    like: View  # allocate beside it
    stream: int

    def empty(self, shape: Shape, dtype: str) -> View:
        """New memory, from the caller's allocator."""
        return self.framework.empty(shape, dtype, self.like)

    def fill(self, view: View, value: float) -> None:
        """Set every element, on the stream."""
        self.framework.fill(view, value, self.stream)

    @property
    def capturing(self) -> bool:
        """Whether the call becomes part of a graph."""
        return device.is_capturing(self.stream)

    def rows(self, view: _View) -> _View:
        """A (tokens, heads, size) array as kernels load it, copied only where they could not."""
        if view is None or arrays.is_aligned(view):
            return view
        return self.framework.contiguous(view, self.stream)

    def mapped(self, view: View) -> View:
        """A (tokens, heads, size) array that is ready, copied where it can have no tensor map."""
        return view if arrays.runs_forward(view) else self.framework.contiguous(view, self.stream)

    def dense(self, view: _View) -> _View:
        """An array that kernels take without strides."""
        if view is None or arrays.is_dense(view):
            return view
        return self.framework.contiguous(view, self.stream)

    def offsets(self, view: View) -> View:
        """cu_seqlens, and whatever counts, as kernels read it: dense int32."""
        if view.dtype == "int32" and arrays.is_dense(view):
            return view
        return self.framework.as_int32(view, self.stream)

    def sums(self, view: View | None) -> View | None:
        """Numbers that kernels read beside lse, dense and of its dtype."""
        dtype = statistic(self.problem.dtype)
        if view is None or (view.dtype == dtype and arrays.is_dense(view)):
            return view
        room = self.empty(view.shape, dtype)
        self.framework.copy(room, view, self.stream)
        return room

    def row(self, stem: str, *, by_size: bool = False, selection: Selection | None = None) -> Row:
        """The row that computes the call with kernel ``stem``; options as in ``select``."""
        return variants.select(
            stem, self.problem, backend=self.backend, by_size=by_size, selection=selection
        )


# ---- look and check ---------------------------------------------------------------------------


class Given(NamedTuple):
    """What a caller gave, but for the arrays: those of a call are looked at beside ``like``."""

    framework: Framework
    problem: Problem
    rows: Like  # out and its relatives
    sums: Like  # lse and its relatives
    backend: str | None
    like: View

    def view(self, array: Array, name: str) -> View:
        """View of an array that belongs to the call."""
        return view_beside(self.framework, array, name, self.like.device)

    def view_like(self, array: Array, name: str, like: Like) -> View:
        """View of an array whose shape and dtype follow from the others."""
        view = self.view(array, name)
        checks.shape(name, view.shape, like[0])
        checks.same_dtype(name, view.dtype, like[1])
        return view

    def passed(self, dout: Array, out: Array, lse: Array, dlse: Array | None) -> Passed:
        """Views of the cotangents and of what the forward gave."""
        return Passed(
            self.view_like(dout, "dout", self.rows),
            self.view_like(out, "out", self.rows),
            self.view_like(lse, "lse", self.sums),
            None if dlse is None else self.view_like(dlse, "dlse", self.sums),
        )

    def direction(self, prefix: str, inputs: Inputs, *parts: Array | None) -> Parts:
        """Views of what is like q, k and v; they are called so behind the prefix."""
        names = zip("qkv", parts, inputs[:3], strict=True)
        return Parts(
            *(
                None if part is None else self.view_like(part, prefix + name, (x.shape, x.dtype))
                for name, part, x in names
            )
        )

    def result(self, array: Array | None, name: str, like: Like) -> Result:
        """A preallocated result, or what a new one has to be like."""
        if array is None:
            return _new(Result, (name, like, None, None))
        view = self.view_like(array, name, like)
        checks.writable(name, self.framework.writable(view))
        checks.distinct_elements(name, view.shape, view.strides)
        return Result(name, like, array, view)

    def along_sinks(self, inputs: Inputs, name: str, part: Array | None) -> View | None:
        """View of a direction of the sinks."""
        if part is None:
            return None
        if (x := inputs.sinks) is None:
            checks.without_sinks(name)
        return self.view_like(part, name, (x.shape, x.dtype))

    def of_sinks(self, inputs: Inputs, name: str, room: Array | None = None) -> tuple[Result, ...]:
        """The result that is like sinks, where there are any."""
        x = inputs.sinks
        return () if x is None else (self.result(room, name, (x.shape, x.dtype)),)

    def gradients(self, inputs: Inputs, prefix: str, *rooms: Array | None) -> tuple[Result, ...]:
        """The results that are like q, k and v; they are called so behind the prefix."""
        named = zip("qkv", rooms, inputs[:3], strict=True)
        return tuple(self.result(room, prefix + x, (y.shape, y.dtype)) for x, room, y in named)


def look(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens: Array,
    cu_seqlens_k: Array | None,
    causal: bool,
    window: Window,
    softmax_scale: float | None,
    backend: str | None,
    validate: bool,
    *,
    softcap: float | None = None,
    sinks: Array | None = None,
    seqused_k: Array | None = None,
) -> tuple[Given, Inputs]:
    """Views of what every call has, and the Problem that they pose."""
    framework = framework_of(q, "q")
    view = framework.view
    gq = view(q, "q")
    ordinal = gq.device
    # Of these two, arrays of one type and device are of one framework: then nothing else is asked.
    alike = framework is arrays.CUPY or framework is arrays.TORCH
    alike = alike and type(q) is type(k) is type(v) is type(cu_seqlens)
    if alike:
        gk, gv, offsets_q = view(k, "k"), view(v, "v"), view(cu_seqlens, "cu_seqlens")
        alike = gk.device == gv.device == offsets_q.device == ordinal
    if not alike:
        gk = view_beside(framework, k, "k", ordinal)
        gv = view_beside(framework, v, "v", ordinal)
        offsets_q = view_beside(framework, cu_seqlens, "cu_seqlens", ordinal)
    offsets_k = offsets_q
    if cu_seqlens_k is not None:
        offsets_k = view_beside(framework, cu_seqlens_k, "cu_seqlens_k", ordinal)
    problem, rows, sums = pose(
        gq.shape, gk.shape, gv.shape, offsets_q.shape, offsets_k.shape,
        gq.dtype, gk.dtype, gv.dtype, offsets_q.dtype, offsets_k.dtype, cu_seqlens_k is None,
        checks.window(window, causal if type(causal) is bool else checks.flag("causal", causal)),
        None if softmax_scale is None else checks.softmax_scale(softmax_scale), backend, ordinal,
        checks.softcap(softcap) if softcap else 0.0, sinks is not None, seqused_k is not None,
    )  # fmt: skip
    if validate or ordinal < 0:
        check_offsets(offsets_q, offsets_k, problem.total_q, problem.total_k)
    given = _new(Given, (framework, problem, rows, sums, backend, gq))
    of_sinks = used = None
    if sinks is not None:
        of_sinks = given.view(sinks, "sinks")
        checks.shape("sinks", of_sinks.shape, (problem.num_heads_q,))
        checks.dtype("sinks", of_sinks.dtype)
    if seqused_k is not None:
        used = given.view(seqused_k, "seqused_k")
        checks.shape("seqused_k", used.shape, (problem.batch,))
        checks.block_dtype("seqused_k", used.dtype)
    return given, _new(Inputs, (gq, gk, gv, offsets_q, offsets_k, of_sinks, used))


def check_offsets(offsets_q: View, offsets_k: View, total_q: int, total_k: int) -> None:
    """The content of cu_seqlens, which has to be read back from a device."""
    checks.offsets("cu_seqlens", arrays.host_values(offsets_q), total_q)
    if offsets_k is not offsets_q:
        checks.offsets("cu_seqlens_k", arrays.host_values(offsets_k), total_k)


# Layers repeat their shapes, and so do steps: every rule is checked once for each combination.
@lru_cache(maxsize=1024)
def pose(
    q: Shape,
    k: Shape,
    v: Shape,
    offsets_q: Shape,
    offsets_k: Shape,
    dtype: str,
    dtype_k: str,
    dtype_v: str,
    dtype_offsets_q: str,
    dtype_offsets_k: str,
    shared: bool,
    window: Window,
    softmax_scale: float | None,
    backend: str | None,
    ordinal: int,
    softcap: float,
    has_sinks: bool,
    has_seqused_k: bool,
) -> tuple[Problem, Like, Like]:
    """Check shapes, dtypes and options against each other, and put them into a Problem.

    With it goes what out and lse are like.
    """
    checks.rank("q", q)
    checks.rank("k", k)
    checks.rank("v", v)
    checks.dtype("q", dtype)
    checks.same_dtype("k", dtype_k, dtype)
    checks.same_dtype("v", dtype_v, dtype)
    total_q, num_heads_q, head_dim = q
    total_k, num_heads_kv, head_dim_v = v
    checks.keys_and_values(k, v)
    checks.same_head_dim(head_dim, k[2])
    checks.head_dim("q", head_dim)
    checks.head_dim("v", head_dim_v)
    checks.heads(num_heads_q, num_heads_kv)
    checks.tokens("q", total_q)
    checks.tokens("k", total_k)
    batch = pose_offsets(offsets_q, offsets_k, dtype_offsets_q, dtype_offsets_k)
    if shared:
        checks.shared_cu_seqlens(total_q, total_k)
    check_backend(backend, ordinal)
    # A side that reaches past every token is open; with that, positions plus a side fit 32 bits.
    left, right = window
    problem = Problem(
        dtype=dtype,
        batch=batch,
        total_q=total_q,
        total_k=total_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        window_left=-1 if left >= total_k else left,
        window_right=-1 if right >= total_q else right,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        arch=device.arch_of(ordinal),
        device=ordinal,
        num_sms=device.sms_of(ordinal),
        softcap=softcap,
        has_sinks=has_sinks,
        has_seqused_k=has_seqused_k,
    )
    rows, sums = (total_q, num_heads_q, head_dim_v), (num_heads_q, total_q)
    return problem, (rows, dtype), (sums, statistic(dtype))


def pose_offsets(offsets_q: Shape, offsets_k: Shape, dtype_q: str, dtype_k: str) -> int:
    """Check the two cu_seqlens against each other; gives the number of sequences."""
    checks.cu_seqlens("cu_seqlens", offsets_q, dtype_q)
    checks.cu_seqlens("cu_seqlens_k", offsets_k, dtype_k)
    checks.same_batch(offsets_q[0], offsets_k[0])
    return offsets_q[0] - 1


@lru_cache(maxsize=1024)
def pose_selection(
    problem: Problem,
    name: str,
    shape: Shape,
    dtype: str,
    block_counts: Shape | None,
    dtype_counts: str,
    block_size: int,
    own: bool,
) -> Selection:
    """Check block_indices or a block_mask against a Problem, and put them into a Selection."""
    checks.block_axes(name, shape)
    checks.block_dtype(name, dtype)
    total_q, num_heads_sel, num_selected = shape
    checks.selection_tokens(name, total_q, problem.total_q)
    checks.selection_heads(num_heads_sel, problem.num_heads_q, problem.num_heads_kv)
    if block_counts is not None:
        checks.shape("block_counts", block_counts, shape[:2])
        checks.block_dtype("block_counts", dtype_counts)
    chunk = default_chunk(max(total_q, 1), problem.group, problem.head_dim)
    selection = Selection(num_heads_sel, num_selected, block_size, own, chunk)
    checks.entries(num_heads_sel, total_q, selection.width)
    checks.lists(selection.lists(problem), selection.segments(problem))
    return selection


def check_backend(backend: str | None, ordinal: int) -> None:
    """A backend that exists and can work here."""
    checks.backend(backend, ordinal)
    if backend == "numba" and ordinal < 0:
        simulated = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
        checks.numba_device(simulated or device.has_cuda_device())


def view_beside(framework: Framework, array: Array, name: str, ordinal: int) -> View:
    """View of an array that has to be of the framework, and on the device, of the first one."""
    if (given := framework_of(array, name)) is not framework:
        checks.same_framework(name, given.name, framework.name)
    view = framework.view(array, name)
    if view.device != ordinal:
        checks.same_device(name, view.device, ordinal)
    return view


def statistic(dtype: str) -> str:
    """dtype of lse, delta and gathered sums beside inputs of ``dtype``."""
    return "float64" if dtype == "float64" else "float32"


# ---- compute ----------------------------------------------------------------------------------


def compute(
    given: Given,
    views: Sequence[View | None],
    results: Sequence[Result],
    *,
    empty: Sequence[float],
    reference: Callable[[], Sequence[Array]],
    kernels: Callable[..., None],
    nothing: bool = False,
    without_keys: bool = False,
) -> list[Any]:
    """The results, in the caller's kind of array, after all work on ``views`` has been queued.

    ``empty`` are their values where no token sees another, or ``nothing`` else asks for more; but
    ``without_keys`` queries alone are something.
    ``reference`` gives values for all; ``kernels`` gets a Call and Views to write to.
    """
    framework, problem, _rows, _sums, backend, like = given
    preallocated: tuple[View, ...] = ()
    for result in results:
        if result.view is not None:
            preallocated += (result.view,)
    if preallocated:
        _check_separate(results, views)
    ordinal = problem.device
    previous = device.enter(ordinal)
    try:
        stream = framework.stream(*views, *preallocated)
        call = _new(Call, (framework, problem, backend, like, stream))
        rooms = []
        for _, (shape, dtype), _, view in results:
            rooms.append(view or framework.empty(shape, dtype, like))
        keys = problem.total_k or without_keys
        if nothing or not (problem.batch and problem.total_q and keys):
            for room, value in zip(rooms, empty, strict=True):
                framework.fill(room, value, stream)
        elif backend == "reference" or (backend is None and ordinal < 0):
            with device.on_stream(stream, ordinal):
                for room, value in zip(rooms, reference(), strict=True):
                    arrays.neutral(room)[...] = value
        elif not preallocated:
            kernels(call, *rooms)
        else:
            targets = [_target(call, room) for room in rooms]
            kernels(call, *targets)
            for room, target in zip(rooms, targets, strict=True):
                if target is not room:
                    framework.copy(room, target, stream)
        if framework.keep is not None:
            framework.keep([view for view in views if view is not None], stream)
        if preallocated:
            pairs = zip(results, rooms, strict=True)
            return [framework.finish(y) if x.view is None else x.array for x, y in pairs]
        return list(map(framework.finish, rooms))
    finally:
        if previous >= 0:
            device.leave(previous)


def _check_separate(results: Sequence[Result], views: Sequence[View | None]) -> None:
    """Preallocated results share memory with nothing else of the call."""
    before: list[tuple[str | None, View]] = [(None, view) for view in views if view is not None]
    for name, _, _, view in results:
        if view is not None:
            for other, seen in before:
                if arrays.share_memory(view, seen):
                    checks.separate(name, other)
            before.append((name, view))


def _target(call: Call, room: View) -> View:
    """Where kernels write a result: the array itself if they can, else one to copy from."""
    usable = arrays.is_aligned(room) if len(room.shape) == 3 else arrays.is_dense(room)
    return room if usable else call.empty(room.shape, room.dtype)


# ---- for the reference ------------------------------------------------------------------------


def mask(problem: Problem) -> dict[str, Any]:
    """What the reference wants to know of a Problem."""
    window = (problem.window_left, problem.window_right)
    return {"window": window, "softmax_scale": problem.softmax_scale}


def options(problem: Problem, inputs: Inputs) -> dict[str, Any]:
    """What the dense reference wants to know beyond arrays, of neutral inputs."""
    more = {"softcap": problem.softcap or None, "sinks": inputs.sinks}
    return mask(problem) | more | {"seqused_k": inputs.seqused_k}


def neutral_or_none(view: View | None) -> Any:
    """An array of the call as the reference takes it, if there is one."""
    return None if view is None else arrays.neutral(view)


def neutral(views: Any) -> Any:
    """Inputs, Passed or Parts with arrays as the reference takes them in the place of Views."""
    return views._make(map(neutral_or_none, views))
