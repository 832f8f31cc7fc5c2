"""Rotary embeddings where there should be none, or none that are undone."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FIRST,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
)
from rawattn.check.diagnose.engine.question import Question

PAIRS = ("halves", "neighbours")  # which columns are rotated together
# share of the columns, how positions count, and the base
FORMS = (
    (1, "sequence", 1e4),
    (1, "sequence", 5e5),
    (1, "packed tokens", 1e4),
    (2, "sequence", 1e4),
)
OF = (("q",), ("k",), ("q", "k"))
Turn = Callable[[Context, Floats, str, int], Floats]


def bugs(question: Question) -> Iterator[Bug]:
    """Each form is a rotation: pairs of columns, how many of them, positions, and the base."""
    for pairs, (share, count, theta) in product(PAIRS, FORMS):
        size = question.q.shape[2] // (2 * share) * 2
        if not size or (count == "packed tokens" and question.batch == 1):
            continue
        form = f"pairs of {pairs}, {size} columns, positions in the {count}, base {theta:g}"
        turn = partial(_turned, count, (pairs, size, theta))
        for of in OF:
            both, gradients = " and ".join(of), " and ".join(f"d{x}" for x in of)
            scores, back = {"Y": _scores(turn, of)}, _gradients(turn, of)
            text = f"{both} rotated, gradients as of those: {form}"
            yield Bug("rotary", text, FIRST, steps=scores)
            text = f"{both} rotated, gradients back: {form}"
            yield Bug("rotary", text, BACKWARD, steps=scores | back)
            yield Bug("rotary", f"{gradients} rotated back: {form}", BACKWARD, steps=back)


def _turned(
    count: str, how: tuple[str, int, float], c: Context, x: Floats, of: str, sign: int
) -> Floats:
    return rotated(x, sign * _positions(c, of, count), *how)


def _positions(c: Context, of: str, count: str) -> np.ndarray:
    places = c.view.rows if of == "q" else c.view.keys
    if count == "packed tokens":
        return np.asarray(places)
    question, b = c.question, c.view.sequence
    if of == "k":
        return np.asarray(places - question.cu_seqlens_k[b])
    shift = question.lengths_k[b] - question.lengths_q[b]
    return np.asarray(places - question.cu_seqlens_q[b] + shift)


def rotated(x: Floats, positions: np.ndarray, pairs: str, size: int, theta: float) -> Floats:
    """Pairs among the first ``size`` columns turned by angles that grow with the position."""
    half = size // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    first, second = slice(half), slice(half, size)
    if pairs == "neighbours":
        first, second = slice(0, size, 2), slice(1, size, 2)
    found = x.copy()
    found[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
    found[..., second] = x[..., second] * np.cos(angles) + x[..., first] * np.sin(angles)
    return found


def _scores(turn: Turn, of: Sequence[str]) -> Step:
    def Y(c: Context) -> Floats:
        for name in of:
            setattr(c, name.upper(), turn(c, getattr(c, name.upper()), name, 1))
        return np.asarray(STEPS["Y"](c))

    return Y


def _gradients(turn: Turn, of: Sequence[str]) -> dict[str, Step]:
    def back(name: str, c: Context) -> Floats:
        return turn(c, np.asarray(STEPS[f"d{name.upper()}"](c)), name, -1)

    return {f"d{name.upper()}": partial(back, name) for name in of}
