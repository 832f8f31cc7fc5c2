"""Offsets that lie, on a GPU: wrong numbers at worst, and no access outside the arrays.

All memory of a call lies between bands that are NaN and must stay so, and results must be finite,
since no number that may be read is not.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.shared.gpu_arrays import Bands
from tests.shared.lies import DENSE, LIES, SIDES, SPARSE, TOKENS, Form, Problem, dense, sparse

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


def faults(compute: Callable[[Problem], dict[str, Any]], form: Form, lie: str) -> list[str]:
    """What is wrong with the problems of a lie on every side and with every number of tokens."""
    found = []
    for sides, tokens in product(SIDES, TOKENS):
        bands = Bands()
        with cupy.cuda.using_allocator(bands.allocate):
            results = compute(Problem(form, lie, sides, tokens))
        where = f"offsets of {sides} lie, {tokens[0]} queries, {tokens[1]} keys"
        found += [f"{where}: written {place}" for place in bands.touched()]
        for name, arrays in results.items():
            for i, array in enumerate(arrays):
                if not np.isfinite(array.get().astype(np.float64)).all():
                    found.append(f"{where}: result {i} of {name} is not finite")
    return found


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("form", DENSE, ids=str)
def test_offsets_that_lie(form: Form, lie: str) -> None:
    wrong = faults(dense, form, lie)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("form", SPARSE, ids=str)
def test_offsets_that_lie_beside_a_selection(form: Form, lie: str) -> None:
    wrong = faults(sparse, form, lie)
    assert not wrong, "\n".join(wrong)


def test_bands_show_reads_and_writes() -> None:
    bands = Bands()
    with cupy.cuda.using_allocator(bands.allocate):
        array = cupy.zeros(4, np.float16)
    assert not bands.touched() and not array.any()
    over = cupy.ndarray(6, np.float16, array.data - 2)
    assert cupy.isnan(over[[0, 5]]).all()
    over[0] = 1
    assert bands.touched() == [f"before the 8 bytes of allocation 0, at {Bands.BYTES - 2}"]
    over[5] = 1
    assert len(bands.touched()) == 2
