"""What kernels for Hopper know of a softcap: kernels_cu/sm90/softcap.cuh."""

import math
from functools import lru_cache

from rawattn.problem import Problem

CAP_SIZES = tuple((name, "f") for name in ("a0", "a1", "a2", "inverse", "limit"))  # struct CapSizes
CAP_SIZES += tuple((name, "f") for name in ("top", "bend", "masked", "least", "most"))
_SMALL = 0.3  # the largest argument of tanh that has a polynomial, of the least largest error
_TANH = 0.999996006489, -0.332974791527, 0.125225916505
_WEIGHTLESS = 12.0
_LOG2E = 1 / math.log(2)


@lru_cache(maxsize=4096)
def cap_sizes(problem: Problem) -> tuple[float, ...]:
    """The values of CAP_SIZES, zeros without a softcap."""
    if not problem.softcap:
        return (0.0,) * len(CAP_SIZES)
    inverse = problem.softmax_scale / problem.softcap
    powers = [inverse ** (2 * n) for n in range(3)]
    tanh = [a * problem.softmax_scale * _LOG2E * x for a, x in zip(_TANH, powers, strict=True)]
    # of so small an inverse float32 has no fourth power: then no element is small
    limit = _SMALL / inverse if inverse > 1e-8 else 0.0
    # Where x is below -0.3 the polynomials are wrong, by 1e-3 at -0.6; from _WEIGHTLESS powers of e
    # below L on, such a score has no weight.
    most = problem.softcap * math.tanh(_SMALL) if limit else 0.0
    bounds = (_WEIGHTLESS - most, most) if 2 * most > _WEIGHTLESS else (math.inf, -math.inf)
    top = problem.softcap * _LOG2E
    return (*tanh, inverse, limit, top, top**-2, -2 * top - 1000, *bounds)
