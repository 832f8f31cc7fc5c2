"""Who sees whom, drawn with letters: a query a line, a key a column."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.findings import Sight

RIGHT, MORE, LESS = ". as it must be", "+ seen by mistake", "- unseen by mistake"


def picture(sight: Sight, queries: int = 6, width: int = 80) -> list[str]:
    """A header and a line for each of so many queries; behind them what the marks mean.

    width: of a line at most, as far as that takes no more keys than half of them.
    """
    whole = len(sight.keys)
    while max(map(len, lines := _drawn(sight, queries))) > width and 2 * len(sight.keys) > whole:
        last = bool((sight.right != sight.found)[:queries, -1].any())
        kept = slice(1, None) if last else slice(-1)
        right, found = sight.right[:, kept], sight.found[:, kept]
        sight = replace(sight, keys=sight.keys[kept], right=right, found=found)
    return lines


def _drawn(sight: Sight, queries: int) -> list[str]:
    right, found = sight.right[:queries], sight.found[:queries]
    wide = max(len(str(key)) for key in (*sight.keys, *sight.queries)) + 1
    own = sum(key < sight.length for key in sight.keys)
    rows = [("  key", [*map(str, sight.keys)])]
    for n, (query, a, b) in enumerate(zip(sight.queries, right, found, strict=False)):
        marks = [_mark(x, y) for x, y in zip(a, b, strict=True)]
        rows.append((f"{'' if n else 'query':6}{query:>{wide - 1}}", marks))
    lines = []
    for label, cells in rows:
        cells = [f"{cell:>{wide}}" for cell in cells]
        bar = [" |"] * (own < len(cells))  # before what follows the sequence's own keys
        lines.append(
            (f"{label:{wide + 6}}" + "".join(cells[:own] + bar + cells[own:])).rstrip(" |")
        )
    notes = list(_legend(sight, right, found))
    width = max(map(len, lines)) + 3
    notes += [""] * (len(lines) - len(notes))
    return [f"{line:{width}}{note}".rstrip() for line, note in zip(lines, notes, strict=False)]


def _mark(right: float, found: float) -> str:
    if right == found:
        return "." if right else ""
    if right and found:
        return f"{found:g}" if found == int(found) < 10 else "x"
    return "+" if found else "-"


def _legend(sight: Sight, right: np.ndarray, found: np.ndarray) -> Iterator[str]:
    yield f"sequence {sight.sequence}, head {sight.head}"
    due, there = right > 0, found > 0
    marks = {RIGHT: due & (right == found), MORE: ~due & there, LESS: due & ~there}
    marks["a number: so often"] = due & there & (right != found)
    yield from (text for text, cells in marks.items() if cells.any())
    if sight.keys[-1] >= sight.length:
        yield f"| {'zeros' if sight.zeros else 'other keys'} from here on"
    if sight.keys[0] < 0:
        yield "below 0: keys before its own"
