"""The machine that is judged on: its GPU, its versions, the simulator in place of a GPU."""

import importlib
import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version

from rawattn.check.transfer import loaded_torch

PACKAGES = (
    *("rawattn", "numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "numba", "numba-cuda"),
    *("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "torch"),
)


def gpu_arch() -> int:
    """Compute capability of GPU 0 as a number, 90 for 9.0; there must be one."""
    return int(importlib.import_module("cupy.cuda").Device(0).compute_capability)


def gpu_name() -> str:
    """The name of GPU 0, or "" where CuPy or a GPU is missing."""
    try:
        runtime = importlib.import_module("cupy.cuda.runtime")
        return str(runtime.getDeviceProperties(0)["name"].decode())
    except Exception:  # no CuPy, no driver, no device: each has its own exception class
        return ""


def use_simulator() -> None:
    """Without a GPU the Numba kernels run in Numba's simulator; read when numba is imported."""
    if not gpu_name():
        os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")


def default_framework() -> str:
    """ "torch" if a torch that uses the GPU is here, else "numpy"."""
    if not gpu_name() or importlib.util.find_spec("torch") is None:
        return "numpy"
    return "torch" if loaded_torch().cuda.is_available() else "numpy"


def versions() -> dict[str, str]:
    """Installed versions of what rawattn works with, the driver's CUDA version and the GPU."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {"driver": _driver(), "gpu": gpu_name() or "none"}


def _driver() -> str:
    try:
        number = int(importlib.import_module("cupy.cuda.runtime").driverGetVersion())
    except Exception:  # no CuPy, or a CuPy without a driver
        return "none"
    return f"CUDA {number // 1000}.{number % 1000 // 10}" if number else "none"
