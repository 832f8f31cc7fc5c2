"""The backward for Hopper on the emulated machine: clusters, tails, and bugs planted in it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

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
    "dS is not waited for": ("read.wait_full(smem.exchange);", ""),
    "dS of the other CTA is not waited for": (
        "mbarrier_wait(smem_address(smem.from_peer + read.stage), read.parity);",
        "read.wait_full(smem.exchange);",
    ),
    "dS is overwritten while it is read": ("written.wait_empty(smem.exchange);", ""),
    "dS is sent before it is whole": ("place.wait_full(smem.exchange);", ""),
    "keys of the next sequence are not cleared": (
        "keys.valid(keys.peer(), consumer),",
        "WARPGROUP_ROWS,",
    ),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[emulated.Kernels]:
    if emulated.COMPILER is None:
        pytest.skip("needs a C++ compiler")
    yield emulated.install(monkeypatch)
    fake_gpu.remove()


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
    kernels.changes = (PLANTS[plant],)

    def fails(seed: int) -> bool:
        kernels.seed = seed
        try:
            check(CASES["cluster"], METHODS[0], forward=False)
        except AssertionError:
            return True
        return False

    assert any(map(fails, range(3)))
