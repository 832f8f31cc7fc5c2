"""Packed attention over several GPUs: 16 bits within what one GPU does, bitwise repeatable.

Long runs, times and memory are tools/bench_parallel.py's.
"""

import os

import pytest

pytest.importorskip("torch")

from tests.shared import parallel_failures, parallel_rounded, parallel_use, ranks

GPUS = int(os.environ.get("RAWATTN_TEST_GPUS", "0"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, there are {GPUS}"),
]


@pytest.mark.parametrize("seed", range(4))
def test_ranks_are_as_exact_as_one(seed: int) -> None:
    found = ranks.run(parallel_rounded.sweep, 2, seed, 10, "cuda", timeout=300.0, on_gpus=True)
    assert found == [[], []]


def test_by_nccl_they_are_too() -> None:
    found = ranks.run(parallel_rounded.by_nccl, 2, 4, 10, "cuda", timeout=300.0, on_gpus=True)
    assert found == [[], []]


def test_no_call_waits_for_the_device() -> None:
    assert ranks.run(parallel_use.without_waiting, 2, on_gpus=True) == [[], []]


@pytest.mark.parametrize("how", ["killed", "raising"])
def test_the_others_raise_when_a_rank_is_gone(how: str) -> None:
    first, _ = ranks.run(
        parallel_failures.failing, 2, "ring", how, "cuda", timeout=20.0, on_gpus=True
    )
    assert first == "gone" or isinstance(first, str) or 0 <= first < 60
