"""tools/train/train_models.py: a wrong attention is found out, one that cannot train says why."""

import json
import sys
import time
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

import implementations  # noqa: E402
import shapes  # noqa: E402
import train_models as tm  # noqa: E402
from click.testing import CliRunner  # noqa: E402

import record  # noqa: E402
from measure.tables import models_grid  # noqa: E402
from rawattn.torch import varlen_attn  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(shapes.WORK, "cpu", replace(shapes.WORK["cpu"], tokens=128, longest=48))


def run(tmp_path, model, *attentions):
    """The exit code, and the rows by attention."""
    record = tmp_path / "models.json"
    chosen = [word for name in attentions for word in ("--attention", name)]
    options = ["--device", "cpu", "--model", model, *chosen, "--json", str(record)]
    result = CliRunner().invoke(tm.main, options, catch_exceptions=False)
    assert result.exit_code in (0, 1), result.output
    rows = json.loads(record.read_text())["models"]
    assert {row["model"] for row in rows} == {model}
    return result.exit_code, {row["attention"]: row for row in rows}


def exact(q, k, v, asked, **changed):
    options = {"window": (-1, -1) if asked.window is None else (asked.window - 1, -1)}
    options |= {"causal": True, "softmax_scale": asked.scale, "sinks": asked.sinks}
    cu_seqlens = changed.pop("cu_seqlens", asked.cu_seqlens)
    return varlen_attn(q, k, v, cu_seqlens, **options | changed)


@pytest.mark.parametrize("model", ["llama", "gpt_oss"])
def test_torch_s_own_mathematics_counts(tmp_path, model):
    """With windows and sinks too, for which the tool makes the masks."""
    _, rows = run(tmp_path, model, "eager", "sdpa", implementations.FLOOR)
    assert list(rows) == ["rawattn", "eager", "sdpa", implementations.FLOOR]
    for name in ("rawattn", "eager"):
        assert rows[name]["note"] == "" and rows[name]["tokens_a_second"] > 0
    if model == "llama":
        assert rows["sdpa"]["note"] == ""
    else:  # it has no sinks
        assert rows["sdpa"]["note"].startswith("ValueError: GptOss")
        assert rows["sdpa"]["tokens_a_second"] is None


def leaking(q, k, v, asked):
    return exact(q, k, v, asked, cu_seqlens=asked.cu_seqlens[[0, -1]])


def wrongly_scaled(q, k, v, asked):
    return exact(q, k, v, asked, softmax_scale=0.26)


def without_gradient_of_v(q, k, v, asked):
    return exact(q, k, v.detach(), asked)


def without_window(q, k, v, asked):
    return exact(q, k, v, asked, window=(-1, -1))


def without_gradient_of_sinks(q, k, v, asked):
    return exact(q, k, v, asked, sinks=asked.sinks.detach())


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        *(("llama", f) for f in (leaking, wrongly_scaled, without_gradient_of_v)),
        *(("gpt_oss", f) for f in (leaking, without_window, without_gradient_of_sinks)),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_attention_does_not_count(tmp_path, monkeypatch, model, wrong):
    """It is timed and shown; that it is the fastest is nothing against rawattn."""
    monkeypatch.setitem(implementations.PACKED, "fa4", lambda: wrong)
    monkeypatch.setattr(tm, "median_times", lambda runs, _: dict.fromkeys(runs, 2.0) | {"fa4": 1.0})
    code, rows = run(tmp_path, model, "rawattn", "fa4")
    assert rows["fa4"]["note"].startswith("wrong: ") and rows["fa4"]["tokens_a_second"] == 128e3
    assert code == 0
    monkeypatch.setitem(implementations.PACKED, "fa4", lambda: exact)
    code, rows = run(tmp_path, model, "rawattn", "fa4")
    assert rows["fa4"]["note"] == "" and code == 1


def test_numbers_that_are_not_finite_are_not_timed(tmp_path, monkeypatch):
    """A step with them would leave them in the weights of all."""

    def infinite(q, k, v, asked):
        return exact(q, k, v, asked) / 0

    monkeypatch.setitem(implementations.PACKED, "fa4", lambda: infinite)
    _, rows = run(tmp_path, "llama", "fa4", "eager")
    assert rows["fa4"]["note"].startswith("wrong: ") and rows["fa4"]["tokens_a_second"] is None
    assert rows["eager"]["note"] == "" and rows["eager"]["tokens_a_second"] > 0


def test_one_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch):
    def failing(*_):
        raise RuntimeError("no kernel for it\nand more")

    monkeypatch.setitem(implementations.PACKED, "fa4", lambda: failing)
    monkeypatch.setitem(sys.modules, "cudnn", None)
    _, rows = run(tmp_path, "gpt_oss", "cudnn", "fa4", "torch_varlen", "eager")
    assert rows["fa4"]["note"] == "RuntimeError: no kernel for it"
    assert rows["cudnn"]["note"].startswith("ModuleNotFoundError: ")
    assert rows["torch_varlen"]["note"].startswith("NotImplementedError: no sinks")
    assert rows["eager"]["note"] == ""


def test_rawattn_that_is_slower_fails(tmp_path, monkeypatch):
    def slow(q, k, v, asked):
        time.sleep(0.05)
        return exact(q, k, v, asked)

    implementations.register("slow", slow)
    monkeypatch.setattr(
        tm,
        "available",
        lambda name: "slow" if name == "rawattn" else implementations.available(name),
    )
    code, rows = run(tmp_path, "llama", "rawattn", "eager")
    assert code == 1 and rows["rawattn"]["tokens_a_second"] < rows["eager"]["tokens_a_second"]


# ---- how others spell what is asked: a double of each counts only if it is called rightly -----


def fake_fa4(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
             causal, window_size, learnable_sink):  # fmt: skip
    """None is an open side; a side counts the keys beside the query's own."""
    assert causal and window_size[1] == 0 and cu_seqlens_k is cu_seqlens_q
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    left = -1 if window_size[0] is None else window_size[0]
    options = {"window": (left, -1), "softmax_scale": softmax_scale, "sinks": learnable_sink}
    return varlen_attn(q, k, v, cu_seqlens_q, causal=True, **options), None


def fake_cudnn(q, k, v, *, scale, is_causal, window_left, sinks, cu_seqlens_q, cu_seqlens_kv,
               max_seqlen_q, max_seqlen_kv, return_lse):  # fmt: skip
    """-1 is an open side; the left one counts the query's own key."""
    assert is_causal and return_lse and cu_seqlens_kv is cu_seqlens_q and window_left
    assert max_seqlen_q == max_seqlen_kv == int(cu_seqlens_q.diff().max())
    options = {"window": (max(window_left, 0) - 1, -1), "softmax_scale": scale, "sinks": sinks}
    return varlen_attn(q, k, v, cu_seqlens_q, causal=True, **options), None


def fake_varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None,
                     window_size=(-1, -1), enable_gqa=False):  # fmt: skip
    """-1 is an open side."""
    assert enable_gqa and window_size[1] == 0 and cu_seq_k is cu_seq_q
    assert max_q == max_k == int(cu_seq_q.diff().max())
    window = (window_size[0], -1)
    return varlen_attn(q, k, v, cu_seq_q, causal=True, window=window, softmax_scale=scale)


@pytest.mark.parametrize("model", ["llama", "gpt_oss"])
def test_others_are_asked_for_the_same_attention(tmp_path, monkeypatch, model):
    modules = {"flash_attn": {}, "flash_attn.cute": {"flash_attn_varlen_func": fake_fa4}}
    modules |= {"cudnn": {"sdpa_torch": fake_cudnn}}
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake_varlen_attn)
    _, rows = run(tmp_path, model, "fa4", "cudnn", "torch_varlen")
    notes = {name: row["note"] for name, row in rows.items()}
    sinks = notes.pop("torch_varlen") if model == "gpt_oss" else "no sinks"
    assert "no sinks" in sinks and set(notes.values()) == {""}, notes


def test_the_table_of_a_record(tmp_path):
    """Rates, and milliseconds beyond a step without attention; newer rows replace older ones, and
    what cannot train a model has no column."""
    _, rows = run(tmp_path, "llama", "torch_varlen", implementations.FLOOR)
    old = {"sources": "a", "models": [{"model": "llama"} | row for row in rows.values()]}
    new = [
        {"model": "llama", "attention": "rawattn", "ms_a_step": 10.0, "tokens_a_second": 1234.5},
        {"model": "llama", "attention": "no_attention", "ms_a_step": 8.0, "tokens_a_second": 2e3},
    ]
    merged = record.merge(old, {"sources": "a", "models": [row | {"note": ""} for row in new]})
    wrong = {"attention": "flex", "ms_a_step": 20.0, "tokens_a_second": 600.0, "note": "wrong: dq"}
    header, cells = models_grid([*merged["models"], {"model": "llama"} | wrong])
    assert header == ["model", "rawattn", "no_attention", "flex"]  # torch_varlen trains nothing
    assert cells == ["llama", "1,234 (2.0)", "2,000", "600 (12.0), wrong"]
