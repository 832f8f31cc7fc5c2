"""What a step costs by each method: bytes and operations counted, seconds by given rates.

It is a model, to choose by: of a rank's work on the pairs that its rows see, of the bytes that come
to it, and of which of the two hides behind the other.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rawattn.torch.context_parallel.stages import Lengths, Stage, Window, pairs

FORWARD, BACKWARD = (2, 2), (6, 4)  # operations a pair, by head_dim and by head_dim_v


class Rates(NamedTuple):
    """What a rank does in a second.

    The defaults are those of two H100, measured. flops: of attention, forward and backward, with
    head_dim 128. received: bytes from the others by copy engines over NVLink, while as many leave.
    memory: bytes that the device reads or writes, an H200's. latency: seconds that one exchange, or
    one call of attention, takes beyond its size.
    """

    flops: float = 6e14
    received: float = 2.2e11
    memory: float = 4e12
    latency: float = 1e-4


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
    products. seconds: of the step, by the rates given. parts: in so many heads go, which is the
    quickest.
    """

    received: int
    kept: int
    flops: float
    seconds: float
    parts: int


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


class Step(NamedTuple):
    """Of a rank, seconds: until what it computes with has come, when nothing else is on the way, of
    its work, and until what it makes is where it belongs."""

    there: float
    work: float
    back: float


def seconds_of(steps: Iterable[Step]) -> float:
    """Of steps one after the other, while what belongs to others is on the way."""
    arrived = done = home = 0.0
    for there, work, back in steps:
        arrived += there
        done = max(done, arrived) + work
        home = max(done, home) + back if back else home
    return max(done, home)


def of_stages(
    stages: Sequence[Sequence[Share]], sizes: Sizes, rates: Rates, method: str, parts: int
) -> Estimate:
    """By stage and rank. Others' keys come by heads in ``parts``, and their gradients go
    back so."""
    ranks = range(len(stages[0]) if stages else 0)
    once = method == "gather"

    def steps(r: int, of: tuple[int, int], home: bool) -> Iterator[Step]:
        for stage in stages:
            share = stage[r]
            cut = parts if any(x.foreign for x in stage) else 1
            foreign, lent = (_way(sizes.key * n // cut, rates) for n in (share.foreign, share.lent))
            work = _work(share, sizes, rates, of, once, cut)
            yield from [Step(foreign, work, max(foreign, lent) if home else 0.0)] * cut

    seconds = [
        seconds_of(steps(r, FORWARD, False)) + seconds_of(steps(r, BACKWARD, True)) for r in ranks
    ]
    received = [
        sizes.key * sum(2 * stage[r].foreign + stage[r].lent for stage in stages) for r in ranks
    ]
    kept = [sizes.key * (sum if once else max)(stage[r].foreign for stage in stages) for r in ranks]
    every = sizes.flops(FORWARD) + sizes.flops(BACKWARD)
    flops = [float(every * sum(stage[r].pairs for stage in stages)) for r in ranks]
    most = max(received, default=0), max(kept, default=0), max(flops, default=0.0)
    return Estimate(*most, max(seconds, default=0.0), parts)


def of_heads(
    tokens: tuple[Sequence[int], Sequence[int]],
    pairs: int,
    keys_here: int,
    sizes: Sizes,
    rates: Rates,
    parts: int,
) -> Estimate:
    """Of all tokens of some heads. ``tokens``: queries and keys of each rank; ``keys_here``: key
    heads of a rank, of which several may have the same, and which go in ``parts``."""
    ranks = len(tokens[0])
    heads = sizes.num_heads_q // ranks
    kept, received, seconds = [], [], []
    for own_q, own_k in zip(*tokens, strict=True):
        away_q, away_k = sum(tokens[0]) - own_q, sum(tokens[1]) - own_k
        here = [  # q, k, v, out
            away_q * heads * sizes.head_dim,
            away_k * keys_here * (sizes.head_dim + sizes.head_dim_v),
            away_q * heads * sizes.head_dim_v,
        ]
        back = [
            own_q * (sizes.num_heads_q - heads) * sizes.head_dim,
            own_k * (ranks - 1) * keys_here * (sizes.head_dim + sizes.head_dim_v),
            own_q * (sizes.num_heads_q - heads) * sizes.head_dim_v,
        ]
        kept.append(sum(here) * sizes.itemsize)
        # forward: q, k and v come, out goes back; backward: dout comes, dq, dk and dv go back
        received.append((sum(here) + sum(back)) * sizes.itemsize)
        both = (max(a, b) * sizes.itemsize // parts for a, b in zip(here, back, strict=True))
        q, k, out = (_way(n, rates) for n in both)
        for of, there, home in ((FORWARD, q + k, out), (BACKWARD, out, q + k)):
            work = sizes.flops(of) * pairs / ranks / parts / rates.flops + rates.latency
            seconds.append(seconds_of([Step(there, work, home)] * parts))
    every = sizes.flops(FORWARD) + sizes.flops(BACKWARD)
    slowest = max(seconds[::2]) + max(seconds[1::2])
    return Estimate(max(received), max(kept), every * pairs / ranks, slowest, parts)


def _work(
    x: Share, sizes: Sizes, rates: Rates, of: tuple[int, int], once: bool, parts: int
) -> float:
    """Seconds of a part of a rank's calls in a stage, and of adding their results to what there
    was."""
    wide = 0 if once else x.rows * sizes.num_heads_q * sizes.head_dim_v * 4 * 3
    by_size = x.pairs * sizes.flops(of) / rates.flops + wide / rates.memory
    return by_size / parts + x.calls * rates.latency


def _way(received: int, rates: Rates) -> float:
    return received / rates.received + rates.latency if received else 0.0
