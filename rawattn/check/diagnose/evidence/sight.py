"""Who sees whom, with a bug and without, of a part that is small enough to be drawn."""

from collections.abc import Iterable, Sequence

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
    first_q, first_k = (int(x[b]) for x in (question.cu_seqlens_q, question.cu_seqlens_k))
    rows, length = question.lengths_q[b], question.lengths_k[b]
    one, other = (_counts(views, head, first_q, rows, first_k) for views in (right, found))
    keys = sorted({*range(length), *one, *other})
    if not keys:
        return None
    nobody = np.zeros(rows)
    a, z = (np.stack([x.get(j, nobody) for j in keys], axis=1) for x in (one, other))
    if np.array_equal(a, z):
        return None
    i, j = _place(a, z)
    part = slice(i, i + QUERIES), slice(j, j + KEYS)
    queries = tuple(range(rows)[part[0]])
    zeros = any((view.keys < 0).any() for view in found)
    return Sight(b, head, queries, tuple(keys[part[1]]), length, zeros, a[part], z[part])


def _counts(
    views: Iterable[View], head: int, first_q: int, rows: int, first_k: int
) -> dict[int, np.ndarray]:
    """How often the queries of a sequence see which keys, by the keys' places from its first one;
    a row of zeros has the place that it stands at."""
    counts: dict[int, np.ndarray] = {}
    for view in views:
        here = (view.rows >= first_q) & (view.rows < first_q + rows)
        if head not in view.heads or not here.any():
            continue
        weight = view.weight[list(view.heads).index(head) if len(view.weight) > 1 else 0]
        there = np.flatnonzero(view.keys >= 0)
        shift = view.keys[there[0]] - there[0] if len(there) else first_k
        places = np.where(view.keys < 0, np.arange(len(view.keys)) + shift, view.keys) - first_k
        for column in np.flatnonzero(weight[here].any(axis=0)):
            of_key = counts.setdefault(int(places[column]), np.zeros(rows))
            of_key[view.rows[here] - first_q] += weight[here, column]
    return counts


def _place(right: np.ndarray, found: np.ndarray) -> tuple[int, int]:
    """The first corner of a part that has some of each: wrong pairs, right ones, none."""
    shape = min(QUERIES, right.shape[0]), min(KEYS, right.shape[1])
    enough = 4, 3, 2
    pairs = right != found, (right > 0) & (right == found), (right == 0) & (found == 0)
    score = np.zeros((right.shape[0] - shape[0] + 1, right.shape[1] - shape[1] + 1))
    for kind, most in zip(pairs, enough, strict=True):
        parts = np.lib.stride_tricks.sliding_window_view(kind, shape)
        score += np.minimum(parts.sum(axis=(2, 3)), most) * most
    i, j = np.unravel_index(score.argmax(), score.shape)
    return int(i), int(j)
