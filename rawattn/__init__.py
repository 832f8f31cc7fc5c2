"""Attention kernels for packed sequences: raw CUDA from Python, on any array library.

``forward``, ``backward_preprocess`` and ``backward`` take CuPy, torch, JAX, Numba or NumPy arrays
and answer in kind. Importing this package loads no torch, no numba, no cupy, and compiles nothing.
"""

from rawattn.api import backward, backward_preprocess, forward

__all__ = ["backward", "backward_preprocess", "forward"]
