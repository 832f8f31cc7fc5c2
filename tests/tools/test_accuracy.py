"""The benchmark's accuracy, on CPU tensors: its scores are as named, and it can tell."""

from dataclasses import replace
from itertools import pairwise

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import bench  # noqa: E402
from measure import accuracy, cases, contenders, pages, peers, tables  # noqa: E402


def case_of(scores, head_dim=64, dtype="bfloat16", causal=False, lengths=(150, 70)):
    return cases.BenchCase("accuracy", scores, lengths, 8, 8, head_dim, causal, dtype)


def data_of(case):
    return accuracy.inputs(case, contenders.make(case, "cpu"))


@pytest.fixture
def mathematics(monkeypatch):
    """torch_math as a peer of the forward: exact in float32, of equal lengths only."""
    everywhere = replace(peers.PEERS["torch_math"], directions=tuple(cases.WORK))
    monkeypatch.setitem(peers.PEERS, "torch_math", everywhere)


def scaled_scores(case):
    """(heads, queries, keys) of each sequence, in float64, of what 16 bits hold."""
    data = data_of(case)
    assert data.q.dtype == data.k.dtype == getattr(torch, case.dtype)
    parts = (x.double().split(case.lengths) for x in (data.q, data.k))
    scale = case.head_dim**-0.5
    return [torch.einsum("qhd,khd->hqk", q, k) * scale for q, k in zip(*parts, strict=True)]


KINDS = [(64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (128, "float16")]


@pytest.mark.parametrize(("head_dim", "dtype"), KINDS)
def test_normal_scores_and_those_of_deviation_30(head_dim, dtype):
    for name, deviation in (("normal", 1), ("deviation 30", 30)):
        for scores in scaled_scores(case_of(name, head_dim, dtype)):
            assert scores.std() == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize(("head_dim", "dtype"), KINDS)
@pytest.mark.parametrize(("name", "step"), [("rising", 40), ("falling", -40)])
def test_scores_rise_and_fall_by_40_a_block(name, step, head_dim, dtype):
    for scores in scaled_scores(case_of(name, head_dim, dtype, lengths=accuracy.LENGTHS)):
        means = [float(block.mean()) for block in scores.split(64, dim=-1)]
        assert all(abs(later - one - step) < 1 for one, later in pairwise(means))
        assert float((scores[..., :64] - means[0]).std()) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(("head_dim", "dtype"), KINDS)
def test_one_key_is_2_to_the_10_above_all_others_and_out_is_its_value(head_dim, dtype):
    case = case_of("dominating", head_dim, dtype, lengths=accuracy.LENGTHS)
    for scores in scaled_scores(case):
        chosen = accuracy.dominating_keys(scores.shape[-1])
        assert {0, scores.shape[-1] - 1, 63} <= {*chosen}
        for key, others in zip(chosen, scores, strict=True):  # head by head
            largest = others[:, key].clone()
            others[:, key] = -torch.inf
            assert (largest - others.amax(-1)).min() > 2**10
    data = data_of(case)
    out, _ = accuracy.reference(case, data)
    values = data.v[torch.tensor(accuracy.dominating_keys(1000)), torch.arange(8)]
    assert torch.equal(out[:1000], values.double().expand(1000, -1, -1))


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_the_mathematics_in_float64(causal):
    case = case_of("normal", dtype="float64", causal=causal, lengths=(30, 1, 17))
    data = data_of(case)
    expected = contenders.ours(case, data, "forward").prepare()()
    for mine, its in zip(accuracy.reference(case, data), expected, strict=True):
        assert mine.shape == its.shape and torch.allclose(mine, its, 1e-12, 1e-12)


def test_a_peer_of_equal_lengths_gets_one_sequence_after_the_other(mathematics):
    case = case_of("normal", dtype="float32", causal=True, lengths=(30, 1, 17))
    data = data_of(case)
    expected, _ = accuracy.reference(case, data)
    out = accuracy.peer_out("torch_math", case, data)
    assert torch.allclose(out.double(), expected, 1e-5, 1e-5)
    assert accuracy.peer_out("fla_nsa", case, data) is None
    one = replace(case, lengths=(48,))
    assert accuracy.peer_out("torch_math", one, data_of(one)).shape == out.shape


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores", accuracy.SCORES)
def test_a_row_has_errors_of_ours_and_of_the_peers_that_computed_it(scores, causal, monkeypatch):
    def broken(case, cu_seqlens):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def nowhere(case, cu_seqlens):
        return lambda q, k, v: q * float("nan"), peers.PACKED

    for name, attention in (("broken", broken), ("nan", nowhere)):
        monkeypatch.setitem(peers.PEERS, name, peers.Peer(attention))
    monkeypatch.setattr(peers, "importable", lambda name: name != "fa4")
    case = case_of(scores, causal=causal)
    row = accuracy.measure_row(case, ["sdpa_flash", "broken", "nan", "fla_nsa", "fa4"], "cpu")
    assert (row["scores"], row["head_dim"], row["dtype"]) == (scores, 64, "bfloat16")
    assert row["causal"] == causal and list(row["peers_rms"]) == ["sdpa_flash"]
    assert set(row["errors"]) == {"broken", "nan"}
    assert row["lse_error"] < 1e-6 and not accuracy.faults(row)
    if scores == "dominating":
        assert row["exact"] and row["ours_rms"] == row["peers_rms"]["sdpa_flash"] == 0
    else:
        assert "exact" not in row and 5e-4 < row["ours_rms"] < 2e-3
        assert 0.5 < accuracy.to_most_exact(row) < 1.05


def test_wrong_results_are_seen(monkeypatch):
    forward = contenders.rawattn.forward

    def faults(scores, wrong):
        def call(*tensors, **options):
            return wrong(*forward(*tensors, **options))

        monkeypatch.setattr(contenders.rawattn, "forward", call)
        return accuracy.faults(accuracy.measure_row(case_of(scores), ["sdpa_flash"], "cpu"))

    def one_element(out, lse):
        out[-1, -1, -1] = torch.nextafter(out[-1, -1, -1].float(), torch.tensor(9.0)) * 1.01
        return out, lse

    assert faults("normal", lambda out, lse: (out, lse)) == []
    (fault,) = faults("normal", lambda out, lse: (out * 1.01, lse))
    assert fault.startswith("normal d64 bfloat16 full: out is ") and fault.endswith("limit 1.4")
    noise = torch.randn(220, 8, 64, generator=torch.Generator().manual_seed(0))
    assert faults("normal", lambda out, lse: (out * (1 + 1e-3 * noise), lse)) == []
    (fault,) = faults("deviation 30", lambda out, lse: (out * (1 + 1e-3 * noise), lse))
    assert fault.endswith("limit 1.1")
    (fault,) = faults("rising", lambda out, lse: (out, lse * (1 + 2e-5)))
    assert fault == "rising d64 bfloat16 full: lse is off by 2e-05 of its size, limit 1e-05"
    assert len(faults("falling", lambda out, lse: (out * float("nan"), lse * float("nan")))) == 2
    assert faults("dominating", one_element) == [
        "dominating d64 bfloat16 full: out is not the dominating key's value"
    ]


def test_one_case_that_fails_costs_no_other(monkeypatch, capsys):
    def measure_row(case, peers):
        if case.name == "rising":
            raise RuntimeError("no kernel")
        return case.name

    monkeypatch.setattr(accuracy, "measure_row", measure_row)
    rows = accuracy.measure()
    assert len(accuracy.cases()) == 60 and len(rows) == 48
    assert "rising d64 bfloat16 full: RuntimeError: no kernel" in capsys.readouterr().err
    assert accuracy.measure(budget=-1) == []


def row(scores, causal, ours, lse_error=2e-7, head_dim=64, dtype="bfloat16", **peers_rms):
    kind = {"scores": scores, "head_dim": head_dim, "dtype": dtype, "causal": causal}
    return {**kind, "ours_rms": ours, "peers_rms": peers_rms, "lse_error": lse_error}


RESULT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "versions": {},
    "accuracy": [
        row("deviation 30", False, 0.0012, fa4=0.001, fa3_fwd=0.0015),
        row("normal", False, 0.00212, fa4=0.002, fa3_fwd=0.00225),
        row("normal", True, 0.003, 3e-5, fa4=0.002)
        | {"errors": {"fa3_fwd": "RuntimeError: refused"}},
        row("dominating", False, 0.0, fa4=0.0) | {"exact": True},
        row("dominating", True, 1e-5, fa4=0.0) | {"exact": False},
    ],
}


def test_the_table_puts_full_and_causal_in_a_cell():
    header, *lines = tables.grids(RESULT, [])["accuracy"]
    shown = [dict(zip(header, line, strict=True)) for line in lines]
    assert header[3:6] == ["ours", "fa4", "fa3_fwd"]
    assert [line["scores"] for line in shown] == ["normal", "deviation 30", "dominating"]
    normal, deviation, dominating = shown
    assert (normal["ours"], normal["fa3_fwd"]) == ("0.00212 / 0.00300", "0.00225 / -")
    assert (normal["ours to most exact"], normal["limit"]) == ("1.06 / 1.50", "1.4")
    assert normal["lse error"] == "2e-07 / 3e-05"
    assert (deviation["ours to most exact"], deviation["limit"]) == ("1.20 / -", "1.1")
    assert (dominating["ours"], dominating["fa4"]) == ("exact / 0.0000100", "exact / exact")
    assert (dominating["ours to most exact"], dominating["limit"]) == ("", "exact")
    assert "accuracy" not in tables.grids(RESULT | {"accuracy": []}, [])
    assert "| normal | 64 | bfloat16 |" in pages.markdown_tables(RESULT, [])["accuracy"]


def test_bench_says_what_is_not_exact_enough(tmp_path):
    source = tmp_path / "record.json"
    source.write_text(bench.json.dumps(RESULT))
    shown = CliRunner().invoke(bench.main, ["--from", str(source)]).output
    assert "accuracy d64 bfloat16 fa3_fwd: RuntimeError: refused" in shown
    assert [
        line for line in shown.splitlines() if "limit 1" in line or "dominating key" in line
    ] == [
        "deviation 30 d64 bfloat16 full: out is 1.20 times as far off as the most exact peer's, "
        "limit 1.1",
        "normal d64 bfloat16 causal: out is 1.50 times as far off as the most exact peer's, "
        "limit 1.4",
        "normal d64 bfloat16 causal: lse is off by 3e-05 of its size, limit 1e-05",
        "dominating d64 bfloat16 causal: out is not the dominating key's value",
    ]
