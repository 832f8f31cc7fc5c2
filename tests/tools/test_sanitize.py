"""tools/sanitize.py without a GPU: its processes started and read, and which problems there are.

What these problems run is in tests/check/test_check_sanitize.py.
"""

import os
from pathlib import Path

import pytest

import sanitize
import visits
import visits_sparse
from rawattn.problem import Problem, Selection
from rawattn.variants import TABLE, select


@pytest.mark.parametrize(
    ("log", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n", 3),
        ("Segmentation fault\n", None),
    ],
)
def test_the_sanitizers_summary_is_read(log: str, errors: int | None) -> None:
    assert sanitize.errors_in(log) == errors


def fake_sanitizer(folder: Path, body: str) -> None:
    path = folder / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="the stand-in is a shell script")
@pytest.mark.parametrize(
    ("body", "errors"),
    [
        ("echo 'ERROR SUMMARY: 0 errors'", 0),
        ("echo 'ERROR SUMMARY: 7 errors'; exit 1", 7),
        ("echo 'ERROR SUMMARY: 0 errors'; exit 3", None),
        ("exit 0", None),
    ],
)
def test_a_tool_that_ends_badly_is_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, errors: int | None
) -> None:
    fake_sanitizer(tmp_path, body)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert sanitize.run_part("memcheck", "1/1", 60)["errors"] == errors


def test_every_tool_meets_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    met: dict[str, list[str]] = {}

    def run_part(tool: str, part: str, timeout: float) -> sanitize.Result:
        assert 50 < timeout <= 60
        met.setdefault(tool, []).append(part)
        errors = {"memcheck": 2, "racecheck": None if part == "3/3" else 1}.get(tool, 0)
        return {"errors": errors, "log": f"{part} "}

    monkeypatch.setattr(sanitize, "run_part", run_part)
    monkeypatch.setattr(os, "cpu_count", lambda: 14)
    results = sanitize.sanitize(timeout=60)
    assert {tool: result["errors"] for tool, result in results.items()} == {
        **{"memcheck": 6, "racecheck": None, "synccheck": 0, "initcheck": 0}
    }
    assert results["memcheck"]["log"] == "1/3 2/3 3/3 "
    assert sorted(met.pop("")) == sorted(f"{i + 1}/12" for i in range(12))
    assert all(sorted(parts) == ["1/3", "2/3", "3/3"] for parts in met.values())


def test_problems_that_do_not_run_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {"errors": None, "log": "a traceback"}
    monkeypatch.setattr(sanitize, "run_part", lambda *_: failed)
    with pytest.raises(RuntimeError, match="without a tool:\na traceback"):
        sanitize.sanitize()


def test_the_sanitizer_visits_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    visited = set()
    for visit in visits.visits():
        monkeypatch.setenv("RAWATTN_VARIANT", visit.row)
        d = visit.head_dim
        sizes = (4, 204, 209, 2, 1, d, d)
        softcap = visit.softcap
        problem = Problem(visit.dtype, *sizes, -1, -1, d**-0.5, 90, 0, softcap=softcap)
        for stem in {row.stem for row in TABLE if not row.kernel.sparse}:
            visited.add(select(stem, problem, backend=visit.backend).name)
    for sparse in visits_sparse.sparse_visits():
        monkeypatch.setenv("RAWATTN_VARIANT", sparse.row)
        d, (heads_q, heads_kv, heads) = sparse.head_dim, sparse.heads
        sizes = (4, 204, 209, heads_q, heads_kv, d, d)
        problem = Problem(sparse.dtype, *sizes, -1, 0, d**-0.5, 90, 0)
        selection = Selection(heads, 3, sparse.block_size, True, 256)
        for stem in {row.stem for row in TABLE if row.kernel.sparse}:
            row = select(stem, problem, backend=sparse.backend, selection=selection)
            visited.add(row.name)
    assert visited == {row.name for row in TABLE}


def test_every_kind_of_sparse_problem_is_visited_with_and_without_a_gate() -> None:
    sparse = visits_sparse.sparse_visits()
    usual = [visit for visit in sparse if visit.row and visit.steps == tuple(visits_sparse.STEPS)]
    for name, values in (
        ("head_dim", visits.HEAD_DIMS),
        ("heads", visits_sparse.HEADS),
        ("block_size", visits_sparse.BLOCK_SIZES),
        ("source", visits_sparse.SOURCES),
        ("causal", (False, True)),
        ("own", (False, True)),
    ):
        seen = {(getattr(visit, name), visit.gate) for visit in usual}
        assert seen == {(value, gate) for value in values for gate in (False, True)}, name
