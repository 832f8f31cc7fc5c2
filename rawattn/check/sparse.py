"""rawattn's block-sparse attention as candidates, and which cases are judged with what."""

from functools import partial

from rawattn.check.candidate import Candidate
from rawattn.check.cases import HALF
from rawattn.check.machine import gpu_name
from rawattn.check.sparse_cases import SparseCase, standard_sparse
from rawattn.problem import Problem, Selection
from rawattn.variants import select
from rawattn.variants.steps import SPARSE_STEPS, Step

# What the simulator gets beside the forward of a few small cases: each step meets every dtype.
SIMULATED = {
    "atomic": ("edges-open", "group4", "query-heads-open", "dim-40"),
    "deterministic": ("edges", "no-own", "unequal", "sliding"),
    "jvp": ("no-own-open", "gate", "unequal-open", "decode"),
    "second": ("counts", "counts-open", "gate-open", "late"),
}
SparseJob = tuple[SparseCase, str, tuple[str, ...]]  # case, backend, steps


def own_sparse(backend: str, steps: tuple[str, ...]) -> list[Candidate]:
    """rawattn itself with ``backend``: the forward, then ``steps``.

    On a GPU, where that is cheap, what must be deterministic runs twice, and second derivatives
    must be symmetric.
    """
    from rawattn import api_sparse as api

    gpu = bool(gpu_name())
    make = partial(Candidate, framework="cupy" if gpu else "numpy")
    candidates = [make(backend, forward=partial(api.sparse_forward, backend=backend))]
    for step in steps:
        name = f"{backend}/{step}"
        if step == "jvp":
            candidates.append(make(name, jvp=partial(api.sparse_jvp, backend=backend)))
        elif step == "second":
            second = partial(api.sparse_double_backward, backend=backend)
            candidates.append(make(name, double_backward=second, symmetry=gpu, repeat=gpu))
        else:
            fixed = step == "deterministic"
            backward = partial(api.sparse_backward, backend=backend, deterministic=fixed)
            candidates.append(make(name, backward=backward, repeat=gpu and fixed))
    return candidates


def sparse_jobs(arch: int) -> list[SparseJob]:
    """The standard sparse cases with the backend and the steps that are judged on each.

    As ``jobs``, but the simulator (``arch`` 0) gets only a few of the small cases.
    """
    small = standard_sparse("small")
    if not arch:
        steps = {f"sparse-{name}": step for step, names in SIMULATED.items() for name in names}
        return [(case, "numba", (steps[case.name],)) for case in small if case.name in steps]
    large, every = standard_sparse("large"), tuple(SPARSE_STEPS)
    raw = {case: _steps_with_rows(case, arch) for case in large if case.dtype in HALF}
    return [
        *((case, "cuda", steps) for case, steps in raw.items() if steps is not None),
        *((case, "numba", every) for case in large if raw.get(case) is None),
        *((case, "numba", every) for case in small),
    ]


def _steps_with_rows(case: SparseCase, arch: int) -> tuple[str, ...] | None:
    """The steps that the table has CUDA rows for; None where not even the forward has."""
    sizes = (case.num_heads_q, case.num_heads_kv, case.head_dim, case.head_dim_v)
    window = (-1, 0 if case.causal else -1)
    problem = Problem(case.dtype, 1, 1, 1, *sizes, *window, 1.0, arch, 0)
    blocks = (case.num_heads_sel, case.num_selected, case.block_size)
    selection = Selection(*blocks, case.own, 256)

    def served(steps: tuple[Step, ...]) -> bool:
        rows = [select(stem, problem, selection=selection) for stem, *_ in steps]
        return all(row.family != "numba" for row in rows)

    if not served((Step("sparse_forward"),)):
        return None
    return tuple(name for name, steps in SPARSE_STEPS.items() if served(steps))
