"""What a step costs by each method: bytes and operations counted, seconds by given rates.

It is a model, to choose by: of a rank's work on the pairs that its rows see, of the bytes that come
to it, and of which of the two hides behind the other.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rawattn.torch.context_parallel.stages import Lengths, Stage, Window, pairs

FORWARD, BACKWARD = (2, 2), (6, 4)  # operations a pair, by head_dim and by head_dim_v


class Rates(NamedTuple):
    """What a rank does in a second.

    flops: of attention; the default is between rawattn's forward and backward on an H200 with
    head_dim 128. received: bytes from the others; the default is two thirds of what NVLink 4 moves
    one way, not measured. memory: bytes that the device reads or writes, an H200's. latency:
    seconds of one exchange, or of one call of attention.
    """

    flops: float = 5.5e14
    received: float = 3e11
    memory: float = 4e12
    latency: float = 3e-5


class Sizes(NamedTuple):
    """Of a token. ``itemsize``: bytes of a number."""

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    itemsize: int

    @property
    def key(self) -> int:
        """Bytes of its key and value."""
        return self.num_heads_kv * (self.head_dim + self.head_dim_v) * self.itemsize

    def flops(self, of: tuple[int, int]) -> int:
        """Of a pair, all heads."""
        return self.num_heads_q * (of[0] * self.head_dim + of[1] * self.head_dim_v)


class Estimate(NamedTuple):
    """Of a forward and a backward, for the rank that has most of each.

    received: bytes that come to it. kept: bytes of others' that it has at once. flops: of its
    products. seconds: of the step, by the rates given.
    """

    received: int
    kept: int
    flops: float
    seconds: float


class Share(NamedTuple):
    """A rank's part in a stage: pairs of rows and keys, calls, rows in them; others' keys that come
    to it, and keys of it that go to others."""

    pairs: int
    calls: int
    rows: int
    foreign: int
    lent: int


def pairs_of(stage: Stage, lengths: Lengths, window: Window) -> int:
    """How many keys the rows of a stage see in it."""
    total = 0
    for call in stage.calls:
        for meeting in call.meetings:
            segment = stage.segments[meeting.segment]
            offset = lengths.k[segment.sequence] - lengths.q[segment.sequence]
            rows, keys = (meeting.start, meeting.stop), (segment.start, meeting.end)
            total += pairs(rows, keys, offset, window)
    return total


def of_stages(
    stages: Sequence[Sequence[Share]], sizes: Sizes, rates: Rates, parts: int
) -> Estimate:
    """By stage and rank. Keys of a stage, and the gradients of the one before, are under way while
    it is computed; of one stage they are cut by heads into ``parts``."""
    ranks = range(len(stages[0]) if stages else 0)
    once = len(stages) == 1
    seconds = 0.0
    for of, trips in ((FORWARD, 1), (BACKWARD, 2)):
        work = [max(_work(x, sizes, rates, of, once) for x in stage) for stage in stages]
        way = [
            max(_way(sizes.key * x.foreign, rates) for x in stage)
            + (trips - 1) * max(_way(sizes.key * x.lent, rates) for x in stage)
            for stage in stages
        ]
        if once:
            longer, shorter = max(work[0], way[0]), min(work[0], way[0])
            seconds += longer + shorter / parts
        else:
            seconds += sum(max(a, b) for a, b in zip([*work, 0.0], [0.0, *way], strict=True))
    received = [
        sizes.key * sum(2 * stage[r].foreign + stage[r].lent for stage in stages) for r in ranks
    ]
    kept = [sizes.key * max(stage[r].foreign for stage in stages) for r in ranks]
    every = sizes.flops(FORWARD) + sizes.flops(BACKWARD)
    flops = [float(every * sum(stage[r].pairs for stage in stages)) for r in ranks]
    return Estimate(
        max(received, default=0), max(kept, default=0), max(flops, default=0.0), seconds
    )


def of_heads(
    tokens: tuple[Sequence[int], Sequence[int]],
    pairs: int,
    keys_here: int,
    sizes: Sizes,
    rates: Rates,
) -> Estimate:
    """Of all tokens of some heads. ``tokens``: queries and keys of each rank; ``keys_here``: key
    heads of a rank, of which several may have the same."""
    ranks = len(tokens[0])
    heads = sizes.num_heads_q // ranks
    width = sizes.head_dim + sizes.head_dim_v
    kept, received = [], []
    for own_q, own_k in zip(*tokens, strict=True):
        away_q, away_k = sum(tokens[0]) - own_q, sum(tokens[1]) - own_k
        here = (away_q * heads + away_k * keys_here) * width * sizes.itemsize
        back_q = own_q * (sizes.num_heads_q - heads) * width
        back_k = own_k * (ranks - 1) * keys_here * width
        kept.append(here)  # q, k, v, and out, which are saved
        # forward: q, k and v come, out goes back; backward: dout comes, dq, dk and dv go back
        received.append(here + (back_q + back_k) * sizes.itemsize)
    every = sizes.flops(FORWARD) + sizes.flops(BACKWARD)
    flops = every * pairs / ranks
    seconds = flops / rates.flops + _way(max(received), rates) + 8 * rates.latency
    return Estimate(max(received), max(kept), flops, seconds)


def _work(x: Share, sizes: Sizes, rates: Rates, of: tuple[int, int], once: bool) -> float:
    """Seconds of a rank's calls in a stage, and of adding their results to what there was."""
    wide = 0 if once else x.rows * sizes.num_heads_q * sizes.head_dim_v * 4 * 3
    return x.pairs * sizes.flops(of) / rates.flops + x.calls * rates.latency + wide / rates.memory


def _way(received: int, rates: Rates) -> float:
    return received / rates.received + rates.latency if received else 0.0
