"""tools/bench_parallel.py on CPUs: its documents, its rows, and that a wrong contender is seen."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from measure import parallel  # noqa: E402
from tests.shared import ranks  # noqa: E402

TOOL = Path(__file__).parents[2] / "tools" / "bench_parallel.py"
CPU = torch.device("cpu")


def test_documents_have_the_mean_and_divide_among_ranks() -> None:
    for tokens in (65536, 131072):
        lengths = parallel.documents(tokens, 8192, 128)
        assert sum(lengths) == tokens and all(n % 128 == 0 for n in lengths)
        assert 0.6 < tokens / len(lengths) / 8192 < 1.6
        assert lengths == parallel.documents(tokens, 8192, 128)
    one, many = parallel.cases((65536,), True)
    assert one.flop == 7 * 32 * 128 * 65536 * 65537 > 4 * many.flop


def rows(mistake: bool) -> list[dict[str, Any]]:
    if mistake:
        real = parallel.cp.attn
        parallel.cp.attn = lambda *qkv, causal: real(*qkv)
    (case, _) = parallel.cases((128,), False)
    return parallel.measure(case, CPU, 1, False)


def test_rows() -> None:
    for found in ranks.run(rows, 2, False):
        assert isinstance(found, list), found
        first, *others = found
        assert first["contender"] == "one rank" and first["distance"] == 0 < first["tflops"]
        assert len(others) == 8
        for row in others:
            assert row["distance"] < 0.01 and "error" not in row and row["ms"] > 0
            known = row["contender"].split()[1] != "auto"
            assert known == ("attention_ms" in row) == ("communication_ms" in row)


def test_another_result_is_an_error() -> None:
    for found in ranks.run(rows, 2, True):
        assert all("another result" in row["error"] for row in found[1:])


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options", [["--tokens", "128", "--rounds", "1"], ["--memory", "128", "--only", "gather"]]
)
def test_by_torchrun(options: list[str], tmp_path: Path) -> None:
    record = tmp_path / "parallel.json"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = ["--device", "cpu", "--json", str(record), *options]
    done = subprocess.run([*start, str(TOOL), *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(record.read_text())
    found = {row["contender"] for row in result["rows"]}
    assert result["ranks"] == 2 and found >= {"one rank", "zigzag gather"}
    assert ("zigzag ring" in found) == ("--only" not in options)
