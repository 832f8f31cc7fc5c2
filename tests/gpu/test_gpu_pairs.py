"""Every CUDA kernel on every pair of native head_dim and head_dim_v, judged by the tolerance.

Dense problems ask for the rows of large ones; those for small grids follow.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from rawattn import variants
from rawattn.build import NO_DIRECTION, WHOLE, Build
from rawattn.check.cases import HALF, Case
from rawattn.check.sparse_cases import SparseCase
from rawattn.ops.arguments import args_bytes
from rawattn.problem import Selection
from rawattn.variants import HEAD_DIMS, METHODS, NO_BLOCKS
from rawattn.variants.steps import SECOND, SPARSE_STEPS, Step
from tests.shared.gpu_problems import (
    ARCH,
    builds_of,
    chosen,
    large_rows,
    problem_of,
    stems_of,
    warm,
)
from tests.shared.pairs import MASKS, check, dense_cases, sparse_cases

pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

STEPS = (*METHODS, *SECOND)


def has_small_rows(case: Case, step: str) -> bool:
    """Whether the kernels of a step, the forward with the first, have other rows for a case than
    for large ones."""
    stems = stems_of(step) if step != STEPS[0] else ("forward", *stems_of(step))
    rows = large_rows(case, stems)
    return any(chosen(stem, case, by_size=True) is not row for stem, row in rows.items())


DENSE, SPARSE = list(dense_cases()), list(sparse_cases())
LARGE = [(case, step) for case in DENSE for step in STEPS]
SMALL = [(case, step) for case, step in LARGE if has_small_rows(case, step)]
SPARSE_RUNS = [(case, step) for case in SPARSE for step in SPARSE_STEPS]


def sparse_builds(case: SparseCase, step: str) -> Iterator[Build]:
    """What the forward and a step of SPARSE_STEPS compile for a case."""
    selected = (case.num_heads_sel, case.num_selected, case.block_size)
    selection, problem = Selection(*selected, case.own, 256), problem_of(case)
    right = 0 if case.causal else -1
    for stem, atomic, *_ in (Step("sparse_forward"), *SPARSE_STEPS[step]):
        row = variants.select(stem, problem, backend="cuda", selection=selection)
        blocks = selection.blocks(problem) if row.kernel.sparse else NO_BLOCKS
        direction = WHOLE if row.kernel.directed else NO_DIRECTION
        fixed = (case.dtype, case.head_dim, case.head_dim_v, False, right == 0, atomic)
        yield Build(row, *fixed, direction, blocks, case.gate, args_bytes(stem, row.family))


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Fill the cache of cubins from several processes, where many tests are selected."""
    wanted: list[Build] = []
    for item in request.session.items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and {"case", "step"} <= given.keys():
            case, step = given["case"], given["step"]
            sparse = isinstance(case, SparseCase)
            wanted += sparse_builds(case, step) if sparse else builds_of(case, step)
    warm(wanted)


@pytest.mark.parametrize(("case", "step"), LARGE, ids=[f"{c}-{s}" for c, s in LARGE])
def test_pair(case: Case, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = large_rows(case, ("forward", *stems_of(step)))
    monkeypatch.setenv("RAWATTN_VARIANT", ",".join(row.name for row in rows.values()))
    check(case, step, forward=step == STEPS[0])


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_forward_of_older_gpus(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that Hopper's own stand in front of."""
    row = variants.select("forward", replace(problem_of(case, tokens=2**20), arch=80))
    monkeypatch.setenv("RAWATTN_VARIANT", row.name)
    check(case, "jvp", forward=True)


@pytest.mark.parametrize(("case", "step"), SMALL, ids=[f"{c}-{s}" for c, s in SMALL])
def test_pair_on_rows_of_small_grids(case: Case, step: str) -> None:
    check(case, step, forward=step == STEPS[0])


@pytest.mark.parametrize(("case", "step"), SPARSE_RUNS, ids=[f"{c}-{s}" for c, s in SPARSE_RUNS])
def test_sparse_pair(case: SparseCase, step: str) -> None:
    check(case, step, forward=step == next(iter(SPARSE_STEPS)))


def test_the_pairs_have_everything_in_them() -> None:
    """Each head_dim, on either side, meets every mask, dtype and group; so with a selection."""
    for side, d in product(("head_dim", "head_dim_v"), HEAD_DIMS):
        some = [case for case in DENSE if getattr(case, side) == d]
        assert {case.dtype for case in some} == set(HALF)
        assert {case.group for case in some} == {1, 3} or side == "head_dim_v"
        assert len({(case.causal, case.window) for case in some}) == len(MASKS)
        some = [case for case in SPARSE if getattr(case, side) == d]
        assert {case.block_size for case in some} == {16, 32, 64, 128}
        for name in ("causal", "gate", "own"):
            assert {getattr(case, name) for case in some} == {False, True} or side != "head_dim"
    assert SMALL or ARCH != 90
