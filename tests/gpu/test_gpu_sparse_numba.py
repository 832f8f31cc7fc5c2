"""The Numba twins of block-sparse attention on a GPU, against autograd of dense attention.

In float64 they may be wrong by 1e-12 of a result's largest element. Each size compiles anew, so
there are few of them.
"""

from collections.abc import Iterator

import pytest

from tests.shared.gpu_arrays import bits
from tests.shared.gpu_problems import faults, judge
from tests.shared.gpu_sparse import (
    Posed,
    in_chunks,
    pose,
    run_backward,
    run_double_backward,
    run_forward,
    run_jvp,
    table_of,
)
from tests.shared.gpu_sparse_random import TWINS, Chunk

pytest.importorskip("torch")
pytest.importorskip("numba.cuda")

pytestmark = pytest.mark.gpu


def run_first(posed: Posed, **options: object) -> dict[str, object]:
    return run_forward(posed, backend="numba") | run_backward(posed, backend="numba", **options)


def run_second(posed: Posed) -> dict[str, object]:
    return run_jvp(posed, backend="numba") | run_double_backward(posed, backend="numba")


@pytest.mark.parametrize("chunk", TWINS, ids=str)
def test_110_twins_of_first_order(chunk: Chunk) -> None:
    wrong = []
    for i, sparse in enumerate(chunk.problems()):
        posed = pose(sparse)
        found = faults(posed, run_first(posed, deterministic=bool(i // 2 % 2)))
        wrong += [f"{sparse.spelled()}\n  {fault}" for fault in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("chunk", TWINS, ids=str)
def test_110_twins_of_second_order(chunk: Chunk) -> None:
    wrong = []
    for sparse in chunk.problems():
        posed = pose(sparse, second=True)
        wrong += [f"{sparse.spelled()}\n  {fault}" for fault in faults(posed, run_second(posed))]
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks of 64 query tokens."""
    yield from in_chunks(64, monkeypatch)


@pytest.mark.usefixtures("small_chunks")
def test_chunks() -> None:
    posed = pose(next(TWINS[0].problems()), second=True)
    assert table_of(posed, backend="numba").starts.shape[0] > 1
    for deterministic in (False, True):
        judge(posed, run_first(posed, deterministic=deterministic))
    judge(posed, run_second(posed))


def test_bitwise_repeatable() -> None:
    posed = pose(next(TWINS[3].problems()), second=True)
    runs = [
        bits(*run_first(posed, deterministic=True).values(), *run_second(posed).values())
        for _ in range(3)
    ]
    assert all(run == runs[0] for run in runs)


def test_float64_comes_here_by_itself() -> None:
    posed = pose(next(TWINS[0].problems()), second=True)
    judge(posed, run_forward(posed) | run_backward(posed, deterministic=True))
    judge(posed, run_jvp(posed) | run_double_backward(posed))
