"""The truth that the GPU tests are judged by is the reference's; this needs no GPU."""

import pytest

from tests.shared.gpu_problems import (
    MASKS,
    PARTIAL,
    WHOLE,
    Chunk,
    faults,
    judge,
    pose,
    run_double_backward,
    run_jvp,
    spelled,
)

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNKS = [
    Chunk("float64", (8, 16), tuple((mask, WHOLE) for mask in MASKS), seed=300, size=6),
    Chunk("float64", (16, 8), tuple(("window", part) for part in PARTIAL), seed=301, size=6),
    Chunk("bfloat16", (24, 24), tuple((mask, WHOLE) for mask in MASKS), seed=302, size=2),
]


@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
def test_truth_is_that_of_the_reference(chunk: Chunk) -> None:
    wrong = []
    for case in chunk.cases():
        posed = pose(case)
        results = run_jvp(posed, backend="reference")
        results |= run_double_backward(posed, backend="reference")
        wrong += [f"{spelled(case)}\n  {fault}" for fault in faults(posed, results)]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_result_is_a_fault() -> None:
    posed = pose(next(CHUNKS[2].cases()))
    results = run_double_backward(posed, backend="reference")
    judge(posed, results)
    for name, array in results.items():
        for wrong in (array * 1.0625, torch.zeros_like(array), torch.full_like(array, torch.nan)):
            assert faults(posed, {name: wrong}), name
