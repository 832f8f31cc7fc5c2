"""Rotary embeddings where there should be none, or none that are undone."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FIRST,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    times,
)
from rawattn.check.diagnose.engine.question import Question

THETAS = (1e4, 5e5, 1e6)
PAIRS = ("halves", "neighbours")  # which columns are rotated together
Turn = Callable[[Context, Floats, str, int], Floats]
COUNTS = ("in the sequence", "in the packed tokens")


def bugs(question: Question) -> Iterator[Bug]:
    """Each form is a rotation: pairs of columns, how many of them, positions, and the base."""
    for pairs, (size, count, theta) in itertools.product(PAIRS, _forms(question)):
        form = f"pairs of {pairs}, {size} columns, positions {count}, base {theta:g}"
        turn = _turn(pairs, size, count, theta)
        for of, sign in (("q", 1), ("q", -1), ("k", 1), ("k", -1), ("qk", 1)):
            text = f"{' and '.join(of)} rotated{' back' if sign < 0 else ''}"
            scores = {"Y": _scores(turn, of, sign)}
            yield Bug("rotary", f"{text}, gradients as of those: {form}", FIRST, steps=scores)
            undone = scores | _gradients(turn, of, -sign)
            yield Bug("rotary", f"{text}, gradients back: {form}", BACKWARD, steps=undone)
        for of, sign in itertools.product(("q", "k", "qk"), (1, -1)):
            text = f"d{' and d'.join(of)} rotated{' back' if sign < 0 else ''}"
            yield Bug("rotary", f"{text}: {form}", BACKWARD, steps=_gradients(turn, of, sign))


def _forms(question: Question) -> Iterator[tuple[int, str, float]]:
    d = question.q.shape[2] // 2 * 2
    if d:
        yield from ((d, COUNTS[0], theta) for theta in THETAS)
    if question.batch > 1 and d:
        yield d, COUNTS[1], THETAS[0]
    if d % 4 == 0 and d:
        yield d // 2, COUNTS[0], THETAS[0]


def _turn(pairs: str, size: int, count: str, theta: float) -> Turn:
    return lambda c, x, of, sign: rotated(x, sign * _positions(c, of, count), pairs, size, theta)


def _positions(c: Context, of: str, count: str) -> np.ndarray:
    places = c.view.rows if of == "q" else c.view.keys
    if count == "in the packed tokens":
        return np.asarray(places)
    b = c.view.sequence
    if of == "k":
        return np.asarray(places - c.question.cu_seqlens_k[b])
    shift = c.question.lengths_k[b] - c.question.lengths_q[b]
    return np.asarray(places - c.question.cu_seqlens_q[b] + shift)


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


def _scores(turn: Turn, of: str, sign: int) -> Step:
    def Y(c: Context) -> Floats:
        if "q" in of:
            c.Q = turn(c, c.Q, "q", sign)
        if "k" in of:
            c.K = turn(c, c.K, "k", sign)
        return np.asarray(c.r(c.s * c.r(times(c.Q, c.K.T))))

    return Y


def _gradients(turn: Turn, of: str, sign: int) -> dict[str, Step]:
    steps: dict[str, Step] = {}
    if "q" in of:
        steps["dQ"] = lambda c: turn(c, STEPS["dQ"](c), "q", sign)
    if "k" in of:
        steps["dK"] = lambda c: turn(c, STEPS["dK"](c), "k", sign)
    return steps
