"""The rows of kernels_cu/sm90/, which are tried before those of sm80. None yet."""

from rawattn.variants.row import Row

SM90: tuple[Row, ...] = ()
