"""tools/foreign_tests.py: files that import other projects' names run on rawattn's."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.11")

from click.testing import CliRunner  # noqa: E402

import foreign_tests  # noqa: E402

FLASH = """
import pytest
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb

x = torch.randn(2, 5, 2, 16, device="cuda")

@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("seqlen,causal", [(n, n % 2) for n in range(1, 6)])
@pytest.mark.parametrize("scale", [0.5, 1.0, 1.5, 2.0])
def test_output(seqlen, causal, scale, dropout_p):
    out = flash_attn_func(x[:, :seqlen], x, x, dropout_p, scale, bool(causal))
    assert out.shape == (2, seqlen, 2, 16)

def test_padded():
    kept = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], dtype=torch.bool, device="cuda")
    packed, places, cu_seqlens, longest, lengths = unpad_input(x, kept)
    assert longest == 4 and lengths.tolist() == [3, 4] and not USE_TRITON_ROCM
    out = flash_attn_varlen_func(packed, packed, packed, cu_seqlens, cu_seqlens, longest, longest)
    batch = pad_input(out, places, 2, 5)
    assert torch.equal(batch[kept], out) and not batch[~kept].any()

def test_cache():
    flash_attn_with_kvcache(apply_rotary_emb(x, None, None), x, x)

def test_wrong():
    assert flash_attn_func(x, x, x).isnan().any()

def test_other_error():
    flash_attn_func(x, x, x[:, :2])

def test_idle():
    pass

def test_flash_attn_generator_arg_must_be_none():
    raise RuntimeError
"""
TORCH = """
import unittest
import torch
from torch.nn.attention.varlen import varlen_attn, varlen_attn_out

PLATFORM_SUPPORTS_FLASH_ATTENTION = False
device_types = ("cuda",)
q = torch.randn(7, 2, 16, device=device_types[0])
cu = torch.tensor([0, 3, 7], dtype=torch.int32, device=device_types[0])

class TestVarlen(unittest.TestCase):
    @unittest.skipIf(not PLATFORM_SUPPORTS_FLASH_ATTENTION, "not supported")
    def test_both(self):
        out = torch.empty_like(q)
        varlen_attn_out(out, q, q, q, cu, cu, 4, 4)
        self.assertTrue(torch.equal(out, varlen_attn(q, q, q, cu, cu, 4, 4)))
        torch.nn.attention.restore_flash_attention_impl()  # of no concern to those after it

    def test_called(self):
        from torch.utils._python_dispatch import TorchDispatchMode
        class Names(TorchDispatchMode):
            met = []
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.met.append(str(func))
                return func(*args, **(kwargs or {}))
        with Names() as names:
            varlen_attn(q, q, q, cu, cu, 4, 4)
        assert any("torch_attn._varlen_attn" in name for name in names.met)

    def test_paged(self):
        varlen_attn(q, q[None], q[None], cu, None, 4, 4, block_table=cu)

    def test_custom_op_compliance(self):
        torch.ops.torch_attn._varlen_attn(q, q, q, cu, cu, 4, 4)
"""


def run(folder: Path, suite: str, text: str, *options: str) -> tuple[int, dict[str, Any]]:
    file, counts = folder / "test_theirs.py", folder / "counts.json"
    file.write_text(text)
    arguments = [suite, str(file), "--cpu", "--json", str(counts), *options]
    done = CliRunner().invoke(foreign_tests.main, arguments)
    return done.exit_code, json.loads(counts.read_text())


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def test_flash_attention(tmp_path: Path) -> None:
    code, counts = run(tmp_path, "flash-attn", FLASH, "--most", "16")
    output = counts.pop("test_output")
    assert output.pop("cases") == 40
    assert output.keys() == {"passed", "refused: dropout"} and sum(output.values()) == 16
    assert code == 1 and {name: [*ends][1] for name, ends in counts.items()} == {
        "test_padded": "passed",
        "test_cache": "refused: kv-cache",
        "test_wrong": "failed",
        "test_other_error": "failed",
        "test_idle": "failed",  # it says nothing of rawattn
        "test_flash_attn_generator_arg_must_be_none": "left out",
    }


def test_time_that_is_spent(tmp_path: Path) -> None:
    code, counts = run(tmp_path, "flash-attn", FLASH, "--seconds", "1e-9", "-k", "padded or wrong")
    assert code == 0 and counts == {
        name: {"cases": 0, "not reached": 1} for name in ("test_padded", "test_wrong")
    }


@pytest.mark.parametrize(
    ("suite", "paged", "compliance"),
    [("torch-compat", "refused: paged cache", "left out"), ("torch-provider", "failed", "passed")],
)
def test_torch(tmp_path: Path, suite: str, paged: str, compliance: str) -> None:
    pytest.importorskip("torch", minversion="2.13")  # has varlen_attn_out
    code, counts = run(tmp_path, suite, TORCH)
    assert {name: [*ends][1] for name, ends in counts.items()} == {
        "test_both": "passed",
        "test_called": "passed",
        "test_paged": paged,
        "test_custom_op_compliance": compliance,
    }
    assert code == (paged == "failed")


def test_draws_are_the_same_and_of_all_marks() -> None:
    marks = [
        pytest.mark.slow.mark,
        pytest.mark.parametrize("a", range(100)).mark,
        pytest.mark.parametrize("b, c", [(n, -n) for n in range(50)]).mark,
    ]
    (other, drawn), total = foreign_tests.draw(marks, 20, "0")
    assert other.name == "slow" and total == 5000
    names, rows = drawn.args
    assert names == ["a", "b", "c"] and len({row.values for row in rows}) == 20
    assert all(row.values[1] == -row.values[2] for row in rows)
    assert foreign_tests.draw(marks, 20, "0")[0][1] == drawn
    assert foreign_tests.draw(marks, 20, "1")[0][1] != drawn
    assert foreign_tests.draw(marks, 5000, "0") == (marks, 5000)


def test_refusals_are_those_of_the_adapters() -> None:
    from rawattn.torch import compat, flash_attn

    sources = "".join(Path(module.__file__).read_text() for module in (compat, flash_attn))
    assert all(text in sources for text in foreign_tests.REFUSALS.values())
    assert not foreign_tests.refusal(ValueError("softcap is not supported"))
