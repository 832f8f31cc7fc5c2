"""Attention kernels for packed sequences: raw CUDA from Python, on any array library.

``forward``, ``backward`` and its step ``backward_preprocess``, ``double_backward`` and ``jvp`` take
CuPy, torch, JAX, Numba or NumPy arrays and answer in kind; so do ``sparse_forward``,
``sparse_backward``, ``sparse_double_backward`` and ``sparse_jvp``, in which every query sees a few
blocks of keys, which a ``BlockTable`` prepares for several calls. Importing this package loads no
torch, no numba, no cupy, and compiles nothing.
"""

from rawattn.api import backward, backward_preprocess, forward
from rawattn.api_second import double_backward, jvp
from rawattn.api_sparse import sparse_backward, sparse_double_backward, sparse_forward, sparse_jvp
from rawattn.tables import BlockTable

__all__ = [
    "BlockTable",
    "backward",
    "backward_preprocess",
    "double_backward",
    "forward",
    "jvp",
    "sparse_backward",
    "sparse_double_backward",
    "sparse_forward",
    "sparse_jvp",
]


def __getattr__(name: str) -> str:
    """``__version__`` of the installed package, looked up when it is asked for."""
    if name != "__version__":
        raise AttributeError(f"module 'rawattn' has no attribute {name!r}")
    from importlib.metadata import version

    return version("rawattn")
