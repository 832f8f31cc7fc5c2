"""Arrays between NumPy and the frameworks that a checked function may want; bfloat16 survives."""

import importlib
import sys
from typing import Any

import ml_dtypes
import numpy as np

Array = Any  # numpy.ndarray, cupy.ndarray or torch.Tensor
FRAMEWORKS = ("numpy", "cupy", "torch")


def to_framework(array: Array, framework: str) -> Array:
    """NumPy ``array`` (or None) as an array of ``framework`` on its GPU, or the CPU without one.

    A view into the leading corner of a larger array keeps its strides and what lies in the gaps.
    """
    if array is None or framework == "numpy":
        return array
    base = array.base
    if base is not None and base.dtype == array.dtype and base.strides == array.strides:
        return to_framework(base, framework)[tuple(slice(n) for n in array.shape)]
    if framework == "cupy":
        return importlib.import_module("cupy").asarray(array)
    torch, array = loaded_torch(), array.copy()  # a tensor cannot be read-only
    if array.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor.cuda() if torch.cuda.is_available() else tensor


def to_numpy(array: Array) -> np.ndarray[Any, Any]:
    """A CuPy array, a torch tensor or whatever NumPy understands, as a NumPy array."""
    root = type(array).__module__.partition(".")[0]
    if root == "cupy":
        return np.asarray(array.get())
    if root == "torch":
        array = array.detach().cpu()
        if array.dtype == loaded_torch().bfloat16:
            return np.asarray(array.view(loaded_torch().int16).numpy()).view(ml_dtypes.bfloat16)
        return np.asarray(array.numpy())
    return np.asarray(array)


def loaded_torch() -> Any:
    """The torch module; loaded through rawattn.torch, the one module that imports it."""
    importlib.import_module("rawattn.torch")
    return sys.modules["torch"]
