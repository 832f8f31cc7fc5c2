"""tools/train/train_nsa.py: it runs, its verdict tells, and both layers see what they should."""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import packing  # noqa: E402
import train_nsa  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from training import Curve  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {"layers": 1, "tokens": 96, "longest": 80, "steps": 4}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    size = replace(train_nsa.SIZES["cpu"], **TINY)
    monkeypatch.setitem(train_nsa.SIZES, "cpu", size)
    return size


def run(*options):
    return CliRunner().invoke(train_nsa.main, ["--device", "cpu", *options])


def test_both_models_train_and_are_recorded(tmp_path):
    record = tmp_path / "nsa.json"
    result = run("--tokens", "128", "--json", str(record))
    assert result.exit_code == 0, result.output
    assert "sparse minus" in result.output and result.output.count("steps/s") == 2
    data = json.loads(record.read_text())
    assert data["size"]["tokens"] == 128 and data["size"]["longest"] == 80
    assert [curve["name"] for curve in data["curves"]] == ["sparse", "dense"]
    sparse, dense = (curve["losses"] for curve in data["curves"])
    assert len(sparse) == len(dense) == 4 and sparse != dense
    assert set(data["verdict"]["last_losses"]) == {"sparse", "dense"}


def test_a_layer_is_timed_alone(tmp_path):
    record = tmp_path / "layer.json"
    result = run("--layer", "64", "--json", str(record))
    assert result.exit_code == 0, result.output
    assert "64 tokens" in result.output and "1.00 x" in result.output
    times = json.loads(record.read_text())["layer_ms"]
    assert list(times) == ["sparse", "dense"] and min(times.values()) > 0


@pytest.mark.parametrize(
    ("sparse", "dense", "passed"),
    [
        ([5.0, 3.0], [5.0, 3.0], True),
        ([5.0, 3.2], [5.0, 3.0], True),
        ([5.0, 3.4], [5.0, 3.0], False),
        ([5.0, 5.0], [5.0, 5.0], False),
        ([5.0, float("nan")], [5.0, 3.0], False),
        ([5.0, 3.0], [2.9, 3.0], False),
    ],
)
def test_verdict(sparse, dense, passed):
    curves = [Curve("sparse", sparse, 1.0), Curve("dense", dense, 1.0)]
    assert train_nsa.judge(curves)["passed"] is passed


@pytest.mark.parametrize("layer", list(train_nsa.LAYERS))
def test_layers_are_causal_within_each_sequence_and_reach_back(layer, tiny):
    torch.manual_seed(0)
    attention = train_nsa.LAYERS[layer](32, tiny)
    pack = packing.pack((70, 26), "cpu")
    x = torch.randn(96, 32)
    out = attention(x, pack)
    changed = x.clone()
    changed[20] += 1
    moved = (attention(changed, pack) - out).abs().amax(1) > 1e-7
    assert out.shape == x.shape and not moved[:20].any() and not moved[70:].any()
    assert moved[20] and moved[21:70].any()


@pytest.mark.gpu
def test_on_a_gpu():
    result = CliRunner().invoke(train_nsa.main, ["--device", "cuda", "--steps", "60"])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(train_nsa.main, ["--device", "cuda", "--layer", "4096"])
    assert result.exit_code == 0 and "cuDNN" in result.output, result.output
