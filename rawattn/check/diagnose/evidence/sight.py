"""Who sees whom in a small part, with a bug and without: a query a line, a key a column."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product, zip_longest

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug, View, views_of
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.findings import Sight

Views = Sequence[View]
QUERIES, KEYS = 6, 8  # that a picture has room for
CELLS = 250_000  # of a sequence, beyond which it is not looked at
SHORTEST = 5  # queries and keys of a sequence that shows a mask


def mask_rule(question: Question) -> str:
    """Which keys j a query i must see, as people write it; "" where it sees all."""
    if question.sparse:
        return ""
    left, right = question.mask_window
    last = "" if question.lengths_q == question.lengths_k else " + seqlen_k - seqlen_q"
    lower = f"i{last} - {left} <= " if left >= 0 else ""
    upper = "" if right < 0 else f" <= i{last}" + (f" + {right}" if right else "")
    return f"{lower}j{upper}" if lower or upper else ""


def sight_of(question: Question, bug: Bug) -> Sight | None:
    """A part where queries see other keys with ``bug`` than they must; None where there is none."""
    if bug.see is None:
        return None
    right = views_of(question)
    try:
        found = tuple(bug.see(question, right))
    except (IndexError, ValueError):  # one that was found beside another, which changes the views
        return None
    sizes = [q * k for q, k in zip(question.lengths_q, question.lengths_k, strict=True)]
    fit = [b for b, size in enumerate(sizes) if size <= CELLS and question.lengths_q[b]]
    shorter = np.minimum(question.lengths_q, question.lengths_k)
    in_order = sorted(fit, key=lambda b: (shorter[b] < SHORTEST, sizes[b]))
    at = product(in_order, range(question.num_heads_q))
    shown = (_of_sequence(question, b, head, right, found) for b, head in at)
    return next(filter(None, shown), None)


def _of_sequence(q: Question, b: int, head: int, right: Views, found: Views) -> Sight | None:
    rows, length = q.lengths_q[b], q.lengths_k[b]
    seen = [list(_seen(q, views, b, head)) for views in (right, found)]
    keys = np.unique([*range(length), *(key for parts in seen for x in parts for key in x[1])])
    counts = np.zeros((2, rows, len(keys)))
    for count, parts in zip(counts, seen, strict=True):
        for here, places, weight in parts:
            np.add.at(count, np.ix_(here, np.searchsorted(keys, places)), weight)
    a, z = counts
    if np.array_equal(a, z):
        return None
    first = np.argwhere(a != z)[0] - (1, KEYS // 2)  # a wrong pair, and what is before it
    i, j = np.clip(first, 0, np.maximum(np.subtract(a.shape, (QUERIES, KEYS)), 0)).tolist()
    part = slice(i, i + QUERIES), slice(j, j + KEYS)
    zeros = any((view.keys < 0).any() for view in found)
    shown = tuple(int(key) for key in keys[part[1]])
    return Sight(b, head, tuple(range(rows)[part[0]]), shown, length, zeros, a[part], z[part])


def _seen(q: Question, views: Views, b: int, head: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Queries and keys (also rows of zeros) by their places, and how often they see these."""
    first_q, first_k = (int(q.offsets(of)[b]) for of in "qk")
    for view in views:
        here = (view.rows >= first_q) & (view.rows < first_q + q.lengths_q[b])
        if head not in view.heads or not here.any():
            continue
        weight = view.weight[list(view.heads).index(head) if len(view.weight) > 1 else 0][here]
        there = np.flatnonzero(view.keys >= 0)
        shift = view.keys[there[0]] - there[0] if len(there) else first_k
        places = np.where(view.keys < 0, np.arange(len(view.keys)) + shift, view.keys) - first_k
        some = weight.any(axis=0)
        yield view.rows[here] - first_q, places[some], weight[:, some]


def picture(sight: Sight, queries: int = 6, width: int = 80) -> list[str]:
    """A header and a line for each query, with what marks mean; a narrow ``width`` takes keys."""
    while max(map(len, lines := _drawn(sight, queries))) > width and len(sight.keys) > 1:
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
        line = f"{label:{wide + 6}}" + "".join(cells[:own] + bar + cells[own:])
        lines.append(line.rstrip(" |"))
    due, there, width = right > 0, found > 0, max(map(len, lines)) + 3
    past = "zeros" if sight.zeros else "other keys"
    legend = {
        f"sequence {sight.sequence}, head {sight.head}": True,
        ". as it must be": (due & (right == found)).any(),
        "+ seen by mistake": (~due & there).any(),
        "- unseen by mistake": (due & ~there).any(),
        "a number: so often": (due & there & (right != found)).any(),
        f"| {past} from here on": sight.keys[-1] >= sight.length,
        "below 0: keys before its own": sight.keys[0] < 0,
    }
    notes = [text for text, holds in legend.items() if holds][: len(lines)]
    beside = zip_longest(lines, notes, fillvalue="")
    return [f"{line:{width}}{note}".rstrip() for line, note in beside]


def _mark(right: float, found: float) -> str:
    if right == found:
        return "." if right else ""
    if right and found:
        return f"{found:g}" if found == int(found) < 10 else "x"
    return "+" if found else "-"
