"""What the public functions share: views of the arrays, the Problem they pose, room for results.

``problem_of`` looks at the arrays of a call and checks them against each other, ``view_like`` and
``output`` at those that follow from them. ``ready`` and ``target`` stand between arrays and
kernels, which ask for alignment; ``mask`` and ``store`` between arrays and the reference.
"""

import os
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from rawattn import arrays, checks
from rawattn.arrays import Array, Framework, Shape, View, framework_of
from rawattn.problem import Problem, Selection, default_chunk
from rawattn.variants import Variant, select

Window = tuple[int, int]
MaybeView = TypeVar("MaybeView", View, View | None)


class Inputs(NamedTuple):
    """What every call has; ``cu_seqlens_k`` is ``cu_seqlens_q`` itself where they are shared."""

    q: View
    k: View
    v: View
    cu_seqlens_q: View
    cu_seqlens_k: View


class Passed(NamedTuple):
    """What a derivative is given beside the inputs."""

    dout: View
    out: View
    lse: View
    dlse: View | None


class Parts(NamedTuple):
    """Of a direction, like q, k and v; None is zero."""

    q: View | None
    k: View | None
    v: View | None


class Call(NamedTuple):
    """What travels from a checked call to its kernels; arrays are allocated beside ``like``."""

    framework: Framework
    problem: Problem
    backend: str | None
    like: View
    stream: int

    def empty(self, shape: Shape, dtype: str) -> View:
        """A new array from the caller's own allocator."""
        return self.framework.empty(shape, dtype, self.like)

    def fill(self, view: View, value: float) -> None:
        """Queue ``view[...] = value``."""
        self.framework.fill(view, value, self.stream)

    def rows(self, view: MaybeView) -> MaybeView:
        """A (tokens, heads, size) input as kernels load it, copied only where they could not."""
        return None if view is None else self.framework.rows(view, self.stream)

    def dense(self, view: MaybeView) -> MaybeView:
        """An input that kernels take without strides."""
        return None if view is None else self.framework.dense(view, self.stream)

    def offsets(self, view: View) -> View:
        """cu_seqlens, and whatever counts, as kernels read it: dense int32."""
        return self.framework.offsets(view, self.stream)

    def row(self, stem: str, **options: Any) -> Variant:
        """The row of ``stem`` for the problem; options as ``variants.select`` takes them."""
        return select(stem, self.problem, backend=self.backend, **options)


# ---- look and check ---------------------------------------------------------------------------


def problem_of(
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
) -> tuple[Framework, Problem, Inputs]:
    """Views of what every call has, and the Problem that they pose."""
    framework = framework_of(q, "q")
    gq = framework.view(q, "q")
    device = gq.device
    gk = view_beside(framework, k, "k", device)
    gv = view_beside(framework, v, "v", device)
    offsets_q = offsets_k = view_beside(framework, cu_seqlens, "cu_seqlens", device)
    if cu_seqlens_k is not None:
        offsets_k = view_beside(framework, cu_seqlens_k, "cu_seqlens_k", device)
    problem = pose(
        gq.shape, gk.shape, gv.shape, offsets_q.shape, offsets_k.shape,
        gq.dtype, gk.dtype, gv.dtype, offsets_q.dtype, offsets_k.dtype, cu_seqlens_k is None,
        checks.window(window, causal), checks.softmax_scale(softmax_scale), backend, device,
    )  # fmt: skip
    if validate:
        checks.offsets("cu_seqlens", arrays.host_values(offsets_q), problem.total_q)
        name = "cu_seqlens" if cu_seqlens_k is None else "cu_seqlens_k"
        checks.offsets(name, arrays.host_values(offsets_k), problem.total_k)
    return framework, problem, Inputs(gq, gk, gv, offsets_q, offsets_k)


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
    device: int,
) -> Problem:
    """Check shapes, dtypes and options against each other, and put them into a Problem."""
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
    checks.cu_seqlens("cu_seqlens", offsets_q, dtype_offsets_q)
    checks.cu_seqlens("cu_seqlens_k", offsets_k, dtype_offsets_k)
    checks.same_batch(offsets_q[0], offsets_k[0])
    if shared:
        checks.shared_cu_seqlens(total_q, total_k)
    check_backend(backend, device)
    # A side that reaches past every token is open; with that, positions plus a side fit 32 bits.
    left, right = window
    return Problem(
        dtype=dtype,
        batch=offsets_q[0] - 1,
        total_q=total_q,
        total_k=total_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        window_left=-1 if left >= total_k else left,
        window_right=-1 if right >= total_q else right,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        arch=arrays.arch_of(device),
        device=device,
    )


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
    checks.lists(selection.lists(problem))
    return selection


def check_backend(backend: str | None, device: int) -> None:
    """A backend that exists and can work here."""
    checks.backend(backend, device)
    if backend == "numba" and device < 0:
        simulated = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
        checks.numba_device(simulated or arrays.has_cuda_device())


def view_beside(framework: Framework, array: Array, name: str, device: int) -> View:
    """View of an array that has to be of the framework, and on the device, of the first one."""
    given = framework_of(array, name)
    if given is not framework:
        checks.same_framework(name, given.name, framework.name)
    view = framework.view(array, name)
    if view.device != device:
        checks.same_device(name, view.device, device)
    return view


def view_like(
    framework: Framework, array: Array, name: str, shape: Shape, dtype: str, like: View
) -> View:
    """View of an array whose shape and dtype follow from the others."""
    view = view_beside(framework, array, name, like.device)
    checks.shape(name, view.shape, shape)
    checks.same_dtype(name, view.dtype, dtype)
    return view


def part_of(
    framework: Framework, array: Array | None, name: str, origin: View, like: View
) -> View | None:
    """View of the part of a direction that belongs to ``origin``, which is q, k or v."""
    if array is None:
        return None
    return view_like(framework, array, name, origin.shape, origin.dtype, like)


def output(
    framework: Framework, array: Array | None, name: str, shape: Shape, dtype: str, like: View
) -> View:
    """View of a preallocated output, or of a new array."""
    if array is None:
        return framework.empty(shape, dtype, like)
    view = view_like(framework, array, name, shape, dtype, like)
    checks.writable(name, framework.writable(view))
    checks.distinct_elements(name, view.shape, view.strides)
    return view


def statistic(dtype: str) -> str:
    """dtype of lse, delta and gathered sums beside inputs of ``dtype``."""
    return "float64" if dtype == "float64" else "float32"


# ---- the reference ----------------------------------------------------------------------------


def by_reference(problem: Problem, backend: str | None) -> bool:
    """Whether the reference computes the call."""
    return backend == "reference" or (backend is None and problem.device < 0)


def mask(problem: Problem) -> dict[str, Any]:
    """What the reference wants to know of a Problem."""
    window = (problem.window_left, problem.window_right)
    return {"window": window, "softmax_scale": problem.softmax_scale}


def neutral(view: View | None) -> Array | None:
    """An array of the call as the reference takes it, if there is one."""
    return None if view is None else arrays.neutral(view)


def store(values: tuple[Array, ...], views: tuple[View, ...]) -> None:
    """Round the reference's values into arrays of the call."""
    for value, view in zip(values, views, strict=True):
        arrays.neutral(view)[...] = value


# ---- the kernels ------------------------------------------------------------------------------


def is_empty(problem: Problem, selection: Selection | None = None) -> bool:
    """No token can see another: the results are known, and a grid would be of size zero."""
    nothing = selection is not None and not selection.width
    return nothing or not (problem.batch and problem.total_q and problem.total_k)


def target(framework: Framework, result: View, like: View) -> View:
    """Where kernels write a result: the array itself if they can, else one to copy from."""
    usable = arrays.is_aligned(result) if len(result.shape) == 3 else arrays.is_dense(result)
    return result if usable else framework.empty(result.shape, result.dtype, like)
