"""Candidates on cases: who judges what, and the rows of results that come of it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rawattn.check.candidate import Candidate, Unsupported
from rawattn.check.cases import HALF, Case, standard
from rawattn.check.diff import Share, Verdict
from rawattn.check.expected import Expected, expect
from rawattn.check.machine import gpu_name
from rawattn.variants import METHODS

Job = tuple[Case, str, tuple[str, ...]]  # case, backend, methods of backward
Results = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of one case. ``shares`` splits the error by sequence and head, largest first."""

    case: str
    backend: str
    tensor: str
    verdict: Verdict
    shares: tuple[Share, ...] = ()


def evaluate(candidate: Candidate, case: Case, against: Candidate | None = None) -> list[Row]:
    """Run ``candidate`` on ``case`` and judge every tensor that it gives.

    With ``against`` the two are compared on what both give. A case that the candidate has no
    parameter for gives one "skipped" row, an exception one "FAIL" row; nothing is raised.
    """
    case = candidate.fit(case if against is None else against.fit(case))
    expected = expect(case)
    try:
        found = candidate.run(expected)
        other = None if against is None else against.run(expected)
        return _judged(candidate.name, expected, found, other)
    except Unsupported as lack:
        verdict = Verdict(np.nan, np.nan, "skipped", str(lack))
    except Exception as error:  # whatever a candidate throws is its result
        verdict = Verdict(np.nan, np.nan, "FAIL", f"{type(error).__name__}: {error}")
    return [Row(str(case), candidate.name, "-", verdict)]


def _judged(name: str, expected: Expected, found: Results, other: Results | None) -> list[Row]:
    rows = []
    for tensor, target in expected.targets.items():
        if tensor not in found or (other is not None and tensor not in other):
            continue
        rival = None if other is None else other[tensor]
        verdict = target.judge(found[tensor], rival)
        shares = tuple(target.shares(found[tensor], rival))
        rows.append(Row(str(expected.case), name, tensor, verdict, shares))
    return rows


def own(backend: str, methods: tuple[str, ...]) -> list[Candidate]:
    """rawattn itself with ``backend``: forward and preprocess, then ``methods`` of backward."""
    from rawattn import api

    framework = "cupy" if gpu_name() else "numpy"
    forward = partial(api.forward, backend=backend)
    preprocess = partial(api.backward_preprocess, backend=backend)
    return [
        Candidate(backend, framework, forward, preprocess=preprocess),
        *(
            Candidate(
                f"{backend}/{method}",
                framework,
                backward=partial(api.backward, backend=backend, method=method),
            )
            for method in methods
        ),
    ]


def jobs(gpu: bool) -> list[Job]:
    """The standard cases with the backend and the methods of backward that are judged on each.

    With a GPU the CUDA kernels get the large 16-bit cases, the Numba twins the other large ones and
    the small ones. Without one the twins get the small ones, in the simulator, which is so slow
    that the cases take the methods in turn.
    """
    small = list(enumerate(standard("small")))
    if not gpu:
        return [(case, "numba", (METHODS[index % len(METHODS)],)) for index, case in small]
    return [
        *((c, "cuda" if c.dtype in HALF else "numba", METHODS) for c in standard("large")),
        *((case, "numba", METHODS) for _, case in small),
    ]


def judge_case(case: Case, backend: str, methods: tuple[str, ...]) -> list[Row]:
    """All rows of ``case`` with rawattn's own ``backend`` and ``methods`` of backward."""
    return [row for candidate in own(backend, methods) for row in evaluate(candidate, case)]
