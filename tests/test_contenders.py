"""The benchmark's calls, on CPU tensors: they compute the same, and what failed is noted."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import cases  # noqa: E402
import contenders  # noqa: E402
import peers  # noqa: E402
import timing  # noqa: E402


def case_of(causal):
    return cases.BenchCase(
        "second", "tiny", (24, 24), 2, 2, 16, causal, "float32", cases.SECOND_ORDER
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", list(cases.WORK))
def test_rawattn_and_mathematics_agree_in_every_direction(direction, causal, monkeypatch):
    everywhere = replace(peers.PEERS["torch_math"], directions=tuple(cases.WORK))
    monkeypatch.setitem(peers.PEERS, "torch_math", everywhere)
    case = case_of(causal)
    data = contenders.make(case, "cpu")
    mine = contenders.ours(case, data, direction).prepare()()
    contender = contenders.theirs("torch_math", case, data, direction)
    its = [contender.packed(x) for x in contender.prepare()()]
    apart = timing.distances(mine[: contenders.DIRECTIONS[direction].results], its)
    assert len(apart) == {"forward": 1, "backward": 3, "second": 4, "jvp": 2}[direction]
    assert max(apart) < 1e-5


@pytest.mark.parametrize("layout", ["PACKED", "BATCHED", "HEADS_FIRST", "HEADS_OUTSIDE"])
def test_layouts_come_back(layout):
    case, chosen = case_of(False), getattr(peers, layout)
    x = torch.randn(48, 2, 16)
    assert torch.equal(chosen.back(case, chosen.there(case, x)), x)


def test_a_peer_is_asked_for_its_directions_alone():
    case = case_of(False)
    data = contenders.make(case, "cpu")
    assert contenders.theirs("torch_math", case, data, "forward") is None
    assert contenders.theirs("sdpa_flash", case, data, "second") is None
    unequal = replace(case, lengths=(10, 38))
    assert contenders.theirs("torch_math", unequal, data, "second") is None


def out_of_memory(case, cu_seqlens):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")


def twice(case, cu_seqlens):
    attention, layout = peers.torch_math(case, cu_seqlens)
    return lambda q, k, v: 2 * attention(q, k, v), layout


def test_a_row_holds_times_and_memory_and_says_who_failed(monkeypatch):
    for name, attention in (("broken", out_of_memory), ("wrong", twice)):
        monkeypatch.setitem(peers.PEERS, name, peers.Peer(attention, cases.SECOND_ORDER))
    case = case_of(True)
    data = contenders.make(case, "cpu")
    monkeypatch.setattr(contenders, "make", lambda case: data)
    monkeypatch.setattr(contenders, "kernels", lambda case, direction: "sm80")
    monkeypatch.setattr(timing, "time_rounds", lambda calls, rounds, lead: dict.fromkeys(calls, 2))
    for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**29)
    names = ["sdpa_flash", "torch_math", "broken", "wrong", "fa4"]
    row = timing.measure_row(case, "second", names, ("two_pass",), 1)
    assert row["peers"] == {"torch_math": 2} and row["peers_gib"] == {"torch_math": 0.5}
    assert row["ours_ms"] == 2 and row["ours_gib"] == 0.5 and "methods" not in row
    assert row["ours_tflops"] == round(case.flop("second") / 2e9, 1)
    assert set(row["errors"]) == {"broken", "wrong"}
    assert row["errors"]["broken"].startswith("OutOfMemoryError: CUDA out of memory")
    assert "differ by" in row["errors"]["wrong"]


def test_every_case_is_measured_in_the_directions_of_its_suite_or_in_those_asked_for():
    suite = cases.second()
    assert len(timing.wanted(suite, ())) == 13
    assert timing.wanted(suite[:1], ("forward", "second")) == [
        (suite[0], "forward"),
        (suite[0], "second"),
    ]
