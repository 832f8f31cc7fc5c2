"""The truth that the sparse GPU tests are judged by is the reference's; this needs no GPU."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from rawattn.check.cases import Case
from tests.shared.gpu_problems import faults, judge
from tests.shared.gpu_sparse import (
    FORBIDDEN,
    OWN,
    Posed,
    Sparse,
    host_of,
    pose,
    run_backward,
    run_double_backward,
    run_forward,
    run_jvp,
    slots_of_blocks,
    slots_of_keys,
    zeros_of,
)
from tests.shared.gpu_sparse_random import (
    BOTH_WAYS,
    CAUSAL,
    FIRST,
    FULL,
    GATED,
    NO_GATE,
    OF_V,
    ONLY_TG,
    ONLY_TQ,
    SECOND,
    TWINS,
    WHOLE,
    Chunk,
)

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = (CAUSAL, GATED, BOTH_WAYS, FULL)
CHUNKS = [
    Chunk(400, "float64", (8, 16), 3, 16, KINDS, directions=(WHOLE, OF_V), size=5),
    Chunk(401, "float64", (16, 8), 4, 32, KINDS, True, directions=(ONLY_TG, ONLY_TQ), size=5),
    Chunk(402, "bfloat16", (24, 24), 2, 16, (GATED, FULL), size=2),
]


def clean(posed: Posed) -> Posed:
    """Without the NaN: the reference multiplies what it then throws away. And with counts of what
    slots there are: on the host others are refused."""

    def of(part: Any, names: tuple[str, ...]) -> Any:
        arrays = {name: getattr(part, name) for name in names}
        return replace(part, **{k: x if x is None else x.nan_to_num() for k, x in arrays.items()})

    tensors, chosen = (
        of(posed.tensors, ("k", "v", "tk", "tv")),
        of(posed.chosen, ("block_scale", "tg")),
    )
    if chosen.block_counts is not None:
        counts = chosen.block_counts.clamp(0, posed.sparse.num_selected)
        chosen = replace(chosen, block_counts=counts)
    return replace(posed, tensors=tensors, chosen=chosen)


def run_reference(posed: Posed) -> dict[str, Any]:
    posed, by = clean(posed), {"backend": "reference"}
    results = run_forward(posed, **by) | run_backward(posed, **by) | run_jvp(posed, **by)
    return results | run_double_backward(posed, **by)


@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
def test_truth_is_that_of_the_reference(chunk: Chunk) -> None:
    wrong = []
    for sparse in chunk.problems():
        posed = pose(sparse, second=True)
        results = run_reference(posed)
        wrong += [f"{sparse.spelled()}\n  {fault}" for fault in faults(posed, results)]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_result_is_a_fault() -> None:
    posed = pose(next(CHUNKS[2].problems()), second=True)
    results = run_reference(posed)
    judge(posed, results)
    for name, array in results.items():
        for wrong in (array * 1.0625, torch.zeros_like(array), torch.full_like(array, torch.nan)):
            assert faults(posed, {name: wrong}), name


@pytest.mark.sweep
def test_the_random_problems_have_everything_in_them() -> None:
    problems = [sparse for chunk in FIRST for sparse in chunk.problems()]
    assert len(problems) == 500 and len({sparse.case.name for sparse in problems}) == 500
    assert {sparse.case.group for sparse in problems} == {1, 3, 4, 16, 64}
    assert {sparse.block_size for sparse in problems} == {16, 32, 64, 128}
    assert {sparse.case.dtype for sparse in problems} == {"float16", "bfloat16"}
    assert {sparse.case.head_dim for sparse in problems} >= {32, 64, 96, 128, 192, 256, 40, 104}
    ways = {(sparse.case.causal, sparse.gate) for sparse in problems}
    assert ways == set(product((False, True), repeat=2))
    met = dict.fromkeys(("duplicates", "dead", "unread", "own selected", "partial"), 0)
    for sparse in problems[::2]:
        (t, chosen), case = host_of(sparse), sparse.case
        zeros, healthy = zeros_of(sparse, chosen), case.healthy("k")
        rows = case.healthy("q") & (case.sequence_of("q") >= 0)
        ordered = np.sort(chosen.block_indices[rows], axis=2)
        met["duplicates"] += ((np.diff(ordered, axis=2) == 0) & (ordered[..., 1:] >= 0)).any()
        met["dead"] += zeros["q"][rows].any()
        met["unread"] += np.isnan(t.k[healthy & (case.sequence_of("k") >= 0)]).any()
        met["own selected"] += sparse.own and not zeros["slot"].all()
        met["partial"] += any(n % sparse.block_size for n in case.lengths_k)
    assert all(n > 50 for n in met.values()), met
    for some in (
        [sparse for sparse in problems if sparse.case.lengths_q != sparse.case.lengths_k],
        [sparse for sparse in problems if 0 in sparse.case.lengths_q],
        [sparse for sparse in problems if sparse.counts],
        [sparse for sparse in problems if not sparse.own],
        [sparse for sparse in problems if sparse.case.strided],
        [sparse for sparse in problems if sparse.per_head],
    ):
        assert len(some) >= 40


def test_the_problems_of_second_order_have_everything_in_them() -> None:
    problems = [sparse for chunk in SECOND for sparse in chunk.problems()]
    assert len(problems) == 160
    assert {sparse.direction for sparse in problems} >= {WHOLE, NO_GATE, OF_V, ONLY_TQ, ONLY_TG}
    ways = {(sparse.case.causal, sparse.gate) for sparse in problems}
    assert ways == set(product((False, True), repeat=2))
    twins = [sparse for chunk in TWINS for sparse in chunk.problems()]
    assert sum(sparse.case.dtype == "float64" for sparse in twins) == 110
    assert {sparse.per_head for sparse in twins} == {False, True}


def test_slots() -> None:
    """Of the block's two slots the lowest counts; the own block has none, and its later keys not
    even without causality."""
    sparse = Sparse(Case("two", (5,), (5,)), 16, num_selected=2)
    indices = np.zeros((5, 2, 2), dtype=np.int32)
    assert (slots_of_blocks(sparse, indices, None, 5) == 0).all()
    indices[:, :, 0] = 7
    slots = slots_of_blocks(sparse, indices, None, 5)
    assert (slots == 1).all() and (slots_of_keys(sparse, slots, 5) == 1).all()
    indices[:] = 7
    of_keys = slots_of_keys(sparse, slots_of_blocks(sparse, indices, None, 5), 5)
    assert (of_keys == np.where(np.tri(5, dtype=bool), OWN, FORBIDDEN)[:, None]).all()
