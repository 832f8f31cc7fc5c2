"""Who sees whom, with a bug and without, of a part that is small enough to be drawn."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug, View, views_of
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.findings import Sight

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
    short = {b: min(question.lengths_q[b], question.lengths_k[b]) < SHORTEST for b in fit}
    for b in sorted(fit, key=lambda b: (short[b], sizes[b])):
        for head in range(question.num_heads_q):
            sight = _of_sequence(question, b, head, right, found)
            if sight is not None:
                return sight
    return None


def _of_sequence(
    question: Question, b: int, head: int, right: Sequence[View], found: Sequence[View]
) -> Sight | None:
    rows, length = question.lengths_q[b], question.lengths_k[b]
    seen = [list(_seen(question, views, b, head)) for views in (right, found)]
    keys = np.unique([*range(length), *(key for parts in seen for x in parts for key in x[1])])
    counts = np.zeros((2, rows, len(keys)))
    for count, parts in zip(counts, seen, strict=True):
        for here, places, weight in parts:
            np.add.at(count, np.ix_(here, np.searchsorted(keys, places)), weight)
    a, z = counts
    if np.array_equal(a, z):
        return None
    i, j = _place(a != z)
    part = slice(i, i + QUERIES), slice(j, j + KEYS)
    queries = tuple(range(rows)[part[0]])
    zeros = any((view.keys < 0).any() for view in found)
    shown = tuple(int(key) for key in keys[part[1]])
    return Sight(b, head, queries, shown, length, zeros, a[part], z[part])


def _seen(
    question: Question, views: Iterable[View], b: int, head: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Queries and keys of a sequence, by their places in it, and how often they see these; a row of
    zeros has the place that it stands at."""
    first_q, first_k = (int(question.offsets(of)[b]) for of in "qk")
    for view in views:
        here = (view.rows >= first_q) & (view.rows < first_q + question.lengths_q[b])
        if head not in view.heads or not here.any():
            continue
        weight = view.weight[list(view.heads).index(head) if len(view.weight) > 1 else 0][here]
        there = np.flatnonzero(view.keys >= 0)
        shift = view.keys[there[0]] - there[0] if len(there) else first_k
        places = np.where(view.keys < 0, np.arange(len(view.keys)) + shift, view.keys) - first_k
        some = weight.any(axis=0)
        yield view.rows[here] - first_q, places[some], weight[:, some]


def _place(wrong: np.ndarray) -> tuple[int, int]:
    """The corner of a part with the first wrong pair, and what is before it."""
    first = np.argwhere(wrong)[0] - (1, KEYS // 2)
    i, j = np.clip(first, 0, np.maximum(np.subtract(wrong.shape, (QUERIES, KEYS)), 0))
    return int(i), int(j)
