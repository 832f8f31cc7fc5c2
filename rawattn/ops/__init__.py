"""One module per kernel, named as its source in kernels_cu; its Numba twin stands beside it."""
