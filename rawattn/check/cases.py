"""The standard cases: shapes, masks and dtypes that attention of packed sequences must get right.

Each case carries its own traps: a sequence of NaN stands between healthy ones, NaN rows follow the
last sequence, and strided cases have NaN in the gaps. Arrays are NumPy; ``Tensors.on`` moves them.
Longer than other modules by the list of cases at its end.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawattn.check.transfer import Array, to_framework
from rawattn.reference.dense import allowed

HALF = ("float16", "bfloat16")
DTYPES = (*HALF, "float32", "float64")
NEIGHBOUR = 5  # tokens of the NaN sequence in the middle of a case
PAST_END = 3  # NaN rows after cu_seqlens[-1]
HEAD_DIMS = (32, 40, 64, 72, 96, 128, 136, 192, 256)
HEAD_DIMS_APART = ((64, 32), (40, 72), (192, 128), (32, 256))
FEW_HEAD_DIMS = (32, 40, 72, 136, 256)  # these and one apart will do where 16 is the plain one


Lengths = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]
Direction = tuple[Array | None, ...]  # tq, tk, tv; where there is one, that of ``Case.learned``


@dataclass(frozen=True, slots=True)
class Case:
    """One packed attention problem.

    ``lengths_*`` are tokens per sequence, ``poisoned`` the indices of the sequences whose every
    number is NaN; ``past_*`` counts rows that belong to no sequence. ``direction`` says which of
    tq, tk and tv there are, ``sinks_direction`` whether the sinks move too. With ``sinks`` nothing
    is poisoned: their gradients are sums over all sequences.
    """

    name: str
    lengths_q: Lengths
    lengths_k: Lengths
    dtype: str = "float16"
    num_heads_kv: int = 2
    group: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    dlse: bool = True
    poisoned: tuple[int, ...] = ()
    past_q: int = PAST_END
    past_k: int = PAST_END
    strided: bool = False
    direction: tuple[bool, bool, bool] = (True, True, True)
    softcap: float | None = None
    sinks: bool = False
    sinks_direction: bool = True
    seqused_k: Lengths | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}"

    @property
    def num_heads_q(self) -> int:
        return self.num_heads_kv * self.group

    @property
    def mask_window(self) -> tuple[int, int]:
        """The window with ``causal`` folded in: causal is a right side of 0."""
        return (self.window[0], 0) if self.causal else self.window

    @property
    def lengths_used(self) -> Lengths:
        """How many keys of each sequence are in use."""
        return self.lengths_k if self.seqused_k is None else self.seqused_k

    @property
    def learned(self) -> str:
        """What has a gradient beside q, k and v, where it is there."""
        return "sinks"

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of every function that are no arrays; those of rarer things if needed."""
        usual = {"causal": self.causal, "window": self.window, "softmax_scale": self.softmax_scale}
        return usual if self.softcap is None else usual | {"softcap": self.softcap}

    @property
    def forward_options(self) -> dict[str, Any]:
        """Those that ``forward`` alone takes."""
        return {}

    @property
    def preallocated(self) -> tuple[str, ...]:
        """The results that may be given to a function to write into."""
        first, second = ("out", "dq", "dk", "dv", "dsinks"), ("gq", "gk", "gv", "gsinks")
        return (*first, "tout", "ddout", "ddlse", *second)

    @property
    def needs(self) -> dict[str, bool]:
        """Whether a function without that keyword would compute something else."""
        return {
            "causal": self.causal,
            "window": self.window != (-1, -1),
            "softmax_scale": self.softmax_scale is not None,
            "cu_seqlens_k": self.lengths_k != self.lengths_q or self.past_k != self.past_q,
            "softcap": self.softcap is not None,
            "sinks": self.sinks,
            "seqused_k": self.seqused_k is not None,
        }

    @property
    def terms(self) -> int:
        """The longest sum behind an element of a result: keys, head_dim or queries of a group."""
        longest_q, longest_k = max(self.lengths_q, default=0), max(self.lengths_k, default=0)
        return max(longest_k, longest_q * self.group, self.head_dim, self.head_dim_v)

    def terms_of(self, name: str) -> int:
        """``terms`` of the result ``name``; those of sinks are sums over all queries."""
        return max(self.terms, sum(self.lengths_q)) if name.endswith("sinks") else self.terms

    def sequence_of(self, side: str) -> npt.NDArray[np.int64]:
        """For every row of side "q" or "k" the index of its sequence, -1 past the last one."""
        lengths, past = {
            "q": (self.lengths_q, self.past_q),
            "k": (self.lengths_k, self.past_k),
        }[side]
        return np.concatenate(
            [np.repeat(np.arange(len(lengths)), lengths), np.full(past, -1, dtype=np.int64)]
        ).astype(np.int64)

    def healthy(self, side: str) -> npt.NDArray[np.bool_]:
        """Rows whose result is defined: all but those of the poisoned sequences."""
        return ~np.isin(self.sequence_of(side), self.poisoned)

    def unseen(self, side: str) -> npt.NDArray[np.bool_]:
        """Rows that must come out exactly 0: past the end, or without an allowed partner."""
        rows = [np.zeros(0, dtype=bool)]
        lengths = zip(self.lengths_q, self.lengths_k, self.lengths_used, strict=True)
        for seqlen_q, seqlen_k, used in lengths:
            mask = allowed(seqlen_q, used, self.mask_window)
            unused = np.ones(seqlen_k - used if side == "k" else 0, dtype=bool)
            rows += [~mask.any(axis=1 if side == "q" else 0), unused]
        past = self.past_q if side == "q" else self.past_k
        return np.concatenate([*rows, np.ones(past, dtype=bool)])

    def trapped(self, side: str) -> npt.NDArray[np.bool_]:
        """Rows whose inputs are NaN: poisoned ones, those of no sequence, keys not in use."""
        trapped = ~self.healthy(side) | (self.sequence_of(side) < 0)
        if side == "k" and self.seqused_k is not None:
            places = (np.arange(n) for n in self.lengths_k)
            unused = [i >= n for i, n in zip(places, self.seqused_k, strict=True)]
            trapped |= np.concatenate([*unused, np.ones(self.past_k, dtype=bool)])
        return trapped


@dataclass(frozen=True, slots=True)
class Tensors:
    """The inputs of one case: q (total_q, num_heads_q, head_dim), k and v (total_k, num_heads_kv,
    head_dim or head_dim_v), dout like out, dlse (num_heads_q, total_q) or None, int32 offsets; a
    direction tq, tk, tv like q, k, v or None (``double_backward`` calls it ddq, ddk, ddv). Where
    there are any, sinks (num_heads_q,) with their direction, and int32 seqused_k (batch,).
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    tq: Array | None
    tk: Array | None
    tv: Array | None
    sinks: Array | None = field(default=None, kw_only=True)
    tsinks: Array | None = field(default=None, kw_only=True)
    seqused_k: Array | None = field(default=None, kw_only=True)

    @property
    def direction(self) -> Direction:
        return (self.tq, self.tk, self.tv, self.tsinks)[: len(self.origins)]

    @property
    def origins(self) -> tuple[Array | None, ...]:
        """What the parts of a direction move."""
        return (self.q, self.k, self.v) + (() if self.sinks is None else (self.sinks,))

    @property
    def where(self) -> tuple[Array, ...]:
        """The positional arguments behind the tensors."""
        return (self.cu_seqlens_q,)

    @property
    def options(self) -> dict[str, Array]:
        """The keywords that are arrays."""
        rarer = {"sinks": self.sinks, "seqused_k": self.seqused_k}
        there = {name: array for name, array in rarer.items() if array is not None}
        return {"cu_seqlens_k": self.cu_seqlens_k} | there

    def on(self, framework: str) -> Self:
        """The same tensors as "numpy", "cupy" or "torch" arrays, with the same strides."""
        return type(self)(
            **{f.name: to_framework(getattr(self, f.name), framework) for f in fields(self)}
        )


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype called ``name``, including "bfloat16"."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def make(case: Case, seed: int = 0) -> Tensors:
    """Unit-size random inputs of ``case``, the same on every machine for the same ``seed``.

    They are read-only: a function that writes to its inputs is caught in the act.
    """
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    bad = {side: case.trapped(side) for side in "qk"}

    def draw(side: str, heads: int, width: int) -> Array:
        rows = len(bad[side])
        # Strided: one head and eight columns more than the case uses, all NaN.
        full = np.full((rows, heads + case.strided, width + 8 * case.strided), np.nan)
        full[:, :heads, :width] = rng.standard_normal((rows, heads, width))
        full[bad[side]] = np.nan
        full = full.astype(dtype_of(case.dtype))
        full.flags.writeable = False
        return full[:, :heads, :width] if case.strided else full

    q = draw("q", case.num_heads_q, case.head_dim)
    k = draw("k", case.num_heads_kv, case.head_dim)
    v = draw("k", case.num_heads_kv, case.head_dim_v)
    dout = draw("q", case.num_heads_q, case.head_dim_v)
    dlse = rng.standard_normal((case.num_heads_q, len(bad["q"]))).astype(lse_dtype(case.dtype))
    dlse[:, bad["q"]] = np.nan
    dlse.flags.writeable = False
    tangents = (
        draw("q", case.num_heads_q, case.head_dim),
        draw("k", case.num_heads_kv, case.head_dim),
        draw("k", case.num_heads_kv, case.head_dim_v),
    )
    direction = (t if there else None for t, there in zip(tangents, case.direction, strict=True))
    offsets = (
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        for lengths in (case.lengths_q, case.lengths_k)
    )
    wide = lse_dtype(case.dtype)
    sinks, tsinks = (rng.standard_normal(case.num_heads_q).astype(wide) for _ in range(2))
    sinks.flags.writeable = tsinks.flags.writeable = False
    return Tensors(
        *(q, k, v, dout, dlse if case.dlse else None, *offsets, *direction),
        sinks=sinks if case.sinks else None,
        tsinks=tsinks if case.sinks and case.sinks_direction else None,
        seqused_k=None if case.seqused_k is None else np.array(case.seqused_k, dtype=np.int32),
    )


def lse_dtype(dtype: str) -> np.dtype[Any]:
    """The dtype of lse and delta for inputs of ``dtype``."""
    return np.dtype("float64" if dtype == "float64" else "float32")


def standard(size: str) -> tuple[Case, ...]:
    """The standard cases, "small" (for a simulator or a slow function) or "large" (for a GPU).

    Small ones take the dtypes in turn; large ones come in float16 and in bfloat16, and those that
    the SIMT kernels see in float32 and float64 too.
    """
    if size == "small":
        plain = Case("", (), (), num_heads_kv=1, head_dim=16, head_dim_v=16)
        few = (FEW_HEAD_DIMS, HEAD_DIMS_APART[1:3])
        features = _features(plain, *few, block=16, long=45, many=6)
        return tuple(replace(c, dtype=DTYPES[i % len(DTYPES)]) for i, c in enumerate(features))
    plain = Case("", (), ())
    dims = ("dim-40", "dim-136", "dim-256")
    wide = ("edges", "edges-causal", "unequal-causal", "window", "softcap-sinks-seqused", *dims)
    return tuple(
        replace(case, dtype=dtype)
        for case in _features(plain, HEAD_DIMS, HEAD_DIMS_APART, block=128, long=1100, many=60)
        for dtype in DTYPES
        if dtype in HALF or case.name in wide
    )


def in_use(lengths: Lengths) -> Lengths:
    """Keys in use of sequences with so many: most of them, half, all, all but one, in turn."""
    return tuple((n - n // 3, n // 2, n, max(n - 1, 0))[b % 4] for b, n in enumerate(lengths))


def with_options(case: Case, softcap: float | None, sinks: bool, seqused: bool) -> Case:
    """``case``, capped, with sinks, with keys that are not in use; as it is in what is not asked
    for."""
    changes: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
    changes |= {"sinks": True, "poisoned": ()} if sinks else {}
    changes |= {"seqused_k": in_use(case.lengths_k)} if seqused else {}
    return replace(case, **changes)


def _features(
    plain: Case, dims: Lengths, dims_apart: Pairs, *, block: int, long: int, many: int
) -> Iterator[Case]:
    """``plain`` changed in one feature after the other, lengths around a tile of ``block`` rows."""

    def case(name: str, lengths_q: Lengths, lengths_k: Lengths = (), **changes: Any) -> Case:
        """With a NaN sequence put into the middle, one of numbers where there are sinks;
        ``lengths_k`` is by default ``lengths_q``."""
        changes |= {"lengths_q": lengths_q, "lengths_k": lengths_k or lengths_q}
        at = len(lengths_q) // 2
        for of in {"lengths_q", "lengths_k", "seqused_k"} & changes.keys():
            changes[of] = (*changes[of][:at], NEIGHBOUR, *changes[of][at:])
        poisoned = () if changes.get("sinks") else (at,)
        return replace(plain, name=name, poisoned=poisoned, **changes)

    edges = (0, 1, block - 1, block, block + 1, 0)
    short = (block + 1, 7)
    only_tq, only_tk, only_tv = (True, False, False), (False, True, False), (False, False, True)
    no_tq, no_tk, no_tv = (False, True, True), (True, False, True), (True, True, False)
    yield case("edges", edges)
    yield case("edges-causal", edges, causal=True)
    yield case("long", (long, 3), causal=True)
    yield case("group3", short[:1], causal=True, group=3)
    yield case("group8", (long // 5,), causal=True, group=8, num_heads_kv=1)
    yield case("two-kv-heads", (long // 5,), group=2, num_heads_kv=2, direction=no_tv)
    unequal = (3, block + 1, 0, 9, block), (block + 2, 5, 4, 0, block - 1)
    yield case("unequal", *unequal, group=2, direction=no_tk)
    yield case("unequal-causal", (3, block + 5, 2, 9), (block + 2, 5, 0, 9), causal=True)
    decode = (1, 1, 1), (block + 1, 2 * block, 3)
    yield case("decode", *decode, causal=True, group=3, direction=no_tq)
    yield case("window", (block + 9, 4, block - 1), window=(6, 3))
    yield case("window-causal", (2 * block + 1, 9), window=(block, -1), causal=True)
    yield case("window-left-open", (block + 9, 6), (block, 11), window=(-1, 2))
    yield case("window-right-open", (block + 9, 6), (block, 11), window=(3, -1))
    yield case("window-narrow", (block + 3, 5), window=(0, 1))
    yield case("all-dead", short, (0, 0), past_k=4)
    yield case("dead-but-few", short, (4, 3), causal=True)
    yield case("scale", short, softmax_scale=0.5, causal=True, direction=only_tq)
    yield case("no-dlse", short, dlse=False, direction=only_tk)
    yield case("no-rows-past-the-end", short, past_q=0, past_k=0, direction=only_tv)
    yield case("strided", short, strided=True, causal=True, group=2)
    yield case("strided-dim-40", short, strided=True, head_dim=40, head_dim_v=24)
    rng = np.random.default_rng(0)
    lengths = tuple(int(n) for n in rng.integers(0, block // 2, many))
    yield case("many", lengths, causal=True)
    for d in dims:
        yield case(f"dim-{d}", short, causal=True, head_dim=d, head_dim_v=d)
    for d, dv in dims_apart:
        yield case(f"dim-{d}-{dv}", short, causal=True, head_dim=d, head_dim_v=dv)
    yield case("no-direction", short[:1], direction=(False, False, False))
    yield replace(plain, name="no-keys", lengths_q=(4, 2), lengths_k=(0, 0), past_k=0)
    yield replace(plain, name="no-sequences")
    yield replace(plain, name="no-tokens", lengths_q=(0,), lengths_k=(0,), past_q=0, past_k=0)
    none, dead = (False, False, False), ((3, block + 5, 2, 9), (block + 2, 5, 0, 9))
    few, fewer = (block - 1, 5, 0, 0, 3), (block // 2, 4, 0, 9)
    two: dict[str, Any] = {"group": 2, "num_heads_kv": 2}
    yield case("softcap", short, softcap=1.5, causal=True, group=3)
    yield case("softcap-sinks", short, softcap=1.0, sinks=True, window=(6, 3), **two)
    yield case("sinks", edges, sinks=True, causal=True, group=3)
    yield case("sinks-dead", *dead, sinks=True, causal=True, direction=none)
    yield case("seqused", *unequal, seqused_k=few, group=2)
    steep: dict[str, Any] = {"softcap": 4.0, "softmax_scale": 1.0}
    yield case("softcap-seqused", *dead, seqused_k=fewer, causal=True, window=(block, -1), **steep)
    every = two | {"softcap": 1.5, "sinks": True, "seqused_k": few, "sinks_direction": False}
    yield case("softcap-sinks-seqused", *unequal, causal=True, **every)
