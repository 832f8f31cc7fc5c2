"""The benchmark's cases: suites of packed self-attention, and the work each direction takes."""

from dataclasses import dataclass, replace

# Log-normal document lengths (mean about 1200), 32768 tokens in all.
# fmt: off
DOCUMENTS = (
    3399, 543, 83, 1285, 247, 180, 1090, 1683, 355, 487, 401, 874, 310, 2188, 250, 823, 414, 1057,
    299, 161, 1055, 3123, 1863, 1580, 882, 2576, 201, 330, 713, 355, 1223, 196, 882, 1253, 80, 327,
)
# fmt: on
# One long document among many short ones.
SKEWED = (24576, *(64,) * 128)
# Eight sequences of unequal, short length.
EIGHT = (1856, 704, 1280, 1664, 320, 1344, 960, 832)
# Many sequences that fill less than a tile each, none of a tile's own length.
SHORT = (33, 35) * 4096

# Matrix products of each direction: of so many with head_dim, and with head_dim_v.
WORK = {"forward": (1, 1), "backward": (3, 2), "second": (10, 5), "jvp": (3, 3)}
FIRST_ORDER = ("forward", "backward")
SECOND_ORDER = ("second", "jvp")


@dataclass(frozen=True)
class Blocks:
    """``num_selected`` blocks of keys for each query of a causal sequence, as selections.py draws.

    ``own``: its own block comes beside them, else it is one of them.
    """

    num_selected: int
    block_size: int
    own: bool = False
    local: bool = False

    def pairs(self, seqlen: int) -> int:
        """Allowed pairs: every earlier block there is up to so many, and the causal part of its own
        block."""
        others = self.num_selected - (not self.own)
        return sum(
            min(i // self.block_size, others) * self.block_size + i % self.block_size + 1
            for i in range(seqlen)
        )


@dataclass(frozen=True)
class BenchCase:
    """One problem: ``lengths`` tokens per sequence; ``dtype`` as torch spells it.

    ``directions``: what its suite measures of it, of the names in WORK. ``selection``: block-sparse
    attention, whose selections belong to kv heads. ``alone``: no peer is measured beside ours.
    ``window``: a query sees so many keys before its own, causally; -1 is all of them.
    ``head_dim_v``: as head_dim where none is given.
    """

    suite: str
    name: str
    lengths: tuple[int, ...]
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    causal: bool
    dtype: str = "bfloat16"
    directions: tuple[str, ...] = FIRST_ORDER
    selection: Blocks | None = None
    alone: bool = False
    window: int = -1
    head_dim_v: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)

    @property
    def total(self) -> int:
        """Tokens over all sequences."""
        return sum(self.lengths)

    @property
    def equal_lengths(self) -> bool:
        """Whether a peer without packed sequences can compute it too."""
        return len(set(self.lengths)) == 1

    def flop(self, direction: str) -> float:
        """Operations of the matrix products over the allowed pairs."""
        products, products_v = WORK[direction]
        dims = products * self.head_dim + products_v * self.head_dim_v
        return 2.0 * dims * self.num_heads_q * self.pairs

    @property
    def pairs(self) -> int:
        """Allowed pairs of query and key over all sequences, of one head."""
        return sum(map(self._pairs, self.lengths))

    def _pairs(self, seqlen: int) -> int:
        if self.selection:
            return self.selection.pairs(seqlen)
        if self.window >= 0:
            return sum(min(i, self.window) + 1 for i in range(seqlen))
        return seqlen * (seqlen + 1) // 2 if self.causal else seqlen**2


def paper() -> list[BenchCase]:
    """16384 tokens in sequences of equal length, num_heads * head_dim = 2048."""
    return [
        BenchCase(
            suite="paper",
            name=f"d{head_dim}_s{seqlen}_{'c' if causal else 'f'}",
            lengths=(seqlen,) * (16384 // seqlen),
            num_heads_q=2048 // head_dim,
            num_heads_kv=2048 // head_dim,
            head_dim=head_dim,
            causal=causal,
        )
        for head_dim in (64, 128, 256)
        for seqlen in (512, 2048, 8192, 16384)
        for causal in (False, True)
    ]


def varlen() -> list[BenchCase]:
    """32768 tokens of documents: many heads, grouped heads, one document far longer than others."""
    return [
        BenchCase(
            "varlen", f"{name}_d{head_dim}_{'c' if causal else 'f'}", *shape, head_dim, causal
        )
        for head_dim in (64, 128)
        for causal in (False, True)
        for name, *shape in (
            ("docs", DOCUMENTS, 2048 // head_dim, 2048 // head_dim),
            ("gqa_docs", DOCUMENTS, 32, 8),
            ("skew", SKEWED, 16, 16),
        )
    ]


def seed() -> list[BenchCase]:
    """Small problems: eight short sequences in both dtypes, and two of 2048 tokens."""
    eight = [
        BenchCase(
            suite="seed",
            name=f"varlen8960_{short}_{'c' if causal else 'f'}",
            lengths=EIGHT,
            num_heads_q=16,
            num_heads_kv=16,
            head_dim=64,
            causal=causal,
            dtype=dtype,
        )
        for short, dtype in (("bf16", "bfloat16"), ("fp16", "float16"))
        for causal in (False, True)
    ]
    two = BenchCase("seed", "triton_b2h4t2048d128", (2048, 2048), 4, 4, 128, False, "float16")
    return [*eight, two]


def dims() -> list[BenchCase]:
    """The other native head_dims on sequences of 2048 and 8192 tokens, and 192 beside values of 128
    (multi-head latent attention); 2048 or 12 * head_dim in all heads."""
    return [
        BenchCase(
            "dims",
            f"{name}_s{seqlen}_{'c' if causal else 'f'}",
            (seqlen,) * (16384 // seqlen),
            heads,
            heads,
            head_dim,
            causal,
            head_dim_v=head_dim_v,
        )
        for name, head_dim, head_dim_v, heads in (
            ("d32", 32, 32, 64),
            ("d96", 96, 96, 12),
            ("d192", 192, 192, 12),
            ("d192_v128", 192, 128, 12),
        )
        for seqlen in (2048, 8192)
        for causal in (False, True)
    ]


def many_short() -> list[BenchCase]:
    """8192 sequences of 33 and 35 tokens in turn: finding a sequence is most of the work."""
    return [
        BenchCase("many_short", f"short_d{head_dim}", SHORT, 16, 16, head_dim, True)
        for head_dim in (64, 128)
    ]


def windows() -> list[BenchCase]:
    """One sequence of 16384 tokens, causal windows of 128 and 1024 keys."""
    return [
        BenchCase(
            suite="windows",
            name=f"window{window}_d{head_dim}",
            lengths=(16384,),
            num_heads_q=2048 // head_dim,
            num_heads_kv=2048 // head_dim,
            head_dim=head_dim,
            causal=True,
            window=window,
        )
        for window in (128, 1024)
        for head_dim in (64, 128)
    ]


def second() -> list[BenchCase]:
    """Second backward and forward mode, from tiny to what N x N matrices just fit a card for."""
    return [
        BenchCase(
            suite="second",
            name=f"b{batch}_h{heads}_t{seqlen}_d{head_dim}_{'c' if causal else 'f'}",
            lengths=(seqlen,) * batch,
            num_heads_q=heads,
            num_heads_kv=heads,
            head_dim=head_dim,
            causal=causal,
            directions=directions,
        )
        for directions, batch, heads, seqlen, head_dim, causal in (
            (("second",), 2, 2, 128, 64, False),
            (("second",), 1, 4, 512, 128, False),
            (("second",), 1, 4, 1024, 128, False),
            (SECOND_ORDER, 1, 1, 8192, 64, False),
            (("second",), 1, 1, 8192, 64, True),
            (SECOND_ORDER, 4, 16, 2048, 64, True),
            (SECOND_ORDER, 2, 16, 4096, 128, True),
            (("jvp",), 1, 16, 8192, 128, True),
            (("jvp",), 1, 16, 8192, 128, False),
            (("second",), 1, 16, 16384, 128, True),
        )
    ]


def second_length() -> list[BenchCase]:
    """The second backward of one causal sequence, ever longer."""
    return [
        BenchCase("second_length", f"t{n}", (n,), 16, 16, 128, True, directions=("second",))
        for n in (1024 << doubled for doubled in range(7))
    ]


def _sparse(suite: str, name: str, tokens: int, head_dim: int, local: bool = False) -> BenchCase:
    """One sequence, 16 query heads on each kv head, 16 blocks of 64 keys for every query."""
    blocks = Blocks(16, 64, local=local)
    return BenchCase(suite, name, (tokens,), 64, 4, head_dim, True, selection=blocks)


def sparse() -> list[BenchCase]:
    """Random selections: groups of 16 heads, and of 4 whose own block comes beside the selected."""
    wide = [
        _sparse("sparse", f"g16_t{tokens}_d{head_dim}", tokens, head_dim)
        for tokens in (8192, 16384, 32768, 65536)
        for head_dim in (64, 128)
    ]
    narrow = [
        BenchCase(
            suite="sparse",
            name=f"g4_t{tokens}_d{head_dim}_{num_selected}x{block_size}",
            lengths=(tokens,),
            num_heads_q=16,
            num_heads_kv=4,
            head_dim=head_dim,
            causal=True,
            selection=Blocks(num_selected, block_size, own=True),
        )
        for tokens in (2048, 8192)
        for head_dim in (64, 128)
        for num_selected, block_size in ((4, 64), (16, 16))
    ]
    return [*wide, *narrow]


def sparse_local() -> list[BenchCase]:
    """The groups of 16 heads again, with selections that neighbouring queries share mostly."""
    return [
        _sparse("sparse_local", f"local_t{tokens}_d{head_dim}", tokens, head_dim, local=True)
        for tokens in (8192, 16384, 32768, 65536)
        for head_dim in (64, 128)
    ]


def sparse_length() -> list[BenchCase]:
    """Time and memory of one sequence, ever longer; ours alone."""
    return [
        replace(_sparse("sparse_length", f"sparse_t{tokens}", tokens, 128), alone=True)
        for tokens in (1024 << doubled for doubled in range(9))
    ]


SUITES = {
    "paper": paper,
    "varlen": varlen,
    "seed": seed,
    "dims": dims,
    "many_short": many_short,
    "windows": windows,
    "second": second,
    "second_length": second_length,
    "sparse": sparse,
    "sparse_local": sparse_local,
    "sparse_length": sparse_length,
}
