"""The table of rows (a kernel and its compile-time choices) and the choice of one for a problem.

``row`` says what a row consists of, ``sm80`` and ``sm90`` are the rows, ``steps`` the kernels of
each function.
"""

from rawattn.variants.choice import TABLE, names_in, select
from rawattn.variants.row import (
    COUNTERS,
    HEAD_DIMS,
    NO_BLOCKS,
    Blocks,
    Kernel,
    Row,
    Tiles,
    block_keys,
    panel_of,
    serves,
    smem_limit,
    tile_width,
    tile_widths,
)
from rawattn.variants.steps import METHODS, method_of

__all__ = [
    "COUNTERS",
    "HEAD_DIMS",
    "METHODS",
    "NO_BLOCKS",
    "TABLE",
    "Blocks",
    "Kernel",
    "Row",
    "Tiles",
    "block_keys",
    "method_of",
    "names_in",
    "panel_of",
    "select",
    "serves",
    "smem_limit",
    "tile_width",
    "tile_widths",
]
