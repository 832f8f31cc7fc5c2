"""gradient_penalty.py, meanflow.py, hvp.py: they pass, and a silent zero is found out by each."""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import contest  # noqa: E402
import gradient_penalty  # noqa: E402
import hvp  # noqa: E402
import meanflow  # noqa: E402
import models  # noqa: E402
import packing  # noqa: E402
from click.testing import CliRunner  # noqa: E402

from rawattn.torch import varlen_attn  # noqa: E402

TOOLS = [gradient_penalty, meanflow, hvp]
TINY = {"layers": 1, "heads": 2, "head_dim": 16, "tokens": 64, "longest": 32, "steps": 3}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for tool in TOOLS:
        monkeypatch.setitem(tool.SIZES, "cpu", replace(tool.SIZES["cpu"], **TINY))


def run(tool, *options):
    return CliRunner().invoke(tool.main, ["--device", "cpu", *options])


@pytest.mark.parametrize("tool", [gradient_penalty, meanflow], ids=lambda tool: tool.__name__)
def test_training_follows_torch(tool, tmp_path):
    record = tmp_path / "curve.json"
    result = run(tool, "--json", str(record))
    assert result.exit_code == 0, result.output
    data = json.loads(record.read_text())
    assert [c["name"] for c in data["curves"]] == [
        *("rawattn", "torch 1"),
        *("perturbed 1", "perturbed 2"),
    ]
    verdict = data["verdict"]
    assert verdict["deviation"] <= verdict["allowed"] < 1e-4
    assert verdict["gradient_error"] <= verdict["gradient_allowed"] < 1e-4


def test_products_agree_with_differences_and_are_symmetric(tmp_path):
    record = tmp_path / "hvp.json"
    result = run(hvp, "--json", str(record))
    assert result.exit_code == 0, result.output
    products = json.loads(record.read_text())["products"]
    assert len(products) == 3 * 2 * 2
    exact = [p for p in products if p["dtype"] == "float64"]
    assert all(p["error"] < 1e-8 and p["asymmetry"] < 1e-12 for p in exact)


class SilentZero(torch.autograd.Function):
    """The right value and the right gradient; the gradient of that, and every tangent, is zero."""

    @staticmethod
    def forward(q, k, v, cu_seqlens, causal):
        return varlen_attn(q, k, v, cu_seqlens, causal=causal)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.causal = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, dout):
        *qkv, cu_seqlens = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in qkv]
            out = varlen_attn(*leaves, cu_seqlens, causal=ctx.causal)
        return (*torch.autograd.grad(out, leaves, dout.detach()), None, None)

    @staticmethod
    def jvp(ctx, tq, tk, tv, *_):
        return torch.zeros_like(tv)


def silent_zero(q, k, v, pack, causal=True):
    return SilentZero.apply(q, k, v, pack.cu_seqlens, causal)


@pytest.mark.parametrize("tool", [gradient_penalty, meanflow], ids=lambda tool: tool.__name__)
def test_training_finds_a_silent_zero(tool, monkeypatch):
    monkeypatch.setattr(contest, "attend_rawattn", silent_zero)
    result = run(tool)
    assert result.exit_code == 1 and "FAIL" in result.output, result.output


def test_products_find_a_silent_zero(monkeypatch):
    monkeypatch.setitem(hvp.ATTENTIONS, "rawattn", silent_zero)
    monkeypatch.delitem(hvp.METHODS, "forward over reverse")
    result = run(hvp, "--dtype", "float32", "--dtype", "bfloat16", "--attention", "rawattn")
    assert result.exit_code == 1 and result.output.count("FAIL") == 2, result.output


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
def test_torch_alone(tool):
    result = run(tool, "--attention", "torch")
    assert result.exit_code == 0, result.output


def test_waves_fill_the_pack_and_depend_on_the_seed_alone():
    one, same, other = (next(packing.waves(seed, 500, 64, "cpu")) for seed in (1, 1, 2))
    assert sum(one.lengths) == 500 and max(one.lengths) <= 64
    assert torch.equal(one.x, same.x) and not torch.equal(one.x, other.x)
    assert torch.equal(torch.bincount(one.owner), one.cu_seqlens.diff().long())
    assert one.x.shape == one.noise.shape == (500, packing.CHANNELS)
    assert one.chance.shape == (len(one.lengths), 3) and 0.5 < one.x.std() < 1.5


@pytest.mark.parametrize("causal", [False, True])
def test_the_attentions_are_the_same(causal):
    pack = packing.pack((5, 1, 12), "cpu")
    q, k, v = torch.randn(3, 18, 2, 16)
    attentions = (models.attend_rawattn, models.attend_by_sequence, models.attend_math)
    ours, theirs, dense = (attend(q, k, v, pack, causal) for attend in attentions)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours, dense)


@pytest.mark.gpu
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
def test_on_a_gpu(tool):
    """As long as rounding does not decide: from step 60 on the critic's equal runs part by 2, and
    its own size has 40."""
    steps = min(100, tool.SIZES["cuda"].steps)
    result = CliRunner().invoke(tool.main, ["--device", "cuda", "--steps", str(steps)])
    assert result.exit_code == 0, result.output
