"""What the tests on a GPU share: arrays of every library, there and back."""

from typing import Any

import numpy as np
import pytest

from rawattn.check.cases import dtype_of
from rawattn.check.transfer import to_framework, to_numpy

Arrays = dict[str, Any]
NAMES = ("q", "k", "v", "dout", "ddq", "ddk", "ddv")


def host_arrays(
    dtype: str = "bfloat16",
    lengths: tuple[int, ...] = (5, 130, 0, 64),
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    seed: int = 0,
) -> Arrays:
    """The tensors of NAMES and cu_seqlens, with a few rows to spare, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    rows = sum(lengths) + 2

    def draw(count: int) -> Any:
        return rng.standard_normal((rows, count, head_dim)).astype(dtype_of(dtype))

    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    return {name: draw(heads[name[-1] in "kv"]) for name in NAMES} | {"cu_seqlens": offsets}


def on(library: str, host: Arrays) -> Arrays:
    """``host`` as arrays of a library on the GPU; skips where the library cannot."""
    if library == "jax":
        jax = pytest.importorskip("jax")
        if jax.default_backend() != "gpu":
            pytest.skip("this JAX has no GPU backend")
        return {name: jax.numpy.asarray(array) for name, array in host.items()}
    if library == "numba":
        cuda = pytest.importorskip("numba.cuda")
        return {name: cuda.to_device(array) for name, array in host.items()}
    if library == "torch":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")
        import rawattn.torch  # noqa: F401
    return {name: to_framework(array, library) for name, array in host.items()}


def moved(array: Any) -> Any:
    return to_framework(array, "cupy")


def numpy_of(array: Any) -> Any:
    root = type(array).__module__.partition(".")[0]
    return np.asarray(array.copy_to_host()) if root == "numba" else to_numpy(array)


def bits(*arrays: Any) -> list[bytes]:
    return [numpy_of(array).tobytes() for array in arrays]


def assert_close(found: Any, wanted: Any, eps: float) -> None:
    """Within a few roundings of the largest element."""
    wanted = numpy_of(wanted).astype(np.float64)
    error = np.abs(numpy_of(found).astype(np.float64) - wanted).max()
    assert error <= 4 * eps * np.abs(wanted).max()


def keep_busy() -> None:
    """Some 20 ms of work on CuPy's current stream."""
    import cupy

    ballast = cupy.zeros(2**27, dtype=cupy.float32)
    for _ in range(80):
        ballast += 1


class Far:
    """Float16 arrays of three tokens by three heads, 2**30 elements from each other, in one buffer.

    ``axis``, "token" or "head", is the one with the far stride. Every array has a slot of its own
    between the far strides.
    """

    STRIDE, SLOT, WIDTH = 2**30, 4096, 64

    def __init__(self, axis: str, slots: int) -> None:
        import cupy

        self.cupy, self.used = cupy, 0
        assert 2 * self.STRIDE >= 2**31
        size = 2 * (2 * self.STRIDE + slots * self.SLOT)
        if cupy.cuda.runtime.memGetInfo()[0] < size + 2**30:
            pytest.skip(f"{size / 2**30:.0f} GiB of free GPU memory needed")
        self.memory = cupy.cuda.Memory(size)  # not from the pool, so that it goes back at once
        near, far = 2 * self.WIDTH, 2 * self.STRIDE
        self.strides = {"token": (far, near, 2), "head": (near, far, 2)}[axis]

    def put(self, values: Any) -> Any:
        """``values`` in a slot of their own."""
        pointer = self.cupy.cuda.MemoryPointer(self.memory, 2 * self.SLOT * self.used)
        self.used += 1
        array = self.cupy.ndarray((3, 3, self.WIDTH), np.float16, pointer, self.strides)
        for t in range(3):
            for h in range(3):
                array[t, h].set(np.ascontiguousarray(values[t, h]))
        return array

    def nan(self) -> Any:
        """An array for a result."""
        return self.put(np.full((3, 3, self.WIDTH), np.nan, dtype=np.float16))

    @staticmethod
    def get(array: Any) -> Any:
        return np.stack([np.stack([array[t, h].get() for h in range(3)]) for t in range(3)])


class Bands:
    """An allocator of CuPy's whose memory lies between bands of ones, and what becomes of those.

    All ones are NaN in every dtype of floats, and -1 in those of integers: what is read there shows
    in a result that must be finite, what is written there shows in ``touched``. The memory itself
    begins with zeros, so that what nobody writes is finite.
    """

    BYTES = 2**17  # wider than what a tile holds of one tensor

    def __init__(self) -> None:
        import cupy

        self._cupy, self._kept = cupy, []  # kept to the end, so that no memory is used twice

    def allocate(self, size: int) -> Any:
        whole = self._cupy.get_default_memory_pool().malloc(size + 2 * self.BYTES)
        stream = self._cupy.cuda.get_current_stream()
        whole.memset_async(255, self.BYTES, stream)
        (whole + self.BYTES).memset_async(0, size, stream)
        (whole + self.BYTES + size).memset_async(255, self.BYTES, stream)
        self._kept.append((whole, size))
        return whole + self.BYTES

    def touched(self) -> list[str]:
        """Where bands have changed: how far from which memory."""
        found = []
        for i, (whole, size) in enumerate(self._kept):
            for side, start in (("before", 0), ("behind", self.BYTES + size)):
                band = self._cupy.ndarray(self.BYTES, np.uint8, whole + start)
                if at := self._cupy.flatnonzero(band != 255)[:1].tolist():
                    found.append(f"{side} the {size} bytes of allocation {i}, at {at[0]}")
        return found
