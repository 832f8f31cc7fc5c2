"""The standard cases of block-sparse attention, as ``cases`` has those of dense attention."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rawattn.check.cases import DTYPES, HALF, NEIGHBOUR, Case, Lengths, Pairs

BLOCK_SIZES = (16, 32, 64, 128)
BEYOND = ("tout", "tlse", "ddout", "ddlse", "gq", "gk", "gv", "gblock_scale")


@dataclass(frozen=True, slots=True)
class SparseCase(Case):
    """One packed problem of block-sparse attention.

    ``by_query_head``: each query head selects for itself. ``own``: include_own_block. ``counts``
    and ``gate``: there are block_counts, a block_scale; ``gate_direction``: that moves too.
    ``sliding``: the second branch is asked for; ``window`` is its own, by default that of a block.
    """

    causal: bool = True
    block_size: int = 16
    num_selected: int = 4
    by_query_head: bool = False
    own: bool = True
    counts: bool = False
    gate: bool = False
    gate_direction: bool = True
    sliding: bool = False
    index_dtype: str = "int32"

    @property
    def num_heads_sel(self) -> int:
        return self.num_heads_q if self.by_query_head else self.num_heads_kv

    def terms_of(self, name: str) -> int:
        """``terms``, and where scores enter more than once, those of the dot products behind each.

        A term of the sum over keys is off by the roundings of its own dot products, which are
        independent of each other and of those of the sum: squares of errors add up, as the numbers
        of steps do. There are two products (S, dP) behind dblock_scale, five beyond first order,
        with the tangents' three (tq k, q tk, dO tv).
        """
        products = 5 if name in BEYOND else 2 if name == "dblock_scale" else 0
        return self.terms + products * max(self.head_dim, self.head_dim_v)

    @property
    def learned(self) -> str:
        return "block_scale"

    @property
    def mask_window(self) -> tuple[int, int]:
        """The window of the sliding branch."""
        if self.window == (-1, -1):
            return self.block_size - 1, 0
        return (self.window[0], 0) if self.causal else self.window

    @property
    def options(self) -> dict[str, Any]:
        return {
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "block_size": self.block_size,
            "include_own_block": self.own,
        }

    @property
    def forward_options(self) -> dict[str, Any]:
        if not self.sliding:
            return {}
        window = None if self.window == (-1, -1) else self.window
        return {"return_sliding": True, "window": window}

    @property
    def preallocated(self) -> tuple[str, ...]:
        return ("out", "dq", "dk", "dv")

    @property
    def needs(self) -> dict[str, bool]:
        return {
            "causal": not self.causal,
            "softmax_scale": self.softmax_scale is not None,
            "cu_seqlens_k": self.lengths_k != self.lengths_q or self.past_k != self.past_q,
            "block_size": self.block_size != 64,
            "include_own_block": not self.own,
            "block_counts": self.counts,
            "block_scale": self.gate,
        }


def standard_sparse(size: str) -> tuple[SparseCase, ...]:
    """The standard cases, "small" (for a simulator or a slow function) or "large" (for a GPU).

    Dtypes as in ``standard``.
    """
    if size == "small":
        plain = SparseCase("", (), (), num_heads_kv=1, head_dim=16, head_dim_v=16)
        features = _features(plain, (40,), ((24, 8),), edge=16, long=70, many=5)
        return tuple(replace(c, dtype=DTYPES[i % len(DTYPES)]) for i, c in enumerate(features))
    plain = SparseCase("", (), (), block_size=64, num_selected=6)
    dims, dims_apart = (32, 40, 96, 128, 192, 256), ((192, 128), (40, 72))
    wide = ("edges", "gate", "group16", "unequal", "dim-40", "dim-256")
    return tuple(
        replace(case, dtype=dtype)
        for case in _features(plain, dims, dims_apart, edge=64, long=700, many=40)
        for dtype in DTYPES
        if dtype in HALF or case.name.removeprefix("sparse-") in wide
    )


def _features(
    plain: SparseCase, dims: Lengths, dims_apart: Pairs, *, edge: int, long: int, many: int
) -> Iterator[SparseCase]:
    """``plain`` changed in one feature after the other; ``edge`` is its block size."""

    def case(name: str, lengths_q: Lengths, lengths_k: Lengths = (), **changes: Any) -> SparseCase:
        """With a NaN sequence put into the middle; ``lengths_k`` is by default ``lengths_q``."""
        lengths_k = lengths_k or lengths_q
        at = len(lengths_q) // 2
        with_q, with_k = ((*n[:at], NEIGHBOUR, *n[at:]) for n in (lengths_q, lengths_k))
        changes |= {"name": f"sparse-{name}", "poisoned": (at,)}
        return replace(plain, lengths_q=with_q, lengths_k=with_k, **changes)

    edges = (0, 1, edge - 1, edge, edge + 1, 0)
    some, short = (2 * edge + 5, 3), (edge + 9, 7)
    late = (edge + 2, 3), (4 * edge + 3, 2 * edge)  # queries at the end of many keys
    yield case("edges", edges)
    yield case("edges-open", edges, causal=False)
    yield case("long", (long, 3), gate=True)
    yield case("group4", some, group=4, gate=True)
    yield case("group16", short, group=16, num_heads_kv=1, gate=True)
    yield case("query-heads", short, group=4, by_query_head=True, gate=True)
    yield case("query-heads-open", short, group=2, num_heads_kv=2, by_query_head=True, causal=False)
    yield case("no-own", some, own=False, group=2)
    yield case("no-own-open", some, own=False, causal=False, num_heads_kv=2)
    yield case("counts", some, counts=True, gate=True, group=2)
    yield case("counts-open", some, counts=True, causal=False, own=False, index_dtype="int64")
    yield case("gate", some, gate=True, num_selected=5)
    yield case("gate-open", some, gate=True, causal=False, direction=(False, False, False))
    unequal = (3, 2 * edge + 5, 0, 9, edge), (edge + 2, 5, 4, 0, 2 * edge + 1)
    yield case("unequal", *unequal, group=2, gate=True)
    yield case("unequal-open", *unequal, causal=False)
    yield case("late", *late, group=4, gate=True, gate_direction=False)
    yield case("late-open", *late, causal=False, own=False, num_heads_kv=2)
    yield case("decode", (1, 1, 1), (edge + 1, 5 * edge, 3), group=4)
    yield case("sliding", some, sliding=True, group=2)
    window: dict[str, Any] = {"sliding": True, "window": (9, 2)}
    yield case("sliding-window", some, causal=False, **window)
    yield case("sliding-unequal", *unequal, **window)
    for size in BLOCK_SIZES:
        if size != edge:
            yield case(f"block-{size}", (edge, 5), (2 * size + 3, size), block_size=size, gate=True)
    yield case("one-slot", some, num_selected=1)
    yield case("many-slots", short, num_selected=19, gate=True, own=False)
    yield case("all-dead", short, (0, 0), past_k=4)
    yield case("scale", short, softmax_scale=0.5, direction=(True, False, False))
    yield case("no-dlse", short, dlse=False, gate=True, direction=(False, True, False))
    yield case("no-rows-past-the-end", short, past_q=0, past_k=0, direction=(False, False, True))
    yield case("strided", some, strided=True, group=2, gate=True)
    rng = np.random.default_rng(0)
    yield case("many", tuple(int(n) for n in rng.integers(0, edge, many)))
    for d in dims:
        yield case(f"dim-{d}", short, head_dim=d, head_dim_v=d, group=4, gate=True)
    for d, dv in dims_apart:
        yield case(f"dim-{d}-{dv}", short, head_dim=d, head_dim_v=dv, group=4, gate=True)
    yield replace(plain, name="sparse-no-keys", lengths_q=(4, 2), lengths_k=(0, 0), past_k=0)
    yield replace(plain, name="sparse-no-sequences")
    nothing: dict[str, Any] = {"lengths_q": (0,), "lengths_k": (0,), "past_q": 0, "past_k": 0}
    yield replace(plain, name="sparse-no-tokens", **nothing)
    yield case("groups", short, group=3, num_heads_kv=2, gate=True)
