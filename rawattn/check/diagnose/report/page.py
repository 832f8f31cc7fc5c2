"""One page of a diagnosis, which needs nothing but itself: no script, no fonts, no links."""

from io import StringIO

from rich.console import Console

from rawattn.check.diagnose.findings import Diagnosis
from rawattn.check.diagnose.report.terminal import About, facts, show

WIDTH = 150  # of tables; sentences are narrower
FORMAT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>rawattn-check</title>
<style>{stylesheet}\nbody {{ color: {foreground}; background: {background}; }}</style>
<pre>{code}</pre></html>
"""


def page(diagnosis: Diagnosis, about: About | None = None, *, full: bool = True) -> str:
    """What ``--full`` shows, as HTML text, to be written as UTF-8; ``full``: and what is right."""
    console = Console(record=True, width=WIDTH, file=StringIO(), legacy_windows=False)
    show(console, diagnosis, about or About(), full=True)
    facts(console, diagnosis, full=full)
    text = console.export_html(code_format=FORMAT)
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
