"""Launches for Hopper whose CTAs take one tile after the other: kernels_cu/sm90/works.cuh."""

from functools import cache
from itertools import count

from rawattn.ops.arguments import Layout
from rawattn.problem import Problem
from rawattn.variants import COUNTERS, Row

NUMBERS = (("num_tiles", "i"), ("counter", "i"))  # the last fields of such a kernel's ``Args``
NO_COUNTER = -1
_launches = count()


@cache
def _counter_of(layout: Layout) -> slice:
    at = layout.offset("counter")
    return slice(at, at + 4)


def with_counter(layout: Layout, packed: bytes) -> bytes:
    """The arguments with a counter that no other launch has that may run at the same time."""
    at = _counter_of(layout)
    counter = (next(_launches) % COUNTERS).to_bytes(4, "little")
    return packed[: at.start] + counter + packed[at.stop :]


def grid_of(row: Row, problem: Problem, works: int) -> tuple[int, int, int]:
    """As many CTAs as run at once, or as there are works for; whole clusters."""
    cfg = row.cfg
    at_once = problem.num_sms * cfg.min_ctas // cfg.cluster
    return (min(works, at_once) * cfg.cluster, 1, 1)
