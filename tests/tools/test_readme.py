"""The pages say what is so: snippets run as pasted, links lead somewhere, what is named exists."""

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from measure.cases import SUITES
from measure.pages import has_place, markdown_tables, splice, splice_all

ROOT = Path(__file__).parents[2]
PAGES = {
    name: (ROOT / name).read_text()
    for name in (
        "README.md",
        "kernels_cu/README.md",
        "rawattn/check/README.md",
        "rawattn/torch/context_parallel/README.md",
        "tools/records/README.md",
    )
}
README = PAGES["README.md"]
TOP = {"rawattn", "kernels_cu", "tests", "tools", ".ci"}
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OPTIONAL = ("torch", "jax", "numba", "cupy")


def named_paths() -> list[str]:
    """Files and folders of this repository that the pages' prose and code name."""
    words = [word for text in PAGES.values() for word in re.findall(r"[\w./-]+", text)]
    paths = [word.rstrip(".") for word in words if word.split("/")[0] in TOP and "/" in word]
    return sorted(set(paths))


def links() -> list[tuple[str, str]]:
    """(page, target) of every link and picture that leads into this repository."""
    found = ((page, re.findall(r"\]\(([^)]+)\)", text)) for page, text in PAGES.items())
    return [(page, to) for page, targets in found for to in targets if "://" not in to]


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_the_snippets_run_as_pasted_one_after_the_other() -> None:
    names: dict[str, Any] = {}
    ran = 0
    for snippet in SNIPPETS:
        needs = re.findall(r"^(?:import|from) (\w+)", snippet, re.MULTILINE)
        if all(find_spec(module) for module in needs if module in OPTIONAL):
            exec(compile(snippet, f"README.md: {snippet.splitlines()[0]}", "exec"), names)
            ran += 1
    assert ran >= 4 and len(SNIPPETS) == 7
    assert names["table"].num_selected == 1 and names["near"].num_selected == 2
    assert float(abs(names["gq"]).max()) > 0


def test_the_first_snippet_stands_alone_and_is_short() -> None:
    names: dict[str, Any] = {}
    exec(SNIPPETS[0], names)
    assert names["out"].shape == (7, 4, 64) and names["lse"].shape == (4, 7)
    assert names["dk"].dtype == names["k"].dtype and len(SNIPPETS[0].splitlines()) <= 8


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


def test_what_the_pages_name_is_looked_for() -> None:
    assert {"kernels_cu/sm80/forward.cu", "rawattn/variants/sm80.py", ".ci/run"} <= {*named_paths()}
    assert ("README.md", "tools/records/README.md#changes") in links()
    assert "how-it-is-built" in anchors(README)


@pytest.mark.parametrize("path", named_paths())
def test_what_it_names_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("page", "target"), links())
def test_links_lead_to_files_and_headings(page: str, target: str) -> None:
    path, _, anchor = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    assert file.is_file(), f"{page} leads to {target}"
    assert not anchor or anchor in anchors(file.read_text())


def test_every_picture_of_the_records_is_shown() -> None:
    shown = {Path(target).name for _, target in links() if target.endswith(".png")}
    assert shown == {path.name for path in (ROOT / "tools/records").glob("*.png")}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 250


def test_every_table_has_its_place() -> None:
    more = (
        "sustained",
        "accuracy",
        "summary",
        "summary_second",
        "summary_sparse",
        "summary_models",
        "host",
        "first_call",
        "rows",
    )
    for name in (*SUITES, *more):
        places = [text for text in PAGES.values() if has_place(text, name)]
        assert len(places) == 1, name
        assert f"bench:{name} -->\nthe body" in splice(places[0], name, "the body")


def test_tables_go_to_the_pages_that_have_their_places(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"<!-- bench:{name} -->\nold\n<!-- /bench:{name} -->\n")
    splice_all([tmp_path / "a", tmp_path / "b"], {"a": "one", "b": "two"})
    assert "\none\n" in (tmp_path / "a").read_text() and "\ntwo\n" in (tmp_path / "b").read_text()
    with pytest.raises(ValueError, match="has a place for 'c'"):
        splice_all([tmp_path / "a"], {"c": "three"})


def test_the_pages_show_the_record() -> None:
    import json

    record = json.loads((ROOT / "tools/records/h200.json").read_text())
    for name, body in markdown_tables(record, ["sdpa_flash", "torch_varlen"]).items():
        assert any(body in text for text in PAGES.values()), f"{name} is not of the record"


@pytest.mark.skipif(os.name != "posix", reason="the scripts are bash")
@pytest.mark.parametrize("script", [".ci/run", "tools/lint.sh"])
def test_scripts_may_be_run_and_parse(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
