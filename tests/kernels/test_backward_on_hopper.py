"""The backward for Hopper on the emulated machine: clusters, tails, and bugs planted in it."""

from dataclasses import replace

import pytest

from rawattn.variants import METHODS
from tests.shared import emulated
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
        "own_row + valid_keys(tile, peer, consumer)",
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
