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
from rawattn.check.second import expect_second
from rawattn.check.sparse import own_sparse
from rawattn.check.sparse_cases import SparseCase
from rawattn.problem import Problem
from rawattn.variants import METHODS, select
from rawattn.variants.steps import SECOND, STEPS

Job = tuple[Case, str, tuple[str, ...]]  # case, backend, steps beside the forward
QUICK = (  # cases that stand for all of them
    *("edges-causal", "unequal", "window", "all-dead", "strided", "dim-40"),
    "softcap-sinks-seqused",
    *("sparse-edges-open", "sparse-counts", "sparse-no-own", "sparse-gate"),
)
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
    second = candidate.second or (against is not None and against.second)
    expected = expect_second(case) if second else expect(case)
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
    if expected.symmetry is not None and "symmetry" in found:
        verdict = expected.symmetry.judge(found["symmetry"])
        rows.append(Row(str(expected.case), name, "symmetry", verdict))
    if "repeat" in found:
        rows.append(Row(str(expected.case), name, "repeat", _unchanged(found["repeat"])))
    return rows


def _unchanged(changed: np.ndarray[Any, Any]) -> Verdict:
    """The verdict on how many elements of each result a second call changed."""
    worst = float(changed.max(initial=0))
    note = f"a second call changes {int(changed.sum())} elements" if worst else ""
    return Verdict(worst, 0.0, "FAIL" if worst else "pass", note)


def own(backend: str, steps: tuple[str, ...]) -> list[Candidate]:
    """rawattn itself with ``backend``: forward and preprocess, then ``steps``.

    In the simulator the symmetry of one way of ``double_backward`` must do.
    """
    from rawattn import api, api_second

    gpu = bool(gpu_name())
    make = partial(Candidate, framework="cupy" if gpu else "numpy")
    forward = partial(api.forward, backend=backend)
    preprocess = partial(api.backward_preprocess, backend=backend)
    candidates = [make(backend, forward=forward, preprocess=preprocess)]
    for step in steps:
        name = f"{backend}/{step}"
        if step == "jvp":
            candidates.append(make(name, jvp=partial(api_second.jvp, backend=backend)))
        elif step in SECOND:
            second = partial(api_second.double_backward, backend=backend)
            second = partial(second, deterministic=step == "second/two_pass")
            symmetry = gpu or step == "second/atomic"
            candidates.append(make(name, double_backward=second, symmetry=symmetry))
        else:
            backward = partial(api.backward, backend=backend, method=step)
            candidates.append(make(name, backward=backward))
    return candidates


def jobs(arch: int) -> list[Job]:
    """The standard cases with the backend and the steps that are judged on each.

    On a GPU of an ``arch`` the CUDA kernels get the large 16-bit cases, the Numba twins the other
    large ones and the small ones. Without one (0) the twins get the small ones, in the simulator,
    which is so slow that the cases take the methods of backward in turn, and the steps beyond it.
    """
    small = list(enumerate(standard("small")))
    if not arch:
        beyond = ("second/atomic", "jvp", "second/two_pass")  # the cheapest for the dearest cases
        return [(case, "numba", (METHODS[i % 3], beyond[i % 3])) for i, case in small]
    raw = [case for case in standard("large") if case.dtype in HALF and arch >= 80]
    return [
        *((case, "cuda", tuple(s for s in STEPS if _has_rows(case, s, arch))) for case in raw),
        *((case, "numba", tuple(STEPS)) for case in standard("large") if case not in raw),
        *((case, "numba", tuple(STEPS)) for _, case in small),
    ]


def _has_rows(case: Case, step: str, arch: int) -> bool:
    """Whether the table has CUDA rows for ``step``: the widest tiles do not fit every GPU."""
    sizes = (case.num_heads_q, case.num_heads_kv, case.head_dim, case.head_dim_v)
    cap = case.softcap or 0.0
    problem = Problem(case.dtype, 1, 1, 1, *sizes, *case.mask_window, 1.0, arch, 0, softcap=cap)
    return all(select(of.stem, problem).family != "numba" for of in STEPS[step])


def is_quick(case: Case) -> bool:
    """Whether ``--quick`` has this case."""
    return case.name in QUICK


def judge_case(case: Case, backend: str, steps: tuple[str, ...]) -> list[Row]:
    """All rows of ``case`` with rawattn's own ``backend`` and ``steps``."""
    make = own_sparse if isinstance(case, SparseCase) else own
    return [row for candidate in make(backend, steps) for row in evaluate(candidate, case)]
