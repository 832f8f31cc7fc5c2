"""The CUDA sources with softcap, sinks and seqused_k, run on the CPU."""

import sys

import ml_dtypes
import numpy as np
import pytest

from tests.shared import emulated, fake_gpu
from tests.shared.optional import OPTIONS, Problem, runs, wrong

BOUNDS = {np.float16: 4e-3, ml_dtypes.bfloat16: 3e-2}
LENGTHS = ((70, 3, 0, 5, 133), (133, 0, 2, 5, 70), (100, 0, 2, 9, 60))
PROBLEMS = {
    "64": Problem(*LENGTHS, 64, 64),
    "128": Problem(*LENGTHS, 128, 64, window=(-1, -1), group=1),
    "wide": Problem(*LENGTHS, 192, 256, window=(40, 20), group=1, num_heads_kv=1),
    "narrow": Problem(*LENGTHS, 40, 32, scale=4.0, group=3, num_heads_kv=1, past=0),
}


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_kernels(
    name: str,
    problem: str,
    family: str,
    kernels: emulated.Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fake_gpu.GPU, "compute_capability", family.removeprefix("sm"))
    cupy = sys.modules["cupy"]
    place, texts = cupy.asarray, []
    dtype = np.float16 if family == "sm80" else ml_dtypes.bfloat16
    for run in runs(PROBLEMS[problem], dtype, OPTIONS[name], place, backend="cuda"):
        texts += wrong(run, BOUNDS[dtype])
    assert not texts, "\n".join(texts)
