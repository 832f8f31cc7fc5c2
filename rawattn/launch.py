"""Kernels on a device, and their launch."""

import os
import tempfile
import threading
from ctypes import addressof, c_char_p
from functools import cache, lru_cache

from rawattn import env
from rawattn.build import NO_DIRECTION, Build, Direction, prelude, source
from rawattn.jit import cached_build
from rawattn.problem import Problem, Selection
from rawattn.variants.row import NO_BLOCKS, Blocks, Row


class Loaded:
    """A kernel on one device, ready to launch."""

    def __init__(self, build: Build, arch: str, device: int) -> None:
        import cupy
        from cupy_backends.cuda.api import driver

        cubin = cached_build(build, arch).cubin
        with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
            file.write(cubin)
        try:
            raw = cupy.RawModule(path=file.name).get_function(build.row.stem)
            if build.smem > 48 * 1024:
                raw.max_dynamic_shared_size_bytes = build.smem
            self._function: int = raw.kernel.ptr
            self._raw = raw  # the module stays loaded as long as this lives
        finally:
            os.unlink(file.name)
        self._threads, self._smem = build.cfg.threads, build.smem
        self._name = build.row.name
        self._device = device
        self._call = driver.launchKernel  # RawKernel's call looks at every argument first

    def launch(self, grid: tuple[int, int, int], arguments: bytes, stream: int) -> None:
        """Launch on a raw stream handle; ``arguments`` are the bytes of ``struct Args``.

        The device must be current. With RAWATTN_SYNC=1 waits, and raises RuntimeError with the
        row's name when a kernel has failed.
        """
        if self._device not in _thread.devices:
            _bind(self._device)
        # The driver takes the address of a list of pointers to arguments, here of one. It copies
        # what they point to before it returns, and until then ``only`` keeps the bytes.
        only = c_char_p(arguments)
        x, y, z = grid
        self._call(
            self._function, x, y, z, self._threads, 1, 1, self._smem, stream, addressof(only), 0
        )
        if env.flag(env.SYNC):
            self._wait(stream)

    def _wait(self, stream: int) -> None:
        from cupy.cuda import runtime

        try:
            runtime.streamSynchronize(stream)
        except Exception as error:
            raise RuntimeError(f"kernel {self._name} failed: {error}") from error


class _Thread(threading.local):
    """The devices whose context this thread has: the driver's calls need one and make none."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


def _bind(device: int) -> None:
    """Have the runtime make the current device's context that of this thread."""
    from cupy.cuda import runtime

    runtime.memGetInfo()
    _thread.devices.add(device)


@lru_cache(maxsize=4096)
def kernel(
    row: Row,
    problem: Problem,
    *,
    atomic: bool = False,
    head_dims: tuple[int, int] | None = None,
    direction: Direction = NO_DIRECTION,
    selection: Selection | None = None,
    scaled: bool = False,
    args_bytes: int = 0,
) -> Loaded:
    """The loaded kernel of a row for a problem, compiled at its first use.

    The device must be current. ``head_dims`` stand in for the problem's (head_dim, head_dim_v)
    where a kernel handles one tensor, which may be V's. ``selection`` and ``scaled`` (are there
    factors of blocks) are for sparse rows. ``args_bytes``: the size of what ``launch`` will get.
    """
    return _kernel(
        row,
        problem.dtype,
        *(head_dims or (problem.head_dim, problem.head_dim_v)),
        problem.window_left >= 0,
        problem.window_right >= 0,
        atomic,
        direction,
        selection.blocks(problem) if selection else NO_BLOCKS,
        scaled,
        args_bytes,
        (problem.softcap > 0, problem.has_sinks, problem.has_seqused_k),
        problem.arch,
        problem.device,
    )


_loaded: dict[tuple[str | int | tuple[int, ...], ...], Loaded] = {}


@cache
def _kernel(
    row: Row,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    has_left: bool,
    has_right: bool,
    atomic: bool,
    direction: Direction,
    blocks: Blocks,
    scaled: bool,
    args_bytes: int,
    options: tuple[bool, bool, bool],
    arch: int,
    device: int,
) -> Loaded:
    """Problems whose builds differ in nothing that the source reads share a kernel."""
    build = Build(
        *(row, dtype, head_dim, head_dim_v, has_left, has_right, atomic),
        *(direction, blocks, scaled, args_bytes, *options),
    )
    key = (build.path, prelude(build), build.smem, build.cfg.threads, arch, device)
    if key not in _loaded:
        _loaded[key] = Loaded(build, f"sm_{arch}", device)
    return _loaded[key]


def forget() -> None:
    """Drop the kernels, for callers that have changed the sources."""
    kernel.cache_clear()
    _kernel.cache_clear()
    _loaded.clear()
    source.cache_clear()
