"""Which sums of the online softmax were rescaled wrongly? Tried on one view, planted where it fits.

The sums over tiles of keys are those of weights (row_sum), P V (out), and in forward mode of P o E
(e) and (P o E) V + P tV. Each must be multiplied by exp(old max - new max) of its own row.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine import TILES, Bug, Context, Floats, Step, times
from rawattn.check.diagnose.question import Answers, Question

Rows = Callable[[np.ndarray], np.ndarray]  # another row for each

FITS = 0.1  # of what is wrong may be left on the view that is looked at

ROWS: dict[str, Rows] = {
    "the row 8 before, for rows i with i % 16 in 8 to 15": lambda i: i & ~8,
    "row i xor 8": lambda i: i ^ 8,
    "row i // 2 * 2": lambda i: i & ~1,
    "row i xor 1": lambda i: i ^ 1,
    "row i // 4 * 4": lambda i: i & ~3,
    "row i // 16 * 16": lambda i: i & ~15,
}
UNSCALED = {
    "forward": (("out",), ("row_sum",), ("out", "row_sum")),
    "jvp": (("e",), ("tout",), ("e", "tout"), ("out",), ("row_sum",), ("out", "tout")),
}
SUMS = {"e": "the sum of P o E", "tout": "the sum of (P o E) V + P tV"}


class _Sums(NamedTuple):
    """The results of an online pass over the keys of a view."""

    out: Floats
    lse: Floats
    e: Floats
    tout: Floats


def bugs(
    question: Question, answers: Answers, stage: str, contexts: Sequence[Context]
) -> Iterator[Bug]:
    """Bugs of the online softmax that fit the view with the largest errors."""
    names = {
        "forward": {"out": "out", "lse": "lse"},
        "jvp": {"out": "jvp out", "lse": "jvp lse", "tout": "tout", "e": "tlse"},
    }[stage]
    there = {sum_: name for sum_, name in names.items() if name in answers}
    errors = [_error(c, answers, there, _right(c)) for c in contexts]
    worst = int(np.argmax(errors))
    if not errors[worst]:
        return
    c = contexts[worst]
    sizes = [tile for tile in TILES if tile < len(c.view.keys)]
    for tile, backwards in product(sizes, (False, True)):
        order = f"tile of {tile}" + (", from the last" if backwards else "")
        tries: list[tuple[str, tuple[str, ...], Rows | None]] = []
        if stage == "jvp":
            tries += [
                (" and ".join(SUMS.get(s, s) for s in sums), sums, None) for sums in UNSCALED[stage]
            ]
        for place, other in ROWS.items():
            tries += [
                (f"{' and '.join(sums)} by the factor of {place}", sums, other)
                for sums in UNSCALED["forward"]
            ]
        for words, sums, rows in tries:
            found = _online(c, tile, backwards, sums, rows)
            if _error(c, answers, there, found) < FITS * errors[worst]:
                steps = _steps(stage, tile, backwards, sums, rows)
                yield Bug("no-rescale", f"{words}, {order}", (stage,), steps=steps)


def _right(c: Context) -> _Sums:
    jvp = hasattr(c, "tO")
    if jvp:
        return _Sums(c.O, c.L, c.tL, c.tO)
    return _Sums(c.O, c.L, np.zeros_like(c.L), np.zeros_like(c.O))


def _error(c: Context, answers: Answers, names: dict[str, str], sums: _Sums) -> float:
    """How far a view's answers are from ``sums``, each in units of its size."""
    total = 0.0
    for of, name in names.items():
        wanted = getattr(sums, of)
        by_row = answers[name].ndim == 2
        at = (
            (c.view.heads[:, None], c.view.rows) if by_row else (c.view.rows, c.view.heads[:, None])
        )
        found = np.asarray(answers[name][at], dtype=np.float64)
        both = np.isfinite(found) & np.isfinite(wanted)
        size = float((found[both] ** 2).sum())
        total += float(((found[both] - wanted[both]) ** 2).sum()) / size if size else 0.0
    return float(np.sqrt(total))


def _online(
    c: Context,
    tile: int,
    backwards: bool,
    unscaled: tuple[str, ...],
    rows: Rows | None,
) -> _Sums:
    """The sums, those of ``unscaled`` rescaled by the factor of other ``rows``, or not at all."""
    heads, n, m = c.S.shape
    top = np.full((heads, n), -np.inf)
    sums = {"row_sum": np.zeros((heads, n, 1)), "out": np.zeros((heads, n, c.V.shape[1]))}
    moved = hasattr(c, "E")
    if moved:
        sums |= {"e": np.zeros((heads, n, 1)), "tout": np.zeros((heads, n, c.V.shape[1]))}
    E = np.where(c.W > 0, c.E, 0.0) if moved else None
    there = None if rows is None else np.minimum(rows(np.arange(n)), n - 1)
    starts = range(0, m, tile)
    for start in reversed(starts) if backwards else starts:
        keys = slice(start, start + tile)
        new = np.maximum(top, c.S[..., keys].max(axis=-1))
        safe = np.where(np.isneginf(new), 0.0, new)
        factor = np.exp(np.where(np.isneginf(top), safe, top) - safe)[..., None]
        weights = np.exp(c.S[..., keys] - safe[..., None])
        more = {"row_sum": weights.sum(axis=-1, keepdims=True), "out": times(weights, c.V[keys])}
        if E is not None:
            moving = weights * E[..., keys]
            more["e"] = moving.sum(axis=-1, keepdims=True)
            more["tout"] = times(moving, c.V[keys]) + times(weights, c.tV[keys])
        for name, x in more.items():
            other = np.ones_like(factor) if there is None else factor[:, there]
            sums[name] = sums[name] * (other if name in unscaled else factor) + x
        top = new
    total = np.where(sums["row_sum"] == 0, 1.0, sums["row_sum"])
    with np.errstate(divide="ignore"):
        lse = np.log(sums["row_sum"][..., 0]) + np.where(np.isneginf(top), 0.0, top)
    out = sums["out"] / total
    if not moved:
        return _Sums(out, lse, np.zeros_like(lse), np.zeros_like(out))
    e = sums["e"] / total
    return _Sums(out, lse, e[..., 0], sums["tout"] / total - e * out)


def _steps(
    stage: str,
    tile: int,
    backwards: bool,
    unscaled: tuple[str, ...],
    rows: Rows | None,
) -> dict[str, Step]:
    def lse(c: Context) -> Floats:
        c.online = _online(c, tile, backwards, unscaled, rows)
        return np.asarray(c.online.lse)

    def e(c: Context) -> Floats:
        c.online = _online(c, tile, backwards, unscaled, rows)
        c.O, c.L = c.online.out, c.online.lse
        return np.asarray(c.online.e)

    if stage == "forward":
        return {"L": lse, "O": lambda c: c.online.out}
    return {"e": e, "tO": lambda c: c.online.tout}
