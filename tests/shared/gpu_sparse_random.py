"""The random problems of the sparse tests on a GPU: few kernels, many lengths and selections."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from rawattn import variants
from rawattn.check.cases import HALF, NEIGHBOUR, Case
from rawattn.problem import Problem, Selection
from rawattn.variants import Row
from tests.shared.gpu_problems import ARCH, poisoned, sized
from tests.shared.gpu_sparse import Sparse

Directions = tuple[tuple[bool, bool, bool, bool], ...]  # which parts of (tq, tk, tv, tg) there are
Kinds = tuple[tuple[bool, bool], ...]  # causal or not, with a gate or not
WHOLE = (True, True, True, True)
NO_GATE = (True, True, True, False)
NO_TQ, OF_V = (False, True, True, False), (False, False, True, True)
ONLY_TQ, ONLY_TG = (True, False, False, False), (False, False, False, True)
CAUSAL, GATED, BOTH_WAYS, FULL = (True, False), (True, True), (False, True), (False, False)


@dataclass(frozen=True)
class Chunk:
    """Random problems that few kernels compute: of one dtype, one size, and given kinds."""

    seed: int
    dtype: str
    dims: tuple[int, int]
    group: int
    block_size: int
    kinds: Kinds = (CAUSAL,)
    per_head: bool = False
    directions: Directions = (WHOLE,)
    size: int = 20

    def __str__(self) -> str:
        d, dv = self.dims
        return f"{self.seed}-{self.dtype}-d{d}-{dv}-group{self.group}-block{self.block_size}"

    def problems(self) -> Iterator[Sparse]:
        for i in range(self.size):
            causal, gate = self.kinds[i % len(self.kinds)]
            *direction, tg = self.directions[i // len(self.kinds) % len(self.directions)]
            fixed = {"dtype": self.dtype, "causal": causal, "direction": tuple(direction)}
            rng = np.random.default_rng([self.seed, i])
            case = self._case(rng, f"sparse-{self.seed}-{i}", fixed | sized(*self.dims))
            yield Sparse(
                case,
                self.block_size,
                num_selected=int(rng.integers(1, 7)),
                own=bool(rng.random() < 0.6),
                gate=gate,
                tg=gate and tg,
                counts=bool(rng.random() < 0.3),
                per_head=self.per_head,
            )

    def _case(self, rng: np.random.Generator, name: str, fixed: dict[str, Any]) -> Case:
        """Up to some 350 tokens; the first sequence drawn is long enough to have gradients."""

        def pick(*choices: Any) -> Any:
            return choices[rng.integers(len(choices))]

        around = [n * self.block_size + e for n in range(20) for e in (-1, 0, 1)]
        most = 200 if self.group * max(self.dims) > 1024 else 290
        anchor = pick(*(n for n in around if 60 <= n <= most))
        drawn = [(anchor, anchor + pick(0, 0, 0, 2, 33, -20))]
        room, equal = int(rng.integers(0, most + 50 - anchor)), bool(rng.random() < 0.4)
        few = [n for n in (0, 1, 7, *around[2:], 63, 64, 65) if n <= 130]
        while room > 0:
            length = pick(*(n for n in few if n <= room))
            drawn.append((length, length if equal else pick(*few)))
            room -= max(length, 16)
        at, bad = int(rng.integers(len(drawn))), bool(rng.random() < 0.7)
        drawn[0], drawn[at] = drawn[at], drawn[0]
        if bad:
            drawn.insert(at, (NEIGHBOUR, NEIGHBOUR))
        lengths_q, lengths_k = (tuple(n) for n in zip(*drawn, strict=True))
        small = self.group > 4 or max(self.dims) > 128
        return Case(
            name,
            lengths_q,
            lengths_k,
            group=self.group,
            num_heads_kv=1 if small else pick(1, 2),
            softmax_scale=pick(None, None, 1.3 * self.dims[0] ** -0.5),
            dlse=bool(rng.random() < 0.7),
            strided=bool(rng.random() < 0.2),
            poisoned=(at,) if bad else (),
            past_q=pick(0, 3, 40),
            past_k=pick(0, 3, 40),
            **fixed,
        )


# head_dims, group, block size, kinds, and whether every query head selects for itself
SIZES: tuple[tuple[tuple[int, int], int, int, Kinds, bool], ...] = (
    ((64, 64), 4, 64, (CAUSAL,), False),
    ((64, 64), 16, 64, (CAUSAL, GATED), False),
    ((64, 64), 64, 64, (CAUSAL,), False),
    ((64, 64), 1, 16, (CAUSAL, FULL), False),
    ((64, 64), 4, 32, (CAUSAL, GATED), True),
    ((64, 32), 3, 128, (FULL,), False),
    ((64, 128), 64, 32, (BOTH_WAYS,), False),
    ((128, 128), 16, 64, (CAUSAL,), False),
    ((128, 128), 4, 32, (GATED,), False),
    ((128, 128), 64, 128, (GATED,), False),
    ((128, 128), 1, 64, (BOTH_WAYS,), False),
    ((128, 128), 16, 64, (GATED,), True),
    ((32, 32), 3, 16, (CAUSAL,), False),
    ((96, 96), 4, 128, (GATED,), False),
    ((192, 192), 16, 64, (CAUSAL,), False),
    ((192, 128), 16, 32, (CAUSAL,), False),
    ((192, 128), 1, 64, (BOTH_WAYS,), False),
    ((256, 256), 4, 64, (GATED,), False),
    ((256, 256), 16, 16, (FULL,), False),
    ((40, 40), 3, 32, (GATED,), False),
    ((72, 56), 16, 128, (CAUSAL,), False),
    ((104, 120), 4, 64, (CAUSAL,), False),
    ((136, 136), 16, 32, (BOTH_WAYS,), False),
    ((200, 248), 1, 128, (CAUSAL,), False),
    ((8, 24), 64, 16, (GATED,), False),
)
FIRST = [
    Chunk(i, HALF[i // 2 % 2], dims, group, block_size, kinds, per_head)
    for i, (dims, group, block_size, kinds, per_head) in enumerate(SIZES)
]

MIXED = [  # a narrow tile beside a wide one is widened
    Chunk(50, "bfloat16", (96, 128), 4, 64, size=8),
    Chunk(51, "float16", (128, 32), 16, 32, size=8),
    Chunk(52, "bfloat16", (32, 192), 4, 16, (GATED,), size=8),
    Chunk(53, "float16", (192, 96), 1, 64, size=8),
]

SECOND = [
    Chunk(100, "bfloat16", (64, 64), 4, 64, (CAUSAL,), directions=(WHOLE, ONLY_TQ)),
    Chunk(101, "float16", (128, 128), 16, 64, (GATED,), directions=(WHOLE, ONLY_TG)),
    Chunk(102, "bfloat16", (192, 128), 16, 32, (CAUSAL,)),
    Chunk(103, "float16", (256, 256), 4, 64, (GATED,)),
    Chunk(104, "bfloat16", (40, 40), 3, 32, (GATED,), directions=(WHOLE, NO_GATE)),
    Chunk(105, "float16", (64, 64), 1, 16, (FULL,), directions=(NO_TQ,)),
    Chunk(106, "bfloat16", (72, 56), 64, 128, (BOTH_WAYS,)),
    Chunk(107, "float16", (96, 96), 4, 16, (GATED,), True, directions=(OF_V,)),
]

TWINS = [
    Chunk(200, "float64", (64, 64), 4, 64, (GATED, FULL), size=22),
    Chunk(201, "float64", (40, 72), 3, 16, (CAUSAL, BOTH_WAYS), size=22),
    Chunk(202, "float64", (16, 8), 16, 32, (GATED, BOTH_WAYS), size=22),
    Chunk(203, "float64", (24, 24), 4, 16, (GATED, CAUSAL), True, size=22),
    Chunk(204, "float64", (32, 32), 1, 128, (GATED,), directions=(WHOLE, NO_GATE), size=22),
    Chunk(210, "float32", (64, 64), 4, 64, (GATED, FULL), size=10),
    Chunk(211, "bfloat16", (40, 72), 3, 16, (CAUSAL, BOTH_WAYS), size=10),
]


# ---- chosen problems --------------------------------------------------------------------------


def edges(name: str, **changes: Any) -> Sparse:
    """Lengths around a block of 64 keys, with queries that see no key.

    As they are, and with head_dim 128, they need no kernel that the above do not.
    """
    usual = {"dtype": "float16", "group": 16, "num_heads_kv": 1, "causal": True, **sized(64)}
    case = poisoned(name, (63, 0, 129, 1, 65), (129, 5, 64, 9, 65), **usual | changes)
    return Sparse(case, 64, num_selected=3, gate=True, tg=True, counts=True)


def row_for(stem: str, sparse: Sparse) -> Row:
    """The CUDA row that the kernel ``stem`` runs on."""
    case = sparse.case
    heads, dims = (case.num_heads_q, case.num_heads_kv), (case.head_dim, case.head_dim_v)
    posed = Problem(case.dtype, 1, 1, 1, *heads, *dims, *case.mask_window, 1.0, ARCH, 0)
    sizes = (sparse.num_heads_sel, sparse.num_selected, sparse.block_size)
    selection = Selection(*sizes, sparse.own, 256)
    return variants.select(stem, posed, backend="cuda", selection=selection)


def other_rows(chunks: list[Chunk], names: tuple[str, ...]) -> list[Row]:
    """Rows of the kernels called sparse_name.. that no problem of the chunks runs on."""
    starts = tuple(f"sparse_{name}" for name in names)
    rows = [row for row in variants.TABLE if row.stem.startswith(starts)]
    rows = [row for row in rows if row.family != "numba" and variants.serves(row, ARCH)]
    used = set()
    for stem, chunk in product({row.stem for row in rows}, chunks):
        with suppress(ValueError):  # another test's matter
            used.add(row_for(stem, next(chunk.problems())).name)
    return [row for row in rows if row.name not in used]


def fitting(row: Row) -> Iterator[Sparse]:
    """Problems that a row serves when RAWATTN_VARIANT asks for it."""
    for group, block_size in ((16, 64), (4, 64), (1, 16), (64, 64), (4, 128)):
        changes = {"group": group, "dtype": "bfloat16", **sized(row.head_dim)}
        sparse = replace(edges(f"row-{row.name}", **changes), block_size=block_size)
        if row_for(row.stem, sparse) is row:
            yield sparse
