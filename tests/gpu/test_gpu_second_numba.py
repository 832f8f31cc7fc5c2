"""The Numba twins of double_backward and jvp on a GPU, against autograd of dense attention.

In float64 they may be wrong by 1e-12 of a result's largest element. Each pair of head_dims and each
direction compiles anew, so there are few of them.
"""

from itertools import product

import pytest

from rawattn.check.cases import Case, make
from tests.shared.gpu_arrays import bits
from tests.shared.gpu_problems import (
    MASKS,
    PARTIAL,
    WHOLE,
    Chunk,
    along,
    faults,
    inner,
    judge,
    poisoned,
    pose,
    run_double_backward,
    run_jvp,
    sized,
    spelled,
)

pytest.importorskip("torch")
pytest.importorskip("numba.cuda")

pytestmark = pytest.mark.gpu

DIMS = ((64, 64), (40, 72), (8, 16), (32, 32), (64, 64), (128, 96), (16, 8), (24, 24))
DIRECTIONS = (WHOLE, WHOLE, *PARTIAL)


def chunk_of(seed: int, dtype: str, dims: tuple[int, int], direction: tuple[bool, ...]) -> Chunk:
    return Chunk(dtype, dims, tuple(product(MASKS, [direction])), seed)


CHUNKS = [
    *(
        chunk_of(100 + i, "float64", *which)
        for i, which in enumerate(zip(DIMS, DIRECTIONS, strict=True))
    ),
    chunk_of(200, "float32", (64, 64), WHOLE),
    chunk_of(201, "float32", (40, 72), (True, False, True)),
    chunk_of(202, "bfloat16", (40, 72), WHOLE),
]


def test_there_are_200_problems_of_float64() -> None:
    cases = [case for chunk in CHUNKS for case in chunk.cases()]
    assert sum(case.dtype == "float64" for case in cases) == 200
    assert {case.direction for case in cases} == {WHOLE, *PARTIAL}


@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
def test_200_twins(chunk: Chunk) -> None:
    wrong = []
    for i, case in enumerate(chunk.cases()):
        posed, deterministic = pose(case), bool(i // 5 % 2)
        results = run_jvp(posed, backend="numba")
        results |= run_double_backward(posed, backend="numba", deterministic=deterministic)
        wrong += [f"{spelled(case)}\n  {fault}" for fault in faults(posed, results)]
    assert not wrong, "\n".join(wrong)


def edges(name: str, **changes: object) -> Case:
    usual = {"dtype": "float64", "group": 3, "num_heads_kv": 1, "causal": True, **sized(64)}
    return poisoned(name, (33, 0, 70, 1), (70, 3, 33, 9), **usual | changes)


@pytest.mark.parametrize("direction", [WHOLE, *PARTIAL], ids=str)
def test_second_derivatives_are_symmetric(direction: tuple[bool, bool, bool]) -> None:
    """<u, H v> = <v, H u>, to 1e-12 of |u| |H v|, since they are sums of that many products."""
    case = edges("symmetry", direction=direction)
    posed = pose(case)
    other = along(posed, make(case, seed=1).on("torch").direction)
    ways, size = [], 0.0
    for here, there in ((posed, other), (other, posed)):
        results, u = run_double_backward(here), there.tensors.direction
        grads = [results[name] for name in ("gq", "gk", "gv")]
        ways.append(inner(case, u, grads))
        size += (inner(case, u, u) * inner(case, grads, grads)) ** 0.5
    assert size and abs(ways[0] - ways[1]) <= 1e-12 * size


def test_bitwise_repeatable() -> None:
    posed = pose(edges("repeated", causal=False, window=(20, 7)))
    runs = [
        bits(*run_jvp(posed).values())
        + bits(*run_double_backward(posed, deterministic=True).values())
        for _ in range(3)
    ]
    assert all(run == runs[0] for run in runs)
    judge(posed, run_double_backward(posed, deterministic=True))
