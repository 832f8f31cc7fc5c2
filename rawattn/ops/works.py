"""Launches for Hopper whose CTAs take one tile after the other: kernels_cu/sm90/works.cuh."""

from itertools import count

from rawattn.ops.arguments import Layout
from rawattn.problem import Problem
from rawattn.variants import COUNTERS, Row

NUMBERS = (("num_tiles", "i"), ("counter", "i"))  # the last fields of such a kernel's ``Args``
NO_COUNTER = -1
_launches = count()


def with_counter(layout: Layout, packed: bytes) -> bytes:
    """The arguments with a counter that no other launch has that may run at the same time."""
    at = layout.offset("counter")
    return packed[:at] + (next(_launches) % COUNTERS).to_bytes(4, "little") + packed[at + 4 :]


def grid_of(row: Row, problem: Problem, works: int) -> tuple[int, int, int]:
    """As many CTAs as run at once, or as there are works for; whole clusters."""
    cluster = row.cfg.cluster
    return (min(works, problem.num_sms * row.cfg.min_ctas // cluster) * cluster, 1, 1)
