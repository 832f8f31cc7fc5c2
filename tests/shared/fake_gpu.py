"""A GPU made of host memory: arrays of every library, streams, devices, and kernels by pointer.

The classes carry the module names by which rawattn tells libraries apart. Memory is NumPy's, fresh
memory is poisoned, and the stand-ins of the kernels read and write through ``View.ptr`` and strides
alone, as the real ones do: a wrong pointer, stride, dtype, order or stream shows in the numbers.
The launchers are the real ones: a fake kernel gets bytes, and reads them as the ``struct Args`` of
its source has it. Long, since libraries, memory and kernels are one machine, whose parts mean
nothing alone.
"""

import ctypes
import dataclasses
import math
import struct
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from rawattn import api, arrays, call, checks, device, kernels_numba
from rawattn import launch as loaded
from rawattn.ops import arguments, tensor_maps
from rawattn.ops import forward as forward_op
from rawattn.ops.workspaces import COUNTS, accum_shape
from rawattn.problem import Problem, Selection
from rawattn.reference import dense, second
from rawattn.variants import block_keys, tile_widths
from tests.shared import structs

OTHERS = ("int32", "int64", "bool", "uint8")  # of offsets, of blocks and of their masks
DTYPES = {name: arrays.numpy_dtype(name) for name in (*checks.DTYPES, *OTHERS)}
STREAMS = {"cupy": 11, "torch": 22, "numba": 33}  # the current stream of each library


def poison(values: np.ndarray) -> np.ndarray:
    values.reshape(-1).view(np.uint8)[...] = 0xFF  # NaN in every floating dtype
    return values


def at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array over raw memory; strides in bytes."""
    if 0 in shape:
        return np.empty(shape, dtype)
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    buffer = (ctypes.c_char * span).from_address(address)
    return np.ndarray(shape, dtype, buffer, 0, strides)


def aligned(values: Any, dtype: Any = None) -> np.ndarray:
    """A copy whose memory begins where a GPU's allocator would begin."""
    values = np.asarray(values, dtype)
    raw = np.zeros(values.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    copy = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


# ---- CuPy -------------------------------------------------------------------------------------


class ndarray(np.ndarray):
    """cupy.ndarray: NumPy's, with a pointer and a device."""

    on_device = 0

    def __new__(cls, shape: Any, dtype: Any, pointer: Any = None, strides: Any = None) -> "ndarray":
        if pointer is None:
            fresh = poison(aligned(np.zeros(shape, dtype))).view(cls)
            fresh.on_device = GPU.current
            return fresh
        array = at(pointer.memory.ptr, shape, strides, dtype).view(cls)
        array.on_device, array.keeps = pointer.memory.device, pointer.memory.owner
        return array

    def __array_finalize__(self, parent: Any) -> None:
        self.on_device = getattr(parent, "on_device", 0)

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=self.on_device)

    def get(self) -> np.ndarray:
        return np.asarray(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.ctypes.data, False)}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.on_device)


ndarray.__module__ = "cupy"


class Stream:
    """cupy.cuda.Stream of a foreign handle: remembers the order of what happens."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    @classmethod
    def from_external(cls, handle: Any) -> "Stream":
        version, ptr = handle.__cuda_stream__()
        assert version == 0
        return cls(ptr)

    def wait_event(self, event: Any) -> None:
        GPU.log.append(("wait", self.ptr, event.recorded))

    def __enter__(self) -> "Stream":
        GPU.entered.append(self.ptr)
        return self

    def __exit__(self, *_: Any) -> None:
        GPU.entered.pop()


class Event:
    def __init__(self, disable_timing: bool = False) -> None:
        assert disable_timing

    def record(self, stream: Stream) -> None:
        self.recorded = stream.ptr
        self.done = False  # until a test says so


class Device:
    def __init__(self, device: int) -> None:
        self.id = device
        self.compute_capability = GPU.compute_capability
        self.attributes = {"MultiProcessorCount": GPU.num_sms}

    def __enter__(self) -> None:
        self.previous, GPU.current = GPU.current, self.id

    def __exit__(self, *_: Any) -> None:
        GPU.current = self.previous


class Machine:
    """Which device is current, which streams CuPy is on, and what has happened."""

    def __init__(self) -> None:
        self.current, self.count = 0, 2
        self.compute_capability, self.num_sms = "90", 132
        self.entered: list[int] = []
        self.capturing = False
        self.log: list[Any] = []
        self.devices: dict[int, int] = {}  # of a pointer, where it is not 0


GPU = Machine()


def unowned_memory(ptr: int, size: int, owner: Any, device: int) -> Any:
    assert size >= 0
    return types.SimpleNamespace(ptr=ptr, owner=owner, device=device)


def set_device(device: int) -> None:
    GPU.log.append(("device", device))
    GPU.current = device


CUPY = types.SimpleNamespace(
    ndarray=ndarray,
    from_dlpack=lambda array: cupy_array(array.values, array.device),
    cuda=types.SimpleNamespace(
        Stream=Stream,
        Event=Event,
        Device=Device,
        MemoryPointer=lambda memory, offset: types.SimpleNamespace(memory=memory),
        UnownedMemory=unowned_memory,
        get_current_stream=lambda device: types.SimpleNamespace(ptr=STREAMS["cupy"]),
        runtime=types.SimpleNamespace(
            getDeviceCount=lambda: GPU.count,
            getDevice=lambda: GPU.current,
            setDevice=set_device,
            streamIsCapturing=lambda stream: GPU.capturing,
            pointerGetAttributes=lambda ptr: types.SimpleNamespace(device=GPU.devices.get(ptr, 0)),
        ),
    ),
)


def cupy_array(values: np.ndarray, device: int = 0) -> ndarray:
    array = values.view(ndarray)
    array.on_device = device
    return array


# ---- torch ------------------------------------------------------------------------------------


class Dtype:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


TORCH = types.SimpleNamespace(
    **{name: Dtype(name) for name in DTYPES},
    contiguous_format="contiguous",
    _C=types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: STREAMS["torch"]),
)


class Tensor:
    """torch.Tensor on a CUDA device."""

    is_cuda, is_cpu, is_meta, requires_grad = True, False, False, False

    def __init__(self, values: np.ndarray, device: int = 0, negated: bool = False) -> None:
        self.values, self.device_index, self.negated = values, device, negated

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Dtype:
        return getattr(TORCH, self.values.dtype.name)

    def is_neg(self) -> bool:
        return self.negated

    def data_ptr(self) -> int:
        return self.values.ctypes.data

    def numel(self) -> int:
        return self.values.size

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.values.itemsize for s in self.values.strides)

    def get_device(self) -> int:
        return self.device_index if self.is_cuda else -1

    def detach(self) -> "Tensor":
        return self

    def new_empty(self, shape: tuple[int, ...], dtype: Dtype) -> "Tensor":
        fresh = poison(aligned(np.zeros(shape, DTYPES[dtype.name])))
        return Tensor(fresh, self.device_index)

    def clone(self, memory_format: str) -> "Tensor":
        assert memory_format == "contiguous"
        return Tensor(aligned(self.values), self.device_index)

    def int(self) -> "Tensor":
        return Tensor(self.values.astype(np.int32, order="K"), self.device_index)

    def clamp(self, low: float, high: float) -> "Tensor":
        return Tensor(self.values.clip(low, high), self.device_index)

    def __getitem__(self, where: slice) -> "Tensor":
        return Tensor(self.values[where], self.device_index)

    def reshape(self, shape: tuple[Any, ...]) -> "Tensor":
        return Tensor(self.values.reshape(shape), self.device_index)

    def contiguous(self) -> "Tensor":
        return Tensor(np.ascontiguousarray(self.values), self.device_index)

    def fill_(self, value: float) -> None:
        self.values.fill(value)

    def copy_(self, other: "Tensor") -> None:
        self.values[...] = other.values


Tensor.__module__ = "torch"


# ---- Numba, JAX, and libraries that nobody knows -----------------------------------------------


class DeviceNDArrayBase:
    """Numba's device array, with the interface alone."""

    def __init__(self, values: np.ndarray, device: int = 0, stream: int = STREAMS["numba"]) -> None:
        self.values, self.stream = values, stream
        self.extra: dict[str, Any] = {}
        GPU.devices[values.ctypes.data] = device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.values.shape,
            "strides": None if self.values.flags.c_contiguous else self.values.strides,
            "data": (self.values.ctypes.data, False),
            "typestr": self.values.dtype.str,
            "stream": self.stream or None,
            "version": 3,
        } | self.extra

    def __getitem__(self, where: slice) -> "DeviceNDArrayBase":
        return self._part(self.values[where])

    def reshape(self, shape: tuple[int, ...]) -> "DeviceNDArrayBase":
        return self._part(self.values.reshape(shape))

    def _part(self, values: np.ndarray) -> "DeviceNDArrayBase":
        device = GPU.devices[self.values.ctypes.data]
        return DeviceNDArrayBase(values, device, self.stream)


DeviceNDArrayBase.__module__ = "numba.cuda.cudadrv.devicearray"


class Context:
    """Numba's own idea of the current device, which does not follow that of the driver."""

    current = 0

    def __init__(self, device: int) -> None:
        self.device = device

    def __enter__(self) -> None:
        Context.current = self.device

    def __exit__(self, *_: Any) -> None:
        Context.current = 0


def device_array(shape: tuple[int, ...], dtype: Any, stream: int) -> DeviceNDArrayBase:
    assert Context.current == GPU.current, "allocated on another device"
    return DeviceNDArrayBase(poison(aligned(np.zeros(shape, dtype))), Context.current, stream)


NUMBA = types.SimpleNamespace(
    cuda=types.SimpleNamespace(gpus=[Context(0), Context(1)], device_array=device_array)
)


class ArrayImpl:
    """A JAX array on a CUDA device."""

    def __init__(self, values: np.ndarray, device: int = 0) -> None:
        self.values, self.device = values, device

    def devices(self) -> set[Any]:
        class Gpu:
            platform = "gpu"

        return {Gpu()}


ArrayImpl.__module__ = "jaxlib._jax"
JAX_DLPACK = types.SimpleNamespace(
    from_dlpack=lambda array: ArrayImpl(np.asarray(array), array.data.device_id)
)


class OverDlpack:
    """An array of a library that nobody knows, with DLPack."""

    def __init__(self, values: np.ndarray, device: int = 0, kind: int = 2) -> None:
        self.values, self.device, self.kind = values, device, kind

    def __dlpack__(self, **_: Any) -> Any:
        return self.values.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.kind, self.device)


class OverInterface:
    """An array of a library that nobody knows, with __cuda_array_interface__ alone."""

    def __init__(self, values: np.ndarray, device: int = 0) -> None:
        self.values, self.extra = values, {"stream": 44}
        GPU.devices[values.ctypes.data] = device

    __cuda_array_interface__ = DeviceNDArrayBase.__cuda_array_interface__
    stream = 44


MAKERS: dict[str, Callable[..., Any]] = {
    "cupy": cupy_array,
    "torch": Tensor,
    "numba": DeviceNDArrayBase,
    "jax": ArrayImpl,
    "dlpack": OverDlpack,
    "interface": OverInterface,
}
RESULTS = MAKERS | {"dlpack": ndarray, "interface": ndarray, "cupy": ndarray}  # kind of the result


def values_of(array: Any) -> np.ndarray:
    """What a fake array holds."""
    return np.asarray(getattr(array, "values", array))


# ---- kernels ----------------------------------------------------------------------------------


def memory(view: arrays.View) -> np.ndarray:
    """What a kernel sees of a view."""
    dtype = DTYPES[view.dtype]
    return at(view.ptr, view.shape, tuple(s * dtype.itemsize for s in view.strides), dtype)


def shape_of(name: str, problem: Problem, choice: Selection | None, head_dims: Any) -> Any:
    """Shape of a parameter of a kernel, from the sizes in its ``struct Args``."""
    p, (d, dv) = problem, head_dims
    queries, keys = (p.total_q, p.num_heads_q), (p.total_k, p.num_heads_kv)
    if name in ("q", "dq", "gq", "ddq", "tq"):
        return (*queries, d)
    if name in ("k", "dk", "gk", "ddk", "tk"):
        return (*keys, d)
    if name in ("v", "dv", "gv", "ddv", "tv"):
        return (*keys, dv)
    if name in ("out", "dout", "ddout", "tout"):
        return (*queries, dv)
    if name in ("lse", "dlse", "ddlse", "tlse", "delta", "ddelta"):
        return queries[::-1]
    if name == "turns":  # of them all, what stands in front
        return (COUNTS,)
    if name in ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens"):
        return (p.batch + 1,)
    if choice is None:  # the numbers of a workspace that are in use
        of_q = name in ("dq_accum", "gq_accum")
        return (math.prod(queries if of_q else keys) * (dv if name == "dv_accum" else d),)
    s, widths = choice, tile_widths(d, dv)
    items, lists = (s.num_heads_sel, p.total_q, s.width), s.lists(p)
    of_keys = (s.num_chunks(p), p.num_heads_kv, s.key_units(p))
    return {
        "dq_accum": (*queries, widths[0]),
        "dk_accum": (*keys, widths[0]),
        "dv_accum": (*keys, widths[1]),
        "blocks": items,
        "slots": items,
        "counts": items[:2],
        "block_counts": items[1::-1],
        "starts": of_keys,
        "lengths": of_keys,
        "cursor": (2 + lists,),
        "work": (s.segments(p), 4),
        **dict.fromkeys(("queries", "query_slots", "unsorted", "unsorted_slots"), math.prod(items)),
    }.get(name, (p.total_q, s.num_heads_sel, s.num_selected))


def scores(problem: Any, terms: Any, lse: np.ndarray) -> Any:
    """Where every sequence and head lies in q, in k and in lse, and its P and E."""
    q, k, _v, of_q, of_k, _of_v, offsets_q, offsets_k = terms
    window, s = (problem.window_left, problem.window_right), problem.softmax_scale
    for rows, keys in dense.sequences(offsets_q, offsets_k):
        seen = dense.allowed(rows.stop - rows.start, keys.stop - keys.start, window)
        for head in range(q.shape[1]):
            at_q, at_k = (rows, head), (keys, head // problem.group)
            level = np.where(lse[head, rows] == -np.inf, np.inf, lse[head, rows])[:, None]
            P = np.exp(np.where(seen, s * product(q[at_q], k[at_k].T), -np.inf) - level)
            E = 0.0 if of_q is None else s * product(of_q[at_q], k[at_k].T)
            E = E + (0.0 if of_k is None else s * product(q[at_q], of_k[at_k].T))
            yield at_q, at_k, (head, rows), P, E


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(float) @ b.astype(float)


def tensor_map(ptr: int, dtype: str, dims: Any, strides: Any, box: Any) -> bytes:
    """In the place of cuTensorMapEncodeTiled, whose rules are checked; tests/emulator reads it."""
    assert ptr % 16 == 0 and all(s > 0 and s % 16 == 0 and s < 2**40 for s in strides)
    assert all(0 < n <= 2**32 for n in dims) and all(0 < n <= 256 for n in box)
    return struct.pack("6Q3I", ptr, *dims, *strides, *box).ljust(structs.MAP_BYTES, b"\0")


def check_map(given: bytes, tensor: tuple[int, int, int], total_k: int) -> None:
    """A tensor map is of the tensor of its name, where there are keys at all."""
    ptr, _dim, heads, tokens, head_stride, token_stride = struct.unpack_from("6Q", given)
    if not total_k:
        return
    assert ptr == tensor[0]
    assert tokens == 1 or token_stride == 2 * tensor[1]
    assert heads == 1 or head_stride == 2 * tensor[2]


class Kernel:
    """What ``launch.kernel`` gives: a kernel that gets the bytes of its ``struct Args``."""

    def __init__(self, kernels: "Kernels", row: Any, problem: Problem, **options: Any) -> None:
        self.kernels, self.row, self.problem, self.options = kernels, row, problem, options

    def launch(self, grid: tuple[int, int, int], arguments: bytes, stream: int) -> None:
        stem, family = self.row.stem, self.row.family
        given = structs.decode(stem, arguments, family)
        assert min(grid) > 0 and max(grid[1:]) < 2**16
        p, choice = self.problem, None
        own = {field.name for field in dataclasses.fields(Problem)}
        p = dataclasses.replace(p, **{name: given[name] for name in own & {*given}})
        if "num_heads_sel" in given:
            names = ("num_heads_sel", "num_selected", "block_size")
            choice = Selection(
                *(given[name] for name in names),  # type: ignore[arg-type]
                own=bool(given["width"] - given["num_selected"]),
                chunk=given["chunk"],
            )
            asked = self.options.get("selection", choice)
            assert (asked.blocks(p), asked.width) == (choice.blocks(p), choice.width)
        head_dims = self.options.get("head_dims", (p.head_dim, p.head_dim_v))
        a = types.SimpleNamespace(**given)
        for name, kind in structs.fields_of(stem, family):
            if kind == "TensorMap":
                check_map(given[name], given[name.removesuffix("_map")], p.total_k)
            if kind != "Tensor" and not kind.endswith("*"):
                continue
            shape = shape_of(name, p, choice, head_dims)
            if stem.endswith("postprocess") and name in ("accum", "grad"):
                shape = (given["total_rows"], given["num_heads"], head_dims[0])
                if name == "accum" and stem == "sparse_postprocess":
                    shape = (*shape[:2], tile_widths(*head_dims)[0])
                elif name == "accum":
                    shape = (math.prod(shape),)
            elif stem == "sparse_backward_kv" and name == "work":
                parts = choice.block_size // block_keys(self.row, choice.block_size)
                shape = (grid[0] // parts if given["dk_accum"] else 0, 4)
            dtype = {"f": "float32", "i": "int32"}.get(kind[0]) or kind
            if kind == "void*":
                dtype = "uint8" if given["source"] == MASK else "int32"
            setattr(a, name, self._array(given[name], shape, p.dtype if dtype == kind else dtype))
        self._check_options(a)
        self.kernels.launch(self.row, p, choice, a, stream)

    @staticmethod
    def _array(given: Any, shape: Any, dtype: str) -> np.ndarray | None:
        kind, shape = DTYPES[dtype], (shape,) if isinstance(shape, int) else shape
        if isinstance(given, tuple):
            pointer, *strides = given
            assert not [x for x in (pointer, *(s * kind.itemsize for s in strides)) if x % 16]
            strides = (*(s * kind.itemsize for s in strides), kind.itemsize)
        else:
            pointer, strides = given, np.empty(0, kind).itemsize
            strides = tuple(kind.itemsize * math.prod(shape[n + 1 :]) for n in range(len(shape)))
        return at(pointer, shape, strides, kind) if pointer else None

    def _check_options(self, a: Any) -> None:
        """What is a constant of the kernel has to agree with what is given to it."""
        for prefix in ("t", "dd"):
            if hasattr(a, f"{prefix}q"):
                there = tuple(getattr(a, prefix + name) is not None for name in "qkv")
                assert self.options["direction"] == there
        scaled = getattr(a, "block_scale", None) is not None
        assert self.options.get("scaled", False) == scaled
        accums = ("dk_accum",) if self.row.stem == "backward_q" else ("dq_accum", "gq_accum")
        if self.row.stem.endswith(("backward_kv", "backward_q")):
            there = any(getattr(a, name, None) is not None for name in accums)
            atomic = self.options.get("atomic", False)
            if self.row.in_order:
                asked = accum_shape(self.row, self.problem, "dq", in_order=not atomic)
                assert there and (self.kernels.zeroed,) == asked
                assert atomic == (a.turns is None)
                assert atomic or a.turns.ctypes.data == a.dq_accum.ctypes.data + a.dq_accum.nbytes
            else:
                assert atomic == there


INDICES, MASK, PATTERN = range(3)


class Kernels:
    """Stand-ins of the kernels. They keep the row, stream, Problem and views of every launch.

    The method of a kernel gets the Problem, the Selection of a sparse one, and ``a``: the fields of
    its ``struct Args`` by name, arrays as NumPy sees them.
    """

    def __init__(self) -> None:
        self.launched: list[tuple[str, int]] = []
        self.problems: list[Any] = []
        self.views: list[tuple[Any, ...]] = []
        self.selections: list[Any] = []

    def kernel(self, row: Any, problem: Problem, **options: Any) -> Kernel:
        """In the place of ``launch.kernel``."""
        assert GPU.current == max(problem.device, 0), "launched with another device current"
        return Kernel(self, row, problem, **options)

    def twin(self, row: Any, problem: Problem, *choice_and_args: Any, stream: int) -> None:
        """In the place of the launch of a Numba twin."""
        assert GPU.current == max(problem.device, 0), "launched with another device current"
        *choice, args = choice_and_args
        self.note(args)
        a = types.SimpleNamespace(
            **{k: memory(x) if isinstance(x, arrays.View) else x for k, x in args._asdict().items()}
        )
        self.launch(row, problem, choice[0] if choice else None, a, stream)

    def note(self, args: Any) -> None:
        """Keep the arrays of an Args, which have to be as kernels take them."""
        views = tuple(x for x in args if x is None or isinstance(x, arrays.View))
        for name, view in args._asdict().items():
            if not isinstance(view, arrays.View) or 0 in view.shape:
                continue
            tensor = len(view.shape) == 3 and view.dtype not in OTHERS and "_" not in name
            assert arrays.is_aligned(view) if tensor else arrays.is_dense(view), (name, view)
            assert view.dtype != "int64"
        assert len({view.device for view in views if view is not None}) == 1
        self.views.append(views)

    def launch(self, row: Any, problem: Problem, choice: Any, a: Any, stream: int) -> None:
        self.launched.append((row.name, stream))
        self.problems.append(problem)
        if choice is not None:
            self.selections.append(choice)
        run = getattr(self, row.stem)
        run(problem, a) if choice is None else run(problem, choice, a)

    @staticmethod
    def _mask(problem: Any) -> dict[str, Any]:
        window = (problem.window_left, problem.window_right)
        return {"window": window, "softmax_scale": problem.softmax_scale}

    def forward(self, problem: Any, a: Any) -> None:
        inputs = (a.q, a.k, a.v, a.cu_seqlens_q, a.cu_seqlens_k)
        a.out[...], a.lse[...] = dense.forward(*inputs, **self._mask(problem))

    def backward_preprocess(self, problem: Any, a: Any) -> None:
        a.delta[...] = (a.out.astype(float) * a.dout.astype(float)).sum(-1).T
        a.delta -= 0 if a.dlse is None else a.dlse
        if a.dq_accum is not None:
            assert a.dq_accum_size >= a.dq_accum.size
            a.dq_accum[...] = 0
            self.zeroed = a.dq_accum_size

    def _gradients(self, problem: Any, a: Any) -> Any:
        # with an out of zeros, D is -dlse: that makes it the delta that was handed over
        inputs = (a.dout, a.q, a.k, a.v, np.zeros(a.dout.shape), a.lse)
        offsets = (a.cu_seqlens_q, a.cu_seqlens_k)
        return dense.backward(*inputs, *offsets, dlse=-a.delta, **self._mask(problem))

    def backward_kv(self, problem: Any, a: Any) -> None:
        dq, a.dk[...], a.dv[...] = self._gradients(problem, a)
        if a.dq_accum is not None:
            a.dq_accum[: dq.size] += dq.ravel() / problem.softmax_scale

    def backward_q(self, problem: Any, a: Any) -> None:
        a.dq[...], dk, dv = self._gradients(problem, a)
        assert (a.dk_accum is None) == (a.dv_accum is None)
        if a.dk_accum is not None:
            a.dk_accum[: dk.size] += dk.ravel() / problem.softmax_scale
            a.dv_accum[: dv.size] += dv.ravel()

    def backward_postprocess(self, problem: Any, a: Any) -> None:
        assert (a.batch, *a.grad.shape[:2]) == (problem.batch, a.total_rows, a.num_heads)
        a.grad[...] = a.accum[: a.grad.size].reshape(a.grad.shape) * a.scale

    def jvp(self, problem: Any, a: Any) -> None:
        offsets = (a.cu_seqlens_q, a.cu_seqlens_k)
        exact = dense.forward(a.q, a.k, a.v, *offsets, **self._mask(problem))
        a.out[...], a.lse[...] = exact
        terms = (a.q, a.k, a.v, a.tq, a.tk, a.tv, *offsets)
        a.tout[...], a.tlse[...] = self._tangents(problem, terms, *exact)

    def _tangents(self, problem: Any, terms: Any, out: np.ndarray, lse: np.ndarray) -> Any:
        v, of_v = terms[2], terms[5]
        tout, tlse = np.zeros(out.shape), np.zeros(lse.shape)
        for at_q, at_k, at_lse, P, E in scores(problem, terms, lse):
            tlse[at_lse] = (P * E).sum(-1)
            tout[at_q] = product(P * E, v[at_k]) - tlse[at_lse][:, None] * out[at_q].astype(float)
            tout[at_q] += 0.0 if of_v is None else product(P, of_v[at_k])
        return tout, tlse

    @staticmethod
    def _terms(a: Any) -> Any:
        return (a.q, a.k, a.v, a.ddq, a.ddk, a.ddv, a.cu_seqlens_q, a.cu_seqlens_k)

    def double_backward_out(self, problem: Any, a: Any) -> None:
        if a.gq_accum is not None:
            assert a.gq_accum_size == a.gq_accum.size
            a.gq_accum[...] = 0
        tout, a.ddlse[...] = self._tangents(problem, self._terms(a), a.out, a.lse)
        a.ddout[...] = tout
        self._row_terms(a, tout)

    @staticmethod
    def _row_terms(a: Any, tout: np.ndarray) -> None:
        dead = np.where(a.lse == -np.inf, np.nan, 0)  # nobody may read them there
        a.delta[...] = (a.out.astype(float) * a.dout.astype(float)).sum(-1).T + dead
        a.delta -= 0 if a.dlse is None else a.dlse
        a.ddelta[...] = (tout * a.dout.astype(float)).sum(-1).T + dead

    def _second(self, problem: Any, a: Any) -> Any:
        """gq / softmax_scale, gk and gv, with the rows' sums as they were handed over."""
        s = problem.softmax_scale
        gq, gk, gv = (np.zeros(x.shape) for x in (a.q, a.k, a.v))
        for at_q, at_k, at_lse, P, E in scores(problem, self._terms(a), a.lse):
            alive = P > 0
            Z = np.where(alive, product(a.dout[at_q], a.v[at_k].T) - a.delta[at_lse][:, None], 0)
            T = 0.0 if a.ddv is None else product(a.dout[at_q], a.ddv[at_k].T)
            T = np.where(alive, T - a.ddelta[at_lse][:, None], 0)
            tP, dS = P * (E - a.ddlse[at_lse][:, None]), P * Z
            tdS = tP * Z + P * T
            gv[at_k] += product(tP.T, a.dout[at_q])
            gk[at_k] += s * product(tdS.T, a.q[at_q])
            gk[at_k] += 0.0 if a.ddq is None else s * product(dS.T, a.ddq[at_q])
            gq[at_q] = product(tdS, a.k[at_k])
            gq[at_q] += 0.0 if a.ddk is None else product(dS, a.ddk[at_k])
        return gq, gk, gv

    def double_backward_kv(self, problem: Any, a: Any) -> None:
        gq, a.gk[...], a.gv[...] = self._second(problem, a)
        if a.gq_accum is not None:
            a.gq_accum[: gq.size] += gq.ravel()

    def double_backward_q(self, problem: Any, a: Any) -> None:
        a.gq[...] = self._second(problem, a)[0] * problem.softmax_scale


def install(monkeypatch: Any, kind: type[Any] = Kernels) -> Any:
    """Put the fakes in the place of the libraries and the kernels, for one test."""
    vars(GPU).update(vars(Machine()))
    for cached in (
        device.cupy,
        arrays._torch_dtype,
        arrays._torch_name,
        device.arch_of,
        device.sms_of,
        device._is_only_one,
    ):
        cached.cache_clear()
    call.pose.cache_clear()
    api._pose_preprocess.cache_clear()
    monkeypatch.setattr(device, "cupy", lambda: CUPY)
    monkeypatch.setattr(arrays, "_torch", lambda: TORCH)
    for module in (dense, second):
        monkeypatch.setattr(module, "namespace", lambda array: np)
    monkeypatch.setitem(arrays.sys.modules, "numba", NUMBA)
    monkeypatch.setitem(arrays.sys.modules, "jax.dlpack", JAX_DLPACK)
    kernels, pack, launch = kind(), arguments.Layout.pack, forward_op._launch_sm90

    def noted(layout: Any, args: Any, *sizes: Any, **beside: Any) -> bytes:
        if layout is not forward_op.LAYOUT_SM90:  # of which they are noted before they are packed
            kernels.note(args)
        return pack(layout, args, *sizes, **beside)

    def noted_hopper(row: Any, problem: Problem, args: Any, *options: Any) -> None:
        kernels.note(args)
        launch(row, problem, args, *options)

    monkeypatch.setattr(arguments.Layout, "pack", noted)
    monkeypatch.setattr(forward_op, "_launch_sm90", noted_hopper)
    monkeypatch.setattr(loaded, "kernel", kernels.kernel)
    monkeypatch.setattr(tensor_maps, "encode", tensor_map)
    forward_op._packed.cache_clear()
    for stem in structs.STEMS:
        twin = types.SimpleNamespace(launch=kernels.twin)
        monkeypatch.setattr(kernels_numba, stem, twin, raising=False)
    return kernels


def remove() -> None:
    """Forget what was cached of the fakes."""
    for cached in (arrays._torch_dtype, arrays._torch_name, device.arch_of, device.sms_of):
        cached.cache_clear()
    device._is_only_one.cache_clear()
    call.pose.cache_clear()
    api._pose_preprocess.cache_clear()
