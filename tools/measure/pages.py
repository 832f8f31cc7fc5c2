"""Tables of a benchmark between the markers of markdown pages."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measure.tables import grids, machine_line


def markdown_tables(result: dict[str, Any], against: list[str]) -> dict[str, str]:
    """The tables as markdown, by the name of their markers."""
    bodies = {}
    for name, (header, *lines) in grids(result, against).items():
        table = [header, ["---"] * len(header), *lines]
        text = "\n".join(f"| {' | '.join(line)} |" for line in table)
        same_run = name.startswith("summary_")  # a page has said so at ``summary``
        bodies[name] = text if same_run else f"{machine_line(result)}.\n\n{text}"
    return bodies


def has_place(text: str, name: str) -> bool:
    """Whether ``text`` has the markers of that table."""
    return f"<!-- bench:{name} -->" in text


def splice(text: str, name: str, body: str) -> str:
    """``text`` with ``body`` between the markers of ``name``; ValueError when it has none."""
    start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no place for the table {name!r}: expected {start} ... {end}")
    return pattern.sub(lambda _: f"{start}\n{body}\n{end}", text, count=1)


def splice_all(pages: Iterable[Path], tables: dict[str, str]) -> None:
    """Each table into every page that has its markers; ValueError when none has."""
    texts = {page: page.read_text() for page in pages}
    for name, body in tables.items():
        places = [page for page, text in texts.items() if has_place(text, name)]
        if not places:
            raise ValueError(f"none of {', '.join(map(str, texts))} has a place for {name!r}")
        for page in places:
            texts[page] = splice(texts[page], name, body)
    for page, text in texts.items():
        page.write_text(text)
