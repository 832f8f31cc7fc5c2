"""The CUDA sources, run on the CPU: right on pairs of head_dim, safe with offsets that lie.

The emulated machine does asynchronous copies as late as it may, and its memory ends where the
arrays end. What it cannot show is a race that no order of its threads brings out.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

import rawattn
from rawattn import env
from rawattn.check.candidate import Candidate
from rawattn.check.cases import HALF, Case
from rawattn.check.run import evaluate
from rawattn.variants import HEAD_DIMS, METHODS, TABLE, names_in
from rawattn.variants.steps import SECOND, SPARSE_STEPS, STEPS
from tests.shared import emulated, fake_gpu, lies, scores
from tests.shared.pairs import check, dense_cases, sparse_cases

DENSE = (*METHODS, *SECOND)
OF_SPARSE = tuple(SPARSE_STEPS)


def some(cases: Iterator[Case], steps: tuple[str, ...]) -> list[tuple[Case, str]]:
    """Two pairs for every step, so that every head_dim is met, and differs from head_dim_v."""
    every, n = list(cases), len(HEAD_DIMS)
    return [
        (every[i * n + (i + shift) % n], step)
        for shift, step in enumerate(steps)
        for i in range(shift % 3, n, 3)
    ]


RUNS = some(dense_cases(), DENSE) + some(sparse_cases(), OF_SPARSE)
CASE = next(dense_cases())
# of many tiles of keys, the last of which end in the midst of a tile
LONG = [replace(c, lengths_q=(300, 5, 129, 1), lengths_k=(130, 5, 385, 9)) for c in dense_cases()]


@pytest.mark.sweep
@pytest.mark.parametrize(("case", "step"), RUNS, ids=[f"{c}-{s}" for c, s in RUNS])
def test_pair(case: Case, step: str, kernels: emulated.Kernels) -> None:
    check(case, step, forward=step in (DENSE[0], OF_SPARSE[0]))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", names_in(env.value(env.VARIANT)) or [""])
def test_row_that_is_asked_for(name: str, dtype: str, kernels: emulated.Kernels) -> None:
    """By RAWATTN_VARIANT: it runs, in the first step that has its kernel, and is right."""
    if not name:
        pytest.skip("RAWATTN_VARIANT names none")
    row = next(row for row in TABLE if row.name == name)
    sparse = row.kernel.sparse
    case = replace(next(sparse_cases() if sparse else dense_cases()), dtype=dtype)
    case = replace(case, head_dim=row.head_dim, head_dim_v=row.head_dim)
    step, *_ = [
        step
        for step, stems in (SPARSE_STEPS if sparse else STEPS).items()
        if row.stem in {"forward", "sparse_forward", *(of.stem for of in stems)}
    ]
    check(case, step, forward=True)
    assert name in {launched for launched, _ in kernels.launched}


def verdicts(case: Case) -> set[str]:
    """Of the forward."""
    forward = Candidate("cuda", "cupy", forward=partial(rawattn.forward, backend="cuda"))
    return {row.verdict.verdict for row in evaluate(forward, case)}


@pytest.mark.parametrize("family", ("sm80", "sm90"))
def test_order_of_threads_and_copies(
    family: str, kernels: emulated.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_gpu.GPU, "compute_capability", family.removeprefix("sm"))
    for kernels.seed, kernels.lateness in product(range(3), (emulated.EARLY, emulated.LATE)):
        assert verdicts(LONG[0]) == {"pass"}
    assert {row.split("_")[1] for row, _ in kernels.launched} == {family}


@pytest.mark.parametrize("head_dim", (64, 128))  # with either way to look for a maximum
@pytest.mark.parametrize("kind", scores.KINDS)
def test_scores_that_lead_a_softmax_astray(
    kind: str, head_dim: int, kernels: emulated.Kernels
) -> None:
    for mask in ({}, {"causal": True}):
        assert scores.deviation(kind, HALF[0], head_dim, mask, fake_gpu.cupy_array) < 4
    assert {row.split("_")[1] for row, _ in kernels.launched} == {"sm90"}


@pytest.mark.sweep
@pytest.mark.parametrize("case", LONG[::5], ids=str)
def test_first_order_on_hopper(case: Case, kernels: emulated.Kernels) -> None:
    method = METHODS[0]
    for kernels.seed, kernels.lateness in ((0, emulated.LATE), (1, emulated.EARLY)):
        check(case, method, forward=True)
    on_hopper = {row.split("_sm90")[0] for row, _ in kernels.launched if "sm90" in row}
    assert on_hopper == {"forward", "backward_kv"}


@pytest.mark.parametrize("capturing", (False, True))
def test_ctas_share_their_work(
    capturing: bool, kernels: emulated.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three CTAs for all tiles: with one counter, which each launch leaves at 0, or, as in a graph,
    without."""
    fake_gpu.GPU.num_sms, fake_gpu.GPU.capturing = 3, capturing
    monkeypatch.setattr("rawattn.ops.works.COUNTERS", 1)
    for case in (LONG[0], LONG[0], LONG[1]):  # the last is causal
        assert verdicts(case) == {"pass"}
    assert {grid for grid in kernels.grids} == {(3, 1, 1)}


@pytest.mark.sweep
@pytest.mark.parametrize("form", (lies.DENSE[2], lies.SPARSE[0]), ids=str)
def test_offsets_that_lie(form: lies.Form, kernels: emulated.Kernels) -> None:
    compute: Callable[[Any], Any] = lies.sparse if form.block_size else lies.dense
    for lie in ("falling", "falls-from-far", "past-in-the-middle", "everywhere", "negative-far"):
        compute(lies.Problem(form, lie, "qk", (64, 150)))


PLANTS = {
    "a copy is not waited for": ("80", "cp_async_wait<0>();", ""),
    "a load runs past the sequence": ("80", "row + i * STEP < rows.valid", "true"),
    "K is overwritten while it is read": ("80", "__syncthreads();  // V is here", "// V is here"),
    "a product is not waited for": ("90", "wgmma_wait_group<0>();\n        hold", "hold"),
    "V of the next sequence is not cleared": ("90", "if (valid < BLOCK_N)", "if (false)"),
    "K is given back too early": (
        "90",
        "leave_k(n);\n        mask_scores",
        "leave_k(n), leave_k(n);\n        mask_scores",
    ),
    "V is never given back": ("90", "v.release(smem.v);", ""),
    "each warp waits for a product in a branch of its own": (
        "90",
        "end_output();\n        if (SUMS",
        "if (any_may_ask(softmax, softmax.row_sum[0])) end_output(); else end_output();\n"
        "        if (SUMS",
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_seen(
    plant: str, kernels: emulated.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, right, wrong = PLANTS[plant]
    monkeypatch.setattr(fake_gpu.GPU, "compute_capability", arch)
    kernels.changes = ((right, wrong),)

    def fails(seed: int) -> bool:
        kernels.seed = seed
        return "FAIL" in verdicts(LONG[0])

    assert any(map(fails, range(3)))


def test_offsets_that_are_believed_are_seen(kernels: emulated.Kernels) -> None:
    kernels.changes = (("min(max(offset, 0), total)", "offset"),)
    p = lies.Problem(lies.DENSE[0], "past", "qk", (64, 64))
    with pytest.raises(AssertionError, match="an access outside the arrays"):
        rawattn.forward(*p.inputs, p.cu_q, **p.options)
