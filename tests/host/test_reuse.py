"""What is kept from call to call of the same Problem, and what is looked at each time."""

import pytest

from rawattn.arrays import View
from rawattn.ops import forward
from rawattn.problem import Problem
from rawattn.variants import select

PROBLEM = Problem("float16", 1, 64, 64, 2, 2, 64, 64, -1, -1, 1.0, 90, 0)


def test_the_rows_that_are_asked_for_are_looked_up_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAWATTN_VARIANT", raising=False)
    usual = select("forward", PROBLEM)
    assert select("forward", PROBLEM, backend="numba") is not usual
    monkeypatch.setenv("RAWATTN_VARIANT", "forward_numba")
    assert select("forward", PROBLEM).name == "forward_numba" != usual.name
    monkeypatch.delenv("RAWATTN_VARIANT")
    assert select("forward", PROBLEM) is usual


def test_strides_and_pointers_belong_to_the_call() -> None:
    def packed(ptr: int, token: int) -> bytes:
        q = View(ptr, (64, 2, 64), (token, 64, 1), "float16", 0, None)
        other = View(4096, (64, 2, 64), (128, 64, 1), "float16", 0, None)
        return forward.LAYOUT.pack(forward.Args(q, *8 * (other,)), PROBLEM)

    assert len({packed(ptr, token) for ptr in (1024, 2048) for token in (128, 384)}) == 4
    assert packed(1024, 128) == packed(1024, 128)
