"""tools/train/train_parallel.py: several ranks train as one does, and a wrong one is found out."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rawattn.torch import context_parallel  # noqa: E402
from tests.shared import ranks  # noqa: E402

TOOL = Path(__file__).parents[2] / "tools" / "train" / "train_parallel.py"
CHOSEN = {"device": "cpu", "steps": 8, "dtype": None, "seed": 0}


def compared(layout: str, method: str, mistake: str = "") -> bool:
    """What the tool says of a tiny model, on every rank."""
    import train_parallel
    from train_packed import RECIPE

    small = {"layers": 1, "head_dim": 16, "tokens": 256, "longest": 128, "learning_rate": 1e-2}
    RECIPE.sizes["cpu"] = replace(RECIPE.sizes["cpu"], **small)
    attn = context_parallel.attn
    if mistake == "each rank alone":
        train_parallel.cp.attn = lambda q, k, v, plan, causal: _of_own_keys(q, k, v, plan)
    elif mistake == "no gradient of keys":
        train_parallel.cp.attn = lambda q, k, v, *more, **named: attn(
            q, k.detach(), v, *more, **named
        )
    return train_parallel.compare(layout, method, record=None, **CHOSEN)


def _of_own_keys(q, k, v, plan):
    from rawattn.torch import varlen_attn

    offsets = torch.tensor(plan.cu_seqlens, dtype=torch.int32)
    return varlen_attn(q, k, v, offsets, causal=True)


@pytest.mark.parametrize(
    ("count", "layout", "method"),
    [(2, "contiguous", "auto"), (3, "zigzag", "ring"), (2, "zigzag", "ulysses")],
)
def test_ranks_train_as_one_does(count: int, layout: str, method: str) -> None:
    assert ranks.run(compared, count, layout, method) == [True] * count


@pytest.mark.parametrize("mistake", ["each rank alone", "no gradient of keys"])
def test_mistakes_are_found_out(mistake: str) -> None:
    assert ranks.run(compared, 2, "contiguous", "gather", mistake) == [False] * 2


@pytest.mark.sweep
def test_by_torchrun(tmp_path: Path) -> None:
    record = tmp_path / "curve.json"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--device", "cpu", "--steps", "6", "--layout", "zigzag", "--json", str(record)]
    done = subprocess.run([*start, str(TOOL), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass" in done.stdout and done.stdout.count("nats per byte") == 1
    data = json.loads(record.read_text())
    assert [c["name"] for c in data["curves"]] == ["2 ranks", "1 rank", "perturbed"]
    assert data["ranks"] == 2 and data["layout"] == "zigzag"
