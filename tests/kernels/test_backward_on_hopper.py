"""The backward for Hopper on the emulated machine: clusters, tails, and bugs planted in it."""

from dataclasses import replace

import pytest

import rawattn
from rawattn.check.cases import Case, make
from rawattn.variants import METHODS
from tests.shared import emulated, fake_gpu
from tests.shared.pairs import check, dense_cases

LENGTHS = {"lengths_q": (300, 5, 129, 1), "lengths_k": (130, 5, 385, 9)}
CASE = replace(next(dense_cases()), **LENGTHS)
CASES = {
    "cluster": replace(CASE, head_dim=128, head_dim_v=128),
    "group": replace(
        CASE, head_dim=128, head_dim_v=64, causal=True, dtype="bfloat16", group=3, num_heads_kv=1
    ),
    "window": replace(CASE, head_dim=96, head_dim_v=128, window=(60, 20)),
    "alone": replace(CASE, head_dim=64, head_dim_v=32),
    "wide": replace(CASE, head_dim=256, head_dim_v=256, causal=True),
    "wide window": replace(CASE, head_dim=192, head_dim_v=128, window=(60, 20), dtype="bfloat16"),
    "wide values": replace(CASE, head_dim=64, head_dim_v=192, group=2, num_heads_kv=1),
    "wide keys": replace(CASE, head_dim=256, head_dim_v=32),
}
PLANTS = {
    "dS of the other CTA is not waited for": (
        "cluster",
        "mbarrier_wait(smem_address(smem.from_peer + read.stage), read.parity);",
        "",
    ),
    "dS is overwritten while it is read": ("cluster", "written.wait_empty(smem.exchange);", ""),
    "dS is sent before it is whole": ("cluster", "place.wait_full(smem.exchange);", ""),
    "keys of the next sequence are not cleared": (
        "cluster",
        "own_row + used_keys(tile, peer, consumer)",
        "own_row + WARPGROUP_ROWS",
    ),
    "keys are read before they are clear": (
        "wide",
        "mbarrier_wait(smem_address(&smem.cleared), parity_of_cleared);",
        "",
    ),
    "the other CTA works on another tile": ("cluster", "work = mail.received[0];", ""),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_backward(name: str, kernels: emulated.Kernels) -> None:
    for kernels.seed in range(3):
        for kernels.lateness in (emulated.EARLY, emulated.LATE):
            check(CASES[name], METHODS[0], forward=False)
    assert any(row.startswith("backward_kv_sm90") for row, _ in kernels.launched)


def gradients(case: Case) -> bytes:
    """dq, dk and dv with deterministic=True."""
    t = make(case)
    q, k, v, dout, cu_seqlens, cu_seqlens_k = (
        fake_gpu.cupy_array(emulated.guarded(array))
        for array in (t.q, t.k, t.v, t.dout, t.cu_seqlens_q, t.cu_seqlens_k)
    )
    options = {"causal": case.causal, "window": case.window, "cu_seqlens_k": cu_seqlens_k}
    out, lse = rawattn.forward(q, k, v, cu_seqlens, return_lse=True, **options)
    passed = (dout, q, k, v, out, lse, cu_seqlens)
    found = rawattn.backward(*passed, deterministic=True, **options)
    return b"".join(array.tobytes() for array in found)


def in_any_schedule(case: Case, kernels: emulated.Kernels, seeds: int) -> set[bytes]:
    """The gradients that schedules lead to."""
    fake_gpu.GPU.num_sms, kernels.clusters = 6, 3
    found = set()
    for kernels.seed in range(seeds):
        found.add(gradients(case))
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_deterministic(name: str, kernels: emulated.Kernels) -> None:
    assert len(in_any_schedule(CASES[name], kernels, 2)) == 1
    check(CASES[name], METHODS[-1], forward=False)
    assert not any(row.startswith("backward_q") for row, _ in kernels.launched)


BACKWARDS = (  # the tiles of keys are begun
    "return {work / num_heads, work % num_heads};",
    "return {num_tiles - 1 - work / num_heads, work % num_heads};",
)
LOST = (("seen >= least", "true"), ("tile.end_before = ", "0;"))


@pytest.mark.sweep
@pytest.mark.parametrize("lost", (None, *LOST))
def test_order_of_tiles(lost: tuple[str, str] | None, kernels: emulated.Kernels) -> None:
    """Three tiles, each by a cluster of its own, that would like to add to dq from the last on."""
    sizes = {"lengths_q": (200,), "lengths_k": (700,), "num_heads_kv": 1, "poisoned": ()}
    case = replace(CASES["cluster"], **sizes)
    right = in_any_schedule(case, kernels, 1)
    kernels.changes = (BACKWARDS,) if lost is None else (BACKWARDS, lost)
    assert (in_any_schedule(case, kernels, 2) == right) == (lost is None)


@pytest.mark.sweep
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_seen(plant: str, kernels: emulated.Kernels) -> None:
    case, right, wrong = PLANTS[plant]
    kernels.changes = ((right, wrong),)

    def fails(seed: int) -> bool:
        kernels.seed = seed
        try:
            check(CASES[case], METHODS[0], forward=False)
        except AssertionError:
            return True
        return False

    assert any(map(fails, range(3)))
