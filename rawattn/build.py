"""A row specialised to a problem, and the constants that it puts in front of the CUDA source."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from rawattn.variants.row import COUNTERS, NO_BLOCKS, Blocks, Cfg, Row, Tiles, tile_widths

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
Direction = tuple[bool, bool, bool]  # which parts of (tq, tk, tv), or (ddq, ddk, ddv), are there
NO_DIRECTION = (False, False, False)
WHOLE = (True, True, True)

INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_READ = re.compile(r"\bcfg::(\w+)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Build:
    """A row specialised to what is fixed at compile time.

    Of a sparse row, ``blocks`` are (query heads that share a selection, keys of a block), and
    ``scaled`` says that blocks have factors. ``args_bytes``: the size of ``struct Args``. The last
    three say which options of dense attention there are.
    """

    row: Row
    dtype: str
    head_dim: int
    head_dim_v: int
    has_left: bool
    has_right: bool
    atomic: bool
    direction: Direction = NO_DIRECTION
    blocks: Blocks = NO_BLOCKS
    scaled: bool = False
    args_bytes: int = 0
    softcap: bool = False
    sinks: bool = False
    seqused_k: bool = False

    @property
    def path(self) -> str:
        """The source, below ``sources_root()``."""
        return f"{self.row.family}/{self.row.source}.cu"

    @property
    def tiles(self) -> Tiles:
        widths = tile_widths(self.head_dim, self.head_dim_v)
        return Tiles(*widths, self.atomic, self.blocks, self.scaled)

    @property
    def cfg(self) -> Cfg:
        """The row's choices, as they are for these tiles."""
        return self.row.fit(self.row, self.tiles)

    @property
    def smem(self) -> int:
        """Dynamic shared memory in bytes."""
        return self.row.smem_bytes(self.tiles)


class Source(NamedTuple):
    """What a kernel's source and everything that it includes come to."""

    text: str
    names: frozenset[str]  # that it reads of ``namespace cfg``


def distinct(builds: Iterable[Build]) -> list[Build]:
    """The first of those builds that come to the same kernel."""
    found: dict[tuple[str, str], Build] = {}
    for build in builds:
        found.setdefault((build.path, prelude(build)), build)
    return list(found.values())


def prelude(build: Build) -> str:
    """The constants that the source reads, as ``namespace cfg``, to stand in front of it.

    Raises RuntimeError when it reads one that there is not.
    """
    width, width_v = tile_widths(build.head_dim, build.head_dim_v)
    given: dict[str, int | bool] = build.cfg.constants() | {
        "HEAD_DIM": width,
        "HEAD_DIM_V": width_v,
        "WIDTH": build.head_dim,
        "WIDTH_V": build.head_dim_v,
        "BF16": build.dtype == "bfloat16",
        "HAS_LEFT": build.has_left,
        "HAS_RIGHT": build.has_right,
        "ATOMIC": build.atomic,
        "HAS_TQ": build.direction[0],
        "HAS_TK": build.direction[1],
        "HAS_TV": build.direction[2],
        "HAS_BLOCK_SCALE": build.scaled,
        "HAS_SOFTCAP": build.softcap,
        "HAS_SINKS": build.sinks,
        "HAS_SEQUSED_K": build.seqused_k,
        "GROUP": build.blocks[0],
        "BLOCK_SIZE": build.blocks[1],
        "SMEM_BYTES": build.smem,
        "ARGS_BYTES": build.args_bytes,
        "COUNTERS": COUNTERS,
    }
    read = source(build.path).names
    if lacking := sorted(read - given.keys()):
        raise RuntimeError(
            f"{build.path} reads cfg::{', cfg::'.join(lacking)}, which neither "
            f"{type(build.cfg).__name__} nor Build gives. There are {', '.join(given)}."
        )
    unread = "[[maybe_unused]]"  # by what this row has of the source
    lines = [
        f"{unread} constexpr {type(value).__name__} {name} = {str(value).lower()};"
        for name, value in given.items()
        if name in read
    ]
    return "\n".join(["namespace cfg {", *lines, "}  // namespace cfg", ""])


def sources_root() -> Path:
    """The folder of the CUDA sources: package data, in a checkout beside the package."""
    try:
        return Path(str(resources.files("rawattn.kernels_cu")))
    except ModuleNotFoundError:
        return Path(__file__).resolve().parent.parent / "kernels_cu"


@cache
def source(path: str) -> Source:
    """A source with everything that it includes."""
    texts: dict[str, str] = {}
    pending = [path]
    while pending:
        name = pending.pop()
        if name not in texts:
            texts[name] = (sources_root() / name).read_text()
            pending += INCLUDE.findall(texts[name])
    names = {name for text in texts.values() for name in _READ.findall(_COMMENT.sub("", text))}
    whole = "\0".join(f"{name}\0{texts[name]}" for name in sorted(texts))
    return Source(whole, frozenset(names))
