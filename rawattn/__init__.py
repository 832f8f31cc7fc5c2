"""Attention kernels for packed sequences: raw CUDA from Python, on any array library.

``forward``, ``backward`` and its step ``backward_preprocess``, ``double_backward`` and ``jvp`` take
CuPy, torch, JAX, Numba or NumPy arrays and answer in kind. Importing this package loads no torch,
no numba, no cupy, and compiles nothing.
"""

from rawattn.api import backward, backward_preprocess, forward
from rawattn.api_second import double_backward, jvp

__all__ = ["backward", "backward_preprocess", "double_backward", "forward", "jvp"]
