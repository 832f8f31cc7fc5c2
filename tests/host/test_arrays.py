"""rawattn.arrays: every kind of array to a View and back, on fakes of a GPU and on what is here.

Long by the number of libraries.
"""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rawattn import arrays, device
from rawattn.arrays import View, framework_of
from rawattn.call import Call
from tests.shared import fake_gpu
from tests.shared.fake_gpu import DTYPES, GPU, MAKERS, STREAMS

KINDS = tuple(MAKERS)
PROBLEM: Any = None  # that nothing here reads
FLOATS = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_gpu.Kernels]:
    yield fake_gpu.install(monkeypatch)
    fake_gpu.remove()


def values(dtype: str = "float32", shape: tuple[int, ...] = (6, 2, 16)) -> np.ndarray:
    return fake_gpu.aligned(np.arange(np.prod(shape)).reshape(shape), DTYPES[dtype])


# ---- views of fakes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (*FLOATS, "int32", "int64"))
@pytest.mark.parametrize("kind", KINDS)
def test_view_of_a_device_array(gpu: fake_gpu.Kernels, kind: str, dtype: str) -> None:
    if dtype == "bfloat16" and kind in ("numba", "interface"):
        pytest.skip("the interface has no bfloat16")
    array = MAKERS[kind](values(dtype)[1::2, :, ::2], 1)
    view = framework_of(array, "q").view(array, "q")
    assert isinstance(view, View)
    assert view[1:5] == ((3, 2, 8), (64, 16, 2), dtype, 1)
    np.testing.assert_array_equal(fake_gpu.memory(view), fake_gpu.values_of(array))


@pytest.mark.parametrize("shape", [(5,), (3, 4), (6, 2, 16), (0, 2, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_empty_belongs_to_the_library_and_the_device(
    gpu: fake_gpu.Kernels, kind: str, shape: tuple[int, ...]
) -> None:
    array = MAKERS[kind](values(), 1)
    framework = framework_of(array, "q")
    previous = device.enter(1)
    view = framework.empty(shape, "float32", framework.view(array, "q"))
    device.leave(previous)
    assert view[1:5] == (shape, arrays.row_major(shape), "float32", 1)
    assert arrays.is_dense(view)
    result = framework.finish(view)
    assert type(result) is fake_gpu.RESULTS[kind]
    assert fake_gpu.values_of(result).shape == shape


@pytest.mark.parametrize("kind", KINDS)
def test_work_of_a_framework(gpu: fake_gpu.Kernels, kind: str) -> None:
    array = MAKERS[kind](values()[:, :, ::2])
    framework = framework_of(array, "q")
    view = framework.view(array, "q")
    copy = framework.contiguous(view, 7)
    assert arrays.is_dense(copy)
    np.testing.assert_array_equal(fake_gpu.memory(copy), fake_gpu.values_of(array))
    framework.fill(copy, 3.0, 7)
    assert (fake_gpu.memory(copy) == 3).all()
    framework.copy(view, copy, 7)
    assert (fake_gpu.values_of(array) == 3).all()
    assert GPU.entered == []


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_become_dense_int32(gpu: fake_gpu.Kernels, kind: str, dtype: str) -> None:
    array = MAKERS[kind](values(dtype, (8,))[::2])
    framework = framework_of(array, "cu_seqlens")
    view = framework.view(array, "cu_seqlens")
    ready = Call(framework, PROBLEM, None, view, 7).offsets(view)
    assert (ready.dtype, ready.strides) == ("int32", (1,))
    assert fake_gpu.memory(ready).tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_ready_inputs_are_not_copied(gpu: fake_gpu.Kernels, kind: str) -> None:
    array = MAKERS[kind](values("float16")[:, 1:])
    framework = framework_of(array, "q")
    view = framework.view(array, "q")
    call = Call(framework, PROBLEM, None, view, 7)
    assert call.rows(view) is view
    offsets = MAKERS[kind](values("int32", (4,)))
    view = framework.view(offsets, "cu_seqlens")
    assert call.offsets(view) is call.dense(view) is view
    assert call.rows(None) is call.dense(None) is None


# ---- streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("cupy", "cupy"), ("torch", "torch"), ("jax", "cupy"), ("dlpack", "cupy"), ("numba", "numba")],
)
def test_work_goes_on_the_current_stream(gpu: fake_gpu.Kernels, kind: str, expected: str) -> None:
    array = MAKERS[kind](values())
    framework = framework_of(array, "q")
    view = framework.view(array, "q")
    assert framework.stream(view, view) == STREAMS[expected]
    assert GPU.log == []


def test_numba_arrays_of_another_stream_are_waited_for_by_an_event(gpu: fake_gpu.Kernels) -> None:
    q, k, v = (fake_gpu.DeviceNDArrayBase(values(), 0, stream) for stream in (5, 6, 0))
    views = [arrays.NUMBA.view(array, "q") for array in (q, k, v)]
    assert arrays.NUMBA.stream(*views) == 5
    assert GPU.log == [("wait", 5, 6)]


def test_a_foreign_producer_is_waited_for_by_an_event(gpu: fake_gpu.Kernels) -> None:
    array = fake_gpu.OverInterface(values())
    arrays.FOREIGN.view(array, "q")
    assert GPU.log == [("wait", STREAMS["cupy"], 44)]


def test_numba_work_goes_on_the_given_stream(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def neutral(view: View) -> np.ndarray:
        seen.extend(GPU.entered)
        return view.owner.values

    monkeypatch.setattr(arrays, "neutral", neutral)
    view = arrays.NUMBA.view(fake_gpu.DeviceNDArrayBase(values()), "q")
    arrays.NUMBA.fill(view, 0.0, 77)
    assert seen == [77]


def test_on_stream_does_nothing_on_the_cpu() -> None:
    with device.on_stream(0, -1) as nothing:
        assert nothing is None


# ---- devices ----------------------------------------------------------------------------------


def test_the_device_changes_only_when_it_has_to(gpu: fake_gpu.Kernels) -> None:
    for ordinal in (0, -1):
        device.leave(device.enter(ordinal))
    assert GPU.log == []
    device.leave(device.enter(1))
    assert GPU.log == [("device", 1), ("device", 0)]


def test_a_device_that_is_the_only_one_is_not_asked_for(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPU.count = 1
    monkeypatch.delattr(fake_gpu.CUPY.cuda.runtime, "getDevice")
    device.leave(device.enter(0))
    assert GPU.log == []


@pytest.mark.parametrize(("capability", "arch"), [("80", 80), ("90", 90), ("120", 120)])
def test_arch(gpu: fake_gpu.Kernels, capability: str, arch: int) -> None:
    GPU.compute_capability = capability
    assert device.arch_of(0) == arch
    assert device.arch_of(-1) == 0


# ---- layouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "offset", "strides", "expected"),
    [
        ("float16", 0, (32, 16, 1), True),
        ("float16", 0, (32, 16, 2), False),  # last stride
        ("float16", 0, (0, 0, 0), False),  # broadcast, as the gradient of a sum
        ("float16", 8, (32, 16, 1), True),
        ("bfloat16", 1, (32, 16, 1), False),  # pointer
        ("bfloat16", 0, (36, 16, 1), False),  # token stride
        ("bfloat16", 0, (32, 12, 1), False),  # head stride
        ("bfloat16", 0, (-32, 16, 1), True),
        ("float32", 1, (33, 17, 1), True),  # only the kernels for 16 bits load 16 bytes
        ("float64", 0, (33, 17, 1), True),
        ("float64", 0, (33, 17, 2), False),
    ],
)
def test_alignment(dtype: str, offset: int, strides: tuple[int, ...], expected: bool) -> None:
    ptr = 4096 + offset * arrays.ITEMSIZE[dtype]
    view = View(ptr, (2, 2, 16), strides, dtype, 0, None)
    assert arrays.is_aligned(view) is expected


def test_row_major_agrees_with_numpy() -> None:
    for shape in [(), (5,), (3, 4), (3, 4, 5), (1, 4, 5), (3, 1, 5)]:
        strides = np.empty(shape, np.int8).strides
        assert arrays.row_major(shape) == strides


def test_neutral_follows_strides_without_a_copy(gpu: fake_gpu.Kernels) -> None:
    source = values("float16")[::2, 1:, :]
    view = arrays.TORCH.view(fake_gpu.Tensor(source), "q")
    neutral = arrays.neutral(view)
    assert type(neutral) is fake_gpu.ndarray
    np.testing.assert_array_equal(neutral, source)
    neutral[...] = 1
    assert (source == 1).all()


def test_neutral_of_no_elements(gpu: fake_gpu.Kernels) -> None:
    view = arrays.TORCH.view(fake_gpu.Tensor(values("float16")[:0, :, ::2]), "q")
    assert arrays.neutral(view).shape == (0, 2, 8)


# ---- which library ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cupy", arrays.CUPY),
        ("torch", arrays.TORCH),
        ("numba", arrays.NUMBA),
        ("jax", arrays.JAX),
        ("dlpack", arrays.FOREIGN),
        ("interface", arrays.FOREIGN),
    ],
)
def test_framework_of(gpu: fake_gpu.Kernels, kind: str, expected: arrays.Framework) -> None:
    derived = type("Derived", (MAKERS[kind] if kind != "cupy" else fake_gpu.ndarray,), {})
    make = derived if kind != "cupy" else lambda array: array.view(derived)
    for _again in range(2):
        assert framework_of(MAKERS[kind](values()), "q") is expected
        assert framework_of(make(values()), "q") is expected


@pytest.mark.parametrize("given", [None, 3, [1, 2], np.float32(3), "q", object()])
def test_what_is_no_array(given: object) -> None:
    with pytest.raises(TypeError, match=r"k is a .*, which is no array: expected one of CuPy"):
        framework_of(given, "k")


@pytest.mark.parametrize(
    ("base", "module"),
    [("Tracer", "jax._src.core"), ("FakeTensor", "torch._subclasses.fake_tensor")],
)
def test_what_has_no_memory(base: str, module: str) -> None:
    traced = type("Traced", (type(base, (), {"__module__": module}),), {})
    with pytest.raises(TypeError, match=r"q is a .*Traced, which has no memory"):
        framework_of(traced(), "q")


def test_a_wrapper_tensor_has_no_memory(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = fake_gpu.Tensor(values())
    monkeypatch.setattr(tensor, "data_ptr", lambda: 0, raising=False)
    with pytest.raises(TypeError, match="q is a torch Tensor, which has no memory"):
        arrays.TORCH.view(tensor, "q")


def test_negated_tensor(gpu: fake_gpu.Kernels) -> None:
    with pytest.raises(TypeError, match=r"lazily negated.*q\.resolve_neg"):
        arrays.TORCH.view(fake_gpu.Tensor(values(), negated=True), "q")


def test_jax_on_another_platform() -> None:
    class Tpu(fake_gpu.ArrayImpl):
        def devices(self) -> set[object]:
            return {type("Tpu", (), {"platform": "tpu"})()}

    with pytest.raises(TypeError, match="q is on device tpu"):
        framework_of(Tpu(values()), "q")


def test_foreign_devices() -> None:
    host = fake_gpu.OverDlpack(values(), kind=1)
    assert framework_of(host, "q") is arrays.FOREIGN_HOST
    assert framework_of(fake_gpu.OverDlpack(values(), kind=13), "q") is arrays.FOREIGN
    with pytest.raises(TypeError, match="q is on device type 10 of DLPack"):
        framework_of(fake_gpu.OverDlpack(values(), kind=10), "q")  # ROCm
    view = arrays.FOREIGN_HOST.view(host, "q")
    assert np.shares_memory(view.owner, host.values)


# ---- the interface ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numba", "interface"])
def test_interface_with_a_mask(gpu: fake_gpu.Kernels, kind: str) -> None:
    array = MAKERS[kind](values())
    array.extra["mask"] = array
    with pytest.raises(TypeError, match="q has an element mask"):
        framework_of(array, "q").view(array, "q")


@pytest.mark.parametrize("kind", ["numba", "interface"])
def test_interface_keeps_byte_order_and_void(gpu: fake_gpu.Kernels, kind: str) -> None:
    for typestr, expected in [(">f4", ">f4"), ("<V2", "void16"), ("<f2", "float16")]:
        array = MAKERS[kind](values())
        array.extra["typestr"] = typestr
        assert framework_of(array, "q").view(array, "q").dtype == expected


@pytest.mark.parametrize("kind", ["numba", "interface"])
def test_interface_that_is_read_only(gpu: fake_gpu.Kernels, kind: str) -> None:
    array = MAKERS[kind](values())
    framework = framework_of(array, "out")
    assert framework.writable(framework.view(array, "out"))
    array.extra["data"] = (array.values.ctypes.data, True)
    assert not framework.writable(framework.view(array, "out"))


def test_uneven_strides() -> None:
    rows = np.zeros((4, 33), np.uint8)[:, :32].view(np.float16).reshape(4, 2, 8)
    uneven = np.lib.stride_tricks.as_strided(rows, (3, 2, 8), (33, 16, 2))
    with pytest.raises(ValueError, match=r"q has strides of \(33, 16, 2\) bytes.*2;"):
        arrays.NUMPY.view(uneven, "q")


# ---- NumPy and the others in host memory ------------------------------------------------------


def test_numpy_view() -> None:
    array = np.zeros((6, 4, 8), np.float32)[::2, ::-1]
    view = arrays.NUMPY.view(array, "q")
    assert view == (array.ctypes.data, (3, 4, 8), (64, -8, 1), "float32", -1, array)
    assert view.owner is array


def test_numpy_with_a_mask_or_read_only_or_big_endian() -> None:
    with pytest.raises(TypeError, match="q has an element mask"):
        framework_of(np.ma.zeros((2, 2, 8)), "q").view(np.ma.zeros((2, 2, 8)), "q")
    array = np.zeros((2, 2, 8))
    assert arrays.NUMPY.writable(arrays.NUMPY.view(array, "out"))
    array.flags.writeable = False
    assert not arrays.NUMPY.writable(arrays.NUMPY.view(array, "out"))
    assert arrays.NUMPY.view(np.zeros(3, ">f4"), "q").dtype == ">f4"


@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_in_host_memory_is_shared(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 2, 16, dtype=getattr(torch, dtype)).requires_grad_()
    part = tensor[1:, :, ::2]
    framework = framework_of(part, "q")
    assert framework is arrays.TORCH_HOST
    with torch.no_grad():
        view = framework.view(part, "q")
    assert view[:5] == (part.data_ptr(), (3, 2, 8), (32, 16, 2), dtype, -1)
    view.owner[...] = 2
    assert (part == 2).all()
    result = framework.finish(framework.empty((3, 2, 8), dtype, view))
    assert (result.dtype, tuple(result.shape)) == (part.dtype, (3, 2, 8))
    assert framework_of(torch.nn.Parameter(torch.zeros(2)), "q") is arrays.TORCH_HOST


def test_torch_without_memory() -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(4, 2, 8)
    with pytest.raises(TypeError, match=r"FakeTensor, which has no memory.*rawattn\.torch"):
        framework_of(fake, "q")
    with pytest.raises(TypeError, match="meta tensor, which has no memory"):
        framework_of(torch.empty(4, 2, 8, device="meta"), "q")
    negated = torch.zeros(4, dtype=torch.complex64).conj().imag
    with pytest.raises(TypeError, match="lazily negated"):
        arrays.TORCH_HOST.view(negated, "q")


def test_jax_in_host_memory() -> None:
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones((3, 2, 8), jax.numpy.bfloat16)
    framework = framework_of(array, "q")
    assert framework is arrays.JAX_HOST
    view = framework.view(array, "q")
    assert view[1:5] == ((3, 2, 8), (16, 8, 1), "bfloat16", -1)
    assert not framework.writable(view)
    result = framework.finish(framework.empty((3, 2, 8), "bfloat16", view))
    assert isinstance(result, jax.Array) and result.dtype == jax.numpy.bfloat16
    with pytest.raises(TypeError, match="which has no memory"):
        jax.jit(lambda traced: framework_of(traced, "q"))(array)


def test_arrays_of_the_simulator() -> None:
    cuda = pytest.importorskip("numba.cuda")
    if "simulator" not in type(cuda.to_device(np.zeros(1))).__module__:
        pytest.skip("Numba runs on a GPU")
    array = cuda.to_device(values())
    framework = framework_of(array, "q")
    assert framework is arrays.SIMULATED
    view = framework.view(array, "q")
    view.owner[...] = 5
    assert (array.copy_to_host() == 5).all()
    assert type(framework.finish(view)) is type(array)


# ---- CuPy as it is: its arrays need no GPU as long as nothing runs on them ---------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_view_of_a_real_cupy_array(dtype: str) -> None:
    cupy = pytest.importorskip("cupy")
    host = values(dtype)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    array = cupy.ndarray(host.shape, DTYPES[dtype], pointer)[1::2, :, ::2]
    assert framework_of(array, "q") is arrays.CUPY
    view = arrays.CUPY.view(array, "q")
    assert view[1:5] == ((3, 2, 8), (64, 16, 2), dtype, 0)
    assert view.ptr == host.ctypes.data + host.strides[0]


def test_empty_and_neutral_with_real_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    host = values()
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    like = View(host.ctypes.data, host.shape, (32, 16, 1), "float32", 0, host)
    with cupy.cuda.using_allocator(lambda size: cupy.cuda.MemoryPointer(memory, 0)):
        view = arrays.CUPY.empty((3, 2, 8), "bfloat16", like)
    assert view[:5] == (host.ctypes.data, (3, 2, 8), (16, 8, 1), "bfloat16", 0)
    assert view.owner.dtype == DTYPES["bfloat16"]
    assert arrays.neutral(view) is view.owner
    neutral = arrays.neutral(like._replace(shape=(3, 2, 8), strides=(64, 16, 2)))
    assert (neutral.data.ptr, neutral.strides) == (host.ctypes.data, (256, 64, 8))


def test_stream_protocol_with_real_cupy() -> None:
    pytest.importorskip("cupy")
    assert device.stream_of(5).ptr == 5


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for cached in (device.cupy, device.has_cuda_device):
        cached.cache_clear()
    try:
        assert not device.has_cuda_device()
        with pytest.raises(RuntimeError, match="CuPy cannot be imported"):
            device.cupy()
    finally:
        device.has_cuda_device.cache_clear()
