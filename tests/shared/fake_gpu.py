"""A GPU made of host memory: arrays of every library, streams, devices, and kernels by pointer.

The classes carry the module names by which rawattn tells libraries apart. Memory is NumPy's, fresh
memory is poisoned, and the stand-ins of the kernels read and write through ``View.ptr`` and strides
alone, as the real ones do: a wrong pointer, stride, dtype, order or stream shows in the numbers.
Long, since libraries, memory and kernels are one machine, whose parts mean nothing alone.
"""

import ctypes
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from rawattn import api, arrays, call, checks, device, passes
from rawattn.reference import dense, second

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
        self.attributes = {"MultiProcessorCount": 132}

    def __enter__(self) -> None:
        self.previous, GPU.current = GPU.current, self.id

    def __exit__(self, *_: Any) -> None:
        GPU.current = self.previous


class Machine:
    """Which device is current, which streams CuPy is on, and what has happened."""

    def __init__(self) -> None:
        self.current = 0
        self.compute_capability = "90"
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
        return self.device_index

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


class Kernels:
    """Stand-ins of ops/*.launch. They keep the row, stream, Problem and views of every launch."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, int]] = []
        self.problems: list[Any] = []
        self.views: list[tuple[Any, ...]] = []

    def _note(self, variant: Any, problem: Any, views: Any, stream: int) -> Any:
        assert GPU.current == max(problem.device, 0), "launched with another device current"
        for view in filter(None, views):
            assert view.device == problem.device
            if len(view.shape) == 3 and view.dtype not in OTHERS:
                assert arrays.is_aligned(view) or 0 in view.shape, view
            else:
                assert arrays.is_dense(view) or 0 in view.shape, view
            assert view.dtype != "int64"
        self.launched.append((variant.name, stream))
        self.problems.append(problem)
        self.views.append(views)
        return [None if view is None else memory(view) for view in views]

    @staticmethod
    def _mask(problem: Any) -> dict[str, Any]:
        window = (problem.window_left, problem.window_right)
        return {"window": window, "softmax_scale": problem.softmax_scale}

    def forward(self, variant: Any, problem: Any, *views: Any, stream: int) -> None:
        *inputs, out, lse = self._note(variant, problem, views, stream)
        out[...], lse[...] = dense.forward(*inputs, **self._mask(problem))

    def backward_preprocess(self, variant: Any, problem: Any, *views: Any, stream: int) -> None:
        out, dout, dlse, delta, dq_accum = self._note(variant, problem, views, stream)
        delta[...] = (out.astype(float) * dout.astype(float)).sum(-1).T
        delta -= 0 if dlse is None else dlse
        if dq_accum is not None:
            dq_accum[...] = 0

    def _gradients(self, problem: Any, terms: Any) -> Any:
        q, k, v, dout, lse, delta, offsets_q, offsets_k = terms
        # with an out of zeros, D is -dlse: that makes it the delta that was handed over
        out = np.zeros(dout.shape)
        return dense.backward(
            dout, q, k, v, out, lse, offsets_q, offsets_k, dlse=-delta, **self._mask(problem)
        )

    def backward_kv(self, variant: Any, problem: Any, *views: Any, stream: int) -> None:
        *terms, dq_accum, dk, dv = self._note(variant, problem, views, stream)
        dq, dk[...], dv[...] = self._gradients(problem, terms)
        if dq_accum is not None:
            dq_accum[: dq.size] += dq.ravel() / problem.softmax_scale

    def backward_q(self, variant: Any, problem: Any, *views: Any, stream: int) -> None:
        *terms, dq, dk_accum, dv_accum = self._note(variant, problem, views, stream)
        dq[...], dk, dv = self._gradients(problem, terms)
        if dk_accum is not None:
            dk_accum[: dk.size] += dk.ravel() / problem.softmax_scale
            dv_accum[: dv.size] += dv.ravel()

    def backward_postprocess(
        self, variant: Any, problem: Any, *views: Any, scale: float, stream: int
    ) -> None:
        accum, _offsets, grad = self._note(variant, problem, views, stream)
        grad[...] = accum[: grad.size].reshape(grad.shape) * scale

    def jvp(self, variant: Any, problem: Any, *views: Any, stream: int) -> None:
        *terms, out, tout, lse, tlse, offsets_q, offsets_k = self._note(
            variant, problem, views, stream
        )
        terms += [offsets_q, offsets_k]
        exact = dense.forward(*terms[:3], offsets_q, offsets_k, **self._mask(problem))
        out[...], lse[...] = exact
        tout[...], tlse[...] = self._tangents(problem, terms, *exact)

    def _tangents(self, problem: Any, terms: Any, out: np.ndarray, lse: np.ndarray) -> Any:
        v, of_v = terms[2], terms[5]
        tout, tlse = np.zeros(out.shape), np.zeros(lse.shape)
        for at_q, at_k, at_lse, P, E in scores(problem, terms, lse):
            tlse[at_lse] = (P * E).sum(-1)
            tout[at_q] = product(P * E, v[at_k]) - tlse[at_lse][:, None] * out[at_q].astype(float)
            tout[at_q] += 0.0 if of_v is None else product(P, of_v[at_k])
        return tout, tlse

    def double_backward_out(self, variant: Any, problem: Any, *views: Any, stream: int) -> None:
        given = self._note(variant, problem, views, stream)
        out, dout, lse, dlse, ddout, ddlse, delta, ddelta, gq_accum, *offsets = given[6:]
        if gq_accum is not None:
            gq_accum[...] = 0
        tout, tlse = self._tangents(problem, [*given[:6], *offsets], out, lse)
        ddout[...], ddlse[...] = tout, tlse
        dead = np.where(lse == -np.inf, np.nan, 0)  # nobody may read them there
        delta[...] = (out.astype(float) * dout.astype(float)).sum(-1).T + dead
        delta -= 0 if dlse is None else dlse
        ddelta[...] = (tout * dout.astype(float)).sum(-1).T + dead

    def _second(self, problem: Any, terms: Any, sums: Any) -> Any:
        """gq / softmax_scale, gk and gv, with the rows' sums as they were handed over."""
        q, k, v, of_q, of_k, of_v, *_ = terms
        dout, lse, delta, ddlse, ddelta = sums
        gq, gk, gv = (np.zeros(x.shape) for x in (q, k, v))
        for at_q, at_k, at_lse, P, E in scores(problem, terms, lse):
            alive = P > 0
            Z = np.where(alive, product(dout[at_q], v[at_k].T) - delta[at_lse][:, None], 0)
            T = 0.0 if of_v is None else product(dout[at_q], of_v[at_k].T)
            T = np.where(alive, T - ddelta[at_lse][:, None], 0)
            tP, dS = P * (E - ddlse[at_lse][:, None]), P * Z
            tdS = tP * Z + P * T
            gv[at_k] += product(tP.T, dout[at_q])
            gk[at_k] += problem.softmax_scale * product(tdS.T, q[at_q])
            gk[at_k] += 0.0 if of_q is None else problem.softmax_scale * product(dS.T, of_q[at_q])
            gq[at_q] = product(tdS, k[at_k]) + (0.0 if of_k is None else product(dS, of_k[at_k]))
        return gq, gk, gv

    def double_backward_kv(self, variant: Any, problem: Any, *views: Any, stream: int) -> None:
        given = self._note(variant, problem, views, stream)
        gq_accum, gk, gv, *offsets = given[11:]
        gq, gk[...], gv[...] = self._second(problem, [*given[:6], *offsets], given[6:11])
        if gq_accum is not None:
            gq_accum[: gq.size] += gq.ravel()

    def double_backward_q(self, variant: Any, problem: Any, *views: Any, stream: int) -> None:
        given = self._note(variant, problem, views, stream)
        target, *offsets = given[11:]
        gq, _, _ = self._second(problem, [*given[:6], *offsets], given[6:11])
        target[...] = gq * problem.softmax_scale


def install(monkeypatch: Any, kind: type[Any] = Kernels) -> Any:
    """Put the fakes in the place of the libraries and the kernels, for one test."""
    vars(GPU).update(vars(Machine()))
    for cached in (device.cupy, arrays._torch_dtype, arrays._torch_name, device.arch_of):
        cached.cache_clear()
    call.pose.cache_clear()
    api._pose_preprocess.cache_clear()
    monkeypatch.setattr(device, "cupy", lambda: CUPY)
    monkeypatch.setattr(arrays, "_torch", lambda: TORCH)
    for module in (dense, second):
        monkeypatch.setattr(module, "namespace", lambda array: np)
    monkeypatch.setitem(arrays.sys.modules, "numba", NUMBA)
    monkeypatch.setitem(arrays.sys.modules, "jax.dlpack", JAX_DLPACK)
    kernels = kind()
    for name, op in vars(passes).items():
        if name.endswith("_op"):
            stem = op.__name__.rpartition(".")[2]
            monkeypatch.setattr(op, "launch", getattr(kernels, stem))
    return kernels


def remove() -> None:
    """Forget what was cached of the fakes."""
    for cached in (arrays._torch_dtype, arrays._torch_name, device.arch_of):
        cached.cache_clear()
    call.pose.cache_clear()
    api._pose_preprocess.cache_clear()
