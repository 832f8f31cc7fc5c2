"""Any array in, the same kind of array out: a neutral View, and what each library does for a call.

One module although it is long, because the kinds of array only make sense side by side:

    NUMPY     host memory. torch, JAX and foreign arrays in host memory, and the arrays of Numba's
              simulator, are looked at as NumPy arrays that share their memory
    CUPY      read by attribute, no protocol in between (speed)
    TORCH     CUDA tensors, read by method (speed)
    JAX       CUDA arrays of JAX, as CuPy arrays over DLPack, which orders the streams by events
    NUMBA     device arrays, by the dict of __cuda_array_interface__: CuPy, importing such an array,
              would make the host wait for its stream
    FOREIGN   anything else with __dlpack__ or __cuda_array_interface__; results are CuPy arrays

Nothing here makes the host wait for a device, except ``host_values``, which reads on request.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np

from rawattn import checks, device

Array = Any  # an array of any library
Shape = tuple[int, ...]

LARGEST = 2**31 - 1  # of int32
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# What the kernels need of pointers and row strides, in bytes: the CUDA ones load 16 at a time.
ALIGNMENT = {"float16": 16, "bfloat16": 16, "float32": 4, "float64": 8}


class View(NamedTuple):
    """An array as the kernels see it: immutable, strides counted in elements.

    ``dtype`` is "float16", "bfloat16", "float32", "float64", "int32", "int64", or another as NumPy
    spells it. ``device`` is a CUDA ordinal, -1 for host memory. ``owner`` keeps the memory alive;
    in host memory it is a NumPy array that shares it.
    """

    ptr: int
    shape: Shape
    strides: Shape
    dtype: str
    device: int
    owner: Any


_owner = attrgetter("owner")
_new = tuple.__new__  # _new(View, (...)) is View(...) in half the time


@dataclass(frozen=True, slots=True)
class Framework:
    """What an array library does for a call. A stream is always a raw CUDA stream handle.

    ``view`` takes a caller's array and its name. ``stream`` tells where the work on some inputs, or
    None, has to go, and puts it behind whatever else they wait for. ``empty`` allocates beside a
    View, from the library's own allocator. ``fill``, ``contiguous``, ``as_int32`` (modulo 2**32),
    ``clipped`` (to int32 too, but 2**31 - 1 from there on and -1 below 0) and ``copy`` (to, from)
    queue their work on the stream. ``finish`` turns a View of ``empty`` into the caller's
    kind of array. ``keep``, where there is one, holds on to inputs that the library would otherwise
    hand to others as soon as the caller drops them, until the stream's present work is done.
    """

    name: str
    view: Callable[[Array, str], View]
    empty: Callable[[Shape, str, View], View]
    fill: Callable[[View, float, int], None]
    contiguous: Callable[[View, int], View]
    as_int32: Callable[[View, int], View]
    clipped: Callable[[View, int], View]
    copy: Callable[[View, View, int], None]
    stream: Callable[..., int]
    writable: Callable[[View], bool]
    finish: Callable[[View], Array]
    keep: Callable[[Iterable[View], int], None] | None = None


def framework_of(array: Array, name: str) -> Framework:
    """The framework of an array, found without importing anything; ``name`` is for error texts."""
    choose = _CHOOSERS.get(type(array))
    if choose is None:
        choose = _CHOOSERS[type(array)] = _chooser(type(array))
    return choose(array, name)


def of_results(framework: Framework) -> Framework:
    """The framework of what ``finish`` gives: for foreign arrays, CuPy or NumPy."""
    if framework is FOREIGN:
        return CUPY
    return NUMPY if framework is FOREIGN_HOST else framework


def is_aligned(view: View) -> bool:
    """Whether kernels can take a (tokens, heads, size) view as it is."""
    token, head, element = view.strides
    dtype = view.dtype
    return element == 1 and not (view.ptr | (token | head) * ITEMSIZE[dtype]) % ALIGNMENT[dtype]


def runs_forward(view: View) -> bool:
    """Whether a view's strides are positive, where they are used: a tensor map has no others."""
    token, head, _ = view.strides
    return (token > 0 or view.shape[0] <= 1) and (head > 0 or view.shape[1] <= 1)


def is_dense(view: View) -> bool:
    """Whether the elements lie in row-major order without gaps."""
    return view.strides == row_major(view.shape)


@lru_cache(maxsize=1024)
def are_usual(dtype: str, offsets: str, *strides: Shape) -> bool:
    """Whether kernels take q, k, v and cu_seqlens of such dtypes and strides as they are.

    That is, where the pointers of q, k and v are multiples of 16.
    """
    *rows, of_offsets = strides
    unit = ALIGNMENT[dtype] // ITEMSIZE[dtype]
    even = all(x[2] == 1 and not (x[0] | x[1]) % unit for x in rows)
    return even and offsets == "int32" and of_offsets == (1,)


@lru_cache(maxsize=1024)
def row_major(shape: Shape) -> Shape:
    """Strides, in elements, of a dense array."""
    if len(shape) == 3:
        return (shape[1] * shape[2], shape[2], 1)
    return (shape[1], 1) if len(shape) == 2 else (1,) * len(shape)


def share_memory(one: View, other: View) -> bool:
    """Whether two views have an element in common; slices of one array need not."""
    if 0 in one.shape or 0 in other.shape:
        return False
    (first, last), (low, high) = _range(one), _range(other)
    if last <= low or high <= first:
        return False
    try:
        return np.shares_memory(_Outline(one), _Outline(other), max_work=_MOST_WORK)  # type: ignore
    except np.exceptions.TooHardError:
        return True


_MOST_WORK = 100_000  # steps of NumPy's search, which needs a few for slices


class _Outline:
    """Where a view lies, as NumPy takes it: nothing is read, and it may be a device's memory."""

    def __init__(self, view: View) -> None:
        size = numpy_dtype(view.dtype).itemsize
        self.__array_interface__ = {
            "data": (view.ptr, True),
            "shape": tuple(view.shape),
            "strides": tuple(s * size for s in view.strides),
            "typestr": f"|V{size}",
            "version": 3,
        }


def _range(view: View) -> tuple[int, int]:
    """First byte of a view, and one past the last."""
    size = numpy_dtype(view.dtype).itemsize
    spans = [(n - 1) * s * size for n, s in zip(view.shape, view.strides, strict=True)]
    low = sum(span for span in spans if span < 0)
    return view.ptr + low, view.ptr + sum(spans) - low + size


def neutral(view: View) -> Array:
    """A NumPy (host) or CuPy (device) array over the memory of a view."""
    cupy = None if view.device < 0 else device.cupy()
    if cupy is None or isinstance(view.owner, cupy.ndarray):
        return view.owner
    itemsize = numpy_dtype(view.dtype).itemsize
    extent = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + 1
    size = max(extent, 0) * itemsize
    memory = cupy.cuda.UnownedMemory(view.ptr, size, view.owner, view.device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    strides = tuple(s * itemsize for s in view.strides)
    return cupy.ndarray(view.shape, numpy_dtype(view.dtype), pointer, strides)


def host_values(view: View) -> list[int]:
    """The elements of an integer view on the host; waits for the device."""
    values: list[int] = neutral(view).tolist()
    return values


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name; bfloat16 is that of ml_dtypes."""
    if name == "bfloat16":
        name = importlib.import_module("ml_dtypes").bfloat16
    return np.dtype(name)


# ---- NumPy, and what lies in host memory -------------------------------------------------------


def _numpy_view(array: Array, name: str) -> View:
    if isinstance(array, np.ma.MaskedArray):
        checks.masked(name)
    strides, dtype = _layout(name, array.strides, array.dtype)
    return View(array.__array_interface__["data"][0], array.shape, strides, dtype, -1, array)


def _clip(array: Array) -> Array:
    return array.clip(-1, LARGEST).astype(np.int32, order="C")


def _assign(destination: View, source: View, stream: int) -> None:
    destination.owner[...] = source.owner


NUMPY = Framework(
    name="NumPy",
    view=_numpy_view,
    empty=lambda shape, dtype, like: _numpy_view(np.empty(shape, numpy_dtype(dtype)), ""),
    fill=lambda view, value, stream: view.owner.fill(value),
    contiguous=lambda view, stream: _numpy_view(view.owner.copy(order="C"), ""),
    as_int32=lambda view, stream: _numpy_view(view.owner.astype(np.int32, order="C"), ""),
    clipped=lambda view, stream: _numpy_view(_clip(view.owner), ""),
    copy=_assign,
    stream=lambda *inputs: 0,
    writable=lambda view: bool(view.owner.flags.writeable),
    finish=_owner,
)


# ---- CuPy -------------------------------------------------------------------------------------


def _cupy_view(array: Array, name: str) -> View:
    strides, dtype = _layout(name, array.strides, array.dtype)
    memory = array.data
    return _new(View, (memory.ptr, array.shape, strides, dtype, memory.device_id, array))


@lru_cache(maxsize=1024)
def _layout(name: str, strides: Shape, dtype: np.dtype[Any]) -> tuple[Shape, str]:
    """Strides from bytes to elements, and the name of the dtype; cached because every call asks."""
    if any(s % dtype.itemsize for s in strides):
        checks.uneven_strides(name, strides, dtype.itemsize)
    # The name of a NumPy dtype hides its byte order.
    spelled = dtype.name if dtype.isnative else dtype.str
    return tuple(s // dtype.itemsize for s in strides), spelled


def _cupy_empty(shape: Shape, dtype: str, like: View) -> View:
    array = device.cupy().ndarray(shape, numpy_dtype(dtype))
    return _new(View, (array.data.ptr, shape, row_major(shape), dtype, like.device, array))


def _cupy_current(first: View, *others: View | None) -> int:
    handle: int = device.cupy().cuda.get_current_stream(first.device).ptr
    return handle


CUPY = Framework(
    name="CuPy",
    view=_cupy_view,
    empty=_cupy_empty,
    fill=lambda view, value, stream: view.owner.fill(value),
    contiguous=lambda view, stream: _cupy_view(view.owner.copy(order="C"), ""),
    as_int32=lambda view, stream: _cupy_view(view.owner.astype(np.int32, order="C"), ""),
    clipped=lambda view, stream: _cupy_view(_clip(view.owner), ""),
    copy=_assign,
    stream=_cupy_current,
    writable=lambda view: True,
    finish=_owner,
)


# ---- torch ------------------------------------------------------------------------------------


def _torch() -> Any:
    return sys.modules["torch"]  # a caller's tensor has loaded it


@cache
def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _torch_dtype(name: str) -> Any:
    return getattr(_torch(), name)


def _torch_view(tensor: Array, name: str) -> View:
    if tensor.is_neg():
        checks.lazily_negated(name)
    ptr = tensor.data_ptr()
    if not ptr and tensor.numel():
        kind = "meta tensor" if tensor.is_meta else type(tensor).__name__
        checks.no_memory(name, f"torch {kind}")
    if tensor.requires_grad:
        _refuse_grad(name)
    dtype = _torch_name(tensor.dtype)
    return _new(View, (ptr, tensor.shape, tensor.stride(), dtype, tensor.get_device(), tensor))


def _refuse_grad(name: str) -> None:
    """As ``Tensor.numpy`` does: the result would not be part of the graph."""
    if _torch().is_grad_enabled():
        checks.requires_grad(name)


def _torch_empty(shape: Shape, dtype: str, like: View) -> View:
    tensor = like.owner.new_empty(shape, dtype=_torch_dtype(dtype))
    return _new(View, (tensor.data_ptr(), shape, row_major(shape), dtype, like.device, tensor))


def _torch_fill(view: View, value: float, stream: int) -> None:
    view.owner.detach().fill_(value)


def _torch_contiguous(view: View, stream: int) -> View:
    layout = _torch().contiguous_format
    return _torch_view(view.owner.detach().clone(memory_format=layout), "")


def _torch_copy(destination: View, source: View, stream: int) -> None:
    destination.owner.detach().copy_(source.owner)


def _torch_current(first: View, *others: View | None) -> int:
    # As in the code that torch generates; the public current_stream builds an object each time.
    handle: int = _torch()._C._cuda_getCurrentRawStream(first.device)
    return handle


TORCH = Framework(
    name="torch CUDA",
    view=_torch_view,
    empty=_torch_empty,
    fill=_torch_fill,
    contiguous=_torch_contiguous,
    as_int32=lambda view, stream: _torch_view(view.owner.int().contiguous(), ""),
    clipped=lambda view, stream: _torch_view(view.owner.clamp(-1, LARGEST).int().contiguous(), ""),
    copy=_torch_copy,
    stream=_torch_current,
    writable=lambda view: True,
    finish=_owner,
)


def _torch_host_view(tensor: Array, name: str) -> View:
    if tensor.is_neg():
        checks.lazily_negated(name)
    if tensor.requires_grad:
        _refuse_grad(name)
        tensor = tensor.detach()
    if tensor.dtype == _torch_dtype("bfloat16"):  # NumPy has no such dtype: go by the bits
        bits = tensor.view(_torch_dtype("int16")).numpy()
        return _numpy_view(bits.view(numpy_dtype("bfloat16")), name)
    return _numpy_view(tensor.numpy(), name)


def _torch_host_finish(view: View) -> Array:
    if view.dtype == "bfloat16":
        return _torch().from_numpy(view.owner.view(np.int16)).view(_torch_dtype("bfloat16"))
    return _torch().from_numpy(view.owner)


TORCH_HOST = replace(NUMPY, name="torch CPU", view=_torch_host_view, finish=_torch_host_finish)


def _choose_torch(tensor: Array, name: str) -> Framework:
    if tensor.is_cuda:
        return TORCH
    if tensor.is_cpu:
        return TORCH_HOST
    if tensor.is_meta:
        checks.no_memory(name, "torch meta tensor")
    checks.unsupported_device(name, str(tensor.device))


# ---- JAX --------------------------------------------------------------------------------------


def _over_dlpack(array: Array, name: str) -> View:
    return _cupy_view(device.cupy().from_dlpack(array), name)


def _keep(views: Iterable[View], stream: int) -> None:
    """DLPack orders our work behind the producer's, but not the next user's behind ours."""
    device.keep((view.owner for view in views), stream)


JAX = replace(
    CUPY,
    name="JAX CUDA",
    view=_over_dlpack,
    writable=lambda view: False,
    finish=lambda view: importlib.import_module("jax.dlpack").from_dlpack(view.owner),
    keep=_keep,
)
JAX_HOST = replace(
    NUMPY,
    name="JAX CPU",
    view=lambda array, name: _numpy_view(np.asarray(array), name),
    writable=lambda view: False,
    finish=lambda view: sys.modules["jax"].device_put(view.owner),
)


def _choose_jax(array: Array, name: str) -> Framework:
    platform = next(iter(array.devices())).platform
    if platform == "cpu":
        return JAX_HOST
    if platform != "gpu":
        checks.unsupported_device(name, platform)
    return JAX


# ---- Numba, and anything else by the interfaces ------------------------------------------------


def _interface_view(array: Array, name: str) -> View:
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        checks.masked(name)
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    strides = interface.get("strides") or tuple(s * dtype.itemsize for s in row_major(shape))
    elements, spelled = _layout(name, tuple(strides), dtype)
    ptr = interface["data"][0]
    return View(ptr, shape, elements, spelled, _device_of(ptr), array)


def _device_of(ptr: int) -> int:
    """The device of a pointer, which the interface does not tell; the current one for a null."""
    runtime = device.cupy().cuda.runtime
    ordinal: int = runtime.pointerGetAttributes(ptr).device if ptr else runtime.getDevice()
    return ordinal


def _follow(stream: int, view: View) -> None:
    """Order ``stream`` behind the stream that an interface names."""
    producer = view.owner.__cuda_array_interface__.get("stream")
    if producer is not None and producer != stream:
        device.follow(stream, producer, view.device)


def _neutral_fill(view: View, value: float, stream: int) -> None:
    with device.stream_of(stream):
        neutral(view).fill(value)


def _neutral_contiguous(view: View, stream: int) -> View:
    with device.stream_of(stream):
        return _cupy_view(neutral(view).copy(order="C"), "")


def _neutral_as_int32(view: View, stream: int) -> View:
    with device.stream_of(stream):
        return _cupy_view(neutral(view).astype(np.int32, order="C"), "")


def _neutral_clipped(view: View, stream: int) -> View:
    with device.stream_of(stream):
        return _cupy_view(_clip(neutral(view)), "")


def _neutral_copy(destination: View, source: View, stream: int) -> None:
    with device.stream_of(stream):
        neutral(destination)[...] = neutral(source)


def _interface_writable(view: View) -> bool:
    return not view.owner.__cuda_array_interface__["data"][1]


def _numba_empty(shape: Shape, dtype: str, like: View) -> View:
    cuda = sys.modules["numba"].cuda
    with cuda.gpus[like.device]:
        array = cuda.device_array(shape, numpy_dtype(dtype), stream=like.owner.stream)
    return _interface_view(array, "")._replace(device=like.device)


def _numba_bound(first: View, *others: View | None) -> int:
    """The stream that the first array is bound to, behind those of the others."""
    stream = int(first.owner.__cuda_array_interface__.get("stream") or 0)
    for view in others:
        if view is not None:
            _follow(stream, view)
    return stream


NUMBA = Framework(
    name="Numba device",
    view=_interface_view,
    empty=_numba_empty,
    fill=_neutral_fill,
    contiguous=_neutral_contiguous,
    as_int32=_neutral_as_int32,
    clipped=_neutral_clipped,
    copy=_neutral_copy,
    stream=_numba_bound,
    writable=_interface_writable,
    finish=_owner,
)
SIMULATED = replace(
    NUMPY,
    name="Numba simulator",
    view=lambda array, name: _numpy_view(array._ary, name),
    finish=lambda view: sys.modules["numba"].cuda.to_device(view.owner),
)


def _foreign_view(array: Array, name: str) -> View:
    if hasattr(array, "__dlpack__"):
        return _over_dlpack(array, name)
    view = _interface_view(array, name)
    _follow(_cupy_current(view), view)
    return view


FOREIGN = replace(
    CUPY,
    name="foreign CUDA",
    view=_foreign_view,
    fill=_neutral_fill,
    contiguous=_neutral_contiguous,
    as_int32=_neutral_as_int32,
    clipped=_neutral_clipped,
    copy=_neutral_copy,
    writable=_interface_writable,
    keep=_keep,
)
FOREIGN_HOST = replace(
    NUMPY,
    name="foreign CPU",
    view=lambda array, name: _numpy_view(np.from_dlpack(array), name),
)


def _choose_foreign(array: Array, name: str) -> Framework:
    if not hasattr(array, "__dlpack__"):
        return FOREIGN
    kind = int(array.__dlpack_device__()[0])
    if kind == 1:  # kDLCPU
        return FOREIGN_HOST
    if kind not in (2, 13):  # kDLCUDA, kDLCUDAManaged
        checks.unsupported_device(name, f"type {kind} of DLPack")
    return FOREIGN


# ---- which one --------------------------------------------------------------------------------

Chooser = Callable[[Array, str], Framework]
_CHOOSERS: dict[type, Chooser] = {}


def _chooser(kind: type) -> Chooser:
    """How to find the framework of arrays of a type: by its first base class that is known."""

    def no_memory(array: Array, name: str) -> NoReturn:
        checks.no_memory(name, f"{kind.__module__}.{kind.__qualname__}")

    def unknown(array: Array, name: str) -> NoReturn:
        checks.unknown_array(name, kind)

    known: dict[tuple[str, str], Chooser] = {
        ("numpy", "ndarray"): lambda array, name: NUMPY,
        ("cupy", "ndarray"): lambda array, name: CUPY,
        ("torch", "FakeTensor"): no_memory,
        ("torch", "Tensor"): _choose_torch,
        ("jax", "Tracer"): no_memory,
        ("jax", "ArrayImpl"): _choose_jax,
        ("jaxlib", "ArrayImpl"): _choose_jax,
        ("numba", "DeviceNDArrayBase"): lambda array, name: NUMBA,
        ("numba", "FakeCUDAArray"): lambda array, name: SIMULATED,
    }
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if (root, base.__name__) in known:
            return known[root, base.__name__]
    if hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__"):
        return _choose_foreign
    return unknown
