"""Which GPU, driver and versions a measurement is of."""

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = (
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-core",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "numba",
    "numba-cuda",
    "numpy",
    "torch",
)


def gpu_name() -> str:
    """The name of device 0, "NVIDIA H200" say."""
    from cupy.cuda.runtime import getDeviceProperties

    return str(getDeviceProperties(0)["name"].decode())


def driver() -> str:
    """The driver's version; the newest CUDA it supports where nvidia-smi is missing."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    from cupy.cuda.runtime import driverGetVersion

    number = driverGetVersion()
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def versions() -> dict[str, str]:
    """Python's version and that of each installed package which shapes a measurement."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe() -> dict[str, Any]:
    """The head of every record and benchmark file."""
    return {"gpu": gpu_name(), "driver": driver(), "versions": versions()}
