"""A GPU's record: what it is of, how its parts merge, and when it counts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import record

ROOT = Path(__file__).parents[2]
CP = "torch/context_parallel/"
CLEAN = dict.fromkeys(record.SANITIZERS, 0)
GOOD: dict[str, Any] = {"tests": {"passed": 3, "failed": 0, "skipped": 1}, "sanitizer": CLEAN}
ROWS = [
    {"suite": "paper", "case": case, "direction": direction, "ours_ms": 1.0}
    for case, direction in (("a", "forward"), ("a", "backward"), ("b", "forward"))
]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small tree of sources, and a record of them in ``records``."""
    for name in ("rawattn/api.py", "kernels_cu/sm80/forward.cu", "rawattn/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "records").mkdir()
    text = json.dumps(GOOD | {"sources": record.sources_hash(tmp_path)})
    (tmp_path / "records" / "h200.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize("change", ["rawattn/api.py", "kernels_cu/sm80/forward.cu", "rawattn/b.py"])
def test_a_record_is_stale_once_a_source_changes(sources: Path, change: str) -> None:
    assert record.check(sources / "records", sources) == 0
    (sources / change).write_text("changed")
    assert record.check(sources / "records", sources) == 1


def test_a_record_outlives_what_is_no_source_and_is_missed(sources: Path) -> None:
    (sources / "rawattn" / "notes.txt").write_text("changed")
    assert record.check(sources / "records", sources) == 0
    (sources / "records" / "h200.json").unlink()
    assert record.check(sources / "records", sources) == 1


@pytest.mark.parametrize(
    "change", ["check/diagnose/words.py", "check/cli_diagnose.py", "check/cli.py", f"{CP}plans.py"]
)
def test_a_record_outlives_what_it_measures_nothing_of(sources: Path, change: str) -> None:
    file = sources / "rawattn" / change
    file.parent.mkdir(parents=True)
    file.write_text("new")
    assert record.check(sources / "records", sources) == (change == "check/cli.py")


@pytest.mark.parametrize("change", ["rawattn/api.py", f"rawattn/{CP}plans.py", ""])
def test_a_record_of_several_gpus_is_of_what_they_run(sources: Path, change: str) -> None:
    rows = [{"contender": name, "error": "no"} for name in ("one rank", "DeepSpeed Ulysses")]
    of_two = {"ranks": 2, "tests": {"passed": 7, "failed": 0}, "rows": rows}
    of_two["sources"] = record.sources_hash(sources, several=True)
    (sources / "records" / "h200.json").write_text(json.dumps(of_two))
    assert record.check(sources / "records", sources) == 0
    if change:
        (sources / change).parent.mkdir(parents=True, exist_ok=True)
        (sources / change).write_text("changed")
    else:  # a way of ours that was wrong
        rows.append({"contender": "zigzag auto", "error": "another result than one rank's"})
        (sources / "records" / "h200.json").write_text(json.dumps(of_two))
    assert record.check(sources / "records", sources) == 1


def test_renaming_a_source_changes_the_hash(sources: Path) -> None:
    before = record.sources_hash(sources)
    (sources / "rawattn/api.py").rename(sources / "rawattn/apis.py")
    assert record.sources_hash(sources) != before


def test_check_needs_nothing_but_python() -> None:
    command = [sys.executable, "-S", "-I", str(ROOT / "tools/record.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode in (0, 1) and not run.stderr
    assert "h200.json" in run.stdout or "no GPU record" in run.stdout


def test_parts_merge_while_the_sources_are_the_same() -> None:
    old = {"sources": "a", "tests": {"passed": 1}, "bench": ROWS}
    faster = ROWS[0] | {"ours_ms": 0.5}
    merged = record.merge(old, {"sources": "a", "sanitizer": {}, "bench": [faster]})
    assert merged["tests"] == {"passed": 1} and merged["sanitizer"] == {}
    assert merged["bench"] == [faster, *ROWS[1:]]
    fresh = {"sources": "b", "tests": {"passed": 2}}
    assert record.merge(old, fresh) == fresh and record.merge(None, fresh) == fresh


def test_accuracy_merges_by_its_case() -> None:
    kinds = [("normal", 64, "float16", True), ("normal", 64, "float16", False)]
    rows = [dict(zip(record.KEYS["accuracy"], kind, strict=True)) for kind in kinds]
    old = {"sources": "a", "bench": ROWS, "accuracy": [row | {"ours_rms": 2.0} for row in rows]}
    again = rows[1] | {"ours_rms": 1.0}
    merged = record.merge(old, {"sources": "a", "accuracy": [again]})
    assert merged["accuracy"] == [rows[0] | {"ours_rms": 2.0}, again] and merged["bench"] == ROWS


def test_records_are_named_after_the_gpu() -> None:
    assert record.record_path("NVIDIA H200").name == "h200.json"
    assert record.record_path("NVIDIA GeForce RTX 4090").name == "geforce-rtx-4090.json"


def test_junit_counts_errors_as_failures(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>'
    )
    assert record.count_tests(junit) == {"passed": 3, "failed": 3, "skipped": 3}


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ({"tests": {"passed": 3, "failed": 2, "skipped": 0}}, "2 tests failed"),
        ({"tests": {"passed": 0, "failed": 0, "skipped": 9}}, "no tests"),
        ({"sanitizer": CLEAN | {"racecheck": 1}}, "no clean end of racecheck"),
        ({"sanitizer": CLEAN | {"memcheck": None}}, "no clean end of memcheck"),
        ({"sanitizer": {"memcheck": 0}}, "no clean end of racecheck, synccheck, initcheck"),
        ({"sources": "b"}, "the sources have changed since"),
    ],
)
def test_a_record_counts_only_when_all_ended_well(part: dict[str, Any], fault: str) -> None:
    good = GOOD | {"sources": "a"}
    assert record.faults(good, "a") == []
    assert record.faults(good | part, "a") == [fault]
    assert record.faults({"sources": "a"}, "a")[0] == "no tests"


def test_shards_add_up_and_count_when_all_are_there() -> None:
    one, two = ({"passed": 5, "failed": 0, "skipped": 1}, {"passed": 7, "failed": 1, "skipped": 0})
    first = {"sources": "a", "tests": record.add_up({"1/2": one}), "sanitizer": CLEAN}
    assert record.faults(first, "a") == ["tests without shards 2/2"]
    both = record.merge(first, {"sources": "a", "tests": record.add_up({"2/2": two})})
    assert {name: both["tests"][name] for name in one} == {"passed": 12, "failed": 1, "skipped": 1}
    assert record.faults(both, "a") == ["1 tests failed"]
    again = record.merge(both, {"sources": "a", "tests": record.add_up({"2/2": one})})
    assert record.faults(again, "a") == []
    others = record.merge(again, {"sources": "a", "tests": record.add_up({"1/3": one})})
    assert record.faults(others, "a") == ["tests without shards 2/3, 3/3"]


def test_sanitizers_merge_by_tool() -> None:
    old = {"sources": "a", "sanitizer": {"memcheck": 0, "racecheck": 2}}
    merged = record.merge(old, {"sources": "a", "sanitizer": {"racecheck": 0}})
    assert merged["sanitizer"] == {"memcheck": 0, "racecheck": 0}


def test_a_record_has_a_line_for_each_row() -> None:
    written = GOOD | {"gpu": 'the "GPU"', "bench": ROWS, "none": []}
    text = record.dumps(written)
    assert json.loads(text) == written
    lines = text.splitlines()
    assert sum('"case"' in line for line in lines) == len(ROWS) and len(lines) == 9 + len(ROWS) - 1


def test_shards_share_the_tests_out(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.parametrize('i', range(40))\ndef test(i): pass\n"
    )
    seen: list[str] = []
    for part, processes in (("1/2", "0"), ("2/2", "1")):
        command = [sys.executable, "-m", "pytest", "-p", "measure.shard", "--shard", part, "-v"]
        command += ["-n", processes, "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        environment = {"PYTHONPATH": str(ROOT / "tools"), "PATH": ""}
        run = subprocess.run(
            [*command, "test_some.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        names = {word for word in run.stdout.split() if word.startswith("test_some.py::")}
        assert 10 < len(names) < 30
        seen += names
    assert len(seen) == len({*seen}) == 40
