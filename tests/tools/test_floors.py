"""The least times of cases, by hand, and the columns that show what part of a time they are."""

from dataclasses import replace

import pytest

from measure import floors, tables
from measure.cases import SUITES, WORK, BenchCase

TINY = BenchCase("seed", "tiny", (3, 1), 4, 2, 64, False)  # 10 pairs, 40 scores
SLOW = floors.Gpu(sms=2, clock=500.0, tensor=4096, exponentials=16, shared=128, hbm=6.208e6)
H200 = "NVIDIA H200"


def test_each_unit_by_hand() -> None:
    # 1000 clocks of SMs a second, so milliseconds are clocks
    assert floors.unit_times(TINY, "forward", SLOW) == pytest.approx(
        {
            "tensor": 40 * 4 * 64 / 4096,
            "exp": 40 / 16,
            "shared": 40 * 5 / 128,
            "HBM": 1.0,  # 4 tokens: 128 bytes for each of 4 heads of q, out, 2 of k, v; lse 16
        }
    )
    backward = floors.unit_times(TINY, "backward", SLOW)
    assert backward["tensor"] == pytest.approx(40 * 10 * 64 / 4096)
    assert backward["exp"] == pytest.approx(2.5)
    assert backward["shared"] == pytest.approx(40 * 20 / 128)
    assert backward["HBM"] == pytest.approx(4 * (2 * 1536 + 16) / 6208)


def test_the_floor_is_that_of_the_unit_with_most_to_do() -> None:
    assert floors.floor(TINY, "forward", replace(SLOW, hbm=6.208e5)) == (pytest.approx(10), "HBM")
    assert floors.floor(TINY, "forward", replace(SLOW, exponentials=8)) == (5.0, "exp")
    assert floors.floor(TINY, "forward", replace(SLOW, tensor=2048)) == (5.0, "tensor")
    assert floors.floor(TINY, "backward", replace(SLOW, shared=64)) == (12.5, "shared")


def test_only_allowed_pairs_count() -> None:
    causal = floors.unit_times(replace(TINY, causal=True), "forward", SLOW)
    full = floors.unit_times(TINY, "forward", SLOW)
    assert causal["exp"] == pytest.approx(full["exp"] * 7 / 10) and causal["HBM"] == full["HBM"]


def test_an_h200_by_the_numbers_of_its_data_sheet() -> None:
    long = tables.CASES["d128_s16384_f"]
    ms, unit = floors.floor(long, "forward", floors.GPUS[H200])
    assert unit == "tensor" and long.flop("forward") / ms * 1e-9 == pytest.approx(989.5, rel=1e-3)
    units = {
        (name, direction): floors.floor(tables.CASES[name], direction, floors.GPUS[H200])[1]
        for name in ("short_d64", "d32_s8192_f", "d192_s8192_f", "d256_s8192_f")
        for direction in floors.TENSORS
    }
    assert units["short_d64", "forward"] == units["short_d64", "backward"] == "HBM"
    assert (units["d32_s8192_f", "forward"], units["d32_s8192_f", "backward"]) == ("exp", "shared")
    assert {units[f"d{d}_s8192_f", "forward"] for d in (192, 256)} == {"tensor"}
    assert {units[f"d{d}_s8192_f", "backward"] for d in (192, 256)} == {"shared"}


@pytest.mark.parametrize(("head_dim", "queries"), [(32, 128), (64, 128), (96, 64)])
def test_backward_bytes_are_what_the_products_read_and_what_passes_through(
    head_dim: int, queries: int
) -> None:
    keys, operand = 128, head_dim / 32  # of the side that all 64 rows of a warpgroup share
    own = 2 * head_dim / queries
    scores = operand + own
    dp = operand + (0 if head_dim == 96 else own)
    dq = operand + 256 / queries
    ds, staging = 2, 2 * 4 * head_dim / keys
    total = scores + dp + 2 * operand + dq + ds + staging
    case = BenchCase("dims", "any", (64,), 1, 1, head_dim, False)
    assert floors.shared_bytes(case, "backward") == total


def test_narrow_values_are_less_work() -> None:
    narrow = replace(TINY, head_dim_v=32)
    assert [narrow.flop(d) for d in WORK] == [40 * 2 * n for n in (96, 256, 800, 288)]
    times = floors.unit_times(narrow, "forward", SLOW)
    assert times["shared"] == pytest.approx(40 * 4 / 128)
    assert times["HBM"] == pytest.approx(4 * (1152 + 16) / 6208)


def test_every_dense_case_has_a_floor() -> None:
    for suite in (*tables.DENSE_SUITES, *tables.TIME_SUITES):
        for case in SUITES[suite]():
            for direction in case.directions:
                assert floors.floor(case, direction, floors.GPUS[H200])[0] > 0


def row(name: str, direction: str, share: float) -> tables.Row:
    """A row whose time makes the floor such a share of it."""
    case = tables.CASES[name]
    ms, _ = floors.floor(case, direction, floors.GPUS[H200])
    where = {"suite": case.suite, "case": name, "direction": direction}
    return where | {"ours_ms": ms / share, "peers": {"fa4": 1.0}}


RESULT = {
    "gpu": H200,
    "bench": [
        row("d64_s512_f", "forward", 0.5),
        row("d64_s512_f", "backward", 0.25) | {"sustained_ms": 1e9, "peers_sustained": {}},
        row("d192_s2048_f", "backward", 0.75),
        row("short_d64", "forward", 0.5),
        row("window128_d64", "forward", 0.9),
    ],
}


def test_tables_show_the_share_and_the_unit() -> None:
    grids = tables.grids(RESULT, ["fa4"])
    shown = {name: [line[-2:] for line in grids[name]] for name in grids if name != "summary"}
    header = ["of floor", "floor by"]
    assert shown == {
        "paper": [header, ["0.50 / 0.25", "tensor / tensor"]],
        "dims": [header, ["- / 0.75", "- / shared"]],
        "many_short": [header, ["0.50 / -", "HBM / -"], ["", ""]],
        "windows": [header, ["0.90 / -", "HBM / -"], ["", ""]],
        "sustained": [header, ["- / 0.00", "- / tensor"]],
    }
    for lines in grids.values():
        assert len({len(line) for line in lines}) == 1


def test_an_unknown_gpu_has_no_floor() -> None:
    for lines in tables.grids(RESULT | {"gpu": "NVIDIA H100 PCIe"}, ["fa4"]).values():
        assert not {"of floor", "floor by"} & {*lines[0]}
        assert len({len(line) for line in lines}) == 1
