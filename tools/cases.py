"""The benchmark's cases: three suites of packed self-attention, and the work each takes."""

from dataclasses import dataclass

# Log-normal document lengths (mean about 1200), 32768 tokens in all.
DOCUMENTS = (
    *(
        3399,
        543,
        83,
        1285,
        247,
        180,
        1090,
        1683,
        355,
        487,
        401,
        874,
        310,
        2188,
        250,
        823,
        414,
        1057,
    ),
    *(
        299,
        161,
        1055,
        3123,
        1863,
        1580,
        882,
        2576,
        201,
        330,
        713,
        355,
        1223,
        196,
        882,
        1253,
        80,
        327,
    ),
)
# One long document among many short ones.
SKEWED = (24576, *(64,) * 128)
# Eight sequences of unequal, short length.
EIGHT = (1856, 704, 1280, 1664, 320, 1344, 960, 832)

BACKWARD_WORK = 2.5  # five matrix products where the forward has two


@dataclass(frozen=True)
class BenchCase:
    """One problem: ``lengths`` tokens per sequence; ``dtype`` as torch spells it."""

    suite: str
    name: str
    lengths: tuple[int, ...]
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    causal: bool
    dtype: str = "bfloat16"

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
        pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)
        forward = 4.0 * self.num_heads_q * self.head_dim * pairs
        return forward * BACKWARD_WORK if direction == "backward" else forward


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


SUITES = {"paper": paper, "varlen": varlen, "seed": seed}
