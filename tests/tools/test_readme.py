"""The README says what is so: its example runs, its commands are CI's, what it names exists."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rawattn

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOP = {"rawattn", "kernels_cu", "tests", "tools", ".ci"}


def named_paths() -> list[str]:
    """Files and folders of this repository that the README's prose and code name."""
    words = re.findall(r"[\w./-]+", README)
    paths = [word.rstrip(".") for word in words if word.split("/")[0] in TOP and "/" in word]
    return sorted(set(paths))


def test_the_example_runs_without_a_gpu() -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example
    check = "\nassert out.shape == q.shape and lse.shape == (4, 7) and dk.dtype == k.dtype"
    code = example[1] + check
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_torch_example_runs() -> None:
    torch = pytest.importorskip("torch")
    example = re.search(r"```python\n(from rawattn\.torch.*?)```", README, re.DOTALL)
    assert example
    q, k, v = (torch.randn(7, 2, 32, requires_grad=True) for _ in range(3))
    names = {"q": q, "k": k, "v": v, "cu_seqlens": torch.tensor([0, 3, 7], dtype=torch.int32)}
    exec(example[1], names)
    assert names["out"].shape == q.shape and names["out"].requires_grad


def test_the_example_of_second_order_runs() -> None:
    example = re.search(r"```python\n(# out and its tangent.*?)```", README, re.DOTALL)
    assert example
    rng = np.random.default_rng(0)
    names = ("q", "k", "v", "tq", "tk", "tv", "ddq", "ddk", "ddv", "dout")
    given: dict[str, Any] = {name: rng.standard_normal((7, 4, 16)) for name in names}
    given |= {"rawattn": rawattn, "cu_seqlens": np.array([0, 3, 7], np.int32)}
    given["out"], given["lse"] = rawattn.forward(
        given["q"], given["k"], given["v"], given["cu_seqlens"], return_lse=True
    )
    exec(example[1], given)
    assert given["gq"].shape == given["tout"].shape and np.abs(given["gq"]).max() > 0


def test_the_example_of_block_sparse_attention_runs() -> None:
    example = re.search(r"```python\n(# every query names blocks.*?)```", README, re.DOTALL)
    assert example
    rng = np.random.default_rng(0)
    given: dict[str, Any] = {"rawattn": rawattn, "np": np, "rng": rng, "total": 70}
    given |= {name: rng.standard_normal((70, 4, 16)) for name in ("q", "dout")}
    given |= {name: rng.standard_normal((70, 2, 16)) for name in ("k", "v")}
    given |= {"num_heads_kv": 2, "cu_seqlens": np.array([0, 3, 70], np.int32)}
    exec(example[1], given)
    assert given["out"].shape == given["dq"].shape and np.abs(given["dk"]).max() > 0


def test_the_two_commands_are_those_of_ci() -> None:
    commands = re.findall(r"^    (pip install .*)$", README, re.MULTILINE)
    assert commands == [
        'pip install -e ".[cuda13]" && rawattn-check',
        'pip install -e ".[cuda13,test]" && pytest',
    ]
    steps = re.findall(r"^step '(.*)'$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert set(commands) <= set(steps)


def test_every_variable_is_documented() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "rawattn").rglob("*.py"))
    used = set(re.findall(r"RAWATTN_[A-Z_]+[A-Z]", sources))
    assert used and set(re.findall(r"RAWATTN_[A-Z_]+[A-Z]", README)) == used


def test_the_search_for_paths_finds_some() -> None:
    assert {"kernels_cu/sm80/forward.cu", "rawattn/variants/sm80.py", ".ci/run"} <= set(
        named_paths()
    )


@pytest.mark.parametrize("path", named_paths())
def test_what_it_names_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_table_has_its_place() -> None:
    from measure.cases import SUITES
    from measure.tables import splice

    for name in (*SUITES, "summary", "host", "first_call"):
        assert f"bench:{name} -->\nthe body" in splice(README, name, "the body")


@pytest.mark.skipif(os.name != "posix", reason="the scripts are bash")
@pytest.mark.parametrize("script", [".ci/run", "tools/lint.sh"])
def test_scripts_may_be_run_and_parse(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
