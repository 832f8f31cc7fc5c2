"""The Numba twins with softcap, sinks and seqused_k, in Numba's simulator."""

import numpy as np
import pytest

from tests.shared.optional import OPTIONS, Problem, runs, wrong

PROBLEMS = {
    "causal": Problem((18, 3, 0, 5, 4), (21, 0, 2, 5, 7), (17, 0, 2, 9, -1), 8, 16),
    "full": Problem((7,), (20,), (18,), 16, 8, window=(-1, -1), past=0),
    "window": Problem((19, 2), (18, 6), (16, 0), 8, 8, window=(4, 2), group=1, seed=3),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_float64(name: str, problem: str) -> None:
    texts = []
    for run in runs(PROBLEMS[problem], np.float64, OPTIONS[name], lambda x: x, backend="numba"):
        texts += wrong(run, 1e-12)
    assert not texts, "\n".join(texts)
