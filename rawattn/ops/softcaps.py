"""What kernels for Hopper know of a softcap: kernels_cu/sm90/softcap.cuh."""

import math
from functools import cache, lru_cache

import numpy as np

from rawattn.problem import Problem

_NAMES = ("a0", "a1", "a2", "limit", "twice", "top", "masked", "least", "most")
CAP_SIZES = tuple((name, "f") for name in _NAMES)  # struct CapSizes
_REACHES = 0.4, 0.35, 0.3, 0.25, 0.2, 0.15  # the largest arguments of tanh that have a polynomial
_ERROR = 2.0**-18  # of a score, as its polynomial may have; of the last reach float32 has as much
_WEIGHT = 2.0**-22  # of a P, likewise
_LOG2E = 1 / math.log(2)


@lru_cache(maxsize=4096)
def cap_sizes(problem: Problem, *, of_scores: bool) -> tuple[float, ...]:
    """The values of CAP_SIZES, zeros without a softcap.

    ``of_scores``: the polynomial is that of scores, in powers of two; else of tanh(X / c).
    """
    cap = problem.softcap
    if not cap:
        return (0.0,) * len(CAP_SIZES)
    inverse, top = problem.softmax_scale / cap, cap * _LOG2E
    reach = next((x for x in _REACHES if cap * _fit(x)[1] <= _ERROR), _REACHES[-1])
    a, _ = _fit(reach)
    # P as it is below -reach, and as the polynomial, which goes on to fall, makes it
    x = np.linspace(reach, 3, 1000)
    wrong = np.abs(np.exp2(-top * np.tanh(x)) - np.exp2(-top * (_powers(x) @ a))).max()
    least = math.log2(max(wrong, 2.0**-top, 1e-300) / _WEIGHT)
    unit = top if of_scores else 1.0
    a0, a1, a2 = (unit * a[n] * inverse ** (2 * n + 1) for n in range(3))
    sizes = reach / inverse, 2 * _LOG2E * inverse, top, -2 - 1000 / top
    return (a0, a1, max(a2, 1e-36), *sizes, least, top * math.tanh(reach))  # a2 in float32 too


@cache
def _fit(reach: float) -> tuple[np.ndarray, float]:
    """tanh(x) = x (a0 + a1 x^2 + a2 x^4) up to ``reach``: a0 to a2, and the largest error.

    Equal at a Chebyshev polynomial's roots, which is within a little of the least largest error.
    """
    roots = reach * np.cos(np.pi / 14 * np.array([1, 3, 5]))
    a = np.linalg.solve(_powers(roots), np.tanh(roots))
    x = np.linspace(0, reach, 1000)
    return a, float(np.abs(_powers(x) @ a - np.tanh(x)).max())


def _powers(x: np.ndarray) -> np.ndarray:
    return np.stack([x, x**3, x**5], axis=-1)
