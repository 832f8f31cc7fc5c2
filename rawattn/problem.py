"""What one call computes, in plain numbers; built once from the arrays, read by all after."""

from dataclasses import dataclass


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """Shapes, dtype, mask and device of one packed attention call.

    Compared by identity, so that what follows from a Problem is found again at no cost: calls of
    the same shapes get the same one from ``call.pose``.

    ``dtype`` is "float16", "bfloat16", "float32" or "float64". ``window_left`` and
    ``window_right`` are inclusive distances around i + seqlen_k - seqlen_q, -1 is open; causal is
    ``window_right`` 0. ``softcap`` is 0 where there is none; the last two say whether there are
    sinks and a seqused_k.
    ``arch`` is the compute capability as a number (90 for 9.0), 0 on the CPU;
    ``device`` the CUDA ordinal, -1 on the CPU; ``num_sms`` the GPU's multiprocessors (132: of an
    H100 or H200), by which ``variants.select`` tells a small grid. Nothing here depends on the
    content of cu_seqlens.
    """

    dtype: str
    batch: int
    total_q: int
    total_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    window_left: int
    window_right: int
    softmax_scale: float
    arch: int
    device: int
    num_sms: int = 132
    softcap: float = 0.0
    has_sinks: bool = False
    has_seqused_k: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads_q // self.num_heads_kv


@dataclass(frozen=True, slots=True)
class Selection:
    """What block-sparse attention adds to a Problem: which blocks of keys each query may see.

    An item is a query token with one of ``num_heads_sel`` selection heads, which are num_heads_kv
    or num_heads_q. It names ``num_selected`` blocks of ``block_size`` keys, and with ``own`` sees
    the causal part of its own block too: the lists of items are ``width`` long. The lists of the
    queries of a key block are cut into chunks of ``chunk`` query tokens.
    """

    num_heads_sel: int
    num_selected: int
    block_size: int
    own: bool
    chunk: int

    @property
    def width(self) -> int:
        """Blocks that an item can see."""
        return self.num_selected + self.own

    def group(self, problem: Problem) -> int:
        """Query heads that share one selection."""
        return problem.num_heads_q // self.num_heads_sel

    def blocks(self, problem: Problem) -> tuple[int, int]:
        """What a row is specialised to: heads that share a selection, keys of a block."""
        return self.group(problem), self.block_size

    def ratio(self, problem: Problem) -> int:
        """Selection heads that share one key/value head."""
        return self.num_heads_sel // problem.num_heads_kv

    def key_units(self, problem: Problem) -> int:
        """Upper bound of the key blocks of all sequences; block n of sequence b that starts at key
        start is unit start // block_size + b + n."""
        return problem.total_k // self.block_size + problem.batch

    def segment(self, problem: Problem) -> int:
        """Items of a segment of work: 4096 rows, beside which adding up dK and dV is little."""
        return max(1, _SEGMENT_ROWS // self.group(problem))

    def segments(self, problem: Problem) -> int:
        """Upper bound of the segments of all lists, one at least: a grid is not empty."""
        items = self.num_heads_sel * problem.total_q * self.width
        return max(1, min(self.lists(problem), items) + items // self.segment(problem))

    def is_cut(self, problem: Problem) -> bool:
        """Whether lists are worked at by segments: several chunks, or lists of many segments."""
        items = problem.total_q * self.ratio(problem)
        return self.num_chunks(problem) > 1 or items > _FEW_SEGMENTS * self.segment(problem)

    def lists(self, problem: Problem) -> int:
        """Lists of the queries of a chunk that see a block of keys."""
        return self.num_chunks(problem) * problem.num_heads_kv * self.key_units(problem)

    def num_chunks(self, problem: Problem) -> int:
        """Chunks that the query tokens are cut into, sequences regardless."""
        return max(1, -(-problem.total_q // self.chunk))


_SEGMENT_ROWS = 4096
_FEW_SEGMENTS = 4  # of a list, that one CTA goes through without keeping the others waiting
_L2_SHARE = 16 << 20  # bytes of a chunk's dQ sums: with its Q and dO they stay in a 50 MB L2
_MOST_CHUNKS = 64  # keeps the lists' offsets linear in the tokens


def default_chunk(total_q: int, group: int, head_dim: int) -> int:
    """Query tokens of a chunk: their gradients stay in the L2 cache while key blocks add to them.

    ``group`` query heads read one kv head. A power of two.
    """
    wanted = max(_L2_SHARE // (4 * group * head_dim), -(-total_q // _MOST_CHUNKS), 256)
    return 1 << (wanted - 1).bit_length()
