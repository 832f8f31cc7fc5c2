"""The machine that is judged or measured on: GPU, driver, versions; the simulator for a GPU."""

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rawattn.check.transfer import loaded_torch

PACKAGES = (
    *("rawattn", "numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "numba", "numba-cuda"),
    *("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "torch"),
)


def gpu_arch() -> int:
    """Compute capability of GPU 0 as a number, 90 for 9.0; there must be one."""
    return int(importlib.import_module("cupy.cuda").Device(0).compute_capability)


def gpu_name() -> str:
    """The name of GPU 0, "NVIDIA H200" say, or "" where CuPy or a GPU is missing."""
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
    if not gpu_name() or not has_torch():
        return "numpy"
    return "torch" if loaded_torch().cuda.is_available() else "numpy"


def has_torch() -> bool:
    """Whether torch is installed; it is not imported for that."""
    return importlib.util.find_spec("torch") is not None


def driver() -> str:
    """The driver's version; the newest CUDA it supports where nvidia-smi is missing; "none"."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, text=True, check=False)
        if told.returncode == 0 and told.stdout.split():
            return told.stdout.split()[0]
    try:
        number = int(importlib.import_module("cupy.cuda.runtime").driverGetVersion())
    except Exception:  # no CuPy, or a CuPy without a driver
        return "none"
    return f"CUDA {number // 1000}.{number % 1000 // 10}" if number else "none"


def nvrtc() -> str:
    """The version of the NVRTC that compiles here, "12.9" say, or "none"."""
    try:
        error, major, minor = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except Exception:  # no cuda-bindings, or no library: each release has its own exception class
        return "none"
    return "none" if int(error) else f"{major}.{minor}"


def versions() -> dict[str, str]:
    """Versions of Python, of the NVRTC that is found, and of each installed package that shapes a
    result or a measurement."""
    found = {"python": platform.python_version(), "NVRTC": nvrtc()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe() -> dict[str, Any]:
    """The head of every record and of every file with results."""
    return {"gpu": gpu_name() or "none", "driver": driver(), "versions": versions()}
